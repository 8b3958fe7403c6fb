//! Server side of a vfio-user connection: a device as its client sees it.
//!
//! ```text
//!   Version ── VERSION ──▶ Commands ── each command ──▶ answered here (device properties)
//!                                                  └──▶ Request, answered by the owner
//! ```
//!
//! Commands are executed in order, one at a time: while the owner has not answered one, no further
//! command is returned. Replies to DMA requests are returned nevertheless, since the owner may need
//! them for its answer.

use std::collections::VecDeque;

use crate::body_codec::{BodyReader, BodyWriter};
use crate::header::{Header, MessageKind};
use crate::message_parser::{Message, MessageParser};
use crate::region::INFO_BYTES;
use crate::send_queue::SendQueue;
use crate::version_capabilities::VERSION_BYTES_MAX;
use crate::violation::Errno;
use crate::{
    Command, IrqInfo, IrqSet, OutgoingMessage, RegionInfo, VersionCapabilities, Violation,
};

/// Description of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo<F> {
    /// Regions by index, with the file of each mappable one.
    pub regions: Vec<(RegionInfo, Option<F>)>,
    /// Interrupts by index.
    pub irqs: Vec<IrqInfo>,
}

/// Connection to a client.
#[derive(Debug)]
pub struct Server<F> {
    device: DeviceInfo<F>,
    inbox: MessageParser<F>,
    outbox: SendQueue<F>,
    awaits: AwaitedMessage,
    /// Commands queued behind the one that is being executed.
    waiting: VecDeque<Message<F>>,
    /// Total size and number of descriptors of the queued commands.
    waiting_bytes: usize,
    waiting_files: usize,
    /// Capabilities of the client.
    client_capabilities: VersionCapabilities,
    pending_dma_count: Vec<PendingDma>,
    ids: u16,
    /// Last rejected message.
    refused: Option<Violation>,
    is_busy: bool,
}

/// Next message that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AwaitedMessage {
    Version,
    Commands,
    /// Answer of the owner to a command.
    Reply,
}

/// Outstanding DMA request to the client.
#[derive(Clone, Copy, Debug)]
struct PendingDma {
    id: u16,
    command: Command,
    iova: u64,
    len_bytes: u32,
    token: u32,
}

/// Command that the owner must answer, once.
#[derive(Debug)]
#[must_use = "a command that is not answered stops all that follow"]
pub struct PendingReply {
    id: u16,
    command: Command,
    wants_reply: bool,
    /// Fixed part of the reply.
    echo: Vec<u8>,
}

/// Request to the owner.
#[derive(Debug)]
pub enum Request<F> {
    /// Map client memory for DMA.
    Map {
        /// Handle for the reply.
        call: PendingReply,
        /// Mapping.
        map: DmaMap,
        /// File, if the memory can be mapped.
        file: Option<F>,
    },
    /// Unmap client memory. It must not be accessed any more once the reply is sent.
    Unmap {
        /// Handle for the reply.
        call: PendingReply,
        /// Address.
        iova: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// Configure, mask or trigger interrupts.
    SetIrqs {
        /// Handle for the reply.
        call: PendingReply,
        /// Request.
        irqs: IrqSet<F>,
    },
    /// Read from a region. The reply carries the data.
    Read {
        /// Handle for the reply.
        call: PendingReply,
        /// Region index.
        region: u32,
        /// Offset.
        offset: u64,
        /// Length in bytes.
        len_bytes: u32,
    },
    /// Write to a region.
    Write {
        /// Handle for the reply.
        call: PendingReply,
        /// Region index.
        region: u32,
        /// Offset.
        offset: u64,
        /// Data.
        data: Vec<u8>,
    },
    /// Reset the device.
    Reset {
        /// Handle for the reply.
        call: PendingReply,
    },
    /// Result of a DMA read.
    DmaRead {
        /// Token of the request.
        token: u32,
        /// Data of the requested length, or the error.
        data: Result<Vec<u8>, Errno>,
    },
    /// Result of a DMA write.
    DmaWritten {
        /// Token of the request.
        token: u32,
        /// Success, or the error.
        result: Result<(), Errno>,
    },
}

/// DMA mapping of client memory (Protocol Specification, VFIO_USER_DMA_MAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// I/O virtual address.
    pub iova: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset in its file.
    pub file_offset: u64,
    /// Whether the device may read it.
    pub is_readable: bool,
    /// Whether the device may write it.
    pub is_writable: bool,
}

