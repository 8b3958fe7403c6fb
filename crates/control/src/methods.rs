//! The rows of the table. A new method is a row here, in the group of what it is about.

mod about;
mod copying;
mod devices;
mod environment;
mod exports;
mod files;
mod mirrors;
mod paths;
mod process;
mod queues;
mod reactors;
mod scheduler;
mod stores;
mod volumes;

pub use copying::Copying;
pub use devices::Devices;
pub use exports::Exports;
pub use paths::{DevicePaths, PathNews, Paths};
pub use process::Process;
pub use queues::Queues;
pub use reactors::{Reactors, Relay, Running};
pub use scheduler::Balancing;

use crate::event::EventKind;
use crate::method::Table;

/// Every method that a tenmil process may have.
pub static TABLE: Table = Table::new(
    &[
        about::METHODS,
        process::METHODS,
        environment::METHODS,
        reactors::METHODS,
        scheduler::METHODS,
        exports::METHODS,
        devices::METHODS,
        copying::METHODS,
        queues::METHODS,
        paths::METHODS,
        volumes::METHODS,
    ],
    &[
        &EventKind::COMMON,
        reactors::EVENTS,
        exports::EVENTS,
        queues::EVENTS,
        paths::EVENTS,
        stores::EVENTS,
        files::EVENTS,
        mirrors::EVENTS,
        crate::orders::EVENTS,
    ],
);

/// Those whose answers depend neither on the machine nor on the moment: what a fuzzer calls.
pub(crate) static SAME_EVERYWHERE: Table = Table::new(
    &[
        about::METHODS,
        process::METHODS,
        reactors::METHODS,
        scheduler::METHODS,
        exports::METHODS,
        devices::METHODS,
        copying::METHODS,
    ],
    &[&EventKind::COMMON, reactors::EVENTS, exports::EVENTS],
);

#[cfg(test)]
mod tests;
