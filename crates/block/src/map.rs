//! Which channel uses which hardware context.
//!
//! ```text
//!   channels            0     1     2     3         software queues, one a thread
//!                       │     │     │     │
//!   default = 2         0     1     0     1         two share each: a lock that nobody waits for
//!   read    = 4         0     1     2     3         each its own: no lock at all
//!   poll    = 0         (as default)
//! ```
//!
//! The map is arithmetic: context = channel modulo count. So it is known when the device is made
//! which contexts will be shared, and a channel never has to give up one that it owns.

/// How many hardware contexts there are of each type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMap {
    /// For all that has no type of its own.
    pub default: u32,
    /// For reads, so that they never wait behind large writes; zero: they go with the rest.
    pub read: u32,
    /// For what is polled for, and never slept for; zero: it goes with the rest.
    pub poll: u32,
}

/// The type of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Type {
    Default,
    Read,
    Poll,
}

/// As many contexts as there are channels.
pub const PER_CHANNEL: u32 = u32::MAX;

impl Default for QueueMap {
    fn default() -> Self {
        Self::of(PER_CHANNEL)
    }
}

impl QueueMap {
    /// `default` contexts for everything.
    pub const fn of(default: u32) -> Self {
        Self { default, read: 0, poll: 0 }
    }

    pub(crate) const fn count(&self, of: Type) -> u32 {
        match of {
            Type::Default => self.default,
            Type::Read => self.read,
            Type::Poll => self.poll,
        }
    }

    /// The context of this type that a channel uses; `None` if it uses the default one.
    pub(crate) const fn context(&self, of: Type, channel: u32) -> Option<u32> {
        channel.checked_rem(self.count(of))
    }

    /// Whether only one of `channels` channels uses a context.
    pub(crate) const fn is_owned(&self, of: Type, context: u32, channels: u32) -> bool {
        context.saturating_add(self.count(of)) >= channels
    }

    /// How many contexts `channels` channels use.
    pub(crate) fn contexts(&self, channels: u32) -> u64 {
        let used = |of| u64::from(self.count(of).min(channels));
        used(Type::Default) + used(Type::Read) + used(Type::Poll)
    }
}

#[cfg(test)]
mod tests {
    use super::{PER_CHANNEL, QueueMap, Type};

    #[test]
    fn a_context_is_owned_if_one_channel_and_no_other_maps_to_it() {
        for count in (1..=6).chain([PER_CHANNEL]) {
            let map = QueueMap::of(count);
            for channels in 1..=8 {
                let of = |channel| map.context(Type::Default, channel).unwrap();
                for channel in 0..channels {
                    let users = (0..channels).filter(|other| of(*other) == of(channel)).count();
                    let owned = map.is_owned(Type::Default, of(channel), channels);
                    assert_eq!(owned, users == 1, "{channel} of {channels} over {count}");
                }
                let mut used: Vec<u32> = (0..channels).map(of).collect();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len() as u64, map.contexts(channels));
            }
        }
    }

    #[test]
    fn a_type_without_contexts_goes_with_the_rest() {
        let map = QueueMap { default: 1, read: 2, poll: 0 };
        assert_eq!(map.context(Type::Poll, 3), None);
        assert_eq!(map.context(Type::Read, 3), Some(1));
        assert_eq!(map.contexts(4), 3);
    }
}
