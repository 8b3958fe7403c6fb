//! `tenmil timeouts`: prints the reconnect and failover timeouts.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::write_stdout;
use tenmil_base::Error;
use tenmil_devices::tcp::timeout_rows_of_uri;

/// Print the timeouts for reconnect and failover of a device: keep alive, reconnect delay, fast I/O
/// fail and controller loss.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct TimeoutsArguments {
    /// Device to print the timeouts of; without it, the defaults
    #[arg(value_name = "URI")]
    uri: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil timeouts
  tenmil timeouts 'tcp://192.0.2.7/nqn.2024-01.example:disk?ctrl-loss-timeout=60s'";

/// Prints the table of timeouts.
pub(super) fn run_timeouts(
    arguments: &TimeoutsArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let rows = timeout_rows_of_uri(arguments.uri.as_deref())?;
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
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}
