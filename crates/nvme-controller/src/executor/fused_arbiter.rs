//! Fused-command arbiter: serializes fused pairs of a subsystem and gives each exclusive access to its
//! namespace.
//!
//! A compare-and-write must look atomic to every other command of its namespace (NVM 1.1 §2.1.3, §2.1.4),
//! whichever host sends it. The queue with such a pair requests exclusivity. The other queues detect the
//! request with one load per poll, fetch no further command of that namespace, and acknowledge when none
//! of theirs is executing:
//!
//! ```text
//!   queue A   request ───────────────── all quiesced? ──────── compare, write ── release
//!   queue B         detect, fetch pending, drain ── acknowledge                    resume
//! ```
//!
//! Requests are served in order. A queue that detects a request first fetches once more what has already
//! arrived, so all queues make progress between two pairs. A queue whose thread sleeps is woken by its
//! waker.
//!
//! The pair is atomic among all controllers of one subsystem, whichever threads their queues run on. The
//! arbiter does not cover other writers to the same block devices.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::controller::WakeFn;

/// Arbiter of the fused pairs of a subsystem.
#[derive(Debug, Default)]
pub struct FusedArbiter {
    /// Number of the current grant; zero if exclusivity is free. Stored with release order under the
    /// lock; pairs with the acquire loads of the participants.
    round: AtomicU64,
    state: Mutex<ArbiterState>,
}

#[derive(Debug, Default)]
struct ArbiterState {
    rounds: u64,
    /// Queues that request exclusivity, each with its namespace. The first one holds it.
    line: VecDeque<(u64, u32)>,
    queues: BTreeMap<u64, ParticipantState>,
    numbers: u64,
}

/// Arbiter's view of a queue.
#[derive(Default)]
struct ParticipantState {
    /// Round in which the queue has quiesced.
    quiet_in: u64,
    waker: Option<WakeFn>,
}

/// One queue's part in the arbiter.
#[derive(Debug)]
pub(super) struct FusedParticipant {
    floor: Arc<FusedArbiter>,
    number: u64,
    /// Last round that the queue has seen.
    heard: u64,
    /// Namespace held by another queue in that round, if any.
    nsid: Option<u32>,
    /// The queue has acknowledged that round.
    is_told: bool,
}

/// Exclusivity as seen by one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExclusiveState {
    /// No other queue holds it.
    Nobody,
    /// Another queue requests it for this namespace; newly detected.
    Requested(u32),
    /// Another queue holds it for this namespace, or waits for the acknowledgments.
    Held(u32),
}

impl FusedArbiter {
    /// Adds a participant for a new queue: from now on its acknowledgment is required.
    pub(super) fn join(self: &Arc<Self>) -> FusedParticipant {
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        // A new queue has no command in flight and fetches none in the namespace until the current round
        // ends.
        let round = self.round.load(Ordering::Relaxed);
        state.queues.insert(number, ParticipantState { quiet_in: round, waker: None });
        let nsid = state.line.front().map(|(_, nsid)| *nsid);
        drop(state);
        FusedParticipant { floor: Arc::clone(self), number, heard: round, nsid, is_told: true }
    }

