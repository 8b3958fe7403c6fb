//! Admin ring over its connection. Property commands share the connection, with a tag of their own.

use tenmil_base::{Instant, WakeSource};
use tenmil_nvme_tcp::{DataDirection, QueueFull};
use tenmil_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use tenmil_wire::{AdminOpcode, Command, Completion, Status, TypedCommand};

use super::HostTransport;
use crate::queue_connection::{CompletedCommand, QueueConnection};
use crate::ring_bridge::{Rings, slots_of};

/// The admin connection, and its rings once the driver has set their addresses.
pub(super) struct AdminConnection {
    pub(super) exchange: QueueConnection,
    pub(super) rings: Option<Rings>,
    /// The tag of property commands, after those of the ring.
    tag: u16,
    /// Deadline of the outstanding property command, if any.
    asked_until: Option<Instant>,
    /// Its completion.
    property: Option<Completion>,
    /// Identifier and deadline of the outstanding Keep Alive, if any.
    alive_until: Option<(u16, Instant)>,
    /// When it was sent, and when the last completed one was sent, until taken.
    alive_asked: Instant,
    alive_seen: Option<Instant>,
}

/// Number of tags in addition to those of the ring.
const TAGS_OWN: u16 = 1;

/// Number of commands that the admin queue has to accept, for rings of this depth.
pub(super) fn depth_for(ring_depth: u32) -> u16 {
    slots_of(ring_depth) + TAGS_OWN
}

/// Depth of the admin rings. With a tag for property commands, this is an admin queue of 32 entries, the
/// minimum that a target may support (ASQSZ, NVM Express Base 2.1, section 5.1.12.3.1), and the maximum
/// of many targets.
pub(crate) const RING_DEPTH: u32 = 31;

const _: () = assert!(RING_DEPTH < 32, "SQSIZE counts from zero, and an entry is never used");

impl AdminConnection {
    pub(super) fn new(exchange: QueueConnection) -> Self {
        Self {
            exchange,
            rings: None,
            tag: depth_for(RING_DEPTH) - TAGS_OWN,
            asked_until: None,
            property: None,
            alive_until: None,
            alive_asked: Instant::default(),
            alive_seen: None,
        }
    }

    /// Reads a property (Property Get).
    pub(super) fn get(&mut self, size: PropertySize, offset: u32, until: Instant) {
        self.submit_property(&PropertyGet { size, ofst: offset }.to_command(), until);
    }

    /// Writes a property of four bytes (Property Set).
    pub(super) fn set(&mut self, offset: u32, value: u32, until: Instant) {
        let size = PropertySize::Four;
        let set = PropertySet { size, ofst: offset, value: value.into() };
        self.submit_property(&set.to_command(), until);
    }

    fn submit_property(&mut self, command: &Command, until: Instant) {
        debug_assert!(self.asked_until.is_none(), "one question at a time");
        let nothing = tenmil_base::Segment::default();
        let command = command.with_cid(self.tag);
        // If the connection is full or lost, the timeout detects it.
        let _ = self.exchange.submit_segment(&command, DataDirection::None, nothing);
        self.asked_until = Some(until);
        self.property = None;
        self.exchange.send(&mut |_| {});
    }

    /// Takes the completion of the property command.
    pub(super) fn take_property_completion(&mut self) -> Option<Completion> {
        self.property.take()
    }

    pub(super) fn wake_at(&self) -> Instant {
        let asked = self.asked_until.unwrap_or(Instant::NEVER);
        let alive = self.alive_until.map_or(Instant::NEVER, |(_, until)| until);
        self.exchange.deadline().min(asked).min(alive)
    }

    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.exchange.wake_source()
    }

    /// Why the connection is unusable, if it is.
    fn problem(&self, now: Instant) -> Option<String> {
        if let Some(lost) = self.exchange.lost() {
            return Some(lost.to_string());
        }
        if self.asked_until.is_some_and(|until| now >= until) {
            return Some("a property was not answered in time".to_owned());
        }
        let is_silent = self.alive_until.is_some_and(|(_, until)| now >= until);
        is_silent.then(|| "a Keep Alive was not answered in time".to_owned())
    }

    /// Receives completions, and posts them.
    fn pull(&mut self, now: Instant) {
        let Self { exchange, rings, tag, asked_until, property, alive_until, .. } = self;
        let (alive_asked, alive_seen) = (self.alive_asked, &mut self.alive_seen);
        exchange.receive(now, &mut |answered: CompletedCommand| {
            if answered.cid == *tag {
                *property = Some(answered.completion);
                *asked_until = None;
                return;
            }
            if alive_until.is_some_and(|(cid, _)| cid == answered.cid) {
                *alive_until = None;
                *alive_seen = Some(alive_asked);
            }
            if let Some(rings) = rings {
                rings.post_from_connection(answered);
            }
        });
        exchange.expire(now);
    }
}

impl HostTransport {
    /// Polls the admin connection, and processes the admin ring.
    pub(super) fn turn_admin(&mut self, now: Instant) {
        let Some(admin) = &mut self.admin else { return };
        admin.pull(now);
        if let (Some(at), Some(association)) = (admin.alive_seen.take(), &self.association) {
            self.caches.seen(association, at);
        }
        while let Some(admin) = &mut self.admin
            && let Some(rings) = &mut admin.rings
            && let Some(command) = rings.next(rings.doorbell())
        {
            if !self.take_command(now, &command) {
                break;
            }
        }
        let Some(admin) = &mut self.admin else { return };
        let AdminConnection { exchange, rings, .. } = admin;
        if let Some(rings) = rings {
            rings.post_refused();
            exchange.send(&mut |answered| rings.post_from_connection(answered));
        } else {
            exchange.send(&mut |_| {});
        }
        if let Some(why) = admin.problem(now) {
            self.lose(now, why);
        }
    }

    /// Handles one command of the admin ring. Returns false if the connection has no free entry for it now.
    fn take_command(&mut self, now: Instant, command: &Command) -> bool {
        match AdminOpcode::from_u8(command.opcode()) {
            Some(
                AdminOpcode::CreateIoCompletionQueue
                | AdminOpcode::CreateIoSubmissionQueue
                | AdminOpcode::DeleteIoSubmissionQueue
                | AdminOpcode::DeleteIoCompletionQueue,
            ) => {
                self.advance_ring();
                self.handle_queue_command(now, command);
                true
            }
            _ => self.pass_on(now, command),
        }
    }

    fn pass_on(&mut self, now: Instant, command: &Command) -> bool {
        let within = self.options.policy.asking();
        let Some(AdminConnection {
            exchange, rings: Some(rings), alive_until, alive_asked, ..
        }) = &mut self.admin
        else {
            return false;
        };
        match rings.submit(command, exchange) {
            Ok(Ok(())) => {
                if command.opcode() == AdminOpcode::KeepAlive.code() {
                    *alive_until = Some((command.cid(), now.after(within)));
                    *alive_asked = now;
                }
            }
            Ok(Err(QueueFull)) => return false,
            Err(status) => rings.complete_locally(command, status),
        }
        rings.advance();
        true
    }

    fn advance_ring(&mut self) {
        if let Some(rings) = self.admin.as_mut().and_then(|admin| admin.rings.as_mut()) {
            rings.advance();
        }
    }

    /// Completes a command of the admin ring locally.
    pub(super) fn complete_locally(&mut self, cid: u16, status: Status) {
        if let Some(rings) = self.admin.as_mut().and_then(|admin| admin.rings.as_mut()) {
            rings.post(cid, Completion::new(cid, status));
        }
    }
}
