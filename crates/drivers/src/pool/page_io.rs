//! Blocking page I/O for creating, opening and checking pools. Not on the I/O path.

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;

use super::{OpenPool, PAGE_BYTES, PageGeometry};

/// An I/O channel to a device, and memory for some pages.
pub(super) struct BlockingPageIo<'a> {
    backend: Box<dyn IoChannel>,
    regions: &'a RegionTable,
    memory: Region,
    /// Number of pages in `memory`.
    pages: u32,
    geometry: PageGeometry,
    clock: Clock,
    /// How long the device may take for a request.
    pub(super) time_limit: Span,
    /// Whether a transfer has timed out. It may still complete, and its memory is not used again: all
    /// further requests fail.
    is_overdue: bool,
}

/// The same for an open pool, which may grow meanwhile.
pub(super) struct GrowablePoolPageIo<'a> {
    open: &'a OpenPool,
    raw: BlockingPageIo<'a>,
    /// End of the pool when the channel was opened.
    end: u64,
}

impl<'a> GrowablePoolPageIo<'a> {
    pub(super) fn open(open: &'a OpenPool, pages: u32) -> Result<Self, Error> {
        let pool_devices = open.lock_pool_devices();
        let raw = BlockingPageIo::open_with_pages_max(
            &open.regions,
            &open.clock,
            &*pool_devices.medium,
            &pool_devices.geometry,
            pages,
        )?;
        let end = open.shared.lock().store.uncommitted_devices().blocks();
        Ok(Self { open, raw, end })
    }

    /// A channel that reaches up to block `end`.
    pub(super) fn page_io_up_to(&mut self, end: u64) -> Result<&mut BlockingPageIo<'a>, IoStatus> {
        if end > self.end {
            let again = Self::open(self.open, self.raw.pages);
            *self = again.map_err(|_| IoStatus::INTERNAL_ERROR)?;
        }
        Ok(&mut self.raw)
    }
}

/// Maximum time of one transfer, and so for all of them if it answers nothing.
const TIME_LIMIT: Span = Span::from_secs(30);

impl<'a> BlockingPageIo<'a> {
    pub(super) fn open(
        regions: &'a RegionTable,
        clock: &Clock,
        medium: &dyn BlockDevice,
        geometry: &PageGeometry,
    ) -> Result<Self, Error> {
        Self::open_with_pages_max(regions, clock, medium, geometry, 1)
    }

    /// Opens a channel for up to `pages` pages per transfer, within the limit of the device.
    pub(super) fn open_with_pages_max(
        regions: &'a RegionTable,
        clock: &Clock,
        medium: &dyn BlockDevice,
        geometry: &PageGeometry,
        pages: u32,
    ) -> Result<Self, Error> {
        let pages = pages.min(geometry.request_pages);
        let memory = regions.allocate_region((pages * PAGE_BYTES) as usize);
        let memory = memory.map_err(Error::environment)?;
        let (geometry, clock) = (*geometry, *clock);
        let backend = medium.channel()?;
        let (time_limit, is_overdue) = (TIME_LIMIT, false);
        Ok(Self { backend, regions, memory, pages, geometry, clock, time_limit, is_overdue })
    }

    /// Maximum number of pages per transfer.
    pub(super) const fn pages_max(&self) -> u32 {
        self.pages
    }

    /// Reads as many pages as `bytes` holds.
    pub(super) fn read_run(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), IoStatus> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let segment = self.memory.segment().slice(0, len).ok_or(IoStatus::DATA_TRANSFER_ERROR)?;
        self.run_request(Operation::Read, at, segment)?;
        self.regions.load(segment, bytes).map_err(|_| IoStatus::DATA_TRANSFER_ERROR)
    }

    /// Reads a page.
    pub(super) fn read(&mut self, at: u64, page: &mut [u8; 4096]) -> Result<(), IoStatus> {
        self.read_run(at, page)
    }

    /// Writes pages, at most [`pages_max`](Self::pages_max).
    pub(super) fn write_run(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoStatus> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let segment = self.memory.segment().slice(0, len).ok_or(IoStatus::DATA_TRANSFER_ERROR)?;
        self.regions.store(segment, bytes).map_err(|_| IoStatus::DATA_TRANSFER_ERROR)?;
        self.run_request(Operation::Write, at, segment)
    }

    /// Writes a page.
    pub(super) fn write(&mut self, at: u64, page: &[u8; 4096]) -> Result<(), IoStatus> {
        self.write_run(at, page)
    }

    /// Flushes.
    pub(super) fn flush(&mut self) -> Result<(), IoStatus> {
        self.run_request(Operation::Flush, 0, Segment::default())
    }

    fn run_request(
        &mut self,
        operation: Operation,
        at: u64,
        segment: Segment,
    ) -> Result<(), IoStatus> {
        if self.is_overdue {
            return Err(IoStatus::ABORTED);
        }
        let moves = operation != Operation::Flush;
        let request = Request {
            lba: at * self.geometry.blocks_in_page,
            blocks: segment.len_bytes / self.geometry.block_size,
            segment_count: u16::from(moves),
            operation,
            flags: RequestFlags::NONE,
            ..Request::PLACEHOLDER
        };
        let until = self.clock.now().after(self.time_limit);
        let mut completions = CompletionBatch::with_capacity(1);
        let mut taken = false;
        loop {
            let now: Instant = self.clock.now();
            taken = taken || self.backend.submit(now, &[request], &[segment]) == 1;
            self.backend.flush_submissions();
            self.backend.poll(now, &mut completions);
            if let [completion] = completions.as_slice() {
                let status = completion.status;
                return if status.is_success() { Ok(()) } else { Err(status) };
            }
            if now > until {
                self.is_overdue = true;
                return Err(IoStatus::ABORTED);
            }
            std::hint::spin_loop();
        }
    }
}
