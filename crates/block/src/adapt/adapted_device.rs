//! Device whose channels adapt requests.

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{BlockDevice, BlockExtent, IoChannel, Limits};

use super::constraints::DeviceConstraints;
use super::{AdaptationOptions, AdaptedChannel, BounceBufferAllocator, RangeLock, check_options};
use crate::{Bdev, BdevDescriptor, ChannelId, QuiescedRange};
use tenmil_base::Error;

/// Device whose channels accept every valid request, each through an [`AdaptedChannel`]. An emulated
/// compare-and-write locks its blocks against all other channels of the device.
#[derive(Debug)]
pub struct AdaptedDevice {
    device: Bdev,
    descriptor: Arc<BdevDescriptor>,
    memory: BounceBufferAllocator,
    options: AdaptationOptions,
}

/// Range lock of one channel, implemented by quiescing.
#[derive(Debug)]
pub struct QuiesceRangeLock {
    device: Bdev,
    channel: ChannelId,
    hold: Option<QuiescedRange>,
}

impl AdaptedDevice {
    /// Adapts `descriptor`, which is open on `device`, with buffers from `memory`.
    ///
    /// # Errors
    ///
    /// The same as for [`AdaptedChannel::new`].
    pub fn new(
        device: &Bdev,
        descriptor: impl Into<Arc<BdevDescriptor>>,
        memory: BounceBufferAllocator,
        options: AdaptationOptions,
    ) -> Result<Self, Error> {
        let descriptor = descriptor.into();
        check_options(&descriptor.limits(), &options, memory.chunk_bytes())?;
        Ok(Self { device: device.clone(), descriptor, memory, options })
    }
}

impl BlockDevice for AdaptedDevice {
    fn limits(&self) -> Limits {
        let below = self.descriptor.limits();
        let chunk_blocks = self.memory.chunk_bytes() / below.block_size;
        DeviceConstraints::new(&below, &self.options, chunk_blocks)
            .limits_above(&below, &self.options)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let channel = self.descriptor.open_channel()?;
        let lock = QuiesceRangeLock::new(&self.device, channel.id());
        let buffers = self.memory.allocate_channel_buffers().map_err(Error::environment)?;
        let shaper = AdaptedChannel::new(channel, lock, buffers, &self.options);
        let shaper = shaper.map_err(Error::environment)?;
        Ok(self.descriptor.with_rate_limits(Box::new(shaper)))
    }

    fn channels_max(&self) -> u32 {
        self.descriptor.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.descriptor.block_status(lba)
    }
}

impl QuiesceRangeLock {
    /// Creates a lock for `channel` against all other channels of `device`.
    pub fn new(device: &Bdev, channel: ChannelId) -> Self {
        Self { device: device.clone(), channel, hold: None }
    }
}

impl RangeLock for QuiesceRangeLock {
    fn acquire(&mut self, blocks: Range<u64>) -> bool {
        let Self { device, channel, hold } = self;
        hold.get_or_insert_with(|| device.begin_quiesce(blocks, Some(*channel))).has_drained()
    }

    fn release(&mut self, _: Range<u64>) {
        self.hold = None;
    }
}
