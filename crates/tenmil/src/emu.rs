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
mod medium;
mod shift;
#[cfg(test)]
mod tests;

use base::{Backend, Dma, Durability, Instant, Segment, Span};
use block::Existing;
use ctrl::front::HostBar;
use dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions};
use host::{Bell, Clock, EventVectors};
use nvme::{
    Controller, ControllerOptions, Event, NamespaceQueue, QueuePairOptions, QueueSizes, State,
};

use crate::perf::options::{self, Techniques};
use crate::perf::outcome::{Counts, DeviceOutcome};
use crate::{EmuSpec, Refused};
pub(crate) use ask::with_controller;
pub(crate) use device::EmulatedSsd;
use shift::{DeviceThread, Shift};

/// Some emulated SSDs, brought up.
pub struct Emulated {
    ssds: Vec<Ssd>,
    /// Dropped after the controllers: somebody has to answer them to the end.
    devices: Vec<DeviceThread>,
    regions: Regions,
    memory_backing: String,
    existing: Vec<Existing>,
}

/// What to bring up, and for whom.
pub struct EmuPlan<'a> {
    /// The SSDs, in order; each may stand for several.
    pub specs: &'a [EmuSpec],
    /// I/O queue pairs that each will be asked for.
    pub queue_pairs: u16,
    /// The deepest of them: commands in flight.
    pub depth: u32,
    /// Bytes of data buffers for each SSD.
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
    /// Queue pairs that have been asked for, and so the last vector that has been given away.
    queues: u16,
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
        let (memory, memory_backing) = map(regions, pool_bytes * count as u64, plan.techniques)?;
        let (mut ssds, mut existing) = (Vec::with_capacity(count), Vec::new());
        let shifts: Result<Vec<_>, _> =
            (0..plan.device_cores.len().max(1)).map(|_| Shift::new()).collect();
        let mut shifts = shifts?;
        for (index, (spec, number)) in each_of(plan.specs).enumerate() {
            let pool = pool(regions, memory, index as u64 * pool_bytes, pool_bytes, plan)?;
            let opened = medium::open(spec, number, regions, plan.seed)?;
            existing.extend(opened.existing);
            let durability = opened.medium.limits().durability;
            let name = name_of(spec, number);
            let vectors = vectors(&name, plan)?;
            let device =
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
            shifts[lane].push(device);
            let controller =
                Controller::new(bar, pool.clone(), options).map_err(|error| peer(&name, &error))?;
            ssds.push(Ssd { name, controller, pool, vectors, durability, queues: 0 });
        }
        let start = |(index, shift): (usize, Shift)| {
            let core = plan.device_cores.get(index).copied().flatten();
            shift.start(index, core, plan.gives_way, *clock)
        };
        let devices = shifts.into_iter().enumerate().map(start).collect::<Result<_, _>>()?;
        let regions = regions.clone();
        let mut emulated = Self { ssds, devices, regions, memory_backing, existing };
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
        self.ssds[index].queue(depth, techniques, clock)
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
        self.ssds.clear();
        self.devices.clear();
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
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
    ) -> Result<Box<dyn Backend>, Refused> {
        let vector = self.vectors.vector(self.queues.saturating_add(1));
        self.queues += u16::from(vector.is_some());
        let options = QueuePairOptions {
            depth: ring_entries(depth),
            vector: vector.is_some().then_some(self.queues),
            techniques: driver_techniques(techniques),
        };
        let now = clock.now();
        let id = self
            .controller
            .create_queue_pair(now, options)
            .map_err(|refusal| Refused::peer(format!("{}: {refusal}", self.name)))?;
        let end = now.after(PATIENCE);
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
            Some(vector) => Box::new(queue.with_vector(Box::new(vector))),
            None => Box::new(queue),
        })
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

/// Maps the memory of all pools at once; says what it is made of.
fn map(
    regions: &Regions,
    bytes: u64,
    techniques: &Techniques,
) -> Result<(Segment, String), Refused> {
    let refuse = |error: &dyn std::fmt::Display| Refused::machine(format!("{error}"));
    let len = usize::try_from(bytes).map_err(|error| refuse(&error))?;
    let mapping = if techniques.huge_pages {
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
    let backing = backing.to_owned();
    let memory = regions.add(mapping).map_err(|error| refuse(&error))?;
    Ok((memory, backing))
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
