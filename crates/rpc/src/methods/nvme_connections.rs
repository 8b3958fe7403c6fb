//! NVMe/TCP connections of a target, and their events.

use serde_json::{Value, json};
use tenmil_serve::tcp::{ConnectionAudit, ConnectionSample, Service, TargetEvent};

use crate::event::{Event, EventKind, EventSender};
use crate::method::{Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// NVMe/TCP service of a process.
#[derive(Clone, Debug)]
pub struct NvmeConnections(pub Service);

const NAME: ParamType = ParamType::Text { len_max: 223 };
const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);
const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

const QUEUE: &[FieldSchema] = &[
    FieldSchema::new("id", ResultType::Whole, "connection identifier, never reused"),
    FieldSchema::new("peer", ResultType::Text, "address of the peer"),
    FieldSchema::new(
        "port",
        ResultType::Whole,
        "number of the listener that accepted the connection, from 1",
    ),
    FieldSchema::new("host", TEXT, "NQN of the host, once known"),
    FieldSchema::new("subsystem", TEXT, "name of the export or subsystem"),
    FieldSchema::new("controller", WHOLE, "controller identifier"),
    FieldSchema::new("queue", WHOLE, "queue identifier; 0 is the admin queue"),
    FieldSchema::new("cipher_suite", TEXT, "cipher suite of the TLS connection"),
    FieldSchema::new(
        "authentication",
        TEXT,
        "DH-HMAC-CHAP exchange that the host has completed: hash, group and index of the secret",
    ),
    FieldSchema::new("header_digest", ResultType::Flag, "whether header digests are in use"),
    FieldSchema::new("data_digest", ResultType::Flag, "whether data digests are in use"),
    FieldSchema::new("memory_bytes", ResultType::Whole, "buffer memory that the connection holds"),
    FieldSchema::new("reactor", WHOLE, "reactor that runs the connection, once assigned"),
];

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "nvme_connections",
    parameters: &[
        Parameter {
            name: "subsystem",
            kind: NAME,
            need: ParamDefault::Optional,
            help: "only connections to the subsystem with this NQN",
        },
        Parameter {
            name: "host",
            kind: NAME,
            need: ParamDefault::Optional,
            help: "only connections of the host with this NQN",
        },
    ],
    answer: ResultType::Rows(QUEUE),
    help: "List the NVMe/TCP connections, one per queue of a host",
    example: "tenmil get nvme_connections host=nqn.2014-08.org.example:client",
    run: |call| {
        let NvmeConnections(service) = call.state.find_part::<NvmeConnections>("queues")?;
        let wanted = |name: &str, found: &Option<String>| {
            call.arguments.text(name).is_none_or(|wanted| found.as_deref() == Some(wanted))
        };
        let connections = service.connections().into_iter();
        let all = connections.filter(|one| wanted("subsystem", &one.subsystem));
        Ok(all.filter(|one| wanted("host", &one.host)).map(connection_row).collect())
    },
}];

fn connection_row(sample: ConnectionSample) -> Value {
    json!({
        "id": sample.id,
        "peer": sample.peer,
        "port": sample.port,
        "host": sample.host,
        "subsystem": sample.subsystem,
        "controller": sample.cntlid,
        "queue": sample.queue,
        "cipher_suite": sample.cipher_suite,
        "authentication": sample.authentication.map(|authentication| authentication.to_string()),
        "header_digest": sample.header_digest,
        "data_digest": sample.data_digest,
        "memory_bytes": sample.memory_bytes,
        "reactor": sample.reactor,
    })
}

const CONNECTED: EventKind =
    host_event_kind("host-connected", "a host opened an NVMe/TCP connection");
const ASSOCIATED: EventKind =
    host_event_kind("host-associated", "a host created an association with a subsystem");
const ACCEPTED: EventKind = host_event_kind(
    "host-accepted",
    "a queue of a host was connected, with what the host has proved: cipher suite and authentication",
);
const AUTHENTICATED: EventKind =
    host_event_kind("host-authenticated", "a connected queue was authenticated again");
const REFUSED: EventKind = host_event_kind(
    "host-refused",
    "a connection, a Connect or an authentication was rejected, with the reason; of each address, a \
     limited number is reported",
);
const DISCONNECTED: EventKind =
    host_event_kind("host-disconnected", "an NVMe/TCP connection ended, with the reason");
const ERROR: EventKind = host_event_kind(
    "nvme-tcp-error",
    "an error or a notable condition occurred on NVMe/TCP connections",
);
const APPLIED: EventKind = host_event_kind(
    "configuration-applied",
    "the configuration file was applied, with the changes",
);
const NOT_APPLIED: EventKind = host_event_kind(
    "configuration-refused",
    "the configuration file was rejected, with the error; nothing was changed",
);

pub(super) const EVENTS: &[EventKind] = &[
    CONNECTED,
    ASSOCIATED,
    ACCEPTED,
    AUTHENTICATED,
    REFUSED,
    DISCONNECTED,
    ERROR,
    APPLIED,
    NOT_APPLIED,
];

