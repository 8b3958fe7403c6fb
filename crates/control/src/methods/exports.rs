//! What a process serves to others, and who is connected.

use std::num::NonZeroU64;
use std::sync::Arc;

use base::{Histogram, Operation};
use block::{Caps, Rate};
use host::Clock;
use serde_json::{Value, json};
use target::nbd::{ConnectionSample, Done, News, Served};

use crate::event::{Announcer, Event, EventKind};
use crate::kind::Kind;
use crate::method::{Call, Method, Need, Parameter, Verb};
use crate::refusal::{Code, Refusal, either, quoted};
use crate::shape::{Field, Shape};

/// What a program serves over NBD.
#[derive(Clone, Debug)]
pub struct Exports {
    served: Vec<Arc<Served>>,
    clock: Clock,
}

/// Names of exports are URIs, and those may be long.
const NAME: Kind = Kind::Text { len_max: 4096 };
const NUMBER: Kind = Kind::Whole { min: 0, max: u64::MAX };
const WHOLE: Shape = Shape::Maybe(&Shape::Whole);

const fn limit(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: NUMBER, need: Need::Optional, help }
}

const EXPORT: &[Field] = &[
    Field::new("name", Shape::Text, "what clients call it, beside the empty name"),
    Field::new("uri", Shape::Text, "what it is, as it was opened"),
    Field::new("size_bytes", Shape::Whole, "how long it is now"),
    Field::new("block_bytes", Shape::Whole, "what requests are multiples of"),
    Field::new("read_only", Shape::Flag, "whether nobody may write"),
    Field::new("shaped", Shape::Flag, "whether requests are cut or emulated for the device"),
    Field::new("connections", Shape::Whole, "who is connected"),
    Field::new("connections_ever", Shape::Whole, "who has ever been connected"),
    Field::new("in_flight", Shape::Whole, "requests of clients that are not answered"),
    Field::new("reads", Shape::Whole, "reads that the device has done"),
    Field::new("read_bytes", Shape::Whole, "bytes in them"),
    Field::new("read_p50_ns", WHOLE, "half of them took no longer, if there were any"),
    Field::new("read_p99_ns", WHOLE, "of a hundred, 99 took no longer"),
    Field::new("writes", Shape::Whole, "writes that the device has done"),
    Field::new("written_bytes", Shape::Whole, "bytes in them"),
    Field::new("write_p50_ns", WHOLE, "half of them took no longer, if there were any"),
    Field::new("write_p99_ns", WHOLE, "of a hundred, 99 took no longer"),
    Field::new("flushes", Shape::Whole, "flushes that the device has done"),
    Field::new("errors", Shape::Whole, "requests that the device has not done"),
    Field::new("limit_iops", WHOLE, "requests a second at most, if there is a limit"),
    Field::new("limit_bytes", WHOLE, "bytes a second at most"),
    Field::new("read_limit_iops", WHOLE, "reads a second at most"),
    Field::new("read_limit_bytes", WHOLE, "bytes read a second at most"),
    Field::new("write_limit_iops", WHOLE, "writes a second at most"),
    Field::new("write_limit_bytes", WHOLE, "bytes written a second at most"),
];