/// Limits of the queued commands: number, total size in bytes, and descriptors.
const WAITING_MAX: usize = 256;
const WAITING_BYTES_MAX: usize = 4 << 20;
const WAITING_FILES_MAX: usize = 128;
/// Flags of DMA_MAP.
const READABLE: u32 = 1;
const WRITABLE: u32 = 1 << 1;
/// Flags of DEVICE_GET_INFO: reset supported, PCI device.
const RESET: u32 = 1;
const PCI: u32 = 1 << 1;

impl<F: Clone> Server<F> {
    /// Creates the server side of a new connection that presents `device`.
    pub fn new(device: DeviceInfo<F>) -> Self {
        let VersionCapabilities { files_max, data_bytes_max } = VersionCapabilities::OURS;
        Self {
            device,
            inbox: MessageParser::new(data_bytes_max, files_max),
            outbox: SendQueue::new(),
            awaits: AwaitedMessage::Version,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            waiting_files: 0,
            client_capabilities: VersionCapabilities::DEFAULT,
            pending_dma_count: Vec::new(),
            ids: 0,
            refused: None,
            is_busy: false,
        }
    }

    /// Creates the server side of a connection to be rejected: VERSION is answered with
    /// [`Errno::BUSY`], and the connection ends with [`Violation::Busy`].
    pub fn new_rejecting() -> Self {
        let device = DeviceInfo { regions: Vec::new(), irqs: Vec::new() };
        Self { is_busy: true, ..Self::new(device) }
    }

    /// Number of bytes to receive next. Zero while the client does not read what is queued for it.
    pub fn receive_len(&self) -> usize {
        if self.outbox.is_full() { 0 } else { self.inbox.receive_len() }
    }

    /// Whether a part of a message has arrived, and the rest has not.
    pub fn has_partial_message(&self) -> bool {
        self.inbox.has_partial_message()
    }

