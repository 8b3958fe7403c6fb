//! Reads whose data are sent from the memory of the medium.
//!
//! A host that does not receive blocks the response, so that what happens meanwhile shows where the data
//! are: a later write changes those in the medium and not those in a buffer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{BlockDevice, MediumMemory, Memory, Random, Segment, Span};
use tenmil_block::{Bdev, BdevOptions, ChannelMode, Claim, Opener, PER_CHANNEL, QueueMap};
use tenmil_dma::Region;
use tenmil_drivers::RamDevice;
use tenmil_linux::Clock;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem};
use tenmil_nvme_tcp::{DataDirection, DigestMode, HostConfig};
use tenmil_reactor::{DetachReason, Poller};
use tenmil_wire::register::offset;
use tenmil_wire::{Command, IoOpcode, Status};

use super::test_target::{
    TestTarget, connect_data, io_config, io_connect, pattern, read_or_write_command,
};

/// Size of the devices of these tests.
const DEVICE_BYTES: u64 = 2 << 20;
/// A large read: the largest transfer.
const LARGE: u32 = 128 << 10;
/// Capacity of a pipe: what a host has received, or will receive, of a blocked response.
const PIPE_BYTES: usize = 3000;
const NSID: u32 = 2;

/// Target with a second namespace, and a host with two I/O queues over pipes of a small capacity.
struct InPlaceFixture {
    rig: TestTarget,
    subsystem: Subsystem,
    admin: usize,
    /// Connection that reads, and may be blocked.
    io: usize,
    /// Connection that writes meanwhile.
    other: usize,
    block_size: u32,
}

fn ram(rig: &TestTarget, block_size: u32) -> Arc<RamDevice> {
    let block_count = DEVICE_BYTES / u64::from(block_size);
    Arc::new(RamDevice::new(&rig.regions, block_size, block_count).unwrap())
}

/// A device with `byte` in all blocks.
fn filled_ram(rig: &TestTarget, byte: u8) -> Arc<RamDevice> {
    let ram = (*ram(rig, 512)).clone().new_filled();
    let MediumMemory { region, offset, .. } = ram.medium_memory().unwrap();
    let len_bytes = u32::try_from(DEVICE_BYTES).unwrap();
    rig.regions.fill(Segment { region, offset, len_bytes }, byte).unwrap();
    Arc::new(ram)
}

impl InPlaceFixture {
    /// The namespace has blocks of `block_size`, its device of `device_block_size`.
    fn new(block_size: u32, device_block_size: u32, data_digest: DigestMode) -> Self {
        Self::with_device(block_size, data_digest, |rig| ram(rig, device_block_size))
    }

    fn with_device(
        block_size: u32,
        data_digest: DigestMode,
        device: impl FnOnce(&TestTarget) -> Arc<dyn BlockDevice>,
    ) -> Self {
        let (mut rig, subsystem) = TestTarget::with_subsystem();
        let device = device(&rig);
        add_namespace(&subsystem, device, block_size);
        let (admin, cntlid) = rig.connect_admin_queue();
        rig.narrow = Some(PIPE_BYTES / 2);
        let [io, other] = [1, 2].map(|qid| {
            let line = rig.open_connection(HostConfig { data_digest, ..io_config() });
            let completion = rig.execute_connect(line, &io_connect(qid), &connect_data(cntlid));
            assert_eq!(completion.status(), Status::SUCCESS);
            line
        });
        Self { rig, subsystem, admin, io, other, block_size }
    }

    fn command(&self, opcode: IoOpcode, lba: u64, len_bytes: u32) -> Command {
        read_or_write_command(opcode.code(), lba, len_bytes / self.block_size).with_nsid(NSID)
    }

    fn write(&mut self, lba: u64, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).unwrap();
        let write = self.command(IoOpcode::Write, lba, len);
        let direction = DataDirection::FromHost(len);
        let (completion, _) = self.rig.execute_command(self.other, &write, direction, bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
    }

    fn read(&mut self, lba: u64, len_bytes: u32) -> (Status, Vec<u8>) {
        let read = self.command(IoOpcode::Read, lba, len_bytes);
        let direction = DataDirection::ToHost(len_bytes);
        let (completion, bytes) = self.rig.execute_command(self.io, &read, direction, &[]);
        assert_eq!(completion.dw0(), 0, "no result of a request");
        (completion.status(), bytes)
    }

