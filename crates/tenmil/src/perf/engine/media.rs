//! Devices of the block layer under load: opened by name, with buffers in a region of the run.

use std::cell::Cell;
use std::sync::Arc;

use base::{Backend, Durability, Histogram, Limits, Medium, Operation, Segment, Span};
use block::{
    BounceMemory, Claim, Device, DeviceOptions, Existing, Limiter, Opened, Opener, Scheduler,
    ShapeOptions, Shaped,
};
use dma::{Backing, Mapping, Regions};
use host::Clock;
use host::machine::Machine;

use super::places::Places;
use super::rig::{depth_of_a_pair, queue_pairs, start_ssds};
use crate::emu::Fleet;
use crate::perf::options::{Layer, Pattern, PerfOptions, Supplies, show_map};
use crate::perf::outcome::{Counts, DeviceOutcome};
use crate::{EmuSpec, FILLED_KINDS, Refused, Uri};

/// Opened devices, with what stands above them, and the memory that is moved to and from them.
pub(super) struct Media {
    devices: Vec<Named>,
    buffers: Option<Buffers>,
}

struct Named {
    name: String,
    /// What it is, in a line.
    description: String,
    /// What channels are opened of: the device, or the medium where nothing stands above it.
    medium: Arc<dyn Medium>,
    /// What an answered write is worth.
    durability: Durability,
    existing: Vec<Existing>,
    /// The block layer above it.
    device: Option<Device>,
    /// The SSD whose memory it finds its data in fastest.
    ssd: Option<(Arc<Fleet>, usize)>,
}

/// Memory that is handed out from its beginning to its end.
struct Buffers {
    memory: Segment,
    len_bytes: u64,
    next: Cell<u64>,
    backing: String,
}

/// Bytes in the buffer that cut requests would take a detour through, if memory had to.
const BUFFER_BYTES: u32 = 64 << 10;

/// Buffers begin on pages: direct I/O asks for no less.
const PAGE: u64 = 4096;

impl Media {
    /// Opens what `options` name and is not loaded through the bare driver, in the order of the
    /// names, and refuses what they cannot do.
    pub(super) fn open(
        options: &PerfOptions,
        places: &Places,
        regions: &Regions,
        clock: Clock,
    ) -> Result<Self, Refused> {
        let opener = Opener { regions, clock, seed: options.seed, more: FILLED_KINDS };
        let mut ssds = start_under(options, places, regions, clock)?.into_iter();
        let mut devices = Vec::new();
        for uri in options.uris.iter().filter(|uri| !options.is_bare(uri)) {
            match uri {
                Uri::Block(name) => devices.push(open_one(options, &opener, name)?),
                Uri::Emu(spec) => devices.extend(ssds.by_ref().take(spec.count as usize)),
            }
        }
        for (device, number) in devices.iter_mut().zip(0..) {
            device.put_layer(options, regions, clock, number)?;
            device.check(options)?;
            device.check_largest(options)?;
        }
        let each = u64::from(options.depth) * u64::from(options.thread_count());
        let stride = u64::from(options.sizes.largest()).next_multiple_of(PAGE);
        let count = devices.iter().filter(|device| device.ssd.is_none()).count();
        let len_bytes = count as u64 * each * stride;
        let huge_pages = options.techniques.huge_pages;
        let buffers = (len_bytes > 0).then(|| Buffers::new(regions, len_bytes, huge_pages));
        Ok(Self { devices, buffers: buffers.transpose()? })
    }

    /// What lies under them that this run did not create.
    pub(super) fn existing(&self) -> impl Iterator<Item = &Existing> {
        self.devices.iter().flat_map(|device| &device.existing)
    }

    /// What buffers are made of, in words.
    pub(super) fn memory_backing(&self) -> String {
        self.buffers.as_ref().map_or_else(String::new, |buffers| buffers.backing.clone())
    }

    /// I/Os in flight that a channel of each device takes.
    pub(super) fn depth_max(&self) -> u32 {
        let each = self.devices.iter().map(|device| device.medium.limits().depth_max);
        each.min().unwrap_or(u32::MAX)
    }

    /// A channel of device `index`.
    pub(super) fn channel(&self, index: usize) -> Result<Box<dyn Backend>, Refused> {
        let Named { name, medium, .. } = &self.devices[index];
        medium.channel().map_err(|text| Refused::machine(format!("{name}: {text}")))
    }

