//! Tests of the block layer over drivers.

pub(crate) mod adapt;
mod composed;
mod open;
mod qos;
pub(crate) mod schedule;
mod threads;

use tenmil_block::Kind;

/// The device types of this crate, and others before them.
pub(crate) fn kinds_with<'a>(others: &[Kind<'a>]) -> Vec<Kind<'a>> {
    [others, crate::KINDS].concat()
}
