//! The load of a thread that is moved: a poller that knows what it has in flight, and what must come
//! back.
//!
//! ```text
//!   attach ──▶ a few single I/Os, far enough apart to be slept for ──▶ 128 in flight, all the time
//!     ▲                                                                 │ told to leave
//!     └──── another reactor ◀── let go, with or without I/Os in flight ─┘
//! ```

use std::sync::mpsc::Sender;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Random,
    Request, RequestFlags, Segment, Span,
};
use tenmil_dma::RegionTable;
use tenmil_reactor::{Context, DetachReason, PollResult, Poller, ReactorId};

/// I/Os in flight under full load.
pub(crate) const DEPTH: usize = 128;
/// Bytes that each moves.
pub(crate) const BUFFER_BYTES: u32 = 4096;

/// What becomes of I/Os in flight when their thread is to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MigrationMode {
    /// They go along: a queue pair belongs to its light thread and to no OS thread.
    Carry,
    /// They are waited for.
    Drain,
}

/// What the load tells the test.
pub(crate) enum LoadReport {
    /// It has had 128 I/Os in flight for a while, on the reactor to which it has come.
    Loaded,
    /// It was told to stop, and everything has been answered.
    Drained(LoadTotals),
    /// It panicked.
    Panicked(String),
}

/// What it has counted.
#[derive(Debug, Default)]
pub(crate) struct LoadTotals {
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Reads that have brought what was written before.
    pub(crate) verified: u64,
    /// I/Os that were submitted on one reactor and answered on another.
    pub(crate) carried: u64,
    /// I/Os in flight each time it was first asked to let go.
    pub(crate) loads_left: Vec<usize>,
    /// Times that each reactor has gone to sleep with an I/O in flight, as far as this could see.
    pub(crate) sleeps: [u64; 2],
    pub(crate) latest: Span,
}

pub(crate) struct MigratingLoad {
    queue: Box<dyn IoChannel>,
    memory: RegionTable,
    /// By slot, as the slots are.
    buffers: Vec<Segment>,
    slots: [LoadSlot; DEPTH],
    in_flight: usize,
    completions: CompletionBatch,
    stage: LoadStage,
    travel: MigrationMode,
    is_leaving: bool,
    home: ReactorId,
    random: Random,
    tell: Sender<LoadReport>,
    tally: LoadTotals,
}

/// Some blocks of its own, which are written and read in turn.
#[derive(Clone, Copy)]
struct LoadSlot {
    pending: Option<PendingIo>,
    /// How often its blocks have been written.
    version: u64,
    /// The next I/O reads what was written last.
    reads_next: bool,
}

#[derive(Clone, Copy)]
struct PendingIo {
    token: u64,
    operation: Operation,
    begun: Instant,
    home: ReactorId,
}

#[derive(Clone, Copy)]
enum LoadStage {
    /// So many single I/Os are left, and the next one begins then.
    Single { left: u32, at: Instant },
    /// So many answers have come under full load.
    Full { completed: usize },
    /// Nothing new is begun.
    Stopping,
    /// All is told.
    Over,
}

/// Single I/Os after each move.
const SINGLE: u32 = 4;
/// The longest gap between them: longer than anybody looks for work before a sleep.
const GAP_MAX: Span = Span::from_ms(2);
/// Answers under full load before it may be moved.
const FULL: usize = 2 * DEPTH;

impl MigratingLoad {
    pub(crate) fn new(
        queue: Box<dyn IoChannel>,
        memory: RegionTable,
        buffers: Vec<Segment>,
        travel: MigrationMode,
        tell: Sender<LoadReport>,
    ) -> Self {
        Self {
            queue,
            memory,
            buffers,
            slots: [LoadSlot { pending: None, version: 0, reads_next: false }; DEPTH],
            in_flight: 0,
            completions: CompletionBatch::with_capacity(DEPTH),
            stage: LoadStage::Single { left: SINGLE, at: Instant::default() },
            travel,
            is_leaving: false,
            home: ReactorId(0),
            random: Random::new(11),
            tell,
            tally: LoadTotals::default(),
        }
    }

