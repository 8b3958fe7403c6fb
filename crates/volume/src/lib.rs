//! Logical volume engine without I/O: a pool that always opens, thin and thick volumes, snapshots and
//! clones.
//!
//! [`PoolConfig`] describes a new pool, [`PoolOpening`] the blocks to read to open one. An open [`Pool`]
//! receives requests and returns the I/O that the device has to do; [`ConsistencyCheck`] verifies a whole pool. The
//! on-disk format is drawn in docs/developer/volume-format.md.
//!
//! Everything read from a device is checked. Every metadata block contains its kind, address, owner and
//! transaction, and so does every reference to it; a block that does not match is reported as a
//! [`Corruption`] that identifies it.

#![forbid(unsafe_code)]

mod capacity_monitor;
mod checksums;
mod commit_cost;
mod consistency_check;
pub mod device_table;
mod error;
pub mod format;
pub mod fuzz;
mod mapping;
mod metadata;
pub mod mirror;
mod on_disk_layout;
mod open;
mod ownership;
mod page_cache;
mod page_map;
mod parent;
mod pool;
mod ranges;
pub mod rescue;
pub mod snapshot_stream;
mod space_map;
mod space_usage;
mod thick;
mod tree;
mod tree_edit;
mod volume_catalog;
mod volume_diff;

pub use capacity_monitor::{CapacityNotice, CapacityState, THRESHOLDS};
pub use checksums::block_checksum;
pub use consistency_check::{CheckFinding, CheckReport, ConsistencyCheck, CountedUsage};
pub use error::{Corruption, CorruptionKind, PoolError};
pub use on_disk_layout::Layout;
pub use open::{CreateStep, OpenedPool, PoolConfig, PoolOpening};
pub use ownership::{ClaimCondition, InjectedBugs, PoolOwner, SuperblockSlots};
pub use parent::ParentInfo;
pub use pool::{ActionResult, DeviceAction, Pool, PoolRequest, PoolResponse, PoolUsage, VolumeRun};
pub use space_usage::SpaceUsage;
pub use volume_catalog::{SNAPSHOTS_MAX, SnapshotMember, VOLUMES_MAX, VolumeInfo, VolumeOp};
