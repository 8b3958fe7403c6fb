//! Metrics of NVMe/TCP and NBD connections.

use std::collections::BTreeMap;

use tenmil_serve::tcp::{ConnectionSample, DisconnectReason, RefusalReason};

use super::families::{
    CONNECTIONS, CONNECTIONS_ACCEPTED, EXPORT_SIZE, IO_IN_FLIGHT, NVME_ABANDONED,
    NVME_ASSOCIATIONS, NVME_ASSOCIATIONS_OPENED, NVME_AUTHENTICATIONS, NVME_DISCONNECTS,
    NVME_MEMORY, NVME_QUEUES, NVME_REFUSALS,
};
use super::host_names::HostNames;
use super::metrics_text::MetricsText;
use crate::methods::{NbdExports, NvmeConnections};
use crate::process_parts::ProcessParts;

/// NVMe/TCP connections of the process.
pub(super) fn nvme_connections(parts: &ProcessParts) -> Vec<ConnectionSample> {
    let service = parts.find_part::<NvmeConnections>("queues");
    service.map(|NvmeConnections(service)| service.connections()).unwrap_or_default()
}

/// NQNs of their hosts.
pub(super) fn hosts(connections: &[ConnectionSample]) -> impl Iterator<Item = &str> {
    connections.iter().filter_map(|one| one.host.as_deref())
}

pub(super) fn collect(
    parts: &ProcessParts,
    connections: &[ConnectionSample],
    hosts: &HostNames,
    text: &mut MetricsText,
) {
    if let Ok(NvmeConnections(service)) = parts.find_part::<NvmeConnections>("queues") {
        collect_nvme(service, connections, hosts, text);
    }
    let Ok(exports) = parts.find_part::<NbdExports>("exports") else { return };
    for served in exports.served() {
        let (export, clients) = (served.export(), served.connections());
        let labels = ["nbd", export.name()];
        let in_flight = clients.iter().map(|one| one.in_flight).sum();
        text.add(&CONNECTIONS, ["nbd", export.name(), ""], clients.len() as u64);
        text.add(&CONNECTIONS_ACCEPTED, labels, served.connections_total());
        text.add(&IO_IN_FLIGHT, labels, in_flight);
        text.add(&EXPORT_SIZE, labels, export.size_bytes());
    }
}

fn collect_nvme(
    service: &tenmil_serve::tcp::Service,
    connections: &[ConnectionSample],
    hosts: &HostNames,
    text: &mut MetricsText,
) {
    let counts = service.event_counts();
    // Before its Connect, a connection has neither subsystem nor host.
    text.add(&CONNECTIONS, ["nvme-tcp", "", ""], 0);
    for one in connections {
        let host = one.host.as_deref().map_or("", |host| hosts.label(host));
        text.add(&CONNECTIONS, ["nvme-tcp", one.subsystem.as_deref().unwrap_or_default(), host], 1);
    }
    for tls in [false, true] {
        for authenticated in [false, true] {
            let is_it = |one: &&ConnectionSample| {
                one.queue.is_some()
                    && one.cipher_suite.is_some() == tls
                    && one.authentication.is_some() == authenticated
            };
            let labels = [flag_text(tls), flag_text(authenticated)];
            text.add(&NVME_QUEUES, labels, connections.iter().filter(is_it).count() as u64);
        }
    }
    text.add(&CONNECTIONS_ACCEPTED, ["nvme-tcp", ""], counts.connected);
    text.add(&NVME_ASSOCIATIONS, [], service.association_count() as u64);
    text.add(&NVME_ASSOCIATIONS_OPENED, [], counts.associated);
    text.add(&NVME_AUTHENTICATIONS, ["connect"], counts.accepted.authenticated);
    text.add(&NVME_AUTHENTICATIONS, ["again"], counts.reauthenticated);
    let count = |counts: &BTreeMap<&'static str, u64>, name| counts.get(name).copied().unwrap_or(0);
    for name in DisconnectReason::NAMES {
        text.add(&NVME_DISCONNECTS, [name], count(&counts.disconnected, name));
    }
    for reason in RefusalReason::ALL {
        let name = reason.name();
        text.add(&NVME_REFUSALS, [name], count(&counts.refused, name));
    }
    text.add(&NVME_ABANDONED, [], service.abandoned_commands());
    // The pool counts its free memory under a lock that commands need; connections know what they hold.
    let held = connections.iter().map(|one| one.memory_bytes).sum::<u64>();
    text.add(&NVME_MEMORY, ["held"], held);
    text.add(&NVME_MEMORY, ["free"], service.buffer_pool().size_bytes().saturating_sub(held));
}

const fn flag_text(flag: bool) -> &'static str {
    if flag { "true" } else { "false" }
}
