//! The one executable.

use std::process::ExitCode;

fn main() -> ExitCode {
    host::descriptors::make_room();
    tenmil::cli::run(std::env::args_os(), &tenmil::cli::Engines::real())
}
