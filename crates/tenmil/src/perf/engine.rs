//! The engine: brings the SSDs up, loads them from one thread per core, and adds up what was found.
//!
//! ```text
//!   Rig ── SSDs, each with a controller in this process or on the bus
//!    │
//!    ├── Worker (on a reactor) ── Lane, Lane, …    one per SSD and queue pair
//!    ├── Worker (on a reactor) ── Lane, Lane, …
//!    │
//!   the calling thread: looks after the controllers, draws the live line
//! ```

mod balance;
mod bare;
mod by_hand;
mod lane;
mod places;
mod scrutiny;
mod tally;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};

use base::{Limits, Segment, Span};
use host::environment::ProcessorTime;
use host::{Clock, Cores, Environment};
use reactor::{ReactorOptions, Reactors, Registration, ThreadPlan};

use super::environment::RunEnvironment;
use super::options::{PerfOptions, RAM_TIME};
use super::outcome::{CeilingOutcome, Ended, PerfOutcome, RamOutcome};
use super::progress::{Phase, Progress};
use super::workload::{BlockRange, Workload};
use crate::emu::{EmuPlan, Emulated};
use crate::{EmuMedium, EmuSpec, Refused, Uri};
use balance::Balance;
pub use by_hand::ByHand;
use lane::{Lane, LaneParts};
use places::Places;
use scrutiny::{Place, Scrutiny, Stamped, Unlooked};
use tally::Tally;
use worker::{LaneOf, Plan, RateShare, Share, Worker, WorkerParts};

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
    let before = ProcessorTime::read();
    let mut rig = Rig::bring_up(options, &places, clock)?;
    let tally = rig.load(options, &places, progress, watch)?;
    let memory_backing = rig.ssds.memory_backing();
    rig.ssds.shut_down(&clock);

    let mut environment = RunEnvironment::of(machine);
    environment.stolen = ProcessorTime::read().stolen_since(before);
    environment.tsc_hz = clock.tsc_hz();
    environment.memory_backing = memory_backing;
    let mut outcome = tally.into_outcome(options, &places, &clock, environment);
    if outcome.ended != Ended::Interrupt {
        outcome.ceiling = ceiling(options, &places, clock, progress, watch)?;
    }
    if outcome.ended != Ended::Interrupt && !progress.is_stopping() {
        outcome.ram = over_ram(options, &places, clock, progress, watch)?;
    }
    Ok(outcome)
}

/// The SSDs of a run.
struct Rig {
    ssds: Emulated,
    clock: Clock,
}

impl Rig {
    fn bring_up(options: &PerfOptions, places: &Places, clock: Clock) -> Result<Self, Refused> {
        let threads = u16::try_from(options.thread_count()).unwrap_or(u16::MAX);
        let plan = EmuPlan {
            uris: &options.uris,
            queue_pairs: options.queue_pairs.saturating_mul(threads),
            depth: depth_of_a_pair(options, 0),
            buffer_bytes: options.buffer_bytes() / u64::from(options.device_count().max(1)),
            techniques: &options.techniques,
            device_cores: &places.device,
            gives_way: places.gives_way,
            interrupts: true,
            seed: options.seed,
        };
        Ok(Self { ssds: Emulated::start(&plan, &clock)?, clock })
    }

    /// Loads the SSDs as `options` say.
    fn load(
        &mut self,
        options: &PerfOptions,
        places: &Places,
        progress: &Arc<Progress>,
        watch: Watch<'_>,
    ) -> Result<Tally, Refused> {
        if options.verify {
            self.load_with(options, places, progress, watch, |rig, place, depth| {
                Stamped::new(place, depth, options.seed, rig.ssds.regions().clone())
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
                clock: self.clock,
                plan: Plan::new(options, places),
                index,
                progress: Arc::clone(progress),
                tell: tell.clone(),
            });
            let woken_by = worker.woken_by();
            let woken_by = woken_by.map_err(|error| Refused::machine(format!("wait: {error}")))?;
            workers.push(Registration::active("load", woken_by, worker));
        }
        drop(tell);
        let cores: Cores = places.submit.iter().flatten().copied().collect();
        let reactors = self.reactors(options, &cores)?;
        let balance = Balance::start(options, reactors.directory(), &cores, progress)?;
        let directory = Arc::clone(reactors.directory());
        progress.show_reactors(control::Running { directory, clock: self.clock });
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
        drop(balance);
        let mut tally = Tally::new(self.ssds.descriptions(), sleeps);
        shares.into_iter().for_each(|share| tally.add(share));
        Ok(tally)
    }

