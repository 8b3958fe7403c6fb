//! Block device drivers.
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
//! Drivers that stack on others are generic over the channel below. [`KINDS`] is the argument that
//! makes an [`Opener`](tenmil_block::Opener) open them.

#![forbid(unsafe_code)]

mod bad_blocks;
mod block_bitmap;
mod combined_wake;
mod delay;
mod delayed;
mod exclusion;
mod fault;
mod file;
pub mod fuzz;
pub mod mirror;
mod model;
mod multi_leg;
mod null;
mod owned;
pub mod pool;
mod profile;
mod ram;
mod split;
mod stripe;
mod validate;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod tests;

use tenmil_block::Kind;

pub use delay::{Delay, DelayControl, Delays, LatencySpec};
pub use fault::{Fault, FaultControl, FaultEffect, FaultTrigger, Rule};
pub use file::{FileDevice, FileDeviceOptions, LostWrite, subscribe_lost_writes};
pub use mirror::Mirror;
pub use model::LatencyModel;
pub use null::NullDevice;
pub use profile::{Latency, ModelProfile, PROFILES, Rates};
pub use ram::{RamDevice, open_ram_filled};
pub use split::Split;
pub use stripe::Stripe;

/// The device types of this crate, by URI scheme.
pub const KINDS: &[Kind<'static>] = &[
    ("null", &null::open),
    ("ram", &ram::open),
    ("file", &file::open),
    ("model", &model::open),
    ("delay", &delay::open),
    ("fault", &fault::open),
    ("split", &split::open),
    ("stripe", &stripe::open),
    ("mirror", &mirror::open),
    (pool::VolumeRef::SCHEME, &pool::open),
];
