//! The media, and the parts they share.

pub(crate) mod delay;
mod exclusion;
pub(crate) mod fault;
pub(crate) mod file;
mod held;
mod joined;
mod legs;
mod lost;
mod marks;
pub mod mirror;
pub(crate) mod model;
pub(crate) mod null;
mod owned;
pub(crate) mod pieces;
pub(crate) mod profile;
pub(crate) mod ram;
mod range;
pub(crate) mod ready;
pub(crate) mod split;
pub mod store;
pub(crate) mod stripe;

#[cfg(test)]
pub(crate) mod conformance;
