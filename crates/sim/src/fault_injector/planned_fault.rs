//! Faults as data: kind, target, trigger and count.

use tenmil_base::{Instant, Span};

/// One planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFault {
    /// Kind of fault.
    pub fault: Fault,
    /// Commands it applies to.
    pub target: FaultTarget,
    /// Trigger that arms it.
    pub gate: FaultTrigger,
    /// Number of opportunities to skip first.
    pub skip: u32,
    /// Number of times it is injected after that.
    pub times: u32,
}

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A register read has some bits replaced.
    Register {
        /// Register offset.
        offset: u32,
        /// Replaced bits.
        mask: u64,
        /// New value of those bits.
        bits: u64,
    },
    /// The device is removed: it does nothing any more, and registers read as all ones.
    Gone,
    /// Registers read as all ones and ignore writes, while the device continues to run and to
    /// access memory.
    Masked,
    /// A completion is posted twice.
    Duplicate,
    /// A completion for no command is posted before the real one.
    Bogus(BogusCid),
    /// A completion is posted with the inverted Phase Tag.
    WrongPhase,
    /// A completion is never posted.
    Drop,
    /// A completion is held back.
    Hold(ReleaseTrigger),
    /// A completion has this status. `FFFFh` selects a random one each time.
    Status(u16),
    /// A completion has this dword 0.
    Result(u32),
    /// SQHD is ahead of the real head by this number.
    Head(u16),
    /// A completion has another SQID.
    QueueId(u16),
    /// The reserved dword of a completion is not zero.
    Reserved,
    /// A whole ring of copies of a completion is posted at once.
    Flood,
    /// A command is completed at once without being executed. For Asynchronous Event Requests.
    Event {
        /// Dword 0.
        result: u32,
        /// Status.
        status: u16,
    },
    /// A data structure is corrupted on its way to the host.
    CorruptData(DataCorruption),
    /// The device performs an unsolicited memory access.
    Dma(DmaFault),
    /// A spurious interrupt is signaled.
    Interrupt {
        /// Interrupt vector.
        vector: u16,
    },
}

/// Command identifier of a bogus completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BogusCid {
    /// An identifier out of range.
    Outside,
    /// The identifier of a completed command.
    Ended,
    /// The identifier of another command that is still being executed.
    InFlight,
}

/// Condition under which a held completion is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseTrigger {
    /// After this time.
    After(Span),
    /// After an Abort of its command has completed.
    Aborted,
    /// After a reset, when its queue exists again: a completion for a command of the previous
    /// session.
    Reset,
}

/// Corruption of a data structure. The structure is selected by the opcode of the target and by
/// `page`: CNS of Identify, LID of Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataCorruption {
    /// CNS or LID. `None` for all.
    pub page: Option<u8>,
    /// Method.
    pub how: CorruptionMethod,
}

/// Method of corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorruptionMethod {
    /// Random bytes.
    Random,
    /// All bytes have this value.
    Fill(u8),
    /// Replaces bits in the eight bytes from `offset`.
    Poke {
        /// Offset.
        offset: u16,
        /// Replaced bits.
        mask: u64,
        /// New value of those bits, little-endian.
        bits: u64,
    },
    /// Dwords that count up from this number: a list without an end.
    Count(u32),
}

/// Unsolicited memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaFault {
    /// Write to an address that was never mapped.
    StrayWrite,
    /// Read from an address that was never mapped.
    StrayRead,
    /// Random bytes in the completion ring of the first I/O queue.
    ScribbleRing,
    /// Random bytes in data buffers of earlier commands.
    ScribbleBuffers,
}

/// Completions and data structures that a fault applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultTarget {
    /// Queues.
    pub queue: QueueKind,
    /// Opcode. `None` for all.
    pub opcode: Option<u8>,
}

/// Kind of queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// All queues.
    Any,
    /// Admin queue.
    Admin,
    /// I/O queues.
    Io,
}

/// Trigger that arms a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultTrigger {
    /// Armed from the start.
    Always,
    /// At this time.
    At(Instant),
    /// After this number of times that CC.EN was cleared.
    Disables(u32),
    /// After this number of times that CC.EN was set.
    Enables(u32),
    /// After this number of shutdown requests.
    Shutdowns(u32),
    /// After this number of I/O completions.
    IoCompletions(u32),
    /// After this number of admin completions.
    AdminCompletions(u32),
}

/// Unlimited count.
pub const FOR_GOOD: u32 = u32::MAX;

impl PlannedFault {
    /// Fault for all commands, from the start, without limit.
    pub const fn for_all_commands(fault: Fault) -> Self {
        let target = FaultTarget { queue: QueueKind::Any, opcode: None };
        Self { fault, target, gate: FaultTrigger::Always, skip: 0, times: FOR_GOOD }
    }

    /// Fault for the I/O queues.
    pub const fn for_io_queues(fault: Fault) -> Self {
        let target = FaultTarget { queue: QueueKind::Io, opcode: None };
        Self { target, ..Self::for_all_commands(fault) }
    }

