//! A slow controller: abandoned requests for queue pairs.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{BlockDevice, Dma, InterruptVector, RegionId, Segment, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, RegionTable, SharedHostMemory};
use tenmil_drivers::NullDevice;
use tenmil_linux::{Clock, EventFdVectors, StepTimer};
use tenmil_nvme_controller::controller::{
    ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::transport::{HostBarHandle, MemoryTransport, MemoryTransportConfig};
use tenmil_nvme_controller::{BouncePool, DoorbellHandle};

use super::super::{AttachOptions, AttachedController, ControllerBus};
use tenmil_base::Error;

/// A controller in this process, which runs only while messages are processed and its gate is open.
#[derive(Clone)]
struct GatedControllerBus {
    shared: Arc<Shared>,
}

struct Shared {
    regions: RegionTable,
    clock: Clock,
    event: EventFdVectors,
    is_open: AtomicBool,
    device: Mutex<Option<Device>>,
    lost: Mutex<Option<String>>,
    /// Wake handles of the vectors that were handed out, by number.
    wake_handles: Mutex<BTreeMap<u16, EventFdVectors>>,
}

struct Device {
    pool: DevicePool,
    front: MemoryTransport<SharedHostMemory, EventFdVectors>,
}

/// One I/O queue, and two interrupt vectors.
const QUEUES: u16 = 1;

impl GatedControllerBus {
    fn new(regions: &RegionTable, clock: Clock) -> Self {
        let event = EventFdVectors::new(QUEUES + 1).unwrap();
        let shared = Shared {
            regions: regions.clone(),
            clock,
            event,
            is_open: AtomicBool::new(true),
            device: Mutex::default(),
            lost: Mutex::default(),
            wake_handles: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    fn set_gate_open(&self, is_open: bool) {
        self.shared.is_open.store(is_open, Ordering::Relaxed);
    }

    fn device(&self) -> MutexGuard<'_, Option<Device>> {
        self.shared.device.lock().unwrap()
    }

    fn whole(&self, region: RegionId) -> Segment {
        let len_bytes = self.shared.regions.len_bytes(region);
        Segment { region, offset: 0, len_bytes: u32::try_from(len_bytes).unwrap() }
    }

    /// Creates the controller; `memory` is the memory of its host.
    fn make(&self, memory: RegionId) -> Device {
        let Shared { regions, clock, event, .. } = &*self.shared;
        let (memory, kind) = (self.whole(memory), DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory, kind, CommandStore::Plain);
        let medium: Arc<dyn BlockDevice> = Arc::new(NullDevice::new(512, 64).unwrap());
        let namespaces = vec![NamespaceConfig::new(medium)];
        let subsystem = Subsystem::new(SubsystemConfig::new("LATE", namespaces)).unwrap();
        let config = ControllerConfig {
            io_queues_max: QUEUES,
            vectors: QUEUES + 1,
            ..ControllerConfig::default()
        };
        let controller = subsystem.open_controller(clock.now(), config).unwrap();
        let buffers = BouncePool::new(Arc::new(regions.clone()), Vec::new());
        let (host, options) = (SharedHostMemory::new(&pool), MemoryTransportConfig::default());
        let front = MemoryTransport::new(controller, host, event.clone(), buffers, options);
        Device { pool, front }
    }
}

impl ControllerBus for GatedControllerBus {
    type Registers = HostBarHandle;
    type Doorbell = DoorbellHandle;

    const KIND: DeviceKind = DeviceKind::Emulated;

    fn name(&self) -> &str {
        "late"
    }

    fn describe(&self) -> &'static str {
        "what a test has made"
    }

    fn registers(&self) -> HostBarHandle {
        HostBarHandle::new(Arc::clone(self.device().as_ref().unwrap().front.bar_registers()), ())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.descriptor(0).unwrap()
    }

    fn process_messages(&self) {
        if self.shared.is_open.load(Ordering::Relaxed) {
            self.device().as_mut().unwrap().front.poll(self.shared.clock.now());
        }
    }

    fn lost_reason(&self) -> Option<String> {
        self.shared.lost.lock().unwrap().clone()
    }

    fn mark_lost(&self, why: &str) {
        self.shared.lost.lock().unwrap().get_or_insert_with(|| why.to_owned());
    }

    fn map(&self, region: RegionId) -> Result<u64, Error> {
        let mut device = self.device();
        let is_first = device.is_none();
        let device = device.get_or_insert_with(|| self.make(region));
        if !is_first {
            device.pool.map(region).unwrap();
        }
        Ok(device.pool.iova(Segment { len_bytes: 1, ..self.whole(region) }).unwrap())
    }

    fn unmap(&self, _: RegionId) -> bool {
        true
    }

    fn revoke_dma_access(&self) -> bool {
        true
    }

    fn restore_dma_access(&self) {}

    fn interrupt_vector_count(&self) -> u32 {
        u32::from(QUEUES) + 1
    }

    fn vector(
        &self,
        number: u16,
    ) -> Result<(Box<dyn InterruptVector + Send>, EventFdVectors), Error> {
        let vector = self
            .shared
            .event
            .vector(number)
            .ok_or("there is no such vector")
            .map_err(Error::environment)?;
        let wake_handle = EventFdVectors::new(1).unwrap();
        self.shared.wake_handles.lock().unwrap().insert(number, wake_handle.clone());
        Ok((Box::new(vector), wake_handle))
    }
}

const OPTIONS: AttachOptions = AttachOptions {
    namespace: 1,
    depth: 3,
    queues: QUEUES,
    shadow_doorbells: false,
    queues_in_cmb: false,
    time_limit: Span::from_ms(50),
};

#[test]
fn state_change_of_a_queue_wakes_the_thread_that_sleeps_on_its_interrupt() {
    let (regions, clock) = (RegionTable::new(8), Clock::start());
    let bus = GatedControllerBus::new(&regions, clock);
    let options = AttachOptions { time_limit: Span::from_secs(20), ..OPTIONS };
    let timer = &mut StepTimer::begin(clock);
    let attached = AttachedController::attach(&bus, &options, &regions, timer).unwrap();
    let leased = attached.create_queue_pair().unwrap();
    let wake_handle = bus.shared.wake_handles.lock().unwrap()[&leased.vector.unwrap()].clone();
    // States up to the one that it runs in.
    wake_handle.clear_signals(0);
    assert!(!wake_handle.clear_signals(0), "nothing signals a queue that runs");
    attached.shared.lock().controller().unwrap().reset(clock.now()).unwrap();
    let is_signaled = wake_handle.wait_for_signal(0, Span::from_secs(20)).unwrap();
    assert!(is_signaled, "the queue is to quiesce, which no interrupt announces");
}

#[test]
fn late_queue_pair_does_not_reduce_the_granted_ones() {
    let (regions, clock) = (RegionTable::new(8), Clock::start());
    let bus = GatedControllerBus::new(&regions, clock);
    let attached =
        AttachedController::attach(&bus, &OPTIONS, &regions, &mut StepTimer::begin(clock)).unwrap();
    for round in 0..3 {
        let end = clock.now().after(Span::from_secs(20));
        loop {
            bus.set_gate_open(false);
            let refused = attached.create_queue_pair().err().unwrap();
            if refused.text == "late: a queue pair was not created in time" {
                break;
            }
            // The previous queue pair is not deleted yet.
            assert!(clock.now() < end, "round {round}: {}", refused.text);
            bus.set_gate_open(true);
            tenmil_linux::named_thread::sleep(Span::from_ms(5));
        }
        let free = attached.shared.lock().vectors_free.len();
        assert_eq!(free, 0, "the one that comes late has it");
        bus.set_gate_open(true);
        loop {
            match attached.create_queue_pair() {
                // The late queue pair is deleted, and its vector is free.
                Ok(leased) if leased.vector == Some(1) => break,
                Ok(other) => drop(other),
                Err(refused) => assert!(clock.now() < end, "round {round}: {}", refused.text),
            }
        }
        attached.release_vector(1);
    }
}
