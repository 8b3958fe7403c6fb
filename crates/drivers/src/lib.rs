//! Block device drivers.
//!
//! | device | what a request does | use |
//! |---|---|---|
//! | [`NullDevice`] | completes; no data moves | overhead of everything else |
//! | [`RamDevice`] | moves bytes to and from memory | benchmarks that move data, tests |
//! | [`FileDevice`] | goes to a file, with direct I/O where possible | persistent data |
//! | [`ModeledLatencyDevice`] | goes to another device with the latency of a named SSD model | latency under load |
//! | [`DelayDevice`] | goes to another device and completes later, by mean and p99 | added latency |
//! | [`FaultDevice`] | goes to another device and fails by rules | injected errors, hangs and corruption |
//! | [`SplitDevice`] | goes to a partition of another device | several devices from one |
//! | [`StripeDevice`] | is distributed over several devices, chunk by chunk | one device from several |
//! | [`Mirror`] | writes go to all legs, reads to one | data that survives the loss of a device |
//! | [`pool`] | is mapped; shared blocks are copied on write | thin volumes, snapshots, clones |
//!
//! Drivers that stack on others are generic over the channel below. [`KINDS`] is the argument that
//! makes an [`Opener`](tenmil_block::Opener) open them.

#![forbid(unsafe_code)]

mod bad_blocks;
mod block_bitmap;
mod combined_wake_source;
mod delay;
mod delayed_channel;
mod fault;
mod file;
pub mod fuzz;
mod latency_model;
mod lease;
pub mod mirror;
mod model_profile;
mod multi_leg_channel;
mod null;
mod owner_identity;
mod owner_reservations;
pub mod pool;
mod ram;
mod request_validation;
mod split;
mod stripe;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod tests;

use tenmil_block::NamedDeviceType;

pub use delay::{DelayControl, DelayDevice, DelaySettings, LatencySpec};
pub use fault::{FaultControl, FaultDevice, FaultEffect, FaultRule, FaultTrigger};
pub use file::{FileDevice, FileDeviceOptions, LostWrite, subscribe_lost_writes};
pub use latency_model::ModeledLatencyDevice;
pub use lease::{LeaseEnd, LeasedDevice, UnopenedDevice};
pub use mirror::Mirror;
pub use model_profile::{LatencyDistribution, MaximumRates, ModelProfile, PROFILES};
pub use null::NullDevice;
pub use ram::{RamDevice, open_ram_filled};
pub use split::SplitDevice;
pub use stripe::StripeDevice;

/// The device types of this crate, by URI scheme.
pub const KINDS: &[NamedDeviceType<'static>] = &[
    ("null", &null::open),
    ("ram", &ram::open),
    ("file", &file::open),
    ("model", &latency_model::open),
    ("delay", &delay::open),
    ("fault", &fault::open),
    ("split", &split::open),
    ("stripe", &stripe::open),
    ("mirror", &mirror::open),
    (pool::VolumeRef::SCHEME, &pool::open),
];
