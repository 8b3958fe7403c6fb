//! Engine of `perf`: starts the devices, loads them from one thread per core, and sums up the
//! results.
//!
//! ```text
//!   DeviceSet ── emulated SSDs, each with its driver, and other block devices
//!    │
//!    ├── Worker (on a reactor) ── QueueRunner, QueueRunner, …    one per device and queue pair
//!    ├── Worker (on a reactor) ── QueueRunner, QueueRunner, …
//!    │
//!   calling thread: polls the controllers, draws the progress line
//! ```

mod baseline_load;
mod block_device_set;
mod cpu_placement;
mod device_set;
mod memcpy_baseline;
mod null_device_comparison;
mod queue_runner;
mod ring_baseline;
mod run_totals;
mod socket_baseline;
mod stepped_ssd;
mod verifier;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};

use tenmil_base::Span;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::machine_environment::CpuTime;
use tenmil_linux::{Clock, CpuList, MachineEnvironment};
use tenmil_reactor::{PollerBuilder, ReactorOptions, Reactors, ThreadBuilder};

use super::environment::RunEnvironment;
use super::perf_options::{MachineResources, PerfOptions, RAM_TIME};
use super::perf_result::{BaselineResult, DeviceResult, PerfResult, RamResult, RunEndReason};
use super::progress::{RunPhase, RunProgress};
use crate::balance::BalancerGuard;
pub use cpu_placement::CoreAssignment;
use device_set::{DeviceSet, depth_of_a_pair};
use run_totals::RunTotals;
pub use stepped_ssd::SteppedSsd;
use tenmil_base::Error;
use tenmil_devices::{EmuMedium, EmuSpec, Uri};
use verifier::{NoVerify, StampVerifier, VerifiedRange, Verifier};
use worker::{LoadWorker, WorkerParts, WorkerPlan, WorkerResult};

/// Callback that runs ten times a second while the engine runs.
pub type TickFn<'a> = &'a mut dyn FnMut(&RunProgress);

/// Runs `perf` with these options.
pub fn run_perf(
    options: &PerfOptions,
    progress: &Arc<RunProgress>,
    watch: TickFn<'_>,
) -> Result<PerfResult, Error> {
    let clock = Clock::start();
    let places = CoreAssignment::from_options(options, &CpuList::allowed_cpus());
    let machine = MachineEnvironment::read();
    let allowed = CpuList::allowed_cpus();
    let before = CpuTime::read(&allowed);
    let mut rig = DeviceSet::open_devices(options, &places, clock)?;
    let options = &options.with_depth_limited(rig.depth_max());
    tenmil_linux::storage_file::commit_created()?;
    let tally = rig.run_load(options, &places, progress, watch)?;
    let memory_backing = rig.memory_backing();
    rig.shut_down();

    let mut environment = RunEnvironment::from_machine(machine, options);
    environment.frequency_scaling = tally.frequency_scaling().to_owned();
    environment.steal = CpuTime::read(&allowed).steal_since(before);
    environment.tsc_hz = clock.tsc_hz();
    environment.memory_backing = memory_backing;
    let mut result = tally.into_result(options, &places, &clock, environment);
    measure_baselines(&mut result, options, &places, clock, progress, watch);
    Ok(result)
}

/// Measures the baselines of a run, until interrupted. The result of the run is kept whatever
/// happens here.
fn measure_baselines(
    result: &mut PerfResult,
    options: &PerfOptions,
    places: &CoreAssignment,
    clock: Clock,
    progress: &Arc<RunProgress>,
    watch: TickFn<'_>,
) {
    let is_over =
        |ended| ended == RunEndReason::Interrupt || tenmil_linux::signal::is_stop_requested();
    let PerfResult { ended, devices, baseline: bare, ram, null_blk, missing, .. } = result;
    let mut known = |found: Result<(), Error>| missing.extend(found.err());
    if !is_over(*ended) {
        let found = measure_ring_or_copy_baseline(options, devices, places, clock, progress, watch);
        known(found.map(|found| *bare = found));
    }
    if !is_over(*ended) {
        known(run_over_ram(options, places, clock, progress, watch).map(|found| *ram = found));
    }
    if !is_over(*ended) {
        known(
            null_device_comparison::compare_block_layer_modes(options, clock, watch)
                .map(|found| *null_blk = found),
        );
    }
}

