//! Admin ring over its connection. Property commands share the connection, with a tag of their own.

use tenmil_base::{Instant, WakeSource};
use tenmil_nvme_tcp::{DataDirection, SendQueueFull};
use tenmil_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use tenmil_wire::{AdminOpcode, Command, Completion, Status, TypedCommand};

use super::HostTransport;
use crate::queue_connection::{CompletedCommand, QueueConnection};
use crate::ring_bridge::{RingPair, slots_of};

/// The admin connection, and its rings once the driver has set their addresses.
pub(super) struct AdminConnection {
    pub(super) connection: QueueConnection,
    pub(super) rings: Option<RingPair>,
    /// The tag of property commands, after those of the ring.
    tag: u16,
    /// Deadline of the outstanding property command, if any.
    property_deadline: Option<Instant>,
    /// Its completion.
    property: Option<Completion>,
    /// Identifier and deadline of the outstanding Keep Alive, if any.
    keep_alive_deadline: Option<(u16, Instant)>,
    /// When it was sent, and when the last completed one was sent, until taken.
    keep_alive_sent_at: Instant,
    keep_alive_confirmed_at: Option<Instant>,
}

/// Number of tags in addition to those of the ring.
const PROPERTY_TAGS: u16 = 1;

/// Number of commands that the admin queue has to accept, for rings of this depth.
pub(super) fn depth_for(ring_depth: u32) -> u16 {
    slots_of(ring_depth) + PROPERTY_TAGS
}

/// Depth of the admin rings. With a tag for property commands, this is an admin queue of 32 entries, the
/// minimum that a target may support (ASQSZ, NVM Express Base 2.1, section 5.1.12.3.1), and the maximum
/// of many targets.
pub(crate) const RING_DEPTH: u32 = 31;

const _: () = assert!(RING_DEPTH < 32, "SQSIZE counts from zero, and an entry is never used");

impl AdminConnection {
    pub(super) fn new(connection: QueueConnection) -> Self {
        Self {
            connection,
            rings: None,
            tag: depth_for(RING_DEPTH) - PROPERTY_TAGS,
            property_deadline: None,
            property: None,
            keep_alive_deadline: None,
            keep_alive_sent_at: Instant::default(),
            keep_alive_confirmed_at: None,
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
        debug_assert!(self.property_deadline.is_none(), "one question at a time");
        let nothing = tenmil_base::Segment::default();
        let command = command.with_cid(self.tag);
        // If the connection is full or lost, the timeout detects it.
        let _ = self.connection.submit_segment(&command, DataDirection::None, nothing);
        self.property_deadline = Some(until);
        self.property = None;
        self.connection.send(&mut |_| {});
    }

    /// Takes the completion of the property command.
    pub(super) fn take_property_completion(&mut self) -> Option<Completion> {
        self.property.take()
    }

    pub(super) fn wake_at(&self) -> Instant {
        let property = self.property_deadline.unwrap_or(Instant::NEVER);
        let keep_alive = self.keep_alive_deadline.map_or(Instant::NEVER, |(_, until)| until);
        self.connection.deadline().min(property).min(keep_alive)
    }

    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.connection.wake_source()
    }

    /// Why the connection is unusable, if it is.
    fn error(&self, now: Instant) -> Option<String> {
        if let Some(lost) = self.connection.lost() {
            return Some(lost.to_string());
        }
        if self.property_deadline.is_some_and(|until| now >= until) {
            return Some("a property was not answered in time".to_owned());
        }
        let is_unanswered = self.keep_alive_deadline.is_some_and(|(_, until)| now >= until);
        is_unanswered.then(|| "a Keep Alive was not answered in time".to_owned())
    }

    /// Receives completions, and posts them.
    fn receive_completions(&mut self, now: Instant) {
        let Self {
            connection, rings, tag, property_deadline, property, keep_alive_deadline, ..
        } = self;
        let (keep_alive_sent_at, keep_alive_confirmed_at) =
            (self.keep_alive_sent_at, &mut self.keep_alive_confirmed_at);
        connection.receive(now, &mut |command: CompletedCommand| {
            if command.cid == *tag {
                *property = Some(command.completion);
                *property_deadline = None;
                return;
            }
            if keep_alive_deadline.is_some_and(|(cid, _)| cid == command.cid) {
                *keep_alive_deadline = None;
                *keep_alive_confirmed_at = Some(keep_alive_sent_at);
            }
            if let Some(rings) = rings {
                rings.post_from_connection(command);
            }
        });
        connection.expire(now);
    }
}

impl HostTransport {
    /// Polls the admin connection, and processes the admin ring.
    pub(super) fn poll_admin(&mut self, now: Instant) {
        let Some(admin) = &mut self.admin else { return };
        admin.receive_completions(now);
        if let (Some(at), Some(association)) =
            (admin.keep_alive_confirmed_at.take(), &self.association)
        {
            self.caches.record_alive(association, at);
        }
        while let Some(admin) = &mut self.admin
            && let Some(rings) = &mut admin.rings
            && let Some(command) = rings.next(rings.doorbell())
        {
            if !self.handle_command(now, &command) {
                break;
            }
        }
        let Some(admin) = &mut self.admin else { return };
        let AdminConnection { connection, rings, .. } = admin;
        if let Some(rings) = rings {
            rings.post_local_completions();
            connection.send(&mut |command| rings.post_from_connection(command));
        } else {
            connection.send(&mut |_| {});
        }
        if let Some(why) = admin.error(now) {
            self.handle_admin_loss(now, why);
        }
    }

    /// Handles one command of the admin ring. Returns false if the connection has no free entry for it now.
    fn handle_command(&mut self, now: Instant, command: &Command) -> bool {
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
            _ => self.forward_command(now, command),
        }
    }

    fn forward_command(&mut self, now: Instant, command: &Command) -> bool {
        let within = self.options.policy.keep_alive_interval();
        let Some(AdminConnection {
            connection,
            rings: Some(rings),
            keep_alive_deadline,
            keep_alive_sent_at,
            ..
        }) = &mut self.admin
        else {
            return false;
        };
        match rings.submit(command, connection) {
            Ok(Ok(())) => {
                if command.opcode() == AdminOpcode::KeepAlive.code() {
                    *keep_alive_deadline = Some((command.cid(), now.after(within)));
                    *keep_alive_sent_at = now;
                }
            }
            Ok(Err(SendQueueFull)) => return false,
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
