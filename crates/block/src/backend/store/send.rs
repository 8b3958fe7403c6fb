//! What differs between two snapshots, and a snapshot as a stream.

use std::io::Write;
use std::sync::Arc;

use base::Blame;
use volume::stream::{Contents, DATA_BLOCKS_MAX, Sender};
use volume::{Answer, Ask, VolumeInfo};

use super::carrier::Carrier;
use super::scrub::STREAM_WAIT_MAX;
use super::{OpenStore, PAGE_BYTES};
use crate::MediumError;
use crate::open::Opener;

/// Blocks of a volume that differ from those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The first one.
    pub block: u64,
    /// How many.
    pub blocks: u64,
    /// Whether they were written.
    pub is_mapped: bool,
    /// Whether they are the parent's. What is neither reads as zeroes now.
    pub is_parents: bool,
}

impl Changed {
    /// Whether they are read from somewhere.
    #[must_use]
    pub const fn has_data(&self) -> bool {
        self.is_mapped || self.is_parents
    }

    /// Whether those that follow are like these.
    const fn goes_on_in(&self, next: &Self) -> bool {
        let is_alike = self.is_mapped == next.is_mapped && self.is_parents == next.is_parents;
        self.block + self.blocks == next.block && is_alike
    }
}

/// What was sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The snapshot as it is called in the store.
    pub info: VolumeInfo,
    /// The snapshot that it differs from.
    pub base: Option<VolumeInfo>,
    /// Blocks of data in the stream.
    pub data_blocks: u64,
    /// Blocks that it says read as zeroes.
    pub hole_blocks: u64,
    /// Whether it had been received already, and nothing was done.
    pub was_there: bool,
}

/// Is told how many bytes of how many are done; it is over when this says no.
pub type Watch<'a> = dyn FnMut((u64, u64)) -> bool + 'a;

impl OpenStore {
    /// Tells `each` what a volume has that another has not, by ascending blocks, from their maps
    /// alone; without a base, all that was ever written.
    ///
    /// # Errors
    ///
    /// If there is no such volume, a map is damaged, or `each` says so.
    pub fn differences(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        each: &mut dyn FnMut(Changed) -> Result<(), MediumError>,
    ) -> Result<(), MediumError> {
        self.differ_from(base, info, 0, &mut |changed| each(changed).map(|()| true))
    }

    /// The first of them from a block on, so many at most, and where to go on if there may be more.
    ///
    /// # Errors
    ///
    /// If there is no such volume, or a map is damaged.
    pub fn differences_from(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        from: u64,
        most: usize,
    ) -> Result<(Vec<Changed>, Option<u64>), MediumError> {
        let mut found = Vec::new();
        self.differ_from(base, info, from, &mut |changed| {
            found.push(changed);
            Ok(found.len() < most)
        })?;
        let last = found.last().filter(|_| found.len() >= most);
        let next = last.map(|last| last.block + last.blocks);
        Ok((found, next))
    }

    /// Tells `each` what differs from a block on, until it says no.
    fn differ_from(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        from: u64,
        each: &mut dyn FnMut(Changed) -> Result<bool, MediumError>,
    ) -> Result<(), MediumError> {
        let (volume, base) = (info.id, base.map_or(0, |base| base.id));
        let (mut at, mut last): (u64, Option<Changed>) = (from, None);
        loop {
            let answer = self.ask(Ask::Difference { volume, base, block: at })?;
            let Answer::Changed { block, blocks, is_mapped, is_parents } = answer else { break };
            let changed = Changed { block, blocks, is_mapped, is_parents };
            if blocks == 0 {
                break;
            }
            at = block + blocks;
            match &mut last {
                Some(last) if last.goes_on_in(&changed) => {
                    last.blocks += blocks;
                }
                _ => {
                    if let Some(whole) = last.replace(changed)
                        && !each(whole)?
                    {
                        return Ok(());
                    }
                }
            }
        }
        last.map_or(Ok(true), each).map(drop)
    }

