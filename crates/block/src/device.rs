//! A block device: a name, a medium, and who may do what with it.
//!
//! ```text
//!   Device ── open(claim, holder) ──> Descriptor ── channel() ──> Channel     one a thread
//!      │                                   │                         │  tags
//!      │ resized, removed, medium changed  │                         v
//!      └────────── events ─────────────────┘                      Context     by the queue map
//!                                                                    │
//!                                                                 Backend     the medium's channel
//! ```
//!
//! A [`Descriptor`] is a [`base::Medium`], and its channels are [`base::Backend`]s: whatever takes a
//! medium can stand on it.

mod claim;
mod descriptor;
mod event;
mod shared;
#[cfg(test)]
mod tests;
mod uuid;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{Blame, Limits, Medium, Span};
use host::Clock;

pub use self::claim::{Claim, ClaimRefused, Found, Holder};
pub use self::descriptor::Descriptor;
pub use self::event::Event;
pub(crate) use self::shared::{Grant, Port, Shared};
pub use self::uuid::{NotAUuid, Uuid};
use crate::MediumError;
use crate::limit::Limiter;
use crate::lock::{Hold, NotStill};
use crate::map::{PER_CHANNEL, QueueMap};
use crate::schedule::Scheduler;
use crate::statistics::Statistics;

/// A block device. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device(Arc<Shared>);

/// How a device is made.
#[derive(Clone)]
pub struct DeviceOptions {
    /// What its channels do.
    pub mode: Mode,
    /// Which of them share hardware contexts.
    pub map: QueueMap,
    /// Channels that may be open at once. A map with fewer contexts than this makes them share.
    pub channels_max: u32,
    /// Requests in flight in a channel, and in a context; the medium's depth if that is less.
    pub depth: u32,
    /// Whether latencies are counted from the start.
    pub timing: bool,
    /// What no other device is called.
    pub uuid: Uuid,
    /// What measures waits: for a lock, for a range to become still.
    pub clock: Clock,
    /// In what order requests go to the medium: one for each context.
    pub scheduler: Scheduler,
    /// How much all channels together are given, and is there to be changed.
    pub limiter: Option<Limiter>,
}

/// What the channels of a device do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Software queues over hardware contexts, as the map says.
    #[default]
    Mq,
    /// The old way, to be compared with: one queue behind one lock that everybody waits for.
    Single,
    /// Nothing: a channel is the medium's own. Claims hold, but there are no counts, no holds, no fences,
    /// no scheduler and no limits, and a removal waits until the holders drop their channels.
    Bypass,
}

/// Which channel of its device: the number by which a hold excepts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelId(pub u32);

impl DeviceOptions {
    /// Mode `mq`, a context for each channel, and a UUID that `seed` draws.
    pub fn new(clock: Clock, seed: u64) -> Self {
        Self {
            mode: Mode::Mq,
            map: QueueMap::default(),
            channels_max: u32::MAX,
            depth: u32::MAX,
            timing: true,
            uuid: Uuid::from_seed(seed),
            clock,
            scheduler: Scheduler::None,
            limiter: None,
        }
    }
}

/// All devices of this process.
static DEVICES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

fn all_devices() -> MutexGuard<'static, Vec<Weak<Shared>>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has every device of this process look how long its medium is: those that find it longer go by that
/// and tell their holders. For whoever has made something longer and does not know what stands on it.
/// Returns how many have grown. Blocks.
pub fn notice_sizes() -> usize {
    let devices: Vec<Arc<Shared>> = all_devices().iter().filter_map(Weak::upgrade).collect();
    devices.iter().filter(|device| device.notice_size()).count()
}