    /// Submits a read whose response is blocked; returns its tag.
    fn submit_blocked_read(&mut self, lba: u64, len_bytes: u32) -> u16 {
        self.rig.lines[self.io].is_deaf = true;
        let read = self.command(IoOpcode::Read, lba, len_bytes);
        let tag = self.rig.lines[self.io].submit(&read, DataDirection::ToHost(len_bytes), &[]);
        self.rig.run_until_idle();
        assert!(!self.rig.lines[self.io].done.contains_key(&tag));
        tag
    }

    /// Receives the blocked response.
    fn receive_blocked(&mut self, tag: u16) -> Vec<u8> {
        self.rig.lines[self.io].is_deaf = false;
        self.rig.run_until_idle();
        let (completion, bytes) = self.rig.lines[self.io].done.remove(&tag).expect("it has ended");
        assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 0));
        bytes
    }

    /// Whether the data of a read are sent from the medium. Its blocks are overwritten.
    fn is_sent_in_place(&mut self, lba: u64, len_bytes: u32) -> bool {
        let (status, before) = self.read(lba, len_bytes);
        assert_eq!(status, Status::SUCCESS);
        let after: Vec<u8> = before.iter().map(|byte| !byte).collect();
        let tag = self.submit_blocked_read(lba, len_bytes);
        self.write(lba, &after);
        let bytes = self.receive_blocked(tag);
        let rest = PIPE_BYTES..;
        assert!(bytes[rest.clone()] == before[rest.clone()] || bytes[rest.clone()] == after[rest]);
        bytes[PIPE_BYTES..] == after[PIPE_BYTES..]
    }

    /// Number of regions after everything idle has been released.
    fn region_count(&mut self) -> usize {
        self.rig.run_until_idle();
        self.rig.regions.region_count()
    }
}

fn add_namespace(subsystem: &Subsystem, device: Arc<dyn BlockDevice>, block_size: u32) {
    let config = NamespaceConfig {
        nsid: Some(NSID),
        block_size: Some(block_size),
        ..NamespaceConfig::new(device)
    };
    subsystem.add_namespace(config).unwrap();
}

/// A region of the size of the devices with other bytes: in the place of a device, if that is free.
fn reuse_regions(rig: &TestTarget) -> Vec<Region> {
    let regions: Vec<_> = (0..3)
        .map(|_| rig.regions.allocate_region(usize::try_from(DEVICE_BYTES).unwrap()).unwrap())
        .collect();
    regions.iter().for_each(|region| rig.regions.fill(region.segment(), 0xee).unwrap());
    regions
}

#[test]
fn large_read_of_written_blocks_is_sent_from_the_medium() {
    for (block_size, device_block_size) in [(512, 512), (4096, 512), (4096, 4096)] {
        let mut fixture = InPlaceFixture::new(block_size, device_block_size, DigestMode::Off);
        fixture.write(8, &pattern(1, LARGE as usize));
        for len_bytes in [LARGE, LARGE / 2, 32 << 10] {
            assert!(fixture.is_sent_in_place(8, len_bytes), "{len_bytes}");
        }
        assert!(!fixture.is_sent_in_place(8, 8 << 10), "small");
        assert!(!fixture.is_sent_in_place(9, LARGE), "its last block is not written");
        assert!(fixture.is_sent_in_place(9, LARGE), "now it is");
    }
}

#[test]
fn data_with_a_digest_are_not_sent_from_the_medium() {
    let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Required);
    fixture.write(8, &pattern(1, LARGE as usize));
    assert!(!fixture.is_sent_in_place(8, LARGE));
    let mut fixture = InPlaceFixture::with_device(512, DigestMode::Off, |rig| {
        // A device on another one has no memory of its own.
        let kinds = tenmil_drivers::KINDS;
        let opener = Opener { regions: &rig.regions, clock: Clock::start(), seed: 1, kinds };
        opener.open(&"split:[ram:4m]?part=1&parts=2".parse().unwrap()).unwrap().medium
    });
    fixture.write(8, &pattern(1, LARGE as usize));
    assert!(!fixture.is_sent_in_place(8, LARGE));
}

