//! Objects of the configuration of a running target: subsystems, namespaces, hosts and listeners.
//!
//! Each is listed by a get method, and created, changed and deleted by methods that edit the text of the
//! configuration ([`ConfigEdit`]).

mod object_rows;
#[cfg(test)]
mod tests;

use serde_json::Value;

use super::target_configuration::{
    CHANGES, ConfigurationAction, FAILED, SAVED_TO, request_change, served_configuration,
};
use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};
use crate::target_config::{ConfigEdit, ConfigObject};

pub(super) use self::object_rows::object_row;
use self::object_rows::{HOST, LISTENER, NAMESPACE, NBD_EXPORT, SUBSYSTEM};

/// Longest NQN (Base 2.1 §4.7).
const NQN: ParamType = ParamType::Text { len_max: tenmil_wire::nqn::LEN_MAX };
const NQNS: ParamType =
    ParamType::Texts { len_max: tenmil_wire::nqn::LEN_MAX, count_max: LIST_MAX };
const WORD: ParamType = ParamType::Text { len_max: 64 };
const WORDS: ParamType = ParamType::Texts { len_max: 64, count_max: LIST_MAX };
const EXPORT_NAME: ParamType = ParamType::Text { len_max: 255 };
const NSID: ParamType = ParamType::Whole { min: 1, max: 1024 };
const REQUIREMENT: ParamType = ParamType::OneOf(&["optional", "required"]);
/// Longest list of an object.
const LIST_MAX: usize = 1024;

const fn required(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Required, help }
}

const fn optional(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Optional, help }
}

const UNSET: Parameter = optional(
    "unset",
    WORDS,
    "parameters that return to their defaults, by name; their keys are removed from the configuration",
);

// Subsystems.
const SUBSYSTEM_NQN: Parameter = required("nqn", NQN, "NQN of the subsystem");
const ALLOW_ANY_HOST: Parameter =
    optional("allow_any_host", ParamType::Flag, "whether any host may connect, without a list");
const AUTHENTICATION: Parameter = optional(
    "authentication",
    REQUIREMENT,
    "whether each host must authenticate with DH-HMAC-CHAP",
);
const SECURE_CHANNEL: Parameter =
    optional("secure_channel", REQUIREMENT, "whether connections need TLS");
const LISTENERS: Parameter = optional(
    "listeners",
    WORDS,
    "addresses of the listeners that show the subsystem; without any, all do",
);
const NETWORKS: Parameter = optional(
    "allowed_networks",
    WORDS,
    "networks whose hosts may connect, such as 192.0.2.0/24; without any, all may",
);

// Namespaces and hosts.
const OF_SUBSYSTEM: Parameter = required("subsystem", NQN, "NQN of the subsystem");
const OF_SUBSYSTEM_OR_DISCOVERY: Parameter =
    required("subsystem", NQN, "NQN of the subsystem, or of the discovery service");
const ONLY_SUBSYSTEM: Parameter =
    optional("subsystem", NQN, "only those of the subsystem with this NQN");
const NAMESPACE_NSID: Parameter = required("nsid", NSID, "namespace identifier (NSID)");
const READ_ONLY: Parameter =
    optional("read_only", ParamType::Flag, "whether the namespace is write protected");
const VISIBLE_TO: Parameter = optional(
    "allowed_hosts",
    NQNS,
    "hosts of the subsystem that see the namespace; without any, all do",
);
const ANA_GROUP: Parameter =
    optional("ana_group", ParamType::Whole { min: 1, max: 128 }, "ANA group of the namespace");
const HOST_NQN: Parameter = required("host", NQN, "NQN of the host");
const DHCHAP: Parameter =
    optional("dhchap", WORDS, "names of the DH-HMAC-CHAP secrets of the host in the keyring");
const DHCHAP_CONTROLLER: Parameter =
    optional("dhchap_controller", WORD, "name of the DH-HMAC-CHAP secret of the controller");
const PSK: Parameter = optional(
    "psk",
    WORDS,
    "names of the TLS PSKs of the host in the keyring, or .nvme for the kernel's keyring",
);
const HOST_READ_ONLY: Parameter =
    optional("read_only", ParamType::Flag, "whether the host may only read");
