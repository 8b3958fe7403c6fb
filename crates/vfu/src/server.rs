//! The server's end: a device as its client sees it.
//!
//! ```text
//!   AwaitsVersion ── VERSION ──▶ Ready ── each command ──▶ answered here (what the device is like)
//!                                                     └──▶ Request, answered by the owner
//! ```
//!
//! Commands are executed in the order in which they come, one at a time: while the owner has not
//! answered one, no other is handed out. Replies to what the owner has asked are, for it may need
//! them to answer.

use std::collections::VecDeque;

use crate::bytes::{Reader, Writer};
use crate::capabilities::VERSION_BYTES_MAX;
use crate::header::{Header, Kind};
use crate::inbox::{Inbox, Message};
use crate::outbox::Outbox;
use crate::region::INFO_BYTES;
use crate::violation::Errno;
use crate::{Capabilities, Command, IrqSet, IrqShape, Outgoing, RegionShape, Violation};

/// What a device is like.
#[derive(Clone, Debug)]
pub struct Device<F> {
    /// Its regions, by index, and the descriptor of each that can be mapped.
    pub regions: Vec<(RegionShape, Option<F>)>,
    /// Its interrupts, by index.
    pub irqs: Vec<IrqShape>,
}

/// A connection to a client.
#[derive(Debug)]
pub struct Server<F> {
    device: Device<F>,
    inbox: Inbox<F>,
    outbox: Outbox<F>,
    awaits: Awaits,
    /// Commands behind the one that is being executed.
    waiting: VecDeque<Message<F>>,
    /// Bytes and descriptors of those.
    waiting_bytes: usize,
    waiting_files: usize,
    /// Of the peer.
    limits: Capabilities,
    asked: Vec<Asked>,
    ids: u16,
    /// What was refused last.
    refused: Option<Violation>,
    is_busy: bool,
}

/// What has to come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaits {
    Version,
    Commands,
    /// The owner's answer to a command.
    Answer,
}

/// What was asked of the client.
#[derive(Clone, Copy, Debug)]
struct Asked {
    id: u16,
    command: Command,
    iova: u64,
    len_bytes: u32,
    token: u32,
}

/// A command that the owner has to answer, once.
#[derive(Debug)]
#[must_use = "a command that is not answered stops all that follow"]
pub struct Call {
    id: u16,
    command: Command,
    wants_reply: bool,
    /// The fixed part of the reply.
    echo: Vec<u8>,
}

/// What the owner has to do.
#[derive(Debug)]
pub enum Request<F> {
    /// Memory of the client can be reached from now on.
    Map {
        /// To be answered.
        call: Call,
        /// Which.
        map: DmaMap,
        /// Where it is, if it can be mapped.
        file: Option<F>,
    },
    /// Memory of the client must not be touched any more once this is answered.
    Unmap {
        /// To be answered.
        call: Call,
        /// Where it begins.
        iova: u64,
        /// How long it is.
        len_bytes: u64,
    },
    /// Interrupts are set up, masked or triggered.
    SetIrqs {
        /// To be answered.
        call: Call,
        /// What is wanted.
        irqs: IrqSet<F>,
    },
    /// A region is read: answered with so many bytes.
    Read {
        /// To be answered.
        call: Call,
        /// Which.
        region: u32,
        /// From where on.
        offset: u64,
        /// How many bytes.
        len_bytes: u32,
    },
    /// A region is written.
    Write {
        /// To be answered.
        call: Call,
        /// Which.
        region: u32,
        /// From where on.
        offset: u64,
        /// With what.
        data: Vec<u8>,
    },
    /// The device begins anew.
    Reset {
        /// To be answered.
        call: Call,
    },
    /// What was read of the client's memory.
    DmaRead {
        /// As it was asked.
        token: u32,
        /// The bytes, as many as were asked for, or why there are none.
        data: Result<Vec<u8>, Errno>,
    },
    /// The client's memory was written.
    DmaWritten {
        /// As it was asked.
        token: u32,
        /// Whether it was.
        result: Result<(), Errno>,
    },
}

