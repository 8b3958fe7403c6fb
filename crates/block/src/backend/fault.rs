//! A device on which things go wrong as they were ordered to.

mod channel;
mod rule;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Backend, Blame, Extent, Interrupts, Limits, Medium};
use dma::Regions;
use host::EventVectors;

use self::channel::FaultChannel;
use self::rule::Rules;
pub use self::rule::{Effect, Rule, When};
use crate::MediumError;
use crate::open::{Handle, Opened, Opener};
use crate::uri::Uri;

/// A medium over another one, whose requests meet with the faults of its rules.
///
/// Without rules everything goes down as it came. Counts and draws are of all channels together, in
/// the order in which they submit.
pub struct Fault {
    inner: Arc<dyn Medium>,
    shared: Arc<Shared>,
    limits: Limits,
}

/// Gives an open medium other rules, and lets go what hangs. Clones are of the same medium.
#[derive(Clone)]
pub struct FaultHandle {
    shared: Arc<Shared>,
}

/// What the channels and handles of a medium share.
struct Shared {
    regions: Regions,
    /// The lock is for requests that meet with rules.
    rules: Mutex<Rules>,
    /// Whether there are any.
    is_armed: AtomicBool,
    seed: u64,
    /// How often what hung was let go, and how often that was by aborting it.
    releases: AtomicU64,
    aborts: AtomicU64,
    hanging: AtomicU64,
    /// What wakes the channels that sleep, by number.
    sleepers: Mutex<Vec<(u64, EventVectors)>>,
}

/// Requests under way, at most.
const DEPTH_MAX: u32 = 4096;
/// A write whose data is corrupted has a block of memory of ours between two parts of its own.
const SEGMENTS_MORE: u16 = 2;

/// Opens `fault:[URI]?rule=error:write@0-1023x3;hang:read/100&seed=1`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let child = uri.only_child()?;
    let mut fields = uri.fields();
    let rules = fields.text("rule").unwrap_or_default();
    let seed = fields.seed()?.unwrap_or(opener.seed);
    fields.finish()?;
    let rules =
        Rule::parse_all(&rules).map_err(|problem| uri.refuse(format!("rule: {problem}")))?;
    let said: Vec<String> = rules.iter().map(ToString::to_string).collect();
    let said = if said.is_empty() { "none".into() } else { said.join(";") };
    let below = opener.open(child)?;
    let fault = Fault::new(Arc::clone(&below.medium), opener.regions, rules, seed)?;
    let description = format!("fault: {said}, on purpose; over {}", below.description);
    let handle = Handle::Fault { uri: uri.to_string(), handle: fault.handle() };
    Ok(below.under(Arc::new(fault), description).with(handle))
}

impl Fault {
    /// A medium over `inner`, whose blocks and durability it has where no fault strikes. Requests
    /// name memory of `regions`, in which each channel takes a place of its own.
    ///
    /// # Errors
    ///
    /// If `inner` has metadata, or takes fewer than three segments.
    pub fn new(
        inner: Arc<dyn Medium>,
        regions: &Regions,
        rules: Vec<Rule>,
        seed: u64,
    ) -> Result<Self, MediumError> {
        let below = inner.limits();
        let refuse = |text| Err(MediumError::new(Blame::Caller, text));
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
        let shared = Shared {
            regions: regions.clone(),
            is_armed: AtomicBool::new(!rules.is_empty()),
            rules: Mutex::new(Rules::new(rules, seed)),
            seed,
            releases: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
            hanging: AtomicU64::new(0),
            sleepers: Mutex::default(),
        };
        Ok(Self { inner, shared: Arc::new(shared), limits })
    }

    /// What changes the rules while the medium is in use.
    pub fn handle(&self) -> FaultHandle {
        FaultHandle { shared: Arc::clone(&self.shared) }
    }
}

impl Medium for Fault {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let channel =
            FaultChannel::open(&*self.inner, Arc::clone(&self.shared), self.limits.clone())?;
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        self.inner.extent(lba)
    }
}

/// Two hands on the same medium are equal.
impl PartialEq for FaultHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl FaultHandle {
    /// The rules there are, and how often each has struck.
    pub fn rules(&self) -> Vec<(Rule, u64)> {
        self.shared.rules().as_list()
    }

    /// How many requests hang.
    pub fn hanging(&self) -> u64 {
        self.shared.hanging.load(Ordering::Acquire)
    }

    /// Other rules, for whatever is submitted from now on; they count from zero. What hangs goes on
    /// hanging.
    pub fn set(&self, rules: Vec<Rule>) {
        let is_armed = !rules.is_empty();
        let mut current = self.shared.rules();
        *current = Rules::new(rules, self.shared.seed);
        self.shared.is_armed.store(is_armed, Ordering::Release);
    }

    /// No rules any more, and an answer for whatever hangs: its own.
    pub fn lift(&self) {
        self.set(Vec::new());
        self.shared.release();
    }

    /// Ends whatever hangs, as aborted. The rules stay.
    pub fn abort(&self) {
        self.shared.aborts.fetch_add(1, Ordering::Release);
        self.shared.release();
    }
}

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleepers(&self) -> MutexGuard<'_, Vec<(u64, EventVectors)>> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the channels let go what hangs, and wakes those that sleep.
    fn release(&self) {
        self.releases.fetch_add(1, Ordering::Release);
        for (_, sleeper) in &mut *self.sleepers() {
            sleeper.raise(0);
        }
    }

    /// Puts a channel among those to be woken, and says by which number it is known.
    fn enlist(&self, sleeper: EventVectors) -> u64 {
        let mut sleepers = self.sleepers();
        let number = sleepers.last().map_or(0, |(last, _)| last + 1);
        sleepers.push((number, sleeper));
        number
    }

    fn discharge(&self, number: u64) {
        self.sleepers().retain(|(other, _)| *other != number);
    }
}

impl std::fmt::Debug for Fault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Fault").field("rules", &self.handle().rules()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for FaultHandle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FaultHandle").field("rules", &self.rules()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
