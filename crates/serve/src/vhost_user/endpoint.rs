//! vhost-user endpoint: one front end and its use of the disk.
//!
//! ```text
//!   Absent ── accepted ──▶ Here ── disconnect or error ──▶ Detaching ── virtqueues ended ──▶ Absent
//! ```
//!
//! The socket is closed last: a front end that waits for that knows that its memory is no longer
//! accessed.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use tenmil_base::{Error, Instant, Span};
use tenmil_linux::RemoteEventFd;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::poll_set::Interest;
use tenmil_vhost_user::{
    CONFIG_CHANGED, MemoryChange, OwnerRequest, PendingReply, QueueStartParams, ReplyDisposition,
    Server, Violation,
};

use super::guest_memory_table::GuestMemoryTable;
use super::queue_mailbox::QueueMailbox;
use super::vhost_block_device::{InflightMemory, VhostBlockDevice, create_inflight_buffer};
use crate::endpoint_event::{DRAIN_WARNING, EndpointEvent, EventReporter, SlowDrainReport};

/// Disk and its current front end.
pub(super) struct Endpoint {
    pub(super) device: VhostBlockDevice,
    state: ClientState,
    reporter: EventReporter,
}

enum ClientState {
    Absent,
    Connected(Box<ClientSession>),
    Detaching(DetachingClient),
}

/// Front end that has disconnected, whose memory is not released yet.
struct DetachingClient {
    connection: LocalConnection,
    queues: BTreeMap<u16, RunningQueue>,
    time_limit: SlowDrainReport,
}

/// Connected front end and its resources.
pub(super) struct ClientSession {
    connection: LocalConnection,
    server: Server<ReceivedFile>,
    pub(super) table: Arc<GuestMemoryTable>,
    pub(super) inflight: Option<InflightMemory>,
    pub(super) queues: BTreeMap<u16, RunningQueue>,
    /// Call eventfds of all queues, including stopped ones.
    pub(super) calls: BTreeMap<u16, ReceivedFile>,
    /// Back-end channel, for messages that this side initiates.
    back: Option<LocalConnection>,
    pending: Option<PendingMessage>,
    /// Deadline for the rest of a partly received message.
    message_deadline: Option<Instant>,
}

/// Virtqueue that runs or is stopping.
pub(super) struct RunningQueue {
    pub(super) mailbox: Arc<QueueMailbox>,
    pub(super) start: QueueStartParams<ReceivedFile>,
}

/// Message whose reply waits until virtqueues have stopped.
struct PendingMessage {
    kind: PendingMessageKind,
    time_limit: SlowDrainReport,
}

enum PendingMessageKind {
    Stop { call: PendingReply, queue: u16 },
    Memory { call: PendingReply, change: MemoryChange<ReceivedFile> },
}

pub(super) type ReceivedFile = Arc<OwnedFd>;

/// Why a front end was disconnected; `None` if it disconnected itself.
type DisconnectReasonText = Option<String>;

/// Largest number of receive calls in an iteration.
const MESSAGES_PER_POLL: usize = 64;
/// Longest message.
const BUFFER_BYTES: usize = 1024;
/// Largest number of file descriptors in a message.
const FILES_MAX: usize = 9;
/// Time limit for the rest of a message.
pub(super) const TIME_LIMIT: Span = Span::from_secs(5);

impl Endpoint {
    pub(super) fn new(device: VhostBlockDevice, events: SyncSender<EndpointEvent>) -> Self {
        Self { device, state: ClientState::Absent, reporter: EventReporter::new(events) }
    }

