//! Multi-queue block device (bdev): a named block device with claims, events and channels.
//!
//! ```text
//!   Bdev ── open(claim, holder) ──> BdevDescriptor ── channel() ──> Channel   one per thread
//!      │                                   │                         │  tags
//!      │ resized, removed, device events   │                         v
//!      └────────── events ─────────────────┘                      Context     by the queue map
//!                                                                    │
//!                                                                 Backend     channel of the device below
//! ```
//!
//! A [`BdevDescriptor`] is a [`tenmil_base::BlockDevice`] and its channels are [`tenmil_base::IoChannel`]s, so that any
//! stacked device can use it.

mod claim;
mod descriptor;
mod event;
mod shared_state;
#[cfg(test)]
mod tests;
mod uuid;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{BlockDevice, ErrorCategory, Limits, Span};
use tenmil_linux::Clock;

pub use self::claim::{Claim, ClaimConflict, ClaimError, Holder};
pub use self::descriptor::BdevDescriptor;
pub use self::event::BdevEvent;
pub(crate) use self::shared_state::{BdevShared, ChannelShared, ClaimGuard};
pub use self::uuid::{Uuid, UuidParseError};
use crate::qos::QosLimiter;
use crate::queue_map::{PER_CHANNEL, QueueMap};
use crate::quiesce::{QuiesceTimeout, QuiescedRange};
use crate::scheduler::IoScheduler;
use tenmil_base::{Error, IoStats};

/// A named block device. Clones refer to the same device.
#[derive(Clone, Debug)]
pub struct Bdev(Arc<BdevShared>);

/// Options of a new bdev.
#[derive(Clone)]
pub struct BdevOptions {
    /// Mode of its channels.
    pub mode: ChannelMode,
    /// Map from channels to hardware contexts.
    pub map: QueueMap,
    /// Maximum number of open channels. With fewer contexts in the map, channels share them.
    pub channels_max: u32,
    /// Queue depth of a channel and of a context, limited by the depth of the device below.
    pub depth: u32,
    /// Whether latencies are recorded from the start.
    pub timing: bool,
    /// The unique UUID of the bdev.
    pub uuid: Uuid,
    /// Clock for waiting times: for locks and for ranges to drain.
    pub clock: Clock,
    /// Scheduler of each context.
    pub scheduler: IoScheduler,
    /// Rate limits shared by all channels; adjustable at run time.
    pub limiter: Option<QosLimiter>,
}

/// Mode of the channels of a bdev.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChannelMode {
    /// Software queues over hardware contexts, as mapped.
    #[default]
    Mq,
    /// Legacy model for comparison: one queue behind one contended lock.
    SingleQueue,
    /// No multi-queue layer: a channel is the I/O channel of the device below. Claims are enforced, but
    /// there are no counters, quiesces, fences, schedulers or limits, and a removal waits until the
    /// holders drop their channels.
    Bypass,
}

/// Index of a channel on its device. A quiesce can exempt it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelId(pub u32);

impl BdevOptions {
    /// Mode `mq`, one context per channel, and a UUID derived from `seed`.
    pub fn new(clock: Clock, seed: u64) -> Self {
        Self {
            mode: ChannelMode::Mq,
            map: QueueMap::default(),
            channels_max: u32::MAX,
            depth: u32::MAX,
            timing: true,
            uuid: Uuid::from_seed(seed),
            clock,
            scheduler: IoScheduler::None,
            limiter: None,
        }
    }
}

/// All bdevs of this process.
static DEVICES: Mutex<Vec<Weak<BdevShared>>> = Mutex::new(Vec::new());

fn lock_all_devices() -> MutexGuard<'static, Vec<Weak<BdevShared>>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes every bdev of this process re-read the size of its device; those that grew adopt the new size
/// and notify their holders. For a caller that extended a device without knowing what is stacked on it.
/// Returns how many have grown. Blocks.
pub fn refresh_sizes() -> usize {
    let devices: Vec<Arc<BdevShared>> =
        lock_all_devices().iter().filter_map(Weak::upgrade).collect();
    devices.iter().filter(|device| device.refresh_size()).count()
}

/// Removes every bdev of this process whose device has failed for good and has this
/// [identity](BlockDevice::identity): for a driver that learns of the failure without knowing what is stacked on the device.
/// Returns how many.
pub fn remove_failed(identity: &str) -> usize {
    let devices: Vec<Arc<BdevShared>> =
        lock_all_devices().iter().filter_map(Weak::upgrade).collect();
    let has_failed = |device: &&Arc<BdevShared>| {
        let medium = device.block_device();
        medium.is_some_and(|medium| {
            medium.failure_reason().is_some() && medium.identity().as_deref() == Some(identity)
        })
    };
    devices.iter().filter(has_failed).map(|device| device.remove()).count()
}

