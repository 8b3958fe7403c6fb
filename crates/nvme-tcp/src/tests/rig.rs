//! Both ends with simulated embedding code, and a stream between them with arbitrary fragmentation.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::{Instant, Random};
use tenmil_wire::tcp::{FatalError, crc32c};
use tenmil_wire::{Command, Completion, Status};

use crate::{
    CloseReason, Connection, ControllerConfig, ControllerConnection, ControllerEvent,
    DataDirection, DataPlacement, DataTransfer, EventQueue, HostConfig, HostConnection, HostEvent,
    NegotiatedParams, PayloadDigest, SendPiece,
};

/// Buffers of commands, by tag.
#[derive(Debug, Default)]
pub(super) struct Memory(pub(super) BTreeMap<u16, Vec<u8>>);

impl PayloadDigest for Memory {
    fn digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        crc32c(&self.0[&tag][offset as usize..][..len_bytes as usize])
    }
}

impl Memory {
    fn store(&mut self, place: DataPlacement, bytes: &[u8], at: u32) {
        let from = &bytes[at as usize..][..place.len_bytes as usize];
        let into = &mut self.0.get_mut(&place.tag).unwrap()[place.offset as usize..];
        into[..from.len()].copy_from_slice(from);
    }

    fn gather(&self, pieces: &[SendPiece], headers: &[u8], most: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in pieces {
            match *piece {
                SendPiece::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                SendPiece::Payload { tag, offset, len_bytes } => {
                    bytes.extend(&self.0[&tag][offset as usize..][..len_bytes as usize]);
                }
            }
            if bytes.len() >= most {
                break;
            }
        }
        bytes.truncate(most);
        bytes
    }
}

/// Data of command `number`.
pub(super) fn pattern(number: u16, len: u32) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ (u32::from(number) * 7)).to_le_bytes()[0])
        .collect()
}

/// Event, independent of the fragmentation of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Open(NegotiatedParams),
    Command { cid: u16, data: Result<DataTransfer, Status> },
    Data { offset: u32, len_bytes: u32 },
    Arrived { is_intact: bool },
    Released,
    Done { status: Status, moved_bytes: u32, bytes: Vec<u8> },
    Ended(CloseReason),
}

fn note(log: &mut Vec<(u16, Seen)>, tag: u16, seen: Seen) {
    if let (
        Some((last, Seen::Data { offset, len_bytes })),
        Seen::Data { offset: next, len_bytes: more },
    ) = (log.last_mut(), &seen)
        && (*last, *offset + *len_bytes) == (tag, *next)
    {
        *len_bytes += more;
        return;
    }
    log.push((tag, seen));
}

/// One end, the state of its embedding code, and all its events.
#[derive(Debug)]
pub(super) struct Side<E: Connection, O> {
    pub(super) end: E,
    pub(super) owner: O,
    pub(super) memory: Memory,
    pub(super) log: Vec<(u16, Seen)>,
    /// Received bytes that were not consumed.
    pub(super) inbox: Vec<u8>,
    events: EventQueue<E::Event>,
    /// Data are received directly into their buffers where possible.
    pub(super) is_direct: bool,
}

/// Event handling of one end.
pub(super) trait Owned {
    /// Handles the pending events; `bytes` are the received bytes that they refer to.
    fn handle(&mut self, bytes: &[u8]);
}

impl<E: Connection, O> Side<E, O> {
    fn with(end: E, owner: O) -> Self {
        Self {
            end,
            owner,
            memory: Memory::default(),
            log: Vec::new(),
            inbox: Vec::new(),
            events: EventQueue::with_capacity(8),
            is_direct: false,
        }
    }

    pub(super) fn cause(&self) -> Option<CloseReason> {
        self.log.iter().find_map(|(_, seen)| match seen {
            Seen::Ended(cause) => Some(*cause),
            _ => None,
        })
    }

