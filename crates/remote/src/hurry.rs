//! Whether somebody on this thread waits for answers, while data of others go out.
//!
//! The data of large writes go a megabyte at a time, which costs least. But whoever reads beside them
//! on the same thread, over the same connection or another, has to wait for that megabyte in each of
//! the turns that his round trip takes, and at the far end too. So while answers come to anything but
//! writes, data go in small portions.

use std::cell::Cell;

use base::{Instant, Span};

/// Data that go in a turn while nobody waits for anything else, and in how many sends at most.
pub(crate) const AT_EASE: Portion = Portion { bytes: 256 << 10, sends: 4 };
/// While somebody does.
pub(crate) const HURRIED: Portion = Portion { bytes: 32 << 10, sends: 1 };
/// For so long after an answer another one is expected.
const EXPECTED: Span = Span::from_ms(1);

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
    /// Until when an answer is expected that is not a write's.
    static UNTIL: Cell<Instant> = const { Cell::new(Instant { ns: 0 }) };
}

/// A turn of this thread has begun.
#[inline]
pub(crate) fn turn(now: Instant) {
    NOW.set(now);
}

/// Something was answered that is not a write.
#[inline]
pub(crate) fn answered() {
    UNTIL.set(NOW.get().after(EXPECTED));
}

/// How much of large data is to go in this turn.
#[inline]
pub(crate) fn portion() -> Portion {
    if NOW.get() < UNTIL.get() { HURRIED } else { AT_EASE }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};

    use super::{AT_EASE, EXPECTED, HURRIED, answered, portion, turn};

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
}
