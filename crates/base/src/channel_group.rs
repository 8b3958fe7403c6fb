//! Groups of I/O channels that their owner uses together.
//!
//! The channel of a mirror has a channel to each leg, submits to all of them before it flushes any,
//! and polls, arms and drops them together, on one thread at a time. A driver may let such channels
//! share what each would otherwise have for itself: those to files share an `io_uring`, and a
//! system call for one is a system call for all.
//!
//! The group is that of the thread that opens the channels, for the duration of a call, so that the
//! layers between the owner and the drivers do not pass it on.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Channels of one owner, and what their drivers share.
#[derive(Clone, Debug, Default)]
pub struct ChannelGroup {
    /// Kept alive by the channels that use them.
    resources: Arc<Mutex<Vec<Weak<dyn Any + Send + Sync>>>>,
}

thread_local! {
    static CURRENT: RefCell<Option<ChannelGroup>> = const { RefCell::new(None) };
}

/// Restores the group of the thread at the end of a call, also after a panic.
struct Restore(Option<ChannelGroup>);

impl ChannelGroup {
    /// Opens channels that the caller uses together. Those of an owner that is itself opened as one
    /// of several channels belong to the outer group.
    pub fn open_together<T>(open: impl FnOnce() -> T) -> T {
        let group = Self::current().unwrap_or_default();
        Self::open_in(Some(group), open)
    }

    /// Opens a channel of an owner that opens others at other times, and keeps this group for that.
    pub fn open_member<T>(&self, open: impl FnOnce() -> T) -> T {
        Self::open_in(Some(Self::current().unwrap_or_else(|| self.clone())), open)
    }

    /// Opens a channel that belongs to no group: another thread uses it than the caller's other
    /// channels, or several threads do.
    pub fn open_alone<T>(open: impl FnOnce() -> T) -> T {
        Self::open_in(None, open)
    }

    /// The group of the channel that is being opened, if it has one.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Option::clone)
    }

    /// The resources of type `T` that channels of the group use.
    pub fn resources<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        let resources = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        resources.iter().filter_map(|one| one.upgrade()?.downcast().ok()).collect()
    }

    /// Adds a resource, for as long as a channel uses it.
    pub fn add_resource<T: Any + Send + Sync>(&self, resource: &Arc<T>) {
        let mut resources = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        resources.retain(|one| one.strong_count() > 0);
        let resource: Arc<dyn Any + Send + Sync> = Arc::<T>::clone(resource);
        resources.push(Arc::downgrade(&resource));
    }

    fn open_in<T>(group: Option<Self>, open: impl FnOnce() -> T) -> T {
        let _restore = Restore(CURRENT.replace(group));
        open()
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::sync::Arc;

    use super::ChannelGroup;

    #[test]
    fn group_lasts_for_the_call_and_the_outer_one_prevails() {
        assert!(ChannelGroup::current().is_none());
        let kept = ChannelGroup::open_together(|| {
            let outer = ChannelGroup::current().unwrap();
            let kept = Arc::new(7_u32);
            outer.add_resource(&kept);
            ChannelGroup::open_together(|| {
                let inner = ChannelGroup::current().unwrap();
                assert_eq!(inner.resources::<u32>(), [Arc::clone(&kept)]);
                assert_eq!(inner.resources::<u64>(), []);
            });
            ChannelGroup::open_alone(|| assert!(ChannelGroup::current().is_none()));
            assert!(ChannelGroup::current().is_some());
            kept
        });
        assert!(ChannelGroup::current().is_none());
        ChannelGroup::open_together(|| {
            assert_eq!(ChannelGroup::current().unwrap().resources::<u32>(), [], "of another owner");
        });
        drop(kept);
    }

    #[test]
    fn resource_that_no_channel_uses_is_released() {
        let group = ChannelGroup::default();
        let (one, other) = (Arc::new(1_u32), Arc::new(2_u32));
        group.add_resource(&one);
        drop(one);
        group.add_resource(&other);
        assert_eq!(group.resources::<u32>(), [Arc::clone(&other)]);
        assert_eq!(Arc::strong_count(&other), 1);
    }

    #[test]
    fn panic_ends_the_group() {
        let opened = catch_unwind(|| ChannelGroup::open_together(|| panic!("no channel")));
        assert!(opened.is_err() && ChannelGroup::current().is_none());
    }
}
