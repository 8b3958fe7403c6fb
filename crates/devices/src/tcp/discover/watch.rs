//! Monitoring of a discovery service: its log page is read again after every change notification.
//!
//! The connection is persistent: the driver sends Keep Alive commands, detects its loss and
//! reconnects according to the policy. Changes during an outage are found by reading the whole page
//! again.

use tenmil_base::{Instant, Span};
use tenmil_wire::log::discovery::DiscoveryEntry;

use super::{DiscoveryLog, read_whole};
use crate::tcp::fabrics_controller::ConnectionEventCounts;
use crate::tcp::remote_admin::RemoteAdmin;
use crate::tcp::tcp_uri::TcpUri;
use tenmil_base::Error;

/// A discovery service and its last known log page.
pub struct DiscoveryWatch {
    service: RemoteAdmin,
    known: DiscoveryLog,
    /// Connection events as of the last call.
    seen: ConnectionEventCounts,
    /// The log page may have changed since it was read.
    is_stale: bool,
    /// Time of the next read, for a service without change notifications.
    next_query: Instant,
}

/// A change of the log page or of the connection.
#[derive(Clone, Debug, PartialEq)]
pub enum DiscoveryChange {
    /// A path to a subsystem was added.
    Added(DiscoveryEntry),
    /// A path to a subsystem was removed.
    Removed(DiscoveryEntry),
    /// The connection was lost for this reason; it is being reconnected.
    Disconnected(String),
    /// The connection was restored.
    Reconnected,
}

/// Read interval of a service without change notifications.
const INTERVAL: Span = Span::from_secs(10);

impl DiscoveryWatch {
    /// Connects to the service that `name` names. Its log page is read by the first
    /// [`next_changes`](Self::next_changes).
    pub fn begin(name: &TcpUri) -> Result<Self, Error> {
        let service = RemoteAdmin::connect(name)?;
        let seen = service.connection_event_counts()?;
        let known = DiscoveryLog { generation: 0, entries: Vec::new() };
        Ok(Self { service, known, seen, is_stale: true, next_query: Instant::NEVER })
    }

    /// Generation counter of the last known log page.
    pub fn generation(&self) -> u64 {
        self.known.generation
    }

    /// Changes since the previous call. To be called repeatedly.
    ///
    /// # Errors
    ///
    /// If the connection was given up, or the service returns invalid data.
    pub fn next_changes(&mut self) -> Result<Vec<DiscoveryChange>, Error> {
        let now = self.service.now();
        let pulse = self.service.connection_event_counts()?;
        let mut changes = Vec::new();
        if pulse.returns > self.seen.returns {
            // The connection may have been lost and restored since the last call.
            if self.seen.disconnect_reason.is_none() {
                changes.push(DiscoveryChange::Disconnected("the connection was lost".to_owned()));
            }
            changes.push(DiscoveryChange::Reconnected);
            self.is_stale = true;
        }
        if let (Some(why), true) =
            (&pulse.disconnect_reason, pulse.is_newly_disconnected(&self.seen))
        {
            changes.push(DiscoveryChange::Disconnected(why.clone()));
        }
        self.is_stale |= pulse.notices > self.seen.notices || now >= self.next_query;
        self.seen = pulse;
        if self.is_stale && self.seen.disconnect_reason.is_none() {
            changes.extend(self.read(now)?);
        }
        Ok(changes)
    }

    /// Reads the log page and compares. No changes if the connection was lost meanwhile.
    fn read(&mut self, now: Instant) -> Result<Vec<DiscoveryChange>, Error> {
        let found = match read_whole(&mut self.service) {
            Ok(found) => found,
            Err(refused) => {
                let pulse = self.service.connection_event_counts()?;
                let was_lost =
                    pulse.disconnect_reason.is_some() || pulse.returns > self.seen.returns;
                return if was_lost { Ok(Vec::new()) } else { Err(refused) };
            }
        };
        self.is_stale = false;
        self.next_query =
            if self.service.notifies_changes() { Instant::NEVER } else { now.after(INTERVAL) };
        let changes = differences(&self.known.entries, &found.entries);
        self.known = found;
        Ok(changes)
    }
}

/// Entries added and removed between `before` and `after`.
fn differences(before: &[DiscoveryEntry], after: &[DiscoveryEntry]) -> Vec<DiscoveryChange> {
    let lacks = |all: &[DiscoveryEntry], one: &DiscoveryEntry| {
        all.iter().all(|other| other.as_bytes() != one.as_bytes())
    };
    let went = before.iter().filter(|one| lacks(after, one)).cloned().map(DiscoveryChange::Removed);
    let came = after.iter().filter(|one| lacks(before, one)).cloned().map(DiscoveryChange::Added);
    went.chain(came).collect()
}

#[cfg(test)]
mod tests {
    use tenmil_wire::log::discovery::DiscoveryEntry;

    use super::{DiscoveryChange, differences};

    #[test]
    fn changed_entry_is_removed_and_added() {
        let entry =
            |port, cntlid| DiscoveryEntry::zeroed().with(|entry| entry.portid(port).cntlid(cntlid));
        let before = [entry(1, 0), entry(2, 0), entry(3, 0)];
        let after = [entry(4, 0), entry(3, 9), entry(1, 0)];
        let expected = [
            DiscoveryChange::Removed(entry(2, 0)),
            DiscoveryChange::Removed(entry(3, 0)),
            DiscoveryChange::Added(entry(4, 0)),
            DiscoveryChange::Added(entry(3, 9)),
        ];
        assert_eq!(differences(&before, &after), expected);
        assert_eq!(differences(&after, &after), []);
    }
}
