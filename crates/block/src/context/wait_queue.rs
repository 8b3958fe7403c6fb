//! Queue of members that wait for free entries of a context, first come, first served.

use std::collections::VecDeque;

use tenmil_base::{Instant, Span};

/// Members that were rejected because the context was full. A free entry is reserved for each queued
/// member, in order.
#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    queue: VecDeque<Waiter>,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    member: u32,
    /// When it was notified of a free entry.
    notified_at: Option<Instant>,
}

/// How long an entry stays reserved for a notified member. A thread that is busy for longer does not
/// block the others.
const RESERVATION_TIMEOUT: Span = Span::from_ms(2);

impl WaitQueue {
    /// Number of the `room` free entries that a member may use now.
    pub(super) fn free_entries_for(&mut self, member: u32, room: usize, now: Instant) -> usize {
        while self.queue.front().is_some_and(|first| first.has_missed_turn(member, now)) {
            self.queue.pop_front();
        }
        let ahead = self.queue.iter().position(|waiter| waiter.member == member);
        room.saturating_sub(ahead.unwrap_or(self.queue.len()))
    }

    /// Queues a rejected member.
    pub(super) fn enqueue(&mut self, member: u32) {
        if !self.queue.iter().any(|waiter| waiter.member == member) {
            self.queue.push_back(Waiter { member, notified_at: None });
        }
    }

    /// Removes a member that was served, or no longer waits.
    pub(super) fn remove(&mut self, member: u32) {
        self.queue.retain(|waiter| waiter.member != member);
    }

    /// Notifies the first `room` members, except those notified before.
    pub(super) fn notify_first(&mut self, room: usize, now: Instant, mut each: impl FnMut(u32)) {
        for waiter in self.queue.iter_mut().take(room).filter(|waiter| waiter.notified_at.is_none())
        {
            waiter.notified_at = Some(now);
            each(waiter.member);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Waiter {
    fn has_missed_turn(&self, asking: u32, now: Instant) -> bool {
        let is_late = |notified_at: Instant| now.since(notified_at) > RESERVATION_TIMEOUT;
        self.member != asking && self.notified_at.is_some_and(is_late)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{RESERVATION_TIMEOUT, WaitQueue};

    const START: Instant = Instant { ns: 1_000 };

    #[test]
    fn wait_queue_is_fifo() {
        let mut waiters = WaitQueue::default();
        [4, 2, 4, 9].into_iter().for_each(|member| waiters.enqueue(member));
        assert_eq!(waiters.free_entries_for(4, 1, START), 1);
        assert_eq!(waiters.free_entries_for(2, 1, START), 0, "one is ahead");
        assert_eq!(waiters.free_entries_for(9, 3, START), 1);
        assert_eq!(
            waiters.free_entries_for(7, 5, START),
            2,
            "three are ahead of one who never waited"
        );
        let mut notified_at = Vec::new();
        waiters.notify_first(2, START, |member| notified_at.push(member));
        waiters.notify_first(3, START, |member| notified_at.push(member));
        assert_eq!(notified_at, [4, 2, 9], "each once");
        waiters.remove(4);
        assert_eq!(waiters.free_entries_for(2, 1, START), 1);
    }

    #[test]
    fn inactive_waiter_loses_its_position() {
        let mut waiters = WaitQueue::default();
        waiters.enqueue(1);
        waiters.enqueue(2);
        waiters.notify_first(1, START, |_| {});
        let in_time = START.after(RESERVATION_TIMEOUT);
        let late = in_time.after(Span { ns: 1 });
        assert_eq!(waiters.free_entries_for(2, 1, in_time), 0);
        assert_eq!(
            waiters.free_entries_for(1, 1, late),
            1,
            "late, but no other waiter has taken its place"
        );
        assert_eq!(waiters.free_entries_for(2, 1, late), 1);
        assert_eq!(waiters.free_entries_for(1, 2, late), 1, "behind now");
        waiters.remove(2);
        assert!(waiters.is_empty());
    }
}
