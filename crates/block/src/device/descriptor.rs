//! An open device.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{Backend, Extent, Limits, Medium};

use super::{Claim, Event, Grant, Mode, Shared};
use crate::channel::{Channel, WRITING};
use crate::limit::Class;

/// An open device: a claim to it, and a medium that opens channels. The claim is given back when
/// this and all its channels have been dropped.
#[derive(Debug)]
pub struct Descriptor {
    grant: Arc<Grant>,
    class: Class,
}

impl Descriptor {
    pub(super) const fn new(grant: Arc<Grant>) -> Self {
        Self { grant, class: Class::Foreground }
    }

    /// The same, for work of this class: what the limits of the device leave to its channels.
    #[must_use]
    pub const fn with_class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }

    /// What was claimed.
    pub fn claim(&self) -> Claim {
        self.grant.claim
    }

    /// The oldest event that was not taken yet.
    pub fn next_event(&self) -> Option<Event> {
        self.grant.events.next()
    }

    /// Readable while there are events. `None` only if the machine ran out of descriptors.
    pub fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.grant.events.descriptor()
    }

    /// Opens a channel as it is, of mode `mq` even where the device has `bypass`, without limits
    /// before it.
    ///
    /// # Errors
    ///
    /// If as many are open as the device was made for, it has been removed, or the medium has none
    /// left.
    pub fn open_channel(&self) -> Result<Channel, String> {
        Channel::open(Arc::clone(&self.grant), self.limits())
    }

    /// Whether its channels are those of the medium.
    fn is_bypass(&self) -> bool {
        self.grant.shared.options.mode == Mode::Bypass && !self.grant.claim.is_read_only()
    }

    /// Puts the limits of the device, if it has any, before a channel of it.
    pub(crate) fn limited(&self, channel: Box<dyn Backend>) -> Box<dyn Backend> {
        match &self.grant.shared.options.limiter {
            Some(limiter) => Box::new(limiter.over(channel, self.class)),
            None => channel,
        }
    }
}

impl Medium for Descriptor {
    /// Those of the medium, with the size that the device has now, the depth that it was made with,
    /// and without what the claim does not allow.
    fn limits(&self) -> Limits {
        let mut limits = self.grant.shared.limits();
        if self.grant.claim.is_read_only() {
            limits.support = limits.support.without(WRITING);
        }
        limits
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let shared = &self.grant.shared;
        if self.is_bypass() {
            let medium = shared.medium().ok_or_else(|| shared.gone())?;
            return medium.channel();
        }
        Ok(self.limited(Box::new(self.open_channel()?)))
    }

    fn channels_max(&self) -> u32 {
        let shared = &self.grant.shared;
        let options = &shared.options;
        let of_medium = shared.medium().map_or(0, |medium| medium.channels_max());
        match options.mode {
            Mode::Bypass => of_medium,
            Mode::Single => options.channels_max,
            // Shared contexts are counted when the device is made.
            Mode::Mq if options.map.default < options.channels_max => options.channels_max,
            Mode::Mq => options.channels_max.min(of_medium),
        }
    }

    fn lost(&self) -> Option<String> {
        self.grant.shared.medium().and_then(|medium| medium.lost())
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let shared = &self.grant.shared;
        let medium = shared.medium();
        medium.ok_or_else(|| shared.gone())?.extent(lba)
    }

    fn takes_lent(&self) -> Result<u32, String> {
        let shared = &self.grant.shared;
        let medium = shared.medium();
        medium.ok_or_else(|| shared.gone())?.takes_lent()
    }

    fn notice_size(&self) -> Result<u64, String> {
        self.grant.shared.notice_size();
        Ok(self.grant.shared.limits().block_count)
    }

    fn is_resizable(&self) -> bool {
        let shared = &self.grant.shared;
        shared.options.mode != Mode::Bypass
            && !self.grant.claim.is_read_only()
            && shared.medium().is_some_and(|medium| medium.is_resizable())
    }

    /// As [`Device::set_size`](super::Device::set_size).
    fn resize(&self, block_count: u64) -> Result<(), String> {
        let shared = &self.grant.shared;
        if self.grant.claim.is_read_only() {
            let holder = &self.grant.holder;
            return Err(format!(
                "{}: {holder} may read it, expected a claim to write it",
                shared.name
            ));
        }
        Shared::set_size(shared, block_count)
    }
}
