//! Events of the target, for operators and programs.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use tenmil_base::text::format_size;
use tenmil_base::{IoStats, Operation, OperationStats, Span};
use tenmil_reactor::flight_recorder::{self, FlightEventKind};

use super::audit::{ConnectionAudit, RefusalReason};

/// Event of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// A connection was accepted.
    Connected {
        /// Connection id, never reused.
        connection: u64,
        /// Address of the peer.
        peer: String,
    },
    /// A host has created an association.
    Associated {
        /// Connection id of its admin queue.
        connection: u64,
        /// Address of the peer.
        peer: String,
        /// NQN of the host.
        host: String,
        /// NQN of the subsystem.
        subsystem: String,
        /// Controller identifier.
        cntlid: u16,
    },
    /// A queue was connected, of a host that has proved what is required.
    Accepted(Box<ConnectionAudit>),
    /// A connected queue was authenticated again.
    Authenticated(Box<ConnectionAudit>),
    /// A connection, a Connect or an authentication was rejected. Of each address, a limited number of
    /// rejections is reported.
    Rejected {
        /// What is known about the connection.
        audit: Box<ConnectionAudit>,
        /// Reason for programs.
        reason: RefusalReason,
        /// What was found and what was expected.
        why: String,
        /// Rejections of this address before that were not reported.
        unreported: u64,
    },
    /// A connection ended.
    Disconnected {
        /// Connection id.
        connection: u64,
        /// Address of the peer.
        peer: String,
        /// Why it ended.
        reason: DisconnectReason,
        /// The association that ended with it, if it was the connection of an admin queue.
        association: Option<Box<EndedAssociation>>,
    },
    /// Peer behavior that is worth a log line. Its rate is controlled by peers.
    Notice(String),
    /// Error of the target, as one line. Its rate is not controlled by any peer.
    Error(String),
}

/// Association that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedAssociation {
    /// NQN of the host.
    pub host: String,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// Controller identifier.
    pub cntlid: u16,
    /// Time from the accepted connection to its end.
    pub lasted: Span,
    /// I/O commands of all its queues.
    pub totals: AssociationTotals,
}

/// Completed I/O commands of an association.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssociationTotals {
    /// Successful Read commands.
    pub reads: u64,
    /// Bytes read by them.
    pub read_bytes: u64,
    /// Successful Write commands.
    pub writes: u64,
    /// Bytes written by them.
    pub written_bytes: u64,
    /// Other successful commands.
    pub others: u64,
    /// Failed commands.
    pub errors: u64,
}

/// Unread events. Their number is bounded, since peers can cause events faster than they are read.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    events: VecDeque<TargetEvent>,
    /// Dropped events that were not reported yet.
    dropped: u64,
    counts: EventCounts,
}

/// Numbers of events since the start, including those that were not reported. They are of connections,
/// not of I/O.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Accepted connections.
    pub connected: u64,
    /// Created associations.
    pub associated: u64,
    /// Connected queues whose host has authenticated, and those of other hosts.
    pub accepted: AcceptedCounts,
    /// Queues that were authenticated again.
    pub reauthenticated: u64,
    /// Rejected connections, Connect commands and authentications, by [`RefusalReason::name`].
    pub refused: BTreeMap<&'static str, u64>,
    /// Ended connections, by [`DisconnectReason::name`].
    pub disconnected: BTreeMap<&'static str, u64>,
}

/// Numbers of connected queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptedCounts {
    /// Those of hosts that have authenticated by DH-HMAC-CHAP.
    pub authenticated: u64,
    /// Those of other hosts.
    pub unauthenticated: u64,
}

/// Largest number of unread events.
const UNREAD_MAX: usize = 1024;

impl EventQueue {
    /// Appends an event. When the queue is full, the oldest event caused by a peer is dropped, so
    /// that peers cannot displace the target's own errors.
    pub(super) fn push(&mut self, events: TargetEvent) {
        self.counts.count(&events);
        if self.events.len() >= UNREAD_MAX {
            let oldest = self.events.iter().position(TargetEvent::is_caused_by_peer).unwrap_or(0);
            self.events.remove(oldest);
            self.dropped += 1;
        }
        self.events.push_back(events);
    }

