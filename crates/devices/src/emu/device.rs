//! Device side of an emulated SSD, polled by a device thread.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Dma, Error, Instant, Interrupts};
use tenmil_dma::{DevicePool, DeviceThreadRegistration, SharedHostMemory};
use tenmil_linux::{EventFdVectors, Notifier};
use tenmil_nvme_controller::BouncePool;
use tenmil_nvme_controller::controller::{
    ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::transport::{
    HostBarHandle, MemoryTransport, MemoryTransportConfig, NextPoll,
};

use crate::EmuSpec;

/// Device side of one emulated SSD.
pub struct EmulatedSsd<I: Interrupts = EventFdVectors> {
    front: MemoryTransport<SharedHostMemory, I>,
    /// Dropped after the front end, which accesses host memory until it is dropped.
    attachment: Option<DeviceThreadRegistration>,
}

/// Number of commands per queue that may be split into several requests at the same time.
const AREAS: u16 = 32;

/// Bounce buffers of an SSD.
const BUFFERS: u32 = 4;
const BUFFER_BYTES: u32 = 64 << 10;

/// Bytes of the pool that the device side uses.
pub(super) const DEVICE_BYTES: u64 = BUFFERS as u64 * BUFFER_BYTES as u64;

impl<I: Interrupts> EmulatedSsd<I> {
    /// Creates SSD number `index` of the run from `spec`. Queues whose vector is missing from
    /// `vectors` are never signaled.
    pub fn new(
        spec: &EmuSpec,
        index: usize,
        medium: Arc<dyn BlockDevice>,
        pool: &DevicePool,
        vectors: I,
        now: Instant,
    ) -> Result<Self, Error> {
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
        let controller = subsystem.open_controller(now, config)?;
        let in_flight_max = u16::try_from(*entries).unwrap_or(u16::MAX);
        let front = MemoryTransportConfig {
            in_flight_max,
            contexts_max: AREAS.min(in_flight_max),
            burst: u32::from(in_flight_max),
            ..MemoryTransportConfig::default()
        };
        // Block devices access the data of reads and writes in place. These buffers are for
        // commands that the controller executes itself, such as a Compare that the block device
        // does not support.
        let buffers = (0..BUFFERS).map_while(|_| pool.allocate(BUFFER_BYTES)).collect();
        let buffers = BouncePool::new(Arc::new(pool.clone()), buffers);
        let host = SharedHostMemory::new(pool);
        let front = MemoryTransport::new(controller, host, vectors, buffers, front);
        Ok(Self { front, attachment: None })
    }

    /// Registers the device thread that will poll this SSD, woken by `notifier`. Revoking the access to
    /// `pool` then waits for that thread.
    pub(super) fn register_device_thread(&mut self, pool: &DevicePool, notifier: Notifier) {
        self.attachment = Some(pool.attach_device_thread(notifier));
    }

    /// Host view of the registers; doorbell writes wake the device thread through `device`.
    pub fn host_bar<W>(&self, device: W) -> HostBarHandle<W> {
        HostBarHandle::new(Arc::clone(self.front.bar_registers()), device)
    }

    /// Performs a bounded amount of work.
    #[inline]
    pub fn poll(&mut self, now: Instant) -> NextPoll {
        self.front.poll(now)
    }

    /// Announces that the thread will sleep and checks for work once more. Returns the time until
    /// which it may sleep, or none if there is work.
    pub(super) fn arm(&mut self, now: Instant) -> Option<Instant> {
        self.front.arm_wakeup(now)
    }

    /// Ends the announcement of [`arm`](Self::arm) after the thread has woken up.
    pub(super) fn disarm(&mut self) {
        self.front.disarm_wakeup();
    }

    /// Passes each new descriptor that must wake the thread to `each`, once.
    pub(super) fn for_each_new_wake_descriptor(&mut self, each: impl FnMut(BorrowedFd<'_>)) {
        self.front.for_each_new_wake_fd(each);
    }
}
