//! NBD exports and their connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tenmil_base::{CoarseHistogram, Error, Operation};
use tenmil_block::{QosLimits, RateLimit};
use tenmil_serve::nbd::{ConnectionSample, ExportedDevice, NbdEvent, NbdStats};

use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::event::{Event, EventKind, EventSender};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// NBD exports of a process. A handle, cheap to clone: exports may be added and removed.
#[derive(Clone, Debug)]
pub struct NbdExports {
    served: Arc<Mutex<Vec<Arc<ExportedDevice>>>>,
}

/// Export names are URIs, which may be long.
const NAME: ParamType = ParamType::Text { len_max: 4096 };
const NUMBER: ParamType = ParamType::Whole { min: 0, max: u64::MAX };
const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

const EXPORT: &[FieldSchema] = &[
    FieldSchema::new("name", ResultType::Text, "export name; clients may also use the empty name"),
    FieldSchema::new("uri", ResultType::Text, "URI that the device was opened with"),
    FieldSchema::new("size_bytes", ResultType::Whole, "current size"),
    FieldSchema::new(
        "block_bytes",
        ResultType::Whole,
        "block size; requests must be multiples of it",
    ),
    FieldSchema::new("read_only", ResultType::Flag, "whether the export is read-only"),
    FieldSchema::new(
        "adapted",
        ResultType::Flag,
        "whether requests are split or emulated for the device",
    ),
    FieldSchema::new("connections", ResultType::Whole, "number of connected clients"),
    FieldSchema::new(
        "connections_total",
        ResultType::Whole,
        "number of connections since the start",
    ),
    FieldSchema::new("in_flight", ResultType::Whole, "outstanding requests of all clients"),
    FieldSchema::new("reads", ResultType::Whole, "reads completed by the device"),
    FieldSchema::new("read_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("read_p50_ns", WHOLE, "median latency; null if there were none"),
    FieldSchema::new("read_p99_ns", WHOLE, "99th percentile of the latency"),
    FieldSchema::new("writes", ResultType::Whole, "writes completed by the device"),
    FieldSchema::new("written_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("write_p50_ns", WHOLE, "median latency; null if there were none"),
    FieldSchema::new("write_p99_ns", WHOLE, "99th percentile of the latency"),
    FieldSchema::new("flushes", ResultType::Whole, "flushes completed by the device"),
    FieldSchema::new("errors", ResultType::Whole, "requests failed by the device"),
    FieldSchema::new("limit_iops", WHOLE, "limit of requests per second; null if there is none"),
    FieldSchema::new("limit_bytes", WHOLE, "limit of bytes per second"),
    FieldSchema::new("read_limit_iops", WHOLE, "limit of reads per second"),
    FieldSchema::new("read_limit_bytes", WHOLE, "limit of bytes read per second"),
    FieldSchema::new("write_limit_iops", WHOLE, "limit of writes per second"),
    FieldSchema::new("write_limit_bytes", WHOLE, "limit of bytes written per second"),
];

const CONNECTION: &[FieldSchema] = &[
    FieldSchema::new("id", ResultType::Whole, "identifier, never reused"),
    FieldSchema::new("export", ResultType::Text, "name of the export or subsystem"),
    FieldSchema::new("peer", ResultType::Text, "address of the peer"),
    FieldSchema::new("phase", ResultType::Text, "phase: handshake, transmission or ending"),
    FieldSchema::new("in_flight", ResultType::Whole, "outstanding requests"),
    FieldSchema::new("reads", ResultType::Whole, "successful reads"),
    FieldSchema::new("read_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("writes", ResultType::Whole, "successful writes"),
    FieldSchema::new("written_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("others", ResultType::Whole, "other successful requests"),
    FieldSchema::new("errors", ResultType::Whole, "failed requests"),
    FieldSchema::new("receives", ResultType::Whole, "receive calls that returned data"),
    FieldSchema::new("empty_receives", ResultType::Whole, "receive calls that returned nothing"),
    FieldSchema::new("sends", ResultType::Whole, "send calls"),
];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "exports",
        parameters: &[],
        answer: ResultType::Rows(EXPORT),
        help: "List the NBD exports and their counters",
        example: "tenmil get exports --json",
        run: |call| {
            let exports = nbd_exports_of(call)?;
            Ok(exports.served().iter().map(export_row).collect())
        },
    },
    Method {
        verb: MethodKind::Get,
        name: "connections",
        parameters: &[Parameter {
            name: "export",
            kind: NAME,
            need: ParamDefault::Optional,
            help: "only connections to the export of this name",
        }],
        answer: ResultType::Rows(CONNECTION),
        help: "List the NBD connections and their counters",
        example: "tenmil get connections",
        run: connections_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "export",
        parameters: &[
            Parameter {
                name: "name",
                kind: NAME,
                need: ParamDefault::Optional,
                help: "the device to change; optional if there is only one",
            },
            Parameter {
                name: "size_bytes",
                kind: NUMBER,
                need: ParamDefault::Optional,
                help: "new size of the file behind the export: data past a lower end are lost, new blocks read as zeroes; clients see the new size when they reconnect",
            },
            Parameter {
                name: "remove",
                kind: ParamType::Flag,
                need: ParamDefault::Optional,
                help: "true to remove the device permanently: outstanding requests fail, its files are closed, and clients are disconnected",
            },
        ],
        answer: ResultType::Record(EXPORT),
        help: "Change the size of an export, or remove its device",
        example: "tenmil set export size_bytes=1073741824",
        run: set_export_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "connection",
        parameters: &[
            Parameter {
                name: "id",
                kind: NUMBER,
                need: ParamDefault::Required,
                help: "identifier",
            },
            Parameter {
                name: "disconnect",
                kind: ParamType::Flag,
                need: ParamDefault::Required,
                help: "true to close the connection after its outstanding requests have completed",
            },
        ],
        answer: ResultType::Record(CONNECTION),
        help: "Close an NBD connection; an event reports when it has ended",
        example: "tenmil set connection id=3 disconnect=true",
        run: set_connection_method,
    },
];

const CONNECTED: EventKind = export_event_kind("connected", "a client connected to an export");
const DISCONNECTED: EventKind =
    export_event_kind("disconnected", "a client disconnected from an export, with the reason");
const RESIZED: EventKind = export_event_kind("export-resized", "an export was resized");
const REMOVED: EventKind =
    export_event_kind("export-removed", "the device of an export was removed");
const ERROR: EventKind =
    export_event_kind("export-error", "an error occurred in an export or its listeners");

const TLS_RELOADED: EventKind = export_event_kind(
    "tls-reloaded",
    "the certificate and the keys of NBD over TLS were read again on SIGHUP",
);

pub(super) const EVENTS: &[EventKind] =
    &[CONNECTED, DISCONNECTED, RESIZED, REMOVED, TLS_RELOADED, ERROR];

const fn export_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl NbdExports {
    /// Creates a set of exports.
    pub fn new(served: Vec<Arc<ExportedDevice>>) -> Self {
        Self { served: Arc::new(Mutex::new(served)) }
    }

    /// Replaces the exports by others.
    pub fn replace(&self, served: Vec<Arc<ExportedDevice>>) {
        *self.lock() = served;
    }

    /// The exports.
    pub(crate) fn served(&self) -> Vec<Arc<ExportedDevice>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<ExportedDevice>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventSender {
    /// Emits an event of an export.
    pub fn emit_export_event(&self, export: &str, new_events: &NbdEvent) {
        let (kind, about) = match new_events {
            NbdEvent::Connected { connection, peer } => {
                (CONNECTED, json!({ "export": export, "connection": connection, "peer": peer }))
            }
            NbdEvent::Disconnected { connection, peer, reason, done } => {
                let mut about = nbd_stats_json(done);
                about["export"] = export.into();
                about["connection"] = (*connection).into();
                about["peer"] = peer.as_str().into();
                about["reason"] = reason.name().into();
                (DISCONNECTED, about)
            }
            NbdEvent::Resized { size_bytes } => {
                (RESIZED, json!({ "export": export, "size_bytes": size_bytes }))
            }
            NbdEvent::Removed => (REMOVED, json!({ "export": export })),
            NbdEvent::Error(_) => (ERROR, json!({ "export": export })),
        };
        self.emit(Event { kind, text: format!("{export}: {new_events}"), about });
    }
}

impl EventSender {
    /// Emits the result of reading the certificate and the keys again: what was wrong, if anything was.
    pub fn emit_tls_reload(&self, export: &str, refused: Option<&Error>) {
        let (kind, what) = match refused {
            None => (TLS_RELOADED, "the certificate and the keys were read again".to_owned()),
            Some(refused) => (ERROR, format!("TLS: nothing is changed: {}", refused.text)),
        };
        let about = json!({ "export": export });
        self.emit(Event { kind, text: format!("{export}: {what}"), about });
    }
}

fn nbd_exports_of<'a>(call: &CallContext<'a>) -> Result<&'a NbdExports, RpcError> {
    call.state.find_part::<NbdExports>("exports")
}

/// Export named in the call, or the only one.
fn find_export(call: &CallContext<'_>, what: &str) -> Result<Arc<ExportedDevice>, RpcError> {
    let served = nbd_exports_of(call)?.served();
    let name = call.arguments.text("name");
    let found = match (name, &served[..]) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), _) => served.iter().find(|served| served.export().name() == name),
    };
    found.cloned().ok_or_else(|| {
        let names: Vec<&str> = served.iter().map(|served| served.export().name()).collect();
        let found = name
            .map_or_else(|| "no name".to_owned(), |name| format!("no {}", quote_untrusted(name)));
        let message = format!("{what}: {found}, expected {}", join_alternatives(&names));
        RpcError::usage(ErrorCode::NotFound, message)
    })
}

