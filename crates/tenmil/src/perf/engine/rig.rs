//! The devices of a run: opened, checked, and handed out to lanes.

use base::{Backend, Limits, Segment, Span};
use block::{Existing, guard};
use dma::Regions;
use host::Clock;
use host::machine::Machine;

use super::lane::{Lane, LaneParts};
use super::media::Media;
use super::places::Places;
use super::scrutiny::{Place, Scrutiny};
use super::worker::{LaneOf, RateShare};
use crate::emu::{EmuPlan, Emulated};
use crate::perf::options::PerfOptions;
use crate::perf::outcome::DeviceOutcome;
use crate::perf::workload::{BlockRange, Workload};
use crate::{EmuSpec, Refused, Uri};

/// The devices of a run, in the order in which they were named.
pub(super) struct Rig {
    devices: Vec<Device>,
    /// Emulated SSDs, loaded through the bare driver.
    ssds: Option<Emulated>,
    /// Everything else.
    media: Media,
    regions: Regions,
    clock: Clock,
}

/// Where a device is to be found.
#[derive(Clone, Copy, Debug)]
enum Device {
    /// Number so many of the SSDs.
    Ssd(usize),
    /// Number so many of the media.
    Medium(usize),
}

/// Places in the table of regions: what an emulated device has addresses for.
const REGIONS_MAX: usize = 4095;

impl Rig {
    pub(super) fn bring_up(
        options: &PerfOptions,
        places: &Places,
        clock: Clock,
    ) -> Result<Self, Refused> {
        // What another process reads and writes lies in memory that it can map.
        let regions = match options.uris.iter().any(Uri::is_in_another_process) {
            true => Regions::shared(REGIONS_MAX),
            false => Regions::new(REGIONS_MAX),
        };
        if options.uris.iter().any(Uri::lacks_iommu) {
            // There is nothing in it that could lie elsewhere.
            regions.lay_rows();
        }
        let bare = options.uris.iter().filter(|uri| options.is_bare(uri));
        let specs: Vec<EmuSpec> = bare.filter_map(Uri::emulated).cloned().collect();
        let ssds = match specs.as_slice() {
            [] => None,
            specs => Some(start_ssds(options, places, specs, &regions, &clock)?),
        };
        let media = Media::open(options, places, &regions, clock)?;
        let existing = ssds.iter().flat_map(Emulated::existing).chain(media.existing());
        refuse_to_destroy(options, &existing.cloned().collect::<Vec<_>>())?;
        let (mut ssd, mut medium) = (0.., 0..);
        let mut devices = Vec::new();
        for uri in &options.uris {
            let next = || match options.is_bare(uri) {
                true => ssd.next().map(Device::Ssd),
                false => medium.next().map(Device::Medium),
            };
            devices.extend(std::iter::repeat_with(next).flatten().take(uri.count() as usize));
        }
        Ok(Self { devices, ssds, media, regions, clock })
    }

    /// The table that resolves every segment of the run.
    pub(super) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// What the time of the run is read from.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// I/Os in flight that a queue pair of each block device takes.
    pub(super) fn depth_max(&self) -> u32 {
        self.media.depth_max()
    }

    /// What rings and buffers are made of, in words.
    pub(super) fn memory_backing(&self) -> String {
        self.ssds.as_ref().map_or_else(|| self.media.memory_backing(), Emulated::memory_backing)
    }

    /// The devices, before anything has happened to them.
    pub(super) fn descriptions(&self) -> Vec<DeviceOutcome> {
        let ssds = self.ssds.as_ref().map(Emulated::descriptions).unwrap_or_default();
        let describe = |device: &Device| match device {
            Device::Ssd(index) => ssds[*index].clone(),
            Device::Medium(index) => self.media.describe(*index),
        };
        self.devices.iter().map(describe).collect()
    }

    /// How long threads have waited for locks of the block layer, all together.
    pub(super) fn lock_wait(&self) -> Span {
        self.media.lock_wait()
    }

