//! A simulated world: a host, a bus, a device and its medium, on one clock and one seed.
//!
//! ```text
//!   loop:  poll device, poll host            time stands still while there is progress
//!          no progress: jump                 to the earliest wake-up
//!          no wake-up                        a request is outstanding and will never complete
//! ```

use tenmil_base::{Durability, Instant, Random, Span};
use tenmil_nvme_host::{ControllerError, ControllerState};

use crate::controller_function::{ControllerFunction, FunctionOptions};
use crate::data_oracle::DataOracle;
use crate::event_trace::TraceKind;
use crate::fault_injector::{FaultInjector, PlannedFault};
use crate::injected_bug::InjectedBug;
use crate::sim_bus::SimBus;
use crate::sim_host::{SimHost, SimHostOptions, WorkloadPhase};
use crate::sim_medium::{MediumOptions, SimMedium};
use crate::sim_pci_device::{BusTimingOptions, SimPciDevice};
use crate::violation::Violation;
use crate::workload::{DataLayout, OperationMix, Workload, WorkloadProfile};

/// Configuration of a world. Together with the seed it determines the run completely.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Options of the host.
    pub host: SimHostOptions,
    /// Options of the bus and the registers.
    pub device: BusTimingOptions,
    /// Options of the controller.
    pub function: FunctionOptions,
    /// Options of the medium.
    pub medium: MediumOptions,
    /// Faults of the device to inject.
    pub plan: Vec<PlannedFault>,
    /// Workload.
    pub profile: WorkloadProfile,
    /// Bytes of host memory that can be mapped for the device.
    pub pool_bytes: usize,
    /// Time that revoking the DMA access takes.
    pub cut_off_lag: Span,
    /// Deliberate bug in the host or the harness, which the checks must find.
    pub planted: Option<InjectedBug>,
}

/// A simulated world.
pub struct Simulation {
    /// Bus between host and device.
    pub bus: SimBus,
    /// Device.
    pub device: SimPciDevice,
    /// Medium of the device.
    pub medium: SimMedium,
    /// Host, after it has attached the device.
    pub host: Option<SimHost>,
    /// Workload.
    pub workload: Workload,
    options: WorldOptions,
}

/// Time limits that the driver must meet whatever the device does. Each is the sum of the timeouts
/// that the driver is configured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeBounds {
    /// From the first register access to success or failure of the initialization.
    pub attach: Span,
    /// From a request to its completion.
    pub completion: Span,
    /// From a fault to a working or dead controller.
    pub recovery: Span,
    /// From a shutdown request to its end.
    pub shutdown: Span,
}

/// Bytes of device memory, used as bounce buffers.
const PRIVATE_BYTES: usize = 256 << 10;
/// Iterations at one instant after which the run fails.
const ITERATIONS_MAX: u32 = 20_000;
/// Shortest and longest simulated step for a component that always wants to be polled at once. The
/// step doubles each time.
const SPIN_MIN: Span = Span { ns: 500 };
const SPIN_MAX: Span = Span::from_us(50);
/// Longest time that a component may want to be polled at once without progress.
const RESTLESS_MAX: Span = Span::from_ms(50);

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            host: SimHostOptions::default(),
            device: BusTimingOptions::default(),
            function: FunctionOptions::default(),
            medium: MediumOptions::default(),
            plan: Vec::new(),
            profile: WorkloadProfile {
                count: 60,
                depth: 8,
                mix: OperationMix::Flushes,
                blocks: (1, 8),
                span: 128,
                pieces: DataLayout::Whole,
            },
            pool_bytes: 64 << 20,
            cut_off_lag: Span::default(),
            planted: None,
        }
    }
}

impl Simulation {
    /// Creates a world in which no host has attached the device yet.
    ///
    /// # Errors
    ///
    /// If the options are invalid, or the memory cannot be mapped.
    pub fn new(options: &WorldOptions) -> Result<Self, String> {
        let mut random = Random::new(options.seed);
        let evil = FaultInjector::new(&options.plan, random.fork());
        let bus = SimBus::new(options.pool_bytes, PRIVATE_BYTES, evil)?;
        bus.with_state(|state| {
            state.cut_off_lag = options.cut_off_lag;
            state.ignores_cut_off = options.planted == Some(InjectedBug::CutOffIgnored);
            state.hastens_cut_off = options.planted == Some(InjectedBug::CutOffNotAwaited);
        });
        let medium = SimMedium::new(&bus, options.medium.clone(), random.fork());
        let function = ControllerFunction::new(&bus, &medium, &options.function)?;
        let device = SimPciDevice::new(
            &bus,
            Box::new(function),
            medium.clone(),
            options.device,
            random.fork(),
        );
        let block_size = options.medium.block_size;
        let is_volatile = options.medium.durability == Durability::VolatileCache;
        let oracle = DataOracle::new(options.seed, block_size as usize, is_volatile);
        let workload = Workload::new(&bus, options.profile, oracle, block_size, random.fork());
        Ok(Self { bus, device, medium, host: None, workload, options: options.clone() })
    }

