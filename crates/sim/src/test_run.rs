//! Test run: a sequence of steps, the checks after each step, and the recorded result.
//!
//! ```text
//!   faults on:   Attach, Work                          safety, checked in every iteration
//!   faults off:  StopFaults, Recover, ReadBack, Again  liveness, checked against time limits
//!   end:         ShutDown, and all resources are returned
//! ```

use tenmil_base::Span;
use tenmil_nvme_host::{ControllerState, Event, ShutdownNotification};

use crate::controller_function::ControllerFunction;
use crate::fault_injector::{PlannedFault, TriggerCounters};
use crate::sim_host::{SimHost, WorkloadPhase};
use crate::simulation::Simulation;
use crate::violation::Violation;
use crate::workload::{OperationMix, RequestCounts, WorkloadProfile};

/// One step of a test run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStep {
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
    pub counts: RequestCounts,
    /// State of the driver when the faults stopped.
    pub state: Option<ControllerState>,
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
    pub counters: TriggerCounters,
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
pub const SESSION: &[RunStep] = &[
    RunStep::Attach,
    RunStep::Work,
    RunStep::StopFaults,
    RunStep::Recover,
    RunStep::ReadBack,
    RunStep::Again,
    RunStep::ShutDown,
];

impl TestRun {
    /// Creates a run in `world`.
    pub fn new(world: Simulation) -> Self {
        Self { world, record: RunRecord::default(), has_repented: false, has_crashed: false }
    }

    /// Executes all steps until the first violation, and returns the result.
    pub fn run(mut self, steps: &[RunStep]) -> RunRecord {
        let taken = steps.iter().try_for_each(|step| self.execute_step(*step));
        let ended = taken.and_then(|()| self.finish_run());
        self.check_result(ended)
    }

    fn execute_step(&mut self, step: RunStep) -> Result<(), Violation> {
        match step {
            RunStep::Attach => self.attach_host(),
            RunStep::Work => self.run_workload(),
            RunStep::WorkPartly(count) => self.run_workload_for(count),
            RunStep::Request(wish) => {
                self.submit_owner_action(wish);
                Ok(())
            }
            RunStep::Arm(mischief) => {
                self.world.bus.with_state(|state| state.evil.add_planned_fault(mischief));
                Ok(())
            }
            RunStep::StopFaults => {
                self.stop_faults();
                Ok(())
            }
            RunStep::Recover => self.wait_for_recovery(),
            RunStep::Renew => self.reset_device(),
            RunStep::ReadBack => self.read_back_all(),
            RunStep::Again => self.restart_workload(),
            RunStep::ShutDown => self.shut_down(),
            RunStep::Settle => {
                self.world.run_until(WorkloadPhase::Drain, SETTLE, |_| false).map(drop)
            }
            RunStep::AwaitEnd => self.await_shutdown(false),
            RunStep::Crash => {
                self.crash_process();
                Ok(())
            }
            RunStep::CutPower => {
                self.world.medium.cut_power();
                Ok(())
            }
            RunStep::CutPowerAfter(count) => {
                self.world
                    .medium
                    .cut_power_after_requests(self.world.medium.completed_request_count() + count);
                Ok(())
            }
            RunStep::RestorePower => self.restore_power(),
        }
    }

    fn attach_host(&mut self) -> Result<(), Violation> {
        if let Err(error) = self.world.attach() {
            self.record.refused.get_or_insert(error.to_string());
            return Ok(());
        }
        let bound = self.world.time_bounds().attach;
        let is_settled = |world: &Simulation| {
            world.host.as_ref().is_some_and(SimHost::is_ready) || world.has_driver_ended()
        };
        if !self.world.run_until(WorkloadPhase::Drain, bound, is_settled)? {
            return self.timeout_violation("a verdict on the controller", bound);
        }
        if self.world.has_driver_ended() {
            let why =
                self.world.host.as_ref().and_then(|host| driver_end_reason(host.driver_events()));
            self.record.refused.get_or_insert(why.unwrap_or_default());
        }
        Ok(())
    }

