//! `tenmil events`: prints the events of a running process.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
use super::write_stdout;
use tenmil_block::quantity_parser::parse_time;

/// Print the events of a running tenmil process, one per line, until it exits or Ctrl-C.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct EventsArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// Print only events of this kind, may be repeated; `tenmil get --markdown` lists the kinds
    #[arg(long, value_name = "KIND")]
    kind: Vec<String>,

    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,

    /// Stop after this many events
    #[arg(long, value_name = "N", value_parser = super::perf::parse_integer::<u64>)]
    count: Option<u64>,

    /// Stop after this time, such as 10 or 500ms
    #[arg(short, long, value_name = "TIME", value_parser = parse_time)]
    time: Option<Span>,
}

const EXAMPLES: &str = "\
Examples:
  tenmil events --json | jq .text
  tenmil events --kind set --kind shutdown";

/// Longest wait for an event; Ctrl-C is checked between two waits.
const WAIT: Span = Span::from_ms(200);

/// Subscribes to the events and prints them.
pub(super) fn run_events(
    arguments: &EventsArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::on_kernel_clock();
    let end = arguments.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut client = connect_to_process(&arguments.process)?;
    let mut parameters = Map::new();
    if !arguments.kind.is_empty() {
        parameters.insert("kind".to_owned(), arguments.kind.clone().into());
    }
    client.call_method("events", parameters, RESPONSE_TIMEOUT).map_err(command_error)?;
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 && clock.now() < end && !tenmil_linux::signal::is_stop_requested() {
        let wait = WAIT.min(end.since(clock.now()));
        let Some(event) = client.next_event(wait).map_err(command_error)? else { continue };
        left -= 1;
        write_stdout(out, &event_line(&event, arguments.json))?;
        if event["kind"] == "shutdown" {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn event_line(event: &Value, json: bool) -> String {
    if json {
        return format!("{event}\n");
    }
    // Escapes control characters, so that an event stays on one line and cannot drive the terminal.
    let text = |name: &str| {
        let text = event[name].as_str().unwrap_or("-");
        text.chars()
            .map(|c| if tenmil_base::text::is_terminal_control(c) { ' ' } else { c })
            .collect::<String>()
    };
    format!("{}  {:<10}  {}\n", text("time"), text("kind"), text("text"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::event_line;

    #[test]
    fn event_is_printed_on_one_line() {
        let time = "2024-02-29T12:34:56.789000Z";
        let event = json!({ "kind": "set", "time": time, "text": "a\nb\u{1b}[2J" });
        assert_eq!(event_line(&event, false), format!("{time}  set         a b [2J\n"));
        assert_eq!(event_line(&event, true).lines().count(), 1);
    }
}
