//! Devices of a run: opened, checked, and divided into queue runners.

use tenmil_base::{IoChannel, Limits, Segment, Span};
use tenmil_block::{ExistingData, overwrite};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::kernel_files::KernelFiles;

use super::block_device_set::BlockDeviceSet;
use super::cpu_placement::CoreAssignment;
use super::queue_runner::{QueueRunner, QueueRunnerParts};
use super::verifier::{VerifiedRange, Verifier};
use super::worker::{DeviceQueue, RateShare};
use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::DeviceResult;
use crate::perf::workload::{BlockRange, Workload};
use tenmil_base::Error;
use tenmil_devices::emu::{EmuPlan, EmulatedSsds};
use tenmil_devices::{EmuSpec, Uri};

/// Devices of a run, in the order of the command line.
pub(super) struct DeviceSet {
    devices: Vec<DeviceIndex>,
    /// Emulated SSDs that are loaded through the driver alone.
    ssds: Option<EmulatedSsds>,
    /// All other devices.
    media: BlockDeviceSet,
    regions: RegionTable,
    clock: Clock,
}

/// Index of a device.
#[derive(Clone, Copy, Debug)]
enum DeviceIndex {
    /// Index among the emulated SSDs.
    Ssd(usize),
    /// Index among the other devices.
    Medium(usize),
}

/// Size of the region table, which is the number of regions that an emulated device can address.
const REGIONS_MAX: usize = 4095;

impl DeviceSet {
    pub(super) fn open_devices(
        options: &PerfOptions,
        places: &CoreAssignment,
        clock: Clock,
    ) -> Result<Self, Error> {
        // Data of a device in another process must lie in memory that can be shared with it.
        let regions = match options.uris.iter().any(Uri::includes_other_process) {
            true => RegionTable::shared(REGIONS_MAX),
            false => RegionTable::new(REGIONS_MAX),
        };
        if options.uris.iter().any(Uri::lacks_iommu) {
            // The table is empty, so no region can be discontiguous.
            regions.make_allocations_contiguous();
        }
        let bare = options.uris.iter().filter(|uri| options.bypasses_block_layer(uri));
        let specs: Vec<EmuSpec> = bare.filter_map(Uri::emulated).cloned().collect();
        let ssds = match specs.as_slice() {
            [] => None,
            specs => Some(start_ssds(options, places, specs, &regions, &clock)?),
        };
        let media = BlockDeviceSet::open(options, places, &regions, clock)?;
        let existing =
            ssds.iter().flat_map(EmulatedSsds::existing_data).chain(media.existing_data());
        reject_existing_data(options, &existing.cloned().collect::<Vec<_>>())?;
        let (mut ssd, mut medium) = (0.., 0..);
        let mut devices = Vec::new();
        for uri in &options.uris {
            let next = || match options.bypasses_block_layer(uri) {
                true => ssd.next().map(DeviceIndex::Ssd),
                false => medium.next().map(DeviceIndex::Medium),
            };
            devices.extend(std::iter::repeat_with(next).flatten().take(uri.count() as usize));
        }
        Ok(Self { devices, ssds, media, regions, clock })
    }

    /// Region table of all segments of the run.
    pub(super) fn regions(&self) -> &RegionTable {
        &self.regions
    }

    /// Clock of the run.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Smallest queue depth that a channel of every block device supports.
    pub(super) fn depth_max(&self) -> u32 {
        self.media.depth_max()
    }

    /// Description of the pages of rings and buffers.
    pub(super) fn memory_backing(&self) -> String {
        self.ssds.as_ref().map_or_else(|| self.media.memory_backing(), EmulatedSsds::memory_backing)
    }

    /// Descriptions of the devices, with zero counters.
    pub(super) fn descriptions(&self) -> Vec<DeviceResult> {
        let ssds = self.ssds.as_ref().map(EmulatedSsds::descriptions).unwrap_or_default();
        let describe = |device: &DeviceIndex| match device {
            DeviceIndex::Ssd(index) => ssds[*index].clone().into(),
            DeviceIndex::Medium(index) => self.media.device_result(*index),
        };
        self.devices.iter().map(describe).collect()
    }

    /// Time that threads have waited for locks of the block layer, in total.
    pub(super) fn lock_wait_total(&self) -> Span {
        self.media.lock_wait_total()
    }

    /// Polls the controllers. Fails once a device is lost.
    pub(super) fn poll_controllers(&mut self) -> Result<(), Error> {
        let now = self.clock.now();
        self.ssds.as_mut().map_or(Ok(()), |ssds| ssds.poll_controllers(now))?;
        self.media.check_health()
    }

    /// Shuts down all devices in order.
    pub(super) fn shut_down(self) {
        if let Some(ssds) = self.ssds {
            ssds.shut_down(&self.clock);
        }
    }

    fn channel(
        &mut self,
        device: DeviceIndex,
        depth: u32,
        options: &PerfOptions,
    ) -> Result<Box<dyn IoChannel>, Error> {
        match (device, &mut self.ssds) {
            (DeviceIndex::Ssd(index), Some(ssds)) => {
                ssds.create_queue_pair(index, depth, &options.techniques, &self.clock)
            }
            (DeviceIndex::Ssd(index) | DeviceIndex::Medium(index), _) => self.media.channel(index),
        }
    }

