//! A controller that answers late: what becomes of queue pairs that nobody waits for any more.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::{Dma, Medium, RegionId, Segment, Span, Vector};
use block::Null;
use ctrl::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use ctrl::front::{FrontEndConfig, HostBar, MemoryFrontEnd};
use ctrl::{Buffers, SharedDoorbell};
use dma::{CommandStore, DeviceKind, DevicePool, Regions, SharedHostMemory};
use host::{Clock, EventVectors, Steps};

use super::super::{Attached, Bus, Wanted};
use crate::Refused;

/// A controller in this process, which works only while somebody carries and its gate is open.
#[derive(Clone)]
struct LateBus {
    shared: Arc<Shared>,
}

struct Shared {
    regions: Regions,
    clock: Clock,
    event: EventVectors,
    is_open: AtomicBool,
    device: Mutex<Option<Device>>,
    lost: Mutex<Option<String>>,
}

struct Device {
    pool: DevicePool,
    front: MemoryFrontEnd<SharedHostMemory, EventVectors>,
}

/// One I/O queue, and two vectors.
const QUEUES: u16 = 1;

impl LateBus {
    fn new(regions: &Regions, clock: Clock) -> Self {
        let event = EventVectors::new(QUEUES + 1).unwrap();
        let (device, lost) = (Mutex::default(), Mutex::default());
        let (regions, is_open) = (regions.clone(), AtomicBool::new(true));
        Self { shared: Arc::new(Shared { regions, clock, event, is_open, device, lost }) }
    }

    fn open(&self, is_open: bool) {
        self.shared.is_open.store(is_open, Ordering::Relaxed);
    }

    fn device(&self) -> MutexGuard<'_, Option<Device>> {
        self.shared.device.lock().unwrap()
    }

    fn whole(&self, region: RegionId) -> Segment {
        let len_bytes = self.shared.regions.len_bytes(region);
        Segment { region, offset: 0, len_bytes: u32::try_from(len_bytes).unwrap() }
    }

    /// The controller, whose host has `memory`.
    fn make(&self, memory: RegionId) -> Device {
        let Shared { regions, clock, event, .. } = &*self.shared;
        let (memory, kind) = (self.whole(memory), DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory, kind, CommandStore::Plain);
        let medium: Arc<dyn Medium> = Arc::new(Null::new(512, 64).unwrap());
        let namespaces = vec![NamespaceConfig::new(medium)];
        let subsystem = Subsystem::new(SubsystemConfig::new("LATE", namespaces)).unwrap();
        let config = ControllerConfig {
            io_queues_max: QUEUES,
            vectors: QUEUES + 1,
            ..ControllerConfig::default()
        };
        let controller = subsystem.controller(clock.now(), config).unwrap();
        let buffers = Buffers::new(Arc::new(regions.clone()), Vec::new());
        let (host, options) = (SharedHostMemory::new(&pool), FrontEndConfig::default());
        let front = MemoryFrontEnd::new(controller, host, event.clone(), buffers, options);
        Device { pool, front }
    }
}

impl Bus for LateBus {
    type Registers = HostBar;
    type Doorbell = SharedDoorbell;

    const KIND: DeviceKind = DeviceKind::Emulated;

    fn name(&self) -> &str {
        "late"
    }

    fn what(&self) -> &'static str {
        "what a test has made"
    }

    fn registers(&self) -> HostBar {
        HostBar::new(Arc::clone(self.device().as_ref().unwrap().front.bar()), ())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.descriptor(0).unwrap()
    }

    fn carry(&self) {
        if self.shared.is_open.load(Ordering::Relaxed) {
            self.device().as_mut().unwrap().front.turn(self.shared.clock.now());
        }
    }

    fn lost(&self) -> Option<String> {
        self.shared.lost.lock().unwrap().clone()
    }

    fn lose(&self, why: &str) {
        self.shared.lost.lock().unwrap().get_or_insert_with(|| why.to_owned());
    }

    fn show(&self, region: RegionId) -> Result<u64, Refused> {
        let mut device = self.device();
        let is_first = device.is_none();
        let device = device.get_or_insert_with(|| self.make(region));
        if !is_first {
            device.pool.map(region).unwrap();
        }
        Ok(device.pool.iova(Segment { len_bytes: 1, ..self.whole(region) }).unwrap())
    }

    fn hide(&self, _: RegionId) -> bool {
        true
    }

    fn cut_off(&self) -> bool {
        true
    }

    fn reconnect(&self) {}

    fn vectors(&self) -> u32 {
        u32::from(QUEUES) + 1
    }

    fn vector(&self, number: u16) -> Result<(Box<dyn Vector + Send>, EventVectors), String> {
        let vector = self.shared.event.vector(number).ok_or("there is no such vector")?;
        Ok((Box::new(vector), EventVectors::new(1).unwrap()))
    }
}

#[test]
fn a_queue_pair_that_comes_too_late_costs_none_of_those_that_are_granted() {
    let (regions, clock) = (Regions::new(8), Clock::start());
    let bus = LateBus::new(&regions, clock);
    let wanted = Wanted {
        namespace: 1,
        depth: 3,
        queues: QUEUES,
        shadow_doorbells: false,
        queues_in_cmb: false,
        patience: Span::from_ms(50),
    };
    let attached = Attached::call(&bus, &wanted, &regions, &mut Steps::begin(clock)).unwrap();
    for round in 0..3 {
        let end = clock.now().after(Span::from_secs(20));
        loop {
            bus.open(false);
            let refused = attached.queue().err().unwrap();
            if refused.text == "late: a queue pair was not created in time" {
                break;
            }
            // The last one is not deleted yet.
            assert!(clock.now() < end, "round {round}: {}", refused.text);
            bus.open(true);
            host::thread::rest(Span::from_ms(5));
        }
        let free = attached.shared.lock().vectors_free.len();
        assert_eq!(free, 0, "the one that comes late has it");
        bus.open(true);
        loop {
            match attached.queue() {
                // Once the late one is deleted, and its vector with it.
                Ok(lent) if lent.vector == Some(1) => break,
                Ok(other) => drop(other),
                Err(refused) => assert!(clock.now() < end, "round {round}: {}", refused.text),
            }
        }
        attached.release_vector(1);
    }
}
