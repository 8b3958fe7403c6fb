//! An open device.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{Backend, Extent, Limits, Medium};

use super::{Claim, Event, Grant, Mode};
use crate::channel::{Channel, WRITING};

/// An open device: a claim to it, and a medium that opens channels. The claim is given back when
/// this and all its channels have been dropped.
#[derive(Debug)]
pub struct Descriptor(Arc<Grant>);

impl Descriptor {
    pub(super) fn new(grant: Arc<Grant>) -> Self {
        Self(grant)
    }

    /// What was claimed.
    pub fn claim(&self) -> Claim {
        self.0.claim
    }

    /// The oldest event that was not taken yet.
    pub fn next_event(&self) -> Option<Event> {
        self.0.events.next()
    }

    /// Readable while there are events. `None` only if the machine ran out of descriptors.
    pub fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.0.events.descriptor()
    }

    /// Opens a channel, as [`Medium::channel`] does, of mode `mq` even where the device has `bypass`.
    ///
    /// # Errors
    ///
    /// If as many are open as the device was made for, it has been removed, or the medium has none
    /// left.
    pub fn open_channel(&self) -> Result<Channel, String> {
        Channel::open(Arc::clone(&self.0), self.limits())
    }
}

impl Medium for Descriptor {
    /// Those of the medium, with the size that the device has now, the depth that it was made with,
    /// and without what the claim does not allow.
    fn limits(&self) -> Limits {
        let mut limits = self.0.shared.limits();
        if self.0.claim.is_read_only() {
            limits.support = limits.support.without(WRITING);
        }
        limits
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let shared = &self.0.shared;
        if shared.options.mode == Mode::Bypass && !self.0.claim.is_read_only() {
            return shared.way();
        }
        Ok(Box::new(self.open_channel()?))
    }

    fn channels_max(&self) -> u32 {
        let shared = &self.0.shared;
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

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let shared = &self.0.shared;
        let medium = shared.medium();
        medium.ok_or_else(|| format!("{}: it has been removed", shared.name))?.extent(lba)
    }
}
