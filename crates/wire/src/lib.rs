//! NVMe wire formats: structures, commands and registers, encoded and decoded.
//!
//! This crate holds no state and does no I/O. It defines the meaning of the bits of NVM Express
//! Base 2.1 and NVM Command Set 1.1, not what to do with them.
//!
//! - [`Command`], [`Completion`] and [`Status`] are queue entries; [`admin`] and [`io`] define a
//!   structure for each command.
//! - [`register`] defines the controller registers in the BAR.
//! - [`fabrics`] defines the fabrics commands, [`tcp`] the PDUs of NVMe/TCP, [`mod@nqn`] the names
//!   of hosts and subsystems.
//! - [`identify`] defines the Identify data structures, [`log`] the log pages, [`feature`] the
//!   features; [`cache_instance`] is a vendor specific addition of `tenmil serve`.
//! - [`mod@prp`] and [`sgl`] describe data pointers, [`protection_information`] end-to-end protection
//!   information, [`directive`] directives and data placement.
//! - [`nbd`] and [`ublk`] define other protocols by which a block device is served.
//! - [`layout`] and [`typed`] declare structures and commands: each field once, with its position
//!   and meaning. Accessors, printed tables and the tests of every bit derive from that
//!   declaration.
//! - [`fuzz`] passes arbitrary bytes to every parser.
#![forbid(unsafe_code)]

pub mod admin;
pub mod cache_instance;
pub mod command;
pub mod completion;
pub mod derived_uuid;
pub mod directive;
pub mod fabrics;
pub mod feature;
#[doc(hidden)]
pub mod field_type;
pub mod fuzz;
pub mod identify;
pub mod io;
pub mod layout;
pub mod log;
pub mod nbd;
pub mod nqn;
pub mod opcode;
pub mod protection_information;
pub mod prp;
pub mod register;
pub mod sgl;
pub mod status;
pub mod tcp;
pub mod typed;
pub mod ublk;

#[cfg(test)]
mod field_width_tests;
#[cfg(test)]
mod round_trip_tests;

pub use command::{Command, DataPointer, Fuse};
pub use completion::Completion;
pub use layout::{Layout, TruncatedError};
pub use opcode::{AdminOpcode, FabricsType, IoOpcode, TransferDirection};
pub use status::Status;
pub use typed::TypedCommand;

/// Visits every structure of the crate, for tests and the fuzzer.
pub fn visit_layouts(visitor: &mut impl layout::LayoutVisitor) {
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
    log::error_information::visit(visitor);
    log::event::visit(visitor);
    log::firmware::visit(visitor);
    log::health::visit(visitor);
    log::persistent_events::visit(visitor);
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
