//! Durability of completed writes after a power failure, for every device that is placed on others.
//!
//! This includes the backend of files, on a simulated disk: the jobs it submits to the kernel determine
//! what survives. Memory guarantees nothing and keeps nothing.

use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, Instant, IoChannel, Memory, Operation, Random,
    Request, RequestFlags, Segment, Span,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;

use super::partial_accept_device::PartialAcceptDeviceType;
use super::power_loss_device::PowerLossDeviceType;
use super::zeroed_crypt_device::ZeroedCryptType;
use crate::mirror::tests::CreatedMirrorType;
use crate::pool::tests::PoolVolumeType;
use tenmil_block::{OpenedDevice, Opener};

/// Versions written to a block. A version is a number that fills the block; zero means zeroes.
#[derive(Clone, Debug)]
struct BlockVersions {
    /// Oldest first.
    versions: Vec<u64>,
    /// Oldest version that may be found after a power failure.
    kept: usize,
    /// Version of the last completed write.
    completed: usize,
    is_busy: bool,
}

/// A device, its load, and what it has guaranteed.
struct PowerLossTest<'a> {
    uri: &'a str,
    seed: u64,
    /// The open device; `None` while it is reopened.
    opened: Option<OpenedDevice>,
    power: &'a PowerLossDeviceType,
    crypt: ZeroedCryptType,
    /// Clock of background threads.
    clock: Clock,
    regions: RegionTable,
    memory: Region,
    random: Random,
    blocks: Vec<BlockVersions>,
    /// Submitted requests, by token: first block, number of blocks, and what had completed by then.
    under_way: Vec<Option<PendingRequest>>,
    next_version: u64,
}

struct PendingRequest {
    request: Request,
    /// For a flush: the version of each block that it has to keep.
    keeps: Vec<usize>,
}

const DEPTH: usize = 8;
const BLOCKS_MAX: u32 = 6;
/// Largest block size.
const BLOCK_MAX: u32 = 4096;

const DEVICES: [(&str, Durability); 31] = [
    ("power:cached", Durability::VolatileCache),
    ("power:stable", Durability::Persistent),
    ("power:file", Durability::VolatileCache),
    ("power:file?direct=no&holes=no", Durability::VolatileCache),
    ("power:file?zeroes=no", Durability::VolatileCache),
    ("power:file?holes=no&zeroes=no", Durability::VolatileCache),
    ("stripe:[power:stable],[delay:[power:stable]?write=9us]?chunk=1k", Durability::Persistent),
    ("model:[power:cached]?device=p4800x", Durability::VolatileCache),
    ("delay:[power:cached]?read=5us&write=9us&write-p99=20us", Durability::VolatileCache),
    ("fault:[power:cached]?rule=error:verify;corrupt:read@999", Durability::VolatileCache),
    ("split:[power:cached]?part=1&parts=2", Durability::VolatileCache),
    ("stripe:[power:cached],[power:cached],[power:cached]?chunk=2k", Durability::VolatileCache),
    ("stripe:[power:cached],[reluctant:[power:cached]]?chunk=1k", Durability::VolatileCache),
    ("stripe:[power:cached],[split:[power:stable]?offset=8k]?chunk=1k", Durability::VolatileCache),
    ("stripe:[power:file],[power:file?zeroes=no]?chunk=2k", Durability::VolatileCache),
    (
        "delay:[stripe:[delay:[power:cached]?write=5us],[power:cached]?chunk=4k]?write=1us",
        Durability::VolatileCache,
    ),
    ("crypt:[power:cached]", Durability::VolatileCache),
    ("stored:[power:cached?size=3m]", Durability::VolatileCache),
    ("stored:[power:stable?size=3m]", Durability::VolatileCache),
    ("stored:[power:file?size=3m]", Durability::VolatileCache),
    ("stored:[power:cached?size=3m],[power:file?size=3m]", Durability::VolatileCache),
    ("stored:[made:[power:cached?size=4m],[power:cached?size=4m]]", Durability::VolatileCache),
    ("stored:[made:[power:stable?size=4m],[power:file?size=4m]]", Durability::VolatileCache),
    (
        "stored:[made:[power:cached?size=4m],[fault:[power:cached?size=4m]?rule=error:write+9~90]]",
        Durability::VolatileCache,
    ),
    ("crypt:[power:file]", Durability::VolatileCache),
    ("made:[power:cached?size=1280k],[power:cached?size=1280k]", Durability::VolatileCache),
    ("made:[power:stable?size=1280k],[power:stable?size=1280k]", Durability::Persistent),
    (
        "made:[power:file?size=1280k],[delay:[power:cached?size=1280k]?write=9us],\
         [fault:[power:cached?size=1280k]?rule=error:write+9~60;tear:write+9~70;error:flush~9]",
        Durability::VolatileCache,
    ),
    ("crypt:[made:[power:cached?size=1152k],[power:stable?size=1152k]]", Durability::VolatileCache),
    (
        "made:[crypt:[power:cached?size=1152k]],[crypt:[power:file?size=1152k]]",
        Durability::VolatileCache,
    ),
    (
        "stripe:[made:[power:cached?size=1152k],[power:cached?size=1152k]],\
         [split:[made:[power:cached?size=1280k],[power:cached?size=1280k]]?part=1&parts=2]?chunk=1k",
        Durability::VolatileCache,
    ),
];

