//! Whether somebody on this thread waits for answers, while data of others go out.
//!
//! The data of large writes go a megabyte at a time, which costs least. But whoever reads beside them
//! on the same thread, over the same connection or another, has to wait for that megabyte in each of
//! the turns that his round trip takes, and at the far end too. So while answers come to anything but
//! writes and large reads, data go in small portions, and after the turn that one took the others have
//! as much time for themselves:
//!
//! ```text
//!   turns:   | portion     | . | . | . | . | portion     | . | .
//!            |<---- d ---->|<---- d ---->|
//! ```

use std::cell::Cell;

use base::{Instant, Span};

/// Data that go in a turn while nobody waits for anything else, and in how many sends at most.
pub(crate) const AT_EASE: Portion = Portion { bytes: 256 << 10, sends: 4 };
/// While somebody does.
pub(crate) const HURRIED: Portion = Portion { bytes: 64 << 10, sends: 1 };
/// Who asks for so many bytes at once does not count as somebody who waits.
pub(crate) const LARGE: u32 = 32 << 10;
/// Between two of those: commands, and what they carry with them.
const AT_REST: Portion = Portion { bytes: 0, sends: 1 };
/// For so long after an answer another one is expected.
const EXPECTED: Span = Span::from_ms(1);
/// The longest rest: if a turn took more, it was not because of a portion.
const REST_MAX: Span = Span::from_ms(1);

/// How much of large data goes in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portion {
    /// Queued at a time.
    pub(crate) bytes: u32,
    pub(crate) sends: usize,
}

thread_local! {
    /// When the present turn of this thread began.
    static NOW: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Until when an answer is expected that is neither a write's nor large.
    static UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
    /// Whether large data have gone in the present turn.
    static HAVE_GONE: Cell<bool> = const { Cell::new(false) };
    /// Until when none are to go.
    static REST_UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
}

/// A simulation begins on this thread: what was noted at times of an earlier one is forgotten, since
/// time begins anew.
#[doc(hidden)]
pub fn begin_simulation() {
    HAVE_GONE.set(false);
    for cell in [&NOW, &UNTIL, &REST_UNTIL] {
        cell.set(Instant { ns: 0 });
    }
}

/// A turn of this thread has begun.
#[inline]
pub(crate) fn turn(now: Instant) {
    let before = NOW.replace(now);
    if HAVE_GONE.get() && now > before {
        HAVE_GONE.set(false);
        REST_UNTIL.set(now.after(now.since(before).min(REST_MAX)));
    }
}

/// Large data go in the present turn.
#[inline]
pub(crate) fn gone() {
    HAVE_GONE.set(true);
}

/// Something was answered that is neither a write nor large.
#[inline]
pub(crate) fn answered() {
    UNTIL.set(NOW.get().after(EXPECTED));
}

/// How much of large data is to go now.
#[inline]
pub(crate) fn portion() -> Portion {
    let now = NOW.get();
    match now < UNTIL.get() {
        false => AT_EASE,
        true if HAVE_GONE.get() || now < REST_UNTIL.get() => AT_REST,
        true => HURRIED,
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};

    use super::{AT_EASE, AT_REST, EXPECTED, HURRIED, REST_MAX, answered, gone, portion, turn};

    #[test]
    fn portions_are_small_for_a_while_after_an_answer() {
        let now = Instant { ns: 5_000_000 };
        turn(now);
        assert_eq!(portion(), AT_EASE);
        answered();
        turn(now.after(Span { ns: EXPECTED.ns - 1 }));
        assert_eq!(portion(), HURRIED);
        turn(now.after(EXPECTED));
        assert_eq!(portion(), AT_EASE);
    }

    #[test]
    fn after_a_turn_with_data_the_others_have_as_much_time() {
        let at = |us: u64| Instant { ns: 5_000_000 + 1_000 * us };
        turn(at(0));
        answered();
        assert_eq!(portion(), HURRIED);
        gone();
        turn(at(0));
        assert_eq!(portion(), AT_REST, "one has had this turn's portion");
        for (us, expected) in [(30, AT_REST), (59, AT_REST), (60, HURRIED), (70, HURRIED)] {
            turn(at(us));
            assert_eq!(portion(), expected, "after {us} us");
        }
        gone();
        turn(at(70).after(REST_MAX).after(REST_MAX));
        answered();
        assert_eq!(portion(), AT_REST);
        turn(at(70).after(REST_MAX).after(REST_MAX).after(REST_MAX));
        assert_eq!(portion(), AT_EASE, "nobody waits any more");
    }
}
