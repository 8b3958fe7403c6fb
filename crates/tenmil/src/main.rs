//! The one executable.

use std::process::ExitCode;

fn main() -> ExitCode {
    tenmil::cli::run(std::env::args_os(), &tenmil::cli::Engines::real())
}
