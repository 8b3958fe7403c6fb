//! From a dialled stream to a ready controller, and to its end.
//!
//! ```text
//!   Pausing ─▶ Opening ─▶ Asking CAP, VS ─▶ Idle ──CC.EN=1──▶ Enabling ─▶ Ready
//!      ▲          │                                             │           │ lost: CSTS.CFS
//!      └──────────┘ not opened: retried                         ▼           ▼
//!   Down ◀── closed, and the old controller can do no harm ── Closing ◀─ CC.EN=0
//!      └──CC.EN=1──▶ Pausing                                    ▲
//!                                      Disabling: CSTS.RDY=0 ───┘
//! ```

use base::{Instant, Span};
use wire::Completion;
use wire::admin::CrossControllerReset;
use wire::fabrics::PropertySize;
use wire::register::{
    Capabilities, Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus,
};

use super::admin::{AdminLane, RING_DEPTH, depth_for};
use super::{CAP, CC, CSTS, Front, VS};
use crate::farewell::Farewell;
use crate::opening::{NotOpened, Opened, Opening, Plan};
use crate::rings::Rings;

/// Named after what is awaited.
pub(super) enum Stage {
    /// Nothing: nobody is connected, and nobody has to be.
    Down,
    /// The time of the next try.
    Pausing { until: Instant },
    /// The admin queue.
    Opening(Box<Opening>),
    /// What a property holds.
    Asking(Question),
    /// That the driver sets CC.EN.
    Idle,
    /// CSTS.RDY=1, until then.
    Enabling { look: Look, until: Instant },
    /// Nothing in particular.
    Ready,
    /// CSTS.SHST.
    ShuttingDown(Look),
    /// CSTS.RDY=0, until then.
    Disabling { look: Look, until: Instant },
    /// That the driver clears CC.EN.
    Lost,
    /// That no connection is left, and that the old controller is silent.
    Closing { is_confirmed: bool },
    /// Nothing, for ever.
    GivenUp,
}

/// The properties that are asked for first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    Cap,
    Vs { cap: u64 },
}

/// One of many looks at CSTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// The answer to a Property Set comes first.
    AfterSet,
    /// At this time, and the next one so much later.
    At { when: Instant, pause: Span },
    /// The answer is awaited; the next look comes so much later.
    Asked { pause: Span },
}

/// What the driver wants, by a store to CC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Enabled,
    Disabled,
    ShutDown,
}

/// The first look at CSTS comes at once, and the others further and further apart.
const PAUSE_MIN: Span = Span::from_ms(1);
const PAUSE_MAX: Span = Span::from_ms(100);

/// How often one looks whether all is closed.
const CLOSING_PAUSE: Span = Span::from_ms(1);

impl Look {
    fn wake_at(&self) -> Instant {
        match self {
            Self::At { when, .. } => *when,
            Self::AfterSet | Self::Asked { .. } => Instant::NEVER,
        }
    }
}

