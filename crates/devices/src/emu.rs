//! Emulated SSDs: NVMe controllers in this process, on device threads of their own.
//!
//! ```text
//!   host side                                     device threads
//!   tenmil_nvme_host::Controller ── HostBar ─────┐       ┌─ MemoryFrontEnd ── block device
//!   NamespaceQueue ── rings, doorbells ──────┘     (polled while there is work)
//!                          └── a pool of pages that both sides access
//! ```
//!
//! The driver runs the same code as for a real SSD: registers, rings and initialization. All SSDs
//! of a run share one mapping that is divided into adjacent pools, one for each. Pools that started
//! at the same offset of a huge page would place all rings in the same cache sets.

mod device;
mod device_set;
mod device_thread;
mod identify;
mod kind;
mod medium;
mod posted_write;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tenmil_base::{
    Dma, Doorbell, Durability, Instant, InterruptVector, IoChannel, Mmio, Segment, Span,
};
use tenmil_block::ExistingData;
use tenmil_dma::{
    CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, Region, RegionTable,
};
use tenmil_linux::{Clock, EventFdVectors, Notifier};
use tenmil_nvme_controller::transport::HostBarHandle;
use tenmil_nvme_host::{
    Controller, ControllerOptions, ControllerState, Event, NamespaceQueue, QueuePair,
    QueuePairOptions, QueueSizes, RequestError, RingTransport,
};

use crate::EmuSpec;
use crate::fast_path_switches::{self, FastPathSwitches};
pub use device::EmulatedSsd;
pub use device_set::EmulatedDevices;
use device_thread::{DeviceThread, DeviceThreadBuilder};
pub use identify::with_controller;
pub use kind::EmulatedSsdKind;
use posted_write::{DoorbellWithPostedCost, PostedWriteCost};
use tenmil_base::Error;

/// A set of emulated SSDs with initialized controllers.
pub struct EmulatedSsds {
    ssds: Vec<EmulatedSsdHost>,
    /// Stopped after the controllers have shut down.
    devices: Vec<DeviceThread>,
    regions: RegionTable,
    memory_backing: String,
    existing: Vec<ExistingData>,
    /// Memory of rings and lists. Shared with channels, whose queue pairs may outlive the SSDs.
    memory: Option<Arc<Region>>,
}

/// Configuration of a set of emulated SSDs.
pub struct EmuPlan<'a> {
    /// SSDs, in order. Each entry may describe several.
    pub specs: &'a [EmuSpec],
    /// I/O queue pairs requested from each controller.
    pub queue_pairs: u16,
    /// Depth of the deepest queue pair: commands in flight.
    pub depth: u32,
    /// Bytes of data buffers for each SSD. If not zero, all memory is backed in advance; if zero,
    /// memory is backed when queue pairs are created.
    pub buffer_bytes: u64,
    /// Driver options.
    pub techniques: &'a FastPathSwitches,
    /// CPUs of the device threads, one entry for each thread.
    pub device_cores: &'a [Option<u32>],
    /// Whether host and device share a CPU, so that the device thread must yield.
    pub yields: bool,
    /// Whether threads may sleep on the queue pairs. Each queue pair then uses a descriptor and
    /// costs the device one load per batch.
    pub interrupts: bool,
    /// Whether every block of a RAM device is written at the start, so that reads transfer data.
    pub fills: bool,
    /// Seed of the random numbers of device models.
    pub seed: u64,
}

/// Host side of one emulated SSD.
struct EmulatedSsdHost {
    name: String,
    controller: Controller<HostBarHandle<Notifier>, DevicePool>,
    pool: DevicePool,
    /// Interrupt vectors of its queue pairs, if interrupts are enabled.
    vectors: EventFdVectors,
    /// Durability of the block device behind it. NVMe has no field for volatile memory.
    durability: Durability,
    /// Unused interrupt vectors; the last one is used next.
    vectors_free: Vec<u16>,
    /// Cost of a doorbell write, if it is modeled.
    bus: Option<PostedWriteCost>,
}

