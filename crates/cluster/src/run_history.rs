//! History of a run, as readable lines and as a running hash.

use std::fmt::Write;
use std::ops::Range;

use tenmil_base::Instant;

/// Records of a run in the order of simulated time.
#[derive(Debug)]
pub(crate) struct RunHistory {
    hash: u64,
    records: Vec<HistoryRecord>,
    /// Whether NVMe/TCP PDUs are recorded. They are not part of the hash.
    has_packets: bool,
}

/// What a record concerns. A field that is `None` matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecordScope {
    /// Host number.
    pub(crate) host: Option<usize>,
    /// Disk number.
    pub(crate) disk: Option<usize>,
    /// Blocks of that disk.
    pub(crate) blocks: Option<Range<u64>>,
}

/// One event.
#[derive(Clone, Debug)]
struct HistoryRecord {
    at: Instant,
    scope: RecordScope,
    is_packet: bool,
    text: String,
}

const HASH_START: u64 = 0xcbf2_9ce4_8422_2325;
const HASH_PRIME: u64 = 0x0000_0100_0000_01b3;

impl RunHistory {
    /// Creates an empty history.
    pub(crate) fn new(has_packets: bool) -> Self {
        Self { hash: HASH_START, records: Vec::new(), has_packets }
    }

    /// Adds a record.
    pub(crate) fn add_record(&mut self, at: Instant, scope: RecordScope, text: String) {
        let bytes = at.ns.to_le_bytes();
        for byte in bytes.iter().chain(text.as_bytes()) {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(HASH_PRIME);
        }
        self.records.push(HistoryRecord { at, scope, is_packet: false, text });
    }

    /// Adds a record of an NVMe/TCP PDU, if these are recorded.
    pub(crate) fn add_pdu(&mut self, at: Instant, scope: RecordScope, text: String) {
        if self.has_packets {
            self.records.push(HistoryRecord { at, scope, is_packet: true, text });
        }
    }

    /// Whether NVMe/TCP PDUs are recorded.
    pub(crate) const fn records_pdus(&self) -> bool {
        self.has_packets
    }

    /// Hash of all records except PDUs.
    pub(crate) const fn running_hash(&self) -> u64 {
        self.hash
    }

    /// Number of records except PDUs.
    pub(crate) fn event_count(&self) -> usize {
        self.records.iter().filter(|record| !record.is_packet).count()
    }

    /// Last `most` records that concern `scope`, oldest first, one per line.
    pub(crate) fn last_lines(&self, scope: &RecordScope, most: usize) -> Vec<String> {
        let chosen: Vec<&HistoryRecord> =
            self.records.iter().filter(|record| record.scope.concerns(scope)).collect();
        let skipped = chosen.len().saturating_sub(most);
        let mut lines = Vec::new();
        if skipped > 0 {
            lines.push(format!("… {skipped} earlier records that concern {scope}"));
        }
        lines.extend(chosen[skipped..].iter().map(|record| record.format_line()));
        lines
    }
}

impl RecordScope {
    /// Everything.
    pub(crate) const ALL: Self = Self { host: None, disk: None, blocks: None };

    /// One host.
    pub(crate) const fn host(host: usize) -> Self {
        Self { host: Some(host), disk: None, blocks: None }
    }

    /// A disk as a whole, without its single blocks.
    pub(crate) const fn disk(disk: usize) -> Self {
        Self { host: None, disk: Some(disk), blocks: Some(0..0) }
    }

    /// Whether an event may concern both.
    fn concerns(&self, other: &Self) -> bool {
        let same = |one: Option<usize>, other: Option<usize>| {
            one.is_none() || other.is_none() || one == other
        };
        let overlap = match (&self.blocks, &other.blocks) {
            (Some(one), Some(other)) => one.start < other.end && other.start < one.end,
            _ => true,
        };
        same(self.host, other.host) && same(self.disk, other.disk) && overlap
    }
}

impl std::fmt::Display for RecordScope {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.host.map(|host| format!("host {host}")));
        parts.extend(self.disk.map(|disk| format!("disk {disk}")));
        parts.extend(self.blocks.as_ref().map(|blocks| format!("block {}", blocks.start)));
        if parts.is_empty() { out.write_str("the run") } else { out.write_str(&parts.join(", ")) }
    }
}

impl HistoryRecord {
    /// `  12.345678 s  event`.
    fn format_line(&self) -> String {
        let (secs, us) = (self.at.ns / 1_000_000_000, self.at.ns / 1_000 % 1_000_000);
        let mut line = format!("{secs:>3}.{us:06} s  ");
        if self.is_packet {
            line += "        ";
        }
        // Writing to a string cannot fail.
        let _ = line.write_str(&self.text);
        line
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{RecordScope, RunHistory};

    #[test]
    fn only_records_that_concern_the_scope_are_printed() {
        let mut history = RunHistory::new(true);
        let now = Instant { ns: 1_500_000_000 };
        let blocks = |blocks| RecordScope { host: Some(0), disk: Some(1), blocks: Some(blocks) };
        history.add_record(now, RecordScope::ALL, "power lost".into());
        history.add_record(now, blocks(4..6), "write 4".into());
        history.add_record(now, blocks(6..7), "write 6".into());
        history.add_pdu(now, RecordScope::host(0), "CapsuleCmd".into());
        let lines =
            history.last_lines(&RecordScope { host: None, disk: Some(1), blocks: Some(5..6) }, 9);
        let expected = [
            "  1.500000 s  power lost",
            "  1.500000 s  write 4",
            "  1.500000 s          CapsuleCmd",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn packets_do_not_change_the_hash() {
        let [mut one, mut other] = [true, false].map(RunHistory::new);
        for history in [&mut one, &mut other] {
            history.add_record(Instant { ns: 1 }, RecordScope::ALL, "a".into());
            history.add_pdu(Instant { ns: 2 }, RecordScope::ALL, "b".into());
        }
        assert_eq!(
            (one.running_hash(), one.event_count()),
            (other.running_hash(), other.event_count())
        );
        other.add_record(Instant { ns: 3 }, RecordScope::ALL, "c".into());
        assert_ne!(one.running_hash(), other.running_hash());
    }
}
