//! Queue map: assigns channels to hardware contexts.
//!
//! ```text
//!   channels            0     1     2     3         software queues, one per thread
//!                       │     │     │     │
//!   default = 2         0     1     0     1         two share each: a lock that is only tried
//!   read    = 4         0     1     2     3         one each: no lock
//!   poll    = 0         (as default)
//! ```
//!
//! The map is arithmetic: context = channel modulo count. So it is known when the device is created which
//! contexts are shared, and a channel never has to give up one that it owns.

/// Number of hardware contexts of each type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMap {
    /// For requests without a context type of their own.
    pub default: u32,
    /// For reads, so that they never queue behind large writes; zero: reads use the default contexts.
    pub read: u32,
    /// For polled requests, which are never slept for; zero: they use the default contexts.
    pub poll: u32,
}

/// The type of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ContextType {
    Default,
    Read,
    Poll,
}

/// One context per channel.
pub const PER_CHANNEL: u32 = u32::MAX;

impl Default for QueueMap {
    fn default() -> Self {
        Self::with_default_contexts(PER_CHANNEL)
    }
}

impl QueueMap {
    /// A map with `default` contexts for all requests.
    pub const fn with_default_contexts(default: u32) -> Self {
        Self { default, read: 0, poll: 0 }
    }

    pub(crate) const fn context_count(&self, of: ContextType) -> u32 {
        match of {
            ContextType::Default => self.default,
            ContextType::Read => self.read,
            ContextType::Poll => self.poll,
        }
    }

    /// The context of this type that a channel uses; `None` if it uses the default one.
    pub(crate) const fn context_of_channel(&self, of: ContextType, channel: u32) -> Option<u32> {
        channel.checked_rem(self.context_count(of))
    }

    /// Whether at most one of `channels` channels uses a context.
    pub(crate) const fn is_exclusive(&self, of: ContextType, context: u32, channels: u32) -> bool {
        context.saturating_add(self.context_count(of)) >= channels
    }

    /// The number of contexts that `channels` channels use.
    pub(crate) fn contexts_used(&self, channels: u32) -> u64 {
        let used = |of| u64::from(self.context_count(of).min(channels));
        used(ContextType::Default) + used(ContextType::Read) + used(ContextType::Poll)
    }
}

#[cfg(test)]
mod tests {
    use super::{ContextType, PER_CHANNEL, QueueMap};

    #[test]
    fn context_is_exclusive_if_one_channel_maps_to_it() {
        for count in (1..=6).chain([PER_CHANNEL]) {
            let map = QueueMap::with_default_contexts(count);
            for channels in 1..=8 {
                let of = |channel| map.context_of_channel(ContextType::Default, channel).unwrap();
                for channel in 0..channels {
                    let users = (0..channels).filter(|other| of(*other) == of(channel)).count();
                    let owned = map.is_exclusive(ContextType::Default, of(channel), channels);
                    assert_eq!(owned, users == 1, "{channel} of {channels} over {count}");
                }
                let mut used: Vec<u32> = (0..channels).map(of).collect();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len() as u64, map.contexts_used(channels));
            }
        }
    }

    #[test]
    fn type_without_contexts_uses_the_default() {
        let map = QueueMap { default: 1, read: 2, poll: 0 };
        assert_eq!(map.context_of_channel(ContextType::Poll, 3), None);
        assert_eq!(map.context_of_channel(ContextType::Read, 3), Some(1));
        assert_eq!(map.contexts_used(4), 3);
    }
}
