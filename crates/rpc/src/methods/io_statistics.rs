//! I/O statistics of everything that a process serves: what hosts and clients have done.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::{IoStats, Operation, OperationStats};
use tenmil_block::Bdev;
use tenmil_serve::DeviceSlowIo;
use tenmil_wire::Status;

use super::{NbdExports, NvmeConnections};
use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::process_parts::ProcessParts;
use crate::result_type::{FieldSchema, ResultType};

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);
const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

const ROW: &[FieldSchema] = &[
    FieldSchema::new("protocol", ResultType::Text, "nvme-tcp, nbd, vfio-user, vhost-user or ublk"),
    FieldSchema::new(
        "export",
        ResultType::Text,
        "NQN of the subsystem, name of the NBD export, or where a device is served",
    ),
    FieldSchema::new(
        "namespace",
        WHOLE,
        "namespace identifier; null for NBD and for a sum of several",
    ),
    FieldSchema::new("host", TEXT, "NQN of the host; null for NBD and for a sum of several"),
    FieldSchema::new("controller", WHOLE, "controller identifier, of an open queue"),
    FieldSchema::new("queue", WHOLE, "queue identifier, of an open queue"),
    FieldSchema::new("reads", ResultType::Whole, "successful reads"),
    FieldSchema::new("read_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("read_errors", ResultType::Whole, "failed reads"),
    FieldSchema::new(
        "read_time_ns",
        ResultType::Whole,
        "sum of the latencies of the successful ones",
    ),
    FieldSchema::new("read_p50_ns", WHOLE, "median latency; null if there were none"),
    FieldSchema::new("read_p99_ns", WHOLE, "99th percentile of the latency"),
    FieldSchema::new("read_p999_ns", WHOLE, "99.9th percentile of the latency"),
    FieldSchema::new("writes", ResultType::Whole, "successful writes"),
    FieldSchema::new("written_bytes", ResultType::Whole, "bytes transferred by them"),
    FieldSchema::new("write_errors", ResultType::Whole, "failed writes"),
    FieldSchema::new(
        "write_time_ns",
        ResultType::Whole,
        "sum of the latencies of the successful ones",
    ),
    FieldSchema::new("write_p50_ns", WHOLE, "median latency; null if there were none"),
    FieldSchema::new("write_p99_ns", WHOLE, "99th percentile of the latency"),
    FieldSchema::new("write_p999_ns", WHOLE, "99.9th percentile of the latency"),
    FieldSchema::new("flushes", ResultType::Whole, "successful flushes"),
    FieldSchema::new("flush_time_ns", ResultType::Whole, "sum of their latencies"),
    FieldSchema::new("deallocations", ResultType::Whole, "successful deallocations"),
    FieldSchema::new("others", ResultType::Whole, "other successful commands"),
    FieldSchema::new("errors", ResultType::Whole, "failed commands of every kind"),
    FieldSchema::new(
        "errors_by_status",
        ResultType::Rows(&[
            FieldSchema::new("status", ResultType::Whole, "status code type and status code"),
            FieldSchema::new("name", ResultType::Text, "name of the status"),
            FieldSchema::new("count", ResultType::Whole, "number of commands"),
        ]),
        "failed commands by their status",
    ),
    FieldSchema::new(
        "busy_ns",
        ResultType::Whole,
        "time with commands in flight, of the queue for which it is longest; NVMe/TCP only",
    ),
    FieldSchema::new("limited", ResultType::Whole, "commands that waited for a rate limit"),
    FieldSchema::new(
        "limit_wait_ns",
        ResultType::Whole,
        "sum of the times that they waited, which is not part of their latency",
    ),
];

/// Devices that a process serves to virtual machines or to its kernel.
#[derive(Clone, Debug)]
pub struct ServedDevices(pub Vec<ServedDevice>);

/// One of them.
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// Protocol: vfio-user, vhost-user or ublk.
    pub protocol: &'static str,
    /// Where it is served, with the protocol.
    pub listen: String,
    /// Namespace identifier, for protocols that have several.
    pub namespace: Option<u32>,
    /// The device.
    pub device: Bdev,
    /// Its slow-I/O log.
    pub slow_io: Arc<DeviceSlowIo>,
}

/// How rows are summed.
const GROUPS: &[&str] = &["namespace", "host", "export", "queue"];

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "io_statistics",
    parameters: &[
        Parameter {
            name: "by",
            kind: ParamType::OneOf(GROUPS),
            need: ParamDefault::Optional,
            help: "one row for each of these; namespace by default. A row of a host is one of a \
                   subsystem; rows of queues are of open ones, and one for the closed ones of a host \
                   and namespace",
        },
        Parameter {
            name: "export",
            kind: ParamType::Text { len_max: 223 },
            need: ParamDefault::Optional,
            help: "only of the subsystem with this NQN, or of the NBD export with this name",
        },
        Parameter {
            name: "host",
            kind: ParamType::Text { len_max: 223 },
            need: ParamDefault::Optional,
            help: "only of the host with this NQN",
        },
    ],
    answer: ResultType::Rows(ROW),
    help: "Count the commands of hosts and clients since the start, with latencies and errors",
    example: "tenmil get io_statistics by=host --json",
    run: io_statistics_method,
}];

/// What a row is about.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowKey {
    pub(crate) protocol: &'static str,
    pub(crate) export: String,
    pub(crate) namespace: Option<u32>,
    pub(crate) host: Option<String>,
    pub(crate) queue: Option<(u16, u16)>,
}

/// What the statistics of an export are divided by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Division {
    pub(crate) namespace: bool,
    pub(crate) host: bool,
    pub(crate) queue: bool,
}

