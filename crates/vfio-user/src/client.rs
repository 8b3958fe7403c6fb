//! Client side of a vfio-user connection: sends requests, receives replies.
//!
//! Any number of requests may be outstanding; each has an id, which its [`ClientEvent`] repeats.
//! Accesses of the server to client memory arrive as a [`ServerDmaRequest`] between the replies.

use crate::body_codec::{BodyReader, BodyWriter};
use crate::header::{Header, MessageKind};
use crate::message_parser::{Message, MessageParser};
use crate::region::INFO_BYTES;
use crate::send_queue::SendQueue;
use crate::server::DmaMap;
use crate::violation::Errno;
use crate::{
    Command, IrqInfo, IrqSet, OutgoingMessage, RegionInfo, VersionCapabilities, Violation,
};

/// Connection to a server.
#[derive(Debug)]
pub struct Client<F> {
    inbox: MessageParser<F>,
    outbox: SendQueue<F>,
    pending: Vec<PendingRequest>,
    ids: u16,
    /// Capabilities of the server, once received.
    capabilities: Option<VersionCapabilities>,
}

#[derive(Clone, Copy, Debug)]
struct PendingRequest {
    id: u16,
    command: Command,
    /// Subject of the request: a region or interrupt index; the length of a read.
    about: u32,
}

/// DMA access of the server to client memory, which must be answered once.
#[derive(Debug)]
#[must_use = "the server waits for it"]
pub struct ServerDmaRequest {
    id: u16,
    command: Command,
    iova: u64,
    len_bytes: u32,
    wants_reply: bool,
}

/// Received message.
#[derive(Debug)]
pub enum ClientEvent<F> {
    /// The server accepted the version; its capabilities.
    Version(VersionCapabilities),
    /// Request `id` succeeded, without result data.
    Done {
        /// Request id.
        id: u16,
    },
    /// Request `id` failed.
    Refused {
        /// Request id.
        id: u16,
        /// Command of the request.
        command: Command,
        /// Error.
        error: Errno,
    },
    /// Properties of the device.
    Device {
        /// Number of regions.
        regions: u32,
        /// Number of interrupt kinds.
        irqs: u32,
        /// Whether the device can be reset.
        can_reset: bool,
    },
    /// Properties of a region.
    Region {
        /// Region index.
        index: u32,
        /// Properties.
        shape: RegionInfo,
        /// File for mmap.
        file: Option<F>,
    },
    /// Properties of interrupts.
    Irqs {
        /// Interrupt index.
        index: u32,
        /// Properties.
        shape: IrqInfo,
    },
    /// Data read from a region.
    Data {
        /// Request id.
        id: u16,
        /// Data, of the requested length.
        data: Vec<u8>,
    },
    /// The server reads client memory.
    DmaRead {
        /// Handle for the reply.
        call: ServerDmaRequest,
        /// Address.
        iova: u64,
        /// Length in bytes.
        len_bytes: u32,
    },
    /// The server writes client memory.
    DmaWrite {
        /// Handle for the reply.
        call: ServerDmaRequest,
        /// Address.
        iova: u64,
        /// Data.
        data: Vec<u8>,
    },
}

/// Longest region info reply that is requested.
const REGION_REPLY_BYTES: u32 = 4096;

impl<F> Client<F> {
    /// Creates a client with the VERSION proposal queued.
    pub fn new() -> Self {
        let VersionCapabilities { files_max, data_bytes_max } = VersionCapabilities::OURS;
        let mut client = Self {
            inbox: MessageParser::new(data_bytes_max, files_max),
            outbox: SendQueue::new(),
            pending: Vec::new(),
            ids: 0,
            capabilities: None,
        };
        client.send_request(
            Command::Version,
            0,
            &VersionCapabilities::OURS.encode_proposal(),
            Vec::new(),
        );
        client
    }

    /// Capabilities of the server; `None` until received.
    pub fn server_capabilities(&self) -> Option<VersionCapabilities> {
        self.capabilities
    }

    /// Requests the properties of the device.
    pub fn request_device_info(&mut self) -> u16 {
        let body = BodyWriter::default().u32(16).u32(0).u32(0).u32(0).into_bytes();
        self.send_request(Command::DeviceGetInfo, 0, &body, Vec::new())
    }

    /// Requests the properties of region `index`.
    pub fn request_region_info(&mut self, index: u32) -> u16 {
        let body = BodyWriter::default().u32(REGION_REPLY_BYTES).u32(0).u32(index).u32(0);
        let body = body.u64(0).u64(0).into_bytes();
        self.send_request(Command::DeviceGetRegionInfo, index, &body, Vec::new())
    }