const HOST_READ_ONLY_NAMESPACES: Parameter = optional(
    "read_only_namespaces",
    ParamType::Texts { len_max: 4, count_max: LIST_MAX },
    "identifiers of the namespaces that the host may only read",
);
const RESERVATIONS: Parameter =
    optional("reservations", ParamType::Flag, "whether the host may hold reservations");
const CONNECTIONS: Parameter = optional(
    "connections",
    ParamType::Whole { min: 1, max: 1 << 16 },
    "largest number of connections of the host",
);
const BUFFER_MEMORY: Parameter =
    optional("buffer_memory", WORD, "memory for data buffers of the host, such as 16m");

// Listeners.
const ADDRESS: Parameter =
    required("address", WORD, "address and port of the listener, such as 192.0.2.1:4420");
const TLS: Parameter = optional(
    "tls",
    ParamType::OneOf(&["off", "allowed", "required"]),
    "whether connections use TLS",
);

/// Result of a change, with the object as it is now.
pub(super) const fn changed(row: &'static ResultType) -> [FieldSchema; 4] {
    [
        CHANGES,
        FAILED,
        SAVED_TO,
        FieldSchema::new("object", ResultType::Maybe(row), "the object as it is now"),
    ]
}

const CHANGED_SUBSYSTEM: &[FieldSchema] = &changed(&ResultType::Record(SUBSYSTEM));
const CHANGED_NAMESPACE: &[FieldSchema] = &changed(&ResultType::Record(NAMESPACE));
const CHANGED_HOST: &[FieldSchema] = &changed(&ResultType::Record(HOST));
const CHANGED_LISTENER: &[FieldSchema] = &changed(&ResultType::Record(LISTENER));
const CHANGED_EXPORT: &[FieldSchema] = &changed(&ResultType::Record(NBD_EXPORT));
const DELETED: &[FieldSchema] = &[CHANGES, FAILED, SAVED_TO];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "subsystems",
        parameters: &[],
        answer: ResultType::Rows(SUBSYSTEM),
        help: "List the NVMe subsystems that are served",
        example: "tenmil get subsystems",
        run: |call| Ok(object_rows::subsystem_rows(&*served_configuration(call)?).into()),
    },
    Method {
        verb: MethodKind::Create,
        name: "subsystem",
        parameters: &[
            SUBSYSTEM_NQN,
            ALLOW_ANY_HOST,
            optional(
                "allowed_hosts",
                NQNS,
                "NQNs of the hosts that may connect; more can be added",
            ),
            optional(
                "serial",
                ParamType::Text { len_max: 20 },
                "serial number; without one it is derived from the NQN",
            ),
            LISTENERS,
            AUTHENTICATION,
            SECURE_CHANNEL,
            NETWORKS,
        ],
        answer: ResultType::Record(CHANGED_SUBSYSTEM),
        help: "Create an NVMe subsystem without namespaces, to which the listed hosts may connect",
        example: "tenmil subsystem create nqn.2026-01.org.example:disks",
        run: |call| request_edit(call, MethodKind::Create, ConfigObject::Subsystem),
    },
    Method {
        verb: MethodKind::Set,
        name: "subsystem",
        parameters: &[
            SUBSYSTEM_NQN,
            ALLOW_ANY_HOST,
            LISTENERS,
            AUTHENTICATION,
            SECURE_CHANNEL,
            NETWORKS,
            UNSET,
        ],
        answer: ResultType::Record(CHANGED_SUBSYSTEM),
        help: "Change who may connect to an NVMe subsystem, or to the discovery service, and through which listeners",
        example: "tenmil set subsystem nqn=nqn.2026-01.org.example:disks authentication=required",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::Subsystem),
    },
    Method {
        verb: MethodKind::Delete,
        name: "subsystem",
        parameters: &[SUBSYSTEM_NQN],
        answer: ResultType::Record(DELETED),
        help: "Delete an NVMe subsystem with its namespaces, and disconnect its hosts; data stay",
        example: "tenmil subsystem delete nqn.2026-01.org.example:disks",
        run: |call| request_edit(call, MethodKind::Delete, ConfigObject::Subsystem),
    },
    Method {
        verb: MethodKind::Get,
        name: "namespaces",
        parameters: &[ONLY_SUBSYSTEM],
        answer: ResultType::Rows(NAMESPACE),
        help: "List the namespaces that are served, with their devices",
        example: "tenmil get namespaces subsystem=nqn.2026-01.org.example:disks",
        run: |call| {
            let served = served_configuration(call)?;
            Ok(object_rows::namespace_rows(&served, call.arguments.text("subsystem")).into())
        },
    },
    Method {
        verb: MethodKind::Create,
        name: "namespace",
        parameters: &[
            OF_SUBSYSTEM,
            required(
                "uri",
                ParamType::Text { len_max: 4096 },
                "device, such as ram:1g or file:PATH",
            ),
            optional("nsid", NSID, "namespace identifier; without one the lowest free one"),
            READ_ONLY,
            VISIBLE_TO,
            ANA_GROUP,
        ],
        answer: ResultType::Record(CHANGED_NAMESPACE),
        help: "Add a device to an NVMe subsystem as a namespace; its hosts are notified",
        example: "tenmil namespace create nqn.2026-01.org.example:disks ram:1g",
        run: |call| request_edit(call, MethodKind::Create, ConfigObject::Namespace),
    },
    Method {
        verb: MethodKind::Set,
        name: "namespace",
        parameters: &[OF_SUBSYSTEM, NAMESPACE_NSID, READ_ONLY, VISIBLE_TO, ANA_GROUP, UNSET],
        answer: ResultType::Record(CHANGED_NAMESPACE),
        help: "Change the visibility, write protection or ANA group of a namespace",
        example: "tenmil set namespace subsystem=nqn.2026-01.org.example:disks nsid=2 read_only=true",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::Namespace),
    },
    Method {
        verb: MethodKind::Delete,
        name: "namespace",
        parameters: &[OF_SUBSYSTEM, NAMESPACE_NSID],
        answer: ResultType::Record(DELETED),
        help: "Remove a namespace from its NVMe subsystem and close its device; data stay",
        example: "tenmil namespace delete nqn.2026-01.org.example:disks 2",
        run: |call| request_edit(call, MethodKind::Delete, ConfigObject::Namespace),
    },
    Method {
        verb: MethodKind::Get,
        name: "hosts",
        parameters: &[ONLY_SUBSYSTEM],
        answer: ResultType::Rows(HOST),
        help: "List the hosts that may connect over NVMe/TCP, with the names of their keys and their rights",
        example: "tenmil get hosts",
        run: |call| {
            let served = served_configuration(call)?;
            Ok(object_rows::host_rows(&served, call.arguments.text("subsystem")).into())
        },
    },
    Method {
        verb: MethodKind::Create,
        name: "host",
        parameters: &[
            OF_SUBSYSTEM_OR_DISCOVERY,
            HOST_NQN,
            DHCHAP,
            DHCHAP_CONTROLLER,
            PSK,
            HOST_READ_ONLY,
            HOST_READ_ONLY_NAMESPACES,
            RESERVATIONS,
            CONNECTIONS,
            BUFFER_MEMORY,
        ],
        answer: ResultType::Record(CHANGED_HOST),
        help: "Allow a host to connect to an NVMe subsystem",
        example: "tenmil host create nqn.2026-01.org.example:disks nqn.2026-01.org.example:db --dhchap db",
        run: |call| request_edit(call, MethodKind::Create, ConfigObject::Host),
    },
    Method {
        verb: MethodKind::Set,
        name: "host",
        parameters: &[
            OF_SUBSYSTEM_OR_DISCOVERY,
            HOST_NQN,
            DHCHAP,
            DHCHAP_CONTROLLER,
            PSK,
            HOST_READ_ONLY,
            HOST_READ_ONLY_NAMESPACES,
            RESERVATIONS,
            CONNECTIONS,
            BUFFER_MEMORY,
            UNSET,
        ],
        answer: ResultType::Record(CHANGED_HOST),
        help: "Change the keys or the rights of a host of an NVMe subsystem",
        example: "tenmil set host subsystem=nqn.2026-01.org.example:disks host=nqn.2026-01.org.example:db read_only=true",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::Host),
    },
    Method {
        verb: MethodKind::Delete,
        name: "host",
        parameters: &[OF_SUBSYSTEM_OR_DISCOVERY, HOST_NQN],
        answer: ResultType::Record(DELETED),
        help: "Forbid a host to connect to an NVMe subsystem, and disconnect it",
        example: "tenmil host delete nqn.2026-01.org.example:disks nqn.2026-01.org.example:db",
        run: |call| request_edit(call, MethodKind::Delete, ConfigObject::Host),
    },
    Method {
        verb: MethodKind::Get,
        name: "listeners",
        parameters: &[],
        answer: ResultType::Rows(LISTENER),
        help: "List the listeners of NVMe/TCP",
        example: "tenmil get listeners",
        run: |call| Ok(object_rows::listener_rows(&*served_configuration(call)?).into()),
    },
    Method {
        verb: MethodKind::Create,
        name: "listener",
        parameters: &[ADDRESS, TLS, NETWORKS],
        answer: ResultType::Record(CHANGED_LISTENER),
        help: "Listen for NVMe/TCP at another address",
        example: "tenmil listener create 192.0.2.1:4420 --tls required",
        run: |call| request_edit(call, MethodKind::Create, ConfigObject::Listener),
    },
    Method {
        verb: MethodKind::Set,
        name: "listener",
        parameters: &[ADDRESS, TLS, NETWORKS, UNSET],
        answer: ResultType::Record(CHANGED_LISTENER),
        help: "Change the TLS or the networks of a listener of NVMe/TCP",
        example: "tenmil set listener address=192.0.2.1:4420 tls=required",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::Listener),
    },
    Method {
        verb: MethodKind::Delete,
        name: "listener",
        parameters: &[ADDRESS],
        answer: ResultType::Record(DELETED),
        help: "Stop listening for NVMe/TCP at an address, and disconnect the hosts that use it",
        example: "tenmil listener delete 192.0.2.1:4420",
        run: |call| request_edit(call, MethodKind::Delete, ConfigObject::Listener),
    },
    Method {
        verb: MethodKind::Create,
        name: "export",
        parameters: &[
            required("name", EXPORT_NAME, "name by which NBD clients select it"),
            required(
                "uri",
                ParamType::Text { len_max: 4096 },
                "device, such as ram:1g or file:PATH",
            ),
            required(
                "listen",
                ParamType::Texts { len_max: 255, count_max: 64 },
                "addresses that offer it, such as nbd:/run/disk.sock, nbd://127.0.0.1:10809 or nbds://HOST:PORT",
            ),
            optional("read_only", ParamType::Flag, "whether clients may only read"),
            optional("allow_resize", ParamType::Flag, "whether clients may resize it"),
            optional(
                "allow_remote_write",
                ParamType::Flag,
                "whether clients of other machines may write without authentication",
            ),
        ],
        answer: ResultType::Record(CHANGED_EXPORT),
        help: "Export a device over NBD",
        example: "tenmil export create images ram:1g nbd:/run/images.sock",
        run: |call| request_edit(call, MethodKind::Create, ConfigObject::Export),
    },
    Method {
        verb: MethodKind::Delete,
        name: "export",
        parameters: &[required("name", EXPORT_NAME, "name of the export")],
        answer: ResultType::Record(DELETED),
        help: "Stop exporting a device over NBD, and disconnect its clients; data stay",
        example: "tenmil export delete images",
        run: |call| request_edit(call, MethodKind::Delete, ConfigObject::Export),
    },
    Method {
        verb: MethodKind::Set,
        name: "ana_state",
        parameters: &[
            OF_SUBSYSTEM,
            required("listener", WORD, "address of the listener"),
            Parameter {
                name: "ana_group",
                kind: ParamType::Whole { min: 1, max: 128 },
                need: ParamDefault::Default("1"),
                help: "ANA group of the namespaces",
            },
            required(
                "state",
                ParamType::OneOf(&["optimized", "non-optimized", "inaccessible"]),
                "ANA state of the group at that listener",
            ),
        ],
        answer: ResultType::Record(CHANGED_SUBSYSTEM),
        help: "Change the ANA state of a group of namespaces at a listener; their hosts are notified",
        example: "tenmil set ana_state subsystem=nqn.2026-01.org.example:disks listener=192.0.2.1:4420 state=inaccessible",
        run: |call| request_edit(call, MethodKind::Set, ConfigObject::AnaState),
    },
];

/// Requests an edit of the configuration; the main loop answers.
pub(super) fn request_edit(
    call: &CallContext<'_>,
    kind: MethodKind,
    object: ConfigObject,
) -> Result<Value, RpcError> {
    // Before the request, so that a process without a target says so.
    let _ = served_configuration(call)?;
    let edit = ConfigEdit { kind, object, arguments: call.arguments.clone() };
    request_change(call, ConfigurationAction::Edit(edit))
}