    /// Whether there is no front end, and nothing of the last one is left.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.state, ClientState::Absent)
    }

    /// Whether the last front end is still being detached, within the expected time. New ones wait
    /// in the listen queue meanwhile.
    pub(super) fn is_detaching(&self) -> bool {
        matches!(&self.state, ClientState::Detaching(detaching) if !detaching.time_limit.has_reported())
    }

    /// Attaches a front end.
    pub(super) fn attach_client(&mut self, now: Instant, connection: LocalConnection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        self.reporter.report(EndpointEvent::Connected(format!("process {peer}")));
        self.state = ClientState::Connected(Box::new(ClientSession {
            connection,
            server: Server::new(self.device.backend_config()),
            table: Arc::default(),
            inflight: None,
            queues: BTreeMap::new(),
            calls: BTreeMap::new(),
            back: None,
            pending: None,
            // Deadline for the first message: a silent front end must not block others.
            message_deadline: Some(now.after(TIME_LIMIT)),
        }));
    }

    /// Reports that a second front end was rejected.
    pub(super) fn report_rejected_front_end(&mut self, connection: &LocalConnection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        let text = format!("process {peer} was rejected: another front end uses the disk");
        self.reporter.report_error(text);
    }

    /// Socket of the front end and the readiness to wait for, if any.
    pub(super) fn socket_interest(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let ClientState::Connected(session) = &self.state else { return None };
        let readable = session.server.receive_len() > 0;
        let writable = session.server.next_outgoing().is_some();
        let interest = Interest { readable, writable };
        (readable || writable).then(|| (session.connection.as_fd(), interest))
    }

    /// Socket of the current or disconnecting front end.
    pub(super) fn client_socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            ClientState::Absent => None,
            ClientState::Connected(session) => Some(session.connection.as_fd()),
            ClientState::Detaching(detaching) => Some(detaching.connection.as_fd()),
        }
    }

    /// Time of the next poll without any event.
    pub(super) fn wake_at(&self) -> Instant {
        match &self.state {
            ClientState::Absent => Instant::NEVER,
            ClientState::Detaching(detaching) => detaching.time_limit.wake_at(),
            ClientState::Connected(session) => {
                let pending = session.pending.as_ref();
                let pending =
                    pending.map_or(Instant::NEVER, |pending| pending.time_limit.wake_at());
                session.message_deadline.unwrap_or(Instant::NEVER).min(pending)
            }
        }
    }

    /// Receives and executes messages. Returns the amount of work.
    pub(super) fn poll_messages(&mut self, now: Instant) -> usize {
        self.run_with_session(now, |endpoint, session| endpoint.receive_and_execute(now, session))
    }

    /// Checks virtqueues, continues pending messages, and sends. Returns the amount of work.
    pub(super) fn continue_pending(&mut self, now: Instant) -> usize {
        if matches!(self.state, ClientState::Detaching(_)) {
            return self.finish_detaching(now);
        }
        self.run_with_session(now, |endpoint, session| {
            let count = endpoint.reap_ended_queues(now, session)?;
            if session.message_deadline.is_some_and(|by| by <= now) {
                return Err(Some(format!("a message was incomplete after {TIME_LIMIT}")));
            }
            Ok(count + session.send()?)
        })
    }

    /// Handles a new device size: the virtqueues use it before the front end is notified.
    pub(super) fn forward_resize(&mut self) {
        let block_count = self.device.medium.limits().block_count;
        self.device.disk.set_block_count(block_count);
        let ClientState::Connected(session) = &mut self.state else { return };
        for virtqueue in session.queues.values() {
            virtqueue.mailbox.commands.send(|commands| commands.block_count = Some(block_count));
        }
        let is_notification_enabled = session.server.set_config(self.device.config_space());
        let Some(back) = session.back.as_ref().filter(|_| is_notification_enabled) else { return };
        // If the socket buffer is full, the front end has not read the previous notification and
        // will read the new configuration then.
        let sent = back.send_files(&CONFIG_CHANGED, &[]);
        if !matches!(sent, Ok(count) if count == 0 || count == CONFIG_CHANGED.len()) {
            session.back = None;
            let text =
                "the front end accepts no message, expected it to be notified of the new size";
            self.reporter.report_error(text.to_owned());
        }
    }

    fn run_with_session(
        &mut self,
        now: Instant,
        action: impl FnOnce(&mut Self, &mut ClientSession) -> Result<usize, DisconnectReasonText>,
    ) -> usize {
        let mut session = match std::mem::replace(&mut self.state, ClientState::Absent) {
            ClientState::Connected(session) => session,
            other => {
                self.state = other;
                return 0;
            }
        };
        let result = action(self, &mut session);
        self.state = ClientState::Connected(session);
        match result {
            Ok(count) => count,
            Err(cause) => {
                self.start_disconnect(now, cause);
                1
            }
        }
    }

    fn receive_and_execute(
        &mut self,
        now: Instant,
        session: &mut ClientSession,
    ) -> Result<usize, DisconnectReasonText> {
        let mut count = 0;
        for _ in 0..MESSAGES_PER_POLL {
            if !session.receive(now)? {
                break;
            }
            count += 1;
            let request = session.server.next_request().map_err(violation_cause)?;
            if let Some(violation) = session.server.take_rejection() {
                self.reporter.report_error(violation.to_string());
            }
            if let Some(request) = request {
                self.execute_message(now, session, request)?;
            }
        }
        Ok(count)
    }

    /// Disconnects the front end because the service ends.
    pub(super) fn disconnect_client(&mut self, now: Instant) {
        if matches!(self.state, ClientState::Connected(_)) {
            self.start_disconnect(now, Some("the service ends".to_owned()));
        }
    }

    /// Disconnects the front end. Its memory is released once the virtqueues have ended.
    fn start_disconnect(&mut self, now: Instant, why: DisconnectReasonText) {
        self.state = match std::mem::replace(&mut self.state, ClientState::Absent) {
            // Dropping the session closes its file descriptors.
            ClientState::Connected(session) => {
                let ClientSession { connection, queues, .. } = *session;
                queues.values().for_each(RunningQueue::send_stop);
                ClientState::Detaching(DetachingClient {
                    connection,
                    queues,
                    time_limit: SlowDrainReport::new(now),
                })
            }
            other => {
                self.state = other;
                return;
            }
        };
        self.reporter.report_disconnect(why, "front end");
    }

    fn finish_detaching(&mut self, now: Instant) -> usize {
        let ClientState::Detaching(detaching) = &mut self.state else { return 0 };
        detaching.queues.retain(|_, virtqueue| virtqueue.mailbox.end_state().is_none());
        if !detaching.queues.is_empty() {
            detaching.time_limit.report_slow_drain(now, &mut self.reporter, || {
                format!(
                    "a device has not completed I/O for {DRAIN_WARNING}: until it does the front end's \
                     memory stays mapped, and no other client is accepted"
                )
            });
            return 0;
        }
        self.state = ClientState::Absent;
        1
    }

    fn execute_message(
        &mut self,
        now: Instant,
        session: &mut ClientSession,
        request: OwnerRequest<ReceivedFile>,
    ) -> Result<(), DisconnectReasonText> {
        match request {
            OwnerRequest::Memory { call, change } => {
                // A running virtqueue resolves addresses with the table it holds, so the table changes
                // only while all of them are stopped.
                session.queues.values().for_each(RunningQueue::send_stop);
                let (kind, time_limit) =
                    (PendingMessageKind::Memory { call, change }, SlowDrainReport::new(now));
                session.pending = Some(PendingMessage { kind, time_limit });
            }
            OwnerRequest::Stop { call, queue } => {
                if let Some(virtqueue) = session.queues.get(&queue) {
                    virtqueue.send_stop();
                }
                let (kind, time_limit) =
                    (PendingMessageKind::Stop { call, queue }, SlowDrainReport::new(now));
                session.pending = Some(PendingMessage { kind, time_limit });
            }
            OwnerRequest::Start { call, queue, start } => {
                let started = self.device.start_virtqueue(session, queue, start);
                let started = started.map_err(|why| format!("queue {queue}: {why}"));
                self.queue_reply(session, call, started.map_err(Error::environment))?;
            }
            OwnerRequest::SetCall { call, queue, file } => {
                let set = session.set_call_eventfd(queue, file);
                let set = set.map_err(|why| format!("queue {queue}: {why}"));
                self.queue_reply(session, call, set.map_err(Error::environment))?;
            }
            OwnerRequest::SetBackChannel { call, file } => {
                let back = file.try_clone().and_then(LocalConnection::from_fd);
                let back = back.map_err(|error| format!("the socket for messages: {error}"));
                let set = back.map(|back| session.back = Some(back));
                self.queue_reply(session, call, set.map_err(Error::environment))?;
            }
            OwnerRequest::GetInflightFd { call, queues, size } => {
                match create_inflight_buffer(queues, size) {
                    Ok((area, file)) => session.server.reply_inflight(call, area, Arc::new(file)),
                    Err(why) => self.queue_reply(session, call, Err(why))?,
                }
            }
            OwnerRequest::SetInflightFd { call, area, file } => {
                let set = self.device.map_inflight_buffer(area, &file);
                let set = set.map(|inflight| session.inflight = Some(inflight));
                self.queue_reply(session, call, set)?;
            }
        }
        Ok(())
    }

    fn queue_reply(
        &mut self,
        session: &mut ClientSession,
        call: PendingReply,
        result: Result<(), Error>,
    ) -> Result<(), DisconnectReasonText> {
        let Err(why) = result else {
            session.server.reply_success(call);
            return Ok(());
        };
        match session.server.reply_error(call) {
            ReplyDisposition::Reported => self.reporter.report_error(why.to_string()),
            ReplyDisposition::NotReported => return Err(Some(why.to_string())),
        }
        Ok(())
    }

    /// Checks whether virtqueues have ended, and continues the message that waits for that.
    fn reap_ended_queues(
        &mut self,
        now: Instant,
        session: &mut ClientSession,
    ) -> Result<usize, DisconnectReasonText> {
        let ended = session.queues.iter().find_map(|(queue, virtqueue)| {
            let why = virtqueue.mailbox.end_state()?.why?;
            Some(format!("queue {queue}: {why}"))
        });
        if let Some(why) = ended {
            return Err(Some(why));
        }
        let Some(pending) = &mut session.pending else { return Ok(0) };
        let is_awaited = |queue: u16| match pending.kind {
            PendingMessageKind::Stop { queue: stopped, .. } => queue == stopped,
            PendingMessageKind::Memory { .. } => true,
        };
        let has_ended = |virtqueue: &RunningQueue| virtqueue.mailbox.end_state().is_some();
        if session
            .queues
            .iter()
            .any(|(queue, virtqueue)| is_awaited(*queue) && !has_ended(virtqueue))
        {
            pending.time_limit.report_slow_drain(now, &mut self.reporter, || {
                format!(
                    "a device has not completed I/O for {DRAIN_WARNING}: until it does the front end \
                     waits for its queues to stop"
                )
            });
            return Ok(0);
        }
        match session.pending.take().map(|pending| pending.kind) {
            Some(PendingMessageKind::Stop { call, queue }) => {
                let virtqueue = session.queues.remove(&queue);
                let ended = virtqueue.and_then(|virtqueue| virtqueue.mailbox.end_state());
                session.server.reply_queue_stopped(call, ended.map_or(0, |ended| ended.next));
            }
            Some(PendingMessageKind::Memory { call, change }) => {
                let changed = self.device.apply_memory_change(session, change);
                // The front end believes that the queues run, so a failure must end the connection.
                self.device.restart_virtqueues(session).map_err(|error| Some(error.text))?;
                self.queue_reply(session, call, changed)?;
            }
            None => {}
        }
        Ok(1)
    }
}