    /// Starts a round for the first queue in line. Returns the wakers of all participants, which the
    /// caller invokes after unlocking.
    #[must_use]
    fn next_round(&self, state: &mut ArbiterState) -> Vec<WakeFn> {
        if state.line.is_empty() {
            self.round.store(0, Ordering::Release);
            return Vec::new();
        }
        state.rounds += 1;
        self.round.store(state.rounds, Ordering::Release);
        state.queues.values().filter_map(|known| known.waker.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, ArbiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FusedParticipant {
    /// Whether any queue holds exclusivity, including this one.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.floor.round.load(Ordering::Acquire) != 0
    }

    /// Whether another queue waits for the acknowledgment of this one.
    #[inline]
    pub(super) fn must_ack(&self) -> bool {
        !self.is_told && self.floor.round.load(Ordering::Relaxed) == self.heard
    }

    /// Sets the waker, invoked when a round starts, and when a queue acknowledges while this one holds
    /// exclusivity.
    pub(super) fn set_arbiter_waker(&self, waker: WakeFn) {
        if let Some(known) = self.floor.lock().queues.get_mut(&self.number) {
            known.waker = Some(waker);
        }
    }

    /// Checks the state of the arbiter.
    #[cold]
    pub(super) fn check(&mut self) -> ExclusiveState {
        let round = self.floor.round.load(Ordering::Acquire);
        if round == self.heard {
            return self
                .nsid
                .filter(|_| round != 0)
                .map_or(ExclusiveState::Nobody, ExclusiveState::Held);
        }
        let state = self.floor.lock();
        // Another round may have started since the load.
        self.heard = self.floor.round.load(Ordering::Relaxed);
        let others = state.line.front().filter(|(number, _)| *number != self.number);
        self.nsid = others.map(|(_, nsid)| *nsid);
        self.is_told = self.nsid.is_none();
        self.nsid.map_or(ExclusiveState::Nobody, ExclusiveState::Requested)
    }

    /// Acknowledges the round: no command of this queue executes in the namespace, and none will before
    /// the round ends. Wakes the holder.
    pub(super) fn ack_quiesced(&mut self) {
        if core::mem::replace(&mut self.is_told, true) {
            return;
        }
        let mut state = self.floor.lock();
        if let Some(known) = state.queues.get_mut(&self.number) {
            known.quiet_in = self.heard;
        }
        let owner = state.line.front().and_then(|(number, _)| state.queues.get(number));
        let waker = owner.and_then(|known| known.waker.clone());
        drop(state);
        if let Some(waker) = waker {
            waker();
        }
    }

    /// Requests exclusivity for a namespace, or checks whether the request is granted and acknowledged by
    /// all queues. Requests are served in order.
    pub(super) fn try_acquire(&self, nsid: u32) -> bool {
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
        let is_quiet = |(number, known): (&u64, &ParticipantState)| {
            *number == self.number || known.quiet_in == round
        };
        let is_alone = is_first && state.queues.iter().all(is_quiet);
        drop(state);
        bells.iter().for_each(|waker| waker());
        is_alone
    }

    /// Releases exclusivity, or withdraws the request.
    pub(super) fn release(&self) {
        let mut state = self.floor.lock();
        let had_it = state.line.front().is_some_and(|(number, _)| *number == self.number);
        state.line.retain(|(number, _)| *number != self.number);
        let bells = if had_it { self.floor.next_round(&mut state) } else { Vec::new() };
        drop(state);
        bells.iter().for_each(|waker| waker());
    }
}

impl Drop for FusedParticipant {
    /// Removes the participant: its acknowledgment is no longer required.
    fn drop(&mut self) {
        self.release();
        self.floor.lock().queues.remove(&self.number);
    }
}

impl fmt::Debug for ParticipantState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Known").field("quiet_in", &self.quiet_in).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::{ExclusiveState, FusedArbiter};

    #[test]
    fn the_floor_is_given_when_all_others_are_quiet_and_not_before() {
        let floor = Arc::<FusedArbiter>::default();
        let [first, mut second, third] = [0; 3].map(|_| floor.join());
        assert!(!second.is_held() && second.check() == ExclusiveState::Nobody);
        assert!(!first.try_acquire(7), "two others run");
        assert_eq!(
            (second.check(), second.check()),
            (ExclusiveState::Requested(7), ExclusiveState::Held(7))
        );
        second.ack_quiesced();
        assert!(!first.try_acquire(7));
        drop(third);
        assert!(first.try_acquire(7));
        first.release();
        assert!(!second.is_held() && second.check() == ExclusiveState::Nobody);
        assert!(!first.try_acquire(7), "an old word does not count for a new round");
        assert_eq!(second.check(), ExclusiveState::Requested(7));
        assert!(second.must_ack());
        second.ack_quiesced();
        assert!(first.try_acquire(7) && !second.must_ack());
        first.release();
        assert!(!first.try_acquire(7));
        assert_eq!(second.check(), ExclusiveState::Requested(7));
        drop(first);
        assert!(!second.must_ack(), "nobody waits any more");
        assert!(!second.is_held(), "a queue that is gone has nothing");
    }

    #[test]
    fn whoever_was_first_in_line_is_first() {
        let floor = Arc::<FusedArbiter>::default();
        let [mut first, mut second, mut third] = [0; 3].map(|_| floor.join());
        assert!(!first.try_acquire(1) && !second.try_acquire(2) && !third.try_acquire(3));
        second.check();
        second.ack_quiesced();
        third.check();
        third.ack_quiesced();
        assert!(!second.try_acquire(2) && first.try_acquire(1));
        assert_eq!(first.check(), ExclusiveState::Nobody, "one's own round stops nobody");
        second.release();
        assert!(first.try_acquire(1), "who leaves the line disturbs nobody");
        first.release();
        assert!(!first.try_acquire(1), "behind the third");
        assert_eq!(
            (first.check(), second.check()),
            (ExclusiveState::Requested(3), ExclusiveState::Requested(3))
        );
        first.ack_quiesced();
        second.ack_quiesced();
        assert!(third.try_acquire(3));
    }

    #[test]
    fn a_queue_that_comes_while_the_floor_is_taken_is_in_nobodys_way() {
        let floor = Arc::<FusedArbiter>::default();
        let first = floor.join();
        assert!(first.try_acquire(7));
        let mut second = floor.join();
        assert!(first.try_acquire(7));
        assert_eq!(second.check(), ExclusiveState::Held(7), "and takes nothing there");
        first.release();
        assert!(!first.try_acquire(7), "from now on it is waited for");
        assert_eq!(second.check(), ExclusiveState::Requested(7));
    }

    #[test]
    fn every_round_is_rung_and_every_word_that_is_waited_for() {
        let floor = Arc::<FusedArbiter>::default();
        let [mut first, second] = [0; 2].map(|_| floor.join());
        let rung = Arc::new(AtomicU32::new(0));
        let waker = Arc::clone(&rung);
        second.set_arbiter_waker(Arc::new(move || {
            waker.fetch_add(1, Ordering::Relaxed);
        }));
        assert!(!first.try_acquire(1) && !first.try_acquire(1));
        assert_eq!(rung.load(Ordering::Relaxed), 1, "once for a round");
        assert!(!second.try_acquire(1));
        first.release();
        assert_eq!(rung.load(Ordering::Relaxed), 2);
        first.check();
        first.ack_quiesced();
        first.ack_quiesced();
        assert_eq!(rung.load(Ordering::Relaxed), 3, "once");
        drop(second);
        assert!(first.try_acquire(1));
        assert_eq!(rung.load(Ordering::Relaxed), 3, "nobody is left to hear it");
    }
}
