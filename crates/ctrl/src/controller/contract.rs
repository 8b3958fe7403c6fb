//! What passes between a controller and the transport in front of it.
//!
//! ```text
//!   front end                                     Controller
//!      │  data(&command)                              │  how many bytes, and which way
//!      │─────────────────────────────────────────────▶│
//!      │  execute(now, &command, &mut bytes)          │  bytes from the host, or for it
//!      │─────────────────────────────────────────────▶│
//!      │◀──────────────────────────────── AdminStep ──│
//!      │  turn(now)                                   │  timers, long commands, news of others
//!      │─────────────────────────────────────────────▶│
//!      │◀── next_done · next_event · next_signal ─────│
//!      │◀── next_decided ─────────────────────────────│  reservation commands that had to wait
//! ```
//!
//! The front end moves data, keeps queues, and writes completions; it also keeps the identifiers
//! of parked Asynchronous Event Requests. Every completion with an error status, of an admin or an
//! I/O command and whoever found the error, is told once to
//! [`Controller::report_error`](super::Controller::report_error), which feeds the error log.

use base::Span;
use wire::Status;
use wire::admin::CrossControllerReset;

use crate::controller::Preempted;

/// The data that goes with an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminData {
    /// None: the data pointer is not looked at.
    None,
    /// So many bytes are fetched from the host before the command executes.
    FromHost(u32),
    /// So many bytes go to the host if the command ends well.
    ToHost(u32),
}

/// What executing an admin command led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminStep {
    /// It ended.
    Done(AdminEnd),
    /// The front end creates a completion queue, or refuses with a status of its own.
    CreateCompletionQueue(CreateCompletionQueue),
    /// The front end creates a submission queue, or refuses with a status of its own.
    CreateSubmissionQueue(CreateSubmissionQueue),
    /// The front end deletes this submission queue; its commands are answered or aborted first.
    DeleteSubmissionQueue {
        /// Which.
        sqid: u16,
    },
    /// The front end deletes this completion queue unless a submission queue still feeds it.
    DeleteCompletionQueue {
        /// Which.
        cqid: u16,
    },
    /// From now on the host writes its doorbells to `shadow` and wants `event_index` kept.
    DoorbellBuffers {
        /// IOVA of the shadow doorbells; page-aligned.
        shadow: u64,
        /// IOVA of the event indices; page-aligned.
        event_index: u64,
    },
    /// The front end tries to abort this command and answers with bit 0 of the result set if it
    /// could not, then calls [`Controller::abort_ended`](super::Controller::abort_ended).
    /// A command of the admin queue (`sqid` 0) may be a parked event request, which the front end
    /// ends, calling
    /// [`Controller::event_request_aborted`](super::Controller::event_request_aborted).
    Abort {
        /// The submission queue it was submitted to.
        sqid: u16,
        /// Its identifier.
        cid: u16,
    },
    /// Parked: the front end keeps the identifier and completes it, oldest first, with each result
    /// of [`Controller::next_event`](super::Controller::next_event).
    AsyncEvent,
    /// The front end has another controller of the subsystem reset, and answers with bit 0 of the
    /// result set when nothing of it is left.
    Reset(CrossControllerReset),
    /// It takes longer: it ends through [`Controller::next_done`](super::Controller::next_done).
    Later,
}

/// How an admin command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminEnd {
    /// Its status.
    pub status: Status,
    /// Dword 0 of its completion.
    pub result: u32,
}

impl AdminEnd {
    /// It ended well, and there is nothing more to say.
    pub const OK: Self = Self { status: Status::SUCCESS, result: 0 };

    /// It ended well with this dword.
    pub const fn with(result: u32) -> Self {
        Self { status: Status::SUCCESS, result }
    }

    /// It was refused.
    pub const fn refused(status: Status) -> Self {
        Self { status, result: 0 }
    }
}

/// The end of a command that had answered [`AdminStep::Later`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminDone {
    /// Its identifier on the admin queue.
    pub cid: u16,
    /// How it ended.
    pub end: AdminEnd,
}

/// Which command of which I/O queue it is, as its front end knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The queue.
    pub queue: u16,
    /// The command, as [`Queue::decide`](crate::queue::Queue::decide) takes it.
    pub ticket: u32,
}

