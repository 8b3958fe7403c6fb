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
    waiters: VecDeque<(u64, u32)>,
    queues: BTreeMap<u64, ParticipantState>,
    last_number: u64,
}

/// Arbiter's view of a queue.
#[derive(Default)]
struct ParticipantState {
    /// Round in which the queue has quiesced.
    quiesced_round: u64,
    waker: Option<WakeFn>,
}

/// One queue's part in the arbiter.
#[derive(Debug)]
pub(super) struct FusedParticipant {
    arbiter: Arc<FusedArbiter>,
    number: u64,
    /// Last round that the queue has seen.
    seen_round: u64,
    /// Namespace held by another queue in that round, if any.
    nsid: Option<u32>,
    /// The queue has acknowledged that round.
    is_acknowledged: bool,
}

/// Exclusivity as seen by one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExclusiveState {
    /// No other queue holds it.
    Free,
    /// Another queue requests it for this namespace; newly detected.
    Requested(u32),
    /// Another queue holds it for this namespace, or waits for the acknowledgments.
    Held(u32),
}

impl FusedArbiter {
    /// Adds a participant for a new queue: from now on its acknowledgment is required.
    pub(super) fn add_participant(self: &Arc<Self>) -> FusedParticipant {
        let mut state = self.lock();
        state.last_number += 1;
        let number = state.last_number;
        // A new queue has no command in flight and fetches none in the namespace until the current round
        // ends.
        let round = self.round.load(Ordering::Relaxed);
        state.queues.insert(number, ParticipantState { quiesced_round: round, waker: None });
        let nsid = state.waiters.front().map(|(_, nsid)| *nsid);
        drop(state);
        FusedParticipant {
            arbiter: Arc::clone(self),
            number,
            seen_round: round,
            nsid,
            is_acknowledged: true,
        }
    }