/// A mirror whose legs are files.
const MIRROR_OF_FILES: &str = "made:[power:file?size=1152k],[power:file?size=1152k&zeroes=no]";

impl<'a> PowerLossTest<'a> {
    fn new(uri: &'a str, power: &'a PowerLossDeviceType, seed: u64) -> Self {
        let regions = RegionTable::new(400);
        let (crypt, clock) = (ZeroedCryptType::new(), Clock::start());
        let opened = open_or_reopen_device(uri, power, &crypt, (&regions, clock), seed);
        crypt.stop_zeroing_on_open();
        let count = usize::try_from(opened.medium.limits().block_count).unwrap();
        let memory = regions.allocate_region(DEPTH * (BLOCKS_MAX * BLOCK_MAX) as usize).unwrap();
        let block = BlockVersions::new(0);
        Self {
            uri,
            seed,
            opened: Some(opened),
            power,
            crypt,
            clock,
            memory,
            regions,
            random: Random::new(seed),
            blocks: vec![block; count],
            under_way: (0..DEPTH).map(|_| None).collect(),
            next_version: 1,
        }
    }

    /// Loads the device, cuts the power, and checks what is left. Returns what should have survived and
    /// has not.
    fn run_until_power_loss(&mut self, steps: u64) -> Vec<String> {
        self.run_load_and_cut_power(steps);
        self.reopen_and_collect_violations()
    }

    /// Loads the device and cuts the power.
    fn run_load_and_cut_power(&mut self, steps: u64) {
        let mut channel = self.device().channel().unwrap();
        let mut now = self.next_iteration_time(Instant { ns: 1 });
        for _ in 0..steps {
            if self.power.has_power_failed() {
                break;
            }
            self.submit_random(&mut *channel, now);
            now = self.poll_once(&mut *channel, now);
            if self.uri.contains("stored:") {
                // A background thread works for it.
                tenmil_linux::named_thread::yield_cpu();
            }
        }
        self.power.lose_power();
        self.under_way.iter_mut().for_each(|place| *place = None);
    }

    /// Reopens the device and checks all blocks.
    fn reopen_and_collect_violations(&mut self) -> Vec<String> {
        self.opened = None;
        self.power.restore_power();
        let world = (&self.regions, self.clock);
        let opened = open_or_reopen_device(self.uri, self.power, &self.crypt, world, self.seed);
        self.opened = Some(opened);
        let mut channel = self.device().channel().unwrap();
        (0..self.blocks.len())
            .filter_map(|block| self.find_block_violation(&mut *channel, block))
            .collect()
    }

    /// The time of the next iteration. A device with a background thread uses the clock of that thread: a
    /// mirror below compares the two.
    fn next_iteration_time(&self, now: Instant) -> Instant {
        match self.uri.contains("stored:") {
            true => self.clock.now(),
            false => Instant { ns: now.ns + 1_000 },
        }
    }

    fn device(&self) -> &dyn BlockDevice {
        &*self.opened.as_ref().unwrap().medium
    }

    fn segment_of_token(&self, token: usize, blocks: u32) -> Segment {
        let skip = u32::try_from(token).unwrap() * BLOCKS_MAX * BLOCK_MAX;
        let block_size = self.device().limits().block_size;
        self.memory.segment().slice(skip, blocks * block_size).unwrap()
    }

