//! Traffic of an executor since the last report.

use tenmil_base::{Instant, Span};

use crate::controller::transport_interface::IoCounters;

/// Traffic since the last report, by the two low bits of the opcode: 1 is write, 2 is read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TrafficCounters {
    commands: [u64; 4],
    bytes: [u64; 4],
    busy_ns: u64,
    busy_since: Option<Instant>,
}

impl TrafficCounters {
    /// Whether commands were counted.
    pub(super) fn has_any(&self) -> bool {
        self.commands != [0; 4]
    }

    /// Counts one command of a class, 1 for writes and 2 for reads.
    #[inline]
    pub(super) fn count_command(&mut self, class: usize, bytes: u64) {
        self.commands[class & 3] += 1;
        self.bytes[class & 3] += bytes;
    }

    /// Counts `count` commands of a class that moved `bytes` together.
    #[inline]
    pub(super) fn add_counters(&mut self, class: usize, count: u32, bytes: u64) {
        self.commands[class & 3] += u64::from(count);
        self.bytes[class & 3] += bytes;
    }

    /// Adds bytes that a Verify command reads from the block device; it does not count as a read command.
    pub(super) fn add_read_bytes(&mut self, bytes: u64) {
        self.bytes[2] += bytes;
    }

    #[inline]
    pub(super) fn set_busy(&mut self, now: Instant) {
        self.busy_since.get_or_insert(now);
    }

    #[inline]
    pub(super) fn set_idle(&mut self, now: Instant) {
        if let Some(since) = self.busy_since.take() {
            self.busy_ns += now.since(since).ns;
        }
    }

    pub(super) fn take_counters(&mut self, now: Instant) -> IoCounters {
        let is_busy = self.busy_since.is_some();
        self.set_idle(now);
        self.busy_since = is_busy.then_some(now);
        let traffic = IoCounters {
            read_bytes: self.bytes[2],
            written_bytes: self.bytes[1],
            read_commands: self.commands[2],
            write_commands: self.commands[1],
            busy: Span { ns: self.busy_ns },
        };
        *self = Self { busy_since: self.busy_since, ..Self::default() };
        traffic
    }
}
