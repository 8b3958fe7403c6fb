//! Block devices under load: opened by URI, with buffers in a region of the run.

use std::cell::Cell;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, Durability, Histogram, IoChannel, Limits, Operation, Segment, Span,
};
use tenmil_block::{
    AdaptationOptions, AdaptedDevice, Bdev, BdevOptions, BounceBufferAllocator, Claim, DeviceType,
    ExistingData, IoScheduler, OpenedDevice, Opener, QosLimiter,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Clock;
use tenmil_linux::kernel_files::KernelFiles;

use super::cpu_placement::CoreAssignment;
use super::device_set::{depth_of_a_pair, queue_pairs_per_device, start_ssds};
use crate::perf::perf_options::{
    AccessPattern, BlockLayerMode, MachineResources, PerfOptions, queue_map_text,
};
use crate::perf::perf_result::{DeviceResult, IoCounts};
use tenmil_base::Error;
use tenmil_devices::emu::EmulatedDevices;
use tenmil_devices::{EmuSpec, Uri};

/// Opened devices, with the block layer above them and the memory for their data.
pub(super) struct BlockDeviceSet {
    devices: Vec<NamedDevice>,
    buffers: Option<BumpAllocator>,
}

struct NamedDevice {
    name: String,
    /// One-line description.
    description: String,
    /// Source of the channels: the block layer, or the block device if there is no layer above it.
    medium: Arc<dyn BlockDevice>,
    /// Durability of a completed write.
    durability: Durability,
    existing: Vec<ExistingData>,
    /// Block layer above it.
    device: Option<Bdev>,
    /// Emulated SSD in whose pool its buffers are allocated, since address translation is fastest
    /// there.
    ssd: Option<(Arc<EmulatedDevices>, usize)>,
}

/// All kinds, with RAM filled at open: a read of memory that was never written moves no data.
fn device_kinds_with_filled_ram() -> Vec<(&'static str, &'static dyn DeviceType)> {
    let filled = |(name, kind): &(&'static str, &'static dyn DeviceType)| match *name {
        "ram" => (*name, &tenmil_drivers::open_ram_filled as &dyn DeviceType),
        EmuSpec::SCHEME => {
            (*name, &tenmil_devices::emu::EmulatedSsdKind { fills: true } as &dyn DeviceType)
        }
        _ => (*name, *kind),
    };
    tenmil::KINDS.iter().map(filled).collect()
}

/// Memory that is allocated from the beginning to the end and never freed.
struct BumpAllocator {
    memory: Segment,
    len_bytes: u64,
    next: Cell<u64>,
    backing: String,
}

/// Bounce buffer size of the splitting layer.
const BUFFER_BYTES: u32 = 64 << 10;

/// Alignment of buffers. Direct I/O requires no more than a page.
const PAGE: u64 = 4096;

impl BlockDeviceSet {
    /// Opens the devices of `options` that are not loaded through the driver alone, in order, and
    /// rejects options that they do not support.
    pub(super) fn open(
        options: &PerfOptions,
        places: &CoreAssignment,
        regions: &RegionTable,
        clock: Clock,
    ) -> Result<Self, Error> {
        let kinds = device_kinds_with_filled_ram();
        let opener = Opener { regions, clock, seed: options.seed, kinds: &kinds };
        let mut ssds = start_block_layer_ssds(options, places, regions, clock)?.into_iter();
        let mut devices = Vec::new();
        for uri in options.uris.iter().filter(|uri| !options.bypasses_block_layer(uri)) {
            match uri {
                Uri::Block(name) => devices.push(open_device(options, &opener, name)?),
                Uri::Emu(spec) => devices.extend(ssds.by_ref().take(spec.count as usize)),
            }
        }
        // Options are checked with the layer in place, since the layer may split requests.
        for (device, number) in devices.iter_mut().zip(0..) {
            device.add_block_layer(options, regions, clock, number)?;
            device.check_options(options)?;
            device.check_largest_request(options)?;
        }
        let each = u64::from(options.depth) * u64::from(options.thread_count());
        let stride = u64::from(options.sizes.largest_bytes()).next_multiple_of(PAGE);
        // Emulated SSDs allocate buffers in their own pools.
        let count = devices.iter().filter(|device| device.ssd.is_none()).count();
        let len_bytes = count as u64 * each * stride;
        let huge_pages = options.techniques.huge_pages;
        let buffers = (len_bytes > 0).then(|| BumpAllocator::new(regions, len_bytes, huge_pages));
        Ok(Self { devices, buffers: buffers.transpose()? })
    }

    /// Existing data on the devices.
    pub(super) fn existing_data(&self) -> impl Iterator<Item = &ExistingData> {
        self.devices.iter().flat_map(|device| &device.existing)
    }

    /// Description of the pages of the buffers.
    pub(super) fn memory_backing(&self) -> String {
        self.buffers.as_ref().map_or_else(String::new, |buffers| buffers.backing.clone())
    }

    /// Smallest queue depth that a channel of every device supports.
    pub(super) fn depth_max(&self) -> u32 {
        let each = self.devices.iter().map(|device| device.medium.limits().depth_max);
        each.min().unwrap_or(u32::MAX)
    }

    /// Creates a channel of device `index`.
    pub(super) fn channel(&self, index: usize) -> Result<Box<dyn IoChannel>, Error> {
        let NamedDevice { name, medium, .. } = &self.devices[index];
        medium.channel().map_err(|text| Error::environment(format!("{name}: {text}")))
    }

    /// Fails once a device is lost for good.
    pub(super) fn check_health(&self) -> Result<(), Error> {
        self.devices
            .iter()
            .find_map(|device| device.medium.failure_reason())
            .map_or(Ok(()), |why| Err(Error::remote(why)))
    }

    /// Allocates a buffer that device `index` can access.
    pub(super) fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        match &self.devices[index].ssd {
            Some((emulated_devices, ssd)) => emulated_devices.allocate(*ssd, len_bytes),
            None => self.buffers.as_ref()?.allocate(len_bytes),
        }
    }

    /// Time that threads have waited for locks of the block layer, in total.
    pub(super) fn lock_wait_total(&self) -> Span {
        let devices = self.devices.iter().filter_map(|device| device.device.as_ref());
        Span { ns: devices.map(|device| device.statistics().lock_wait.ns).sum() }
    }

    /// Description of device `index`, with zero counters.
    pub(super) fn device_result(&self, index: usize) -> DeviceResult {
        let NamedDevice { name, description, medium, durability, .. } = &self.devices[index];
        let limits = medium.limits();
        DeviceResult {
            name: name.clone(),
            model: description.clone(),
            durability: *durability,
            size_bytes: device_bytes(&limits),
            block_size: limits.block_size,
            counts: IoCounts::default(),
            latency: Histogram::new(),
        }
    }
}

