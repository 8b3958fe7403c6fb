//! Keep Alive commands (Base 2.1 §3.9).

use tenmil_base::{Dma, Instant, Mmio, Span};
use tenmil_wire::admin::KeepAlive;

use super::admin_queue_pair::AdminCommandPurpose;
use super::{Controller, QueueTransports};

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Keep-alive timeout to set: the configured one, rounded up to the controller's granularity. Zero if
    /// none is set.
    pub(super) fn keep_alive_timeout(&self) -> Span {
        let unit = self.identity.as_ref().map_or(0, |identity| identity.limits.keep_alive_unit.ns);
        match self.options.keep_alive {
            Some(wanted) if unit > 0 => Span { ns: wanted.ns.max(1).next_multiple_of(unit) },
            _ => Span::default(),
        }
    }

    /// Starts the keep-alive interval.
    pub(super) fn begin_keep_alive(&mut self, now: Instant) {
        self.keep_alive_at = now.after(self.keep_alive_interval());
    }

    /// Sends a Keep Alive command after half of the timeout.
    pub(super) fn send_keep_alive_if_due(&mut self, now: Instant) {
        if now < self.keep_alive_at || self.is_admin_queue_stopped() {
            return;
        }
        self.keep_alive_at = now.after(self.keep_alive_interval());
        if self.admin.outstanding_count(|purpose| *purpose == AdminCommandPurpose::KeepAlive) == 0 {
            self.admin.submit_internal(now, AdminCommandPurpose::KeepAlive, &KeepAlive {});
        }
    }

    /// Makes the next [`poll`](Self::poll) send a Keep Alive command, if keep-alive is in use.
    pub fn request_keep_alive(&mut self, now: Instant) {
        if self.keep_alive_at != Instant::NEVER {
            self.keep_alive_at = self.keep_alive_at.min(now);
        }
    }

    fn keep_alive_interval(&self) -> Span {
        match self.keep_alive_timeout() {
            // The timeout set by Connect.
            Span { ns: 0 } => Span { ns: self.options.keep_alive.map_or(0, |time| time.ns / 2) },
            time => Span { ns: time.ns / 2 },
        }
    }
}
