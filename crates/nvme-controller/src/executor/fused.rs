//! Fused Compare and Write (Base 2.1 §3.4.2, NVM 1.1 §2.1.3).
//!
//! The second command must be the next one of the same stream. A pair runs exclusively: after all commands
//! begun before it, before any later command, and while the other queues of the subsystem are quiesced in
//! its namespace (see [`FusedArbiter`](super::FusedArbiter)).

use tenmil_base::{HostMemory, Instant, Span};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::command_context::WaitReason;
use super::decode::ExecutionPlan;
use super::fused_arbiter::ExclusiveState;
use super::job::JobEvent;
use super::slot_table::SlotState;
use super::{CommandDataLocation, CommandTag, Executor};

/// First and second fused command.
#[derive(Debug)]
pub(super) struct PendingFusedPair {
    first: u16,
    second: u16,
    nsid: u32,
    /// Deadline for the pair to get exclusivity.
    deadline: Instant,
    is_running: bool,
}

/// First command of a pair whose second is awaited, with its slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstFusedHalf {
    slot: u16,
    command: Command,
    data: CommandDataLocation,
}

/// Longest wait for exclusivity. Commands in progress need a fraction of it, unless they hang.
const EXCLUSIVE_TIMEOUT: Span = Span::from_secs(5);

impl<H: HostMemory> Executor<H> {
    /// Handles a command that starts or follows a fused pair. Returns false if it cannot
    /// begin now.
    pub(super) fn begin_fused(
        &mut self,
        now: Instant,
        tag: CommandTag,
        (command, data): (Command, CommandDataLocation),
    ) -> bool {
        let first = self.waiting_first_half(tag.stream);
        match (first, command.fuse()) {
            (None, Fuse::First) => {
                if let Some(slot) = self.take_slot(tag, &command, SlotState::AwaitingSecond)
                    && let Some(first) = self.first_halves.get_mut(usize::from(tag.stream))
                {
                    *first = Some(FirstFusedHalf { slot, command, data });
                    self.paused += 1;
                }
                true
            }
            (Some(first), Fuse::Second) => self.begin_pair(now, tag, first, (command, data)),
            (Some(FirstFusedHalf { slot, .. }), _) => {
                self.release_first_half(tag.stream);
                self.complete_command(slot, Status::ABORTED_MISSING_FUSED, 0);
                self.begin_command(now, tag, command, data)
            }
            (None, _) => {
                self.reject_command(tag, &command, Status::ABORTED_MISSING_FUSED);
                true
            }
        }
    }

    /// Ends the wait of a first command for its second.
    pub(super) fn release_first_half(&mut self, stream: u16) {
        if self.first_halves.get_mut(usize::from(stream)).and_then(Option::take).is_some() {
            self.paused -= 1;
        }
    }

    /// Starts the pair if it has exclusivity. After the deadline the pair fails with a status that the
    /// host may retry: otherwise a hanging command would block all queues that wait for this pair.
    pub(super) fn try_start_pair(&mut self, now: Instant) {
        let Some(pair) = self.pair.as_mut().filter(|pair| !pair.is_running) else { return };
        let first = pair.first;
        if self.slots.allocated_count() == self.paused
            && self.fused_participant.try_acquire_exclusivity(pair.nsid)
        {
            pair.is_running = true;
            // Both halves run now. First halves in other streams stay paused.
            self.paused -= 2;
            self.drive_job(now, first, JobEvent::Begin);
        } else if now >= pair.deadline {
            self.finish_job(now, first, Status::COMMAND_INTERRUPTED, 0);
        }
    }

    /// First command of a fused pair of this stream that awaits its second.
    pub(super) fn waiting_first_half(&self, stream: u16) -> Option<FirstFusedHalf> {
        self.first_halves.get(usize::from(stream)).copied().flatten()
    }

    /// Whether any queue of the subsystem holds exclusivity: then commands begin between
    /// [`bar_exclusive_namespace`](Self::bar_exclusive_namespace) and [`unbar_and_acknowledge_exclusivity`](Self::unbar_and_acknowledge_exclusivity).
    #[inline]
    pub fn is_exclusivity_held(&self) -> bool {
        self.fused_participant.is_exclusivity_held()
    }

    /// Before commands begin while a queue holds exclusivity: bars those of its namespace. A request
    /// detected only now bars nothing yet, so that all queues make progress between two pairs.
    #[cold]
    pub fn bar_exclusive_namespace(&mut self) {
        (self.quiesce_nsid, self.blocked_nsid) = match self.fused_participant.exclusive_state() {
            ExclusiveState::Free => (None, None),
            ExclusiveState::Requested(nsid) => (Some(nsid), None),
            ExclusiveState::Held(nsid) => (Some(nsid), Some(nsid)),
        };
    }

