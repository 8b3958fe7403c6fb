//! Adaptation to a device with narrow limits.

mod compare_and_write;
mod random_requests;
pub(crate) mod strict_device;
