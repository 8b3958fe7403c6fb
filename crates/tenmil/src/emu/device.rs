//! The device's side: one SSD behind its registers, as a thread turns it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{Dma, Instant, Interrupts, Medium};
use ctrl::Buffers;
use ctrl::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use ctrl::front::{FrontEndConfig, HostBar, MemoryFrontEnd, Wait};
use dma::{Attachment, DevicePool, SharedHostMemory};
use host::{Bell, EventVectors};

use crate::EmuSpec;

/// One emulated SSD, as its device's thread turns it.
pub(crate) struct EmulatedSsd<I: Interrupts = EventVectors> {
    front: MemoryFrontEnd<SharedHostMemory, I>,
    /// Dropped after the front end: who is gone touches nothing.
    attachment: Option<Attachment>,
}

/// Commands that may need more than one request each, per queue.
const AREAS: u16 = 32;

/// Bounce buffers of an SSD.
const BUFFERS: u32 = 4;
const BUFFER_BYTES: u32 = 64 << 10;

/// Bytes of a pool that the device's side takes for itself.
pub(super) const DEVICE_BYTES: u64 = BUFFERS as u64 * BUFFER_BYTES as u64;

impl<I: Interrupts> EmulatedSsd<I> {
    /// SSD number `index` of the run, of the kind that `spec` names. Queues whose vector `vectors`
    /// does not have are never signalled.
    pub(crate) fn new(
        spec: &EmuSpec,
        index: usize,
        medium: Arc<dyn Medium>,
        pool: &DevicePool,
        vectors: I,
        now: Instant,
    ) -> Result<Self, String> {
        let EmuSpec { entries, queues, .. } = spec;
        let namespaces = vec![NamespaceConfig::new(medium)];
        let subsystem =
            Subsystem::new(SubsystemConfig::new(&format!("EMU{index:05}"), namespaces))?;
        let config = ControllerConfig {
            queue_entries_max: *entries,
            io_queues_max: *queues,
            vectors: queues.saturating_add(1),
            ..ControllerConfig::default()
        };
        let controller = subsystem.controller(now, config)?;
        let in_flight_max = u16::try_from(*entries).unwrap_or(u16::MAX);
        let front = FrontEndConfig {
            in_flight_max,
            areas: AREAS.min(in_flight_max),
            burst: u32::from(in_flight_max),
            ..FrontEndConfig::default()
        };
        // Media reach the data of reads and writes where they lie; the buffers are for commands that
        // look at data themselves, such as a compare that the medium does not know.
        let buffers = (0..BUFFERS).map_while(|_| pool.allocate(BUFFER_BYTES)).collect();
        let buffers = Buffers::new(Arc::new(pool.clone()), buffers);
        let host = SharedHostMemory::new(pool);
        let front = MemoryFrontEnd::new(controller, host, vectors, buffers, front);
        Ok(Self { front, attachment: None })
    }

    /// It is going to have a thread, which `bell` wakes: its host then waits for that thread when
    /// it cuts the SSD off from `pool`.
    pub(super) fn attach(&mut self, pool: &DevicePool, bell: Bell) {
        self.attachment = Some(pool.attach(bell));
    }

    /// The registers, as the host holds them that wakes the device through `device`.
    pub(crate) fn host_bar<W>(&self, device: W) -> HostBar<W> {
        HostBar::new(Arc::clone(self.front.bar()), device)
    }

    /// Does a bounded amount of work.
    #[inline]
    pub(crate) fn turn(&mut self, now: Instant) -> Wait {
        self.front.turn(now)
    }

    /// Gets ready for a sleep of the thread and looks once more: until when it may sleep.
    pub(super) fn arm(&mut self, now: Instant) -> Option<Instant> {
        self.front.arm(now)
    }

    /// The thread is awake.
    pub(super) fn disarm(&mut self) {
        self.front.disarm();
    }

    /// Descriptors that will wake the thread, each handed out once.
    pub(super) fn new_descriptors(&mut self, each: impl FnMut(BorrowedFd<'_>)) {
        self.front.new_descriptors(each);
    }
}
