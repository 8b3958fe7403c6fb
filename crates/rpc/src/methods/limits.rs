//! Rate limits of what a process serves: of subsystems, namespaces, hosts and NBD exports.

use serde_json::{Value, json};
use tenmil_block::{QosLimits, RateLimit};
use tenmil_serve::tcp::{ExportLimits, Service};

use super::NbdExports;
use super::live_configuration::{changed, request_edit};
use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};
use crate::target_config::{ConfigEdit, ConfigObject, ExportConfig, SubsystemConfig, TargetConfig};

/// Rate limits of the NVMe/TCP service of a process.
#[derive(Clone, Debug)]
pub struct RateLimits(pub Service);

const NAME: ParamType = ParamType::Text { len_max: 223 };
const NUMBER: ParamType = ParamType::Whole { min: 0, max: u64::MAX };
const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);
const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);
/// Longest burst in milliseconds: one hour.
const BURST_MS_MAX: u64 = 3_600_000;

const ROW: &[FieldSchema] = &[
    FieldSchema::new(
        "of",
        ResultType::Text,
        "what is limited: subsystem, namespace, host, each-host (every host without limits of its own) or \
         export (an NBD export)",
    ),
    FieldSchema::new("export", ResultType::Text, "NQN of the subsystem, or name of the NBD export"),
    FieldSchema::new("namespace", WHOLE, "namespace identifier"),
    FieldSchema::new("host", TEXT, "NQN of the host"),
    FieldSchema::new("iops", WHOLE, "commands per second; null if there is no limit"),
    FieldSchema::new("read_iops", WHOLE, "reads per second"),
    FieldSchema::new("write_iops", WHOLE, "all other commands except flushes per second"),
    FieldSchema::new("bytes", WHOLE, "bytes per second"),
    FieldSchema::new("read_bytes", WHOLE, "bytes read per second"),
    FieldSchema::new("write_bytes", WHOLE, "bytes written per second"),
    FieldSchema::new(
        "burst_ms",
        ResultType::Whole,
        "time for which an unused rate accumulates and may be used at once; at least 20 ms",
    ),
];

const fn parameter(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Optional, help }
}

const SUBSYSTEM: Parameter =
    parameter("subsystem", NAME, "NQN of the subsystem; optional if there is only one");
const IOPS: Parameter = parameter("iops", NUMBER, "commands per second; 0 for no limit");
const READ_IOPS: Parameter = parameter("read_iops", NUMBER, "reads per second");
const WRITE_IOPS: Parameter =
    parameter("write_iops", NUMBER, "all other commands except flushes per second");
const BYTES: Parameter = parameter("bytes", NUMBER, "bytes per second; 0 for no limit");
const READ_BYTES: Parameter = parameter("read_bytes", NUMBER, "bytes read per second");
const WRITE_BYTES: Parameter = parameter("write_bytes", NUMBER, "bytes written per second");
const BURST: Parameter = parameter(
    "burst_ms",
    ParamType::Whole { min: 0, max: BURST_MS_MAX },
    "time for which an unused rate accumulates and may be used at once; at least 20 ms",
);