    /// Lets controllers look after themselves. Fails once a device is lost.
    pub(super) fn look_after(&mut self) -> Result<(), Refused> {
        let now = self.clock.now();
        self.ssds.as_mut().map_or(Ok(()), |ssds| ssds.look_after(now))?;
        self.media.look_after()
    }

    /// Shuts everything down in order.
    pub(super) fn shut_down(self) {
        if let Some(ssds) = self.ssds {
            ssds.shut_down(&self.clock);
        }
    }

    fn channel(
        &mut self,
        device: Device,
        depth: u32,
        options: &PerfOptions,
    ) -> Result<Box<dyn Backend>, Refused> {
        match (device, &mut self.ssds) {
            (Device::Ssd(index), Some(ssds)) => {
                ssds.queue(index, depth, &options.techniques, &self.clock)
            }
            (Device::Ssd(index) | Device::Medium(index), _) => self.media.channel(index),
        }
    }

    fn buffers(&mut self, device: Device, depth: u32, len: u32) -> Result<Vec<Segment>, Refused> {
        let one = |_| match (device, &self.ssds) {
            (Device::Ssd(index), Some(ssds)) => ssds.allocate(index, len),
            (Device::Ssd(index) | Device::Medium(index), _) => self.media.allocate(index, len),
        };
        (0..depth).map(one).collect::<Option<Vec<_>>>().ok_or_else(|| {
            Refused::machine(format!("allocate {depth} buffers of {len} bytes: no memory is left"))
        })
    }

    /// The lanes of one thread: its queue pairs, its part of the blocks, its buffers.
    pub(super) fn lanes<S: Scrutiny>(
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
        for (device, at) in self.devices.clone().into_iter().enumerate() {
            for pair in 0..pairs {
                let depth = depth_of_a_pair(options, pair);
                let backend = self.channel(at, depth, options)?;
                let lane = index as u64 * u64::from(pairs) + u64::from(pair);
                let range = range_of(options, backend.limits(), lane, threads * u64::from(pairs));
                let block_size = backend.limits().block_size;
                let buffers = self.buffers(at, depth, options.sizes.largest())?;
                let (first, count) = (range.first, usize::try_from(range.count).unwrap_or(0));
                let number = u32::try_from(device).unwrap_or(u32::MAX);
                let place = Place { device: number, first, count, block_size };
                let part = lane * self.devices.len() as u64 + device as u64;
                let parts = threads * u64::from(pairs) * self.devices.len() as u64;
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
}

/// Queue pairs of each device, over all submitting threads.
pub(super) fn queue_pairs(options: &PerfOptions) -> u16 {
    let threads = u16::try_from(options.thread_count()).unwrap_or(u16::MAX);
    options.queue_pairs.saturating_mul(threads)
}

/// Brings emulated SSDs up.
pub(super) fn start_ssds(
    options: &PerfOptions,
    places: &Places,
    specs: &[EmuSpec],
    regions: &Regions,
    clock: &Clock,
) -> Result<Emulated, Refused> {
    let plan = EmuPlan {
        specs,
        queue_pairs: queue_pairs(options),
        depth: depth_of_a_pair(options, 0),
        buffer_bytes: options.buffer_bytes() / u64::from(options.device_count().max(1)),
        techniques: &options.techniques,
        device_cores: &places.device,
        gives_way: places.gives_way,
        interrupts: true,
        fills: true,
        seed: options.seed,
    };
    Emulated::start_in(regions, &plan, clock)
}

/// Refuses to write to what this run did not create, unless that was asked for, and to what somebody
/// else uses.
fn refuse_to_destroy(options: &PerfOptions, existing: &[Existing]) -> Result<(), Refused> {
    if !options.pattern.writes() {
        return Ok(());
    }
    let doing = format!("-w {}", options.pattern.name());
    guard::allow(&doing, existing, options.overwrite, &Machine::this())?;
    Ok(())
}

/// I/Os in flight on queue pair `pair` of those that share a depth.
pub(super) fn depth_of_a_pair(options: &PerfOptions, pair: u16) -> u32 {
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