    /// Configuration of this world.
    pub fn options(&self) -> &WorldOptions {
        &self.options
    }

    /// Lets a new host attach the device.
    pub fn attach(&mut self) -> Result<(), ControllerError> {
        self.host = None;
        let WorldOptions { host, planted, .. } = self.options.clone();
        self.host = Some(SimHost::new(&self.bus, &self.device, host, planted)?);
        Ok(())
    }

    /// State of the driver. `None` without a host.
    pub fn driver_state(&self) -> Option<ControllerState> {
        self.host.as_ref().map(SimHost::driver_state)
    }

    /// Whether the driver has given up the controller or has shut it down.
    pub fn has_driver_ended(&self) -> bool {
        matches!(
            self.driver_state(),
            None | Some(
                ControllerState::Dead | ControllerState::Removed | ControllerState::ShutDown
            )
        )
    }

    /// Runs the world until `is_done`, for at most `bound`. Returns whether it was done in time.
    ///
    /// # Errors
    ///
    /// The first violation found.
    pub fn run_until(
        &mut self,
        work: WorkloadPhase,
        bound: Span,
        is_done: impl Fn(&Self) -> bool,
    ) -> Result<bool, Violation> {
        let deadline = self.bus.now().after(bound);
        let mut turns = 0;
        let (mut spin, mut restless_since) = (SPIN_MIN, None);
        // Order: check for violations and the goal after every iteration, since time does not
        // advance while there is progress. Only an iteration without progress jumps to the next
        // wake-up.
        loop {
            let before = self.progress_count();
            self.run_iteration(work);
            if let Some(failure) = self.bus.with_state(|state| state.failures.first().cloned()) {
                return Err(failure);
            }
            if is_done(self) {
                return Ok(true);
            }
            let now = self.bus.now();
            if self.progress_count() != before {
                (turns, spin, restless_since) = (turns + 1, SPIN_MIN, None);
                if turns > ITERATIONS_MAX {
                    return Err(Violation::Spinning { at: now, turns });
                }
                continue;
            }
            let Some(wake) = self.wake_at() else { return Ok(false) };
            let wake = if wake > now {
                restless_since = None;
                wake
            } else {
                let since = *restless_since.get_or_insert(now);
                if now.since(since) > RESTLESS_MAX {
                    return Err(Violation::Restless {
                        who: self.component_without_progress(),
                        since,
                        at: now,
                    });
                }
                spin = Span { ns: (spin.ns * 2).min(SPIN_MAX.ns) };
                now.after(spin)
            };
            if wake > deadline {
                self.bus.with_state(|state| state.clock.jump_to(deadline));
                return Ok(false);
            }
            turns = 0;
            self.bus.with_state(|state| state.clock.jump_to(wake));
            self.check_request_times(now)?;
        }
    }

    /// Time limits for this configuration.
    pub fn time_bounds(&self) -> TimeBounds {
        let host = &self.options.host.controller;
        // A CAP register with an injected fault can report a timeout of at most 255 units.
        let ready = self.options.function.ready_timeout;
        let plus = |spans: &[Span]| Span { ns: spans.iter().map(|span| span.ns).sum() };
        let times = |span: Span, count: u64| Span { ns: span.ns * count };
        // Waits for RDY=1 before clearing EN, for RDY=0, and for RDY=1 (Base 2.1 §3.5.1).
        let walk = times(ready, 3);
        // A timeout is detected up to an eighth late, then the command is aborted and gets its
        // timeout again.
        let admin = times(host.admin_timeout, 3);
        let io = times(host.io_timeout, 3);
        // The enable sequence, and one admin command that fails.
        let attach = plus(&[walk, admin, host.status_interval, SLACK]);
        let reset = plus(&[io, attach]);
        let recovery = times(reset, u64::from(host.resets_max) + 1);
        let shutdown =
            plus(&[host.quiesce_timeout, host.shutdown_timeout, times(admin, 2), walk, SLACK]);
        TimeBounds { attach, completion: recovery, recovery, shutdown }
    }

