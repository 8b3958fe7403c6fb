//! Link between an association and the connection of one of its I/O queues.

use core::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tenmil_base::{Instant, Mailbox};

use crate::controller::transport_interface::AdminResult;
use crate::controller::{PreemptedWriterGuard, WakeFn};

/// Link between an association and one of its I/O queues.
#[derive(Default)]
pub struct QueueLink {
    /// Time when the queue last fetched commands, in nanoseconds.
    activity_ns: AtomicU64,
    /// The connection is closed or closing.
    is_ending: AtomicBool,
    /// Commands to the connection, oldest first.
    commands: Mailbox<Vec<QueueCommand>>,
}

/// Instruction from an association to an I/O queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueCommand {
    /// Stop, release everything, close the connection.
    Stop,
    /// Poll the queue once, even if it is idle: another queue of the subsystem waits for it, or the
    /// namespaces have changed, or a preemption, for which [`Executor::poll_preempted_writes`](crate::executor::Executor::poll_preempted_writes) is
    /// called.
    Poll,
    /// Try to abort a command; completed through
    /// [`FabricsTransport::handle_abort_result`](super::FabricsTransport::handle_abort_result).
    Abort {
        /// Host's identifier of the command.
        cid: u16,
        /// Returned with the result.
        admin_cid: u16,
    },
    /// Abort the outstanding commands of a namespace.
    AbortNamespace {
        /// Namespace identifier.
        nsid: u32,
        /// For [`Executor::abort_namespace`](crate::executor::Executor::abort_namespace).
        preempted: PreemptedWriterGuard,
    },
    /// Result of a deferred reservation command, for
    /// [`Executor::complete_reservation_command`](crate::executor::Executor::complete_reservation_command), without data.
    CompleteReservation {
        /// Ticket of the [`QueueEvent::Reservation`](crate::queue::QueueEvent::Reservation).
        ticket: u32,
        /// Result of the command.
        end: AdminResult,
    },
}

impl QueueLink {
    /// Sets the callback that wakes the connection's thread for a command.
    pub fn set_waker(&self, waker: WakeFn) {
        self.commands.set_waker(Arc::new(move || waker()));
    }

    /// Records that the queue has fetched commands.
    #[inline]
    pub fn note_activity(&self, now: Instant) {
        // A single value that orders no other memory access.
        self.activity_ns.store(now.ns, Ordering::Relaxed);
    }

    /// Records that the queue fetches no more commands and is removed once its commands have completed.
    pub fn set_ending(&self) {
        // Pairs with the acquire load below: the loader sees writes to the block devices as fenced.
        self.is_ending.store(true, Ordering::Release);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Whether commands are pending.
    #[inline]
    pub fn has_commands(&self) -> bool {
        self.commands.is_pending()
    }

    /// Removes and returns the pending commands, oldest first.
    pub fn take_commands(&self) -> Vec<QueueCommand> {
        self.commands.take().unwrap_or_default()
    }

    pub(super) fn last_activity(&self) -> Instant {
        Instant { ns: self.activity_ns.load(Ordering::Relaxed) }
    }

    pub(super) fn send_command(&self, command: QueueCommand) {
        self.commands.send(|commands| {
            if !commands.contains(&command) {
                commands.push(command);
            }
        });
    }
}

impl fmt::Debug for QueueLink {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("QueueLink").field("commands", &self.commands).finish_non_exhaustive()
    }
}