    /// A reactor for each submitting thread.
    fn reactors(&self, options: &PerfOptions, cores: &Cores) -> Result<Reactors, Refused> {
        let poll = ReactorOptions { poll: options.poll, ..ReactorOptions::default() };
        Reactors::start(cores, &poll, &self.clock).map_err(refused)
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
                        health = self.ssds.look_after(self.clock.now());
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

    /// The lanes of one thread: its queue pairs, its part of the blocks, its buffers.
    fn lanes<S: Scrutiny>(
        &mut self,
        options: &PerfOptions,
        places: &Places,
        index: usize,
        scrutiny: &impl Fn(&Self, &Place, usize) -> S,
    ) -> Result<(Vec<LaneOf<S>>, Workload), Refused> {
        let threads = places.submit.len() as u64;
        let pairs = options.queue_pairs;
        let mut workload = Workload::new(options, options.seed.wrapping_add(index as u64));
        let mut lanes = Vec::new();
        for device in 0..self.ssds.count() {
            for pair in 0..pairs {
                let depth = depth_of_a_pair(options, pair);
                let techniques = options.techniques;
                let backend = self.ssds.queue(device, depth, &techniques, &self.clock)?;
                let lane = index as u64 * u64::from(pairs) + u64::from(pair);
                let range = range_of(options, backend.limits(), lane, threads * u64::from(pairs));
                let block_size = backend.limits().block_size;
                let buffers = self.buffers(device, depth, options.sizes.largest())?;
                let (first, count) = (range.first, usize::try_from(range.count).unwrap_or(0));
                let number = u32::try_from(device).unwrap_or(u32::MAX);
                let place = Place { device: number, first, count, block_size };
                let part = lane * self.ssds.count() as u64 + device as u64;
                let parts = threads * u64::from(pairs) * self.ssds.count() as u64;
                let seed = options.seed ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                lanes.push(LaneOf {
                    device,
                    rate: options.rate.map(|rate| RateShare { rate, part, parts, seed }),
                    arrivals: None,
                    lane: Lane::new(LaneParts {
                        fixed: workload.fixed(),
                        backend,
                        addresses: workload.lane(range, block_size),
                        scrutiny: scrutiny(self, &place, buffers.len()),
                        buffers,
                        budget: options.io_count.map_or(u64::MAX, |count| {
                            count / u64::from(pairs)
                                + u64::from(u64::from(pair) < count % u64::from(pairs))
                        }),
                        look_at_tasks: options.techniques.prefetch.tasks,
                    }),
                });
            }
        }
        Ok((lanes, workload))
    }

    fn buffers(&self, device: usize, depth: u32, len: u32) -> Result<Vec<Segment>, Refused> {
        let all = (0..depth).map(|_| self.ssds.allocate(device, len)).collect::<Option<Vec<_>>>();
        all.ok_or_else(|| {
            Refused::machine(format!("allocate {depth} buffers of {len} bytes: no memory is left"))
        })
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

/// I/Os in flight on queue pair `pair` of those that share a depth.
fn depth_of_a_pair(options: &PerfOptions, pair: u16) -> u32 {
    let pairs = u32::from(options.queue_pairs);
    options.depth / pairs + u32::from(u32::from(pair) < options.depth % pairs)
}

/// The blocks that a lane addresses: all of them, or a part of its own where lanes would be in each
/// other's way.
fn range_of(options: &PerfOptions, limits: &Limits, lane: u64, lanes: u64) -> BlockRange {
    let all = BlockRange { first: 0, count: limits.block_count };
    let apart = options.verify || !options.pattern.is_random();
    if apart { all.part(lane, lanes) } else { all }
}

/// Measures the bare ring with as many rings as the run had, between the same two threads.
fn ceiling(
    options: &PerfOptions,
    places: &Places,
    clock: Clock,
    progress: &Arc<Progress>,
    watch: Watch<'_>,
) -> Result<Option<CeilingOutcome>, Refused> {
    let Some(time) = options.ceiling else { return Ok(None) };
    progress.enter(Phase::Ceiling);
    watch(progress);
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
    rig.ssds.shut_down(&clock);
    Ok(Some(tally.into_ram_outcome(&options)))
}

/// How much each SSD of the phase over memory holds: together more than the caches do.
const RAM_SIZE_BYTES: u64 = 16 << 20;

/// How often controllers are looked after and the live line is drawn.
const WATCH_INTERVAL: Span = Span::from_ms(100);
