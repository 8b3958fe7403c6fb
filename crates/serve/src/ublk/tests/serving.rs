//! Queue on a reactor that sleeps and is woken by the kernel.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use tenmil_base::{BlockDevice, Memory, Span};
use tenmil_dma::{KernelBufferSource, RegionTable};
use tenmil_drivers::{NullDevice, RamDevice};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, PollerBuilder, ReactorOptions, Reactors, ThreadBuilder};
use tenmil_wire::ublk::IoOp;

use super::super::poller::{QueueParts, QueuePoller, ZeroCopy};
use super::super::server::UblkEvent;
use super::super::tags::{Tags, UblkStats};
use super::fake::Kernel;
use super::{BLOCK, BLOCKS, descriptor, disk};

const DEPTH: u16 = 4;
const TIME_LIMIT: Span = Span::from_secs(20);

struct Rig {
    kernel: Kernel,
    events: Receiver<UblkEvent>,
    reactors: Reactors,
    clock: Clock,
}

impl Rig {
    fn new(poll: PollMode) -> Self {
        let regions = RegionTable::new(8);
        let medium: Arc<dyn BlockDevice> =
            Arc::new(RamDevice::new(&regions, BLOCK, BLOCKS).unwrap());
        Self::of(poll, &regions, &*medium, None)
    }

    fn of(
        poll: PollMode,
        regions: &RegionTable,
        medium: &dyn BlockDevice,
        zero_copy: Option<ZeroCopy>,
    ) -> Self {
        let clock = Clock::start();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        let cores: CpuList = CpuList::allowed().iter().take(1).collect();
        let reactors = Reactors::start(&cores, &options, &clock).unwrap();
        let bytes = usize::from(DEPTH) * disk().io_bytes_max() as usize;
        let memory = regions.allocate(bytes).unwrap();
        let kernel = Kernel::new(DEPTH, regions);
        let (event_sender, events) = channel();
        let serving = QueuePoller::new(QueueParts {
            number: 0,
            driver: kernel.clone(),
            backend: medium.channel().unwrap(),
            tags: Tags::new(disk(), DEPTH, memory.segment()),
            memory,
            zero_copy,
            event_sender,
        });
        let serving = serving.unwrap();
        let poller_wake = serving.poller_wake().unwrap();
        let registration = PollerBuilder::active("queue", poller_wake, serving).pinned("a test");
        reactors.spawn(ThreadBuilder::new("ublk-0").poller(registration)).unwrap();
        let rig = Self { kernel, events, reactors, clock };
        rig.until(|rig| rig.kernel.commands() == usize::from(DEPTH));
        rig
    }

    fn until(&self, mut is_so: impl FnMut(&Self) -> bool) {
        let until = self.clock.now().after(TIME_LIMIT);
        while !is_so(self) {
            assert!(self.clock.now() < until, "it takes too long");
            tenmil_linux::thread::sleep(Span::from_us(50));
        }
    }

    fn one(&self, tag: u16, op: IoOp, first: u64, data: &[u8]) -> i32 {
        self.kernel.request(tag, descriptor(op, first, 1), data);
        let mut results = Vec::new();
        self.until(|rig| {
            results.extend(rig.kernel.results());
            !results.is_empty()
        });
        assert_eq!((results.len(), results[0].0), (1, tag));
        results[0].1
    }

    fn new_events(&self) -> UblkEvent {
        let mut new_events = None;
        self.until(|rig| {
            new_events = rig.events.try_recv().ok();
            new_events.is_some()
        });
        new_events.unwrap()
    }
}

fn queue_ended(succeeded: u64, failed: u64, copied_bytes: u64) -> UblkEvent {
    UblkEvent::QueueEnded {
        queue: 0,
        done: UblkStats { succeeded, failed, zero_copy_bytes: 0, copied_bytes },
    }
}

#[test]
fn a_queue_serves_sleeps_and_is_woken() {
    for poll in [PollMode::Adaptive, PollMode::Always] {
        let rig = Rig::new(poll);
        for round in 0..50_u8 {
            let tag = u16::from(round) % DEPTH;
            assert_eq!(rig.one(tag, IoOp::Write, u64::from(round), &[round; 512]), 512);
            assert_eq!(rig.one(tag, IoOp::Read, u64::from(round), &[]), 512);
            assert_eq!(rig.kernel.data(tag), [round; 512]);
            if round % 10 == 0 && poll == PollMode::Adaptive {
                rig.until(|rig| rig.reactors.sample().reactors.iter().any(|one| one.sleeping));
            }
        }
        assert!(rig.kernel.flushes() > 0, "the kernel is told of what has ended");
        rig.kernel.abort();
        let expected = queue_ended(100, 0, 100 * 512);
        assert_eq!(rig.new_events(), expected);
        rig.reactors.stop();
    }
}

#[test]
fn errors_are_reported_and_other_requests_continue() {
    let rig = Rig::new(PollMode::Adaptive);
    rig.kernel.end(99, 0);
    let UblkEvent::Error(events) = rig.new_events() else { panic!("expected trouble") };
    assert!(events.starts_with("queue 0: ") && events.contains("tag 99"), "{events}");
    assert_eq!(rig.one(0, IoOp::Read, 0, &[]), 512);
    assert_eq!(rig.one(1, IoOp::Read, BLOCKS, &[]), -22);
    rig.kernel.abort();
    assert_eq!(rig.new_events(), queue_ended(1, 1, 512));
    rig.reactors.stop();
}

#[test]
fn a_queue_ends_with_its_reactor() {
    let rig = Rig::new(PollMode::Adaptive);
    assert_eq!(rig.one(0, IoOp::Read, 0, &[]), 512);
    rig.reactors.stop();
    assert_eq!(rig.events.recv(), Ok(queue_ended(1, 0, 512)));
    assert!(rig.events.recv().is_err(), "no sender is left");
}

/// This device moves no data; the test does what it would have copied.
#[test]
fn copied_bytes_of_zero_copy_requests_are_counted_and_reported_once() {
    let regions = RegionTable::new(8);
    let file = tempfile::tempfile().unwrap();
    let data_at = |_, request, byte| u64::from(request) << 20 | u64::from(byte);
    let zero_copy_device = KernelBufferSource { descriptor: file.into(), queue: 0, data_at };
    let whole =
        regions.register_kernel_buffers(zero_copy_device, (DEPTH, disk().io_bytes_max())).unwrap();
    let zero_copy = ZeroCopy { regions: regions.clone(), whole };
    let medium = NullDevice::new(BLOCK, BLOCKS).unwrap();
    let rig = Rig::of(PollMode::Adaptive, &regions, &medium, Some(zero_copy));
    for round in 0..3 {
        assert_eq!(rig.one(1, IoOp::Write, round, &[1; 512]), 512);
    }
    assert!(rig.events.try_recv().is_err(), "nothing was copied");
    for round in 0..3 {
        regions.store(whole.slice(0, 100).unwrap(), &[1; 100]).unwrap();
        assert_eq!(rig.one(1, IoOp::Write, round, &[1; 512]), 512);
    }
    let UblkEvent::Error(events) = rig.new_events() else { panic!("expected trouble") };
    assert!(events.contains("has copied 100 bytes"), "{events}");
    rig.kernel.abort();
    let done =
        UblkStats { succeeded: 6, failed: 0, zero_copy_bytes: 6 * 512 - 300, copied_bytes: 300 };
    assert_eq!(rig.new_events(), UblkEvent::QueueEnded { queue: 0, done });
    rig.reactors.stop();
}
