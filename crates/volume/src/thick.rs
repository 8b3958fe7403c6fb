//! Thick volumes: room is kept for all of their blocks, so that a first write never finds none.
//!
//! What was not written of a thick volume lies in units of its own all the same: in runs that are
//! spare. A write there takes no room for data, but it may part a run in three, and the counts of a
//! unit with it; so what the trees may grow by is kept as well:
//!
//! ```text
//!   promised = nodes of the map at worst + units that it is owed      for each thick volume
//!   kept from all others = all that is promised + nodes of the space map at worst
//! ```
//!
//! A leaf is split only when it is full, so it answers for as many blocks as half a leaf has records:
//! that bounds the nodes of a map by the size of the volume, whatever is written in which order.

mod own;

use crate::books::{Books, Stop};
use crate::edit::FULL;
use crate::error::StoreError;
use crate::format::{NUMBER_MAX, UNIT_SHIFT_MAX, VolumeBody, features, flags, unpadded};
use crate::volumes::Progress;
pub(crate) use own::{Move, Owning};

/// The fewest children that a node has when it is new, or records that a leaf of single blocks has.
const HALF: u64 = FULL as u64 / 2;
/// The fewest blocks that a leaf of a map answers for: leaves part between units.
const LEAF_BLOCKS_MIN: u64 = HALF + 1 - (1 << UNIT_SHIFT_MAX);

/// How many nodes a tree has at most whose keys are so many blocks, if each of its leaves answers for
/// so many at least.
const fn nodes_max(blocks: u64, leaf_blocks: u64) -> u64 {
    let mut level = blocks / leaf_blocks + 1;
    let mut nodes = level;
    while level > 1 {
        level = level / HALF + 1;
        nodes += level;
    }
    nodes
}

impl VolumeBody {
    /// How many units it has.
    pub(crate) const fn units(&self) -> u64 {
        self.blocks.div_ceil(self.unit())
    }

    /// The blocks that are kept for it: none unless it is thick.
    pub(crate) const fn promise(&self) -> u64 {
        if !self.has(flags::THICK) {
            return 0;
        }
        nodes_max(self.blocks, LEAF_BLOCKS_MIN) + self.owed
    }
}

impl Books {
    /// Blocks that are kept for thick volumes.
    pub(crate) const fn reserve(&self) -> u64 {
        match self.superblock.promised {
            0 => 0,
            promised => promised + self.space_nodes_max(),
        }
    }

    const fn space_nodes_max(&self) -> u64 {
        nodes_max(self.superblock.blocks, HALF)
    }

    /// A volume that was promised `before` is promised what it says now.
    pub(crate) fn note_promise(&mut self, before: u64, after: u64) {
        let others = self.superblock.promised.saturating_sub(before);
        self.superblock.promised = (others + after).min(NUMBER_MAX - 1);
    }

    /// Whether there is room for what a volume is to be promised, more than `before`; else there may
    /// be after a commit.
    pub(crate) fn expect_room(&self, before: u64, body: &VolumeBody) -> Result<(), Stop> {
        let wanted = body.promise().saturating_sub(before);
        let taken = self.space.kept + self.superblock.promised + self.space_nodes_max();
        let free = self.space.free(&self.superblock).saturating_sub(taken);
        if wanted <= free {
            return Ok(());
        }
        let name = unpadded(&body.name);
        Err(Stop::Short(Box::new(StoreError::NoRoomForThick { name, wanted, free })))
    }

    /// Promises a volume room for all of its blocks, of which units with so many blocks are missing.
    pub(crate) fn thicken(&mut self, name: &str, missing: u64) -> Result<Progress, Stop> {
        let body = self.lookup(name)?;
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(name.into()).into());
        }
        if body.has(flags::CHECKSUMS) {
            return Err(StoreError::ThickChecksums(name.into()).into());
        }
        body.expect_no_parent()?;
        let thick = VolumeBody { flags: body.flags | flags::THICK, owed: missing, ..body };
        self.expect_room(body.promise(), &thick)?;
        self.superblock.incompatible |= features::SPARE;
        self.put_volume(&thick)?;
        Ok(Progress::Made(Some(thick.info())))
    }
}

#[cfg(test)]
mod tests {
    use super::{HALF, LEAF_BLOCKS_MIN, nodes_max};

    #[test]
    fn what_is_kept_for_maps_is_a_small_part_of_a_volume_of_any_size() {
        assert_eq!((HALF, LEAF_BLOCKS_MIN), (82, 67), "as docs/room.md says");
        assert_eq!(nodes_max(1, LEAF_BLOCKS_MIN), 1);
        assert_eq!(nodes_max(67, LEAF_BLOCKS_MIN), 3);
        for shift in 10..=48 {
            let nodes = nodes_max(1 << shift, LEAF_BLOCKS_MIN);
            assert!(nodes <= (1 << shift) / 65 + 4, "{nodes} of 2^{shift}");
        }
    }
}