/// A doorbell register of an emulated SSD.
type EmulatedDoorbell = <HostBarHandle<Notifier> as Mmio>::Doorbell;

/// Queue pair of an emulated SSD as an I/O channel. The variants have different types, so that a
/// plain doorbell pays no test for the model.
pub enum SsdQueue {
    /// Plain doorbell.
    Direct(NamespaceQueue<RingTransport<DevicePool, EmulatedDoorbell>>),
    /// A doorbell whose writes cost what posted writes on the bus do.
    WithPostedDoorbell(
        NamespaceQueue<RingTransport<DevicePool, DoorbellWithPostedCost<EmulatedDoorbell>>>,
    ),
}

/// Identifier of the only namespace of an emulated SSD.
const NSID: u32 = 1;

/// Entries of the admin queue.
const ADMIN_DEPTH: u32 = 64;

/// Timeout for the creation of a queue pair, and for a shutdown.
const TIME_LIMIT: Span = Span::from_secs(10);

const PAGE: u64 = 4096;

impl EmulatedSsds {
    /// Starts the SSDs and initializes them concurrently, with a region table of their own.
    pub fn start(plan: &EmuPlan<'_>, clock: &Clock) -> Result<Self, Error> {
        let regions = RegionTable::new(1 + plan.count() * medium::REGIONS_MAX);
        Self::start_in(&regions, plan, clock)
    }

    /// Like [`start`](Self::start), with memory registered in `regions`.
    pub fn start_in(
        regions: &RegionTable,
        plan: &EmuPlan<'_>,
        clock: &Clock,
    ) -> Result<Self, Error> {
        let count = plan.count();
        let pool_bytes = plan.pool_bytes()?;
        let EmulatedPoolMemory { whole: memory, backing: memory_backing, region } =
            EmulatedPoolMemory::allocate_pools(regions, pool_bytes * count as u64, plan)?;
        let (mut ssds, mut existing) = (Vec::with_capacity(count), Vec::new());
        let shifts: Result<Vec<_>, _> =
            (0..plan.device_cores.len().max(1)).map(|_| DeviceThreadBuilder::new()).collect();
        let mut shifts = shifts?;
        for (index, (spec, number)) in expand_specs(plan.specs).enumerate() {
            let pool = create_pool_at_offset(
                regions,
                memory,
                index as u64 * pool_bytes,
                pool_bytes,
                plan,
            )?;
            let opened = medium::open(spec, number, regions, plan)?;
            existing.extend(opened.existing);
            let durability = opened.medium.limits().durability;
            let name = name_of(spec, number);
            let vectors = vectors(&name, plan)?;
            let vectors_free = (1..=plan.queue_pairs).rev().take_while(|_| plan.interrupts);
            let vectors_free = vectors_free.collect();
            let mut device =
                EmulatedSsd::new(spec, index, opened.medium, &pool, vectors.clone(), clock.now())
                    .map_err(|error| Error::environment(format!("{name}: {error}")))?;
            let options = ControllerOptions {
                admin_depth: ADMIN_DEPTH,
                queue_pairs: plan.queue_pairs,
                shadow_doorbells: plan.techniques.shadow_doorbells,
                ..ControllerOptions::default()
            };
            // SSDs are distributed over the device threads round-robin.
            let lane = index % shifts.len();
            let bar = device.host_bar(shifts[lane].notifier());
            // The pool must know the device thread: revoking its DMA access waits for that thread.
            device.register_device_thread(&pool, shifts[lane].notifier());
            shifts[lane].push(device);
            let controller = Controller::new(bar, pool.clone(), options)
                .map_err(|error| remote_error(&name, &error))?;
            let cost = Span { ns: spec.doorbell_ns.into() };
            let bus = (spec.doorbell_ns > 0).then(|| PostedWriteCost::calibrate(cost, clock));
            ssds.push(EmulatedSsdHost {
                name,
                controller,
                pool,
                vectors,
                durability,
                vectors_free,
                bus,
            });
        }
        // The threads start after every SSD has been added to one.
        let start = |(index, shift): (usize, DeviceThreadBuilder)| {
            let core = plan.device_cores.get(index).copied().flatten();
            shift.start(index, core, plan.yields, *clock)
        };
        let devices = shifts.into_iter().enumerate().map(start).collect::<Result<_, _>>()?;
        let regions = regions.clone();
        let memory = region;
        let mut emulated = Self { ssds, devices, regions, memory_backing, existing, memory };
        emulated.await_ready(clock)?;
        Ok(emulated)
    }

