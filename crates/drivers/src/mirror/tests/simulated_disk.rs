//! Simulated leg of a mirror: completes requests late and out of order, fails and returns, and keeps a
//! random part of its unflushed writes on a power failure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Memory, Operation, OperationSet, Random, Request, RequestFlags,
    Segment, Span,
};
use tenmil_dma::RegionTable;

pub(crate) const BLOCK: usize = 512;

/// Handle of a disk.
#[derive(Clone)]
pub(crate) struct SimulatedDisk(Arc<Mutex<SimulatedDiskState>>);

struct SimulatedDiskState {
    regions: RegionTable,
    random: Random,
    limits: Limits,
    stable: BTreeMap<u64, Vec<u8>>,
    /// Versions written since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<Vec<u8>>>,
    under_way: Vec<(u32, Instant, Request, Vec<Segment>)>,
    /// Blocks that cannot be read until they are written.
    bad: BTreeSet<u64>,
    is_failing: bool,
    channels: u32,
    /// Open channels.
    open: BTreeSet<u32>,
    /// Channels that have not reported the last loss of completed writes yet.
    owing: BTreeSet<u32>,
    /// Whether no channel has reported the last loss yet.
    is_unheard: bool,
    /// Number of losses that at least one channel has reported.
    losses: u64,
    /// Whether the disk reports the number of its losses.
    counts: bool,
    /// Whether it reports a loss on one channel only.
    reports_once: bool,
}

struct SimulatedDiskChannel {
    disk: SimulatedDisk,
    limits: Limits,
    number: u32,
}

impl SimulatedDisk {
    pub(crate) fn new(regions: &RegionTable, blocks: u64, random: Random) -> Self {
        let operations = [
            Operation::Read,
            Operation::Write,
            Operation::Flush,
            Operation::WriteZeroes,
            Operation::Compare,
            Operation::Verify,
        ];
        let limits = Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: blocks,
            request_blocks_max: 64,
            segments_max: 4,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 16,
            durability: Durability::VolatileCache,
            operations: OperationSet::from_operations(&operations),
        };
        Self(Arc::new(Mutex::new(SimulatedDiskState {
            regions: regions.clone(),
            random,
            limits,
            stable: BTreeMap::new(),
            cached: BTreeMap::new(),
            under_way: Vec::new(),
            bad: BTreeSet::new(),
            is_failing: false,
            channels: 0,
            open: BTreeSet::new(),
            owing: BTreeSet::new(),
            is_unheard: false,
            losses: 0,
            counts: true,
            reports_once: false,
        })))
    }

    /// Stops reporting the number of losses.
    pub(crate) fn disable_loss_count(&self) {
        self.lock().counts = false;
    }

    /// From now on only the first flush after a loss fails, whichever channel it comes from.
    pub(crate) fn fail_only_first_flush_after_loss(&self) {
        self.lock().reports_once = true;
    }

    fn lock(&self) -> MutexGuard<'_, SimulatedDiskState> {
        self.0.lock().unwrap()
    }

    /// From now on, every request completes with an error, whether executed or not.
    pub(crate) fn fail_all_requests(&self) {
        self.lock().is_failing = true;
    }

    /// Ends the failure; with `reset`, unflushed writes are lost.
    pub(crate) fn end_failure(&self, reset: bool) {
        let mut state = self.lock();
        state.is_failing = false;
        if reset {
            state.lose_cached_randomly();
        }
    }

    /// Loses some of the unflushed writes and continues: the next flush of each channel reports it.
    pub(crate) fn lose_unflushed(&self) {
        let mut state = self.lock();
        state.lose_cached_randomly();
        state.owing = state.open.clone();
        state.is_unheard = true;
    }

    /// As [`lose_unflushed`](Self::lose_unflushed), and the loss is counted before anything is read.
    pub(crate) fn lose_unflushed_counted(&self) {
        self.lose_unflushed();
        let mut state = self.lock();
        (state.losses, state.is_unheard) = (state.losses + 1, false);
    }

    /// What is not flushed yet.
    pub(crate) fn has_unflushed(&self) -> bool {
        !self.lock().cached.is_empty()
    }

    pub(crate) fn is_failing(&self) -> bool {
        self.lock().is_failing
    }

    /// Makes a block unreadable until it is written.
    pub(crate) fn make_unreadable(&self, lba: u64) {
        self.lock().bad.insert(lba);
    }

    pub(crate) fn has_bad_blocks(&self) -> bool {
        !self.lock().bad.is_empty()
    }

    /// Simulates a power cycle: any part of the requests in flight may have been executed.
    pub(crate) fn power_cycle(&self) {
        let mut state = self.lock();
        state.drop_requests(|_| true);
        state.lose_cached_randomly();
        state.is_failing = false;
        state.owing.clear();
        state.is_unheard = false;
        // Blocks that become unreadable while legs differ after a power failure would be a second fault.
        state.bad.clear();
    }

    /// Reads a block directly.
    pub(crate) fn read_block(&self, lba: u64) -> Vec<u8> {
        self.lock().block_contents(lba)
    }

    /// Writes a block directly and durably.
    pub(crate) fn overwrite_block(&self, lba: u64, bytes: Vec<u8>) {
        self.lock().stable.insert(lba, bytes);
    }
}

