//! Test run: a sequence of steps, the checks after each step, and the recorded result.
//!
//! ```text
//!   faults on:   Attach, Work                          safety, checked in every iteration
//!   faults off:  StopFaults, Recover, ReadBack, Again  liveness, checked against time limits
//!   end:         ShutDown, and all resources are returned
//! ```

use tenmil_base::Span;
use tenmil_nvme_host::{Event, ShutdownNotification, State};

use crate::failure::Violation;
use crate::fault_injector::{Counters, PlannedFault};
use crate::function::ControllerFunction;
use crate::host::{Host, WorkloadPhase};
use crate::workload::{Counts, Mix, Profile};
use crate::world::Simulation;

/// One step of a test run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CourseStep {
    /// A host attaches the device, or reports why it cannot.
    Attach,
    /// Runs the workload to its end, or until the controller has ended.
    Work,
    /// Runs the workload until a number of requests were submitted.
    WorkPartly(u64),
    /// The owner requests an action while requests are in flight.
    Request(OwnerAction),
    /// Adds a planned fault.
    Arm(PlannedFault),
    /// Stops all faults of the device and its medium.
    StopFaults,
    /// Waits until the controller has recovered. A dead one is attached by a new host.
    Recover,
    /// Ends the host, with a shutdown if possible, and attaches the device by a new one.
    Renew,
    /// Reads every block that was ever written. All reads must succeed.
    ReadBack,
    /// Runs more requests of all kinds. All must succeed, after each queue has failed the one flush
    /// that reports lost writes.
    Again,
    /// Shuts down the controller.
    ShutDown,
    /// Lets one second pass.
    Settle,
    /// Waits for a requested shutdown, clean or not.
    AwaitEnd,
    /// Ends the host process without a shutdown.
    Crash,
    /// Cuts the power of the device and its medium.
    CutPower,
    /// Cuts the power of the medium after it has executed a number of further requests.
    CutPowerAfter(u64),
    /// Restores the power.
    RestorePower,
}

/// Action requested by the owner of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerAction {
    /// Controller reset.
    Reset,
    /// NVM subsystem reset.
    ResetSubsystem,
    /// Deletion of the first queue pair.
    DeleteQueuePair,
    /// Normal shutdown with requests in flight.
    ShutDown,
    /// Abrupt shutdown with requests in flight.
    ShutDownAbruptly,
}

/// Result of a test run.
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    /// First violation.
    pub failure: Option<Violation>,
    /// Hash of the trace.
    pub hash: u64,
    /// Number of trace records.
    pub events: u64,
    /// Last lines of the trace, after a violation.
    pub tail: Vec<String>,
    /// Why the first attach failed.
    pub refused: Option<String>,
    /// Events of the drivers as text.
    pub driver_events: Vec<String>,
    /// Counts of requests while faults were on.
    pub counts: Counts,
    /// State of the driver when the faults stopped.
    pub state: Option<State>,
    /// Number of queue pairs at that time.
    pub queues: usize,
    /// Device accesses that were rejected.
    pub blocked: u64,
    /// Number of injected faults.
    pub faults: u64,
    /// Whether a second host was needed.
    pub reattached: bool,
    /// Longest time from a request to its completion.
    pub longest_completion: Span,
    /// Counters of the bus.
    pub counters: Counters,
    /// Requests that the medium has executed.
    pub medium_done: u64,
}

/// A test run in progress.
pub struct TestRun {
    /// The simulated world.
    pub world: Simulation,
    record: RunRecord,
    has_repented: bool,
    /// The host process has crashed, so its resources are gone without being returned.
    has_crashed: bool,
}

/// Default sequence of steps.
pub const SESSION: &[CourseStep] = &[
    CourseStep::Attach,
    CourseStep::Work,
    CourseStep::StopFaults,
    CourseStep::Recover,
    CourseStep::ReadBack,
    CourseStep::Again,
    CourseStep::ShutDown,
];

impl TestRun {
    /// Creates a run in `world`.
    pub fn new(world: Simulation) -> Self {
        Self { world, record: RunRecord::default(), has_repented: false, has_crashed: false }
    }

