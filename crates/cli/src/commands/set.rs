//! `tenmil set`: calls a `set` method of a running process.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use tenmil_rpc::MethodKind;

use super::get::call_method;
use super::rpc_endpoint::ProcessSelector;
use super::write_stdout;
use tenmil_base::Error;

/// Change a setting of a running tenmil process, and print its new state.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SetArguments {
    /// Method to call
    #[arg(value_name = "NAME")]
    name: String,

    /// Parameters of the method
    #[arg(value_name = "NAME=VALUE")]
    parameters: Vec<String>,

    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil set scheduler policy=dynamic
  tenmil set export_limits iops=5000

`tenmil get` lists what can be set; `tenmil get --markdown` describes it.";

/// Calls the method and prints its result.
pub(super) fn run_set(arguments: &SetArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let SetArguments { name, parameters, process, json } = arguments;
    write_stdout(out, &call_method(MethodKind::Set, name, parameters, process, *json)?)?;
    Ok(ExitCode::SUCCESS)
}
