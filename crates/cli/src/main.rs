//! The program `tenmil`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tenmil_linux::fd_table::reserve_fds();
    tenmil_cli::commands::install_panic_logging();
    tenmil_cli::commands::run_command_line(
        std::env::args_os(),
        &tenmil_cli::commands::CommandEngines::production(),
    )
}
