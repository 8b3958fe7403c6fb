//! Devices that lose power, as a base for other devices: `power:stable`, `power:cached` and
//! `power:forgetful`, and as `power:file` the backend of files over such a disk.
//!
//! ```text
//!   channel --submit--> in flight --poll, at random--> cache --flush, FUA--> stable
//!                            \_______________ power cut ____________/
//! ```
//!
//! A power failure keeps stable data, and of each sector of 512 bytes that is not stable any version
//! since.

mod power_loss_file;
mod sectors;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Operation, OperationSet, Random, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_dma::RegionTable;

use self::power_loss_file::PowerLossFile;
use self::sectors::{CachedSectors, SECTOR};
use crate::request_validation::valid_request_segments;
use tenmil_base::Error;
use tenmil_block::{DeviceType, OpenedDevice, Opener, uri::Uri};

/// A device. Clones share the blocks.
#[derive(Clone)]
pub(super) struct PowerLossDevice {
    state: Arc<Mutex<PowerLossState>>,
    limits: Limits,
}

/// Opens the devices, and keeps a handle to each. After a restart, existing devices are returned in the
/// order in which they were first opened.
#[derive(Default)]
pub(crate) struct PowerLossDeviceType {
    media: Mutex<Vec<LossyStorage>>,
    /// Number of devices opened since the restart.
    opened: AtomicU64,
    countdown: PowerLossCountdown,
}

/// A device or disk that loses power.
#[derive(Clone)]
enum LossyStorage {
    Medium(PowerLossDevice),
    File(Arc<PowerLossFile>),
}

/// Number of operations that all devices together may still execute before the power fails.
#[derive(Clone)]
struct PowerLossCountdown(Arc<AtomicU64>);

struct PowerLossState {
    regions: RegionTable,
    random: Random,
    sectors: CachedSectors,
    under_way: Vec<InFlightRequest>,
    is_powered: bool,
    channels: u32,
    durability: Durability,
    /// Completes flushes without flushing, which a test must detect.
    is_forgetful: bool,
    countdown: PowerLossCountdown,
}

struct InFlightRequest {
    channel: u32,
    request: Request,
    segments: Vec<Segment>,
}

struct PowerLossChannel {
    state: Arc<Mutex<PowerLossState>>,
    limits: Limits,
    number: u32,
}

const BLOCK: u32 = 1024;
/// Blocks of each device, unless its name specifies another number.
const BLOCKS: u64 = 128;

impl DeviceType for PowerLossDeviceType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let mut fields = uri.options();
        let blocks = fields.size_value("size")?.map_or(BLOCKS, |size| size / u64::from(BLOCK));
        let file = power_loss_file::PowerLossFileOptions::parse(&mut fields)?;
        fields.reject_unconsumed()?;
        let mut media = self.media.lock().unwrap();
        let number = usize::try_from(self.opened.fetch_add(1, Ordering::Relaxed)).unwrap();
        if number == media.len() {
            let seed = opener.seed ^ (number as u64) << 32;
            let countdown = self.countdown.clone();
            media.push(match uri.path() {
                "file" => {
                    LossyStorage::File(Arc::new(PowerLossFile::new(seed, blocks, file, countdown)))
                }
                path => LossyStorage::Medium(PowerLossDevice::new(
                    opener.regions,
                    path,
                    blocks,
                    seed,
                    countdown,
                )),
            });
        }
        let medium: Arc<dyn BlockDevice> = match &media[number] {
            LossyStorage::Medium(power) => Arc::new(power.clone()),
            LossyStorage::File(file) => Arc::new(file.open(opener.regions)?),
        };
        Ok(OpenedDevice::without_existing_data(medium, "power: loses it"))
    }
}

impl PowerLossDeviceType {
    /// Lets this number of requests and jobs be executed before the power fails.
    pub(crate) fn arm_power_loss_after(&self, count: u64) {
        self.countdown.0.store(count, Ordering::Relaxed);
    }

    /// Whether the countdown has ended.
    pub(crate) fn has_power_failed(&self) -> bool {
        self.countdown.0.load(Ordering::Relaxed) == 0
    }

    /// Number of operations executed since the countdown was set to `count`.
    pub(super) fn operations_since_countdown_start(&self, count: u64) -> u64 {
        count - self.countdown.0.load(Ordering::Relaxed)
    }

    /// Cuts the power of all devices at the same moment.
    pub(crate) fn lose_power(&self) {
        for medium in &*self.media.lock().unwrap() {
            match medium {
                LossyStorage::Medium(power) => power.lock().lose_power(),
                LossyStorage::File(file) => file.lose_power(),
            }
        }
    }

    /// Restores the power; the devices wait to be opened again.
    pub(crate) fn restore_power(&self) {
        self.arm_power_loss_after(u64::MAX);
        self.opened.store(0, Ordering::Relaxed);
        for medium in &*self.media.lock().unwrap() {
            match medium {
                LossyStorage::Medium(power) => power.lock().is_powered = true,
                LossyStorage::File(file) => file.restore_power(),
            }
        }
    }
}

