//! Pages of a device, read and written by a caller who waits: to make a store, to open one, to check
//! one. Nothing here is on the way of an I/O.

use base::{
    Answers, Backend, Flags, Instant, Medium, Memory, Operation, Outcome, Request, Segment, Span,
};
use dma::{Region, Regions};
use host::Clock;

use super::{PAGE_BYTES, Shape};

/// A channel to a device, and memory for one page.
pub(super) struct Raw<'a> {
    backend: Box<dyn Backend>,
    regions: &'a Regions,
    memory: Region,
    shape: Shape,
    clock: Clock,
}

/// How long a device may take for a page.
const PATIENCE: Span = Span::from_secs(30);

impl<'a> Raw<'a> {
    pub(super) fn open(
        regions: &'a Regions,
        clock: &Clock,
        medium: &dyn Medium,
        shape: &Shape,
    ) -> Result<Self, String> {
        let memory = regions.allocate(PAGE_BYTES as usize).map_err(|error| error.to_string())?;
        let (shape, clock) = (*shape, *clock);
        Ok(Self { backend: medium.channel()?, regions, memory, shape, clock })
    }

    /// What is there.
    pub(super) fn read(&mut self, at: u64, page: &mut [u8; 4096]) -> Result<(), Outcome> {
        self.run(Operation::Read, at)?;
        let segment = self.segment();
        self.regions.load(segment, page).map_err(|_| Outcome::DATA_TRANSFER_ERROR)
    }

    /// Writes a page.
    pub(super) fn write(&mut self, at: u64, page: &[u8; 4096]) -> Result<(), Outcome> {
        let segment = self.segment();
        self.regions.store(segment, page).map_err(|_| Outcome::DATA_TRANSFER_ERROR)?;
        self.run(Operation::Write, at)
    }

    /// Makes what was written survive.
    pub(super) fn flush(&mut self) -> Result<(), Outcome> {
        self.run(Operation::Flush, 0)
    }

    fn segment(&self) -> Segment {
        self.memory.segment().slice(0, PAGE_BYTES).unwrap_or_default()
    }

    fn run(&mut self, operation: Operation, at: u64) -> Result<(), Outcome> {
        let moves = operation != Operation::Flush;
        let pages = if moves { self.shape.blocks_in_page } else { 0 };
        let request = Request {
            lba: at * self.shape.blocks_in_page,
            blocks: u32::try_from(pages).unwrap_or(0),
            segment_count: u16::from(moves),
            operation,
            flags: Flags::NONE,
            ..Request::NOTHING
        };
        let segment = self.segment();
        let until = self.clock.now().after(PATIENCE);
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
                return Err(Outcome::ABORTED);
            }
            std::hint::spin_loop();
        }
    }
}
