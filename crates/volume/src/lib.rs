//! Logical volumes: a store that always opens, volumes thin and thick, snapshots and clones. No I/O.
//!
//! [`NewStore`] says what makes a store, [`Opening`] which blocks have to be read to open one. An
//! open [`Store`] is asked things and says what the device is to do; [`Check`] walks a whole store.
//! What lies where on the device is drawn in docs/volume-format.md.
//!
//! Nothing that was read from a device is believed. Every block of metadata says what it is, where
//! it lies, whose it is and which transaction wrote it, and whatever points to it says so too; a
//! block for which that does not hold is a [`Damage`] that names it.

#![forbid(unsafe_code)]

mod account;
mod books;
mod cache;
mod check;
mod cost;
pub mod devices;
mod difference;
mod edit;
mod error;
mod fence;
pub mod format;
pub mod fuzz;
mod layout;
mod level;
mod open;
mod parent;
mod plan;
mod ranges;
pub mod rescue;
mod space;
mod store;
pub mod stream;
mod sums;
mod thick;
mod tree;
mod volumes;

pub use account::Account;
pub use check::{Check, Counted, Finding, Report};
pub use error::{Damage, Flaw, StoreError};
pub use fence::{Claim, InjectedBugs, Owner, Slots};
pub use layout::Layout;
pub use level::{Fill, Notice, THRESHOLDS};
pub use open::{NewStore, Opened, Opening, Step};
pub use parent::Parent;
pub use store::{Action, Answer, Ask, End, Run, Store, Usage};
pub use sums::checksum;
pub use volumes::{Change, VOLUMES_MAX, VolumeInfo};