fn connections_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let wanted = call.arguments.text("export");
    let served = nbd_exports_of(call)?.served();
    let served =
        served.iter().filter(|served| wanted.is_none_or(|name| served.export().name() == name));
    let rows = |served: &Arc<ExportedDevice>| {
        let name = served.export().name().to_owned();
        let samples = served.connections().into_iter();
        samples.map(|sample| connection_row(&name, &sample)).collect::<Vec<_>>()
    };
    Ok(served.flat_map(rows).collect())
}

fn set_export_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let served = find_export(call, "set export")?;
    if let Some(size_bytes) = call.arguments.integer("size_bytes") {
        let refuse = |why| RpcError::usage(ErrorCode::Failed, format!("set export: {why}"));
        served.resize(size_bytes).map_err(refuse)?;
    }
    if call.arguments.boolean("remove") == Some(true) {
        served.remove_and_disconnect();
    }
    Ok(export_row(&served))
}

fn set_connection_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let id = call.arguments.integer("id").unwrap_or_default();
    let exports = nbd_exports_of(call)?.served();
    let all = exports.iter().flat_map(|served| {
        let samples = served.connections().into_iter();
        samples.map(move |sample| (served, sample))
    });
    let Some((served, sample)) = all.into_iter().find(|(_, sample)| sample.id == id) else {
        let message =
            format!("set connection: none has the number {id}, expected one that is there");
        let refusal = RpcError::usage(ErrorCode::NotFound, message);
        return Err(refusal.with_hint("see `tenmil get connections`"));
    };
    if call.arguments.boolean("disconnect") == Some(true) {
        served.disconnect_client(id);
    }
    Ok(connection_row(served.export().name(), &sample))
}