    /// Executes all steps until the first violation, and returns the result.
    pub fn run(mut self, steps: &[CourseStep]) -> RunRecord {
        let taken = steps.iter().try_for_each(|step| self.take(*step));
        let ended = taken.and_then(|()| self.end());
        self.judge(ended)
    }

    fn take(&mut self, step: CourseStep) -> Result<(), Violation> {
        match step {
            CourseStep::Attach => self.attach(),
            CourseStep::Work => self.work(),
            CourseStep::WorkPartly(count) => self.work_some(count),
            CourseStep::Request(wish) => {
                self.submit(wish);
                Ok(())
            }
            CourseStep::Arm(mischief) => {
                self.world.bus.with(|state| state.evil.arm(mischief));
                Ok(())
            }
            CourseStep::StopFaults => {
                self.repent();
                Ok(())
            }
            CourseStep::Recover => self.recover(),
            CourseStep::Renew => self.renew(),
            CourseStep::ReadBack => self.review(),
            CourseStep::Again => self.again(),
            CourseStep::ShutDown => self.shut_down(),
            CourseStep::Settle => self.world.run(WorkloadPhase::Drain, SETTLE, |_| false).map(drop),
            CourseStep::AwaitEnd => self.await_shutdown(false),
            CourseStep::Crash => {
                self.crash();
                Ok(())
            }
            CourseStep::CutPower => {
                self.world.medium.cut_power();
                Ok(())
            }
            CourseStep::CutPowerAfter(count) => {
                self.world.medium.cut_power_after(self.world.medium.done() + count);
                Ok(())
            }
            CourseStep::RestorePower => self.restore_power(),
        }
    }

    fn attach(&mut self) -> Result<(), Violation> {
        if let Err(error) = self.world.attach() {
            self.record.refused.get_or_insert(error.to_string());
            return Ok(());
        }
        let bound = self.world.bounds().attach;
        let is_settled =
            |world: &Simulation| world.host.as_ref().is_some_and(Host::is_up) || world.has_ended();
        if !self.world.run(WorkloadPhase::Drain, bound, is_settled)? {
            return self.missed("a verdict on the controller", bound);
        }
        if self.world.has_ended() {
            let why = self.world.host.as_ref().and_then(|host| why_ended(host.events()));
            self.record.refused.get_or_insert(why.unwrap_or_default());
        }
        Ok(())
    }

    fn work(&mut self) -> Result<(), Violation> {
        if !self.has_queues() {
            return Ok(());
        }
        let bound = Span { ns: self.world.bounds().recovery.ns * 4 };
        let is_over = |world: &Simulation| {
            let is_abandoned =
                world.has_ended() || !world.device.is_powered() || !has_queues(world);
            world.workload.is_done() || is_abandoned && world.workload.outstanding() == 0
        };
        if !self.world.run(WorkloadPhase::Submit, bound, is_over)? {
            return self.unanswered(bound);
        }
        Ok(())
    }

    fn work_some(&mut self, count: u64) -> Result<(), Violation> {
        if !self.has_queues() {
            return Ok(());
        }
        let wanted = self.world.workload.counts().submitted + count;
        let bound = Span { ns: self.world.bounds().recovery.ns * 4 };
        let is_enough = |world: &Simulation| {
            world.workload.counts().submitted >= wanted
                || world.workload.is_done()
                || world.has_ended()
                || !world.medium.is_powered()
                || !has_queues(world)
        };
        if !self.world.run(WorkloadPhase::Submit, bound, is_enough)? {
            return self.unanswered(bound);
        }
        Ok(())
    }

    fn submit(&mut self, wish: OwnerAction) {
        let now = self.world.bus.now();
        let Some(host) = &mut self.world.host else { return };
        let controller = host.controller();
        // The driver may reject the action while it is dead or resetting, which is correct
        // behavior.
        let _ = match wish {
            OwnerAction::Reset => controller.reset(now),
            OwnerAction::ResetSubsystem => controller.reset_subsystem(now),
            OwnerAction::DeleteQueuePair => controller.delete_queue_pair(now, 1),
            OwnerAction::ShutDown => controller.shut_down(now, ShutdownNotification::Normal),
            OwnerAction::ShutDownAbruptly => {
                controller.shut_down(now, ShutdownNotification::Abrupt)
            }
        };
    }

