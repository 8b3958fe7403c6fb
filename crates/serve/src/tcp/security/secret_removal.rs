//! Removal of a secret while queues are connected that have authenticated with it.

use tenmil_base::{Instant, Span};

use super::Verdict;
use crate::tcp::authentication::AUTHENTICATION_TIMEOUT;

/// Progress of a removal, for the queues that end together: those of an association, or that of a
/// discovery controller.
///
/// ```text
///   removal ── REMOVAL_GRACE ──▶ end, unless an authentication is in progress
///      └──────── AUTHENTICATION_TIMEOUT ────────▶ end in any case
/// ```
///
/// The times are of the removal, so a host that begins one authentication after the other gains nothing.
/// The queues stay once each has authenticated with a secret that is valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::tcp) enum SecretRemoval {
    /// All secrets are valid.
    #[default]
    None,
    /// A secret was removed; the connection is to look at its clock.
    Noted,
    /// A secret was removed at this time.
    Since(Instant),
}

/// Time for a host to begin an authentication with its new secret.
pub(in crate::tcp) const REMOVAL_GRACE: Span = Span::from_secs(1);

impl SecretRemoval {
    /// Records that a secret was removed. The time of an earlier removal stays.
    pub(in crate::tcp) fn note(&mut self) {
        if *self == Self::None {
            *self = Self::Noted;
        }
    }

    pub(in crate::tcp) fn is_pending(self) -> bool {
        self != Self::None
    }

    /// Whether the queues end now.
    pub(in crate::tcp) fn ends_queues(
        &mut self,
        now: Instant,
        verdict: Verdict,
        is_authenticating: bool,
    ) -> bool {
        match verdict {
            Verdict::Permitted => {
                *self = Self::None;
                false
            }
            Verdict::SecretRemoved => {
                if !matches!(self, Self::Since(_)) {
                    *self = Self::Since(now);
                }
                now >= self.ends_at(is_authenticating)
            }
            Verdict::Refused => true,
        }
    }

    /// When the queues end, unless they authenticate before.
    pub(in crate::tcp) fn ends_at(self, is_authenticating: bool) -> Instant {
        match self {
            Self::Since(removed_at) if is_authenticating => {
                removed_at.after(AUTHENTICATION_TIMEOUT)
            }
            Self::Since(removed_at) => removed_at.after(REMOVAL_GRACE),
            Self::None | Self::Noted => Instant::NEVER,
        }
    }
}
