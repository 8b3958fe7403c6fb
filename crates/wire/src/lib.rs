//! NVMe bytes to meaning and back.
//!
//! This crate holds no state and does no I/O. It knows what the bits of NVM Express Base 2.1 and
//! NVM Command Set 1.1 mean, and nothing about what to do with them.
//!
//! - [`Command`], [`Completion`] and [`Status`] are what travels in queues; [`admin`] and [`io`]
//!   give each command a structure of its own.
//! - [`register`] is what lies in a controller's BAR.
//! - [`fabrics`] is how a host reaches a controller over a network, [`tcp`] the units that travel on
//!   an NVMe/TCP connection, [`mod@nqn`] the names of hosts and subsystems.
//! - [`identify`] is what a controller and its namespaces say about themselves, [`log`] what has
//!   happened to them, [`feature`] how they are set; [`cache`] is what `tenmil serve` says beside that.
//! - [`mod@pointer`] and [`sgl`] say where data lie, [`protection`] how they are guarded, [`directive`]
//!   where they are to be placed.
//! - [`nbd`] and [`ublk`] are how others than NVMe hosts reach a block device.
//! - [`layout`] and [`typed`] declare structures and commands: each field once, with its place and
//!   its meaning. Accessors, the tables that print them and the tests that flip every bit of them
//!   come from that one declaration.
//! - [`fuzz`] gives any bytes to every parser.
#![forbid(unsafe_code)]

pub mod admin;
pub mod cache;
pub mod command;
pub mod completion;
pub mod derived_uuid;
pub mod directive;
#[doc(hidden)]
pub mod element;
pub mod fabrics;
pub mod feature;
pub mod fuzz;
pub mod identify;
pub mod io;
pub mod layout;
pub mod log;
pub mod nbd;
pub mod nqn;
pub mod opcode;
pub mod pointer;
pub mod protection;
pub mod register;
pub mod sgl;
pub mod status;
pub mod tcp;
pub mod typed;
pub mod ublk;

#[cfg(test)]
mod round_trip;
#[cfg(test)]
mod widths;

pub use command::{Command, DataPointer, Fuse};
pub use completion::Completion;
pub use layout::{Layout, Short};
pub use opcode::{AdminOpcode, FabricsType, IoOpcode, Transfer};
pub use status::Status;
pub use typed::Typed;

/// Visits every structure of the crate: what tests and the fuzzer do to one is done to all.
pub fn visit_layouts(visitor: &mut impl layout::Visitor) {
    admin::visit(visitor);
    directive::visit(visitor);
    fabrics::visit(visitor);
    feature::visit(visitor);
    feature::identity::visit(visitor);
    feature::media::visit(visitor);
    feature::power::visit(visitor);
    feature::queue::visit(visitor);
    identify::controller::visit(visitor);
    identify::limits::visit(visitor);
    identify::list::visit(visitor);
    identify::namespace::visit(visitor);
    identify::power::visit(visitor);
    identify::resource::visit(visitor);
    io::visit(visitor);
    io::copy::visit(visitor);
    io::dataset::visit(visitor);
    io::reservation::visit(visitor);
    log::ana::visit(visitor);
    log::discovery::visit(visitor);
    log::effects::visit(visitor);
    log::error::visit(visitor);
    log::event::visit(visitor);
    log::firmware::visit(visitor);
    log::health::visit(visitor);
    log::history::visit(visitor);
    log::lba::visit(visitor);
    log::sanitize::visit(visitor);
    log::self_test::visit(visitor);
    register::visit(visitor);
    tcp::pdu::visit(visitor);
}

/// Visits every command of the crate.
pub fn visit_commands(visitor: &mut impl typed::CommandVisitor) {
    admin::visit_commands(visitor);
    admin::subsystem::visit_commands(visitor);
    fabrics::visit_commands(visitor);
    io::visit_commands(visitor);
    io::copy::visit_commands(visitor);
    io::dataset::visit_commands(visitor);
    io::reservation::visit_commands(visitor);
}
