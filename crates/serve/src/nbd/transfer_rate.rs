//! Minimum transfer rate of a client, for requests it has started to send and replies it must
//! receive.

use tenmil_base::{Instant, Span};

/// Measures whether a pending transfer of a client proceeds fast enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransferRateCheck {
    /// Number of the awaited transfer.
    transfer: u64,
    /// Bytes moved in the current window.
    bytes: usize,
    /// End of the window; `NEVER` while no transfer is awaited.
    until: Instant,
}

/// Length of a window: in each one the transfer completes or at least [`WINDOW_BYTES_MIN`] are moved.
pub(super) const WINDOW: Span = Span::from_secs(10);
/// Smallest number of bytes to move in a window, about 26 KB/s.
pub(super) const WINDOW_BYTES_MIN: usize = 256 << 10;

impl TransferRateCheck {
    pub(super) const NOTHING: Self = Self { transfer: 0, bytes: 0, until: Instant::NEVER };

    /// Adds bytes moved.
    #[inline]
    pub(super) fn record_transfer(&mut self, count: usize) {
        self.bytes += count;
    }

    /// End of the current window.
    #[inline]
    pub(super) fn window_end(&self) -> Instant {
        self.until
    }

    /// Checks the awaited transfer `transfer`. Returns true if it is too slow.
    #[inline]
    pub(super) fn is_too_slow(&mut self, now: Instant, transfer: Option<u64>) -> bool {
        let Some(transfer) = transfer else {
            self.until = Instant::NEVER;
            return false;
        };
        let is_new = self.until == Instant::NEVER || transfer != self.transfer;
        if !is_new && now < self.until {
            return false;
        }
        if !is_new && self.bytes < WINDOW_BYTES_MIN {
            return true;
        }
        *self = Self { transfer, bytes: 0, until: now.after(WINDOW) };
        false
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{TransferRateCheck, WINDOW, WINDOW_BYTES_MIN};

    #[test]
    fn stalled_transfer_is_too_slow_and_one_at_the_minimum_rate_is_not() {
        let mut progress = TransferRateCheck::NOTHING;
        let at = |windows: u64| Instant::default().after(Span { ns: windows * WINDOW.ns });
        assert!(!progress.is_too_slow(at(0), Some(1)));
        for window in 1..10 {
            progress.record_transfer(WINDOW_BYTES_MIN);
            assert!(!progress.is_too_slow(at(window), Some(1)));
        }
        progress.record_transfer(WINDOW_BYTES_MIN - 1);
        assert!(progress.is_too_slow(at(10), Some(1)));
    }

    #[test]
    fn next_request_or_a_pause_starts_a_new_window() {
        let mut progress = TransferRateCheck::NOTHING;
        let at = |seconds| Instant::default().after(Span::from_secs(seconds));
        for number in 0..5 {
            assert!(!progress.is_too_slow(at(9 * number), Some(number)), "another request");
        }
        assert!(!progress.is_too_slow(at(40), None));
        assert_eq!(
            progress.window_end(),
            Instant::NEVER,
            "an idle client is idle as long as it likes"
        );
        assert!(!progress.is_too_slow(at(1000), Some(4)));
        assert!(progress.is_too_slow(at(1010), Some(4)));
    }
}