    /// Polls all controllers until each is ready or one has failed. Every controller state has a
    /// timeout, so this terminates.
    fn await_ready(&mut self, clock: &Clock) -> Result<(), Error> {
        let mut waiting: Vec<usize> = (0..self.ssds.len()).collect();
        while !waiting.is_empty() {
            let mut failed = None;
            waiting.retain(|index| {
                let ssd = &mut self.ssds[*index];
                match ssd.poll_events(clock.now()) {
                    Ok(()) => ssd.controller.state() != ControllerState::Ready,
                    Err(refused) => {
                        failed = Some(refused);
                        false
                    }
                }
            });
            if let Some(refused) = failed {
                return Err(refused);
            }
            tenmil_linux::named_thread::yield_cpu();
        }
        Ok(())
    }

    /// Number of SSDs.
    pub fn count(&self) -> usize {
        self.ssds.len()
    }

    /// Region table of all segments.
    pub fn regions(&self) -> &RegionTable {
        &self.regions
    }

    /// Description of the pages behind rings and buffers.
    pub fn memory_backing(&self) -> String {
        self.memory_backing.clone()
    }

    /// Existing data on the block devices behind the SSDs.
    pub fn existing_data(&self) -> &[ExistingData] {
        &self.existing
    }

    /// Allocates a buffer that SSD `index` can access.
    pub fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        self.ssds[index].pool.allocate(len_bytes)
    }

    /// Descriptions of the SSDs.
    pub fn descriptions(&self) -> Vec<SsdDescription> {
        self.ssds.iter().map(EmulatedSsdHost::describe).collect()
    }

    /// Controller of SSD `index`.
    pub fn controller(
        &mut self,
        index: usize,
    ) -> &mut Controller<HostBarHandle<Notifier>, DevicePool> {
        &mut self.ssds[index].controller
    }

    /// Creates a queue pair of SSD `index` for `depth` commands in flight.
    pub fn create_queue_pair(
        &mut self,
        index: usize,
        depth: u32,
        techniques: &FastPathSwitches,
        clock: &Clock,
    ) -> Result<Box<dyn IoChannel>, Error> {
        let (queue, _) = self.ssds[index].create_queue_pair(depth, techniques, clock)?;
        Ok(match queue {
            SsdQueue::Direct(queue) => Box::new(queue),
            SsdQueue::WithPostedDoorbell(queue) => Box::new(queue),
        })
    }

    /// Like [`create_queue_pair`](Self::create_queue_pair), with the concrete type and the interrupt vector, if it has one.
    /// The vector must be [released](Self::release_vector) after the queue pair has been dropped.
    pub fn ssd_queue(
        &mut self,
        index: usize,
        depth: u32,
        techniques: &FastPathSwitches,
        clock: &Clock,
    ) -> Result<(SsdQueue, Option<u16>), Error> {
        self.ssds[index].create_queue_pair(depth, techniques, clock)
    }

    /// Returns the vector of a dropped queue pair to SSD `index`.
    pub fn release_vector(&mut self, index: usize, vector: u16) {
        self.ssds[index].vectors_free.push(vector);
    }

    /// Interrupt vectors of all SSDs.
    pub fn vectors(&self) -> Vec<EventFdVectors> {
        self.ssds.iter().map(|ssd| ssd.vectors.clone()).collect()
    }

    /// Memory of rings and lists, if it is not held by the region table for ever.
    pub fn memory(&self) -> Option<Arc<Region>> {
        self.memory.clone()
    }

    /// Allows requests to any of the SSDs to refer to any region of the table, which is mapped on
    /// first use.
    pub fn enable_mapping_on_use(&self) {
        self.ssds.iter().for_each(|ssd| ssd.pool.map_on_demand());
    }

    /// Polls all controllers. Fails once one of them is dead or removed.
    pub fn poll_controllers(&mut self, now: Instant) -> Result<(), Error> {
        self.ssds.iter_mut().try_for_each(|ssd| ssd.poll_events(now))
    }

    /// Time at which a controller must be polled next.
    pub fn wake_at(&self) -> Instant {
        let wakes = self.ssds.iter().map(|ssd| ssd.controller.wake_at());
        wakes.min().unwrap_or(Instant::NEVER)
    }

    /// Shuts down the controllers in order and stops the device threads.
    pub fn shut_down(mut self, clock: &Clock) {
        let now = clock.now();
        for ssd in &mut self.ssds {
            // A controller that cannot be shut down is dropped, which revokes its DMA access.
            let _ =
                ssd.controller.start_shutdown(now, tenmil_nvme_host::ShutdownNotification::Normal);
        }
        let end = now.after(TIME_LIMIT);
        while clock.now() < end
            && self.ssds.iter().any(|ssd| ssd.controller.state() == ControllerState::ShuttingDown)
        {
            let now = clock.now();
            self.ssds.iter_mut().for_each(|ssd| while ssd.controller.poll(now).is_some() {});
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}

impl Drop for EmulatedSsds {
    /// The threads stop first. The SSDs then access no memory, so dropping the controllers revokes
    /// their access at once and notifies every queue pair.
    fn drop(&mut self) {
        self.devices.clear();
        self.ssds.clear();
    }
}

impl EmuPlan<'_> {
    /// Number of SSDs.
    fn count(&self) -> usize {
        self.specs.iter().map(|spec| spec.count as usize).sum()
    }

    /// Memory of one SSD: queues and their lists, buffers, and some spare pages.
    fn pool_bytes(&self) -> Result<u64, Error> {
        let entries = u64::from(ring_entries(self.depth));
        let queues = u64::from(self.queue_pairs);
        let lists = entries * PAGE;
        let rings = entries * (64 + 16) + 2 * PAGE;
        let buffers = self.buffer_bytes.next_multiple_of(PAGE) + u64::from(self.depth) * PAGE;
        let bytes = 64 * PAGE + device::DEVICE_BYTES + queues * (lists + rings) + buffers;
        if bytes > u64::from(u32::MAX) {
            return Err(Error::usage(format!(
                "{bytes} bytes of queues and buffers for one SSD, expected less than 4 GiB: lower \
                 -q or -o"
            )));
        }
        Ok(bytes.next_multiple_of(PAGE))
    }
}

