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
const AT_REST: SendBudget = SendBudget { bytes: 0, sends: 1 };
/// How long after a completion of small I/O another one is expected.
const EXPECTED: Span = Span::from_ms(1);
/// Maximum pause between portions: an iteration that took longer was delayed by something else.
const REST_MAX: Span = Span::from_ms(1);

/// Budget of large data per iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendBudget {
    /// Bytes queued at a time.
    pub(crate) bytes: u32,
    pub(crate) sends: usize,
}

thread_local! {
    /// Start of the current iteration of this thread.
    static NOW: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Until when a completion of small I/O is expected.
    static UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Large data was sent in the current iteration.
    static HAVE_GONE: Cell<bool> = const { Cell::new(false) };
    /// Until when no large data is to be sent.
    static REST_UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
}

/// Starts a simulation on this thread: resets the state, because its time starts anew.
#[doc(hidden)]
pub fn begin_simulation() {
    HAVE_GONE.set(false);
    for cell in [&NOW, &UNTIL, &REST_UNTIL] {
        cell.set(Instant { ns: 0 });
    }
}

/// Starts an iteration of this thread.
#[inline]
pub(crate) fn turn(now: Instant) {
    let before = NOW.replace(now);
    if HAVE_GONE.get() && now > before {
        HAVE_GONE.set(false);
        REST_UNTIL.set(now.after(now.since(before).min(REST_MAX)));
    }
}

/// Records that large data is sent in this iteration.
#[inline]
pub(crate) fn note_large_send() {
    HAVE_GONE.set(true);
}

/// Records a completion of small I/O.
#[inline]
pub(crate) fn note_small_completion() {
    UNTIL.set(NOW.get().after(EXPECTED));
}

/// Current budget of large data.
#[inline]
pub(crate) fn portion() -> SendBudget {
    let now = NOW.get();
    match now < UNTIL.get() {
        false => BUDGET_UNCONTENDED,
        true if HAVE_GONE.get() || now < REST_UNTIL.get() => AT_REST,
        true => BUDGET_CONTENDED,
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{
        AT_REST, BUDGET_CONTENDED, BUDGET_UNCONTENDED, EXPECTED, REST_MAX, note_large_send,
        note_small_completion, portion, turn,
    };

    #[test]
    fn portions_are_small_for_a_while_after_an_answer() {
        let now = Instant { ns: 5_000_000 };
        turn(now);
        assert_eq!(portion(), BUDGET_UNCONTENDED);
        note_small_completion();
        turn(now.after(Span { ns: EXPECTED.ns - 1 }));
        assert_eq!(portion(), BUDGET_CONTENDED);
        turn(now.after(EXPECTED));
        assert_eq!(portion(), BUDGET_UNCONTENDED);
    }

    #[test]
    fn after_a_turn_with_data_the_others_have_as_much_time() {
        let at = |us: u64| Instant { ns: 5_000_000 + 1_000 * us };
        turn(at(0));
        note_small_completion();
        assert_eq!(portion(), BUDGET_CONTENDED);
        note_large_send();
        turn(at(0));
        assert_eq!(portion(), AT_REST, "one has had this turn's portion");
        for (us, expected) in
            [(30, AT_REST), (59, AT_REST), (60, BUDGET_CONTENDED), (70, BUDGET_CONTENDED)]
        {
            turn(at(us));
            assert_eq!(portion(), expected, "after {us} us");
        }
        note_large_send();
        turn(at(70).after(REST_MAX).after(REST_MAX));
        note_small_completion();
        assert_eq!(portion(), AT_REST);
        turn(at(70).after(REST_MAX).after(REST_MAX).after(REST_MAX));
        assert_eq!(portion(), BUDGET_UNCONTENDED, "nobody waits any more");
    }
}
