//! One sample as plain text and as JSON.

use serde_json::{Value, json};
use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_rpc::Client;

use super::header::{busy, process};
use super::query;
use super::rates::{PollerRates, Rates, ReactorRates, ThreadRates};
use super::sample::{Poller, Reactor, Thread, refused};
use super::state::{AppState, DisplayedSample, Table, Update};
use super::tables::{all_pollers, table};

/// Takes two samples, `interval` apart.
pub(crate) fn sample_twice(client: &mut Client, interval: Span) -> Result<AppState, Error> {
    let mut state = AppState::default();
    state.take(Update::Attached(query::process(client)?));
    let clock = Clock::kernel();
    for wait in [Span::default(), interval] {
        let end = clock.now().after(wait);
        while clock.now() < end {
            // No events are subscribed here, so this call only waits, and fails if the process exits.
            client.next_event(end.since(clock.now())).map_err(refused)?;
        }
        let sample = query::sample(query::call(client, "snapshot_stats").map_err(refused)?)?;
        state.take(Update::Looked { sample, policy: query::policy(client).map_err(refused)? });
    }
    Ok(state)
}

/// The tables as plain text, with all columns in full width.
pub(crate) fn text(state: &AppState) -> String {
    // With a width of zero no bar is drawn.
    let mut text = format!("{}\n{}\n", process(state), busy(state, 0));
    let grids = [table(state, Table::Reactors), table(state, Table::Threads), all_pollers(state)];
    for grid in grids {
        text += "\n";
        text += &grid.lines();
    }
    text
}

/// The sample as JSON, following the schema of `json_schema.rs`, which the tests check.
pub(crate) fn json(state: &AppState) -> Value {
    let nothing = DisplayedSample::default();
    let DisplayedSample { sample, rates } = state.shown.as_ref().unwrap_or(&nothing);
    let rates = rates.clone().unwrap_or_default();
    let process = state.process.clone().unwrap_or_default();
    let Rates { span_ns, whole, reactors, threads, pollers } = &rates;
    json!({
        "monotonic_ns": sample.monotonic_ns,
        "interval_ns": span_ns,
        "process": {
            "version": process.version,
            "pid": process.pid,
            "command_line": process.command_line,
            "uptime_ns": process.uptime_ns,
        },
        "policy": state.policy,
        "busy_percent": whole.busy_percent,
        "sleeps_per_second": whole.sleeps,
        "messages_per_second": whole.messages,
        "migrations_per_second": whole.migrations,
        "reactors": sample.reactors.iter().zip(reactors).map(reactor).collect::<Vec<_>>(),
        "threads": sample.threads.iter().zip(threads).map(thread).collect::<Vec<_>>(),
        "pollers": sample.pollers.iter().zip(pollers).map(poller).collect::<Vec<_>>(),
    })
}

fn reactor((reactor, rates): (&Reactor, &ReactorRates)) -> Value {
    json!({
        "id": reactor.id,
        "core": reactor.core,
        "mode": reactor.mode,
        "sleeping": reactor.sleeping,
        "stalled": rates.is_stuck,
        "busy_percent": rates.busy_percent,
        "iterations_per_second": rates.iterations,
        "sleeps_per_second": rates.sleeps,
        "messages_per_second": rates.messages,
        "migrations_per_second": rates.migrations,
        "iterations_too_long": reactor.iterations_too_long,
        "longest_iteration_ns": reactor.longest_iteration_ns,
        "longest_iteration_cause": reactor.longest_iteration_cause,
        "running": reactor.running,
    })
}

fn thread((thread, rates): (&Thread, &ThreadRates)) -> Value {
    json!({
        "id": thread.id,
        "name": thread.name,
        "reactor": thread.reactor,
        "mask": thread.mask,
        "busy_percent": rates.busy_percent,
        "messages_per_second": rates.messages,
        "migrations": thread.migrations,
        "channels": thread.channels,
    })
}

fn poller((poller, rates): (&Poller, &PollerRates)) -> Value {
    json!({
        "thread_id": poller.thread_id,
        "name": poller.name,
        "wake": poller.wake,
        "every_ns": poller.every_ns,
        "paused": poller.paused,
        "polls_per_second": rates.polls,
        "found_percent": rates.found_percent,
    })
}

#[cfg(test)]
mod tests {
    use super::{json, text};
    use crate::top::json_schema::SHAPE;
    use crate::top::state::AppState;
    use crate::top::state::tests::watching;

    #[test]
    fn the_json_has_the_shape_that_is_published() {
        for state in [AppState::default(), watching(0, 0), watching(3, 7)] {
            assert_eq!(SHAPE.check(&json(&state)), Ok(()));
        }
        let sample = json(&watching(3, 7));
        assert_eq!(sample["interval_ns"], 1_000_000_000);
        assert_eq!((&sample["busy_percent"], &sample["policy"]), (&10.0.into(), &"dynamic".into()));
        assert_eq!(sample["reactors"][2]["busy_percent"], 20.0);
        assert_eq!(sample["threads"].as_array().unwrap().len(), 7);
        assert_eq!(sample["pollers"][6]["found_percent"], 25.0);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it reads the tree it holds true")]
    fn every_published_name_is_documented() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operator/top.md");
        let documented = String::from_utf8(std::fs::read(path).unwrap()).unwrap();
        for field in SHAPE
            .fields()
            .iter()
            .flat_map(|field| [field].into_iter().chain(field.geometry.fields()))
        {
            let line =
                format!("| `{}` | {} | {} |\n", field.name, field.geometry.name(), field.help);
            assert!(documented.contains(&line), "docs/operator/top.md lacks {line}");
        }
    }

    #[test]
    fn the_text_has_every_table_and_nothing_a_terminal_acts_on() {
        let text = text(&watching(2, 3));
        let heads = ["tenmil 0.1.0  process 4711", "busy 5.0 % of 2 reactors", "reactor  core"];
        for head in heads.iter().chain(&["thread  name", "poller   kind"]) {
            assert!(text.lines().any(|line| line.starts_with(head)), "{head} in {text}");
        }
        assert!(!text.replace('\n', "").contains(char::is_control));
        assert!(text.contains("queue-0") && text.contains("queue-2"), "of all threads");
    }
}