impl EmulatedSsdHost {
    /// Polls the controller and handles its events.
    fn poll_events(&mut self, now: Instant) -> Result<(), Error> {
        while let Some(event) = self.controller.poll(now) {
            match event {
                Event::Dead(error) => return Err(remote_error(&self.name, &error)),
                Event::Removed => {
                    return Err(Error::remote(format!(
                        "{}: the controller was removed",
                        self.name
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn create_queue_pair(
        &mut self,
        depth: u32,
        techniques: &FastPathSwitches,
        clock: &Clock,
    ) -> Result<(SsdQueue, Option<u16>), Error> {
        let number = self.vectors_free.pop();
        let vector = number.and_then(|number| self.vectors.vector(number));
        let options = QueuePairOptions {
            depth: ring_entries(depth),
            vector: number,
            techniques: to_driver_options(techniques),
        };
        let end = clock.now().after(TIME_LIMIT);
        let id = self.request_queue_pair_and_wait(options, clock, end)?;
        let pair = loop {
            self.poll_events(clock.now())?;
            if let Some(pair) = self.controller.take_queue_pair(id) {
                break pair;
            }
            if clock.now() >= end {
                return Err(Error::remote(format!(
                    "{}: queue pair {id} was not created within {TIME_LIMIT}",
                    self.name
                )));
            }
            tenmil_linux::named_thread::yield_cpu();
        };
        if let Some(number) = number {
            // No interrupt announces a state change of the queue.
            let vectors = self.vectors.clone();
            pair.set_waker(Arc::new(move || vectors.signal(number)));
        }
        let queue = match self.bus {
            None => SsdQueue::Direct(self.bind_namespace(pair, vector)?),
            Some(bus) => {
                let pair = pair.map_registers(|register| bus.wrap_doorbell(register));
                SsdQueue::WithPostedDoorbell(self.bind_namespace(pair, vector)?)
            }
        };
        Ok((queue, number))
    }

    /// Binds a queue pair to the namespace.
    fn bind_namespace<B: Doorbell>(
        &self,
        pair: QueuePair<RingTransport<DevicePool, B>>,
        vector: Option<impl InterruptVector + 'static>,
    ) -> Result<NamespaceQueue<RingTransport<DevicePool, B>>, Error> {
        let limits = self.controller.identity().map(|identity| identity.limits);
        let view = self.controller.namespace(NSID).zip(limits);
        let Some((namespace, limits)) = view else {
            return Err(Error::remote(format!("{}: namespace {NSID} is not there", self.name)));
        };
        let view = namespace.view(&limits);
        let queue = NamespaceQueue::new(pair, view, QueueSizes::default());
        let queue = queue.ok_or_else(|| {
            Error::environment(format!("{}: no memory is left for its lists", self.name))
        })?;
        Ok(match vector {
            Some(vector) => queue.with_vector(Box::new(vector)),
            None => queue,
        })
    }

    /// Requests a queue pair. Retries until `end` while another one is being deleted.
    fn request_queue_pair_and_wait(
        &mut self,
        options: QueuePairOptions,
        clock: &Clock,
        end: Instant,
    ) -> Result<u16, Error> {
        loop {
            let now = clock.now();
            match self.controller.create_queue_pair(now, options) {
                Ok(id) => return Ok(id),
                Err(RequestError::QueueLimit { .. }) if now < end => {
                    self.poll_events(now)?;
                    tenmil_linux::named_thread::yield_cpu();
                }
                Err(refusal) => {
                    return Err(Error::remote(format!("{}: {refusal}", self.name)));
                }
            }
        }
    }

    fn describe(&self) -> SsdDescription {
        let namespace = self.controller.namespace(NSID);
        let size = |blocks: u64, block_size: u32| blocks.saturating_mul(u64::from(block_size));
        SsdDescription {
            name: self.name.clone(),
            model: self.controller.identity().map_or_else(String::new, |id| id.model.clone()),
            durability: self.durability,
            size_bytes: namespace.map_or(0, |known| size(known.block_count, known.block_size)),
            block_size: namespace.map_or(0, |known| known.block_size),
        }
    }
}

/// Model and geometry of an emulated SSD.
#[derive(Clone, Debug)]
pub struct SsdDescription {
    /// URI, with a number if it describes several devices.
    pub name: String,
    /// Model number of the controller.
    pub model: String,
    /// Durability of a completed write.
    pub durability: Durability,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
}

/// Command store of the rings of emulated SSDs, with `auto` resolved.
pub fn command_store(techniques: &FastPathSwitches) -> CommandStore {
    techniques.command_store.unwrap_or(CommandStore::for_device(DeviceKind::Emulated))
}

/// Converts the options of `perf` to those of the driver.
pub fn to_driver_options(techniques: &FastPathSwitches) -> tenmil_nvme_host::FastPathOptions {
    use fast_path_switches::CompletionDoorbell;
    tenmil_nvme_host::FastPathOptions {
        doorbell_batching: techniques.doorbell_batching,
        completion_doorbell: match techniques.completion_doorbell {
            CompletionDoorbell::Each => tenmil_nvme_host::CompletionDoorbell::Each,
            CompletionDoorbell::Poll => tenmil_nvme_host::CompletionDoorbell::Poll,
            CompletionDoorbell::Deferred => tenmil_nvme_host::CompletionDoorbell::Deferred,
        },
    }
}

/// Ring size for `depth` commands in flight: one entry is always empty, and the size is a power of
/// two.
fn ring_entries(depth: u32) -> u32 {
    (depth + 1).next_power_of_two().max(4)
}

/// Memory of all pools.
struct EmulatedPoolMemory {
    whole: Segment,
    /// Description of its pages.
    backing: String,
    /// Owner of the memory, unless the region table holds it for ever.
    region: Option<Arc<Region>>,
}

impl EmulatedPoolMemory {
    fn allocate_pools(
        regions: &RegionTable,
        bytes: u64,
        plan: &EmuPlan<'_>,
    ) -> Result<Self, Error> {
        let refuse = |error: &dyn std::fmt::Display| Error::environment(format!("{error}"));
        let len = usize::try_from(bytes).map_err(|error| refuse(&error))?;
        if plan.buffer_bytes == 0 {
            let region = regions.allocate_region(len).map_err(|error| refuse(&error))?;
            let (whole, backing) = (region.segment(), String::new());
            return Ok(Self { whole, backing, region: Some(Arc::new(region)) });
        }
        let mapping = if plan.techniques.huge_pages {
            // Explicit huge pages need a reservation (`vm.nr_hugepages`); otherwise fall back to
            // normal pages.
            MemoryMapping::new(len, MemoryBacking::SharedHuge)
                .or_else(|_| MemoryMapping::new(len, MemoryBacking::Private))
        } else {
            MemoryMapping::with_small_pages(len)
        };
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let backing = match mapping.backing() {
            MemoryBacking::SharedHuge => "2 MiB pages",
            _ if mapping.has_transparent_huge_pages() => {
                "transparent huge pages, where the kernel gives them"
            }
            _ => "4 KiB pages",
        };
        let whole = regions.add_mapping(mapping).map_err(|error| refuse(&error))?;
        Ok(Self { whole, backing: backing.into(), region: None })
    }
}

/// Interrupt vectors of one SSD: one for the admin queue, which is polled, and one for each queue
/// pair.
fn vectors(name: &str, plan: &EmuPlan<'_>) -> Result<EventFdVectors, Error> {
    let count = if plan.interrupts { plan.queue_pairs.saturating_add(1) } else { 0 };
    EventFdVectors::new(count)
        .map_err(|error| Error::environment(format!("{name}: make {count} vectors: {error}")))
}

/// Pool of one SSD at its offset in the shared memory.
fn create_pool_at_offset(
    regions: &RegionTable,
    memory: Segment,
    offset: u64,
    bytes: u64,
    plan: &EmuPlan<'_>,
) -> Result<DevicePool, Error> {
    let store = command_store(plan.techniques)
        .check_supported()
        .map_err(|missing| Error::usage(format!("--command-store: {missing}")))?;
    let len_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    let part = Segment { region: memory.region, offset, len_bytes };
    Ok(DevicePool::new(regions.clone(), part, DeviceKind::Emulated, store))
}

/// Expands `specs` to single SSDs, each with its number within the entry.
fn expand_specs(specs: &[EmuSpec]) -> impl Iterator<Item = (&EmuSpec, u32)> {
    specs.iter().flat_map(|spec| (0..spec.count).map(move |number| (spec, number)))
}

/// URI of the SSD, with its number if the entry describes several.
fn name_of(spec: &EmuSpec, number: u32) -> String {
    if spec.count == 1 { spec.to_string() } else { format!("{spec}#{number}") }
}

fn remote_error(name: &str, error: &tenmil_nvme_host::ControllerError) -> Error {
    Error::new(error.category(), format!("{name}: {error}"))
}