impl ClientSession {
    /// Receives from the socket. Returns false if nothing is available.
    fn receive(&mut self, now: Instant) -> Result<bool, DisconnectReasonText> {
        let mut buffer = [0; BUFFER_BYTES];
        let awaited = self.server.receive_len().min(buffer.len());
        if awaited == 0 {
            return Ok(false);
        }
        let mut files = Vec::new();
        let received = self.connection.receive_files(&mut buffer[..awaited], &mut files, FILES_MAX);
        match received.map_err(|error| Some(error.to_string()))? {
            RecvResult::WouldBlock => Ok(false),
            RecvResult::Eof => Err(None),
            RecvResult::Bytes(count) => {
                let files = files.into_iter().map(Arc::new);
                self.server.receive(&buffer[..count], files).map_err(violation_cause)?;
                let is_amid = self.server.has_partial_message();
                let by = self.message_deadline.unwrap_or(now.after(TIME_LIMIT));
                self.message_deadline = is_amid.then_some(by);
                Ok(true)
            }
        }
    }

    fn send(&mut self) -> Result<usize, DisconnectReasonText> {
        let mut count = 0;
        while let Some((bytes, file)) = self.server.next_outgoing() {
            let files: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
            let sent = self.connection.send_files(bytes, &files);
            let sent = sent.map_err(|error| match error.kind() {
                std::io::ErrorKind::BrokenPipe => None,
                _ => Some(error.to_string()),
            })?;
            if sent == 0 {
                break;
            }
            self.server.record_sent(sent);
            count += 1;
        }
        Ok(count)
    }

    fn set_call_eventfd(&mut self, queue: u16, file: Option<ReceivedFile>) -> Result<(), Error> {
        let call = file.as_ref().map(|file| eventfd_from_file(file)).transpose()?;
        match file {
            Some(file) => self.calls.insert(queue, file),
            None => self.calls.remove(&queue),
        };
        if let Some(virtqueue) = self.queues.get(&queue) {
            virtqueue.mailbox.commands.send(|commands| commands.call = Some(call));
        }
        Ok(())
    }
}

impl RunningQueue {
    fn send_stop(&self) {
        self.mailbox.commands.send(|commands| commands.ends = true);
    }
}

pub(super) fn eventfd_from_file(file: &OwnedFd) -> Result<RemoteEventFd, Error> {
    let line = file.try_clone().and_then(RemoteEventFd::new);
    line.map_err(Error::environment)
}

fn violation_cause(violation: Violation) -> DisconnectReasonText {
    Some(violation.to_string())
}
