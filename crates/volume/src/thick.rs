//! Thick volumes: space is reserved for all of their blocks, so a first write never fails for lack of
//! space.
//!
//! Blocks of a thick volume that were never written are nevertheless allocated, in exclusive clusters: in
//! unwritten runs. A write there uses no space for data, but it may split a run in three, and with it the
//! counts of a cluster. So the possible growth of the trees is reserved as well:
//!
//! ```text
//!   reserved = nodes of the map in the worst case
//!            + clusters not yet allocated                 for each thick volume
//!   unavailable to others = sum of all reserved + nodes of the space map in the worst case
//! ```
//!
//! A leaf is split only when it is full, so it covers at least as many blocks as half a leaf has records.
//! That bounds the number of nodes of a map by the size of the volume, whatever the order of writes.

mod exclusive;

use crate::error::PoolError;
use crate::format::{NUMBER_MAX, UNIT_SHIFT_MAX, VolumeBody, decode_name, features, flags};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree_edit::FULL;
use crate::volume_catalog::CommandProgress;
pub(crate) use exclusive::{ClusterCopy, MakeExclusiveStep};

/// Minimum number of children of a new node, or of records in a leaf of single blocks.
const HALF: u64 = FULL as u64 / 2;
/// Minimum number of blocks that a leaf of a map covers: leaves are split between clusters.
const LEAF_BLOCKS_MIN: u64 = HALF + 1 - (1 << UNIT_SHIFT_MAX);

/// Maximum number of nodes of a tree with this number of blocks as keys, if each of its leaves covers at
/// least this number.
const fn tree_nodes_max(blocks: u64, leaf_blocks: u64) -> u64 {
    let mut level = blocks / leaf_blocks + 1;
    let mut nodes = level;
    while level > 1 {
        level = level / HALF + 1;
        nodes += level;
    }
    nodes
}

impl VolumeBody {
    /// Number of its clusters.
    pub(crate) const fn cluster_count(&self) -> u64 {
        self.blocks.div_ceil(self.cluster_blocks())
    }

    /// Number of blocks reserved for it: zero unless it is thick.
    pub(crate) const fn reserved_blocks(&self) -> u64 {
        if !self.has_flag(flags::THICK) {
            return 0;
        }
        tree_nodes_max(self.blocks, LEAF_BLOCKS_MIN) + self.owed
    }
}

impl Metadata {
    /// Number of blocks reserved for thick volumes.
    pub(crate) const fn thick_reserved_blocks(&self) -> u64 {
        match self.superblock.provisioned {
            0 => 0,
            provisioned => provisioned + self.space_map_nodes_max(),
        }
    }

    const fn space_map_nodes_max(&self) -> u64 {
        tree_nodes_max(self.superblock.blocks, HALF)
    }

    /// Changes a volume's part of the reservation.
    pub(crate) fn change_reservation(&mut self, before: u64, after: u64) {
        let others = self.superblock.provisioned.saturating_sub(before);
        self.superblock.provisioned = (others + after).min(NUMBER_MAX - 1);
    }

    /// Fails if less space is free than a volume's reservation grows from `before`; there may be enough
    /// after a commit.
    pub(crate) fn check_reservation_space(
        &self,
        before: u64,
        body: &VolumeBody,
    ) -> Result<(), TransactionStop> {
        let wanted = body.reserved_blocks().saturating_sub(before);
        let taken = self.space.kept + self.superblock.provisioned + self.space_map_nodes_max();
        let free = self.space.free_blocks(&self.superblock).saturating_sub(taken);
        if wanted <= free {
            return Ok(());
        }
        let name = decode_name(&body.name);
        Err(TransactionStop::NeedSpace(Box::new(PoolError::NoSpaceForThick { name, wanted, free })))
    }

    /// Reserves space for all blocks of a volume, of which clusters with `missing` blocks are not
    /// allocated.
    pub(crate) fn convert_to_thick(
        &mut self,
        name: &str,
        missing: u64,
    ) -> Result<CommandProgress, TransactionStop> {
        let body = self.expect_volume_by_name(name)?;
        if body.has_flag(flags::READ_ONLY) {
            return Err(PoolError::ReadOnly(name.into()).into());
        }
        if body.has_flag(flags::CHECKSUMS) {
            return Err(PoolError::ThickChecksums(name.into()).into());
        }
        body.expect_no_parent()?;
        let thick = VolumeBody { flags: body.flags | flags::THICK, owed: missing, ..body };
        self.check_reservation_space(body.reserved_blocks(), &thick)?;
        self.superblock.incompatible |= features::UNWRITTEN;
        self.store_volume(&thick)?;
        Ok(CommandProgress::Made(Some(thick.info())))
    }
}

#[cfg(test)]
mod tests {
    use super::{HALF, LEAF_BLOCKS_MIN, tree_nodes_max};

    #[test]
    fn map_reservation_is_a_small_part_of_any_volume_size() {
        assert_eq!((HALF, LEAF_BLOCKS_MIN), (82, 67), "as docs/user/pool-capacity.md says");
        assert_eq!(tree_nodes_max(1, LEAF_BLOCKS_MIN), 1);
        assert_eq!(tree_nodes_max(67, LEAF_BLOCKS_MIN), 3);
        for shift in 10..=48 {
            let nodes = tree_nodes_max(1 << shift, LEAF_BLOCKS_MIN);
            assert!(nodes <= (1 << shift) / 65 + 4, "{nodes} of 2^{shift}");
        }
    }
}
