//! Faults, one at a time.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span, WakeSource,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Sleeper;

use super::{FaultControl, FaultDevice, FaultRule};
use crate::{DelayDevice, DelaySettings, LatencySpec, NullDevice, RamDevice};

/// A channel with faults over memory of 64 blocks, and a channel without them.
struct FaultFixture {
    regions: RegionTable,
    memory: Region,
    handle: FaultControl,
    channel: Box<dyn IoChannel>,
    behind: Box<dyn IoChannel>,
}

const BLOCK: u32 = 512;

impl FaultFixture {
    fn new(rules: &str, seed: u64) -> Self {
        let regions = RegionTable::new(4);
        let memory = regions.allocate_region(64 << 10).unwrap();
        let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, BLOCK, 64).unwrap());
        let behind = ram.channel().unwrap();
        let fault =
            FaultDevice::new(ram, &regions, FaultRule::parse_all(rules).unwrap(), seed).unwrap();
        let (handle, channel) = (fault.control(), fault.channel().unwrap());
        Self { regions, memory, handle, channel, behind }
    }

    fn memory(&self, blocks: u32) -> Segment {
        self.memory.segment().slice(0, blocks * BLOCK).unwrap()
    }

    /// Submits a request whose memory is filled with one byte.
    fn submit(&mut self, operation: Operation, token: u64, lba: u64, blocks: u32) -> usize {
        // Three segments, the middle one of which ends in the middle of a block.
        let whole = self.memory(blocks.max(2));
        let len = blocks * BLOCK;
        let cut = len / 2 + 100;
        let slices = [(0, 100), (100, cut - 100), (cut, len.saturating_sub(cut))];
        let segments = slices.map(|(from, len)| whole.slice(from, len).unwrap());
        let request = Request { segment_count: 3, ..request(operation, token, lba, blocks) };
        self.channel.submit(Instant::default(), &[request], &segments)
    }

    fn poll(&mut self) -> Vec<(u64, IoStatus)> {
        let mut completions = CompletionBatch::with_capacity(64);
        self.channel.poll(Instant::default(), &mut completions);
        completions.drain().map(|completion| (completion.token, completion.status)).collect()
    }

    fn run_request(&mut self, operation: Operation, lba: u64, blocks: u32) -> IoStatus {
        assert_eq!(self.submit(operation, 7, lba, blocks), 1);
        let [(7, status)] = self.poll()[..] else { panic!("one answer") };
        status
    }

    /// Writes `byte` to 64 blocks, without faults.
    fn write_without_faults(&mut self, byte: u8) {
        let all = self.memory(64);
        self.regions.fill(all, byte).unwrap();
        self.run_without_faults(Operation::Write);
    }

    /// Contents of 64 blocks, without faults.
    fn read_without_faults(&mut self) -> Vec<u8> {
        self.run_without_faults(Operation::Read);
        self.memory_bytes(64)
    }

    fn run_without_faults(&mut self, operation: Operation) {
        let all = self.memory(64);
        let request = Request { segment_count: 1, ..request(operation, 1, 0, 64) };
        assert_eq!(self.behind.submit(Instant::default(), &[request], &[all]), 1);
        let mut completions = CompletionBatch::with_capacity(1);
        assert_eq!(self.behind.poll(Instant::default(), &mut completions), 1);
        assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS);
    }

    fn memory_bytes(&self, blocks: u32) -> Vec<u8> {
        let mut bytes = vec![0; (blocks * BLOCK) as usize];
        self.regions.load(self.memory(blocks), &mut bytes).unwrap();
        bytes
    }

    fn fill_memory(&self, byte: u8) {
        self.regions.fill(self.memory(64), byte).unwrap();
    }
}

fn request(operation: Operation, token: u64, lba: u64, blocks: u32) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks,
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

/// Number of bits that differ from `byte`.
fn count_wrong_bits(bytes: &[u8], byte: u8) -> u32 {
    bytes.iter().map(|found| (found ^ byte).count_ones()).sum()
}

