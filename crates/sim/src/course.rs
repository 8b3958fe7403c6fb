//! The course of a run: what is done in which order, what is checked after each step, and what is
//! kept for the verdict.
//!
//! ```text
//!   faults on:   Attach, Work                    safety, at every turn
//!   faults off:  Repent, Recover, Review, Again  liveness, within bounds
//!   the end:     ShutDown, and everything is given back
//! ```

use base::Span;
use nvme::{Event, ShutdownNotification, State};

use crate::evil::{Counters, Mischief};
use crate::failure::Failure;
use crate::function::ControllerFunction;
use crate::host::{Host, Work};
use crate::workload::{Counts, Mix, Profile};
use crate::world::World;

/// One step of a course.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A host finds the device and brings it up, or says why it cannot.
    Attach,
    /// The workload runs to its end, or to the end of the controller.
    Work,
    /// The workload runs until so many requests were submitted.
    WorkSome(u64),
    /// The owner asks for something while requests are under way.
    Ask(Wish),
    /// One more fault is planned.
    Arm(Mischief),
    /// The device and its medium are honest from now on.
    Repent,
    /// The controller comes back; one that was given up is found by a new host.
    Recover,
    /// The host ends, in good order if it can, and another one finds the device.
    Renew,
    /// Every block that was ever written is read. All reads succeed.
    Review,
    /// More requests of all kinds. All succeed, once each queue has failed the flush that it owes for
    /// lost writes.
    Again,
    /// The controller is shut down.
    ShutDown,
    /// Whatever is going on gets a second of its time.
    Settle,
    /// A shutdown that was asked for is over, cleanly or not.
    AwaitEnd,
    /// The process that is the host ends without a word.
    Crash,
    /// The power of the device fails now, and with it that of the medium.
    CutPower,
    /// The power of the medium is to fail once it has carried out so many more requests.
    CutPowerAfter(u64),
    /// The power comes back.
    RestorePower,
}

/// What an owner may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// A reset of the controller.
    Reset,
    /// A reset of the subsystem.
    ResetSubsystem,
    /// The deletion of the first queue pair.
    DeleteQueuePair,
    /// A shutdown, with requests under way.
    ShutDown,
    /// The same, abruptly.
    ShutDownAbruptly,
}

/// What a run has shown.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The first promise that was broken.
    pub failure: Option<Failure>,
    /// The hash of the trace.
    pub hash: u64,
    /// How many records it has.
    pub events: u64,
    /// Its last lines; only after a failure.
    pub tail: Vec<String>,
    /// Why the first attach did not succeed.
    pub refused: Option<String>,
    /// What drivers have told, in words.
    pub told: Vec<String>,
    /// What came of the requests while faults were on.
    pub counts: Counts,
    /// How far the driver was when the faults ended.
    pub state: Option<State>,
    /// How many queue pairs there were then.
    pub lanes: usize,
    /// Accesses of the device that were turned away.
    pub blocked: u64,
    /// Times that a fault struck.
    pub deeds: u64,
    /// Whether a second host was needed.
    pub reattached: bool,
    /// The longest time from a request to its answer.
    pub longest_answer: Span,
    /// What was counted on the bus.
    pub counters: Counters,
    /// What the medium has carried out.
    pub medium_done: u64,
}

/// A course under way.
pub struct Course {
    /// The world it goes through.
    pub world: World,
    record: Record,
    has_repented: bool,
    /// What a process had is gone with it, in this world as in every other.
    has_crashed: bool,
}

/// The ordinary course.
pub const SESSION: &[Step] = &[
    Step::Attach,
    Step::Work,
    Step::Repent,
    Step::Recover,
    Step::Review,
    Step::Again,
    Step::ShutDown,
];

impl Course {
    /// A course through `world`.
    pub fn new(world: World) -> Self {
        Self { world, record: Record::default(), has_repented: false, has_crashed: false }
    }

    /// Takes all steps, unless a promise is broken on the way, and tells what they have shown.
    pub fn run(mut self, steps: &[Step]) -> Record {
        let taken = steps.iter().try_for_each(|step| self.take(*step));
        let ended = taken.and_then(|()| self.end());
        self.judge(ended)
    }

