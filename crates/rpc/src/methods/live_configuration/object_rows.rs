//! Rows of the objects of a configuration.

use serde_json::{Value, json};
use tenmil_serve::tcp::{HostRights, NamespaceSelection, PortSecurity};
use tenmil_wire::nqn;

use crate::methods::limits::edited_limits_row;
use crate::methods::target_configuration::ServedConfiguration;
use crate::result_type::{FieldSchema, ResultType};
use crate::target_config::{
    ConfigEdit, ConfigObject, HostsConfig, KeyReference, SecurityConfig, SubsystemConfig,
};

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

pub(super) const SUBSYSTEM: &[FieldSchema] = &[
    FieldSchema::new("nqn", ResultType::Text, "NQN"),
    FieldSchema::new(
        "serial",
        ResultType::Maybe(&ResultType::Text),
        "configured serial number; null if it is derived from the NQN",
    ),
    FieldSchema::new("allow_any_host", ResultType::Flag, "whether any host may connect"),
    FieldSchema::new("hosts", ResultType::Whole, "number of hosts that are listed"),
    FieldSchema::new("namespaces", ResultType::Whole, "number of namespaces"),
    FieldSchema::new("listeners", ResultType::Texts, "addresses of the listeners that show it"),
    FieldSchema::new(
        "authentication",
        ResultType::Flag,
        "whether each host must authenticate with DH-HMAC-CHAP",
    ),
    FieldSchema::new("secure_channel", ResultType::Flag, "whether connections need TLS"),
];

pub(super) const NAMESPACE: &[FieldSchema] = &[
    FieldSchema::new("subsystem", ResultType::Text, "NQN of the subsystem"),
    FieldSchema::new("nsid", ResultType::Whole, "namespace identifier (NSID)"),
    FieldSchema::new("uri", ResultType::Text, "device"),
    FieldSchema::new("size_bytes", WHOLE, "size; null if the device is gone"),
    FieldSchema::new("block_bytes", WHOLE, "size of a logical block"),
    FieldSchema::new("read_only", ResultType::Flag, "whether it is write protected"),
    FieldSchema::new(
        "allowed_hosts",
        ResultType::Texts,
        "hosts that see it; empty if all hosts of the subsystem do",
    ),
    FieldSchema::new("ana_group", ResultType::Whole, "ANA group"),
];

pub(super) const HOST: &[FieldSchema] = &[
    FieldSchema::new(
        "subsystem",
        ResultType::Maybe(&ResultType::Text),
        "NQN of the subsystem; null for the discovery service",
    ),
    FieldSchema::new(
        "host",
        ResultType::Maybe(&ResultType::Text),
        "NQN of the host; null for every host that has no row of its own",
    ),
    FieldSchema::new(
        "authentication",
        ResultType::Flag,
        "whether the host must authenticate with DH-HMAC-CHAP",
    ),
    FieldSchema::new("secure_channel", ResultType::Flag, "whether its connections need TLS"),
    FieldSchema::new("dhchap", ResultType::Texts, "names of the DH-HMAC-CHAP secrets of the host"),
    FieldSchema::new(
        "dhchap_controller",
        ResultType::Maybe(&ResultType::Text),
        "name of the DH-HMAC-CHAP secret of the controller",
    ),
    FieldSchema::new("psk", ResultType::Texts, "names of the TLS PSKs of the host"),
    FieldSchema::new("read_only", ResultType::Flag, "whether it may only read"),
    FieldSchema::new(
        "read_only_namespaces",
        ResultType::Wholes,
        "identifiers of the namespaces that it may only read",
    ),
    FieldSchema::new("reservations", ResultType::Flag, "whether it may hold reservations"),
    FieldSchema::new(
        "connections",
        WHOLE,
        "limit of its connections; null if it has none of its own",
    ),
    FieldSchema::new(
        "buffer_memory_bytes",
        WHOLE,
        "limit of its data buffers; null if it has none of its own",
    ),
];

pub(super) const LISTENER: &[FieldSchema] = &[
    FieldSchema::new("address", ResultType::Text, "address and port"),
    FieldSchema::new(
        "configured",
        ResultType::Text,
        "address as it is configured: with port 0 the kernel picks the port",
    ),
    FieldSchema::new("tls", ResultType::Text, "TLS: off, allowed or required"),
    FieldSchema::new(
        "allowed_networks",
        ResultType::Texts,
        "networks whose hosts may connect; empty if all may",
    ),
    FieldSchema::new("subsystems", ResultType::Whole, "number of subsystems that it shows"),
];

