//! The floor of a subsystem: who is alone with a namespace.
//!
//! A compare-and-write must look atomic to every other command of its namespace (NVM 1.1 §2.1.3,
//! §2.1.4), whichever host sends it. The queue that has such a pair asks for the floor; the others see
//! it with one load per turn, take no further command of that namespace, and say when none of theirs
//! is running:
//!
//! ```text
//!   queue A   asks ──────────────────── all quiet? ─────────── compare, write ── leaves the floor
//!   queue B         hears, takes what waits, finishes ── quiet                          goes on
//! ```
//!
//! Who asks stands in a line, and whoever hears takes once more what has come to it: so between two
//! pairs everybody gets on. A queue whose thread sleeps is called by its bell.
//!
//! This makes the pair atomic among all controllers of one subsystem, whichever threads their queues
//! live on. What else writes to its media does not see the floor.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::controller::Bell;

/// The floor of a subsystem.
#[derive(Debug, Default)]
pub struct Floor {
    /// How often the floor has been given away, if somebody has it; zero if nobody has. Stored with
    /// release order inside the lock.
    round: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rounds: u64,
    /// Queues that want to be alone, with which namespace. The first has the floor.
    line: VecDeque<(u64, u32)>,
    queues: BTreeMap<u64, Known>,
    numbers: u64,
}

/// What is known of a queue.
#[derive(Default)]
struct Known {
    /// The round in which it is quiet.
    quiet_in: u64,
    bell: Option<Bell>,
}

/// One queue's voice on the floor.
#[derive(Debug)]
pub(super) struct Voice {
    floor: Arc<Floor>,
    number: u64,
    /// The round that was heard of last.
    heard: u64,
    /// The namespace that somebody else is alone with in that round, if it is somebody else.
    nsid: Option<u32>,
    /// It has said that it is quiet in that round.
    is_told: bool,
}

/// What a queue hears of the floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nobody else has it.
    Nobody,
    /// Somebody asks to be alone with this namespace, since just now.
    News(u32),
    /// Somebody is alone with this namespace, or waits until he is.
    Known(u32),
}

impl Floor {
    /// A voice for a queue that comes into being: from now on it is waited for.
    pub(super) fn join(self: &Arc<Self>) -> Voice {
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        // It has nothing that runs, and takes nothing before the round is over that stands.
        let round = self.round.load(Ordering::Relaxed);
        state.queues.insert(number, Known { quiet_in: round, bell: None });
        let nsid = state.line.front().map(|(_, nsid)| *nsid);
        drop(state);
        Voice { floor: Arc::clone(self), number, heard: round, nsid, is_told: true }
    }

