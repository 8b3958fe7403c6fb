//! I/O queues: connect, and wait until they have closed.
//!
//! ```text
//!   creation ─▶ stream, ICReq, Connect ─▶ success, with the connection: the driver has the queue run
//!   deletion ─▶ the queue, which the driver has frozen, closes ─▶ success; or an error, if the controller
//!               may still execute commands: then only a reset ends that
//! ```

use std::sync::Arc;

use tenmil_base::{Error, Instant, Span};
use tenmil_nvme_host::{LinkSignals, StepResult};
use tenmil_wire::Status;

use super::HostTransport;
use crate::options::SecureChannelMode;
use crate::queue_connect::{
    ChannelSecurity, ConnectedQueue, QueueConnect, QueueConnectError, QueueConnectParams,
};
use crate::queue_report::QueueReport;
use crate::stall_detector::StallDetector;
use crate::tcp_transport::{AttachedQueue, TcpTransport};

/// An I/O queue, as the controller thread knows it.
pub(super) struct IoQueueEntry {
    report: Arc<QueueReport>,
    /// Number of commands in flight.
    slots: u16,
    progress: QueueProgress,
}

/// State of a queue, named for what it awaits.
enum QueueProgress {
    /// Its creation.
    Nothing,
    /// The next poll.
    Requested,
    /// Its connection, for the result of its creation.
    Connection(Box<QueueConnect>),
    /// Nothing: the driver has the connection, or the queue thread.
    Connected,
    /// That the queue thread has closed it, for the result of its deletion, within a timeout.
    Deleted { until: Option<Instant> },
    /// That the queue thread has closed it, during a reset.
    Closed,
}

/// Interval of checks for a queue that is being closed.
const CLOSE_POLL_INTERVAL: Span = Span::from_ms(1);

impl IoQueueEntry {
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.progress {
            QueueProgress::Requested => now,
            QueueProgress::Connection(connect) => connect.wake_at(now),
            QueueProgress::Deleted { .. } | QueueProgress::Closed => now.after(CLOSE_POLL_INTERVAL),
            QueueProgress::Nothing | QueueProgress::Connected => Instant::NEVER,
        }
    }

    fn is_closed(&self) -> bool {
        matches!(self.progress, QueueProgress::Nothing | QueueProgress::Requested)
    }
}

impl HostTransport {
    /// The transport of queue `id` with `depth` commands, for the thread that uses it. Once for each
    /// queue.
    pub(crate) fn queue_transport(
        &mut self,
        id: u16,
        depth: u16,
        link: LinkSignals,
    ) -> TcpTransport {
        let (dma, report) = (self.dma.clone(), QueueReport::new(link, &self.events));
        // A deleted queue with the same identifier may still be polled by its owner.
        let progress = QueueProgress::Nothing;
        self.queues
            .insert(id, IoQueueEntry { report: Arc::clone(&report), slots: depth, progress });
        TcpTransport::new(report, dma, depth)
    }

    fn queue_entry(&mut self, id: u16) -> &mut IoQueueEntry {
        self.queues.get_mut(&id).expect("its transport was created first")
    }

    /// Connects queue `id`, with `slots` commands in flight. A result follows.
    pub(super) fn connect_queue(&mut self, id: u16, slots: u16) {
        let queue = self.queue_entry(id);
        (queue.slots, queue.progress) = (slots, QueueProgress::Requested);
    }

    /// Waits until queue `id` has closed, which the driver has frozen. A result follows.
    pub(super) fn close_queue(&mut self, id: u16) {
        self.queue_entry(id).progress = QueueProgress::Deleted { until: None };
    }

    fn begin_queue_connect(&mut self, now: Instant, id: u16) {
        let data = self.store_connect_data(false);
        let depth = self.queue_entry(id).slots;
        let in_capsule_bytes = self.controller_info.in_capsule_bytes;
        let security = match self.options.secure_channel {
            SecureChannelMode::Off => ChannelSecurity::Any,
            SecureChannelMode::Required => ChannelSecurity::SecureChannel,
            SecureChannelMode::Concatenate => ChannelSecurity::GeneratedKey,
        };
        let params = QueueConnectParams { queue: id, depth, in_capsule_bytes, data, security };
        self.stats.attempts += 1;
        let connect = QueueConnect::begin(&mut *self.connector, &self.options, params, now);
        self.queue_entry(id).progress = QueueProgress::Connection(Box::new(connect));
    }

    fn push_queue_result(&mut self, id: u16, result: StepResult<TcpTransport>) {
        self.queue_results.push_back((id, result));
    }

    /// Advances queues that are being opened or closed.
    pub(super) fn poll_queues(&mut self, now: Instant) {
        let ids: Vec<u16> = self.queues.keys().copied().collect();
        for id in ids {
            // A key that is about to be replaced is not used any more.
            let (is_ready, is_reauthenticating) = (self.is_ready(), self.is_reauthenticating());
            let has_info = self.has_controller_info;
            match self.queue_entry(id).progress {
                QueueProgress::Requested if is_ready && has_info && !is_reauthenticating => {
                    self.begin_queue_connect(now, id)
                }
                // Its in-capsule data size is not known before Identify Controller has been evaluated.
                QueueProgress::Requested if is_ready => {}
                // The controller is lost: the driver resets it, and creates the queue again.
                QueueProgress::Requested => self.queue_entry(id).progress = QueueProgress::Nothing,
                QueueProgress::Connection(_) => self.poll_queue_connect(now, id),
                QueueProgress::Deleted { .. } | QueueProgress::Closed => self.poll_close(now, id),
                QueueProgress::Nothing | QueueProgress::Connected => {}
            }
        }
    }

