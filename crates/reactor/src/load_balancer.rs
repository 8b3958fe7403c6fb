//! Load balancer: a poller that samples loads once per period, plans, and migrates threads.
//!
//! It runs on a light thread of its own, which is idle and so is placed with the idle ones. As a
//! timed poller it costs nothing in the iterations between. Blocking work, such as reading cpusets
//! and writing frequencies, is left to the [`CpuPlatform`].
//!
//! [`start_balancer`] is all that a program needs; [`new_balancer`] leaves platform and thread to the caller.

mod cpu_platform;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use tenmil_base::{Instant, Span};
use tenmil_linux::CpuList;
use tenmil_linux::cpu_topology::CpuLocation;
use tenmil_linux::frequency_control::{FrequencyControl, FrequencyRequest};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::thread_pool::ThreadPool;

use crate::context::Context;
use crate::error::ReactorError;
use crate::event::Event;
use crate::frequency_governor;
use crate::light_thread::ThreadBuilder;
use crate::message::ThreadHandle;
use crate::poller::{PollResult, Poller, PollerBuilder};
use crate::registry::{LoadSnapshot, ReactorUsage, Registry, ThreadId, ThreadUsage};
use crate::thread_scheduler::{
    Migration, Options, OptionsError, ReactorLoad, SchedulerSnapshot, SchedulingPlan, ThreadLoad,
    ThreadScheduler,
};
pub use cpu_platform::{CpuPlatform, LinuxPlatform};

/// Poller that balances threads over reactors.
struct Balancer {
    handle: BalancerHandle,
    platform: Box<dyn CpuPlatform>,
    /// CPU locations of the reactors.
    cpu_locations: Vec<CpuLocation>,
    last: Option<LoadSnapshot>,
    /// First observation of each thread after its last migration.
    arrived: BTreeMap<ThreadId, Instant>,
    /// Poll interval: the period of the options when they were last read.
    period: Span,
}

/// Handle to query and configure a balancer, from any thread.
#[derive(Clone, Debug)]
pub struct BalancerHandle(Arc<Mutex<BalancerState>>);

#[derive(Debug)]
struct BalancerState {
    scheduler: ThreadScheduler,
    plan: SchedulingPlan,
    /// Frequency requests of the last period; empty without frequency control.
    frequencies: Vec<(u32, FrequencyRequest)>,
}

/// A balancer was not started.
#[derive(Debug)]
pub enum BalancerError {
    /// The options are inconsistent.
    Options(OptionsError),
    /// Its thread was rejected.
    Spawn(ReactorError),
}

/// Creates a balancer for reactors at these CPU locations, to be added to a light thread, and its
/// handle.
pub fn new_balancer(
    options: Options,
    cpu_locations: Vec<CpuLocation>,
    ground: impl CpuPlatform + 'static,
) -> Result<(PollerBuilder, BalancerHandle), OptionsError> {
    let cores: CpuList = cpu_locations.iter().map(|place| place.core).collect();
    let period = options.period;
    let scheduler = ThreadScheduler::new(options, cores)?;
    let steering = BalancerHandle(Arc::new(Mutex::new(BalancerState {
        scheduler,
        plan: SchedulingPlan::default(),
        frequencies: Vec::new(),
    })));
    let balancer = Balancer {
        handle: steering.clone(),
        platform: Box::new(ground),
        cpu_locations,
        last: None,
        arrived: BTreeMap::new(),
        period,
    };
    Ok((PollerBuilder::polled_each_period("balancer", period, balancer), steering))
}

/// Starts balancing the threads of these reactors, on a light thread of its own. With a
/// `frequency`, it also controls the CPU frequencies. Blocking work runs on `pool`.
pub fn start_balancer(
    directory: &Registry,
    options: Options,
    frequency: Option<FrequencyControl>,
    pool: Arc<ThreadPool>,
) -> Result<(ThreadHandle, BalancerHandle), BalancerError> {
    let machine = KernelFiles::live_system();
    let reactors = directory.sample_statistics(Instant::default()).reactors;
    let cores: CpuList = reactors.iter().map(|reactor| reactor.core).collect();
    let cpu_locations = CpuLocation::read_all(&machine, &cores);
    let ground = LinuxPlatform::new(machine, cores, frequency, pool);
    let (balancer, steering) =
        new_balancer(options, cpu_locations, ground).map_err(BalancerError::Options)?;
    let plan = ThreadBuilder::new("balancer").add_poller(balancer);
    let handle = directory.spawn(plan).map_err(|refused| BalancerError::Spawn(refused.reason))?;
    Ok((handle, steering))
}

