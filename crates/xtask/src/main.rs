//! `cargo xtask`: work on this repository that is no part of tenmil.
//!
//! Exit codes: 0 if all went well, 1 if a check did not pass, 2 if it could not be made.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_methods,
    reason = "a program on the top floor: files and time are real"
)]

mod lab;

use std::process::ExitCode;

use clap::Parser;

/// Work on this repository that is no part of tenmil.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", after_help = "Example: cargo xtask lab linux-host")]
enum Task {
    /// Boot Linux in QEMU and let its NVMe drivers and targets meet tenmil.
    Lab(lab::Options),
}

fn main() -> ExitCode {
    let Task::Lab(options) = Task::parse();
    match lab::run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("lab: {why}");
            ExitCode::from(2)
        }
    }
}
