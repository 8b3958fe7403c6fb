//! Ring micro-benchmark: two rings and a token table, and nothing else.
//!
//! One side stores commands and consumes completions, the other does the reverse, with the same
//! rings, doorbells and batching as the driver and the emulated SSD. Nothing is decoded, checked,
//! timed or transferred. It is the upper bound that the driver is compared with, and it is measured
//! in the same run, because on a shared machine the bound varies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{
    CompletionEntry, CompletionRing, Dma, Histogram, RingEntries, RingMemory, Segment, Span,
    SubmissionRing,
};
use tenmil_dma::{
    DeviceKind, DevicePool, HostCompletionRing, HostSubmissionRing, MemoryBacking, MemoryMapping,
    RegionTable, SharedHostMemory, SharedRingEntries,
};
use tenmil_linux::{Clock, NamedThread};

use super::baseline_load::repeat_for;
use super::cpu_placement::CoreAssignment;
use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::{Baseline, BaselineResult};
use tenmil_base::Error;

/// Parameters of the measurement.
pub(super) struct RingBaselinePlan<'a> {
    pub(super) options: &'a PerfOptions,
    pub(super) rings: u32,
    /// Entries in flight on each ring.
    pub(super) depth: u32,
    pub(super) time: Span,
    pub(super) cores: &'a CoreAssignment,
    pub(super) clock: Clock,
}

/// Two doorbells on a cache line of their own, as in the emulated SSD.
#[derive(Debug, Default)]
#[repr(align(64))]
struct BaselineDoorbells {
    tail: AtomicU32,
    head: AtomicU32,
}

/// Submitting side.
struct RingProducer {
    submission: HostSubmissionRing,
    completion: HostCompletionRing,
    doorbells: Arc<BaselineDoorbells>,
    tokens: Box<[u64]>,
    depth: u32,
    tail: u32,
    head: u32,
    phase: bool,
    /// Sum of the tokens, which prevents the reads of the table from being optimized away.
    checksum: u64,
}

/// Completing side.
struct RingConsumer {
    submission: SharedRingEntries,
    completion: SharedRingEntries,
    doorbells: Arc<BaselineDoorbells>,
    depth: u32,
    head: u32,
    tail: u32,
    phase: bool,
}

const LINE: u32 = 4;