const CONNECTION: &[Field] = &[
    Field::new("id", Shape::Whole, "its number, which is never used again"),
    Field::new("export", Shape::Text, "what it is connected to"),
    Field::new("peer", Shape::Text, "who it is"),
    Field::new("phase", Shape::Text, "handshake, transmission or ending"),
    Field::new("in_flight", Shape::Whole, "requests that are not answered"),
    Field::new("reads", Shape::Whole, "reads that succeeded"),
    Field::new("read_bytes", Shape::Whole, "bytes in them"),
    Field::new("writes", Shape::Whole, "writes that succeeded"),
    Field::new("written_bytes", Shape::Whole, "bytes in them"),
    Field::new("others", Shape::Whole, "everything else that succeeded"),
    Field::new("errors", Shape::Whole, "requests that did not"),
    Field::new("receives", Shape::Whole, "system calls that received something"),
    Field::new("receives_in_vain", Shape::Whole, "system calls that found nothing to receive"),
    Field::new("sends", Shape::Whole, "system calls that sent"),
];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "exports",
        parameters: &[],
        answer: Shape::Rows(EXPORT),
        help: "List what is served, and what was done with it",
        example: "tenmil get exports --json",
        run: |call| {
            let exports = exports(call)?;
            Ok(exports.served.iter().map(export_row).collect())
        },
    },
    Method {
        verb: Verb::Get,
        name: "connections",
        parameters: &[Parameter {
            name: "export",
            kind: NAME,
            need: Need::Optional,
            help: "only those to the export of this name",
        }],
        answer: Shape::Rows(CONNECTION),
        help: "List who is connected, and what each was answered",
        example: "tenmil get connections",
        run: connections,
    },
    Method {
        verb: Verb::Set,
        name: "export",
        parameters: &[
            Parameter {
                name: "name",
                kind: NAME,
                need: Need::Optional,
                help: "which; need not be said of the only one",
            },
            limit("limit_iops", "requests a second for all clients together; 0 for any number"),
            limit("limit_bytes", "bytes a second for all clients together; 0 for any number"),
            limit("read_limit_iops", "the same, of reads"),
            limit("read_limit_bytes", "the same, of reads"),
            limit("write_limit_iops", "the same, of all that is no read"),
            limit("write_limit_bytes", "the same, of all that is no read"),
            Parameter {
                name: "size_bytes",
                kind: NUMBER,
                need: Need::Optional,
                help: "how long its file is from now on: what lies past a new end is lost, what is new \
                       reads as zeroes; clients see it when they connect again",
            },
            Parameter {
                name: "remove",
                kind: Kind::Flag,
                need: Need::Optional,
                help: "true to take the device away for good: what is under way fails, its files \
                       are closed, and clients are sent away",
            },
        ],
        answer: Shape::Record(EXPORT),
        help: "Change what the clients of an export are given, how long it is, or take its device away",
        example: "tenmil set export limit_iops=5000 write_limit_bytes=100000000",
        run: set_export,
    },
    Method {
        verb: Verb::Set,
        name: "connection",
        parameters: &[
            Parameter { name: "id", kind: NUMBER, need: Need::Required, help: "its number" },
            Parameter {
                name: "disconnect",
                kind: Kind::Flag,
                need: Need::Required,
                help: "true to end it: what is under way is answered first",
            },
        ],
        answer: Shape::Record(CONNECTION),
        help: "End a connection; an event says when it has gone",
        example: "tenmil set connection id=3 disconnect=true",
        run: set_connection,
    },
];

const CONNECTED: EventKind = kind("connected", "somebody has connected to an export");
const DISCONNECTED: EventKind = kind("disconnected", "a connection has ended, and why");
const RESIZED: EventKind = kind("export-resized", "an export has another size now");
const REMOVED: EventKind = kind("export-removed", "the device of an export has been removed");
const TROUBLE: EventKind = kind("export-trouble", "something went wrong at the doors of an export");

pub(super) const EVENTS: &[EventKind] = &[CONNECTED, DISCONNECTED, RESIZED, REMOVED, TROUBLE];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl Exports {
    /// These, whose limits are counted by `clock`.
    pub fn new(served: Vec<Arc<Served>>, clock: Clock) -> Self {
        Self { served, clock }
    }
}

impl Announcer {
    /// Tells what has happened at the doors of an export.
    pub fn announce_export(&self, export: &str, news: &News) {
        let (kind, about) = match news {
            News::Connected { connection, peer } => {
                (CONNECTED, json!({ "export": export, "connection": connection, "peer": peer }))
            }
            News::Disconnected { connection, peer, reason, done } => {
                let mut about = done_of(done);
                about["export"] = export.into();
                about["connection"] = (*connection).into();
                about["peer"] = peer.as_str().into();
                about["reason"] = reason.name().into();
                (DISCONNECTED, about)
            }
            News::Resized { size_bytes } => {
                (RESIZED, json!({ "export": export, "size_bytes": size_bytes }))
            }
            News::Removed => (REMOVED, json!({ "export": export })),
            News::Trouble(_) => (TROUBLE, json!({ "export": export })),
        };
        self.announce(Event { kind, text: format!("{export}: {news}"), about });
    }
}

fn exports<'a>(call: &Call<'a>) -> Result<&'a Exports, Refusal> {
    call.state.part::<Exports>("exports")
}

/// The export that is meant: the one that was named, or the only one.
fn choose<'a>(call: &Call<'a>, what: &str) -> Result<&'a Arc<Served>, Refusal> {
    let served = &exports(call)?.served;
    let name = call.arguments.text("name");
    let found = match (name, &served[..]) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), _) => served.iter().find(|served| served.export().name() == name),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = served.iter().map(|served| served.export().name()).collect();
        let found =
            name.map_or_else(|| "no name".to_owned(), |name| format!("no {}", quoted(name)));
        let message = format!("{what}: {found}, expected {}", either(&names));
        Refusal::caller(Code::Absent, message)
    })
}

fn connections(call: &Call<'_>) -> Result<Value, Refusal> {
    let wanted = call.arguments.text("export");
    let served = exports(call)?.served.iter();
    let served = served.filter(|served| wanted.is_none_or(|name| served.export().name() == name));
    let rows = |served: &Arc<Served>| {
        let name = served.export().name().to_owned();
        let samples = served.connections().into_iter();
        samples.map(|sample| connection_row(&name, &sample)).collect::<Vec<_>>()
    };
    Ok(served.flat_map(rows).collect())
}

