//! Differences between snapshots, and sending a snapshot as a stream.

use std::io::Write;
use std::sync::Arc;

use tenmil_base::ErrorCategory;
use tenmil_volume::snapshot_stream::{DATA_BLOCKS_MAX, StreamEncoder, StreamInfo};
use tenmil_volume::{PoolRequest, PoolResponse, VolumeInfo};

use super::blocking_volume_io::BlockingVolumeIo;
use super::scrub::STREAM_WAIT_MAX;
use super::{OpenPool, PAGE_BYTES};
use tenmil_base::Error;
use tenmil_block::Opener;

/// A range of blocks that differs between two volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRange {
    /// The first block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// They are mapped in the volume.
    pub is_mapped: bool,
    /// They are in the parent. Blocks that are neither read as zeroes now.
    pub is_parents: bool,
}

impl ChangedRange {
    /// Whether they contain data.
    #[must_use]
    pub const fn has_data(&self) -> bool {
        self.is_mapped || self.is_parents
    }

    /// Whether `next` continues this range with the same state.
    const fn is_continued_by(&self, next: &Self) -> bool {
        let is_alike = self.is_mapped == next.is_mapped && self.is_parents == next.is_parents;
        self.block + self.blocks == next.block && is_alike
    }
}

/// Summary of a send or a receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferSummary {
    /// The snapshot in this pool.
    pub info: VolumeInfo,
    /// The base snapshot of an incremental stream.
    pub base: Option<VolumeInfo>,
    /// Blocks of data in the stream.
    pub data_blocks: u64,
    /// Blocks of holes in the stream.
    pub hole_blocks: u64,
    /// It had been received already, and nothing was done.
    pub was_there: bool,
}

/// Progress callback with bytes done and total; returns false to stop.
pub type ProgressFn<'a> = dyn FnMut((u64, u64)) -> bool + 'a;

impl OpenPool {
    /// Calls `each` with the ranges that a volume has and its base has not, in ascending order, from
    /// their maps alone. Without a base, with everything ever written.
    ///
    /// # Errors
    ///
    /// If there is no such volume, a map is damaged, or `each` fails.
    pub fn for_each_difference(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        each: &mut dyn FnMut(ChangedRange) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.for_each_difference_from(base, info, 0, &mut |changed| each(changed).map(|()| true))
    }

    /// The first `most` ranges from a block on, and where to continue if there may be more.
    ///
    /// # Errors
    ///
    /// If there is no such volume, or a map is damaged.
    pub fn first_differences(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        from: u64,
        most: usize,
    ) -> Result<(Vec<ChangedRange>, Option<u64>), Error> {
        let mut found = Vec::new();
        self.for_each_difference_from(base, info, from, &mut |changed| {
            found.push(changed);
            Ok(found.len() < most)
        })?;
        let last = found.last().filter(|_| found.len() >= most);
        let next = last.map(|last| last.block + last.blocks);
        Ok((found, next))
    }