/// The end of a reservation command that had to wait. It brings no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Where it came from.
    pub from: Origin,
    /// How it ended.
    pub end: AdminEnd,
}

/// A Create I/O Completion Queue command whose fields are in range (Base 2.1 §5.2.1).
///
/// The front end still checks that the identifier is free and that the memory exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateCompletionQueue {
    /// Its identifier: 1 to the number of queues granted.
    pub cqid: u16,
    /// How many entries: 2 to the limit.
    pub entries: u32,
    /// IOVA of its first entry; page-aligned.
    pub address: u64,
    /// Which vector signals it, if interrupts are enabled.
    pub vector: Option<u16>,
}

/// A Create I/O Submission Queue command whose fields are in range (Base 2.1 §5.2.2).
///
/// The front end still checks that the identifier is free and that the completion queue exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateSubmissionQueue {
    /// Its identifier: 1 to the number of queues granted.
    pub sqid: u16,
    /// How many entries: 2 to the limit.
    pub entries: u32,
    /// IOVA of its first entry; page-aligned.
    pub address: u64,
    /// The completion queue it feeds: 1 to the number of queues granted.
    pub cqid: u16,
    /// Its class for weighted round robin; means nothing under plain round robin.
    pub priority: Priority,
}

/// The priority class of a submission queue (Base 2.1 §3.4.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Before all weighted classes.
    Urgent,
    /// Weighted high.
    High,
    /// Weighted medium.
    Medium,
    /// Weighted low.
    Low,
}

/// Something a front end has to act upon that is no answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The host has not been heard of for its keep-alive time-out. A memory front end sets
    /// CSTS.CFS; a fabrics transport ends the association (Base 2.1 §3.9).
    KeepAliveExpired,
    /// Another host has preempted this one's reservation and wants its commands aborted: end what
    /// is outstanding on this namespace with Command Aborted due to Preempted.
    AbortNamespace {
        /// Which namespace.
        nsid: u32,
        /// To be given to every I/O queue: the preemption ends when their media have answered.
        preempted: Preempted,
    },
    /// Every I/O queue is to look whether the media have answered what preemptions wait for:
    /// [`Queue::check_preempted`](crate::queue::Queue::check_preempted).
    CheckPreempted,
    /// A change that this host asked for could not be made durable, or a preemption could not abort all
    /// commands; its command has failed.
    NotKept {
        /// Why, in a line.
        why: String,
    },
}

/// A completion with an error status, for the error log (Base 2.1 §5.1.12.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorReport {
    /// The submission queue, or FFFFh if no command is to blame.
    pub sqid: u16,
    /// The command, or FFFFh if no command is to blame.
    pub cid: u16,
    /// Its opcode; means nothing without a command.
    pub opcode: u8,
    /// The status it was answered with.
    pub status: Status,
    /// The first block that had the error, or 0.
    pub lba: u64,
    /// The namespace, or 0.
    pub nsid: u32,
}

/// A doorbell write that cannot be (Base 2.1 §5.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidDoorbell {
    /// To a queue that does not exist.
    Register,
    /// Of a value outside the queue, or one that would overfill it.
    Value,
}

/// What I/O queues have done since they last told, for the SMART log. The front end adds it up and
/// hands it over when it likes, at the latest before a Get Log Page command executes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that read, compare and verify commands took from media.
    pub read_bytes: u64,
    /// Bytes that write commands put on media.
    pub written_bytes: u64,
    /// Read and compare commands ended.
    pub read_commands: u64,
    /// Write commands ended.
    pub write_commands: u64,
    /// Time during which at least one I/O command was outstanding.
    pub busy: Span,
}

/// How submission queues are served (Base 2.1 §5.1.25.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arbitration {
    /// Commands that may be taken from one queue at a time; `None` is no limit.
    pub burst: Option<u8>,
    /// Commands of low priority per round: 1 to 256.
    pub low_weight: u16,
    /// Commands of medium priority per round.
    pub medium_weight: u16,
    /// Commands of high priority per round.
    pub high_weight: u16,
}

/// When completions of I/O queues are signalled (NVMe over PCIe 1.1, Base 2.1 §5.1.25.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalescing {
    /// How long an interrupt may be held back; zero means not at all.
    pub time: Span,
    /// After so many completions it is signalled anyway: 1 to 256; 1 means at once.
    pub threshold: u16,
}
