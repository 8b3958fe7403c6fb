//! I/O queues: queue commands on the admin ring become connections.
//!
//! ```text
//!   Create I/O Completion Queue ─▶ success: a connection has none
//!   Create I/O Submission Queue ─▶ stream, ICReq, Connect ─▶ handed over to the queue thread ─▶ success
//!   Delete I/O Submission Queue ─▶ the queue thread closes ─▶ success; or an error, if the controller
//!                                  may still execute commands: then only a reset ends that
//! ```

use std::sync::Arc;

use tenmil_base::Instant;
use tenmil_wire::admin::{
    CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue,
};
use tenmil_wire::{Command, Status, TypedCommand};

use super::HostTransport;
use crate::queue_connect::{ConnectedQueue, QueueConnect, QueueConnectError, QueueConnectParams};
use crate::queue_mailbox::{AttachedQueue, QueueCommand, QueueMailbox};
use crate::ring_bridge::slots_of;
use crate::stall_detector::StallDetector;
use crate::tcp_transport::TcpTransport;

/// An I/O queue, as the controller thread knows it.
pub(super) struct IoQueueEntry {
    mailbox: Arc<QueueMailbox>,
    /// Number of commands in flight.
    slots: u16,
    progress: QueueProgress,
}

/// State of a queue, named for what it awaits.
enum QueueProgress {
    /// Its creation.
    Nothing,
    /// Its connection, to complete the command with this identifier.
    Connection { cid: u16, connect: Box<QueueConnect> },
    /// Nothing: the queue thread serves it.
    Attached,
    /// That the queue thread has closed it, to complete a command, or during a reset.
    Closed { cid: Option<u16> },
}

impl IoQueueEntry {
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.progress {
            QueueProgress::Connection { connect, .. } => connect.wake_at(now),
            QueueProgress::Closed { .. } => now.after(tenmil_base::Span::from_ms(1)),
            QueueProgress::Nothing | QueueProgress::Attached => Instant::NEVER,
        }
    }

    fn is_closed(&self) -> bool {
        matches!(self.progress, QueueProgress::Nothing)
    }
}

impl HostTransport {
    /// The transport of queue `id` with `depth` commands, for the thread that uses it. Once for each
    /// queue.
    pub(crate) fn queue_transport(&mut self, id: u16, depth: u16) -> TcpTransport {
        let dma = self.dma.clone();
        TcpTransport::new(Arc::clone(&self.queue(id).mailbox), dma, depth)
    }

    fn queue(&mut self, id: u16) -> &mut IoQueueEntry {
        let events = &self.events;
        self.queues.entry(id).or_insert_with(|| IoQueueEntry {
            mailbox: QueueMailbox::new(events),
            slots: 0,
            progress: QueueProgress::Nothing,
        })
    }

    pub(super) fn handle_queue_command(&mut self, now: Instant, command: &Command) {
        let cid = command.cid();
        if CreateIoCompletionQueue::parse(command).is_ok() {
            self.complete_locally(cid, Status::SUCCESS);
        } else if let Ok(create) = CreateIoSubmissionQueue::parse(command) {
            self.queue(create.qid).slots = slots_of(u32::from(create.qsize) + 1);
            self.open_queue(now, create.qid, cid);
        } else if let Ok(delete) = DeleteIoSubmissionQueue::parse(command) {
            let queue = self.queue(delete.qid);
            queue.mailbox.set_command(QueueCommand::Close);
            queue.progress = QueueProgress::Closed { cid: Some(cid) };
        } else if DeleteIoCompletionQueue::parse(command).is_ok() {
            self.complete_locally(cid, Status::SUCCESS);
        }
    }

    fn open_queue(&mut self, now: Instant, id: u16, cid: u16) {
        let data = self.connect_data(false);
        let depth = self.queue(id).slots;
        let in_capsule_bytes = self.controller_info.in_capsule_bytes;
        let params = QueueConnectParams { queue: id, depth, in_capsule_bytes, data };
        self.stats.attempts += 1;
        let connect = QueueConnect::begin(&mut *self.connector, &self.options, params, now);
        self.queue(id).progress = QueueProgress::Connection { cid, connect: Box::new(connect) };
    }

    /// Advances queues that are being opened or closed.
    pub(super) fn poll_queues(&mut self, now: Instant) {
        let ids: Vec<u16> = self.queues.keys().copied().collect();
        for id in ids {
            let queue = self.queue(id);
            match &mut queue.progress {
                QueueProgress::Connection { .. } => self.poll_queue_connect(now, id),
                QueueProgress::Closed { cid } => {
                    let cid = *cid;
                    let Some(closed) = queue.mailbox.take_closed() else { continue };
                    queue.progress = QueueProgress::Nothing;
                    // The queue thread may have sent data until now.
                    self.last_sent_at = now;
                    self.handle_queue_closed(cid, closed.may_execute_late);
                }
                QueueProgress::Nothing | QueueProgress::Attached => {}
            }
        }
    }