    /// Starts a round for the first queue in line. Returns the wakers of all participants, which the
    /// caller invokes after unlocking.
    #[must_use]
    fn start_next_round(&self, state: &mut ArbiterState) -> Vec<WakeFn> {
        if state.waiters.is_empty() {
            self.round.store(0, Ordering::Release);
            return Vec::new();
        }
        state.rounds += 1;
        self.round.store(state.rounds, Ordering::Release);
        state.queues.values().filter_map(|participant| participant.waker.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, ArbiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FusedParticipant {
    /// Whether any queue holds exclusivity, including this one.
    #[inline]
    pub(super) fn is_exclusivity_held(&self) -> bool {
        self.arbiter.round.load(Ordering::Acquire) != 0
    }

    /// Whether another queue waits for the acknowledgment of this one.
    #[inline]
    pub(super) fn must_acknowledge(&self) -> bool {
        !self.is_acknowledged && self.arbiter.round.load(Ordering::Relaxed) == self.seen_round
    }

    /// Sets the waker, invoked when a round starts, and when a queue acknowledges while this one holds
    /// exclusivity.
    pub(super) fn set_waker(&self, waker: WakeFn) {
        if let Some(participant) = self.arbiter.lock().queues.get_mut(&self.number) {
            participant.waker = Some(waker);
        }
    }

    /// Checks the state of the arbiter.
    #[cold]
    pub(super) fn exclusive_state(&mut self) -> ExclusiveState {
        let round = self.arbiter.round.load(Ordering::Acquire);
        if round == self.seen_round {
            return self
                .nsid
                .filter(|_| round != 0)
                .map_or(ExclusiveState::Free, ExclusiveState::Held);
        }
        let state = self.arbiter.lock();
        // Another round may have started since the load.
        self.seen_round = self.arbiter.round.load(Ordering::Relaxed);
        let others = state.waiters.front().filter(|(number, _)| *number != self.number);
        self.nsid = others.map(|(_, nsid)| *nsid);
        self.is_acknowledged = self.nsid.is_none();
        self.nsid.map_or(ExclusiveState::Free, ExclusiveState::Requested)
    }

    /// Acknowledges the round: no command of this queue executes in the namespace, and none will before
    /// the round ends. Wakes the holder.
    pub(super) fn acknowledge_quiesced(&mut self) {
        if core::mem::replace(&mut self.is_acknowledged, true) {
            return;
        }
        let mut state = self.arbiter.lock();
        if let Some(participant) = state.queues.get_mut(&self.number) {
            participant.quiesced_round = self.seen_round;
        }
        let owner = state.waiters.front().and_then(|(number, _)| state.queues.get(number));
        let waker = owner.and_then(|participant| participant.waker.clone());
        drop(state);
        if let Some(waker) = waker {
            waker();
        }
    }

    /// Requests exclusivity for a namespace, or checks whether the request is granted and acknowledged by
    /// all queues. Requests are served in order.
    pub(super) fn try_acquire_exclusivity(&self, nsid: u32) -> bool {
        let mut state = self.arbiter.lock();
        let mut wakers = Vec::new();
        if !state.waiters.iter().any(|(number, _)| *number == self.number) {
            state.waiters.push_back((self.number, nsid));
            if state.waiters.len() == 1 {
                wakers = self.arbiter.start_next_round(&mut state);
            }
        }
        let round = self.arbiter.round.load(Ordering::Relaxed);
        let is_first = state.waiters.front().is_some_and(|(number, _)| *number == self.number);
        let is_quiesced = |(number, participant): (&u64, &ParticipantState)| {
            *number == self.number || participant.quiesced_round == round
        };
        let is_granted = is_first && state.queues.iter().all(is_quiesced);
        drop(state);
        wakers.iter().for_each(|waker| waker());
        is_granted
    }

    /// Releases exclusivity, or withdraws the request.
    pub(super) fn release_exclusivity(&self) {
        let mut state = self.arbiter.lock();
        let was_holder = state.waiters.front().is_some_and(|(number, _)| *number == self.number);
        state.waiters.retain(|(number, _)| *number != self.number);
        let wakers =
            if was_holder { self.arbiter.start_next_round(&mut state) } else { Vec::new() };
        drop(state);
        wakers.iter().for_each(|waker| waker());
    }
}

impl Drop for FusedParticipant {
    /// Removes the participant: its acknowledgment is no longer required.
    fn drop(&mut self) {
        self.release_exclusivity();
        self.arbiter.lock().queues.remove(&self.number);
    }
}

impl fmt::Debug for ParticipantState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ParticipantState")
            .field("quiesced_round", &self.quiesced_round)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::{ExclusiveState, FusedArbiter};

    #[test]
    fn exclusivity_is_granted_once_all_other_queues_are_quiesced() {
        let arbiter = Arc::<FusedArbiter>::default();
        let [first, mut second, third] = [0; 3].map(|_| arbiter.add_participant());
        assert!(!second.is_exclusivity_held() && second.exclusive_state() == ExclusiveState::Free);
        assert!(!first.try_acquire_exclusivity(7), "two others run");
        assert_eq!(
            (second.exclusive_state(), second.exclusive_state()),
            (ExclusiveState::Requested(7), ExclusiveState::Held(7))
        );
        second.acknowledge_quiesced();
        assert!(!first.try_acquire_exclusivity(7));
        drop(third);
        assert!(first.try_acquire_exclusivity(7));
        first.release_exclusivity();
        assert!(!second.is_exclusivity_held() && second.exclusive_state() == ExclusiveState::Free);
        assert!(!first.try_acquire_exclusivity(7), "an old word does not count for a new round");
        assert_eq!(second.exclusive_state(), ExclusiveState::Requested(7));
        assert!(second.must_acknowledge());
        second.acknowledge_quiesced();
        assert!(first.try_acquire_exclusivity(7) && !second.must_acknowledge());
        first.release_exclusivity();
        assert!(!first.try_acquire_exclusivity(7));
        assert_eq!(second.exclusive_state(), ExclusiveState::Requested(7));
        drop(first);
        assert!(!second.must_acknowledge(), "no queue waits");
        assert!(!second.is_exclusivity_held(), "a queue that is gone has nothing");
    }

    #[test]
    fn exclusivity_is_granted_in_request_order() {
        let arbiter = Arc::<FusedArbiter>::default();
        let [mut first, mut second, mut third] = [0; 3].map(|_| arbiter.add_participant());
        assert!(
            !first.try_acquire_exclusivity(1)
                && !second.try_acquire_exclusivity(2)
                && !third.try_acquire_exclusivity(3)
        );
        second.exclusive_state();
        second.acknowledge_quiesced();
        third.exclusive_state();
        third.acknowledge_quiesced();
        assert!(!second.try_acquire_exclusivity(2) && first.try_acquire_exclusivity(1));
        assert_eq!(
            first.exclusive_state(),
            ExclusiveState::Free,
            "a queue does not wait for its own round"
        );
        second.release_exclusivity();
        assert!(first.try_acquire_exclusivity(1), "a withdrawn request does not affect the holder");
        first.release_exclusivity();
        assert!(!first.try_acquire_exclusivity(1), "behind the third");
        assert_eq!(
            (first.exclusive_state(), second.exclusive_state()),
            (ExclusiveState::Requested(3), ExclusiveState::Requested(3))
        );
        first.acknowledge_quiesced();
        second.acknowledge_quiesced();
        assert!(third.try_acquire_exclusivity(3));
    }

    #[test]
    fn queue_added_during_exclusivity_does_not_block_it() {
        let arbiter = Arc::<FusedArbiter>::default();
        let first = arbiter.add_participant();
        assert!(first.try_acquire_exclusivity(7));
        let mut second = arbiter.add_participant();
        assert!(first.try_acquire_exclusivity(7));
        assert_eq!(second.exclusive_state(), ExclusiveState::Held(7), "and takes nothing there");
        first.release_exclusivity();
        assert!(!first.try_acquire_exclusivity(7), "from now on it is waited for");
        assert_eq!(second.exclusive_state(), ExclusiveState::Requested(7));
    }

    #[test]
    fn each_round_and_each_awaited_acknowledgment_wakes_the_queues() {
        let arbiter = Arc::<FusedArbiter>::default();
        let [mut first, second] = [0; 2].map(|_| arbiter.add_participant());
        let rung = Arc::new(AtomicU32::new(0));
        let waker = Arc::clone(&rung);
        second.set_waker(Arc::new(move || {
            waker.fetch_add(1, Ordering::Relaxed);
        }));
        assert!(!first.try_acquire_exclusivity(1) && !first.try_acquire_exclusivity(1));
        assert_eq!(rung.load(Ordering::Relaxed), 1, "once for a round");
        assert!(!second.try_acquire_exclusivity(1));
        first.release_exclusivity();
        assert_eq!(rung.load(Ordering::Relaxed), 2);
        first.exclusive_state();
        first.acknowledge_quiesced();
        first.acknowledge_quiesced();
        assert_eq!(rung.load(Ordering::Relaxed), 3, "once");
        drop(second);
        assert!(first.try_acquire_exclusivity(1));
        assert_eq!(rung.load(Ordering::Relaxed), 3, "a removed queue is not woken");
    }
}
