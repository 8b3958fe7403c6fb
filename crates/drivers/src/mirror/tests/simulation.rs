//! Simulation of a mirror with two channels: random requests and faults, and the conditions that must
//! hold.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus, Memory,
    Operation, Random, Request, RequestFlags, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::block_model::{BlockModel, BlockSnapshot, parse_version, versioned_contents};
use super::simulated_disk::{BLOCK, SimulatedDisk};
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::mirror_state::InjectedBug;
use crate::mirror::{InjectedBugs, Mirror, MirrorLegDevice, MirrorOptions};

/// Blocks of the mirror: eight regions of 64 KiB.
const BLOCKS: u64 = 1024;
/// Blocks of a leg before those of the mirror.
const FIRST: u64 = 2048;
const CHANNELS: usize = 2;
const SLOTS: usize = 6;
const REQUEST_BLOCKS_MAX: u64 = 8;

/// Copying takes four times as long while there are requests, which is most of the time.
const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_ms(2),
    probe_every: Span::from_us(700),
    copy_rate: 1_600 << 20,
};

/// Events of a run, for comparison.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RunSummary {
    completed: u64,
    faults: u64,
    end: Instant,
}

struct MirrorSimulation {
    random: Random,
    regions: RegionTable,
    memory: Segment,
    disks: Vec<SimulatedDisk>,
    mirror: Option<Arc<Mirror>>,
    channels: Vec<Option<Box<dyn IoChannel>>>,
    slots: Vec<Option<OpenRequest>>,
    blocks: Vec<BlockModel>,
    now: Instant,
    planted: Option<InjectedBug>,
    bugs: InjectedBugs,
    tale: RunSummary,
    /// One of this many requests is a flush; some programs hardly ever flush.
    flush_every: u64,
    /// First of the blocks that most writes go to: few blocks, so that other regions become clean.
    hot: u64,
    /// The leg that has failed while the others were resynchronized, until the mirror has given it up.
    second_fault: Option<usize>,
}

/// A request in flight.
struct OpenRequest {
    operation: Operation,
    lba: u64,
    blocks: u64,
    is_forced: bool,
    before: Vec<BlockSnapshot>,
}

/// Runs one seed to its end, with this number of legs.
pub(super) fn run_simulation(
    seed: u64,
    legs: usize,
    planted: Option<InjectedBug>,
) -> Result<RunSummary, Error> {
    run_with_injected_bugs(seed, legs, planted, InjectedBugs::default())
}

/// Like [`run`], with bugs that the mirror is opened with.
pub(super) fn run_with_injected_bugs(
    seed: u64,
    legs: usize,
    planted: Option<InjectedBug>,
    bugs: InjectedBugs,
) -> Result<RunSummary, Error> {
    let mut world = MirrorSimulation::new(seed, legs, planted, bugs)?;
    for _ in 0..1_500 {
        world.poll_channels()?;
        if world.random.chance(1, 40) {
            world.inject_fault()?;
        }
        world.submit_random();
    }
    world.end_faults_and_compare()?;
    Ok(world.tale)
}

/// Reads a range in which the source cannot read one block, and another leg has older versions of others.
pub(super) fn check_read_around_bad_block() -> Result<(), Error> {
    let mut world = MirrorSimulation::new(1, 2, None, InjectedBugs::default())?;
    while !world.is_in_sync_and_idle() {
        world.poll_channels()?;
    }
    let lba = 101;
    let block = &mut world.blocks[101];
    let version = block.begin_write();
    block.end_write(true, true);
    world.disks[0].overwrite_block(FIRST + lba, versioned_contents(lba, version));
    world.disks[0].make_unreadable(FIRST + lba - 1);
    let shared = Arc::clone(&world.mirror.as_ref().unwrap().shared);
    shared.lock().mark_divergent(&shared, lba, 1);
    world.submit_request(0, 0, Operation::Read, 96, 8);
    while world.slots[0].is_some() {
        world.poll_channels()?;
    }
    Ok(())
}