    /// Receives at most [`receive_len`](Self::receive_len) bytes and the descriptors that arrived with them.
    ///
    /// # Errors
    ///
    /// If the stream cannot be parsed any further; the connection must be closed.
    pub fn handle_received(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<(), Violation> {
        let Some(mut message) = self.inbox.handle_received(bytes, files)? else { return Ok(()) };
        // One excess descriptor suffices to detect that there are too many; further ones are closed
        // at once.
        message.files.truncate(message_files_max(&message) + 1);
        let too_many = |found: usize, expected_max: usize, what| match found > expected_max {
            true => Err(Violation::TooManyPending { expected_max, what }),
            false => Ok(found),
        };
        too_many(self.waiting.len() + 1, WAITING_MAX, "commands")?;
        let bytes = self.waiting_bytes + message.body.len();
        self.waiting_bytes = too_many(bytes, WAITING_BYTES_MAX, "bytes of commands")?;
        let files = self.waiting_files + message.files.len();
        self.waiting_files = too_many(files, WAITING_FILES_MAX, "descriptors with commands")?;
        self.waiting.push_back(message);
        Ok(())
    }

    /// Next request to the owner, if any.
    ///
    /// # Errors
    ///
    /// If the stream cannot be parsed any further; the connection must be closed.
    pub fn next_request(&mut self) -> Result<Option<Request<F>>, Violation> {
        loop {
            let is_taken = |message: &Message<F>| match message.header.kind {
                MessageKind::Reply { .. } => true,
                MessageKind::Command { .. } => self.awaits != AwaitedMessage::Reply,
            };
            let Some(at) = self.waiting.iter().position(is_taken) else { return Ok(None) };
            let Some(message) = self.waiting.remove(at) else { return Ok(None) };
            self.waiting_bytes -= message.body.len();
            self.waiting_files -= message.files.len();
            let header = message.header;
            let taken = match header.kind {
                MessageKind::Reply { error } => self.handle_reply(message, error).map(Some),
                MessageKind::Command { .. } if self.awaits == AwaitedMessage::Version => {
                    self.handle_version(message).map(|()| None)
                }
                MessageKind::Command { .. } => self.handle_command(message),
            };
            match taken {
                Ok(None) => {}
                Ok(Some(request)) => return Ok(Some(request)),
                Err(violation) => self.reject_message(header, violation)?,
            }
        }
    }

    /// Removes and returns the last rejected message that did not end the connection.
    pub fn take_rejection(&mut self) -> Option<Violation> {
        self.refused.take()
    }

    /// Whether the version was negotiated.
    pub fn is_version_negotiated(&self) -> bool {
        self.awaits != AwaitedMessage::Version
    }

    /// Capabilities of the client.
    pub fn client_capabilities(&self) -> VersionCapabilities {
        self.client_capabilities
    }

    /// Replies that a command succeeded.
    pub fn reply_success(&mut self, call: PendingReply) {
        self.reply(call, &[]);
    }

    /// Replies to a read with data of the requested length.
    pub fn reply_read(&mut self, call: PendingReply, data: &[u8]) {
        self.reply(call, data);
    }

    /// Replies that a command failed.
    pub fn reply_error(&mut self, call: PendingReply, error: Errno) {
        self.awaits = AwaitedMessage::Commands;
        if call.wants_reply {
            let (id, command) = (call.id, call.command);
            let kind = MessageKind::Reply { error: Some(error) };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &[], Vec::new());
        }
    }

    fn reply(&mut self, call: PendingReply, data: &[u8]) {
        self.awaits = AwaitedMessage::Commands;
        if call.wants_reply {
            let body = [&call.echo, data].concat();
            self.queue_reply(call.id, call.command, &body, Vec::new());
        }
    }

    /// Requests `len_bytes` of client memory, at most the peer's [`client_capabilities`](Self::client_capabilities).
    /// [`Request::DmaRead`] returns the data.
    pub fn request_dma_read(&mut self, token: u32, iova: u64, len_bytes: u32) {
        let body = BodyWriter::default().u64(iova).u64(len_bytes.into()).into_bytes();
        self.send_request(Command::DmaRead, token, iova, len_bytes, &body);
    }

    /// Writes to client memory. [`Request::DmaWritten`] returns the result.
    pub fn request_dma_write(&mut self, token: u32, iova: u64, data: &[u8]) {
        let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let body = BodyWriter::default().u64(iova).u64(len_bytes.into()).slice(data).into_bytes();
        self.send_request(Command::DmaWrite, token, iova, len_bytes, &body);
    }