impl BlockDevice for SimulatedDisk {
    fn limits(&self) -> Limits {
        self.lock().limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let mut state = self.lock();
        state.channels += 1;
        let (number, limits) = (state.channels, state.limits.clone());
        state.open.insert(number);
        if state.is_unheard {
            state.owing.insert(number);
        }
        Ok(Box::new(SimulatedDiskChannel { disk: self.clone(), limits, number }))
    }
}

impl IoChannel for SimulatedDiskChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.disk.lock();
        let mine = state.under_way.iter().filter(|one| one.0 == self.number).count();
        let count = requests.len().min(self.limits.depth_max as usize - mine);
        for request in &requests[..count] {
            let first = request.segment_first as usize;
            let own = segments[first..first + usize::from(request.segment_count)].to_vec();
            let due = now.after(Span::from_us(5 + state.random.below(100)));
            state.under_way.push((self.number, due, *request, own));
        }
        count
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut state = self.disk.lock();
        let mut count = 0;
        while completions.remaining() > 0 {
            let is_due = |one: &(u32, Instant, _, _)| one.0 == self.number && one.1 <= now;
            let next = state.under_way.iter().enumerate().filter(|(_, one)| is_due(one));
            let Some((index, _)) = next.min_by_key(|(_, one)| one.1) else { break };
            let (_, _, request, segments) = state.under_way.swap_remove(index);
            let status = match state.take_loss_report(self.number, &request) {
                true => IoStatus::WRITE_FAULT,
                false => state.execute_request(&request, &segments),
            };
            completions.push(IoCompletion { token: request.token, status, result: 0 });
            count += 1;
        }
        count
    }

    fn known_write_loss_count(&self) -> u64 {
        let state = self.disk.lock();
        if state.counts { state.losses } else { 0 }
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        let mut state = self.disk.lock();
        assert!(count <= state.losses, "it has counted no more");
        if state.counts && !state.is_unheard && count == state.losses {
            state.owing.remove(&self.number);
        }
    }
}

impl ChannelWakeup for SimulatedDiskChannel {
    fn wake_at(&self) -> Instant {
        let state = self.disk.lock();
        let mine = state.under_way.iter().filter(|one| one.0 == self.number);
        mine.map(|one| one.1).min().unwrap_or(Instant::NEVER)
    }
}

impl Drop for SimulatedDiskChannel {
    fn drop(&mut self) {
        let number = self.number;
        let mut state = self.disk.lock();
        state.drop_requests(|one| one == number);
        state.open.remove(&number);
        state.owing.remove(&number);
    }
}

