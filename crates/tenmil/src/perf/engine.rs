//! The engine: brings the devices up, loads them from one thread per core, and adds up what was
//! found.
//!
//! ```text
//!   Rig ── emulated SSDs, each with its driver, and any other block devices
//!    │
//!    ├── Worker (on a reactor) ── Lane, Lane, …    one per SSD and queue pair
//!    ├── Worker (on a reactor) ── Lane, Lane, …
//!    │
//!   the calling thread: looks after the controllers, draws the live line
//! ```

mod bare;
mod by_hand;
mod copy_loop;
mod exchange;
mod lane;
mod media;
mod null_blk;
mod places;
mod rig;
mod rounds;
mod scrutiny;
mod tally;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};

use base::Span;
use host::environment::ProcessorTime;
use host::machine::Machine;
use host::{Clock, Cores, Environment};
use reactor::{ReactorOptions, Reactors, Registration, ThreadPlan};

use super::environment::RunEnvironment;
use super::options::{PerfOptions, RAM_TIME, Supplies};
use super::outcome::{CeilingOutcome, DeviceOutcome, Ended, PerfOutcome, RamOutcome};
use super::progress::{Phase, Progress};
use crate::balance::Balance;
use crate::{EmuMedium, EmuSpec, Refused, Uri};
pub use by_hand::ByHand;
pub(crate) use places::Places;
use rig::{Rig, depth_of_a_pair};
use scrutiny::{Place, Scrutiny, Stamped, Unlooked};
use tally::Tally;
use worker::{Plan, Share, Worker, WorkerParts};

/// What a caller does while the engine runs, ten times a second.
pub type Watch<'a> = &'a mut dyn FnMut(&Progress);

/// Runs what `options` ask for.
pub fn run(
    options: &PerfOptions,
    progress: &Arc<Progress>,
    watch: Watch<'_>,
) -> Result<PerfOutcome, Refused> {
    let clock = Clock::start();
    let places = Places::choose(options, &Cores::allowed());
    let machine = Environment::read();
    let allowed = Cores::allowed();
    let before = ProcessorTime::read(&allowed);
    let mut rig = Rig::bring_up(options, &places, clock)?;
    let options = &options.suited_to(rig.depth_max());
    host::file::keep()?;
    let tally = rig.load(options, &places, progress, watch)?;
    let memory_backing = rig.memory_backing();
    rig.shut_down();

    let mut environment = RunEnvironment::of(machine, options);
    environment.frequency_scaling = tally.frequency_scaling().to_owned();
    environment.stolen = ProcessorTime::read(&allowed).stolen_since(before);
    environment.tsc_hz = clock.tsc_hz();
    environment.memory_backing = memory_backing;
    let mut outcome = tally.into_outcome(options, &places, &clock, environment);
    compare(&mut outcome, options, &places, clock, progress, watch);
    Ok(outcome)
}

/// Measures what the run is compared with, until somebody has seen enough. What was measured before
/// stands, whatever becomes of this.
fn compare(
    outcome: &mut PerfOutcome,
    options: &PerfOptions,
    places: &Places,
    clock: Clock,
    progress: &Arc<Progress>,
    watch: Watch<'_>,
) {
    let is_over = |ended| ended == Ended::Interrupt || host::signal::interrupted();
    let PerfOutcome { ended, devices, ceiling: bare, ram, null_blk, missing, .. } = outcome;
    let mut known = |found: Result<(), Refused>| missing.extend(found.err());
    if !is_over(*ended) {
        let found = ceiling(options, devices, places, clock, progress, watch);
        known(found.map(|found| *bare = found));
    }
    if !is_over(*ended) {
        known(over_ram(options, places, clock, progress, watch).map(|found| *ram = found));
    }
    if !is_over(*ended) {
        known(null_blk::compare(options, clock, watch).map(|found| *null_blk = found));
    }
}

impl Rig {
    /// Loads the devices as `options` say.
    fn load(
        &mut self,
        options: &PerfOptions,
        places: &Places,
        progress: &Arc<Progress>,
        watch: Watch<'_>,
    ) -> Result<Tally, Refused> {
        if options.verify {
            self.load_with(options, places, progress, watch, |rig, place, depth| {
                Stamped::new(place, depth, options.seed, rig.regions().clone())
            })
        } else {
            self.load_with(options, places, progress, watch, |_, _, _| Unlooked)
        }
    }

