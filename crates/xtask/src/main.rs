//! `cargo xtask`: work on this repository that is no part of tenmil.
//!
//! Exit codes: 0 if all went well, 1 if a check did not pass, 2 if it could not be made.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_methods,
    reason = "a program on the top floor: files and time are real"
)]

mod api;
mod crash;
mod docs;
mod lab;
mod pgo;

use std::process::ExitCode;

use clap::Parser;

/// Work on this repository that is no part of tenmil.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", after_help = "Example: cargo xtask lab linux-host")]
enum Task {
    /// Boot Linux in QEMU and let its NVMe drivers and targets meet tenmil.
    Lab(lab::Options),
    /// Kill processes and cut the power of disks at their flushes, and look for data that were flushed.
    Crash(crash::Options),
    /// Build tenmil without link-time optimisation, with it and with a profile, and compare.
    Pgo(pgo::Options),
    /// List what the crate `tenmil` offers in docs/api.txt, or compare.
    Api(api::Options),
    /// Run every command in the documents as it is written.
    Docs(docs::Options),
}

fn main() -> ExitCode {
    let (name, ended) = match Task::parse() {
        Task::Lab(options) => ("lab", lab::run(&options)),
        Task::Crash(options) => ("crash", crash::run(&options)),
        Task::Pgo(options) => ("pgo", pgo::run(&options)),
        Task::Api(options) => ("api", api::run(&options)),
        Task::Docs(options) => ("docs", docs::run(&options)),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("{name}: {why}");
            ExitCode::from(2)
        }
    }
}
