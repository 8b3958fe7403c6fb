//! What a device, its descriptors and its channels share.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{Interrupts, Limits, Medium, Span};
use host::EventVectors;
use host::bell::Barrier;

use super::claim::{Claim, ClaimRefused, Found, Holder};
use super::event::{Event, EventQueue};
use super::{ChannelId, DeviceOptions, Mode};
use crate::channel::Losses;
use crate::context::SharedContext;
use crate::fence::Fence;
use crate::lock::{Held, Hold};
use crate::map::Type;
use crate::statistics::{Meter, Statistics};

/// One device. What is on the way of an I/O lies outside the lock: one word that changes whenever
/// there is a reason to look inside.
pub(crate) struct Shared {
    pub(crate) attention: Attention,
    pub(crate) name: String,
    pub(crate) options: DeviceOptions,
    pub(crate) barrier: Barrier,
    pub(crate) losses: Losses,
    /// Held by whoever changes the size.
    sizing: Mutex<()>,
    ledger: Mutex<Ledger>,
}

/// On lines of its own: every channel looks at it once a batch.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Attention(pub(crate) AtomicU64);

/// What the lock keeps. `attention` changes only under it.
struct Ledger {
    /// None: removed.
    medium: Option<Arc<dyn Medium>>,
    limits: Limits,
    grants: Vec<Granted>,
    ports: Vec<Option<Arc<Port>>>,
    contexts: BTreeMap<(Type, u32), Weak<SharedContext>>,
    holds: Vec<Held>,
    fences: Vec<Fence>,
    /// What the channels that are closed have done.
    closed: Statistics,
    timing: bool,
    /// Ids that were given out.
    ids: u64,
}

struct Granted {
    id: u64,
    holder: Holder,
    events: Arc<EventQueue>,
}

/// A claim: given back when the descriptor and all its channels have dropped it.
pub(crate) struct Grant {
    pub(crate) shared: Arc<Shared>,
    pub(crate) claim: Claim,
    pub(crate) holder: String,
    pub(super) events: Arc<EventQueue>,
    id: u64,
}

/// What a channel shows to the rest of the house.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) index: u32,
    pub(crate) holder: String,
    /// How much is in flight, or more; stored before `attention` is loaded.
    pub(crate) in_flight: AtomicU32,
    /// As of this `attention`, nothing in flight overlaps a hold.
    pub(crate) quiet: AtomicU64,
    /// Whether it has a way to the medium.
    pub(crate) is_open: AtomicBool,
    pub(crate) meter: Meter,
    /// Rung when `attention` changes.
    pub(crate) bell: EventVectors,
}

/// What a channel finds when it looks.
pub(crate) struct View {
    pub(crate) generation: u64,
    pub(crate) block_count: u64,
    pub(crate) is_removed: bool,
    pub(crate) holds: Vec<Held>,
    pub(crate) fences: Vec<Fence>,
}

/// How long a device that becomes shorter waits for what is past its new end.
const STILL_MAX: Span = Span::from_secs(1);

