//! Command decoding: checks a command and selects how it is executed.
//!
//! The checks follow the order of the specification's tables: opcode, namespace, its state, fields,
//! access rights, range, size. Errors that a retry would repeat carry Do Not Retry (DNR).

use tenmil_base::{Durability, HostMemory, Instant, Operation, Request, RequestFlags};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::fast_path::{NO_SEGMENT, fua_and_lr_flags};
use super::job::{
    CommandExtent, CommandJob, CopyJob, DeallocateJob, EmulatedZeroesVerifyJob, FlushAllJob,
    JobEvent, ReservationJob, TransferJob,
};
use super::namespace_table::{
    FastPathNamespace, READ_CONFLICT, RESERVATIONS_DENIED, WRITE_CONFLICT, WRITE_PROTECTED,
};
use super::slot_table::{Slot, SlotState};
use super::{CommandDataLocation, CommandTag, Executor};
use crate::data_pointer_walk::ACCESS_BYTES_MAX;
use crate::namespace::CopyLimits;

/// Kind of execution of a command.
#[derive(Debug)]
pub(super) enum ExecutionPlan {
    /// Completes at once.
    Done,
    /// One request without data to this channel.
    Single(u16, Request),
    /// A job on this channel.
    Job(u16, CommandJob),
}

/// Access class for the reservation checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReservationAccessKind {
    Read,
    Write,
}

/// NSID of a Flush of every namespace (Base 2.1 §7.2).
const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// PRACT, the first bit of PRINFO, in dword 12 (NVM 1.1 §3.3.4).
const PRACT: u32 = 1 << 29;
/// DTYPE in dword 12 of writes: no directive is enabled (Base 2.1 §8.1.8).
const DTYPE: u32 = 0xf << 20;
/// DEAC in dword 12 of Write Zeroes (NVM 1.1 §3.3.8).
const DEAC: u32 = 1 << 25;
/// AD in dword 11 of Dataset Management (NVM 1.1 §3.3.3).
const DEALLOCATE: u32 = 1 << 2;

impl<H: HostMemory> Executor<H> {
    /// Begins a command. There must be [`free_count`](Self::free_count). Returns false if it cannot begin now: then
    /// the owner begins it again later, and nothing before it.
    #[cold]
    pub fn begin_command(
        &mut self,
        now: Instant,
        tag: CommandTag,
        command: Command,
        data: CommandDataLocation,
    ) -> bool {
        if self.blocked_nsid == Some(command.nsid()) {
            return false;
        }
        // After a first fused command, the next command must be checked as its second one.
        let has_first = self.waiting_first_half(tag.stream).is_some();
        if has_first || command.fuse() != Fuse::Normal {
            if command.fuse() == Fuse::Reserved && !has_first {
                self.reject_command(tag, &command, Status::INVALID_FIELD.with_dnr());
                return true;
            }
            return self.begin_fused(now, tag, (command, data));
        }
        let plan = match self.plan_command(&command) {
            Ok(plan) => plan,
            Err(status) => {
                let status = self.write_protection_status(&command).unwrap_or(status);
                self.reject_command(tag, &command, status);
                return true;
            }
        };
        // Completing it with an error would be visible to the host, so it waits for a context.
        if matches!(plan, ExecutionPlan::Job(..)) && self.contexts.free_count() == 0 {
            return false;
        }
        match plan {
            ExecutionPlan::Done => self.reject_command(tag, &command, Status::SUCCESS),
            ExecutionPlan::Single(channel, mut request) => {
                if let Some(slot) = self.take_slot(tag, &command, SlotState::Fast)
                    && let Some(channel_to) = self.namespace_table.channel(channel)
                {
                    request.token = slot.into();
                    channel_to.batch_request(request, NO_SEGMENT);
                    channel_to.count_single(&request);
                    self.slots.get_mut(slot).set_channel(channel);
                }
            }
            ExecutionPlan::Job(..) => {
                if let Some(slot) = self.take_slot(tag, &command, SlotState::Slow)
                    && let Some(context) = self.take_context(slot, (command, data), plan)
                {
                    self.drive_job(now, context, JobEvent::Begin);
                }
            }
        }
        true
    }