pub(super) const NBD_EXPORT: &[FieldSchema] = &[
    FieldSchema::new("name", ResultType::Text, "name by which clients select it"),
    FieldSchema::new("uri", ResultType::Text, "device"),
    FieldSchema::new("read_only", ResultType::Flag, "whether clients may only read"),
    FieldSchema::new("allow_resize", ResultType::Flag, "whether clients may resize it"),
    FieldSchema::new("listen", ResultType::Texts, "addresses that offer it, as configured"),
];

pub(super) fn subsystem_rows(served: &ServedConfiguration) -> Vec<Value> {
    served.config.subsystems.iter().map(|one| subsystem_row(served, one)).collect()
}

/// Rows of all namespaces, or of those of one subsystem.
pub(super) fn namespace_rows(served: &ServedConfiguration, of: Option<&str>) -> Vec<Value> {
    let subsystems = served.config.subsystems.iter();
    let wanted = subsystems.filter(|one| of.is_none_or(|nqn| one.nqn == nqn));
    let rows = |one: &SubsystemConfig| {
        let nsids = one.namespaces.iter().map(|namespace| namespace.nsid);
        nsids.filter_map(|nsid| namespace_row(served, one, nsid)).collect::<Vec<_>>()
    };
    wanted.flat_map(rows).collect()
}

/// Rows of the hosts of the discovery service and of all subsystems, or of one subsystem.
pub(super) fn host_rows(served: &ServedConfiguration, of: Option<&str>) -> Vec<Value> {
    let config = &served.config;
    let mut rows = match of {
        None | Some(nqn::DISCOVERY) => security_rows(None, &HostsConfig::Any, &config.discovery),
        Some(_) => Vec::new(),
    };
    for one in config.subsystems.iter().filter(|one| of.is_none_or(|nqn| one.nqn == nqn)) {
        rows.extend(security_rows(Some(&one.nqn), &one.hosts, &one.security));
    }
    rows
}

pub(super) fn listener_rows(served: &ServedConfiguration) -> Vec<Value> {
    (0..served.config.listeners.len()).filter_map(|at| listener_row(served, at)).collect()
}

/// Row of the object of an edit, if there is one.
pub(in crate::methods) fn object_row(
    served: &ServedConfiguration,
    edit: &ConfigEdit,
) -> Option<Value> {
    let text = |parameter: &str| edit.arguments.text(parameter);
    let subsystem = |nqn: Option<&str>| {
        served.config.subsystems.iter().find(|one| Some(one.nqn.as_str()) == nqn)
    };
    match edit.object {
        ConfigObject::Subsystem => Some(subsystem_row(served, subsystem(text("nqn"))?)),
        ConfigObject::AnaState => Some(subsystem_row(served, subsystem(text("subsystem"))?)),
        ConfigObject::Namespace => {
            let one = subsystem(text("subsystem"))?;
            let nsid = match edit.arguments.integer("nsid") {
                Some(nsid) => u32::try_from(nsid).ok()?,
                // It was the lowest free one.
                None => {
                    let uri = text("uri")?;
                    let is_it = |it: &&crate::target_config::NamespaceConfig| {
                        it.uri.to_string() == uri || uri.parse().is_ok_and(|uri| it.uri == uri)
                    };
                    one.namespaces.iter().find(is_it)?.nsid
                }
            };
            namespace_row(served, one, nsid)
        }
        ConfigObject::Host => {
            let host = text("host")?;
            let rows = host_rows(served, Some(text("subsystem")?));
            rows.into_iter().find(|row| row["host"] == host)
        }
        ConfigObject::Export => {
            let one =
                served.config.exports.iter().find(|one| Some(one.name.as_str()) == text("name"))?;
            Some(json!({
                "name": one.name,
                "uri": one.uri.to_string(),
                "read_only": one.is_read_only,
                "allow_resize": one.allows_resize,
                "listen": one.listeners.iter().map(ToString::to_string).collect::<Vec<_>>(),
            }))
        }
        ConfigObject::SubsystemLimits
        | ConfigObject::NamespaceLimits
        | ConfigObject::HostLimits
        | ConfigObject::ExportLimits => edited_limits_row(&served.config, edit),
        ConfigObject::Listener => {
            let wanted = text("address")?;
            let wanted = wanted.strip_prefix("tcp://").unwrap_or(wanted).parse().ok()?;
            let listeners = &served.config.listeners;
            let configured = listeners.iter().rposition(|one| one.address == wanted);
            let at = configured.or_else(|| served.addresses.iter().position(|at| *at == wanted))?;
            listener_row(served, at)
        }
    }
}

