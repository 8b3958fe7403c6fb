//! Options for opening a mirror.

use tenmil_base::Span;

use super::assembly::DegradedStartPolicy;
use super::maintenance::ResyncPolicy;

/// Options for opening a mirror. By default all legs that may be in sync must be present.
#[derive(Clone, Copy, Debug)]
pub struct MirrorOptions {
    /// Maximum resync rate in bytes per second while clients do not use the mirror.
    pub resync: u64,
    /// Start without a leg that may have newer blocks: those are lost, and the leg is recorded as stale.
    pub degraded: bool,
    /// Take the mirror over from an owner that has it open for writing.
    pub force: bool,
    /// The owner to record; `None` is this process.
    pub opener: Option<tenmil_volume::PoolOwner>,
    /// Bugs that simulations inject.
    #[doc(hidden)]
    pub bugs: InjectedBugs,
    pub(super) clear_after: Span,
    pub(super) probe_every: Span,
}

/// Bugs that a simulation injects to prove that it detects them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A mirror starts although a leg is absent that may have newer blocks.
    pub starts_without_legs: bool,
    /// A leg whose flush fails stays in sync if another leg has flushed.
    pub ignores_failed_flush: bool,
    /// The mirror is opened regardless of its owner, and superblocks are written without an ownership
    /// check.
    pub ignores_fence: bool,
}

/// Default resync rate in bytes per second.
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
    pub(super) fn start_policy(&self) -> DegradedStartPolicy {
        let starts = self.degraded || self.bugs.starts_without_legs;
        if starts { DegradedStartPolicy::Degraded } else { DegradedStartPolicy::Complete }
    }

    pub(super) fn resync_policy(&self) -> ResyncPolicy {
        let Self { resync: copy_rate, clear_after, probe_every, .. } = *self;
        ResyncPolicy { clear_after, probe_every, copy_rate }
    }

    /// Default options with the delays and rate of a policy.
    #[cfg(test)]
    pub(super) fn with_resync_policy(policy: ResyncPolicy) -> Self {
        let ResyncPolicy { clear_after, probe_every, copy_rate: resync } = policy;
        Self { resync, clear_after, probe_every, ..Self::default() }
    }
}
