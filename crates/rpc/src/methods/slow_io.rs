//! Slow-I/O log: thresholds, counters and events.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_block::quantity_parser::parse_time;
use tenmil_serve::nbd::ExportedDevice;
use tenmil_serve::{ExportSlowIo, SlowIo, SlowIoThresholds};

use super::io_statistics::{ServedDevice, ServedDevices};
use super::{NbdExports, NvmeConnections};
use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::event::{Event, EventKind, EventSender};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);
const NAME: ParamType = ParamType::Text { len_max: 4096 };
/// Shortest threshold: about what an iteration of a loaded reactor takes.
const TIME_MIN: Span = Span::from_us(1);

const ROW: &[FieldSchema] = &[
    FieldSchema::new(
        "export",
        ResultType::Text,
        "NQN of the subsystem, name of the NBD export, or where a device is served",
    ),
    FieldSchema::new(
        "namespace",
        WHOLE,
        "namespace identifier; null for all namespaces without a row of their own",
    ),
    FieldSchema::new("threshold_ns", WHOLE, "time from which a command is logged; null if none is"),
    FieldSchema::new("slow", ResultType::Whole, "number of slow commands of the export"),
    FieldSchema::new(
        "dropped",
        ResultType::Whole,
        "slow commands of all subsystems, or of the export, that were not logged: there were too many at once",
    ),
];

const fn parameter(
    name: &'static str,
    kind: ParamType,
    need: ParamDefault,
    help: &'static str,
) -> Parameter {
    Parameter { name, kind, need, help }
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "slow_io",
        parameters: &[],
        answer: ResultType::Rows(ROW),
        help: "Show from which time commands are logged as slow, and how many were",
        example: "tenmil get slow_io",
        run: get_slow_io_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "slow_io",
        parameters: &[
            parameter(
                "threshold",
                ParamType::Text { len_max: 32 },
                ParamDefault::Required,
                "time such as 10ms, or off",
            ),
            parameter(
                "export",
                NAME,
                ParamDefault::Optional,
                "NQN of the subsystem, name of the NBD export, or where a device is served; may be omitted if there is \
                 only one",
            ),
            parameter(
                "namespace",
                ParamType::Whole { min: 1, max: u32::MAX as u64 },
                ParamDefault::Optional,
                "only this namespace; all of them by default",
            ),
        ],
        answer: ResultType::Rows(ROW),
        help: "Log commands that take this long from reception to completion, with the times of their stages",
        example: "tenmil set slow_io threshold=10ms",
        run: set_slow_io_method,
    },
];

const SLOW: EventKind = EventKind {
    name: "slow-io",
    help: "a command took longer than the threshold, with the times of its stages",
};
const DROPPED: EventKind = EventKind {
    name: "slow-io-dropped",
    help: "slow commands were not logged, because there were too many at once",
};

pub(super) const EVENTS: &[EventKind] = &[SLOW, DROPPED];

/// Parses a threshold for slow commands: a time such as `10ms`, or `off`.
///
/// # Errors
///
/// If it is neither.
pub fn parse_slow_io(text: &str) -> Result<Option<Span>, String> {
    if text == "off" {
        return Ok(None);
    }
    match parse_time(text) {
        Ok(time) if time >= TIME_MIN => Ok(Some(time)),
        Ok(_) => Err(format!("'{text}' is too short, expected at least {TIME_MIN}, or off")),
        Err(problem) => Err(format!("{problem}, or off")),
    }
}

/// An export, with its thresholds.
enum FoundExport {
    Subsystem(SlowIoThresholds),
    Nbd(Arc<ExportedDevice>),
    /// Devices that are served at one place.
    Devices(Vec<ServedDevice>),
}

fn get_slow_io_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let rows = exports_of(call)?.into_iter().flat_map(|(name, slow, dropped, export)| {
        let row = |namespace: Option<u32>, threshold: Option<Span>| {
            json!({
                "export": name,
                "namespace": namespace,
                "threshold_ns": threshold.map(|threshold| threshold.ns),
                "slow": slow,
                "dropped": dropped,
            })
        };
        match &export {
            FoundExport::Nbd(device) => vec![row(None, device.slow_io().threshold())],
            FoundExport::Devices(devices) => {
                let row = |device: &ServedDevice| {
                    row(device.namespace, device.slow_io.export().threshold())
                };
                devices.iter().map(row).collect()
            }
            FoundExport::Subsystem(thresholds) => {
                let own = thresholds.namespaces.iter();
                let own = own.map(|(namespace, threshold)| row(Some(*namespace), *threshold));
                core::iter::once(row(None, thresholds.default)).chain(own).collect()
            }
        }
    });
    Ok(rows.collect())
}

