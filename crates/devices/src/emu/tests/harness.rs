//! An emulated SSD without a thread, and the queue pair of its host, for tests in simulated time.
//! Both sleepers are words in memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, Dma, Instant, Interrupts, IoChannel, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_base::{InterruptVector, Wake};
use tenmil_dma::{DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_drivers::{ModelProfile, ModeledLatencyDevice, NullDevice};
use tenmil_linux::{EventFdVectors, EventLoop, NextStep, Sleeper};
use tenmil_nvme_controller::transport::HostBarHandle;
use tenmil_nvme_host::{
    Controller, ControllerOptions, ControllerState, NamespaceQueue, QueuePairOptions, QueueSizes,
};

use crate::emu::device_thread::DeviceLoop;
use crate::emu::{EmulatedSsd, NSID, command_store};
use crate::fast_path_switches::FastPathSwitches;
use crate::{EmuMedium, EmuSpec};

/// SSD and host of a test.
pub(super) struct EmulationHarness {
    pub(super) device: Device,
    /// The only queue pair.
    pub(super) queue: Box<dyn IoChannel>,
    /// Sleeper of the host, woken by the vector of the queue pair.
    pub(super) host_sleeper: SimulatedSleeper,
    pub(super) buffer: Segment,
    pub(super) now: Instant,
    /// Not dropped before the queue pair, whose DMA access it would revoke.
    pub(super) controller: HarnessController,
}

/// Controller that has created the queue pair.
pub(super) type HarnessController = Controller<HostBarHandle<DoorbellWaker>, DevicePool>;

/// An injected bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedBug {
    Nothing,
    /// The device sleeps without a second check.
    DeviceLooksOnce,
    /// The host sleeps without a second check.
    HostLooksOnce,
    /// Doorbells do not wake the device.
    MuteBell,
}

impl InjectedBug {
    pub(super) const MISTAKES: [Self; 3] =
        [Self::DeviceLooksOnce, Self::HostLooksOnce, Self::MuteBell];
}

/// Time after which a completion counts as lost.
pub(super) const LOST_AFTER: Span = Span::from_ms(100);

/// Device side, executed step by step.
pub(super) struct Device {
    turn: DeviceLoop<SimulatedSleeper>,
    simulated_sleeper: SimulatedSleeper,
    pub(super) is: DevicePhase,
    looks_once: bool,
    pub(super) sleeps: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum DevicePhase {
    Awake,
    /// No work was found; about to arm.
    Tired(Instant),
    Announced(Instant),
    Asleep(Instant),
}

/// A sleeper without a thread.
#[derive(Clone, Default)]
pub(super) struct SimulatedSleeper(Arc<SleeperState>);

#[derive(Default)]
struct SleeperState {
    /// Armed.
    is_announced: AtomicBool,
    is_woken: AtomicBool,
}

impl SimulatedSleeper {
    pub(super) fn announce(&self) {
        self.0.is_announced.store(true, Ordering::Relaxed);
    }

    pub(super) fn withdraw(&self) {
        self.0.is_announced.store(false, Ordering::Relaxed);
        self.0.is_woken.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_woken(&self) -> bool {
        self.0.is_woken.load(Ordering::Relaxed)
    }
}

impl Wake for SimulatedSleeper {
    fn wake(&self) {
        if self.0.is_announced.swap(false, Ordering::Relaxed) {
            self.0.is_woken.store(true, Ordering::Relaxed);
        }
    }
}

/// The only vector of the I/O queue, both ends of it.
struct SimulatedInterruptVector {
    simulated_sleeper: SimulatedSleeper,
    /// A descriptor that is never signaled.
    silent: EventFdVectors,
}

impl Interrupts for SimulatedSleeper {
    fn raise(&mut self, vector: u16) {
        if vector == 1 {
            self.wake();
        }
    }
}

impl InterruptVector for SimulatedInterruptVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.silent.descriptor(0).expect("it was made with one vector")
    }

    fn unmask(&mut self) -> bool {
        self.simulated_sleeper.withdraw();
        self.simulated_sleeper.announce();
        true
    }

    fn mask(&mut self) {
        self.simulated_sleeper.withdraw();
    }
}

/// Waker of the device for doorbells, unless the injected bug disables it.
#[derive(Clone)]
pub(super) struct DoorbellWaker {
    simulated_sleeper: SimulatedSleeper,
    is_mute: Arc<AtomicBool>,
}

impl Wake for DoorbellWaker {
    fn wake(&self) {
        if !self.is_mute.load(Ordering::Relaxed) {
            self.simulated_sleeper.wake();
        }
    }
}