impl DeviceSet {
    /// Loads the devices according to `options`.
    fn run_load(
        &mut self,
        options: &PerfOptions,
        places: &CoreAssignment,
        progress: &Arc<RunProgress>,
        watch: TickFn<'_>,
    ) -> Result<RunTotals, Error> {
        if options.verify {
            self.run_load_with_verifier(options, places, progress, watch, |rig, place, depth| {
                StampVerifier::new(place, depth, options.seed, rig.regions().clone())
            })
        } else {
            self.run_load_with_verifier(options, places, progress, watch, |_, _, _| NoVerify)
        }
    }

    fn run_load_with_verifier<S: Verifier + Send + 'static>(
        &mut self,
        options: &PerfOptions,
        places: &CoreAssignment,
        progress: &Arc<RunProgress>,
        watch: TickFn<'_>,
        scrutiny: impl Fn(&Self, &VerifiedRange, usize) -> S,
    ) -> Result<RunTotals, Error> {
        let (results, reported_values) = mpsc::channel();
        // Workers are created before the reactors, so that an error leaves no reactor running.
        // Results come back through the channel, whose disconnection means that all workers have
        // ended.
        let mut workers = Vec::new();
        for (index, _) in places.submit.iter().enumerate() {
            let (queues, workload) =
                self.create_queue_runners(options, places, index, &scrutiny)?;
            let worker = LoadWorker::new(WorkerParts {
                queues,
                workload,
                clock: *self.clock(),
                plan: WorkerPlan::new(options, places),
                index,
                progress: Arc::clone(progress),
                results: results.clone(),
            });
            let woken_by = worker.wake_sources();
            let woken_by =
                woken_by.map_err(|error| Error::environment(format!("wait: {error}")))?;
            let is_done_by_kernel = worker.does_kernel_deliver_completions();
            let registration = PollerBuilder::polled_each_iteration("load", woken_by, worker);
            workers.push(match is_done_by_kernel {
                true => registration.no_spin(),
                false => registration,
            });
        }
        drop(results);
        let cores = places.submit_cores();
        let reactors = self.start_reactors(options, &cores)?;
        let note = |text| progress.add_note(text);
        let (rules, has_governor) = (&options.scheduler, options.governor);
        let balance =
            BalancerGuard::start_balancer(rules, has_governor, reactors.registry(), &cores, &note)?;
        progress.publish_scheduler(balance.scheduler_handle().clone());
        let directory = Arc::clone(reactors.registry());
        progress
            .publish_reactors(tenmil_reactor::ReactorsHandle { directory, clock: *self.clock() });
        progress.set_phase(RunPhase::WarmUp);
        for ((index, worker), reactor) in
            workers.into_iter().enumerate().zip(reactors.registry().reactors())
        {
            let plan = ThreadBuilder::new(&format!("submit-{index}"))
                .on_reactor(reactor)
                .add_poller(worker);
            reactors.spawn(plan).map_err(|error| Error::environment(error.to_string()))?;
        }
        let shares =
            self.await_worker_results(&reported_values, places.submit.len(), progress, watch)?;
        let sleeps = reactors.sample().reactors.iter().map(|reactor| reactor.sleeps).sum();
        reactors.stop();
        progress.withdraw_scheduler();
        let mut tally =
            RunTotals::new(self.descriptions(), sleeps, balance.stop_and_describe_frequency());
        shares.into_iter().for_each(|share| tally.add_worker(share));
        Ok(tally)
    }

    /// Starts a reactor for each submitting thread.
    fn start_reactors(&self, options: &PerfOptions, cores: &CpuList) -> Result<Reactors, Error> {
        let poll = ReactorOptions { poll: options.poll, ..ReactorOptions::default() };
        Reactors::start_on_cores(cores, &poll, self.clock()).map_err(reactor_error)
    }

    /// Polls the controllers until `count` workers have reported. Fails if a controller is lost, or
    /// a worker ends without a report.
    fn await_worker_results(
        &mut self,
        reported_values: &mpsc::Receiver<WorkerResult>,
        count: usize,
        progress: &RunProgress,
        watch: TickFn<'_>,
    ) -> Result<Vec<WorkerResult>, Error> {
        let mut shares = Vec::new();
        let mut health = Ok(());
        loop {
            match reported_values.try_recv() {
                Ok(share) => shares.push(share),
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    // After an error the loop continues until all workers have ended, since they
                    // still use the devices.
                    if health.is_ok() {
                        health = self.poll_controllers();
                    }
                    if health.is_err() || tenmil_linux::signal::is_stop_requested() {
                        progress.request_stop();
                    }
                    watch(progress);
                    tenmil_linux::named_thread::sleep(WATCH_INTERVAL);
                }
            }
        }
        health?;
        if shares.len() < count {
            let found = shares.len();
            return Err(Error::environment(format!(
                "add up the run: {found} submitting threads returned a result, expected {count}"
            )));
        }
        Ok(shares)
    }
}

