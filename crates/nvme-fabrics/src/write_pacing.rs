//! Write pacing: limits write bursts while small I/O on the same thread awaits completions.
//!
//! Data of large writes is sent 1 MiB at a time, which costs least. Small I/O on the same thread, over
//! the same or another connection, then waits for that in each iteration of its round trip, and at the
//! target as well. So while completions other than of writes and large reads arrive, data is sent in
//! small portions, and after an iteration with a portion, other I/O has as much time as the portion took:
//!
//! ```text
//!   iterations: | portion     | . | . | . | . | portion     | . | .
//!               |<---- d ---->|<---- d ---->|
//! ```

use std::cell::Cell;

use tenmil_base::{Instant, Span};

/// Data per iteration without waiting small I/O, and the maximum number of sends.
pub(crate) const BUDGET_UNCONTENDED: SendBudget = SendBudget { bytes: 256 << 10, sends: 4 };
/// The same with waiting small I/O.
pub(crate) const BUDGET_CONTENDED: SendBudget = SendBudget { bytes: 64 << 10, sends: 1 };
/// A read of at least this size does not count as small I/O.
pub(crate) const LARGE: u32 = 32 << 10;
/// Between two portions: commands and their in-capsule data only.
const BUDGET_PAUSED: SendBudget = SendBudget { bytes: 0, sends: 1 };
/// How long after a completion of small I/O another one is expected.
const SMALL_IO_WINDOW: Span = Span::from_ms(1);
/// Maximum pause between portions: an iteration that took longer was delayed by something else.
const PAUSE_MAX: Span = Span::from_ms(1);

/// Budget of large data per iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendBudget {
    /// Bytes queued at a time.
    pub(crate) bytes: u32,
    pub(crate) sends: usize,
}

thread_local! {
    /// Start of the current iteration of this thread.
    static ITERATION_START: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Until when a completion of small I/O is expected.
    static SMALL_IO_UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Large data was sent in the current iteration.
    static LARGE_DATA_SENT: Cell<bool> = const { Cell::new(false) };
    /// Until when no large data is to be sent.
    static PAUSED_UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
}

/// Starts a simulation on this thread: resets the state, because its time starts anew.
#[doc(hidden)]
pub fn reset_for_simulation() {
    LARGE_DATA_SENT.set(false);
    for cell in [&ITERATION_START, &SMALL_IO_UNTIL, &PAUSED_UNTIL] {
        cell.set(Instant { ns: 0 });
    }
}

/// Starts an iteration of this thread.
#[inline]
pub(crate) fn begin_iteration(now: Instant) {
    let before = ITERATION_START.replace(now);
    if LARGE_DATA_SENT.get() && now > before {
        LARGE_DATA_SENT.set(false);
        PAUSED_UNTIL.set(now.after(now.since(before).min(PAUSE_MAX)));
    }
}

/// Records that large data is sent in this iteration.
#[inline]
pub(crate) fn note_large_send() {
    LARGE_DATA_SENT.set(true);
}

/// Records a completion of small I/O.
#[inline]
pub(crate) fn note_small_completion() {
    SMALL_IO_UNTIL.set(ITERATION_START.get().after(SMALL_IO_WINDOW));
}

/// Current budget of large data.
#[inline]
pub(crate) fn send_budget() -> SendBudget {
    let now = ITERATION_START.get();
    match now < SMALL_IO_UNTIL.get() {
        false => BUDGET_UNCONTENDED,
        true if LARGE_DATA_SENT.get() || now < PAUSED_UNTIL.get() => BUDGET_PAUSED,
        true => BUDGET_CONTENDED,
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{
        BUDGET_CONTENDED, BUDGET_PAUSED, BUDGET_UNCONTENDED, PAUSE_MAX, SMALL_IO_WINDOW,
        begin_iteration, note_large_send, note_small_completion, send_budget,
    };

    #[test]
    fn send_portions_are_small_after_a_completion() {
        let now = Instant { ns: 5_000_000 };
        begin_iteration(now);
        assert_eq!(send_budget(), BUDGET_UNCONTENDED);
        note_small_completion();
        begin_iteration(now.after(Span { ns: SMALL_IO_WINDOW.ns - 1 }));
        assert_eq!(send_budget(), BUDGET_CONTENDED);
        begin_iteration(now.after(SMALL_IO_WINDOW));
        assert_eq!(send_budget(), BUDGET_UNCONTENDED);
    }

    #[test]
    fn large_send_is_followed_by_equal_time_for_other_connections() {
        let at = |us: u64| Instant { ns: 5_000_000 + 1_000 * us };
        begin_iteration(at(0));
        note_small_completion();
        assert_eq!(send_budget(), BUDGET_CONTENDED);
        note_large_send();
        begin_iteration(at(0));
        assert_eq!(send_budget(), BUDGET_PAUSED, "one has had this turn's portion");
        for (us, expected) in [
            (30, BUDGET_PAUSED),
            (59, BUDGET_PAUSED),
            (60, BUDGET_CONTENDED),
            (70, BUDGET_CONTENDED),
        ] {
            begin_iteration(at(us));
            assert_eq!(send_budget(), expected, "after {us} us");
        }
        note_large_send();
        begin_iteration(at(70).after(PAUSE_MAX).after(PAUSE_MAX));
        note_small_completion();
        assert_eq!(send_budget(), BUDGET_PAUSED);
        begin_iteration(at(70).after(PAUSE_MAX).after(PAUSE_MAX).after(PAUSE_MAX));
        assert_eq!(send_budget(), BUDGET_UNCONTENDED, "no connection waits");
    }
}
