//! Stripe (RAID 0): one device over several, with blocks distributed to the legs chunk by chunk.
//!
//! ```text
//!   blocks     | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | ...
//!                   |         |         |         |         |
//!   legs       leg 0 row 0  leg 1 row 0  leg 2 row 0  leg 0 row 1 ...
//! ```
//!
//! The chunks of a request on one leg are adjacent there, so a request of any length becomes at most one
//! request for each leg. Its segments are split and data is not copied.

mod stripe_layout;

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelGroup, ErrorCategory, IoChannel, Limits, Operation,
    OperationSet,
};

pub(crate) use self::stripe_layout::StripeLayout;
use super::multi_leg_channel::{MultiLegChannel, common_leg_limits};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Stripe over several devices, without redundancy: data lost by one leg is lost.
///
/// It has as many chunks as the smallest leg, times the number of legs, and the durability of the weakest
/// leg. A request completes when all its legs have completed, with the first error. A flush goes to all
/// legs.
/// Copy is not supported, because source and target may be on different legs. Compare-and-write is not
/// supported, because there is no lock across legs. The limits state both.
pub struct StripeDevice {
    legs: Vec<Arc<dyn BlockDevice>>,
    layout: StripeLayout,
    limits: Limits,
}

/// Default chunk size in bytes.
const CHUNK_DEFAULT: u64 = 64 << 10;

/// Opens `stripe:[URI],[URI]?chunk=64k`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let mut fields = uri.options();
    let chunk_bytes = fields.size_value("chunk")?.unwrap_or(CHUNK_DEFAULT);
    fields.reject_unconsumed()?;
    if uri.children().is_empty() {
        let problem = "stands on nothing, expected its legs: stripe:[ram:1g],[ram:1g]";
        return Err(uri.error(problem).into());
    }
    let legs = uri.children().iter().map(|child| opener.open(child));
    let legs = legs.collect::<Result<Vec<OpenedDevice>, _>>()?;
    let named = uri.children().iter().zip(&legs);
    let named = named.map(|(child, leg)| (format!("{child:#}"), Arc::clone(&leg.medium)));
    let stripe = StripeDevice::new(named.collect(), chunk_bytes)?;
    let below: Vec<&str> = legs.iter().map(|leg| leg.description.as_str()).collect();
    let description = format!(
        "stripe: {} legs by {chunk_bytes} bytes, {}; over {}",
        legs.len(),
        stripe.limits.durability.describe(),
        below.join("; and ")
    );
    let mut opened = OpenedDevice::without_existing_data(Arc::new(stripe), description);
    for leg in legs {
        opened.existing.extend(leg.existing);
        opened.handles.extend(leg.handles);
        opened.identities.extend(leg.identities);
    }
    Ok(opened)
}

impl StripeDevice {
    /// Creates a stripe over `legs`, each with its name in errors, with chunks of `chunk_bytes`.
    ///
    /// # Errors
    ///
    /// If there are no legs, their block sizes differ, or the chunk size is invalid.
    pub fn new(legs: Vec<(String, Arc<dyn BlockDevice>)>, chunk_bytes: u64) -> Result<Self, Error> {
        let refuse = |text: Error| Error::new(ErrorCategory::Usage, format!("stripe: {text}"));
        let with_limits: Vec<(&str, Limits)> =
            legs.iter().map(|(name, leg)| (name.as_str(), leg.limits())).collect();
        check_leg_block_sizes(&with_limits).map_err(refuse)?;
        let layout = StripeLayout::from_legs(&with_limits, chunk_bytes).map_err(refuse)?;
        let limits = stripe_limits(&with_limits, &layout);
        let legs = legs.into_iter().map(|(_, leg)| leg).collect();
        Ok(Self { legs, layout, limits })
    }
}

impl BlockDevice for StripeDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let legs = self.legs.iter().map(|leg| leg.channel());
        let legs = ChannelGroup::open_together(|| legs.collect::<Result<_, _>>())?;
        Ok(Box::new(MultiLegChannel::new(legs, self.layout, self.limits.clone())?))
    }

    fn channels_max(&self) -> u32 {
        self.legs.iter().map(|leg| leg.channels_max()).min().unwrap_or(0)
    }

    /// Covers at most the chunk of `lba`.
    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let left = self.limits.block_count.saturating_sub(lba);
        if left == 0 {
            return Ok(BlockExtent { blocks: 0, kind: tenmil_base::ExtentKind::Data });
        }
        let location = self.layout.leg_of_block(lba);
        let BlockExtent { blocks, kind: holds } =
            self.legs[location.leg].block_status(location.lba)?;
        Ok(BlockExtent { blocks: blocks.min(location.left), kind: holds })
    }
}

fn check_leg_block_sizes(legs: &[(&str, Limits)]) -> Result<(), Error> {
    let Some((first, expected)) = legs.first() else {
        return Err(Error::environment("stands on nothing, expected at least one leg"));
    };
    for (name, found) in legs {
        if found.block_size != expected.block_size {
            return Err(Error::environment(format!(
                "{name} has blocks of {} bytes and {first} of {}, expected the same on all legs",
                found.block_size, expected.block_size
            )));
        }
        if found.metadata_size != 0 {
            return Err(Error::environment(format!(
                "{name} has {} bytes of metadata with each block, expected none",
                found.metadata_size
            )));
        }
    }
    Ok(())
}

fn stripe_limits(legs: &[(&str, Limits)], layout: &StripeLayout) -> Limits {
    let common = common_leg_limits(legs.iter().map(|(_, leg)| leg));
    let mut limits = common.unwrap_or_else(|| legs[0].1.clone());
    limits.block_count = layout.block_count();
    if legs.len() == 1 {
        return limits;
    }
    // A write across legs is torn if only one of them has executed it.
    limits.atomic_write_blocks = limits.atomic_write_blocks.min(1);
    limits.optimal_boundary_blocks = layout.chunk_blocks();
    let alone = OperationSet::from_operations(&[Operation::Copy, Operation::CompareAndWrite]);
    limits.operations = limits.operations.without(alone);
    // Each further chunk of a request on a leg may split one more of its segments. At most half of the
    // leg's segments are reserved for that.
    let chunks = u64::from(limits.segments_max / 2).max(1);
    limits.request_blocks_max =
        limits.request_blocks_max.min(layout.blocks_within_chunks_max(chunks));
    let cuts = layout.chunks_on_a_leg_max(limits.request_blocks_max) - 1;
    limits.segments_max -= u16::try_from(cuts).unwrap_or(u16::MAX).min(limits.segments_max - 1);
    limits
}

impl std::fmt::Debug for StripeDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layout, limits, .. } = self;
        let mut out = out.debug_struct("Stripe");
        out.field("layout", layout).field("limits", limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
