//! Requests of a queue whose controller is connected again before the queue is.
//!
//! A queue without requests in flight need not be polled, so it finds out with its next request that its
//! controller has been lost and is connected again. Whatever time has passed until then, that request does
//! not fail: it is not accepted before the queue is connected, which takes a few round trips.

use tenmil_base::{Instant, Span};

/// How long a queue waits for its own connection once its controller is connected.
#[derive(Debug, Default)]
pub(crate) struct QueueResumptionWait {
    /// The association that the queue is to use, and the end of the wait.
    awaited: Option<(u64, Instant)>,
}

impl QueueResumptionWait {
    /// Whether to wait for the queue to use `association`, for at most `limit` from the first call that names
    /// it.
    pub(crate) fn must_wait(
        &mut self,
        association: Option<u64>,
        now: Instant,
        limit: Span,
    ) -> bool {
        let Some(association) = association else { return false };
        let known = self.awaited.filter(|(of, _)| *of == association);
        let (_, until) = *self.awaited.insert(known.unwrap_or((association, now.after(limit))));
        now < until
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::QueueResumptionWait;

    #[test]
    fn each_association_is_awaited_once() {
        let mut resumption = QueueResumptionWait::default();
        let mut is_due =
            |association, ns| resumption.must_wait(association, Instant { ns }, Span { ns: 10 });
        assert!(!is_due(None, 0));
        assert!(is_due(Some(1), 5) && is_due(Some(1), 14) && !is_due(Some(1), 15));
        assert!(!is_due(None, 16) && !is_due(Some(1), 17));
        assert!(is_due(Some(2), 20) && !is_due(Some(2), 30));
    }
}
