//! The thread that reads and writes what a store needs for itself: metadata, and flushes.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{
    Answers, Backend, Flags, Instant, Medium, Memory, Operation, Outcome, Request, Segment, Span,
    WakeSource,
};
use dma::{Region, Regions};
use host::{Clock, Sleeper};
use volume::{Action, Ask, End};

use super::absent::Absent;
use super::reserved::Reserved;
use super::room::{self, RoomNews};
use super::shared::{Desk, Note, Shared};
use super::stops::StopNews;
use super::{PAGE_BYTES, Shape};

/// The owner of an open store.
pub(super) struct Owner {
    /// The device that the store is on.
    device: String,
    pub(super) shared: Arc<Shared>,
    desk: Arc<Desk>,
    backend: Box<dyn Backend>,
    shape: Shape,
    regions: Regions,
    memory: Region,
    jobs: Box<[Job]>,
    /// Free places for one page, and for many.
    small: Vec<u32>,
    large: Vec<u32>,
    waiting: VecDeque<Action>,
    /// What waits for the device to take it.
    queue: VecDeque<Request>,
    /// The segments of each place, one for each part.
    table: Box<[Segment]>,
    answers: Answers,
    notes: VecDeque<Note>,
    /// Devices have come that nobody listens to yet.
    has_more: bool,
    /// How often it was told that the store has stopped, and whether it was told that it goes on.
    told_stops: u64,
    told_stop: bool,
    /// When the next recovery is begun, while the store does not go on.
    recovers_at: Instant,
    /// What is released once the superblocks name no owner.
    reserved: Option<Arc<Reserved>>,
}

/// What is done in a place.
#[derive(Clone, Copy, Debug)]
struct Job {
    io: u64,
    /// Whether a page is read, whose bytes the store wants.
    reads: bool,
    /// Requests that have not been answered.
    left: u32,
    outcome: Outcome,
    /// What it is, to do it once more: the operation, where, and how many bytes.
    work: (Operation, u64, u32),
    /// How often it has been tried again, and when it is the next time.
    tries: u32,
    again_at: Option<Instant>,
}

impl Job {
    const NONE: Self = Self {
        io: 0,
        reads: false,
        left: 0,
        outcome: Outcome::SUCCESS,
        work: (Operation::Flush, 0, 0),
        tries: 0,
        again_at: None,
    };
}

/// Places for one page.
const SMALL: u32 = 32;
/// Places for many.
const LARGE: u32 = 8;
/// Pages in a place for many, as many as a store writes at once.
const LARGE_PAGES: u32 = 64;
/// Bytes of the superblocks at the start.
const SLOTS_BYTES: u32 = 2 * PAGE_BYTES;
const PAGE: usize = PAGE_BYTES as usize;
/// Answers that are taken at once.
const ANSWERS_MAX: usize = 64;
/// How long the owner sleeps at most, and while it waits for reads to end before a recovery.
const SLEEP_MAX: Span = Span::from_secs(1);
const SLEEP_RECOVERING: Span = Span::from_ms(2);
/// How often what failed on the way is tried again, and how long after. The device has deadlines of its own.
const TRIES_MAX: u32 = 3;
const TRY_AGAIN_AFTER: Span = Span::from_ms(500);
/// How long after a recovery that came to nothing the next one begins.
const RECOVER_AFTER: Span = Span::from_secs(2);

impl Owner {
    pub(super) fn new(
        device: &str,
        shared: Arc<Shared>,
        (desk, backend): (Arc<Desk>, Box<dyn Backend>),
        shape: Shape,
        regions: &Regions,
    ) -> Result<Self, String> {
        let pages = SMALL + LARGE * LARGE_PAGES;
        let memory = regions.allocate((pages * PAGE_BYTES) as usize);
        let places = (SMALL + LARGE) as usize;
        Ok(Self {
            device: device.into(),
            desk,
            shared,
            backend,
            shape,
            regions: regions.clone(),
            memory: memory.map_err(|error| error.to_string())?,
            jobs: vec![Job::NONE; places].into(),
            small: (0..SMALL).rev().collect(),
            large: (SMALL..SMALL + LARGE).rev().collect(),
            waiting: VecDeque::new(),
            queue: VecDeque::new(),
            table: vec![Segment::default(); places * LARGE_PAGES as usize].into(),
            answers: Answers::with_capacity(ANSWERS_MAX),
            notes: VecDeque::new(),
            has_more: false,
            told_stops: 0,
            told_stop: false,
            recovers_at: Instant::default(),
            reserved: None,
        })
    }