    fn take(&mut self, step: Step) -> Result<(), Failure> {
        match step {
            Step::Attach => self.attach(),
            Step::Work => self.work(),
            Step::WorkSome(count) => self.work_some(count),
            Step::Ask(wish) => {
                self.ask(wish);
                Ok(())
            }
            Step::Arm(mischief) => {
                self.world.bus.with(|state| state.evil.arm(mischief));
                Ok(())
            }
            Step::Repent => {
                self.repent();
                Ok(())
            }
            Step::Recover => self.recover(),
            Step::Renew => self.renew(),
            Step::Review => self.review(),
            Step::Again => self.again(),
            Step::ShutDown => self.shut_down(),
            Step::Settle => self.world.run(Work::Drain, SETTLE, |_| false).map(drop),
            Step::AwaitEnd => self.await_shutdown(false),
            Step::Crash => {
                self.crash();
                Ok(())
            }
            Step::CutPower => {
                self.world.medium.cut_power();
                Ok(())
            }
            Step::CutPowerAfter(count) => {
                self.world.medium.cut_power_after(self.world.medium.done() + count);
                Ok(())
            }
            Step::RestorePower => self.restore_power(),
        }
    }

    fn attach(&mut self) -> Result<(), Failure> {
        if let Err(error) = self.world.attach() {
            self.record.refused.get_or_insert(error.to_string());
            return Ok(());
        }
        let bound = self.world.bounds().attach;
        let is_settled =
            |world: &World| world.host.as_ref().is_some_and(Host::is_up) || world.has_ended();
        if !self.world.run(Work::Drain, bound, is_settled)? {
            return self.missed("a verdict on the controller", bound);
        }
        if self.world.has_ended() {
            let why = self.world.host.as_ref().and_then(|host| why_ended(host.told()));
            self.record.refused.get_or_insert(why.unwrap_or_default());
        }
        Ok(())
    }

    fn work(&mut self) -> Result<(), Failure> {
        if !self.has_lanes() {
            return Ok(());
        }
        let bound = Span { ns: self.world.bounds().recovery.ns * 4 };
        let is_over = |world: &World| {
            let is_abandoned = world.has_ended() || !world.device.is_powered() || !has_lanes(world);
            world.workload.is_done() || is_abandoned && world.workload.outstanding() == 0
        };
        if !self.world.run(Work::Submit, bound, is_over)? {
            return self.unanswered(bound);
        }
        Ok(())
    }

    fn work_some(&mut self, count: u64) -> Result<(), Failure> {
        if !self.has_lanes() {
            return Ok(());
        }
        let wanted = self.world.workload.counts().submitted + count;
        let bound = Span { ns: self.world.bounds().recovery.ns * 4 };
        let is_enough = |world: &World| {
            world.workload.counts().submitted >= wanted
                || world.workload.is_done()
                || world.has_ended()
                || !world.medium.is_powered()
                || !has_lanes(world)
        };
        if !self.world.run(Work::Submit, bound, is_enough)? {
            return self.unanswered(bound);
        }
        Ok(())
    }

    fn ask(&mut self, wish: Wish) {
        let now = self.world.bus.now();
        let Some(host) = &mut self.world.host else { return };
        let controller = host.controller();
        // A driver that has given up or is busy with a reset refuses, and that is an answer.
        let _ = match wish {
            Wish::Reset => controller.reset(now),
            Wish::ResetSubsystem => controller.reset_subsystem(now),
            Wish::DeleteQueuePair => controller.delete_queue_pair(now, 1),
            Wish::ShutDown => controller.shut_down(now, ShutdownNotification::Normal),
            Wish::ShutDownAbruptly => controller.shut_down(now, ShutdownNotification::Abrupt),
        };
    }

    fn repent(&mut self) {
        self.has_repented = true;
        self.keep_counts();
        self.record.state = self.world.state();
        self.record.lanes = self.world.host.as_ref().map_or(0, Host::lanes);
        self.world.bus.with(|state| state.evil.repent());
        self.world.medium.repent();
    }

