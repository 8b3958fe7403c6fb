//! `tenmil config`: configuration files.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tenmil_linux::storage_file::replace_with_backup;
use tenmil_rpc::target_config::migrate_config;

use super::write_stdout;
use tenmil_base::Error;

/// Arguments of `config`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct ConfigArguments {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Convert a configuration file of version 0.1 to the present names of keys and parameters
    Migrate(MigrateArguments),
}

/// Arguments of `config migrate`.
#[derive(Debug, Args)]
struct MigrateArguments {
    /// File to convert; the original is kept as FILE.bak
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print the converted file and change nothing
    #[arg(long)]
    dry_run: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil config migrate /etc/tenmil/target.toml            converts, and keeps target.toml.bak
  tenmil config migrate --dry-run /etc/tenmil/target.toml  prints the result";

/// Runs `config`.
pub(super) fn run_config(
    arguments: &ConfigArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let ConfigCommand::Migrate(arguments) = &arguments.command;
    let file = arguments.file.as_path();
    let shown = file.display();
    let text = tenmil_linux::storage_file::read_text(file)
        .map_err(|error| Error::usage(format!("config migrate: read {shown}: {error}")))?;
    let migrated = migrate_config(&text)
        .map_err(|error| Error::usage(format!("config migrate: {shown}: {error}")))?;
    if arguments.dry_run {
        write_stdout(out, &migrated.text)?;
    } else if migrated.changes.is_empty() {
        write_stdout(out, &format!("{shown}: up to date\n"))?;
    } else {
        replace_with_backup(file, migrated.text.as_bytes())
            .map_err(|error| Error::environment(format!("config migrate: {error}")))?;
        write_stdout(out, &format!("{shown}: converted\n{}\n", migrated.changes.join("\n")))?;
    }
    Ok(ExitCode::SUCCESS)
}
