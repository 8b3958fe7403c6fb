//! Emulated SSDs: controllers in this process, on threads of their own.
//!
//! ```text
//!   this side                                     the device's threads
//!   nvme::Controller ── HostBar ─────┐       ┌─ MemoryFrontEnd ── Medium
//!   NamespaceQueue ── rings, doorbells ──────┘     (turned while there is work)
//!                          └── a pool of pages, which both sides reach
//! ```
//!
//! The driver cannot tell one from a device: the same registers, rings and bring-up. All SSDs of a
//! run share one stretch of memory, cut into a pool for each, packed closely: pools that begin at
//! the same offset of a huge page would put all rings into the same sets of the cache.

mod ask;
mod device;
mod fleet;
mod kind;
mod medium;
mod posted;
mod shift;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use base::{Backend, Dma, Doorbell, Durability, Instant, Mmio, Segment, Span, Vector};
use block::Existing;
use ctrl::front::HostBar;
use dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, Region, Regions};
use host::{Bell, Clock, EventVectors};
use nvme::{
    Controller, ControllerOptions, Event, NamespaceQueue, QueuePair, QueuePairOptions, QueueSizes,
    Refusal, State,
};

use crate::perf::options::{self, Techniques};
use crate::perf::outcome::{Counts, DeviceOutcome};
use crate::{EmuSpec, Refused};
pub(crate) use ask::with_controller;
pub(crate) use device::EmulatedSsd;
pub(crate) use fleet::Fleet;
pub use kind::Kind;
use posted::{Bus, PostedWrite};
use shift::{DeviceThread, Shift};

/// Some emulated SSDs, brought up.
pub struct Emulated {
    ssds: Vec<Ssd>,
    /// They answer the controllers to the end of a shutdown.
    devices: Vec<DeviceThread>,
    regions: Regions,
    memory_backing: String,
    existing: Vec<Existing>,
    /// Kept while anything of the above is there, and by whoever has queue pairs for longer.
    memory: Option<Arc<Region>>,
}

/// What to bring up, and for whom.
pub struct EmuPlan<'a> {
    /// The SSDs, in order; each may stand for several.
    pub specs: &'a [EmuSpec],
    /// I/O queue pairs that each will be asked for.
    pub queue_pairs: u16,
    /// The deepest of them: commands in flight.
    pub depth: u32,
    /// Bytes of data buffers for each SSD. Where there are some, all memory is at hand from the
    /// start; without, it is when queue pairs are made.
    pub buffer_bytes: u64,
    /// What is switched on and off on the fast path.
    pub techniques: &'a Techniques,
    /// Where the device's threads run: one for each.
    pub device_cores: &'a [Option<u32>],
    /// Whether the two sides share a processor.
    pub gives_way: bool,
    /// Whether threads may sleep on the queue pairs: each then takes a descriptor, and costs the
    /// device a load per batch.
    pub interrupts: bool,
    /// Whether every block of an SSD in memory is written before it is there, so that a read of it
    /// moves bytes.
    pub fills: bool,
    /// What random numbers of models are made from.
    pub seed: u64,
}

/// One SSD, from the host's side.
struct Ssd {
    name: String,
    controller: Controller<HostBar<Bell>, DevicePool>,
    pool: DevicePool,
    /// The vectors of its queue pairs, if they are to be slept on.
    vectors: EventVectors,
    /// What the medium behind it promises; a controller has no word for memory.
    durability: Durability,
    /// Vectors that no queue pair has, the next one to be given away last.
    vectors_free: Vec<u16>,
    /// What doorbells lie behind, if that is modelled.
    bus: Option<Bus>,
}

/// A doorbell register of an emulated SSD.
type Register = <HostBar<Bell> as Mmio>::Doorbell;

/// A queue pair of an emulated SSD, as a block device. Each kind is a type of its own, so that an
/// ordinary doorbell is not asked whether it is one.
pub(crate) enum SsdQueue {
    Direct(NamespaceQueue<DevicePool, Register>),
    Posted(NamespaceQueue<DevicePool, PostedWrite<Register>>),
}

/// The one namespace that an emulated SSD has.
const NSID: u32 = 1;

/// Entries in the admin queue.
const ADMIN_DEPTH: u32 = 64;

/// How long a queue pair, or a shutdown, is waited for.
const PATIENCE: Span = Span::from_secs(10);

