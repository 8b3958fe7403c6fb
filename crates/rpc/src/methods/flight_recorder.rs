//! The flight recorder: the last control events of each reactor.

use serde_json::{Value, json};
use tenmil_base::UtcTime;
use tenmil_linux::clock::utc_now;
use tenmil_reactor::flight_recorder::{FlightEvent, FlightLog, recorded_events};

use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

const ROW: &[FieldSchema] = &[
    FieldSchema::new("time", ResultType::Text, "time of the wall clock"),
    FieldSchema::new("at_ns", ResultType::Whole, "time on the reactors' clock"),
    FieldSchema::new("reactor", WHOLE, "the reactor; null for all threads that are none"),
    FieldSchema::new(
        "sequence",
        ResultType::Whole,
        "number among the events of the reactor, from 1",
    ),
    FieldSchema::new("kind", ResultType::Text, "kind of event"),
    FieldSchema::new("text", ResultType::Text, "what it is about"),
];

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "flight_recorder",
    parameters: &[Parameter {
        name: "reactor",
        kind: ParamType::Whole { min: 0, max: u32::MAX as u64 },
        need: ParamDefault::Optional,
        help: "only events of this reactor",
    }],
    answer: ResultType::Rows(ROW),
    help: "Show the last control events of each reactor: threads, connections, long iterations, stalls and \
           panics",
    example: "tenmil get flight_recorder",
    run: flight_recorder_method,
}];

fn flight_recorder_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let wanted = call.arguments.integer("reactor");
    let logs = recorded_events();
    let is_wanted = |log: &&FlightLog| {
        wanted
            .is_none_or(|wanted| log.reactor.is_some_and(|reactor| u64::from(reactor.0) == wanted))
    };
    let mut rows: Vec<(u64, Value)> = logs.iter().filter(is_wanted).flat_map(rows_of).collect();
    rows.sort_by_key(|(at_us, _)| *at_us);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// Rows of a ring, with their times of the wall clock.
fn rows_of(log: &FlightLog) -> Vec<(u64, Value)> {
    let (now, wall_clock) = (log.clock.now(), utc_now());
    let row = |event: &FlightEvent| {
        let FlightEvent { sequence, at, kind, .. } = *event;
        let unix_us = wall_clock.unix_us.saturating_sub(now.since(at).ns / 1_000);
        let row = json!({
            "time": UtcTime { unix_us }.to_string(),
            "at_ns": at.ns,
            "reactor": log.reactor.map(|reactor| reactor.0),
            "sequence": sequence,
            "kind": kind.name(),
            "text": log.describe(event),
        });
        (unix_us, row)
    };
    log.events.iter().map(row).collect()
}
