//! A discovery service that is asked again whenever it says that something has changed.
//!
//! The connection stays: the driver keeps it alive, notices when it is lost, and calls again as its
//! policy says. What was missed meanwhile is found by reading everything again.

use base::{Instant, Span};
use wire::log::discovery::DiscoveryEntry;

use super::{Discovered, read_whole};
use crate::Refused;
use crate::tcp::ask::AskedRemote;
use crate::tcp::attached::Pulse;
use crate::tcp::name::TcpName;

/// A discovery service, and what it said last.
pub(crate) struct Watch {
    service: AskedRemote,
    known: Discovered,
    /// What had happened when it was looked at last.
    seen: Pulse,
    /// Something may have changed that was not read.
    wants: bool,
    /// One that tells of no changes is asked again at this time.
    ask_at: Instant,
}

/// What has changed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// There is one more way to a subsystem.
    Came(DiscoveryEntry),
    /// There is one less.
    Went(DiscoveryEntry),
    /// The service does not answer, for this reason; it is called again.
    Away(String),
    /// It answers again.
    Back,
}

/// How often a service is asked that does not tell of changes.
const INTERVAL: Span = Span::from_secs(10);

impl Watch {
    /// Calls the service that `name` names. Nothing is known of it yet.
    pub(crate) fn begin(name: &TcpName) -> Result<Self, Refused> {
        let service = AskedRemote::call(name)?;
        let seen = service.pulse()?;
        let known = Discovered { generation: 0, entries: Vec::new() };
        Ok(Self { service, known, seen, wants: true, ask_at: Instant::NEVER })
    }

    /// The generation of what is known.
    pub(crate) fn generation(&self) -> u64 {
        self.known.generation
    }

    /// What has changed since this was last called; to be called again and again.
    ///
    /// # Errors
    ///
    /// If the service was given up, or says what makes no sense.
    pub(crate) fn next(&mut self) -> Result<Vec<Change>, Refused> {
        let now = self.service.now();
        let pulse = self.service.pulse()?;
        let mut changes = Vec::new();
        if pulse.returns > self.seen.returns {
            // It may have gone and come since.
            if self.seen.away.is_none() {
                changes.push(Change::Away("the connection was lost".to_owned()));
            }
            changes.push(Change::Back);
            self.wants = true;
        }
        if let (Some(why), true) = (&pulse.away, pulse.is_newly_away(&self.seen)) {
            changes.push(Change::Away(why.clone()));
        }
        self.wants |= pulse.notices > self.seen.notices || now >= self.ask_at;
        self.seen = pulse;
        if self.wants && self.seen.away.is_none() {
            changes.extend(self.read(now)?);
        }
        Ok(changes)
    }

    /// Reads everything, and compares. Nothing if the connection was lost meanwhile.
    fn read(&mut self, now: Instant) -> Result<Vec<Change>, Refused> {
        let found = match read_whole(&mut self.service) {
            Ok(found) => found,
            Err(refused) => {
                let pulse = self.service.pulse()?;
                let was_lost = pulse.away.is_some() || pulse.returns > self.seen.returns;
                return if was_lost { Ok(Vec::new()) } else { Err(refused) };
            }
        };
        self.wants = false;
        self.ask_at =
            if self.service.tells_of_changes() { Instant::NEVER } else { now.after(INTERVAL) };
        let changes = differences(&self.known.entries, &found.entries);
        self.known = found;
        Ok(changes)
    }
}

/// What came and went from `before` to `after`.
fn differences(before: &[DiscoveryEntry], after: &[DiscoveryEntry]) -> Vec<Change> {
    let lacks = |all: &[DiscoveryEntry], one: &DiscoveryEntry| {
        all.iter().all(|other| other.as_bytes() != one.as_bytes())
    };
    let went = before.iter().filter(|one| lacks(after, one)).cloned().map(Change::Went);
    let came = after.iter().filter(|one| lacks(before, one)).cloned().map(Change::Came);
    went.chain(came).collect()
}

#[cfg(test)]
mod tests {
    use wire::log::discovery::DiscoveryEntry;

    use super::{Change, differences};

    #[test]
    fn what_stays_is_no_change_and_what_differs_went_and_came() {
        let entry =
            |port, cntlid| DiscoveryEntry::zeroed().with(|entry| entry.portid(port).cntlid(cntlid));
        let before = [entry(1, 0), entry(2, 0), entry(3, 0)];
        let after = [entry(4, 0), entry(3, 9), entry(1, 0)];
        let expected = [
            Change::Went(entry(2, 0)),
            Change::Went(entry(3, 0)),
            Change::Came(entry(4, 0)),
            Change::Came(entry(3, 9)),
        ];
        assert_eq!(differences(&before, &after), expected);
        assert_eq!(differences(&after, &after), []);
    }
}
