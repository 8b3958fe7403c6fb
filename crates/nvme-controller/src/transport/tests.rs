//! A complete controller between a fake host and a fake block device.

mod admin;
mod bringup;
mod io;
mod reset;
mod rig;
mod signals;
mod sleep;
