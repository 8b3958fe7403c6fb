//! Due times of timed pollers: a heap with a cached minimum, so that an iteration costs one
//! comparison regardless of their number.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tenmil_base::Instant;

use crate::poller::PollerId;

/// Due times with their pollers. A poller may occur several times: a popped entry is compared with
/// the due time stored in the poller.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, PollerId)>>,
}

impl Timers {
    pub(crate) fn push(&mut self, due: Instant, poller: PollerId) {
        self.heap.push(Reverse((due, poller)));
    }

    /// Earliest due time.
    pub(crate) fn next(&self) -> Instant {
        self.heap.peek().map_or(Instant::NEVER, |Reverse((due, _))| *due)
    }

    /// Pops the earliest entry if it is due.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Instant, PollerId)> {
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

    use super::Timers;
    use crate::poller::PollerId;

    #[test]
    fn entries_come_out_in_the_order_of_their_moments_and_not_before() {
        let mut timers = Timers::default();
        assert_eq!(timers.next(), Instant::NEVER);
        for (ns, index) in [(30, 0), (10, 1), (20, 2)] {
            timers.push(Instant { ns }, PollerId::new(index, 0));
        }
        assert_eq!(timers.next(), Instant { ns: 10 });
        assert_eq!(timers.pop(Instant { ns: 9 }), None);
        let mut order = Vec::new();
        while let Some((due, poller)) = timers.pop(Instant { ns: 20 }) {
            order.push((due.ns, poller.index()));
        }
        assert_eq!(order, [(10, 1), (20, 2)]);
        assert_eq!(timers.next(), Instant { ns: 30 });
    }
}
