//! The faults there are, as data: what, where, when, how often.

use base::{Instant, Span};

/// One planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mischief {
    /// What goes wrong.
    pub fault: Fault,
    /// For whom.
    pub target: Target,
    /// From when on.
    pub gate: Gate,
    /// Occasions that are let pass first.
    pub skip: u32,
    /// Occasions that are used then.
    pub times: u32,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A register reads with some bits replaced.
    Register {
        /// Which.
        offset: u32,
        /// The bits that are replaced.
        mask: u64,
        /// By what.
        bits: u64,
    },
    /// The device is unplugged: it does nothing more, and registers read as all ones.
    Gone,
    /// Registers read as all ones and swallow what is written, while the device behind them goes
    /// on, and goes on touching memory.
    Masked,
    /// A completion is posted twice.
    Duplicate,
    /// A completion that answers nothing is posted before the real one.
    Invent(Invented),
    /// A completion is posted with the phase of the lap before.
    WrongPhase,
    /// A completion is never posted.
    Swallow,
    /// A completion is held back.
    Hold(Release),
    /// A completion carries this status. One of `FFFFh` draws a random one each time.
    Status(u16),
    /// A completion carries this in dword 0.
    Result(u32),
    /// A completion says that the submission queue has been read this much further than it has.
    Head(u16),
    /// A completion names another submission queue.
    QueueId(u16),
    /// The reserved dword of a completion is not zero.
    Reserved,
    /// A ring full of old completions is posted at once.
    Flood,
    /// A command is answered at once, whatever it was, with this: for requests that wait for
    /// something to happen.
    Event {
        /// Dword 0.
        result: u32,
        /// The status.
        status: u16,
    },
    /// A data structure is falsified on its way to the host.
    Forge(Forgery),
    /// The device accesses memory that nobody asked it to.
    Dma(DmaFault),
    /// A vector is signalled for no reason.
    Interrupt {
        /// Which.
        vector: u16,
    },
}

/// What a completion that answers nothing names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invented {
    /// An identifier that no command of this queue can have.
    Outside,
    /// The identifier of a command that has ended.
    Ended,
    /// The identifier of another command in flight, which the device is not done with.
    InFlight,
}

/// Until when a completion is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// For so long.
    After(Span),
    /// Until an Abort for its command has been answered.
    Aborted,
    /// Until the controller has been reset and its queue exists again: a voice from the grave.
    Reset,
}

/// How a data structure is falsified. Which one it is says the target's opcode, together with
/// `page`: CNS of Identify, LID of Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgery {
    /// CNS or LID; `None` for all.
    pub page: Option<u8>,
    /// What happens to the bytes.
    pub how: How,
}

/// What happens to the bytes of a data structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Each is random.
    Random,
    /// All are this.
    Fill(u8),
    /// The eight from `offset` are replaced, as far as `mask` goes.
    Poke {
        /// Where.
        offset: u16,
        /// The bits that are replaced.
        mask: u64,
        /// By what, little endian.
        bits: u64,
    },
    /// The dwords count up from this number: a list without an end.
    Count(u32),
}

/// An access that nobody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaFault {
    /// Writes to an address that was never mapped.
    StrayWrite,
    /// Reads from an address that was never mapped.
    StrayRead,
    /// Fills the completion ring of the first I/O queue with noise.
    ScribbleRing,
    /// Writes noise where data of earlier commands was.
    ScribbleBuffers,
}

/// Which completions and data structures a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// On which queues.
    pub queue: QueueKind,
    /// Of which commands.
    pub opcode: Option<u8>,
}

/// Kinds of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// All.
    Any,
    /// The admin queue.
    Admin,
    /// I/O queues.
    Io,
}

/// When a fault's time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// From the start.
    Always,
    /// From this time on.
    At(Instant),
    /// Once CC.EN has been cleared so often.
    Disables(u32),
    /// Once CC.EN has been set so often.
    Enables(u32),
    /// Once a shutdown has been asked for so often.
    Shutdowns(u32),
    /// Once so many I/O commands have been completed.
    IoCompletions(u32),
    /// Once so many admin commands have been completed.
    AdminCompletions(u32),
}

/// For good.
pub const FOR_GOOD: u32 = u32::MAX;

impl Mischief {
    /// From the start, everywhere, for good.
    pub const fn always(fault: Fault) -> Self {
        let target = Target { queue: QueueKind::Any, opcode: None };
        Self { fault, target, gate: Gate::Always, skip: 0, times: FOR_GOOD }
    }

    /// On the I/O queues.
    pub const fn io(fault: Fault) -> Self {
        let target = Target { queue: QueueKind::Io, opcode: None };
        Self { target, ..Self::always(fault) }
    }

