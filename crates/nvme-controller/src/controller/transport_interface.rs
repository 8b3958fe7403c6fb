//! Interface between a controller and the transport in front of it.
//!
//! ```text
//!   transport                                     Controller
//!      │  data(&command)                              │  data length and direction
//!      │─────────────────────────────────────────────▶│
//!      │  execute(now, &command, &mut bytes)          │  data from or for the host
//!      │─────────────────────────────────────────────▶│
//!      │◀───────────────────────────── AdminOutcome ──│
//!      │  turn(now)                                   │  timers, long commands, updates
//!      │─────────────────────────────────────────────▶│
//!      │◀── next_done · next_event · next_signal ─────│
//!      │◀── next_decided ─────────────────────────────│  deferred reservation commands
//! ```
//!
//! The transport moves data, owns the queues, posts completions, and keeps the identifiers of outstanding
//! Asynchronous Event Requests. Every completion with an error status, of an admin or an I/O command and
//! regardless of where the error was found, is reported once to
//! [`Controller::record_error_completion`](super::Controller::record_error_completion), which feeds the error log.

use tenmil_base::{IoStats, Operation, Span};
use tenmil_wire::Status;
use tenmil_wire::admin::CrossControllerReset;

use crate::controller::PreemptedWriterGuard;

/// Data length and direction of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminDataTransfer {
    /// No data: the data pointer is ignored.
    None,
    /// Bytes to read from the host before the command executes.
    FromHost(u32),
    /// Bytes to write to the host if the command succeeds.
    ToHost(u32),
}

/// Result of executing an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOutcome {
    /// The command has completed.
    Done(AdminResult),
    /// The transport creates a completion queue, or rejects the command.
    CreateCompletionQueue(CreateCompletionQueue),
    /// The transport creates a submission queue, or rejects the command.
    CreateSubmissionQueue(CreateSubmissionQueue),
    /// The transport deletes this submission queue after its commands are completed or aborted.
    DeleteSubmissionQueue {
        /// Submission queue identifier.
        sqid: u16,
    },
    /// The transport deletes this completion queue unless a submission queue still uses it.
    DeleteCompletionQueue {
        /// Completion queue identifier.
        cqid: u16,
    },
    /// The transport reads doorbells from `shadow` from now on and maintains the event indices.
    DoorbellBuffers {
        /// IOVA of the shadow doorbells; page-aligned.
        shadow: u64,
        /// IOVA of the event indices; page-aligned.
        event_index: u64,
    },
    /// The transport tries to abort this command, completes the Abort command with bit 0 of the result
    /// set if that failed, and calls [`Controller::note_abort_completed`](super::Controller::note_abort_completed). A
    /// command of the admin queue (`sqid` 0) may be an outstanding Asynchronous Event Request, which the
    /// transport completes before it calls
    /// [`Controller::note_event_request_aborted`](super::Controller::note_event_request_aborted).
    Abort {
        /// Submission queue of the command.
        sqid: u16,
        /// Identifier of the command.
        cid: u16,
    },
    /// The Asynchronous Event Request is outstanding: the transport keeps its identifier and completes
    /// requests, oldest first, with the results of
    /// [`Controller::next_async_event_dword0`](super::Controller::next_async_event_dword0).
    AsyncEvent,
    /// The transport has another controller of the subsystem reset, and completes the command, with bit 0
    /// of the result set, when that controller has terminated.
    Reset(CrossControllerReset),
    /// The command completes later, through [`Controller::next_deferred_completion`](super::Controller::next_deferred_completion).
    Deferred,
}

/// Status and dword 0 of an admin completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminResult {
    /// Status.
    pub status: Status,
    /// Dword 0.
    pub result: u32,
}

impl AdminResult {
    /// Success with dword 0 zero.
    pub const OK: Self = Self { status: Status::SUCCESS, result: 0 };

    /// Success with this dword 0.
    pub const fn success_with(result: u32) -> Self {
        Self { status: Status::SUCCESS, result }
    }

    /// Failure with this status.
    pub const fn failure(status: Status) -> Self {
        Self { status, result: 0 }
    }
}

/// Completion of a command for which [`AdminOutcome::Deferred`] was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminCompletion {
    /// Command identifier on the admin queue.
    pub cid: u16,
    /// Result.
    pub end: AdminResult,
}

/// I/O queue and command of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCommandId {
    /// I/O queue identifier.
    pub queue: u16,
    /// Ticket of the command for
    /// [`Queue::complete_reservation_command`](crate::queue::Queue::complete_reservation_command).
    pub ticket: u32,
}

/// Completion of a deferred reservation command. It has no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationCompletion {
    /// Queue and command.
    pub from: QueueCommandId,
    /// Result.
    pub end: AdminResult,
}

/// Create I/O Completion Queue command whose fields are in range (Base 2.1 §5.2.1).
///
/// The transport still checks that the identifier is free and that the memory exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateCompletionQueue {
    /// Identifier: 1 to the number of queues granted.
    pub cqid: u16,
    /// Number of entries: 2 to the limit.
    pub entries: u32,
    /// IOVA of the first entry; page-aligned.
    pub address: u64,
    /// Interrupt vector, if interrupts are enabled.
    pub vector: Option<u16>,
}