/// Converts an error of the reactors.
fn reactor_error(why: tenmil_reactor::ReactorError) -> Error {
    let text = why.to_string();
    match why.category() {
        tenmil_base::ErrorCategory::Usage => Error::usage(text),
        tenmil_base::ErrorCategory::Environment => Error::environment(text),
        tenmil_base::ErrorCategory::Remote => Error::remote(text),
    }
}

/// Measures the baseline: as many rings as the run had, between the same two threads, or memory
/// copies for RAM devices.
fn measure_ring_or_copy_baseline(
    options: &PerfOptions,
    devices: &[DeviceResult],
    places: &CoreAssignment,
    clock: Clock,
    progress: &Arc<RunProgress>,
    watch: TickFn<'_>,
) -> Result<Option<BaselineResult>, Error> {
    let Some(time) = options.baseline_time else { return Ok(None) };
    progress.set_phase(RunPhase::Baseline);
    watch(progress);
    if let Some(engine) = options.message_baseline_engine() {
        let plan =
            socket_baseline::SocketBaselinePlan { options, cores: places, clock, time, engine };
        return socket_baseline::measure_sockets(&plan, depth_of_a_pair(options, 0)).map(Some);
    }
    if !options.is_all_emulated() {
        return memcpy_baseline::measure_memcpy(options, devices, places, clock, time).map(Some);
    }
    let rings = options.device_count() * u32::from(options.queue_pairs);
    let depth = depth_of_a_pair(options, 0);
    ring_baseline::measure_rings(&ring_baseline::RingBaselinePlan {
        options,
        rings,
        depth,
        time,
        cores: places,
        clock,
    })
    .map(Some)
}

/// Runs the same workload over emulated SSDs that transfer data.
fn run_over_ram(
    options: &PerfOptions,
    places: &CoreAssignment,
    clock: Clock,
    progress: &Arc<RunProgress>,
    watch: TickFn<'_>,
) -> Result<Option<RamResult>, Error> {
    let Some(time) = options.ram else { return Ok(None) };
    progress.set_phase(RunPhase::Ram);
    let needed = RAM_SIZE_BYTES * u64::from(options.device_count());
    let there = MachineResources::probe_machine(&KernelFiles::live_system()).memory_available_bytes;
    if needed > there / 2 {
        return Err(Error::environment(format!(
            "run over memory: {} SSDs take {} MiB, expected at most half of the {} MiB that are \
             available",
            options.device_count(),
            needed >> 20,
            there >> 20
        )));
    }
    let spec = EmuSpec {
        count: options.device_count(),
        size_bytes: RAM_SIZE_BYTES,
        ..EmuSpec::new(EmuMedium::Ram)
    };
    let options = PerfOptions {
        uris: vec![Uri::Emu(spec)],
        time,
        warm_up: Span { ns: RAM_TIME.ns / 10 },
        ..options.clone()
    };
    let mut rig = DeviceSet::open_devices(&options, places, clock)?;
    let tally = rig.run_load(&options, places, progress, watch)?;
    rig.shut_down();
    Ok(tally.into_ram_result(&options))
}

/// Size of each device of the run over RAM. Together they exceed the CPU caches.
const RAM_SIZE_BYTES: u64 = 16 << 20;

/// Interval in which controllers are polled and the progress line is drawn.
const WATCH_INTERVAL: Span = Span::from_ms(100);