#[test]
fn injected_error_executes_nothing() {
    let mut bench = FaultFixture::new("error:write@8-9;error-path:flush;error:read@9x1", 1);
    bench.write_without_faults(3);
    bench.fill_memory(5);
    assert_eq!(bench.run_request(Operation::Write, 4, 8), IoStatus::WRITE_FAULT);
    assert_eq!(bench.run_request(Operation::Flush, 0, 0), IoStatus::PATH_ERROR);
    assert_eq!(bench.run_request(Operation::Read, 2, 8), IoStatus::UNRECOVERED_READ);
    assert_eq!(bench.run_request(Operation::Read, 2, 8), IoStatus::SUCCESS, "once");
    assert_eq!(count_wrong_bits(&bench.read_without_faults(), 3), 0);
    bench.fill_memory(5);
    assert_eq!(bench.run_request(Operation::Write, 10, 8), IoStatus::SUCCESS, "beside the range");
    let struck: Vec<u64> = bench.handle.rules().iter().map(|(_, struck)| *struck).collect();
    assert_eq!(struck, [1, 1, 1]);
}

#[test]
fn hanging_request_executes_when_rules_are_cleared() {
    let mut bench = FaultFixture::new("hang:writex2", 1);
    bench.fill_memory(5);
    for token in 0..3 {
        assert_eq!(bench.submit(Operation::Write, token, token * 8, 8), 1);
    }
    assert_eq!(bench.poll(), [(2, IoStatus::SUCCESS)]);
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.handle.hanging_count(), 2);
    assert_eq!(
        count_wrong_bits(&bench.read_without_faults()[..24 * 512], 5),
        0,
        "all of it is written"
    );
    bench.handle.set_rules(Vec::new());
    assert_eq!(bench.poll(), [], "other rules change nothing for what hangs");
    bench.handle.clear_rules();
    assert_eq!(bench.channel.wake_at(), Instant::default());
    assert_eq!(bench.poll(), [(0, IoStatus::SUCCESS), (1, IoStatus::SUCCESS)]);
    assert_eq!(bench.handle.hanging_count(), 0);
    assert_eq!(bench.handle.rules(), []);
}

#[test]
fn hanging_request_can_be_aborted() {
    let mut bench = FaultFixture::new("hang:any", 1);
    assert_eq!(bench.submit(Operation::Read, 1, 0, 8), 1);
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.submit(Operation::Read, 2, 0, 8), 1);
    // The second one has not completed below yet.
    bench.handle.abort_hanging();
    let mut ended = bench.poll();
    ended.extend(bench.poll());
    assert_eq!(ended, [(1, IoStatus::ABORTED), (2, IoStatus::ABORTED)]);
    assert_eq!(bench.submit(Operation::Read, 3, 0, 8), 1);
    assert_eq!(bench.poll(), [], "the rules stay");
    let handle = bench.handle.clone();
    drop(bench);
    assert_eq!(handle.hanging_count(), 0);
    handle.clear_rules();
}

#[test]
fn request_aborted_below_ends_at_its_completion() {
    let null = Arc::new(NullDevice::new(512, 64).unwrap());
    let write = LatencySpec { mean: Span::from_us(5), p99: None };
    let delay =
        DelayDevice::new(null, DelaySettings { write, ..DelaySettings::default() }, 1).unwrap();
    let rules = FaultRule::parse_all("hang:flush").unwrap();
    let fault = FaultDevice::new(Arc::new(delay), &RegionTable::new(1), rules, 1).unwrap();
    let mut channel = fault.channel().unwrap();
    let now = Instant { ns: 1_000 };
    let mut completions = CompletionBatch::with_capacity(1);
    assert_eq!(channel.submit(now, &[request(Operation::Flush, 1, 0, 0)], &[]), 1);
    fault.control().abort_hanging();
    assert_eq!(channel.poll(now, &mut completions), 0, "it is still below");
    assert_eq!(channel.poll(now.after(write.mean), &mut completions), 1);
    assert_eq!(completions.as_slice()[0].status, IoStatus::ABORTED);
}

