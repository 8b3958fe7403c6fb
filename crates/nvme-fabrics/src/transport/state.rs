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

use tenmil_base::{Instant, Span};
use tenmil_wire::Completion;
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::fabrics::PropertySize;
use tenmil_wire::register::{
    Capabilities, Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus,
};

use super::admin::{AdminConnection, RING_DEPTH, depth_for};
use super::{CAP, CC, CSTS, HostTransport, VS};
use crate::queue_connect::{ConnectedQueue, QueueConnect, QueueConnectError, QueueConnectParams};
use crate::ring_bridge::Rings;
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
    Enabling { look: CstsPoll, until: Instant },
    /// Nothing in particular.
    Ready,
    /// Completion of the shutdown in CSTS.SHST.
    ShuttingDown(CstsPoll),
    /// CSTS.RDY=0, within a timeout.
    Disabling { look: CstsPoll, until: Instant },
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
    /// The next read is at this time, and the one after it `pause` later.
    At { when: Instant, pause: Span },
    /// A read is outstanding; the next one follows after `pause`.
    Asked { pause: Span },
}

/// State requested by the driver in CC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DesiredState {
    Enabled,
    Disabled,
    ShutDown,
}

/// The first CSTS read follows at once, the others at increasing intervals.
const PAUSE_MIN: Span = Span::from_ms(1);
const PAUSE_MAX: Span = Span::from_ms(100);

/// Poll interval while connections are drained.
const CLOSING_PAUSE: Span = Span::from_ms(1);

impl CstsPoll {
    fn wake_at(&self) -> Instant {
        match self {
            Self::At { when, .. } => *when,
            Self::AfterSet | Self::Asked { .. } => Instant::NEVER,
        }
    }
}

