//! One connection, with its socket: commands in, answers out, data straight to their memory.
//!
//! ```text
//!   submit ──▶ tcp::Host ── pieces ──▶ one gathered send ──▶ Stream
//!   answer ◀── tcp::Host ◀── bytes where they lie ◀────────── Stream
//!                  └── data: copied once from there, or received straight into place
//! ```
//!
//! Memory that was lent has no address, and data for it are to come straight to it: while any are
//! awaited, headers are received one by one, so that nothing else lies behind them.
//!
//! Whoever owns it calls [`send`](Exchange::send) and [`receive`](Exchange::receive) once a turn each.

use std::collections::VecDeque;

use base::{Broken, Instant, Received, Segment, Span, Stream, Stretch, WakeSource};
use dma::DevicePool;
use tcp::{Cause, Connection, Data, Events, Full, Host, HostConfig, HostEvent, Piece};
use wire::{Command, Completion, Status};

use crate::hurry;
use crate::places::{FAILED, Places, SIPPED, TO_CONTROLLER};

/// A connection that is being opened, or is open, or has been lost.
pub(crate) struct Exchange {
    end: Host,
    stream: Box<dyn Stream>,
    events: Events<HostEvent>,
    places: Places,
    stretches: Vec<Stretch>,
    straight: Vec<Segment>,
    /// Bytes that the stream has ever taken.
    taken_bytes: u64,
    /// Of those, the ones up to here may lie in memory of commands.
    memory_bytes: u64,
    /// Those of them that it is known to have let go of.
    released_bytes: u64,
    /// Commands that were answered while the stream may still have been reading their data, and
    /// which bytes those are.
    held: VecDeque<(u64, Answered)>,
    outstanding: u32,
    /// Those of them that are [`SIPPED`].
    sipped: u32,
    /// How often something has come.
    received: u64,
    lost: Option<Lost>,
}

/// A command that has been answered, and whose memory nobody touches any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) tag: u16,
    /// What it was submitted with.
    pub(crate) name: u16,
    pub(crate) completion: Completion,
}

/// How a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    Ended(Cause),
    Broken(Broken),
    /// Nothing came for so long, and commands were under way.
    Silent(Span),
}

/// Events that one call of the connection's end may tell of.
const EVENTS: usize = 128;

/// Headers and data that a turn takes one by one.
const SIPS: usize = 64;

/// From so many bytes on, data are received straight to where they belong: for fewer, the copy costs
/// less than a system call of their own.
const STRAIGHT_BYTES_MIN: u32 = 16 << 10;

impl Exchange {
    /// A connection over `stream`, which begins to open. Data lie in what `memory` can resolve.
    pub(crate) fn new(
        stream: Box<dyn Stream>,
        config: HostConfig,
        memory: DevicePool,
        now: Instant,
    ) -> Self {
        let depth = config.depth;
        Self {
            end: Host::new(HostConfig { names_tags: true, ..config }, now),
            stream,
            events: Events::with_capacity(EVENTS),
            places: Places::new(memory, depth),
            stretches: Vec::new(),
            straight: Vec::new(),
            taken_bytes: 0,
            memory_bytes: 0,
            released_bytes: 0,
            held: VecDeque::new(),
            outstanding: 0,
            sipped: 0,
            received: 0,
            lost: None,
        }
    }

    /// Whether commands can be submitted.
    pub(crate) fn is_open(&self) -> bool {
        self.end.is_open()
    }

    /// How it has ended, if it has.
    #[inline]
    pub(crate) fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// Commands that have not been answered, or whose memory the stream may still read.
    #[inline]
    pub(crate) fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// How often something has come.
    pub(crate) const fn received(&self) -> u64 {
        self.received
    }

    /// Nothing came for so long, and something should have.
    pub(crate) fn fall_silent(&mut self, waited: Span) {
        self.lose(Lost::Silent(waited));
    }

    /// Whether anything is outstanding that would do harm if it were executed late.
    pub(crate) fn may_linger(&self, is_admin: bool) -> bool {
        self.end.outstanding().any(|tag| self.places.known(tag).changes(is_admin))
    }