impl Bdev {
    /// Creates a bdev called `name` over a block device.
    ///
    /// # Errors
    ///
    /// If the map has no default context, or more contexts than the device has channels.
    pub fn new(
        name: &str,
        medium: Arc<dyn BlockDevice>,
        options: BdevOptions,
    ) -> Result<Self, Error> {
        let refuse = |text| Err(Error::new(ErrorCategory::Usage, format!("{name}: {text}")));
        if options.map.default == 0 {
            return refuse("the queue map has 0 default contexts, expected at least 1".to_owned());
        }
        if options.depth == 0 || options.channels_max == 0 {
            return refuse("depth and channels are counted from 1, found 0".to_owned());
        }
        let (contexts, most) =
            (options.map.contexts_used(options.channels_max), medium.channels_max());
        let is_counted = options.map.default != PER_CHANNEL || options.channels_max != u32::MAX;
        if options.mode == ChannelMode::Mq && is_counted && contexts > u64::from(most) {
            return refuse(format!(
                "the queue map has {contexts} contexts, expected at most the {most} channels of its \
                 medium"
            ));
        }
        let shared = Arc::new(BdevShared::new(name, medium, options));
        let mut all = lock_all_devices();
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The UUID.
    pub fn uuid(&self) -> Uuid {
        self.0.options.uuid
    }

    /// The mode of its channels.
    pub fn channel_mode(&self) -> ChannelMode {
        self.0.options.mode
    }

    /// Current geometry and limits.
    pub fn current_limits(&self) -> Limits {
        self.0.limits()
    }

    /// Opens the bdev and grants `claim` to `holder` until the descriptor and all its channels are
    /// dropped.
    ///
    /// # Errors
    ///
    /// If an existing claim conflicts with this one, or the device has been removed.
    pub fn open(&self, claim: Claim, holder: &str) -> Result<BdevDescriptor, ClaimError> {
        let grant = BdevShared::claim(&self.0, claim, holder)?;
        BdevDescriptor::new(grant).map_err(|error| ClaimError {
            device: self.0.name.clone(),
            holder: holder.to_owned(),
            requested: claim,
            found: ClaimConflict::Machine(error.to_string()),
        })
    }

    /// The holders of open descriptors.
    pub fn list_holders(&self) -> Vec<Holder> {
        self.0.holders()
    }

    /// Removes the device. It cannot be opened any more. Each channel is woken; in its next iteration it
    /// closes its access to the device below, then completes what was in flight with
    /// [`ABORTED_BY_HOST`](tenmil_base::IoStatus::ABORTED_BY_HOST), and every later request with
    /// [`NO_DEVICE`](tenmil_base::IoStatus::NO_DEVICE).
    pub fn remove(&self) {
        self.0.remove();
    }

    /// The number of open channels to the device below; zero once a removal has reached every channel.
    pub fn open_channel_count(&self) -> usize {
        self.0.open_channel_count()
    }

    /// Sets the new size of the device. Channels check requests against it from their next iteration on.
    pub fn set_resized_block_count(&self, block_count: u64) {
        self.0.apply_new_size(block_count);
    }

    /// Resizes the device to `block_count` blocks and notifies all holders. Blocks until requests past a
    /// new end have drained. Must not be called on a thread that runs channels of the device.
    ///
    /// # Errors
    ///
    /// If the device cannot be resized, has been removed, or the range past the new end does not drain.
    /// The size is then unchanged.
    pub fn resize_and_wait(&self, block_count: u64) -> Result<(), Error> {
        let done = BdevShared::resize_device(&self.0, block_count);
        done.map_err(|text| Error::new(ErrorCategory::Usage, text))
    }

    /// Sends an event to every holder.
    pub fn notify_holders(&self, event: &BdevEvent) {
        self.0.notify(event);
    }

    /// Statistics of all channels, including closed ones.
    pub fn statistics(&self) -> IoStats {
        self.0.statistics()
    }

    /// Statistics and holder of each open channel.
    pub fn channel_statistics(&self) -> Vec<(ChannelId, String, IoStats)> {
        self.0.channel_statistics()
    }

    /// Switches latency recording on or off, for open and future channels.
    pub fn set_latency_recording(&self, on: bool) {
        self.0.set_latency_recording(on);
    }

    /// Quiesces `blocks`: waits until no channel has a request in flight there, and holds new ones until
    /// the returned range is dropped. Must not be called on a thread that runs channels of the device;
    /// use [`begin_quiesce`](Self::begin_quiesce) there.
    ///
    /// # Errors
    ///
    /// If that takes longer than `at_most`: then nothing is quiesced.
    pub fn quiesce(
        &self,
        blocks: Range<u64>,
        at_most: Span,
    ) -> Result<QuiescedRange, QuiesceTimeout> {
        let hold = self.begin_quiesce(blocks, None);
        hold.wait_until_drained(at_most)?;
        Ok(hold)
    }

    /// Fenced blocks: closed to all channels because a client was lost with writes in flight there. See
    /// [`Backend::fence_writes`](tenmil_base::IoChannel::fence_writes).
    pub fn fenced_ranges(&self) -> Vec<Range<u64>> {
        self.0.fenced_ranges()
    }

    /// Begins to quiesce `blocks` for all channels but `except`, and returns at once.
    /// [`QuiescedRange::has_drained`] returns whether the range has drained. Overlapping quiesces are
    /// granted in order.
    pub fn begin_quiesce(&self, blocks: Range<u64>, except: Option<ChannelId>) -> QuiescedRange {
        BdevShared::quiesce_range(&self.0, blocks, except.map(|channel| channel.0))
    }
}

impl fmt::Debug for BdevOptions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, map, channels_max, depth, .. } = self;
        out.debug_struct("DeviceOptions")
            .field("mode", mode)
            .field("map", map)
            .field("channels_max", channels_max)
            .field("depth", depth)
            .finish_non_exhaustive()
    }
}
