//! The device's end of a pair of rings: commands out of one, and onto a connection; answers into the
//! other.
//!
//! ```text
//!   doorbell ──▶ tail                        posted ──▶ tail, phase
//!   submission | · · · c c c · |  completion | a a a · · · |
//!                      └─ head, to be taken next
//! ```
//!
//! The tag of a command on the wire is the number of its slot at the driver, which is in the low bits
//! of its identifier. So an Abort names the same command on both sides, and nothing is translated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base::{HostEntries, HostMemory, Segment, Ticket, entry_from_dwords};
use dma::{SharedEntries, SharedHostMemory};
use tcp::{Data, Full};
use wire::sgl::{Descriptor, Meaning, Place};
use wire::{Command, Completion, DataPointer, Status};

use crate::exchange::{Answered, Exchange};

/// A pair of rings, from the device's side.
#[derive(Debug)]
pub(crate) struct Rings {
    commands: SharedEntries,
    completions: SharedEntries,
    memory: SharedHostMemory,
    bell: Bell,
    queue: u16,
    depth: u32,
    completion_depth: u32,
    /// The next command.
    head: u32,
    /// The next completion.
    tail: u32,
    phase: bool,
    /// The bits of an identifier that are the number of a slot.
    slot_mask: u16,
    /// Answers that were made here.
    refused: Vec<Completion>,
}

/// A submission doorbell: a word that the driver stores to and the device loads.
///
/// Completion doorbells tell a device nothing here: a queue pair never has more commands out than its
/// completion ring has room for.
#[derive(Clone, Debug, Default)]
pub struct Bell(Arc<AtomicU32>);

/// Where rings lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingPlaces {
    pub(crate) submission: u64,
    pub(crate) submission_depth: u32,
    pub(crate) completion: u64,
    pub(crate) completion_depth: u32,
}

/// Descriptors in the longest list that a driver makes.
const DESCRIPTORS_MAX: usize = 256;

impl base::Doorbell for Bell {
    #[inline]
    fn ring(&mut self, value: u32) {
        // Pairs with the acquire in `load`: who sees the tail sees the commands before it.
        self.0.store(value, Ordering::Release);
    }
}

impl Bell {
    #[inline]
    pub(crate) fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl Rings {
    /// The rings at `places`, empty. `None` if they do not lie in memory that rings may lie in.
    pub(crate) fn new(
        mut memory: SharedHostMemory,
        places: RingPlaces,
        bell: Bell,
        queue: u16,
    ) -> Option<Self> {
        let RingPlaces { submission, submission_depth, completion, completion_depth } = places;
        let mut entries =
            |iova, depth: u32, bytes| memory.entries(iova, u64::from(depth) * bytes).ok().flatten();
        let commands = entries(submission, submission_depth, 64)?;
        let completions = entries(completion, completion_depth, 16)?;
        Some(Self {
            commands,
            completions,
            memory,
            bell,
            queue,
            depth: submission_depth,
            completion_depth,
            head: 0,
            tail: 0,
            phase: true,
            slot_mask: slot_mask(submission_depth),
            refused: Vec::new(),
        })
    }

    /// The driver's doorbell.
    #[inline]
    pub(crate) fn doorbell(&self) -> u32 {
        self.bell.load()
    }

    /// Whether there are commands before `doorbell`.
    #[inline]
    pub(crate) fn has_commands(&self, doorbell: u32) -> bool {
        doorbell != self.head
    }

    /// The next command before `doorbell`, which stays where it is.
    #[inline]
    pub(crate) fn next(&self, doorbell: u32) -> Option<Command> {
        if self.head == doorbell || doorbell >= self.depth {
            return None;
        }
        self.commands.load_command(self.head).ok().map(Command)
    }

    /// The next command has been taken.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.head += 1;
        if self.head == self.depth {
            self.head = 0;
        }
    }

    /// The number of the driver's slot.
    #[inline]
    pub(crate) fn tag_of(&self, command: &Command) -> u16 {
        command.cid() & self.slot_mask
    }

    /// Puts what lies before `doorbell` onto `exchange`, as far as there is room.
    #[inline]
    pub(crate) fn take(&mut self, doorbell: u32, exchange: &mut Exchange) {
        while let Some(command) = self.next(doorbell) {
            match self.submit(&command, exchange) {
                Ok(Ok(())) => {}
                Ok(Err(Full)) => break,
                Err(status) => self.refuse(&command, status),
            }
            self.advance();
        }
        self.post_refused();
    }

