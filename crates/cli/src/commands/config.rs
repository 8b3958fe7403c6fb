//! `tenmil config`: configuration files, and the configuration of a running target.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};
use tenmil_linux::storage_file::{create_text, read_text, replace_text, replace_with_backup};
use tenmil_rpc::target_config::{TargetConfig, migrate_config};

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
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
    /// Print the configuration of a running target as the text of a file
    Show(ShowArguments),
    /// Save the configuration of a running target to a file
    Save(SaveArguments),
    /// Check a configuration file, without a process
    Check(CheckArguments),
    /// Convert a configuration file of version 0.1 to the present names of keys and parameters
    Migrate(MigrateArguments),
}

/// Arguments of `config show`.
#[derive(Debug, Args)]
struct ShowArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON: the path of its file and the text
    #[arg(long)]
    json: bool,
}

/// Arguments of `config save`.
#[derive(Debug, Args)]
struct SaveArguments {
    /// File to write; the file of `serve --config` always has the configuration already
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Replace the file if there is one
    #[arg(long)]
    overwrite: bool,

    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `config check`.
#[derive(Debug, Args)]
struct CheckArguments {
    /// File to check
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
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

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil config show                              what a running target serves
  tenmil config save /etc/tenmil/target.toml      makes a file of it, for `serve --config`
  tenmil config check /etc/tenmil/target.toml     the first error of a file, with its line
  tenmil config migrate /etc/tenmil/target.toml   converts, and keeps target.toml.bak
  tenmil config migrate --dry-run /etc/tenmil/target.toml";

/// Runs `config`.
pub(super) fn run_config(
    arguments: &ConfigArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let text = match &arguments.command {
        ConfigCommand::Show(arguments) => show(arguments)?,
        ConfigCommand::Save(arguments) => save(arguments)?,
        ConfigCommand::Check(arguments) => check(arguments)?,
        ConfigCommand::Migrate(arguments) => migrate(arguments)?,
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn show(arguments: &ShowArguments) -> Result<String, Error> {
    let answer = running_configuration(&arguments.process)?;
    Ok(match arguments.json {
        true => format!("{answer:#}\n"),
        false => answer["text"].as_str().unwrap_or_default().to_owned(),
    })
}

fn save(arguments: &SaveArguments) -> Result<String, Error> {
    let SaveArguments { file, overwrite, process, json } = arguments;
    let answer = running_configuration(process)?;
    let text = answer["text"].as_str().unwrap_or_default();
    let shown = file.display();
    if file.exists() {
        if !overwrite {
            let text = format!("config save: {shown} exists, expected no such file");
            return Err(Error::usage(text).with_hint("`--overwrite` replaces it"));
        }
        let former = read_file("save", file)?;
        replace_text(file, &former, text)
            .map_err(|error| Error::environment(format!("config save: {shown}: {error}")))?;
    } else {
        create_text(file, text)
            .map_err(|error| Error::environment(format!("config save: write {shown}: {error}")))?;
    }
    Ok(match json {
        true => format!("{:#}\n", json!({ "path": file.display().to_string() })),
        false => format!("saved to {shown}\n"),
    })
}

fn check(arguments: &CheckArguments) -> Result<String, Error> {
    let CheckArguments { file, json } = arguments;
    let shown = file.display();
    let config = TargetConfig::parse(&read_file("check", file)?)
        .map_err(|wrong| Error::usage(format!("config check: {shown}: {wrong}")))?;
    let (listeners, subsystems) = (config.listeners.len(), config.subsystems.len());
    let namespaces: usize = config.subsystems.iter().map(|one| one.namespaces.len()).sum();
    Ok(match json {
        true => {
            let counts = json!({
                "path": shown.to_string(),
                "listeners": listeners,
                "subsystems": subsystems,
                "namespaces": namespaces,
            });
            format!("{counts:#}\n")
        }
        false => format!(
            "{shown}: valid: listeners {listeners}, subsystems {subsystems}, namespaces {namespaces}\n"
        ),
    })
}

fn migrate(arguments: &MigrateArguments) -> Result<String, Error> {
    let MigrateArguments { file, dry_run, json } = arguments;
    let shown = file.display();
    let text = read_file("migrate", file)?;
    let migrated = migrate_config(&text)
        .map_err(|error| Error::usage(format!("config migrate: {shown}: {error}")))?;
    if !dry_run && !migrated.changes.is_empty() {
        replace_with_backup(file, migrated.text.as_bytes())
            .map_err(|error| Error::environment(format!("config migrate: {error}")))?;
    }
    Ok(if *json {
        let (text, changes) = (&migrated.text, &migrated.changes);
        format!("{:#}\n", json!({ "path": shown.to_string(), "changes": changes, "text": text }))
    } else if *dry_run {
        migrated.text
    } else if migrated.changes.is_empty() {
        format!("{shown}: up to date\n")
    } else {
        format!("{shown}: converted\n{}\n", migrated.changes.join("\n"))
    })
}

fn read_file(command: &str, file: &Path) -> Result<String, Error> {
    read_text(file).map_err(|error| {
        Error::usage(format!("config {command}: read {}: {error}", file.display()))
    })
}

fn running_configuration(process: &ProcessSelector) -> Result<Value, Error> {
    let mut client = connect_to_process(process)?;
    client.call_method("configuration", Map::new(), RESPONSE_TIMEOUT).map_err(command_error)
}
