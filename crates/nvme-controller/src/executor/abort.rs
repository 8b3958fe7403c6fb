//! Early termination of commands: abort, preemption, and stopping an executor.
//!
//! A command with a request or a host access in flight keeps its memory until that has completed; only
//! the status reported to the host changes.

use tenmil_base::{HostMemory, Instant};
use tenmil_wire::{IoOpcode, Status};

use super::channel;
use super::command_context::WaitReason;
use super::slot_table::{Slot, SlotState};
use super::{CommandTag, Executor};
use crate::controller::PreemptedWriterGuard;

/// Writes of a namespace that were outstanding when its reservation was preempted.
#[derive(Debug)]
pub(super) struct PreemptedWrites {
    /// The preemption waits while this is there.
    _guard: PreemptedWriterGuard,
    commands: Vec<(u16, Slot)>,
}

impl<H: HostMemory> Executor<H> {
    /// Tries to abort a command (Base 2.1 §5.1.1). Returns true if it completes, now or later, as
    /// aborted. A command that a block device already executes, or that has not begun, is not affected.
    pub fn try_abort_command(&mut self, now: Instant, tag: CommandTag) -> bool {
        let is_match = |slot: &Slot| (slot.stream(), slot.id()) == (tag.stream, tag.id);
        let found = self.slots.iter().find(|(_, slot)| is_match(slot)).map(|(number, _)| number);
        found.is_some_and(|number| self.cancel_command(now, number, Status::ABORT_REQUESTED))
    }

    /// Aborts the outstanding commands of a namespace after its reservation was preempted (Base 2.1
    /// §8.1.22.7). `preempted` is held until the outstanding writes have completed:
    /// see [`poll_preempted_writes`](Self::poll_preempted_writes).
    pub fn abort_namespace(&mut self, now: Instant, nsid: u32, preempted: &PreemptedWriterGuard) {
        let numbers: Vec<u16> = self
            .slots
            .iter()
            .filter(|(_, slot)| self.namespace_table.nsid_of(slot.channel()) == nsid)
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.cancel_command(now, number, Status::ABORTED_PREEMPT_AND_ABORT);
        }
        let is_writing = |slot: &Slot| {
            is_write_opcode(slot.opcode()) && self.namespace_table.nsid_of(slot.channel()) == nsid
        };
        let writing = self.slots.iter().filter(|(_, slot)| is_writing(slot));
        let commands: Vec<_> = writing.map(|(number, slot)| (number, *slot)).collect();
        if !commands.is_empty() {
            self.preempted.push(PreemptedWrites { _guard: preempted.clone(), commands });
        }
    }

    /// Checks which writes that were outstanding at a preemption have completed, and releases the guards of
    /// preemptions without such writes.
    pub fn poll_preempted_writes(&mut self) {
        let slots = &self.slots;
        self.preempted.retain_mut(|writes| {
            let is_outstanding = |(number, old): &(u16, Slot)| {
                slots.get((*number).into()).is_some_and(|slot| slot.is_same_command(old))
            };
            writes.commands.retain(is_outstanding);
            !writes.commands.is_empty()
        });
    }

    /// Ends the commands of a stream, at once or when their accesses complete.
    pub(crate) fn cancel_stream(&mut self, now: Instant, stream: u16) {
        let in_stream = |slot: &Slot| slot.stream() == stream;
        let numbers: Vec<u16> = self
            .slots
            .iter()
            .filter(|(_, slot)| in_stream(slot))
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.cancel_command(now, number, Status::ABORTED_SQ_DELETION);
        }
    }

    /// Stops: starts no new access to host memory; finished commands are to be discarded. The owner
    /// continues to poll until no command is in flight.
    pub fn stop(&mut self, now: Instant) {
        self.is_stopping = true;
        for index in 0..self.namespace_table.channel_count() {
            let Some(channel) = self.namespace_table.channel(index) else { continue };
            for token in channel.take_unsubmitted_tokens() {
                if self.slots.get(token).is_some_and(|slot| slot.state() == SlotState::Fast)
                    && let Ok(number) = u16::try_from(token)
                {
                    self.complete_command(number, Status::ABORTED_SQ_DELETION, 0);
                }
            }
        }
        for number in self.slots.iter().map(|(number, _)| number).collect::<Vec<_>>() {
            if self.slots.get(number.into()).is_some() {
                self.cancel_command(now, number, Status::ABORTED_SQ_DELETION);
            }
        }
    }

    /// After [`stop`](Self::stop): blocks all access to the blocks with writes in flight until these
    /// complete. The host gets no completion for them anymore and may resend them through another queue;
    /// the resent writes must not be overtaken by the old ones.
    pub fn fence_writes(&mut self) {
        self.namespace_table.channels().for_each(channel::NamespaceChannel::fence_writes);
    }

    /// Opcode, namespace and first block of the outstanding command in the lowest slot.
    pub fn lowest_slot_command(&self) -> Option<(u8, u32, u64)> {
        let (_, slot) = self.slots.iter().next()?;
        Some((slot.opcode(), self.namespace_table.nsid_of(slot.channel()), slot.lba))
    }

    /// Stops at once: the rings of its queue are not accessible anymore.
    pub(crate) fn set_stopping(&mut self) {
        self.is_stopping = true;
    }

    /// Whether it was stopped.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Whether only first halves of fused pairs are outstanding; these access nothing before their second
    /// halves arrive.
    pub(crate) fn is_idle_except_fused_halves(&self) -> bool {
        self.slots.allocated_count() == self.first_halves.iter().flatten().count()
    }

    /// Commands being executed. Halves of fused pairs that wait do not count.
    pub fn executing_count(&self) -> usize {
        self.slots.allocated_count() - self.paused
    }

    /// Ends a command with `status`, at once or when its accesses complete. Returns false if the command
    /// is not affected.
    fn cancel_command(&mut self, now: Instant, number: u16, status: Status) -> bool {
        let Some(slot) = self.slots.get(number.into()).copied() else { return false };
        match slot.state() {
            SlotState::Free | SlotState::Fast => false,
            SlotState::AwaitingSecond => {
                self.release_first_half(slot.stream());
                self.complete_command(number, status, 0);
                true
            }
            SlotState::Slow => {
                let waiting_pair = self.waiting_pair_context();
                let context = self.contexts.get(slot.context());
                if context.wait == WaitReason::Controller && !self.is_stopping {
                    // The reservation change may be durable already: the command keeps its own result.
                    return false;
                }
                context.cancelled = Some(status);
                context.host_copy.stop_new_accesses();
                // The second half of a running pair is completed with the first half, in `handle_pair_completion`.
                let is_second =
                    context.wait == WaitReason::Pair && waiting_pair != Some(slot.context());
                if !context.has_pending_completions() && !is_second {
                    self.buffer_waiters.retain(|waiting| *waiting != slot.context());
                    self.capacity_waiters.retain(|waiting| *waiting != slot.context());
                    self.finish_job(now, slot.context(), status, 0);
                }
                true
            }
        }
    }
}

/// Whether a command of this opcode changes blocks.
fn is_write_opcode(opcode: u8) -> bool {
    matches!(
        IoOpcode::from_u8(opcode),
        Some(
            IoOpcode::Write
                | IoOpcode::WriteUncorrectable
                | IoOpcode::WriteZeroes
                | IoOpcode::DatasetManagement
                | IoOpcode::Copy
        )
    )
}
