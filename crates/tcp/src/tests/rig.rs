//! Both ends with owners that keep memory, and a stream between them that is cut anywhere.

use std::collections::{BTreeMap, BTreeSet};

use base::{Instant, Random};
use wire::tcp::{Refusal, crc32c};
use wire::{Command, Completion, Status};

use crate::{
    Cause, CommandData, Connection, Controller, ControllerConfig, ControllerEvent, Data, Events,
    Host, HostConfig, HostEvent, Payloads, Piece, Place, Terms,
};

/// Memory of commands, by tag.
#[derive(Debug, Default)]
pub(super) struct Memory(pub(super) BTreeMap<u16, Vec<u8>>);

impl Payloads for Memory {
    fn digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        crc32c(&self.0[&tag][offset as usize..][..len_bytes as usize])
    }
}

impl Memory {
    fn store(&mut self, place: Place, bytes: &[u8], at: u32) {
        let from = &bytes[at as usize..][..place.len_bytes as usize];
        let into = &mut self.0.get_mut(&place.tag).unwrap()[place.offset as usize..];
        into[..from.len()].copy_from_slice(from);
    }

    fn gather(&self, pieces: &[Piece], headers: &[u8], most: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in pieces {
            match *piece {
                Piece::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                Piece::Payload { tag, offset, len_bytes } => {
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

/// The bytes that command `number` moves.
pub(super) fn pattern(number: u16, len: u32) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ (u32::from(number) * 7)).to_le_bytes()[0])
        .collect()
}

/// What has happened, without where the stream was cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Open(Terms),
    Command { cid: u16, data: Result<CommandData, Status> },
    Data { offset: u32, len_bytes: u32 },
    Arrived { is_intact: bool },
    Released,
    Done { status: Status, moved_bytes: u32, bytes: Vec<u8> },
    Ended(Cause),
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

/// An end, what its owner keeps beside memory, and all that has happened there.
#[derive(Debug)]
pub(super) struct Side<E: Connection, O> {
    pub(super) end: E,
    pub(super) owner: O,
    pub(super) memory: Memory,
    pub(super) log: Vec<(u16, Seen)>,
    /// Bytes that came and were not taken.
    pub(super) inbox: Vec<u8>,
    events: Events<E::Event>,
    /// Data are read straight to where they belong, where that can be.
    pub(super) is_direct: bool,
}

/// What a side does with the events at its end.
pub(super) trait Owned {
    /// Deals with what has happened, with the bytes that the events are about.
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
            events: Events::with_capacity(8),
            is_direct: false,
        }
    }

    pub(super) fn cause(&self) -> Option<Cause> {
        self.log.iter().find_map(|(_, seen)| match seen {
            Seen::Ended(cause) => Some(*cause),
            _ => None,
        })
    }

    /// Bytes of data have come to where they belong.
    fn note_data(&mut self, place: Place) {
        let Place { tag, offset, len_bytes } = place;
        note(&mut self.log, tag, Seen::Data { offset, len_bytes });
    }
}

impl<E: Connection, O> Side<E, O>
where
    Self: Owned,
{
    /// The next bytes that it sends.
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
            && let Some(place) = self.end.direct()
        {
            let count = bytes.len().min(place.len_bytes as usize);
            let placed = Place { len_bytes: u32::try_from(count).unwrap(), ..place };
            self.memory.store(placed, bytes, 0);
            self.note_data(placed);
            self.end.placed(now, placed.len_bytes, &mut self.events);
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
        self.end.expired(now, &mut self.events);
        self.handle(&[]);
    }

    pub(super) fn receive_end(&mut self) {
        self.end.receive_end(self.inbox.len(), &mut self.events);
        self.handle(&[]);
    }
}

/// A host and its owner.
pub(super) type HostSide = Side<Host, ()>;

impl HostSide {
    pub(super) fn new(config: HostConfig) -> Self {
        Self::with(Host::new(config, Instant::default()), ())
    }

    pub(super) fn submit(&mut self, opcode: u8, data: Data, number: u16) -> u16 {
        let tag = self.try_submit(opcode, data, number);
        tag.expect("there is room")
    }