impl MirrorSimulation {
    fn new(
        seed: u64,
        open_legs: usize,
        planted: Option<InjectedBug>,
        bugs: InjectedBugs,
    ) -> Result<Self, Error> {
        let mut random = Random::new(seed);
        let flush_every = if random.chance(1, 2) { 20 } else { 2_000 };
        let regions = RegionTable::new(400);
        let len = CHANNELS * SLOTS * BLOCK * usize::try_from(REQUEST_BLOCKS_MAX).unwrap();
        let memory =
            regions.add_mapping(MemoryMapping::new(len, MemoryBacking::Private).unwrap()).unwrap();
        let disks: Vec<SimulatedDisk> = (0..open_legs)
            .map(|_| SimulatedDisk::new(&regions, FIRST + BLOCKS, random.fork()))
            .collect();
        // Not every device counts its losses.
        disks.iter().filter(|_| seed & 4 == 0).for_each(SimulatedDisk::disable_loss_count);
        // Earlier contents of the second leg must not remain as differences.
        (0..BLOCKS)
            .step_by(7)
            .for_each(|lba| disks[1].overwrite_block(FIRST + lba, versioned_contents(lba, 0)));
        let mut world = Self {
            random,
            regions,
            memory,
            disks,
            mirror: None,
            channels: Vec::new(),
            slots: (0..CHANNELS * SLOTS).map(|_| None).collect(),
            blocks: vec![BlockModel::new(); usize::try_from(BLOCKS).unwrap()],
            now: Instant { ns: 1 },
            planted,
            bugs,
            tale: RunSummary { completed: 0, faults: 0, end: Instant::default() },
            flush_every,
            hot: 0,
            second_fault: None,
        };
        let (legs, regions, mut time) = (world.legs(), world.regions.clone(), world.now);
        format_mirror(&regions, &legs, 7, &mut || advance_time(&mut time))?;
        world.open_mirror()?;
        Ok(world)
    }

    fn legs(&self) -> Vec<MirrorLegDevice> {
        let leg = |(index, disk): (usize, &SimulatedDisk)| MirrorLegDevice {
            name: format!("disk{index}"),
            medium: Ok(Arc::new(disk.clone())),
        };
        self.disks.iter().enumerate().map(leg).collect()
    }

    fn open_mirror(&mut self) -> Result<(), Error> {
        let (legs, mut time) = (self.legs(), self.now);
        let options =
            MirrorOptions { bugs: self.bugs, ..MirrorOptions::with_resync_policy(POLICY) };
        let mirror = Mirror::open(&self.regions, &legs, &options, &mut || advance_time(&mut time))?;
        mirror.shared.lock().planted = self.planted;
        mirror.shared.publish_leg_masks(&mirror.shared.lock());
        self.now = time;
        self.channels = (0..CHANNELS).map(|_| mirror.channel().ok()).collect();
        self.mirror = Some(Arc::new(mirror));
        Ok(())
    }

    fn in_sync_mask_and_remaining_regions(&self) -> (u8, u64) {
        self.mirror.as_ref().unwrap().in_sync_mask_and_remaining_regions()
    }

    /// Whether the mirror has detected that a leg has failed.
    fn is_leg_failed(&self, leg: usize) -> bool {
        let meta = self.mirror.as_ref().unwrap().shared.lock();
        (meta.in_sync | meta.returning) & (1 << leg) == 0
    }

    fn is_recovering(&self) -> bool {
        let (in_sync, todo) = self.in_sync_mask_and_remaining_regions();
        todo > 0 && in_sync.count_ones() > 1
    }

    /// Advances the time and processes all completions.
    fn poll_channels(&mut self) -> Result<(), Error> {
        self.now = self.now.after(Span { ns: 1 + self.random.below(40_000) });
        for index in 0..CHANNELS {
            let mut completions = CompletionBatch::with_capacity(SLOTS);
            let Some(channel) = &mut self.channels[index] else { continue };
            channel.poll(self.now, &mut completions);
            for completion in completions.drain() {
                self.handle_completion(&completion)?;
            }
        }
        if self.second_fault.is_some_and(|leg| self.is_leg_failed(leg) || !self.is_recovering()) {
            self.second_fault = None;
        }
        Ok(())
    }

    fn slot_memory(&self, slot: usize, blocks: u64) -> Segment {
        let size = u32::try_from(BLOCK as u64 * REQUEST_BLOCKS_MAX).unwrap();
        let len = u32::try_from(blocks * BLOCK as u64).unwrap();
        self.memory.slice(u32::try_from(slot).unwrap() * size, len).unwrap()
    }

    fn block_index_range(lba: u64, blocks: u64) -> std::ops::Range<usize> {
        usize::try_from(lba).unwrap()..usize::try_from(lba + blocks).unwrap()
    }

    /// Submits a request on a channel that has a free slot.
    fn submit_random(&mut self) {
        let channel = usize::try_from(self.random.below(CHANNELS as u64)).unwrap();
        let free =
            (channel * SLOTS..(channel + 1) * SLOTS).find(|slot| self.slots[*slot].is_none());
        let Some(slot) = free else { return };
        if self.channels[channel].is_none() {
            return;
        }
        if self.random.chance(1, 100) {
            self.hot = self.random.below(BLOCKS);
        }
        let spread = if self.random.chance(1, 20) { BLOCKS } else { 40 };
        let most = 1 + self.random.below(REQUEST_BLOCKS_MAX);
        let lba = (self.hot + self.random.below(spread)) % BLOCKS;
        let blocks = most.min(BLOCKS - lba);
        let operation = match self.random.below(2) {
            _ if self.random.chance(1, self.flush_every) => Operation::Flush,
            0 => Operation::Write,
            _ => Operation::Read,
        };
        self.submit_request(channel, slot, operation, lba, blocks);
    }