    fn repent(&mut self) {
        self.has_repented = true;
        self.keep_counts();
        self.record.state = self.world.state();
        self.record.queues = self.world.host.as_ref().map_or(0, Host::queues);
        self.world.bus.with(|state| state.evil.stop_faults());
        self.world.medium.repent();
    }

    fn recover(&mut self) -> Result<(), Violation> {
        // A dropped completion shows only when its command times out.
        self.world.run(WorkloadPhase::Drain, SETTLE, |_| false)?;
        let bound = self.world.bounds().recovery;
        let is_settled =
            |world: &Simulation| world.has_ended() || world.state() == Some(State::Ready);
        if !self.world.run(WorkloadPhase::Drain, bound, is_settled)? {
            return self.missed("a controller that works or is given up", bound);
        }
        if self.world.has_ended() && !self.is_removed() {
            self.reattach()?;
        }
        let now = self.world.bus.now();
        if let Some(host) = &mut self.world.host {
            host.reopen(now);
        }
        let is_settled = |world: &Simulation| {
            world.has_ended() || world.host.as_ref().is_some_and(|host| host.is_up())
        };
        if !self.world.run(WorkloadPhase::Drain, bound, is_settled)? {
            return self.missed("queue pairs, or their refusal", bound);
        }
        Ok(())
    }

    fn reattach(&mut self) -> Result<(), Violation> {
        self.record.reattached = true;
        self.let_go()?;
        let first = self.record.refused.take();
        self.attach()?;
        let second = core::mem::replace(&mut self.record.refused, first);
        if self.world.host.as_ref().is_some_and(Host::is_up) {
            return Ok(());
        }
        let expected = "an honest controller that comes up".to_owned();
        Err(Violation::Expectation { expected, found: second.unwrap_or_default() })
    }

    fn renew(&mut self) -> Result<(), Violation> {
        self.recover()?;
        if self.record.reattached || self.is_removed() {
            return Ok(());
        }
        self.await_shutdown(false)?;
        self.reattach()
    }

    fn review(&mut self) -> Result<(), Violation> {
        if !self.has_queues() || self.world.has_ended() {
            return Ok(());
        }
        self.world.workload.review();
        self.must_all_succeed("reads of what was written")
    }

    fn again(&mut self) -> Result<(), Violation> {
        if !self.has_queues() || self.world.has_ended() {
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
            if !self.world.run(WorkloadPhase::Submit, bound, |world| world.workload.is_done())? {
                return self.unanswered(bound);
            }
        }
        self.world.workload.restart(profile);
        self.must_all_succeed("requests to an honest device")
    }

    fn must_all_succeed(&mut self, what: &str) -> Result<(), Violation> {
        let before = self.world.workload.counts();
        // Each request has a limit of its own; this one covers all of them one after the other.
        let bound = Span { ns: self.world.bounds().recovery.ns * 8 };
        if !self.world.run(WorkloadPhase::Submit, bound, |world| world.workload.is_done())? {
            return self.unanswered(bound);
        }
        let after = self.world.workload.counts();
        let failed = after.failed + after.aborted - before.failed - before.aborted;
        if failed > 0 {
            let found = format!("{failed} of {} failed", after.submitted - before.submitted);
            return Err(Violation::Expectation {
                expected: format!("only success: {what}"),
                found,
            });
        }
        Ok(())
    }

    fn shut_down(&mut self) -> Result<(), Violation> {
        if self.world.state() != Some(State::Ready) {
            return Ok(());
        }
        self.await_shutdown(true)
    }

