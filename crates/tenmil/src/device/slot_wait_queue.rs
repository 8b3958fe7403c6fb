//! Free slots and the futures that wait for one, in order.
//!
//! Slots are not reserved: a future may take a slot if fewer futures wait before it than there are
//! free slots. A future that is dropped while it waits therefore loses no slot.

use std::collections::VecDeque;
use std::task::Waker;

pub(super) struct SlotWaitQueue {
    free: Vec<u32>,
    /// Waiting futures, ordered by ticket.
    waiting: VecDeque<(u64, Waker)>,
    next_ticket: u64,
    is_closed: bool,
}

/// Result of requesting a slot.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AcquireResult {
    /// The future has this slot.
    Acquired(u32),
    /// The future waits under this ticket; its waker is woken when a slot is free.
    Waiting(u64),
    /// The device was removed.
    Closed,
}

impl SlotWaitQueue {
    pub(super) fn new(slots: u32) -> Self {
        let waiting = VecDeque::new();
        Self { free: (0..slots).rev().collect(), waiting, next_ticket: 0, is_closed: false }
    }

    /// Requests a slot, for the first time or with the ticket of an earlier call. A waker that is
    /// no longer needed is moved into `old`, to be dropped outside the lock.
    pub(super) fn request_slot(
        &mut self,
        ticket: Option<u64>,
        waker: &Waker,
        old: &mut Option<Waker>,
    ) -> AcquireResult {
        if self.is_closed {
            return AcquireResult::Closed;
        }
        let position = ticket.and_then(|ticket| self.waiter_position(ticket));
        // Entitled if fewer futures wait before this one than slots are free; a new one is behind
        // all.
        if self.free.len() > position.unwrap_or(self.waiting.len()) {
            *old = position.and_then(|position| self.waiting.remove(position)).map(|(_, w)| w);
            return self.free.pop().map_or(AcquireResult::Closed, AcquireResult::Acquired);
        }
        match position {
            Some(position) => {
                let (ticket, kept) = &mut self.waiting[position];
                *old = Some(std::mem::replace(kept, waker.clone()));
                AcquireResult::Waiting(*ticket)
            }
            None => {
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                self.waiting.push_back((ticket, waker.clone()));
                AcquireResult::Waiting(ticket)
            }
        }
    }

    /// Frees a slot. Returns the waker to wake.
    pub(super) fn release_slot(&mut self, place: u32) -> Option<Waker> {
        self.free.push(place);
        self.last_entitled_waker()
    }

    /// Removes a waiting future. Returns the waker to wake and the waker that is no longer needed.
    pub(super) fn remove_waiter(&mut self, ticket: u64) -> [Option<Waker>; 2] {
        let Some(position) = self.waiter_position(ticket) else { return [None, None] };
        let old = self.waiting.remove(position).map(|(_, waker)| waker);
        // Every future behind it moves up by one. At most one of them becomes entitled to a slot by
        // that.
        let next = if position < self.free.len() { self.last_entitled_waker() } else { None };
        [next, old]
    }

    /// Closes the queue and removes all waiting futures. Returns their wakers.
    pub(super) fn close_queue(&mut self) -> Vec<Waker> {
        self.is_closed = true;
        self.waiting.drain(..).map(|(_, waker)| waker).collect()
    }

    /// Waker of the last future that is entitled to a slot; the ones before it were woken earlier.
    fn last_entitled_waker(&self) -> Option<Waker> {
        let (_, waker) = self.waiting.get(self.free.len().checked_sub(1)?)?;
        Some(waker.clone())
    }

