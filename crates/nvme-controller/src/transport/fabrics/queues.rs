//! I/O queues of an association: created for a connection, controlled by events and commands, removed
//! with the connection.

use std::sync::Arc;

use tenmil_base::Instant;
use tenmil_wire::register::CommandSetSelected;

use super::{FabricsTransport, QueueCommand, QueueLink};
use crate::bounce_pool::BouncePool;
use crate::controller::transport_interface::{AdminResult, QueueCommandId};
use crate::executor::{Executor, ExecutorConfig, ExecutorContext, SegmentMemory};
use crate::io_stats::QueueIoStats;
use crate::queue::QueueEvent;

/// Parameters of an I/O queue.
#[derive(Clone, Copy, Debug)]
pub struct FabricsQueueParams {
    /// Identifier of the submission and of the completion queue.
    pub qid: u16,
    /// Maximum commands in flight.
    pub in_flight_max: u16,
    /// Of these, commands that need more than one block-device request.
    pub contexts_max: u16,
}

/// Result of a reservation command, for [`Executor::complete_reservation_command`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationReply {
    /// Ticket of the [`QueueEvent::Reservation`].
    pub ticket: u32,
    /// Result of the command.
    pub end: AdminResult,
    /// Data of a report.
    pub bytes: Vec<u8>,
}

/// Reason why an I/O queue cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateQueueError {
    /// The controller is not enabled, or not for I/O.
    NotEnabled,
    /// The identifier is zero or above the number of granted queues.
    Identifier {
        /// Requested identifier.
        qid: u16,
        /// Highest granted identifier.
        granted: u16,
    },
    /// The queue exists already.
    Exists {
        /// Its identifier.
        qid: u16,
        /// The existing queue is being removed.
        is_ending: bool,
    },
}

/// CC.IOSQES and CC.IOCQES as powers of two (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;

impl FabricsTransport {
    /// Creates the executor of an I/O queue for a connection, which owns it and executes the commands of
    /// its link. Its commands belong to stream 0, and their data lie in `memory`.
    ///
    /// # Errors
    ///
    /// [`CreateQueueError`] with the reason.
    pub fn create_queue(
        &mut self,
        memory: SegmentMemory,
        new: &FabricsQueueParams,
        buffers: BouncePool,
    ) -> Result<(Executor<SegmentMemory>, Arc<QueueLink>), CreateQueueError> {
        self.check_create_queue(new.qid)?;
        let config = ExecutorConfig {
            page_shift: 12,
            transfer_bytes_max: self.controller.configuration().transfer_bytes_max,
            in_flight_max: new.in_flight_max,
            contexts_max: new.contexts_max,
        };
        let shared = ExecutorContext {
            fused_arbiter: self.controller.fused_arbiter(),
            is_write_through: self.is_write_through.clone(),
            buffers,
            io_stats: Some(QueueIoStats { controller: self.io_stats.clone(), qid: new.qid }),
        };
        let namespaces = self.controller.namespaces().reader();
        let mut executor = Executor::new(memory, &config, shared, namespaces);
        executor.add_command_stream();
        self.controller.note_queue_created();
        let link = Arc::new(QueueLink::default());
        let link_to_wake = Arc::clone(&link);
        executor.set_waker(Arc::new(move || link_to_wake.send_command(QueueCommand::Poll)));
        self.links.insert(new.qid, Arc::clone(&link));
        Ok((executor, link))
    }

    /// Checks whether queue `qid` may be created now.
    ///
    /// # Errors
    ///
    /// [`CreateQueueError`] with the reason.
    pub fn check_create_queue(&self, qid: u16) -> Result<(), CreateQueueError> {
        let (granted, _) = self.controller.granted_queue_counts();
        let cc = &self.configuration;
        let has_entries = cc.iosqes() == SUBMISSION_ENTRY_SHIFT
            && cc.iocqes() == COMPLETION_ENTRY_SHIFT
            && cc.css() != CommandSetSelected::AdminOnly;
        if !self.is_enabled() || !has_entries || self.association_end_reason.is_some() {
            return Err(CreateQueueError::NotEnabled);
        }
        if qid == 0 || qid > granted {
            return Err(CreateQueueError::Identifier { qid, granted });
        }
        if let Some(link) = self.links.get(&qid) {
            return Err(CreateQueueError::Exists { qid, is_ending: link.is_ending() });
        }
        Ok(())
    }

    /// Handles an event of queue `qid`. Commands in it have the host's identifiers. A reservation command
    /// that gets no reply here is completed later by [`QueueCommand::CompleteReservation`].
    pub fn handle_queue_event(
        &mut self,
        now: Instant,
        qid: u16,
        event: QueueEvent,
    ) -> Option<ReservationReply> {
        match event {
            QueueEvent::Error(report) => self.controller.record_error_completion(now, &report),
            QueueEvent::Reservation { ticket, command, mut bytes } => {
                let from = QueueCommandId { queue: qid, ticket };
                let end =
                    self.controller.execute_reservation_command(now, from, &command, &mut bytes);
                self.wake_owner();
                return end.map(|end| ReservationReply { ticket, end, bytes });
            }
            QueueEvent::OpenFailed(what) => self.last_error = Some(what),
            // There are no rings.
            QueueEvent::InvalidDoorbell(_) | QueueEvent::RingFault(_) => {}
        }
        None
    }

    /// Handles the result of [`QueueCommand::Abort`].
    pub fn handle_abort_result(&mut self, now: Instant, admin_cid: u16, is_aborted: bool) {
        self.controller.note_abort_completed();
        self.complete_deferred(now, admin_cid, AdminResult::success_with(u32::from(!is_aborted)));
        self.wake_owner();
    }

    /// Removes a queue whose commands have all completed.
    pub fn remove_queue(&mut self, now: Instant, qid: u16) {
        if let Some(link) = self.links.remove(&qid) {
            self.controller.drop_queue_reservation_commands(qid);
            for command in link.take_commands() {
                if let QueueCommand::Abort { admin_cid, .. } = command {
                    self.handle_abort_result(now, admin_cid, false);
                }
            }
        }
        self.advance_state(now);
        self.wake_owner();
    }
}
