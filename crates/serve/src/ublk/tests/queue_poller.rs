//! Queue on a reactor that sleeps and is woken by the kernel.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use tenmil_base::{BlockDevice, Memory, Span};
use tenmil_dma::{KernelBufferSource, RegionTable};
use tenmil_drivers::{NullDevice, RamDevice};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, PollerBuilder, ReactorOptions, Reactors, ThreadBuilder};
use tenmil_wire::ublk::IoOp;

use super::super::poller::{QueueParts, QueuePoller, ZeroCopyBuffers};
use super::super::server::UblkEvent;
use super::super::tags::{TagTable, UblkStats};
use super::fake_kernel::FakeKernel;
use super::{BLOCK, BLOCKS, io_descriptor, test_disk};

const DEPTH: u16 = 4;
const TIME_LIMIT: Span = Span::from_secs(20);

struct TestQueue {
    kernel: FakeKernel,
    events: Receiver<UblkEvent>,
    reactors: Reactors,
    clock: Clock,
}

impl TestQueue {
    fn new(poll: PollMode) -> Self {
        let regions = RegionTable::new(8);
        let medium: Arc<dyn BlockDevice> =
            Arc::new(RamDevice::new(&regions, BLOCK, BLOCKS).unwrap());
        Self::with_disk(poll, &regions, &*medium, None)
    }

    fn with_disk(
        poll: PollMode,
        regions: &RegionTable,
        medium: &dyn BlockDevice,
        zero_copy: Option<ZeroCopyBuffers>,
    ) -> Self {
        let clock = Clock::start();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        let cores: CpuList = CpuList::allowed_cpus().iter().take(1).collect();
        let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
        let bytes = usize::from(DEPTH) * test_disk().io_bytes_max() as usize;
        let memory = regions.allocate_region(bytes).unwrap();
        let kernel = FakeKernel::new(DEPTH, regions);
        let (event_sender, events) = channel();
        let serving = QueuePoller::new(QueueParts {
            number: 0,
            driver: kernel.clone(),
            backend: medium.channel().unwrap(),
            tags: TagTable::new(test_disk(), DEPTH, memory.segment()),
            memory,
            zero_copy,
            event_sender,
        });
        let serving = serving.unwrap();
        let poller_wake = serving.poller_wake().unwrap();
        let registration =
            PollerBuilder::polled_each_iteration("queue", poller_wake, serving).pinned("a test");
        reactors.spawn(ThreadBuilder::new("ublk-0").add_poller(registration)).unwrap();
        let rig = Self { kernel, events, reactors, clock };
        rig.run_until(|rig| rig.kernel.pending_command_count() == usize::from(DEPTH));
        rig
    }

    fn run_until(&self, mut is_so: impl FnMut(&Self) -> bool) {
        let until = self.clock.now().after(TIME_LIMIT);
        while !is_so(self) {
            assert!(self.clock.now() < until, "it takes too long");
            tenmil_linux::named_thread::sleep(Span::from_us(50));
        }
    }

    fn complete_one_request(&self, tag: u16, op: IoOp, first: u64, data: &[u8]) -> i32 {
        self.kernel.deliver_request(tag, io_descriptor(op, first, 1), data);
        let mut results = Vec::new();
        self.run_until(|rig| {
            results.extend(rig.kernel.take_committed_results());
            !results.is_empty()
        });
        assert_eq!((results.len(), results[0].0), (1, tag));
        results[0].1
    }

    fn wait_for_event(&self) -> UblkEvent {
        let mut new_events = None;
        self.run_until(|rig| {
            new_events = rig.events.try_recv().ok();
            new_events.is_some()
        });
        new_events.unwrap()
    }
}

fn queue_ended_event(succeeded: u64, failed: u64, copied_bytes: u64) -> UblkEvent {
    UblkEvent::QueueEnded {
        queue: 0,
        done: UblkStats { succeeded, failed, zero_copy_bytes: 0, copied_bytes },
    }
}