    /// Namespace Write Protected status for a write. A read-only block device supports no writes, but the
    /// protection is the status to report, not an invalid opcode.
    fn write_protection_status(&self, command: &Command) -> Option<Status> {
        let opcode = IoOpcode::from_u8(command.opcode())?;
        let writes = matches!(
            opcode,
            IoOpcode::Write
                | IoOpcode::WriteZeroes
                | IoOpcode::WriteUncorrectable
                | IoOpcode::DatasetManagement
                | IoOpcode::Copy
        );
        let entry = self.namespace_table.fast_path_entry(command.nsid()).filter(|_| writes)?;
        let is_protected = entry.rights & WRITE_PROTECTED != 0;
        is_protected.then_some(Status::NAMESPACE_WRITE_PROTECTED.with_dnr())
    }

    /// Completes a command that has not started.
    pub(crate) fn reject_command(&mut self, tag: CommandTag, command: &Command, status: Status) {
        if let Some(slot) = self.take_slot(tag, command, SlotState::Slow) {
            self.complete_command(slot, status, 0);
        }
    }

    /// Allocates a slot for a command.
    pub(super) fn take_slot(
        &mut self,
        tag: CommandTag,
        command: &Command,
        state: SlotState,
    ) -> Option<u16> {
        let channel = self
            .namespace_table
            .fast_path_entry(command.nsid())
            .map_or(u16::MAX, |entry| entry.channel);
        let (lba, opcode) = (command.0[5], command.opcode());
        let last_block = super::low_16_bits(command.cdw12().into());
        let slot = Slot::new(lba, tag.id, channel, tag.stream, opcode)
            .with_blocks_and_start(last_block, self.iteration_start);
        self.slots.allocate(slot.with_state(state))
    }

    /// Allocates a context for the command in `slot`.
    pub(super) fn take_context(
        &mut self,
        slot: u16,
        (command, data): (Command, CommandDataLocation),
        plan: ExecutionPlan,
    ) -> Option<u16> {
        let ExecutionPlan::Job(channel, job) = plan else { return None };
        let context = self.contexts.allocate(slot, channel, (command, data), job)?;
        if self.scratch.is_empty() {
            self.scratch = vec![0; ACCESS_BYTES_MAX].into();
        }
        let slot = self.slots.get_mut(slot);
        slot.set_context(context);
        slot.set_channel(channel);
        slot.set_state(SlotState::Slow);
        Some(context)
    }