    /// Calls `each` with the ranges that differ from a block on, until it returns false.
    fn for_each_difference_from(
        &self,
        base: Option<&VolumeInfo>,
        info: &VolumeInfo,
        from: u64,
        each: &mut dyn FnMut(ChangedRange) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let (volume, base) = (info.id, base.map_or(0, |base| base.id));
        let (mut at, mut last): (u64, Option<ChangedRange>) = (from, None);
        loop {
            let completion =
                self.request_and_wait(PoolRequest::Difference { volume, base, block: at })?;
            let PoolResponse::Changed { block, blocks, is_mapped, is_parents } = completion else {
                break;
            };
            let changed = ChangedRange { block, blocks, is_mapped, is_parents };
            if blocks == 0 {
                break;
            }
            at = block + blocks;
            match &mut last {
                Some(last) if last.is_continued_by(&changed) => {
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

    /// Writes a snapshot as a stream, in full or relative to a base. Blocks of its parent are read and
    /// included.
    ///
    /// # Errors
    ///
    /// If one is not a snapshot, blocks cannot be read, `out` fails, or `watch` returns false.
    pub fn send_stream(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        base: Option<&str>,
        name: &str,
        out: &mut dyn Write,
        watch: &mut ProgressFn<'_>,
    ) -> Result<TransferSummary, Error> {
        let info = self.require_snapshot(name)?;
        let base = base.map(|base| self.require_snapshot(base)).transpose()?;
        // Other clients stay active, and must not delete these.
        let _held = self.pin_volume(&info)?;
        let _held_base = base.as_ref().map(|base| self.pin_volume(base)).transpose()?;
        let mut total = 0;
        self.for_each_difference(base.as_ref(), &info, &mut |changed| {
            total += if changed.has_data() { changed.blocks } else { 0 };
            Ok(())
        })?;
        let (sender, head) = StreamEncoder::start_with_head(&StreamInfo {
            store: self.uuid(),
            uuid: info.uuid,
            name: info.name.clone(),
            blocks: info.blocks,
            unit: info.unit,
            has_checksums: info.has_checksums,
            base: base.as_ref().map(|base| (base.uuid, base.name.clone())),
        });
        let carrier = BlockingVolumeIo::open(self, &info, self.open_parent(opener, &info)?)?;
        let room = carrier.blocks_max().min(u32::try_from(DATA_BLOCKS_MAX).unwrap_or(1));
        let buffer = vec![0; (room * PAGE_BYTES) as usize];
        let mut way = SendInProgress { sender, carrier, buffer, out, watch, done: 0, total };
        let mut hole_blocks = 0;
        way.write_bytes(&head).map_err(|error| self.write_error(&error))?;
        self.for_each_difference(base.as_ref(), &info, &mut |changed| {
            if changed.has_data() {
                return self.send_data(&mut way, changed);
            }
            hole_blocks += changed.blocks;
            let record = way.sender.hole_record(changed.block, changed.blocks);
            way.write_bytes(&record).map_err(|error| self.write_error(&error))
        })?;
        let end = way.sender.end_record();
        let ended = way.out.write_all(&end).and_then(|()| way.out.flush());
        ended.map_err(|error| self.write_error(&error))?;
        Ok(TransferSummary { info, base, data_blocks: total, hole_blocks, was_there: false })
    }

    fn send_data(&self, way: &mut SendInProgress<'_>, changed: ChangedRange) -> Result<(), Error> {
        let page = u64::from(PAGE_BYTES);
        let (mut at, end) = (changed.block, changed.block + changed.blocks);
        while at < end {
            let polite = u64::from(self.wait_for_foreground_idle(STREAM_WAIT_MAX));
            let len = (way.buffer.len() as u64).min((end - at).min(polite) * page);
            let (blocks, len) = (len / page, usize::try_from(len).unwrap_or(0));
            way.carrier.read(at, &mut way.buffer[..len])?;
            let record = way.sender.data_record(at, &way.buffer[..len]);
            let put = way.out.write_all(&record);
            put.and_then(|()| way.out.write_all(&way.buffer[..len]))
                .map_err(|error| self.write_error(&error))?;
            at += blocks;
            way.done += blocks;
            if !(way.watch)((way.done * page, way.total * page)) {
                return Err(self.interrupted_error());
            }
        }
        Ok(())
    }

    /// The snapshot with this name; a writable volume is rejected.
    pub(super) fn require_snapshot(&self, name: &str) -> Result<VolumeInfo, Error> {
        let info = self.find_volume(name)?;
        if info.is_read_only {
            return Ok(info);
        }
        let text = format!("{}: `{name}` is a volume, expected a snapshot", self.name);
        let hint = format!(
            "Make one of it with `tenmil volume snapshot`, and name that in place \
                            of `{name}`."
        );
        Err(Error::new(ErrorCategory::Usage, text).with_hint(hint))
    }

    pub(super) fn interrupted_error(&self) -> Error {
        Error::new(ErrorCategory::Environment, format!("{}: the stream was interrupted", self.name))
    }

    fn write_error(&self, error: &std::io::Error) -> Error {
        Error::new(ErrorCategory::Environment, format!("{}: write the stream: {error}", self.name))
    }
}

/// State of a send in progress.
struct SendInProgress<'a> {
    sender: StreamEncoder,
    carrier: BlockingVolumeIo,
    buffer: Vec<u8>,
    out: &'a mut dyn Write,
    watch: &'a mut ProgressFn<'a>,
    done: u64,
    total: u64,
}

impl SendInProgress<'_> {
    fn write_bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.out.write_all(bytes)
    }
}
