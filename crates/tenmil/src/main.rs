//! The program `tenmil`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tenmil_linux::fd_table::reserve_fds();
    tenmil::cli::run(std::env::args_os(), &tenmil::cli::Engines::real())
}
