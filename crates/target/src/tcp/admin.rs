//! The admin queue of an association, at the end of its connection.

use std::sync::Arc;

use base::{Instant, Memory, Span};
use ctrl::controller::contract::{AdminData, AdminEnd};
use ctrl::front::fabrics::{Ended, Over};
use tcp::Controller;
use wire::admin::{CrossControllerReset, CrossResetResult};
use wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use wire::opcode::FabricsType;
use wire::{AdminOpcode, Command, Completion, Status, Typed};

use super::association::Association;
use super::offer::RESETS_MAX;
use super::rooms::{Rooms, Way};
use super::service::Limits;

/// An admin queue.
#[derive(Debug)]
pub(super) struct Admin {
    association: Arc<Association>,
    bytes: Vec<u8>,
    /// When the association wants to be turned.
    wakes_at: Instant,
    /// Something was done that it has to look after.
    wants_turn: bool,
    /// How long the I/O queues of a controller that is reset may take to end.
    quiesce: Span,
    /// Other controllers that the host has had reset, and that have not gone.
    resets: Vec<Reset>,
    /// It takes every controller that it does not know for one that is gone.
    is_credulous: bool,
    /// The host only says that it is there, and seldom.
    is_only_kept_alive: bool,
}

/// A controller that its host has had reset by this one.
#[derive(Debug)]
struct Reset {
    /// The command that asked for it.
    tag: u16,
    named: CrossControllerReset,
    /// Until when it has to be gone.
    until: Instant,
}

/// Of a host that may be silent for so long a sign may wait for those of others. It is many times as
/// long as the sign waits.
const PATIENT: Span = Span::from_ms(2_500);
const _: () = assert!(PATIENT.ns >= 50 * host::LINGER.ns);

/// How often one looks whether it has.
const RESET_PAUSE: Span = Span::from_ms(1);

impl Admin {
    pub(super) fn new(association: Arc<Association>, limits: &Limits) -> Self {
        Self {
            association,
            bytes: Vec::new(),
            wakes_at: Instant::default(),
            wants_turn: true,
            quiesce: limits.quiesce,
            is_credulous: limits.injected_bugs.unknown_resets_done,
            resets: Vec::new(),
            is_only_kept_alive: false,
        }
    }

