//! Both sides of an emulated SSD on one thread, in an order drawn from a seed: what one does may come
//! between any two steps of the other that goes to sleep.
//!
//! ```text
//!   device   turn ── announce ── look once more ── asleep ── woken by a bell or a deadline
//!   host     think ── submit ── ring ── poll ── unmask and look ── asleep ── woken by the vector
//! ```
//!
//! Time is a number that is added to, and both sleepers are words in memory.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{
    Answers, Backend, Dma, Flags, Instant, Interrupts, Medium, Operation, Random, Request, Segment,
    Span, Vector, Wake,
};
use block::{Model, Null, Profile};
use dma::{Backing, DeviceKind, DevicePool, Mapping, Regions};
use host::{Sleeper, Turn, Wait};
use nvme::{Controller, ControllerOptions, NamespaceQueue, QueuePairOptions, QueueSizes, State};

use crate::emu::shift::OnShift;
use crate::emu::{EmulatedSsd, NSID, command_store};
use crate::perf::options::Techniques;
use crate::{EmuMedium, EmuSpec, Uri};

/// A sleeper without a thread.
#[derive(Clone, Default)]
struct Nap(Arc<NapWords>);

#[derive(Default)]
struct NapWords {
    /// It wants to be woken.
    is_announced: AtomicBool,
    is_woken: AtomicBool,
}

impl Nap {
    fn announce(&self) {
        self.0.is_announced.store(true, Ordering::Relaxed);
    }

    fn withdraw(&self) {
        self.0.is_announced.store(false, Ordering::Relaxed);
        self.0.is_woken.store(false, Ordering::Relaxed);
    }

    fn is_woken(&self) -> bool {
        self.0.is_woken.load(Ordering::Relaxed)
    }
}

impl Wake for Nap {
    fn wake(&self) {
        if self.0.is_announced.swap(false, Ordering::Relaxed) {
            self.0.is_woken.store(true, Ordering::Relaxed);
        }
    }
}

/// The one vector of the I/O queue, both ends of it.
struct NapVector {
    nap: Nap,
    /// Never waited for.
    descriptor: std::io::Stdin,
}

impl Interrupts for Nap {
    fn raise(&mut self, vector: u16) {
        if vector == 1 {
            self.wake();
        }
    }
}

impl Vector for NapVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    fn unmask(&mut self) -> bool {
        self.nap.withdraw();
        self.nap.announce();
        true
    }

    fn mask(&mut self) {
        self.nap.withdraw();
    }
}

/// A mistake that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// The device sleeps without a second look.
    DeviceLooksOnce,
    /// The host does.
    HostLooksOnce,
    /// Doorbells wake nobody.
    MuteBell,
}

#[derive(Clone, Copy, Debug)]
enum Device {
    Awake,
    /// It has found nothing, and is about to say so.
    Tired(Instant),
    Announced(Instant),
    Asleep(Instant),
}

#[derive(Clone, Copy, Debug)]
enum Host {
    /// Until it wants something.
    Thinking(Instant),
    Submitted,
    /// So many times more, and then it is tired.
    Polling(u32),
    /// It has found nothing, and is about to ask for a signal.
    Tired,
    Asleep(Instant),
}

struct World {
    device: OnShift<Nap>,
    device_nap: Nap,
    device_is: Device,
    queue: Box<dyn Backend>,
    host_nap: Nap,
    host_is: Host,
    buffer: Segment,
    answers: Answers,
    random: Random,
    now: Instant,
    begun: Instant,
    answered: u32,
    latest: Span,
    sleeps: [u32; 2],
    planted: Planted,
    _controller: Controller<ctrl::front::HostBar<Bell>, DevicePool>,
}

/// What the host rings: the device's sleeper, unless the mistake is here.
#[derive(Clone)]
struct Bell {
    nap: Nap,
    is_mute: Arc<AtomicBool>,
}

impl Wake for Bell {
    fn wake(&self) {
        if !self.is_mute.load(Ordering::Relaxed) {
            self.nap.wake();
        }
    }
}

/// What takes longer was forgotten.
const FORGOTTEN: Span = Span::from_ms(100);