#[test]
fn dropped_request_never_completes_and_occupies_its_slot() {
    let mut bench = FaultFixture::new("drop:readx3", 1);
    let depth = bench.channel.limits().depth_max as usize;
    for token in 0..4 {
        assert_eq!(bench.submit(Operation::Read, token, 0, 8), 1);
    }
    assert_eq!(bench.poll(), [(3, IoStatus::SUCCESS)]);
    bench.handle.clear_rules();
    bench.handle.abort_hanging();
    assert_eq!(bench.poll(), []);
    let many = vec![request(Operation::Verify, 9, 0, 1); depth];
    assert_eq!(bench.channel.submit(Instant::default(), &many, &[]), depth - 3);
}

#[test]
fn corrupted_read_succeeds_with_one_to_three_wrong_bits() {
    let mut counts = [0; 4];
    for seed in 0..60 {
        let mut bench = FaultFixture::new("corrupt:read", seed);
        bench.write_without_faults(0x5a);
        bench.fill_memory(0xff);
        assert_eq!(bench.run_request(Operation::Read, 8, 8), IoStatus::SUCCESS);
        let wrong = count_wrong_bits(&bench.memory_bytes(8), 0x5a);
        counts[wrong as usize] += 1;
        assert_eq!(
            count_wrong_bits(&bench.read_without_faults(), 0x5a),
            0,
            "what is stored is right"
        );
    }
    assert!(counts[0] == 0 && counts[1..].iter().all(|count| *count > 5), "{counts:?}");
}

#[test]
fn corrupted_write_stores_wrong_bits_only_on_the_device() {
    for seed in 0..60 {
        let mut bench = FaultFixture::new("corrupt:write", seed);
        bench.write_without_faults(1);
        bench.fill_memory(0x5a);
        assert_eq!(bench.run_request(Operation::Write, 8, 8), IoStatus::SUCCESS);
        assert_eq!(
            count_wrong_bits(&bench.memory_bytes(64), 0x5a),
            0,
            "the memory is the caller's"
        );
        let stored = bench.read_without_faults();
        let wrong = count_wrong_bits(&stored[8 * 512..16 * 512], 0x5a);
        assert!((1..=3).contains(&wrong), "{wrong}");
        assert_eq!(
            count_wrong_bits(&stored[..8 * 512], 1) + count_wrong_bits(&stored[16 * 512..], 1),
            0
        );
    }
}

#[test]
fn corrupted_writes_wait_for_a_free_bounce_block() {
    let mut bench = FaultFixture::new("corrupt:write", 1);
    for round in 0..3 {
        let taken: usize = (0..10).map(|token| bench.submit(Operation::Write, token, 0, 8)).sum();
        assert_eq!(taken, 8, "round {round}");
        assert_eq!(bench.poll().len(), 8);
    }
    let struck = bench.handle.rules()[0].1;
    assert_eq!(struck, 24, "only what was taken counts");
}

#[test]
fn torn_write_stores_its_first_blocks_and_fails() {
    let mut lengths = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let mut bench = FaultFixture::new("tear:write", seed);
        bench.write_without_faults(1);
        bench.fill_memory(2);
        assert_eq!(bench.run_request(Operation::Write, 8, 8), IoStatus::WRITE_FAULT);
        let stored = bench.read_without_faults();
        let torn = stored[8 * 512..].iter().take_while(|byte| **byte == 2).count();
        assert!(torn.is_multiple_of(512) && torn < 8 * 512);
        assert_eq!(count_wrong_bits(&stored[8 * 512 + torn..], 1), 0);
        assert_eq!(count_wrong_bits(&stored[..8 * 512], 1), 0);
        lengths.insert(torn);
    }
    assert_eq!(lengths.len(), 8, "every length there is");
}

