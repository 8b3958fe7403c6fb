//! NVMe controller as a PCI function: BAR 0 and configuration space.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Error, Instant, Segment};
use tenmil_dma::{Region, RegionTable};
use tenmil_nvme_controller::BouncePool;
use tenmil_nvme_controller::controller::{
    ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::transport::{MemoryTransport, MemoryTransportConfig, NextPoll};
use tenmil_vfio_user::config_space::{
    CONFIGURATION_BYTES, ConfigSpace, ConfigSpaceChange, ConfigSpaceConfig,
};
use tenmil_vfio_user::{IrqInfo, RegionInfo, SparseMmapArea, irq_index, region_index};
use tenmil_wire::register::offset;

use super::client_memory::{ClientMemory, DmaMappings};
use super::doorbells::{self, DoorbellPage};
use super::irq_eventfds::IrqEventFds;

/// Properties of the controller.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// Serial number.
    pub serial: String,
    /// Largest number of I/O queues: 1 to 63.
    pub queues: u16,
    /// Largest number of entries in a queue.
    pub entries: u32,
    /// Whether doorbells can be mapped, which requires permanent polling.
    pub maps_doorbells: bool,
}

/// NVMe controller presented as a PCI function.
pub(super) struct NvmePciFunction {
    pub(super) front: MemoryTransport<ClientMemory, IrqEventFds>,
    function: ConfigSpace,
    pub(super) subsystem: Subsystem,
    bar_bytes: u32,
    vectors: u16,
    doorbells: Option<DoorbellPage>,
    /// Memory of the bounce buffers.
    _buffers: Region,
}

/// Vendor and device id. The vendor id is not assigned to anyone.
const VENDOR: u16 = 0xfff0;
const DEVICE: u16 = 0x0001;

/// Number of commands per queue that may be split into several requests at the same time.
const AREAS: u16 = 32;
/// Number of bounce buffers.
const BUFFERS: u32 = 16;
const BUFFER_BYTES: u32 = 64 << 10;

impl Default for ControllerOptions {
    fn default() -> Self {
        let serial = "TENMIL".to_owned();
        Self { serial, queues: 32, entries: 1024, maps_doorbells: false }
    }
}

impl NvmePciFunction {
    /// Creates a controller with one namespace per block device, which accesses client memory
    /// through `mappings`.
    pub(super) fn new(
        media: Vec<Arc<dyn BlockDevice>>,
        options: &ControllerOptions,
        mappings: &DmaMappings,
        irqs: IrqEventFds,
        regions: &RegionTable,
        now: Instant,
    ) -> Result<Self, Error> {
        // One vector for each I/O queue and one for the admin queue.
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
        let controller = subsystem.open_controller(now, config)?;
        let memory = regions.allocate_region((BUFFERS * BUFFER_BYTES) as usize);
        let memory = memory.map_err(Error::environment)?;
        let buffers = (0..BUFFERS).map(|index| index * BUFFER_BYTES);
        let buffers: Vec<Segment> =
            buffers.filter_map(|at| memory.segment().slice(at, BUFFER_BYTES)).collect();
        let buffers = BouncePool::new(Arc::new(regions.clone()), buffers);
        let in_flight_max = u16::try_from(options.entries).unwrap_or(u16::MAX).min(256);
        let front = MemoryTransportConfig {
            in_flight_max,
            contexts_max: AREAS.min(in_flight_max),
            ..MemoryTransportConfig::default()
        };
        let front =
            MemoryTransport::new(controller, mappings.client_memory(), irqs, buffers, front);
        let (bar, bar_bytes) = (front.bar_registers(), front.bar_registers().len_bytes());
        let function = ConfigSpace::new(ConfigSpaceConfig {
            vendor: VENDOR,
            device: DEVICE,
            bar_bytes,
            vectors,
            table_offset: bar.vector_table_offset(),
            pending_offset: bar.pending_bits_offset(),
        });
        let pairs = bar.doorbells().pair_count();
        let doorbells = options.maps_doorbells;
        let doorbells = doorbells.then(|| DoorbellPage::new(bar_bytes, pairs)).transpose()?;
        Ok(Self { front, function, subsystem, bar_bytes, vectors, doorbells, _buffers: memory })
    }

    /// Prepares for a new client: replaces the doorbell page, which earlier clients may still have
    /// mapped.
    pub(super) fn replace_doorbell_page(&mut self) -> Result<(), Error> {
        if let Some(doorbells) = &mut self.doorbells {
            *doorbells = doorbells.new_for_next_client()?;
        }
        Ok(())
    }

