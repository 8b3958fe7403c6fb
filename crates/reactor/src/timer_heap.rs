//! Due times of timed pollers: a heap with a cached minimum, so that an iteration costs one
//! comparison regardless of their number.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tenmil_base::Instant;

use crate::poller::PollerId;

/// Due times with their pollers. A poller may occur several times: a popped entry is compared with
/// the due time stored in the poller.
#[derive(Debug, Default)]
pub(crate) struct TimerHeap {
    heap: BinaryHeap<Reverse<(Instant, PollerId)>>,
}

impl TimerHeap {
    pub(crate) fn push(&mut self, due: Instant, poller: PollerId) {
        self.heap.push(Reverse((due, poller)));
    }

    /// Earliest due time.
    pub(crate) fn earliest_due(&self) -> Instant {
        self.heap.peek().map_or(Instant::NEVER, |Reverse((due, _))| *due)
    }

    /// Pops the earliest entry if it is due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(Instant, PollerId)> {
        let Reverse((due, _)) = self.heap.peek()?;
        if *due > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::TimerHeap;
    use crate::poller::PollerId;

    #[test]
    fn entries_are_popped_in_order_and_not_before_they_are_due() {
        let mut timers = TimerHeap::default();
        assert_eq!(timers.earliest_due(), Instant::NEVER);
        for (ns, index) in [(30, 0), (10, 1), (20, 2)] {
            timers.push(Instant { ns }, PollerId::new(index, 0));
        }
        assert_eq!(timers.earliest_due(), Instant { ns: 10 });
        assert_eq!(timers.pop_due(Instant { ns: 9 }), None);
        let mut order = Vec::new();
        while let Some((due, poller)) = timers.pop_due(Instant { ns: 20 }) {
            order.push((due.ns, poller.index()));
        }
        assert_eq!(order, [(10, 1), (20, 2)]);
        assert_eq!(timers.earliest_due(), Instant { ns: 30 });
    }
}
