//! Tests of the block layer over drivers.

pub(crate) mod adapt;
mod all_layers;
mod open;
mod qos;
pub(crate) mod scheduled_device;
mod threads;

use tenmil_block::NamedDeviceType;

/// The device types of this crate, and others before them.
pub(crate) fn device_types_with<'a>(others: &[NamedDeviceType<'a>]) -> Vec<NamedDeviceType<'a>> {
    [others, crate::KINDS].concat()
}