    /// Records data that were received into their buffer.
    fn note_data(&mut self, place: DataPlacement) {
        let DataPlacement { tag, offset, len_bytes } = place;
        note(&mut self.log, tag, Seen::Data { offset, len_bytes });
    }
}

impl<E: Connection, O> Side<E, O>
where
    Self: Owned,
{
    /// The next at most `most` bytes to send.
    pub(super) fn take(&mut self, most: usize) -> Vec<u8> {
        self.end.fill(&self.memory);
        let bytes = self.memory.gather(self.end.pieces(), self.end.headers(), most);
        self.end.sent(bytes.len(), &mut self.events);
        self.handle(&[]);
        bytes
    }

    pub(super) fn give(&mut self, now: Instant, mut bytes: &[u8]) {
        if self.is_direct
            && self.inbox.is_empty()
            && let Some(place) = self.end.direct_placement()
        {
            let count = bytes.len().min(place.len_bytes as usize);
            let placed = DataPlacement { len_bytes: u32::try_from(count).unwrap(), ..place };
            self.memory.store(placed, bytes, 0);
            self.note_data(placed);
            self.end.received_direct(now, placed.len_bytes, &mut self.events);
            self.handle(&[]);
            bytes = &bytes[count..];
        }
        self.inbox.extend_from_slice(bytes);
        loop {
            let inbox = core::mem::take(&mut self.inbox);
            let taken = self.end.receive(now, &inbox, &mut self.events);
            let any = !self.events.as_slice().is_empty();
            self.handle(&inbox);
            self.inbox = inbox[taken..].to_vec();
            if taken == 0 && !any {
                break;
            }
        }
    }

    pub(super) fn expired(&mut self, now: Instant) {
        self.end.handle_deadline(now, &mut self.events);
        self.handle(&[]);
    }

    pub(super) fn receive_end(&mut self) {
        self.end.receive_end(self.inbox.len(), &mut self.events);
        self.handle(&[]);
    }
}

/// Host with its embedding code.
pub(super) type HostSide = Side<HostConnection, ()>;

impl HostSide {
    pub(super) fn new(config: HostConfig) -> Self {
        Self::with(HostConnection::new(config, Instant::default()), ())
    }

    pub(super) fn submit(&mut self, opcode: u8, data: DataDirection, number: u16) -> u16 {
        let tag = self.try_submit(opcode, data, number);
        tag.expect("there is room")
    }

    pub(super) fn try_submit(
        &mut self,
        opcode: u8,
        data: DataDirection,
        number: u16,
    ) -> Option<u16> {
        let tag = self.end.next_tag()?;
        let bytes = match data {
            DataDirection::FromHost(len) => pattern(number, len),
            DataDirection::ToHost(len) => vec![0; len as usize],
            DataDirection::None => Vec::new(),
        };
        self.memory.0.insert(tag, bytes);
        let command = Command::new(opcode).with_cdw10(number.into());
        let given = self.end.submit(&command, data, &self.memory).ok()?;
        assert_eq!(given, tag);
        Some(tag)
    }

    pub(super) fn done(&self) -> Vec<(Status, u32)> {
        let each = self.log.iter().filter_map(|(_, seen)| match seen {
            Seen::Done { status, moved_bytes, .. } => Some((*status, *moved_bytes)),
            _ => None,
        });
        each.collect()
    }
}

impl Owned for HostSide {
    fn handle(&mut self, bytes: &[u8]) {
        for event in self.events.as_slice().iter().flat_map(|event| event.parts()) {
            match event {
                HostEvent::Open(terms) => note(&mut self.log, u16::MAX, Seen::Open(terms)),
                HostEvent::Data { place, at } => {
                    self.memory.store(place, bytes, at);
                    let (offset, len_bytes) = (place.offset, place.len_bytes);
                    note(&mut self.log, place.tag, Seen::Data { offset, len_bytes });
                }
                HostEvent::Completed { tag, completion, moved_bytes } => {
                    let bytes = self.memory.0[&tag].clone();
                    let status = completion.status();
                    note(&mut self.log, tag, Seen::Done { status, moved_bytes, bytes });
                }
                HostEvent::Ended(cause) => note(&mut self.log, u16::MAX, Seen::Ended(cause)),
                HostEvent::ReadCompleted { .. } => unreachable!("it has parts"),
            }
        }
        self.events.clear();
    }
}