/// Which statistics are collected; `None` is all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selection<'a> {
    pub(crate) export: Option<&'a str>,
    pub(crate) host: Option<&'a str>,
}

fn io_statistics_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let division = match call.arguments.text("by").unwrap_or(GROUPS[0]) {
        "host" => Division { host: true, ..Division::default() },
        "queue" => Division { namespace: true, host: true, queue: true },
        "namespace" => Division { namespace: true, ..Division::default() },
        _ => Division::default(),
    };
    let selection =
        Selection { export: call.arguments.text("export"), host: call.arguments.text("host") };
    let rows = collect_io_stats(call.state, division, selection)?;
    Ok(rows.into_iter().map(|(key, stats)| row(key, &stats)).collect())
}

/// Statistics of everything that the process serves. Those of hosts are added up unless `division` keeps
/// them apart.
pub(crate) fn collect_io_stats(
    state: &ProcessParts,
    division: Division,
    selection: Selection<'_>,
) -> Result<BTreeMap<RowKey, IoStats>, RpcError> {
    let nvme = state.find_part::<NvmeConnections>("queues");
    let nbd = state.find_part::<NbdExports>("exports");
    let devices = state.find_part::<ServedDevices>("served devices");
    if let (Err(_), Err(_), Err(error)) = (&nvme, &nbd, &devices) {
        return Err(error.clone());
    }
    let is_export = |found: &str| selection.export.is_none_or(|wanted| wanted == found);
    let is_host = |found: &str| selection.host.is_none_or(|wanted| wanted == found);
    let mut rows = BTreeMap::<RowKey, IoStats>::new();
    let subsystems = nvme.map(|NvmeConnections(service)| service.io_stats()).unwrap_or_default();
    for (export, samples) in subsystems.iter().filter(|(nqn, _)| is_export(nqn)) {
        for sample in samples.iter().filter(|sample| is_host(&sample.host)) {
            let key = RowKey {
                protocol: "nvme-tcp",
                export: export.clone(),
                namespace: division.namespace.then_some(sample.nsid),
                host: division.host.then(|| sample.host.to_string()),
                queue: sample.queue.filter(|_| division.queue),
            };
            add(rows.entry(key).or_default(), &sample.stats);
        }
    }
    // The rows of other protocols have no host.
    if selection.host.is_some() {
        return Ok(rows);
    }
    let served = nbd.map(|exports| exports.served()).unwrap_or_default();
    for export in served {
        let name = export.export().name();
        if is_export(name) {
            let key = RowKey { protocol: "nbd", export: name.to_owned(), ..RowKey::default() };
            add(rows.entry(key).or_default(), &export.io_stats());
        }
    }
    let devices = devices.map(|ServedDevices(devices)| &devices[..]).unwrap_or_default();
    for ServedDevice { protocol, listen, namespace, device, .. } in devices {
        if is_export(listen) {
            let namespace = namespace.filter(|_| division.namespace);
            let export = listen.clone();
            let key = RowKey { protocol, export, namespace, ..RowKey::default() };
            add(rows.entry(key).or_default(), &device.statistics());
        }
    }
    Ok(rows)
}

/// Adds statistics; busy times of several queues overlap, so the longest one stays.
fn add(sum: &mut IoStats, more: &IoStats) {
    let busy = sum.busy.max(more.busy);
    sum.merge(more);
    sum.busy = busy;
}

fn row(key: RowKey, stats: &IoStats) -> Value {
    let of = |operation| stats.operation_stats(operation);
    let [reads, writes, flushes, deallocations] =
        [Operation::Read, Operation::Write, Operation::Flush, Operation::Deallocate].map(of);
    let all = || Operation::ALL.into_iter().map(of);
    let shown = [reads, writes, flushes, deallocations];
    let others =
        all().map(|one| one.count).sum::<u64>() - shown.iter().map(|one| one.count).sum::<u64>();
    let by_status = stats.errors_by_status.iter().map(|(status, count)| {
        json!({ "status": status, "name": Status(*status).name(), "count": count })
    });
    json!({
        "protocol": key.protocol,
        "export": key.export,
        "namespace": key.namespace,
        "host": key.host,
        "controller": key.queue.map(|(controller, _)| controller),
        "queue": key.queue.map(|(_, queue)| queue),
        "reads": reads.count,
        "read_bytes": reads.bytes,
        "read_errors": reads.errors,
        "read_time_ns": reads.latency.sum(),
        "read_p50_ns": percentile(reads, 500_000),
        "read_p99_ns": percentile(reads, 990_000),
        "read_p999_ns": percentile(reads, 999_000),
        "writes": writes.count,
        "written_bytes": writes.bytes,
        "write_errors": writes.errors,
        "write_time_ns": writes.latency.sum(),
        "write_p50_ns": percentile(writes, 500_000),
        "write_p99_ns": percentile(writes, 990_000),
        "write_p999_ns": percentile(writes, 999_000),
        "flushes": flushes.count,
        "flush_time_ns": flushes.latency.sum(),
        "deallocations": deallocations.count,
        "others": others,
        "errors": all().map(|one| one.errors).sum::<u64>(),
        "errors_by_status": by_status.collect::<Vec<_>>(),
        "busy_ns": stats.busy.ns,
        "limited": stats.limited,
        "limit_wait_ns": stats.limit_wait.ns,
    })
}

fn percentile(one: &OperationStats, per_million: u64) -> Option<u64> {
    (one.latency.count() > 0).then(|| one.latency.percentile(per_million))
}