    /// Fault for one admin opcode.
    pub const fn for_admin_opcode(opcode: tenmil_wire::AdminOpcode, fault: Fault) -> Self {
        let target = FaultTarget { queue: QueueKind::Admin, opcode: Some(opcode.code()) };
        Self { target, ..Self::for_all_commands(fault) }
    }

    /// Sets the trigger.
    #[must_use]
    pub const fn with_trigger(self, gate: FaultTrigger) -> Self {
        Self { gate, ..self }
    }

    /// Sets the number of opportunities to skip.
    #[must_use]
    pub const fn with_skip(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    /// Sets the count.
    #[must_use]
    pub const fn with_count(self, times: u32) -> Self {
        Self { times, ..self }
    }
}

/// Register faults by name.
pub mod lies {
    use super::Fault;
    use tenmil_wire::register::offset;

    const CAP: u32 = 0x00;
    const CSTS: u32 = 0x1c;
    const _: () = assert!(CAP as usize == offset::CAP && CSTS as usize == offset::CSTS);

    const fn register_fault(offset: u32, low: u32, width: u32, value: u64) -> Fault {
        let mask = (u64::MAX >> (64 - width)) << low;
        Fault::Register { offset, mask, bits: value << low }
    }

    /// CSTS.RDY reads as 0.
    pub const NEVER_READY: Fault = register_fault(CSTS, 0, 1, 0);
    /// CSTS.RDY reads as 1.
    pub const NEVER_NOT_READY: Fault = register_fault(CSTS, 0, 1, 1);
    /// CSTS.CFS reads as 1.
    pub const FATAL: Fault = register_fault(CSTS, 1, 1, 1);
    /// CSTS.SHST reads as "in progress".
    pub const SHUTDOWN_STUCK: Fault = register_fault(CSTS, 2, 2, 1);
    /// CSTS.SHST reads as the reserved value.
    pub const SHUTDOWN_RESERVED: Fault = register_fault(CSTS, 2, 2, 3);
    /// Reserved bits of CSTS read as 1.
    pub const STATUS_RESERVED: Fault = register_fault(CSTS, 7, 24, 0xff_ffff);
    /// CAP.MQES is 0: queues of one entry.
    pub const NO_ENTRIES: Fault = register_fault(CAP, 0, 16, 0);
    /// CAP.MQES is 1: queues of two entries, the minimum.
    pub const TWO_ENTRIES: Fault = register_fault(CAP, 0, 16, 1);
    /// CAP.TO is 0.
    pub const NO_TIME: Fault = register_fault(CAP, 24, 8, 0);
    /// CAP.DSTRD is 15: doorbells 128 KiB apart.
    pub const STRIDE_MAX: Fault = register_fault(CAP, 32, 4, 15);
    /// CAP.CSS is 0: no command set.
    pub const NO_COMMAND_SET: Fault = register_fault(CAP, 37, 8, 0);
    /// CAP.MPSMIN is 4: no page smaller than 64 KiB.
    pub const LARGE_PAGES: Fault = register_fault(CAP, 48, 8, 0x44);
    /// CAP.MPSMIN is above CAP.MPSMAX.
    pub const PAGES_BACKWARDS: Fault = register_fault(CAP, 48, 8, 0x03);
    /// CAP is 0.
    pub const CAP_ZERO: Fault = register_fault(CAP, 0, 64, 0);
    /// VS is 0.
    pub const VERSION_ZERO: Fault = register_fault(0x08, 0, 32, 0);
    /// VS is an unknown future version.
    pub const VERSION_HIGH: Fault = register_fault(0x08, 0, 32, 0x7fff_ff01);
    /// CRTO is 0.
    pub const CRTO_ZERO: Fault = register_fault(0x68, 0, 32, 0);
}

/// Data structure faults by name.
pub mod pokes {
    use super::{CorruptionMethod, DataCorruption, Fault};

    /// Replaces `width` bytes at `offset` of the Identify Controller data structure (CNS 01h).
    pub const fn identify_controller_fault(offset: u16, width: u32, value: u64) -> Fault {
        field_fault(0x01, offset, width, value)
    }

    /// Replaces `width` bytes at `offset` of the Identify Namespace data structure (CNS 00h).
    pub const fn identify_namespace_fault(offset: u16, width: u32, value: u64) -> Fault {
        field_fault(0x00, offset, width, value)
    }

    /// Fills a page with this byte.
    pub const fn page_fill_fault(page: Option<u8>, byte: u8) -> Fault {
        Fault::CorruptData(DataCorruption { page, how: CorruptionMethod::Fill(byte) })
    }

    /// Fills a page with random bytes.
    pub const fn page_random_fault(page: Option<u8>) -> Fault {
        Fault::CorruptData(DataCorruption { page, how: CorruptionMethod::Random })
    }

    /// Fills a page with dwords that count up.
    pub const fn page_counting_fault(page: u8, first: u32) -> Fault {
        Fault::CorruptData(DataCorruption { page: Some(page), how: CorruptionMethod::Count(first) })
    }

    const fn field_fault(page: u8, offset: u16, width: u32, value: u64) -> Fault {
        let mask = u64::MAX >> (64 - 8 * width);
        Fault::CorruptData(DataCorruption {
            page: Some(page),
            how: CorruptionMethod::Poke { offset, mask, bits: value },
        })
    }
}