/// Measures with one thread on each side. At depth 1 the round trip time is measured as well.
pub(super) fn measure_rings(plan: &RingBaselinePlan<'_>) -> Result<BaselineResult, Error> {
    let ring_depth = (plan.depth + 1).next_power_of_two().max(LINE);
    let pool = ring_pool(plan, ring_depth)?;
    let mut hosts = Vec::new();
    let mut devices = Vec::new();
    for _ in 0..plan.rings {
        let (host, device) = ring_pair(&pool, ring_depth, plan.depth).ok_or_else(|| {
            Error::environment("measure the ring micro-benchmark: no memory is left")
        })?;
        hosts.push(host);
        devices.push(device);
    }
    let yields = plan.cores.yields;
    let other = NamedThread::spawn("bare-device", plan.cores.device[0], move |stop| {
        while !stop.is_stopped() {
            let done: u32 = devices.iter_mut().map(RingConsumer::complete_submitted).sum();
            if done == 0 && yields {
                tenmil_linux::named_thread::yield_cpu();
            }
        }
    });
    let other = other.map_err(thread_error)?;
    let (clock, time, single) = (plan.clock, plan.time, plan.depth == 1);
    let this = NamedThread::spawn("bare-submit", plan.cores.submit[0], move |_| {
        run_producer_loop(&mut hosts, &clock, time, single, yields)
    });
    let (count, elapsed, trips) = this.map_err(thread_error)?.join();
    other.stop();
    Ok(BaselineResult {
        limit: Baseline::Ring,
        iops: crate::perf::perf_result::per_second(count, elapsed),
        elapsed,
        rings: plan.rings,
        depth: plan.depth,
        round_trip: single.then(|| Span { ns: trips.percentile(500_000) }),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err wants")]
fn thread_error(error: std::io::Error) -> Error {
    Error::environment(format!("start a thread for the ring micro-benchmark: {error}"))
}

/// Pool with the same kind of memory as the run.
fn ring_pool(plan: &RingBaselinePlan<'_>, ring_depth: u32) -> Result<DevicePool, Error> {
    let bytes = plan.rings as usize * (ring_depth as usize * 80 + 8192);
    let mapping = MemoryMapping::new(bytes, MemoryBacking::Private).map_err(|error| {
        Error::environment(format!("measure the ring micro-benchmark: {error}"))
    })?;
    mapping.populate();
    let regions = RegionTable::new(1);
    let memory =
        regions.add_mapping(mapping).map_err(|error| Error::environment(error.to_string()))?;
    let store = tenmil_devices::emu::command_store(&plan.options.techniques);
    Ok(DevicePool::new(regions, memory, DeviceKind::Emulated, store))
}

/// Creates a pair of rings. `None` if the pool is exhausted.
fn ring_pair(
    pool: &DevicePool,
    depth: u32,
    in_flight: u32,
) -> Option<(RingProducer, RingConsumer)> {
    let submission = pool.allocate(depth * 64)?;
    let completion = pool.allocate(depth * 16)?;
    let mut memory = SharedHostMemory::new(pool);
    let mut view = |segment: Segment| {
        memory.resolve_ring(pool.iova(segment)?, u64::from(segment.len_bytes)).ok()?
    };
    let doorbells = Arc::new(BaselineDoorbells::default());
    let device = RingConsumer {
        submission: view(submission)?,
        completion: view(completion)?,
        doorbells: Arc::clone(&doorbells),
        depth,
        head: 0,
        tail: 0,
        phase: true,
    };
    let host = RingProducer {
        submission: pool.submission_ring(submission, depth),
        completion: pool.completion_ring(completion, depth),
        doorbells,
        tokens: (0..u64::from(in_flight)).collect(),
        depth,
        tail: 0,
        head: 0,
        phase: true,
        checksum: 0,
    };
    Some((host, device))
}

/// Submitting loop. Returns the number of completed entries, the elapsed time, and at depth 1 the
/// round trip times.
fn run_producer_loop(
    hosts: &mut [RingProducer],
    clock: &Clock,
    time: Span,
    single: bool,
    yields: bool,
) -> (u64, Span, Histogram) {
    hosts.iter_mut().for_each(RingProducer::fill_ring);
    let round = || hosts.iter_mut().map(|host| u64::from(host.resubmit_completed())).sum();
    let found = repeat_for(*clock, time, single, yields, round);
    let checksum = hosts.iter().fold(0_u64, |sum, host| sum.wrapping_add(host.checksum));
    std::hint::black_box(checksum);
    found
}

impl RingProducer {
    /// Fills the ring for the first time.
    fn fill_ring(&mut self) {
        (0..self.tokens.len() as u64).for_each(|cid| self.store_command(cid));
        self.publish_and_ring_doorbell();
    }

    /// Consumes completions and resubmits each entry. Returns their number.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most four")]
    fn resubmit_completed(&mut self) -> u32 {
        let mut taken = 0;
        let mut line = [[0; 2]; LINE as usize];
        loop {
            let count = self.load_completions(&mut line);
            if count == 0 {
                break;
            }
            for entry in &line[..count] {
                let cid = entry[1] >> 32 & 0xffff;
                if let Some(token) = usize::try_from(cid).ok().and_then(|cid| self.tokens.get(cid))
                {
                    self.checksum = self.checksum.wrapping_add(*token);
                }
                self.store_command(cid);
            }
            taken += count as u32;
            self.head += count as u32;
            if self.head == self.depth {
                self.head = 0;
                self.phase = !self.phase;
            }
        }
        if taken > 0 {
            self.doorbells.head.store(self.head, Ordering::Release);
            self.publish_and_ring_doorbell();
        }
        taken
    }

    /// Copies the new completions up to the end of the cache line, and returns their number.
    #[inline]
    fn load_completions(&self, into: &mut [CompletionEntry; LINE as usize]) -> usize {
        let end = ((self.head | (LINE - 1)) + 1).min(self.depth);
        let mut count = 0;
        for (slot, index) in into.iter_mut().zip(self.head..end) {
            let Some(entry) = self.completion.load(index, self.phase) else { break };
            *slot = entry;
            count += 1;
        }
        count
    }

    #[inline]
    fn store_command(&mut self, cid: u64) {
        self.submission.store(self.tail, &[cid << 16 | 2, 0, 0, 0, 0, 0, 0, 0]);
        self.tail = if self.tail + 1 == self.depth { 0 } else { self.tail + 1 };
    }

    #[inline]
    fn publish_and_ring_doorbell(&mut self) {
        self.submission.order_before_doorbell();
        self.doorbells.tail.store(self.tail, Ordering::Release);
    }
}

impl RingConsumer {
    /// Completes the submitted entries. Returns their number.
    #[inline]
    fn complete_submitted(&mut self) -> u32 {
        // Pairs with the Release store in `flush`: the commands before the tail are visible.
        let tail = self.doorbells.tail.load(Ordering::Acquire);
        let mut taken = 0;
        let mut line = [[0; 2]; LINE as usize];
        while self.head != tail {
            let room = LINE - self.tail % LINE;
            let mut count = 0;
            while count < room && self.head != tail {
                let Ok(command) = self.submission.load_command(self.head) else { return taken };
                let cid = command[0] >> 16 & 0xffff;
                let second = u64::from(self.head) | cid << 32 | u64::from(self.phase) << 48;
                line[count as usize] = [0, second];
                self.head = if self.head + 1 == self.depth { 0 } else { self.head + 1 };
                count += 1;
            }
            let stored = self.completion.store_completions(self.tail, &line[..count as usize]);
            if stored.is_err() {
                return taken;
            }
            self.tail += count;
            if self.tail == self.depth {
                self.tail = 0;
                self.phase = !self.phase;
            }
            taken += count;
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use tenmil_dma::{
        CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable,
    };

    use super::ring_pair;

    /// Both sides on one thread, over many wraps of the ring: every token completes and is counted.
    #[test]
    fn every_submitted_entry_completes() {
        for (depth, in_flight) in [(4, 1), (4, 3), (8, 5), (256, 128)] {
            let regions = RegionTable::new(1);
            let memory = regions
                .add_mapping(MemoryMapping::new(1 << 17, MemoryBacking::Private).unwrap())
                .unwrap();
            let store = CommandStore::Plain;
            let pool = DevicePool::new(regions, memory, DeviceKind::Emulated, store);
            let (mut host, mut device) = ring_pair(&pool, depth, in_flight).unwrap();
            host.fill_ring();
            for _ in 0..1000 {
                assert_eq!(device.complete_submitted(), in_flight);
                assert_eq!(host.resubmit_completed(), in_flight);
            }
            let once: u64 = (0..u64::from(in_flight)).sum();
            assert_eq!(host.checksum, 1000 * once);
        }
    }
}