impl SimulatedDiskState {
    fn block_contents(&self, lba: u64) -> Vec<u8> {
        let newest = self.cached.get(&lba).and_then(|versions| versions.last());
        newest.or_else(|| self.stable.get(&lba)).cloned().unwrap_or(vec![0; BLOCK])
    }

    /// Whether this request reports a loss: the first flush of each channel that was open then fails.
    fn take_loss_report(&mut self, channel: u32, request: &Request) -> bool {
        let reports = request.operation == Operation::Flush
            && !self.is_failing
            && self.owing.remove(&channel);
        self.losses += u64::from(reports && self.is_unheard);
        self.is_unheard &= !reports;
        if reports && self.reports_once {
            self.owing.clear();
        }
        reports
    }

    fn execute_request(&mut self, request: &Request, segments: &[Segment]) -> IoStatus {
        if self.is_failing {
            if self.random.chance(1, 2) {
                self.write_random_part(request, segments);
            }
            return IoStatus::INTERNAL_ERROR;
        }
        let range = request.lba..request.lba + u64::from(request.blocks);
        assert!(range.end <= self.limits.block_count, "{request:?}");
        match request.operation {
            Operation::Read if self.bad.range(range.clone()).next().is_some() => {
                return IoStatus::UNRECOVERED_READ;
            }
            Operation::Read => {
                let bytes: Vec<u8> = range.flat_map(|lba| self.block_contents(lba)).collect();
                self.regions.store(segments[0], &bytes).unwrap();
            }
            Operation::Write | Operation::WriteZeroes => {
                let bytes = self.load_write_data(request, segments);
                for (lba, block) in range.clone().zip(bytes.chunks(BLOCK)) {
                    self.write_cached(lba, block);
                }
                if request.flags.has(RequestFlags::FUA) {
                    range.for_each(|lba| self.persist_newest(lba));
                }
            }
            Operation::Flush => {
                let cached: Vec<u64> = self.cached.keys().copied().collect();
                cached.into_iter().for_each(|lba| self.persist_newest(lba));
            }
            other => panic!("a mirror sends no {other:?} here"),
        }
        IoStatus::SUCCESS
    }

    fn load_write_data(&self, request: &Request, segments: &[Segment]) -> Vec<u8> {
        let mut bytes = vec![0; request.blocks as usize * BLOCK];
        if request.operation == Operation::Write {
            self.regions.load(segments[0], &mut bytes).unwrap();
        }
        bytes
    }

    fn write_cached(&mut self, lba: u64, block: &[u8]) {
        self.bad.remove(&lba);
        self.cached.entry(lba).or_default().push(block.to_vec());
    }

    fn persist_newest(&mut self, lba: u64) {
        if let Some(newest) = self.cached.remove(&lba).and_then(|mut versions| versions.pop()) {
            self.stable.insert(lba, newest);
        }
    }

    /// Executes a part of a write whose completion is never delivered; it reaches the cache.
    fn write_random_part(&mut self, request: &Request, segments: &[Segment]) {
        if !matches!(request.operation, Operation::Write | Operation::WriteZeroes) {
            return;
        }
        let bytes = self.load_write_data(request, segments);
        for (lba, block) in (request.lba..).zip(bytes.chunks(BLOCK)) {
            if self.random.chance(1, 2) {
                self.write_cached(lba, block);
            }
        }
    }

    fn drop_requests(&mut self, is_dropped: impl Fn(u32) -> bool) {
        for (channel, due, request, segments) in std::mem::take(&mut self.under_way) {
            if !is_dropped(channel) {
                self.under_way.push((channel, due, request, segments));
            } else if self.random.chance(1, 2) {
                self.write_random_part(&request, &segments);
            }
        }
    }

    /// Of each unflushed block, any version may survive.
    fn lose_cached_randomly(&mut self) {
        for (lba, mut versions) in std::mem::take(&mut self.cached) {
            let drawn = self.random.below(versions.len() as u64 + 1);
            if let Some(survivor) = usize::try_from(drawn).unwrap().checked_sub(1) {
                self.stable.insert(lba, versions.swap_remove(survivor));
            }
        }
    }
}