    /// After commands have begun while a queue holds exclusivity: acknowledges that none executes in its
    /// namespace.
    #[cold]
    pub fn unbar_and_acknowledge_exclusivity(&mut self) {
        self.blocked_nsid = None;
        if self.quiesce_nsid.take().is_some_and(|nsid| self.is_quiesced_in(nsid)) {
            self.fused_participant.acknowledge_quiesced();
        }
    }

    /// Whether no command executes in a namespace. Halves of waiting pairs do not count.
    fn is_quiesced_in(&mut self, nsid: u32) -> bool {
        let Self { slots, contexts, namespace_table, .. } = self;
        let mut there =
            slots.iter().filter(|(_, slot)| namespace_table.nsid_of(slot.channel()) == nsid);
        there.all(|(_, slot)| match slot.state() {
            SlotState::Free | SlotState::AwaitingSecond => true,
            SlotState::Fast => false,
            SlotState::Slow => contexts.get(slot.context()).wait == WaitReason::Pair,
        })
    }

    /// Handles the end of the command in context `index`, which may be half of the pair.
    pub(super) fn handle_pair_completion(&mut self, now: Instant, index: u16, status: Status) {
        let Some(PendingFusedPair { first, second, is_running, .. }) = self.pair else { return };
        if index == first {
            if !is_running {
                self.paused -= 2;
            }
            match status.is_success() {
                true => self.drive_job(now, second, JobEvent::Begin),
                false => self.finish_job(now, second, Status::ABORTED_FAILED_FUSED, 0),
            }
        } else if index == second {
            self.pair = None;
            self.fused_participant.release_exclusivity();
        }
    }

    /// Context of the first command, if the pair has not started.
    pub(crate) fn waiting_pair_context(&self) -> Option<u16> {
        self.pair.as_ref().filter(|pair| !pair.is_running).map(|pair| pair.first)
    }

    fn begin_pair(
        &mut self,
        now: Instant,
        tag: CommandTag,
        FirstFusedHalf { slot, command: first, data: first_data }: FirstFusedHalf,
        (second, second_data): (Command, CommandDataLocation),
    ) -> bool {
        if self.pair.is_some() || self.contexts.free_count() < 2 {
            return false;
        }
        let plans = self.plan_pair(&first, &second);
        let (nsid, deadline) = (first.nsid(), now.after(EXCLUSIVE_TIMEOUT));
        self.release_first_half(tag.stream);
        let Some(second_slot) = self.take_slot(tag, &second, SlotState::Slow) else { return true };
        match plans {
            Err((status, second_status)) => {
                self.complete_command(slot, status, 0);
                self.complete_command(second_slot, second_status, 0);
            }
            Ok([first_plan, second_plan]) => {
                let contexts = [
                    self.take_context(slot, (first, first_data), first_plan),
                    self.take_context(second_slot, (second, second_data), second_plan),
                ];
                if let [Some(first), Some(second)] = contexts {
                    self.contexts.get(first).wait = WaitReason::Pair;
                    self.contexts.get(second).wait = WaitReason::Pair;
                    self.pair =
                        Some(PendingFusedPair { first, second, nsid, deadline, is_running: false });
                    self.paused += 2;
                    self.try_start_pair(now);
                }
            }
        }
        true
    }

    /// Checks both commands. If one is rejected, the other fails with it (Base 2.1 §4.2.3.1).
    fn plan_pair(
        &mut self,
        first: &Command,
        second: &Command,
    ) -> Result<[ExecutionPlan; 2], (Status, Status)> {
        let opcodes = (IoOpcode::from_u8(first.opcode()), IoOpcode::from_u8(second.opcode()));
        let is_known = opcodes == (Some(IoOpcode::Compare), Some(IoOpcode::Write));
        // "The LBA range shall be the same": NSID, SLBA and NLB.
        let is_same = first.nsid() == second.nsid()
            && first.0[5] == second.0[5]
            && first.cdw12() & 0xffff == second.cdw12() & 0xffff;
        if !is_known || !is_same {
            let status = Status::INVALID_FIELD.with_dnr();
            return Err((status, status));
        }
        let failed = Status::ABORTED_FAILED_FUSED;
        let first = self.plan_command(first).map_err(|status| (status, failed))?;
        let second = self.plan_command(second).map_err(|status| (failed, status))?;
        Ok([first, second])
    }
}
