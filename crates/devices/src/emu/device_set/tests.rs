//! Emulated SSDs as block devices, together with other devices and below them.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, ErrorCategory, Instant, IoChannel, IoStatus, Memory,
    Operation, Request, RequestFlags, Segment, Span,
};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Clock;

use crate::emu::SsdQueue;
use tenmil_base::Error;

const BLOCK: u32 = 512;
const LEN: u32 = 16 << 10;

struct DeviceSetHarness {
    regions: RegionTable,
    clock: Clock,
    /// Memory outside the pools of the SSDs.
    memory: Segment,
}

impl DeviceSetHarness {
    fn new() -> Self {
        let regions = RegionTable::new(512);
        let memory = MemoryMapping::new(LEN as usize, MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(memory).unwrap();
        Self { regions, clock: Clock::start(), memory }
    }

    fn open(&self, uri: &str) -> Result<OpenedDevice, Error> {
        let Self { regions, clock, .. } = self;
        let opener = Opener { regions, clock: *clock, seed: 1, kinds: crate::KINDS };
        opener.open(&uri.parse::<Uri>()?)
    }

    /// Runs one operation on all of the memory, and waits for the completion.
    fn run(&self, channel: &mut dyn IoChannel, operation: Operation, lba: u64) -> IoStatus {
        let request = request(7, operation, lba);
        let (mut completions, end) = (CompletionBatch::with_capacity(1), self.deadline());
        while channel.submit(self.clock.now(), &[request], &[self.memory]) == 0 {
            assert!(self.clock.now() < end, "never taken");
        }
        channel.flush_submissions();
        while channel.poll(self.clock.now(), &mut completions) == 0 {
            assert!(self.clock.now() < end, "never answered");
            tenmil_linux::named_thread::yield_cpu();
        }
        completions.as_slice()[0].status
    }

    fn deadline(&self) -> Instant {
        self.clock.now().after(Span::from_secs(10))
    }
}

/// Request for as many blocks as fit into the memory.
fn request(token: u64, operation: Operation, lba: u64) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks: LEN / BLOCK,
        segment_count: 1,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

#[test]
fn requests_use_memory_outside_the_ssd_pool() {
    let harness = DeviceSetHarness::new();
    for uri in ["emu:ram?size=1m&queues=2", "stripe:[emu:ram?size=1m],[emu:ram?size=1m]?chunk=4k"] {
        let opened = harness.open(uri).unwrap();
        let limits = opened.medium.limits();
        assert_eq!(
            (limits.block_size, limits.durability),
            (BLOCK, Durability::NonPersistent),
            "{uri}"
        );
        let [mut first, mut second] = [(); 2].map(|()| opened.medium.channel().unwrap());
        harness.regions.fill(harness.memory, 0x5a).unwrap();
        assert_eq!(harness.run(&mut *first, Operation::Write, 32), IoStatus::SUCCESS);
        harness.regions.fill(harness.memory, 0).unwrap();
        assert_eq!(harness.run(&mut *second, Operation::Read, 32), IoStatus::SUCCESS);
        let mut bytes = vec![0; LEN as usize];
        harness.regions.load(harness.memory, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0x5a), "{uri}");
    }
}

#[test]
fn each_channel_is_a_queue_pair_and_closing_frees_it() {
    let harness = DeviceSetHarness::new();
    let opened = harness.open("emu:null?queues=2").unwrap();
    assert_eq!(opened.medium.channels_max(), 2);
    for _ in 0..3 {
        let mut two = [(); 2].map(|()| opened.medium.channel().unwrap());
        let third = opened.medium.channel().err().unwrap();
        assert!(third.text.starts_with("2 queue pairs are in use, expected at most 2"), "{third}");
        for channel in &mut two {
            assert_eq!(harness.run(&mut **channel, Operation::Read, 0), IoStatus::SUCCESS);
        }
    }
}

#[test]
fn channel_is_released_only_once_the_ssd_does_not_access_its_memory() {
    let harness = DeviceSetHarness::new();
    let spec = "emu:model:p4800x?size=16m".parse().unwrap();
    let opener = Opener {
        regions: &harness.regions,
        clock: harness.clock,
        seed: 1,
        kinds: tenmil_drivers::KINDS,
    };
    let medium = crate::emu::kind::start(&opener, &spec, false).unwrap();
    let emulated_devices = &medium.emulated_devices;
    let mut state = emulated_devices.shared.lock();
    let emulated = state.emulated().unwrap();
    let made = emulated
        .ssd_queue(0, emulated_devices.depth, &emulated_devices.techniques, &emulated_devices.clock)
        .unwrap();
    drop(state);
    let SsdQueue::Direct(mut queue) = made.0 else { panic!("its doorbells are plain ones") };
    let reads: Vec<Request> = (0..8).map(|token| request(token, Operation::Read, 0)).collect();
    assert_eq!(queue.submit(harness.clock.now(), &reads, &[harness.memory]), 8);
    queue.flush_submissions();
    assert!(queue.queue().in_flight() >= 8, "the device has not been polled");
    super::drain_abandoned_commands(&mut queue, &emulated_devices.clock);
    assert_eq!(queue.queue().in_flight(), 0);
}

#[test]
fn a_channel_outlives_its_medium() {
    let harness = DeviceSetHarness::new();
    let mut channel = harness.open("emu:ram?size=1m").unwrap().medium.channel().unwrap();
    assert_eq!(harness.run(&mut *channel, Operation::Read, 0), IoStatus::SUCCESS);
}

#[test]
fn ssd_with_a_lost_controller_fails_requests_and_opens_no_channel() {
    let harness = DeviceSetHarness::new();
    let spec = "emu:ram?size=1m".parse().unwrap();
    let opener = Opener {
        regions: &harness.regions,
        clock: harness.clock,
        seed: 1,
        kinds: tenmil_drivers::KINDS,
    };
    let medium = Arc::new(crate::emu::kind::start(&opener, &spec, false).unwrap());
    let emulated_devices = Arc::clone(&medium.emulated_devices);
    let mut channel = medium.channel().unwrap();
    assert_eq!(harness.run(&mut *channel, Operation::Read, 0), IoStatus::SUCCESS);
    emulated_devices
        .shared
        .mark_lost_and_wake(&mut emulated_devices.shared.lock(), Error::remote("it burnt"));
    assert_eq!(harness.run(&mut *channel, Operation::Read, 0), IoStatus::PATH_ERROR);
    assert_eq!(medium.channel().err().unwrap(), Error::environment("it burnt"));
    assert!(
        !emulated_devices.shared.poll_controllers(harness.clock.now()),
        "and a lost controller is not polled"
    );
}

#[test]
fn uri_of_no_single_ssd_is_rejected() {
    let harness = DeviceSetHarness::new();
    for (uri, expected) in [
        ("emu:null?count=2", "count is 2, expected 1: one device is one SSD"),
        ("emu:tape", "no medium `tape`, expected emu:null"),
        ("emu:null?colour=1", "no parameter `colour`, expected count, size"),
    ] {
        let error = harness.open(uri).unwrap_err();
        assert_eq!(error.category(), ErrorCategory::Usage);
        assert!(error.to_string().starts_with(&format!("{uri}: {expected}")), "{error}");
    }
}