/// Behavior of the controller's embedding code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    /// Largest number of bytes granted at a time.
    pub(super) grant_bytes: u32,
    /// Number of bytes replied at a time.
    pub(super) reply_bytes: u32,
    /// Status of the completions.
    pub(super) status: Status,
    /// Commands with data from the host are finished at once, without their data.
    pub(super) is_rash: bool,
    /// Commands are not finished.
    pub(super) is_idle: bool,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            grant_bytes: u32::MAX,
            reply_bytes: u32::MAX,
            status: Status::SUCCESS,
            is_rash: false,
            is_idle: false,
        }
    }
}

/// State of the controller's embedding code.
#[derive(Debug, Default)]
pub(super) struct Target {
    pub(super) manner: Manner,
    /// Bytes of each tag that are not granted yet.
    ungranted: BTreeMap<u16, u32>,
    /// Tags of finished commands, whose remaining events of a batch are ignored.
    finished: BTreeSet<u16>,
    /// Command of each tag.
    commands: BTreeMap<u16, (Command, Result<DataTransfer, Status>)>,
}

/// Controller with its embedding code.
pub(super) type ControllerSide = Side<ControllerConnection, Target>;

impl Owned for ControllerSide {
    fn handle(&mut self, bytes: &[u8]) {
        for event in self.events.as_slice().to_vec() {
            match event {
                ControllerEvent::Open(terms) => note(&mut self.log, u16::MAX, Seen::Open(terms)),
                ControllerEvent::Command { tag, command, data } => {
                    note(&mut self.log, tag, Seen::Command { cid: command.cid(), data });
                    self.owner.commands.insert(tag, (command, data));
                    self.owner.finished.remove(&tag);
                    self.begin(tag, command, data);
                }
                ControllerEvent::Data { place, .. } if self.owner.finished.contains(&place.tag) => {
                }
                ControllerEvent::DataComplete { tag, .. } if self.owner.finished.contains(&tag) => {
                }
                ControllerEvent::Data { place, at } => {
                    self.memory.store(place, bytes, at);
                    let (offset, len_bytes) = (place.offset, place.len_bytes);
                    note(&mut self.log, place.tag, Seen::Data { offset, len_bytes });
                    self.grant_more(place.tag, offset + len_bytes);
                }
                ControllerEvent::DataComplete { tag, is_intact } => {
                    note(&mut self.log, tag, Seen::Arrived { is_intact });
                    let (command, _) = self.owner.commands[&tag];
                    if is_intact {
                        let len = u32::try_from(self.memory.0[&tag].len()).unwrap();
                        let expected = pattern(number(command), len);
                        assert!(self.memory.0[&tag] == expected, "the data of {command:?}");
                    }
                    self.finish(tag, 0);
                }
                ControllerEvent::Sent { tag } => {
                    note(&mut self.log, tag, Seen::Released);
                    self.owner.commands.remove(&tag);
                }
                ControllerEvent::Ended(cause) => note(&mut self.log, u16::MAX, Seen::Ended(cause)),
            }
        }
        self.events.clear();
    }
}

impl ControllerSide {
    pub(super) fn new(config: ControllerConfig) -> Self {
        Self::with(ControllerConnection::new(config, Instant::default()), Target::default())
    }