    /// Fails once a device is lost for good.
    pub(super) fn look_after(&self) -> Result<(), Refused> {
        self.devices
            .iter()
            .find_map(|device| device.medium.lost())
            .map_or(Ok(()), |why| Err(Refused::peer(why)))
    }

    /// A buffer that device `index` can reach.
    pub(super) fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        match &self.devices[index].ssd {
            Some((fleet, ssd)) => fleet.allocate(*ssd, len_bytes),
            None => self.buffers.as_ref()?.allocate(len_bytes),
        }
    }

    /// How long threads have waited for locks of the block layer, all together.
    pub(super) fn lock_wait(&self) -> Span {
        let devices = self.devices.iter().filter_map(|device| device.device.as_ref());
        Span { ns: devices.map(|device| device.statistics().lock_wait.ns).sum() }
    }

    /// Device `index`, before anything has happened to it.
    pub(super) fn describe(&self, index: usize) -> DeviceOutcome {
        let Named { name, description, medium, durability, .. } = &self.devices[index];
        let limits = medium.limits();
        DeviceOutcome {
            name: name.clone(),
            model: description.clone(),
            durability: *durability,
            size_bytes: size_bytes(&limits),
            block_size: limits.block_size,
            counts: Counts::default(),
            latency: Histogram::new(),
        }
    }
}

fn open_one(
    options: &PerfOptions,
    opener: &Opener<'_>,
    uri: &block::uri::Uri,
) -> Result<Named, Refused> {
    let Opened { medium, description, existing, .. } = opener.open(uri)?;
    let (name, durability) = (uri.to_string(), medium.limits().durability);
    let named = Named { name, description, medium, durability, existing, device: None, ssd: None };
    named.check(options)?;
    Ok(named)
}

/// Brings up the emulated SSDs that are not loaded through the bare driver.
fn start_under(
    options: &PerfOptions,
    places: &Places,
    regions: &Regions,
    clock: Clock,
) -> Result<Vec<Named>, Refused> {
    let under = options.uris.iter().filter(|uri| !options.is_bare(uri));
    let specs: Vec<EmuSpec> = under.filter_map(Uri::emulated).cloned().collect();
    if specs.is_empty() {
        return Ok(Vec::new());
    }
    let ssds = start_ssds(options, places, &specs, regions, &clock)?;
    let (outcomes, existing) = (ssds.descriptions(), ssds.existing().to_vec());
    let channels_max = u32::from(queue_pairs(options));
    let depth = depth_of_a_pair(options, 0);
    let fleet = Fleet::new(ssds, depth, channels_max, &options.techniques, clock)?;
    let mut named = Vec::new();
    for (index, outcome) in outcomes.into_iter().enumerate() {
        named.push(Named {
            name: outcome.name,
            description: outcome.model,
            medium: Arc::new(fleet.medium(index)?),
            durability: outcome.durability,
            existing: if index == 0 { existing.clone() } else { Vec::new() },
            device: None,
            ssd: Some((Arc::clone(&fleet), index)),
        });
    }
    Ok(named)
}

impl Named {
    /// Puts the block layer above it, if there is to be one.
    fn put_layer(
        &mut self,
        options: &PerfOptions,
        regions: &Regions,
        clock: Clock,
        number: u64,
    ) -> Result<(), Refused> {
        // What has the bare driver is not among the media.
        let layer = options.layer.layer.unwrap_or(Layer::Mq);
        let Some(mode) = layer.mode() else { return Ok(()) };
        let map = options.layer.map.unwrap_or_default();
        let device = DeviceOptions {
            mode,
            map,
            channels_max: queue_pairs(options).into(),
            scheduler: options.layer.scheduler,
            limiter: options.layer.caps().map(Limiter::new),
            ..DeviceOptions::new(clock, options.seed.wrapping_add(number))
        };
        let device = Device::new(&self.name, Arc::clone(&self.medium), device)?;
        let claim = if options.pattern.writes() { Claim::WriteOnce } else { Claim::ReadShared };
        let descriptor = device
            .open(claim, "perf")
            .map_err(|refused| Refused::of(refused.blame(), refused.to_string()))?;
        let largest = largest_bytes(&self.medium.limits());
        let cuts = u64::from(options.sizes.largest()) > largest && mode != block::Mode::Bypass;
        self.medium = if cuts {
            let memory = BounceMemory::new(regions, BUFFER_BYTES, 1)?;
            let parents_max = u16::try_from(options.depth).unwrap_or(u16::MAX);
            let shape = ShapeOptions { parents_max, ..ShapeOptions::default() };
            Arc::new(Shaped::new(&device, descriptor, memory, shape)?)
        } else {
            Arc::new(descriptor)
        };
        self.description += &match mode {
            block::Mode::Mq => format!(", under the block layer in mode mq, {}", show_map(&map)),
            _ => format!(", under the block layer in mode {layer}"),
        };
        if cuts {
            self.description += &format!(", requests of more than {largest} bytes cut");
        }
        if options.layer.scheduler != Scheduler::None {
            self.description += &format!(", scheduled by {}", options.layer.scheduler);
        }
        self.device = Some(device);
        Ok(())
    }

