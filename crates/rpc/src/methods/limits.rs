//! Rate limits of what a process serves: of subsystems, namespaces, hosts and NBD exports.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_block::{QosLimits, RateLimit};
use tenmil_linux::Clock;
use tenmil_serve::tcp::{ExportLimits, Service};

use super::NbdExports;
use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// Rate limits of the NVMe/TCP service of a process, which uses this clock.
#[derive(Clone, Debug)]
pub struct RateLimits {
    /// The service.
    pub service: Service,
    /// Clock of its reactors.
    pub clock: Clock,
}

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
        answer: ResultType::Record(ROW),
        help: "Change the rate limits of all hosts and namespaces of a subsystem together",
        example: "tenmil set subsystem_limits iops=100000",
        run: |call| set_limits_method(call, Scope::Subsystem),
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
        answer: ResultType::Record(ROW),
        help: "Change the rate limits of a namespace, for all hosts together",
        example: "tenmil set namespace_limits namespace=1 iops=5000 write_bytes=100000000",
        run: |call| {
            let nsid = call.arguments.integer("namespace").unwrap_or_default();
            set_limits_method(call, Scope::Namespace(u32::try_from(nsid).unwrap_or_default()))
        },
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
        answer: ResultType::Record(ROW),
        help: "Change the rate limits of a host, for all its connections together",
        example: "tenmil set host_limits host=nqn.2014-08.org.example:client iops=5000 burst_ms=2000",
        run: |call| {
            let host = call.arguments.text("host").map(str::to_owned);
            set_limits_method(call, host.map_or(Scope::EachHost, Scope::Host))
        },
    },
];

/// What limits are of, within a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Subsystem,
    Namespace(u32),
    Host(String),
    EachHost,
}

impl Scope {
    /// Its limits, which are added if it has none.
    fn limits<'a>(&self, limits: &'a mut ExportLimits) -> &'a mut QosLimits {
        match self {
            Self::Subsystem => &mut limits.subsystem,
            Self::Namespace(nsid) => limits.namespaces.entry(*nsid).or_default(),
            Self::Host(host) => {
                let each = limits.each_host;
                limits.hosts.entry(host.clone()).or_insert(each)
            }
            Self::EachHost => &mut limits.each_host,
        }
    }

    fn row(&self, nqn: &str, limits: &QosLimits) -> Value {
        let (of, namespace, host) = match self {
            Self::Subsystem => ("subsystem", None, None),
            Self::Namespace(nsid) => ("namespace", Some(*nsid), None),
            Self::Host(host) => ("host", None, Some(host.as_str())),
            Self::EachHost => ("each-host", None, None),
        };
        limits_row(of, nqn, namespace, host, limits)
    }
}

fn limits_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let nvme = call.state.find_part::<RateLimits>("rate limits");
    let nbd = call.state.find_part::<NbdExports>("exports");
    if let (Err(_), Err(error)) = (&nvme, &nbd) {
        return Err(error.clone());
    }
    let mut rows = Vec::new();
    for (nqn, limits) in nvme.map(|part| part.service.all_limits()).unwrap_or_default() {
        let ExportLimits { subsystem, namespaces, hosts, each_host } = limits;
        rows.push(Scope::Subsystem.row(&nqn, &subsystem));
        rows.extend(namespaces.iter().map(|(nsid, of)| Scope::Namespace(*nsid).row(&nqn, of)));
        rows.push(Scope::EachHost.row(&nqn, &each_host));
        rows.extend(hosts.into_iter().map(|(host, of)| Scope::Host(host).row(&nqn, &of)));
    }
    for served in nbd.map(NbdExports::served).unwrap_or_default() {
        let name = served.export().name();
        rows.push(limits_row("export", name, None, None, &served.qos_limits()));
    }
    Ok(rows.into())
}

fn set_limits_method(call: &CallContext<'_>, scope: Scope) -> Result<Value, RpcError> {
    let RateLimits { service, clock } = call.state.find_part::<RateLimits>("NVMe/TCP target")?;
    let mut all: BTreeMap<String, ExportLimits> = service.all_limits().into_iter().collect();
    let names: Vec<String> = all.keys().cloned().collect();
    let name = match (call.arguments.text("subsystem"), &names[..]) {
        (Some(name), _) => name.to_owned(),
        (None, [only]) => only.clone(),
        (None, _) => String::new(),
    };
    let not_found = || {
        let found = if name.is_empty() {
            "no subsystem is named".to_owned()
        } else {
            format!("no subsystem {}", quote_untrusted(&name))
        };
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let message = format!("set limits: {found}, expected {}", join_alternatives(&names));
        RpcError::usage(ErrorCode::NotFound, message)
    };
    let mut limits = all.remove(&name).ok_or_else(not_found)?;
    let of = scope.limits(&mut limits);
    change_limits(call, of);
    let row = scope.row(&name, of);
    limits.namespaces.retain(|_, of| !of.is_unlimited());
    if !service.set_export_limits(clock.now(), &name, limits) {
        return Err(not_found());
    }
    Ok(row)
}