    /// With what is released once the superblocks name no owner.
    pub(super) fn with_reserved(self, reserved: &Arc<Reserved>) -> Self {
        Self { reserved: Some(Arc::clone(reserved)), ..self }
    }

    /// Works until it is told to stop; then has everything that was written survive, unless that takes
    /// too long, and ends.
    pub(super) fn run(
        mut self,
        stop: &host::Stop,
        clock: &Clock,
        sleeper: &mut Sleeper,
        closing_max: Span,
    ) {
        if let WakeSource::Descriptor(descriptor) = self.backend.wake_source() {
            // Without it the sleeps are short.
            let _ = sleeper.sources().add(descriptor, 0);
        }
        while !stop.is_stopped() {
            if !self.turn(clock.now()) {
                self.sleep(stop, clock, sleeper);
            }
            if std::mem::take(&mut self.has_more)
                && let WakeSource::Descriptor(descriptor) = self.backend.wake_source()
            {
                // Without it the sleeps are short.
                let _ = sleeper.sources().add(descriptor, 0);
            }
        }
        let until = clock.now().after(closing_max);
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_to_tell();
        state.ask(&self.desk, 0, Ask::Release);
        shared.sort(&mut state);
        drop(state);
        while self.notes.is_empty() && clock.now() < until {
            self.turn(clock.now());
        }
        let is_released = matches!(self.notes.front(), Some(Note::Ended(_, Ok(_))));
        if let Some(reserved) = self.reserved.take_if(|_| is_released) {
            reserved.release();
        }
        if let WakeSource::Descriptor(descriptor) = self.backend.wake_source() {
            let _ = sleeper.sources().remove(descriptor);
        }
        shared.leave(&self.desk, core::iter::empty());
    }

    /// Does what there is to do. False if that was nothing.
    fn turn(&mut self, now: Instant) -> bool {
        if let Some(news) = self.look_around() {
            news.tell();
        }
        self.recover(now);
        self.try_again(now);
        self.reach_further();
        let mut did = false;
        while let Some(action) = self.waiting.pop_front() {
            if !self.begin(&action) {
                self.waiting.push_front(action);
                break;
            }
            did = true;
        }
        if !self.queue.is_empty() {
            let taken = self.backend.submit(now, self.queue.make_contiguous(), &self.table);
            self.queue.drain(..taken);
            did |= taken > 0;
        }
        self.backend.flush();
        self.backend.poll(now, &mut self.answers);
        did | self.end_jobs(now)
    }

    /// Takes what is to be done. Returns how full the store is, if that is news: looked at here, once a
    /// second at least, and not on the way of an I/O.
    fn look_around(&mut self) -> Option<RoomNews> {
        let mut state = self.shared.lock();
        state.take_pages(&mut self.waiting);
        state.take_notes(&self.desk, &mut self.notes);
        let (stops, stopped) = (state.store.losses(), state.store.is_stopped());
        let is_news = stops > self.told_stops || (self.told_stop && !stopped);
        if let Some(why) = state.store.last_stop().filter(|_| is_news) {
            let recovered = (!stopped).then(|| state.store.generation());
            let (device, store, why) = (self.device.clone(), state.store.name(), why.clone());
            drop(state);
            let news = StopNews { device, store, why, recovered };
            if stops > self.told_stops && recovered.is_some() && !self.told_stop {
                // It went on before anybody could be told that it had stopped.
                StopNews { recovered: None, ..news.clone() }.tell();
            }
            (self.told_stops, self.told_stop) = (stops, stopped);
            news.tell();
            return None;
        }
        let notice = room::is_heard().then(|| state.store.next_notice())??;
        Some(RoomNews::new(&self.device, state.store.name(), &notice))
    }

    /// While the store does not go on, has it try now and then; and tells it of reads that have ended.
    fn recover(&mut self, now: Instant) {
        if !self.told_stop {
            self.recovers_at = now.after(RECOVER_AFTER);
            return;
        }
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_to_tell();
        if !state.store.is_recovering() && now >= self.recovers_at {
            self.recovers_at = now.after(RECOVER_AFTER);
            state.store.recover();
        }
        shared.sort(&mut state);
    }