    /// Device description for the client: regions and interrupts.
    pub(super) fn device_info(&self) -> tenmil_vfio_user::DeviceInfo<Arc<OwnedFd>> {
        let plain = |size| RegionInfo {
            size,
            is_readable: true,
            is_writable: true,
            ..RegionInfo::default()
        };
        let mut regions = vec![(RegionInfo::default(), None); region_index::COUNT as usize];
        let mut bar = plain(self.bar_bytes.into());
        let mut file = None;
        if let Some(doorbells) = &self.doorbells {
            let (offset, size) = (doorbells::FIRST.into(), doorbells.len_bytes());
            bar.areas = vec![SparseMmapArea { offset, size }];
            file = Some(Arc::clone(doorbells.shared_file()));
        }
        regions[region_index::BAR0 as usize] = (bar, file);
        regions[region_index::CONFIGURATION as usize] = (plain(CONFIGURATION_BYTES), None);
        let mut irqs = vec![IrqInfo::default(); irq_index::COUNT as usize];
        let (count, is_maskable) = (self.vectors.into(), true);
        irqs[irq_index::MSIX as usize] = IrqInfo { count, is_maskable, is_fixed: false };
        // These interrupts are never raised, but clients configure them.
        for index in [irq_index::ERROR, irq_index::REQUEST] {
            irqs[index as usize] = IrqInfo { count: 1, ..IrqInfo::default() };
        }
        tenmil_vfio_user::DeviceInfo { regions, irqs }
    }

    /// Reads from a region, within its bounds.
    pub(super) fn read_region(&self, region: u32, offset: u64, into: &mut [u8]) {
        if region == region_index::CONFIGURATION {
            return self.function.read(offset, into);
        }
        let mut at = u32::try_from(offset).unwrap_or(u32::MAX);
        for piece in aligned_pieces(into, at) {
            let size = u32::try_from(piece.len()).unwrap_or(4);
            let value = self.front.read_register(at, size).to_le_bytes();
            piece.copy_from_slice(&value[..piece.len()]);
            at = at.saturating_add(size);
        }
    }

    /// Writes to a region, within its bounds. Returns whether the function must be reset.
    pub(super) fn write_region(
        &mut self,
        now: Instant,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> bool {
        if region == region_index::CONFIGURATION {
            return match self.function.write(offset, data) {
                ConfigSpaceChange::Nothing => false,
                ConfigSpaceChange::Vectors { is_enabled, is_masked } => {
                    self.front.bar_registers().set_msix_control(is_enabled, is_masked);
                    false
                }
                ConfigSpaceChange::Reset => true,
            };
        }
        let mut at = u32::try_from(offset).unwrap_or(u32::MAX);
        if data.len() == 8 && at.is_multiple_of(8) {
            let value = data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            self.front.write_register(now, at, 8, value);
            return false;
        }
        // Registers are written as whole dwords.
        for dword in data.as_chunks::<4>().0 {
            self.write_dword(now, at, u32::from_le_bytes(*dword));
            at = at.saturating_add(4);
        }
        false
    }

    fn write_dword(&mut self, now: Instant, at: u32, value: u32) {
        let end = self.front.bar_registers().vector_table_offset();
        match &self.doorbells {
            // Keep the mapped page consistent with writes by message.
            Some(doorbells) if (doorbells::FIRST..end).contains(&at) => {
                doorbells.store_at_offset(at, value);
            }
            _ => self.front.write_register(now, at, 4, value.into()),
        }
    }

    /// Starts to disable the controller.
    pub(super) fn start_disabling_controller(&mut self, now: Instant) {
        self.front.write_register(now, register_offset(offset::CC), 4, 0);
    }

    /// Whether the controller is disabled and does no DMA.
    pub(super) fn is_controller_disabled(&self) -> bool {
        self.front.read_register(register_offset(offset::CSTS), 4) & 1 == 0
            && self.front.is_quiesced()
    }

    /// Resets the function. The controller must be disabled.
    pub(super) fn reset_function(&mut self) {
        self.function.reset();
        self.front.bar_registers().enable_and_unmask_vectors();
    }

    /// Does a bounded amount of work.
    #[inline]
    pub(super) fn poll_controller(&mut self, now: Instant) -> NextPoll {
        let has_new_events = match &mut self.doorbells {
            Some(doorbells) => doorbells.poll_doorbells(now, &mut self.front),
            None => false,
        };
        let wait = self.front.poll(now);
        if has_new_events { NextPoll::Busy } else { wait }
    }

    /// Whether doorbells are polled, because their writes give no wake-up.
    pub(super) fn has_mapped_doorbells(&self) -> bool {
        self.doorbells.is_some()
    }
}

fn register_offset(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

/// Splits a read into aligned pieces of 8, 4, 2 or 1 bytes.
fn aligned_pieces(mut rest: &mut [u8], mut at: u32) -> impl Iterator<Item = &mut [u8]> {
    std::iter::from_fn(move || {
        let fits = |size: &u32| at.is_multiple_of(*size) && *size as usize <= rest.len();
        let size = [8, 4, 2, 1].into_iter().find(fits)?;
        let (piece, others) = std::mem::take(&mut rest).split_at_mut(size as usize);
        (rest, at) = (others, at.wrapping_add(size));
        Some(piece)
    })
}