    fn run_workload(&mut self) -> Result<(), Violation> {
        if !self.has_queues() {
            return Ok(());
        }
        let bound = Span { ns: self.world.time_bounds().recovery.ns * 4 };
        let is_over = |world: &Simulation| {
            let is_abandoned =
                world.has_driver_ended() || !world.device.is_powered() || !has_queues(world);
            world.workload.is_done() || is_abandoned && world.workload.outstanding_requests() == 0
        };
        if !self.world.run_until(WorkloadPhase::Submit, bound, is_over)? {
            return self.outstanding_violation(bound);
        }
        Ok(())
    }

    fn run_workload_for(&mut self, count: u64) -> Result<(), Violation> {
        if !self.has_queues() {
            return Ok(());
        }
        let wanted = self.world.workload.request_counts().submitted + count;
        let bound = Span { ns: self.world.time_bounds().recovery.ns * 4 };
        let is_enough = |world: &Simulation| {
            world.workload.request_counts().submitted >= wanted
                || world.workload.is_done()
                || world.has_driver_ended()
                || !world.medium.is_powered()
                || !has_queues(world)
        };
        if !self.world.run_until(WorkloadPhase::Submit, bound, is_enough)? {
            return self.outstanding_violation(bound);
        }
        Ok(())
    }

    fn submit_owner_action(&mut self, wish: OwnerAction) {
        let now = self.world.bus.now();
        let Some(host) = &mut self.world.host else { return };
        let controller = host.driver();
        // The driver may reject the action while it is dead or resetting, which is correct
        // behavior.
        let _ = match wish {
            OwnerAction::Reset => controller.reset(now),
            OwnerAction::ResetSubsystem => controller.reset_subsystem(now),
            OwnerAction::DeleteQueuePair => controller.delete_queue_pair(now, 1),
            OwnerAction::ShutDown => controller.start_shutdown(now, ShutdownNotification::Normal),
            OwnerAction::ShutDownAbruptly => {
                controller.start_shutdown(now, ShutdownNotification::Abrupt)
            }
        };
    }

    fn stop_faults(&mut self) {
        self.has_repented = true;
        self.record_counts();
        self.record.state = self.world.driver_state();
        self.record.queues = self.world.host.as_ref().map_or(0, SimHost::queue_pair_count);
        self.world.bus.with_state(|state| state.evil.stop_faults());
        self.world.medium.stop_faults();
    }

    fn wait_for_recovery(&mut self) -> Result<(), Violation> {
        // A dropped completion shows only when its command times out.
        self.world.run_until(WorkloadPhase::Drain, SETTLE, |_| false)?;
        let bound = self.world.time_bounds().recovery;
        let is_settled = |world: &Simulation| {
            world.has_driver_ended() || world.driver_state() == Some(ControllerState::Ready)
        };
        if !self.world.run_until(WorkloadPhase::Drain, bound, is_settled)? {
            return self.timeout_violation("a controller that works or is given up", bound);
        }
        if self.world.has_driver_ended() && !self.is_removed() {
            self.reattach()?;
        }
        let now = self.world.bus.now();
        if let Some(host) = &mut self.world.host {
            host.recreate_queue_pairs(now);
        }
        let is_settled = |world: &Simulation| {
            world.has_driver_ended() || world.host.as_ref().is_some_and(|host| host.is_ready())
        };
        if !self.world.run_until(WorkloadPhase::Drain, bound, is_settled)? {
            return self.timeout_violation("queue pairs, or their refusal", bound);
        }
        Ok(())
    }

    fn reattach(&mut self) -> Result<(), Violation> {
        self.record.reattached = true;
        self.release_controller()?;
        let first = self.record.refused.take();
        self.attach_host()?;
        let second = core::mem::replace(&mut self.record.refused, first);
        if self.world.host.as_ref().is_some_and(SimHost::is_ready) {
            return Ok(());
        }
        let expected = "an honest controller that comes up".to_owned();
        Err(Violation::Expectation { expected, found: second.unwrap_or_default() })
    }

