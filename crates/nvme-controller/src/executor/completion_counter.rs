//! Counts the completed commands of one channel in runs: successive ones of one kind and size that began
//! in the same iteration are one update.

use tenmil_base::{Instant, IoCounters, Operation};
use tenmil_wire::{IoOpcode, Status};

use super::slot_table::Slot;

/// Time at which a command began, in units that fit the slot. It is equal for the commands of an
/// iteration, and goes round after 9 minutes: a command that takes longer is counted as faster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StartTime(pub(super) u32);

/// Nanoseconds per unit of [`StartTime`], as a power of two.
const UNIT_SHIFT: u32 = 7;

/// Counters of one channel, while completions of one poll are handled.
#[derive(Clone, Copy)]
pub(crate) struct CompletionCounter<'a> {
    pub(super) counters: &'a IoCounters,
    pub(super) block_shift: u8,
    pub(super) now: StartTime,
}

/// What a loop that frees slots counts.
pub(crate) trait CountReleases {
    /// Counts a successful command with this kind and these details ([`Slot`]).
    fn count(&mut self, kind: u16, details: u64);

    /// Ends the loop.
    fn finish(self);
}

/// Counts nothing.
pub(crate) struct NotCounted;

/// Counts runs.
pub(crate) struct CountedRuns<'a> {
    counter: CompletionCounter<'a>,
    kind: u16,
    details: u64,
    count: u32,
}

impl StartTime {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "it goes round")]
    pub(super) const fn new(now: Instant) -> Self {
        Self((now.ns >> UNIT_SHIFT) as u32)
    }

    /// Nanoseconds from `self` to `end`.
    #[inline]
    fn ns_until(self, end: Self) -> u64 {
        u64::from(end.0.wrapping_sub(self.0)) << UNIT_SHIFT
    }
}

impl<'a> CompletionCounter<'a> {
    #[inline]
    pub(crate) fn runs(self) -> CountedRuns<'a> {
        CountedRuns { counter: self, kind: 0, details: 0, count: 0 }
    }

    /// Counts one command.
    pub(super) fn count_command(self, slot: &Slot, status: Status) {
        let Some(operation) = operation_of_opcode(slot.opcode()) else { return };
        if status.is_success() {
            self.count_alike(operation, slot.details(), 1);
        } else {
            let status = tenmil_base::IoStatus(status.without_crd_more_dnr().0);
            self.counters.count_failure(operation as usize, status);
        }
    }

    #[inline]
    fn count_run(self, opcode: u8, details: u64, count: u32) {
        if let Some(operation) = operation_of_opcode(opcode) {
            self.count_alike(operation, details, count);
        }
    }

    #[inline]
    fn count_alike(self, operation: Operation, details: u64, count: u32) {
        let blocks = if has_blocks(operation) { u64::from(Slot::blocks_of(details)) } else { 0 };
        let took_ns = Slot::start_of(details).ns_until(self.now);
        let bytes = (blocks << self.block_shift) * u64::from(count);
        self.counters.count_success(operation as usize, count.into(), bytes, took_ns);
    }
}

impl CountReleases for NotCounted {
    #[inline(always)]
    fn count(&mut self, _: u16, _: u64) {}

    #[inline(always)]
    fn finish(self) {}
}

impl CountReleases for CountedRuns<'_> {
    #[inline(always)]
    fn count(&mut self, kind: u16, details: u64) {
        if kind != self.kind || details != self.details {
            self.start_run(kind, details);
        }
        self.count += 1;
    }

    #[inline(always)]
    fn finish(self) {
        if self.count > 0 {
            self.count_last_run();
        }
    }
}

impl CountedRuns<'_> {
    #[inline(never)]
    fn start_run(&mut self, kind: u16, details: u64) {
        if self.count > 0 {
            self.count_last_run();
        }
        (self.kind, self.details, self.count) = (kind, details, 0);
    }

    #[inline(never)]
    fn count_last_run(&self) {
        let [opcode, _] = self.kind.to_le_bytes();
        self.counter.count_run(opcode, self.details, self.count);
    }
}

/// Operation as which commands with an opcode are counted; `None` for reservations and unknown ones.
#[inline]
fn operation_of_opcode(opcode: u8) -> Option<Operation> {
    OPERATIONS[usize::from(opcode)]
}

/// By opcode.
const OPERATIONS: [Option<Operation>; 256] = {
    let mut operations = [None; 256];
    let mut opcode = 0;
    while opcode < operations.len() {
        #[expect(clippy::cast_possible_truncation, reason = "the index of an opcode")]
        let byte = opcode as u8;
        operations[opcode] = find_operation(byte);
        opcode += 1;
    }
    operations
};

const fn find_operation(opcode: u8) -> Option<Operation> {
    Some(match IoOpcode::from_u8(opcode) {
        Some(IoOpcode::Read) => Operation::Read,
        Some(IoOpcode::Write) => Operation::Write,
        Some(IoOpcode::Flush) => Operation::Flush,
        Some(IoOpcode::DatasetManagement) => Operation::Deallocate,
        Some(IoOpcode::WriteZeroes) => Operation::WriteZeroes,
        Some(IoOpcode::Compare) => Operation::Compare,
        Some(IoOpcode::WriteUncorrectable) => Operation::WriteUncorrectable,
        Some(IoOpcode::Verify) => Operation::Verify,
        Some(IoOpcode::Copy) => Operation::Copy,
        _ => return None,
    })
}

/// Whether dword 12 of its commands has a number of blocks.
const fn has_blocks(operation: Operation) -> bool {
    !matches!(operation, Operation::Flush | Operation::Deallocate | Operation::Copy)
}