fn export_row(served: &Arc<ExportedDevice>) -> Value {
    let (export, statistics) = (served.export(), served.io_stats());
    let connections = served.connections();
    let [reads, writes] =
        [Operation::Read, Operation::Write].map(|it| statistics.operation_stats(it));
    let errors: u64 = Operation::ALL.iter().map(|it| statistics.operation_stats(*it).errors).sum();
    let mut row = json!({
        "name": export.name(),
        "uri": served.uri(),
        "size_bytes": export.size_bytes(),
        "block_bytes": export.block_size(),
        "read_only": export.is_read_only(),
        "adapted": served.is_adapted(),
        "connections": connections.len(),
        "connections_total": served.connections_total(),
        "in_flight": connections.iter().map(|one| one.in_flight).sum::<u64>(),
        "reads": reads.count,
        "read_bytes": reads.bytes,
        "read_p50_ns": percentile(&reads.latency, 500_000),
        "read_p99_ns": percentile(&reads.latency, 990_000),
        "writes": writes.count,
        "written_bytes": writes.bytes,
        "write_p50_ns": percentile(&writes.latency, 500_000),
        "write_p99_ns": percentile(&writes.latency, 990_000),
        "flushes": statistics.operation_stats(Operation::Flush).count,
        "errors": errors,
    });
    let QosLimits { total, reads, writes, .. } = served.qos_limits();
    for (name, RateLimit { iops, bytes }) in [("", total), ("read_", reads), ("write_", writes)] {
        row[format!("{name}limit_iops")] = json!(iops);
        row[format!("{name}limit_bytes")] = json!(bytes);
    }
    row
}

fn percentile(latency: &CoarseHistogram, per_million: u64) -> Option<u64> {
    (latency.count() > 0).then(|| latency.percentile(per_million))
}

fn connection_row(export: &str, sample: &ConnectionSample) -> Value {
    let mut row = nbd_stats_json(&sample.done);
    row["id"] = sample.id.into();
    row["export"] = export.into();
    row["peer"] = sample.peer.as_str().into();
    row["phase"] = sample.phase.name().into();
    row["in_flight"] = sample.in_flight.into();
    row["receives"] = sample.receives.into();
    row["empty_receives"] = sample.receives_in_vain.into();
    row["sends"] = sample.sends.into();
    row
}

fn nbd_stats_json(done: &NbdStats) -> Value {
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
