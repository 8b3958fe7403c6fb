//! The program `tenmil`, run as a process. One test program: the linking of one for each file takes longer than
//! most of their tests. Tests that measure time or processor time are programs of their own, because those
//! of one program run at the same time.

#![allow(clippy::unwrap_used, reason = "a test may")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests start processes, make files and stand between sockets"
)]

mod async_events;
mod cli_errors;
mod completions_man;
mod control_tls;
mod copy;
mod diagnosis;
mod error_message_lint;
mod external_parents;
mod io_statistics;
mod keys;
mod live_configuration;
mod live_exports;
mod log;
mod migration;
mod nbd;
mod online_pool;
mod otlp;
mod owners;
mod pool;
mod rejected_commands_change_no_file;
mod remote;
mod reproduce;
mod reservations;
mod rpc_commands;
mod sandbox;
mod serve;
#[path = "../served/mod.rs"]
mod served;
mod service_manager;
mod takeover_fencing;
mod terminal;
mod top;
mod vfio_user;
mod vfio_user_peer;
mod vhost_user;
mod volumes;