impl Device {
    /// Makes a device called `name` of a medium.
    ///
    /// # Errors
    ///
    /// If the map has no default context, or more contexts than the medium has channels.
    pub fn new(
        name: &str,
        medium: Arc<dyn Medium>,
        options: DeviceOptions,
    ) -> Result<Self, MediumError> {
        let refuse = |text| Err(MediumError::new(Blame::Caller, format!("{name}: {text}")));
        if options.map.default == 0 {
            return refuse("the queue map has 0 default contexts, expected at least 1".to_owned());
        }
        if options.depth == 0 || options.channels_max == 0 {
            return refuse("depth and channels are counted from 1, found 0".to_owned());
        }
        let (contexts, most) = (options.map.contexts(options.channels_max), medium.channels_max());
        let is_counted = options.map.default != PER_CHANNEL || options.channels_max != u32::MAX;
        if options.mode == Mode::Mq && is_counted && contexts > u64::from(most) {
            return refuse(format!(
                "the queue map has {contexts} contexts, expected at most the {most} channels of its \
                 medium"
            ));
        }
        let shared = Arc::new(Shared::new(name, medium, options));
        let mut all = all_devices();
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its UUID.
    pub fn uuid(&self) -> Uuid {
        self.0.options.uuid
    }

    /// What its channels do.
    pub fn mode(&self) -> Mode {
        self.0.options.mode
    }

    /// Geometry and limits as they are now.
    pub fn limits(&self) -> Limits {
        self.0.limits()
    }

    /// Opens it: grants `claim` to `holder` until the descriptor and all its channels are dropped.
    ///
    /// # Errors
    ///
    /// If somebody has a claim that does not go with this one, or the device has been removed.
    pub fn open(&self, claim: Claim, holder: &str) -> Result<Descriptor, ClaimRefused> {
        let grant = Shared::claim(&self.0, claim, holder)?;
        Ok(Descriptor::new(grant))
    }

    /// Who has it open.
    pub fn holders(&self) -> Vec<Holder> {
        self.0.holders()
    }

    /// Takes the device away. Nothing more is opened; at its next turn, which this rings for if its
    /// thread sleeps, each channel drops its way to the medium and then answers what was in flight
    /// with [`ABORTED_BY_HOST`](base::Outcome::ABORTED_BY_HOST), and from then on everything with
    /// [`NO_DEVICE`](base::Outcome::NO_DEVICE).
    pub fn remove(&self) {
        self.0.remove();
    }

    /// How many ways to the medium are open: zero once a removal has reached every channel.
    pub fn ways_open(&self) -> usize {
        self.0.ways_open()
    }

    /// The medium has another size now. Requests are checked against it from the next turn of their
    /// channel on.
    pub fn resized(&self, block_count: u64) {
        self.0.resize(block_count);
    }

    /// Makes the medium `block_count` blocks long, and tells everybody. Blocks: what is under way past
    /// a new end is waited for. Not for a thread that turns channels of the device.
    ///
    /// # Errors
    ///
    /// If the medium cannot do that, the device has been removed, or what is past the new end does
    /// not become still; then it is as long as it was.
    pub fn set_size(&self, block_count: u64) -> Result<(), MediumError> {
        let done = Shared::set_size(&self.0, block_count);
        done.map_err(|text| MediumError::new(Blame::Caller, text))
    }

    /// Tells every holder what has happened to the medium.
    pub fn tell(&self, event: &Event) {
        self.0.tell(event);
    }

    /// What all channels have done, those that are closed too.
    pub fn statistics(&self) -> Statistics {
        self.0.statistics()
    }

    /// What each open channel has done, and who holds it.
    pub fn channel_statistics(&self) -> Vec<(ChannelId, String, Statistics)> {
        self.0.channel_statistics()
    }

    /// Switches the counting of latencies on or off, for all channels that are open and those to
    /// come.
    pub fn time_requests(&self, on: bool) {
        self.0.time(on);
    }

    /// Keeps `blocks` still: waits until no channel has a request there in flight, and lets none
    /// begin until the hold is dropped. Not for a thread that turns channels of the device: it asks
    /// [`hold`](Self::hold).
    ///
    /// # Errors
    ///
    /// If that takes longer than `at_most`: then nothing is held.
    pub fn quiesce(&self, blocks: Range<u64>, at_most: Span) -> Result<Hold, NotStill> {
        let hold = self.hold(blocks, None);
        hold.wait(at_most)?;
        Ok(hold)
    }

    /// The blocks that are closed to everyone, because the client of a channel has gone while its
    /// writes there were in flight: see [`Backend::fence_writes`](base::Backend::fence_writes).
    pub fn fenced(&self) -> Vec<Range<u64>> {
        self.0.fenced()
    }

    /// Begins to keep `blocks` still for all channels but `except`, and returns at once;
    /// [`Hold::is_still`] says when nobody is there any more. Holds that overlap are granted in their
    /// order.
    pub fn hold(&self, blocks: Range<u64>, except: Option<ChannelId>) -> Hold {
        Shared::hold(&self.0, blocks, except.map(|channel| channel.0))
    }
}

impl fmt::Debug for DeviceOptions {
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