impl EmulationHarness {
    /// Initializes the SSD. Half of the seeds have a slow one.
    pub(super) fn new(seed: u64, injected_bug: InjectedBug) -> Self {
        let (device_nap, host_sleeper) = (SimulatedSleeper::default(), SimulatedSleeper::default());
        let notifier =
            DoorbellWaker { simulated_sleeper: device_nap.clone(), is_mute: Arc::default() };
        let regions = RegionTable::new(1);
        let memory = regions
            .add_mapping(MemoryMapping::new(4 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let store = command_store(&FastPathSwitches::default());
        let pool = DevicePool::new(regions, memory, DeviceKind::Emulated, store);
        let null = Arc::new(NullDevice::new(4096, 1 << 20).unwrap());
        let medium: Arc<dyn BlockDevice> = match seed % 2 {
            0 => null,
            _ => Arc::new(ModeledLatencyDevice::new(
                null,
                ModelProfile::find_by_name("p4600").unwrap(),
                seed,
            )),
        };
        let spec = EmuSpec { block_size: 4096, ..EmuSpec::new(EmuMedium::Null) };
        let mut now = Instant { ns: 1_000_000 };
        let ssd = EmulatedSsd::new(&spec, 0, medium, &pool, host_sleeper.clone(), now).unwrap();
        let options = ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let bar = ssd.host_bar(notifier.clone());
        let mut controller = Controller::new(bar, pool.clone(), options).unwrap();
        // Only devices with descriptors need wait sources, and there are none here.
        let mut device = DeviceLoop::without_thread(ssd, Sleeper::new().unwrap().sources());
        let mut turn = |controller: &mut Controller<_, _>| {
            now = now.after(Span::from_us(100));
            device.iterate(now);
            while controller.poll(now).is_some() {}
            now
        };
        while controller.state() != ControllerState::Ready {
            turn(&mut controller);
        }
        let pair_options = QueuePairOptions {
            depth: 8,
            vector: Some(1),
            techniques: tenmil_nvme_host::FastPathOptions::default(),
        };
        let asked_at = turn(&mut controller);
        let id = controller.create_queue_pair(asked_at, pair_options).unwrap();
        let pair = loop {
            turn(&mut controller);
            if let Some(pair) = controller.take_queue_pair(id) {
                break pair;
            }
        };
        let limits = controller.identity().unwrap().limits;
        let view = controller.namespace(NSID).unwrap().view(&limits);
        let queue = NamespaceQueue::new(pair, view, QueueSizes::default()).unwrap();
        let silent = EventFdVectors::new(1).unwrap();
        let vector = SimulatedInterruptVector { simulated_sleeper: host_sleeper.clone(), silent };
        let mut queue = queue.with_vector(Box::new(vector));
        queue.disarm();
        notifier.is_mute.store(injected_bug == InjectedBug::MuteBell, Ordering::Relaxed);
        let device = Device {
            turn: device,
            simulated_sleeper: device_nap,
            is: DevicePhase::Awake,
            looks_once: injected_bug == InjectedBug::DeviceLooksOnce,
            sleeps: 0,
        };
        let buffer = pool.allocate(4096).unwrap();
        let queue = Box::new(queue);
        Self { device, queue, host_sleeper, buffer, now, controller }
    }
}

impl Device {
    pub(super) fn can_step(&self, now: Instant) -> bool {
        match self.is {
            DevicePhase::Asleep(until) => self.simulated_sleeper.is_woken() || now >= until,
            _ => true,
        }
    }

    /// Wake-up time without an event.
    pub(super) fn deadline(&self) -> Instant {
        match self.is {
            DevicePhase::Asleep(until) => until,
            _ => Instant::NEVER,
        }
    }

    pub(super) fn step(&mut self, now: Instant) {
        self.is = match self.is {
            DevicePhase::Awake => match self.turn.iterate(now) {
                NextStep::SleepUntil(until) => DevicePhase::Tired(until),
                _ => DevicePhase::Awake,
            },
            DevicePhase::Tired(until) => {
                self.simulated_sleeper.announce();
                DevicePhase::Announced(until)
            }
            DevicePhase::Announced(until) => {
                if !self.looks_once && self.turn.arm(now) {
                    self.wake()
                } else {
                    self.sleeps += 1;
                    DevicePhase::Asleep(until)
                }
            }
            DevicePhase::Asleep(_) => self.wake(),
        };
    }

    fn wake(&mut self) -> DevicePhase {
        self.simulated_sleeper.withdraw();
        self.turn.disarm(&[]);
        DevicePhase::Awake
    }
}

/// A read of one block.
pub(super) const READ: Request = Request {
    token: 0,
    lba: 0,
    operand: 0,
    blocks: 1,
    segment_first: 0,
    segment_count: 1,
    metadata_count: 0,
    operation: Operation::Read,
    flags: RequestFlags::NONE,
};
