//! Logical volume engine without I/O: a pool that always opens, thin and thick volumes, snapshots and
//! clones.
//!
//! [`PoolConfig`] describes a new pool, [`Opening`] the blocks to read to open one. An open [`Pool`]
//! receives requests and returns the I/O that the device has to do; [`Check`] verifies a whole pool. The
//! on-disk format is drawn in docs/developer/volume-format.md.
//!
//! Everything read from a device is checked. Every metadata block contains its kind, address, owner and
//! transaction, and so does every reference to it; a block that does not match is reported as a
//! [`Corruption`] that identifies it.

#![forbid(unsafe_code)]

mod cache;
mod capacity;
mod check;
mod checksums;
mod commit_cost;
pub mod devices;
mod diff;
mod edit;
mod error;
mod fence;
pub mod format;
pub mod fuzz;
mod layout;
mod mapping;
mod metadata;
pub mod mirror;
mod open;
mod page_map;
mod parent;
mod pool;
mod ranges;
pub mod rescue;
mod space_map;
pub mod stream;
mod thick;
mod tree;
mod usage;
mod volumes;

pub use capacity::{CapacityNotice, CapacityState, THRESHOLDS};
pub use check::{Check, CountedUsage, Finding, Report};
pub use checksums::checksum;
pub use error::{Corruption, CorruptionKind, PoolError};
pub use fence::{Claim, InjectedBugs, Owner, Slots};
pub use layout::Layout;
pub use open::{Opened, Opening, PoolConfig, Step};
pub use parent::ParentInfo;
pub use pool::{ActionResult, DeviceAction, Pool, PoolRequest, PoolResponse, PoolUsage, VolumeRun};
pub use usage::SpaceUsage;
pub use volumes::{VOLUMES_MAX, VolumeInfo, VolumeOp};