    fn load_with<S: Scrutiny + Send + 'static>(
        &mut self,
        options: &PerfOptions,
        places: &Places,
        progress: &Arc<Progress>,
        watch: Watch<'_>,
        scrutiny: impl Fn(&Self, &Place, usize) -> S,
    ) -> Result<Tally, Refused> {
        let (tell, told) = mpsc::channel();
        let mut workers = Vec::new();
        for (index, _) in places.submit.iter().enumerate() {
            let (lanes, workload) = self.lanes(options, places, index, &scrutiny)?;
            let worker = Worker::new(WorkerParts {
                lanes,
                workload,
                clock: *self.clock(),
                plan: Plan::new(options, places),
                index,
                progress: Arc::clone(progress),
                tell: tell.clone(),
            });
            let woken_by = worker.woken_by();
            let woken_by = woken_by.map_err(|error| Refused::machine(format!("wait: {error}")))?;
            let is_done_by_kernel = worker.is_done_by_kernel();
            let registration = Registration::active("load", woken_by, worker);
            workers.push(match is_done_by_kernel {
                true => registration.sleeps_at_once(),
                false => registration,
            });
        }
        drop(tell);
        let cores = places.submit_cores();
        let reactors = self.reactors(options, &cores)?;
        let note = |text| progress.note(text);
        let (rules, has_governor) = (&options.scheduler, options.governor);
        let balance = Balance::start(rules, has_governor, reactors.directory(), &cores, &note)?;
        progress.show_steering(balance.steering().clone());
        let directory = Arc::clone(reactors.directory());
        progress.show_reactors(control::Running { directory, clock: *self.clock() });
        progress.enter(Phase::WarmUp);
        for ((index, worker), reactor) in
            workers.into_iter().enumerate().zip(reactors.directory().reactors())
        {
            let plan = ThreadPlan::new(&format!("submit-{index}")).on(reactor).poller(worker);
            reactors.spawn(plan).map_err(|error| Refused::machine(error.to_string()))?;
        }
        let shares = self.await_shares(&told, places.submit.len(), progress, watch)?;
        let sleeps = reactors.sample().reactors.iter().map(|reactor| reactor.sleeps).sum();
        reactors.stop();
        progress.hide_steering();
        let mut tally = Tally::new(self.descriptions(), sleeps, balance.into_frequency_scaling());
        shares.into_iter().for_each(|share| tally.add(share));
        Ok(tally)
    }

    /// A reactor for each submitting thread.
    fn reactors(&self, options: &PerfOptions, cores: &Cores) -> Result<Reactors, Refused> {
        let poll = ReactorOptions { poll: options.poll, ..ReactorOptions::default() };
        Reactors::start(cores, &poll, self.clock()).map_err(refused)
    }

    /// Looks after the controllers until `count` workers have told what they found. Fails if a
    /// controller is lost, or a worker ends without a word.
    fn await_shares(
        &mut self,
        told: &mpsc::Receiver<Share>,
        count: usize,
        progress: &Progress,
        watch: Watch<'_>,
    ) -> Result<Vec<Share>, Refused> {
        let mut shares = Vec::new();
        let mut health = Ok(());
        loop {
            match told.try_recv() {
                Ok(share) => shares.push(share),
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    if health.is_ok() {
                        health = self.look_after();
                    }
                    if health.is_err() || host::signal::interrupted() {
                        progress.ask_to_stop();
                    }
                    watch(progress);
                    host::thread::rest(WATCH_INTERVAL);
                }
            }
        }
        health?;
        if shares.len() < count {
            let found = shares.len();
            return Err(Refused::machine(format!(
                "add up the run: {found} submitting threads told what they found, expected {count}"
            )));
        }
        Ok(shares)
    }
}

/// Why there are no reactors, in this house's words.
fn refused(why: reactor::Refused) -> Refused {
    let text = why.to_string();
    match why.blame() {
        base::Blame::Caller => Refused::caller(text),
        base::Blame::Machine => Refused::machine(text),
        base::Blame::Peer => Refused::peer(text),
    }
}

/// Measures the bare ring with as many rings as the run had, between the same two threads; or bare
/// copies, where the devices are memory.
fn ceiling(
    options: &PerfOptions,
    devices: &[DeviceOutcome],
    places: &Places,
    clock: Clock,
    progress: &Arc<Progress>,
    watch: Watch<'_>,
) -> Result<Option<CeilingOutcome>, Refused> {
    let Some(time) = options.ceiling else { return Ok(None) };
    progress.enter(Phase::Ceiling);
    watch(progress);
    if let Some(engine) = options.exchange_engine() {
        let plan = exchange::Plan { options, places, clock, time, engine };
        return exchange::measure(&plan, depth_of_a_pair(options, 0)).map(Some);
    }
    if !options.is_all_emulated() {
        return copy_loop::measure(options, devices, places, clock, time).map(Some);
    }
    let rings = options.device_count() * u32::from(options.queue_pairs);
    let depth = depth_of_a_pair(options, 0);
    bare::measure(&bare::Plan { options, rings, depth, time, places, clock }).map(Some)
}

/// Runs the same workload over SSDs that move the data.
fn over_ram(
    options: &PerfOptions,
    places: &Places,
    clock: Clock,
    progress: &Arc<Progress>,
    watch: Watch<'_>,
) -> Result<Option<RamOutcome>, Refused> {
    let Some(time) = options.ram else { return Ok(None) };
    progress.enter(Phase::Ram);
    let needed = RAM_SIZE_BYTES * u64::from(options.device_count());
    let there = Supplies::look(&Machine::this()).memory_available_bytes;
    if needed > there / 2 {
        return Err(Refused::machine(format!(
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
    let mut rig = Rig::bring_up(&options, places, clock)?;
    let tally = rig.load(&options, places, progress, watch)?;
    rig.shut_down();
    Ok(tally.into_ram_outcome(&options))
}

/// How much each SSD of the phase over memory holds: together more than the caches do.
const RAM_SIZE_BYTES: u64 = 16 << 20;

/// How often controllers are looked after and the live line is drawn.
const WATCH_INTERVAL: Span = Span::from_ms(100);