#[test]
fn short_request_executes_partially_and_succeeds() {
    for seed in 0..30 {
        let mut bench = FaultFixture::new("short:any", seed);
        bench.write_without_faults(1);
        bench.fill_memory(2);
        assert_eq!(bench.run_request(Operation::Read, 8, 8), IoStatus::SUCCESS);
        let bytes = bench.memory_bytes(8);
        let read = bytes.iter().take_while(|byte| **byte == 1).count();
        assert!(read < 8 * 512 && count_wrong_bits(&bytes[read..], 2) == 0);
        assert_eq!(bench.run_request(Operation::WriteZeroes, 8, 8), IoStatus::SUCCESS);
        let stored = bench.read_without_faults();
        let zeroed = stored[8 * 512..].iter().take_while(|byte| **byte == 0).count();
        assert!(zeroed < 8 * 512 && count_wrong_bits(&stored[8 * 512 + zeroed..], 1) == 0);
    }
}

#[test]
fn rule_counts_all_channels_and_same_seed_repeats_faults() {
    let run = |seed| {
        let regions = RegionTable::new(4);
        let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, BLOCK, 64).unwrap());
        let rules = FaultRule::parse_all("error:verify~4x10").unwrap();
        let fault = FaultDevice::new(ram, &regions, rules, seed).unwrap();
        let mut channels = [fault.channel().unwrap(), fault.channel().unwrap()];
        let mut statuses = Vec::new();
        for round in 0..200 {
            let channel = &mut channels[round % 2];
            let one = request(Operation::Verify, 0, 0, 1);
            assert_eq!(channel.submit(Instant::default(), &[one], &[]), 1);
            let mut completions = CompletionBatch::with_capacity(1);
            assert_eq!(channel.poll(Instant::default(), &mut completions), 1);
            statuses.push(completions.as_slice()[0].status.is_success());
        }
        statuses
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
    assert_eq!(run(3).iter().filter(|good| !**good).count(), 10);
}

#[test]
fn releasing_hanging_requests_wakes_sleeping_channels() {
    let mut bench = FaultFixture::new("hang:any", 1);
    let mut sleeper = Sleeper::new().unwrap();
    let WakeSource::Descriptor(descriptor) = bench.channel.wake_source() else {
        panic!("the channel has no wake descriptor")
    };
    sleeper.sources().add_source(descriptor, 0).unwrap();
    for round in 0..3 {
        assert_eq!(bench.submit(Operation::Verify, round, 0, 1), 1);
        assert_eq!(bench.poll(), []);
        assert!(!bench.channel.arm(), "nothing to do");
        let handle = bench.handle.clone();
        let letting_go =
            tenmil_linux::NamedThread::spawn("let go", None, move |_| handle.abort_hanging())
                .unwrap();
        let mut ready = Vec::new();
        while ready.is_empty() {
            sleeper.sleep_until_ready(Span::from_secs(10), &mut ready);
        }
        bench.channel.disarm();
        letting_go.join();
        assert_eq!(bench.poll(), [(round, IoStatus::ABORTED)]);
    }
    assert!(!bench.channel.arm());
    bench.handle.abort_hanging();
    assert!(bench.channel.arm(), "it was ordered after we announced that we sleep");
    bench.channel.disarm();
}

#[test]
fn closed_channel_releases_its_memory_and_waker() {
    let regions = RegionTable::new(2);
    let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, BLOCK, 64).unwrap());
    let fault = FaultDevice::new(ram, &regions, Vec::new(), 1).unwrap();
    for _ in 0..10 {
        let channel = fault.channel().unwrap();
        assert_eq!(fault.shared.lock_wakers().len(), 1);
        let second = fault.channel().err().unwrap();
        assert!(second.text.starts_with("fault: add a memory region"), "{second}");
        assert_eq!(fault.shared.lock_wakers().len(), 1);
        drop(channel);
        assert_eq!(fault.shared.lock_wakers().len(), 0);
    }
}