    /// Waits for a requested shutdown. A request that was rejected during a reset is repeated.
    fn await_shutdown(&mut self, must_be_clean: bool) -> Result<(), Violation> {
        let bounds = self.world.bounds();
        if self.world.state() == Some(State::Resetting) {
            let is_settled =
                |world: &Simulation| world.has_ended() || world.state() == Some(State::Ready);
            if !self.world.run(WorkloadPhase::Drain, bounds.recovery, is_settled)? {
                return self.missed("a controller that works or is given up", bounds.recovery);
            }
        }
        if self.world.state() == Some(State::Ready) {
            self.submit(OwnerAction::ShutDown);
        }
        let bound = bounds.shutdown;
        if !self.world.run(WorkloadPhase::Drain, bound, Simulation::has_ended)? {
            return self.missed("a controller that is shut down", bound);
        }
        let clean = Event::ShutDown { is_clean: true };
        let is_clean = self.world.host.as_ref().is_some_and(|host| host.events().contains(&clean));
        if must_be_clean && !is_clean {
            let found = format!("{:?}", self.world.host.as_ref().map(|host| host.events().last()));
            return Err(Violation::Expectation { expected: "a clean shutdown".to_owned(), found });
        }
        Ok(())
    }

    fn crash(&mut self) {
        self.record_events();
        self.has_crashed = true;
        self.world.host = None;
        self.world.workload.abandon();
    }

    fn restore_power(&mut self) -> Result<(), Violation> {
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
                return Err(Violation::Expectation { expected, found });
            }
        }
        Ok(())
    }

    /// Drops the host after the driver has ended. All outstanding requests must complete first.
    fn let_go(&mut self) -> Result<(), Violation> {
        let bound = self.world.bounds().recovery;
        let is_let_go = |world: &Simulation| {
            world.workload.outstanding() == 0
                && world.host.as_ref().is_none_or(|host| host.in_flight() == 0)
        };
        if !self.world.run(WorkloadPhase::Drain, bound, is_let_go)? {
            return self.unanswered(bound);
        }
        self.record_events();
        if let Some(host) = &mut self.world.host {
            host.drop_queues();
        }
        self.world.host = None;
        Ok(())
    }

    /// Final checks of every run: no request is outstanding, and all resources have been returned.
    fn end(&mut self) -> Result<(), Violation> {
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
            return Err(Violation::Leak { what, found: free, expected: total });
        }
        match self.world.bus.with(|state| state.failures.first().cloned()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    fn judge(mut self, ended: Result<(), Violation>) -> RunRecord {
        self.record_events();
        let mut record = self.record;
        record.longest_completion = self.world.workload.longest_completion();
        record.medium_done = self.world.medium.done();
        self.world.bus.with(|state| {
            record.hash = state.trace.hash();
            record.events = state.trace.count();
            record.blocked = state.iommu.blocked;
            record.faults = state.evil.applied_faults();
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

    fn record_events(&mut self) {
        if let Some(host) = &self.world.host {
            self.record
                .driver_events
                .extend(host.events().iter().map(|event| format!("{event:?}")));
        }
    }

    fn has_queues(&self) -> bool {
        has_queues(&self.world)
    }

    fn is_removed(&self) -> bool {
        self.world.bus.with(|state| state.evil.is_removed()) || !self.world.device.is_powered()
    }

    fn missed(&self, what: &str, bound: Span) -> Result<(), Violation> {
        let found = format!("{:?}", self.world.state());
        Err(Violation::Expectation { expected: format!("{what} within {bound}"), found })
    }

    fn unanswered(&self, bound: Span) -> Result<(), Violation> {
        match self.world.workload.oldest() {
            Some((token, _)) => {
                let (count, at) = (self.world.workload.outstanding(), self.world.bus.now());
                Err(Violation::NeverCompleted { token, count, at })
            }
            None => self.missed("a controller that takes requests", bound),
        }
    }
}

fn has_queues(world: &Simulation) -> bool {
    world.host.as_ref().is_some_and(|host| host.queues() > 0)
}

/// Longer than any single timeout of the default options.
const SETTLE: Span = Span::from_secs(1);
/// Maximum number of rounds in which every queue should report its lost writes by a failed flush.
const REPORTS_MAX: u32 = 16;
/// Lines of the trace that are kept after a violation.
const TAIL: usize = 80;

fn why_ended(driver_events: &[Event]) -> Option<String> {
    driver_events.iter().rev().find_map(|event| match event {
        Event::Dead(error) => Some(error.to_string()),
        Event::Removed => Some("removed".to_owned()),
        _ => None,
    })
}