    fn reset_device(&mut self) -> Result<(), Violation> {
        self.wait_for_recovery()?;
        if self.record.reattached || self.is_removed() {
            return Ok(());
        }
        self.await_shutdown(false)?;
        self.reattach()
    }

    fn read_back_all(&mut self) -> Result<(), Violation> {
        if !self.has_queues() || self.world.has_driver_ended() {
            return Ok(());
        }
        self.world.workload.read_back_written_blocks();
        self.run_workload_without_errors("reads of what was written")
    }

    fn restart_workload(&mut self) -> Result<(), Violation> {
        if !self.has_queues() || self.world.has_driver_ended() {
            return Ok(());
        }
        let profile = self.world.options().profile;
        let profile = WorkloadProfile { count: 20, mix: OperationMix::Flushes, ..profile };
        let bound = Span { ns: self.world.time_bounds().recovery.ns * 8 };
        for _ in 0..REPORTS_MAX {
            if !self.world.host.as_ref().is_some_and(SimHost::has_unreported_losses) {
                break;
            }
            self.world.workload.restart(profile);
            if !self
                .world
                .run_until(WorkloadPhase::Submit, bound, |world| world.workload.is_done())?
            {
                return self.outstanding_violation(bound);
            }
        }
        self.world.workload.restart(profile);
        self.run_workload_without_errors("requests to an honest device")
    }

    fn run_workload_without_errors(&mut self, what: &str) -> Result<(), Violation> {
        let before = self.world.workload.request_counts();
        // Each request has a limit of its own; this one covers all of them one after the other.
        let bound = Span { ns: self.world.time_bounds().recovery.ns * 8 };
        if !self.world.run_until(WorkloadPhase::Submit, bound, |world| world.workload.is_done())? {
            return self.outstanding_violation(bound);
        }
        let after = self.world.workload.request_counts();
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
        if self.world.driver_state() != Some(ControllerState::Ready) {
            return Ok(());
        }
        self.await_shutdown(true)
    }

    /// Waits for a requested shutdown. A request that was rejected during a reset is repeated.
    fn await_shutdown(&mut self, must_be_clean: bool) -> Result<(), Violation> {
        let bounds = self.world.time_bounds();
        if self.world.driver_state() == Some(ControllerState::Resetting) {
            let is_settled = |world: &Simulation| {
                world.has_driver_ended() || world.driver_state() == Some(ControllerState::Ready)
            };
            if !self.world.run_until(WorkloadPhase::Drain, bounds.recovery, is_settled)? {
                return self
                    .timeout_violation("a controller that works or is given up", bounds.recovery);
            }
        }
        if self.world.driver_state() == Some(ControllerState::Ready) {
            self.submit_owner_action(OwnerAction::ShutDown);
        }
        let bound = bounds.shutdown;
        if !self.world.run_until(WorkloadPhase::Drain, bound, Simulation::has_driver_ended)? {
            return self.timeout_violation("a controller that is shut down", bound);
        }
        let clean = Event::ShutDown { is_clean: true };
        let is_clean =
            self.world.host.as_ref().is_some_and(|host| host.driver_events().contains(&clean));
        if must_be_clean && !is_clean {
            let found =
                format!("{:?}", self.world.host.as_ref().map(|host| host.driver_events().last()));
            return Err(Violation::Expectation { expected: "a clean shutdown".to_owned(), found });
        }
        Ok(())
    }

    fn crash_process(&mut self) {
        self.record_events();
        self.has_crashed = true;
        self.world.host = None;
        self.world.workload.discard_outstanding();
    }

