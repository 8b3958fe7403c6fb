//! One sample as plain text and as JSON.

use serde_json::{Value, json};
use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_rpc::RpcClient;

use super::app_state::{AppState, DisplayedSample, SamplerUpdate, ScreenTable};
use super::header::{busy_line, process_line};
use super::process_queries;
use super::process_sample::{PollerSample, ReactorSample, ThreadSample, command_error};
use super::rates::{PollerRates, ReactorRates, SampleRates, ThreadRates};
use super::screen_tables::{all_pollers_table, screen_table};
use super::table_grid::TableGrid;
use crate::io_rates::{Grouping, IoRates, IoRow, json_row};

/// Takes two samples, `interval` apart.
pub(crate) fn sample_twice(client: &mut RpcClient, interval: Span) -> Result<AppState, Error> {
    let mut state = AppState::default();
    state.apply_update(SamplerUpdate::Attached(process_queries::query_process(client)?));
    let clock = Clock::on_kernel_clock();
    for wait in [Span::default(), interval] {
        let end = clock.now().after(wait);
        while clock.now() < end {
            // No events are subscribed here, so this call only waits, and fails if the process exits.
            client.next_event(end.since(clock.now())).map_err(command_error)?;
        }
        let sample = process_queries::parse_sample(
            process_queries::call_method(client, "snapshot_stats").map_err(command_error)?,
        )?;
        state.apply_update(SamplerUpdate::Looked {
            sample,
            policy: process_queries::query_scheduler_policy(client).map_err(command_error)?,
        });
        let grouping = Grouping::default();
        let io = process_queries::query_io(client, &clock, grouping).map_err(command_error)?;
        state.apply_update(SamplerUpdate::LookedAtIo(grouping, io));
    }
    Ok(state)
}

/// The tables as plain text, with all columns in full width.
pub(crate) fn state_text(state: &AppState) -> String {
    // With a width of zero no bar is drawn.
    let mut text = format!("{}\n{}\n", process_line(state), busy_line(state, 0));
    let grids = [
        screen_table(state, ScreenTable::Reactors),
        screen_table(state, ScreenTable::Threads),
        all_pollers_table(state),
        screen_table(state, ScreenTable::Io),
    ];
    let is_shown =
        |grid: &&TableGrid<'_>| !grid.rows.is_empty() || grid.columns[0].head != "export";
    for grid in grids.iter().filter(is_shown) {
        text += "\n";
        text += &grid.text_lines();
    }
    text
}

/// The sample as JSON, following the schema of `json_schema.rs`, which the tests check.
pub(crate) fn state_json(state: &AppState) -> Value {
    let nothing = DisplayedSample::default();
    let DisplayedSample { sample, rates } = state.shown.as_ref().unwrap_or(&nothing);
    let rates = rates.clone().unwrap_or_default();
    let process = state.process.clone().unwrap_or_default();
    let SampleRates { span_ns, whole, reactors, threads, pollers } = &rates;
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
        "reactors": sample.reactors.iter().zip(reactors).map(reactor_json).collect::<Vec<_>>(),
        "threads": sample.threads.iter().zip(threads).map(thread_json).collect::<Vec<_>>(),
        "pollers": sample.pollers.iter().zip(pollers).map(poller_json).collect::<Vec<_>>(),
        "io": state.io_rows().iter().filter_map(io_json).collect::<Vec<_>>(),
    })
}

fn reactor_json((reactor, rates): (&ReactorSample, &ReactorRates)) -> Value {
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

fn thread_json((thread, rates): (&ThreadSample, &ThreadRates)) -> Value {
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

fn poller_json((poller, rates): (&PollerSample, &PollerRates)) -> Value {
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

fn io_json((row, rates): &(&IoRow, Option<IoRates>)) -> Option<Value> {
    rates.as_ref().map(|rates| json_row(row, rates))
}

#[cfg(test)]
mod tests {
    use super::{state_json, state_text};
    use crate::top::app_state::AppState;
    use crate::top::app_state::tests::watching_state;
    use crate::top::json_schema::SHAPE;

    #[test]
    fn json_matches_the_published_schema() {
        for state in [AppState::default(), watching_state(0, 0), watching_state(3, 7)] {
            assert_eq!(SHAPE.check_value(&state_json(&state)), Ok(()));
        }
        let sample = state_json(&watching_state(3, 7));
        assert_eq!(sample["interval_ns"], 1_000_000_000);
        assert_eq!((&sample["busy_percent"], &sample["policy"]), (&10.0.into(), &"dynamic".into()));
        assert_eq!(sample["reactors"][2]["busy_percent"], 20.0);
        assert_eq!(sample["threads"].as_array().unwrap().len(), 7);
        assert_eq!(sample["pollers"][6]["found_percent"], 25.0);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it reads the tree it holds true")]
    fn every_published_field_is_documented() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operator/top.md");
        let documented = String::from_utf8(std::fs::read(path).unwrap()).unwrap();
        for field in SHAPE
            .declared_fields()
            .iter()
            .flat_map(|field| [field].into_iter().chain(field.geometry.declared_fields()))
        {
            let line =
                format!("| `{}` | {} | {} |\n", field.name, field.geometry.type_name(), field.help);
            assert!(documented.contains(&line), "docs/operator/top.md lacks {line}");
        }
    }

    #[test]
    fn text_has_every_table_and_no_control_characters() {
        let text = state_text(&watching_state(2, 3));
        let heads = ["tenmil 0.1.0  process 4711", "busy 5.0 % of 2 reactors", "reactor  core"];
        for head in heads.iter().chain(&["thread  name", "poller   kind"]) {
            assert!(text.lines().any(|line| line.starts_with(head)), "{head} in {text}");
        }
        assert!(!text.replace('\n', "").contains(char::is_control));
        assert!(text.contains("queue-0") && text.contains("queue-2"), "of all threads");
    }
}
