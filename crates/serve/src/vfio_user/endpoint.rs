//! vfio-user endpoint: one client and its use of the device.
//!
//! ```text
//!   Absent ── accepted ──▶ Connected ── disconnect or error ──▶ Disconnecting ── DMA drained ──▶ Absent
//! ```
//!
//! The socket is closed last: a client that waits for that knows that its memory is no longer
//! accessed.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use tenmil_base::{Error, Instant, Span};
use tenmil_dma::{FileRange, ForeignRegion, RegionTable};
use tenmil_linux::RemoteEventFd;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::poll_set::Interest;
use tenmil_vfio_user::server::{DmaMap, PendingReply};
use tenmil_vfio_user::{Errno, IrqSelection, IrqSet, Request, Server, Violation, irq_index};

use super::client_memory::{AccessDirection, ClientDmaRequest, DmaMappings};
use super::irq_eventfds::IrqEventFds;
use super::nvme_pci_function::NvmePciFunction;
use crate::endpoint_event::{DRAIN_WARNING, EndpointEvent, EventReporter, SlowDrainReport};

/// Device and its current client.
pub(super) struct Endpoint {
    pub(super) device: NvmePciFunction,
    mappings: DmaMappings,
    irqs: IrqEventFds,
    regions: RegionTable,
    state: ClientState,
    reporter: EventReporter,
    /// Receive buffer.
    buffer: Box<[u8]>,
}

enum ClientState {
    Absent,
    Connected(Box<ClientSession>),
    Disconnecting(DetachingClient),
}

/// Client that has disconnected, whose memory is not released yet.
struct DetachingClient {
    connection: LocalConnection,
    timer: SlowDrainReport,
}

/// Connected client and its pending operations.
struct ClientSession {
    connection: LocalConnection,
    server: Server<ReceivedFile>,
    pending_command: Option<PendingCommand>,
    /// Message-based DMA accesses in progress, by token.
    accesses: BTreeMap<u32, DmaMessageProgress>,
    /// Whether there has been one.
    uses_messages: bool,
    /// Deadline for the VERSION message, or for the rest of a message of which a part has arrived.
    message_deadline: Instant,
}

type ReceivedFile = Arc<OwnedFd>;

/// Command whose reply is delayed.
struct PendingCommand {
    pending: DeferredReplyKind,
    timer: SlowDrainReport,
}

/// Kind of a delayed reply.
enum DeferredReplyKind {
    Unmap { call: PendingReply, iova: u64 },
    Reset { call: PendingReply },
}

/// Progress of a message-based DMA access.
struct DmaMessageProgress {
    request: ClientDmaRequest,
    done_bytes: usize,
    data: Vec<u8>,
}

/// Why a client was disconnected; `None` if it disconnected itself.
type DisconnectReasonText = Option<String>;

/// Largest number of receive calls in an iteration.
const MESSAGES_PER_POLL: usize = 64;
const BUFFER_BYTES: usize = 256 << 10;

impl Endpoint {
    pub(super) fn new(
        device: NvmePciFunction,
        mappings: DmaMappings,
        irqs: IrqEventFds,
        regions: RegionTable,
        events: SyncSender<EndpointEvent>,
    ) -> Self {
        let (buffer, reporter) = (vec![0; BUFFER_BYTES].into(), EventReporter::new(events));
        Self { device, mappings, irqs, regions, state: ClientState::Absent, reporter, buffer }
    }

