//! Server that is killed at any step, and its successor that resumes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, InvalidSegment, IoChannel,
    IoCompletion, IoStatus, Limits, Memory, Random, Request, Segment, Span, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_vhost_user::inflight::{InflightLog, stride_bytes};
use tenmil_vhost_user::{GuestMemory, GuestRegion, Vring, VringAddresses};

use super::super::request_table::{QueueFault, QueueParts, RequestTable};
use super::virtio_driver::{
    GUEST, MEMORY_BYTES, SIZE, USED, USER, VirtioBlkDriver, queue_addresses, write_request,
};
use super::{device_limits, test_disk};

/// Memory of a process that is killed after a number of stores.
#[derive(Clone, Debug)]
struct KillableMemory {
    regions: RegionTable,
    left: Arc<AtomicUsize>,
}

impl KillableMemory {
    fn fail_after_last_store(&self, at: Segment) -> Result<(), InvalidSegment> {
        let count = |left: usize| left.checked_sub(1);
        let lived = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        lived.map(drop).map_err(|_| InvalidSegment(at))
    }
}

impl Memory for KillableMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.regions.load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.fail_after_last_store(segment)?;
        self.regions.store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.fail_after_last_store(segment)?;
        self.regions.fill(segment, byte)
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        self.regions.load_u32(segment)
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        self.fail_after_last_store(segment)?;
        self.regions.store_u32(segment, value)
    }
}

/// Offset of the inflight record in memory.
const RECORD: u64 = MEMORY_BYTES - 0x4000;

/// Guest, its requests, and how often each was executed.
struct CrashTest {
    driver: VirtioBlkDriver<RegionTable>,
    space: GuestMemory,
    region: tenmil_base::RegionId,
    /// Number of the request of each head.
    asked: BTreeMap<u16, u64>,
    /// Number of executions of each request.
    done: BTreeMap<u64, usize>,
    completed: Vec<u64>,
    numbers: u64,
    random: Random,
}

impl CrashTest {
    fn new(regions: &RegionTable, region: tenmil_base::RegionId, seed: u64) -> Self {
        let area =
            GuestRegion { guest: GUEST, user: USER, len_bytes: MEMORY_BYTES, region, offset: 0 };
        Self {
            driver: VirtioBlkDriver::new(regions.clone(), region, 0),
            space: GuestMemory::new(vec![area]).unwrap(),
            region,
            asked: BTreeMap::new(),
            done: BTreeMap::new(),
            completed: Vec::new(),
            numbers: 0,
            random: Random::new(seed),
        }
    }

    /// Submits up to `most` requests; each has its own block.
    fn submit_request(&mut self, most: u64) {
        for _ in 0..self.random.below(most + 1) {
            let head = u16::try_from(self.random.below(10)).unwrap() * 3;
            if self.asked.contains_key(&head) {
                continue;
            }
            self.driver.submit_request(head, write_request(self.numbers * 8, 4096));
            self.asked.insert(head, self.numbers);
            self.numbers += 1;
        }
    }

    /// Takes the used heads.
    fn take_used(&mut self) {
        while let Some((head, _)) = self.driver.take_used() {
            let number = self.asked.remove(&head).expect("used once, and only what was asked");
            assert_eq!(self.driver.request_status(head), 0);
            assert!(self.done[&number] > 0, "it was done before it was answered");
            self.completed.push(number);
        }
    }

