//! Asymmetric memory barrier: cheap for threads that notify often, expensive for the one that goes
//! to sleep.
//!
//! Two threads that each store one word and then load the other's must not both miss the other's
//! store: that requires a full barrier between store and load, on both sides. `membarrier(2)`
//! executes one on every CPU that runs a thread of this process, so the sleeping side pays for all,
//! about a microsecond, and the other side needs only a compiler fence.

use std::sync::atomic::{Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// Implementation of the two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsymmetricBarrier {
    /// The sleeping side calls `membarrier(2)`; the other side needs a compiler fence only.
    Expedited,
    /// `membarrier(2)` is not available: a full fence on both sides.
    FullFences,
}

impl AsymmetricBarrier {
    /// Selects the cheaper barrier that the kernel grants to this process.
    pub fn detect() -> Self {
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Expedited,
            Err(_) => Self::FullFences,
        }
    }

    /// Barrier of the notifying side: between its store and its load of the sleep flag.
    #[inline]
    pub fn notifier_barrier(self) {
        match self {
            Self::Expedited => compiler_fence(Ordering::SeqCst),
            Self::FullFences => fence(Ordering::SeqCst),
        }
    }

    /// Barrier of the sleeping side: between announcing the sleep and checking for work. Returns
    /// false if the kernel refused; then nothing is ordered.
    #[must_use]
    pub fn sleeper_barrier(self) -> bool {
        match self {
            Self::Expedited => membarrier(MembarrierCommand::PrivateExpedited).is_ok(),
            Self::FullFences => {
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

    use super::AsymmetricBarrier;
    use crate::named_thread::{NamedThread, yield_cpu};

    #[derive(Default)]
    #[repr(align(128))]
    struct Word(AtomicUsize);

    /// Words that one of the two threads of a trial writes; each holds the number of a round.
    #[derive(Default)]
    struct Side {
        gate: Word,
        word: Word,
    }

    const ROUNDS: usize = 60_000;

    /// In each round stores a word, executes one half of a barrier and loads the other side's word.
    /// Returns in which rounds that load missed the store.
    ///
    /// Each side waits for a varying number of spins, so that the rounds overlap differently.
    fn missed_store_per_round(
        mine: &Side,
        theirs: &Side,
        rhythm: usize,
        half: impl Fn(),
    ) -> Vec<bool> {
        let one = |round| {
            // Both sides start each round at nearly the same moment.
            mine.gate.0.store(round, Ordering::Release);
            let mut looks = 0;
            while theirs.gate.0.load(Ordering::Acquire) < round {
                looks += 1;
                if looks % 1_000 == 0 {
                    yield_cpu();
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
    fn one_of_two_threads_sees_the_store_of_the_other() {
        for barrier in [AsymmetricBarrier::detect(), AsymmetricBarrier::FullFences] {
            let sides: Arc<[Side; 2]> = Arc::default();
            let others = Arc::clone(&sides);
            let ringer = move |_: &_| {
                missed_store_per_round(&others[0], &others[1], 31, || barrier.notifier_barrier())
            };
            let ringer = NamedThread::spawn("ringer", None, ringer).unwrap();
            let sleeper = missed_store_per_round(&sides[1], &sides[0], 97, || {
                assert!(barrier.sleeper_barrier())
            });
            let both =
                ringer.join().iter().zip(&sleeper).filter(|(one, two)| **one && **two).count();
            assert_eq!(both, 0, "of {ROUNDS} rounds, with {barrier:?}");
        }
    }
}
