//! Connection state machine of a controller, from the first stream to a ready controller, and to its end.
//!
//! ```text
//!   Backoff ─▶ Connecting ─▶ ReadingProperties ─▶ Idle ──CC.EN=1──▶ Enabling ─▶ Ready
//!      ▲            │                                                  │          │ lost: CSTS.CFS
//!      └────────────┘ not connected: retried                           ▼          ▼
//!   Down ◀── closed, and the old controller can do no harm ── Draining ◀───── CC.EN=0
//!      └──CC.EN=1──▶ Backoff                                      ▲
//!                                        Disabling: CSTS.RDY=0 ───┘
//! ```

use tenmil_base::{Error, Instant, Span};
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::fabrics::PropertySize;
use tenmil_wire::register::{
    Capabilities, Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus,
};
use tenmil_wire::{Completion, Status};

use super::admin_connection::{ADMIN_COMMANDS, AdminConnection};
use super::{CAP, CC, CSTS, HostTransport, VS};
use crate::queue_authentication::QueueAuthentication;
use crate::queue_connect::{ConnectedQueue, QueueConnect, QueueConnectError, QueueConnectParams};
use crate::zero_copy_drain::ZeroCopyDrain;

/// Stage of a controller, named for what it awaits.
pub(super) enum ControllerStage {
    /// Nothing: it is not connected, and need not be.
    Down,
    /// The time of the next attempt.
    Backoff { until: Instant },
    /// The connect of the admin queue.
    Connecting(Box<QueueConnect>),
    /// The value of a property.
    ReadingProperties(PropertyRead),
    /// CC.EN=1 from the driver.
    Idle,
    /// CSTS.RDY=1, within a timeout.
    Enabling { csts_poll: CstsPoll, until: Instant },
    /// Nothing in particular.
    Ready,
    /// Completion of the shutdown in CSTS.SHST.
    ShuttingDown(CstsPoll),
    /// CSTS.RDY=0, within a timeout.
    Disabling { csts_poll: CstsPoll, until: Instant },
    /// CC.EN=0 from the driver.
    Lost,
    /// That no connection is left, and that the old controller can no longer execute commands.
    Draining { is_confirmed: bool },
    /// Nothing: it has failed permanently.
    Failed,
}

/// The properties read after the connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PropertyRead {
    Cap,
    Vs { cap: u64 },
}

/// Periodic reads of CSTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CstsPoll {
    /// The completion of a Property Set comes first.
    AfterSet,
    /// The next read is at this time, and the one after it `interval` later.
    At { at: Instant, interval: Span },
    /// A read is outstanding; the next one follows after `interval`.
    Reading { interval: Span },
}

/// State requested by the driver in CC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DesiredState {
    Enabled,
    Disabled,
    ShutDown,
}

/// The first CSTS read follows at once, the others at increasing intervals.
const CSTS_POLL_INTERVAL_MIN: Span = Span::from_ms(1);
const CSTS_POLL_INTERVAL_MAX: Span = Span::from_ms(100);

/// Poll interval while keys are looked up.
const LOOKUP_POLL_INTERVAL: Span = Span::from_ms(10);

/// Poll interval while connections are drained.
const DRAIN_POLL_INTERVAL: Span = Span::from_ms(1);

impl CstsPoll {
    fn wake_at(&self) -> Instant {
        match self {
            Self::At { at, .. } => *at,
            Self::AfterSet | Self::Reading { .. } => Instant::NEVER,
        }
    }
}

impl HostTransport {
    /// Advances the state machine.
    pub(super) fn advance_state(&mut self, now: Instant) {
        if self.dma.is_revoked() && !self.is_closed() {
            self.registers.cc = Configuration::zeroed();
            self.begin_drain(now);
        }
        if let Some(desired_state) = self.desired_state.take() {
            self.apply_desired_state(now, desired_state);
        }
        if self.has_loss_timeout_expired(now) {
            self.give_up_reconnecting(now);
        }
        match &mut self.stage {
            ControllerStage::Backoff { until } if now >= *until => self.reconnect_admin(now),
            ControllerStage::Connecting(connect) => {
                let buffers = &self.exchange_buffers;
                if let Some(result) = connect.poll(now, &self.options, self.dma.pool(), buffers) {
                    self.handle_admin_connected(now, result);
                }
            }
            ControllerStage::ReadingProperties(property) => {
                let property = *property;
                if let Some(completion) = self.take_property() {
                    self.handle_property_completion(now, property, completion);
                }
            }
            ControllerStage::Enabling { .. }
            | ControllerStage::Disabling { .. }
            | ControllerStage::ShuttingDown(_) => {
                self.poll_csts(now);
            }
            ControllerStage::Draining { is_confirmed } => {
                // Drained: the old controller was confirmed as disabled or reset, or had no harmful
                // command, or its time has passed.
                let is_quiet = now.since(self.last_sent_at) >= self.controller_info.quiesce_time;
                let is_silent = *is_confirmed || !self.may_execute_late || is_quiet;
                if is_silent && self.are_queues_closed() && self.draining.is_empty() {
                    self.finish_drain();
                }
            }
            _ => {}
        }
    }