#[test]
fn a_queue_serves_sleeps_and_is_woken() {
    for poll in [PollMode::Adaptive, PollMode::Always] {
        let rig = TestQueue::new(poll);
        for round in 0..50_u8 {
            let tag = u16::from(round) % DEPTH;
            assert_eq!(
                rig.complete_one_request(tag, IoOp::Write, u64::from(round), &[round; 512]),
                512
            );
            assert_eq!(rig.complete_one_request(tag, IoOp::Read, u64::from(round), &[]), 512);
            assert_eq!(rig.kernel.data(tag), [round; 512]);
            if round % 10 == 0 && poll == PollMode::Adaptive {
                rig.run_until(|rig| rig.reactors.sample().reactors.iter().any(|one| one.sleeping));
            }
        }
        assert!(rig.kernel.flush_count() > 0, "completions are passed to the kernel");
        rig.kernel.abort_all_tags();
        let expected = queue_ended_event(100, 0, 100 * 512);
        assert_eq!(rig.wait_for_event(), expected);
        rig.reactors.stop();
    }
}

#[test]
fn errors_are_reported_and_other_requests_continue() {
    let rig = TestQueue::new(PollMode::Adaptive);
    rig.kernel.complete_command(99, 0);
    let UblkEvent::Error(events) = rig.wait_for_event() else { panic!("expected trouble") };
    assert!(events.starts_with("queue 0: ") && events.contains("tag 99"), "{events}");
    assert_eq!(rig.complete_one_request(0, IoOp::Read, 0, &[]), 512);
    assert_eq!(rig.complete_one_request(1, IoOp::Read, BLOCKS, &[]), -22);
    rig.kernel.abort_all_tags();
    assert_eq!(rig.wait_for_event(), queue_ended_event(1, 1, 512));
    rig.reactors.stop();
}

#[test]
fn a_queue_ends_with_its_reactor() {
    let rig = TestQueue::new(PollMode::Adaptive);
    assert_eq!(rig.complete_one_request(0, IoOp::Read, 0, &[]), 512);
    rig.reactors.stop();
    assert_eq!(rig.events.recv(), Ok(queue_ended_event(1, 0, 512)));
    assert!(rig.events.recv().is_err(), "no sender is left");
}

/// This device moves no data; the test does what it would have copied.
#[test]
fn copied_bytes_of_zero_copy_requests_are_counted_and_reported_once() {
    let regions = RegionTable::new(8);
    let file = tempfile::tempfile().unwrap();
    let data_at = |_, request, byte| u64::from(request) << 20 | u64::from(byte);
    let zero_copy_device = KernelBufferSource { descriptor: file.into(), queue: 0, data_at };
    let whole = regions
        .register_kernel_buffers(zero_copy_device, (DEPTH, test_disk().io_bytes_max()))
        .unwrap();
    let zero_copy = ZeroCopyBuffers { regions: regions.clone(), whole };
    let medium = NullDevice::new(BLOCK, BLOCKS).unwrap();
    let rig = TestQueue::with_disk(PollMode::Adaptive, &regions, &medium, Some(zero_copy));
    for round in 0..3 {
        assert_eq!(rig.complete_one_request(1, IoOp::Write, round, &[1; 512]), 512);
    }
    assert!(rig.events.try_recv().is_err(), "nothing was copied");
    for round in 0..3 {
        regions.store(whole.slice(0, 100).unwrap(), &[1; 100]).unwrap();
        assert_eq!(rig.complete_one_request(1, IoOp::Write, round, &[1; 512]), 512);
    }
    let UblkEvent::Error(events) = rig.wait_for_event() else { panic!("expected trouble") };
    assert!(events.contains("has copied 100 bytes"), "{events}");
    rig.kernel.abort_all_tags();
    let done =
        UblkStats { succeeded: 6, failed: 0, zero_copy_bytes: 6 * 512 - 300, copied_bytes: 300 };
    assert_eq!(rig.wait_for_event(), UblkEvent::QueueEnded { queue: 0, done });
    rig.reactors.stop();
}
