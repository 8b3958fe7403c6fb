//! Adaptive pacing of receive calls on a connection.
//!
//! A receive call costs a system call and keeps the client from sending meanwhile. Where many
//! connections share a reactor, idle connections must not slow down busy ones. Empty receive calls
//! are therefore spaced further and further apart.
//!
//! A client that sends each request with a system call of its own delivers requests one by one.
//! Receiving each request as it arrives costs two calls and a wake-up of the client per request. So
//! after a receive call that returned data, the next one is delayed. The delay is found by trial:
//! once in a while the delay is the longest allowed, and the number of requests received then is
//! the number that the client sends when it is not interrupted. If there are few, there is no
//! delay. If there are many, the delay grows to the time that most of them take to arrive.
//!
//! An NVMe/TCP host sends everything of one iteration in a single call, so its connections are not
//! delayed ([`RecvBackoff::record_data`]): while one end collects requests the other has nothing to
//! do, and both would alternate instead of working at the same time.

use tenmil_base::{Instant, Span};

/// Decides when a connection calls `recv` again.
#[derive(Debug, Default)]
pub(crate) struct RecvBackoff {
    /// Consecutive receive calls that returned nothing.
    in_vain: u32,
    next: Instant,
    /// Delay after a receive call that returned requests.
    wait: Span,
    /// Receive calls that returned requests, since the last trial.
    fruitful: u32,
    /// Whether one of those returned more than one request.
    is_plural: bool,
    /// Number of requests that the last trial returned.
    crowd: usize,
}

/// Longest delay that lets further requests arrive.
const WAIT_MAX: Span = Span::from_us(50);
/// Smallest increment of the delay.
const WAIT_STEP: Span = Span { ns: 500 };
/// Every `TRIAL`th receive call that returns requests is a trial with the longest delay.
const TRIAL: u32 = 64;
/// Smallest batch that is worth a delay: while requests are collected, neither end works.
const BATCH_MIN: usize = 8;
/// Interval between two empty receive calls: at first, and after many of them.
const INTERVAL_MIN: Span = Span::from_us(1);
const INTERVAL_MAX: Span = Span::from_us(20);
/// Number of empty receive calls after which the interval doubles.
const EMPTY_RECEIVES_MAX: u32 = 16;

impl RecvBackoff {
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// Makes the next receive call due at once, for example after a wake-up.
    pub(crate) fn make_due(&mut self) {
        self.next = Instant::default();
        self.in_vain = 0;
    }

    #[inline]
    pub(crate) fn record_empty(&mut self, now: Instant) {
        self.in_vain = self.in_vain.saturating_add(1);
        let doubled = INTERVAL_MIN.ns << (self.in_vain / EMPTY_RECEIVES_MAX).min(8);
        self.next = now.after(Span { ns: doubled.min(INTERVAL_MAX.ns) });
    }

    /// Records that data was received and more may follow at once.
    #[inline]
    pub(crate) fn record_data(&mut self, now: Instant) {
        self.in_vain = 0;
        self.next = now;
    }

    /// Records that `requests` requests were received from a client that sends each with its own
    /// call.
    #[inline]
    pub(crate) fn record_requests(&mut self, now: Instant, requests: usize) {
        self.record_data(now);
        if requests == 0 {
            // Part of a large request: the rest is on its way.
            return;
        }
        self.fruitful += 1;
        self.is_plural |= requests > 1;
        if self.fruitful > TRIAL {
            // The call that just returned was the trial.
            (self.fruitful, self.is_plural, self.crowd) = (0, false, requests);
        }
        self.update_interval(requests);
        let is_trial = self.fruitful == TRIAL && self.is_plural;
        self.next = now.after(if is_trial { WAIT_MAX } else { self.wait });
    }

