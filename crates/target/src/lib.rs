//! Services: what makes a block device one of somebody else's.
//!
//! For now there is one, [`nbd`]: any [`base::Medium`] over the NBD protocol.

#![forbid(unsafe_code)]

pub mod nbd;
