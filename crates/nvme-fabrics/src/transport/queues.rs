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
use crate::silence::Silence;
use crate::tcp_transport::TcpTransport;

/// An I/O queue, as the controller thread knows it.
pub(super) struct IoQueueEntry {
    mailbox_slot: Arc<QueueMailbox>,
    /// Number of commands in flight.
    slots: u16,
    progress: QueueProgress,
}

/// State of a queue, named for what it awaits.
enum QueueProgress {
    /// Its creation.
    Nothing,
    /// Its connection, to complete the command with this identifier.
    Connection { cid: u16, opening: Box<QueueConnect> },
    /// Nothing: the queue thread serves it.
    Served,
    /// That the queue thread has closed it, to complete a command, or during a reset.
    Closed { cid: Option<u16> },
}

impl IoQueueEntry {
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.progress {
            QueueProgress::Connection { opening, .. } => opening.wake_at(now),
            QueueProgress::Closed { .. } => now.after(tenmil_base::Span::from_ms(1)),
            QueueProgress::Nothing | QueueProgress::Served => Instant::NEVER,
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
        let dma = self.reach.clone();
        TcpTransport::new(Arc::clone(&self.queue(id).mailbox_slot), dma, depth)
    }

    fn queue(&mut self, id: u16) -> &mut IoQueueEntry {
        let events = &self.events;
        self.queues.entry(id).or_insert_with(|| IoQueueEntry {
            mailbox_slot: QueueMailbox::new(events),
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
            queue.mailbox_slot.set_command(QueueCommand::Close);
            queue.progress = QueueProgress::Closed { cid: Some(cid) };
        } else if DeleteIoCompletionQueue::parse(command).is_ok() {
            self.complete_locally(cid, Status::SUCCESS);
        }
    }

    fn open_queue(&mut self, now: Instant, id: u16, cid: u16) {
        let data = self.connect_data(false);
        let depth = self.queue(id).slots;
        let in_capsule_bytes = self.learnt.in_capsule_bytes;
        let plan = QueueConnectParams { queue: id, depth, in_capsule_bytes, data };
        self.counts.dialled += 1;
        let opening = QueueConnect::begin(&mut *self.dial, &self.options, plan, now);
        self.queue(id).progress = QueueProgress::Connection { cid, opening: Box::new(opening) };
    }

    /// Advances queues that are being opened or closed.
    pub(super) fn turn_queues(&mut self, now: Instant) {
        let ids: Vec<u16> = self.queues.keys().copied().collect();
        for id in ids {
            let queue = self.queue(id);
            match &mut queue.progress {
                QueueProgress::Connection { .. } => self.turn_opening(now, id),
                QueueProgress::Closed { cid } => {
                    let cid = *cid;
                    let Some(closed) = queue.mailbox_slot.closed() else { continue };
                    queue.progress = QueueProgress::Nothing;
                    // The queue thread may have sent data until now.
                    self.silent_since = now;
                    self.end_queue(cid, closed.may_linger);
                }
                QueueProgress::Nothing | QueueProgress::Served => {}
            }
        }
    }

    fn turn_opening(&mut self, now: Instant, id: u16) {
        let Self { queues, options, reach, .. } = self;
        let Some(queue) = queues.get_mut(&id) else { return };
        let QueueProgress::Connection { cid, opening } = &mut queue.progress else { return };
        let Some(ended) = opening.turn(now, options, reach.pool()) else { return };
        let cid = *cid;
        queue.progress = QueueProgress::Nothing;
        match ended {
            Ok(opened) => self.serve(now, id, cid, opened),
            // If an I/O queue cannot be connected, the controller counts as lost.
            Err(QueueConnectError { why, is_fatal: false }) => self.fail(now, why),
            Err(QueueConnectError { why, is_fatal: true }) => {
                self.why = Some(why);
                self.complete_locally(cid, Status::INTERNAL_ERROR);
            }
        }
    }

    /// Hands a connection over to the queue thread.
    fn serve(&mut self, now: Instant, id: u16, cid: u16, opened: ConnectedQueue) {
        let Some(association) = self.association.clone() else {
            return self.complete_locally(cid, Status::INTERNAL_ERROR);
        };
        let policy = self.options.policy;
        let queue = self.queue(id);
        let silence = Silence::new(&policy, queue.slots, now);
        let exchange = *opened.exchange;
        queue.mailbox_slot.set_command(QueueCommand::Attach(Box::new(AttachedQueue {
            exchange,
            silence,
            association,
        })));
        queue.progress = QueueProgress::Served;
        self.complete_locally(cid, Status::SUCCESS);
    }

    /// Handles a closed queue, which may have left commands that can still be executed.
    fn end_queue(&mut self, cid: Option<u16>, may_linger: bool) {
        self.may_linger |= may_linger;
        match cid {
            Some(cid) if may_linger => self.complete_locally(cid, Status::INTERNAL_ERROR),
            Some(cid) => self.complete_locally(cid, Status::SUCCESS),
            None => {}
        }
    }

    /// Reports drained connections of dropped queues as closed.
    pub(super) fn reap_drained(&mut self, now: Instant) {
        let Self { left, queues, .. } = self;
        for (id, _, closed) in left.extract_if(.., |(_, drain, _)| drain.is_drained(now)) {
            if let Some(queue) = queues.get(&id) {
                queue.mailbox_slot.report(closed);
            }
        }
    }

    /// Detects lost queues; each of them means the loss of the controller.
    pub(super) fn check_queues(&mut self, now: Instant) {
        let mut lost = None;
        for (id, queue) in &mut self.queues {
            if let Some((drain, closed)) = queue.mailbox_slot.take_left() {
                self.left.push((*id, drain, closed));
            }
            if !matches!(queue.progress, QueueProgress::Served) {
                continue;
            }
            if let Some(closed) = queue.mailbox_slot.lost() {
                self.may_linger |= closed.may_linger;
                queue.progress = QueueProgress::Nothing;
                lost = lost.or(closed.lost);
            }
        }
        if let Some(why) = lost {
            self.fail(now, why);
        }
    }

    /// Closes all queues.
    pub(super) fn close_queues(&mut self) {
        for queue in self.queues.values_mut() {
            match queue.progress {
                QueueProgress::Connection { .. } => queue.progress = QueueProgress::Nothing,
                QueueProgress::Served => {
                    queue.mailbox_slot.set_command(QueueCommand::Close);
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
    pub(super) fn note_closed_queues(&mut self) {
        for queue in self.queues.values_mut() {
            if matches!(queue.progress, QueueProgress::Closed { .. })
                && queue.mailbox_slot.closed().is_some()
            {
                queue.progress = QueueProgress::Nothing;
            }
        }
    }

    pub(super) fn are_queues_closed(&self) -> bool {
        self.queues.values().all(IoQueueEntry::is_closed)
    }
}
