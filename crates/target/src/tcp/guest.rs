//! A connection that is served: a poller between a stream and a queue.
//!
//! ```text
//!   Stream ─ bytes ─▶ Controller ─ events ─▶ Rooms ─▶ Role: a stranger, an admin queue, an I/O queue
//!   Stream ◀─ one gathered list ─ Outgoing ◀─ Controller ◀─ finish ──┘
//! ```

mod connecting;
mod ending;
mod farewell;
mod sleeping;

use std::fmt;
use std::sync::Arc;

use base::{Instant, Received, Segment, Stream};
use ctrl::front::fabrics::Over;
use tcp::{Connection, Controller, ControllerEvent, Events};
use wire::opcode::FabricsType;
use wire::{Completion, Status};

use self::connecting::Patient;
use self::ending::Debt;
use self::farewell::Farewell;
use super::admin::Admin;
use super::admission::Admitted;
use super::discovery::Discovery;
use super::io::{Begun, Io};
use super::memory::Purse;
use super::news::{News, Reason};
use super::outgoing::Outgoing;
use super::poller::Bed;
use super::rooms::{Opened, Rooms};
use super::seat::Seat;
use super::service::Service;
use crate::looks::Looks;

/// Whoever has connected.
pub struct Guest {
    /// None once it is closed.
    stream: Option<Box<dyn Stream>>,
    /// It is closed, and its memory still read.
    farewell: Option<Farewell>,
    end: Controller,
    rooms: Rooms,
    role: Role,
    events: Events<ControllerEvent>,
    /// The first event that was not dealt with, for want of room.
    next_event: usize,
    /// Bytes that events tell of.
    taken: usize,
    outgoing: Outgoing,
    /// Until when it has to be connected; or when it is looked again whether it can be.
    connect_by: Instant,
    patient: Option<Patient>,
    /// Since when its stream has had no room.
    blocked_since: Option<Instant>,
    /// What its host owes for the longest, as it was found at the last look.
    debt: Option<Debt>,
    /// When it is looked whether the host owes data, or leaves answers untaken, for too long.
    debts_check: Instant,
    /// Why it ends.
    reason: Option<Reason>,
    /// It ends when what there is to send has been sent.
    ends_sent: bool,
    /// When it last worked.
    worked_at: Instant,
    /// What it is woken by, if it may sleep.
    bed: Option<Bed>,
    looks: Looks,
    /// It is about to go to another thread, and takes in nothing more before.
    is_travelling: bool,
    service: Service,
    seat: Arc<Seat>,
    admitted: Admitted,
    id: u64,
    peer: String,
    port: u16,
}

/// What a connection is.
enum Role {
    /// Nothing yet: Connect is awaited.
    Stranger,
    Admin(Box<Admin>),
    Io(Box<Io>),
    Discovery(Box<Discovery>),
    /// Nothing any more.
    Gone,
}

/// What a guest is made of.
pub(super) struct GuestParts {
    pub(super) service: Service,
    pub(super) stream: Box<dyn Stream>,
    pub(super) seat: Arc<Seat>,
    pub(super) purse: Purse,
    pub(super) connection: u64,
    pub(super) peer: String,
    pub(super) port: u16,
    pub(super) admitted: Admitted,
    pub(super) now: Instant,
}

/// Events that are dealt with at a time.
const EVENTS: usize = 64;
/// Data that are worth a system call of their own, and no copy.
const DIRECT_BYTES: u32 = 16 << 10;
/// Looks at the stream in a turn, while there is more.
const LOOKS: usize = 4;

impl Guest {
    pub(super) fn new(parts: GuestParts) -> Self {
        let GuestParts { service, stream, seat, purse, connection, peer, port, admitted, now } =
            parts;
        let config = service.limits().end();
        Self {
            stream: Some(stream),
            farewell: None,
            end: Controller::new(config, now),
            rooms: Rooms::new(purse),
            role: Role::Stranger,
            events: Events::with_capacity(EVENTS),
            next_event: 0,
            taken: 0,
            outgoing: Outgoing::new(config.depth),
            connect_by: now.after(admitted.connect_max()),
            patient: None,
            blocked_since: None,
            debt: None,
            debts_check: Instant::NEVER,
            reason: None,
            ends_sent: false,
            worked_at: now,
            bed: None,
            looks: Looks::default(),
            is_travelling: false,
            service,
            seat,
            admitted,
            id: connection,
            peer,
            port,
        }
    }

