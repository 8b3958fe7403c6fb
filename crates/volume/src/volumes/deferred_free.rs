//! Deferred frees: deleted or truncated blocks are freed in the background, one leaf at a time.

use super::WORK;
use crate::format::{Kind, PageBody, Pointer, Record, VolumeBody, flags};
use crate::metadata::{Metadata, TxnStop};
use crate::tree::ALL;

impl Metadata {
    /// Enters a volume that is no longer in the catalog in the deferred frees, in a block of its own.
    pub(super) fn defer_free(&mut self, body: VolumeBody) -> Result<(), TxnStop> {
        let flags = (body.flags & !flags::THICK) | flags::DOOMED;
        let (parent, reach) = (Pointer::NONE, 0);
        let body = VolumeBody { flags, owed: 0, parent, reach, ..body };
        let at = self.put_new(Kind::Volume, body.id, PageBody::Volume(body))?;
        self.put_work(body.id, at)
    }

    pub(super) fn put_work(&mut self, id: u64, at: Pointer) -> Result<(), TxnStop> {
        let mut root = self.superblock.work;
        let line = Record { key: id, value: at.address, extra: at.generation };
        self.splice(&WORK, &mut root, id..id + 1, Some(line))?;
        self.superblock.work = root;
        Ok(())
    }

    /// Skips the first entry, which is corrupt. False if the tree of entries itself is.
    pub(crate) fn skip_work(&mut self) -> bool {
        let first = self.next_run(&WORK, self.superblock.work, self.sweep_from);
        self.sweep_from = first.ok().flatten().map_or(0, |line| line.key + 1);
        self.sweep_from > 0
    }

    /// Processes a part of the first entry. False if there are no entries.
    pub(crate) fn free_deferred(&mut self) -> Result<bool, TxnStop> {
        let root = self.superblock.work;
        let Some(line) = self.next_run(&WORK, root, self.sweep_from)? else {
            return Ok(false);
        };
        if line.value == 0 {
            match self.volume(line.key)? {
                Some(mut body) => self.free_truncated(&mut body)?,
                None => self.remove_line(&WORK, line.key)?,
            }
            return Ok(true);
        }
        let mut body = self.volume_at(line.key, line.child())?;
        let tree = body.tree();
        if !body.map.is_none() {
            self.clear(&tree, &mut body.map, &ALL, true)?;
        } else if !body.sums.is_none() {
            self.clear(&body.sums_tree(), &mut body.sums, &ALL, true)?;
        }
        if body.map.is_none() && body.sums.is_none() {
            self.remove_line(&WORK, body.id)?;
        } else if line.child().generation == self.generation {
            self.edit(line.value)?.body = PageBody::Volume(body);
        } else {
            self.drop_page(line.value);
            let at = self.put_new(Kind::Volume, body.id, PageBody::Volume(body))?;
            self.put_work(body.id, at)?;
        }
        Ok(true)
    }

    /// Frees a part of the mapped blocks after the truncation point of a volume.
    pub(super) fn free_truncated(&mut self, body: &mut VolumeBody) -> Result<(), TxnStop> {
        let tree = body.tree();
        let map = body.map;
        let (end, gain) = self.clear(&tree, &mut body.map, &(body.cut..ALL.end), false)?;
        body.take_in(gain);
        let is_unmapped = end == ALL.end;
        // One of the two trees at a time.
        let is_next = is_unmapped && body.map == map;
        if is_unmapped && (body.sums.is_none() || (is_next && self.cut_sums(body)?)) {
            body.cut = u64::MAX;
            self.remove_line(&WORK, body.id)?;
        }
        self.put_volume(body)
    }
}
