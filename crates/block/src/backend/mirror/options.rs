//! How a mirror is opened.

use base::Span;

use super::assemble::Start;
use super::tend::Policy;

/// How a mirror is opened. The default starts only with every leg that may be in sync.
#[derive(Clone, Copy, Debug)]
pub struct MirrorOptions {
    /// Bytes that are copied to stale legs in a second at most, while nobody else uses the mirror.
    pub resync: u64,
    /// Start although a leg is absent that may hold newer blocks: those are lost, and the leg is
    /// recorded as stale.
    pub degraded: bool,
    /// Take the mirror from whoever has it open for writing.
    pub force: bool,
    /// Who opens it; this process if that is nobody.
    pub opener: Option<volume::Owner>,
    /// Bugs that simulations inject.
    #[doc(hidden)]
    pub bugs: InjectedBugs,
    pub(super) clear_after: Span,
    pub(super) probe_every: Span,
}

/// Bugs that a simulation injects to see itself find them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A leg starts although another one is absent that may hold newer blocks.
    pub starts_without_legs: bool,
    /// A leg that answers a flush with an error stays in sync if another leg has flushed.
    pub ignores_failed_flush: bool,
    /// The mirror is opened whoever has it open, and superblocks are written without a look who has.
    pub ignores_fence: bool,
}

/// Bytes per second that are copied, unless the name says otherwise.
const RESYNC_DEFAULT: u64 = 100 << 20;
const CLEAR_AFTER: Span = Span::from_secs(2);
const PROBE_EVERY: Span = Span::from_secs(1);

impl Default for MirrorOptions {
    fn default() -> Self {
        Self {
            resync: RESYNC_DEFAULT,
            degraded: false,
            force: false,
            opener: None,
            bugs: InjectedBugs::default(),
            clear_after: CLEAR_AFTER,
            probe_every: PROBE_EVERY,
        }
    }
}

impl MirrorOptions {
    pub(super) fn start(&self) -> Start {
        let starts = self.degraded || self.bugs.starts_without_legs;
        if starts { Start::Degraded } else { Start::Complete }
    }

    pub(super) fn policy(&self) -> Policy {
        let Self { resync: copy_rate, clear_after, probe_every, .. } = *self;
        Policy { clear_after, probe_every, copy_rate }
    }

    /// These, with the pace of a policy.
    #[cfg(test)]
    pub(super) fn paced(policy: Policy) -> Self {
        let Policy { clear_after, probe_every, copy_rate: resync } = policy;
        Self { resync, clear_after, probe_every, ..Self::default() }
    }
}