    /// Counts a rejection that is not reported.
    pub(super) fn count_unreported_refusal(&mut self, reason: RefusalReason) {
        *self.counts.refused.entry(reason.name()).or_default() += 1;
    }

    /// Numbers of events since the start.
    pub(super) fn counts(&self) -> EventCounts {
        self.counts.clone()
    }

    /// Removes the oldest event. After the last one, reports how many were dropped.
    pub(super) fn next(&mut self) -> Option<TargetEvent> {
        self.events.pop_front().or_else(|| {
            let dropped = std::mem::take(&mut self.dropped);
            let text = format!("{dropped} events of connections were dropped: they arrived faster than they were read");
            (dropped > 0).then_some(TargetEvent::Notice(text))
        })
    }
}

impl EventCounts {
    fn count(&mut self, event: &TargetEvent) {
        match event {
            TargetEvent::Connected { .. } => self.connected += 1,
            TargetEvent::Associated { .. } => self.associated += 1,
            TargetEvent::Accepted(audit) if audit.authentication.is_some() => {
                self.accepted.authenticated += 1;
            }
            TargetEvent::Accepted(_) => self.accepted.unauthenticated += 1,
            TargetEvent::Authenticated(_) => self.reauthenticated += 1,
            TargetEvent::Rejected { reason, .. } => {
                *self.refused.entry(reason.name()).or_default() += 1;
            }
            TargetEvent::Disconnected { reason, .. } => {
                *self.disconnected.entry(reason.name()).or_default() += 1;
            }
            TargetEvent::Notice(_) | TargetEvent::Error(_) => {}
        }
    }
}

impl AssociationTotals {
    /// Totals of I/O statistics.
    pub(super) fn of_stats(stats: &IoStats) -> Self {
        let mut totals = Self::default();
        for operation in Operation::ALL {
            let OperationStats { count, bytes, errors, .. } = stats.operation_stats(operation);
            match operation {
                Operation::Read => (totals.reads, totals.read_bytes) = (*count, *bytes),
                Operation::Write => (totals.writes, totals.written_bytes) = (*count, *bytes),
                _ => totals.others += count,
            }
            totals.errors += errors;
        }
        totals
    }
}

impl TargetEvent {
    /// Records the event in the flight recorder, without its texts.
    pub(super) fn record_in_flight_recorder(&self) {
        let (kind, arguments) = match self {
            Self::Connected { connection, .. } => {
                (FlightEventKind::ConnectionAccepted, [*connection, 0])
            }
            Self::Associated { connection, cntlid, .. } => {
                (FlightEventKind::ControllerCreated, [*connection, (*cntlid).into()])
            }
            Self::Accepted(audit) => {
                let queue = audit.queue.unwrap_or_default();
                (FlightEventKind::QueueConnected, [audit.connection.unwrap_or(0), queue.into()])
            }
            Self::Rejected { audit, reason, .. } => {
                let reason = flight_recorder::pack_text(reason.name());
                (FlightEventKind::ConnectionRejected, [audit.connection.unwrap_or(0), reason])
            }
            Self::Disconnected { connection, reason, .. } => {
                let reason = flight_recorder::pack_text(reason.name());
                (FlightEventKind::ConnectionEnded, [*connection, reason])
            }
            Self::Error(_) => (FlightEventKind::TargetError, [0, 0]),
            Self::Authenticated(_) | Self::Notice(_) => return,
        };
        flight_recorder::record_now(kind, arguments);
    }