    /// Runs a process until it is killed, or until nothing is left to do if `ends_when_idle`.
    fn run_until_killed(
        &mut self,
        memory: &KillableMemory,
        ends_when_idle: bool,
    ) -> Result<(), QueueFault> {
        let mut slots = self.reopen_request_table(memory)?;
        let mut held: Vec<Request> = Vec::new();
        let mut idle = 0;
        while idle < 8 {
            self.submit_request(if ends_when_idle { 0 } else { 3 });
            idle = if slots.receive_chains(&self.space, true)? == 0 { idle + 1 } else { 0 };
            let (requests, _) = slots.pending_requests();
            let taken = usize::try_from(self.random.below(requests.len() as u64 + 1)).unwrap();
            held.extend_from_slice(&requests[..taken]);
            slots.record_submitted(taken);
            for _ in 0..self.random.below(4) {
                if held.is_empty() {
                    break;
                }
                let at = usize::try_from(self.random.below(held.len() as u64)).unwrap();
                let request = held.swap_remove(at);
                *self.done.entry(request.lba).or_default() += 1;
                let status = IoStatus::SUCCESS;
                slots.handle_completion(
                    IoCompletion { token: request.token, status, result: 0 },
                    false,
                )?;
            }
            slots.publish_used()?;
            self.take_used();
            if !held.is_empty() || !slots.is_drained() {
                idle = 0;
            }
            if !ends_when_idle && self.numbers > 60 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Opens the queue as a new process does.
    fn reopen_request_table(
        &self,
        memory: &KillableMemory,
    ) -> Result<RequestTable<KillableMemory>, QueueFault> {
        let place = VringAddresses::new(&self.space, SIZE, queue_addresses(0)).unwrap();
        let used = Vring::new(memory.clone(), place, 0, false)?.used_index();
        let len_bytes = stride_bytes(SIZE);
        let record = Segment { region: self.region, offset: RECORD, len_bytes };
        let opened = InflightLog::open(memory.clone(), record, SIZE, used);
        let (record, again) = opened.map_err(|_| tenmil_vhost_user::VringError::Unmapped)?;
        let next = used.wrapping_add(u16::try_from(again.len()).unwrap());
        let ring = Vring::new(memory.clone(), place, next, false)?;
        let (memory, record) = (memory.clone(), Some((record, again)));
        let disk = test_disk(device_limits());
        Ok(RequestTable::new(QueueParts {
            memory,
            disk,
            features: 1 << 9,
            ring,
            size: SIZE,
            record,
        })?)
    }
}

/// The process is killed after each possible store, and its successor during recovery.
#[test]
fn every_request_completes_once_after_a_kill_at_any_store() {
    for seed in 0..6 {
        let mut kills = 0;
        for left in (0..900).step_by(if seed == 0 { 1 } else { 7 }) {
            let regions = RegionTable::new(1);
            let region = regions.allocate_region(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
            let mut world = CrashTest::new(&regions, region.id(), seed);
            let mortal = |left: usize| KillableMemory {
                regions: regions.clone(),
                left: Arc::new(AtomicUsize::new(left)),
            };
            kills += usize::from(world.run_until_killed(&mortal(left), false).is_err());
            world.take_used();
            // The successor is killed early, too.
            let _ = world
                .run_until_killed(&mortal(usize::try_from(seed).unwrap() * 9 + left % 40), false);
            world.take_used();
            world.run_until_killed(&mortal(usize::MAX), true).unwrap();
            assert!(world.asked.is_empty(), "seed {seed}, after {left}: {:?}", world.asked);
            let completed = world.completed.len() as u64;
            assert_eq!(completed, world.numbers, "seed {seed}, after {left}");
        }
        assert!(kills > 30, "seed {seed}: {kills}");
    }
}

#[test]
fn no_request_is_repeated_without_a_kill() {
    let regions = RegionTable::new(1);
    let region = regions.allocate_region(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
    let mut world = CrashTest::new(&regions, region.id(), 3);
    let mortal =
        KillableMemory { regions: regions.clone(), left: Arc::new(AtomicUsize::new(usize::MAX)) };
    world.run_until_killed(&mortal, false).unwrap();
    world.run_until_killed(&mortal, true).unwrap();
    assert!(world.numbers > 50 && world.done.len() as u64 == world.numbers);
    let used = u16::from_le_bytes(world.driver.load_bytes(USED + 2));
    assert_eq!(u64::from(used), world.numbers);
}

/// RAM device whose completions take 300 ms.
pub(super) struct ShufflingDevice(RamDevice);

struct ShufflingChannel {
    below: Box<dyn IoChannel>,
    until: Instant,
    in_flight: usize,
}

const DELAY: Span = Span::from_ms(300);

impl ShufflingDevice {
    pub(super) fn new(regions: &RegionTable) -> Self {
        Self(RamDevice::new(regions, 512, 64).unwrap())
    }
}

impl BlockDevice for ShufflingDevice {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let below = self.0.channel()?;
        Ok(Box::new(ShufflingChannel { below, until: Instant::default(), in_flight: 0 }))
    }
}

impl IoChannel for ShufflingChannel {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.until = now.after(DELAY);
        let taken = self.below.submit(now, requests, segments);
        self.in_flight += taken;
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        if now < self.until {
            return 0;
        }
        let ended = self.below.poll(now, completions);
        self.in_flight -= ended;
        ended
    }
}

impl ChannelWakeup for ShufflingChannel {
    fn wake_at(&self) -> Instant {
        if self.in_flight > 0 { self.until } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        false
    }
}
