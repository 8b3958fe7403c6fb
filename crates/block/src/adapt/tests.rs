//! Adaptation to a device with narrow limits.

mod requests;
pub(crate) mod scripted_channel;
