//! What the servers log of their events: who connects, who is refused and who disconnects, and changes of the
//! configuration.
//!
//! Each record has the field `event` and a field for each value in its message; docs/operator/logs.md lists them.
//! Events that a peer can cause at will have places of their own here, and so rate limits of their own: they
//! cannot suppress other messages. Queues and connections without a host are details, of level debug.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;
use tenmil_base::text::format_size;
use tenmil_linux::clock::coarse_now;
use tenmil_rpc::{ConfigurationChange, RpcError};
use tenmil_serve::EndpointEvent;
use tenmil_serve::nbd::{DisconnectReason as NbdDisconnectReason, NbdEvent, NbdStats};
use tenmil_serve::tcp::{
    AssociationTotals, ConnectionAudit, DisconnectReason, EndedAssociation, TargetEvent,
};

/// Logs an event with what is known about its connection: names of keys, no keys.
macro_rules! log_audit {
    ($level:ident, $name:literal, $audit:expr, $event:expr) => {{
        let audit: &ConnectionAudit = $audit;
        let tls_keys = audit.tls_key.as_ref().map(|key| key.names.join(","));
        let authentication = audit.authentication.as_ref();
        tracing::$level!(
            event = $name,
            protocol = "nvme-tcp",
            connection = audit.connection,
            peer = audit.peer,
            host = audit.host,
            subsystem = audit.subsystem,
            controller = audit.cntlid,
            queue = audit.queue,
            tls = audit.secure_channel.is_some(),
            tls_keys,
            secret = authentication.and_then(|it| it.secret.as_deref()),
            bidirectional = authentication.map(|it| it.bidirectional),
            "{}",
            $event
        )
    }};
}

/// Logs the end of a connection: one that is not orderly is a warning.
macro_rules! log_by_order {
    ($is_orderly:expr, $($record:tt)*) => {
        if $is_orderly { tracing::info!($($record)*) } else { tracing::warn!($($record)*) }
    };
}

/// Logs an event of the NVMe/TCP target.
pub(super) fn log_target_event(event: &TargetEvent) {
    match event {
        TargetEvent::Connected { connection, peer } => {
            tracing::debug!(event = "accept", connection, peer, "{event}");
        }
        TargetEvent::Associated { connection, peer, host, subsystem, cntlid } => {
            tracing::info!(
                event = "connect",
                protocol = "nvme-tcp",
                connection,
                peer,
                host,
                subsystem,
                controller = cntlid,
                "{event}"
            );
        }
        // Of an admin queue it is the authentication of its host, of others a detail.
        TargetEvent::Accepted(audit) if audit.queue == Some(0) && has_proof(audit) => {
            log_audit!(info, "authenticate", audit, event);
        }
        TargetEvent::Accepted(audit) => log_audit!(debug, "connect-queue", audit, event),
        TargetEvent::Authenticated(audit) => log_audit!(info, "reauthenticate", audit, event),
        TargetEvent::Rejected { audit, reason, unreported, .. } => {
            let ConnectionAudit { connection, peer, host, subsystem, .. } = &**audit;
            tracing::warn!(
                event = "refuse",
                protocol = "nvme-tcp",
                connection,
                peer,
                host,
                subsystem,
                reason = reason.name(),
                unreported,
                "{event}"
            );
        }
        TargetEvent::Disconnected { connection, peer, reason, association: Some(ended) } => {
            log_ended_association(event, (*connection, peer), reason, ended);
        }
        TargetEvent::Disconnected { connection, peer, reason, association: None } => {
            let reason = reason.name();
            tracing::debug!(event = "disconnect-queue", connection, peer, reason, "{event}");
        }
        TargetEvent::Notice(text) => tracing::info!("{text}"),
        TargetEvent::Error(text) => tracing::warn!("{text}"),
    }
}

fn log_ended_association(
    event: &TargetEvent,
    (connection, peer): (u64, &str),
    reason: &DisconnectReason,
    ended: &EndedAssociation,
) {
    let EndedAssociation { host, subsystem, cntlid, lasted, totals } = ended;
    let AssociationTotals { reads, read_bytes, writes, written_bytes, others, errors } = totals;
    // A peer that is gone without a word may be a failure of the network or of the host.
    let is_orderly = matches!(
        reason,
        DisconnectReason::HostDisconnect | DisconnectReason::Closed | DisconnectReason::ServerEnds
    );
    log_by_order!(
        is_orderly,
        event = "disconnect",
        protocol = "nvme-tcp",
        connection,
        peer,
        host,
        subsystem,
        controller = cntlid,
        reason = reason.name(),
        duration_s = lasted.as_secs_f64(),
        reads,
        read_bytes,
        writes,
        written_bytes,
        others,
        errors,
        "{event}"
    );
}