    /// Writes or reads a slot's blocks.
    fn submit(&mut self, now: Instant, index: usize) {
        let slot = &mut self.slots[index];
        let operation = if slot.reads_next { Operation::Read } else { Operation::Write };
        if operation == Operation::Write {
            slot.version += 1;
            self.memory.store(self.buffers[index], &content(index, slot.version)).unwrap();
        } else {
            self.memory.fill(self.buffers[index], 0xee).unwrap();
        }
        slot.reads_next = !slot.reads_next;
        let token = self.tally.submitted << 8 | index as u64;
        slot.pending = Some(PendingIo { token, operation, begun: now, home: self.home });
        let block_size = self.queue.limits().block_size;
        let blocks = BUFFER_BYTES / block_size;
        let request = Request {
            token,
            lba: index as u64 * u64::from(blocks),
            operand: 0,
            blocks,
            segment_first: u32::try_from(index).unwrap(),
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let taken = self.queue.submit(now, &[request], &self.buffers);
        assert_eq!(taken, 1, "refused with {} in flight", self.in_flight);
        self.in_flight += 1;
        self.tally.submitted += 1;
    }

    /// Takes what has been answered. Returns how many that were.
    fn poll_completions(&mut self, now: Instant) -> usize {
        let count = self.queue.poll(now, &mut self.completions);
        let mut completions =
            std::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
        completions.drain().for_each(|completion| self.completion(now, completion));
        self.completions = completions;
        count
    }

    fn completion(&mut self, now: Instant, completion: IoCompletion) {
        let index = usize::try_from(completion.token & 0xff).unwrap();
        let slot = &mut self.slots[index];
        let pending = slot.pending.take().unwrap_or_else(|| panic!("{completion:?} came twice"));
        assert_eq!(completion.token, pending.token, "slot {index} was answered for another I/O");
        assert_eq!(completion.status, IoStatus::SUCCESS, "{completion:?}");
        if pending.operation == Operation::Read {
            let mut found = [0; BUFFER_BYTES as usize];
            self.memory.load(self.buffers[index], &mut found).unwrap();
            assert!(found == content(index, slot.version), "slot {index} read something else");
            self.tally.verified += 1;
        }
        self.in_flight -= 1;
        self.tally.completed += 1;
        self.tally.carried += u64::from(pending.home != self.home);
        self.tally.latest = self.tally.latest.max(now.since(pending.begun));
    }

    /// Begins what is due.
    fn submit_due_ios(&mut self, now: Instant, completed: usize) {
        match &mut self.stage {
            LoadStage::Single { .. } if self.in_flight > 0 => {}
            LoadStage::Single { left: 0, .. } => {
                self.stage = LoadStage::Full { completed: 0 };
                (0..DEPTH).for_each(|index| self.submit(now, index));
            }
            LoadStage::Single { left, at } => {
                if now >= *at {
                    *left -= 1;
                    *at = now.after(Span { ns: self.random.below(GAP_MAX.ns) });
                    let index = self.random.below(DEPTH as u64);
                    self.submit(now, usize::try_from(index).unwrap());
                }
            }
            LoadStage::Full { completed: so_far } => {
                let before = *so_far;
                *so_far += completed;
                if before < FULL && *so_far >= FULL {
                    self.tell.send(LoadReport::Loaded).unwrap();
                }
                let is_free = |slot: &LoadSlot| slot.pending.is_none();
                while let Some(index) = self.slots.iter().position(is_free) {
                    self.submit(now, index);
                }
            }
            LoadStage::Stopping | LoadStage::Over => {}
        }
    }
}

impl Poller for MigratingLoad {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        self.home = context.reactor_id();
        let (completed, submitted) = (self.poll_completions(now), self.tally.submitted);
        if !self.is_leaving {
            self.submit_due_ios(now, completed);
        }
        if matches!(self.stage, LoadStage::Stopping) && self.in_flight == 0 {
            self.stage = LoadStage::Over;
            self.tell.send(LoadReport::Drained(std::mem::take(&mut self.tally))).unwrap();
            context.request_thread_end();
            return PollResult::Busy;
        }
        PollResult::from_count(completed + usize::from(self.tally.submitted > submitted))
    }

    fn flush(&mut self) {
        self.queue.flush_submissions();
    }

    fn handle_message(&mut self, _: [u64; 2], _: &mut Context<'_>) {
        self.stage = LoadStage::Stopping;
    }

    fn arm(&mut self) -> PollResult {
        // In any case: an old signal that was not cleared would end every sleep at once.
        let is_behind = self.queue.arm();
        self.tally.sleeps[self.home.0 as usize] += u64::from(self.in_flight > 0 && !is_behind);
        PollResult::from_count(usize::from(self.in_flight > 0 && is_behind))
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_at(&self) -> Instant {
        match self.stage {
            LoadStage::Single { at, .. } if self.in_flight == 0 => at,
            _ => self.queue.wake_at(),
        }
    }

    fn try_detach(&mut self, _: DetachReason) -> bool {
        if matches!(self.stage, LoadStage::Full { .. }) && !self.is_leaving {
            self.tally.loads_left.push(self.in_flight);
        }
        self.is_leaving = true;
        self.travel == MigrationMode::Carry || self.in_flight == 0
    }

    fn attach(&mut self) {
        self.is_leaving = false;
        self.stage = LoadStage::Single { left: SINGLE, at: Instant::default() };
    }
}

/// What a slot's blocks hold after they have been written so often.
fn content(index: usize, version: u64) -> [u8; BUFFER_BYTES as usize] {
    let mut random = Random::new((index as u64) << 48 | version);
    let mut bytes = [0; BUFFER_BYTES as usize];
    bytes.as_chunks_mut().0.iter_mut().for_each(|word| *word = random.next_u64().to_le_bytes());
    bytes
}
