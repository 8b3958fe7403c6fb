//! `tenmil man`: writes the manual pages.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_mangen::Man;

use super::report_file::ReportFile;
use super::write_stdout;
use tenmil_base::Error;

/// Write a manual page for tenmil and for each of its commands.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ManArguments {
    /// Existing directory to write to
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  tenmil man ~/.local/share/man/man1
  tenmil man . && man ./tenmil-serve.1";

/// Writes the pages and prints their number.
pub(super) fn run_man(
    arguments: &ManArguments,
    mut command: Command,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    // Derives the full names of subcommands (`tenmil-volume-create`).
    command.build();
    let mut count = 0;
    write_pages(&command, &arguments.directory, &mut count)?;
    write_stdout(out, &format!("{count} pages in {}\n", arguments.directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn write_pages(command: &Command, directory: &Path, count: &mut u32) -> Result<(), Error> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let path = directory.join(format!("{name}.1")).display().to_string();
    let file = ReportFile::open("man", &path)?;
    let mut page = Vec::new();
    Man::new(command.clone().name(name))
        .render(&mut page)
        .map_err(|error| Error::environment(format!("write {path}: {error}")))?;
    file.write_report(&String::from_utf8_lossy(&page))?;
    *count += 1;
    let inner = command.get_subcommands();
    let mut inner = inner.filter(|inner| !inner.is_hide_set() && inner.get_name() != "help");
    inner.try_for_each(|inner| write_pages(inner, directory, count))
}
