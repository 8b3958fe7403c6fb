//! Rows of the method table, grouped by object.

mod copy;
pub(crate) mod devices;
mod environment;
mod exports;
mod files;
mod list;
mod mirrors;
mod nvme_connections;
mod paths;
mod pool_events;
mod process;
mod reactors;
mod scheduler;
mod volumes;

pub use copy::CopyProgress;
pub use devices::Devices;
pub use exports::Exports;
pub use nvme_connections::NvmeConnections;
pub use paths::announce_path_changes;
pub use process::ProgramInfo;
pub use reactors::{EventRelay, Reactors};
pub use scheduler::SchedulerSource;

use crate::event::EventKind;
use crate::method::MethodRegistry;

/// All methods of a tenmil process.
pub static TABLE: MethodRegistry = MethodRegistry::new(
    &[
        list::METHODS,
        process::METHODS,
        environment::METHODS,
        reactors::METHODS,
        scheduler::METHODS,
        exports::METHODS,
        devices::METHODS,
        copy::METHODS,
        nvme_connections::METHODS,
        paths::METHODS,
        volumes::METHODS,
    ],
    &[
        &EventKind::COMMON,
        reactors::EVENTS,
        exports::EVENTS,
        nvme_connections::EVENTS,
        paths::EVENTS,
        pool_events::EVENTS,
        files::EVENTS,
        mirrors::EVENTS,
        crate::pool_commands::EVENTS,
    ],
);

/// Methods whose results depend neither on the machine nor on time, for the fuzzer.
pub(crate) static SAME_EVERYWHERE: MethodRegistry = MethodRegistry::new(
    &[
        list::METHODS,
        process::METHODS,
        reactors::METHODS,
        scheduler::METHODS,
        exports::METHODS,
        devices::METHODS,
        copy::METHODS,
    ],
    &[&EventKind::COMMON, reactors::EVENTS, exports::EVENTS],
);

#[cfg(test)]
mod tests;
