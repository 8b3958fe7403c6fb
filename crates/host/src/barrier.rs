//! A memory barrier of two unlike halves: one that is paid by those who ring often, and one that is
//! paid by the one who sleeps now and then.
//!
//! Two threads that each store one word and then load the other's must not both miss: that takes a
//! full barrier between store and load, on both sides. `membarrier(2)` runs one on every processor
//! that runs a thread of this process, so a sleeper can pay for everybody, about a microsecond, and
//! the others only have to keep the compiler from swapping the two.

use std::sync::atomic::{Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// How the two halves are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// The sleeper asks the kernel; the others pay nothing.
    Expedited,
    /// The kernel refuses that: a full fence on both sides.
    Fences,
}

impl Barrier {
    /// The cheaper barrier, if the kernel grants it to this process.
    pub fn detect() -> Self {
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Expedited,
            Err(_) => Self::Fences,
        }
    }

    /// The half of those who store, then look whether somebody sleeps.
    #[inline]
    pub fn light(self) {
        match self {
            Self::Expedited => compiler_fence(Ordering::SeqCst),
            Self::Fences => fence(Ordering::SeqCst),
        }
    }

    /// The half of the one who says that it sleeps, then looks for what was stored. False if the
    /// kernel refused this time: then nothing is ordered.
    #[must_use]
    pub fn heavy(self) -> bool {
        match self {
            Self::Expedited => membarrier(MembarrierCommand::PrivateExpedited).is_ok(),
            Self::Fences => {
                fence(Ordering::SeqCst);
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Barrier;
    use crate::thread::{Thread, give_way};

    #[derive(Default)]
    #[repr(align(128))]
    struct Word(AtomicUsize);

    /// What one of the two threads of a trial writes; each shows the number of a round.
    #[derive(Default)]
    struct Side {
        gate: Word,
        word: Word,
    }

    const ROUNDS: usize = 60_000;

    /// In each round stores a word, executes a half of a barrier and looks for the other's word.
    /// Returns in which rounds that was missing.
    ///
    /// The halves drift past each other: each side waits a little, in a rhythm of its own.
    fn store_and_look(mine: &Side, theirs: &Side, rhythm: usize, half: impl Fn()) -> Vec<bool> {
        let one = |round| {
            // Both begin at nearly the same moment.
            mine.gate.0.store(round, Ordering::Release);
            let mut looks = 0;
            while theirs.gate.0.load(Ordering::Acquire) < round {
                looks += 1;
                if looks % 1_000 == 0 {
                    give_way();
                }
            }
            for step in 0..round % rhythm {
                black_box(step);
            }
            mine.word.0.store(round, Ordering::Relaxed);
            half();
            theirs.word.0.load(Ordering::Relaxed) < round
        };
        (1..=ROUNDS).map(one).collect()
    }

    #[test]
    fn of_two_that_store_and_then_look_one_sees_the_other() {
        for barrier in [Barrier::detect(), Barrier::Fences] {
            let sides: Arc<[Side; 2]> = Arc::default();
            let others = Arc::clone(&sides);
            let ringer =
                move |_: &_| store_and_look(&others[0], &others[1], 31, || barrier.light());
            let ringer = Thread::spawn("ringer", None, ringer).unwrap();
            let sleeper = store_and_look(&sides[1], &sides[0], 97, || assert!(barrier.heavy()));
            let both =
                ringer.join().iter().zip(&sleeper).filter(|(one, two)| **one && **two).count();
            assert_eq!(both, 0, "of {ROUNDS} rounds, with {barrier:?}");
        }
    }
}