const PAGE: u64 = 4096;

impl Emulated {
    /// Starts the SSDs and brings them all up at once, with a table of regions of their own.
    pub fn start(plan: &EmuPlan<'_>, clock: &Clock) -> Result<Self, Refused> {
        let regions = Regions::new(1 + plan.count() * medium::REGIONS_MAX);
        Self::start_in(&regions, plan, clock)
    }

    /// The same, with memory that is entered in `regions`.
    pub fn start_in(regions: &Regions, plan: &EmuPlan<'_>, clock: &Clock) -> Result<Self, Refused> {
        let count = plan.count();
        let pool_bytes = plan.pool_bytes()?;
        let Memory { whole: memory, backing: memory_backing, region } =
            Memory::of(regions, pool_bytes * count as u64, plan)?;
        let (mut ssds, mut existing) = (Vec::with_capacity(count), Vec::new());
        let shifts: Result<Vec<_>, _> =
            (0..plan.device_cores.len().max(1)).map(|_| Shift::new()).collect();
        let mut shifts = shifts?;
        for (index, (spec, number)) in each_of(plan.specs).enumerate() {
            let pool = pool(regions, memory, index as u64 * pool_bytes, pool_bytes, plan)?;
            let opened = medium::open(spec, number, regions, plan)?;
            existing.extend(opened.existing);
            let durability = opened.medium.limits().durability;
            let name = name_of(spec, number);
            let vectors = vectors(&name, plan)?;
            let vectors_free = (1..=plan.queue_pairs).rev().take_while(|_| plan.interrupts);
            let vectors_free = vectors_free.collect();
            let mut device =
                EmulatedSsd::new(spec, index, opened.medium, &pool, vectors.clone(), clock.now())
                    .map_err(|error| Refused::machine(format!("{name}: {error}")))?;
            let options = ControllerOptions {
                admin_depth: ADMIN_DEPTH,
                queue_pairs: plan.queue_pairs,
                shadow_doorbells: plan.techniques.shadow_doorbells,
                ..ControllerOptions::default()
            };
            let lane = index % shifts.len();
            let bar = device.host_bar(shifts[lane].bell());
            device.attach(&pool, shifts[lane].bell());
            shifts[lane].push(device);
            let controller =
                Controller::new(bar, pool.clone(), options).map_err(|error| peer(&name, &error))?;
            let cost = Span { ns: spec.doorbell_ns.into() };
            let bus = (spec.doorbell_ns > 0).then(|| Bus::of(cost, clock));
            ssds.push(Ssd { name, controller, pool, vectors, durability, vectors_free, bus });
        }
        let start = |(index, shift): (usize, Shift)| {
            let core = plan.device_cores.get(index).copied().flatten();
            shift.start(index, core, plan.gives_way, *clock)
        };
        let devices = shifts.into_iter().enumerate().map(start).collect::<Result<_, _>>()?;
        let regions = regions.clone();
        let memory = region;
        let mut emulated = Self { ssds, devices, regions, memory_backing, existing, memory };
        emulated.await_ready(clock)?;
        Ok(emulated)
    }

    /// Polls all controllers until each is ready, or one is not going to be. Every wait in a
    /// controller is bounded, so this is.
    fn await_ready(&mut self, clock: &Clock) -> Result<(), Refused> {
        let mut waiting: Vec<usize> = (0..self.ssds.len()).collect();
        while !waiting.is_empty() {
            let mut failed = None;
            waiting.retain(|index| {
                let ssd = &mut self.ssds[*index];
                match ssd.heed(clock.now()) {
                    Ok(()) => ssd.controller.state() != State::Ready,
                    Err(refused) => {
                        failed = Some(refused);
                        false
                    }
                }
            });
            if let Some(refused) = failed {
                return Err(refused);
            }
            host::thread::give_way();
        }
        Ok(())
    }

    /// How many SSDs there are.
    pub fn count(&self) -> usize {
        self.ssds.len()
    }

    /// The table that resolves every segment of the run.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// What rings and buffers are made of, in words.
    pub fn memory_backing(&self) -> String {
        self.memory_backing.clone()
    }

    /// What lies on them that this run did not create.
    pub fn existing(&self) -> &[Existing] {
        &self.existing
    }