    /// Submits one request if a slot is free and none of its blocks is being written.
    fn submit_random(&mut self, channel: &mut dyn IoChannel, now: Instant) {
        let Some(token) = self.under_way.iter().position(Option::is_none) else { return };
        let count = u32::try_from(self.random.below(BLOCKS_MAX.into())).unwrap() + 1;
        let first = self.random.below(self.blocks.len() as u64 - u64::from(count) + 1);
        let from = usize::try_from(first).unwrap();
        let range = from..from + count as usize;
        let drawn = self.random.below(10);
        let operation = match drawn {
            0 | 1 => Operation::Flush,
            2 if channel.limits().operations.has(Operation::WriteZeroes) => Operation::WriteZeroes,
            _ => Operation::Write,
        };
        let is_flush = operation == Operation::Flush;
        if !is_flush && self.blocks[range.clone()].iter().any(|block| block.is_busy) {
            return;
        }
        let flags = if drawn > 7 || drawn == 2 { RequestFlags::FUA } else { RequestFlags::NONE };
        let memory = self.segment_of_token(token, count);
        let version = if operation == Operation::Write { self.next_version } else { 0 };
        self.store_version(memory, version);
        let request = match is_flush {
            true => request(operation, 0, 0),
            false => Request { flags, ..request(operation, first, count) },
        };
        let request = Request { token: token as u64, ..request };
        let keeps = self.blocks.iter().map(|block| block.completed).collect();
        if channel.submit(now, &[request], &[memory]) == 0 {
            return;
        }
        if !is_flush {
            for block in &mut self.blocks[range] {
                block.versions.push(version);
                block.is_busy = true;
            }
            self.next_version += 1;
        }
        self.under_way[token] = Some(PendingRequest { request, keeps });
    }

    fn store_version(&self, memory: Segment, version: u64) {
        let bytes = version.to_le_bytes().repeat(memory.len_bytes as usize / 8);
        self.regions.store(memory, &bytes).unwrap();
    }

    fn poll_once(&mut self, channel: &mut dyn IoChannel, now: Instant) -> Instant {
        let mut completions = CompletionBatch::with_capacity(DEPTH);
        channel.flush_submissions();
        channel.poll(now, &mut completions);
        for completion in completions.drain() {
            assert!(completion.status.is_success(), "{completion:?}");
            let token = usize::try_from(completion.token).unwrap();
            let pending = self.under_way[token].take().expect("answered once");
            self.record_completion(&pending);
        }
        self.next_iteration_time(now)
    }

    /// Records what a completion guarantees.
    fn record_completion(&mut self, pending: &PendingRequest) {
        let Request { operation, lba, blocks, flags, .. } = pending.request;
        let is_stable = self.device().limits().durability == Durability::Persistent;
        if operation == Operation::Flush {
            for (block, keep) in self.blocks.iter_mut().zip(&pending.keeps) {
                block.kept = block.kept.max(*keep);
            }
            return;
        }
        let first = usize::try_from(lba).unwrap();
        for block in &mut self.blocks[first..first + blocks as usize] {
            block.is_busy = false;
            block.completed = block.versions.len() - 1;
            if is_stable || flags.has(RequestFlags::FUA) {
                block.kept = block.completed;
            }
        }
    }

    /// Reads a block and returns what is wrong with it. The contents found are the new state.
    fn find_block_violation(
        &mut self,
        channel: &mut dyn IoChannel,
        number: usize,
    ) -> Option<String> {
        let memory = self.segment_of_token(0, 1);
        self.run_request(channel, Operation::Read, number, memory);
        let mut bytes = vec![0; memory.len_bytes as usize];
        self.regions.load(memory, &mut bytes).unwrap();
        let block = &self.blocks[number];
        let parts = bytes.chunks(512).map(|part| u64::from_le_bytes(*part.first_chunk().unwrap()));
        let found: Vec<u64> = parts.collect();
        let good = found.iter().all(|version| block.versions[block.kept..].contains(version));
        let said = format!("block {number} holds {found:?}, expected of {block:?}");
        // A torn block is written whole, so that the next life starts with one version.
        self.store_version(memory, found[0]);
        self.run_request(channel, Operation::Write, number, memory);
        self.blocks[number] = BlockVersions::new(found[0]);
        (!good).then_some(said)
    }

    /// Executes one request on a block, alone and with FUA.
    fn run_request(
        &self,
        channel: &mut dyn IoChannel,
        operation: Operation,
        block: usize,
        memory: Segment,
    ) {
        let request = Request { flags: RequestFlags::FUA, ..request(operation, block as u64, 1) };
        let mut now = self.next_iteration_time(Instant { ns: 1 });
        while channel.submit(now, &[request], &[memory]) == 0 {}
        let mut completions = CompletionBatch::with_capacity(1);
        while channel.poll(now, &mut completions) == 0 {
            channel.flush_submissions();
            now = self.next_iteration_time(now);
        }
        assert!(completions.as_slice()[0].status.is_success());
    }
}