/// Memory that a client lets its device reach (Protocol Specification, VFIO_USER_DMA_MAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// Where it begins for the device.
    pub iova: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// Where it begins in its descriptor.
    pub file_offset: u64,
    /// Whether the device may read it.
    pub is_readable: bool,
    /// Whether the device may write it.
    pub is_writable: bool,
}

/// Commands that are kept while one is executed, their bytes, and the descriptors with them.
const WAITING_MAX: usize = 256;
const WAITING_BYTES_MAX: usize = 4 << 20;
const WAITING_FILES_MAX: usize = 128;
/// Flags of DMA_MAP.
const READABLE: u32 = 1;
const WRITABLE: u32 = 1 << 1;
/// Flags of DEVICE_GET_INFO: the device can be reset, and it is a PCI device.
const RESET: u32 = 1;
const PCI: u32 = 1 << 1;

impl<F: Clone> Server<F> {
    /// A connection that has just been made, to be offered `device`.
    pub fn new(device: Device<F>) -> Self {
        let Capabilities { files_max, data_bytes_max } = Capabilities::OURS;
        Self {
            device,
            inbox: Inbox::new(data_bytes_max, files_max),
            outbox: Outbox::new(),
            awaits: Awaits::Version,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            waiting_files: 0,
            limits: Capabilities::DEFAULT,
            asked: Vec::new(),
            ids: 0,
            refused: None,
            is_busy: false,
        }
    }

    /// A connection of somebody who cannot have the device: his proposal is answered with
    /// [`Errno::BUSY`], and then it is over with [`Violation::Busy`].
    pub fn turning_away() -> Self {
        let device = Device { regions: Vec::new(), irqs: Vec::new() };
        Self { is_busy: true, ..Self::new(device) }
    }

    /// How many bytes are wanted next. None while the client takes too little of what is meant for
    /// it.
    pub fn wanted(&self) -> usize {
        if self.outbox.is_full() { 0 } else { self.inbox.wanted() }
    }

    /// Whether a part of a message has come, and the rest is waited for.
    pub fn is_amid(&self) -> bool {
        self.inbox.is_amid()
    }

    /// Takes bytes, no more than were [wanted](Self::wanted), and the descriptors that came with
    /// them.
    ///
    /// # Errors
    ///
    /// If nothing that follows can be understood: the connection is to be closed.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<(), Violation> {
        let Some(mut message) = self.inbox.take(bytes, files)? else { return Ok(()) };
        // One more than it may have says that it has too many; the others are closed at once.
        message.files.truncate(files_max(&message) + 1);
        let too_many = |found: usize, expected_max: usize, what| match found > expected_max {
            true => Err(Violation::Crowd { expected_max, what }),
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

    /// What the owner has to do next, if anything.
    ///
    /// # Errors
    ///
    /// If nothing that follows can be understood: the connection is to be closed.
    pub fn next_request(&mut self) -> Result<Option<Request<F>>, Violation> {
        loop {
            let is_taken = |message: &Message<F>| match message.header.kind {
                Kind::Reply { .. } => true,
                Kind::Command { .. } => self.awaits != Awaits::Answer,
            };
            let Some(at) = self.waiting.iter().position(is_taken) else { return Ok(None) };
            let Some(message) = self.waiting.remove(at) else { return Ok(None) };
            self.waiting_bytes -= message.body.len();
            self.waiting_files -= message.files.len();
            let header = message.header;
            let taken = match header.kind {
                Kind::Reply { error } => self.reply(message, error).map(Some),
                Kind::Command { .. } if self.awaits == Awaits::Version => {
                    self.version(message).map(|()| None)
                }
                Kind::Command { .. } => self.command(message),
            };
            match taken {
                Ok(None) => {}
                Ok(Some(request)) => return Ok(Some(request)),
                Err(violation) => self.refuse_message(header, violation)?,
            }
        }
    }

    /// What was refused since this was last asked, and left the connection as it was.
    pub fn take_refused(&mut self) -> Option<Violation> {
        self.refused.take()
    }

    /// Whether the peer has said which version it speaks.
    pub fn has_version(&self) -> bool {
        self.awaits != Awaits::Version
    }

    /// What the peer can take.
    pub fn limits(&self) -> Capabilities {
        self.limits
    }

    /// A command is done.
    pub fn done(&mut self, call: Call) {
        self.answer(call, &[]);
    }

    /// A read is done, with as many bytes as it asked for.
    pub fn data(&mut self, call: Call, data: &[u8]) {
        self.answer(call, data);
    }

    /// A command cannot be done.
    pub fn refuse(&mut self, call: Call, error: Errno) {
        self.awaits = Awaits::Commands;
        if call.wants_reply {
            let (id, command) = (call.id, call.command);
            let kind = Kind::Reply { error: Some(error) };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &[], Vec::new());
        }
    }

