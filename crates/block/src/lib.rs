//! Block devices.
//!
//! A [`Device`] is the multi-queue layer over a medium: a name, claims and events, a [`Channel`] with
//! tags for each thread, and a [`QueueMap`] between channels and the medium. What it stands on, and
//! what emulated SSDs keep their blocks in, are the media, each a [`base::Medium`] that opens
//! channels.
//!
//! | medium | what a request does | for |
//! |---|---|---|
//! | [`Null`] | is answered; no data moves | the cost of everything else |
//! | [`Ram`] | moves bytes to and from memory | figures that move data, tests |
//! | [`FileMedium`] | goes to a file, direct where that can be done | data that stays |
//! | [`Model`] | goes to another medium and takes as long as a named device would | latency under load |
//! | [`Delay`] | goes to another medium and is answered later, by a mean and a p99 | slowness on demand |
//! | [`Fault`] | goes to another medium and goes wrong by rules | errors, hangs and lies on demand |
//! | [`Split`] | goes to a part of another medium | several devices out of one |
//! | [`Stripe`] | goes to several media, chunk by chunk in turn | one device out of several |
//! | [`Mirror`] | writes go to all of several media, reads to one | data that outlives a device |
//! | [`store`] | goes where a map says, and what is shared is left alone | thin volumes, snapshots, clones |
//!
//! Wrappers are generic over the backend below: a [`Shaper`] makes any request fit what a device can
//! do, a [`Scheduler`] decides in what order requests go, and a [`Limiter`] holds all channels of a
//! device to so many requests and bytes per second. [`Shaped`] puts a shaper on every channel.
//!
//! A device is named by a [`uri::Uri`], which says what stands on what, and opened by an
//! [`Opener`]. What lies there that a run did not create is looked at, and kept, by [`guard`].

#![forbid(unsafe_code)]

mod backend;
mod channel;
mod context;
mod device;
mod existing;
mod fence;
pub mod fuzz;
pub mod guard;
pub mod identity;
mod limit;
mod lock;
mod map;
mod open;
mod own;
pub mod quantity;
mod schedule;
mod shape;
mod statistics;
pub mod uri;

pub use backend::delay::{Delay, DelayHandle, Delays, Spread};
pub use backend::fault::{Effect, Fault, FaultHandle, Rule, When};
pub use backend::file::{FileMedium, FileMediumOptions, LostWrite, hear_of_lost_writes};
pub use backend::mirror::{self, Mirror};
pub use backend::model::Model;
pub use backend::null::Null;
pub use backend::profile::{Latency, PROFILES, Profile, Rates};
pub use backend::ram::{Ram, open_ram_filled};
pub use backend::split::Split;
pub use backend::store;
pub use backend::stripe::Stripe;
pub use channel::Channel;
pub use device::{
    ChannelId, Claim, ClaimRefused, Descriptor, Device, DeviceOptions, Event, Found, Holder, Mode,
    NotAUuid, Uuid, notice_sizes,
};
pub use existing::Existing;
pub use limit::{Caps, Class, FLOOR_PERCENT, LOOK_AGAIN, Limited, Limiter, Rate};
pub use lock::{Hold, NotStill};
pub use map::{PER_CHANNEL, QueueMap};
pub use open::{Handle, Kind, Opened, Opener};
pub use schedule::{Deadline, DeadlineOptions, Merge, Scheduler, StreamBatch, StreamBatchOptions};
pub use shape::{
    Alignment, BounceBuffers, BounceMemory, Deallocate, ForceUnitAccess, HoldLock, RangeLock,
    ShapeOptions, Shaped, Shaper,
};
pub use statistics::{DepthSamples, Done, Statistics};

use base::Blame;

/// A medium that could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumError {
    text: String,
    blame: Blame,
    hint: Option<String>,
}

impl MediumError {
    /// A line that says what was found and what was expected, and whose move it is.
    pub fn new(blame: Blame, text: impl Into<String>) -> Self {
        Self { text: text.into(), blame, hint: None }
    }

    /// The same, with a sentence that says what can be done.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same, and what was being done meanwhile, in front.
    #[must_use]
    pub fn during(self, what: impl std::fmt::Display) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// What can be done about it, if there is something.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        self.blame
    }
}

impl std::fmt::Display for MediumError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for MediumError {}

impl From<guard::NotAllowed> for MediumError {
    fn from(not: guard::NotAllowed) -> Self {
        Self::new(Blame::Caller, not.text).with_hint(not.remedy)
    }
}