impl World {
    fn new(seed: u64, planted: Planted) -> Self {
        let (device_nap, host_nap) = (Nap::default(), Nap::default());
        let bell = Bell { nap: device_nap.clone(), is_mute: Arc::default() };
        let regions = Regions::new(1);
        let memory = regions.add(Mapping::new(4 << 20, Backing::Private).unwrap()).unwrap();
        let store = command_store(&Techniques::default());
        let pool = DevicePool::new(regions, memory, DeviceKind::Emulated, store);
        let null = Arc::new(Null::new(4096, 1 << 20).unwrap());
        let medium: Arc<dyn Medium> = match seed % 2 {
            0 => null,
            _ => Arc::new(Model::new(null, Profile::named("p4600").unwrap(), seed)),
        };
        let uri = Uri::Emu(EmuSpec { block_size: 4096, ..EmuSpec::new(EmuMedium::Null) });
        let mut now = Instant { ns: 1_000_000 };
        let ssd = EmulatedSsd::new(&uri, 0, medium, &pool, host_nap.clone(), now).unwrap();
        let options = ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let bar = ssd.host_bar(bell.clone());
        let mut controller = Controller::new(bar, pool.clone(), options).unwrap();
        // Sources are added to by media with descriptors, and there are none here.
        let mut device = OnShift::by_hand(ssd, Sleeper::new().unwrap().sources());
        let mut turn = |controller: &mut Controller<_, _>| {
            now = now.after(Span::from_us(100));
            device.turn(now);
            while controller.poll(now).is_some() {}
            now
        };
        while controller.state() != State::Ready {
            turn(&mut controller);
        }
        let pair_options =
            QueuePairOptions { depth: 8, vector: Some(1), techniques: nvme::Techniques::default() };
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
        let queue = NamespaceQueue::new(&pool, pair, view, QueueSizes::default()).unwrap();
        let vector = NapVector { nap: host_nap.clone(), descriptor: std::io::stdin() };
        let mut queue = queue.with_vector(Box::new(vector));
        queue.disarm();
        bell.is_mute.store(planted == Planted::MuteBell, Ordering::Relaxed);
        let buffer = pool.allocate(4096).unwrap();
        Self {
            device,
            device_nap,
            device_is: Device::Awake,
            queue: Box::new(queue),
            host_nap,
            host_is: Host::Thinking(now),
            buffer,
            answers: Answers::with_capacity(8),
            random: Random::new(seed),
            now,
            begun: now,
            answered: 0,
            latest: Span::default(),
            sleeps: [0; 2],
            planted,
            _controller: controller,
        }
    }

    /// Goes on until so many commands have been answered, or one was forgotten.
    fn run(&mut self, commands: u32) -> Result<(), String> {
        while self.answered < commands {
            let waits = !matches!(self.host_is, Host::Thinking(_));
            if waits && self.now.since(self.begun) > FORGOTTEN {
                let (device, host) = (self.device_is, self.host_is);
                return Err(format!("device {device:?}, host {host:?}, after {}", self.answered));
            }
            match (self.can_device_step(), self.can_host_step()) {
                (true, true) if self.random.chance(1, 2) => self.step_device(),
                (_, true) => self.step_host(),
                (true, false) => {
                    // Nobody is in the device's way: time may pass faster.
                    self.step_device();
                    self.now.ns += self.random.below(20_000);
                }
                (false, false) => self.now = self.next_deadline(),
            }
            self.now.ns += 50 + self.random.below(300);
        }
        Ok(())
    }

    fn can_device_step(&self) -> bool {
        match self.device_is {
            Device::Asleep(until) => self.device_nap.is_woken() || self.now >= until,
            _ => true,
        }
    }

    fn can_host_step(&self) -> bool {
        match self.host_is {
            Host::Thinking(until) => self.now >= until,
            Host::Asleep(until) => self.host_nap.is_woken() || self.now >= until,
            _ => true,
        }
    }

