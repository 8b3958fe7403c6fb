//! When to look whether a client has sent something.
//!
//! A look is a system call that keeps the client from sending meanwhile, and where many connections
//! share a reactor, those that are silent must not slow those that are not. So looks in vain become
//! rarer.
//!
//! Requests come one by one from a client that sends each with a call of its own, and who takes each
//! as it comes pays two calls for it, and a wake-up of the client. So after a look that found
//! something the next one waits. For how long is found out by trying: once in a while the wait is
//! the longest there may be, and what came in it is how many requests the client sends when it is
//! let. If those are few, nobody is kept waiting; if they are many, the wait becomes as long as most
//! of them take to come.
//!
//! A host of NVMe/TCP sends all that it has in a turn in one call, so a connection of it does not
//! wait ([`Looks::found`]): while one end gathers, the other has nothing to do, and both take turns
//! instead of working at the same time.

use base::{Instant, Span};

/// The looks at one connection.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// In vain, since something was there.
    in_vain: u32,
    next: Instant,
    /// How long the client is given to send more.
    wait: Span,
    /// Looks that found something, since the last trial.
    fruitful: u32,
    /// Whether one of those found more than one request.
    is_plural: bool,
    /// What came in the last trial.
    crowd: usize,
}

/// The longest wait for more requests.
const WAIT_MAX: Span = Span::from_us(50);
/// By how much a wait grows at least.
const WAIT_STEP: Span = Span { ns: 500 };
/// One look in so many, of those that find something, is a trial.
const TRIAL: u32 = 64;
/// Fewer requests than this are not worth waiting for: while they are gathered nobody works.
const CROWD_MIN: usize = 8;
/// The time between two looks in vain: at first, and after many.
const SOON: Span = Span::from_us(1);
const SELDOM: Span = Span::from_us(20);
/// Looks in vain after which that time doubles.
const LOOKS: u32 = 16;

impl Looks {
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// The next look is due at once: something has come, perhaps for this connection.
    pub(crate) fn now(&mut self) {
        self.next = Instant::default();
        self.in_vain = 0;
    }

    #[inline]
    pub(crate) fn was_in_vain(&mut self, now: Instant) {
        self.in_vain = self.in_vain.saturating_add(1);
        let doubled = SOON.ns << (self.in_vain / LOOKS).min(8);
        self.next = now.after(Span { ns: doubled.min(SELDOM.ns) });
    }

    /// Something was there, and there may be more at once.
    #[inline]
    pub(crate) fn found(&mut self, now: Instant) {
        self.in_vain = 0;
        self.next = now;
    }

    /// Something was there, among it so many requests of a client that sends each by itself.
    #[inline]
    pub(crate) fn found_requests(&mut self, now: Instant, requests: usize) {
        self.found(now);
        if requests == 0 {
            // A part of something large: the rest is on its way.
            return;
        }
        self.fruitful += 1;
        self.is_plural |= requests > 1;
        if self.fruitful > TRIAL {
            // The look that has ended was the trial.
            (self.fruitful, self.is_plural, self.crowd) = (0, false, requests);
        }
        self.adapt(requests);
        let is_trial = self.fruitful == TRIAL && self.is_plural;
        self.next = now.after(if is_trial { WAIT_MAX } else { self.wait });
    }

    fn adapt(&mut self, requests: usize) {
        let ns = self.wait.ns;
        self.wait.ns = if self.crowd < CROWD_MIN {
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
    use base::{Instant, Span};

    use super::{Looks, WAIT_MAX};

    /// What each of a thousand looks finds at a client that has so many requests under way, takes a
    /// microsecond to send one, and has each answer at once; and how long they take.
    fn looks_at_a_client(looks: &mut Looks, depth: usize) -> (Vec<usize>, Span) {
        let start = Instant { ns: 1_000_000 };
        let mut now = start;
        let look = |_| {
            let until = looks.next.max(now.after(Span::from_us(1)));
            let sent = usize::try_from(until.since(now).ns / 1_000).unwrap().min(depth);
            now = until;
            looks.found_requests(now, sent);
            sent
        };
        let came = (0..1_000).map(look).collect();
        (came, now.since(start))
    }

    #[test]
    fn a_client_that_waits_for_each_answer_is_never_kept_waiting() {
        let (came, took) = looks_at_a_client(&mut Looks::default(), 1);
        assert!(came.iter().all(|requests| *requests == 1));
        assert_eq!(took, Span::from_ms(1));
    }

    #[test]
    fn requests_of_a_client_with_many_are_taken_together() {
        for depth in [16, 64, 256] {
            // Two have come together once: it has more than one.
            let mut looks = Looks { is_plural: true, ..Looks::default() };
            let (came, _) = looks_at_a_client(&mut looks, depth);
            let later = &came[500..];
            let mean = later.iter().sum::<usize>() / later.len();
            let most = depth.min(usize::try_from(WAIT_MAX.ns / 1_000).unwrap());
            assert!(mean >= most / 2, "{depth}: {mean} a look");
        }
    }

    #[test]
    fn a_client_with_a_few_is_kept_waiting_in_trials_only() {
        let mut looks = Looks { is_plural: true, ..Looks::default() };
        let (_, took) = looks_at_a_client(&mut looks, 4);
        assert!(took < Span::from_us(1_100), "{took}");
    }

    #[test]
    fn a_client_that_has_fewer_now_is_not_kept_waiting_for_long() {
        let mut looks = Looks { crowd: 64, wait: WAIT_MAX, ..Looks::default() };
        for _ in 0..=super::TRIAL {
            looks.found_requests(Instant { ns: 1 }, 1);
        }
        assert_eq!((looks.crowd, looks.wait), (1, Span::default()));
    }

    #[test]
    fn looks_in_vain_become_rarer_and_end_when_something_comes() {
        let (mut looks, now) = (Looks::default(), Instant { ns: 5 });
        looks.was_in_vain(now);
        assert_eq!(looks.next, now.after(super::SOON));
        for _ in 0..1_000 {
            looks.was_in_vain(now);
        }
        assert_eq!(looks.next, now.after(super::SELDOM));
        assert!(!looks.is_due(now));
        looks.now();
        assert!(looks.is_due(now));
    }

    #[test]
    fn who_sends_all_at_once_is_never_kept_waiting() {
        let mut looks = Looks { is_plural: true, crowd: 64, wait: WAIT_MAX, ..Looks::default() };
        for ns in 0..=u64::from(2 * super::TRIAL) {
            looks.found(Instant { ns });
            assert!(looks.is_due(Instant { ns }));
        }
    }

    #[test]
    fn a_part_of_a_request_makes_nobody_wait() {
        let mut looks = Looks { crowd: 64, wait: WAIT_MAX, ..Looks::default() };
        looks.found_requests(Instant { ns: 5 }, 0);
        assert!(looks.is_due(Instant { ns: 5 }));
    }
}
