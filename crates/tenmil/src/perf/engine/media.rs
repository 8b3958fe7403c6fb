//! Devices of the block layer under load: opened by name, with buffers in a region of the run.

use std::cell::Cell;

use base::{Backend, Histogram, Limits, Operation, Segment};
use block::{Existing, Opened, Opener};
use dma::{Backing, Mapping, Regions};
use host::Clock;
use host::machine::Machine;

use super::fill::fill;
use crate::perf::options::{Pattern, PerfOptions, Supplies};
use crate::perf::outcome::{Counts, DeviceOutcome};
use crate::{KINDS, Refused, Uri};

/// Opened devices and the memory that is moved to and from them.
pub(super) struct Media {
    devices: Vec<Named>,
    buffers: Option<Buffers>,
}

struct Named {
    uri: block::uri::Uri,
    opened: Opened,
}

/// Memory that is handed out from its beginning to its end.
struct Buffers {
    memory: Segment,
    len_bytes: u64,
    next: Cell<u64>,
    backing: String,
}

/// Buffers begin on pages: direct I/O asks for no less.
const PAGE: u64 = 4096;

impl Media {
    /// Opens what `options` name that is no emulated SSD, and refuses what they cannot do.
    pub(super) fn open(
        options: &PerfOptions,
        regions: &Regions,
        clock: Clock,
    ) -> Result<Self, Refused> {
        let opener = Opener { regions, clock, seed: options.seed, more: KINDS };
        let mut devices = Vec::new();
        for uri in &options.uris {
            let Uri::Block(uri) = uri else { continue };
            let opened = opener.open(uri)?;
            check(options, uri, &opened)?;
            if uri.scheme() == "ram" {
                // What was never written takes no memory, and no read of it would move any.
                fill(&uri.to_string(), &opened, regions, &clock)?;
            }
            devices.push(Named { uri: uri.clone(), opened });
        }
        let each = u64::from(options.depth) * u64::from(options.thread_count());
        let stride = u64::from(options.sizes.largest()).next_multiple_of(PAGE);
        let len_bytes = devices.len() as u64 * each * stride;
        let huge_pages = options.techniques.huge_pages;
        let buffers = (len_bytes > 0).then(|| Buffers::new(regions, len_bytes, huge_pages));
        Ok(Self { devices, buffers: buffers.transpose()? })
    }

    /// What lies under them that this run did not create.
    pub(super) fn existing(&self) -> impl Iterator<Item = &Existing> {
        self.devices.iter().flat_map(|device| &device.opened.existing)
    }

    /// What buffers are made of, in words.
    pub(super) fn memory_backing(&self) -> String {
        self.buffers.as_ref().map_or_else(String::new, |buffers| buffers.backing.clone())
    }

    /// A channel of device `index`.
    pub(super) fn channel(&self, index: usize) -> Result<Box<dyn Backend>, Refused> {
        let Named { uri, opened } = &self.devices[index];
        opened.medium.channel().map_err(|text| Refused::machine(format!("{uri}: {text}")))
    }

    /// A buffer that every device can reach.
    pub(super) fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        self.buffers.as_ref()?.allocate(len_bytes)
    }

    /// Device `index`, before anything has happened to it.
    pub(super) fn describe(&self, index: usize) -> DeviceOutcome {
        let Named { uri, opened } = &self.devices[index];
        let limits = opened.medium.limits();
        DeviceOutcome {
            name: uri.to_string(),
            model: opened.description.clone(),
            durability: limits.durability,
            size_bytes: size_bytes(&limits),
            block_size: limits.block_size,
            counts: Counts::default(),
            latency: Histogram::new(),
        }
    }
}

impl Buffers {
    fn new(regions: &Regions, len_bytes: u64, huge_pages: bool) -> Result<Self, Refused> {
        let refuse = |error: &dyn std::fmt::Display| {
            Refused::machine(format!("{len_bytes} bytes of buffers: {error}"))
        };
        let len = usize::try_from(len_bytes).map_err(|error| refuse(&error))?;
        let mapping = if huge_pages {
            Mapping::new(len, Backing::Private)
        } else {
            Mapping::with_small_pages(len)
        };
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let backing = if mapping.transparent_huge_pages() {
            "transparent huge pages, where the kernel gives them"
        } else {
            "4 KiB pages"
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

fn size_bytes(limits: &Limits) -> u64 {
    limits.block_count.saturating_mul(u64::from(limits.block_size))
}

/// Refuses what `opened` cannot do, naming the value and what it allows.
fn check(options: &PerfOptions, uri: &block::uri::Uri, opened: &Opened) -> Result<(), Refused> {
    let limits = opened.medium.limits();
    options.check_queues(uri, limits.depth_max, opened.medium.channels_max())?;
    options.check_sizes(uri, limits.block_size, size_bytes(&limits))?;
    let largest = options.sizes.largest();
    let most = u64::from(limits.request_blocks_max) * u64::from(limits.block_size);
    if u64::from(largest) > most {
        return Err(Refused::caller(format!(
            "-o {}: size is {largest} bytes, expected at most the {most} bytes of a request to \
             {uri}",
            options.sizes
        )));
    }
    for operation in operations(options) {
        if !limits.support.has(*operation) {
            return Err(Refused::caller(format!(
                "-w {}: {uri} has no {}, expected another pattern",
                options.pattern.name(),
                operation.name()
            )));
        }
    }
    let supplies = Supplies::look(&Machine::this());
    options.check_table(uri, limits.block_count, supplies.memory_available_bytes)
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