    fn submit_request(
        &mut self,
        channel: usize,
        slot: usize,
        operation: Operation,
        lba: u64,
        blocks: u64,
    ) {
        let range = Self::block_index_range(lba, blocks);
        let is_write = operation == Operation::Write;
        if is_write && self.blocks[range.clone()].iter().any(|block| block.is_busy) {
            return;
        }
        let memory = self.slot_memory(slot, blocks);
        let is_recovering = self.is_recovering();
        let whole =
            if operation == Operation::Flush { 0..self.blocks.len() } else { range.clone() };
        let before = self.blocks[whole].iter().map(|block| block.snapshot(is_recovering)).collect();
        let is_forced = is_write && self.random.chance(1, 3);
        if is_write {
            let bytes: Vec<u8> = (lba..)
                .zip(&mut self.blocks[range])
                .flat_map(|(lba, block)| versioned_contents(lba, block.begin_write()))
                .collect();
            self.regions.store(memory, &bytes).unwrap();
        } else if operation == Operation::Read {
            self.regions.fill(memory, 0xee).unwrap();
        }
        let moves = operation != Operation::Flush;
        let request = Request {
            token: slot as u64,
            lba: if moves { lba } else { 0 },
            operand: 0,
            segment_first: 0,
            blocks: if moves { u32::try_from(blocks).unwrap() } else { 0 },
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags: if is_forced { RequestFlags::FUA } else { RequestFlags::NONE },
        };
        self.slots[slot] = Some(OpenRequest { operation, lba, blocks, is_forced, before });
        let backend = self.channels[channel].as_mut().unwrap();
        assert_eq!(backend.submit(self.now, &[request], &[memory]), 1, "there is room");
    }

    fn handle_completion(&mut self, completion: &IoCompletion) -> Result<(), Error> {
        let slot = usize::try_from(completion.token).unwrap();
        let open = self.slots[slot].take().ok_or("answered twice").map_err(Error::environment)?;
        let OpenRequest { operation, lba, blocks, is_forced, before } = open;
        self.tale.completed += 1;
        let is_good = completion.status == IoStatus::SUCCESS;
        if !is_good {
            return Err(Error::environment(format!(
                "{operation:?} of {lba}+{blocks} ended with {:?}",
                completion.status
            )));
        }
        match operation {
            Operation::Write => self.blocks[Self::block_index_range(lba, blocks)]
                .iter_mut()
                .for_each(|block| block.end_write(is_good, is_forced)),
            Operation::Flush => {
                let pairs = self.blocks.iter_mut().zip(&before);
                pairs.for_each(|(block, before)| block.record_flush(before));
            }
            _ => {
                let memory = self.slot_memory(slot, blocks);
                let mut bytes = vec![0; memory.len_bytes as usize];
                self.regions.load(memory, &mut bytes).unwrap();
                // A leg that has failed during the resync and answers again may be read until the mirror gives
                // it up for a request that failed, and the other leg from then on.
                let decides = self.second_fault.is_none();
                let read = (lba..).zip(bytes.chunks(BLOCK)).zip(&before);
                for ((lba, bytes), before) in read {
                    let block = &mut self.blocks[usize::try_from(lba).unwrap()];
                    parse_version(lba, bytes)
                        .and_then(|version| block.check_read(before, version, decides))
                        .map_err(|problem| format!("block {lba}: {problem}"))
                        .map_err(Error::environment)?;
                }
            }
        }
        Ok(())
    }

    fn inject_fault(&mut self) -> Result<(), Error> {
        let (in_sync, todo) = self.in_sync_mask_and_remaining_regions();
        let legs = self.disks.len();
        let leg = usize::try_from(self.random.below(legs as u64)).unwrap();
        let others_hold = (0..legs).any(|other| {
            other != leg && in_sync & (1 << other) != 0 && !self.disks[other].is_failing()
        });
        let all_readable = self.disks.iter().all(|disk| !disk.has_bad_blocks());
        let is_whole = in_sync.count_ones() as usize == legs
            && todo == 0
            && self.disks.iter().all(|disk| !disk.is_failing());
        self.tale.faults += 1;
        match self.random.below(13) {
            0..=3 if others_hold && all_readable => {
                if self.is_recovering() {
                    self.blocks.iter_mut().for_each(BlockModel::record_second_fault);
                    self.second_fault = Some(leg);
                }
                self.disks[leg].fail_all_requests();
            }
            4..=7 => {
                // A device that loses completed writes and never fails a request cannot be detected by
                // any mirror.
                let reset = self.random.chance(1, 2) && self.is_leg_failed(leg);
                if self.disks[leg].is_failing() {
                    self.disks[leg].end_failure(reset);
                }
            }
            8 => {
                let may_fail = others_hold && all_readable && !self.is_recovering();
                if may_fail && self.random.chance(1, 2) {
                    self.disks[leg].fail_all_requests();
                }
                return self.lose_power_during_rewrite();
            }
            9 => self.close_and_reopen_channel(leg % CHANNELS),
            10 if is_whole && all_readable => self.disks[leg].make_unreadable(FIRST + self.hot),
            11 if is_whole && all_readable => return self.lose_unflushed(leg),
            _ => {}
        }
        Ok(())
    }

