//! The places of a table that are free, and the futures that stand in line for one.
//!
//! Nothing is reserved for anybody: whoever has fewer in front of them than there are free places
//! may take one. So a future that is dropped in line holds nothing that could be lost with it.

use std::collections::VecDeque;
use std::task::Waker;

pub(super) struct Line {
    free: Vec<u32>,
    /// In the order of their tickets.
    waiting: VecDeque<(u64, Waker)>,
    next_ticket: u64,
    is_closed: bool,
}

/// What asking for a place came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// This is the place.
    Takes(u32),
    /// The waker of this ticket will be woken when there is one.
    Waits(u64),
    /// There will be none any more.
    Closed,
}

impl Line {
    pub(super) fn new(places: u32) -> Self {
        let waiting = VecDeque::new();
        Self { free: (0..places).rev().collect(), waiting, next_ticket: 0, is_closed: false }
    }

    /// Asks for a place: for the first time, or with the ticket from then. A waker that is not
    /// needed any more is put into `old`, to be dropped when no lock is held.
    pub(super) fn ask(
        &mut self,
        ticket: Option<u64>,
        waker: &Waker,
        old: &mut Option<Waker>,
    ) -> Turn {
        if self.is_closed {
            return Turn::Closed;
        }
        let position = ticket.and_then(|ticket| self.position(ticket));
        if self.free.len() > position.unwrap_or(self.waiting.len()) {
            *old = position.and_then(|position| self.waiting.remove(position)).map(|(_, w)| w);
            return self.free.pop().map_or(Turn::Closed, Turn::Takes);
        }
        match position {
            Some(position) => {
                let (ticket, kept) = &mut self.waiting[position];
                *old = Some(std::mem::replace(kept, waker.clone()));
                Turn::Waits(*ticket)
            }
            None => {
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                self.waiting.push_back((ticket, waker.clone()));
                Turn::Waits(ticket)
            }
        }
    }

    /// Gives a place back. Returns whom to wake.
    pub(super) fn give_back(&mut self, place: u32) -> Option<Waker> {
        self.free.push(place);
        self.last_served()
    }

    /// Leaves the line. Returns whom to wake, and the waker that is not needed any more.
    pub(super) fn leave(&mut self, ticket: u64) -> [Option<Waker>; 2] {
        let Some(position) = self.position(ticket) else { return [None, None] };
        let old = self.waiting.remove(position).map(|(_, waker)| waker);
        // Those behind have come one place nearer. Whoever may take a place only now is to be told.
        let next = if position < self.free.len() { self.last_served() } else { None };
        [next, old]
    }

    /// Sends everybody away. Returns whom to wake.
    pub(super) fn close(&mut self) -> Vec<Waker> {
        self.is_closed = true;
        self.waiting.drain(..).map(|(_, waker)| waker).collect()
    }

    /// The last of those for whom there is a place: all before knew already.
    fn last_served(&self) -> Option<Waker> {
        let (_, waker) = self.waiting.get(self.free.len().checked_sub(1)?)?;
        Some(waker.clone())
    }

    fn position(&self, ticket: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |(ticket, _)| *ticket).ok()
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    use base::Random;

    use super::{Line, Turn};

    #[derive(Default)]
    struct Noting(AtomicBool);

    impl Wake for Noting {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A line, and what it ought to know: who waits, in order, and which places are taken.
    struct Model {
        line: Line,
        waiting: Vec<(u64, Arc<Noting>)>,
        taken: Vec<u32>,
    }

    impl Model {
        fn begin(&mut self) {
            let noting = Arc::new(Noting::default());
            let served = self.line.free() > self.waiting.len();
            match self.line.ask(None, &Waker::from(Arc::clone(&noting)), &mut None) {
                Turn::Takes(place) => {
                    assert!(served, "it has passed somebody");
                    self.taken.push(place);
                }
                Turn::Waits(ticket) => {
                    assert!(!served, "there was a place");
                    self.waiting.push((ticket, noting));
                }
                Turn::Closed => unreachable!("nobody closes it"),
            }
        }

        fn ask_again(&mut self, index: usize) {
            let served = self.line.free() > index;
            let (ticket, noting) = self.waiting[index].clone();
            match self.line.ask(Some(ticket), &Waker::from(noting), &mut None) {
                Turn::Takes(place) => {
                    assert!(served, "it has passed somebody");
                    self.waiting.remove(index);
                    self.taken.push(place);
                }
                turn => assert!(!served && turn == Turn::Waits(ticket)),
            }
        }

        fn leave(&mut self, index: usize) {
            let (ticket, _) = self.waiting.remove(index);
            let [next, _] = self.line.leave(ticket);
            next.into_iter().for_each(Waker::wake);
        }

        fn give_back(&mut self, index: usize) {
            let place = self.taken.swap_remove(index);
            self.line.give_back(place).into_iter().for_each(Waker::wake);
        }
    }

    #[test]
    fn places_go_to_those_who_came_first_and_nobody_is_forgotten() {
        let mut waited = 0;
        for seed in 0..2_000 {
            let mut random = Random::new(seed);
            let places = 1 + random.below(4);
            let line = Line::new(u32::try_from(places).unwrap());
            let mut model = Model { line, waiting: Vec::new(), taken: Vec::new() };
            for _ in 0..100 {
                let mut draw = |count: usize| {
                    let index = random.below(count.max(1) as u64);
                    usize::try_from(index).unwrap()
                };
                match draw(4) {
                    0 => model.begin(),
                    1 if !model.waiting.is_empty() => model.ask_again(draw(model.waiting.len())),
                    2 if !model.waiting.is_empty() => model.leave(draw(model.waiting.len())),
                    3 if !model.taken.is_empty() => model.give_back(draw(model.taken.len())),
                    _ => {}
                }
                let free = model.line.free();
                assert_eq!(free + model.taken.len(), usize::try_from(places).unwrap());
                let told = |(_, noting): &(u64, Arc<Noting>)| noting.0.load(Ordering::Relaxed);
                let all_told = model.waiting.iter().take(free).all(told);
                assert!(all_told, "seed {seed}: there is a place and nobody knows");
                waited += model.waiting.len();
            }
        }
        assert!(waited > 10_000, "the line was too short to tell: {waited}");
    }

    #[test]
    fn a_closed_line_sends_everybody_away() {
        let mut line = Line::new(1);
        assert_eq!(line.ask(None, Waker::noop(), &mut None), Turn::Takes(0));
        assert_eq!(line.ask(None, Waker::noop(), &mut None), Turn::Waits(0));
        assert_eq!(line.close().len(), 1);
        assert_eq!(line.ask(Some(0), Waker::noop(), &mut None), Turn::Closed);
        assert!(line.give_back(0).is_none());
        assert_eq!(line.ask(None, Waker::noop(), &mut None), Turn::Closed);
    }
}
