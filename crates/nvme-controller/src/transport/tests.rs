//! A complete controller between a fake host and a fake block device.

mod admin;
mod enable;
mod fixture;
mod interrupts;
mod io;
mod reset;
mod sleep;