    fn next_deadline(&self) -> Instant {
        let device = match self.device_is {
            Device::Asleep(until) => until,
            _ => Instant::NEVER,
        };
        match self.host_is {
            Host::Thinking(until) => device.min(until),
            Host::Asleep(until) => device.min(until).min(self.begun.after(FORGOTTEN)),
            _ => device,
        }
        .max(self.now)
    }

    fn step_device(&mut self) {
        self.device_is = match self.device_is {
            Device::Awake => match self.device.turn(self.now) {
                Wait::Until(until) => Device::Tired(until),
                _ => Device::Awake,
            },
            Device::Tired(until) => {
                self.device_nap.announce();
                Device::Announced(until)
            }
            Device::Announced(until) => {
                let looks = self.planted != Planted::DeviceLooksOnce;
                if looks && self.device.arm(self.now) {
                    self.wake_device()
                } else {
                    self.sleeps[0] += 1;
                    Device::Asleep(until)
                }
            }
            Device::Asleep(_) => self.wake_device(),
        };
    }

    fn wake_device(&mut self) -> Device {
        self.device_nap.withdraw();
        self.device.woken(&[]);
        Device::Awake
    }

    fn step_host(&mut self) {
        self.host_is = match self.host_is {
            Host::Thinking(_) => {
                self.begun = self.now;
                let (token, lba) = (u64::from(self.answered), self.random.below(1 << 20));
                let request = Request { token, lba, ..READ };
                assert_eq!(self.queue.submit(self.now, &[request], &[self.buffer]), 1);
                Host::Submitted
            }
            Host::Submitted => {
                self.queue.flush();
                // Its patience may end at any time, before the answer or just when it comes.
                let scale = 1 << self.random.below(10);
                Host::Polling(u32::try_from(self.random.below(scale)).unwrap())
            }
            Host::Polling(polls) => self.poll(polls),
            Host::Tired => self.fall_asleep(),
            Host::Asleep(_) => {
                self.queue.disarm();
                self.poll(3)
            }
        };
    }

    fn poll(&mut self, polls: u32) -> Host {
        if self.queue.poll(self.now, &mut self.answers) > 0 {
            let tokens: Vec<_> = self.answers.drain().map(|answer| answer.token).collect();
            assert_eq!(tokens, [u64::from(self.answered)]);
            self.answered += 1;
            self.latest = self.latest.max(self.now.since(self.begun));
            // From one microsecond to four milliseconds, each scale as likely as the next.
            let scale = 1_u64 << (10 + self.random.below(12));
            let gap = Span { ns: scale + self.random.below(scale) };
            return Host::Thinking(self.now.after(gap));
        }
        if polls > 0 { Host::Polling(polls - 1) } else { Host::Tired }
    }

    fn fall_asleep(&mut self) -> Host {
        let has_work = self.queue.arm();
        if has_work && self.planted != Planted::HostLooksOnce {
            self.queue.disarm();
            return Host::Polling(0);
        }
        self.sleeps[1] += 1;
        Host::Asleep(self.queue.wake_at())
    }
}

const READ: Request = Request {
    token: 0,
    lba: 0,
    operand: 0,
    blocks: 1,
    segment_first: 0,
    segment_count: 1,
    metadata_count: 0,
    operation: Operation::Read,
    flags: Flags::NONE,
};

#[test]
fn in_a_million_gaps_of_simulated_time_nothing_is_forgotten() {
    for seed in 0..20 {
        let mut world = World::new(seed, Planted::Nothing);
        let ran = world.run(50_000);
        assert_eq!(ran, Ok(()), "seed {seed}");
        assert!(world.latest < Span::from_ms(20), "seed {seed}: {}", world.latest);
        let [device, host] = world.sleeps;
        assert!(device > 1_000 && host > 1_000, "seed {seed}: {device} and {host} are no test");
    }
}

#[test]
fn every_mistake_in_the_handshake_is_found() {
    for planted in [Planted::DeviceLooksOnce, Planted::HostLooksOnce, Planted::MuteBell] {
        for seed in 0..4 {
            let ran = World::new(seed, planted).run(50_000);
            assert!(ran.is_err(), "{planted:?}, seed {seed}: nothing was forgotten");
        }
    }
}
