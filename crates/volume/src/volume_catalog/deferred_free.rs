//! Deferred frees: deleted or truncated blocks are freed in the background, one leaf at a time.

use super::WORK;
use crate::format::{BlockKind, PageBody, Pointer, Record, VolumeBody, flags};
use crate::metadata::{Metadata, TransactionStop};
use crate::tree::ALL;

impl Metadata {
    /// Enters a volume that is no longer in the catalog in the deferred frees, in a block of its own.
    pub(super) fn defer_free(&mut self, body: VolumeBody) -> Result<(), TransactionStop> {
        let flags = (body.flags & !flags::THICK) | flags::DOOMED;
        let (parent, reach) = (Pointer::NONE, 0);
        let body = VolumeBody { flags, owed: 0, parent, reach, ..body };
        let at = self.create_page(BlockKind::Volume, body.id, PageBody::Volume(body))?;
        self.store_deferred_entry(body.id, at)
    }

    pub(super) fn store_deferred_entry(
        &mut self,
        id: u64,
        at: Pointer,
    ) -> Result<(), TransactionStop> {
        let mut root = self.superblock.work;
        let line = Record { key: id, value: at.address, extra: at.generation };
        self.replace_range_in_leaf(&WORK, &mut root, id..id + 1, Some(line))?;
        self.superblock.work = root;
        Ok(())
    }

    /// Skips the first entry, which is corrupt. False if the tree of entries itself is.
    pub(crate) fn skip_corrupt_deferred_entry(&mut self) -> bool {
        let first = self.next_run(&WORK, self.superblock.work, self.sweep_from);
        self.sweep_from = first.ok().flatten().map_or(0, |line| line.key + 1);
        self.sweep_from > 0
    }

    /// Processes a part of the first entry. False if there are no entries.
    pub(crate) fn step_deferred_free(&mut self) -> Result<bool, TransactionStop> {
        let root = self.superblock.work;
        let Some(line) = self.next_run(&WORK, root, self.sweep_from)? else {
            return Ok(false);
        };
        if line.value == 0 {
            match self.find_volume(line.key)? {
                Some(mut body) => self.step_truncated_free(&mut body)?,
                None => self.remove_record(&WORK, line.key)?,
            }
            return Ok(true);
        }
        let mut body = self.load_volume(line.key, line.child())?;
        let tree = body.map_tree();
        if !body.map.is_null() {
            self.clear_range_in_leaf(&tree, &mut body.map, &ALL, true)?;
        } else if !body.sums.is_null() {
            self.clear_range_in_leaf(&body.checksum_tree(), &mut body.sums, &ALL, true)?;
        }
        if body.map.is_null() && body.sums.is_null() {
            self.remove_record(&WORK, body.id)?;
        } else if line.child().generation == self.generation {
            self.page_mut(line.value)?.body = PageBody::Volume(body);
        } else {
            self.free_page(line.value);
            let at = self.create_page(BlockKind::Volume, body.id, PageBody::Volume(body))?;
            self.store_deferred_entry(body.id, at)?;
        }
        Ok(true)
    }

    /// Frees a part of the mapped blocks after the truncation point of a volume.
    pub(super) fn step_truncated_free(
        &mut self,
        body: &mut VolumeBody,
    ) -> Result<(), TransactionStop> {
        let tree = body.map_tree();
        let map = body.map;
        let (end, gain) =
            self.clear_range_in_leaf(&tree, &mut body.map, &(body.cut..ALL.end), false)?;
        body.apply_map_delta(gain);
        let is_unmapped = end == ALL.end;
        // One of the two trees at a time.
        let is_next = is_unmapped && body.map == map;
        if is_unmapped && (body.sums.is_null() || (is_next && self.truncate_checksums(body)?)) {
            body.cut = u64::MAX;
            self.remove_record(&WORK, body.id)?;
        }
        self.store_volume(body)
    }
}