impl HostTransport {
    /// Advances the state machine.
    pub(super) fn advance_state(&mut self, now: Instant) {
        if self.reach.is_cut_off() && !self.is_over() {
            self.registers.cc = Configuration::zeroed();
            self.leave(now);
        }
        if let Some(wanted) = self.wanted.take() {
            self.apply_desired_state(now, wanted);
        }
        if self.is_time_to_give_up(now) {
            self.give_up(now);
        }
        match &mut self.stage {
            ControllerStage::Backoff { until } if now >= *until => self.dial_admin(now),
            ControllerStage::Connecting(opening) => {
                if let Some(ended) = opening.turn(now, &self.options, self.reach.pool()) {
                    self.handle_opened(now, ended);
                }
            }
            ControllerStage::ReadingProperties(question) => {
                let question = *question;
                if let Some(answer) = self.property() {
                    self.handle_property(now, question, answer);
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
                let is_quiet = now.since(self.silent_since) >= self.learnt.quiet;
                let is_silent = *is_confirmed || !self.may_linger || is_quiet;
                if is_silent && self.are_queues_closed() && self.partings.is_empty() {
                    self.end_closing();
                }
            }
            _ => {}
        }
    }

    pub(super) fn stage_wake_at(&self, now: Instant) -> Instant {
        if self.wanted.is_some() {
            return now;
        }
        let until = match &self.stage {
            ControllerStage::Backoff { until } => *until,
            ControllerStage::Connecting(opening) => opening.wake_at(now),
            ControllerStage::ShuttingDown(look) => look.wake_at(),
            ControllerStage::Enabling { look, until }
            | ControllerStage::Disabling { look, until } => look.wake_at().min(*until),
            ControllerStage::Draining { .. } => now.after(CLOSING_PAUSE),
            _ => Instant::NEVER,
        };
        let end = self.lost_since.filter(|_| !self.registers.is_gone);
        until.min(end.map_or(Instant::NEVER, |since| since.after(self.options.policy.give_up)))
    }

    /// The old controller that another one should reset, while it may still execute commands.
    pub(crate) fn fencing_target(&self, now: Instant) -> Option<CrossControllerReset> {
        let is_silent = now.since(self.silent_since) >= self.learnt.quiet;
        let is_doubtful = matches!(self.stage, ControllerStage::Draining { is_confirmed: false });
        let (ciu, cirn) = self.learnt.instance?;
        (is_doubtful && self.may_linger && !is_silent).then_some(CrossControllerReset {
            icid: self.cntlid,
            ciu,
            cirn,
        })
    }

    /// Records that another controller has reset the old one. Returns false if it is a different one.
    pub(crate) fn confirm_fenced(&mut self, whom: CrossControllerReset) -> bool {
        let is_it = self.learnt.instance == Some((whom.ciu, whom.cirn)) && self.cntlid == whom.icid;
        match &mut self.stage {
            ControllerStage::Draining { is_confirmed } if is_it => {
                !core::mem::replace(is_confirmed, true)
            }
            _ => false,
        }
    }

    /// Whether a connection, or a controller with commands, may still be active.
    pub(super) fn has_unfenced_io(&self) -> bool {
        let is_closing = matches!(self.stage, ControllerStage::Draining { .. });
        let is_closed = self.are_queues_closed() && self.partings.is_empty();
        self.admin.is_some() || is_closing || self.may_linger || !is_closed
    }

    /// Whether the driver can enable it.
    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.stage, ControllerStage::Idle)
    }

    /// Whether reconnecting has ended.
    pub(crate) fn has_given_up(&self) -> bool {
        self.registers.is_gone
    }

    /// Whether it is not connected, and nothing is awaited.
    fn is_over(&self) -> bool {
        matches!(
            self.stage,
            ControllerStage::Down | ControllerStage::Draining { .. } | ControllerStage::Failed
        )
    }

    fn is_time_to_give_up(&self, now: Instant) -> bool {
        let limit = self.options.policy.give_up;
        !self.registers.is_gone && self.lost_since.is_some_and(|since| now.since(since) >= limit)
    }

    /// Ends reconnecting: all registers read as ones, so the driver finds the controller removed.
    fn give_up(&mut self, now: Instant) {
        if !self.is_over() {
            self.leave(now);
        }
        self.registers.is_gone = true;
        self.has_changed = true;
    }

    fn dial_admin(&mut self, now: Instant) {
        let depth = depth_for(RING_DEPTH);
        let in_capsule_bytes = tenmil_wire::tcp::ADMIN_IN_CAPSULE_BYTES;
        let plan =
            QueueConnectParams { queue: 0, depth, in_capsule_bytes, data: self.connect_data(true) };
        self.counts.dialled += 1;
        self.next_try = now.after(self.options.policy.retry);
        let opening = QueueConnect::begin(&mut *self.dial, &self.options, plan, now);
        self.stage = ControllerStage::Connecting(Box::new(opening));
    }

    fn handle_opened(&mut self, now: Instant, ended: Result<ConnectedQueue, QueueConnectError>) {
        match ended {
            Ok(ConnectedQueue { exchange, cntlid }) => {
                self.cntlid = cntlid;
                self.counts.connected += 1;
                self.association = Some(self.caches.connect(self.path, now));
                let mut admin = AdminConnection::new(*exchange);
                admin.get(PropertySize::Eight, CAP, now.after(self.options.policy.connect));
                self.admin = Some(admin);
                self.stage = ControllerStage::ReadingProperties(PropertyRead::Cap);
            }
            Err(QueueConnectError { why, is_fatal: is_final }) => {
                self.why = Some(why);
                self.try_again(now, is_final);
            }
        }
    }

    /// After a failed attempt: retries a controller that was connected before, until the timeout.
    fn try_again(&mut self, now: Instant, is_final: bool) {
        if is_final || self.lost_since.is_none() {
            return self.give_up(now);
        }
        self.stage = ControllerStage::Backoff { until: self.next_try.max(now) };
    }

    /// The completion of the outstanding property command, if it has arrived.
    fn property(&mut self) -> Option<Completion> {
        self.admin.as_mut().and_then(AdminConnection::take_property_completion)
    }

    fn handle_property(&mut self, now: Instant, question: PropertyRead, answer: Completion) {
        if !answer.status().is_success() {
            let status = answer.status();
            return self.lose(now, format!("Property Get was refused: {status}"));
        }
        let until = now.after(self.options.policy.connect);
        match question {
            PropertyRead::Cap => {
                if let Some(admin) = &mut self.admin {
                    admin.get(PropertySize::Four, VS, until);
                }
                self.stage =
                    ControllerStage::ReadingProperties(PropertyRead::Vs { cap: answer.result() });
            }
            PropertyRead::Vs { cap } => {
                self.handle_capabilities(now, Capabilities(cap), answer.dw0())
            }
        }
    }

    fn handle_capabilities(&mut self, now: Instant, cap: Capabilities, vs: u32) {
        if self.registers.vs != 0 && self.registers.cap.mqes() != cap.mqes() {
            let (before, found) = (self.registers.cap.mqes(), cap.mqes());
            self.why = Some(format!("CAP.MQES is {found}, expected {before}, as before"));
            return self.give_up(now);
        }
        self.ready_within = Span::from_ms(500 * (u64::from(cap.to()) + 1));
        self.registers.set_controller_info(cap, vs, &self.options, self.learnt.quiet);
        self.stage = ControllerStage::Idle;
        if self.registers.cc.en() {
            self.enable(now);
        }
    }

    /// Handles a write to CC by the driver.
    pub(super) fn configure(&mut self, cc: Configuration) {
        let before = core::mem::replace(&mut self.registers.cc, cc);
        self.wanted = match (before.en(), cc.en()) {
            (false, true) => Some(DesiredState::Enabled),
            (true, false) => Some(DesiredState::Disabled),
            _ if cc.shn() != before.shn() && cc.shn() != ShutdownNotification::None => {
                Some(DesiredState::ShutDown)
            }
            _ => self.wanted,
        };
    }

    fn apply_desired_state(&mut self, now: Instant, wanted: DesiredState) {
        match (wanted, &self.stage) {
            (DesiredState::Enabled, ControllerStage::Idle) => self.enable(now),
            (DesiredState::Enabled, ControllerStage::Down) => {
                // It may be unreachable for a while, even after a reset by the driver.
                if self.is_known {
                    self.lost_since.get_or_insert(now);
                }
                self.stage = ControllerStage::Backoff { until: self.next_try };
            }
            (DesiredState::Disabled, ControllerStage::Ready) => self.disable(now),
            (DesiredState::Disabled, _) if !self.is_over() => self.leave(now),
            (DesiredState::ShutDown, ControllerStage::Ready) => {
                let until = now.after(self.options.policy.connect);
                let cc = self.registers.cc.0;
                if let Some(admin) = &mut self.admin {
                    admin.set(CC, cc, until);
                }
                self.stage = ControllerStage::ShuttingDown(CstsPoll::AfterSet);
            }
            _ => {}
        }
    }

    fn enable(&mut self, now: Instant) {
        let places = self.registers.admin_rings();
        let tail_doorbell = self.admin_doorbell.clone();
        tenmil_base::Doorbell::ring(&mut tail_doorbell.clone(), 0);
        let rings = Rings::new(self.memory(), places, tail_doorbell, 0);
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.connect));
        let Some(admin) = &mut self.admin else { return };
        admin.rings = rings;
        admin.set(CC, cc, until);
        let until = now.after(self.ready_within);
        self.stage = ControllerStage::Enabling { look: CstsPoll::AfterSet, until };
    }

    /// Disables the controller.
    fn disable(&mut self, now: Instant) {
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.detect));
        self.close_queues();
        if let Some(admin) = &mut self.admin {
            admin.rings = None;
            admin.set(CC, cc, until);
        }
        self.stage = ControllerStage::Disabling { look: CstsPoll::AfterSet, until };
    }

    /// Advances the reads of CSTS.
    fn poll_csts(&mut self, now: Instant) {
        let answer = self.property();
        let until = now.after(self.options.policy.connect);
        let (look, end) = match &mut self.stage {
            ControllerStage::Enabling { look, until }
            | ControllerStage::Disabling { look, until } => (look, *until),
            ControllerStage::ShuttingDown(look) => (look, Instant::NEVER),
            _ => return,
        };
        match (*look, answer) {
            (_, Some(answer)) if !answer.status().is_success() => {
                let status = answer.status();
                self.lose(now, format!("a property was refused: {status}"));
            }
            (CstsPoll::AfterSet, Some(_)) => *look = CstsPoll::At { when: now, pause: PAUSE_MIN },
            (CstsPoll::Asked { pause }, Some(answer)) => {
                let next = Span { ns: (2 * pause.ns).min(PAUSE_MAX.ns) };
                *look = CstsPoll::At { when: now.after(pause), pause: next };
                self.handle_status(now, ControllerStatus(answer.dw0()));
            }
            (CstsPoll::At { when, pause }, _) if now >= when => {
                *look = CstsPoll::Asked { pause };
                if let Some(admin) = &mut self.admin {
                    admin.get(PropertySize::Four, CSTS, until);
                }
            }
            _ if now >= end => self.lose(now, "CSTS.RDY did not change in time".to_owned()),
            _ => {}
        }
    }

    fn handle_status(&mut self, now: Instant, csts: ControllerStatus) {
        match self.stage {
            ControllerStage::Enabling { .. } if csts.cfs() => {
                self.lose(now, "the controller reports a fatal status (CSTS.CFS)".to_owned());
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
    pub(super) fn lose(&mut self, now: Instant, why: String) {
        if self.is_over()
            || matches!(self.stage, ControllerStage::Lost | ControllerStage::Backoff { .. })
        {
            return;
        }
        self.why = Some(why);
        self.counts.lost += 1;
        let was_ready = self.registers.csts.rdy();
        let was_disabling = matches!(self.stage, ControllerStage::Disabling { .. });
        self.leave(now);
        if was_disabling {
            return;
        }
        if was_ready {
            self.lost_since.get_or_insert(now);
            self.registers.csts = self.registers.csts.with(|csts| csts.cfs(true));
            self.has_changed = true;
            self.stage = ControllerStage::Lost;
        } else {
            self.try_again(now, false);
        }
    }

    /// Handles the loss of an I/O queue. The admin connection is kept if possible: it is used to disable
    /// the controller, which then needs no drain time.
    pub(super) fn fail(&mut self, now: Instant, why: String) {
        if !matches!(self.stage, ControllerStage::Ready) {
            return self.lose(now, why);
        }
        if self.registers.csts.cfs() {
            return;
        }
        self.why = Some(why);
        self.counts.lost += 1;
        self.lost_since.get_or_insert(now);
        self.registers.csts = self.registers.csts.with(|csts| csts.cfs(true));
        self.has_changed = true;
    }

    /// Closes all connections, without disabling the controller.
    fn leave(&mut self, now: Instant) {
        self.may_linger |= self.close_admin();
        self.close_queues();
        if !matches!(self.stage, ControllerStage::Lost) {
            self.silent_since = now;
        }
        self.stage = ControllerStage::Draining { is_confirmed: false };
    }

    /// Closes the admin connection. Returns whether a command was outstanding that would do harm if it
    /// were executed late.
    pub(super) fn close_admin(&mut self) -> bool {
        if let Some(association) = self.association.take() {
            self.caches.lose(&association);
        }
        let Some(admin) = self.admin.take() else { return false };
        let may_linger = admin.exchange.may_execute_late(true);
        self.partings.extend(ZeroCopyDrain::begin(admin.exchange, may_linger));
        may_linger
    }

    /// Ends the drain of the old controller.
    fn end_closing(&mut self) {
        self.may_linger = false;
        self.registers.csts = ControllerStatus::zeroed();
        self.stage =
            if self.registers.is_gone { ControllerStage::Failed } else { ControllerStage::Down };
    }
}