fn open_device(
    options: &PerfOptions,
    opener: &Opener<'_>,
    uri: &tenmil_block::uri::Uri,
) -> Result<NamedDevice, Error> {
    let OpenedDevice { medium, description, existing, .. } = opener.open(uri)?;
    let (name, durability) = (uri.to_string(), medium.limits().durability);
    let named =
        NamedDevice { name, description, medium, durability, existing, device: None, ssd: None };
    named.check_options(options)?;
    Ok(named)
}

/// Starts the emulated SSDs that are loaded through the block layer.
fn start_block_layer_ssds(
    options: &PerfOptions,
    places: &CoreAssignment,
    regions: &RegionTable,
    clock: Clock,
) -> Result<Vec<NamedDevice>, Error> {
    let under = options.uris.iter().filter(|uri| !options.bypasses_block_layer(uri));
    let specs: Vec<EmuSpec> = under.filter_map(Uri::emulated).cloned().collect();
    if specs.is_empty() {
        return Ok(Vec::new());
    }
    let ssds = start_ssds(options, places, &specs, regions, &clock)?;
    let (results, existing) = (ssds.descriptions(), ssds.existing_data().to_vec());
    let channels_max = u32::from(queue_pairs_per_device(options));
    let depth = depth_of_a_pair(options, 0);
    let emulated_devices =
        EmulatedDevices::new(ssds, depth, channels_max, &options.techniques, clock)?;
    let mut named = Vec::new();
    for (index, result) in results.into_iter().enumerate() {
        named.push(NamedDevice {
            name: result.name,
            description: result.model,
            medium: Arc::new(emulated_devices.block_device(index)?),
            durability: result.durability,
            existing: if index == 0 { existing.clone() } else { Vec::new() },
            device: None,
            ssd: Some((Arc::clone(&emulated_devices), index)),
        });
    }
    Ok(named)
}

impl NamedDevice {
    /// Puts the block layer above the device, if one is configured.
    fn add_block_layer(
        &mut self,
        options: &PerfOptions,
        regions: &RegionTable,
        clock: Clock,
        number: u64,
    ) -> Result<(), Error> {
        // Devices without a default layer are loaded through the driver alone and are not in this
        // set.
        let layer = options.layer.layer.unwrap_or(BlockLayerMode::Mq);
        let Some(mode) = layer.mode() else { return Ok(()) };
        let map = options.layer.map.unwrap_or_default();
        let device = BdevOptions {
            mode,
            map,
            channels_max: queue_pairs_per_device(options).into(),
            scheduler: options.layer.scheduler,
            limiter: options.layer.qos_limits().map(QosLimiter::new),
            ..BdevOptions::new(clock, options.seed.wrapping_add(number))
        };
        let device = Bdev::new(&self.name, Arc::clone(&self.medium), device)?;
        let claim = if options.pattern.has_writes() { Claim::WriteOnce } else { Claim::ReadShared };
        let descriptor = device
            .open(claim, "perf")
            .map_err(|refused| Error::new(refused.category(), refused.to_string()))?;
        let largest = request_bytes_max(&self.medium.limits());
        let cuts = u64::from(options.sizes.largest_bytes()) > largest
            && mode != tenmil_block::ChannelMode::Bypass;
        self.medium = if cuts {
            let memory = BounceBufferAllocator::new(regions, BUFFER_BYTES, 1)?;
            let parents_max = u16::try_from(options.depth).unwrap_or(u16::MAX);
            let shape = AdaptationOptions { parents_max, ..AdaptationOptions::default() };
            Arc::new(AdaptedDevice::new(&device, descriptor, memory, shape)?)
        } else {
            Arc::new(descriptor)
        };
        self.description += &match mode {
            tenmil_block::ChannelMode::Mq => {
                format!(", under the block layer in mode mq, {}", queue_map_text(&map))
            }
            _ => format!(", under the block layer in mode {layer}"),
        };
        if cuts {
            self.description += &format!(", requests of more than {largest} bytes cut");
        }
        if options.layer.scheduler != IoScheduler::None {
            self.description += &format!(", scheduled by {}", options.layer.scheduler);
        }
        self.device = Some(device);
        Ok(())
    }