/// Whether the peer has proved its identity.
fn has_proof(audit: &ConnectionAudit) -> bool {
    audit.secure_channel.is_some() || audit.authentication.is_some()
}

/// Time at which the connected NBD clients have connected, by connection.
static CONNECTED: Mutex<BTreeMap<u64, Span>> = Mutex::new(BTreeMap::new());

fn lock_connected() -> MutexGuard<'static, BTreeMap<u64, Span>> {
    CONNECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Logs an event of an NBD export.
pub(super) fn log_nbd_event(export: &str, event: &NbdEvent) {
    match event {
        NbdEvent::Connected { connection, peer } => {
            lock_connected().insert(*connection, coarse_now());
            tracing::info!(
                event = "connect",
                protocol = "nbd",
                export,
                connection,
                peer,
                "{event}"
            );
        }
        NbdEvent::Disconnected { connection, peer, reason, done } => {
            let since = lock_connected().remove(connection);
            let lasted = since.map(|since| Span { ns: coarse_now().ns.saturating_sub(since.ns) });
            let duration_s = lasted.map(|lasted| lasted.as_secs_f64());
            let NbdStats { reads, read_bytes, writes, written_bytes, others, errors } = *done;
            let is_orderly = matches!(
                reason,
                NbdDisconnectReason::ClientDisconnect
                    | NbdDisconnectReason::Closed
                    | NbdDisconnectReason::Idle
                    | NbdDisconnectReason::Administrative
                    | NbdDisconnectReason::ServerEnds
            );
            log_by_order!(
                is_orderly,
                event = "disconnect",
                protocol = "nbd",
                export,
                connection,
                peer,
                reason = reason.name(),
                duration_s,
                reads,
                read_bytes,
                writes,
                written_bytes,
                others,
                errors,
                "{event} (after {:.3} s, {reads} reads of {}, {writes} writes of {}, {others} other \
                 requests, {errors} errors)",
                duration_s.unwrap_or_default(),
                format_size(read_bytes),
                format_size(written_bytes)
            );
        }
        NbdEvent::Resized { size_bytes } => {
            tracing::info!(event = "resize", export, size_bytes, "{event}");
        }
        NbdEvent::Removed => tracing::warn!(event = "remove", export, "{event}"),
        NbdEvent::Error(text) => tracing::warn!("{text}"),
    }
}

/// Logs an event of an endpoint with one client at a time, vfio-user or vhost-user.
pub(super) fn log_endpoint_event(client: &str, event: &EndpointEvent) {
    match event {
        EndpointEvent::Connected(peer) => {
            tracing::info!(event = "connect", client, peer, "{client} connected: {peer}");
        }
        EndpointEvent::Disconnected(Some(reason)) => {
            tracing::warn!(event = "disconnect", client, reason, "{client} disconnected: {reason}");
        }
        EndpointEvent::Disconnected(None) => {
            tracing::info!(event = "disconnect", client, "{client} disconnected");
        }
        EndpointEvent::Error(text) => tracing::warn!("{text}"),
    }
}

/// Logs a configuration that was applied: what was changed, and what of it has failed.
pub(super) fn log_configuration(file: &str, done: &str, failed: &[String]) {
    tracing::info!(
        event = "configuration",
        file,
        result = "applied",
        changes = done,
        "{file}: {done}"
    );
    for failed in failed {
        tracing::warn!(
            cause = %failed, event = "configuration", file, result = "failed", change = failed,
            "{file}: {failed}"
        );
    }
}

/// Logs a change of the configuration that a client has requested: what was changed, what of it has failed, or why
/// nothing was changed.
pub(super) fn log_configuration_change(
    (client, action): (&str, &str),
    file: Option<&str>,
    done: Result<&ConfigurationChange, &RpcError>,
) {
    let ConfigurationChange { difference, failed, .. } = match done {
        Ok(change) => change,
        Err(refused) => {
            let reason = refused.message.as_str();
            // One that is repeated by a script must not suppress changes.
            tracing::info!(
                cause = "configuration-change-refused",
                event = "configuration",
                file,
                client,
                action,
                result = "refused",
                reason,
                "{client}: nothing is changed: {reason}"
            );
            return;
        }
    };
    if !difference.is_empty() {
        let changes = difference.join("; ");
        tracing::info!(
            event = "configuration",
            file,
            client,
            action,
            result = "applied",
            changes,
            "{client}: {action}: {changes}"
        );
    }
    for failed in failed {
        tracing::warn!(
            cause = %failed, event = "configuration", file, client, action, result = "failed",
            change = failed, "{client}: {action}: {failed}"
        );
    }
}

/// Logs a configuration that was refused.
pub(super) fn log_refused_configuration(file: &str, why: &str) {
    tracing::warn!(
        event = "configuration",
        file,
        result = "refused",
        reason = why,
        "nothing is changed: {why}"
    );
}