impl Shared {
    pub(super) fn new(name: &str, medium: Arc<dyn Medium>, options: DeviceOptions) -> Self {
        let mut limits = medium.limits();
        limits.depth_max = limits.depth_max.min(options.depth);
        let ledger = Ledger {
            limits,
            medium: Some(medium),
            grants: Vec::new(),
            ports: Vec::new(),
            contexts: BTreeMap::new(),
            holds: Vec::new(),
            fences: Vec::new(),
            closed: Statistics::default(),
            timing: options.timing,
            ids: 0,
        };
        Self {
            attention: Attention(AtomicU64::new(1)),
            name: name.to_owned(),
            options,
            barrier: Barrier::detect(),
            losses: Losses::default(),
            sizing: Mutex::new(()),
            ledger: Mutex::new(ledger),
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limits(&self) -> Limits {
        self.ledger().limits.clone()
    }

    pub(super) fn medium(&self) -> Option<Arc<dyn Medium>> {
        self.ledger().medium.clone()
    }

    pub(super) fn claim(
        this: &Arc<Self>,
        claim: Claim,
        holder: &str,
    ) -> Result<Arc<Grant>, ClaimRefused> {
        let refuse = |found| ClaimRefused {
            device: this.name.clone(),
            holder: holder.to_owned(),
            asked: claim,
            found,
        };
        let events =
            EventQueue::new().map_err(|error| refuse(Found::Machine(error.to_string())))?;
        let events = Arc::new(events);
        let mut ledger = this.ledger();
        if ledger.medium.is_none() {
            return Err(refuse(Found::Removed));
        }
        let against = ledger.grants.iter().map(|granted| &granted.holder);
        let against = against.filter(|held| !claim.goes_with(held.claim)).cloned();
        let against: Vec<Holder> = against.collect();
        if !against.is_empty() {
            return Err(refuse(Found::Holders(against)));
        }
        let id = ledger.next_id();
        let kept = Holder { name: holder.to_owned(), claim };
        ledger.grants.push(Granted { id, holder: kept, events: Arc::clone(&events) });
        drop(ledger);
        let (shared, holder) = (Arc::clone(this), holder.to_owned());
        Ok(Arc::new(Grant { shared, claim, holder, events, id }))
    }

    pub(super) fn holders(&self) -> Vec<Holder> {
        self.ledger().grants.iter().map(|granted| granted.holder.clone()).collect()
    }

    pub(super) fn remove(&self) {
        let mut ledger = self.ledger();
        // Dropped after the lock: closing a medium may take its time.
        let medium = ledger.medium.take();
        if medium.is_some() {
            ledger.tell(&Event::Removed);
            self.ring(&ledger);
        }
        drop(ledger);
    }

    pub(super) fn resize(&self, block_count: u64) {
        let mut ledger = self.ledger();
        ledger.limits.block_count = block_count;
        ledger.tell(&Event::Resized { block_count });
        self.ring(&ledger);
    }

    /// See [`notice_sizes`](super::notice_sizes). Whether it has grown.
    pub(super) fn notice_size(&self) -> bool {
        let _alone = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(medium) = self.medium() else { return false };
        let has_grown = |found: &u64| *found > self.limits().block_count;
        let found = medium.notice_size().ok().filter(has_grown);
        if let Some(block_count) = found {
            self.resize(block_count);
        }
        found.is_some()
    }

    /// See [`Device::set_size`](super::Device::set_size).
    pub(super) fn set_size(this: &Arc<Self>, block_count: u64) -> Result<(), String> {
        let refuse = |text: String| format!("{}: {text}", this.name);
        if this.options.mode == Mode::Bypass {
            let text = "its mode is bypass, expected one that knows what is under way";
            return Err(refuse(text.to_owned()));
        }
        let _alone = this.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let medium = this.medium().ok_or_else(|| this.gone())?;
        let before = this.limits().block_count;
        if block_count >= before {
            medium.resize(block_count).map_err(refuse)?;
            this.resize(block_count);
            return Ok(());
        }
        if block_count == 0 || !medium.is_resizable() {
            return medium.resize(block_count).map_err(refuse);
        }
        // Nothing begins past the new end from here on, and what has begun is waited for.
        this.resize(block_count);
        let hold = Self::hold(this, block_count..before, None);
        let done = hold.wait(STILL_MAX).map_err(|busy| busy.to_string());
        let done = done.and_then(|()| medium.resize(block_count).map_err(refuse));
        if done.is_err() {
            this.resize(before);
        }
        done
    }

    pub(super) fn tell(&self, event: &Event) {
        self.ledger().tell(event);
    }

    pub(super) fn time(&self, on: bool) {
        let mut ledger = self.ledger();
        ledger.timing = on;
        ledger.ports().for_each(|port| port.meter.time(on));
    }

    pub(super) fn statistics(&self) -> Statistics {
        let ledger = self.ledger();
        let mut sum = ledger.closed.clone();
        let clock = &self.options.clock;
        ledger.ports().for_each(|port| sum.merge(&port.meter.read(clock)));
        sum
    }

    pub(super) fn channel_statistics(&self) -> Vec<(ChannelId, String, Statistics)> {
        let clock = &self.options.clock;
        let of =
            |port: &Arc<Port>| (ChannelId(port.index), port.holder.clone(), port.meter.read(clock));
        self.ledger().ports().map(of).collect()
    }

    pub(super) fn ways_open(&self) -> usize {
        self.ledger().ports().filter(|port| port.is_open.load(Ordering::Acquire)).count()
    }

    /// Has every channel look, and wakes those that sleep.
    fn ring(&self, ledger: &Ledger) {
        // Pairs with the load of a channel's turn; what it orders beyond that, the lock does.
        self.attention.0.fetch_add(1, Ordering::Release);
        ledger.ports().for_each(|port| port.bell.clone().raise(0));
    }

    pub(super) fn hold(this: &Arc<Self>, blocks: Range<u64>, except: Option<u32>) -> Hold {
        let mut ledger = this.ledger();
        let id = ledger.next_id();
        // Without a descriptor the wait looks for itself.
        let bell = EventVectors::new(1).or_else(|_| EventVectors::new(0));
        let bell = bell.expect("no vectors take no descriptor");
        let held = Held { id, blocks, except, bell };
        ledger.holds.push(held.clone());
        this.ring(&ledger);
        let generation = this.attention.0.load(Ordering::Relaxed);
        Hold { shared: Arc::clone(this), held, generation }
    }

    /// Sets which blocks the fence `id`, or a new one, closes. Its number; none if it closes nothing.
    pub(crate) fn set_fence(&self, id: Option<u64>, written: Vec<Range<u64>>) -> Option<u64> {
        let mut ledger = self.ledger();
        let id = id.unwrap_or_else(|| ledger.next_id());
        let closed = ledger.fences.iter().filter(|fence| fence.id == id).map(|fence| &fence.blocks);
        let is_empty = written.is_empty();
        if !closed.eq(&written) {
            ledger.fences.retain(|fence| fence.id != id);
            ledger.fences.extend(written.into_iter().map(|blocks| Fence { id, blocks }));
            self.ring(&ledger);
        }
        (!is_empty).then_some(id)
    }

    pub(super) fn fenced(&self) -> Vec<Range<u64>> {
        self.ledger().fences.iter().map(|fence| fence.blocks.clone()).collect()
    }

    pub(crate) fn release(&self, id: u64) {
        let mut ledger = self.ledger();
        ledger.holds.retain(|held| held.id != id);
        ledger.holds.iter().for_each(|held| held.bell.clone().raise(0));
        self.ring(&ledger);
    }

    /// Whether a hold is alone with its blocks, or who is there.
    pub(crate) fn is_still(&self, hold: &Held, generation: u64) -> Result<(), Vec<String>> {
        let ledger = self.ledger();
        let overlaps = |held: &&Held| {
            held.blocks.start < hold.blocks.end && hold.blocks.start < held.blocks.end
        };
        let earlier = ledger.holds.iter().take_while(|held| held.id != hold.id);
        if earlier.clone().any(|held| overlaps(&held)) {
            return Err(vec!["an earlier hold".to_owned()]);
        }
        if !self.barrier.heavy() {
            return Err(vec!["a kernel that refuses a barrier".to_owned()]);
        }
        let is_quiet = |port: &&Arc<Port>| {
            hold.except == Some(port.index)
                || port.in_flight.load(Ordering::Acquire) == 0
                || port.quiet.load(Ordering::Acquire) >= generation
        };
        let busy = ledger.ports().filter(|port| !is_quiet(port));
        let busy: Vec<String> = busy.map(|port| port.holder.clone()).collect();
        if busy.is_empty() { Ok(()) } else { Err(busy) }
    }

    /// What a channel should know; as of which `attention` it is.
    pub(crate) fn view(&self) -> View {
        let ledger = self.ledger();
        View {
            generation: self.attention.0.load(Ordering::Relaxed),
            block_count: ledger.limits.block_count,
            is_removed: ledger.medium.is_none(),
            holds: ledger.holds.clone(),
            fences: ledger.fences.clone(),
        }
    }

    /// A place for a new channel.
    pub(crate) fn enter(&self, holder: &str) -> Result<Arc<Port>, String> {
        let refuse = |problem: String| format!("{}: {problem}", self.name);
        let bell =
            EventVectors::new(1).map_err(|error| refuse(format!("a descriptor: {error}")))?;
        // To ring is heard from here on; its first turn looks in any case.
        bell.unmask(0);
        let mut ledger = self.ledger();
        let free = ledger.ports.iter().position(Option::is_none);
        let position = free.unwrap_or(ledger.ports.len());
        let index = u32::try_from(position).ok().filter(|index| *index < self.options.channels_max);
        let index = index.ok_or_else(|| {
            refuse(format!("{position} channels are open, and it was made for no more"))
        })?;
        let port = Arc::new(Port {
            index,
            holder: holder.to_owned(),
            in_flight: AtomicU32::new(0),
            quiet: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            meter: Meter::new(ledger.timing),
            bell,
        });
        if position == ledger.ports.len() {
            ledger.ports.push(None);
        }
        ledger.ports[position] = Some(Arc::clone(&port));
        Ok(port)
    }

    /// A channel closes; what it has done stays.
    pub(crate) fn leave(&self, port: &Port) {
        let mut ledger = self.ledger();
        let done = port.meter.read(&self.options.clock);
        ledger.closed.merge(&done);
        ledger.ports[port.index as usize] = None;
        ledger.holds.iter().for_each(|held| held.bell.clone().raise(0));
    }

    /// The context of this number, which channels share.
    pub(crate) fn context(&self, of: Type, number: u32) -> Arc<SharedContext> {
        let mut ledger = self.ledger();
        if let Some(context) = ledger.contexts.get(&(of, number)).and_then(Weak::upgrade) {
            return context;
        }
        let context = Arc::new(SharedContext::new(self.options.mode, self.options.clock));
        ledger.contexts.insert((of, number), Arc::downgrade(&context));
        context
    }

    /// A new way to the medium, behind a scheduler if there is to be one.
    pub(crate) fn way(&self) -> Result<Box<dyn base::Backend>, String> {
        let medium = self.medium().ok_or_else(|| self.gone())?;
        Ok(self.options.scheduler.over(medium.channel()?))
    }
}

impl Shared {
    /// What is said of a device that has been removed.
    pub(super) fn gone(&self) -> String {
        format!("{}: it has been removed", self.name)
    }
}

impl Ledger {
    fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.ports.iter().flatten()
    }

    fn tell(&self, event: &Event) {
        self.grants.iter().for_each(|granted| granted.events.push(event.clone()));
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.shared.ledger().grants.retain(|granted| granted.id != self.id);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, options, .. } = self;
        out.debug_struct("Shared")
            .field("name", name)
            .field("options", options)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Grant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shared, claim, holder, .. } = self;
        out.debug_tuple("Grant").field(&shared.name).field(claim).field(holder).finish()
    }
}