    /// Rejects options that the device does not support.
    fn check_options(&self, options: &PerfOptions) -> Result<(), Error> {
        let (name, limits) = (&self.name, self.medium.limits());
        options.check_queues(name, limits.depth_max, self.medium.channels_max())?;
        options.check_sizes(name, limits.block_size, device_bytes(&limits))?;
        for operation in operations_of_run(options) {
            if !limits.operations.has(*operation) {
                return Err(Error::usage(format!(
                    "-w {}: {name} has no {}, expected another pattern",
                    options.pattern.name(),
                    operation.name()
                )));
            }
        }
        let supplies = MachineResources::probe_machine(&KernelFiles::live_system());
        options.check_version_map_memory(name, limits.block_count, supplies.memory_available_bytes)
    }

    /// Rejects requests that are larger than the device supports and that no layer splits.
    fn check_largest_request(&self, options: &PerfOptions) -> Result<(), Error> {
        let (largest, most) =
            (options.sizes.largest_bytes(), request_bytes_max(&self.medium.limits()));
        if u64::from(largest) <= most {
            return Ok(());
        }
        Err(Error::usage(format!(
            "-o {}: size is {largest} bytes, expected at most the {most} bytes of a request to {}, \
             or --block mq, which cuts it",
            options.sizes, self.name
        )))
    }
}

impl BumpAllocator {
    fn new(regions: &RegionTable, len_bytes: u64, huge_pages: bool) -> Result<Self, Error> {
        let refuse = |error: &dyn std::fmt::Display| {
            Error::environment(format!("{len_bytes} bytes of buffers: {error}"))
        };
        let len = usize::try_from(len_bytes).map_err(|error| refuse(&error))?;
        let mapping = match huge_pages {
            // Without an IOMMU, memory must be physically contiguous.
            _ if regions.allocates_contiguous() => {
                MemoryMapping::new(len, MemoryBacking::Contiguous)
            }
            // Another process maps the buffers as well.
            _ if regions.allocates_shared() => MemoryMapping::new(len, MemoryBacking::Shared),
            true => MemoryMapping::new(len, MemoryBacking::Private),
            false => MemoryMapping::with_small_pages(len),
        };
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let backing = match mapping.backing() {
            MemoryBacking::Contiguous => "2 MiB pages in a row",
            _ if mapping.has_transparent_huge_pages() => {
                "transparent huge pages, where the kernel gives them"
            }
            _ => "4 KiB pages",
        };
        let memory = regions.add_mapping(mapping).map_err(|error| refuse(&error))?;
        Ok(Self { memory, len_bytes, next: Cell::new(0), backing: backing.into() })
    }

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let offset = self.next.get();
        let end = offset + u64::from(len_bytes);
        (end <= self.len_bytes).then(|| {
            self.next.set(end.next_multiple_of(PAGE));
            Segment { offset, len_bytes, ..self.memory }
        })
    }
}

/// Bytes of the largest request.
fn request_bytes_max(limits: &Limits) -> u64 {
    u64::from(limits.request_blocks_max) * u64::from(limits.block_size)
}

fn device_bytes(limits: &Limits) -> u64 {
    limits.block_count.saturating_mul(u64::from(limits.block_size))
}

/// Operations that a run may use.
fn operations_of_run(options: &PerfOptions) -> &'static [Operation] {
    match options.pattern {
        AccessPattern::Read | AccessPattern::RandRead => &[Operation::Read],
        AccessPattern::Write | AccessPattern::RandWrite => &[Operation::Write],
        AccessPattern::Rw | AccessPattern::RandRw => &[Operation::Read, Operation::Write],
        AccessPattern::Trim => &[Operation::Deallocate],
        AccessPattern::FlushMix => &[Operation::Read, Operation::Write, Operation::Flush],
    }
}
