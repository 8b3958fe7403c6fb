//! Data checksums, for volumes that have them.
//!
//! A separate tree, shared by a volume's snapshots and clones like its map, has the checksum of every
//! mapped block, four in a record:
//!
//! ```text
//!   key = block / 4 | value: of block 4k, of 4k + 1 | extra: of 4k + 2, of 4k + 3     0: none
//! ```
//!
//! A checksum is found by volume number and block number, in pages that identify their owner, address and
//! transaction. A write that went to another address, a lost write, or data from an earlier use of the
//! address therefore does not match the expected checksum, unless the bytes are the same. A block and its
//! checksum are in one commit, since a mapped block is never overwritten.

use std::ops::Range;

use crate::format::{Block, Record, VolumeBody};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::ALL;

/// Blocks whose checksums are in one record.
pub(crate) const GROUP_BLOCKS: u64 = 4;

const GROUP: usize = 4;

/// Stored checksum of a block: CRC-32C, with zero replaced by one.
#[must_use]
pub fn block_checksum(block: &Block) -> u32 {
    tenmil_crc::crc32c(block).max(1)
}

/// Checksums in a record.
pub(crate) fn checksums_in_record(record: &Record) -> [u32; GROUP] {
    let mut sums = [0; GROUP];
    let words = [record.value, record.extra].map(u64::to_le_bytes);
    for (sum, bytes) in sums.iter_mut().zip(words.as_flattened().chunks_exact(4)) {
        *sum = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    sums
}

fn group_record(key: u64, sums: [u32; GROUP]) -> Record {
    let word = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    Record { key, value: word(sums[0], sums[1]), extra: word(sums[2], sums[3]) }
}

/// Groups that contain blocks of a range.
fn groups_of_blocks(range: &Range<u64>) -> Range<u64> {
    range.start / GROUP_BLOCKS..range.end.div_ceil(GROUP_BLOCKS)
}

/// Replaces the checksums of the group's blocks that are in a range.
fn replace_in_group(
    group: u64,
    range: &Range<u64>,
    sums: &mut [u32; GROUP],
    of: impl Fn(u64) -> u32,
) {
    for (block, sum) in (group * GROUP_BLOCKS..).zip(sums) {
        if range.contains(&block) {
            *sum = of(block);
        }
    }
}

impl Metadata {
    /// Checksums of a range of blocks, one for each; zero for a block without one.
    pub(crate) fn data_checksums(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
    ) -> Result<Vec<u32>, TransactionStop> {
        let (tree, groups) = (body.checksum_tree(), groups_of_blocks(range));
        let mut sums = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
        let mut key = groups.start;
        while let Some(leaf) = self.find_leaf(&tree, body.sums, key)? {
            let records = leaf.page.records();
            let from = records.partition_point(|record| record.key < key);
            for record in records[from..].iter().take_while(|record| record.key < groups.end) {
                for (block, sum) in (record.key * GROUP_BLOCKS..).zip(checksums_in_record(record)) {
                    let index = block.checked_sub(range.start).map(usize::try_from);
                    if let Some(Ok(place)) = index
                        && let Some(place) = sums.get_mut(place)
                    {
                        *place = sum;
                    }
                }
            }
            if leaf.bounds.end >= groups.end {
                break;
            }
            key = leaf.bounds.end;
        }
        Ok(sums)
    }

    /// Checksums of a group.
    fn checksum_group(
        &mut self,
        body: &VolumeBody,
        group: u64,
    ) -> Result<[u32; GROUP], TransactionStop> {
        let line = self.next_run(&body.checksum_tree(), body.sums, group)?;
        Ok(line
            .filter(|line| line.key == group)
            .map_or([0; GROUP], |line| checksums_in_record(&line)))
    }

    /// Stores the checksums of blocks from `block` on.
    pub(crate) fn store_checksums(
        &mut self,
        body: &mut VolumeBody,
        block: u64,
        sums: &[u32],
    ) -> Result<(), TransactionStop> {
        let range = block..block + sums.len() as u64;
        let of = |at: u64| usize::try_from(at - block).map_or(0, |index| sums[index]);
        let mut lines = Vec::with_capacity(sums.len() / GROUP + 2);
        for group in groups_of_blocks(&range) {
            let first = group * GROUP_BLOCKS;
            let is_whole = range.start <= first && first + GROUP_BLOCKS <= range.end;
            let mut own = if is_whole { [0; GROUP] } else { self.checksum_group(body, group)? };
            replace_in_group(group, &range, &mut own, of);
            lines.push(group_record(group, own));
        }
        let (tree, mut done) = (body.checksum_tree(), 0);
        while done < lines.len() {
            done += self.insert_records(&tree, &mut body.sums, &lines[done..])?;
        }
        Ok(())
    }

    /// End of the blocks whose checksums are in the same leaf as the first ones of a range; the end of
    /// the range if there are none.
    pub(crate) fn checksum_leaf_end(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
    ) -> Result<u64, TransactionStop> {
        let (tree, groups) = (body.checksum_tree(), groups_of_blocks(range));
        let first = self.next_run(&tree, body.sums, groups.start)?;
        let Some(first) = first.filter(|line| groups.contains(&line.key)) else {
            return Ok(range.end);
        };
        let leaf = self.find_leaf(&tree, body.sums, first.key)?;
        let end = leaf.map_or(u64::MAX, |leaf| leaf.bounds.end);
        Ok(end.saturating_mul(GROUP_BLOCKS).min(range.end))
    }

    /// Removes the checksums of a range of blocks, which should be in one leaf.
    pub(crate) fn remove_checksums(
        &mut self,
        body: &mut VolumeBody,
        range: &Range<u64>,
    ) -> Result<(), TransactionStop> {
        let tree = body.checksum_tree();
        let whole = range.start.div_ceil(GROUP_BLOCKS)..range.end / GROUP_BLOCKS;
        let mut at = whole.start;
        while at < whole.end {
            (at, _) = self.clear_range_in_leaf(&tree, &mut body.sums, &(at..whole.end), false)?;
        }
        let groups = groups_of_blocks(range);
        let edges = [groups.start, groups.end - 1];
        let count = if edges[0] == edges[1] { 1 } else { 2 };
        for group in edges.into_iter().take(count).filter(|group| !whole.contains(group)) {
            let before = self.checksum_group(body, group)?;
            let mut sums = before;
            replace_in_group(group, range, &mut sums, |_| 0);
            if sums == before {
                continue;
            }
            let line = Some(group_record(group, sums)).filter(|_| sums != [0; GROUP]);
            self.replace_range_in_leaf(&tree, &mut body.sums, group..group + 1, line)?;
        }
        Ok(())
    }

    /// Removes a part of the checksums after a volume's truncation point. Returns whether all are
    /// removed.
    pub(crate) fn truncate_checksums(
        &mut self,
        body: &mut VolumeBody,
    ) -> Result<bool, TransactionStop> {
        let behind = body.cut.div_ceil(GROUP_BLOCKS)..ALL.end;
        let (end, _) =
            self.clear_range_in_leaf(&body.checksum_tree(), &mut body.sums, &behind, false)?;
        if end == ALL.end && !body.cut.is_multiple_of(GROUP_BLOCKS) {
            let rest = body.cut..body.cut.next_multiple_of(GROUP_BLOCKS);
            self.remove_checksums(body, &rest)?;
        }
        Ok(end == ALL.end)
    }
}