    fn begin(&mut self, tag: u16, command: Command, data: Result<DataTransfer, Status>) {
        let len = match data {
            Ok(DataTransfer::InCapsule(len) | DataTransfer::FromHost(len)) => len,
            Ok(DataTransfer::ToHost(len)) => {
                self.memory.0.insert(tag, pattern(number(command), len));
                if !self.owner.manner.is_idle {
                    self.reply(tag, len);
                }
                return;
            }
            Ok(DataTransfer::None) => return self.finish(tag, 0),
            Err(status) => return self.end.complete(tag, 0, Completion::new(0, status)).unwrap(),
        };
        self.memory.0.insert(tag, vec![0; len as usize]);
        if self.owner.manner.is_rash {
            if matches!(data, Ok(DataTransfer::FromHost(_))) {
                self.end.request_data(tag, len).unwrap();
                self.end.fill(&self.memory);
            }
            return self.finish(tag, 0);
        }
        if let Ok(DataTransfer::FromHost(len)) = data {
            let first = len.min(self.owner.manner.grant_bytes);
            self.owner.ungranted.insert(tag, len - first);
            self.end.request_data(tag, first).unwrap();
        }
    }

    /// Grants the next part after the previous one was received.
    fn grant_more(&mut self, tag: u16, came: u32) {
        let Some((_, Ok(DataTransfer::FromHost(len)))) = self.owner.commands.get(&tag).copied()
        else {
            return;
        };
        let left = self.owner.ungranted[&tag];
        if left > 0 && came == len - left {
            let next = left.min(self.owner.manner.grant_bytes);
            self.owner.ungranted.insert(tag, left - next);
            self.end.request_data(tag, next).unwrap();
        }
    }

    fn reply(&mut self, tag: u16, len: u32) {
        let mut left = len;
        while left > self.owner.manner.reply_bytes {
            self.end.send_data(tag, self.owner.manner.reply_bytes).unwrap();
            left -= self.owner.manner.reply_bytes;
        }
        self.finish(tag, left);
    }

    pub(super) fn finish(&mut self, tag: u16, len: u32) {
        if !self.owner.manner.is_idle {
            self.owner.finished.insert(tag);
            self.end.complete(tag, len, Completion::new(0, self.owner.manner.status)).unwrap();
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers are small")]
fn number(command: Command) -> u16 {
    command.cdw10() as u16
}

/// Host and controller.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) host: HostSide,
    pub(super) controller: ControllerSide,
    /// All bytes sent in each direction.
    pub(super) up: Vec<u8>,
    pub(super) down: Vec<u8>,
}

impl Pair {
    pub(super) fn new(host: HostConfig, controller: ControllerConfig) -> Self {
        Self {
            host: HostSide::new(host),
            controller: ControllerSide::new(controller),
            up: Vec::new(),
            down: Vec::new(),
        }
    }

    /// Pair with an open connection.
    pub(super) fn open(host: HostConfig, controller: ControllerConfig) -> Self {
        let mut pair = Self::new(host, controller);
        pair.run(&mut |_| usize::MAX);
        pair
    }

    /// Moves bytes until neither end sends any more. `most` limits each step.
    pub(super) fn run(&mut self, most: &mut dyn FnMut(usize) -> usize) {
        let now = Instant::default();
        let mut turn = 0;
        loop {
            turn += 1;
            let up = self.host.take(most(turn).max(1));
            self.controller.give(now, &up);
            let down = self.controller.take(most(turn + 1).max(1));
            self.host.give(now, &down);
            if up.is_empty() && down.is_empty() {
                return;
            }
            self.up.extend(up);
            self.down.extend(down);
        }
    }
}

/// Random fragment sizes, mostly small.
pub(super) fn drawn(seed: u64) -> impl FnMut(usize) -> usize {
    let mut random = Random::new(seed);
    move |_| {
        let bound = 1 << random.below(14);
        usize::try_from(random.below(bound)).unwrap() + 1
    }
}

pub(super) fn refused(refusal: FatalError) -> Option<CloseReason> {
    Some(CloseReason::ProtocolError(refusal))
}