fn set_export(call: &Call<'_>) -> Result<Value, Refusal> {
    let served = choose(call, "set export")?;
    let mut caps = served.caps();
    let change = |name, rate: &mut Option<NonZeroU64>| {
        if let Some(value) = call.arguments.whole(name) {
            *rate = NonZeroU64::new(value);
        }
    };
    change("limit_iops", &mut caps.total.iops);
    change("limit_bytes", &mut caps.total.bytes);
    change("read_limit_iops", &mut caps.reads.iops);
    change("read_limit_bytes", &mut caps.reads.bytes);
    change("write_limit_iops", &mut caps.writes.iops);
    change("write_limit_bytes", &mut caps.writes.bytes);
    if caps != served.caps() && !served.limit(exports(call)?.clock.now(), caps) {
        let message = "set export: its device was made without limits, expected one that has them";
        return Err(Refusal::caller(Code::NotDone, message));
    }
    if let Some(size_bytes) = call.arguments.whole("size_bytes") {
        let refuse = |why| Refusal::caller(Code::NotDone, format!("set export: {why}"));
        served.resize(size_bytes).map_err(refuse)?;
    }
    if call.arguments.flag("remove") == Some(true) {
        served.remove();
    }
    Ok(export_row(served))
}

fn set_connection(call: &Call<'_>) -> Result<Value, Refusal> {
    let id = call.arguments.whole("id").unwrap_or_default();
    let all = exports(call)?.served.iter().flat_map(|served| {
        let samples = served.connections().into_iter();
        samples.map(move |sample| (served, sample))
    });
    let Some((served, sample)) = all.into_iter().find(|(_, sample)| sample.id == id) else {
        let message =
            format!("set connection: none has the number {id}, expected one that is there");
        let refusal = Refusal::caller(Code::Absent, message);
        return Err(refusal.with_hint("see `tenmil get connections`"));
    };
    if call.arguments.flag("disconnect") == Some(true) {
        served.disconnect(id);
    }
    Ok(connection_row(served.export().name(), &sample))
}

fn export_row(served: &Arc<Served>) -> Value {
    let (export, statistics) = (served.export(), served.statistics());
    let connections = served.connections();
    let [reads, writes] = [Operation::Read, Operation::Write].map(|it| statistics.of(it));
    let errors: u64 = Operation::ALL.iter().map(|it| statistics.of(*it).errors).sum();
    let mut row = json!({
        "name": export.name(),
        "uri": served.uri(),
        "size_bytes": export.size_bytes(),
        "block_bytes": export.block_size(),
        "read_only": export.is_read_only(),
        "shaped": served.is_shaped(),
        "connections": connections.len(),
        "connections_ever": served.connections_ever(),
        "in_flight": connections.iter().map(|one| one.in_flight).sum::<u64>(),
        "reads": reads.count,
        "read_bytes": reads.bytes,
        "read_p50_ns": percentile(&reads.latency, 500_000),
        "read_p99_ns": percentile(&reads.latency, 990_000),
        "writes": writes.count,
        "written_bytes": writes.bytes,
        "write_p50_ns": percentile(&writes.latency, 500_000),
        "write_p99_ns": percentile(&writes.latency, 990_000),
        "flushes": statistics.of(Operation::Flush).count,
        "errors": errors,
    });
    let Caps { total, reads, writes } = served.caps();
    for (name, Rate { iops, bytes }) in [("", total), ("read_", reads), ("write_", writes)] {
        row[format!("{name}limit_iops")] = json!(iops);
        row[format!("{name}limit_bytes")] = json!(bytes);
    }
    row
}

fn percentile(latency: &Histogram, per_million: u64) -> Option<u64> {
    (latency.count() > 0).then(|| latency.percentile(per_million))
}

fn connection_row(export: &str, sample: &ConnectionSample) -> Value {
    let mut row = done_of(&sample.done);
    row["id"] = sample.id.into();
    row["export"] = export.into();
    row["peer"] = sample.peer.as_str().into();
    row["phase"] = sample.phase.name().into();
    row["in_flight"] = sample.in_flight.into();
    row["receives"] = sample.receives.into();
    row["receives_in_vain"] = sample.receives_in_vain.into();
    row["sends"] = sample.sends.into();
    row
}

fn done_of(done: &Done) -> Value {
    json!({
        "reads": done.reads,
        "read_bytes": done.read_bytes,
        "writes": done.writes,
        "written_bytes": done.written_bytes,
        "others": done.others,
        "errors": done.errors,
    })
}

#[cfg(test)]
mod tests;