    /// A leg loses its unflushed writes and continues; this cannot be detected before a flush.
    fn lose_unflushed(&mut self, leg: usize) -> Result<(), Error> {
        while self.slots.iter().any(Option::is_some) {
            self.poll_channels()?;
        }
        if self.disks[leg].is_failing() || !self.disks[leg].has_unflushed() {
            return Ok(());
        }
        self.disks[leg].lose_unflushed();
        let Some(channel) = self.channels.iter().position(Option::is_some) else { return Ok(()) };
        let slot = channel * SLOTS;
        self.submit_request(channel, slot, Operation::Flush, 0, 0);
        while self.slots[slot].is_some() {
            self.poll_channels()?;
        }
        Ok(())
    }

    /// The power fails just as blocks are written that have not been written for a while.
    fn lose_power_during_rewrite(&mut self) -> Result<(), Error> {
        self.hot = self.random.below(BLOCKS - 40);
        for slot in (0..CHANNELS * SLOTS).step_by(3) {
            let (channel, lba) = (slot / SLOTS, self.hot + self.random.below(30));
            if self.slots[slot].is_none() && self.channels[channel].is_some() {
                self.submit_request(channel, slot, Operation::Write, lba, 8);
            }
        }
        for _ in 0..self.random.below(10) {
            self.poll_channels()?;
        }
        self.power_cycle_all()
    }

    fn power_cycle_all(&mut self) -> Result<(), Error> {
        self.disks.iter().for_each(SimulatedDisk::power_cycle);
        self.channels.clear();
        self.mirror = None;
        self.slots.iter_mut().for_each(|slot| *slot = None);
        self.blocks.iter_mut().for_each(BlockModel::record_power_failure);
        self.second_fault = None;
        self.open_mirror()
    }

    /// A thread ends with requests in flight, and another one starts.
    fn close_and_reopen_channel(&mut self, index: usize) {
        self.channels[index] = None;
        for slot in index * SLOTS..(index + 1) * SLOTS {
            if let Some(open) = self.slots[slot].take()
                && open.operation == Operation::Write
            {
                let range = Self::block_index_range(open.lba, open.blocks);
                self.blocks[range].iter_mut().for_each(|block| block.end_write(false, false));
            }
        }
        self.channels[index] = self.mirror.as_ref().unwrap().channel().ok();
    }

    /// Ends all faults: all requests complete, and all legs become equal.
    fn end_faults_and_compare(&mut self) -> Result<(), Error> {
        self.disks.iter().for_each(|disk| disk.end_failure(false));
        let mut turns = 0;
        while !self.is_in_sync_and_idle() {
            self.poll_channels()?;
            turns += 1;
            if turns > 20_000 {
                let waiting = self.slots.iter().flatten().count();
                let (in_sync, todo) = self.in_sync_mask_and_remaining_regions();
                return Err(Error::environment(format!(
                    "in sync {in_sync:b}, {todo} to do, {waiting} unanswered"
                )));
            }
        }
        for lba in (0..BLOCKS).step_by(8) {
            self.submit_request(0, 0, Operation::Read, lba, 8);
            while self.slots[0].is_some() {
                self.poll_channels()?;
            }
        }
        for lba in FIRST..FIRST + BLOCKS {
            if self.disks.iter().any(|disk| disk.read_block(lba) != self.disks[0].read_block(lba)) {
                return Err(Error::environment(format!(
                    "legs differ at rest, block {}",
                    lba - FIRST
                )));
            }
        }
        self.tale.end = self.now;
        Ok(())
    }

    fn is_in_sync_and_idle(&self) -> bool {
        let mirror = self.mirror.as_ref().unwrap();
        let meta = mirror.shared.lock();
        let clean = meta.are_all_legs_in_sync() && meta.todo.is_empty() && meta.dirty.is_empty();
        clean && meta.wanted == meta.settled && self.slots.iter().all(Option::is_none)
    }
}

fn advance_time(time: &mut Instant) -> Instant {
    *time = time.after(Span::from_us(10));
    *time
}