/// Compares with a model in memory: unwritten, deallocated and zeroed blocks, uncorrectable ones, and reads of
/// any size at any block.
#[test]
fn reads_return_what_was_written_in_every_state_of_the_blocks() {
    #[derive(Clone, Copy, PartialEq)]
    enum Block {
        /// Every byte has this value.
        Filled(u8),
        Uncorrectable,
    }
    for (seed, block_size, device_block_size) in
        [(1, 512, 512), (2, 4096, 512), (3, 4096, 4096), (4, 512, 512)]
    {
        let mut fixture = InPlaceFixture::new(block_size, device_block_size, DigestMode::Off);
        let blocks_max = LARGE / block_size;
        let mut random = Random::new(seed);
        let mut model = vec![Block::Filled(0); blocks_max as usize * 3];
        let (mut lengths, mut errors) = (0, 0);
        for round in 0..250_u32 {
            let count = 1 + random.below(u64::from(blocks_max));
            let lba = random.below(model.len() as u64 - count + 1);
            let range = usize::try_from(lba).unwrap()..usize::try_from(lba + count).unwrap();
            let len_bytes = u32::try_from(count).unwrap() * block_size;
            let byte = round.to_le_bytes()[0] | 1;
            match random.below(10) {
                0..3 => {
                    fixture.write(lba, &vec![byte; len_bytes as usize]);
                    model[range].fill(Block::Filled(byte));
                }
                3 => {
                    let short = range.start..range.start + range.len().min(3);
                    let zeroes = fixture.command(
                        IoOpcode::WriteZeroes,
                        lba,
                        u32::try_from(short.len()).unwrap() * block_size,
                    );
                    let (line, none) = (fixture.other, DataDirection::None);
                    let (completion, _) = fixture.rig.execute_command(line, &zeroes, none, &[]);
                    assert_eq!(completion.status(), Status::SUCCESS);
                    model[short].fill(Block::Filled(0));
                }
                4 if random.chance(1, 3) => {
                    let command = fixture.command(IoOpcode::WriteUncorrectable, lba, block_size);
                    let (line, none) = (fixture.other, DataDirection::None);
                    let (completion, _) = fixture.rig.execute_command(line, &command, none, &[]);
                    assert_eq!(completion.status(), Status::SUCCESS);
                    model[range.start] = Block::Uncorrectable;
                }
                _ => {
                    let (status, bytes) = fixture.read(lba, len_bytes);
                    if model[range.clone()].contains(&Block::Uncorrectable) {
                        assert_eq!(status, Status::UNRECOVERED_READ_ERROR, "round {round}");
                        errors += 1;
                        continue;
                    }
                    assert_eq!(status, Status::SUCCESS, "round {round}");
                    lengths += count;
                    for (block, bytes) in
                        model[range].iter().zip(bytes.chunks_exact(block_size as usize))
                    {
                        let Block::Filled(byte) = block else { unreachable!() };
                        assert!(bytes.iter().all(|found| found == byte), "round {round}");
                    }
                }
            }
        }
        assert!(lengths > 1000 / u64::from(block_size / 512) && errors > 0, "{lengths} {errors}");
    }
}

/// Whatever removes the namespace: the region of its device stays until the response has been sent, and
/// then it is released.
#[test]
fn blocked_response_keeps_the_memory_of_a_removed_namespace() {
    for replaces in [false, true] {
        let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Off);
        let bytes = pattern(7, LARGE as usize);
        fixture.write(16, &bytes);
        let before = fixture.region_count();
        let tag = fixture.submit_blocked_read(16, LARGE);
        assert!(fixture.subsystem.remove_namespace(NSID));
        if replaces {
            add_namespace(&fixture.subsystem, filled_ram(&fixture.rig, 0x99), 512);
        }
        let added = usize::from(replaces);
        assert_eq!(fixture.region_count(), before + added, "it is kept");
        let reused = reuse_regions(&fixture.rig);
        assert!(fixture.receive_blocked(tag) == bytes, "the old data");
        assert_eq!(fixture.region_count(), before - 1 + added + reused.len(), "it is released");
        drop(reused);
        if replaces {
            assert!(fixture.read(16, LARGE) == (Status::SUCCESS, vec![0x99; LARGE as usize]));
        }
    }
}

/// A removed bdev drops its medium, although its descriptor exists.
#[test]
fn blocked_response_keeps_the_memory_of_a_removed_bdev() {
    for (map, mode) in [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Bypass),
    ] {
        let mut bdev = None;
        let mut fixture = InPlaceFixture::with_device(512, DigestMode::Off, |rig| {
            let options = BdevOptions { map, mode, ..BdevOptions::new(Clock::start(), 4) };
            let device = Bdev::new("ram0", ram(rig, 512), options).unwrap();
            let descriptor = device.open(Claim::WriteOnce, "target").unwrap();
            bdev = Some(device);
            Arc::new(descriptor)
        });
        let bytes = pattern(7, LARGE as usize);
        fixture.write(16, &bytes);
        assert!(fixture.is_sent_in_place(16, LARGE), "{mode:?}");
        fixture.write(16, &bytes);
        let before = fixture.region_count();
        let tag = fixture.submit_blocked_read(16, LARGE);
        bdev.unwrap().remove();
        // Its channels notice it.
        if mode != ChannelMode::Bypass {
            let read = fixture.command(IoOpcode::Read, 0, 512);
            let (line, direction) = (fixture.other, DataDirection::ToHost(512));
            let (completion, _) = fixture.rig.execute_command(line, &read, direction, &[]);
            assert!(!completion.status().is_success());
        }
        assert!(fixture.subsystem.remove_namespace(NSID));
        assert_eq!(fixture.region_count(), before, "it is kept");
        let reused = reuse_regions(&fixture.rig);
        assert!(fixture.receive_blocked(tag) == bytes, "the old data");
        assert_eq!(fixture.region_count(), before - 1 + reused.len(), "it is released");
    }
}