    /// Does once more what failed on the way a while ago.
    fn try_again(&mut self, now: Instant) {
        for place in 0..SMALL + LARGE {
            let job = &mut self.jobs[place as usize];
            if job.again_at.is_none_or(|at| at > now) {
                continue;
            }
            (job.again_at, job.outcome, job.tries) = (None, Outcome::SUCCESS, job.tries + 1);
            let (operation, at, len) = job.work;
            if operation == Operation::Flush {
                self.push(place, operation, 0, Segment::default());
            } else {
                let memory = self.memory(place).slice(0, len).unwrap_or_default();
                self.push_parts(place, operation, at, memory);
            }
        }
    }

    /// If there are more devices, goes to them, too. What is told otherwise is the end of the last flush,
    /// and stays.
    fn reach_further(&mut self) {
        for note in std::mem::take(&mut self.notes) {
            let Note::More(more) = note else {
                self.notes.push_back(note);
                continue;
            };
            let Ok(none) = Absent(self.backend.limits().clone()).channel() else { continue };
            let below = std::mem::replace(&mut self.backend, none);
            let owed: usize = self.jobs.iter().map(|job| job.left as usize).sum();
            self.shape.request_pages = self.shape.request_pages.min(more.request_pages);
            self.backend = more.behind(below, owed - self.queue.len());
            self.has_more = true;
        }
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self, stop: &host::Stop, clock: &Clock, sleeper: &mut Sleeper) {
        let under_way = self.jobs.iter().any(|job| job.left > 0);
        let is_silent = matches!(self.backend.wake_source(), WakeSource::Nothing);
        if under_way && is_silent {
            return host::thread::give_way();
        }
        sleeper.announce();
        let stuck = self.waiting.len();
        self.shared.lock().take_pages(&mut self.waiting);
        let has_work = self.waiting.len() > stuck || !self.queue.is_empty() || stop.is_stopped();
        let busy_below = !is_silent && self.backend.arm();
        if has_work || busy_below {
            sleeper.cancel();
        } else {
            let most = if self.shared.lock().store.is_recovering() {
                SLEEP_RECOVERING
            } else if self.jobs.iter().any(|job| job.again_at.is_some()) {
                TRY_AGAIN_AFTER
            } else {
                SLEEP_MAX
            };
            let left = self.backend.wake_at().since(clock.now()).min(most);
            sleeper.block(left, &mut Vec::new());
        }
        self.backend.disarm();
    }

