//! The rows of the table. A new method is a row here, in the group of what it is about.

mod about;
mod environment;
mod process;

pub use process::Process;

use crate::event::EventKind;
use crate::method::Table;

/// Every method that a tenmil process may have.
pub static TABLE: Table =
    Table::new(&[about::METHODS, process::METHODS, environment::METHODS], &[&EventKind::COMMON]);

#[cfg(test)]
mod tests;
