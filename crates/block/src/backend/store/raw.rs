//! Pages of a device, read and written by a caller who waits: to make a store, to open one, to check
//! one. Nothing here is on the way of an I/O.

use base::{
    Answers, Backend, Flags, Instant, Medium, Memory, Operation, Outcome, Request, Segment, Span,
};
use dma::{Region, Regions};
use host::Clock;

use super::{OpenStore, PAGE_BYTES, Shape};

/// A channel to a device, and memory for some pages.
pub(super) struct Raw<'a> {
    backend: Box<dyn Backend>,
    regions: &'a Regions,
    memory: Region,
    /// Pages that there is memory for.
    pages: u32,
    shape: Shape,
    clock: Clock,
    /// How long the device may take for a request.
    pub(super) patience: Span,
    /// Whether it has not answered one in time. It may still answer, and its memory is not used again: all
    /// further requests fail.
    is_overdue: bool,
}

/// The same for an open store, which may grow meanwhile.
pub(super) struct StorePages<'a> {
    open: &'a OpenStore,
    raw: Raw<'a>,
    /// Where the store ended when that was opened.
    end: u64,
}

impl<'a> StorePages<'a> {
    pub(super) fn open(open: &'a OpenStore, pages: u32) -> Result<Self, String> {
        let ground = open.ground();
        let raw = Raw::wide(&open.regions, &open.clock, &*ground.medium, &ground.shape, pages)?;
        let end = open.shared.lock().store.next_devices().blocks();
        Ok(Self { open, raw, end })
    }

    /// The pages up to some block.
    pub(super) fn up_to(&mut self, end: u64) -> Result<&mut Raw<'a>, Outcome> {
        if end > self.end {
            let again = Self::open(self.open, self.raw.pages);
            *self = again.map_err(|_| Outcome::INTERNAL_ERROR)?;
        }
        Ok(&mut self.raw)
    }
}

/// How long a device may take for a page, and so for all of them if it answers nothing.
const PATIENCE: Span = Span::from_secs(30);

impl<'a> Raw<'a> {
    pub(super) fn open(
        regions: &'a Regions,
        clock: &Clock,
        medium: &dyn Medium,
        shape: &Shape,
    ) -> Result<Self, String> {
        Self::wide(regions, clock, medium, shape, 1)
    }

    /// One that reads or writes up to so many pages at once, as far as the device does.
    pub(super) fn wide(
        regions: &'a Regions,
        clock: &Clock,
        medium: &dyn Medium,
        shape: &Shape,
        pages: u32,
    ) -> Result<Self, String> {
        let pages = pages.min(shape.request_pages);
        let memory = regions.allocate((pages * PAGE_BYTES) as usize);
        let memory = memory.map_err(|error| error.to_string())?;
        let (shape, clock) = (*shape, *clock);
        let backend = medium.channel()?;
        let (patience, is_overdue) = (PATIENCE, false);
        Ok(Self { backend, regions, memory, pages, shape, clock, patience, is_overdue })
    }

    /// Pages that it reads or writes at once at most.
    pub(super) const fn pages_max(&self) -> u32 {
        self.pages
    }

    /// What is there, in as many pages as `bytes` has room for.
    pub(super) fn read_run(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), Outcome> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let segment = self.memory.segment().slice(0, len).ok_or(Outcome::DATA_TRANSFER_ERROR)?;
        self.run(Operation::Read, at, segment)?;
        self.regions.load(segment, bytes).map_err(|_| Outcome::DATA_TRANSFER_ERROR)
    }

    /// What is there.
    pub(super) fn read(&mut self, at: u64, page: &mut [u8; 4096]) -> Result<(), Outcome> {
        self.read_run(at, page)
    }

    /// Writes pages, as many as it reads at once at most.
    pub(super) fn write_run(&mut self, at: u64, bytes: &[u8]) -> Result<(), Outcome> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let segment = self.memory.segment().slice(0, len).ok_or(Outcome::DATA_TRANSFER_ERROR)?;
        self.regions.store(segment, bytes).map_err(|_| Outcome::DATA_TRANSFER_ERROR)?;
        self.run(Operation::Write, at, segment)
    }

    /// Writes a page.
    pub(super) fn write(&mut self, at: u64, page: &[u8; 4096]) -> Result<(), Outcome> {
        self.write_run(at, page)
    }

    /// Makes what was written survive.
    pub(super) fn flush(&mut self) -> Result<(), Outcome> {
        self.run(Operation::Flush, 0, Segment::default())
    }

    fn run(&mut self, operation: Operation, at: u64, segment: Segment) -> Result<(), Outcome> {
        if self.is_overdue {
            return Err(Outcome::ABORTED);
        }
        let moves = operation != Operation::Flush;
        let request = Request {
            lba: at * self.shape.blocks_in_page,
            blocks: segment.len_bytes / self.shape.block_size,
            segment_count: u16::from(moves),
            operation,
            flags: Flags::NONE,
            ..Request::NOTHING
        };
        let until = self.clock.now().after(self.patience);
        let mut answers = Answers::with_capacity(1);
        let mut taken = false;
        loop {
            let now: Instant = self.clock.now();
            taken = taken || self.backend.submit(now, &[request], &[segment]) == 1;
            self.backend.flush();
            self.backend.poll(now, &mut answers);
            if let [answer] = answers.as_slice() {
                let outcome = answer.outcome;
                return if outcome.is_success() { Ok(()) } else { Err(outcome) };
            }
            if now > until {
                self.is_overdue = true;
                return Err(Outcome::ABORTED);
            }
            std::hint::spin_loop();
        }
    }
}
