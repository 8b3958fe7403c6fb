//! The list of work: what was deleted or cut is given back in the background, a leaf at a time.

use super::WORK;
use crate::books::{Books, Stop};
use crate::format::{Body, Kind, Pointer, Record, VolumeBody, flags};
use crate::tree::ALL;

impl Books {
    /// Puts a volume that is no longer in the catalogue on the list of work, in a block of its own.
    pub(super) fn doom(&mut self, body: VolumeBody) -> Result<(), Stop> {
        let flags = (body.flags & !flags::THICK) | flags::DOOMED;
        let (parent, reach) = (Pointer::NONE, 0);
        let body = VolumeBody { flags, owed: 0, parent, reach, ..body };
        let at = self.put_new(Kind::Volume, body.id, Body::Volume(body))?;
        self.put_work(body.id, at)
    }

    pub(super) fn put_work(&mut self, id: u64, at: Pointer) -> Result<(), Stop> {
        let mut root = self.superblock.work;
        let line = Record { key: id, value: at.address, extra: at.generation };
        self.splice(&WORK, &mut root, id..id + 1, Some(line))?;
        self.superblock.work = root;
        Ok(())
    }

    /// Passes over the first work on the list, which is damaged. False if the list itself is.
    pub(crate) fn skip_work(&mut self) -> bool {
        let first = self.next_run(&WORK, self.superblock.work, self.sweep_from);
        self.sweep_from = first.ok().flatten().map_or(0, |line| line.key + 1);
        self.sweep_from > 0
    }

    /// Does a part of the first work on the list. False if there is none.
    pub(crate) fn sweep(&mut self) -> Result<bool, Stop> {
        let root = self.superblock.work;
        let Some(line) = self.next_run(&WORK, root, self.sweep_from)? else {
            return Ok(false);
        };
        if line.value == 0 {
            match self.volume(line.key)? {
                Some(mut body) => self.cut(&mut body)?,
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
            self.edit(line.value)?.body = Body::Volume(body);
        } else {
            self.drop_page(line.value);
            let at = self.put_new(Kind::Volume, body.id, Body::Volume(body))?;
            self.put_work(body.id, at)?;
        }
        Ok(true)
    }

    /// Gives back a part of what is mapped behind the place where a volume was cut.
    pub(super) fn cut(&mut self, body: &mut VolumeBody) -> Result<(), Stop> {
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
