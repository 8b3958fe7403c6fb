//! A controller behind a server of rust-vmm.
//!
//! ```text
//!   vfio_user::Server ── its thread: registers, maps, vectors ──┐
//!                                                               ├── LockedPeer: the front end, what is mapped
//!                        a thread that turns the controller ────┘
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tenmil_base::{
    AccessFault, AccessId, AccessProgress, BlockDevice, HostMemory, Interrupts, Memory, RingMemory,
    Segment,
};
use tenmil_dma::{FileRange, ForeignRegion, RegionTable, SharedRingEntries};
use tenmil_drivers::RamDevice;
use tenmil_linux::Clock;
use tenmil_nvme_controller::BouncePool;
use tenmil_nvme_controller::controller::{
    ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::transport::{MemoryTransport, MemoryTransportConfig, NextPoll};
use tenmil_vfio_user::config_space::{
    CONFIGURATION_BYTES, ConfigSpace, ConfigSpaceChange, ConfigSpaceConfig,
};
use tenmil_vfio_user::{irq_index, region_index};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion};

/// Serves clients, one after the other.
pub(crate) fn serve(path: &Path) {
    let peer = VfioUserPeer::new();
    let regions = peer.regions();
    let locked = Arc::clone(&peer.locked);
    std::thread::spawn(move || {
        loop {
            let wait = VfioUserPeer::lock(&locked).poll_controller();
            if wait != NextPoll::Busy {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    });
    let mut peer = peer;
    let irqs = (0..irq_index::COUNT).map(|index| {
        let count = if index == irq_index::MSIX { VECTORS.into() } else { 0 };
        // VFIO_IRQ_INFO_EVENTFD
        IrqInfo { index, flags: 1, count }
    });
    let server = Server::new(path, true, irqs.collect(), regions).unwrap();
    loop {
        // One that goes in the middle of a message is a client that goes.
        let _ = server.run(&mut peer);
        peer.forget_client();
    }
}

/// What its serial number is, and how long its namespace.
pub(crate) const SERIAL: &str = "PEER";
pub(crate) const BLOCKS: u64 = 8192;

const QUEUES: u16 = 4;
const VECTORS: u16 = QUEUES + 1;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
/// VFIO_REGION_INFO_FLAG_READ and _WRITE.
const READ_WRITE: u32 = 3;

/// The controller's owner.
struct VfioUserPeer {
    locked: Arc<Mutex<LockedPeer>>,
    maps: DmaMaps,
    regions: RegionTable,
    vectors: EventFdVectors,
    function: ConfigSpace,
    bar_bytes: u32,
}

struct LockedPeer {
    front: MemoryTransport<GuestMemory, EventFdVectors>,
    clock: Clock,
}

impl LockedPeer {
    fn poll_controller(&mut self) -> NextPoll {
        self.front.poll(self.clock.now())
    }
}

/// What a client has mapped, by its address.
type DmaMaps = Arc<Mutex<BTreeMap<u64, ForeignRegion>>>;

/// The controller's way to it.
#[derive(Clone)]
struct GuestMemory {
    maps: DmaMaps,
    regions: RegionTable,
}

/// Files that are written to when a vector is signalled.
#[derive(Clone, Default)]
struct EventFdVectors(Arc<Mutex<BTreeMap<u16, File>>>);

impl Interrupts for EventFdVectors {
    fn raise(&mut self, vector: u16) {
        if let Some(file) = self.0.lock().unwrap().get_mut(&vector) {
            file.write_all(&1_u64.to_ne_bytes()).unwrap();
        }
    }
}

impl GuestMemory {
    fn segment(&self, iova: u64, len_bytes: usize) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        let maps = self.maps.lock().unwrap();
        let (begin, map) = maps.range(..=iova).next_back().ok_or(fault)?;
        let skip = iova - begin;
        let fits = skip + len_bytes as u64 <= map.len_bytes();
        let len_bytes = u32::try_from(len_bytes).map_err(|_| fault)?;
        let segment = Segment { region: map.id(), offset: map.offset() + skip, len_bytes };
        fits.then_some(segment).ok_or(fault)
    }
}

impl RingMemory for GuestMemory {
    type Entries = SharedRingEntries;

    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<SharedRingEntries>, AccessFault> {
        let segment = self.segment(iova, usize::try_from(len_bytes).unwrap())?;
        SharedRingEntries::new(&self.regions, segment, iova).map(Some)
    }
}

impl HostMemory for GuestMemory {
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        self.segment(iova, len_bytes as usize).map(Some)
    }

    fn read(
        &mut self,
        _: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        let segment = self.segment(iova, into.len())?;
        self.regions.load(segment, into).unwrap();
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        _: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        let segment = self.segment(iova, from.len())?;
        self.regions.store(segment, from).unwrap();
        Ok(AccessProgress::Done)
    }
}