    /// Begins to carry something out. False if there is no place for it.
    fn begin(&mut self, action: &Action) -> bool {
        let (io, at, bytes, operation) = match action {
            Action::ReadSlots { io } => return self.begin_slots(*io),
            Action::ReadPage { io, at } => (*io, *at, &[][..], Operation::Read),
            Action::WritePages { io, at, bytes } => (*io, *at, &bytes[..], Operation::Write),
            Action::Flush { io } => (*io, 0, &[][..], Operation::Flush),
            // Those go to whoever asked.
            Action::ReadData { .. }
            | Action::ReadParent { .. }
            | Action::WriteData { .. }
            | Action::Zero { .. } => return true,
        };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).max(PAGE_BYTES);
        let free = if len > PAGE_BYTES { &mut self.large } else { &mut self.small };
        let Some(place) = free.pop() else { return false };
        let memory = self.memory(place).slice(0, len).unwrap_or_default();
        let reads = operation == Operation::Read;
        let work = (operation, at, len);
        self.jobs[place as usize] = Job { io, reads, work, ..Job::NONE };
        if operation == Operation::Flush {
            self.push(place, operation, 0, Segment::default());
        } else if operation == Operation::Write && self.regions.store(memory, bytes).is_err() {
            let job = &mut self.jobs[place as usize];
            job.outcome = Outcome::DATA_TRANSFER_ERROR;
            self.end(place);
        } else {
            self.push_parts(place, operation, at, memory);
        }
        true
    }

    /// Begins to read the superblocks at the start.
    fn begin_slots(&mut self, io: u64) -> bool {
        let Some(place) = self.large.pop() else { return false };
        let memory = self.memory(place).slice(0, SLOTS_BYTES).unwrap_or_default();
        let work = (Operation::Read, 0, SLOTS_BYTES);
        self.jobs[place as usize] = Job { io, reads: true, work, ..Job::NONE };
        self.push_parts(place, Operation::Read, 0, memory);
        true
    }

    /// Cuts a transfer into what the device takes at once.
    fn push_parts(&mut self, place: u32, operation: Operation, at: u64, memory: Segment) {
        let step = self.shape.request_pages.min(LARGE_PAGES) * PAGE_BYTES;
        let mut done = 0;
        while done < memory.len_bytes {
            let len = step.min(memory.len_bytes - done);
            let part = memory.slice(done, len).unwrap_or_default();
            self.push(place, operation, at + u64::from(done / PAGE_BYTES), part);
            done += len;
        }
    }

    fn push(&mut self, place: u32, operation: Operation, at: u64, memory: Segment) {
        let job = &mut self.jobs[place as usize];
        let segment_first = place * LARGE_PAGES + job.left;
        job.left += 1;
        self.table[segment_first as usize] = memory;
        let moves = operation != Operation::Flush;
        self.queue.push_back(Request {
            token: place.into(),
            lba: at * self.shape.blocks_in_page,
            operand: 0,
            segment_first,
            blocks: memory.len_bytes / self.shape.block_size,
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags: Flags::NONE,
        });
    }

    /// The memory of a place.
    fn memory(&self, place: u32) -> Segment {
        let (first, pages) = match place.checked_sub(SMALL) {
            None => (place, 1),
            Some(large) => (SMALL + large * LARGE_PAGES, LARGE_PAGES),
        };
        let (at, len_bytes) = (first * PAGE_BYTES, pages * PAGE_BYTES);
        self.memory.segment().slice(at, len_bytes).unwrap_or_default()
    }

    /// Takes the answers of the device. False if there are none.
    fn end_jobs(&mut self, now: Instant) -> bool {
        let mut ended = Vec::new();
        for answer in self.answers.drain() {
            let Ok(place) = u32::try_from(answer.token) else { continue };
            let job = &mut self.jobs[place as usize];
            job.left -= 1;
            if !answer.outcome.is_success() {
                job.outcome = answer.outcome;
            }
            if job.left == 0 && may_be_repeated(job) {
                job.again_at = Some(now.after(TRY_AGAIN_AFTER));
            } else if job.left == 0 {
                ended.push(place);
            }
        }
        ended.iter().for_each(|place| self.end(*place));
        !ended.is_empty()
    }

    /// Tells the store how something has ended, and frees its place.
    fn end(&mut self, place: u32) {
        let Job { io, reads, outcome, work, .. } = self.jobs[place as usize];
        // The store reads again what is durable, and its channels hear that writes may be lost.
        let is_loss = work.0 == Operation::Flush && outcome == Outcome::WRITE_FAULT;
        let unread = is_loss.then(|| self.backend.acknowledge_losses()).and_then(Result::err);
        let (mut page, mut slots) = ([0; PAGE], [[0; PAGE]; 2]);
        // Pages are read into places for one; what is read into others are superblocks.
        let read = if place < SMALL { &mut page[..] } else { slots.as_flattened_mut() };
        let len_bytes = u32::try_from(read.len()).unwrap_or(u32::MAX);
        let memory = self.memory(place).slice(0, len_bytes).unwrap_or_default();
        let end = if !outcome.is_success() {
            End::Failed(outcome)
        } else if !reads {
            End::Done
        } else if self.regions.load(memory, read).is_err() {
            End::Failed(Outcome::DATA_TRANSFER_ERROR)
        } else if place < SMALL {
            End::Read(&page)
        } else {
            End::Slots(&slots)
        };
        if place < SMALL {
            self.small.push(place)
        } else {
            self.large.push(place)
        }
        let mut state = self.shared.lock_to_tell();
        state.store.complete(io, end);
        if let Some(why) = unread {
            state.store.refuse_recovery(why);
        }
        self.shared.sort(&mut state);
    }
}

/// Whether it failed by something on the way to the device, which may be over, and so nothing is known to be
/// lost: any status of the path, and of a flush all but Write Fault, which tells of lost writes.
fn may_be_repeated(job: &Job) -> bool {
    let status = job.outcome.0 & 0x7ff;
    let is_path =
        status >> 8 == 3 || [Outcome::INTERRUPTED.0, Outcome::ABORTED.0].contains(&status);
    let is_flush = job.work.0 == Operation::Flush && job.outcome != Outcome::WRITE_FAULT;
    !job.outcome.is_success() && job.tries < TRIES_MAX && (is_path || is_flush)
}