    fn recover(&mut self) -> Result<(), Failure> {
        // What was swallowed before shows only when its deadline comes.
        self.world.run(Work::Drain, SETTLE, |_| false)?;
        let bound = self.world.bounds().recovery;
        let is_settled = |world: &World| world.has_ended() || world.state() == Some(State::Ready);
        if !self.world.run(Work::Drain, bound, is_settled)? {
            return self.missed("a controller that works or is given up", bound);
        }
        if self.world.has_ended() && !self.is_gone() {
            self.reattach()?;
        }
        let now = self.world.bus.now();
        if let Some(host) = &mut self.world.host {
            host.reopen(now);
        }
        let is_settled = |world: &World| {
            world.has_ended() || world.host.as_ref().is_some_and(|host| host.is_up())
        };
        if !self.world.run(Work::Drain, bound, is_settled)? {
            return self.missed("queue pairs, or their refusal", bound);
        }
        Ok(())
    }

    fn reattach(&mut self) -> Result<(), Failure> {
        self.record.reattached = true;
        self.let_go()?;
        let first = self.record.refused.take();
        self.attach()?;
        let second = core::mem::replace(&mut self.record.refused, first);
        if self.world.host.as_ref().is_some_and(Host::is_up) {
            return Ok(());
        }
        let expected = "an honest controller that comes up".to_owned();
        Err(Failure::Expectation { expected, found: second.unwrap_or_default() })
    }

    fn renew(&mut self) -> Result<(), Failure> {
        self.recover()?;
        if self.record.reattached || self.is_gone() {
            return Ok(());
        }
        self.await_shutdown(false)?;
        self.reattach()
    }

    fn review(&mut self) -> Result<(), Failure> {
        if !self.has_lanes() || self.world.has_ended() {
            return Ok(());
        }
        self.world.workload.review();
        self.must_all_succeed("reads of what was written")
    }

    fn again(&mut self) -> Result<(), Failure> {
        if !self.has_lanes() || self.world.has_ended() {
            return Ok(());
        }
        let profile = self.world.options().profile;
        let profile = Profile { count: 20, mix: Mix::Flushes, ..profile };
        let bound = Span { ns: self.world.bounds().recovery.ns * 8 };
        for _ in 0..REPORTS_MAX {
            if !self.world.host.as_ref().is_some_and(Host::owes_losses) {
                break;
            }
            self.world.workload.restart(profile);
            if !self.world.run(Work::Submit, bound, |world| world.workload.is_done())? {
                return self.unanswered(bound);
            }
        }
        self.world.workload.restart(profile);
        self.must_all_succeed("requests to an honest device")
    }

    fn must_all_succeed(&mut self, what: &str) -> Result<(), Failure> {
        let before = self.world.workload.counts();
        // Each request has its own bound; this one is for all of them, one after the other.
        let bound = Span { ns: self.world.bounds().recovery.ns * 8 };
        if !self.world.run(Work::Submit, bound, |world| world.workload.is_done())? {
            return self.unanswered(bound);
        }
        let after = self.world.workload.counts();
        let failed = after.failed + after.aborted - before.failed - before.aborted;
        if failed > 0 {
            let found = format!("{failed} of {} failed", after.submitted - before.submitted);
            return Err(Failure::Expectation { expected: format!("only success: {what}"), found });
        }
        Ok(())
    }

    fn shut_down(&mut self) -> Result<(), Failure> {
        if self.world.state() != Some(State::Ready) {
            return Ok(());
        }
        self.await_shutdown(true)
    }

    /// Waits for a shutdown that was asked for; one that was refused in the midst of a reset is
    /// asked for again.
    fn await_shutdown(&mut self, must_be_clean: bool) -> Result<(), Failure> {
        let bounds = self.world.bounds();
        if self.world.state() == Some(State::Resetting) {
            let is_settled =
                |world: &World| world.has_ended() || world.state() == Some(State::Ready);
            if !self.world.run(Work::Drain, bounds.recovery, is_settled)? {
                return self.missed("a controller that works or is given up", bounds.recovery);
            }
        }
        if self.world.state() == Some(State::Ready) {
            self.ask(Wish::ShutDown);
        }
        let bound = bounds.shutdown;
        if !self.world.run(Work::Drain, bound, World::has_ended)? {
            return self.missed("a controller that is shut down", bound);
        }
        let clean = Event::ShutDown { is_clean: true };
        let is_clean = self.world.host.as_ref().is_some_and(|host| host.told().contains(&clean));
        if must_be_clean && !is_clean {
            let found = format!("{:?}", self.world.host.as_ref().map(|host| host.told().last()));
            return Err(Failure::Expectation { expected: "a clean shutdown".to_owned(), found });
        }
        Ok(())
    }

