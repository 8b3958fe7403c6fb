//! The device: a controller behind BAR 0, and its configuration space.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::{Instant, Medium, Segment};
use ctrl::Buffers;
use ctrl::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use ctrl::front::{FrontEndConfig, MemoryFrontEnd, Wait};
use dma::{Region, Regions};
use vfu::function::{CONFIGURATION_BYTES, Change, Function, FunctionShape};
use vfu::{Area, IrqShape, RegionShape, irq_index, region_index};
use wire::register::offset;

use super::doorbells::{self, Doorbells};
use super::lines::Lines;
use super::memory::{Maps, Reach};

/// What the controller is like.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Its serial number.
    pub serial: String,
    /// I/O queues that a client may have: 1 to 63.
    pub queues: u16,
    /// Entries in the largest of them.
    pub entries: u32,
    /// Whether doorbells can be mapped: then they are looked at for ever.
    pub maps_doorbells: bool,
}

/// A controller as a PCI function.
pub(super) struct Device {
    pub(super) front: MemoryFrontEnd<Reach, Lines>,
    function: Function,
    pub(super) subsystem: Subsystem,
    bar_bytes: u32,
    vectors: u16,
    doorbells: Option<Doorbells>,
    /// Data that commands look at themselves.
    _buffers: Region,
}

/// Whose device it is: a number of nobody, since none is registered.
const VENDOR: u16 = 0xfff0;
const DEVICE: u16 = 0x0001;

/// Commands that may need more than one request each, per queue.
const AREAS: u16 = 32;
/// Bounce buffers.
const BUFFERS: u32 = 16;
const BUFFER_BYTES: u32 = 64 << 10;

impl Default for DeviceOptions {
    fn default() -> Self {
        let serial = "TENMIL".to_owned();
        Self { serial, queues: 32, entries: 1024, maps_doorbells: false }
    }
}

impl Device {
    /// A controller whose namespaces are these media, with the memory of a client that `maps` will
    /// know.
    pub(super) fn new(
        media: Vec<Arc<dyn Medium>>,
        options: &DeviceOptions,
        maps: &Maps,
        lines: Lines,
        regions: &Regions,
        now: Instant,
    ) -> Result<Self, String> {
        let vectors = options.queues.saturating_add(1);
        let namespaces = media.into_iter().map(NamespaceConfig::new).collect();
        let subsystem = Subsystem::new(SubsystemConfig::new(&options.serial, namespaces))?;
        let config = ControllerConfig {
            pci_vendor: VENDOR,
            queue_entries_max: options.entries,
            io_queues_max: options.queues,
            vectors,
            ..ControllerConfig::default()
        };
        let controller = subsystem.controller(now, config)?;
        let memory = regions.allocate((BUFFERS * BUFFER_BYTES) as usize);
        let memory = memory.map_err(|error| error.to_string())?;
        let buffers = (0..BUFFERS).map(|index| index * BUFFER_BYTES);
        let buffers: Vec<Segment> =
            buffers.filter_map(|at| memory.segment().slice(at, BUFFER_BYTES)).collect();
        let buffers = Buffers::new(Arc::new(regions.clone()), buffers);
        let in_flight_max = u16::try_from(options.entries).unwrap_or(u16::MAX).min(256);
        let front = FrontEndConfig {
            in_flight_max,
            areas: AREAS.min(in_flight_max),
            ..FrontEndConfig::default()
        };
        let front = MemoryFrontEnd::new(controller, maps.reach(), lines, buffers, front);
        let (bar, bar_bytes) = (front.bar(), front.bar().len_bytes());
        let function = Function::new(FunctionShape {
            vendor: VENDOR,
            device: DEVICE,
            bar_bytes,
            vectors,
            table_offset: bar.vector_table_offset(),
            pending_offset: bar.pending_bits_offset(),
        });
        let pairs = bar.doorbells().pair_count();
        let doorbells = options.maps_doorbells;
        let doorbells = doorbells.then(|| Doorbells::new(bar_bytes, pairs)).transpose()?;
        Ok(Self { front, function, subsystem, bar_bytes, vectors, doorbells, _buffers: memory })
    }

    /// Gets ready for a client: what those before it have mapped is not looked at any more.
    pub(super) fn welcome(&mut self) -> Result<(), String> {
        if let Some(doorbells) = &mut self.doorbells {
            *doorbells = doorbells.anew()?;
        }
        Ok(())
    }

