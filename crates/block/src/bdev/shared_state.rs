//! State shared by a bdev, its descriptors and its channels.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{BlockDevice, Error, Interrupts, IoCounters, IoStats, Limits, Span};
use tenmil_linux::wakeup::AsymmetricBarrier;
use tenmil_linux::{Clock, EventFdVectors};

use super::claim::{Claim, ClaimConflict, ClaimError, Holder};
use super::event::{BdevEvent, BdevEventQueue};
use super::{BdevOptions, ChannelId, ChannelMode};
use crate::channel::LostWriteCounter;
use crate::context::SharedContext;
use crate::queue_map::ContextType;
use crate::quiesce::{QuiesceEntry, QuiescedRange};
use crate::write_fence::WriteFence;

/// Shared state of one bdev. The I/O path uses only the fields outside the lock: one word that changes
/// whenever a channel has to look at the locked state.
pub(crate) struct BdevShared {
    pub(crate) attention: AlignedChangeCounter,
    pub(crate) name: String,
    pub(crate) options: BdevOptions,
    pub(crate) barrier: AsymmetricBarrier,
    pub(crate) losses: LostWriteCounter,
    /// Serializes changes of the size.
    sizing: Mutex<()>,
    state: Mutex<BdevState>,
}

/// In cache lines of its own: every channel loads it once a batch. Not a
/// [`Mailbox`](tenmil_base::Mailbox): all channels read the same state, and a quiesce waits for channels
/// that have seen a certain count.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct AlignedChangeCounter(pub(crate) AtomicU64);

/// State behind the lock. `attention` changes only while it is held.
struct BdevState {
    /// `None` after removal.
    block_device: Option<Arc<dyn BlockDevice>>,
    limits: Limits,
    grants: Vec<ClaimEntry>,
    channels: Vec<Option<Arc<ChannelShared>>>,
    contexts: BTreeMap<(ContextType, u32), Weak<SharedContext>>,
    holds: Vec<QuiesceEntry>,
    fences: Vec<WriteFence>,
    /// Statistics of closed channels.
    closed: IoStats,
    timing: bool,
    /// Ids given out.
    ids: u64,
}

struct ClaimEntry {
    id: u64,
    holder: Holder,
    /// One of each descriptor of the claim.
    events: Vec<Weak<BdevEventQueue>>,
}

/// A granted claim, released when the descriptor and all its channels have dropped it.
pub(crate) struct ClaimGuard {
    pub(crate) shared: Arc<BdevShared>,
    pub(crate) claim: Claim,
    pub(crate) holder: String,
    id: u64,
}

/// State that a channel publishes to other threads.
#[derive(Debug)]
pub(crate) struct ChannelShared {
    pub(crate) index: u32,
    pub(crate) holder: String,
    /// Upper bound of the requests in flight; stored before `attention` is loaded.
    pub(crate) in_flight: AtomicU32,
    /// Value of `attention` as of which nothing in flight overlaps a quiesced range.
    pub(crate) quiet: AtomicU64,
    /// The channel has access to the device below.
    pub(crate) is_open: AtomicBool,
    pub(crate) meter: IoCounters,
    /// Raised when `attention` changes.
    pub(crate) waker: EventFdVectors,
}

/// Snapshot of the locked state for a channel.
pub(crate) struct ChannelView {
    pub(crate) generation: u64,
    pub(crate) block_count: u64,
    pub(crate) is_removed: bool,
    pub(crate) holds: Vec<QuiesceEntry>,
    pub(crate) fences: Vec<WriteFence>,
}

/// Maximum time that a shrinking device waits for requests past its new end.
const STILL_MAX: Span = Span::from_secs(1);