    fn crash(&mut self) {
        self.keep_told();
        self.has_crashed = true;
        self.world.host = None;
        self.world.workload.abandon();
    }

    fn restore_power(&mut self) -> Result<(), Failure> {
        self.world.device.turn();
        self.world.workload.power_cut();
        self.world.medium.restore_power();
        let function = ControllerFunction::new(
            &self.world.bus,
            &self.world.medium,
            &self.world.options().function,
        );
        match function {
            Ok(function) => self.world.device.restore_power(Box::new(function)),
            Err(found) => {
                let expected = "a controller after a power cut".to_owned();
                return Err(Failure::Expectation { expected, found });
            }
        }
        Ok(())
    }

    /// The host lets go of everything, after the driver has ended: whatever is outstanding is
    /// answered first.
    fn let_go(&mut self) -> Result<(), Failure> {
        let bound = self.world.bounds().recovery;
        let is_let_go = |world: &World| {
            world.workload.outstanding() == 0
                && world.host.as_ref().is_none_or(|host| host.in_flight() == 0)
        };
        if !self.world.run(Work::Drain, bound, is_let_go)? {
            return self.unanswered(bound);
        }
        self.keep_told();
        if let Some(host) = &mut self.world.host {
            host.drop_lanes();
        }
        self.world.host = None;
        Ok(())
    }

    /// The end of every course: nothing is outstanding, and everything is given back.
    fn end(&mut self) -> Result<(), Failure> {
        if !self.has_repented {
            self.repent();
        }
        if self.world.host.is_some() && !self.world.has_ended() {
            self.await_shutdown(false)?;
        }
        self.let_go()?;
        self.world.workload.release();
        let total = self.world.options().pool_bytes as u64;
        let free = self.world.bus.pool().free_bytes();
        if free != total && !self.has_crashed {
            let what = "bytes free in the pool after all was given back";
            return Err(Failure::Leak { what, found: free, expected: total });
        }
        match self.world.bus.with(|state| state.failures.first().cloned()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    fn judge(mut self, ended: Result<(), Failure>) -> Record {
        self.keep_told();
        let mut record = self.record;
        record.longest_answer = self.world.workload.longest_answer();
        record.medium_done = self.world.medium.done();
        self.world.bus.with(|state| {
            record.hash = state.trace.hash();
            record.events = state.trace.count();
            record.blocked = state.iommu.blocked;
            record.deeds = state.evil.deeds();
            record.counters = state.evil.counters();
            if let Err(failure) = ended {
                record.tail = state.trace.tail(TAIL);
                record.failure = Some(failure);
            }
        });
        record
    }

    fn keep_counts(&mut self) {
        self.record.counts = self.world.workload.counts();
    }

    fn keep_told(&mut self) {
        if let Some(host) = &self.world.host {
            self.record.told.extend(host.told().iter().map(|event| format!("{event:?}")));
        }
    }

    fn has_lanes(&self) -> bool {
        has_lanes(&self.world)
    }

    fn is_gone(&self) -> bool {
        self.world.bus.with(|state| state.evil.is_gone()) || !self.world.device.is_powered()
    }

    fn missed(&self, what: &str, bound: Span) -> Result<(), Failure> {
        let found = format!("{:?}", self.world.state());
        Err(Failure::Expectation { expected: format!("{what} within {bound}"), found })
    }

    fn unanswered(&self, bound: Span) -> Result<(), Failure> {
        match self.world.workload.oldest() {
            Some((token, _)) => {
                let (count, at) = (self.world.workload.outstanding(), self.world.bus.now());
                Err(Failure::NeverAnswered { token, count, at })
            }
            None => self.missed("a controller that takes requests", bound),
        }
    }
}

fn has_lanes(world: &World) -> bool {
    world.host.as_ref().is_some_and(|host| host.lanes() > 0)
}

/// Longer than any single deadline of the default options.
const SETTLE: Span = Span::from_secs(1);
/// Runs of requests in which every queue is to get a flush.
const REPORTS_MAX: u32 = 16;
/// Lines of the trace that are kept after a failure.
const TAIL: usize = 80;

fn why_ended(told: &[Event]) -> Option<String> {
    told.iter().rev().find_map(|event| match event {
        Event::Dead(error) => Some(error.to_string()),
        Event::Removed => Some("removed".to_owned()),
        _ => None,
    })
}
