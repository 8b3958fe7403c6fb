//! `tenmil set`.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use control::Verb;

use super::get::ask;
use super::running::Whom;
use super::write_out;
use crate::Refused;

/// Change something in a running tenmil process, and print how it then is.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SetArguments {
    /// What to change
    #[arg(value_name = "NAME")]
    name: String,

    /// How it is to be
    #[arg(value_name = "NAME=VALUE")]
    parameters: Vec<String>,

    #[command(flatten)]
    whom: Whom,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil set scheduler policy=dynamic
  tenmil set export limit_iops=5000

`tenmil get` lists what can be set; docs/control.md describes it.";

/// Changes and prints.
pub(super) fn run(arguments: &SetArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let SetArguments { name, parameters, whom, json } = arguments;
    write_out(out, &ask(Verb::Set, name, parameters, *whom, *json)?)?;
    Ok(ExitCode::SUCCESS)
}