impl Balancer {
    /// Plans for the period between two samples, and requests the planned migrations. Returns the
    /// length of the next period.
    fn plan_and_migrate(
        &mut self,
        last: &LoadSnapshot,
        loads: &LoadSnapshot,
        directory: &Registry,
    ) -> Option<Span> {
        let now = loads.at;
        let snapshot = self.build_snapshot(last, loads);
        let steering = self.handle.clone();
        let mut steered = match steering.0.try_lock() {
            Ok(steered) => steered,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The options are being changed. The next sample covers two periods.
            Err(TryLockError::WouldBlock) => return None,
        };
        let plan = steered.scheduler.plan(now, &snapshot);
        let requests =
            frequency_governor::frequency_requests(steered.scheduler.options(), &snapshot, &plan);
        for order in &plan.migrations {
            send_migration(order, loads, directory);
        }
        for event in &plan.events {
            directory.record_event(now, Event::Schedule(event.clone()));
        }
        steered.frequencies =
            if self.platform.controls_frequency() { requests.clone() } else { Vec::new() };
        for error in self.platform.request_frequencies(requests) {
            directory.record_event(now, Event::Frequency(error));
        }
        steered.plan = plan;
        let Options { period, migration_interval: rest, .. } = *steered.scheduler.options();
        // Older entries have no effect.
        self.arrived.retain(|_, at| now.since(*at) < rest);
        Some(period)
    }

    fn build_snapshot(&mut self, last: &LoadSnapshot, loads: &LoadSnapshot) -> SchedulerSnapshot {
        let ours = self.platform.available_cpus();
        let reactor = |reactor: &ReactorUsage| {
            let before = last.reactors.iter().find(|before| before.id == reactor.id);
            let place = self.cpu_locations.iter().find(|place| place.core == reactor.core);
            ReactorLoad {
                core: reactor.core,
                busy: busy_ns_since(reactor.busy, before.map(|before| before.busy)),
                taken: !ours.cores.contains(reactor.core),
                siblings: place.map(|place| place.siblings.clone()).unwrap_or_default(),
                node: place.and_then(|place| place.node),
            }
        };
        let reactors = loads.reactors.iter().map(reactor).collect();
        let mut threads = Vec::with_capacity(loads.threads.len());
        for thread in &loads.threads {
            let before = last.usage_of_thread(thread.id);
            if before.is_some_and(|before| before.migrations < thread.migrations) {
                self.arrived.insert(thread.id, loads.at);
            }
            threads.extend(self.thread_load_since(thread, before, loads));
        }
        SchedulerSnapshot {
            elapsed: loads.at.since(last.at).ns,
            quota: ours.quota,
            reactors,
            threads,
        }
    }

    fn thread_load_since(
        &self,
        thread: &ThreadUsage,
        before: Option<&ThreadUsage>,
        loads: &LoadSnapshot,
    ) -> Option<ThreadLoad> {
        let home = loads.reactors.iter().find(|reactor| reactor.id == thread.home)?;
        // A pinned thread is restricted to its current reactor.
        let mask = match thread.is_pinned {
            true => Some(CpuList::from_iter([home.core])),
            false => thread.mask.clone(),
        };
        Some(ThreadLoad {
            id: u64::from(thread.id.0),
            home: home.core,
            busy: busy_ns_since(thread.busy, before.map(|before| before.busy)),
            mask,
            node: thread.node,
            last_migration: self.arrived.get(&thread.id).copied(),
            // A second request before the first is carried out would replace it; the rest time
            // keeps the scheduler from making one.
            moving: false,
        })
    }
}

impl Poller for Balancer {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let loads = context.registry().sample_loads(context.now());
        let Some(last) = self.last.take() else {
            self.last = Some(loads);
            return PollResult::Busy;
        };
        let Some(period) = self.plan_and_migrate(&last, &loads, context.registry()) else {
            self.last = Some(last);
            return PollResult::Busy;
        };
        self.last = Some(loads);
        if let Some(me) = context.current_poller().filter(|_| period != self.period) {
            self.period = period;
            context.set_poller_period(me, period);
        }
        PollResult::Busy
    }
}

impl BalancerHandle {
    /// Current options.
    pub fn options(&self) -> Options {
        self.lock().scheduler.options().clone()
    }

    /// Changes the options, including the policy, from the end of the current period on.
    /// Inconsistent options are rejected and change nothing.
    pub fn set_options(&self, options: Options) -> Result<(), OptionsError> {
        self.lock().scheduler.set_options(options)
    }

    /// Last plan.
    pub fn last_plan(&self) -> SchedulingPlan {
        self.lock().plan.clone()
    }

    /// Frequency requests of the last period; empty without frequency control.
    pub fn last_frequency_requests(&self) -> Vec<(u32, FrequencyRequest)> {
        self.lock().frequencies.clone()
    }

    fn lock(&self) -> MutexGuard<'_, BalancerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for BalancerError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Options(error) => write!(out, "{error}"),
            Self::Spawn(why) => write!(out, "start the balancer: {why}"),
        }
    }
}

impl std::error::Error for BalancerError {}

/// Requests a migration. If a reactor's inbox is full the request is dropped; if the reason
/// persists, a later plan repeats it after the thread's rest time.
fn send_migration(order: &Migration, loads: &LoadSnapshot, directory: &Registry) {
    let on = |core| loads.reactors.iter().find(|reactor| reactor.core == core);
    let Some(to) = on(order.to) else { return };
    let Ok(thread) = u32::try_from(order.thread).map(ThreadId) else { return };
    // Not by `Registry::migrate_thread`, which enforces the mask: where no core of the mask is left,
    // the scheduler must violate it.
    let _ = directory.force_migration(thread, to.id);
}

fn busy_ns_since(now: Span, before: Option<Span>) -> u64 {
    now.ns.saturating_sub(before.unwrap_or_default().ns)
}

#[cfg(test)]
mod tests;