    /// Requests the properties of interrupts `index`.
    pub fn request_irq_info(&mut self, index: u32) -> u16 {
        let body = BodyWriter::default().u32(16).u32(0).u32(index).u32(0).into_bytes();
        self.send_request(Command::DeviceGetIrqInfo, index, &body, Vec::new())
    }

    /// Maps memory for DMA, shared through `file` if given.
    pub fn request_dma_map(&mut self, map: DmaMap, file: Option<F>) -> u16 {
        let DmaMap { iova, len_bytes, file_offset, is_readable, is_writable } = map;
        let flags = u32::from(is_readable) | u32::from(is_writable) << 1;
        let body = BodyWriter::default().u32(32).u32(flags);
        let body = body.u64(file_offset).u64(iova).u64(len_bytes).into_bytes();
        self.send_request(Command::DmaMap, 0, &body, file.into_iter().collect())
    }

    /// Unmaps memory: the device does not access it any more once the reply arrives.
    pub fn request_dma_unmap(&mut self, iova: u64, len_bytes: u64) -> u16 {
        let body = BodyWriter::default().u32(24).u32(0).u64(iova).u64(len_bytes).into_bytes();
        self.send_request(Command::DmaUnmap, 0, &body, Vec::new())
    }

    /// Configures, masks or triggers interrupts.
    pub fn request_set_irqs(&mut self, irqs: IrqSet<F>) -> u16 {
        let body = irqs.encode();
        let files = match irqs.data {
            crate::IrqSelection::Files(files) => files,
            _ => Vec::new(),
        };
        self.send_request(Command::DeviceSetIrqs, 0, &body, files)
    }

    /// Reads from a region.
    pub fn request_region_read(&mut self, region: u32, offset: u64, len_bytes: u32) -> u16 {
        let body = BodyWriter::default().u64(offset).u32(region).u32(len_bytes).into_bytes();
        self.send_request(Command::RegionRead, len_bytes, &body, Vec::new())
    }

    /// Writes to a region.
    pub fn request_region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> u16 {
        let body = region_write_body(region, offset, data);
        self.send_request(Command::RegionWrite, 0, &body, Vec::new())
    }

    /// Writes to a region without a reply.
    pub fn write_region_without_reply(&mut self, region: u32, offset: u64, data: &[u8]) {
        self.ids = self.ids.wrapping_add(1);
        let kind = MessageKind::Command { wants_reply: false };
        let header = Header { id: self.ids, command: Command::RegionWrite, body_bytes: 0, kind };
        self.outbox.push(header, &region_write_body(region, offset, data), Vec::new());
    }

    /// Resets the device.
    pub fn request_reset(&mut self) -> u16 {
        self.send_request(Command::DeviceReset, 0, &[], Vec::new())
    }