    fn restore_power(&mut self) -> Result<(), Violation> {
        self.world.device.poll_device();
        self.world.workload.handle_power_cut();
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
    fn release_controller(&mut self) -> Result<(), Violation> {
        let bound = self.world.time_bounds().recovery;
        let is_let_go = |world: &Simulation| {
            world.workload.outstanding_requests() == 0
                && world.host.as_ref().is_none_or(|host| host.commands_in_flight() == 0)
        };
        if !self.world.run_until(WorkloadPhase::Drain, bound, is_let_go)? {
            return self.outstanding_violation(bound);
        }
        self.record_events();
        if let Some(host) = &mut self.world.host {
            host.drop_queues();
        }
        self.world.host = None;
        Ok(())
    }

    /// Final checks of every run: no request is outstanding, and all resources have been returned.
    fn finish_run(&mut self) -> Result<(), Violation> {
        if !self.has_repented {
            self.stop_faults();
        }
        if self.world.host.is_some() && !self.world.has_driver_ended() {
            self.await_shutdown(false)?;
        }
        self.release_controller()?;
        self.world.workload.release_memory();
        let total = self.world.options().pool_bytes as u64;
        let free = self.world.bus.host_memory_pool().free_bytes();
        if free != total && !self.has_crashed {
            let what = "bytes free in the pool after all was given back";
            return Err(Violation::Leak { what, found: free, expected: total });
        }
        match self.world.bus.with_state(|state| state.failures.first().cloned()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    fn check_result(mut self, ended: Result<(), Violation>) -> RunRecord {
        self.record_events();
        let mut record = self.record;
        record.longest_completion = self.world.workload.longest_completion();
        record.medium_done = self.world.medium.completed_request_count();
        self.world.bus.with_state(|state| {
            record.hash = state.trace.running_hash();
            record.events = state.trace.record_count();
            record.blocked = state.iommu.blocked;
            record.faults = state.evil.applied_fault_count();
            record.counters = state.evil.trigger_counters();
            if let Err(failure) = ended {
                record.tail = state.trace.last_records(TAIL);
                record.failure = Some(failure);
            }
        });
        record
    }

    fn record_counts(&mut self) {
        self.record.counts = self.world.workload.request_counts();
    }

    fn record_events(&mut self) {
        if let Some(host) = &self.world.host {
            self.record
                .driver_events
                .extend(host.driver_events().iter().map(|event| format!("{event:?}")));
        }
    }

    fn has_queues(&self) -> bool {
        has_queues(&self.world)
    }

    fn is_removed(&self) -> bool {
        self.world.bus.with_state(|state| state.evil.is_removed())
            || !self.world.device.is_powered()
    }

    fn timeout_violation(&self, what: &str, bound: Span) -> Result<(), Violation> {
        let found = format!("{:?}", self.world.driver_state());
        Err(Violation::Expectation { expected: format!("{what} within {bound}"), found })
    }

    fn outstanding_violation(&self, bound: Span) -> Result<(), Violation> {
        match self.world.workload.oldest_outstanding() {
            Some((token, _)) => {
                let (count, at) =
                    (self.world.workload.outstanding_requests(), self.world.bus.now());
                Err(Violation::NeverCompleted { token, count, at })
            }
            None => self.timeout_violation("a controller that takes requests", bound),
        }
    }
}

fn has_queues(world: &Simulation) -> bool {
    world.host.as_ref().is_some_and(|host| host.queue_pair_count() > 0)
}

/// Longer than any single timeout of the default options.
const SETTLE: Span = Span::from_secs(1);
/// Maximum number of rounds in which every queue should report its lost writes by a failed flush.
const REPORTS_MAX: u32 = 16;
/// Lines of the trace that are kept after a violation.
const TAIL: usize = 80;

fn driver_end_reason(driver_events: &[Event]) -> Option<String> {
    driver_events.iter().rev().find_map(|event| match event {
        Event::Dead(error) => Some(error.to_string()),
        Event::Removed => Some("removed".to_owned()),
        _ => None,
    })
}