    /// To one kind of admin command.
    pub const fn admin(opcode: wire::AdminOpcode, fault: Fault) -> Self {
        let target = Target { queue: QueueKind::Admin, opcode: Some(opcode.code()) };
        Self { target, ..Self::always(fault) }
    }

    /// From then on.
    #[must_use]
    pub const fn gate(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Not before so many occasions have passed.
    #[must_use]
    pub const fn skip(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    /// So often.
    #[must_use]
    pub const fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }
}

/// Registers that lie, by name.
pub mod lies {
    use super::Fault;
    use wire::register::offset;

    const CAP: u32 = 0x00;
    const CSTS: u32 = 0x1c;
    const _: () = assert!(CAP as usize == offset::CAP && CSTS as usize == offset::CSTS);

    const fn register(offset: u32, low: u32, width: u32, value: u64) -> Fault {
        let mask = (u64::MAX >> (64 - width)) << low;
        Fault::Register { offset, mask, bits: value << low }
    }

    /// CSTS.RDY reads as 0.
    pub const NEVER_READY: Fault = register(CSTS, 0, 1, 0);
    /// CSTS.RDY reads as 1.
    pub const NEVER_NOT_READY: Fault = register(CSTS, 0, 1, 1);
    /// CSTS.CFS reads as 1.
    pub const FATAL: Fault = register(CSTS, 1, 1, 1);
    /// CSTS.SHST reads as "in progress".
    pub const SHUTDOWN_STUCK: Fault = register(CSTS, 2, 2, 1);
    /// CSTS.SHST reads as the reserved value.
    pub const SHUTDOWN_RESERVED: Fault = register(CSTS, 2, 2, 3);
    /// CSTS: bits that are reserved read as 1.
    pub const STATUS_RESERVED: Fault = register(CSTS, 7, 24, 0xff_ffff);
    /// CAP.MQES is 0: queues of one entry.
    pub const NO_ENTRIES: Fault = register(CAP, 0, 16, 0);
    /// CAP.MQES is 1: queues of two entries, the least that is allowed.
    pub const TWO_ENTRIES: Fault = register(CAP, 0, 16, 1);
    /// CAP.TO is 0.
    pub const NO_TIME: Fault = register(CAP, 24, 8, 0);
    /// CAP.DSTRD is 15: doorbells 128 KiB apart.
    pub const STRIDE_MAX: Fault = register(CAP, 32, 4, 15);
    /// CAP.CSS is 0: no command set at all.
    pub const NO_COMMAND_SET: Fault = register(CAP, 37, 8, 0);
    /// CAP.MPSMIN is 4: no page smaller than 64 KiB.
    pub const LARGE_PAGES: Fault = register(CAP, 48, 8, 0x44);
    /// CAP.MPSMIN is above CAP.MPSMAX.
    pub const PAGES_BACKWARDS: Fault = register(CAP, 48, 8, 0x03);
    /// CAP is 0.
    pub const CAP_ZERO: Fault = register(CAP, 0, 64, 0);
    /// VS is 0.
    pub const VERSION_ZERO: Fault = register(0x08, 0, 32, 0);
    /// VS is from the far future.
    pub const VERSION_HIGH: Fault = register(0x08, 0, 32, 0x7fff_ff01);
    /// CRTO is 0.
    pub const CRTO_ZERO: Fault = register(0x68, 0, 32, 0);
}

/// Fields of data structures that lie, by name.
pub mod pokes {
    use super::{Fault, Forgery, How};

    /// Of the Identify Controller data structure (CNS 01h), `width` bytes at `offset`.
    pub const fn controller(offset: u16, width: u32, value: u64) -> Fault {
        poke(0x01, offset, width, value)
    }

    /// Of the Identify Namespace data structure (CNS 00h).
    pub const fn namespace(offset: u16, width: u32, value: u64) -> Fault {
        poke(0x00, offset, width, value)
    }

    /// All of a page is this byte.
    pub const fn fill(page: Option<u8>, byte: u8) -> Fault {
        Fault::Forge(Forgery { page, how: How::Fill(byte) })
    }

    /// All of a page is noise.
    pub const fn noise(page: Option<u8>) -> Fault {
        Fault::Forge(Forgery { page, how: How::Random })
    }

    /// A page of dwords that count up.
    pub const fn count(page: u8, first: u32) -> Fault {
        Fault::Forge(Forgery { page: Some(page), how: How::Count(first) })
    }

    const fn poke(page: u8, offset: u16, width: u32, value: u64) -> Fault {
        let mask = u64::MAX >> (64 - 8 * width);
        Fault::Forge(Forgery { page: Some(page), how: How::Poke { offset, mask, bits: value } })
    }
}