    /// Whether there is no client, and nothing of the last one is left.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.state, ClientState::Absent)
    }

    /// Whether the last client is still being detached, within the expected time. New clients wait
    /// in the listen queue meanwhile.
    pub(super) fn is_detaching(&self) -> bool {
        matches!(&self.state, ClientState::Disconnecting(detaching) if !detaching.timer.has_reported())
    }

    /// Attaches a client.
    pub(super) fn attach_client(&mut self, now: Instant, connection: LocalConnection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        if let Err(why) = self.device.replace_doorbell_page() {
            let text = format!("process {peer} was rejected: {why}");
            return self.reporter.report(EndpointEvent::Error(text));
        }
        self.reporter.report(EndpointEvent::Connected(format!("process {peer}")));
        let server = Server::new(self.device.device_info());
        let accesses = BTreeMap::new();
        let session = ClientSession {
            connection,
            server,
            pending_command: None,
            accesses,
            uses_messages: false,
            message_deadline: now.after(MESSAGE_MAX),
        };
        self.state = ClientState::Connected(Box::new(session));
    }

    /// Disconnects a client that does not negotiate, or does not end a message, so that another one can
    /// connect. Returns the amount of work.
    pub(super) fn disconnect_if_timed_out(&mut self, now: Instant) -> usize {
        if now < self.wake_at() {
            return 0;
        }
        let has_begun = matches!(&self.state, ClientState::Connected(session) if session.server.is_version_negotiated());
        let why = match has_begun {
            true => format!("a message was incomplete after {MESSAGE_MAX}"),
            false => format!("it sent no VERSION for {MESSAGE_MAX}, expected it first"),
        };
        self.start_disconnect(now, Some(why));
        1
    }

    /// Deadline of the negotiation.
    pub(super) fn wake_at(&self) -> Instant {
        match &self.state {
            // Nothing is received while the client does not receive its replies.
            ClientState::Connected(session) if session.server.receive_len() == 0 => Instant::NEVER,
            ClientState::Connected(session) => session.message_deadline,
            ClientState::Disconnecting(_) | ClientState::Absent => Instant::NEVER,
        }
    }

    /// Socket of the client, and the readiness to wait for.
    pub(super) fn socket_interest(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let ClientState::Connected(session) = &self.state else { return None };
        let readable = session.server.receive_len() > 0;
        let writable = session.server.next_outgoing().is_some();
        Some((session.connection.as_fd(), Interest { readable, writable }))
    }

    /// Socket of a disconnecting client, which is not waited on.
    pub(super) fn socket_of_disconnecting_client(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            ClientState::Disconnecting(detaching) => Some(detaching.connection.as_fd()),
            _ => None,
        }
    }

    /// Whether a command or a disconnect waits for the controller, within the expected time. Once
    /// it is late, the device wakes the reactor by itself.
    pub(super) fn is_waiting_for_controller(&self) -> bool {
        match &self.state {
            ClientState::Connected(session) => session
                .pending_command
                .as_ref()
                .is_some_and(|command| !command.timer.has_reported()),
            ClientState::Disconnecting(detaching) => !detaching.timer.has_reported(),
            ClientState::Absent => false,
        }
    }

    /// Receives and executes messages. Returns the amount of work.
    pub(super) fn process_messages(&mut self, now: Instant) -> usize {
        let mut session = match std::mem::replace(&mut self.state, ClientState::Absent) {
            ClientState::Connected(session) => session,
            other => {
                self.state = other;
                return 0;
            }
        };
        let result = self.receive_and_execute(now, &mut session);
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
            if !session.receive(now, &mut self.buffer)? {
                break;
            }
            count += 1;
            while let Some(request) = session.server.next_request().map_err(violation_cause)? {
                self.execute_request(now, session, request);
            }
        }
        Ok(count)
    }

    /// Continues delayed commands, and sends messages. Returns the amount of work.
    #[inline]
    pub(super) fn continue_pending(&mut self, now: Instant) -> usize {
        let is_quiet = match &self.state {
            ClientState::Absent => true,
            ClientState::Disconnecting(_) => false,
            ClientState::Connected(session) => {
                session.pending_command.is_none()
                    && session.server.next_outgoing().is_none()
                    && !self.mappings.has_dma_requests()
            }
        };
        if is_quiet { 0 } else { self.advance_session(now) }
    }

    #[cold]
    fn advance_session(&mut self, now: Instant) -> usize {
        match std::mem::replace(&mut self.state, ClientState::Absent) {
            ClientState::Absent => 0,
            ClientState::Disconnecting(detaching) => {
                self.state = ClientState::Disconnecting(detaching);
                self.finish_disconnect(now)
            }
            ClientState::Connected(mut session) => {
                let finished = self.finish_deferred_reply(now, &mut session);
                let asked = self.start_dma_accesses(&mut session);
                let sent = session.send();
                self.state = ClientState::Connected(session);
                match finished.and_then(|finished| Ok(finished + asked + sent?)) {
                    Ok(count) => count,
                    Err(cause) => {
                        self.start_disconnect(now, cause);
                        1
                    }
                }
            }
        }
    }

    /// Checks whether the client has truncated shared memory.
    pub(super) fn disconnect_if_memory_truncated(&mut self, now: Instant) {
        if let Some(iova) = self.mappings.truncated_address() {
            let text = format!("memory at {iova:#x} was made shorter than it was when mapped");
            self.start_disconnect(now, Some(text));
        }
    }

    /// Disconnects the client because the service ends.
    pub(super) fn disconnect_client(&mut self, now: Instant) {
        if matches!(self.state, ClientState::Connected(_)) {
            self.start_disconnect(now, Some("the service ends".to_owned()));
        }
    }

    /// Disconnects the client. Its memory is released once the DMA has drained.
    fn start_disconnect(&mut self, now: Instant, why: DisconnectReasonText) {
        self.state = match std::mem::replace(&mut self.state, ClientState::Absent) {
            // Dropping the session closes its file descriptors.
            ClientState::Connected(session) => {
                let (connection, timer) = (session.connection, SlowDrainReport::new(now));
                ClientState::Disconnecting(DetachingClient { connection, timer })
            }
            other => {
                self.state = other;
                return;
            }
        };
        self.irqs.clear_all();
        self.mappings.unmap_all();
        self.device.front.set_paused(false);
        self.device.start_disabling_controller(now);
        self.reporter.report_disconnect(why, "client");
    }

    fn finish_disconnect(&mut self, now: Instant) -> usize {
        if !self.device.is_controller_disabled() {
            if let ClientState::Disconnecting(detaching) = &mut self.state {
                detaching.timer.report_slow_drain(now, &mut self.reporter, || {
                    format!(
                        "a device has not completed I/O for {DRAIN_WARNING}: until it does the client's \
                         memory stays mapped, and no other client is accepted"
                    )
                });
            }
            return 0;
        }
        self.mappings.release_all();
        self.device.reset_function();
        self.state = ClientState::Absent;
        1
    }

    fn execute_request(
        &mut self,
        now: Instant,
        session: &mut ClientSession,
        request: Request<ReceivedFile>,
    ) {
        let server = &mut session.server;
        match request {
            Request::Map { call, map, file } => match self.map_dma(map, file) {
                Ok(()) => server.reply_success(call),
                Err((errno, text)) => {
                    self.reporter.report_error(text);
                    server.reply_error(call, errno);
                }
            },
            Request::Unmap { call, iova, len_bytes } => {
                // A disabled controller uses no ring, so its rings need no revocation.
                if self.device.is_controller_disabled() {
                    self.mappings.record_rings_released();
                }
                if !self.mappings.invalidate_mapping(iova, len_bytes) {
                    return server.reply_error(call, Errno::NO_ENTRY);
                }
                // The reply means that the memory is no longer accessed: it is deferred until the
                // controller, which starts nothing meanwhile, has acknowledged.
                self.device.front.set_paused(true);
                session.pending_command =
                    Some(PendingCommand::new(now, DeferredReplyKind::Unmap { call, iova }));
            }
            Request::SetIrqs { call, irqs } => match self.set_irqs(irqs) {
                Ok(()) => server.reply_success(call),
                Err(text) => {
                    self.reporter.report_error(text.to_string());
                    server.reply_error(call, Errno::INVALID);
                }
            },
            Request::Read { call, region, offset, len_bytes } => {
                let mut data = vec![0; len_bytes as usize];
                self.device.read_region(region, offset, &mut data);
                server.reply_read(call, &data);
            }
            Request::Write { call, region, offset, data } => {
                if self.device.write_region(now, region, offset, &data) {
                    self.device.start_disabling_controller(now);
                    session.pending_command =
                        Some(PendingCommand::new(now, DeferredReplyKind::Reset { call }));
                    return;
                }
                server.reply_success(call);
            }
            Request::Reset { call } => {
                self.device.start_disabling_controller(now);
                session.pending_command =
                    Some(PendingCommand::new(now, DeferredReplyKind::Reset { call }));
            }
            Request::DmaRead { token, data } => self.handle_dma_reply(session, token, data),
            Request::DmaWritten { token, result } => {
                self.handle_dma_reply(session, token, result.map(|()| Vec::new()));
            }
        }
    }

    fn map_dma(&mut self, map: DmaMap, file: Option<ReceivedFile>) -> Result<(), (Errno, String)> {
        // Regions with only one permission are accessed by message, which needs no mapping. So a
        // file that cannot be mapped for both is not an error there.
        let file = file.filter(|_| map.is_readable && map.is_writable);
        let memory = file.map(|file| self.map_shared_dma(&map, &file)).transpose()?;
        self.mappings.add_mapping(map, memory).map_err(|refused| (refused.errno, refused.text))
    }

    fn map_shared_dma(
        &self,
        map: &DmaMap,
        file: &OwnedFd,
    ) -> Result<ForeignRegion, (Errno, String)> {
        let DmaMap { iova, len_bytes, file_offset: offset, .. } = *map;
        let part = FileRange { offset, len_bytes };
        self.mappings.check_mappable(len_bytes).map_err(|refused| (refused.errno, refused.text))?;
        let adopted = self.regions.map_foreign(file.as_fd(), part);
        adopted.map_err(|why| (Errno::INVALID, format!("memory at {iova:#x}: {why}")))
    }

    fn set_irqs(&self, irqs: IrqSet<ReceivedFile>) -> Result<(), Error> {
        let IrqSet { index, start, count, action, data } = irqs;
        if index != irq_index::MSIX {
            // Error and request interrupts are never raised, so configuring them always succeeds.
            return Ok(());
        }
        let data = match data {
            IrqSelection::All => IrqSelection::All,
            IrqSelection::Some(which) => IrqSelection::Some(which),
            IrqSelection::Files(files) => {
                let line = |file: ReceivedFile| RemoteEventFd::new(file.try_clone()?);
                let irqs: Result<Vec<_>, std::io::Error> = files.into_iter().map(line).collect();
                IrqSelection::Files(
                    irqs.map_err(|error| format!("vector {start}: {error}"))
                        .map_err(Error::environment)?,
                )
            }
        };
        self.irqs.set_irqs(start, count, action, data);
        Ok(())
    }

    /// Replies to a delayed command, once it is done.
    fn finish_deferred_reply(
        &mut self,
        now: Instant,
        session: &mut ClientSession,
    ) -> Result<usize, DisconnectReasonText> {
        let Some(command) = &mut session.pending_command else { return Ok(0) };
        let is_done = match command.pending {
            DeferredReplyKind::Unmap { .. } => {
                !self.mappings.is_awaiting_ring_revocation() && self.device.front.is_quiesced()
            }
            DeferredReplyKind::Reset { .. } => self.device.is_controller_disabled(),
        };
        if !is_done {
            let PendingCommand { pending, timer } = command;
            timer.report_slow_drain(now, &mut self.reporter, || {
                let waited_for =
                    if session.accesses.is_empty() { "a device" } else { "the client itself" };
                format!(
                    "{waited_for} has not completed I/O for {DRAIN_WARNING}: {pending} waits for it"
                )
            });
            return Ok(0);
        }
        match session.pending_command.take().map(|command| command.pending) {
            Some(DeferredReplyKind::Unmap { call, iova }) => {
                self.mappings.release_mapping(iova);
                self.device.front.set_paused(false);
                session.server.reply_success(call);
            }
            Some(DeferredReplyKind::Reset { call }) => {
                self.mappings.record_rings_released();
                self.device.reset_function();
                session.server.reply_success(call);
            }
            None => {}
        }
        // Commands may be queued behind it.
        let mut count = 1;
        while let Some(request) = session.server.next_request().map_err(violation_cause)? {
            self.execute_request(now, session, request);
            count += 1;
        }
        Ok(count)
    }

    /// Starts message-based DMA accesses, one part of each at a time.
    fn start_dma_accesses(&mut self, session: &mut ClientSession) -> usize {
        let mut count = 0;
        while let Some(request) = self.mappings.next_dma_request() {
            if !session.uses_messages {
                session.uses_messages = true;
                let text = format!(
                    "memory at {:#x} was added without a descriptor, or not for reading and writing, and is \
                     accessed by message, which is slow: share it (QEMU: share=on)",
                    request.iova
                );
                self.reporter.report_error(text);
            }
            let token = request.token;
            let part = DmaMessageProgress { request, done_bytes: 0, data: Vec::new() };
            session.send_dma_request(&part);
            session.accesses.insert(token, part);
            count += 1;
        }
        count
    }

    fn handle_dma_reply(
        &mut self,
        session: &mut ClientSession,
        token: u32,
        data: Result<Vec<u8>, Errno>,
    ) {
        let Some(mut part) = session.accesses.remove(&token) else { return };
        match data {
            Err(errno) => self.mappings.complete_dma_request(token, Err(errno)),
            Ok(data) => {
                part.done_bytes += session.next_dma_message_len(&part);
                part.data.extend(data);
                if part.done_bytes >= part.len_bytes() {
                    self.mappings.complete_dma_request(token, Ok(part.data));
                } else {
                    session.send_dma_request(&part);
                    session.accesses.insert(token, part);
                }
            }
        }
    }
}