    /// A buffer that SSD `index` can reach.
    pub fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        self.ssds[index].pool.allocate(len_bytes)
    }

    /// The SSDs, before anything has happened to them.
    pub fn descriptions(&self) -> Vec<DeviceOutcome> {
        self.ssds.iter().map(Ssd::describe).collect()
    }

    /// The controller of SSD `index`.
    pub fn controller(&mut self, index: usize) -> &mut Controller<HostBar<Bell>, DevicePool> {
        &mut self.ssds[index].controller
    }

    /// A queue pair of SSD `index` with `depth` commands in flight, as a block device.
    pub fn queue(
        &mut self,
        index: usize,
        depth: u32,
        techniques: &Techniques,
        clock: &Clock,
    ) -> Result<Box<dyn Backend>, Refused> {
        let (queue, _) = self.ssds[index].queue(depth, techniques, clock)?;
        Ok(match queue {
            SsdQueue::Direct(queue) => Box::new(queue),
            SsdQueue::Posted(queue) => Box::new(queue),
        })
    }

    /// The same as what it is, with the number of its vector, if it has one: to be
    /// [given back](Self::release_vector) once the queue pair is gone.
    pub(crate) fn ssd_queue(
        &mut self,
        index: usize,
        depth: u32,
        techniques: &Techniques,
        clock: &Clock,
    ) -> Result<(SsdQueue, Option<u16>), Refused> {
        self.ssds[index].queue(depth, techniques, clock)
    }

    /// Takes the vector of a queue pair of SSD `index` back.
    pub(crate) fn release_vector(&mut self, index: usize, vector: u16) {
        self.ssds[index].vectors_free.push(vector);
    }

    /// The vectors of every SSD.
    pub(crate) fn vectors(&self) -> Vec<EventVectors> {
        self.ssds.iter().map(|ssd| ssd.vectors.clone()).collect()
    }

    /// The memory of their rings and lists, where it goes when nobody keeps it.
    pub(crate) fn memory(&self) -> Option<Arc<Region>> {
        self.memory.clone()
    }

    /// Lets the host name any region of the table in requests to any of the SSDs.
    pub(crate) fn map_on_use(&self) {
        self.ssds.iter().for_each(|ssd| ssd.pool.map_on_use());
    }

    /// Lets the controllers look after themselves. Fails once one of them is dead or gone.
    pub fn look_after(&mut self, now: Instant) -> Result<(), Refused> {
        self.ssds.iter_mut().try_for_each(|ssd| ssd.heed(now))
    }

    /// When a controller wants to be looked after next.
    pub fn wake_at(&self) -> Instant {
        let wakes = self.ssds.iter().map(|ssd| ssd.controller.wake_at());
        wakes.min().unwrap_or(Instant::NEVER)
    }

    /// Shuts the controllers down in order and stops the device's threads.
    pub fn shut_down(mut self, clock: &Clock) {
        let now = clock.now();
        for ssd in &mut self.ssds {
            // One that cannot be shut down is dropped, and thereby cut off.
            let _ = ssd.controller.shut_down(now, nvme::ShutdownNotification::Normal);
        }
        let end = now.after(PATIENCE);
        while clock.now() < end
            && self.ssds.iter().any(|ssd| ssd.controller.state() == State::ShuttingDown)
        {
            let now = clock.now();
            self.ssds.iter_mut().for_each(|ssd| while ssd.controller.poll(now).is_some() {});
            host::thread::give_way();
        }
    }
}

impl Drop for Emulated {
    /// The threads end first. Then the SSDs touch nothing, so their controllers are cut off at once
    /// and every queue pair is told.
    fn drop(&mut self) {
        self.devices.clear();
        self.ssds.clear();
    }
}

impl EmuPlan<'_> {
    /// How many SSDs there will be.
    fn count(&self) -> usize {
        self.specs.iter().map(|spec| spec.count as usize).sum()
    }

    /// Memory for one SSD: its queues and their lists, its buffers, and some pages for the rest.
    fn pool_bytes(&self) -> Result<u64, Refused> {
        let entries = u64::from(ring_entries(self.depth));
        let queues = u64::from(self.queue_pairs);
        let lists = entries * PAGE;
        let rings = entries * (64 + 16) + 2 * PAGE;
        let buffers = self.buffer_bytes.next_multiple_of(PAGE) + u64::from(self.depth) * PAGE;
        let bytes = 64 * PAGE + device::DEVICE_BYTES + queues * (lists + rings) + buffers;
        if bytes > u64::from(u32::MAX) {
            return Err(Refused::caller(format!(
                "{bytes} bytes of queues and buffers for one SSD, expected less than 4 GiB: lower \
                 -q or -o"
            )));
        }
        Ok(bytes.next_multiple_of(PAGE))
    }
}