    /// Whether a peer caused the event and can repeat it at will.
    const fn is_caused_by_peer(&self) -> bool {
        !matches!(self, Self::Error(_))
    }
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DisconnectReason {
    /// The peer closed it.
    Closed,
    /// The host sent a Fabrics Disconnect.
    HostDisconnect,
    /// The host violated the protocol; the text names the violation.
    ProtocolError(String),
    /// The peer terminated the connection with a TermReq; the text names its reason.
    Terminated(String),
    /// The peer exceeded the time limit of this step.
    Timeout(&'static str),
    /// The stream failed with this error.
    Broken(String),
    /// The keep-alive timeout expired.
    KeepAliveExpired,
    /// The host did not enable its controller in time.
    NotEnabled,
    /// The association ended or the controller was reset.
    AssociationEnded,
    /// The host failed to authenticate; the text names the failure.
    AuthenticationFailed(String),
    /// A key that the host has used was removed, or the host does not fulfill a new requirement.
    CredentialsRevoked,
    /// The controller of an authenticated host could not be created; the text names the reason.
    Refused(String),
    /// The host reset the controller from another controller of the subsystem.
    Reset,
    /// Bug of the target: an invalid call of the protocol engine.
    Internal(String),
    /// The server is shutting down.
    ServerEnds,
}

impl DisconnectReason {
    /// Identifiers of all reasons.
    pub const NAMES: [&'static str; 15] = [
        "closed",
        "host-disconnect",
        "protocol-error",
        "terminated",
        "timeout",
        "broken",
        "keep-alive-expired",
        "not-enabled",
        "association-ended",
        "authentication-failed",
        "credentials-revoked",
        "refused",
        "reset",
        "internal-error",
        "server-ends",
    ];

    /// Stable identifier for programs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        Self::NAMES[match self {
            Self::Closed => 0,
            Self::HostDisconnect => 1,
            Self::ProtocolError(_) => 2,
            Self::Terminated(_) => 3,
            Self::Timeout(_) => 4,
            Self::Broken(_) => 5,
            Self::KeepAliveExpired => 6,
            Self::NotEnabled => 7,
            Self::AssociationEnded => 8,
            Self::AuthenticationFailed(_) => 9,
            Self::CredentialsRevoked => 10,
            Self::Refused(_) => 11,
            Self::Reset => 12,
            Self::Internal(_) => 13,
            Self::ServerEnds => 14,
        }]
    }
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => out.write_str("the host has closed the connection"),
            Self::HostDisconnect => out.write_str("the host has disconnected"),
            Self::ProtocolError(why) => write!(out, "the host violated the protocol: {why}"),
            Self::Terminated(why) => write!(out, "the host has terminated the connection: {why}"),
            Self::Timeout(what) => write!(out, "the host exceeded the time limit to {what}"),
            Self::Broken(why) => write!(out, "the stream failed: {why}"),
            Self::KeepAliveExpired => out.write_str("the keep-alive timeout of the host expired"),
            Self::NotEnabled => out.write_str("the host did not enable its controller in time"),
            Self::AssociationEnded => out.write_str("its association has ended"),
            Self::AuthenticationFailed(why) => out.write_str(why),
            Self::CredentialsRevoked => {
                out.write_str("a key of the host was removed, or more is required of it")
            }
            Self::Refused(why) => write!(out, "it is rejected: {why}"),
            Self::Reset => out.write_str("the host reset its controller from another controller"),
            Self::Internal(what) => {
                write!(out, "a bug of this target; report it: {what}")
            }
            Self::ServerEnds => out.write_str("the server is shutting down"),
        }
    }
}

impl fmt::Display for TargetEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connection, peer } => {
                write!(out, "connection {connection}: {peer} connected")
            }
            Self::Associated { connection, peer, host, subsystem, cntlid } => write!(
                out,
                "connection {connection}: {peer} created controller {cntlid} of {subsystem} as {host}"
            ),
            Self::Accepted(audit) => {
                write_connection(out, audit)?;
                let (subsystem, cntlid) = (&audit.subsystem, audit.cntlid.unwrap_or_default());
                let queue = audit.queue.unwrap_or_default();
                write!(out, "{audit} connected queue {queue} of controller {cntlid} of {subsystem}")
            }
            Self::Authenticated(audit) => {
                write_connection(out, audit)?;
                write!(out, "{audit} authenticated again")
            }
            Self::Rejected { audit, why, unreported, .. } => {
                write_connection(out, audit)?;
                write!(out, "{} is rejected: {why}", audit.peer)?;
                match unreported {
                    0 => Ok(()),
                    count => write!(out, " ({count} rejections before are not reported)"),
                }
            }
            Self::Disconnected { connection, peer, reason, association } => {
                write!(out, "connection {connection}: {peer} disconnected")?;
                if let Some(association) = association {
                    write!(out, " {association}")?;
                }
                write!(out, ": {reason}")
            }
            Self::Notice(text) | Self::Error(text) => out.write_str(text),
        }
    }
}