    fn update_interval(&mut self, requests: usize) {
        let ns = self.wait.ns;
        self.wait.ns = if self.crowd < BATCH_MIN {
            0
        } else if requests * 4 < self.crowd * 3 {
            (ns + ns / 2 + WAIT_STEP.ns).min(WAIT_MAX.ns)
        } else {
            ns - ns / 8
        };
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{RecvBackoff, WAIT_MAX};

    /// Number of requests found by each of 1000 receives, and the total time, for a client with
    /// `depth` requests outstanding that sends each in one microsecond and gets each response
    /// immediately.
    fn simulate_client(backoff: &mut RecvBackoff, depth: usize) -> (Vec<usize>, Span) {
        let start = Instant { ns: 1_000_000 };
        let mut now = start;
        let look = |_| {
            let until = backoff.next.max(now.after(Span::from_us(1)));
            let sent = usize::try_from(until.since(now).ns / 1_000).unwrap().min(depth);
            now = until;
            backoff.record_requests(now, sent);
            sent
        };
        let came = (0..1_000).map(look).collect();
        (came, now.since(start))
    }

    #[test]
    fn client_with_one_outstanding_request_is_never_delayed() {
        let (came, took) = simulate_client(&mut RecvBackoff::default(), 1);
        assert!(came.iter().all(|requests| *requests == 1));
        assert_eq!(took, Span::from_ms(1));
    }

    #[test]
    fn many_small_requests_are_received_in_one_call() {
        for depth in [16, 64, 256] {
            // Two requests have arrived together once, so the client is known to send several.
            let mut backoff = RecvBackoff { is_plural: true, ..RecvBackoff::default() };
            let (came, _) = simulate_client(&mut backoff, depth);
            let later = &came[500..];
            let mean = later.iter().sum::<usize>() / later.len();
            let most = depth.min(usize::try_from(WAIT_MAX.ns / 1_000).unwrap());
            assert!(mean >= most / 2, "{depth}: {mean} a look");
        }
    }

    #[test]
    fn client_with_few_requests_is_delayed_only_during_trials() {
        let mut backoff = RecvBackoff { is_plural: true, ..RecvBackoff::default() };
        let (_, took) = simulate_client(&mut backoff, 4);
        assert!(took < Span::from_us(1_100), "{took}");
    }

    #[test]
    fn delay_ends_soon_after_a_client_sends_fewer_requests() {
        let mut backoff = RecvBackoff { crowd: 64, wait: WAIT_MAX, ..RecvBackoff::default() };
        for _ in 0..=super::TRIAL {
            backoff.record_requests(Instant { ns: 1 }, 1);
        }
        assert_eq!((backoff.crowd, backoff.wait), (1, Span::default()));
    }

    #[test]
    fn empty_receive_calls_become_rarer_until_data_arrives() {
        let (mut backoff, now) = (RecvBackoff::default(), Instant { ns: 5 });
        backoff.record_empty(now);
        assert_eq!(backoff.next, now.after(super::INTERVAL_MIN));
        for _ in 0..1_000 {
            backoff.record_empty(now);
        }
        assert_eq!(backoff.next, now.after(super::INTERVAL_MAX));
        assert!(!backoff.is_due(now));
        backoff.make_due();
        assert!(backoff.is_due(now));
    }

    #[test]
    fn client_that_sends_everything_at_once_is_never_delayed() {
        let mut backoff =
            RecvBackoff { is_plural: true, crowd: 64, wait: WAIT_MAX, ..RecvBackoff::default() };
        for ns in 0..=u64::from(2 * super::TRIAL) {
            backoff.record_data(Instant { ns });
            assert!(backoff.is_due(Instant { ns }));
        }
    }

    #[test]
    fn partial_request_causes_no_delay() {
        let mut backoff = RecvBackoff { crowd: 64, wait: WAIT_MAX, ..RecvBackoff::default() };
        backoff.record_requests(Instant { ns: 5 }, 0);
        assert!(backoff.is_due(Instant { ns: 5 }));
    }
}