    /// Does everything that can be done just now. True if anything was.
    pub fn turn(&mut self, now: Instant) -> bool {
        self.looks.now();
        let count = self.work(now);
        self.send(now);
        count > 0
    }

    /// Whether it has ended, and can be dropped: nobody works on anything of it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let is_ended = self.reason.is_some() && (self.stream.is_none() || self.end.is_over());
        is_ended && self.farewell.is_none() && self.is_drained()
    }

    /// Why it ends, once it does.
    #[must_use]
    pub fn reason(&self) -> Option<&Reason> {
        self.reason.as_ref()
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Receives, executes and ends commands. How many things were done.
    #[inline]
    pub(super) fn work(&mut self, now: Instant) -> usize {
        self.worked_at = now;
        if let Role::Io(io) = &mut self.role {
            io.pass(now);
        }
        let is_called = self.seat.answer();
        let mut count = usize::from(is_called);
        if self.outgoing.is_blocked() && self.looks.is_due(now) {
            self.send(now);
            count += usize::from(!self.outgoing.is_blocked());
        }
        if self.outgoing.is_read()
            && let Some(stream) = &mut self.stream
        {
            count += self.outgoing.tell(&mut **stream, &mut self.end, &mut self.rooms);
        }
        if self.reason.is_none() {
            if self.is_travelling {
                count += self.handle_events(now) + self.take_in(now);
            } else if self.looks.is_due(now) {
                count += self.look(now);
            }
            if self.rooms.has_waiting() {
                count += self.begin_waiting(now);
            }
        } else {
            count += self.linger(now) + self.wait_for_release(now);
        }
        count += self.turn_role(now, is_called);
        self.rooms.share();
        if let Some(fault) = self.rooms.fault() {
            self.faulted(now, fault);
        }
        if now >= self.deadline() {
            count += self.expire(now);
        }
        if self.reason.is_some() && !self.has_unsent() {
            self.close(now);
        }
        count
    }

    /// Looks whether something has come.
    #[inline]
    fn look(&mut self, now: Instant) -> usize {
        let count = self.receive(now);
        if count == 0 {
            self.looks.was_in_vain(now);
        } else {
            self.looks.found(now);
        }
        if self.debts_check == Instant::NEVER && self.rooms.is_owed() {
            self.watch_untaken(now);
        }
        count
    }

    /// Takes what has come. A look takes all there is: another would be in vain, unless the first
    /// has ended where data begin that go elsewhere, or has filled them.
    #[inline]
    fn receive(&mut self, now: Instant) -> usize {
        let mut count = self.handle_events(now);
        let mut is_last = false;
        for _ in 0..LOOKS {
            if self.next_event < self.events.as_slice().len() {
                break;
            }
            let segment = self.direct();
            let Some(stream) = &mut self.stream else { break };
            let received = match segment {
                Some(segment) => stream.receive_into(&[segment]),
                None => stream.receive(),
            };
            match received {
                Received::Bytes(bytes) => {
                    count += 1;
                    if let Some(segment) = segment {
                        let placed = u32::try_from(bytes).unwrap_or(u32::MAX);
                        self.end.placed(now, placed, &mut self.events);
                        count += self.handle_events(now);
                        is_last = placed < segment.len_bytes;
                    }
                }
                Received::Nothing => {
                    count += self.take_in(now);
                    break;
                }
                Received::End => {
                    count += self.take_in(now);
                    self.stream_ended(None);
                    break;
                }
                Received::Broken(why) => {
                    count += self.take_in(now);
                    self.stream_ended(Some(why));
                    break;
                }
            }
            count += self.take_in(now);
            if is_last || segment.is_none() && self.direct().is_none() {
                break;
            }
        }
        count
    }

    /// Where data that come next are received straight to.
    #[inline]
    fn direct(&self) -> Option<Segment> {
        let place = self.end.direct().filter(|place| place.len_bytes >= DIRECT_BYTES)?;
        let stream = self.stream.as_ref()?;
        if stream.bytes().is_empty() { self.rooms.segment(place) } else { None }
    }

    /// Waits for the peer to close a connection that has ended: what still comes is of no use.
    #[cold]
    fn linger(&mut self, now: Instant) -> usize {
        let Some(stream) = &mut self.stream else { return 0 };
        let count = stream.bytes().len();
        stream.consume(count);
        match stream.receive() {
            Received::Bytes(_) => 1,
            Received::Nothing => 0,
            Received::End | Received::Broken(_) => {
                self.part(now);
                1
            }
        }
    }

    /// Reads the bytes that lie there, as far as there is room for what they say.
    #[inline]
    fn take_in(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while self.next_event == self.events.as_slice().len() {
            let Some(stream) = &self.stream else { break };
            let bytes = stream.bytes();
            if bytes.is_empty() {
                break;
            }
            self.taken = self.end.receive(now, bytes, &mut self.events);
            let is_stuck = self.taken == 0 && self.events.as_slice().is_empty();
            count += self.handle_events(now);
            if is_stuck {
                break;
            }
        }
        count
    }

    /// Deals with what has happened. Stops where there is no room for data that have come.
    #[inline]
    fn handle_events(&mut self, now: Instant) -> usize {
        let first = self.next_event;
        while let Some(event) = self.events.as_slice().get(self.next_event).copied() {
            if !self.handle(now, event) {
                return self.next_event - first;
            }
            self.next_event += 1;
        }
        let count = self.next_event - first;
        self.events.clear();
        self.next_event = 0;
        if self.taken > 0
            && let Some(stream) = &mut self.stream
        {
            stream.consume(core::mem::take(&mut self.taken));
        }
        count
    }

    /// False if there is no room just now.
    #[inline]
    fn handle(&mut self, now: Instant, event: ControllerEvent) -> bool {
        match event {
            ControllerEvent::Command { tag, command, data: Ok(data) } => {
                match self.rooms.open(&mut self.end, (tag, now), command, data) {
                    Opened::Ready => self.begin(now, tag),
                    Opened::Later => {}
                    Opened::NoRoom => return false,
                }
            }
            ControllerEvent::Command { tag, command, data: Err(status) } => {
                self.rooms.refuse(&mut self.end, tag, command, status.with_dnr());
            }
            ControllerEvent::Data { place, at } => {
                let Some(stream) = &self.stream else { return true };
                let bytes = stream.bytes().get(at as usize..).unwrap_or_default();
                let bytes = bytes.get(..place.len_bytes as usize).unwrap_or_default();
                if self.rooms.store(place, bytes).is_err() {
                    self.misplaced(now, place);
                }
            }
            ControllerEvent::Arrived { tag, is_intact } => {
                if self.rooms.arrived(&mut self.end, tag, is_intact) {
                    self.arrived(now, tag, is_intact);
                }
            }
            ControllerEvent::Released { tag } => self.rooms.release(tag),
            ControllerEvent::Open(terms) => {
                let mut shown = self.seat.shown();
                (shown.header_digest, shown.data_digest) = (terms.header_digest, terms.data_digest);
            }
            ControllerEvent::Ended(cause) => self.line_ended(now, cause),
        }
        true
    }

    #[inline]
    fn arrived(&mut self, now: Instant, tag: u16, is_intact: bool) {
        if is_intact {
            return self.begin(now, tag);
        }
        let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
        self.rooms.finish(&mut self.end, tag, 0, completion);
    }

    /// A command has all that it needs.
    #[inline]
    fn begin(&mut self, now: Instant, tag: u16) {
        let Self { role, rooms, end, .. } = self;
        match role {
            Role::Io(io) => {
                if io.begin(rooms, tag) == Begun::Fabrics {
                    self.begin_fabrics(now, tag);
                }
            }
            Role::Admin(admin) => admin.begin(now, rooms, end, tag),
            Role::Discovery(discovery) => discovery.begin(now, rooms, end, tag),
            Role::Stranger => self.connect(now, tag),
            Role::Gone => {}
        }
    }

    /// Commands of fabrics on an I/O queue: Disconnect (Base 2.1 §6.4).
    #[cold]
    fn begin_fabrics(&mut self, now: Instant, tag: u16) {
        let kind = FabricsType::from_u8(self.rooms.command(tag).nsid().to_le_bytes()[0]);
        let status = match kind {
            Some(FabricsType::Disconnect) => {
                self.ends_sent = true;
                if let Role::Io(io) = &mut self.role {
                    io.stop(now);
                }
                Status::SUCCESS
            }
            Some(FabricsType::Connect) => Status::COMMAND_SEQUENCE_ERROR.with_dnr(),
            _ => Status::INVALID_OPCODE.with_dnr(),
        };
        self.rooms.finish(&mut self.end, tag, 0, Completion::new(0, status));
    }

    fn begin_waiting(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while let Some(tag) = self.rooms.next_ready(&mut self.end, now) {
            count += 1;
            self.begin(now, tag);
        }
        count
    }

    #[inline]
    fn turn_role(&mut self, now: Instant, is_called: bool) -> usize {
        let Self { role, rooms, end, .. } = self;
        match role {
            Role::Io(io) => {
                let count = io.turn(now, rooms, end);
                io.tell(now);
                if io.is_stopping() {
                    self.look_after_stopped(now);
                }
                count
            }
            Role::Admin(admin) => {
                let turned = admin.turn(now, is_called, rooms, end);
                if let Some(text) = turned.trouble {
                    self.service.tell(News::Trouble(format!("{}: {text}", self.peer)));
                }
                let reason = match turned.over {
                    Some(Over::KeepAliveExpired) => Some(Reason::KeepAliveExpired),
                    Some(Over::NotEnabled) => Some(Reason::NotEnabled),
                    Some(Over::Reset) => Some(Reason::Reset),
                    Some(Over::HostLost | Over::Withdrawn) => Some(Reason::AssociationEnded),
                    None => None,
                };
                if let Some(reason) = reason {
                    self.end_for(now, reason);
                }
                turned.count
            }
            Role::Discovery(discovery) => {
                let count = discovery.turn(is_called, rooms, end);
                if discovery.is_forsaken(now) {
                    self.end_for(now, Reason::KeepAliveExpired);
                }
                count
            }
            Role::Stranger | Role::Gone => 0,
        }
    }

    /// Sends what there is to send.
    #[inline]
    pub(super) fn send(&mut self, now: Instant) {
        let Some(stream) = &mut self.stream else { return };
        match self.outgoing.send(&mut **stream, &mut self.end, &mut self.rooms) {
            Ok(count) => {
                if !self.outgoing.is_blocked() {
                    self.blocked_since = None;
                } else if count > 0 || self.blocked_since.is_none() {
                    self.blocked_since = Some(now);
                }
                if self.outgoing.is_blocked() || self.outgoing.is_read() {
                    self.watch_untaken(now);
                }
            }
            Err(why) => self.stream_ended(Some(why)),
        }
        if self.ends_sent && self.end.pieces().is_empty() && !self.end.has_more() {
            self.end_for(now, Reason::Said);
        }
        if self.reason.is_some() {
            self.close(now);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.service.left(self.id);
        self.part(self.worked_at);
        if self.farewell.is_some() {
            self.keep_for_ever();
        }
        let (connection, peer) = (self.id, self.peer.clone());
        let reason = self.reason.take().unwrap_or(Reason::ServerEnds);
        self.service.tell(News::Disconnected { connection, peer, reason });
        self.leave_queue(self.worked_at);
        match &self.role {
            Role::Io(io) => self.service.tell(News::Trouble(format!(
                "{}: {} commands are given up: their medium has not answered, expected it to",
                self.peer,
                io.under_way()
            ))),
            _ => return self.rooms.clear(),
        }
        self.rooms.abandon_begun();
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Guest")
            .field("id", &self.id)
            .field("peer", &self.peer)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}
