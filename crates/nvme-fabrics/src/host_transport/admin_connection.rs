//! Admin queue over its connection. Property commands share the connection, with a tag of their own.

use tenmil_base::{Error, Instant, WakeSource};
use tenmil_dma::DevicePool;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use tenmil_wire::{AdminOpcode, Command, Completion, TypedCommand};

use super::HostTransport;
use crate::admin_transport::AdminCommands;
use crate::queue_authentication::{ExchangeLink, ExchangeResult, QueueAuthentication};
use crate::queue_connection::{CompletedCommand, QueueConnection};

/// The admin connection.
pub(super) struct AdminConnection {
    pub(super) connection: QueueConnection,
    /// Deadline of the outstanding property command, if any.
    property_deadline: Option<Instant>,
    /// Its completion.
    property: Option<Completion>,
    /// Identifier and deadline of the outstanding Keep Alive, if any.
    keep_alive_deadline: Option<(u16, Instant)>,
    /// When it was sent, and when the last completed one was sent, until taken.
    keep_alive_sent_at: Instant,
    keep_alive_confirmed_at: Option<Instant>,
    /// Its authentication, if it was authenticated, to be repeated.
    pub(super) authentication: Option<QueueAuthentication>,
    /// Completion of an authentication command.
    pub(super) authentication_completion: Option<Completion>,
}

/// Tags in addition to those of the admin queue: of a property command, and of an authentication command.
const ADDITIONAL_TAGS: u16 = 2;

/// Entries of the admin queue, of which one is never used. With the additional tags, this is an admin queue
/// of 32 entries, the minimum that a target may support (ASQSZ, NVM Express Base 2.1, section 5.1.12.3.1),
/// and the maximum of many targets.
pub(crate) const ADMIN_DEPTH: u32 = 30;

/// Number of commands that the admin connection has to accept.
pub(super) const ADMIN_COMMANDS: u16 = outstanding_max(ADMIN_DEPTH) + ADDITIONAL_TAGS;

const _: () = assert!(ADMIN_COMMANDS < 32, "SQSIZE counts from zero, and an entry is never used");

/// Tags of property commands, and of authentication commands, which begin while the queue is connected.
const PROPERTY_TAG: u16 = ADMIN_COMMANDS - 2;
pub(super) const AUTHENTICATION_TAG: u16 = ADMIN_COMMANDS - 1;

/// Number of commands that can be outstanding in a queue of this depth: one entry is never used.
#[expect(clippy::cast_possible_truncation, reason = "the minimum is below 65 536")]
pub(super) const fn outstanding_max(depth: u32) -> u16 {
    if depth > 0xffff { u16::MAX - 1 } else { (depth - 1) as u16 }
}

impl AdminConnection {
    pub(super) fn new(
        connection: QueueConnection,
        authentication: Option<QueueAuthentication>,
    ) -> Self {
        Self {
            connection,
            property_deadline: None,
            property: None,
            keep_alive_deadline: None,
            keep_alive_sent_at: Instant::default(),
            keep_alive_confirmed_at: None,
            authentication,
            authentication_completion: None,
        }
    }

    /// Reads a property (Property Get).
    pub(super) fn get_property(&mut self, size: PropertySize, offset: u32, until: Instant) {
        self.submit_property(&PropertyGet { size, ofst: offset }.to_command(), until);
    }

    /// Writes a property of four bytes (Property Set).
    pub(super) fn set_property(&mut self, offset: u32, value: u32, until: Instant) {
        let size = PropertySize::Four;
        let set = PropertySet { size, ofst: offset, value: value.into() };
        self.submit_property(&set.to_command(), until);
    }

    fn submit_property(&mut self, command: &Command, until: Instant) {
        debug_assert!(self.property_deadline.is_none(), "one question at a time");
        let nothing = tenmil_base::Segment::default();
        let command = command.with_cid(PROPERTY_TAG);
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

    /// Advances an authentication in progress.
    pub(super) fn poll_authentication(
        &mut self,
        now: Instant,
        memory: &DevicePool,
    ) -> ExchangeResult {
        let Self { connection, authentication, authentication_completion, .. } = self;
        let authentication =
            authentication.as_mut().filter(|authentication| authentication.is_in_progress())?;
        let result = authentication_completion.take().and_then(|completion| {
            authentication.handle_completion(now, completion, ExchangeLink { connection, memory })
        });
        result.or_else(|| authentication.poll(now, ExchangeLink { connection, memory }))
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
    fn unusable_reason(&self, now: Instant) -> Option<String> {
        if let Some(lost) = self.connection.loss() {
            return Some(lost.to_string());
        }
        if self.property_deadline.is_some_and(|until| now >= until) {
            return Some("a property was not answered in time".to_owned());
        }
        let is_unanswered = self.keep_alive_deadline.is_some_and(|(_, until)| now >= until);
        is_unanswered.then(|| "a Keep Alive was not answered in time".to_owned())
    }

    /// Receives completions, and passes those of the admin queue to `commands`.
    fn receive_completions(&mut self, now: Instant, commands: &AdminCommands) {
        let Self { connection, property_deadline, property, keep_alive_deadline, .. } = self;
        let authentication_completion = &mut self.authentication_completion;
        let (keep_alive_sent_at, keep_alive_confirmed_at) =
            (self.keep_alive_sent_at, &mut self.keep_alive_confirmed_at);
        connection.receive(now, &mut |command: CompletedCommand| {
            if command.cid == PROPERTY_TAG {
                *property = Some(command.completion);
                *property_deadline = None;
                return;
            }
            if command.cid == AUTHENTICATION_TAG {
                *authentication_completion = Some(command.completion);
                return;
            }
            if keep_alive_deadline.is_some_and(|(cid, _)| cid == command.cid) {
                *keep_alive_deadline = None;
                *keep_alive_confirmed_at = Some(keep_alive_sent_at);
            }
            commands.push_completed(command);
        });
        connection.check_timeouts(now);
    }
}

impl HostTransport {
    /// Polls the admin connection, and submits the commands of the admin queue.
    pub(super) fn poll_admin(&mut self, now: Instant) {
        let within = self.options.policy.keep_alive_interval();
        let Self { admin, admin_commands: commands, association, caches, .. } = self;
        let Some(admin) = admin else { return };
        admin.receive_completions(now, commands);
        if let (Some(at), Some(association)) = (admin.keep_alive_confirmed_at.take(), association) {
            caches.record_alive(association, at);
        }
        while let Some(command) = commands.submit_next(&mut admin.connection) {
            if command.opcode() == AdminOpcode::KeepAlive.code() {
                admin.keep_alive_deadline = Some((command.cid(), now.after(within)));
                admin.keep_alive_sent_at = now;
            }
        }
        admin.connection.send(&mut |command| commands.push_completed(command));
        if let Some(why) = admin.unusable_reason(now) {
            self.handle_admin_loss(now, Error::remote(why));
        }
    }
}
