//! The media, and the parts they share.

pub(crate) mod file;
mod marks;
pub(crate) mod model;
pub(crate) mod null;
mod pieces;
pub(crate) mod profile;
pub(crate) mod ram;
mod range;
mod ready;

#[cfg(test)]
mod conformance;
