//! Error injection per opcode, to test the layers above.
//!
//! While an injection is armed, the queue pair keeps its slot table closed, so that every command takes
//! the slow path through this module. Otherwise injection adds no check to the fast path.

use tenmil_base::{CompletionBatch, IoStatus};
use tenmil_wire::Command;

use super::completions::complete_flagged;
use super::{PointerOf, QueuePair, SplitTracker, Transport};
use crate::queue_link::QueueState;
use crate::slot_table::SlotFlags;

/// Error to be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Opcode of the affected commands.
    pub opcode: u8,
    /// Side on which it takes effect.
    pub side: InjectionSide,
    /// Status of the affected commands.
    pub status: IoStatus,
    /// Number of commands to affect.
    pub count: u32,
}

/// Side on which an injected error takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectionSide {
    /// The command is not sent to the controller.
    Submission,
    /// The controller executes the command, and its status is replaced.
    Completion,
}

/// Injections of a queue pair.
#[derive(Debug)]
pub(super) struct Injections {
    list: Vec<Injection>,
    /// Commands that were not sent, with the status for the next poll.
    unsent: Vec<(u16, IoStatus)>,
    /// By slot: the status of a flagged command.
    statuses: Box<[IoStatus]>,
    count: u64,
}

impl Injections {
    fn new(slots: usize) -> Self {
        Self {
            list: Vec::new(),
            unsent: Vec::with_capacity(slots),
            statuses: vec![IoStatus::SUCCESS; slots].into_boxed_slice(),
            count: 0,
        }
    }

    pub(super) fn are_armed(&self) -> bool {
        !self.list.is_empty() || !self.unsent.is_empty()
    }

    pub(super) fn injected_count(&self) -> u64 {
        self.count
    }

    /// Takes one count from an injection for `opcode`, if there is one.
    fn take_for_opcode(&mut self, opcode: u8) -> Option<Injection> {
        let index = self.list.iter().position(|injection| injection.opcode == opcode)?;
        let injection = &mut self.list[index];
        injection.count -= 1;
        let hit = *injection;
        if hit.count == 0 {
            self.list.remove(index);
        }
        self.count += 1;
        Some(hit)
    }
}

impl<T: Transport> QueuePair<T> {
    /// Arms an injection. Fused pairs are not affected.
    pub fn arm_injection(&mut self, injection: Injection) {
        let slots = self.slots.len();
        let injections = self.cold.injections.get_or_insert_with(|| Injections::new(slots));
        if injection.count > 0 {
            injections.list.push(injection);
        }
        self.resume_fast_path();
    }

    /// Disarms all injections; commands already affected still complete with their errors.
    pub fn clear_injections(&mut self) {
        if let Some(injections) = &mut self.cold.injections {
            injections.list.clear();
        }
        self.resume_fast_path();
    }

    /// Submits a command with the slot table closed, applying injections.
    #[cold]
    pub(super) fn enqueue_injected(
        &mut self,
        tick: u32,
        token: u64,
        mark: SlotFlags,
        (mut command, pointer): (Command, PointerOf<T>),
        lists: Option<&mut T::Pointers>,
    ) -> Option<u16> {
        let injections = self.cold.injections.as_mut()?;
        if !self.slots.is_closed() || self.cold.standing != QueueState::Running {
            return None;
        }
        self.slots.next_index()?;
        // The closed table keeps the fast path out; it is open only for this allocation.
        let hit = injections.take_for_opcode(command.opcode());
        self.slots.open();
        let mark = if hit.is_some() { mark.union(SlotFlags::INJECTED) } else { mark };
        let cid = self.slots.allocate(token, tick, mark);
        self.slots.close();
        let cid = cid?;
        if let Some(hit) = hit {
            injections.statuses[self.slots.slot_index(cid)] = hit.status;
            // The command is never submitted, and completes with the injected status.
            if hit.side == InjectionSide::Submission {
                injections.unsent.push((cid, hit.status));
                return Some(cid);
            }
        }
        command.0[0] |= u64::from(cid) << 16;
        self.transport.submit(command, pointer, lists);
        self.flush_if_eager();
        Some(cid)
    }

    /// Completes commands that were not sent, as far as there is space.
    pub(super) fn complete_injected<P: SplitTracker>(
        &mut self,
        completions: &mut CompletionBatch,
        parents: &mut P,
    ) {
        let Some(injections) = &mut self.cold.injections else { return };
        let count = injections.unsent.len().min(completions.remaining());
        for (cid, status) in injections.unsent.drain(..count) {
            if let Ok(ended) = self.slots.complete(cid) {
                complete_flagged(ended, status, 0, parents)
                    .into_iter()
                    .for_each(|it| completions.push(it));
            }
        }
    }

    pub(super) fn has_injected_completions(&self) -> bool {
        self.cold.injections.as_ref().is_some_and(|injections| !injections.unsent.is_empty())
    }

    /// Drops the pending injected completions; the commands complete with all others in flight.
    pub(super) fn drop_injected_completions(&mut self) {
        if let Some(injections) = &mut self.cold.injections {
            injections.unsent.clear();
        }
    }
}

impl Injections {
    /// Status of a completed command after injection.
    pub(super) fn injected_status(
        &self,
        index: usize,
        mark: SlotFlags,
        status: IoStatus,
    ) -> IoStatus {
        if mark.has(SlotFlags::INJECTED) { self.statuses[index] } else { status }
    }
}