/// Applies the arguments that are given.
fn change_limits(call: &CallContext<'_>, limits: &mut QosLimits) {
    let change = |name: &str, rate: &mut Option<NonZeroU64>| {
        if let Some(value) = call.arguments.integer(name) {
            *rate = NonZeroU64::new(value);
        }
    };
    let QosLimits { total, reads, writes, burst } = limits;
    for (prefix, RateLimit { iops, bytes }) in [("", total), ("read_", reads), ("write_", writes)] {
        change(&format!("{prefix}iops"), iops);
        change(&format!("{prefix}bytes"), bytes);
    }
    if let Some(ms) = call.arguments.integer("burst_ms") {
        *burst = Span::from_ms(ms);
    }
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
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tenmil_dma::RegionTable;
    use tenmil_drivers::NullDevice;
    use tenmil_linux::Clock;
    use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
    use tenmil_serve::tcp::{
        AllowedHosts, ControllerModel, Service, ServiceLimits, SubsystemExportConfig,
        SubsystemSecurity,
    };

    use super::RateLimits;
    use crate::ProcessParts;
    use crate::methods::test_calls::call_method;

    const NQN: &str = "nqn.2026-01.org.example:disk";

    fn process() -> ProcessParts {
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
        ProcessParts::new().with_part(RateLimits { service, clock: Clock::start() })
    }

    #[test]
    fn changed_limits_are_listed_and_others_stay() {
        let state = process();
        let rows = call_method(&state, "limits", &json!({})).unwrap();
        let of = |rows: &Value| -> Vec<String> {
            let rows = rows.as_array().unwrap();
            rows.iter().map(|row| row["of"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(of(&rows), ["subsystem", "each-host"]);
        assert_eq!((&rows[0]["iops"], &rows[0]["burst_ms"]), (&Value::Null, &json!(20)));

        call_method(&state, "set_subsystem_limits", &json!({ "read_iops": 7 })).unwrap();
        call_method(&state, "set_host_limits", &json!({ "iops": 50, "burst_ms": 1_500 })).unwrap();
        let row = call_method(&state, "set_host_limits", &json!({ "host": "nqn.h", "bytes": 9 }))
            .unwrap();
        assert_eq!((&row["iops"], &row["bytes"]), (&json!(50), &json!(9)), "beside those of each");
        call_method(&state, "set_namespace_limits", &json!({ "namespace": 1, "write_bytes": 3 }))
            .unwrap();
        let row =
            call_method(&state, "set_namespace_limits", &json!({ "namespace": 1, "iops": 4 }))
                .unwrap();
        assert_eq!((&row["write_bytes"], &row["iops"]), (&json!(3), &json!(4)));

        let rows = call_method(&state, "limits", &json!({})).unwrap();
        assert_eq!(of(&rows), ["subsystem", "namespace", "each-host", "host"]);
        assert_eq!(rows[0]["read_iops"], 7);
        assert_eq!((&rows[2]["burst_ms"], &rows[3]["host"]), (&json!(1_500), &json!("nqn.h")));

        let none = json!({ "namespace": 1, "iops": 0, "write_bytes": 0 });
        call_method(&state, "set_namespace_limits", &none).unwrap();
        let rows = call_method(&state, "limits", &json!({})).unwrap();
        assert_eq!(of(&rows), ["subsystem", "each-host", "host"]);
    }

    #[test]
    fn unknown_subsystem_is_refused_with_those_that_exist() {
        let state = process();
        let other = json!({ "subsystem": "nqn.other", "iops": 1 });
        let error = call_method(&state, "set_subsystem_limits", &other).unwrap_err();
        assert!(error.message.contains("nqn.other") && error.message.contains(NQN), "{error:?}");
        let error = call_method(&ProcessParts::new(), "limits", &json!({})).unwrap_err();
        assert!(error.message.contains("expected one that has"), "{error:?}");
    }
}
