//! Makes a volume thick: space for all of its blocks is reserved at once, and then allocated range by
//! range, while the volume is in use.
//!
//! First, the parent's blocks are copied, and blocks shared with a snapshot or a clone. Writes to the
//! range being copied wait; reads do not.

use std::sync::Arc;

use tenmil_base::{ErrorCategory, IoStatus};
use tenmil_volume::{DeviceAction, PoolRequest, PoolResponse, VolumeInfo};

use super::page_io::GrowablePoolPageIo;
use super::send_stream::ProgressFn;
use super::throttle::RateThrottle;
use super::{OpenPool, PAGE_BYTES, TransferResult};
use tenmil_base::Error;
use tenmil_block::Opener;

/// Result of making a volume thick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InflateResult {
    /// The volume.
    pub info: VolumeInfo,
    /// It was thick already; nothing was written.
    pub was_there: bool,
}

/// Blocks per copy step: 1 MiB.
const COPY_BLOCKS: u32 = 256;

/// Copies shared clusters.
struct ClusterCopier<'a> {
    store: GrowablePoolPageIo<'a>,
    pages: Vec<u8>,
    /// Bytes copied.
    copied: u64,
}

impl OpenPool {
    /// Makes a volume thick, or continues an interrupted inflate, or restores a reservation that a
    /// snapshot has used. Blocks are copied at most at `rate` bytes per second.
    ///
    /// # Errors
    ///
    /// If there is not enough space, in which case nothing is reserved; if there is no such volume, it is
    /// a snapshot or has checksums, blocks cannot be copied, or `watch` returns false.
    pub fn inflate(
        self: &Arc<Self>,
        opener: &Opener<'_>,
        name: &str,
        rate: Option<u64>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<InflateResult, Error> {
        self.copy_parent(opener, name, rate, watch)?;
        let before = self.volume_usage(name)?;
        let was_thick = self.find_volume(name)?.is_thick;
        let PoolResponse::Volume(info) =
            self.request_and_wait(PoolRequest::ReserveThick(name.into()))?
        else {
            return Err(self.pool_error(&tenmil_volume::PoolError::NoVolume(name.into())));
        };
        if was_thick && before.exclusive_blocks() == info.blocks {
            return Ok(InflateResult { info, was_there: true });
        }
        let machine = |problem: Error| {
            Error::new(
                ErrorCategory::Environment,
                format!("{}: inflate `{name}`: {problem}", self.name),
            )
        };
        let store = GrowablePoolPageIo::open(self, COPY_BLOCKS).map_err(machine)?;
        let pages = vec![0; (COPY_BLOCKS * PAGE_BYTES) as usize];
        let mut mover = ClusterCopier { store, pages, copied: 0 };
        let pace = RateThrottle { rate, clock: self.clock };
        let (volume, page) = (info.id, u64::from(PAGE_BYTES));
        let mut block = 0;
        while block < info.blocks {
            let (began, before) = (self.clock.now(), mover.copied);
            let own = PoolRequest::MakeExclusive { volume, block, blocks: COPY_BLOCKS.into() };
            match self.request_with_transfers(own, &mut |action| mover.execute_transfer(action))? {
                PoolResponse::Owned(to) if to > block => block = to,
                _ => return Err(machine(Error::environment("it made no progress, expected some"))),
            }
            let progress = (block.min(info.blocks) * page, info.blocks * page);
            let continues = &mut || watch(progress);
            if !(continues() && pace.sleep_to_rate(mover.copied - before, began, continues)) {
                return Err(machine(Error::environment("interrupted; repeat it to resume")));
            }
        }
        // Writes of clients may have allocated clusters meanwhile, for which nothing needs to be reserved
        // any more.
        self.request_and_wait(PoolRequest::ReserveThick(name.into()))?;
        self.request_and_wait(PoolRequest::Flush)?;
        Ok(InflateResult { info: self.find_volume(name)?, was_there: false })
    }
}

impl ClusterCopier<'_> {
    /// Transfers blocks from the device, or to it.
    fn execute_transfer(&mut self, action: &DeviceAction) -> Result<TransferResult, IoStatus> {
        let page = PAGE_BYTES as usize;
        let (is_read, offset, at, blocks) = match *action {
            DeviceAction::ReadData { offset, at, blocks, .. } => (true, offset, at, blocks),
            DeviceAction::WriteData { offset, at, blocks, .. } => (false, offset, at, blocks),
            _ => return Err(IoStatus::INTERNAL_ERROR),
        };
        let index = |blocks: u64| usize::try_from(blocks).unwrap_or(usize::MAX);
        let Some(pages) = self.pages.get_mut(index(offset) * page..index(offset + blocks) * page)
        else {
            return Err(IoStatus::INTERNAL_ERROR);
        };
        let raw = self.store.page_io_up_to(at + blocks)?;
        let step = raw.pages_max() as usize * page;
        for (at, part) in (at..).step_by(step / page).zip(pages.chunks_mut(step)) {
            match is_read {
                true => raw.read_run(at, part)?,
                false => raw.write_run(at, part)?,
            }
        }
        self.copied += if is_read { 0 } else { pages.len() as u64 };
        Ok(TransferResult::Data)
    }
}