const CHANGED_LIMITS: &[FieldSchema] = &changed(&ResultType::Record(ROW));

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "limits",
        parameters: &[],
        answer: ResultType::Rows(ROW),
        help: "List the rate limits of subsystems, namespaces, hosts and NBD exports",
        example: "tenmil get limits",
        run: limits_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "subsystem_limits",
        parameters: &[
            SUBSYSTEM,
            IOPS,
            READ_IOPS,
            WRITE_IOPS,
            BYTES,
            READ_BYTES,
            WRITE_BYTES,
            BURST,
        ],
        answer: ResultType::Record(CHANGED_LIMITS),
        help: "Change the rate limits of all hosts and namespaces of a subsystem together",
        example: "tenmil set subsystem_limits iops=100000",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::SubsystemLimits),
    },
    Method {
        verb: MethodKind::Set,
        name: "namespace_limits",
        parameters: &[
            SUBSYSTEM,
            Parameter {
                name: "namespace",
                kind: ParamType::Whole { min: 1, max: u32::MAX as u64 },
                need: ParamDefault::Required,
                help: "namespace identifier",
            },
            IOPS,
            READ_IOPS,
            WRITE_IOPS,
            BYTES,
            READ_BYTES,
            WRITE_BYTES,
            BURST,
        ],
        answer: ResultType::Record(CHANGED_LIMITS),
        help: "Change the rate limits of a namespace, for all hosts together",
        example: "tenmil set namespace_limits namespace=1 iops=5000 write_bytes=100000000",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::NamespaceLimits),
    },
    Method {
        verb: MethodKind::Set,
        name: "host_limits",
        parameters: &[
            SUBSYSTEM,
            parameter(
                "host",
                NAME,
                "NQN of the host; without it, each host that has no limits of its own",
            ),
            IOPS,
            READ_IOPS,
            WRITE_IOPS,
            BYTES,
            READ_BYTES,
            WRITE_BYTES,
            BURST,
        ],
        answer: ResultType::Record(CHANGED_LIMITS),
        help: "Change the rate limits of a host, for all its connections together",
        example: "tenmil set host_limits host=nqn.2014-08.org.example:client iops=5000 burst_ms=2000",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::HostLimits),
    },
    Method {
        verb: MethodKind::Set,
        name: "export_limits",
        parameters: &[
            parameter(
                "name",
                ParamType::Text { len_max: 4096 },
                "name of the NBD export; optional if there is only one",
            ),
            IOPS,
            READ_IOPS,
            WRITE_IOPS,
            BYTES,
            READ_BYTES,
            WRITE_BYTES,
            BURST,
        ],
        answer: ResultType::Record(CHANGED_LIMITS),
        help: "Change the rate limits of an NBD export, for all clients together",
        example: "tenmil set export_limits name=images iops=5000 write_bytes=100000000",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::ExportLimits),
    },
];

fn limits_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let nvme = call.state.find_part::<RateLimits>("rate limits");
    let nbd = call.state.find_part::<NbdExports>("exports");
    if let (Err(_), Err(error)) = (&nvme, &nbd) {
        return Err(error.clone());
    }
    let mut rows = Vec::new();
    for (nqn, limits) in nvme.map(|RateLimits(service)| service.all_limits()).unwrap_or_default() {
        let ExportLimits { subsystem, namespaces, hosts, each_host } = limits;
        let mut add = |of: &str, namespace: Option<u32>, host: Option<&str>, limits: &QosLimits| {
            rows.push(limits_row(of, &nqn, namespace, host, limits));
        };
        add("subsystem", None, None, &subsystem);
        namespaces.iter().for_each(|(nsid, of)| add("namespace", Some(*nsid), None, of));
        add("each-host", None, None, &each_host);
        hosts.iter().for_each(|(host, of)| add("host", None, Some(host), of));
    }
    for served in nbd.map(NbdExports::served).unwrap_or_default() {
        let name = served.export().name();
        rows.push(limits_row("export", name, None, None, &served.qos_limits()));
    }
    Ok(rows.into())
}

/// Row of the object whose limits an edit has changed, in the configuration that is served.
pub(super) fn edited_limits_row(config: &TargetConfig, edit: &ConfigEdit) -> Option<Value> {
    let text = |parameter: &str| edit.arguments.text(parameter);
    if edit.object == ConfigObject::ExportLimits {
        let is_it = |one: &&ExportConfig| text("name").is_none_or(|name| one.name == name);
        let one = config.exports.iter().find(is_it)?;
        return Some(limits_row("export", &one.name, None, None, &one.limits));
    }
    let is_it = |one: &&SubsystemConfig| text("subsystem").is_none_or(|nqn| one.nqn == nqn);
    let SubsystemConfig { nqn, limits, .. } = config.subsystems.iter().find(is_it)?;
    let none = QosLimits::default();
    Some(match (edit.object, text("host")) {
        (ConfigObject::NamespaceLimits, _) => {
            let nsid = u32::try_from(edit.arguments.integer("namespace")?).ok()?;
            let of = limits.namespaces.get(&nsid).unwrap_or(&none);
            limits_row("namespace", nqn, Some(nsid), None, of)
        }
        (ConfigObject::HostLimits, Some(host)) => {
            let of = limits.hosts.get(host).unwrap_or(&limits.each_host);
            limits_row("host", nqn, None, Some(host), of)
        }
        (ConfigObject::HostLimits, None) => {
            limits_row("each-host", nqn, None, None, &limits.each_host)
        }
        _ => limits_row("subsystem", nqn, None, None, &limits.subsystem),
    })
}