    fn send_request(
        &mut self,
        command: Command,
        token: u32,
        iova: u64,
        len_bytes: u32,
        body: &[u8],
    ) {
        self.ids = self.ids.wrapping_add(1);
        let id = self.ids;
        self.pending_dma_count.push(PendingDma { id, command, iova, len_bytes, token });
        let kind = MessageKind::Command { wants_reply: true };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, Vec::new());
    }

    /// Number of outstanding DMA requests.
    pub fn pending_dma_count(&self) -> usize {
        self.pending_dma_count.len()
    }

    /// Next message to send.
    pub fn next_outgoing(&self) -> Option<OutgoingMessage<'_, F>> {
        self.outbox.next_outgoing()
    }

    /// Records that `len_bytes` of it were sent; the descriptors are sent with the first byte.
    pub fn record_sent(&mut self, len_bytes: usize) {
        self.outbox.record_sent(len_bytes);
    }

    fn queue_reply(&mut self, id: u16, command: Command, body: &[u8], files: Vec<F>) {
        let kind = MessageKind::Reply { error: None };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, files);
    }

    /// Answers an invalid message with its errno, if the violation has one.
    fn reject_message(&mut self, header: Header, violation: Violation) -> Result<(), Violation> {
        let Some(error) = violation.errno() else { return Err(violation) };
        if header.kind == (MessageKind::Command { wants_reply: true }) {
            let kind = MessageKind::Reply { error: Some(error) };
            self.outbox.push(Header { kind, ..header }, &[], Vec::new());
        }
        self.refused = Some(violation);
        Ok(())
    }

    fn handle_version(&mut self, message: Message<F>) -> Result<(), Violation> {
        let Message { header: Header { id, command, body_bytes, .. }, body, files } = message;
        if command != Command::Version {
            return Err(Violation::OutOfSequence { found: command, expected: "VERSION first" });
        }
        if body.len() > VERSION_BYTES_MAX {
            let expected_max = u32::try_from(VERSION_BYTES_MAX).unwrap_or(u32::MAX);
            return Err(Violation::Size { command, found: body_bytes, expected_max });
        }
        if !files.is_empty() {
            return Err(Violation::TooManyFiles { command, found: files.len(), expected_max: 0 });
        }
        let (minor, limits) = VersionCapabilities::parse_version(&body)?;
        if self.is_busy {
            let kind = MessageKind::Reply { error: Some(Errno::BUSY) };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &[], Vec::new());
            return Err(Violation::Busy);
        }
        (self.client_capabilities, self.awaits) = (limits, AwaitedMessage::Commands);
        self.queue_reply(id, command, &VersionCapabilities::OURS.encode_version(minor), Vec::new());
        Ok(())
    }

    /// Executes a command, or turns it into a request to the owner.
    fn handle_command(&mut self, message: Message<F>) -> Result<Option<Request<F>>, Violation> {
        let (id, command) = (message.header.id, message.header.command);
        let found = message.files.len();
        let expected = match command {
            Command::DeviceSetIrqs => None,
            Command::DmaMap => (found > 1).then_some("one, or none"),
            // libvfio-user clients attach the descriptor of the memory; it is closed.
            Command::DmaUnmap => None,
            _ => (found > 0).then_some("none"),
        };
        if let Some(expected) = expected {
            return Err(Violation::Files { command, found, expected });
        }
        let request = match command {
            Command::Version => {
                return Err(Violation::OutOfSequence {
                    found: command,
                    expected: "it once, and first",
                });
            }
            Command::DeviceGetInfo => {
                let body = self.encode_device_info(&message.body)?;
                self.queue_reply(id, command, &body, Vec::new());
                return Ok(None);
            }
            Command::DeviceGetRegionInfo => {
                let (body, file) = self.encode_region_info(&message.body)?;
                self.queue_reply(id, command, &body, file.into_iter().collect());
                return Ok(None);
            }
            Command::DeviceGetIrqInfo => {
                let body = self.encode_irq_info(&message.body)?;
                self.queue_reply(id, command, &body, Vec::new());
                return Ok(None);
            }
            Command::DmaMap => parse_dma_map(message)?,
            Command::DmaUnmap => parse_dma_unmap(&message)?,
            Command::DeviceSetIrqs => {
                let call = PendingReply::from_message(&message, &[]);
                let irqs = IrqSet::parse(&message.body, message.files, &self.device.irqs)?;
                Request::SetIrqs { call, irqs }
            }
            Command::RegionRead | Command::RegionWrite => self.parse_region_access(message)?,
            Command::DeviceReset => {
                Request::Reset { call: PendingReply::from_message(&message, &[]) }
            }
            Command::DeviceGetRegionIoFds
            | Command::DmaRead
            | Command::DmaWrite
            | Command::Other(_) => return Err(Violation::NotOffered { command }),
        };
        self.awaits = AwaitedMessage::Reply;
        Ok(Some(request))
    }

    /// Encodes the device properties. The reply is as long as the request, which has an additional
    /// field in some clients.
    fn encode_device_info(&self, body: &[u8]) -> Result<Vec<u8>, Violation> {
        if !matches!(body.len(), 16 | 20) {
            return Err(Violation::Body {
                command: Command::DeviceGetInfo,
                found: body.len(),
                expected: "16 bytes",
            });
        }
        let len = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let mut reply = BodyWriter::default()
            .u32(len(body.len()))
            .u32(RESET | PCI)
            .u32(len(self.device.regions.len()))
            .u32(len(self.device.irqs.len()))
            .into_bytes();
        reply.resize(body.len(), 0);
        Ok(reply)
    }

    fn encode_region_info(&self, body: &[u8]) -> Result<(Vec<u8>, Option<F>), Violation> {
        let command = Command::DeviceGetRegionInfo;
        let mut reader = BodyReader(body);
        let (Some(room), Some(_), Some(index)) = (reader.u32(), reader.u32(), reader.u32()) else {
            return Err(Violation::Body { command, found: body.len(), expected: "32 bytes" });
        };
        let field = |field, found: u32, expected| {
            Err(Violation::Field { command, field, found: found.into(), expected })
        };
        if (room as usize) < INFO_BYTES {
            return field("argsz", room, "space for 32 bytes");
        }
        let Some((shape, file)) = self.device.regions.get(index as usize) else {
            return field("index", index, "a region that the device has");
        };
        let reply = shape.encode(index, room as usize);
        let is_whole = reply.len() == shape.encoded_len();
        Ok((reply, file.clone().filter(|_| is_whole && !shape.areas.is_empty())))
    }

    fn encode_irq_info(&self, body: &[u8]) -> Result<Vec<u8>, Violation> {
        let command = Command::DeviceGetIrqInfo;
        let mut reader = BodyReader(body);
        let (Some(_), Some(_), Some(index)) = (reader.u32(), reader.u32(), reader.u32()) else {
            return Err(Violation::Body { command, found: body.len(), expected: "16 bytes" });
        };
        let shape = self.device.irqs.get(index as usize).ok_or(Violation::Field {
            command,
            field: "index",
            found: index.into(),
            expected: "interrupts that the device has",
        })?;
        Ok(shape.encode(index))
    }

    fn parse_region_access(&self, message: Message<F>) -> Result<Request<F>, Violation> {
        let (command, body) = (message.header.command, &message.body);
        let found = body.len();
        let mut reader = BodyReader(body);
        let (Some(offset), Some(region), Some(len_bytes)) =
            (reader.u64(), reader.u32(), reader.u32())
        else {
            return Err(Violation::Body { command, found, expected: "16 bytes, and the data" });
        };
        let field = |field, found, expected| Violation::Field { command, field, found, expected };
        let shape = self.device.regions.get(region as usize).map(|(shape, _)| shape);
        let may = |shape: &&RegionInfo| match command {
            Command::RegionRead => shape.is_readable,
            _ => shape.is_writable,
        };
        let shape = shape.filter(may).ok_or(field(
            "region",
            region.into(),
            "a region that can be accessed so",
        ))?;
        if len_bytes > VersionCapabilities::OURS.data_bytes_max {
            return Err(field("count", len_bytes.into(), "at most what was negotiated"));
        }
        let end = offset.checked_add(len_bytes.into());
        if end.is_none_or(|end| end > shape.size) {
            return Err(field("offset plus count", offset, "a place inside of the region"));
        }
        let expected_data = if command == Command::RegionRead { 0 } else { len_bytes as usize };
        if reader.remaining().len() != expected_data {
            return Err(Violation::Body { command, found, expected: "as many data as it counts" });
        }
        let call = PendingReply::from_message(&message, &body[..16]);
        if command == Command::RegionRead {
            return Ok(Request::Read { call, region, offset, len_bytes });
        }
        let mut data = message.body;
        data.drain(..16);
        Ok(Request::Write { call, region, offset, data })
    }

    /// Matches a reply with its DMA request.
    fn handle_reply(
        &mut self,
        message: Message<F>,
        error: Option<Errno>,
    ) -> Result<Request<F>, Violation> {
        let Header { id, command, .. } = message.header;
        let is_it = |pending: &PendingDma| pending.id == id && pending.command == command;
        let at = self.pending_dma_count.iter().position(is_it);
        let at = at.ok_or(Violation::UnsolicitedReply { command, id })?;
        let PendingDma { iova, len_bytes, token, .. } = self.pending_dma_count.swap_remove(at);
        let refused = error.or_else(|| {
            let mut reader = BodyReader(&message.body);
            let (address, count) = (reader.u64()?, reader.u32()?);
            (address != iova || count != len_bytes).then_some(Errno::INVALID)
        });
        if command == Command::DmaWrite {
            return Ok(Request::DmaWritten { token, result: refused.map_or(Ok(()), Err) });
        }
        let mut data = message.body;
        let is_whole = data.len() == 16 + len_bytes as usize;
        let data = match refused {
            None if is_whole => {
                data.drain(..16);
                Ok(data)
            }
            None => Err(Errno::INVALID),
            Some(error) => Err(error),
        };
        Ok(Request::DmaRead { token, data })
    }
}