impl fmt::Display for EndedAssociation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, subsystem, cntlid, lasted, totals } = self;
        let AssociationTotals { reads, read_bytes, writes, written_bytes, others, errors } = totals;
        write!(
            out,
            "controller {cntlid} of {subsystem} as {host} after {:.3} s ({reads} reads of {}, {writes} writes \
             of {}, {others} other commands, {errors} errors)",
            lasted.as_secs_f64(),
            format_size(*read_bytes),
            format_size(*written_bytes)
        )
    }
}

/// Writes the connection, if it has an id.
fn write_connection(out: &mut fmt::Formatter<'_>, audit: &ConnectionAudit) -> fmt::Result {
    audit.connection.map_or(Ok(()), |connection| write!(out, "connection {connection}: "))
}

#[cfg(test)]
mod tests {
    use super::{DisconnectReason, EventQueue, TargetEvent, UNREAD_MAX};
    use crate::tcp::audit::{ConnectionAudit, RefusalReason};

    fn peer_rejected_event(connection: u64) -> TargetEvent {
        TargetEvent::Rejected {
            audit: Box::new(ConnectionAudit::of_peer(Some(connection), "192.0.2.1:5", 1)),
            reason: RefusalReason::NoSuchSubsystem,
            why: "no such subsystem".into(),
            unreported: 0,
        }
    }

    #[test]
    fn events_caused_by_peers_never_displace_errors() {
        let mut unread = EventQueue::default();
        unread.push(TargetEvent::Error("a medium has not answered".into()));
        (0..3 * UNREAD_MAX as u64)
            .for_each(|connection| unread.push(peer_rejected_event(connection)));
        assert_eq!(unread.next(), Some(TargetEvent::Error("a medium has not answered".into())));
        let read = std::iter::from_fn(|| unread.next()).collect::<Vec<_>>();
        let (last, read) = read.split_last().unwrap();
        assert_eq!(
            (read.len(), read[0].clone()),
            (UNREAD_MAX - 1, peer_rejected_event(2 * UNREAD_MAX as u64 + 1))
        );
        let TargetEvent::Notice(text) = last else { panic!("{last:?}") };
        assert!(text.starts_with(&format!("{} events", 2 * UNREAD_MAX + 1)), "{text}");
        assert_eq!(unread.next(), None, "it is reported once");
    }

    #[test]
    fn events_are_counted_by_reason_whether_or_not_they_are_read() {
        let mut unread = EventQueue::default();
        let end = |reason| TargetEvent::Disconnected {
            connection: 1,
            peer: "x".into(),
            reason,
            association: None,
        };
        (0..2 * UNREAD_MAX as u64).for_each(|id| unread.push(peer_rejected_event(id)));
        unread.count_unreported_refusal(RefusalReason::NoSuchSubsystem);
        unread.push(end(DisconnectReason::KeepAliveExpired));
        unread.push(end(DisconnectReason::Broken("reset".into())));
        unread.push(end(DisconnectReason::KeepAliveExpired));
        let audit = ConnectionAudit::of_peer(Some(1), "192.0.2.1:5", 1);
        unread.push(TargetEvent::Accepted(Box::new(audit)));
        while unread.next().is_some() {}
        let counts = unread.counts();
        assert_eq!(counts.refused["no-such-subsystem"], 2 * UNREAD_MAX as u64 + 1);
        assert_eq!(counts.disconnected["keep-alive-expired"], 2);
        assert_eq!(counts.disconnected["broken"], 1);
        assert_eq!((counts.accepted.authenticated, counts.accepted.unauthenticated), (0, 1));
        assert!(counts.disconnected.keys().all(|name| DisconnectReason::NAMES.contains(name)));
        let distinct: std::collections::BTreeSet<_> = DisconnectReason::NAMES.into_iter().collect();
        assert_eq!(distinct.len(), DisconnectReason::NAMES.len());
    }

    #[test]
    fn event_queue_is_bounded_for_errors() {
        let mut unread = EventQueue::default();
        (0..2 * UNREAD_MAX).for_each(|count| unread.push(TargetEvent::Error(count.to_string())));
        assert_eq!(unread.next(), Some(TargetEvent::Error(UNREAD_MAX.to_string())));
        assert_eq!(unread.events.len(), UNREAD_MAX - 1);
    }
}