    /// Checks `command` and selects its execution, or returns the status that rejects it.
    pub(super) fn plan_command(&mut self, command: &Command) -> Result<ExecutionPlan, Status> {
        let Some(opcode) = IoOpcode::from_u8(command.opcode()) else {
            return Err(Status::INVALID_OPCODE.with_dnr());
        };
        match opcode {
            IoOpcode::Flush if command.nsid() == ALL_NAMESPACES => {
                Ok(ExecutionPlan::Job(u16::MAX, CommandJob::FlushAll(FlushAllJob::default())))
            }
            IoOpcode::Flush => self.plan_flush(command),
            IoOpcode::Read => self.plan_transfer(command, Operation::Read),
            IoOpcode::Write => self.plan_transfer(command, Operation::Write),
            IoOpcode::Compare => self.plan_transfer(command, Operation::Compare),
            IoOpcode::WriteZeroes => self.plan_range_command(command, Operation::WriteZeroes),
            IoOpcode::WriteUncorrectable => {
                self.plan_range_command(command, Operation::WriteUncorrectable)
            }
            IoOpcode::Verify => self.plan_range_command(command, Operation::Verify),
            IoOpcode::DatasetManagement => self.plan_deallocate(command),
            IoOpcode::Copy => self.plan_copy(command),
            IoOpcode::ReservationRegister
            | IoOpcode::ReservationReport
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease => {
                let entry = self.namespace_table.checked_entry(command.nsid())?;
                if entry.rights & RESERVATIONS_DENIED != 0 && opcode != IoOpcode::ReservationReport
                {
                    return Err(Status::OPERATION_DENIED.with_dnr());
                }
                let job = ReservationJob::new(opcode, command, self.transfer_bytes_max);
                let job = job.ok_or(Status::INVALID_FIELD.with_dnr())?;
                Ok(ExecutionPlan::Job(entry.channel, CommandJob::Reservation(job)))
            }
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    fn plan_flush(&mut self, command: &Command) -> Result<ExecutionPlan, Status> {
        let entry = self.namespace_table.checked_entry(command.nsid())?;
        if entry.rights & WRITE_CONFLICT != 0 {
            return Err(Status::RESERVATION_CONFLICT.with_dnr());
        }
        match self.supports_operation(entry, Operation::Flush) {
            true => {
                Ok(plan_single_request(entry.channel, Operation::Flush, RequestFlags::NONE, (0, 0)))
            }
            // Without a volatile cache, Flush succeeds without doing anything. It also does for volatile
            // media.
            false if self.namespace_durability(entry) != Durability::VolatileCache => {
                Ok(ExecutionPlan::Done)
            }
            false => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Checks Read, Write and Compare.
    fn plan_transfer(
        &mut self,
        command: &Command,
        operation: Operation,
    ) -> Result<ExecutionPlan, Status> {
        let entry = self.namespace_table.checked_entry(command.nsid())?;
        let compares_in_controller =
            operation == Operation::Compare && !self.supports_operation(entry, Operation::Compare);
        let asked = if compares_in_controller { Operation::Read } else { operation };
        if !self.supports_operation(entry, asked) {
            return Err(Status::INVALID_OPCODE.with_dnr());
        }
        check_dword12(command, operation)?;
        let access = if operation == Operation::Write {
            ReservationAccessKind::Write
        } else {
            ReservationAccessKind::Read
        };
        check_access_rights(entry, access)?;
        let (lba, blocks) = check_lba_range(entry, command)?;
        let len_bytes = u64::from(blocks) << entry.block_shift;
        if len_bytes > self.transfer_bytes_max.into() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let flags = fua_and_lr_flags(command.cdw12()).union(self.write_request_flags(access));
        let extent = self.to_device_extent(entry, lba, blocks);
        let segments_max = self.device_limits(entry).map_or(0, |limits| limits.segments_max.into());
        let transfer =
            TransferJob::new(operation, flags, extent, segments_max, compares_in_controller);
        Ok(ExecutionPlan::Job(entry.channel, CommandJob::Transfer(transfer)))
    }

    /// Checks Write Zeroes, Write Uncorrectable and Verify: commands with a range and no data.
    fn plan_range_command(
        &mut self,
        command: &Command,
        operation: Operation,
    ) -> Result<ExecutionPlan, Status> {
        let entry = self.namespace_table.checked_entry(command.nsid())?;
        let substitute = match operation {
            Operation::WriteZeroes => Some(Operation::Write),
            Operation::Verify => Some(Operation::Read),
            _ => None,
        };
        let substitute = substitute.filter(|operation| self.supports_operation(entry, *operation));
        let is_native = self.supports_operation(entry, operation);
        if !is_native && substitute.is_none() {
            return Err(Status::INVALID_OPCODE.with_dnr());
        }
        check_dword12(command, operation)?;
        let access = if operation == Operation::Verify {
            ReservationAccessKind::Read
        } else {
            ReservationAccessKind::Write
        };
        check_access_rights(entry, access)?;
        let (lba, blocks) = check_lba_range(entry, command)?;
        let mut flags = fua_and_lr_flags(command.cdw12()).union(self.write_request_flags(access));
        if operation == Operation::WriteZeroes && command.cdw12() & DEAC != 0 {
            flags = flags.union(RequestFlags::DEALLOCATE);
        }
        let extent = self.to_device_extent(entry, lba, blocks);
        Ok(match substitute {
            Some(substitute) if !is_native => ExecutionPlan::Job(
                entry.channel,
                CommandJob::Emulated(EmulatedZeroesVerifyJob::new(substitute, flags, extent)),
            ),
            _ => plan_single_request(entry.channel, operation, flags, (extent.lba, extent.blocks)),
        })
    }

    fn plan_deallocate(&mut self, command: &Command) -> Result<ExecutionPlan, Status> {
        let entry = self.namespace_table.checked_entry(command.nsid())?;
        check_access_rights(entry, ReservationAccessKind::Write)?;
        // NR is 0's based.
        let count = (command.cdw10() & 0xff) + 1;
        let deallocates = command.cdw11() & DEALLOCATE != 0
            && self.supports_operation(entry, Operation::Deallocate);
        let ranges = DeallocateJob::new(count, deallocates, entry.block_count, entry.device_shift);
        Ok(ExecutionPlan::Job(entry.channel, CommandJob::Ranges(ranges)))
    }

    fn plan_copy(&mut self, command: &Command) -> Result<ExecutionPlan, Status> {
        let entry = self.namespace_table.checked_entry(command.nsid())?;
        let device_copies = self.supports_operation(entry, Operation::Copy);
        let copies_in_controller = self.supports_operation(entry, Operation::Read)
            && self.supports_operation(entry, Operation::Write);
        if !device_copies && !copies_in_controller {
            return Err(Status::INVALID_OPCODE.with_dnr());
        }
        // NR in bits 7:0 (0's based), descriptor format in 11:8, PRACT of the read in 15 and of the write
        // in 29.
        let (count, format) = ((command.cdw12() & 0xff) + 1, command.cdw12() >> 8 & 0xf);
        let Some(range_bytes) = super::job::RANGE_BYTES.get(format as usize) else {
            return Err(Status::INVALID_FIELD.with_dnr());
        };
        if command.cdw12() & (1 << 15) != 0 {
            return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
        }
        check_dword12(command, Operation::Copy)?;
        check_access_rights(entry, ReservationAccessKind::Read)?;
        check_access_rights(entry, ReservationAccessKind::Write)?;
        let device_limits = self.copy_limits(command.nsid());
        if count > u32::from(device_limits.ranges_max) {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        let copy = CopyJob::new(
            self.to_device_extent(entry, command.0[5], 0),
            (count, *range_bytes),
            (entry.block_count, entry.device_shift),
            device_limits,
            fua_and_lr_flags(command.cdw12())
                .union(self.write_request_flags(ReservationAccessKind::Write)),
            device_copies,
        );
        Ok(ExecutionPlan::Job(entry.channel, CommandJob::Copy(copy)))
    }

    fn supports_operation(&self, entry: FastPathNamespace, operation: Operation) -> bool {
        self.device_limits(entry).is_some_and(|limits| limits.operations.has(operation))
    }

    fn namespace_durability(&self, entry: FastPathNamespace) -> Durability {
        self.device_limits(entry).map_or(Durability::VolatileCache, |limits| limits.durability)
    }

    fn device_limits(&self, entry: FastPathNamespace) -> Option<&tenmil_base::Limits> {
        self.namespace_table.limits(entry.channel)
    }

    fn copy_limits(&self, nsid: u32) -> CopyLimits {
        self.namespaces.get().get(nsid).map_or(CopyLimits::DEFAULT, |namespace| namespace.copy)
    }

    fn write_request_flags(&self, access: ReservationAccessKind) -> RequestFlags {
        if access == ReservationAccessKind::Write { self.write_flags } else { RequestFlags::NONE }
    }

    /// Converts a block range of the namespace to blocks of the block device.
    fn to_device_extent(&self, entry: FastPathNamespace, lba: u64, blocks: u32) -> CommandExtent {
        CommandExtent {
            lba: lba << entry.device_shift,
            blocks: blocks << entry.device_shift,
            shift: entry.block_shift - entry.device_shift,
            blocks_max: self.device_limits(entry).map_or(0, |limits| limits.request_blocks_max),
        }
    }
}

/// A plan with one request; the token is set when a slot is allocated.
fn plan_single_request(
    channel: u16,
    operation: Operation,
    flags: RequestFlags,
    (lba, blocks): (u64, u32),
) -> ExecutionPlan {
    let request = Request {
        token: 0,
        lba,
        operand: 0,
        blocks,
        segment_first: 0,
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags,
    };
    ExecutionPlan::Single(channel, request)
}

/// Rejects dword 12 fields for unsupported features: protection information and directives.
fn check_dword12(command: &Command, operation: Operation) -> Result<(), Status> {
    if command.cdw12() & PRACT != 0 && operation != Operation::WriteUncorrectable {
        return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
    }
    let may_be_directed = matches!(
        operation,
        Operation::Write | Operation::Copy | Operation::WriteZeroes | Operation::WriteUncorrectable
    );
    if may_be_directed && command.cdw12() & DTYPE != 0 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok(())
}

fn check_access_rights(
    entry: FastPathNamespace,
    access: ReservationAccessKind,
) -> Result<(), Status> {
    let conflict =
        if access == ReservationAccessKind::Read { READ_CONFLICT } else { WRITE_CONFLICT };
    if access == ReservationAccessKind::Write && entry.rights & WRITE_PROTECTED != 0 {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
    }
    if entry.rights & conflict != 0 {
        return Err(Status::RESERVATION_CONFLICT.with_dnr());
    }
    Ok(())
}

/// Checks and decodes SLBA and NLB; NLB is 0's based.
fn check_lba_range(entry: FastPathNamespace, command: &Command) -> Result<(u64, u32), Status> {
    let (lba, blocks) = (command.0[5], (command.cdw12() & 0xffff) + 1);
    let end = lba.checked_add(blocks.into());
    if end.is_none_or(|end| end > entry.block_count) {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    }
    Ok((lba, blocks))
}