    fn send_request(&mut self, command: Command, about: u32, body: &[u8], files: Vec<F>) -> u16 {
        self.ids = self.ids.wrapping_add(1);
        let id = self.ids;
        self.pending.push(PendingRequest { id, command, about });
        let kind = MessageKind::Command { wants_reply: true };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, files);
        id
    }

    /// Replies to a DMA read.
    pub fn reply_dma_read(&mut self, call: ServerDmaRequest, data: &[u8]) {
        self.reply(call, Some(data));
    }

    /// Replies to a DMA write.
    pub fn reply_dma_write(&mut self, call: ServerDmaRequest) {
        self.reply(call, None);
    }

    fn reply(&mut self, call: ServerDmaRequest, data: Option<&[u8]>) {
        let ServerDmaRequest { id, command, iova, len_bytes, wants_reply } = call;
        if wants_reply {
            let body = BodyWriter::default().u64(iova);
            // The count of a DMA_WRITE reply has four bytes, that of a DMA_READ reply eight.
            let body = match data {
                Some(data) => body.u64(len_bytes.into()).slice(data).into_bytes(),
                None => body.u32(len_bytes).into_bytes(),
            };
            let kind = MessageKind::Reply { error: None };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &body, Vec::new());
        }
    }

    /// Rejects a DMA access.
    pub fn reject_dma(&mut self, call: ServerDmaRequest, error: Errno) {
        if call.wants_reply {
            let kind = MessageKind::Reply { error: Some(error) };
            let header = Header { id: call.id, command: call.command, body_bytes: 0, kind };
            self.outbox.push(header, &[], Vec::new());
        }
    }

    /// Next message to send.
    pub fn next_outgoing(&self) -> Option<OutgoingMessage<'_, F>> {
        self.outbox.next_outgoing()
    }

    /// Records that `len_bytes` of it were sent; the descriptors are sent with the first byte.
    pub fn record_sent(&mut self, len_bytes: usize) {
        self.outbox.record_sent(len_bytes);
    }

    /// Number of bytes to receive next. Zero while the server does not read what is queued for it.
    pub fn receive_len(&self) -> usize {
        if self.outbox.is_full() { 0 } else { self.inbox.receive_len() }
    }

    /// Receives at most [`receive_len`](Self::receive_len) bytes and the descriptors that arrived with them.
    /// Returns a message if it is complete.
    ///
    /// # Errors
    ///
    /// If the server violated the protocol; the connection must be closed.
    pub fn handle_received(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<Option<ClientEvent<F>>, Violation> {
        let Some(message) = self.inbox.handle_received(bytes, files)? else { return Ok(None) };
        match message.header.kind {
            MessageKind::Reply { error } => self.handle_reply(message, error).map(Some),
            MessageKind::Command { wants_reply } => {
                parse_server_command(message, wants_reply).map(Some)
            }
        }
    }

    fn handle_reply(
        &mut self,
        message: Message<F>,
        error: Option<Errno>,
    ) -> Result<ClientEvent<F>, Violation> {
        let Message { header: Header { id, command, .. }, body, files } = message;
        let is_it = |pending: &PendingRequest| pending.id == id && pending.command == command;
        let at = self.pending.iter().position(is_it);
        let PendingRequest { about, .. } =
            self.pending.swap_remove(at.ok_or(Violation::UnsolicitedReply { command, id })?);
        if self.capabilities.is_none() && command != Command::Version {
            return Err(Violation::OutOfSequence {
                found: command,
                expected: "a reply to VERSION first",
            });
        }
        if let Some(error) = error {
            return Ok(ClientEvent::Refused { id, command, error });
        }
        let refuse = |expected| Violation::Body { command, found: body.len(), expected };
        if command != Command::DeviceGetRegionInfo && !files.is_empty() {
            let found = files.len();
            return Err(Violation::Files { command, found, expected: "none" });
        }
        let mut reader = BodyReader(&body);
        Ok(match command {
            Command::Version => {
                let (_, limits) = VersionCapabilities::parse_version(&body)?;
                self.capabilities = Some(limits);
                ClientEvent::Version(limits)
            }
            Command::DeviceGetInfo => {
                let mut next = || reader.u32().ok_or(refuse("16 bytes"));
                let (_, flags, regions, irqs) = (next()?, next()?, next()?, next()?);
                ClientEvent::Device { regions, irqs, can_reset: flags & 1 != 0 }
            }
            Command::DeviceGetRegionInfo => {
                if body.len() < INFO_BYTES {
                    return Err(refuse("32 bytes, and the capabilities that they name"));
                }
                let shape = RegionInfo::parse(&body, about)?;
                ClientEvent::Region { index: about, shape, file: files.into_iter().next() }
            }
            Command::DeviceGetIrqInfo => {
                let shape = IrqInfo::parse(&body, about).ok_or(refuse("16 bytes about it"))?;
                ClientEvent::Irqs { index: about, shape }
            }
            Command::RegionRead => {
                if body.len() != 16 + about as usize {
                    return Err(refuse("as many data as were asked for"));
                }
                ClientEvent::Data { id, data: body[16..].to_vec() }
            }
            _ => ClientEvent::Done { id },
        })
    }
}

impl<F> Default for Client<F> {
    fn default() -> Self {
        Self::new()
    }
}

fn region_write_body(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
    BodyWriter::default().u64(offset).u32(region).u32(len_bytes).slice(data).into_bytes()
}

/// Parses a command of the server.
fn parse_server_command<F>(
    message: Message<F>,
    wants_reply: bool,
) -> Result<ClientEvent<F>, Violation> {
    let Message { header: Header { id, command, .. }, body, .. } = message;
    let refuse = |expected| Violation::Body { command, found: body.len(), expected };
    let mut reader = BodyReader(&body);
    let is_read = match command {
        Command::DmaRead => true,
        Command::DmaWrite => false,
        _ => {
            return Err(Violation::OutOfSequence {
                found: command,
                expected: "DMA_READ or DMA_WRITE",
            });
        }
    };
    let (Some(iova), Some(count)) = (reader.u64(), reader.u64()) else {
        return Err(refuse("16 bytes, and the data"));
    };
    let expected_max = VersionCapabilities::OURS.data_bytes_max;
    let len_bytes = u32::try_from(count).ok().filter(|len| *len <= expected_max);
    let len_bytes = len_bytes.ok_or(Violation::Field {
        command,
        field: "count",
        found: count,
        expected: "at most what was negotiated",
    })?;
    let call = ServerDmaRequest { id, command, iova, len_bytes, wants_reply };
    if is_read {
        return Ok(ClientEvent::DmaRead { call, iova, len_bytes });
    }
    let data = reader.remaining();
    if data.len() != len_bytes as usize {
        return Err(refuse("as many data as it counts"));
    }
    Ok(ClientEvent::DmaWrite { call, iova, data: data.to_vec() })
}