/// Create I/O Submission Queue command whose fields are in range (Base 2.1 §5.2.2).
///
/// The transport still checks that the identifier is free and that the completion queue exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateSubmissionQueue {
    /// Identifier: 1 to the number of queues granted.
    pub sqid: u16,
    /// Number of entries: 2 to the limit.
    pub entries: u32,
    /// IOVA of the first entry; page-aligned.
    pub address: u64,
    /// Completion queue: 1 to the number of queues granted.
    pub cqid: u16,
    /// Priority class for weighted round robin; ignored under round robin.
    pub priority: Priority,
}

/// Priority class of a submission queue (Base 2.1 §3.4.4.2).
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

/// Action for the transport that is not the result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportAction {
    /// The host was silent for its keep-alive timeout. A memory-based transport sets CSTS.CFS; a fabrics
    /// transport ends the association (Base 2.1 §3.9).
    KeepAliveExpired,
    /// Another host has preempted this host's reservation with abort: outstanding commands of this
    /// namespace fail with Command Aborted due to Preempt and Abort.
    AbortNamespace {
        /// Namespace identifier.
        nsid: u32,
        /// To be given to every I/O queue: the preemption completes when their writes have completed.
        preempted: PreemptedWriterGuard,
    },
    /// Every I/O queue is to check whether the writes that preemptions wait for have completed:
    /// [`Queue::poll_preempted_writes`](crate::queue::Queue::poll_preempted_writes).
    CheckPreempted,
    /// A change requested by this host could not be made durable, or a preemption could not abort all
    /// commands; its command has failed.
    PersistFailed {
        /// Reason, as one line.
        why: String,
    },
}

/// Completion with an error status, for the error log (Base 2.1 §5.1.12.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorReport {
    /// Submission queue, or FFFFh if no command caused the error.
    pub sqid: u16,
    /// Command identifier, or FFFFh if no command caused the error.
    pub cid: u16,
    /// Opcode; meaningless without a command.
    pub opcode: u8,
    /// Status of the completion.
    pub status: Status,
    /// First block with the error, or 0.
    pub lba: u64,
    /// Namespace identifier, or 0.
    pub nsid: u32,
}

/// Invalid doorbell write (Base 2.1 §5.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidDoorbell {
    /// The queue does not exist.
    Register,
    /// The value is outside the queue, or would overfill it.
    Value,
}

/// I/O totals of queues, for the SMART log. The transport reports them at the latest before a Get Log Page
/// command executes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoTotals {
    /// Bytes read from block devices by Read, Compare and Verify commands.
    pub read_bytes: u64,
    /// Bytes written to block devices by Write commands.
    pub written_bytes: u64,
    /// Completed Read and Compare commands.
    pub read_commands: u64,
    /// Completed Write commands.
    pub write_commands: u64,
    /// Time during which at least one I/O command was outstanding.
    pub busy: Span,
}

impl IoTotals {
    /// Totals of the commands that were counted.
    pub(crate) fn of_stats(stats: &IoStats) -> Self {
        let [read, write, compare, verify] =
            [Operation::Read, Operation::Write, Operation::Compare, Operation::Verify]
                .map(|operation| stats.operation_stats(operation));
        Self {
            read_bytes: read.bytes + compare.bytes + verify.bytes,
            written_bytes: write.bytes,
            read_commands: read.count + read.errors + compare.count + compare.errors,
            write_commands: write.count + write.errors,
            busy: stats.busy,
        }
    }

    /// Adds other totals.
    pub(crate) const fn add(&mut self, more: &Self) {
        self.read_bytes = self.read_bytes.saturating_add(more.read_bytes);
        self.written_bytes = self.written_bytes.saturating_add(more.written_bytes);
        self.read_commands = self.read_commands.saturating_add(more.read_commands);
        self.write_commands = self.write_commands.saturating_add(more.write_commands);
        self.busy.ns = self.busy.ns.saturating_add(more.busy.ns);
    }

    /// What was added since `before`.
    pub(crate) const fn since(&self, before: &Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
            read_commands: self.read_commands.saturating_sub(before.read_commands),
            write_commands: self.write_commands.saturating_sub(before.write_commands),
            busy: Span { ns: self.busy.ns.saturating_sub(before.busy.ns) },
        }
    }
}

/// Arbitration of submission queues (Base 2.1 §5.1.25.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arbitration {
    /// Maximum commands fetched from one queue at a time; `None` means no limit.
    pub burst: Option<u8>,
    /// Commands of low priority per round: 1 to 256.
    pub low_weight: u16,
    /// Commands of medium priority per round.
    pub medium_weight: u16,
    /// Commands of high priority per round.
    pub high_weight: u16,
}

/// Interrupt coalescing of I/O queues (NVMe over PCIe 1.1, Base 2.1 §5.1.25.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoQueueCoalescing {
    /// Longest delay of an interrupt; zero disables coalescing.
    pub time: Span,
    /// Number of completions that triggers the interrupt: 1 to 256; 1 means at once.
    pub threshold: u16,
}
