//! One device out of several: the blocks go to the legs chunk by chunk, in turn.
//!
//! ```text
//!   blocks     | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | ...
//!                   |         |         |         |         |
//!   legs       leg 0 row 0  leg 1 row 0  leg 2 row 0  leg 0 row 1 ...
//! ```
//!
//! The chunks that a request has on one leg lie next to each other there, so whatever its length it
//! becomes at most one request for each leg. Its memory is cut to fit and never copied.

mod layout;

use std::sync::Arc;

use base::{Backend, Blame, Extent, Limits, Medium, Operation, Support};

pub(crate) use self::layout::Layout;
use super::legs::{LegsChannel, common_limits};
use crate::MediumError;
use crate::open::{Opened, Opener};
use crate::uri::Uri;

/// Several media as one, without redundancy: what one leg loses is lost.
///
/// It has as many chunks as the smallest leg, times the number of legs, and promises of an answered
/// write what the weakest leg does. A request is answered when all its legs have answered, with the
/// first error that came. A flush goes to all legs. Blocks cannot be copied, because source and
/// target may lie on different legs, nor compared and written in one, because nobody holds the legs
/// together; its limits say so.
pub struct Stripe {
    legs: Vec<Arc<dyn Medium>>,
    layout: Layout,
    limits: Limits,
}

/// Bytes in a chunk, where a name does not say.
const CHUNK_DEFAULT: u64 = 64 << 10;

/// Opens `stripe:[URI],[URI]?chunk=64k`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let mut fields = uri.fields();
    let chunk_bytes = fields.size("chunk")?.unwrap_or(CHUNK_DEFAULT);
    fields.finish()?;
    if uri.children().is_empty() {
        let problem = "stands on nothing, expected its legs: stripe:[ram:1g],[ram:1g]";
        return Err(uri.refuse(problem).into());
    }
    let legs = uri.children().iter().map(|child| opener.open(child));
    let legs = legs.collect::<Result<Vec<Opened>, _>>()?;
    let named = uri.children().iter().zip(&legs);
    let named = named.map(|(child, leg)| (child.to_string(), Arc::clone(&leg.medium)));
    let stripe = Stripe::new(named.collect(), chunk_bytes)?;
    let below: Vec<&str> = legs.iter().map(|leg| leg.description.as_str()).collect();
    let description = format!(
        "stripe: {} legs by {chunk_bytes} bytes, {}; over {}",
        legs.len(),
        stripe.limits.durability.describe(),
        below.join("; and ")
    );
    let mut opened = Opened::fresh(Arc::new(stripe), description);
    for leg in legs {
        opened.existing.extend(leg.existing);
        opened.handles.extend(leg.handles);
        opened.identities.extend(leg.identities);
    }
    Ok(opened)
}

impl Stripe {
    /// The media in `legs`, each with the name that errors call it by, in chunks of `chunk_bytes`.
    ///
    /// # Errors
    ///
    /// If there are no legs, they do not agree on their blocks, or a chunk does not fit.
    pub fn new(
        legs: Vec<(String, Arc<dyn Medium>)>,
        chunk_bytes: u64,
    ) -> Result<Self, MediumError> {
        let refuse = |text: String| MediumError::new(Blame::Caller, format!("stripe: {text}"));
        let with_limits: Vec<(&str, Limits)> =
            legs.iter().map(|(name, leg)| (name.as_str(), leg.limits())).collect();
        check_blocks_agree(&with_limits).map_err(refuse)?;
        let layout = Layout::over(&with_limits, chunk_bytes).map_err(refuse)?;
        let limits = joined_limits(&with_limits, &layout);
        let legs = legs.into_iter().map(|(_, leg)| leg).collect();
        Ok(Self { legs, layout, limits })
    }
}

impl Medium for Stripe {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let legs = self.legs.iter().map(|leg| leg.channel()).collect::<Result<_, _>>()?;
        Ok(Box::new(LegsChannel::new(legs, self.layout, self.limits.clone())?))
    }

    fn channels_max(&self) -> u32 {
        self.legs.iter().map(|leg| leg.channels_max()).min().unwrap_or(0)
    }

    /// Does not look past the chunk of `lba`.
    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let left = self.limits.block_count.saturating_sub(lba);
        if left == 0 {
            return Ok(Extent { blocks: 0, holds: base::Holds::Data });
        }
        let place = self.layout.place(lba);
        let Extent { blocks, holds } = self.legs[place.leg].extent(place.lba)?;
        Ok(Extent { blocks: blocks.min(place.left), holds })
    }
}

fn check_blocks_agree(legs: &[(&str, Limits)]) -> Result<(), String> {
    let Some((first, expected)) = legs.first() else {
        return Err("stands on nothing, expected at least one leg".into());
    };
    for (name, found) in legs {
        if found.block_size != expected.block_size {
            return Err(format!(
                "{name} has blocks of {} bytes and {first} of {}, expected the same on all legs",
                found.block_size, expected.block_size
            ));
        }
        if found.metadata_size != 0 {
            return Err(format!(
                "{name} has {} bytes of metadata with each block, expected none",
                found.metadata_size
            ));
        }
    }
    Ok(())
}

fn joined_limits(legs: &[(&str, Limits)], layout: &Layout) -> Limits {
    let common = common_limits(legs.iter().map(|(_, leg)| leg));
    let mut limits = common.unwrap_or_else(|| legs[0].1.clone());
    limits.block_count = layout.block_count();
    if legs.len() == 1 {
        return limits;
    }
    // A write across legs is torn when one of them has it and the other has not.
    limits.atomic_write_blocks = limits.atomic_write_blocks.min(1);
    limits.optimal_boundary_blocks = layout.chunk_blocks();
    let alone = Support::of(&[Operation::Copy, Operation::CompareAndWrite]);
    limits.support = limits.support.without(alone);
    // Each chunk after the first that a request has on a leg may cut one more of its segments: at
    // most half of what the leg takes is kept for those.
    let chunks = u64::from(limits.segments_max / 2).max(1);
    limits.request_blocks_max = limits.request_blocks_max.min(layout.blocks_max(chunks));
    let cuts = layout.chunks_on_a_leg_max(limits.request_blocks_max) - 1;
    limits.segments_max -= u16::try_from(cuts).unwrap_or(u16::MAX).min(limits.segments_max - 1);
    limits
}

impl std::fmt::Debug for Stripe {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layout, limits, .. } = self;
        let mut out = out.debug_struct("Stripe");
        out.field("layout", layout).field("limits", limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