#[test]
fn connection_reset_releases_the_memory_of_a_blocked_response() {
    for resets_controller in [false, true] {
        let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Off);
        fixture.write(16, &pattern(7, LARGE as usize));
        let before = fixture.region_count();
        fixture.submit_blocked_read(16, LARGE);
        assert!(fixture.subsystem.remove_namespace(NSID));
        assert_eq!(fixture.region_count(), before);
        if resets_controller {
            fixture.rig.set_property(fixture.admin, offset::CC, 0);
        } else {
            fixture.rig.lines[fixture.io].pipe = None;
        }
        // A channel is closed in an iteration without work.
        assert_eq!(fixture.region_count(), before - 1);
        fixture.rig.lines.clear();
        fixture.rig.assert_all_released();
    }
}

/// The kernel may read memory that was sent by reference after the connection and the device have gone.
#[test]
fn memory_of_the_medium_is_kept_until_the_kernel_releases_it() {
    for is_released in [true, false] {
        let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Off);
        fixture.write(16, &pattern(7, LARGE as usize));
        let before = fixture.region_count();
        fixture.rig.traits.reads.store(true, Ordering::Relaxed);
        fixture.submit_blocked_read(16, LARGE);
        fixture.rig.lines[fixture.io].pipe = None;
        assert!(fixture.subsystem.remove_namespace(NSID));
        assert_eq!(fixture.region_count(), before);
        fixture.rig.advance_time(Span::from_secs(10));
        assert_eq!(fixture.region_count(), before, "the kernel references it");
        if is_released {
            fixture.rig.traits.reads.store(false, Ordering::Relaxed);
            fixture.rig.advance_time(Span::from_ms(1));
            assert_eq!(fixture.region_count(), before - 1);
        } else {
            fixture.rig.advance_time(Span::from_secs(60));
            let is_leak = |text: &String| text.contains("references 131072 bytes of sent data");
            let texts: Vec<_> = fixture.rig.new_events.iter().map(ToString::to_string).collect();
            assert!(texts.iter().any(is_leak), "{texts:?}");
            assert_eq!(fixture.region_count(), before, "it is not used again");
        }
        fixture.rig.lines.clear();
        fixture.rig.traits.reads.store(false, Ordering::Relaxed);
        fixture.rig.assert_all_released();
    }
}

#[test]
fn blocked_response_is_sent_after_a_migration() {
    let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Off);
    let bytes = pattern(7, LARGE as usize);
    fixture.write(16, &bytes);
    let tag = fixture.submit_blocked_read(16, LARGE);
    assert!(fixture.subsystem.remove_namespace(NSID));
    fixture.rig.run_until_idle();
    let io = fixture.io;
    assert!(fixture.rig.guests[io].try_detach(DetachReason::Migrating));
    let reused = reuse_regions(&fixture.rig);
    fixture.rig.guests[io].attach();
    assert!(fixture.receive_blocked(tag) == bytes);
    drop(reused);
}

/// The buffer of a read is free while its response is blocked.
#[test]
fn blocked_in_place_responses_hold_no_buffer() {
    let mut fixture = InPlaceFixture::new(512, 512, DigestMode::Off);
    fixture.write(16, &pattern(3, LARGE as usize));
    // More than the buffers suffice for.
    let count = 8 + fixture.rig.service.buffer_pool().size_bytes() / u64::from(LARGE);
    fixture.rig.lines[fixture.io].is_deaf = true;
    for _ in 0..count {
        let read = fixture.command(IoOpcode::Read, 16, LARGE);
        fixture.rig.lines[fixture.io].submit(&read, DataDirection::ToHost(LARGE), &[]);
    }
    fixture.rig.run_until_idle();
    let pool = fixture.rig.service.buffer_pool();
    assert!(pool.size_bytes() - pool.free_bytes() < 1 << 20, "{} are free", pool.free_bytes());
    fixture.write(16, &pattern(4, LARGE as usize));
    fixture.rig.lines.clear();
    fixture.rig.assert_all_released();
}
