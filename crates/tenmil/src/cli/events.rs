//! `tenmil events`.

use std::io::Write;
use std::process::ExitCode;

use base::{Instant, Span};
use clap::Args;
use host::Clock;
use serde_json::{Map, Value};

use super::running::{PATIENCE, Whom, connect, refused};
use super::write_out;
use crate::Refused;
use block::quantity::parse_time;

/// Print what happens in a running tenmil process, a line each, until it ends or Ctrl-C.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  tenmil events --json | jq .text")]
pub(super) struct EventsArguments {
    #[command(flatten)]
    whom: Whom,

    /// Print JSON, one object on a line
    #[arg(long)]
    json: bool,

    /// Stop after so many events
    #[arg(long, value_name = "N", value_parser = super::perf::whole::<u64>)]
    count: Option<u64>,

    /// Stop after this time, such as 10 or 500ms
    #[arg(short, long, value_name = "TIME", value_parser = parse_time)]
    time: Option<Span>,
}

/// How long one wait lasts; between two, Ctrl-C is looked at.
const WAIT: Span = Span::from_ms(200);

/// Follows and prints.
pub(super) fn run(arguments: &EventsArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::kernel();
    let end = arguments.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut client = connect(arguments.whom)?;
    client.call("events", Map::new(), PATIENCE).map_err(refused)?;
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 && clock.now() < end && !host::signal::interrupted() {
        let wait = WAIT.min(end.since(clock.now()));
        let Some(event) = client.next_event(wait).map_err(refused)? else { continue };
        left -= 1;
        write_out(out, &line(&event, arguments.json))?;
        if event["kind"] == "ending" {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn line(event: &Value, json: bool) -> String {
    if json {
        return format!("{event}\n");
    }
    // On one line, and without what a terminal would act on.
    let text = |name: &str| {
        let text = event[name].as_str().unwrap_or("-");
        text.chars().map(|c| if base::text::acts(c) { ' ' } else { c }).collect::<String>()
    };
    let seconds = event["at_ns"].as_u64().unwrap_or(0) as f64 / 1e9;
    format!("{seconds:.6}  {:<10}  {}\n", text("kind"), text("text"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::line;

    #[test]
    fn an_event_is_one_line() {
        let event = json!({ "kind": "set", "at_ns": 1_500_000_000, "text": "a\nb\u{1b}[2J" });
        assert_eq!(line(&event, false), "1.500000  set         a b [2J\n");
        assert_eq!(line(&event, true).lines().count(), 1);
    }
}
