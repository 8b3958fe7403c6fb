//! Adaptation to a device with narrow limits.

mod device;
pub(crate) mod harsh;
mod order;
mod random;
pub(crate) mod scripted;