    fn poll_queue_connect(&mut self, now: Instant, id: u16) {
        let Self { queues, options, dma, exchange_buffers, .. } = self;
        let Some(queue) = queues.get_mut(&id) else { return };
        let QueueProgress::Connection(connect) = &mut queue.progress else { return };
        let Some(result) = connect.poll(now, options, dma.pool(), exchange_buffers) else { return };
        queue.progress = QueueProgress::Nothing;
        match result {
            Ok(connected) => self.finish_connect(now, id, connected),
            // If an I/O queue cannot be connected, the controller counts as lost.
            Err(QueueConnectError { error, is_fatal: false, .. }) => {
                self.handle_queue_loss(now, error);
            }
            Err(QueueConnectError { error, is_fatal: true, .. }) => {
                self.why = Some(error);
                self.push_queue_result(id, Err(Status::INTERNAL_ERROR));
            }
        }
    }

    /// Waits for the queue thread to close its connection. A deletion that takes too long has failed; then
    /// only a reset ends the queue.
    fn poll_close(&mut self, now: Instant, id: u16) {
        let timeout = now.after(self.options.policy.connect);
        let queue = self.queue_entry(id);
        let is_deletion = match &mut queue.progress {
            QueueProgress::Deleted { until } => {
                until.get_or_insert(timeout);
                true
            }
            _ => false,
        };
        if let Some(closed) = queue.report.take_closed() {
            queue.progress = QueueProgress::Nothing;
            // The queue thread may have sent data until now.
            self.last_sent_at = now;
            self.may_execute_late |= closed.may_execute_late;
            // The controller may still execute commands: then only a reset ends that.
            let is_done = !closed.may_execute_late;
            if is_deletion {
                self.push_queue_result(
                    id,
                    if is_done { Ok(None) } else { Err(Status::INTERNAL_ERROR) },
                );
            }
        } else if let QueueProgress::Deleted { until: Some(until) } = queue.progress
            && now >= until
        {
            queue.progress = QueueProgress::Closed;
            self.push_queue_result(id, Err(Status::INTERNAL_ERROR));
        }
    }

    /// Passes a connection to the driver, as the attachment of the queue.
    fn finish_connect(&mut self, now: Instant, id: u16, connected: ConnectedQueue) {
        let Some(association) = self.association.clone() else {
            return self.push_queue_result(id, Err(Status::INTERNAL_ERROR));
        };
        let policy = self.options.policy;
        let queue = self.queue_entry(id);
        let stall_detector = StallDetector::new(&policy, queue.slots, now);
        let connection = *connected.connection;
        queue.report.clear();
        queue.progress = QueueProgress::Connected;
        self.push_queue_result(
            id,
            Ok(Some(Box::new(AttachedQueue { connection, stall_detector, association }))),
        );
    }

    /// Reports drained connections of dropped queues as closed.
    pub(super) fn reap_drained(&mut self, now: Instant) {
        let Self { undrained, queues, .. } = self;
        for (id, _, closed) in undrained.extract_if(.., |(_, drain, _)| drain.poll_drained(now)) {
            if let Some(queue) = queues.get(&id) {
                queue.report.report(closed);
            }
        }
    }

    /// Detects lost queues; each of them means the loss of the controller.
    pub(super) fn detect_lost_queues(&mut self, now: Instant) {
        let mut lost = None;
        for (id, queue) in &mut self.queues {
            if let Some((drain, closed)) = queue.report.take_undrained() {
                self.undrained.push((*id, drain, closed));
            }
            if !matches!(queue.progress, QueueProgress::Connected) {
                continue;
            }
            if let Some(closed) = queue.report.take_loss() {
                self.may_execute_late |= closed.may_execute_late;
                queue.progress = QueueProgress::Nothing;
                lost = lost.or(closed.lost);
            }
        }
        if let Some(why) = lost {
            self.handle_queue_loss(now, Error::remote(why));
        }
    }

    /// Whether a queue is being connected.
    pub(super) fn is_connecting_queue(&self) -> bool {
        let is_connecting =
            |queue: &IoQueueEntry| matches!(queue.progress, QueueProgress::Connection(_));
        self.queues.values().any(is_connecting)
    }

    /// Ends all queues, without a result for each. The driver freezes them, now or when it sees the state
    /// of the controller; a connection that it has not handed over is closed here.
    pub(super) fn close_queues(&mut self) {
        self.queue_results.clear();
        for queue in self.queues.values_mut() {
            match queue.progress {
                QueueProgress::Requested | QueueProgress::Connection(_) => {
                    queue.progress = QueueProgress::Nothing;
                }
                QueueProgress::Connected | QueueProgress::Deleted { .. } => {
                    queue.progress = QueueProgress::Closed;
                }
                QueueProgress::Closed | QueueProgress::Nothing => {}
            }
        }
    }

    /// Checks which closing queues have closed.
    pub(super) fn reap_closed_queues(&mut self) {
        for queue in self.queues.values_mut() {
            if matches!(queue.progress, QueueProgress::Deleted { .. } | QueueProgress::Closed)
                && queue.report.take_closed().is_some()
            {
                queue.progress = QueueProgress::Nothing;
            }
        }
    }

    pub(super) fn are_queues_closed(&self) -> bool {
        self.queues.values().all(IoQueueEntry::is_closed)
    }
}