impl Front {
    /// Goes on with its life.
    pub(super) fn live(&mut self, now: Instant) {
        if self.reach.is_cut_off() && !self.is_over() {
            self.registers.cc = Configuration::zeroed();
            self.leave(now);
        }
        if let Some(wanted) = self.wanted.take() {
            self.heed(now, wanted);
        }
        if self.is_time_to_give_up(now) {
            self.give_up(now);
        }
        match &mut self.stage {
            Stage::Pausing { until } if now >= *until => self.dial_admin(now),
            Stage::Opening(opening) => {
                if let Some(ended) = opening.turn(now, &self.options, self.reach.pool()) {
                    self.handle_opened(now, ended);
                }
            }
            Stage::Asking(question) => {
                let question = *question;
                if let Some(answer) = self.property() {
                    self.handle_property(now, question, answer);
                }
            }
            Stage::Enabling { .. } | Stage::Disabling { .. } | Stage::ShuttingDown(_) => {
                self.look(now);
            }
            Stage::Closing { is_confirmed } => {
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
            Stage::Pausing { until } => *until,
            Stage::Opening(opening) => opening.wake_at(now),
            Stage::ShuttingDown(look) => look.wake_at(),
            Stage::Enabling { look, until } | Stage::Disabling { look, until } => {
                look.wake_at().min(*until)
            }
            Stage::Closing { .. } => now.after(CLOSING_PAUSE),
            _ => Instant::NEVER,
        };
        let end = self.lost_since.filter(|_| !self.registers.is_gone);
        until.min(end.map_or(Instant::NEVER, |since| since.after(self.options.policy.give_up)))
    }

    /// How another controller would be asked to end the one that was lost, as long as that may still do
    /// something.
    pub(crate) fn doubtful(&self, now: Instant) -> Option<CrossControllerReset> {
        let is_silent = now.since(self.silent_since) >= self.learnt.quiet;
        let is_doubtful = matches!(self.stage, Stage::Closing { is_confirmed: false });
        let (ciu, cirn) = self.learnt.instance?;
        (is_doubtful && self.may_linger && !is_silent).then_some(CrossControllerReset {
            icid: self.cntlid,
            ciu,
            cirn,
        })
    }

    /// Another controller has ended the one that was lost. False if that is not the one it was.
    pub(crate) fn confirm_dead(&mut self, whom: CrossControllerReset) -> bool {
        let is_it = self.learnt.instance == Some((whom.ciu, whom.cirn)) && self.cntlid == whom.icid;
        match &mut self.stage {
            Stage::Closing { is_confirmed } if is_it => !core::mem::replace(is_confirmed, true),
            _ => false,
        }
    }

    /// Whether something of ours, or of a controller that was told something, may still be under way.
    pub(super) fn holds(&self) -> bool {
        let is_closing = matches!(self.stage, Stage::Closing { .. });
        let is_closed = self.are_queues_closed() && self.partings.is_empty();
        self.admin.is_some() || is_closing || self.may_linger || !is_closed
    }

    /// Whether the driver can be told to bring it up.
    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.stage, Stage::Idle)
    }

    /// Whether nobody will ever be connected again.
    pub(crate) fn has_given_up(&self) -> bool {
        self.registers.is_gone
    }

    /// Whether nobody is connected and nothing is awaited.
    fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Down | Stage::Closing { .. } | Stage::GivenUp)
    }

    fn is_time_to_give_up(&self, now: Instant) -> bool {
        let limit = self.options.policy.give_up;
        !self.registers.is_gone && self.lost_since.is_some_and(|since| now.since(since) >= limit)
    }

    /// The driver finds all registers reading as ones: the controller is not there any more.
    fn give_up(&mut self, now: Instant) {
        if !self.is_over() {
            self.leave(now);
        }
        self.registers.is_gone = true;
        self.has_changed = true;
    }

    fn dial_admin(&mut self, now: Instant) {
        let depth = depth_for(RING_DEPTH);
        let in_capsule_bytes = wire::tcp::ADMIN_IN_CAPSULE_BYTES;
        let plan = Plan { queue: 0, depth, in_capsule_bytes, data: self.connect_data(true) };
        self.counts.dialled += 1;
        self.next_try = now.after(self.options.policy.retry);
        let opening = Opening::begin(&mut *self.dial, &self.options, plan, now);
        self.stage = Stage::Opening(Box::new(opening));
    }

    fn handle_opened(&mut self, now: Instant, ended: Result<Opened, NotOpened>) {
        match ended {
            Ok(Opened { exchange, cntlid }) => {
                self.cntlid = cntlid;
                self.counts.connected += 1;
                self.association = Some(self.caches.connect(self.path, now));
                let mut admin = AdminLane::new(*exchange);
                admin.get(PropertySize::Eight, CAP, now.after(self.options.policy.connect));
                self.admin = Some(admin);
                self.stage = Stage::Asking(Question::Cap);
            }
            Err(NotOpened { why, is_final }) => {
                self.why = Some(why);
                self.try_again(now, is_final);
            }
        }
    }

    /// After a try that has failed: what was connected before is called again, until it is given up.
    fn try_again(&mut self, now: Instant, is_final: bool) {
        if is_final || self.lost_since.is_none() {
            return self.give_up(now);
        }
        self.stage = Stage::Pausing { until: self.next_try.max(now) };
    }

    /// The answer to the question that is open, if it has come.
    fn property(&mut self) -> Option<Completion> {
        self.admin.as_mut().and_then(AdminLane::answer)
    }

    fn handle_property(&mut self, now: Instant, question: Question, answer: Completion) {
        if !answer.status().is_success() {
            let status = answer.status();
            return self.lose(now, format!("Property Get was refused: {status}"));
        }
        let until = now.after(self.options.policy.connect);
        match question {
            Question::Cap => {
                if let Some(admin) = &mut self.admin {
                    admin.get(PropertySize::Four, VS, until);
                }
                self.stage = Stage::Asking(Question::Vs { cap: answer.result() });
            }
            Question::Vs { cap } => self.handle_capabilities(now, Capabilities(cap), answer.dw0()),
        }
    }

    fn handle_capabilities(&mut self, now: Instant, cap: Capabilities, vs: u32) {
        if self.registers.vs != 0 && self.registers.cap.mqes() != cap.mqes() {
            let (before, found) = (self.registers.cap.mqes(), cap.mqes());
            self.why = Some(format!("CAP.MQES is {found}, expected {before}, as before"));
            return self.give_up(now);
        }
        self.ready_within = Span::from_ms(500 * (u64::from(cap.to()) + 1));
        self.registers.learn(cap, vs, &self.options, self.learnt.quiet);
        self.stage = Stage::Idle;
        if self.registers.cc.en() {
            self.enable(now);
        }
    }

    /// The driver has stored to CC.
    pub(super) fn configure(&mut self, cc: Configuration) {
        let before = core::mem::replace(&mut self.registers.cc, cc);
        self.wanted = match (before.en(), cc.en()) {
            (false, true) => Some(Wanted::Enabled),
            (true, false) => Some(Wanted::Disabled),
            _ if cc.shn() != before.shn() && cc.shn() != ShutdownNotification::None => {
                Some(Wanted::ShutDown)
            }
            _ => self.wanted,
        };
    }

    fn heed(&mut self, now: Instant, wanted: Wanted) {
        match (wanted, &self.stage) {
            (Wanted::Enabled, Stage::Idle) => self.enable(now),
            (Wanted::Enabled, Stage::Down) => {
                // It may be away for a while, even if it was the driver who ended it.
                if self.is_known {
                    self.lost_since.get_or_insert(now);
                }
                self.stage = Stage::Pausing { until: self.next_try };
            }
            (Wanted::Disabled, Stage::Ready) => self.disable(now),
            (Wanted::Disabled, _) if !self.is_over() => self.leave(now),
            (Wanted::ShutDown, Stage::Ready) => {
                let until = now.after(self.options.policy.connect);
                let cc = self.registers.cc.0;
                if let Some(admin) = &mut self.admin {
                    admin.set(CC, cc, until);
                }
                self.stage = Stage::ShuttingDown(Look::AfterSet);
            }
            _ => {}
        }
    }

    fn enable(&mut self, now: Instant) {
        let places = self.registers.admin_rings();
        let bell = self.bell(0);
        base::Doorbell::ring(&mut bell.clone(), 0);
        let rings = Rings::new(self.memory(), places, bell, 0);
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.connect));
        let Some(admin) = &mut self.admin else { return };
        admin.rings = rings;
        admin.set(CC, cc, until);
        let until = now.after(self.ready_within);
        self.stage = Stage::Enabling { look: Look::AfterSet, until };
    }

    /// Asks the controller to stop what it is at.
    fn disable(&mut self, now: Instant) {
        let (cc, until) = (self.registers.cc.0, now.after(self.options.policy.detect));
        self.close_queues();
        if let Some(admin) = &mut self.admin {
            admin.rings = None;
            admin.set(CC, cc, until);
        }
        self.stage = Stage::Disabling { look: Look::AfterSet, until };
    }

    /// Goes on with looking at CSTS.
    fn look(&mut self, now: Instant) {
        let answer = self.property();
        let until = now.after(self.options.policy.connect);
        let (look, end) = match &mut self.stage {
            Stage::Enabling { look, until } | Stage::Disabling { look, until } => (look, *until),
            Stage::ShuttingDown(look) => (look, Instant::NEVER),
            _ => return,
        };
        match (*look, answer) {
            (_, Some(answer)) if !answer.status().is_success() => {
                let status = answer.status();
                self.lose(now, format!("a property was refused: {status}"));
            }
            (Look::AfterSet, Some(_)) => *look = Look::At { when: now, pause: PAUSE_MIN },
            (Look::Asked { pause }, Some(answer)) => {
                let next = Span { ns: (2 * pause.ns).min(PAUSE_MAX.ns) };
                *look = Look::At { when: now.after(pause), pause: next };
                self.handle_status(now, ControllerStatus(answer.dw0()));
            }
            (Look::At { when, pause }, _) if now >= when => {
                *look = Look::Asked { pause };
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
            Stage::Enabling { .. } if csts.cfs() => {
                self.lose(now, "the controller reports a fatal status (CSTS.CFS)".to_owned());
            }
            Stage::Enabling { .. } if csts.rdy() => {
                self.registers.csts = ControllerStatus::zeroed().with(|csts| csts.rdy(true));
                self.stage = Stage::Ready;
            }
            Stage::Disabling { .. } if !csts.rdy() => {
                self.part_admin();
                self.stage = Stage::Closing { is_confirmed: true };
            }
            Stage::ShuttingDown(_) => {
                let shst = csts.shst();
                self.registers.csts = self.registers.csts.with(|csts| csts.shst(shst));
                if shst == ShutdownStatus::Complete {
                    self.stage = Stage::Ready;
                }
            }
            _ => {}
        }
    }

    /// The controller can be spoken to no more. Who was connected to it finds a fatal status.
    pub(super) fn lose(&mut self, now: Instant, why: String) {
        if self.is_over() || matches!(self.stage, Stage::Lost | Stage::Pausing { .. }) {
            return;
        }
        self.why = Some(why);
        self.counts.lost += 1;
        let was_ready = self.registers.csts.rdy();
        let was_disabling = matches!(self.stage, Stage::Disabling { .. });
        self.leave(now);
        if was_disabling {
            return;
        }
        if was_ready {
            self.lost_since.get_or_insert(now);
            self.registers.csts = self.registers.csts.with(|csts| csts.cfs(true));
            self.has_changed = true;
            self.stage = Stage::Lost;
        } else {
            self.try_again(now, false);
        }
    }

    /// A queue can be spoken to no more. The admin connection goes on as long as it can: by it the
    /// controller is told to stop, and then there is nothing to wait for.
    pub(super) fn fail(&mut self, now: Instant, why: String) {
        if !matches!(self.stage, Stage::Ready) {
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

    /// Closes everything, without a word.
    fn leave(&mut self, now: Instant) {
        self.may_linger |= self.part_admin();
        self.close_queues();
        if !matches!(self.stage, Stage::Lost) {
            self.silent_since = now;
        }
        self.stage = Stage::Closing { is_confirmed: false };
    }

    /// Ends the admin connection. Whether anything was outstanding there that would do harm if it were
    /// executed late.
    pub(super) fn part_admin(&mut self) -> bool {
        if let Some(association) = self.association.take() {
            self.caches.lose(&association);
        }
        let Some(admin) = self.admin.take() else { return false };
        let may_linger = admin.exchange.may_linger(true);
        self.partings.extend(Farewell::begin(admin.exchange, may_linger));
        may_linger
    }

    /// The old controller is no more.
    fn end_closing(&mut self) {
        self.may_linger = false;
        self.registers.csts = ControllerStatus::zeroed();
        self.stage = if self.registers.is_gone { Stage::GivenUp } else { Stage::Down };
    }
}