    fn waiter_position(&self, ticket: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |(ticket, _)| *ticket).ok()
    }

    #[cfg(test)]
    pub(super) fn free_slot_count(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    use tenmil_base::Random;

    use super::{AcquireResult, SlotWaitQueue};

    #[derive(Default)]
    struct Noting(AtomicBool);

    impl Wake for Noting {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A wait queue with a model of its state: waiting tickets in order, and slots in use.
    struct Model {
        line: SlotWaitQueue,
        waiting: Vec<(u64, Arc<Noting>)>,
        taken: Vec<u32>,
    }

    impl Model {
        fn request_first(&mut self) {
            let noting = Arc::new(Noting::default());
            let served = self.line.free_slot_count() > self.waiting.len();
            match self.line.request_slot(None, &Waker::from(Arc::clone(&noting)), &mut None) {
                AcquireResult::Acquired(place) => {
                    assert!(served, "it has passed an earlier waiter");
                    self.taken.push(place);
                }
                AcquireResult::Waiting(ticket) => {
                    assert!(!served, "there was a place");
                    self.waiting.push((ticket, noting));
                }
                AcquireResult::Closed => unreachable!("the queue is never closed"),
            }
        }

        fn request_again(&mut self, index: usize) {
            let served = self.line.free_slot_count() > index;
            let (ticket, noting) = self.waiting[index].clone();
            match self.line.request_slot(Some(ticket), &Waker::from(noting), &mut None) {
                AcquireResult::Acquired(place) => {
                    assert!(served, "it has passed an earlier waiter");
                    self.waiting.remove(index);
                    self.taken.push(place);
                }
                turn => assert!(!served && turn == AcquireResult::Waiting(ticket)),
            }
        }

        fn remove_waiter(&mut self, index: usize) {
            let (ticket, _) = self.waiting.remove(index);
            let [next, _] = self.line.remove_waiter(ticket);
            next.into_iter().for_each(Waker::wake);
        }

        fn free_slot(&mut self, index: usize) {
            let place = self.taken.swap_remove(index);
            self.line.release_slot(place).into_iter().for_each(Waker::wake);
        }
    }

    #[test]
    fn slots_are_granted_in_order_and_no_waiter_is_forgotten() {
        let mut waited = 0;
        for seed in 0..2_000 {
            let mut random = Random::new(seed);
            let slots = 1 + random.below(4);
            let line = SlotWaitQueue::new(u32::try_from(slots).unwrap());
            let mut model = Model { line, waiting: Vec::new(), taken: Vec::new() };
            for _ in 0..100 {
                let mut draw = |count: usize| {
                    let index = random.below(count.max(1) as u64);
                    usize::try_from(index).unwrap()
                };
                match draw(4) {
                    0 => model.request_first(),
                    1 if !model.waiting.is_empty() => {
                        model.request_again(draw(model.waiting.len()))
                    }
                    2 if !model.waiting.is_empty() => {
                        model.remove_waiter(draw(model.waiting.len()))
                    }
                    3 if !model.taken.is_empty() => model.free_slot(draw(model.taken.len())),
                    _ => {}
                }
                let free = model.line.free_slot_count();
                assert_eq!(free + model.taken.len(), usize::try_from(slots).unwrap());
                let reported = |(_, noting): &(u64, Arc<Noting>)| noting.0.load(Ordering::Relaxed);
                let all_told = model.waiting.iter().take(free).all(reported);
                assert!(all_told, "seed {seed}: a slot is free and its waiter was not woken");
                waited += model.waiting.len();
            }
        }
        assert!(waited > 10_000, "the line was too short to tell: {waited}");
    }

    #[test]
    fn closed_queue_rejects_all_waiters() {
        let mut line = SlotWaitQueue::new(1);
        assert_eq!(line.request_slot(None, Waker::noop(), &mut None), AcquireResult::Acquired(0));
        assert_eq!(line.request_slot(None, Waker::noop(), &mut None), AcquireResult::Waiting(0));
        assert_eq!(line.close_queue().len(), 1);
        assert_eq!(line.request_slot(Some(0), Waker::noop(), &mut None), AcquireResult::Closed);
        assert!(line.release_slot(0).is_none());
        assert_eq!(line.request_slot(None, Waker::noop(), &mut None), AcquireResult::Closed);
    }
}