    fn allocate_buffers(
        &mut self,
        device: DeviceIndex,
        depth: u32,
        len: u32,
    ) -> Result<Vec<Segment>, Error> {
        let one = |_| match (device, &self.ssds) {
            (DeviceIndex::Ssd(index), Some(ssds)) => ssds.allocate(index, len),
            (DeviceIndex::Ssd(index) | DeviceIndex::Medium(index), _) => {
                self.media.allocate(index, len)
            }
        };
        (0..depth).map(one).collect::<Option<Vec<_>>>().ok_or_else(|| {
            Error::environment(format!(
                "allocate {depth} buffers of {len} bytes: no memory is left"
            ))
        })
    }

    /// Queue runners of one thread: its queue pairs, block ranges and buffers.
    pub(super) fn create_queue_runners<S: Verifier>(
        &mut self,
        options: &PerfOptions,
        places: &CoreAssignment,
        index: usize,
        scrutiny: &impl Fn(&Self, &VerifiedRange, usize) -> S,
    ) -> Result<(Vec<DeviceQueue<S>>, Workload), Error> {
        let threads = places.submit.len() as u64;
        let pairs = options.queue_pairs;
        let mut workload = Workload::new(options, options.seed.wrapping_add(index as u64));
        let mut queues = Vec::new();
        for (device, at) in self.devices.clone().into_iter().enumerate() {
            for pair in 0..pairs {
                let depth = depth_of_a_pair(options, pair);
                let backend = self.channel(at, depth, options)?;
                // Number among the runners of this device, which selects the block range.
                let queue = index as u64 * u64::from(pairs) + u64::from(pair);
                let range = block_range_of_queue(
                    options,
                    backend.limits(),
                    queue,
                    threads * u64::from(pairs),
                );
                let block_size = backend.limits().block_size;
                let buffers = self.allocate_buffers(at, depth, options.sizes.largest_bytes())?;
                let (first, count) = (range.first, usize::try_from(range.count).unwrap_or(0));
                let number = u32::try_from(device).unwrap_or(u32::MAX);
                let place = VerifiedRange { device: number, first, count, block_size };
                // Number among all runners, which interleaves the arrivals of an open loop.
                let part = queue * self.devices.len() as u64 + device as u64;
                let parts = threads * u64::from(pairs) * self.devices.len() as u64;
                let seed = options.seed ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                queues.push(DeviceQueue {
                    device,
                    rate: options.rate.map(|rate| RateShare { rate, part, parts, seed }),
                    arrivals: None,
                    queue: QueueRunner::new(QueueRunnerParts {
                        fixed: workload.fixed_operation_and_size(),
                        backend,
                        addresses: workload.new_address_stream(range, block_size),
                        scrutiny: scrutiny(self, &place, buffers.len()),
                        buffers,
                        // The remainder of the count goes to the first queue pairs.
                        budget: options.io_count.map_or(u64::MAX, |count| {
                            count / u64::from(pairs)
                                + u64::from(u64::from(pair) < count % u64::from(pairs))
                        }),
                    }),
                });
            }
        }
        Ok((queues, workload))
    }
}

/// Queue pairs of each device, over all submitting threads.
pub(super) fn queue_pairs_per_device(options: &PerfOptions) -> u16 {
    let threads = u16::try_from(options.thread_count()).unwrap_or(u16::MAX);
    options.queue_pairs.saturating_mul(threads)
}

/// Starts the emulated SSDs.
pub(super) fn start_ssds(
    options: &PerfOptions,
    places: &CoreAssignment,
    specs: &[EmuSpec],
    regions: &RegionTable,
    clock: &Clock,
) -> Result<EmulatedSsds, Error> {
    let plan = EmuPlan {
        specs,
        queue_pairs: queue_pairs_per_device(options),
        depth: depth_of_a_pair(options, 0),
        buffer_bytes: options.buffer_bytes() / u64::from(options.device_count().max(1)),
        techniques: &options.techniques,
        device_cores: &places.device,
        yields: places.yields,
        interrupts: true,
        fills: true,
        seed: options.seed,
    };
    EmulatedSsds::start_in(regions, &plan, clock)
}

/// Rejects writes to existing data unless overwriting is allowed, and to devices in use by another
/// process.
fn reject_existing_data(options: &PerfOptions, existing: &[ExistingData]) -> Result<(), Error> {
    if !options.pattern.has_writes() {
        return Ok(());
    }
    let doing = format!("-w {}", options.pattern.name());
    overwrite::check_overwrite_allowed(
        &doing,
        existing,
        options.overwrite,
        &KernelFiles::live_system(),
    )?;
    Ok(())
}

/// Depth of queue pair `pair`, where all pairs of a device share one depth.
pub(super) fn depth_of_a_pair(options: &PerfOptions, pair: u16) -> u32 {
    let pairs = u32::from(options.queue_pairs);
    options.depth / pairs + u32::from(u32::from(pair) < options.depth % pairs)
}

/// Block range of a queue runner: all blocks, or a separate part if runners must not conflict.
fn block_range_of_queue(
    options: &PerfOptions,
    limits: &Limits,
    queue: u64,
    queues: u64,
) -> BlockRange {
    let all = BlockRange { first: 0, count: limits.block_count };
    let apart = options.verify || !options.pattern.is_random();
    if apart { all.nth_part(queue, queues) } else { all }
}
