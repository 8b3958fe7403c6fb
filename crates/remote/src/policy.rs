//! What is done about a peer that does not answer, in four words: detect, retry, give up, fail fast.

use base::Span;

/// How long each of the four may take. All of them are finite.
///
/// ```text
///   all is well ── detect ──▶ lost ── retry, retry, … ──▶ connected again: held requests go on
///                               ├─ fail fast ──▶ requests fail that were held, and new ones at once
///                               └─ give up ────▶ the device is gone
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// A peer that is silent is noticed within this time: it is asked every half of it (Keep Alive),
    /// and told to give us up if it hears nothing for all of it (KATO).
    pub detect: Span,
    /// How long each try to connect may take.
    pub connect: Span,
    /// The pause between two tries.
    pub retry: Span,
    /// Requests are held for so long after the connection was lost, and fail from then on.
    pub fail_fast: Span,
    /// So long after the connection was lost nobody tries any more.
    pub give_up: Span,
}

impl Default for Policy {
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

impl Policy {
    /// What was looked after longest: how often the peer is asked for a sign of life.
    #[must_use]
    pub const fn asking(&self) -> Span {
        Span { ns: self.detect.ns / 2 }
    }
}
