//! Who waits for room in a context, in the order in which they came.

use std::collections::VecDeque;

use base::{Instant, Span};

/// Members that were refused for want of room. The place of each in the queue is a place in the
/// context that nobody behind takes away.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    queue: VecDeque<Waiter>,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    member: u32,
    /// When there was room, and it was told.
    told: Option<Instant>,
}

/// How long a place is kept for one who was told of it. A thread that does something else for longer
/// than this does not hold the others up.
const KEPT: Span = Span::from_ms(2);

impl Waiters {
    /// How many of `room` places a member may take now.
    pub(super) fn share(&mut self, member: u32, room: usize, now: Instant) -> usize {
        while self.queue.front().is_some_and(|first| first.is_over(member, now)) {
            self.queue.pop_front();
        }
        let ahead = self.queue.iter().position(|waiter| waiter.member == member);
        room.saturating_sub(ahead.unwrap_or(self.queue.len()))
    }

    /// A member was refused.
    pub(super) fn enter(&mut self, member: u32) {
        if !self.queue.iter().any(|waiter| waiter.member == member) {
            self.queue.push_back(Waiter { member, told: None });
        }
    }

    /// A member has what it wanted, or wants it no more.
    pub(super) fn leave(&mut self, member: u32) {
        self.queue.retain(|waiter| waiter.member != member);
    }

    /// There are `room` places: tells as many as those are for, who were not told yet.
    pub(super) fn tell(&mut self, room: usize, now: Instant, mut each: impl FnMut(u32)) {
        for waiter in self.queue.iter_mut().take(room).filter(|waiter| waiter.told.is_none()) {
            waiter.told = Some(now);
            each(waiter.member);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Waiter {
    fn is_over(&self, asking: u32, now: Instant) -> bool {
        let is_late = |told: Instant| now.since(told) > KEPT;
        self.member != asking && self.told.is_some_and(is_late)
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};

    use super::{KEPT, Waiters};

    const START: Instant = Instant { ns: 1_000 };

    #[test]
    fn whoever_came_first_is_served_first() {
        let mut waiters = Waiters::default();
        [4, 2, 4, 9].into_iter().for_each(|member| waiters.enter(member));
        assert_eq!(waiters.share(4, 1, START), 1);
        assert_eq!(waiters.share(2, 1, START), 0, "one is ahead");
        assert_eq!(waiters.share(9, 3, START), 1);
        assert_eq!(waiters.share(7, 5, START), 2, "three are ahead of one who never waited");
        let mut told = Vec::new();
        waiters.tell(2, START, |member| told.push(member));
        waiters.tell(3, START, |member| told.push(member));
        assert_eq!(told, [4, 2, 9], "each once");
        waiters.leave(4);
        assert_eq!(waiters.share(2, 1, START), 1);
    }

    #[test]
    fn one_who_does_not_come_loses_his_place_and_nobody_else() {
        let mut waiters = Waiters::default();
        waiters.enter(1);
        waiters.enter(2);
        waiters.tell(1, START, |_| {});
        let in_time = START.after(KEPT);
        let late = in_time.after(Span { ns: 1 });
        assert_eq!(waiters.share(2, 1, in_time), 0);
        assert_eq!(waiters.share(1, 1, late), 1, "late, and nobody else has asked");
        assert_eq!(waiters.share(2, 1, late), 1);
        assert_eq!(waiters.share(1, 2, late), 1, "behind now");
        waiters.leave(2);
        assert!(waiters.is_empty());
    }
}