    /// Refuses what it cannot do, naming the value and what it allows.
    fn check(&self, options: &PerfOptions) -> Result<(), Refused> {
        let (name, limits) = (&self.name, self.medium.limits());
        options.check_queues(name, limits.depth_max, self.medium.channels_max())?;
        options.check_sizes(name, limits.block_size, size_bytes(&limits))?;
        for operation in operations(options) {
            if !limits.support.has(*operation) {
                return Err(Refused::caller(format!(
                    "-w {}: {name} has no {}, expected another pattern",
                    options.pattern.name(),
                    operation.name()
                )));
            }
        }
        let supplies = Supplies::look(&Machine::this());
        options.check_table(name, limits.block_count, supplies.memory_available_bytes)
    }

    /// Refuses requests that are too large for what is loaded, where nothing cuts them.
    fn check_largest(&self, options: &PerfOptions) -> Result<(), Refused> {
        let (largest, most) = (options.sizes.largest(), largest_bytes(&self.medium.limits()));
        if u64::from(largest) <= most {
            return Ok(());
        }
        Err(Refused::caller(format!(
            "-o {}: size is {largest} bytes, expected at most the {most} bytes of a request to {}, \
             or --block mq, which cuts it",
            options.sizes, self.name
        )))
    }
}

impl Buffers {
    fn new(regions: &Regions, len_bytes: u64, huge_pages: bool) -> Result<Self, Refused> {
        let refuse = |error: &dyn std::fmt::Display| {
            Refused::machine(format!("{len_bytes} bytes of buffers: {error}"))
        };
        let len = usize::try_from(len_bytes).map_err(|error| refuse(&error))?;
        let mapping = match huge_pages {
            // An SSD without an IOMMU finds no others.
            _ if regions.is_in_rows() => Mapping::new(len, Backing::Row),
            // Another process maps them too.
            _ if regions.is_shared() => Mapping::new(len, Backing::Shared),
            true => Mapping::new(len, Backing::Private),
            false => Mapping::with_small_pages(len),
        };
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let backing = match mapping.backing() {
            Backing::Row => "2 MiB pages in a row",
            _ if mapping.transparent_huge_pages() => {
                "transparent huge pages, where the kernel gives them"
            }
            _ => "4 KiB pages",
        };
        let memory = regions.add(mapping).map_err(|error| refuse(&error))?;
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

/// Bytes in the largest request.
fn largest_bytes(limits: &Limits) -> u64 {
    u64::from(limits.request_blocks_max) * u64::from(limits.block_size)
}

fn size_bytes(limits: &Limits) -> u64 {
    limits.block_count.saturating_mul(u64::from(limits.block_size))
}

/// What a run may ask of a device.
fn operations(options: &PerfOptions) -> &'static [Operation] {
    match options.pattern {
        Pattern::Read | Pattern::RandRead => &[Operation::Read],
        Pattern::Write | Pattern::RandWrite => &[Operation::Write],
        Pattern::Rw | Pattern::RandRw => &[Operation::Read, Operation::Write],
        Pattern::Trim => &[Operation::Deallocate],
        Pattern::FlushMix => &[Operation::Read, Operation::Write, Operation::Flush],
    }
}
