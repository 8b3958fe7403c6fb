//! `tenmil identify`.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;

use super::{Engines, write_out};
use crate::identify::{Document, interrogate, show};
use crate::{EmuSpec, Refused};

/// Ask an SSD what it is, and decode all it answers: registers, Identify, log pages, features.
///
/// Nothing is changed by asking; outstanding events stay outstanding.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct IdentifyArguments {
    /// One SSD, such as emu:null
    #[arg(value_name = "URI", value_parser = parse_uri)]
    uri: EmuSpec,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Show fields that are zero too
    #[arg(long)]
    all: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil identify emu:null
  tenmil identify emu:null --json | jq .controller.identify.mn";

fn parse_uri(text: &str) -> Result<EmuSpec, Refused> {
    let spec: EmuSpec = text.parse()?;
    match spec.count {
        1 => Ok(spec),
        count => Err(Refused::caller(format!("{text}: {count} SSDs are named, expected one"))),
    }
}

/// Asks and prints.
pub(super) fn run(
    arguments: &IdentifyArguments,
    engines: &Engines,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let mut document = Document::default();
    (engines.identify)(&arguments.uri, &mut |controller| {
        document = interrogate(controller)?;
        Ok(())
    })?;
    let text =
        if arguments.json { show::json(&document) } else { show::text(&document, arguments.all) };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}
