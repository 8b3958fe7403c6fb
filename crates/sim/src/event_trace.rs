//! Trace of all observable events: a running hash, and the last records.
//!
//! Two runs are identical if their traces have the same hash: every register access, every memory
//! access of the device, every submission and every completion is included with its time.

use std::collections::VecDeque;
use std::fmt;

use tenmil_base::Instant;

/// Running hash of all records, and the last of them.
#[derive(Debug)]
pub struct EventTrace {
    hash: u64,
    count: u64,
    progress: u64,
    tail: VecDeque<TraceRecord>,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Time.
    pub at: Instant,
    /// Kind.
    pub kind: TraceKind,
    /// Three numbers whose meaning depends on the kind.
    pub detail: [u64; 3],
}

/// Kinds of records, each with the meaning of the three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum TraceKind {
    /// The host reads a register: offset, value, access number.
    RegisterRead,
    /// The host writes a register: offset, value, access number.
    RegisterWrite,
    /// A doorbell write arrives at the device: offset, value as written, value as delivered.
    Doorbell,
    /// The host stores a command in a ring: address of the entry, dword 0, data pointer.
    CommandStored,
    /// The device fetches a command: address of the ring, index, dword 0.
    CommandFetched,
    /// A completion becomes visible: address of the entry, result and SQHD, identifier and status.
    CompletionStored,
    /// The device reads host memory: address, length, digest of the data.
    DeviceRead,
    /// The device writes host memory: address, length, digest of the data.
    DeviceWrite,
    /// The IOMMU rejects an access: address, length, 1 for a write.
    Blocked,
    /// Memory is mapped: address, length.
    Mapped,
    /// Memory is unmapped: address, length.
    Unmapped,
    /// The host revokes the DMA access of the device.
    CutOff,
    /// The host restores the DMA access of the device.
    Reconnected,
    /// A request is submitted: token, operation, first block and count.
    Submitted,
    /// A request completes: token, status, result.
    Completed,
    /// The driver reports an event: digest of it.
    Reported,
    /// A fault is injected: number of the fault, two numbers of its own.
    Mischief,
    /// The medium executes a request: operation, first block and count, status.
    Medium,
    /// The device signals an interrupt: vector.
    Interrupt,
    /// An action of the harness: code, two numbers of its own.
    Harness,
}

/// Number of records kept for printing.
const TAIL_LEN: usize = 4096;

impl Default for EventTrace {
    fn default() -> Self {
        Self { hash: HASH_START, count: 0, progress: 0, tail: VecDeque::with_capacity(256) }
    }
}

impl EventTrace {
    /// Adds a record.
    pub fn record(&mut self, at: Instant, kind: TraceKind, detail: [u64; 3]) {
        for word in [at.ns, kind as u64, detail[0], detail[1], detail[2]] {
            self.hash = mix_hash(self.hash, word);
        }
        self.count += 1;
        // A register read and a rejected access change nothing.
        if !matches!(kind, TraceKind::RegisterRead | TraceKind::Blocked) {
            self.progress += 1;
        }
        if self.tail.len() == TAIL_LEN {
            self.tail.pop_front();
        }
        self.tail.push_back(TraceRecord { at, kind, detail });
    }

    /// Hash of all records so far.
    pub fn running_hash(&self) -> u64 {
        self.hash
    }

    /// Number of records.
    pub fn record_count(&self) -> u64 {
        self.count
    }

    /// Number of records that changed some state. Without a change there was no progress.
    pub fn progress_count(&self) -> u64 {
        self.progress
    }

    /// Last `count` records, oldest first, one per line.
    pub fn last_records(&self, count: usize) -> Vec<String> {
        let skip = self.tail.len().saturating_sub(count);
        self.tail.iter().skip(skip).map(TraceRecord::to_string).collect()
    }
}

impl fmt::Display for TraceRecord {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second, third] = self.detail;
        write!(out, "{:>14} ns  {:<16?} {first:#x} {second:#x} {third:#x}", self.at.ns, self.kind)
    }
}

/// Digest of some bytes, for a record.
pub fn digest_bytes(bytes: &[u8]) -> u64 {
    let mut hash = mix_hash(HASH_START, bytes.len() as u64);
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        hash = mix_hash(hash, u64::from_le_bytes(chunk.try_into().unwrap_or_default()));
    }
    for byte in chunks.remainder() {
        hash = mix_hash(hash, u64::from(*byte));
    }
    hash
}

const HASH_START: u64 = 0x7e9c_0a5e_ed5e_edf0;

/// One round of `wyhash`: a wide multiplication, folded.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two halves")]
const fn mix_hash(hash: u64, word: u64) -> u64 {
    let wide = (hash ^ 0xa076_1d64_78bd_642f) as u128 * (word ^ 0xe703_7ed1_a0b4_28db) as u128;
    (wide as u64 ^ (wide >> 64) as u64).wrapping_add(hash.rotate_left(23))
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{EventTrace, TraceKind, digest_bytes};

    fn test_trace(details: &[[u64; 3]]) -> EventTrace {
        let mut trace = EventTrace::default();
        for (ns, detail) in (0..).zip(details) {
            trace.record(Instant { ns }, TraceKind::Completed, *detail);
        }
        trace
    }

    #[test]
    fn hash_depends_on_every_number_and_the_order() {
        let reference = test_trace(&[[1, 2, 3], [4, 5, 6]]).running_hash();
        assert_eq!(reference, test_trace(&[[1, 2, 3], [4, 5, 6]]).running_hash());
        for changed in [
            [[4, 5, 6], [1, 2, 3]],
            [[0, 2, 3], [4, 5, 6]],
            [[1, 0, 3], [4, 5, 6]],
            [[1, 2, 3], [4, 5, 7]],
        ] {
            assert_ne!(reference, test_trace(&changed).running_hash(), "{changed:?}");
        }
        let mut later = test_trace(&[[1, 2, 3]]);
        later.record(Instant { ns: 2 }, TraceKind::Completed, [4, 5, 6]);
        assert_ne!(reference, later.running_hash(), "at another time");
        let mut other = test_trace(&[[1, 2, 3]]);
        other.record(Instant { ns: 1 }, TraceKind::Submitted, [4, 5, 6]);
        assert_ne!(reference, other.running_hash(), "of another kind");
    }

    #[test]
    fn register_read_is_no_progress() {
        let mut trace = EventTrace::default();
        trace.record(Instant { ns: 1 }, TraceKind::RegisterRead, [0x1c, 1, 0]);
        assert_eq!((trace.record_count(), trace.progress_count()), (1, 0));
        trace.record(Instant { ns: 1 }, TraceKind::RegisterWrite, [0x14, 1, 0]);
        assert_eq!((trace.record_count(), trace.progress_count()), (2, 1));
        assert_eq!(trace.last_records(1).len(), 1);
    }

    #[test]
    fn digest_depends_on_every_byte() {
        let bytes: Vec<u8> = (0..100).collect();
        let reference = digest_bytes(&bytes);
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 0x80;
            assert_ne!(digest_bytes(&changed), reference, "byte {index}");
        }
        assert_ne!(digest_bytes(&[0; 8]), digest_bytes(&[0; 16]), "lengths count");
    }
}
