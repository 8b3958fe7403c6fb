//! Adaptation to a device with narrow limits.

mod order;
pub(crate) mod scripted;