impl Ssd {
    /// Polls the controller and deals with what it has to say.
    fn heed(&mut self, now: Instant) -> Result<(), Refused> {
        while let Some(event) = self.controller.poll(now) {
            match event {
                Event::Dead(error) => return Err(peer(&self.name, &error)),
                Event::Removed => {
                    return Err(Refused::peer(format!("{}: the controller is gone", self.name)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn queue(
        &mut self,
        depth: u32,
        techniques: &Techniques,
        clock: &Clock,
    ) -> Result<(SsdQueue, Option<u16>), Refused> {
        let number = self.vectors_free.pop();
        let vector = number.and_then(|number| self.vectors.vector(number));
        let options = QueuePairOptions {
            depth: ring_entries(depth),
            vector: number,
            techniques: driver_techniques(techniques),
        };
        let end = clock.now().after(PATIENCE);
        let id = self.create(options, clock, end)?;
        let pair = loop {
            self.heed(clock.now())?;
            if let Some(pair) = self.controller.take_queue_pair(id) {
                break pair;
            }
            if clock.now() >= end {
                return Err(Refused::peer(format!(
                    "{}: queue pair {id} was not created within {PATIENCE}",
                    self.name
                )));
            }
            host::thread::give_way();
        };
        let queue = match self.bus {
            None => SsdQueue::Direct(self.serve(pair, vector)?),
            Some(bus) => {
                let pair = pair.map_registers(|register| bus.before(register));
                SsdQueue::Posted(self.serve(pair, vector)?)
            }
        };
        Ok((queue, number))
    }

    /// The SSD's namespace behind a queue pair.
    fn serve<B: Doorbell>(
        &self,
        pair: QueuePair<DevicePool, B>,
        vector: Option<impl Vector + 'static>,
    ) -> Result<NamespaceQueue<DevicePool, B>, Refused> {
        let limits = self.controller.identity().map(|identity| identity.limits);
        let view = self.controller.namespace(NSID).zip(limits);
        let Some((namespace, limits)) = view else {
            return Err(Refused::peer(format!("{}: namespace {NSID} is not there", self.name)));
        };
        let view = namespace.view(&limits);
        let queue = NamespaceQueue::new(&self.pool, pair, view, QueueSizes::default());
        let queue = queue.ok_or_else(|| {
            Refused::machine(format!("{}: no memory is left for its lists", self.name))
        })?;
        Ok(match vector {
            Some(vector) => queue.with_vector(Box::new(vector)),
            None => queue,
        })
    }

    /// Asks for a queue pair; one whose deletion is under way makes room until `end`.
    fn create(
        &mut self,
        options: QueuePairOptions,
        clock: &Clock,
        end: Instant,
    ) -> Result<u16, Refused> {
        loop {
            let now = clock.now();
            match self.controller.create_queue_pair(now, options) {
                Ok(id) => return Ok(id),
                Err(Refusal::NoQueueLeft { .. }) if now < end => {
                    self.heed(now)?;
                    host::thread::give_way();
                }
                Err(refusal) => return Err(Refused::peer(format!("{}: {refusal}", self.name))),
            }
        }
    }

    fn describe(&self) -> DeviceOutcome {
        let namespace = self.controller.namespace(NSID);
        let size = |blocks: u64, block_size: u32| blocks.saturating_mul(u64::from(block_size));
        DeviceOutcome {
            name: self.name.clone(),
            model: self.controller.identity().map_or_else(String::new, |id| id.model.clone()),
            durability: self.durability,
            size_bytes: namespace.map_or(0, |known| size(known.block_count, known.block_size)),
            block_size: namespace.map_or(0, |known| known.block_size),
            counts: Counts::default(),
            latency: base::Histogram::new(),
        }
    }
}

/// How commands are stored into the rings of emulated SSDs, with `auto` resolved.
pub fn command_store(techniques: &Techniques) -> CommandStore {
    techniques.command_store.unwrap_or(CommandStore::for_device(DeviceKind::Emulated))
}

/// The driver's names for what was switched.
pub(crate) fn driver_techniques(techniques: &Techniques) -> nvme::Techniques {
    use options::{CompletionCopy, CompletionDoorbell};
    nvme::Techniques {
        doorbell_batching: techniques.doorbell_batching,
        completion_doorbell: match techniques.completion_doorbell {
            CompletionDoorbell::Each => nvme::CompletionDoorbell::Each,
            CompletionDoorbell::Poll => nvme::CompletionDoorbell::Poll,
            CompletionDoorbell::Deferred => nvme::CompletionDoorbell::Deferred,
        },
        completion_copy: match techniques.completion_copy {
            CompletionCopy::Line => nvme::CompletionCopy::Line,
            CompletionCopy::One => nvme::CompletionCopy::Each,
        },
        slot_lookahead: techniques.prefetch.slots,
        submission_prefetch: if techniques.prefetch.ring { RING_AHEAD } else { 0 },
        completion_prefetch: techniques.prefetch.ring,
    }
}

/// How many entries ahead the submission ring is asked for.
const RING_AHEAD: u32 = 8;

/// Entries of a ring for `depth` commands in flight: one is never used, and a power of two is what
/// devices like best.
fn ring_entries(depth: u32) -> u32 {
    (depth + 1).next_power_of_two().max(4)
}

/// The memory of all pools.
struct Memory {
    whole: Segment,
    /// What it is made of, in words.
    backing: String,
    /// What gives it back, where it is not there for as long as the table is.
    region: Option<Arc<Region>>,
}

impl Memory {
    fn of(regions: &Regions, bytes: u64, plan: &EmuPlan<'_>) -> Result<Self, Refused> {
        let refuse = |error: &dyn std::fmt::Display| Refused::machine(format!("{error}"));
        let len = usize::try_from(bytes).map_err(|error| refuse(&error))?;
        if plan.buffer_bytes == 0 {
            let region = regions.allocate(len).map_err(|error| refuse(&error))?;
            let (whole, backing) = (region.segment(), String::new());
            return Ok(Self { whole, backing, region: Some(Arc::new(region)) });
        }
        let mapping = if plan.techniques.huge_pages {
            // Explicit huge pages where somebody has reserved enough of them.
            Mapping::new(len, Backing::SharedHuge).or_else(|_| Mapping::new(len, Backing::Private))
        } else {
            Mapping::with_small_pages(len)
        };
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let backing = match mapping.backing() {
            Backing::SharedHuge => "2 MiB pages",
            _ if mapping.transparent_huge_pages() => {
                "transparent huge pages, where the kernel gives them"
            }
            _ => "4 KiB pages",
        };
        let whole = regions.add(mapping).map_err(|error| refuse(&error))?;
        Ok(Self { whole, backing: backing.into(), region: None })
    }
}

/// The vectors of one SSD: that of the admin queue, which is polled, and one for each queue pair.
fn vectors(name: &str, plan: &EmuPlan<'_>) -> Result<EventVectors, Refused> {
    let count = if plan.interrupts { plan.queue_pairs.saturating_add(1) } else { 0 };
    EventVectors::new(count)
        .map_err(|error| Refused::machine(format!("{name}: make {count} vectors: {error}")))
}

/// The pool of one SSD, at its place in the memory of all.
fn pool(
    regions: &Regions,
    memory: Segment,
    offset: u64,
    bytes: u64,
    plan: &EmuPlan<'_>,
) -> Result<DevicePool, Refused> {
    let store = command_store(plan.techniques)
        .checked()
        .map_err(|missing| Refused::caller(format!("--command-store: {missing}")))?;
    let len_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    let part = Segment { region: memory.region, offset, len_bytes };
    Ok(DevicePool::new(regions.clone(), part, DeviceKind::Emulated, store))
}

/// Every SSD that `specs` name, with its number within its name.
fn each_of(specs: &[EmuSpec]) -> impl Iterator<Item = (&EmuSpec, u32)> {
    specs.iter().flat_map(|spec| (0..spec.count).map(move |number| (spec, number)))
}

/// The URI, with a number if it names several.
fn name_of(spec: &EmuSpec, number: u32) -> String {
    if spec.count == 1 { spec.to_string() } else { format!("{spec}#{number}") }
}

fn peer(name: &str, error: &nvme::ControllerError) -> Refused {
    Refused::of(error.blame(), format!("{name}: {error}"))
}