    /// Writes a snapshot, or what it has that another one has not, as a stream. What is its parent's is
    /// read there, and is in the stream like all else.
    ///
    /// # Errors
    ///
    /// If one is no snapshot, blocks cannot be read, `out` takes no more, or `watch` says no.
    pub fn send(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        base: Option<&str>,
        name: &str,
        out: &mut dyn Write,
        watch: &mut Watch<'_>,
    ) -> Result<Carried, MediumError> {
        let info = self.snapshot(name)?;
        let base = base.map(|base| self.snapshot(base)).transpose()?;
        // Others go on meanwhile, and may not delete what is read.
        let _held = self.hold(&info)?;
        let _held_base = base.as_ref().map(|base| self.hold(base)).transpose()?;
        let mut total = 0;
        self.differences(base.as_ref(), &info, &mut |changed| {
            total += if changed.has_data() { changed.blocks } else { 0 };
            Ok(())
        })?;
        let (sender, head) = Sender::begin(&Contents {
            store: self.uuid(),
            uuid: info.uuid,
            name: info.name.clone(),
            blocks: info.blocks,
            unit: info.unit,
            has_checksums: info.has_checksums,
            base: base.as_ref().map(|base| (base.uuid, base.name.clone())),
        });
        let carrier = Carrier::open(self, &info, self.open_parent(opener, &info)?)?;
        let room = carrier.blocks_max().min(u32::try_from(DATA_BLOCKS_MAX).unwrap_or(1));
        let buffer = vec![0; (room * PAGE_BYTES) as usize];
        let mut way = Way { sender, carrier, buffer, out, watch, done: 0, total };
        let mut hole_blocks = 0;
        way.put(&head).map_err(|error| self.broken(&error))?;
        self.differences(base.as_ref(), &info, &mut |changed| {
            if changed.has_data() {
                return self.send_data(&mut way, changed);
            }
            hole_blocks += changed.blocks;
            let record = way.sender.hole(changed.block, changed.blocks);
            way.put(&record).map_err(|error| self.broken(&error))
        })?;
        let end = way.sender.end();
        let ended = way.out.write_all(&end).and_then(|()| way.out.flush());
        ended.map_err(|error| self.broken(&error))?;
        Ok(Carried { info, base, data_blocks: total, hole_blocks, was_there: false })
    }

    fn send_data(&self, way: &mut Way<'_>, changed: Changed) -> Result<(), MediumError> {
        let page = u64::from(PAGE_BYTES);
        let (mut at, end) = (changed.block, changed.block + changed.blocks);
        while at < end {
            let polite = u64::from(self.let_others_go_first(STREAM_WAIT_MAX));
            let len = (way.buffer.len() as u64).min((end - at).min(polite) * page);
            let (blocks, len) = (len / page, usize::try_from(len).unwrap_or(0));
            way.carrier.read(at, &mut way.buffer[..len])?;
            let record = way.sender.data(at, &way.buffer[..len]);
            let put = way.out.write_all(&record);
            put.and_then(|()| way.out.write_all(&way.buffer[..len]))
                .map_err(|error| self.broken(&error))?;
            at += blocks;
            way.done += blocks;
            if !(way.watch)((way.done * page, way.total * page)) {
                return Err(self.interrupted());
            }
        }
        Ok(())
    }

    /// The snapshot of a name: what may change while it is read is refused.
    pub(super) fn snapshot(&self, name: &str) -> Result<VolumeInfo, MediumError> {
        let info = self.find(name)?;
        if info.is_read_only {
            return Ok(info);
        }
        let text = format!("{}: `{name}` is a volume, expected a snapshot", self.name);
        let hint = format!(
            "Make one of it with `tenmil volume snapshot`, and name that in place \
                            of `{name}`."
        );
        Err(MediumError::new(Blame::Caller, text).with_hint(hint))
    }

    pub(super) fn interrupted(&self) -> MediumError {
        MediumError::new(Blame::Machine, format!("{}: the stream was interrupted", self.name))
    }

    fn broken(&self, error: &std::io::Error) -> MediumError {
        MediumError::new(Blame::Machine, format!("{}: write the stream: {error}", self.name))
    }
}

/// What a stream goes through.
struct Way<'a> {
    sender: Sender,
    carrier: Carrier,
    buffer: Vec<u8>,
    out: &'a mut dyn Write,
    watch: &'a mut Watch<'a>,
    done: u64,
    total: u64,
}

impl Way<'_> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.out.write_all(bytes)
    }
}