    pub(super) fn stage_wake_at(&self, now: Instant) -> Instant {
        if self.desired_state.is_some() {
            return now;
        }
        let until = match &self.stage {
            ControllerStage::Backoff { until } => *until,
            ControllerStage::Connecting(connect) => connect.wake_at(now),
            ControllerStage::ShuttingDown(csts_poll) => csts_poll.wake_at(),
            ControllerStage::Enabling { csts_poll, until }
            | ControllerStage::Disabling { csts_poll, until } => csts_poll.wake_at().min(*until),
            ControllerStage::Draining { .. } => now.after(DRAIN_POLL_INTERVAL),
            _ => Instant::NEVER,
        };
        let end = self.lost_since.filter(|_| !self.registers.is_removed);
        until.min(end.map_or(Instant::NEVER, |since| since.after(self.options.policy.give_up)))
    }

    /// The old controller that another one should reset, while it may still execute commands.
    pub(crate) fn fencing_target(&self, now: Instant) -> Option<CrossControllerReset> {
        let is_silent = now.since(self.last_sent_at) >= self.controller_info.quiesce_time;
        let is_unconfirmed =
            matches!(self.stage, ControllerStage::Draining { is_confirmed: false });
        let (ciu, cirn) = self.controller_info.instance?;
        (is_unconfirmed && self.may_execute_late && !is_silent).then_some(CrossControllerReset {
            icid: self.cntlid,
            ciu,
            cirn,
        })
    }

    /// Records that another controller has reset the old one. Returns false if it is a different one.
    pub(crate) fn confirm_fenced(&mut self, old_controller: CrossControllerReset) -> bool {
        let is_same_instance = self.controller_info.instance
            == Some((old_controller.ciu, old_controller.cirn))
            && self.cntlid == old_controller.icid;
        match &mut self.stage {
            ControllerStage::Draining { is_confirmed } if is_same_instance => {
                !core::mem::replace(is_confirmed, true)
            }
            _ => false,
        }
    }

    /// Whether a connection, or a controller with commands, may still be active.
    pub(super) fn has_unfenced_io(&self) -> bool {
        let is_closing = matches!(self.stage, ControllerStage::Draining { .. });
        let is_closed = self.are_queues_closed() && self.draining.is_empty();
        self.admin.is_some() || is_closing || self.may_execute_late || !is_closed
    }

