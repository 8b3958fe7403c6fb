//! Decouples a volume from its parent by copying the parent's blocks.
//!
//! Blocks of zeroes use no space in the pool.
//!
//! The copy proceeds from the end of the volume to its start, at most 1 MiB at a time. If it is
//! interrupted, the part already copied remains. Writes to the range being copied wait; reads do not.

use std::sync::Arc;

use tenmil_base::{ErrorCategory, IoStatus};
use tenmil_volume::{
    DeviceAction, PoolRequest, PoolResponse, VolumeInfo, VolumeOp, block_checksum,
};

use super::page_io::{BlockingPageIo, GrowablePoolPageIo};
use super::parent_image::ParentImage;
use super::send_stream::ProgressFn;
use super::throttle::RateThrottle;
use super::{OpenPool, PAGE_BYTES, TransferResult};
use tenmil_base::Error;
use tenmil_block::Opener;

/// Result of decoupling a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecoupleResult {
    /// The volume.
    pub info: VolumeInfo,
    /// Number of blocks that were read from the parent; zero if it had none.
    pub blocks: u64,
}

/// Blocks per copy step: 1 MiB.
const COPY_BLOCKS: u32 = 256;

/// Copies from the parent to the devices of the pool.
struct ParentCopier<'a> {
    store: GrowablePoolPageIo<'a>,
    parent: BlockingPageIo<'a>,
    pages: Vec<u8>,
    /// Bytes copied.
    copied: u64,
}

impl OpenPool {
    /// Detaches a volume from its origin and its parent. The parent's blocks are copied, at most `rate`
    /// bytes per second.
    ///
    /// # Errors
    ///
    /// If there is no such volume, or it is a snapshot; if its parent cannot be opened or read, the pool
    /// is full, or `watch` returns false. In the latter cases the part already copied remains, and the
    /// rest still belongs to the parent.
    pub fn decouple(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<DecoupleResult, Error> {
        let blocks = self.copy_parent(opener, name, rate, watch)?;
        let decoupled = self.execute_volume_op(VolumeOp::Decouple { name: name.into() })?;
        let info = decoupled.map_or_else(|| self.find_volume(name), Ok)?;
        Ok(DecoupleResult { info, blocks })
    }

    /// Copies the parent's blocks into a volume. Returns the number of blocks covered.
    pub(super) fn copy_parent(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<u64, Error> {
        let info = self.find_volume(name)?;
        if info.is_read_only {
            return Err(self.pool_error(&tenmil_volume::PoolError::ReadOnly(name.into())));
        }
        let Some(parent) = self.open_parent(opener, &info)? else { return Ok(0) };
        let machine = |problem: Error| {
            Error::new(
                ErrorCategory::Environment,
                format!("{}: decouple `{name}`: {problem}", self.name),
            )
        };
        let mut mover = ParentCopier::new(self, &parent).map_err(machine)?;
        let (volume, page, mut left) = (info.id, u64::from(PAGE_BYTES), info.reach);
        let pace = RateThrottle { rate, clock: self.clock };
        while left > 0 {
            let (began, before) = (self.clock.now(), mover.copied);
            let fill = PoolRequest::CopyFromParent { volume, blocks: COPY_BLOCKS.into() };
            match self.request_with_transfers(fill, &mut |action| mover.execute_transfer(action))? {
                PoolResponse::Filled(to) if to < left => left = to,
                _ => return Err(machine(Error::environment("it made no progress, expected some"))),
            }
            let progress = ((info.reach - left) * page, info.reach * page);
            let continues = &mut || watch(progress);
            if !(continues() && pace.sleep_to_rate(mover.copied - before, began, continues)) {
                return Err(machine(Error::environment("interrupted; repeat it to resume")));
            }
        }
        self.request_and_wait(PoolRequest::Flush)?;
        Ok(info.reach)
    }
}

impl<'a> ParentCopier<'a> {
    fn new(open: &'a OpenPool, parent: &'a ParentImage) -> Result<Self, Error> {
        let (regions, clock) = (&open.regions, &open.clock);
        let store = GrowablePoolPageIo::open(open, COPY_BLOCKS)?;
        let parent = BlockingPageIo::open_with_pages_max(
            regions,
            clock,
            &*parent.opened.medium,
            &parent.geometry,
            COPY_BLOCKS,
        )?;
        let pages = vec![0; (COPY_BLOCKS * PAGE_BYTES) as usize];
        Ok(Self { store, parent, pages, copied: 0 })
    }

    /// Transfers blocks from the parent, or to the device.
    fn execute_transfer(&mut self, action: &DeviceAction) -> Result<TransferResult, IoStatus> {
        let (is_read, offset, at, blocks, is_summed) = match *action {
            DeviceAction::ReadParent { offset, block, blocks, .. } => {
                (true, offset, block, blocks, false)
            }
            DeviceAction::WriteData { offset, at, blocks, is_summed, .. } => {
                (false, offset, at, blocks, is_summed)
            }
            _ => return Err(IoStatus::INTERNAL_ERROR),
        };
        let page = PAGE_BYTES as usize;
        let index = |blocks: u64| usize::try_from(blocks).unwrap_or(usize::MAX);
        let range = index(offset).saturating_mul(page)..index(offset + blocks).saturating_mul(page);
        let pages = self.pages.get_mut(range).ok_or(IoStatus::INTERNAL_ERROR)?;
        let raw = if is_read { &mut self.parent } else { self.store.page_io_up_to(at + blocks)? };
        let step = raw.pages_max() as usize * page;
        for (at, part) in (at..).step_by(step / page).zip(pages.chunks_mut(step)) {
            match is_read {
                true => raw.read_run(at, part)?,
                false => raw.write_run(at, part)?,
            }
        }
        self.copied += if is_read { 0 } else { pages.len() as u64 };
        let pages = pages.as_chunks::<4096>().0.iter();
        Ok(match (is_read, is_summed) {
            (true, _) => TransferResult::Contents(pages.map(|page| page != &[0; 4096]).collect()),
            (false, true) => TransferResult::Sums(pages.map(block_checksum).collect()),
            (false, false) => TransferResult::Data,
        })
    }
}
