//! A shaper for every channel of a device.

use std::ops::Range;
use std::sync::Arc;

use base::{Backend, Extent, Limits, Medium};

use super::rules::Rules;
use super::{BounceMemory, RangeLock, ShapeOptions, Shaper, check_options};
use crate::{ChannelId, Descriptor, Device, Hold, MediumError};

/// A device whose channels take whatever makes sense, each through a [`Shaper`] of its own. A
/// compare-and-write that is emulated holds its blocks against all other channels of the device.
#[derive(Debug)]
pub struct Shaped {
    device: Device,
    descriptor: Arc<Descriptor>,
    memory: BounceMemory,
    options: ShapeOptions,
}

/// Holds blocks of a device for one of its channels.
#[derive(Debug)]
pub struct HoldLock {
    device: Device,
    channel: ChannelId,
    hold: Option<Hold>,
}

impl Shaped {
    /// Shapes for `descriptor`, which is open on `device`, with buffers from `memory`.
    ///
    /// # Errors
    ///
    /// As [`Shaper::new`].
    pub fn new(
        device: &Device,
        descriptor: impl Into<Arc<Descriptor>>,
        memory: BounceMemory,
        options: ShapeOptions,
    ) -> Result<Self, MediumError> {
        let descriptor = descriptor.into();
        check_options(&descriptor.limits(), &options, memory.chunk_bytes())?;
        Ok(Self { device: device.clone(), descriptor, memory, options })
    }
}

impl Medium for Shaped {
    fn limits(&self) -> Limits {
        let below = self.descriptor.limits();
        let chunk_blocks = self.memory.chunk_bytes() / below.block_size;
        Rules::new(&below, &self.options, chunk_blocks).above(&below, &self.options)
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let channel = self.descriptor.open_channel()?;
        let lock = HoldLock::new(&self.device, channel.id());
        let buffers = self.memory.channel().map_err(|error| error.to_string())?;
        let shaper = Shaper::new(channel, lock, buffers, &self.options);
        let shaper = shaper.map_err(|error| error.to_string())?;
        Ok(self.descriptor.limited(Box::new(shaper)))
    }

    fn channels_max(&self) -> u32 {
        self.descriptor.channels_max()
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        self.descriptor.extent(lba)
    }
}

impl HoldLock {
    /// Holds blocks of `device` for `channel`, against all its others.
    pub fn new(device: &Device, channel: ChannelId) -> Self {
        Self { device: device.clone(), channel, hold: None }
    }
}

impl RangeLock for HoldLock {
    fn acquire(&mut self, blocks: Range<u64>) -> bool {
        let Self { device, channel, hold } = self;
        hold.get_or_insert_with(|| device.hold(blocks, Some(*channel))).is_still()
    }

    fn release(&mut self, _: Range<u64>) {
        self.hold = None;
    }
}