    /// Puts one command onto `exchange`, or says why it makes no sense.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        command: &Command,
        exchange: &mut Exchange,
    ) -> Result<Result<(), Full>, Status> {
        let names = (self.tag_of(command), command.cid());
        let direction = command.opcode() & 0b11;
        let Descriptor([iova, rest]) = command.sgl1();
        let plain = rest >> 32 == 0 && command.psdt() == DataPointer::Sgl;
        if plain && let Ok(len_bytes @ 4..) = u32::try_from(rest) {
            let data = data_of(direction, len_bytes)?;
            return match self.memory.reach(iova, len_bytes).ok().flatten() {
                Some(segment) => Ok(exchange.submit(names, command, data, Some(segment))),
                None => self.submit_lent(names, command, data, exchange),
            };
        }
        self.submit_slowly(names, command, exchange)
    }

    /// A command whose data have no address, because they were lent or because they do not exist.
    #[cold]
    fn submit_lent(
        &mut self,
        names: (u16, u16),
        command: &Command,
        data: Data,
        exchange: &mut Exchange,
    ) -> Result<Result<(), Full>, Status> {
        let (Descriptor([iova, _]), len_bytes) = (command.sgl1(), len_of(data));
        let segment = self.memory.lent(iova, len_bytes).ok_or(Status::DATA_TRANSFER_ERROR)?;
        Ok(exchange.submit_lent(names, command, data, segment))
    }

    #[cold]
    fn submit_slowly(
        &mut self,
        names: (u16, u16),
        command: &Command,
        exchange: &mut Exchange,
    ) -> Result<Result<(), Full>, Status> {
        let nothing = Some(Segment::default());
        let has_data = command.opcode() & 0b11 != 0
            && (command.psdt() != DataPointer::Prp || command.prp1() != 0);
        if !has_data {
            return Ok(exchange.submit(names, command, Data::None, nothing));
        }
        if command.psdt() != DataPointer::Sgl {
            return Err(Status::INVALID_FIELD);
        }
        match command.sgl1().meaning() {
            Meaning::LastSegment { place: Place::Address(iova), len_bytes } => {
                let len_bytes = self.resolve(iova, len_bytes, exchange.list(names.0))?;
                let data = data_of(command.opcode() & 0b11, len_bytes)?;
                Ok(exchange.submit(names, command, data, None))
            }
            Meaning::DataBlock { len_bytes: 0, .. } => {
                Ok(exchange.submit(names, command, Data::None, nothing))
            }
            Meaning::DataBlock { .. } => Err(Status::DATA_SGL_LENGTH_INVALID),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        }
    }

    /// Puts the segments behind a list of descriptors into `into`. How many bytes they are.
    fn resolve(
        &mut self,
        iova: u64,
        len_bytes: u32,
        into: &mut Vec<Segment>,
    ) -> Result<u32, Status> {
        let mut bytes = [[0; Descriptor::BYTES]; DESCRIPTORS_MAX];
        let count = len_bytes as usize / Descriptor::BYTES;
        let list = bytes.get_mut(..count).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        let read = self.memory.read(Ticket(0), iova, list.as_flattened_mut());
        read.map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        into.clear();
        let mut total = 0_u32;
        for descriptor in list {
            let Meaning::DataBlock { place: Place::Address(iova), len_bytes } =
                Descriptor::from_bytes(descriptor).meaning()
            else {
                return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
            };
            let segment = self.memory.reach(iova, len_bytes).ok().flatten();
            into.push(segment.ok_or(Status::DATA_TRANSFER_ERROR)?);
            total = total.checked_add(len_bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        }
        Ok(total)
    }

    /// Answers `command` from here, with the next [`post_refused`](Self::post_refused).
    #[cold]
    pub(crate) fn refuse(&mut self, command: &Command, status: Status) {
        self.refused.push(Completion::new(command.cid(), status));
    }

    #[inline]
    pub(crate) fn post_refused(&mut self) {
        while let Some(completion) = self.refused.pop() {
            self.post(completion.cid(), completion);
        }
    }

    /// Posts the answer to the command whose identifier on these rings is `cid`.
    #[inline]
    pub(crate) fn post(&mut self, cid: u16, completion: Completion) {
        let Completion([first, second, _, last]) = completion;
        let third = u32::from(self.queue) << 16 | self.head;
        let status = last >> 17 << 17 | u32::from(self.phase) << 16 | u32::from(cid);
        let entry = entry_from_dwords([first, second, third, status]);
        // It lies inside: the rings were resolved whole.
        let _ = self.completions.store_completion(self.tail, entry);
        self.tail += 1;
        if self.tail == self.completion_depth {
            (self.tail, self.phase) = (0, !self.phase);
        }
    }

    /// As [`post`](Self::post), for what a connection has answered.
    #[inline]
    pub(crate) fn answer(&mut self, answered: Answered) {
        let Answered { name, completion, .. } = answered;
        // Only a host says so (Base 2.1 §4.2.3.4), and this one would send it again without end.
        let is_lie = completion.status().is(Status::ABORTED_BY_HOST);
        let believed =
            if is_lie { completion.with_status(Status::INTERNAL_PATH_ERROR) } else { completion };
        self.post(name, believed);
    }
}

/// How the data of a command move, by the low bits of its opcode.
#[inline]
fn data_of(direction: u8, len_bytes: u32) -> Result<Data, Status> {
    match direction {
        // The transport moves dwords (TCP 1.0 §3.6.2.8).
        _ if len_bytes & 3 != 0 => Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        0b10 => Ok(Data::ToHost(len_bytes)),
        0b01 => Ok(Data::FromHost(len_bytes)),
        0b00 => Ok(Data::None),
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn len_of(data: Data) -> u32 {
    match data {
        Data::None => 0,
        Data::FromHost(len_bytes) | Data::ToHost(len_bytes) => len_bytes,
    }
}

/// Commands that can be out on rings of so many entries: one entry is never used.
pub(crate) fn slots_of(depth: u32) -> u16 {
    u16::try_from(depth - 1).unwrap_or(u16::MAX - 1)
}

/// The bits of an identifier that are the number of a slot, on rings of so many entries.
fn slot_mask(depth: u32) -> u16 {
    u16::MAX >> slots_of(depth).leading_zeros()
}