impl PendingCommand {
    fn new(now: Instant, pending: DeferredReplyKind) -> Self {
        Self { pending, timer: SlowDrainReport::new(now) }
    }
}

impl fmt::Display for DeferredReplyKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmap { iova, .. } => write!(out, "DMA_UNMAP at {iova:#x}"),
            Self::Reset { .. } => out.write_str("a reset"),
        }
    }
}

impl ClientSession {
    /// Receives from the socket. Returns false if nothing is available.
    fn receive(&mut self, now: Instant, buffer: &mut [u8]) -> Result<bool, DisconnectReasonText> {
        let interest = self.server.receive_len().min(buffer.len());
        if interest == 0 {
            return Ok(false);
        }
        let mut files = Vec::new();
        let files_max = tenmil_vfio_user::VersionCapabilities::OURS.files_max as usize;
        let received =
            self.connection.receive_files(&mut buffer[..interest], &mut files, files_max);
        match received.map_err(|error| Some(error.to_string()))? {
            RecvResult::WouldBlock => Ok(false),
            RecvResult::Eof => Err(None),
            RecvResult::Bytes(count) => {
                let files = files.into_iter().map(Arc::new);
                self.server.handle_received(&buffer[..count], files).map_err(violation_cause)?;
                self.message_deadline = match self.server.has_partial_message() {
                    true => self.message_deadline.min(now.after(MESSAGE_MAX)),
                    false => Instant::NEVER,
                };
                Ok(true)
            }
        }
    }