    /// A command has all that it needs.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        rooms: &mut Rooms,
        end: &mut Controller,
        tag: u16,
    ) {
        self.wants_turn = true;
        self.is_only_kept_alive = false;
        let command = *rooms.command(tag);
        let host_cid = command.cid();
        if command.opcode() == AdminOpcode::FabricsCommands.code() {
            let completion = self.property(now, &command);
            rooms.finish(end, tag, 0, completion);
            return;
        }
        // Under its tag, which is unique even if the host's identifiers are not.
        let command = under_tags(rooms, &command).with_cid(tag);
        let association = Arc::clone(&self.association);
        let mut front = association.front();
        let data = front.data(&command).and_then(|data| self.load(rooms, tag, data));
        let ended = match data {
            Ok(()) => {
                let is_sign = command.opcode() == AdminOpcode::KeepAlive.code();
                self.is_only_kept_alive = is_sign && front.keep_alive() >= PATIENT;
                front.execute(now, &command, host_cid, &mut self.bytes)
            }
            Err(status) => {
                front.refused(now, &command.with_cid(host_cid), status);
                Some(AdminEnd::refused(status))
            }
        };
        drop(front);
        self.begin_resets(now);
        let Some(AdminEnd { status, result }) = ended else { return };
        let sent = if status.is_success() { self.store(rooms, tag) } else { Ok(0) };
        let (status, len_bytes) = match sent {
            Ok(len_bytes) => (status, len_bytes),
            Err(why) => (why, 0),
        };
        let completion = Completion::new(0, status).with_dw0(result);
        rooms.finish(end, tag, len_bytes, completion);
    }

    /// Whether the last that came was a keep-alive of a host that can wait for its answer.
    pub(super) fn is_only_kept_alive(&self) -> bool {
        self.is_only_kept_alive
    }

    /// Property Get and Set (Base 2.1 §6.5, §6.6); nothing else of fabrics is known here.
    fn property(&self, now: Instant, command: &Command) -> Completion {
        let mut front = self.association.front();
        let bytes = |size| if size == PropertySize::Eight { 8 } else { 4 };
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        let value = match kind {
            Some(FabricsType::PropertyGet) => PropertyGet::parse(command)
                .and_then(|get| front.property(now, get.ofst, bytes(get.size))),
            Some(FabricsType::PropertySet) => PropertySet::parse(command).and_then(|set| {
                front.set_property(now, set.ofst, bytes(set.size), set.value).map(|()| 0)
            }),
            // A host connects a queue once (Base 2.1 §6.3).
            Some(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR),
            // Only I/O queues are disconnected one by one (Base 2.1 §6.4).
            Some(FabricsType::Disconnect) => Err(Status::INVALID_QUEUE_TYPE),
            _ => Err(Status::INVALID_OPCODE),
        };
        match value {
            Ok(value) => Completion::new(0, Status::SUCCESS).with_result(value),
            Err(status) => {
                let status = status.with_dnr();
                front.refused(now, command, status);
                Completion::new(0, status)
            }
        }
    }

    /// What the host has sent, if it is what the command needs.
    fn load(&mut self, rooms: &Rooms, tag: u16, data: AdminData) -> Result<(), Status> {
        let wrong = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
        let (way, len_bytes) = rooms.data(tag);
        self.bytes.clear();
        match data {
            AdminData::None => Ok(()),
            AdminData::ToHost(need) if way == Way::ToHost && len_bytes >= need => Ok(()),
            // What is sent beyond that is not looked at, as with commands of I/O queues.
            AdminData::FromHost(need) if way == Way::FromHost && len_bytes >= need => {
                self.bytes.resize(need as usize, 0);
                let segment = rooms.front_of(tag, need).ok_or(wrong)?;
                let loaded = rooms.budget().regions().load(segment, &mut self.bytes);
                loaded.map_err(|_| Status::INTERNAL_ERROR)
            }
            AdminData::ToHost(_) | AdminData::FromHost(_) => Err(wrong),
        }
    }

    /// Has the controllers reset that the host has named.
    fn begin_resets(&mut self, now: Instant) {
        // Two that reset each other must not hold what the other needs.
        while let Some((tag, named)) = { self.association.front().next_reset() } {
            if let Some(end) = self.begin_reset(now, tag, named) {
                self.association.front().end_reset(now, tag, end);
            }
        }
    }

    /// Its end, if there is nothing to wait for.
    fn begin_reset(
        &mut self,
        now: Instant,
        tag: u16,
        named: CrossControllerReset,
    ) -> Option<AdminEnd> {
        let found = self.association.offer().association(named.icid);
        let Some(other) = found.filter(|other| other.is_meant(&named)) else {
            let offer = self.association.offer();
            // A controller of another process, or of an earlier life of this one, may still write.
            return Some(match offer.has_ended(&named) || self.is_credulous {
                true => reset_done(),
                false => AdminEnd::refused(Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr()),
            });
        };
        if !other.host.is_same_host(&self.association.host) {
            return Some(AdminEnd::refused(Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr()));
        }
        if self.resets.len() >= usize::from(RESETS_MAX) {
            return Some(AdminEnd::refused(Status::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED));
        }
        other.front().end(Over::Reset);
        self.resets.push(Reset { tag, named, until: now.after(self.quiesce) });
        None
    }

    /// Answers for those that are gone. A controller goes with the last connection of its association,
    /// and that when nothing of it is under way in a medium; one that takes longer than it said is not
    /// called reset.
    fn look_at_resets(&mut self, now: Instant) {
        let Self { association, resets, .. } = self;
        resets.retain(|Reset { tag, named, until }| {
            let found = association.offer().association(named.icid);
            let is_there = found.is_some_and(|other| other.is_meant(named));
            let is_gone = !is_there && association.offer().has_ended(named);
            if is_gone {
                association.front().end_reset(now, *tag, reset_done());
            } else if now >= *until {
                let late = AdminEnd::refused(Status::INTERNAL_ERROR);
                association.front().end_reset(now, *tag, late);
            }
            !is_gone && now < *until
        });
    }

    /// Puts what the host gets where it is sent from. How many bytes.
    fn store(&self, rooms: &Rooms, tag: u16) -> Result<u32, Status> {
        let (way, room) = rooms.data(tag);
        let len_bytes = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        if way != Way::ToHost || len_bytes == 0 {
            return Ok(0);
        }
        let segment = rooms.front_of(tag, len_bytes).filter(|_| len_bytes <= room);
        let segment = segment.ok_or(Status::INTERNAL_ERROR)?;
        let stored = rooms.budget().regions().store(segment, &self.bytes);
        stored.map(|()| len_bytes).map_err(|_| Status::INTERNAL_ERROR)
    }

    /// Looks after the association if it is time to. Why it has ended, once it has.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        is_called: bool,
        rooms: &mut Rooms,
        end: &mut Controller,
    ) -> Turned {
        if !self.wants_turn && !is_called && now < self.wakes_at {
            return Turned::default();
        }
        self.wants_turn = false;
        self.look_at_resets(now);
        let mut front = self.association.front();
        let is_busy = front.turn(now);
        let mut count = usize::from(is_busy);
        while let Some((tag, ended)) = front.next_end() {
            count += 1;
            // Who is told of something asks for it next.
            self.is_only_kept_alive = false;
            match ended {
                _ if !rooms.is_ready(tag) => {}
                Ended::Answered(AdminEnd { status, result }) => {
                    rooms.finish(end, tag, 0, Completion::new(0, status).with_dw0(result));
                }
                Ended::Forgotten => rooms.forget(end, tag),
            }
        }
        let trouble = front.take_trouble();
        self.wakes_at = front.wake_at(now);
        if !self.resets.is_empty() {
            self.wakes_at = self.wakes_at.min(now.after(RESET_PAUSE));
        }
        Turned { count, over: front.over(), trouble }
    }

    /// The connection ends, and with it the association.
    pub(super) fn stop(&mut self) {
        self.association.front().end(Over::HostLost);
    }

    /// Whether no I/O queue of the association is left.
    pub(super) fn is_drained(&self) -> bool {
        self.association.front().is_drained()
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.wakes_at
    }

    pub(super) fn wants_turn(&self) -> bool {
        self.wants_turn
    }
}

/// The command, with the tag of the one it aborts if that came on the same connection: a front end
/// knows commands by their tags, and an Abort names what the host calls them (Base 2.1 §5.1.1).
fn under_tags(rooms: &Rooms, command: &Command) -> Command {
    if command.opcode() != AdminOpcode::Abort.code() || command.cdw10() & 0xffff != 0 {
        return *command;
    }
    let [_, _, low, high] = command.cdw10().to_le_bytes();
    let found = rooms.find(u16::from_le_bytes([low, high]));
    // No command is under this tag.
    let tag = found.map_or(u16::MAX, |(tag, _)| tag);
    command.with_cdw10(u32::from(tag) << 16)
}

/// The controller that was named is reset.
fn reset_done() -> AdminEnd {
    AdminEnd::with(CrossResetResult(0).with(|result| result.is_reset(true)).0)
}

/// What a turn came to.
#[derive(Debug, Default)]
pub(super) struct Turned {
    pub(super) count: usize,
    pub(super) over: Option<Over>,
    pub(super) trouble: Option<String>,
}
