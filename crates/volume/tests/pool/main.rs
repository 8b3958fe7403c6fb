//! Pools of volumes over simulated devices, compared with a model. One test program, which is linked in a
//! few seconds where one for each file took a minute.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "../fixture/mod.rs"]
mod fixture;

mod checksums;
mod concurrency;
mod crash;
mod format;
mod grow;
mod inflate;
mod limits;
mod lost_writes;
mod metadata_damage;
mod model;
mod ownership;
mod parent_copy;
mod pool_full;
mod rescue;
mod stream;
mod thick_volumes;