    /// What a client is told of it.
    pub(super) fn shape(&self) -> vfu::Device<Arc<OwnedFd>> {
        let plain = |size| RegionShape {
            size,
            is_readable: true,
            is_writable: true,
            ..RegionShape::default()
        };
        let mut regions = vec![(RegionShape::default(), None); region_index::COUNT as usize];
        let mut bar = plain(self.bar_bytes.into());
        let mut file = None;
        if let Some(doorbells) = &self.doorbells {
            let (offset, size) = (doorbells::FIRST.into(), doorbells.len_bytes());
            bar.areas = vec![Area { offset, size }];
            file = Some(Arc::clone(doorbells.file()));
        }
        regions[region_index::BAR0 as usize] = (bar, file);
        regions[region_index::CONFIGURATION as usize] = (plain(CONFIGURATION_BYTES), None);
        let mut irqs = vec![IrqShape::default(); irq_index::COUNT as usize];
        let (count, is_maskable) = (self.vectors.into(), true);
        irqs[irq_index::MSIX as usize] = IrqShape { count, is_maskable, is_fixed: false };
        // Nobody signals these two; clients ask for them all the same.
        for index in [irq_index::ERROR, irq_index::REQUEST] {
            irqs[index as usize] = IrqShape { count: 1, ..IrqShape::default() };
        }
        vfu::Device { regions, irqs }
    }

    /// Reads a region, within its bounds.
    pub(super) fn read(&self, region: u32, offset: u64, into: &mut [u8]) {
        if region == region_index::CONFIGURATION {
            return self.function.read(offset, into);
        }
        let mut at = u32::try_from(offset).unwrap_or(u32::MAX);
        for piece in pieces(into, at) {
            let size = u32::try_from(piece.len()).unwrap_or(4);
            let value = self.front.read(at, size).to_le_bytes();
            piece.copy_from_slice(&value[..piece.len()]);
            at = at.saturating_add(size);
        }
    }

    /// Writes a region, within its bounds. True if the function is to be reset.
    pub(super) fn write(&mut self, now: Instant, region: u32, offset: u64, data: &[u8]) -> bool {
        if region == region_index::CONFIGURATION {
            return match self.function.write(offset, data) {
                Change::Nothing => false,
                Change::Vectors { is_enabled, is_masked } => {
                    self.front.bar().set_vectors(is_enabled, is_masked);
                    false
                }
                Change::Reset => true,
            };
        }
        let mut at = u32::try_from(offset).unwrap_or(u32::MAX);
        if data.len() == 8 && at.is_multiple_of(8) {
            let value = data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            self.front.write(now, at, 8, value);
            return false;
        }
        // Registers are written by whole dwords.
        for dword in data.as_chunks::<4>().0 {
            self.write_dword(now, at, u32::from_le_bytes(*dword));
            at = at.saturating_add(4);
        }
        false
    }

    fn write_dword(&mut self, now: Instant, at: u32, value: u32) {
        let end = self.front.bar().vector_table_offset();
        match &self.doorbells {
            // So that what is mapped and what is sent are one.
            Some(doorbells) if (doorbells::FIRST..end).contains(&at) => {
                doorbells.store_at(at, value);
            }
            _ => self.front.write(now, at, 4, value.into()),
        }
    }

    /// Begins to disable the controller.
    pub(super) fn disable(&mut self, now: Instant) {
        self.front.write(now, register(offset::CC), 4, 0);
    }

    /// Whether it is disabled, and touches nothing.
    pub(super) fn is_disabled(&self) -> bool {
        self.front.read(register(offset::CSTS), 4) & 1 == 0 && self.front.is_quiet()
    }

    /// The function as it was at first. The controller has been disabled.
    pub(super) fn reset(&mut self) {
        self.function.reset();
        self.front.bar().arm_vectors();
    }

    /// Does a bounded amount of work.
    #[inline]
    pub(super) fn turn(&mut self, now: Instant) -> Wait {
        let has_news = match &mut self.doorbells {
            Some(doorbells) => doorbells.look(now, &mut self.front),
            None => false,
        };
        let wait = self.front.turn(now);
        if has_news { Wait::Busy } else { wait }
    }

    /// Whether doorbells are looked at and not heard of.
    pub(super) fn maps_doorbells(&self) -> bool {
        self.doorbells.is_some()
    }
}

fn register(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

/// Cuts a read into aligned pieces of 8, 4, 2 or 1 bytes.
fn pieces(mut rest: &mut [u8], mut at: u32) -> impl Iterator<Item = &mut [u8]> {
    std::iter::from_fn(move || {
        let fits = |size: &u32| at.is_multiple_of(*size) && *size as usize <= rest.len();
        let size = [8, 4, 2, 1].into_iter().find(fits)?;
        let (piece, others) = std::mem::take(&mut rest).split_at_mut(size as usize);
        (rest, at) = (others, at.wrapping_add(size));
        Some(piece)
    })
}
