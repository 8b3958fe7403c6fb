//! The client's end: questions out, answers in.
//!
//! Any number of questions may be under way; each has a number, under which its [`Answer`] comes.
//! What the server asks of the client's memory comes as a [`Call`] between the answers.

use crate::bytes::{Reader, Writer};
use crate::header::{Header, Kind};
use crate::inbox::{Inbox, Message};
use crate::outbox::Outbox;
use crate::region::INFO_BYTES;
use crate::server::DmaMap;
use crate::violation::Errno;
use crate::{Capabilities, Command, IrqSet, IrqShape, Outgoing, RegionShape, Violation};

/// A connection to a server.
#[derive(Debug)]
pub struct Client<F> {
    inbox: Inbox<F>,
    outbox: Outbox<F>,
    asked: Vec<Asked>,
    ids: u16,
    /// Of the server, once it has answered.
    limits: Option<Capabilities>,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    id: u16,
    command: Command,
    /// What it was about: a region, an interrupt; for a read its length.
    about: u32,
}

/// A question of the server about the client's memory, to be answered once.
#[derive(Debug)]
#[must_use = "the server waits for it"]
pub struct Call {
    id: u16,
    command: Command,
    iova: u64,
    len_bytes: u32,
    wants_reply: bool,
}

/// What has come.
#[derive(Debug)]
pub enum Answer<F> {
    /// The server is ready: what it can take.
    Version(Capabilities),
    /// Question `id` was answered, and there is nothing more to say.
    Done {
        /// Which.
        id: u16,
    },
    /// Question `id` was refused.
    Refused {
        /// Which.
        id: u16,
        /// What it was.
        command: Command,
        /// Why.
        error: Errno,
    },
    /// What the device is like.
    Device {
        /// How many regions it has.
        regions: u32,
        /// How many kinds of interrupts.
        irqs: u32,
        /// Whether it can be reset.
        can_reset: bool,
    },
    /// What a region is like.
    Region {
        /// Which.
        index: u32,
        /// What it is like.
        shape: RegionShape,
        /// What can be mapped.
        file: Option<F>,
    },
    /// What interrupts are like.
    Irqs {
        /// Which.
        index: u32,
        /// What they are like.
        shape: IrqShape,
    },
    /// What a region holds.
    Data {
        /// Which question it answers.
        id: u16,
        /// As many bytes as were asked for.
        data: Vec<u8>,
    },
    /// The server reads the client's memory.
    DmaRead {
        /// To be answered.
        call: Call,
        /// From where on.
        iova: u64,
        /// How much.
        len_bytes: u32,
    },
    /// The server writes the client's memory.
    DmaWrite {
        /// To be answered.
        call: Call,
        /// From where on.
        iova: u64,
        /// With what.
        data: Vec<u8>,
    },
}

/// The longest reply about a region that is asked for.
const REGION_REPLY_BYTES: u32 = 4096;

impl<F> Client<F> {
    /// A connection that has just been made, with the proposal on its way.
    pub fn new() -> Self {
        let Capabilities { files_max, data_bytes_max } = Capabilities::OURS;
        let mut client = Self {
            inbox: Inbox::new(data_bytes_max, files_max),
            outbox: Outbox::new(),
            asked: Vec::new(),
            ids: 0,
            limits: None,
        };
        client.ask(Command::Version, 0, &Capabilities::OURS.proposal(), Vec::new());
        client
    }

    /// What the server can take; `None` until it has answered.
    pub fn limits(&self) -> Option<Capabilities> {
        self.limits
    }

    /// Asks what the device is like.
    pub fn device(&mut self) -> u16 {
        let body = Writer::default().u32(16).u32(0).u32(0).u32(0).done();
        self.ask(Command::DeviceGetInfo, 0, &body, Vec::new())
    }

    /// Asks what region `index` is like.
    pub fn region(&mut self, index: u32) -> u16 {
        let body = Writer::default().u32(REGION_REPLY_BYTES).u32(0).u32(index).u32(0);
        let body = body.u64(0).u64(0).done();
        self.ask(Command::DeviceGetRegionInfo, index, &body, Vec::new())
    }

    /// Asks what interrupts `index` are like.
    pub fn irqs(&mut self, index: u32) -> u16 {
        let body = Writer::default().u32(16).u32(0).u32(index).u32(0).done();
        self.ask(Command::DeviceGetIrqInfo, index, &body, Vec::new())
    }