impl BlockVersions {
    fn new(version: u64) -> Self {
        Self { versions: vec![version], kept: 0, completed: 0, is_busy: false }
    }
}

/// Opens a device, or reopens it after a power failure.
fn open_or_reopen_device(
    uri: &str,
    power: &PowerLossDeviceType,
    crypt: &ZeroedCryptType,
    (regions, clock): (&RegionTable, Clock),
    seed: u64,
) -> OpenedDevice {
    let more: [(&str, &dyn tenmil_block::DeviceType); 5] = [
        ("power", power),
        ("reluctant", &PartialAcceptDeviceType),
        ("made", &CreatedMirrorType),
        ("crypt", crypt),
        ("stored", &PoolVolumeType { closing_max: Span::default() }),
    ];
    let opener = Opener { regions, clock, seed, kinds: &crate::tests::device_types_with(&more) };
    opener.open(&uri.parse().unwrap()).unwrap()
}

fn request(operation: Operation, lba: u64, blocks: u32) -> Request {
    let moves = matches!(operation, Operation::Read | Operation::Write);
    Request {
        token: 0,
        lba,
        operand: 0,
        segment_first: 0,
        blocks,
        segment_count: u16::from(moves),
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

/// Several lives of a device, each ended by a power failure. Returns what was lost.
fn violations_after_random_power_cycles(uri: &str, seed: u64) -> Vec<String> {
    let power = PowerLossDeviceType::default();
    let mut load = PowerLossTest::new(uri, &power, seed);
    let mut lost = Vec::new();
    for _ in 0..5 {
        let steps = load.random.below(250) + 1;
        lost.extend(load.run_until_power_loss(steps));
    }
    lost
}

#[test]
fn guaranteed_data_survives_random_power_loss() {
    for (uri, _) in DEVICES {
        // Pools are large, and each has a thread.
        let seeds = match uri {
            uri if uri.contains("stored:") && uri.contains("],[") => 1,
            uri if uri.contains("stored:") => 3,
            _ => 20,
        };
        for seed in 0..seeds {
            let lost = violations_after_random_power_cycles(uri, seed);
            assert!(lost.is_empty(), "{uri} seed {seed}: {lost:#?}");
        }
    }
}

/// One life that ends when this many jobs have been executed below, and at the latest after a few steps.
/// Returns what was lost, and the number of executed jobs.
fn violations_after_power_loss_at(uri: &str, seed: u64, jobs: u64) -> (Vec<String>, u64) {
    let power = PowerLossDeviceType::default();
    let mut load = PowerLossTest::new(uri, &power, seed);
    power.arm_power_loss_after(jobs);
    load.run_load_and_cut_power(40);
    let done = power.operations_since_countdown_start(jobs);
    (load.reopen_and_collect_violations(), done)
}

#[test]
fn guaranteed_data_survives_power_loss_after_every_operation() {
    for uri in ["power:file", "power:file?direct=no&zeroes=no&holes=no", MIRROR_OF_FILES] {
        for seed in 0..3 {
            for jobs in 1.. {
                let (lost, done) = violations_after_power_loss_at(uri, seed, jobs);
                assert!(lost.is_empty(), "{uri} seed {seed}, cut after {jobs}: {lost:#?}");
                if done < jobs {
                    assert!(jobs > 30, "{uri} seed {seed}: {jobs} jobs");
                    break;
                }
            }
        }
    }
}

#[test]
fn volatile_cache_is_reported() {
    for (uri, durability) in DEVICES {
        let power = PowerLossDeviceType::default();
        let load = PowerLossTest::new(uri, &power, 1);
        assert_eq!(load.device().limits().durability, durability, "{uri}");
    }
}

#[test]
fn device_that_violates_its_durability_is_detected() {
    for uri in [
        "power:forgetful",
        "stripe:[power:cached],[delay:[power:forgetful]]?chunk=1k",
        "power:file?syncs=no",
        "power:file?forces=no",
        "crypt:[power:file?forces=no]",
    ] {
        let found = (0..20)
            .filter(|seed| !violations_after_random_power_cycles(uri, *seed).is_empty())
            .count();
        assert!(found > 15, "{uri}: {found} of 20 seeds");
    }
}
