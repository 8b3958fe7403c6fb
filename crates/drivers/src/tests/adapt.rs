//! Adaptation to a device with narrow limits.

mod device;
pub(crate) mod harsh;
mod random;
