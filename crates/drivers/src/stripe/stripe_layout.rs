//! Stripe layout: maps a block to its leg and position.

use tenmil_base::Error;
use tenmil_base::Limits;

use crate::multi_leg_channel::BlockLayout;

/// Chunks of blocks, distributed to legs round-robin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StripeLayout {
    legs: u64,
    chunk_shift: u32,
    /// Number of chunks on each leg.
    rows: u64,
}

/// Location of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StripeLocation {
    /// Index of the leg.
    pub(crate) leg: usize,
    /// LBA on the leg.
    pub(crate) lba: u64,
    /// Number of blocks from there to the end of the chunk.
    pub(crate) left: u64,
}

impl StripeLayout {
    /// A layout with chunks of `chunk_bytes` over these legs, whose block sizes are equal.
    pub(super) fn from_legs(legs: &[(&str, Limits)], chunk_bytes: u64) -> Result<Self, Error> {
        let block_size = u64::from(legs[0].1.block_size);
        let chunk_blocks = chunk_bytes / block_size;
        let fits = chunk_bytes.is_power_of_two() && chunk_bytes <= u64::from(u32::MAX);
        if !fits || chunk_blocks == 0 {
            return Err(Error::environment(format!(
                "chunk is {chunk_bytes} bytes, expected a power of two from the block of \
                 {block_size} to 2 GiB"
            )));
        }
        let chunk_shift = chunk_blocks.trailing_zeros();
        let mut rows = u64::MAX;
        for (name, leg) in legs {
            rows = rows.min(leg.block_count >> chunk_shift);
            if rows == 0 {
                return Err(Error::environment(format!(
                    "{name} has {} blocks, expected at least a chunk of {chunk_blocks}",
                    leg.block_count
                )));
            }
        }
        let block_count = (rows << chunk_shift).checked_mul(legs.len() as u64);
        block_count
            .ok_or_else(|| format!("{} legs have more blocks than fit", legs.len()))
            .map_err(Error::environment)?;
        Ok(Self { legs: legs.len() as u64, chunk_shift, rows })
    }

    /// Number of blocks on all legs together.
    pub(super) fn block_count(&self) -> u64 {
        (self.rows << self.chunk_shift) * self.legs
    }

    /// Number of blocks in a chunk.
    pub(super) fn chunk_blocks(&self) -> u32 {
        1 << self.chunk_shift
    }

    /// Maximum number of chunks of one leg that a request of so many blocks overlaps.
    pub(super) fn chunks_on_a_leg_max(&self, blocks: u32) -> u64 {
        // The first of its chunks may contribute a single block.
        let chunks = (u64::from(blocks).saturating_sub(2) >> self.chunk_shift) + 2;
        chunks.div_ceil(self.legs)
    }

    /// Maximum number of blocks of a request that overlaps at most `chunks` chunks on each of several
    /// legs.
    pub(super) fn blocks_within_chunks_max(&self, chunks: u64) -> u32 {
        u32::try_from((chunks * self.legs - 1) << self.chunk_shift).unwrap_or(u32::MAX)
    }

    /// The location of a block.
    #[inline]
    pub(crate) fn leg_of_block(&self, lba: u64) -> StripeLocation {
        let chunk = lba >> self.chunk_shift;
        let inside = lba & (u64::from(self.chunk_blocks()) - 1);
        let (row, leg) = (chunk / self.legs, chunk % self.legs);
        let leg = usize::try_from(leg).unwrap_or(0);
        let lba = (row << self.chunk_shift) + inside;
        StripeLocation { leg, lba, left: u64::from(self.chunk_blocks()) - inside }
    }

    /// The range of `leg` for `blocks` from `lba` on: first block and count.
    pub(super) fn range_on_leg(&self, leg: usize, lba: u64, blocks: u32) -> (u64, u32) {
        let end = lba + u64::from(blocks);
        let (first, after) =
            (self.blocks_on_leg_before(leg, lba), self.blocks_on_leg_before(leg, end));
        // A part is never larger than the whole.
        (first, u32::try_from(after - first).unwrap_or(blocks))
    }

    /// Number of blocks below `lba` that are on `leg`, which is the position of the next one there.
    fn blocks_on_leg_before(&self, leg: usize, lba: u64) -> u64 {
        let StripeLocation { leg: own, lba: on_leg, .. } = self.leg_of_block(lba);
        let row = on_leg >> self.chunk_shift;
        match leg.cmp(&own) {
            std::cmp::Ordering::Less => (row + 1) << self.chunk_shift,
            std::cmp::Ordering::Equal => on_leg,
            std::cmp::Ordering::Greater => row << self.chunk_shift,
        }
    }
}

impl BlockLayout for StripeLayout {
    #[inline]
    fn leg_of_block(&self, lba: u64) -> (usize, u64) {
        let StripeLocation { leg, left, .. } = self.leg_of_block(lba);
        (leg, left)
    }

    #[inline]
    fn range_on_leg(&self, leg: usize, lba: u64, blocks: u32) -> (u64, u32) {
        self.range_on_leg(leg, lba, blocks)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{BlockDevice, Limits};

    use super::{StripeLayout, StripeLocation};
    use crate::NullDevice;

    fn null_device_limits(blocks: u64) -> Limits {
        NullDevice::new(512, blocks).unwrap().limits()
    }

    fn sample_layout(legs: usize, chunk_bytes: u64) -> StripeLayout {
        StripeLayout::from_legs(&vec![("leg", null_device_limits(64)); legs], chunk_bytes).unwrap()
    }

    #[test]
    fn stripe_layout_is_a_bijection() {
        for (legs, chunk_bytes) in [(1, 4096), (2, 512), (3, 2048), (5, 1024)] {
            let layout = sample_layout(legs, chunk_bytes);
            let places: Vec<StripeLocation> =
                (0..layout.block_count()).map(|lba| layout.leg_of_block(lba)).collect();
            let mut seen: Vec<(usize, u64)> =
                places.iter().map(|location| (location.leg, location.lba)).collect();
            seen.sort_unstable();
            assert!(
                seen.into_iter().eq((0..legs).flat_map(|leg| (0..64).map(move |lba| (leg, lba))))
            );
            for first in 0..30_usize {
                for count in 0..34_usize {
                    let mut chunks = vec![Vec::new(); legs];
                    for location in &places[first..first + count] {
                        chunks[location.leg].push(location.lba);
                    }
                    for (leg, own) in chunks.iter().enumerate() {
                        let blocks = u32::try_from(count).unwrap();
                        let (from, many) = layout.range_on_leg(leg, first as u64, blocks);
                        assert!(own.iter().copied().eq(from..from + u64::from(many)));
                        let touched =
                            own.chunk_by(|a, b| a >> layout.chunk_shift == b >> layout.chunk_shift);
                        assert!(touched.count() as u64 <= layout.chunks_on_a_leg_max(blocks));
                    }
                }
            }
        }
    }

    #[test]
    fn invalid_chunk_size_is_rejected() {
        for bad in [0, 256, 1_536, 1 << 32] {
            let refused =
                StripeLayout::from_legs(&[("leg", null_device_limits(64))], bad).unwrap_err();
            assert!(
                refused.text.starts_with(&format!("chunk is {bad} bytes, expected")),
                "{refused}"
            );
        }
        let refused = StripeLayout::from_legs(
            &[("a", null_device_limits(64)), ("b", null_device_limits(7))],
            4096,
        )
        .unwrap_err();
        assert_eq!(
            refused,
            tenmil_base::Error::environment("b has 7 blocks, expected at least a chunk of 8")
        );
    }
}