impl BdevShared {
    pub(super) fn new(name: &str, medium: Arc<dyn BlockDevice>, options: BdevOptions) -> Self {
        let mut limits = medium.limits();
        limits.depth_max = limits.depth_max.min(options.depth);
        let ledger = BdevState {
            limits,
            block_device: Some(medium),
            grants: Vec::new(),
            channels: Vec::new(),
            contexts: BTreeMap::new(),
            holds: Vec::new(),
            fences: Vec::new(),
            closed: IoStats::default(),
            timing: options.timing,
            ids: 0,
        };
        Self {
            attention: AlignedChangeCounter(AtomicU64::new(1)),
            name: name.to_owned(),
            options,
            barrier: AsymmetricBarrier::detect(),
            losses: LostWriteCounter::default(),
            sizing: Mutex::new(()),
            state: Mutex::new(ledger),
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, BdevState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limits(&self) -> Limits {
        self.lock_state().limits.clone()
    }

    pub(super) fn block_device(&self) -> Option<Arc<dyn BlockDevice>> {
        self.lock_state().block_device.clone()
    }

    pub(super) fn claim(
        this: &Arc<Self>,
        claim: Claim,
        holder: &str,
    ) -> Result<Arc<ClaimGuard>, ClaimError> {
        let refuse = |found| ClaimError {
            device: this.name.clone(),
            holder: holder.to_owned(),
            requested: claim,
            found,
        };
        let mut ledger = this.lock_state();
        if ledger.block_device.is_none() {
            return Err(refuse(ClaimConflict::Removed));
        }
        let against = ledger.grants.iter().map(|granted| &granted.holder);
        let against = against.filter(|held| !claim.is_compatible(held.claim)).cloned();
        let against: Vec<Holder> = against.collect();
        if !against.is_empty() {
            return Err(refuse(ClaimConflict::Holders(against)));
        }
        let id = ledger.next_id();
        let kept = Holder { name: holder.to_owned(), claim };
        ledger.grants.push(ClaimEntry { id, holder: kept, events: Vec::new() });
        drop(ledger);
        let (shared, holder) = (Arc::clone(this), holder.to_owned());
        Ok(Arc::new(ClaimGuard { shared, claim, holder, id }))
    }

    pub(super) fn holders(&self) -> Vec<Holder> {
        self.lock_state().grants.iter().map(|granted| granted.holder.clone()).collect()
    }

    pub(super) fn remove(&self) {
        let mut ledger = self.lock_state();
        // Dropped after the lock is released: closing a device may take long.
        let medium = ledger.block_device.take();
        if medium.is_some() {
            ledger.notify(&BdevEvent::Removed);
            self.signal_state_change(&ledger);
        }
        drop(ledger);
    }

    pub(super) fn apply_new_size(&self, block_count: u64) {
        let mut ledger = self.lock_state();
        ledger.limits.block_count = block_count;
        ledger.notify(&BdevEvent::Resized { block_count });
        self.signal_state_change(&ledger);
    }

    /// Implements [`refresh_sizes`](super::refresh_sizes). Returns whether the device has grown.
    pub(super) fn refresh_size(&self) -> bool {
        let _alone = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(medium) = self.block_device() else { return false };
        let has_grown = |found: &u64| *found > self.limits().block_count;
        let found = medium.refresh_size().ok().filter(has_grown);
        if let Some(block_count) = found {
            self.apply_new_size(block_count);
        }
        found.is_some()
    }

    /// Implements [`Bdev::resize_and_wait`](super::Bdev::resize_and_wait).
    pub(super) fn resize_device(this: &Arc<Self>, block_count: u64) -> Result<(), Error> {
        if this.options.mode == ChannelMode::Bypass {
            let text = "its mode is bypass, expected one that tracks requests in flight";
            return Err(Error::usage(text).with_context(&this.name));
        }
        let _alone = this.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let medium =
            this.block_device().ok_or_else(|| this.removed_error()).map_err(Error::environment)?;
        let before = this.limits().block_count;
        if block_count >= before {
            medium.resize(block_count).map_err(|error| error.with_context(&this.name))?;
            this.apply_new_size(block_count);
            return Ok(());
        }
        if block_count == 0 || !medium.is_resizable() {
            return medium.resize(block_count).map_err(|error| error.with_context(&this.name));
        }
        // From here on no request starts past the new end; those in flight are waited for.
        this.apply_new_size(block_count);
        let hold = Self::quiesce_range(this, block_count..before, None);
        let done = hold.wait_until_drained(STILL_MAX).map_err(Error::environment);
        let done = done.and_then(|()| {
            medium.resize(block_count).map_err(|error| error.with_context(&this.name))
        });
        if done.is_err() {
            this.apply_new_size(before);
        }
        done
    }

    pub(super) fn notify(&self, event: &BdevEvent) {
        self.lock_state().notify(event);
    }

    pub(super) fn set_latency_recording(&self, on: bool) {
        let mut ledger = self.lock_state();
        ledger.timing = on;
        ledger.registered_channels().for_each(|port| port.meter.set_latency_recording(on));
    }

    pub(super) fn statistics(&self) -> IoStats {
        let ledger = self.lock_state();
        let mut sum = ledger.closed.clone();
        let clock = &self.options.clock;
        ledger.registered_channels().for_each(|port| sum.merge(&snapshot(&port.meter, clock)));
        if let Some(limiter) = &self.options.limiter {
            (sum.limited, sum.limit_wait) = limiter.waits();
        }
        sum
    }

    pub(super) fn channel_statistics(&self) -> Vec<(ChannelId, String, IoStats)> {
        let clock = &self.options.clock;
        let of = |port: &Arc<ChannelShared>| {
            (ChannelId(port.index), port.holder.clone(), snapshot(&port.meter, clock))
        };
        self.lock_state().registered_channels().map(of).collect()
    }

    pub(super) fn open_channel_count(&self) -> usize {
        self.lock_state()
            .registered_channels()
            .filter(|port| port.is_open.load(Ordering::Acquire))
            .count()
    }

    /// Makes every channel look at the locked state, and wakes sleeping ones.
    fn signal_state_change(&self, ledger: &BdevState) {
        // Release pairs with the load of `attention` in a channel's iteration; all other ordering comes
        // from the lock.
        self.attention.0.fetch_add(1, Ordering::Release);
        ledger.registered_channels().for_each(|port| port.waker.clone().raise(0));
    }

    pub(super) fn quiesce_range(
        this: &Arc<Self>,
        blocks: Range<u64>,
        except: Option<u32>,
    ) -> QuiescedRange {
        let mut ledger = this.lock_state();
        let id = ledger.next_id();
        // Without a descriptor, the waiter polls.
        let waker = EventFdVectors::new(1).or_else(|_| EventFdVectors::new(0));
        let waker = waker.expect("no vectors take no descriptor");
        let held = QuiesceEntry { id, blocks, except, waker };
        ledger.holds.push(held.clone());
        this.signal_state_change(&ledger);
        let generation = this.attention.0.load(Ordering::Relaxed);
        QuiescedRange { shared: Arc::clone(this), held, generation }
    }

    /// Sets the blocks that fence `id`, or a new one, closes. Returns its id, or `None` if it closes
    /// nothing.
    pub(crate) fn set_fence_blocks(
        &self,
        id: Option<u64>,
        written: Vec<Range<u64>>,
    ) -> Option<u64> {
        let mut ledger = self.lock_state();
        let id = id.unwrap_or_else(|| ledger.next_id());
        let closed = ledger.fences.iter().filter(|fence| fence.id == id).map(|fence| &fence.blocks);
        let is_empty = written.is_empty();
        if !closed.eq(&written) {
            ledger.fences.retain(|fence| fence.id != id);
            ledger.fences.extend(written.into_iter().map(|blocks| WriteFence { id, blocks }));
            self.signal_state_change(&ledger);
        }
        (!is_empty).then_some(id)
    }

    pub(super) fn fenced_ranges(&self) -> Vec<Range<u64>> {
        self.lock_state().fences.iter().map(|fence| fence.blocks.clone()).collect()
    }

    pub(crate) fn release_quiesced(&self, id: u64) {
        let mut ledger = self.lock_state();
        ledger.holds.retain(|held| held.id != id);
        // Later overlapping ranges may be granted now.
        ledger.holds.iter().for_each(|held| held.waker.clone().raise(0));
        self.signal_state_change(&ledger);
    }

    /// Whether a quiesced range has drained; otherwise the holders with requests in it.
    pub(crate) fn check_drained(
        &self,
        hold: &QuiesceEntry,
        generation: u64,
    ) -> Result<(), Vec<String>> {
        let ledger = self.lock_state();
        // Overlapping ranges are granted in the order of their creation.
        let overlaps = |held: &&QuiesceEntry| {
            held.blocks.start < hold.blocks.end && hold.blocks.start < held.blocks.end
        };
        let earlier = ledger.holds.iter().take_while(|held| held.id != hold.id);
        if earlier.clone().any(|held| overlaps(&held)) {
            return Err(vec!["an earlier hold".to_owned()]);
        }
        // Heavy half of the barrier: see `quiesce`.
        if !self.barrier.sleeper_barrier() {
            return Err(vec!["a kernel that refuses a barrier".to_owned()]);
        }
        let is_quiet = |port: &&Arc<ChannelShared>| {
            hold.except == Some(port.index)
                || port.in_flight.load(Ordering::Acquire) == 0
                || port.quiet.load(Ordering::Acquire) >= generation
        };
        let busy = ledger.registered_channels().filter(|port| !is_quiet(port));
        let busy: Vec<String> = busy.map(|port| port.holder.clone()).collect();
        if busy.is_empty() { Ok(()) } else { Err(busy) }
    }

    /// Snapshot of the locked state with its value of `attention`.
    pub(crate) fn channel_view(&self) -> ChannelView {
        let ledger = self.lock_state();
        ChannelView {
            generation: self.attention.0.load(Ordering::Relaxed),
            block_count: ledger.limits.block_count,
            is_removed: ledger.block_device.is_none(),
            holds: ledger.holds.clone(),
            fences: ledger.fences.clone(),
        }
    }

    /// Registers a new channel.
    pub(crate) fn register_channel(&self, holder: &str) -> Result<Arc<ChannelShared>, Error> {
        let refuse = |problem: String| format!("{}: {problem}", self.name);
        let waker = EventFdVectors::new(1)
            .map_err(|error| refuse(format!("a descriptor: {error}")))
            .map_err(Error::environment)?;
        // The waker is armed from here on; the first iteration handles changes in any case.
        waker.unmask(0);
        let mut ledger = self.lock_state();
        let free = ledger.channels.iter().position(Option::is_none);
        let position = free.unwrap_or(ledger.channels.len());
        let index = u32::try_from(position).ok().filter(|index| *index < self.options.channels_max);
        let index = index
            .ok_or_else(|| {
                refuse(format!("{position} channels are open, and it was made for no more"))
            })
            .map_err(Error::environment)?;
        let port = Arc::new(ChannelShared {
            index,
            holder: holder.to_owned(),
            in_flight: AtomicU32::new(0),
            quiet: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            meter: IoCounters::new(ledger.timing),
            waker,
        });
        if position == ledger.channels.len() {
            ledger.channels.push(None);
        }
        ledger.channels[position] = Some(Arc::clone(&port));
        Ok(port)
    }

    /// Unregisters a channel; its statistics are kept.
    pub(crate) fn unregister_channel(&self, port: &ChannelShared) {
        let mut ledger = self.lock_state();
        let done = snapshot(&port.meter, &self.options.clock);
        ledger.closed.merge(&done);
        ledger.channels[port.index as usize] = None;
        // Waiters check again: this channel no longer delays them.
        ledger.holds.iter().for_each(|held| held.waker.clone().raise(0));
    }

    /// The shared context with this index.
    pub(crate) fn shared_context(&self, of: ContextType, number: u32) -> Arc<SharedContext> {
        let mut ledger = self.lock_state();
        if let Some(context) = ledger.contexts.get(&(of, number)).and_then(Weak::upgrade) {
            return context;
        }
        let context = Arc::new(SharedContext::new(self.options.mode, self.options.clock));
        ledger.contexts.insert((of, number), Arc::downgrade(&context));
        context
    }

    /// Opens an I/O channel to the device below, with the configured scheduler.
    pub(crate) fn open_channel(&self) -> Result<Box<dyn tenmil_base::IoChannel>, Error> {
        let medium =
            self.block_device().ok_or_else(|| self.removed_error()).map_err(Error::environment)?;
        Ok(self.options.scheduler.wrap_channel(medium.channel()?))
    }
}

impl BdevShared {
    /// Error text for a removed device.
    pub(super) fn removed_error(&self) -> String {
        format!("{}: it has been removed", self.name)
    }
}

fn snapshot(counters: &IoCounters, clock: &Clock) -> IoStats {
    counters.snapshot(|ticks| clock.span_of_ticks(ticks))
}

impl BdevState {
    fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    fn registered_channels(&self) -> impl Iterator<Item = &Arc<ChannelShared>> {
        self.channels.iter().flatten()
    }

    fn notify(&mut self, event: &BdevEvent) {
        for granted in &mut self.grants {
            granted.events.retain(|queue| {
                queue.upgrade().inspect(|queue| queue.push(event.clone())).is_some()
            });
        }
    }
}

impl ClaimGuard {
    /// An event queue for a descriptor of this claim, until it is dropped.
    pub(super) fn new_event_queue(&self) -> std::io::Result<Arc<BdevEventQueue>> {
        let queue = Arc::new(BdevEventQueue::new()?);
        let mut ledger = self.shared.lock_state();
        let granted = ledger.grants.iter_mut().find(|granted| granted.id == self.id);
        let granted = granted.expect("a claim is registered until its guard is dropped");
        granted.events.push(Arc::downgrade(&queue));
        if ledger.block_device.is_none() {
            queue.push(BdevEvent::Removed);
        }
        Ok(queue)
    }
}

impl Drop for ClaimGuard {
    fn drop(&mut self) {
        self.shared.lock_state().grants.retain(|granted| granted.id != self.id);
    }
}

impl fmt::Debug for BdevShared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, options, .. } = self;
        out.debug_struct("Shared")
            .field("name", name)
            .field("options", options)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ClaimGuard {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shared, claim, holder, .. } = self;
        out.debug_tuple("Grant").field(&shared.name).field(claim).field(holder).finish()
    }
}