fn subsystem_row(served: &ServedConfiguration, one: &SubsystemConfig) -> Value {
    let address = |at: &usize| served.addresses.get(*at).map(ToString::to_string);
    let listed = match &one.hosts {
        HostsConfig::Any => 0,
        HostsConfig::Only(hosts) => hosts.len(),
    };
    json!({
        "nqn": one.nqn,
        "serial": one.serial,
        "allow_any_host": one.hosts == HostsConfig::Any,
        "hosts": listed,
        "namespaces": one.namespaces.len(),
        "listeners": one.listeners.iter().filter_map(address).collect::<Vec<_>>(),
        "authentication": one.security.authentication_required,
        "secure_channel": one.security.secure_channel_required,
    })
}

fn namespace_row(served: &ServedConfiguration, of: &SubsystemConfig, nsid: u32) -> Option<Value> {
    let one = of.namespaces.iter().find(|one| one.nsid == nsid)?;
    let mut devices = served.namespaces.iter();
    let device = devices.find(|device| device.nqn == of.nqn && device.nsid == nsid);
    let limits = device.and_then(|device| device.device.upgrade()).map(|device| device.limits());
    let size = limits.as_ref().map(|limits| limits.block_count * u64::from(limits.block_size));
    let hosts = match &one.hosts {
        HostsConfig::Any => &[][..],
        HostsConfig::Only(hosts) => hosts,
    };
    Some(json!({
        "subsystem": of.nqn,
        "nsid": nsid,
        "uri": one.uri.to_string(),
        "size_bytes": size,
        "block_bytes": limits.as_ref().map(|limits| limits.block_size),
        "read_only": one.is_read_only,
        "allowed_hosts": hosts,
        "ana_group": one.ana_group,
    }))
}

fn listener_row(served: &ServedConfiguration, at: usize) -> Option<Value> {
    let one = served.config.listeners.get(at)?;
    let tls = match one.security {
        PortSecurity::Plaintext => "off",
        PortSecurity::TlsAllowed => "allowed",
        PortSecurity::TlsRequired => "required",
    };
    let shows = |subsystem: &&SubsystemConfig| subsystem.listeners.contains(&at);
    Some(json!({
        "address": served.addresses.get(at).unwrap_or(&one.address).to_string(),
        "configured": one.address.to_string(),
        "tls": tls,
        "allowed_networks": one.networks.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "subsystems": served.config.subsystems.iter().filter(shows).count(),
    }))
}

/// Rows of a subsystem, or of the discovery service: its hosts with their keys, by name.
fn security_rows(
    subsystem: Option<&str>,
    allowed: &HostsConfig,
    security: &SecurityConfig,
) -> Vec<Value> {
    let names = |keys: &[KeyReference]| -> Vec<String> {
        keys.iter().map(|key| key.name.to_string()).collect()
    };
    let row = |host: Option<&str>| {
        let keys = security.hosts.iter().find(|keys| Some(keys.nqn.as_str()) == host);
        let has_secret = keys.is_some_and(|keys| !keys.dhchap.is_empty());
        let controller = keys.and_then(|keys| keys.dhchap_controller.as_ref());
        let rights = keys.map_or_else(HostRights::default, |keys| keys.rights.clone());
        let listed: Vec<u32> = match &rights.read_only {
            NamespaceSelection::Listed(nsids) => nsids.iter().copied().collect(),
            NamespaceSelection::None | NamespaceSelection::All => Vec::new(),
        };
        json!({
            "subsystem": subsystem,
            "host": host,
            "authentication": security.authentication_required || has_secret,
            "secure_channel": security.secure_channel_required,
            "dhchap": keys.map(|keys| names(&keys.dhchap)).unwrap_or_default(),
            "dhchap_controller": controller.map(|key| key.name.to_string()),
            "psk": keys.map(|keys| keys.psk_names().collect::<Vec<_>>()).unwrap_or_default(),
            "read_only": rights.read_only == NamespaceSelection::All,
            "read_only_namespaces": listed,
            "reservations": rights.reservations,
            "connections": rights.connections_max,
            "buffer_memory_bytes": rights.memory_bytes_max,
        })
    };
    match allowed {
        HostsConfig::Only(hosts) => hosts.iter().map(|host| row(Some(host))).collect(),
        HostsConfig::Any => {
            let named = security.hosts.iter().map(|keys| row(Some(&keys.nqn)));
            named.chain([row(None)]).collect()
        }
    }
}
