//! The program `tenmil-csi`: a driver of the Container Storage Interface for volumes of a tenmil pool.
//!
//! ```text
//!   orchestrator ─gRPC─▶ controller ─API─▶ tenmil serve: pool, subsystems, hosts
//!                └─────▶ node ─▶ nvme-tcp of the kernel, or ublk ◀──NVMe/TCP──┘
//! ```
//!
//! | start reading at | for |
//! |---|---|
//! | `service.rs` | the methods, by path |
//! | `controller.rs` | volumes, snapshots and exports of the storage server |
//! | `node.rs` | devices, file systems and mounts |
//! | `grpc.rs`, `messages.rs` | the protocol |
//!
//! Controller and node decide over two traits, `StorageApi` and `NodeSystem`, so that tests cut every call after
//! each step.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_methods,
    reason = "a program on the top layer: files, processes and time are real"
)]

mod api_client;
mod attachment;
mod capabilities;
mod connection;
mod controller;
mod grpc;
mod grpc_client;
mod linux_node;
mod messages;
mod names;
mod node;
mod node_system;
mod options;
mod parameters;
mod process_run;
mod self_test;
mod service;
mod status;
mod storage_api;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tenmil_base::Error;
use tenmil_linux::signal::{is_stop_requested, request_stop_on_sigint_or_sigterm};

use crate::options::DriverOptions;

/// Largest number of calls that are executed at a time; the others wait.
const CALLS_MAX: usize = 64;
/// Longest time from a signal to the end.
const STOP_CHECK_EVERY: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    let options = DriverOptions::parse();
    let ended = match &options.self_test {
        Some(directory) => options
            .socket_path()
            .and_then(|path| self_test::run_self_test(&path, directory, options.seed)),
        None => run(&options),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tenmil-csi: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("{hint}");
            }
            ExitCode::from(error.category().exit_code())
        }
    }
}

/// Serves until SIGTERM. Calls in progress end with the process: each can be interrupted anywhere.
fn run(options: &DriverOptions) -> Result<(), Error> {
    let services = options.services()?;
    let path = options.socket_path()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(CALLS_MAX)
        .build()
        .map_err(|error| Error::environment(format!("start the runtime: {error}")))?;
    let ended = runtime.block_on(async {
        let failed = |error| Error::environment(format!("listen at {}: {error}", path.display()));
        let listener = grpc::bind_socket(&path).map_err(failed)?;
        request_stop_on_sigint_or_sigterm().map_err(failed)?;
        println!("ready {}", path.display());
        tokio::select! {
            () = grpc::serve_grpc(listener, Arc::new(services)) => {}
            () = stop_requested() => {}
        }
        Ok(())
    });
    runtime.shutdown_background();
    // Another process may have replaced it; then it has gone already.
    let _ = std::fs::remove_file(&path);
    ended
}

/// Ends after SIGINT or SIGTERM.
async fn stop_requested() {
    while !is_stop_requested() {
        tokio::time::sleep(STOP_CHECK_EVERY).await;
    }
}