const fn host_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl EventSender {
    /// Emits an event of the NVMe/TCP target.
    pub fn emit_target_event(&self, new_events: &TargetEvent) {
        let (kind, about) = match new_events {
            TargetEvent::Connected { connection, peer } => {
                (CONNECTED, json!({ "connection": connection, "peer": peer }))
            }
            TargetEvent::Associated { connection, peer, host, subsystem, cntlid } => (
                ASSOCIATED,
                json!({
                    "connection": connection,
                    "peer": peer,
                    "host": host,
                    "subsystem": subsystem,
                    "controller": cntlid,
                }),
            ),
            TargetEvent::Accepted(audit) => (ACCEPTED, audit_object(audit)),
            TargetEvent::Authenticated(audit) => (AUTHENTICATED, audit_object(audit)),
            TargetEvent::Rejected { audit, reason, unreported, .. } => {
                let mut object = audit_object(audit);
                object["reason"] = json!(reason.name());
                object["unreported"] = json!(unreported);
                (REFUSED, object)
            }
            TargetEvent::Disconnected { connection, peer, reason } => (
                DISCONNECTED,
                json!({ "connection": connection, "peer": peer, "reason": reason.name() }),
            ),
            TargetEvent::Notice(_) | TargetEvent::Error(_) => (ERROR, json!({})),
        };
        self.emit(Event { kind, text: new_events.to_string(), about });
    }

    /// Emits the result of applying the configuration file at `path`: its changes or its error.
    pub fn emit_configuration_event(&self, path: &str, applied: Result<&[String], &str>) {
        let about = json!({ "path": path, "changes": applied.unwrap_or_default() });
        let (kind, text) = match applied {
            Ok([]) => (APPLIED, format!("{path}: nothing has changed")),
            Ok(changes) => (APPLIED, format!("{path}: {}", changes.join("; "))),
            Err(why) => (NOT_APPLIED, format!("nothing is changed: {why}")),
        };
        self.emit(Event { kind, text, about });
    }
}

/// Audit of a connection as an object.
fn audit_object(audit: &ConnectionAudit) -> Value {
    let authentication = audit.authentication.map(|authentication| {
        json!({
            "hash": authentication.hash.to_string(),
            "group": authentication.group.to_string(),
            "bidirectional": authentication.bidirectional,
            "secret": authentication.secret_index,
            "generated_key": authentication.concatenation.generates_psk(),
        })
    });
    json!({
        "connection": audit.connection,
        "peer": audit.peer,
        "port": audit.port,
        "host": audit.host,
        "subsystem": audit.subsystem,
        "controller": audit.cntlid,
        "queue": audit.queue,
        "cipher_suite": audit.secure_channel.as_ref().map(|channel| channel.cipher_suite),
        "tls_identity": audit.secure_channel.as_ref().and_then(|channel| channel.psk_identity.clone()),
        "authentication": authentication,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tenmil_dma::RegionTable;
    use tenmil_serve::tcp::{DisconnectReason, Service, ServiceLimits, TargetEvent};

    use super::{APPLIED, DISCONNECTED, NOT_APPLIED, NvmeConnections};
    use crate::event::event_channel;
    use crate::methods::TABLE;
    use crate::{Arguments, CallContext, DeferredReplySlot, ProcessParts};

    #[test]
    fn service_without_listeners_has_no_connections() {
        let limits =
            ServiceLimits { connections_max: 1, memory_bytes: 4 << 20, ..ServiceLimits::default() };
        let service = Service::new(&RegionTable::new(4), limits).unwrap();
        let state = ProcessParts::new().with_part(NvmeConnections(service));
        let method = TABLE.find("nvme_connections").unwrap();
        let arguments = Arguments::validate(method, &serde_json::Map::new()).unwrap();
        let call = CallContext {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &DeferredReplySlot::default(),
            passed: &crate::PassedFd::default(),
        };
        assert_eq!((method.run)(&call).unwrap(), json!([]));
        let none = ProcessParts::new();
        let refusal = (method.run)(&CallContext { state: &none, ..call }).unwrap_err();
        assert_eq!(refusal.message, "this process has no queues, expected one that has");
    }

    #[test]
    fn target_event_carries_its_reason() {
        let (announcer, announced) = event_channel().unwrap();
        let reason = DisconnectReason::Timeout("connect");
        announcer.emit_target_event(&TargetEvent::Disconnected {
            connection: 3,
            peer: "x".into(),
            reason,
        });
        let event = announced.next().unwrap();
        assert_eq!((event.kind, &event.about["reason"]), (DISCONNECTED, &json!("timeout")));
        let changes = ["adds one".to_owned(), "removes two".to_owned()];
        announcer.emit_configuration_event("a.toml", Ok(&changes));
        let event = announced.next().unwrap();
        assert_eq!((event.kind, event.text.as_str()), (APPLIED, "a.toml: adds one; removes two"));
        announcer.emit_configuration_event("a.toml", Ok(&[]));
        assert_eq!(announced.next().unwrap().text, "a.toml: nothing has changed");
        announcer
            .emit_configuration_event("a.toml", Err("a.toml: line 1, `buffer-memory`: it is less"));
        let event = announced.next().unwrap();
        assert_eq!((event.kind, &event.about["changes"]), (NOT_APPLIED, &json!([])));
    }
}