    /// Gives the floor to whoever is first in line. Returns the bells of those who have to hear of it.
    #[must_use]
    fn next_round(&self, state: &mut State) -> Vec<Bell> {
        if state.line.is_empty() {
            self.round.store(0, Ordering::Release);
            return Vec::new();
        }
        state.rounds += 1;
        self.round.store(state.rounds, Ordering::Release);
        state.queues.values().filter_map(|known| known.bell.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Voice {
    /// Whether anybody has the floor, this queue or another.
    #[inline]
    pub(super) fn is_floor_taken(&self) -> bool {
        self.floor.round.load(Ordering::Acquire) != 0
    }

    /// Whether somebody waits until this queue is quiet.
    #[inline]
    pub(super) fn owes_word(&self) -> bool {
        !self.is_told && self.floor.round.load(Ordering::Relaxed) == self.heard
    }

    /// Has `bell` called when the floor is given to somebody, and when somebody else is quiet for whom
    /// this queue waits.
    pub(super) fn set_bell(&self, bell: Bell) {
        if let Some(known) = self.floor.lock().queues.get_mut(&self.number) {
            known.bell = Some(bell);
        }
    }

    /// Looks who has the floor.
    #[cold]
    pub(super) fn hear(&mut self) -> Heard {
        let round = self.floor.round.load(Ordering::Acquire);
        if round == self.heard {
            return self.nsid.filter(|_| round != 0).map_or(Heard::Nobody, Heard::Known);
        }
        let state = self.floor.lock();
        // It may be another round by now.
        self.heard = self.floor.round.load(Ordering::Relaxed);
        let others = state.line.front().filter(|(number, _)| *number != self.number);
        self.nsid = others.map(|(_, nsid)| *nsid);
        self.is_told = self.nsid.is_none();
        self.nsid.map_or(Heard::Nobody, Heard::News)
    }

    /// Nothing of this queue's runs in the namespace that was heard of, and nothing will before the
    /// round is over. Whoever has the floor is called.
    pub(super) fn tell_quiet(&mut self) {
        if core::mem::replace(&mut self.is_told, true) {
            return;
        }
        let mut state = self.floor.lock();
        if let Some(known) = state.queues.get_mut(&self.number) {
            known.quiet_in = self.heard;
        }
        let owner = state.line.front().and_then(|(number, _)| state.queues.get(number));
        let bell = owner.and_then(|known| known.bell.clone());
        drop(state);
        if let Some(bell) = bell {
            bell();
        }
    }

    /// Asks to be alone with a namespace, or finds out whether this queue is. Whoever was first is
    /// first.
    pub(super) fn is_alone_with(&self, nsid: u32) -> bool {
        let mut state = self.floor.lock();
        let mut bells = Vec::new();
        if !state.line.iter().any(|(number, _)| *number == self.number) {
            state.line.push_back((self.number, nsid));
            if state.line.len() == 1 {
                bells = self.floor.next_round(&mut state);
            }
        }
        let round = self.floor.round.load(Ordering::Relaxed);
        let is_first = state.line.front().is_some_and(|(number, _)| *number == self.number);
        let is_quiet =
            |(number, known): (&u64, &Known)| *number == self.number || known.quiet_in == round;
        let is_alone = is_first && state.queues.iter().all(is_quiet);
        drop(state);
        bells.iter().for_each(|bell| bell());
        is_alone
    }

    /// Leaves the floor to others, or the line.
    pub(super) fn yield_floor(&self) {
        let mut state = self.floor.lock();
        let had_it = state.line.front().is_some_and(|(number, _)| *number == self.number);
        state.line.retain(|(number, _)| *number != self.number);
        let bells = if had_it { self.floor.next_round(&mut state) } else { Vec::new() };
        drop(state);
        bells.iter().for_each(|bell| bell());
    }
}

impl Drop for Voice {
    /// A queue that is gone is waited for by nobody.
    fn drop(&mut self) {
        self.yield_floor();
        self.floor.lock().queues.remove(&self.number);
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Known").field("quiet_in", &self.quiet_in).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::{Floor, Heard};

    #[test]
    fn the_floor_is_given_when_all_others_are_quiet_and_not_before() {
        let floor = Arc::<Floor>::default();
        let [first, mut second, third] = [0; 3].map(|_| floor.join());
        assert!(!second.is_floor_taken() && second.hear() == Heard::Nobody);
        assert!(!first.is_alone_with(7), "two others run");
        assert_eq!((second.hear(), second.hear()), (Heard::News(7), Heard::Known(7)));
        second.tell_quiet();
        assert!(!first.is_alone_with(7));
        drop(third);
        assert!(first.is_alone_with(7));
        first.yield_floor();
        assert!(!second.is_floor_taken() && second.hear() == Heard::Nobody);
        assert!(!first.is_alone_with(7), "an old word does not count for a new round");
        assert_eq!(second.hear(), Heard::News(7));
        assert!(second.owes_word());
        second.tell_quiet();
        assert!(first.is_alone_with(7) && !second.owes_word());
        first.yield_floor();
        assert!(!first.is_alone_with(7));
        assert_eq!(second.hear(), Heard::News(7));
        drop(first);
        assert!(!second.owes_word(), "nobody waits any more");
        assert!(!second.is_floor_taken(), "a queue that is gone has nothing");
    }

    #[test]
    fn whoever_was_first_in_line_is_first() {
        let floor = Arc::<Floor>::default();
        let [mut first, mut second, mut third] = [0; 3].map(|_| floor.join());
        assert!(!first.is_alone_with(1) && !second.is_alone_with(2) && !third.is_alone_with(3));
        second.hear();
        second.tell_quiet();
        third.hear();
        third.tell_quiet();
        assert!(!second.is_alone_with(2) && first.is_alone_with(1));
        assert_eq!(first.hear(), Heard::Nobody, "one's own round stops nobody");
        second.yield_floor();
        assert!(first.is_alone_with(1), "who leaves the line disturbs nobody");
        first.yield_floor();
        assert!(!first.is_alone_with(1), "behind the third");
        assert_eq!((first.hear(), second.hear()), (Heard::News(3), Heard::News(3)));
        first.tell_quiet();
        second.tell_quiet();
        assert!(third.is_alone_with(3));
    }

    #[test]
    fn a_queue_that_comes_while_the_floor_is_taken_is_in_nobodys_way() {
        let floor = Arc::<Floor>::default();
        let first = floor.join();
        assert!(first.is_alone_with(7));
        let mut second = floor.join();
        assert!(first.is_alone_with(7));
        assert_eq!(second.hear(), Heard::Known(7), "and takes nothing there");
        first.yield_floor();
        assert!(!first.is_alone_with(7), "from now on it is waited for");
        assert_eq!(second.hear(), Heard::News(7));
    }

    #[test]
    fn every_round_is_rung_and_every_word_that_is_waited_for() {
        let floor = Arc::<Floor>::default();
        let [mut first, second] = [0; 2].map(|_| floor.join());
        let rung = Arc::new(AtomicU32::new(0));
        let bell = Arc::clone(&rung);
        second.set_bell(Arc::new(move || {
            bell.fetch_add(1, Ordering::Relaxed);
        }));
        assert!(!first.is_alone_with(1) && !first.is_alone_with(1));
        assert_eq!(rung.load(Ordering::Relaxed), 1, "once for a round");
        assert!(!second.is_alone_with(1));
        first.yield_floor();
        assert_eq!(rung.load(Ordering::Relaxed), 2);
        first.hear();
        first.tell_quiet();
        first.tell_quiet();
        assert_eq!(rung.load(Ordering::Relaxed), 3, "once");
        drop(second);
        assert!(first.is_alone_with(1));
        assert_eq!(rung.load(Ordering::Relaxed), 3, "nobody is left to hear it");
    }
}