impl PendingReply {
    fn from_message<F>(message: &Message<F>, echo: &[u8]) -> Self {
        let Header { id, command, kind, .. } = message.header;
        let wants_reply = kind == MessageKind::Command { wants_reply: true };
        Self { id, command, wants_reply, echo: echo.to_vec() }
    }
}

/// Parses DMA_MAP.
fn parse_dma_map<F>(message: Message<F>) -> Result<Request<F>, Violation> {
    let command = Command::DmaMap;
    let call = PendingReply::from_message(&message, &[]);
    let Message { body, files, .. } = message;
    let mut reader = BodyReader(&body);
    let mut fields = || {
        let (_, flags, file_offset) = (reader.u32()?, reader.u32()?, reader.u64()?);
        Some((flags, file_offset, reader.u64()?, reader.u64()?))
    };
    let Some((flags, file_offset, iova, len_bytes)) = fields().filter(|_| body.len() == 32) else {
        return Err(Violation::Body { command, found: body.len(), expected: "32 bytes" });
    };
    let field = |field, found, expected| Err(Violation::Field { command, field, found, expected });
    if flags == 0 || flags & !(READABLE | WRITABLE) != 0 {
        return field("flags", flags.into(), "readable, writable or both");
    }
    if len_bytes == 0 || iova.checked_add(len_bytes).is_none() {
        return field("size", len_bytes, "memory that does not end past the last address");
    }
    if file_offset.checked_add(len_bytes).is_none() {
        return field("offset", file_offset, "a place in a file");
    }
    let (is_readable, is_writable) = (flags & READABLE != 0, flags & WRITABLE != 0);
    let map = DmaMap { iova, len_bytes, file_offset, is_readable, is_writable };
    Ok(Request::Map { call, map, file: files.into_iter().next() })
}

/// Parses DMA_UNMAP; its reply repeats the request.
fn parse_dma_unmap<F>(message: &Message<F>) -> Result<Request<F>, Violation> {
    let (command, body) = (Command::DmaUnmap, &message.body);
    let mut reader = BodyReader(body);
    let mut fields = || Some((reader.u32()?, reader.u32()?, reader.u64()?, reader.u64()?));
    let Some((_, flags, iova, len_bytes)) = fields().filter(|_| body.len() == 24) else {
        return Err(Violation::Body { command, found: body.len(), expected: "24 bytes" });
    };
    if flags != 0 {
        let (field, found) = ("flags", flags.into());
        return Err(Violation::Field { command, field, found, expected: "0" });
    }
    Ok(Request::Unmap { call: PendingReply::from_message(message, body), iova, len_bytes })
}

/// Largest number of descriptors that a message may carry.
fn message_files_max<F>(message: &Message<F>) -> usize {
    match (message.header.kind, message.header.command) {
        (MessageKind::Command { .. }, Command::DeviceSetIrqs) => usize::MAX - 1,
        (MessageKind::Command { .. }, Command::DmaMap) => 1,
        _ => 0,
    }
}