    fn poll_queue_connect(&mut self, now: Instant, id: u16) {
        let Self { queues, options, dma, .. } = self;
        let Some(queue) = queues.get_mut(&id) else { return };
        let QueueProgress::Connection { cid, connect } = &mut queue.progress else { return };
        let Some(result) = connect.poll(now, options, dma.pool()) else { return };
        let cid = *cid;
        queue.progress = QueueProgress::Nothing;
        match result {
            Ok(connected) => self.attach_connection(now, id, cid, connected),
            // If an I/O queue cannot be connected, the controller counts as lost.
            Err(QueueConnectError { why, is_fatal: false }) => self.handle_queue_loss(now, why),
            Err(QueueConnectError { why, is_fatal: true }) => {
                self.why = Some(why);
                self.complete_locally(cid, Status::INTERNAL_ERROR);
            }
        }
    }

    /// Hands a connection over to the queue thread.
    fn attach_connection(&mut self, now: Instant, id: u16, cid: u16, connected: ConnectedQueue) {
        let Some(association) = self.association.clone() else {
            return self.complete_locally(cid, Status::INTERNAL_ERROR);
        };
        let policy = self.options.policy;
        let queue = self.queue(id);
        let stall_detector = StallDetector::new(&policy, queue.slots, now);
        let connection = *connected.connection;
        queue.mailbox.set_command(QueueCommand::Attach(Box::new(AttachedQueue {
            connection,
            stall_detector,
            association,
        })));
        queue.progress = QueueProgress::Attached;
        self.complete_locally(cid, Status::SUCCESS);
    }

    /// Handles a closed queue, which may have left commands that can still be executed.
    fn handle_queue_closed(&mut self, cid: Option<u16>, may_execute_late: bool) {
        self.may_execute_late |= may_execute_late;
        match cid {
            Some(cid) if may_execute_late => self.complete_locally(cid, Status::INTERNAL_ERROR),
            Some(cid) => self.complete_locally(cid, Status::SUCCESS),
            None => {}
        }
    }

    /// Reports drained connections of dropped queues as closed.
    pub(super) fn reap_drained(&mut self, now: Instant) {
        let Self { undrained, queues, .. } = self;
        for (id, _, closed) in undrained.extract_if(.., |(_, drain, _)| drain.is_drained(now)) {
            if let Some(queue) = queues.get(&id) {
                queue.mailbox.report(closed);
            }
        }
    }

    /// Detects lost queues; each of them means the loss of the controller.
    pub(super) fn check_queues(&mut self, now: Instant) {
        let mut lost = None;
        for (id, queue) in &mut self.queues {
            if let Some((drain, closed)) = queue.mailbox.take_undrained() {
                self.undrained.push((*id, drain, closed));
            }
            if !matches!(queue.progress, QueueProgress::Attached) {
                continue;
            }
            if let Some(closed) = queue.mailbox.take_loss() {
                self.may_execute_late |= closed.may_execute_late;
                queue.progress = QueueProgress::Nothing;
                lost = lost.or(closed.lost);
            }
        }
        if let Some(why) = lost {
            self.handle_queue_loss(now, why);
        }
    }

    /// Closes all queues.
    pub(super) fn close_queues(&mut self) {
        for queue in self.queues.values_mut() {
            match queue.progress {
                QueueProgress::Connection { .. } => queue.progress = QueueProgress::Nothing,
                QueueProgress::Attached => {
                    queue.mailbox.set_command(QueueCommand::Close);
                    queue.progress = QueueProgress::Closed { cid: None };
                }
                QueueProgress::Closed { .. } => {
                    queue.progress = QueueProgress::Closed { cid: None }
                }
                QueueProgress::Nothing => {}
            }
        }
    }

    /// Checks which closing queues have closed.
    pub(super) fn reap_closed_queues(&mut self) {
        for queue in self.queues.values_mut() {
            if matches!(queue.progress, QueueProgress::Closed { .. })
                && queue.mailbox.take_closed().is_some()
            {
                queue.progress = QueueProgress::Nothing;
            }
        }
    }

    pub(super) fn are_queues_closed(&self) -> bool {
        self.queues.values().all(IoQueueEntry::is_closed)
    }
}
