//! `tenmil apply` and `tenmil reload`: the whole configuration of a running target.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};
use tenmil_base::Error;

use super::live_objects::{CHANGE_TIMEOUT, change_text, check_whole};
use super::rpc_endpoint::{ProcessSelector, command_error, connect_to_process};
use super::write_stdout;

/// Arguments of `apply`.
#[derive(Debug, Args)]
#[command(after_help = APPLY_EXAMPLES)]
pub(super) struct ApplyArguments {
    /// Configuration to apply
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Check the file and print the difference, and change nothing. Devices are not opened and
    /// addresses not bound
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `reload`.
#[derive(Debug, Args)]
#[command(after_help = RELOAD_EXAMPLES)]
pub(super) struct ReloadArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const APPLY_EXAMPLES: &str = "\
Lines begin with + for what is added, - for what is removed, ~ for what is changed. Everything is
applied or nothing; what is equal in both is not touched. The file of `serve --config` gets the text.

Examples:
  tenmil apply new.toml --dry-run    prints the difference
  tenmil apply new.toml              makes it so";

const RELOAD_EXAMPLES: &str = "\
Examples:
  tenmil reload               applies the file of `serve --config` again, as SIGHUP does
  tenmil reload --pid 4711    that of one of several processes";

/// Runs `apply`.
pub(super) fn run_apply(
    arguments: &ApplyArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let ApplyArguments { file, dry_run, process, json } = arguments;
    let shown = file.display();
    let text = tenmil_linux::storage_file::read_text(file)
        .map_err(|error| Error::usage(format!("apply: read {shown}: {error}")))?;
    // Checked here too, so that an error names the file, and nothing of a file with a key is sent.
    tenmil_rpc::target_config::TargetConfig::parse(&text)
        .map_err(|wrong| Error::usage(format!("apply: {shown}: {wrong}")))?;
    if text.is_empty() {
        let text = format!("apply: {shown} is empty, expected a configuration");
        return Err(Error::usage(text));
    }
    let parameters = [("text", Value::from(text)), ("dry_run", Value::from(*dry_run))];
    let answer = set_configuration(process, parameters)?;
    if *json {
        write_stdout(out, &format!("{answer:#}\n"))?;
        return check_whole(&answer);
    }
    let lines = answer["difference"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut text: String = lines.map(|line| format!("{line}\n")).collect();
    if text.is_empty() {
        text += "no difference\n";
    }
    if let Some(path) = answer["saved_to"].as_str() {
        text += &format!("saved to {path}\n");
    }
    write_stdout(out, &text)?;
    check_whole(&answer)
}

/// Runs `reload`.
pub(super) fn run_reload(
    arguments: &ReloadArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let answer = set_configuration(&arguments.process, [("reload", Value::from(true))])?;
    let text = match arguments.json {
        true => format!("{answer:#}\n"),
        false => {
            let text = change_text(&answer);
            let lines = text.lines().filter(|line| !line.starts_with("saved to "));
            lines.map(|line| format!("{line}\n")).collect()
        }
    };
    write_stdout(out, &text)?;
    check_whole(&answer)
}

fn set_configuration<const N: usize>(
    process: &ProcessSelector,
    parameters: [(&str, Value); N],
) -> Result<Value, Error> {
    let parameters: Map<String, Value> =
        parameters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let mut client = connect_to_process(process)?;
    client.call_method("set_configuration", parameters, CHANGE_TIMEOUT).map_err(command_error)
}
