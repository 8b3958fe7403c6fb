//! Block device implementations and their shared parts.

mod bad_blocks;
mod block_bitmap;
mod combined_wake;
pub(crate) mod completion_queue;
pub(crate) mod delay;
mod delayed;
mod exclusion;
pub(crate) mod fault;
pub(crate) mod file;
pub mod mirror;
pub(crate) mod model;
mod multi_leg;
pub(crate) mod null;
mod owned;
pub mod pool;
pub(crate) mod profile;
pub(crate) mod ram;
pub(crate) mod segment_cursor;
pub(crate) mod split;
pub(crate) mod stripe;
mod validate;

#[cfg(test)]
pub(crate) mod conformance;
