//! Block devices.
//!
//! A [`Bdev`] is the multi-queue layer over a block device: a name, claims and events, a [`Channel`] with
//! tags for each thread, and a [`QueueMap`] from channels to hardware contexts.
//! The devices below it, which also store the blocks of emulated SSDs, implement [`tenmil_base::BlockDevice`] and
//! open I/O channels.
//!
//! | device | what a request does | use |
//! |---|---|---|
//! | [`NullDevice`] | completes; no data moves | overhead of everything else |
//! | [`RamDevice`] | moves bytes to and from memory | benchmarks that move data, tests |
//! | [`FileDevice`] | goes to a file, with direct I/O where possible | persistent data |
//! | [`LatencyModel`] | goes to another device with the latency of a named SSD model | latency under load |
//! | [`Delay`] | goes to another device and completes later, by mean and p99 | added latency |
//! | [`Fault`] | goes to another device and fails by rules | injected errors, hangs and corruption |
//! | [`Split`] | goes to a partition of another device | several devices from one |
//! | [`Stripe`] | is distributed over several devices, chunk by chunk | one device from several |
//! | [`Mirror`] | writes go to all legs, reads to one | data that survives the loss of a device |
//! | [`pool`] | is mapped; shared blocks are copied on write | thin volumes, snapshots, clones |
//!
//! Wrappers are generic over the channel below. An [`AdaptedChannel`] splits or emulates requests that a
//! device does not support, a [`Scheduler`] orders requests, and a [`QosLimiter`] limits the IOPS and
//! bandwidth of all channels of a device.
//! [`AdaptedDevice`] wraps every channel of a device in an [`AdaptedChannel`].
//!
//! A device is named by a [`uri::Uri`], which describes the device stack, and is opened by an [`Opener`].
//! Existing data that a run did not create is detected and protected by [`overwrite`].

#![forbid(unsafe_code)]

mod adapt;
mod bdev;
mod channel;
mod context;
mod devices;
mod existing_data;
mod fence;
pub mod fuzz;
pub mod identity;
mod internal_token;
mod io_stats;
mod map;
mod open;
pub mod overwrite;
mod qos;
pub mod quantity;
mod quiesce;
mod schedule;
pub mod uri;

pub use adapt::{
    AdaptOptions, AdaptedChannel, AdaptedDevice, Alignment, BounceBuffers, BounceMemory,
    Deallocate, FuaMode, QuiesceLock, RangeLock,
};
pub use bdev::{
    Bdev, BdevDescriptor, BdevOptions, ChannelId, Claim, ClaimConflict, ClaimError, Event, Holder,
    Mode, Uuid, UuidParseError, refresh_sizes,
};
pub use channel::Channel;
pub use devices::delay::{Delay, DelayControl, Delays, LatencySpec};
pub use devices::fault::{Fault, FaultControl, FaultEffect, FaultTrigger, Rule};
pub use devices::file::{FileDevice, FileDeviceOptions, LostWrite, hear_of_lost_writes};
pub use devices::mirror::{self, Mirror};
pub use devices::model::LatencyModel;
pub use devices::null::NullDevice;
pub use devices::pool;
pub use devices::profile::{Latency, ModelProfile, PROFILES, Rates};
pub use devices::ram::{RamDevice, open_ram_filled};
pub use devices::split::Split;
pub use devices::stripe::Stripe;
pub use existing_data::ExistingData;
pub use io_stats::{DepthSamples, IoStats, OpStats};
pub use map::{PER_CHANNEL, QueueMap};
pub use open::{DeviceControl, DeviceType, OpenedDevice, Opener};
pub use qos::{
    FLOOR_PERCENT, IoClass, QosLimiter, QosLimits, RECHECK_INTERVAL, RateLimit, RateLimitedChannel,
};
pub use quiesce::{QuiesceTimeout, QuiescedRange};
pub use schedule::{Deadline, DeadlineOptions, Merge, Scheduler, StreamBatch, StreamBatchOptions};

use tenmil_base::Error;

impl From<overwrite::OverwriteDenied> for Error {
    fn from(not: overwrite::OverwriteDenied) -> Self {
        Self::usage(not.text).with_hint(not.remedy)
    }
}
