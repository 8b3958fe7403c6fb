//! Rows of the method table, grouped by object.

mod control_credentials;
mod copy;
mod environment;
mod file_events;
mod flight_recorder;
mod gateway_group;
pub(crate) mod io_statistics;
mod limits;
mod live_configuration;
mod method_list;
mod mirror_events;
pub(crate) mod mirrors_and_delays;
mod nbd_exports;
mod nvme_connections;
mod paths;
mod pool_events;
mod process;
pub(crate) mod reactors;
mod sandbox;
mod scheduler;
mod slow_io;
mod target_configuration;
#[cfg(test)]
mod test_calls;
mod volumes;

pub use copy::CopyProgress;
pub use io_statistics::{ServedDevice, ServedDevices};
pub use limits::RateLimits;
pub use mirrors_and_delays::DeviceControls;
pub use nbd_exports::NbdExports;
pub use nvme_connections::NvmeConnections;
pub use paths::subscribe_path_events;
pub use process::ProgramInfo;
pub use reactors::{EventRelay, ReactorsSource};
pub use scheduler::SchedulerSource;
pub use slow_io::parse_slow_io;
pub use target_configuration::{
    ConfigurationAction, ConfigurationChange, ConfigurationRequest, ServedConfiguration,
    ServedNamespace, TargetConfiguration,
};

use crate::event::EventKind;
use crate::method::MethodRegistry;

/// All methods of a tenmil process.
pub static TABLE: MethodRegistry = MethodRegistry::new(
    &[
        method_list::METHODS,
        process::METHODS,
        environment::METHODS,
        sandbox::METHODS,
        reactors::METHODS,
        flight_recorder::METHODS,
        scheduler::METHODS,
        nbd_exports::METHODS,
        io_statistics::METHODS,
        limits::METHODS,
        mirrors_and_delays::METHODS,
        copy::METHODS,
        nvme_connections::METHODS,
        slow_io::METHODS,
        target_configuration::METHODS,
        live_configuration::METHODS,
        gateway_group::METHODS,
        paths::METHODS,
        volumes::METHODS,
    ],
    &[
        &EventKind::COMMON,
        reactors::EVENTS,
        sandbox::EVENTS,
        nbd_exports::EVENTS,
        nvme_connections::EVENTS,
        slow_io::EVENTS,
        target_configuration::EVENTS,
        paths::EVENTS,
        pool_events::EVENTS,
        control_credentials::EVENTS,
        file_events::EVENTS,
        mirror_events::EVENTS,
        crate::pool_commands::EVENTS,
    ],
);

/// Methods whose results depend neither on the machine nor on time, for the fuzzer.
pub(crate) static SAME_EVERYWHERE: MethodRegistry = MethodRegistry::new(
    &[
        method_list::METHODS,
        process::METHODS,
        reactors::METHODS,
        scheduler::METHODS,
        nbd_exports::METHODS,
        mirrors_and_delays::METHODS,
        copy::METHODS,
    ],
    &[&EventKind::COMMON, reactors::EVENTS, nbd_exports::EVENTS],
);

#[cfg(test)]
mod tests;