    pub(super) fn try_submit(&mut self, opcode: u8, data: Data, number: u16) -> Option<u16> {
        let tag = self.end.next_tag()?;
        let bytes = match data {
            Data::FromHost(len) => pattern(number, len),
            Data::ToHost(len) => vec![0; len as usize],
            Data::None => Vec::new(),
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
        for event in self.events.as_slice() {
            match *event {
                HostEvent::Open(terms) => note(&mut self.log, u16::MAX, Seen::Open(terms)),
                HostEvent::Data { place, at } => {
                    self.memory.store(place, bytes, at);
                    let (offset, len_bytes) = (place.offset, place.len_bytes);
                    note(&mut self.log, place.tag, Seen::Data { offset, len_bytes });
                }
                HostEvent::Done { tag, completion, moved_bytes } => {
                    let bytes = self.memory.0[&tag].clone();
                    let status = completion.status();
                    note(&mut self.log, tag, Seen::Done { status, moved_bytes, bytes });
                }
                HostEvent::Ended(cause) => note(&mut self.log, u16::MAX, Seen::Ended(cause)),
            }
        }
        self.events.clear();
    }
}

/// How a controller's owner deals with commands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    /// Room is granted by so many bytes at a time.
    pub(super) grant_bytes: u32,
    /// Data are replied by so many bytes at a time.
    pub(super) reply_bytes: u32,
    /// What commands end with.
    pub(super) status: Status,
    /// Commands from the host are finished at once, without their data.
    pub(super) is_rash: bool,
    /// Commands are not finished at all.
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

/// What a controller's owner keeps.
#[derive(Debug, Default)]
pub(super) struct Target {
    pub(super) manner: Manner,
    /// Bytes of each tag that are still to be granted.
    ungranted: BTreeMap<u16, u32>,
    /// Tags that are finished: what a batch of events still says about them is passed over.
    finished: BTreeSet<u16>,
    /// What each tag's command was.
    commands: BTreeMap<u16, (Command, Result<CommandData, Status>)>,
}

/// A controller and its owner.
pub(super) type ControllerSide = Side<Controller, Target>;

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
                ControllerEvent::Arrived { tag, .. } if self.owner.finished.contains(&tag) => {}
                ControllerEvent::Data { place, at } => {
                    self.memory.store(place, bytes, at);
                    let (offset, len_bytes) = (place.offset, place.len_bytes);
                    note(&mut self.log, place.tag, Seen::Data { offset, len_bytes });
                    self.grant_more(place.tag, offset + len_bytes);
                }
                ControllerEvent::Arrived { tag, is_intact } => {
                    note(&mut self.log, tag, Seen::Arrived { is_intact });
                    let (command, _) = self.owner.commands[&tag];
                    if is_intact {
                        let len = u32::try_from(self.memory.0[&tag].len()).unwrap();
                        let expected = pattern(number(command), len);
                        assert!(self.memory.0[&tag] == expected, "the data of {command:?}");
                    }
                    self.finish(tag, 0);
                }
                ControllerEvent::Released { tag } => {
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
        Self::with(Controller::new(config, Instant::default()), Target::default())
    }

    fn begin(&mut self, tag: u16, command: Command, data: Result<CommandData, Status>) {
        let len = match data {
            Ok(CommandData::InCapsule(len) | CommandData::FromHost(len)) => len,
            Ok(CommandData::ToHost(len)) => {
                self.memory.0.insert(tag, pattern(number(command), len));
                if !self.owner.manner.is_idle {
                    self.reply(tag, len);
                }
                return;
            }
            Ok(CommandData::None) => return self.finish(tag, 0),
            Err(status) => return self.end.finish(tag, 0, Completion::new(0, status)).unwrap(),
        };
        self.memory.0.insert(tag, vec![0; len as usize]);
        if self.owner.manner.is_rash {
            if matches!(data, Ok(CommandData::FromHost(_))) {
                self.end.grant(tag, len).unwrap();
                self.end.fill(&self.memory);
            }
            return self.finish(tag, 0);
        }
        if let Ok(CommandData::FromHost(len)) = data {
            let first = len.min(self.owner.manner.grant_bytes);
            self.owner.ungranted.insert(tag, len - first);
            self.end.grant(tag, first).unwrap();
        }
    }

    /// Grants the next room once the last was filled.
    fn grant_more(&mut self, tag: u16, came: u32) {
        let Some((_, Ok(CommandData::FromHost(len)))) = self.owner.commands.get(&tag).copied()
        else {
            return;
        };
        let left = self.owner.ungranted[&tag];
        if left > 0 && came == len - left {
            let next = left.min(self.owner.manner.grant_bytes);
            self.owner.ungranted.insert(tag, left - next);
            self.end.grant(tag, next).unwrap();
        }
    }

    fn reply(&mut self, tag: u16, len: u32) {
        let mut left = len;
        while left > self.owner.manner.reply_bytes {
            self.end.reply(tag, self.owner.manner.reply_bytes).unwrap();
            left -= self.owner.manner.reply_bytes;
        }
        self.finish(tag, left);
    }

    pub(super) fn finish(&mut self, tag: u16, len: u32) {
        if !self.owner.manner.is_idle {
            self.owner.finished.insert(tag);
            self.end.finish(tag, len, Completion::new(0, self.owner.manner.status)).unwrap();
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers are small")]
fn number(command: Command) -> u16 {
    command.cdw10() as u16
}

/// Both ends.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) host: HostSide,
    pub(super) controller: ControllerSide,
    /// All that went each way.
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

    /// A pair that has shaken hands.
    pub(super) fn open(host: HostConfig, controller: ControllerConfig) -> Self {
        let mut pair = Self::new(host, controller);
        pair.run(&mut |_| usize::MAX);
        pair
    }

    /// Moves bytes until nobody has any, `most` of them at a time, which may differ every time.
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

/// Pieces of lengths that are drawn from a seed, mostly short ones.
pub(super) fn drawn(seed: u64) -> impl FnMut(usize) -> usize {
    let mut random = Random::new(seed);
    move |_| {
        let bound = 1 << random.below(14);
        usize::try_from(random.below(bound)).unwrap() + 1
    }
}

pub(super) fn refused(refusal: Refusal) -> Option<Cause> {
    Some(Cause::Refused(refusal))
}