    /// Whether the stream may still read memory of commands that are outstanding.
    pub(crate) fn is_read(&mut self) -> bool {
        self.released_bytes = self.stream.released();
        self.outstanding > 0 && self.released_bytes < self.memory_bytes
    }

    /// The peer gets nothing any more of what has not gone.
    pub(crate) fn abandon(&mut self) {
        self.stream.abandon();
    }

    /// Submits `command` under `tag`, with its data in `segment`, or in the [list](Self::list) of
    /// that tag. It is answered as `name`.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        (tag, name): (u16, u16),
        command: &Command,
        data: Data,
        segment: Option<Segment>,
    ) -> Result<(), Full> {
        self.places.put(tag, name, command.opcode(), segment);
        self.end.submit_as(tag, command, data, &self.places)?;
        self.outstanding += 1;
        Ok(())
    }

    /// The same for data in a `segment` that was lent.
    #[cold]
    pub(crate) fn submit_lent(
        &mut self,
        (tag, name): (u16, u16),
        command: &Command,
        data: Data,
        segment: Segment,
    ) -> Result<(), Full> {
        self.submit((tag, name), command, data, Some(segment))?;
        if let Data::ToHost(_) = data {
            self.places.mark(tag, SIPPED);
            self.sipped += 1;
        }
        Ok(())
    }

    /// The segments of the command that is submitted next under `tag`.
    pub(crate) fn list(&mut self, tag: u16) -> &mut Vec<Segment> {
        self.places.list(tag)
    }

    /// Sends what there is to send.
    #[inline]
    pub(crate) fn send(&mut self, answer: &mut impl FnMut(Answered)) {
        if self.end.has_more() {
            self.send_portions(answer);
        } else if !self.end.pieces().is_empty() && self.lost.is_none() {
            // Commands, and what they carry with them.
            self.send_once(false, answer);
        }
    }

    /// Sends as much of large data as may go now, behind the commands.
    #[inline(never)]
    fn send_portions(&mut self, answer: &mut impl FnMut(Answered)) {
        let portion = hurry::portion();
        self.end.set_portion(portion.bytes);
        for _ in 0..portion.sends {
            let has_more = self.end.has_more() && portion.bytes > 0;
            if has_more {
                hurry::gone();
            }
            let has_nothing = self.end.pieces().is_empty() && !has_more;
            if has_nothing || self.lost.is_some() || !self.send_once(portion.sends > 1, answer) {
                return;
            }
        }
    }

    /// Whether all of it went. The rest of the data `follows` at once, if there is more.
    fn send_once(&mut self, follows: bool, answer: &mut impl FnMut(Answered)) -> bool {
        self.end.fill(&self.places);
        self.stretches.clear();
        let mut has_memory = false;
        for piece in self.end.pieces() {
            match *piece {
                Piece::Headers { at, len_bytes } => {
                    self.stretches.push(Stretch::Headers { at, len_bytes });
                }
                Piece::Payload { tag, offset, len_bytes } => {
                    has_memory = true;
                    let place = tcp::Place { tag, offset, len_bytes };
                    self.places
                        .each(place, |segment| self.stretches.push(Stretch::Memory(segment)));
                }
            }
        }
        let has_more = follows && self.end.has_more();
        match self.stream.send(self.end.headers(), &self.stretches, has_more) {
            Ok(count) => {
                self.taken_bytes += count as u64;
                if has_memory {
                    self.memory_bytes = self.taken_bytes;
                }
                self.end.sent(count, &mut self.events);
                self.tell(answer);
                count > 0 && self.end.pieces().is_empty()
            }
            Err(broken) => {
                self.lose(Lost::Broken(broken));
                false
            }
        }
    }

    /// Takes what has come.
    #[inline]
    pub(crate) fn receive(&mut self, now: Instant, answer: &mut impl FnMut(Answered)) {
        hurry::turn(now);
        if self.lost.is_some() {
            return;
        }
        if self.sipped > 0 {
            self.sip(now, answer);
        } else if !self.receive_straight(now, answer) {
            let received = self.stream.receive();
            self.read(now, answer);
            match received {
                Received::Bytes(_) => {
                    self.received += 1;
                    self.receive_straight(now, answer);
                }
                Received::Nothing => {}
                Received::End => self.hang_up(answer),
                Received::Broken(broken) => self.lose(Lost::Broken(broken)),
            }
        }
        if !self.held.is_empty() {
            self.release(answer);
        }
    }

    /// Takes what has come, each header and all data by themselves.
    #[cold]
    fn sip(&mut self, now: Instant, answer: &mut impl FnMut(Answered)) {
        for _ in 0..SIPS {
            // What had come before anything was lent.
            self.read(now, answer);
            if self.lost.is_some() {
                return;
            }
            let waiting = self.stream.bytes().len();
            let received = match self.end.direct().filter(|_| waiting == 0) {
                Some(place) => self.receive_to(place, now, answer),
                None => self.stream.receive_at_most(self.end.before_data(waiting)),
            };
            match received {
                Received::Bytes(_) => self.received += 1,
                Received::Nothing => return,
                Received::End => return self.hang_up(answer),
                Received::Broken(broken) => return self.lose(Lost::Broken(broken)),
            }
        }
        self.read(now, answer);
    }

    /// Whether data were awaited that are worth it, and can come straight to where they belong.
    #[inline]
    fn receive_straight(&mut self, now: Instant, answer: &mut impl FnMut(Answered)) -> bool {
        let place = self.end.direct().filter(|place| place.len_bytes >= STRAIGHT_BYTES_MIN);
        let Some(place) = place.filter(|_| self.stream.bytes().is_empty()) else { return false };
        match self.receive_to(place, now, answer) {
            Received::Bytes(_) | Received::Nothing => {}
            Received::End => self.hang_up(answer),
            Received::Broken(broken) => self.lose(Lost::Broken(broken)),
        }
        true
    }

    /// Receives data straight to where they belong.
    #[inline]
    fn receive_to(
        &mut self,
        place: tcp::Place,
        now: Instant,
        answer: &mut impl FnMut(Answered),
    ) -> Received {
        self.straight.clear();
        self.places.each(place, |segment| self.straight.push(segment));
        let received = self.stream.receive_into(&self.straight);
        if let Received::Bytes(count) = received {
            self.received += 1;
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            self.end.placed(now, count, &mut self.events);
            self.tell(answer);
        }
        received
    }

    /// Reads what lies in the stream.
    #[inline]
    fn read(&mut self, now: Instant, answer: &mut impl FnMut(Answered)) {
        loop {
            let Self { end, stream, events, places, .. } = self;
            let bytes = stream.bytes();
            if bytes.is_empty() {
                return;
            }
            let taken = end.receive(now, bytes, events);
            if taken == 0 {
                return;
            }
            for event in events.as_slice() {
                if let HostEvent::Data { place, at } = *event {
                    places.store(place, &bytes[at as usize..][..place.len_bytes as usize]);
                }
            }
            stream.consume(taken);
            self.tell(answer);
        }
    }

    /// Tells what the events say, but for data that were stored already.
    #[inline]
    fn tell(&mut self, answer: &mut impl FnMut(Answered)) {
        let mut ended = None;
        // Asked once: what is released meanwhile is found at the next turn.
        let mut is_read = None;
        let mut has_others = false;
        for event in self.events.as_slice() {
            match *event {
                HostEvent::Done { tag, completion, .. } => {
                    let known = self.places.known(tag);
                    let completion = match known.marks {
                        0 => completion,
                        marks => {
                            self.sipped -= u32::from(marks & SIPPED != 0);
                            judged(marks, completion)
                        }
                    };
                    let answered = Answered { tag, name: known.name, completion };
                    if known.opcode & 0b11 == TO_CONTROLLER {
                        let taken = self.taken_bytes;
                        let stream = &mut self.stream;
                        if *is_read.get_or_insert_with(|| stream.released() < taken) {
                            self.held.push_back((taken, answered));
                            continue;
                        }
                    } else {
                        has_others = has_others || self.places.len_bytes(tag) < hurry::LARGE;
                    }
                    self.outstanding -= 1;
                    answer(answered);
                }
                HostEvent::Ended(cause) => ended = Some(cause),
                HostEvent::Data { .. } | HostEvent::Open(_) => {}
            }
        }
        self.events.clear();
        if has_others {
            hurry::answered();
        }
        if let Some(cause) = ended {
            self.lose(Lost::Ended(cause));
        }
    }

    /// Answers what was held back, now that the stream has let go of its data.
    #[cold]
    fn release(&mut self, answer: &mut impl FnMut(Answered)) {
        let released = self.stream.released();
        while let Some((_, answered)) = self.held.pop_front_if(|(end, _)| *end <= released) {
            self.outstanding -= 1;
            answer(answered);
        }
    }

    /// The peer sends nothing any more.
    #[cold]
    fn hang_up(&mut self, answer: &mut impl FnMut(Answered)) {
        self.end.receive_end(self.stream.bytes().len(), &mut self.events);
        self.tell(answer);
    }

    /// When [`expire`](Self::expire) is to be called.
    pub(crate) fn deadline(&self) -> Instant {
        if self.lost.is_some() { Instant::NEVER } else { self.end.deadline() }
    }

    /// Ends the connection if the peer has taken too long over something.
    pub(crate) fn expire(&mut self, now: Instant) {
        if now >= self.deadline() {
            self.end.expired(now, &mut self.events);
            self.tell(&mut |_| {});
        }
    }

    #[cold]
    fn lose(&mut self, lost: Lost) {
        if self.lost.is_some() {
            return;
        }
        if let Lost::Ended(Cause::Refused(_)) = lost {
            // The peer is told why, as far as there is room.
            self.stretches.clear();
            let headers = |piece: &Piece| match *piece {
                Piece::Headers { at, len_bytes } => Some(Stretch::Headers { at, len_bytes }),
                Piece::Payload { .. } => None,
            };
            if self.end.pieces().len() == 1 {
                self.stretches.extend(self.end.pieces().iter().filter_map(headers));
                // It is lost either way.
                let _ = self.stream.send(self.end.headers(), &self.stretches, false);
            }
            self.stream.shut_down();
        }
        self.lost = Some(lost);
    }

    pub(crate) fn wake_source(&self) -> WakeSource<'_> {
        self.stream.wake_source()
    }

    /// As [`Stream::arm`]: true if there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        let wants_room = !self.end.pieces().is_empty();
        // One turn sends only so much: the socket would not wake anybody for the rest.
        let has_unsent = !wants_room && self.end.has_more();
        has_unsent
            || self.lost.is_some()
            || self.has_released()
            || self.stream.arm(true, wants_room)
    }

    /// Takes what the stream says of memory: a notice that nobody takes would end every sleep at once.
    /// True if there is something to answer now.
    fn has_released(&mut self) -> bool {
        if self.released_bytes == self.taken_bytes {
            return false;
        }
        self.released_bytes = self.stream.released();
        self.held.front().is_some_and(|(end, _)| *end <= self.released_bytes)
    }

    pub(crate) fn disarm(&mut self) {
        self.stream.disarm();
    }
}

/// How a command has ended that is out of the ordinary.
#[cold]
fn judged(marks: u8, completion: Completion) -> Completion {
    if marks & FAILED != 0 && completion.status().is_success() {
        completion.with_status(Status::DATA_TRANSFER_ERROR)
    } else {
        completion
    }
}

impl core::fmt::Display for Lost {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Broken(broken) => broken.fmt(out),
            Self::Silent(waited) => write!(
                out,
                "nothing came over the connection of a queue for {}, expected an answer",
                Span::from_ms(waited.ns / 1_000_000)
            ),
            Self::Ended(cause) => match cause {
                Cause::Refused(refusal) => {
                    write!(out, "the peer sent an invalid PDU: {refusal}")
                }
                Cause::Terminated(refusal) => {
                    write!(out, "the peer has terminated the connection: {refusal}")
                }
                Cause::TerminatedUnsoundly => out
                    .write_str("the peer has terminated the connection by a request that is none"),
                Cause::NotOpened => out.write_str("the peer has not opened the connection in time"),
                Cause::Stalled => out.write_str("the peer has begun a unit and not ended it"),
                Cause::Closed => out.write_str("the peer has closed the connection"),
                Cause::Cut => out.write_str("the connection has ended within a unit"),
            },
        }
    }
}