    /// Lets the device reach memory, by `file` if there is one.
    pub fn map(&mut self, map: DmaMap, file: Option<F>) -> u16 {
        let DmaMap { iova, len_bytes, file_offset, is_readable, is_writable } = map;
        let flags = u32::from(is_readable) | u32::from(is_writable) << 1;
        let body = Writer::default().u32(32).u32(flags);
        let body = body.u64(file_offset).u64(iova).u64(len_bytes).done();
        self.ask(Command::DmaMap, 0, &body, file.into_iter().collect())
    }

    /// Takes memory away again: the device does not touch it any more once this is answered.
    pub fn unmap(&mut self, iova: u64, len_bytes: u64) -> u16 {
        let body = Writer::default().u32(24).u32(0).u64(iova).u64(len_bytes).done();
        self.ask(Command::DmaUnmap, 0, &body, Vec::new())
    }

    /// Sets up, masks or triggers interrupts.
    pub fn set_irqs(&mut self, irqs: IrqSet<F>) -> u16 {
        let body = irqs.body();
        let files = match irqs.data {
            crate::IrqData::Files(files) => files,
            _ => Vec::new(),
        };
        self.ask(Command::DeviceSetIrqs, 0, &body, files)
    }

    /// Reads a region.
    pub fn read(&mut self, region: u32, offset: u64, len_bytes: u32) -> u16 {
        let body = Writer::default().u64(offset).u32(region).u32(len_bytes).done();
        self.ask(Command::RegionRead, len_bytes, &body, Vec::new())
    }

