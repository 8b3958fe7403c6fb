//! The block layer: devices with names and claims, channels, queue maps, schedulers, limits.
//!
//! A [`Bdev`] is the multi-queue layer over a block device: a name, claims and events, a [`Channel`] with
//! tags for each thread, and a [`QueueMap`] from channels to hardware contexts.
//! The devices below it implement [`tenmil_base::BlockDevice`] and open I/O channels.
//!
//! An [`AdaptedChannel`] splits or emulates requests that a device does not support, a [`IoScheduler`] orders
//! requests, and a [`QosLimiter`] limits the IOPS and bandwidth of all channels of a device.
//! [`AdaptedDevice`] wraps every channel of a device in an [`AdaptedChannel`].
//!
//! A device is named by a [`uri::Uri`], which describes the device stack, and is opened by an [`Opener`],
//! whose table of [device types](DeviceType) is an argument.
//! Existing data that a run did not create is detected and protected by [`overwrite`].

#![forbid(unsafe_code)]

mod adapt;
mod bdev;
mod channel;
mod completion_queue;
mod context;
pub mod device_identity;
mod existing_data;
pub mod fuzz;
mod internal_token;
mod open;
pub mod overwrite;
mod qos;
pub mod quantity_parser;
mod queue_map;
mod quiesce;
mod scheduler;
mod segment_cursor;
pub mod uri;
mod write_fence;

pub use adapt::{
    AdaptationOptions, AdaptedChannel, AdaptedDevice, BounceBufferAllocator, BounceBuffers,
    DeallocateEmulation, FuaMode, MemoryAlignment, QuiesceRangeLock, RangeLock,
};
pub use bdev::{
    Bdev, BdevDescriptor, BdevEvent, BdevOptions, ChannelId, ChannelMode, Claim, ClaimConflict,
    ClaimError, Holder, Uuid, UuidParseError, refresh_sizes, remove_failed,
};
pub use channel::Channel;
pub use completion_queue::CompletionQueue;
pub use existing_data::ExistingData;
pub use open::{
    BLOCK_DEFAULT, DeviceControl, DeviceType, NamedDeviceType, OpenedDevice, Opener,
    join_device_types, whole_block_count,
};
pub use qos::{
    IoClass, IoDirection, MINIMUM_PERCENT, QosLimiter, QosLimits, RECHECK_INTERVAL, RateGate,
    RateLimit, RateLimitedChannel,
};
pub use queue_map::{PER_CHANNEL, QueueMap};
pub use quiesce::{QuiesceTimeout, QuiescedRange};
pub use scheduler::{
    DeadlineOptions, DeadlineScheduler, IoScheduler, MergeScheduler, StreamBatchOptions,
    StreamBatchScheduler,
};
pub use segment_cursor::SegmentCursor;
pub use tenmil_base::{IoStats, OperationStats, QueueDepthSamples};

use tenmil_base::Error;

impl From<overwrite::OverwriteDenied> for Error {
    fn from(not: overwrite::OverwriteDenied) -> Self {
        Self::usage(not.text).with_hint(not.remedy)
    }
}
