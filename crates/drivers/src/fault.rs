//! Fault injection: a device whose requests fail by rules.

mod fault_channel;
mod rule;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BlockDevice, BlockExtent, ErrorCategory, Interrupts, IoChannel, Limits};
use tenmil_dma::RegionTable;
use tenmil_linux::EventFdVectors;

use self::fault_channel::FaultChannel;
use self::rule::FaultRules;
pub use self::rule::{FaultEffect, FaultRule, FaultTrigger};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceControl, OpenedDevice, Opener};

/// Device over another one that injects faults by rules.
///
/// Without rules, requests pass unchanged. Counts and random draws are over all channels, in the order of
/// submission.
pub struct FaultDevice {
    inner: Arc<dyn BlockDevice>,
    shared: Arc<FaultShared>,
    limits: Limits,
}

/// Changes the rules of an open device and completes hanging requests. Clones control the same device.
#[derive(Clone)]
pub struct FaultControl {
    shared: Arc<FaultShared>,
}

/// State shared by the channels and controls of a device.
struct FaultShared {
    regions: RegionTable,
    /// Locked only while there are rules.
    rules: Mutex<FaultRules>,
    /// Whether there are rules.
    is_armed: AtomicBool,
    seed: u64,
    /// Number of releases of hanging requests, and how many of them were aborts.
    releases: AtomicU64,
    aborts: AtomicU64,
    hanging: AtomicU64,
    /// Wakers of sleeping channels, by number.
    wakers: Mutex<Vec<(u64, EventFdVectors)>>,
}

/// Maximum number of requests in flight.
const DEPTH_MAX: u32 = 4096;
/// Extra segments of a corrupted write: a block of the channel's memory between two parts of the
/// original.
const SEGMENTS_MORE: u16 = 2;

/// Opens `fault:[URI]?rule=error:write@0-1023x3;hang:read/100&seed=1`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let child = uri.single_child()?;
    let mut fields = uri.options();
    let rules = fields.text_value("rule").unwrap_or_default();
    let seed = fields.seed_value()?.unwrap_or(opener.seed);
    fields.reject_unconsumed()?;
    let rules =
        FaultRule::parse_all(&rules).map_err(|problem| uri.error(format!("rule: {problem}")))?;
    let said: Vec<String> = rules.iter().map(ToString::to_string).collect();
    let said = if said.is_empty() { "none".into() } else { said.join(";") };
    let below = opener.open(child)?;
    let fault = FaultDevice::new(Arc::clone(&below.medium), opener.regions, rules, seed)?;
    let description = format!("fault: {said}, on purpose; over {}", below.description);
    let handle = DeviceControl::new(uri, fault.control());
    Ok(below.with_device_stacked_on(Arc::new(fault), description).with_control(handle))
}

impl FaultDevice {
    /// A device over `inner`, with its blocks and durability where no rule applies. Requests refer to
    /// memory of `regions`, in which each channel registers a region.
    ///
    /// # Errors
    ///
    /// If `inner` has metadata, or accepts fewer than three segments.
    pub fn new(
        inner: Arc<dyn BlockDevice>,
        regions: &RegionTable,
        rules: Vec<FaultRule>,
        seed: u64,
    ) -> Result<Self, Error> {
        let below = inner.limits();
        let refuse = |text| Err(Error::new(ErrorCategory::Usage, text));
        if below.metadata_size != 0 {
            let found = below.metadata_size;
            return refuse(format!(
                "fault: {found} bytes of metadata with each block, expected none"
            ));
        }
        if below.segments_max <= SEGMENTS_MORE {
            let found = below.segments_max;
            return refuse(format!("fault: a request has {found} segments, expected at least 3"));
        }
        let depth_max = below.depth_max.min(DEPTH_MAX);
        let segments_max = below.segments_max - SEGMENTS_MORE;
        let limits = Limits { depth_max, segments_max, ..below };
        let shared = FaultShared {
            regions: regions.clone(),
            is_armed: AtomicBool::new(!rules.is_empty()),
            rules: Mutex::new(FaultRules::new(rules, seed)),
            seed,
            releases: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
            hanging: AtomicU64::new(0),
            wakers: Mutex::default(),
        };
        Ok(Self { inner, shared: Arc::new(shared), limits })
    }

    /// Control for changing the rules at run time.
    pub fn control(&self) -> FaultControl {
        FaultControl { shared: Arc::clone(&self.shared) }
    }
}

impl BlockDevice for FaultDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let channel =
            FaultChannel::open(&*self.inner, Arc::clone(&self.shared), self.limits.clone())?;
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.inner.block_status(lba)
    }
}

/// Controls of the same device are equal.
impl PartialEq for FaultControl {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl FaultControl {
    /// The current rules and how often each was applied.
    pub fn rules(&self) -> Vec<(FaultRule, u64)> {
        self.shared.lock_rules().rules_with_counts()
    }

    /// The number of hanging requests.
    pub fn hanging_count(&self) -> u64 {
        self.shared.hanging.load(Ordering::Acquire)
    }

    /// Sets the rules of requests submitted from now on; their counters start at zero. Hanging requests
    /// keep hanging.
    pub fn set_rules(&self, rules: Vec<FaultRule>) {
        let is_armed = !rules.is_empty();
        let mut current = self.shared.lock_rules();
        *current = FaultRules::new(rules, self.shared.seed);
        self.shared.is_armed.store(is_armed, Ordering::Release);
    }

    /// Removes all rules and completes hanging requests with the status of the device below.
    pub fn clear_rules(&self) {
        self.set_rules(Vec::new());
        self.shared.signal_release_hanging();
    }

    /// Completes hanging requests as aborted. The rules remain.
    pub fn abort_hanging(&self) {
        self.shared.aborts.fetch_add(1, Ordering::Release);
        self.shared.signal_release_hanging();
    }
}

impl FaultShared {
    fn lock_rules(&self) -> MutexGuard<'_, FaultRules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_wakers(&self) -> MutexGuard<'_, Vec<(u64, EventFdVectors)>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all channels release hanging requests, and wakes sleeping ones.
    fn signal_release_hanging(&self) {
        self.releases.fetch_add(1, Ordering::Release);
        for (_, sleeper) in &mut *self.lock_wakers() {
            sleeper.raise(0);
        }
    }

    /// Registers a channel for wake-ups and returns its number.
    fn register_waker(&self, sleeper: EventFdVectors) -> u64 {
        let mut sleepers = self.lock_wakers();
        let number = sleepers.last().map_or(0, |(last, _)| last + 1);
        sleepers.push((number, sleeper));
        number
    }

    fn unregister_waker(&self, number: u64) {
        self.lock_wakers().retain(|(other, _)| *other != number);
    }
}

impl std::fmt::Debug for FaultDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Fault").field("rules", &self.control().rules()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for FaultControl {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FaultHandle").field("rules", &self.rules()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
