//! Descriptor: an open bdev with its claim.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, Error, HoleReporting, IoChannel, Limits, MediumMemory,
};

use super::event::BdevEventQueue;
use super::{BdevEvent, BdevShared, ChannelMode, Claim, ClaimGuard};
use crate::channel::{Channel, WRITING};
use crate::qos::{IoClass, QosLimiter};

/// An open bdev with a claim (SPDK's bdev_desc). It opens channels, and receives the events of the device.
/// The claim is released when all its descriptors and their channels have been dropped.
#[derive(Debug)]
pub struct BdevDescriptor {
    grant: Arc<ClaimGuard>,
    events: Arc<BdevEventQueue>,
    class: IoClass,
    limiter: Option<QosLimiter>,
}

impl BdevDescriptor {
    pub(super) fn new(grant: Arc<ClaimGuard>) -> std::io::Result<Self> {
        let events = grant.new_event_queue()?;
        Ok(Self { grant, events, class: IoClass::Foreground, limiter: None })
    }

    /// Another descriptor with the same claim, which receives the same events: for a device that two servers
    /// share, each of which has to notify its clients.
    ///
    /// # Errors
    ///
    /// If the process has no more file descriptors.
    pub fn open_with_same_claim(&self) -> Result<Self, Error> {
        let shared = Self::new(Arc::clone(&self.grant));
        let shared = shared.map_err(|why| Error::environment(why.to_string()))?;
        Ok(shared.with_io_class(self.class))
    }

    /// Sets the I/O class of its channels, which the rate limits of the device distinguish.
    #[must_use]
    pub const fn with_io_class(mut self, class: IoClass) -> Self {
        self.class = class;
        self
    }

    /// Sets rate limits of its channels, beside those of the device.
    #[must_use]
    pub fn with_limiter(mut self, limiter: QosLimiter) -> Self {
        self.limiter = Some(limiter);
        self
    }

    /// The granted claim.
    pub fn claim(&self) -> Claim {
        self.grant.claim
    }

    /// Removes the oldest pending event.
    pub fn next_event(&self) -> Option<BdevEvent> {
        self.events.next()
    }

    /// A descriptor that is readable while events are pending. `None` only if the process is out of file
    /// descriptors.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.events.event_fd()
    }

    /// Opens a channel of mode `mq`, even if the device has mode `bypass`, and without rate limits.
    ///
    /// # Errors
    ///
    /// If the maximum number of channels is open, the device has been removed, or the device below cannot
    /// open another channel.
    pub fn open_channel(&self) -> Result<Channel, Error> {
        Channel::open(Arc::clone(&self.grant), self.limits())
    }

    /// Whether its channels are those of the device below.
    fn uses_channels_below(&self) -> bool {
        self.grant.shared.options.mode == ChannelMode::Bypass && !self.grant.claim.is_read_only()
    }

    /// Applies the rate limits of the device and of the descriptor, if any, to a channel.
    pub(crate) fn with_rate_limits(&self, channel: Box<dyn IoChannel>) -> Box<dyn IoChannel> {
        let limiters = [&self.grant.shared.options.limiter, &self.limiter];
        limiters
            .into_iter()
            .flatten()
            .fold(channel, |channel, limiter| Box::new(limiter.wrap_channel(channel, self.class)))
    }
}

impl BlockDevice for BdevDescriptor {
    /// The limits of the device below, with the current size, the configured depth, and only the
    /// operations that the claim permits.
    fn limits(&self) -> Limits {
        let mut limits = self.grant.shared.limits();
        if self.grant.claim.is_read_only() {
            limits.operations = limits.operations.without(WRITING);
        }
        limits
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let shared = &self.grant.shared;
        if self.uses_channels_below() {
            let medium = shared
                .block_device()
                .ok_or_else(|| shared.removed_error())
                .map_err(Error::environment)?;
            return medium.channel();
        }
        Ok(self.with_rate_limits(Box::new(self.open_channel()?)))
    }

    fn channels_max(&self) -> u32 {
        let shared = &self.grant.shared;
        let options = &shared.options;
        let of_medium = shared.block_device().map_or(0, |medium| medium.channels_max());
        match options.mode {
            ChannelMode::Bypass => of_medium,
            ChannelMode::SingleQueue => options.channels_max,
            // Shared contexts were counted when the bdev was created.
            ChannelMode::Mq if options.map.default < options.channels_max => options.channels_max,
            ChannelMode::Mq => options.channels_max.min(of_medium),
        }
    }

    fn failure_reason(&self) -> Option<String> {
        self.grant.shared.block_device().and_then(|medium| medium.failure_reason())
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let shared = &self.grant.shared;
        let medium = shared.block_device();
        medium.ok_or_else(|| shared.removed_error()).map_err(Error::environment)?.block_status(lba)
    }

    fn hole_reporting(&self) -> HoleReporting {
        self.grant
            .shared
            .block_device()
            .map_or(HoleReporting::Never, |medium| medium.hole_reporting())
    }

    fn medium_memory(&self) -> Option<MediumMemory> {
        self.grant.shared.block_device().and_then(|medium| medium.medium_memory())
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        let shared = &self.grant.shared;
        let medium = shared.block_device();
        medium
            .ok_or_else(|| shared.removed_error())
            .map_err(Error::environment)?
            .supports_kernel_buffers()
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.grant.shared.refresh_size();
        Ok(self.grant.shared.limits().block_count)
    }

    fn is_resizable(&self) -> bool {
        let shared = &self.grant.shared;
        shared.options.mode != ChannelMode::Bypass
            && !self.grant.claim.is_read_only()
            && shared.block_device().is_some_and(|medium| medium.is_resizable())
    }

    /// Like [`Bdev::resize_and_wait`](super::Bdev::resize_and_wait).
    fn resize(&self, block_count: u64) -> Result<(), Error> {
        let shared = &self.grant.shared;
        if self.grant.claim.is_read_only() {
            let holder = &self.grant.holder;
            return Err(Error::environment(format!(
                "{}: {holder} may read it, expected a claim to write it",
                shared.name
            )));
        }
        BdevShared::resize_device(shared, block_count)
    }
}