    /// Writes a region.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> u16 {
        let body = write_body(region, offset, data);
        self.ask(Command::RegionWrite, 0, &body, Vec::new())
    }

    /// Writes a region and wants to hear nothing of it.
    pub fn post(&mut self, region: u32, offset: u64, data: &[u8]) {
        self.ids = self.ids.wrapping_add(1);
        let kind = Kind::Command { wants_reply: false };
        let header = Header { id: self.ids, command: Command::RegionWrite, body_bytes: 0, kind };
        self.outbox.push(header, &write_body(region, offset, data), Vec::new());
    }

    /// Has the device begin anew.
    pub fn reset(&mut self) -> u16 {
        self.ask(Command::DeviceReset, 0, &[], Vec::new())
    }

    fn ask(&mut self, command: Command, about: u32, body: &[u8], files: Vec<F>) -> u16 {
        self.ids = self.ids.wrapping_add(1);
        let id = self.ids;
        self.asked.push(Asked { id, command, about });
        let kind = Kind::Command { wants_reply: true };
        self.outbox.push(Header { id, command, body_bytes: 0, kind }, body, files);
        id
    }

    /// Answers a read of memory.
    pub fn data(&mut self, call: Call, data: &[u8]) {
        self.answer(call, Some(data));
    }

    /// Answers a write of memory.
    pub fn written(&mut self, call: Call) {
        self.answer(call, None);
    }

    fn answer(&mut self, call: Call, data: Option<&[u8]>) {
        let Call { id, command, iova, len_bytes, wants_reply } = call;
        if wants_reply {
            let body = Writer::default().u64(iova);
            // The count of DMA_WRITE is answered in four bytes, that of DMA_READ in eight.
            let body = match data {
                Some(data) => body.u64(len_bytes.into()).slice(data).done(),
                None => body.u32(len_bytes).done(),
            };
            let kind = Kind::Reply { error: None };
            self.outbox.push(Header { id, command, body_bytes: 0, kind }, &body, Vec::new());
        }
    }

    /// Refuses an access to memory.
    pub fn refuse(&mut self, call: Call, error: Errno) {
        if call.wants_reply {
            let kind = Kind::Reply { error: Some(error) };
            let header = Header { id: call.id, command: call.command, body_bytes: 0, kind };
            self.outbox.push(header, &[], Vec::new());
        }
    }

    /// What is to be sent next.
    pub fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        self.outbox.next()
    }

    /// So many bytes of it have been sent, and its descriptors with the first.
    pub fn sent(&mut self, len_bytes: usize) {
        self.outbox.sent(len_bytes);
    }

    /// How many bytes are wanted next. None while the server takes too little of what is meant for
    /// it.
    pub fn wanted(&self) -> usize {
        if self.outbox.is_full() { 0 } else { self.inbox.wanted() }
    }

    /// Takes bytes, no more than were [wanted](Self::wanted), and the descriptors that came with
    /// them: an answer, if that was the last of it.
    ///
    /// # Errors
    ///
    /// If the server is not to be believed any more: the connection is to be closed.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<Option<Answer<F>>, Violation> {
        let Some(message) = self.inbox.take(bytes, files)? else { return Ok(None) };
        match message.header.kind {
            Kind::Reply { error } => self.reply(message, error).map(Some),
            Kind::Command { wants_reply } => command(message, wants_reply).map(Some),
        }
    }

    fn reply(&mut self, message: Message<F>, error: Option<Errno>) -> Result<Answer<F>, Violation> {
        let Message { header: Header { id, command, .. }, body, files } = message;
        let is_it = |asked: &Asked| asked.id == id && asked.command == command;
        let at = self.asked.iter().position(is_it);
        let Asked { about, .. } =
            self.asked.swap_remove(at.ok_or(Violation::Unasked { command, id })?);
        if self.limits.is_none() && command != Command::Version {
            return Err(Violation::Order { found: command, expected: "a reply to VERSION first" });
        }
        if let Some(error) = error {
            return Ok(Answer::Refused { id, command, error });
        }
        let refuse = |expected| Violation::Body { command, found: body.len(), expected };
        if command != Command::DeviceGetRegionInfo && !files.is_empty() {
            let found = files.len();
            return Err(Violation::Files { command, found, expected: "none" });
        }
        let mut reader = Reader(&body);
        Ok(match command {
            Command::Version => {
                let (_, limits) = Capabilities::parse(&body)?;
                self.limits = Some(limits);
                Answer::Version(limits)
            }
            Command::DeviceGetInfo => {
                let mut next = || reader.u32().ok_or(refuse("16 bytes"));
                let (_, flags, regions, irqs) = (next()?, next()?, next()?, next()?);
                Answer::Device { regions, irqs, can_reset: flags & 1 != 0 }
            }
            Command::DeviceGetRegionInfo => {
                if body.len() < INFO_BYTES {
                    return Err(refuse("32 bytes, and the capabilities that they name"));
                }
                let shape = RegionShape::parse(&body, about)?;
                Answer::Region { index: about, shape, file: files.into_iter().next() }
            }
            Command::DeviceGetIrqInfo => {
                let shape = IrqShape::parse(&body, about).ok_or(refuse("16 bytes about it"))?;
                Answer::Irqs { index: about, shape }
            }
            Command::RegionRead => {
                if body.len() != 16 + about as usize {
                    return Err(refuse("as many data as were asked for"));
                }
                Answer::Data { id, data: body[16..].to_vec() }
            }
            _ => Answer::Done { id },
        })
    }
}

impl<F> Default for Client<F> {
    fn default() -> Self {
        Self::new()
    }
}

fn write_body(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
    Writer::default().u64(offset).u32(region).u32(len_bytes).slice(data).done()
}

/// Reads what a server asks.
fn command<F>(message: Message<F>, wants_reply: bool) -> Result<Answer<F>, Violation> {
    let Message { header: Header { id, command, .. }, body, .. } = message;
    let refuse = |expected| Violation::Body { command, found: body.len(), expected };
    let mut reader = Reader(&body);
    let is_read = match command {
        Command::DmaRead => true,
        Command::DmaWrite => false,
        _ => return Err(Violation::Order { found: command, expected: "DMA_READ or DMA_WRITE" }),
    };
    let (Some(iova), Some(count)) = (reader.u64(), reader.u64()) else {
        return Err(refuse("16 bytes, and the data"));
    };
    let expected_max = Capabilities::OURS.data_bytes_max;
    let len_bytes = u32::try_from(count).ok().filter(|len| *len <= expected_max);
    let len_bytes = len_bytes.ok_or(Violation::Field {
        command,
        field: "count",
        found: count,
        expected: "at most what was negotiated",
    })?;
    let call = Call { id, command, iova, len_bytes, wants_reply };
    if is_read {
        return Ok(Answer::DmaRead { call, iova, len_bytes });
    }
    let data = reader.rest();
    if data.len() != len_bytes as usize {
        return Err(refuse("as many data as it counts"));
    }
    Ok(Answer::DmaWrite { call, iova, data: data.to_vec() })
}