impl PowerLossCountdown {
    /// Counts one operation; returns whether it may be executed.
    fn try_consume_operation(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl Default for PowerLossCountdown {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl PowerLossDevice {
    fn new(
        regions: &RegionTable,
        path: &str,
        blocks: u64,
        seed: u64,
        countdown: PowerLossCountdown,
    ) -> Self {
        let durability = match path {
            "stable" => Durability::Persistent,
            _ => Durability::VolatileCache,
        };
        let limits = Limits {
            block_size: BLOCK,
            metadata_size: 0,
            block_count: blocks,
            request_blocks_max: 64,
            segments_max: 16,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 16,
            durability,
            operations: OperationSet::from_operations(&[
                Operation::Read,
                Operation::Write,
                Operation::Flush,
                Operation::WriteZeroes,
                Operation::Verify,
            ]),
        };
        let state = PowerLossState {
            regions: regions.clone(),
            random: Random::new(seed),
            sectors: CachedSectors::default(),
            under_way: Vec::new(),
            is_powered: true,
            channels: 0,
            durability,
            is_forgetful: path == "forgetful",
            countdown,
        };
        Self { state: Arc::new(Mutex::new(state)), limits }
    }

    fn lock(&self) -> MutexGuard<'_, PowerLossState> {
        self.state.lock().unwrap()
    }
}

impl BlockDevice for PowerLossDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let mut state = self.lock();
        state.channels += 1;
        let (number, limits) = (state.channels, self.limits.clone());
        Ok(Box::new(PowerLossChannel { state: Arc::clone(&self.state), limits, number }))
    }
}

impl IoChannel for PowerLossChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.state.lock().unwrap();
        if !state.is_powered {
            return 0;
        }
        let mine = state.under_way.iter().filter(|one| one.channel == self.number).count();
        let taken = requests.len().min(self.limits.depth_max as usize - mine);
        for request in &requests[..taken] {
            let own = valid_request_segments(&self.limits, request, segments).unwrap().to_vec();
            let one = InFlightRequest { channel: self.number, request: *request, segments: own };
            state.under_way.push(one);
        }
        taken
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut state = self.state.lock().unwrap();
        let before = completions.remaining();
        let mut index = 0;
        while state.is_powered && completions.remaining() > 0 && index < state.under_way.len() {
            let is_mine = state.under_way[index].channel == self.number;
            if is_mine && state.random.chance(1, 3) && state.countdown.try_consume_operation() {
                let one = state.under_way.swap_remove(index);
                state.execute_request(&one);
                let (token, status) = (one.request.token, IoStatus::SUCCESS);
                completions.push(IoCompletion { token, status, result: 0 });
            } else {
                index += 1;
            }
        }
        before - completions.remaining()
    }
}

impl ChannelWakeup for PowerLossChannel {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }
}

impl Drop for PowerLossChannel {
    /// Requests in flight are executed without a completion, because their memory is released.
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap();
        let all = std::mem::take(&mut state.under_way);
        let (mine, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|one| one.channel == self.number);
        state.under_way = others;
        if state.is_powered {
            mine.iter().for_each(|one| state.execute_request(one));
        }
    }
}

impl PowerLossState {
    fn execute_request(&mut self, one: &InFlightRequest) {
        let Request { operation, flags, lba, blocks, .. } = one.request;
        let each = u64::from(BLOCK) / SECTOR as u64;
        let range = lba * each..(lba + u64::from(blocks)) * each;
        match operation {
            Operation::Read => self.sectors.read(range.start, &one.segments, &self.regions),
            Operation::Write => self.sectors.write(range.start, &request_bytes(&self.regions, one)),
            Operation::WriteZeroes => {
                self.sectors.write(range.start, &vec![0; blocks as usize * BLOCK as usize]);
            }
            Operation::Flush if !self.is_forgetful => {
                self.sectors.persist_up_to(0..u64::MAX, u64::MAX)
            }
            _ => {}
        }
        let is_forced = flags.has(RequestFlags::FUA) && !self.is_forgetful;
        if is_forced || self.durability == Durability::Persistent {
            self.sectors.persist_up_to(range, u64::MAX);
        }
    }

    fn lose_power(&mut self) {
        self.is_powered = false;
        for one in std::mem::take(&mut self.under_way) {
            // A request in flight may have reached the cache, or a part of it.
            if one.request.operation == Operation::Write && self.random.chance(1, 2) {
                let bytes = request_bytes(&self.regions, &one);
                let len = usize::try_from(self.random.below(bytes.len() as u64 + 1)).unwrap();
                let first = one.request.lba * u64::from(BLOCK) / SECTOR as u64;
                self.sectors.write(first, &bytes[..len]);
            }
        }
        self.sectors.drop_cached_randomly(&mut self.random);
    }
}

fn request_bytes(regions: &RegionTable, one: &InFlightRequest) -> Vec<u8> {
    sectors::segment_bytes(regions, &one.segments)
}
