//! Detects a stalled connection of an I/O queue while its controller is alive.
//!
//! If nothing is received while commands are outstanding, either the device is slow or the connection has
//! stalled. A Flush of namespace 0, which every controller rejects at once, distinguishes the two:
//!
//! ```text
//!   busy ── a third of `detect`, nothing received ──▶ probed ── another third ──▶ lost
//!    ▲                                                  │
//!    └─────────────── something received ───────────────┘
//! ```
//!
//! A queue with all its commands outstanding has no free entry for the probe. It is lost when nothing has
//! been received for as long as requests may be held (`fail-fast`).

use tenmil_base::{Instant, Span};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::{Command, IoOpcode};

use crate::queue_connection::QueueConnection;
use crate::timeout_policy::TimeoutPolicy;

/// Stall detection of one connection.
#[derive(Debug)]
pub(crate) struct StallDetector {
    check_interval: Span,
    time_limit: Span,
    /// Time of the next check.
    next_check: Instant,
    /// Receive count at the last check.
    received_before: u64,
    /// Since when nothing was received while commands were outstanding.
    since: Option<Instant>,
    is_probing: bool,
    /// Identifier of the probe, whose tag is after those of the queue pair.
    cid: u16,
}

impl StallDetector {
    /// For a queue with so many commands.
    pub(crate) fn new(policy: &TimeoutPolicy, slots: u16, now: Instant) -> Self {
        let check_interval = Span { ns: (policy.detect.ns / 3).max(1) };
        let time_limit = policy.fail_fast.max(policy.detect);
        let (received_before, since, is_probing, next_check) =
            (0, None, false, now.after(check_interval));
        Self {
            check_interval,
            time_limit,
            next_check,
            received_before,
            since,
            is_probing,
            cid: slots,
        }
    }

    /// Time of the next [`check`](Self::check).
    #[inline]
    pub(crate) const fn next_check(&self) -> Instant {
        self.next_check
    }

    /// Whether new commands have to wait, because the probe uses their entries.
    #[inline]
    pub(crate) const fn is_probing(&self) -> bool {
        self.is_probing
    }

    /// Whether a completion with this identifier is of the probe.
    #[inline]
    pub(crate) const fn is_probe(&self, cid: u16) -> bool {
        cid == self.cid
    }

    /// Checks whether anything was received since the last check; if not, sends the probe, or ends the
    /// connection.
    #[cold]
    pub(crate) fn check(&mut self, now: Instant, connection: &mut QueueConnection) {
        self.next_check = now.after(self.check_interval);
        let count = connection.receive_count();
        let is_new = core::mem::replace(&mut self.received_before, count) != count;
        if is_new || connection.outstanding_count() == 0 {
            self.since = (connection.outstanding_count() > 0).then_some(now);
            self.is_probing = false;
            return;
        }
        let Some(since) = self.since else {
            self.since = Some(now);
            return;
        };
        let waited = now.since(since);
        if self.is_probing || waited >= self.time_limit {
            connection.end_as_stalled(waited);
        } else if !connection.is_tag_free(self.cid) {
            // The last probe has no completion, although others have: it serves for this silence too.
            self.is_probing = true;
        } else if connection.outstanding_count() < u32::from(self.cid) {
            let probe = Command::new(IoOpcode::Flush.code()).with_cid(self.cid);
            let nothing = tenmil_base::Segment::default();
            self.is_probing =
                connection.submit_segment(&probe, DataDirection::None, nothing).is_ok();
        }
    }
}