/// All exports with their names, and the numbers of slow and of dropped commands.
fn exports_of(call: &CallContext<'_>) -> Result<Vec<(String, u64, u64, FoundExport)>, RpcError> {
    let nvme = call.state.find_part::<NvmeConnections>("subsystems");
    let nbd = call.state.find_part::<NbdExports>("exports");
    let devices = call.state.find_part::<ServedDevices>("served devices");
    if let (Err(_), Err(_), Err(error)) = (&nvme, &nbd, &devices) {
        return Err(error.clone());
    }
    let mut exports = Vec::new();
    let devices = devices.map(|ServedDevices(devices)| &devices[..]).unwrap_or_default();
    for devices in devices.chunk_by(|one, next| one.listen == next.listen) {
        let sum = |count: fn(&ExportSlowIo) -> u64| -> u64 {
            devices.iter().map(|device| count(device.slow_io.export())).sum()
        };
        let (slow, dropped) = (sum(ExportSlowIo::count), sum(|slow_io| slow_io.log().dropped()));
        let name = devices[0].listen.clone();
        exports.push((name, slow, dropped, FoundExport::Devices(devices.to_vec())));
    }
    if let Ok(NvmeConnections(service)) = nvme {
        let dropped = service.slow_io_log().dropped();
        for (nqn, thresholds, slow) in service.slow_io() {
            exports.push((nqn, slow, dropped, FoundExport::Subsystem(thresholds)));
        }
    }
    for device in nbd.map(|exports| exports.served()).unwrap_or_default() {
        let (name, slow_io) = (device.export().name().to_owned(), device.slow_io());
        let (slow, dropped) = (slow_io.count(), slow_io.log().dropped());
        exports.push((name, slow, dropped, FoundExport::Nbd(device)));
    }
    Ok(exports)
}

fn set_slow_io_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let refuse = |message| RpcError::usage(ErrorCode::BadValue, format!("set slow_io: {message}"));
    let text = call.arguments.text("threshold").unwrap_or_default();
    let threshold = parse_slow_io(text).map_err(refuse)?;
    let exports = exports_of(call)?;
    let names: Vec<&str> = exports.iter().map(|(name, ..)| name.as_str()).collect();
    let expected = join_alternatives(&names);
    let (name, .., export) = match call.arguments.text("export") {
        Some(name) => exports.iter().find(|(one, ..)| one == name).ok_or_else(|| {
            refuse(format!("no export {}, expected {expected}", quote_untrusted(name)))
        })?,
        None => match exports.as_slice() {
            [only] => only,
            _ => return Err(refuse(format!("`export` is missing, expected {expected}"))),
        },
    };
    let namespace = call.arguments.integer("namespace").and_then(|it| u32::try_from(it).ok());
    match (export, namespace) {
        (FoundExport::Nbd(device), None) => device.slow_io().set_threshold(threshold),
        (FoundExport::Nbd(_), Some(_)) => {
            return Err(refuse("`namespace` is given, expected none: NBD has none".to_owned()));
        }
        (FoundExport::Devices(devices), namespace) => {
            let is_meant =
                |device: &&ServedDevice| namespace.is_none() || device.namespace == namespace;
            let mut meant = devices.iter().filter(is_meant).peekable();
            if meant.peek().is_none() {
                let found = namespace.unwrap_or_default();
                let expected = match devices[0].namespace {
                    Some(_) => format!("1 to {}", devices.len()),
                    None => "none: a disk has none".to_owned(),
                };
                return Err(refuse(format!("`namespace` is {found}, expected {expected}")));
            }
            meant.for_each(|device| device.slow_io.export().set_threshold(threshold));
        }
        (FoundExport::Subsystem(before), namespace) => {
            let thresholds = match namespace {
                None => SlowIoThresholds { default: threshold, namespaces: BTreeMap::new() },
                Some(namespace) => {
                    let mut thresholds = before.clone();
                    thresholds.namespaces.insert(namespace, threshold);
                    thresholds
                }
            };
            let NvmeConnections(service) = call.state.find_part::<NvmeConnections>("subsystems")?;
            service.set_slow_io(name, thresholds);
        }
    }
    get_slow_io_method(call)
}

impl EventSender {
    /// Emits the event of a slow command.
    pub fn emit_slow_io(&self, slow: &SlowIo) {
        let SlowIo { source, operation, namespace, start, len_bytes, id, error, stages, .. } = slow;
        let about = json!({
            "protocol": source.protocol,
            "export": source.export,
            "namespace": namespace,
            "host": source.host,
            "peer": source.peer,
            "controller": source.queue.map(|(controller, _)| controller),
            "queue": source.queue.map(|(_, queue)| queue),
            "operation": operation,
            "start": start,
            "bytes": len_bytes,
            "command": id,
            "error": error,
            "total_ns": stages.total().ns,
            "wait_ns": stages.wait.ns,
            "transfer_ns": stages.transfer.map(|stage| stage.ns),
            "queue_ns": stages.queue.ns,
            "device_ns": stages.device.ns,
            "send_ns": stages.send.map(|stage| stage.ns),
            "ended_unix_us": slow.ended_at.unix_us,
        });
        self.emit(Event { kind: SLOW, text: slow.to_string(), about });
    }

    /// Emits the event of slow commands that were dropped.
    pub fn emit_slow_io_dropped(&self, count: u64) {
        let text = format!("{count} slow commands were not logged: there were too many at once");
        self.emit(Event { kind: DROPPED, text, about: json!({ "count": count }) });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::parse_slow_io;

    #[test]
    fn threshold_is_a_time_or_off() {
        assert_eq!(parse_slow_io("10ms"), Ok(Some(Span::from_ms(10))));
        assert_eq!(parse_slow_io("0.5"), Ok(Some(Span::from_ms(500))));
        assert_eq!(parse_slow_io("off"), Ok(None));
        assert!(parse_slow_io("0").unwrap_err().contains("at least 1 us"));
        assert!(parse_slow_io("never").unwrap_err().ends_with("or off"));
    }
}
