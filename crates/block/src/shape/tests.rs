//! Shaping for a medium that can do little.

mod device;
pub(crate) mod harsh;
mod order;
mod random;
pub(crate) mod scripted;