    fn progress_count(&self) -> u64 {
        self.bus.with_state(|state| state.trace.progress_count())
    }

    fn run_iteration(&mut self, work: WorkloadPhase) {
        self.device.poll_device();
        let now = self.bus.now();
        if let Some(host) = &mut self.host {
            host.run_iteration(now, &mut self.workload, work);
        }
    }

    /// Component that wants to be polled at once.
    fn component_without_progress(&self) -> &'static str {
        let is_due = |wake: Option<Instant>| wake.is_some_and(|wake| wake <= self.bus.now());
        if is_due(self.device.wake_at().earliest()) { "the device" } else { "the driver" }
    }

    fn wake_at(&self) -> Option<Instant> {
        let device = self.device.wake_at();
        let host = self.host.as_ref().map_or(device, |host| host.wake_at());
        let earliest = [device.earliest(), host.earliest()].into_iter().flatten().min();
        earliest.filter(|wake| *wake != Instant::NEVER)
    }

    /// Checks that no request is older than its time limit.
    fn check_request_times(&self, now: Instant) -> Result<(), Violation> {
        let Some((token, since)) = self.workload.oldest_outstanding() else { return Ok(()) };
        if self.host.is_some() && now.since(since) > self.time_bounds().completion {
            let count = self.workload.outstanding_requests();
            return Err(Violation::NeverCompleted { token, count, at: now });
        }
        Ok(())
    }
}

impl Drop for Simulation {
    /// The host is dropped first, then the device with its channels. Requests left in the medium
    /// are discarded.
    fn drop(&mut self) {
        self.bus.record(TraceKind::Harness, [0, 0, 0]);
        self.medium.discard_in_flight();
        self.host = None;
        self.device.drop_controller();
    }
}

/// Time of the harness itself: initialization takes about twenty commands of some microseconds
/// each.
const SLACK: Span = Span::from_ms(100);

#[cfg(test)]
mod tests {
    use tenmil_nvme_host::{ControllerState, Event, ShutdownNotification};

    use super::{Simulation, WorldOptions};
    use crate::sim_host::{SimHost, WorkloadPhase};

    fn run_session(options: &WorldOptions) -> (Simulation, u64) {
        let mut world = Simulation::new(options).unwrap();
        let bounds = world.time_bounds();
        world.attach().unwrap();
        let is_up = |world: &Simulation| world.host.as_ref().is_some_and(SimHost::is_ready);
        assert_eq!(
            world.run_until(WorkloadPhase::Drain, bounds.attach, is_up),
            Ok(true),
            "{:#?}",
            trace_tail(&world)
        );
        let is_done = |world: &Simulation| world.workload.is_done();
        assert_eq!(
            world.run_until(WorkloadPhase::Submit, bounds.completion, is_done),
            Ok(true),
            "{:#?}",
            trace_tail(&world)
        );
        let now = world.bus.now();
        let host = world.host.as_mut().unwrap();
        host.driver().start_shutdown(now, ShutdownNotification::Normal).unwrap();
        let is_down = |world: &Simulation| world.driver_state() == Some(ControllerState::ShutDown);
        assert_eq!(
            world.run_until(WorkloadPhase::Drain, bounds.shutdown, is_down),
            Ok(true),
            "{:#?}",
            trace_tail(&world)
        );
        let driver_events = world.host.as_ref().unwrap().driver_events();
        assert!(driver_events.contains(&Event::ShutDown { is_clean: true }), "{driver_events:?}");
        let hash = world.bus.with_state(|state| state.trace.running_hash());
        (world, hash)
    }

    fn trace_tail(world: &Simulation) -> Vec<String> {
        world.bus.with_state(|state| state.trace.last_records(60))
    }

    #[test]
    fn conforming_device_completes_a_whole_session() {
        let (world, _) = run_session(&WorldOptions::default());
        let counts = world.workload.request_counts();
        assert_eq!((counts.submitted, counts.succeeded), (60, 60));
        assert!(counts.verified > 0);
    }

    #[test]
    fn same_seed_gives_the_same_run_and_another_seed_another() {
        let run = |seed| run_session(&WorldOptions { seed, ..WorldOptions::default() }).1;
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