impl VfioUserPeer {
    fn new() -> Self {
        let (regions, clock) = (RegionTable::new(64), Clock::start());
        let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, 512, BLOCKS).unwrap());
        let namespaces = vec![NamespaceConfig::new(ram)];
        let subsystem = Subsystem::new(SubsystemConfig::new(SERIAL, namespaces)).unwrap();
        let config = ControllerConfig {
            queue_entries_max: 256,
            io_queues_max: QUEUES,
            vectors: VECTORS,
            ..ControllerConfig::default()
        };
        let controller = subsystem.open_controller(clock.now(), config).unwrap();
        let (maps, vectors) = (DmaMaps::default(), EventFdVectors::default());
        let guest = GuestMemory { maps: Arc::clone(&maps), regions: regions.clone() };
        let buffers = BouncePool::new(Arc::new(regions.clone()), Vec::new());
        let options = MemoryTransportConfig::default();
        let front = MemoryTransport::new(controller, guest, vectors.clone(), buffers, options);
        let (bar, bar_bytes) = (front.bar_registers(), front.bar_registers().len_bytes());
        let function = ConfigSpace::new(ConfigSpaceConfig {
            vendor: 0xfff0,
            device: 1,
            bar_bytes,
            vectors: VECTORS,
            table_offset: bar.vector_table_offset(),
            pending_offset: bar.pending_bits_offset(),
        });
        let locked = Arc::new(Mutex::new(LockedPeer { front, clock }));
        Self { locked, maps, regions, vectors, function, bar_bytes }
    }

    fn regions(&self) -> Vec<ServerRegion> {
        let region = |index| {
            let size = match index {
                region_index::BAR0 => self.bar_bytes.into(),
                region_index::CONFIGURATION => CONFIGURATION_BYTES,
                _ => 0,
            };
            let flags = if size > 0 { READ_WRITE } else { 0 };
            let (sparse_areas, mmap_fd) = (Vec::new(), None);
            let mut region =
                ServerRegion { region_info: Default::default(), sparse_areas, mmap_fd };
            let info = &mut region.region_info;
            (info.index, info.size, info.flags) = (index, size, flags);
            info.argsz = 32;
            region
        };
        (0..region_index::COUNT).map(region).collect()
    }

    fn lock(locked: &Mutex<LockedPeer>) -> MutexGuard<'_, LockedPeer> {
        locked.lock().unwrap()
    }

    /// Turns the controller until it is as is wanted.
    fn poll_until(
        locked: &mut LockedPeer,
        is_so: impl Fn(&MemoryTransport<GuestMemory, EventFdVectors>) -> bool,
    ) {
        while !is_so(&locked.front) {
            locked.poll_controller();
        }
    }

    fn reset_controller(&mut self) {
        let mut locked = Self::lock(&self.locked);
        let now = locked.clock.now();
        locked.front.write_register(now, CC, 4, 0);
        locked.poll_controller();
        Self::poll_until(&mut locked, |front| {
            front.read_register(CSTS, 4) & 1 == 0 && front.is_quiesced()
        });
        locked.front.bar_registers().enable_and_unmask_vectors();
        self.function.reset();
    }

    fn forget_client(&mut self) {
        self.reset_controller();
        self.maps.lock().unwrap().clear();
        self.vectors.0.lock().unwrap().clear();
    }
}

impl ServerBackend for VfioUserPeer {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if region == region_index::CONFIGURATION {
            self.function.read(offset, data);
        } else {
            let locked = Self::lock(&self.locked);
            let size = u32::try_from(data.len()).unwrap();
            let value = locked.front.read_register(u32::try_from(offset).unwrap(), size);
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if region == region_index::CONFIGURATION {
            match self.function.write(offset, data) {
                ConfigSpaceChange::Nothing => {}
                ConfigSpaceChange::Vectors { is_enabled, is_masked } => {
                    Self::lock(&self.locked)
                        .front
                        .bar_registers()
                        .set_msix_control(is_enabled, is_masked);
                }
                ConfigSpaceChange::Reset => self.reset_controller(),
            }
            return Ok(());
        }
        let mut bytes = [0; 8];
        bytes[..data.len()].copy_from_slice(data);
        let (at, size) = (u32::try_from(offset).unwrap(), u32::try_from(data.len()).unwrap());
        let mut locked = Self::lock(&self.locked);
        let now = locked.clock.now();
        locked.front.write_register(now, at, size, u64::from_le_bytes(bytes));
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        len_bytes: u64,
        file: Option<File>,
    ) -> io::Result<()> {
        assert!(flags.contains(DmaMapFlags::READ_WRITE), "{flags:?}");
        let file = file.ok_or(io::ErrorKind::Unsupported)?;
        let part = FileRange { offset, len_bytes };
        let adopted = self.regions.map_foreign(file.as_fd(), part).map_err(io::Error::other)?;
        self.maps.lock().unwrap().insert(address, adopted);
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, address: u64, len_bytes: u64) -> io::Result<()> {
        let mut locked = Self::lock(&self.locked);
        locked.front.set_paused(true);
        Self::poll_until(&mut locked, MemoryTransport::is_quiesced);
        let gone = self.maps.lock().unwrap().remove(&address);
        locked.front.set_paused(false);
        let gone = gone.ok_or(io::ErrorKind::NotFound)?;
        assert_eq!(gone.len_bytes(), len_bytes);
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.reset_controller();
        Ok(())
    }

    fn set_irqs(
        &mut self,
        index: u32,
        _: u32,
        start: u32,
        count: u32,
        files: Vec<File>,
    ) -> io::Result<()> {
        assert_eq!((index, count as usize), (irq_index::MSIX, files.len()));
        let numbers = u16::try_from(start).unwrap()..;
        self.vectors.0.lock().unwrap().extend(numbers.zip(files));
        Ok(())
    }
}