    fn answer(&mut self, call: Call, data: &[u8]) {
        self.awaits = Awaits::Commands;
        if call.wants_reply {
            let body = [&call.echo, data].concat();
            self.reply_with(call.id, call.command, &body, Vec::new());
        }
    }

    /// Asks for `len_bytes` of the client's memory: [`Request::DmaRead`] brings them. No more than
    /// the peer's [`limits`](Self::limits) can be asked for at once.
    pub fn dma_read(&mut self, token: u32, iova: u64, len_bytes: u32) {
        let body = Writer::default().u64(iova).u64(len_bytes.into()).done();
        self.ask(Command::DmaRead, token, iova, len_bytes, &body);
    }

    /// Sends bytes for the client's memory: [`Request::DmaWritten`] says that they are there.
    pub fn dma_write(&mut self, token: u32, iova: u64, data: &[u8]) {
        let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let body = Writer::default().u64(iova).u64(len_bytes.into()).slice(data).done();
        self.ask(Command::DmaWrite, token, iova, len_bytes, &body);
    }

    fn ask(&mut self, command: Command, token: u32, iova: u64, len_bytes: u32, body: &[u8]) {
        self.ids = self.ids.wrapping_add(1);
        let id = self.ids;
        self.asked.push(Asked { id, command, iova, len_bytes, token });
        let kind = Kind::Command { wants_reply: true };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, Vec::new());
    }

    /// How many of the accesses to the client's memory have not ended.
    pub fn asked(&self) -> usize {
        self.asked.len()
    }

    /// What is to be sent next.
    pub fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        self.outbox.next()
    }

    /// So many bytes of it have been sent, and its descriptors with the first.
    pub fn sent(&mut self, len_bytes: usize) {
        self.outbox.sent(len_bytes);
    }

    fn reply_with(&mut self, id: u16, command: Command, body: &[u8], files: Vec<F>) {
        let kind = Kind::Reply { error: None };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, files);
    }

    /// Answers a message that was not as it should be, if that can be.
    fn refuse_message(&mut self, header: Header, violation: Violation) -> Result<(), Violation> {
        let Some(error) = violation.errno() else { return Err(violation) };
        if header.kind == (Kind::Command { wants_reply: true }) {
            let kind = Kind::Reply { error: Some(error) };
            self.outbox.push(Header { kind, ..header }, &[], Vec::new());
        }
        self.refused = Some(violation);
        Ok(())
    }

    fn version(&mut self, message: Message<F>) -> Result<(), Violation> {
        let Message { header: Header { id, command, body_bytes, .. }, body, files } = message;
        if command != Command::Version {
            return Err(Violation::Order { found: command, expected: "VERSION first" });
        }
        if body.len() > VERSION_BYTES_MAX {
            let expected_max = u32::try_from(VERSION_BYTES_MAX).unwrap_or(u32::MAX);
            return Err(Violation::Size { command, found: body_bytes, expected_max });
        }
        if !files.is_empty() {
            return Err(Violation::TooManyFiles { command, found: files.len(), expected_max: 0 });
        }
        let (minor, limits) = Capabilities::parse(&body)?;
        if self.is_busy {
            let kind = Kind::Reply { error: Some(Errno::BUSY) };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &[], Vec::new());
            return Err(Violation::Busy);
        }
        (self.limits, self.awaits) = (limits, Awaits::Commands);
        self.reply_with(id, command, &Capabilities::OURS.body(minor), Vec::new());
        Ok(())
    }

    /// Executes a command, or hands it to the owner.
    fn command(&mut self, message: Message<F>) -> Result<Option<Request<F>>, Violation> {
        let (id, command) = (message.header.id, message.header.command);
        let found = message.files.len();
        let expected = match command {
            Command::DeviceSetIrqs => None,
            Command::DmaMap => (found > 1).then_some("one, or none"),
            // Clients of the reference library send that of the memory along: it is closed.
            Command::DmaUnmap => None,
            _ => (found > 0).then_some("none"),
        };
        if let Some(expected) = expected {
            return Err(Violation::Files { command, found, expected });
        }
        let request = match command {
            Command::Version => {
                return Err(Violation::Order { found: command, expected: "it once, and first" });
            }
            Command::DeviceGetInfo => {
                let body = self.info(&message.body)?;
                self.reply_with(id, command, &body, Vec::new());
                return Ok(None);
            }
            Command::DeviceGetRegionInfo => {
                let (body, file) = self.region_info(&message.body)?;
                self.reply_with(id, command, &body, file.into_iter().collect());
                return Ok(None);
            }
            Command::DeviceGetIrqInfo => {
                let body = self.irq_info(&message.body)?;
                self.reply_with(id, command, &body, Vec::new());
                return Ok(None);
            }
            Command::DmaMap => map(message)?,
            Command::DmaUnmap => unmap(&message)?,
            Command::DeviceSetIrqs => {
                let call = Call::of(&message, &[]);
                let irqs = IrqSet::parse(&message.body, message.files, &self.device.irqs)?;
                Request::SetIrqs { call, irqs }
            }
            Command::RegionRead | Command::RegionWrite => self.access(message)?,
            Command::DeviceReset => Request::Reset { call: Call::of(&message, &[]) },
            Command::DeviceGetRegionIoFds
            | Command::DmaRead
            | Command::DmaWrite
            | Command::Other(_) => return Err(Violation::NotOffered { command }),
        };
        self.awaits = Awaits::Answer;
        Ok(Some(request))
    }

    /// The reply is as long as the question, which has another field in some clients.
    fn info(&self, body: &[u8]) -> Result<Vec<u8>, Violation> {
        if !matches!(body.len(), 16 | 20) {
            return Err(Violation::Body {
                command: Command::DeviceGetInfo,
                found: body.len(),
                expected: "16 bytes",
            });
        }
        let len = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let mut reply = Writer::default()
            .u32(len(body.len()))
            .u32(RESET | PCI)
            .u32(len(self.device.regions.len()))
            .u32(len(self.device.irqs.len()))
            .done();
        reply.resize(body.len(), 0);
        Ok(reply)
    }

    fn region_info(&self, body: &[u8]) -> Result<(Vec<u8>, Option<F>), Violation> {
        let command = Command::DeviceGetRegionInfo;
        let mut reader = Reader(body);
        let (Some(room), Some(_), Some(index)) = (reader.u32(), reader.u32(), reader.u32()) else {
            return Err(Violation::Body { command, found: body.len(), expected: "32 bytes" });
        };
        let field = |field, found: u32, expected| {
            Err(Violation::Field { command, field, found: found.into(), expected })
        };
        if (room as usize) < INFO_BYTES {
            return field("argsz", room, "room for 32 bytes");
        }
        let Some((shape, file)) = self.device.regions.get(index as usize) else {
            return field("index", index, "a region that the device has");
        };
        let reply = shape.body(index, room as usize);
        let is_whole = reply.len() == shape.reply_bytes();
        Ok((reply, file.clone().filter(|_| is_whole && !shape.areas.is_empty())))
    }

    fn irq_info(&self, body: &[u8]) -> Result<Vec<u8>, Violation> {
        let command = Command::DeviceGetIrqInfo;
        let mut reader = Reader(body);
        let (Some(_), Some(_), Some(index)) = (reader.u32(), reader.u32(), reader.u32()) else {
            return Err(Violation::Body { command, found: body.len(), expected: "16 bytes" });
        };
        let shape = self.device.irqs.get(index as usize).ok_or(Violation::Field {
            command,
            field: "index",
            found: index.into(),
            expected: "interrupts that the device has",
        })?;
        Ok(shape.body(index))
    }

    fn access(&self, message: Message<F>) -> Result<Request<F>, Violation> {
        let (command, body) = (message.header.command, &message.body);
        let found = body.len();
        let mut reader = Reader(body);
        let (Some(offset), Some(region), Some(len_bytes)) =
            (reader.u64(), reader.u32(), reader.u32())
        else {
            return Err(Violation::Body { command, found, expected: "16 bytes, and the data" });
        };
        let field = |field, found, expected| Violation::Field { command, field, found, expected };
        let shape = self.device.regions.get(region as usize).map(|(shape, _)| shape);
        let may = |shape: &&RegionShape| match command {
            Command::RegionRead => shape.is_readable,
            _ => shape.is_writable,
        };
        let shape = shape.filter(may).ok_or(field(
            "region",
            region.into(),
            "a region that can be accessed so",
        ))?;
        if len_bytes > Capabilities::OURS.data_bytes_max {
            return Err(field("count", len_bytes.into(), "at most what was negotiated"));
        }
        let end = offset.checked_add(len_bytes.into());
        if end.is_none_or(|end| end > shape.size) {
            return Err(field("offset plus count", offset, "a place inside of the region"));
        }
        let expected_data = if command == Command::RegionRead { 0 } else { len_bytes as usize };
        if reader.rest().len() != expected_data {
            return Err(Violation::Body { command, found, expected: "as many data as it counts" });
        }
        let call = Call::of(&message, &body[..16]);
        if command == Command::RegionRead {
            return Ok(Request::Read { call, region, offset, len_bytes });
        }
        let mut data = message.body;
        data.drain(..16);
        Ok(Request::Write { call, region, offset, data })
    }

    /// Finds what a reply answers.
    fn reply(
        &mut self,
        message: Message<F>,
        error: Option<Errno>,
    ) -> Result<Request<F>, Violation> {
        let Header { id, command, .. } = message.header;
        let is_it = |asked: &Asked| asked.id == id && asked.command == command;
        let at = self.asked.iter().position(is_it);
        let at = at.ok_or(Violation::Unasked { command, id })?;
        let Asked { iova, len_bytes, token, .. } = self.asked.swap_remove(at);
        let refused = error.or_else(|| {
            let mut reader = Reader(&message.body);
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

impl Call {
    fn of<F>(message: &Message<F>, echo: &[u8]) -> Self {
        let Header { id, command, kind, .. } = message.header;
        let wants_reply = kind == Kind::Command { wants_reply: true };
        Self { id, command, wants_reply, echo: echo.to_vec() }
    }
}

/// Reads a DMA_MAP.
fn map<F>(message: Message<F>) -> Result<Request<F>, Violation> {
    let command = Command::DmaMap;
    let call = Call::of(&message, &[]);
    let Message { body, files, .. } = message;
    let mut reader = Reader(&body);
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

/// Reads a DMA_UNMAP, which is answered with itself.
fn unmap<F>(message: &Message<F>) -> Result<Request<F>, Violation> {
    let (command, body) = (Command::DmaUnmap, &message.body);
    let mut reader = Reader(body);
    let mut fields = || Some((reader.u32()?, reader.u32()?, reader.u64()?, reader.u64()?));
    let Some((_, flags, iova, len_bytes)) = fields().filter(|_| body.len() == 24) else {
        return Err(Violation::Body { command, found: body.len(), expected: "24 bytes" });
    };
    if flags != 0 {
        let (field, found) = ("flags", flags.into());
        return Err(Violation::Field { command, field, found, expected: "0" });
    }
    Ok(Request::Unmap { call: Call::of(message, body), iova, len_bytes })
}

/// How many descriptors may come with a message.
fn files_max<F>(message: &Message<F>) -> usize {
    match (message.header.kind, message.header.command) {
        (Kind::Command { .. }, Command::DeviceSetIrqs) => usize::MAX - 1,
        (Kind::Command { .. }, Command::DmaMap) => 1,
        _ => 0,
    }
}
