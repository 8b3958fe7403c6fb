//! Timeout policy for an unresponsive peer: detect, reconnect, give up, fail fast.

use tenmil_base::Span;

/// Timeouts for an unresponsive peer. All of them are finite.
///
/// ```text
///   connected ── detect ──▶ lost ── retry, retry, … ──▶ connected again: held requests continue
///                             ├─ fail fast ──▶ held requests fail, and new ones at once
///                             └─ give up ────▶ the device is gone
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutPolicy {
    /// Keep Alive Timeout (KATO): an unresponsive peer is detected within this time. Keep Alive is sent
    /// at half of it, and the controller ends the association if it receives nothing for all of it.
    pub detect: Span,
    /// Timeout of each connect attempt.
    pub connect: Span,
    /// Delay between two connect attempts (reconnect delay).
    pub retry: Span,
    /// Requests are held for this time after a connection loss, and fail from then on (fast I/O fail
    /// timeout).
    pub fail_fast: Span,
    /// Reconnects end this time after a connection loss (ctrl-loss timeout).
    pub give_up: Span,
}

impl Default for TimeoutPolicy {
    fn default() -> Self {
        Self {
            detect: Span::from_secs(5),
            connect: Span::from_secs(5),
            retry: Span::from_secs(1),
            fail_fast: Span::from_secs(30),
            give_up: Span::from_secs(600),
        }
    }
}

impl TimeoutPolicy {
    /// Interval of Keep Alive commands, which is also the timeout of each.
    #[must_use]
    pub const fn keep_alive_interval(&self) -> Span {
        Span { ns: self.detect.ns / 2 }
    }
}
