//! `tenmil policy`.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::write_out;
use crate::Refused;
use crate::tcp::policy_of;

/// Print what is done about a peer that does not answer: detect, retry, fail fast, give up, and how
/// long each takes.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PolicyArguments {
    /// A device whose policy is wanted; without it, the defaults
    #[arg(value_name = "URI")]
    uri: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil policy
  tenmil policy 'tcp://192.0.2.7:4420/nqn.2024-01.example:disk?detect=2s&give-up=60s'";

/// Prints.
pub(super) fn run(arguments: &PolicyArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let rows = policy_of(arguments.uri.as_deref())?;
    let text = if arguments.json {
        let object: serde_json::Map<_, _> = rows
            .iter()
            .map(|row| {
                (
                    row.key.to_owned(),
                    json!({ "ms": row.span.ns / 1_000_000, "meaning": row.meaning }),
                )
            })
            .collect();
        format!("{:#}\n", serde_json::Value::Object(object))
    } else {
        let mut text = String::new();
        for row in rows {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:<10} {:>8}  {}", row.key, row.span.to_string(), row.meaning);
        }
        text
    };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}