    /// Whether the driver can enable it.
    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.stage, ControllerStage::Idle)
    }

    /// Whether it is ready, and not lost since.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, ControllerStage::Ready) && !self.registers.csts.cfs()
    }

    /// Whether reconnecting has ended.
    pub(crate) fn has_given_up(&self) -> bool {
        self.registers.is_removed
    }

    /// Whether it is not connected, and nothing is awaited.
    fn is_closed(&self) -> bool {
        matches!(
            self.stage,
            ControllerStage::Down | ControllerStage::Draining { .. } | ControllerStage::Failed
        )
    }

    fn has_loss_timeout_expired(&self, now: Instant) -> bool {
        let limit = self.options.policy.give_up;
        !self.registers.is_removed && self.lost_since.is_some_and(|since| now.since(since) >= limit)
    }

    /// Ends reconnecting: all registers read as ones, so the driver finds the controller removed.
    fn give_up_reconnecting(&mut self, now: Instant) {
        if !self.is_closed() {
            self.begin_drain(now);
        }
        self.registers.is_removed = true;
        self.has_changed = true;
    }

    /// Connects after a pause. Secrets that were refused are used again only if others were found.
    fn reconnect_admin(&mut self, now: Instant) {
        if self.awaits_secrets
            && let Some(authentication) = &self.options.authentication
        {
            if authentication.lookup.as_ref().is_some_and(|lookup| lookup.is_in_progress()) {
                self.stage = ControllerStage::Backoff { until: now.after(LOOKUP_POLL_INTERVAL) };
                return;
            }
            self.awaits_secrets = false;
            if authentication.replacements() == self.attempted_replacements {
                return self.give_up_reconnecting(now);
            }
        }
        self.connect_admin(now);
    }

    fn connect_admin(&mut self, now: Instant) {
        if let Some(authentication) = &self.options.authentication {
            self.attempted_replacements = authentication.replacements();
        }
        let security = match self.admin_channel_security() {
            Ok(security) => security,
            Err(error) => {
                self.why = Some(error);
                return self.schedule_reconnect(now, true);
            }
        };
        let in_capsule_bytes = tenmil_wire::tcp::ADMIN_IN_CAPSULE_BYTES;
        let params = QueueConnectParams {
            queue: 0,
            depth: ADMIN_COMMANDS,
            in_capsule_bytes,
            data: self.store_connect_data(true),
            security,
        };
        self.stats.attempts += 1;
        self.next_connect_at = now.after(self.options.policy.retry);
        let connect = QueueConnect::begin(&mut *self.connector, &self.options, params, now);
        self.stage = ControllerStage::Connecting(Box::new(connect));
    }

    fn handle_admin_connected(
        &mut self,
        now: Instant,
        result: Result<ConnectedQueue, QueueConnectError>,
    ) {
        match result {
            Ok(ConnectedQueue { connection, cntlid, authentication }) => {
                let (authentication, outcome) = authentication.unzip();
                if self.generated_key.is_none() {
                    self.authenticated_generation = None;
                }
                if let Some(authentication) = &authentication {
                    self.stats.authentications += 1;
                    self.authenticated_generation = Some(authentication.generation());
                }
                if let Some(outcome) = outcome.filter(|outcome| outcome.generated_psk.is_some()) {
                    // This connection is closed, and another one is opened with the generated key.
                    return match self.use_generated_key(now, &outcome) {
                        Ok(()) => self.connect_admin(now),
                        Err(error) => self.handle_connect_error(now, error),
                    };
                }
                self.cntlid = cntlid;
                self.stats.connected += 1;
                self.association = Some(self.caches.record_connect(self.path, now));
                let mut admin = AdminConnection::new(*connection, authentication);
                admin.get_property(
                    PropertySize::Eight,
                    CAP,
                    now.after(self.options.policy.connect),
                );
                self.admin = Some(admin);
                self.stage = ControllerStage::ReadingProperties(PropertyRead::Cap);
            }
            Err(error) => self.handle_connect_error(now, error),
        }
    }

    fn handle_connect_error(&mut self, now: Instant, failed: QueueConnectError) {
        let QueueConnectError { error, is_fatal, are_secrets_refused } = failed;
        self.forget_generated_key();
        self.why = Some(error);
        let authentication = self.options.authentication.as_ref();
        let lookup = authentication.and_then(|authentication| authentication.lookup.as_ref());
        if let (true, Some(lookup)) = (are_secrets_refused, lookup) {
            lookup.start();
            // A first connection is made again by its owner, or not at all.
            self.awaits_secrets = self.lost_since.is_some();
        }
        self.schedule_reconnect(now, is_fatal && !self.awaits_secrets);
    }

    /// After a failed attempt: retries a controller that was connected before, until the timeout.
    fn schedule_reconnect(&mut self, now: Instant, is_final: bool) {
        self.stats.failed += 1;
        if is_final || self.lost_since.is_none() {
            return self.give_up_reconnecting(now);
        }
        self.stage = ControllerStage::Backoff { until: self.next_connect_at.max(now) };
    }

    /// The completion of the outstanding property command, if it has arrived.
    fn take_property(&mut self) -> Option<Completion> {
        self.admin.as_mut().and_then(AdminConnection::take_property_completion)
    }

    fn handle_property_completion(
        &mut self,
        now: Instant,
        property: PropertyRead,
        completion: Completion,
    ) {
        if !completion.status().is_success() {
            let status = completion.status();
            return self.handle_admin_loss(now, property_refusal(status));
        }
        let until = now.after(self.options.policy.connect);
        match property {
            PropertyRead::Cap => {
                if let Some(admin) = &mut self.admin {
                    admin.get_property(PropertySize::Four, VS, until);
                }
                self.stage = ControllerStage::ReadingProperties(PropertyRead::Vs {
                    cap: completion.result(),
                });
            }
            PropertyRead::Vs { cap } => {
                self.handle_capabilities(now, Capabilities(cap), completion.dw0())
            }
        }
    }

    fn handle_capabilities(&mut self, now: Instant, cap: Capabilities, vs: u32) {
        if self.registers.vs != 0 && self.registers.cap.mqes() != cap.mqes() {
            let (before, found) = (self.registers.cap.mqes(), cap.mqes());
            let text = format!("CAP.MQES is {found}, expected {before}, as before");
            self.why = Some(Error::remote(text));
            return self.give_up_reconnecting(now);
        }
        self.ready_timeout = Span::from_ms(500 * (u64::from(cap.to()) + 1));
        self.registers.set_capabilities(cap, vs, &self.options, self.controller_info.quiesce_time);
        self.stage = ControllerStage::Idle;
        if self.registers.cc.en() {
            self.enable(now);
        }
    }

    /// Handles a write to CC by the driver.
    pub(super) fn handle_cc_write(&mut self, cc: Configuration) {
        let before = core::mem::replace(&mut self.registers.cc, cc);
        self.desired_state = match (before.en(), cc.en()) {
            (false, true) => Some(DesiredState::Enabled),
            (true, false) => Some(DesiredState::Disabled),
            _ if cc.shn() != before.shn() && cc.shn() != ShutdownNotification::None => {
                Some(DesiredState::ShutDown)
            }
            _ => self.desired_state,
        };
    }

    fn apply_desired_state(&mut self, now: Instant, desired_state: DesiredState) {
        match (desired_state, &self.stage) {
            (DesiredState::Enabled, ControllerStage::Idle) => self.enable(now),
            (DesiredState::Enabled, ControllerStage::Down) => {
                // It may be unreachable for a while, even after a reset by the driver.
                if self.was_ready {
                    self.lost_since.get_or_insert(now);
                }
                self.stage = ControllerStage::Backoff { until: self.next_connect_at };
            }
            (DesiredState::Disabled, ControllerStage::Ready) => self.disable(now),
            (DesiredState::Disabled, _) if !self.is_closed() => self.begin_drain(now),
            (DesiredState::ShutDown, ControllerStage::Ready) => {
                let until = now.after(self.options.policy.connect);
                let cc = self.registers.cc.0;
                if let Some(admin) = &mut self.admin {
                    admin.set_property(CC, cc, until);
                }
                self.stage = ControllerStage::ShuttingDown(CstsPoll::AfterSet);
            }
            _ => {}
        }
    }

    fn enable(&mut self, now: Instant) {
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.connect));
        let Some(admin) = &mut self.admin else { return };
        admin.set_property(CC, cc, until);
        let until = now.after(self.ready_timeout);
        self.stage = ControllerStage::Enabling { csts_poll: CstsPoll::AfterSet, until };
    }

    /// Disables the controller.
    fn disable(&mut self, now: Instant) {
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.detect));
        self.close_queues();
        if let Some(admin) = &mut self.admin {
            admin.set_property(CC, cc, until);
        }
        self.stage = ControllerStage::Disabling { csts_poll: CstsPoll::AfterSet, until };
    }

    /// Advances the reads of CSTS.
    fn poll_csts(&mut self, now: Instant) {
        let completion = self.take_property();
        let until = now.after(self.options.policy.connect);
        let (csts_poll, end) = match &mut self.stage {
            ControllerStage::Enabling { csts_poll, until }
            | ControllerStage::Disabling { csts_poll, until } => (csts_poll, *until),
            ControllerStage::ShuttingDown(csts_poll) => (csts_poll, Instant::NEVER),
            _ => return,
        };
        match (*csts_poll, completion) {
            (_, Some(completion)) if !completion.status().is_success() => {
                let status = completion.status();
                self.handle_admin_loss(now, property_refusal(status));
            }
            (CstsPoll::AfterSet, Some(_)) => {
                *csts_poll = CstsPoll::At { at: now, interval: CSTS_POLL_INTERVAL_MIN }
            }
            (CstsPoll::Reading { interval }, Some(completion)) => {
                let next = Span { ns: (2 * interval.ns).min(CSTS_POLL_INTERVAL_MAX.ns) };
                *csts_poll = CstsPoll::At { at: now.after(interval), interval: next };
                self.handle_status(now, ControllerStatus(completion.dw0()));
            }
            (CstsPoll::At { at, interval }, _) if now >= at => {
                *csts_poll = CstsPoll::Reading { interval };
                if let Some(admin) = &mut self.admin {
                    admin.get_property(PropertySize::Four, CSTS, until);
                }
            }
            _ if now >= end => {
                self.handle_admin_loss(now, Error::remote("CSTS.RDY did not change in time"))
            }
            _ => {}
        }
    }

    fn handle_status(&mut self, now: Instant, csts: ControllerStatus) {
        match self.stage {
            ControllerStage::Enabling { .. } if csts.cfs() => {
                self.handle_admin_loss(
                    now,
                    Error::remote("the controller reports a fatal status (CSTS.CFS)"),
                );
            }
            ControllerStage::Enabling { .. } if csts.rdy() => {
                self.registers.csts = ControllerStatus::zeroed().with(|csts| csts.rdy(true));
                self.stage = ControllerStage::Ready;
            }
            ControllerStage::Disabling { .. } if !csts.rdy() => {
                self.close_admin();
                self.stage = ControllerStage::Draining { is_confirmed: true };
            }
            ControllerStage::ShuttingDown(_) => {
                let shst = csts.shst();
                self.registers.csts = self.registers.csts.with(|csts| csts.shst(shst));
                if shst == ShutdownStatus::Complete {
                    self.stage = ControllerStage::Ready;
                }
            }
            _ => {}
        }
    }

    /// Handles the loss of the admin connection. The driver of a ready controller sees a fatal status
    /// (CSTS.CFS).
    pub(super) fn handle_admin_loss(&mut self, now: Instant, why: Error) {
        if self.is_closed()
            || matches!(self.stage, ControllerStage::Lost | ControllerStage::Backoff { .. })
        {
            return;
        }
        self.why = Some(why);
        self.stats.lost += 1;
        let was_ready = self.registers.csts.rdy();
        let was_disabling = matches!(self.stage, ControllerStage::Disabling { .. });
        self.begin_drain(now);
        if was_disabling {
            return;
        }
        if was_ready {
            self.lost_since.get_or_insert(now);
            self.registers.csts = self.registers.csts.with(|csts| csts.cfs(true));
            self.has_changed = true;
            self.stage = ControllerStage::Lost;
        } else {
            self.schedule_reconnect(now, false);
        }
    }

    /// Handles the loss of an I/O queue. The admin connection is kept if possible: it is used to disable
    /// the controller, which then needs no drain time.
    pub(super) fn handle_queue_loss(&mut self, now: Instant, why: Error) {
        if !matches!(self.stage, ControllerStage::Ready) {
            return self.handle_admin_loss(now, why);
        }
        if self.registers.csts.cfs() {
            return;
        }
        self.why = Some(why);
        self.stats.lost += 1;
        self.lost_since.get_or_insert(now);
        self.registers.csts = self.registers.csts.with(|csts| csts.cfs(true));
        self.has_changed = true;
    }

    /// Closes all connections, without disabling the controller.
    fn begin_drain(&mut self, now: Instant) {
        self.may_execute_late |= self.close_admin();
        self.close_queues();
        if !matches!(self.stage, ControllerStage::Lost) {
            self.last_sent_at = now;
        }
        self.stage = ControllerStage::Draining { is_confirmed: false };
    }

    /// Closes the admin connection. Returns whether a command was outstanding that would do harm if it
    /// were executed late.
    pub(super) fn close_admin(&mut self) -> bool {
        if let Some(association) = self.association.take() {
            self.caches.record_loss(&association);
        }
        self.has_controller_info = false;
        self.forget_generated_key();
        let Some(admin) = self.admin.take() else { return false };
        let AdminConnection { connection, authentication, .. } = admin;
        let may_execute_late = connection.may_execute_late(true);
        let exchange = authentication.filter(|authentication| authentication.is_in_progress());
        self.draining.extend(match exchange.map(QueueAuthentication::into_buffer) {
            Some(buffer) => ZeroCopyDrain::begin_with_buffer(connection, may_execute_late, buffer),
            None => ZeroCopyDrain::begin(connection, may_execute_late),
        });
        may_execute_late
    }

    /// Ends the drain of the old controller.
    fn finish_drain(&mut self) {
        self.may_execute_late = false;
        self.registers.csts = ControllerStatus::zeroed();
        self.stage =
            if self.registers.is_removed { ControllerStage::Failed } else { ControllerStage::Down };
    }
}

/// Why a property command was refused.
fn property_refusal(status: Status) -> Error {
    let error = Error::remote(format!("a property command was refused: {status}"));
    if status.has_same_code_as(Status::AUTHENTICATION_REQUIRED) {
        return error.with_hint(
            "the controller requires authentication, which its Connect result did not announce: check that \
             nothing on the path alters the connection",
        );
    }
    error
}