fn limits_row(
    of: &str,
    export: &str,
    namespace: Option<u32>,
    host: Option<&str>,
    limits: &QosLimits,
) -> Value {
    let QosLimits { total, reads, writes, burst } = limits;
    let mut row = json!({ "of": of, "export": export, "namespace": namespace, "host": host });
    for (prefix, RateLimit { iops, bytes }) in [("", total), ("read_", reads), ("write_", writes)] {
        row[format!("{prefix}iops")] = json!(iops);
        row[format!("{prefix}bytes")] = json!(bytes);
    }
    row["burst_ms"] = json!((burst.ns / 1_000_000).max(20));
    row
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroU64;
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tenmil_base::Span;
    use tenmil_block::{QosLimits, RateLimit};
    use tenmil_dma::RegionTable;
    use tenmil_drivers::NullDevice;
    use tenmil_linux::Clock;
    use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
    use tenmil_serve::tcp::{
        AllowedHosts, ControllerModel, ExportLimits, Service, ServiceLimits, SubsystemExportConfig,
        SubsystemSecurity,
    };

    use super::RateLimits;
    use crate::ProcessParts;
    use crate::methods::test_calls::call_method;

    const NQN: &str = "nqn.2026-01.org.example:disk";

    fn process() -> (ProcessParts, Service) {
        let limits =
            ServiceLimits { connections_max: 1, memory_bytes: 4 << 20, ..ServiceLimits::default() };
        let service = Service::new(&RegionTable::new(4), limits).unwrap();
        let medium = Arc::new(NullDevice::new(512, 2048).unwrap());
        let config = SubsystemConfig {
            nqn: NQN.to_owned(),
            ..SubsystemConfig::new("1", vec![NamespaceConfig::new(medium)])
        };
        let export = SubsystemExportConfig {
            subsystem: Subsystem::new(config).unwrap(),
            nqn: NQN.to_owned(),
            hosts: AllowedHosts::Any,
            ports: BTreeMap::new(),
            model: ControllerModel::Dynamic,
            masks: BTreeMap::new(),
            security: SubsystemSecurity::default(),
        };
        service.add_subsystem(export).unwrap();
        (ProcessParts::new().with_part(RateLimits(service.clone())), service)
    }

    #[test]
    fn limits_of_subsystems_namespaces_and_hosts_are_listed() {
        let (state, service) = process();
        let rows = call_method(&state, "limits", &json!({})).unwrap();
        let of = |rows: &Value| -> Vec<String> {
            let rows = rows.as_array().unwrap();
            rows.iter().map(|row| row["of"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(of(&rows), ["subsystem", "each-host"]);
        assert_eq!((&rows[0]["iops"], &rows[0]["burst_ms"]), (&Value::Null, &json!(20)));

        let rate = |iops| RateLimit { iops: NonZeroU64::new(iops), bytes: None };
        let none = QosLimits::default();
        let limits = ExportLimits {
            subsystem: QosLimits { reads: rate(7), ..none },
            namespaces: [(1, QosLimits { writes: rate(3), ..none })].into(),
            hosts: [("nqn.h".to_owned(), QosLimits { total: rate(9), ..none })].into(),
            each_host: QosLimits { total: rate(50), burst: Span::from_ms(1_500), ..none },
        };
        assert!(service.set_export_limits(Clock::start().now(), NQN, limits));
        let rows = call_method(&state, "limits", &json!({})).unwrap();
        assert_eq!(of(&rows), ["subsystem", "namespace", "each-host", "host"]);
        assert_eq!((&rows[0]["read_iops"], &rows[1]["write_iops"]), (&json!(7), &json!(3)));
        assert_eq!((&rows[2]["burst_ms"], &rows[3]["host"]), (&json!(1_500), &json!("nqn.h")));
    }

    #[test]
    fn process_without_limits_says_so() {
        let error = call_method(&ProcessParts::new(), "limits", &json!({})).unwrap_err();
        assert!(error.message.contains("expected one that has"), "{error:?}");
    }
}