    fn send(&mut self) -> Result<usize, DisconnectReasonText> {
        let mut count = 0;
        while let Some(outgoing) = self.server.next_outgoing() {
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            let sent = self.connection.send_files(outgoing.bytes, &files);
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

    /// Length of the next part of an access.
    fn next_dma_message_len(&self, part: &DmaMessageProgress) -> usize {
        let most = self
            .server
            .client_capabilities()
            .data_bytes_max
            .min(tenmil_vfio_user::VersionCapabilities::OURS.data_bytes_max);
        (part.len_bytes() - part.done_bytes).min(most as usize)
    }

    fn send_dma_request(&mut self, part: &DmaMessageProgress) {
        let len = self.next_dma_message_len(part);
        let ClientDmaRequest { token, iova, what } = &part.request;
        let iova = iova + part.done_bytes as u64;
        match what {
            AccessDirection::Read(_) => {
                self.server.request_dma_read(*token, iova, u32::try_from(len).unwrap_or(0));
            }
            AccessDirection::Write(data) => {
                self.server.request_dma_write(*token, iova, &data[part.done_bytes..][..len]);
            }
        }
    }
}

impl DmaMessageProgress {
    fn len_bytes(&self) -> usize {
        match &self.request.what {
            AccessDirection::Read(len_bytes) => *len_bytes as usize,
            AccessDirection::Write(data) => data.len(),
        }
    }
}

fn violation_cause(violation: Violation) -> DisconnectReasonText {
    Some(violation.to_string())
}

/// Longest time that a rejected client is waited for.
pub(super) const TIME_LIMIT: Span = Span::from_secs(1);
/// Time that a client has to negotiate the version, and for the rest of a message.
const MESSAGE_MAX: Span = Span::from_secs(5);
