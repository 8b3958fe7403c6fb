//! A channel of a remote device whose queue is not connected yet.

use std::collections::VecDeque;

use tenmil_base::{
    CompletionBatch, Instant, IoCompletion, IoStatus, Limits, Request, Span, WakeSource,
};
use tenmil_nvme_fabrics::WaitHandle;

/// What a channel does until it has its queue: as a queue whose connection is lost, it accepts nothing
/// for the policy's time to [fail fast](tenmil_nvme_fabrics::TimeoutPolicy::fail_fast), and fails everything from then on.
pub(super) struct Opening<T> {
    /// The requested queue.
    pub(super) ticket: T,
    /// What the device was like when the channel was opened.
    pub(super) limits: Limits,
    /// What the queue will sleep on: the wake source of a channel stays the same.
    pub(super) sleep: Option<Box<dyn WaitHandle>>,
    /// Losses that the queue is to fail no flush for.
    pub(super) acknowledged: u64,
    fail_fast: Span,
    /// When requests begin to fail, from the first one on.
    until: Option<Instant>,
    /// When to ask for the queue again, which takes a lock.
    next_check: Instant,
    /// A request was not accepted since.
    has_waiting: bool,
    failed: VecDeque<IoCompletion>,
}

/// Between two questions for the queue.
const PAUSE: Span = Span::from_ms(1);

impl<T> Opening<T> {
    pub(super) fn new(
        ticket: T,
        limits: Limits,
        sleep: Box<dyn WaitHandle>,
        fail_fast: Span,
    ) -> Self {
        Self {
            ticket,
            limits,
            sleep: Some(sleep),
            acknowledged: 0,
            fail_fast,
            until: None,
            next_check: Instant::default(),
            has_waiting: false,
            failed: VecDeque::new(),
        }
    }

    /// Whether to ask for the queue now.
    pub(super) fn is_check_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.next_check && self.is_settled();
        if is_due {
            (self.next_check, self.has_waiting) = (now.after(PAUSE), false);
        }
        is_due
    }

    /// Whether all completions were delivered: the queue does not know them.
    pub(super) fn is_settled(&self) -> bool {
        self.failed.is_empty()
    }

    pub(super) fn submit(&mut self, now: Instant, requests: &[Request]) -> usize {
        if now < *self.until.get_or_insert(now.after(self.fail_fast)) {
            self.has_waiting = true;
            return 0;
        }
        let room = (self.limits.depth_max as usize).saturating_sub(self.failed.len());
        let count = requests.len().min(room);
        let status = IoStatus::PATH_ERROR;
        let failed =
            |request: &Request| IoCompletion { token: request.random_token, status, result: 0 };
        self.failed.extend(requests[..count].iter().map(failed));
        count
    }

    pub(super) fn poll(&mut self, completions: &mut CompletionBatch) -> usize {
        let count = self.failed.len().min(completions.remaining());
        self.failed.drain(..count).for_each(|completion| completions.push(completion));
        count
    }

    pub(super) fn wake_at(&self) -> Instant {
        match (self.is_settled(), self.has_waiting) {
            (false, _) => Instant::default(),
            (true, true) => self.next_check,
            (true, false) => Instant::NEVER,
        }
    }

    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::None, |sleep| sleep.wake_source())
    }

    pub(super) fn arm(&mut self) -> bool {
        if let Some(sleep) = &mut self.sleep {
            sleep.clear();
        }
        !self.is_settled()
    }
}
