//! One thread's way to a volume.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{
    Answer, Answers, Backend, Instant, Limits, Memory, NoSuchMemory, Operation, Outcome, Request,
    Segment, WakeSource,
};
use dma::Regions;
use volume::format::BLOCKS_MAX;
use volume::{Action, Ask, StoreError, VolumeInfo};

use super::below::Below;
use super::bounce::Bounce;
use super::grow::More;
use super::known::{Known, slot_of};
use super::outside::Outside;
use super::readers::Readers;
use super::shared::{Desk, Note, State, transfer_of};
use super::transfers::Transfers;
use super::{OpenStore, PAGE_BYTES};
use crate::backend::joined::Joined;
use crate::backend::pieces::Pieces;
use crate::backend::range::check;
use crate::backend::ready::Ready;

/// A channel of a volume.
pub(super) struct VolumeChannel {
    open: Arc<OpenStore>,
    desk: Arc<Desk>,
    volume: u64,
    limits: Limits,
    /// How many blocks it has by now.
    block_count: Arc<AtomicU64>,
    /// The way to the device, and to the volume's parent behind its end. None once it is closed.
    below: Option<Box<dyn Backend>>,
    wake: Joined,
    works: Box<[Work]>,
    free: Vec<u32>,
    ready: Ready,
    transfers: Transfers,
    /// What waits for the device to take it.
    queue: VecDeque<Request>,
    /// Segments: for each place those of its request, and then parts of them.
    table: Box<[Segment]>,
    notes: VecDeque<Note>,
    /// Something that it waits for wakes nobody.
    is_deaf: bool,
    /// Reads of which the store does not know.
    known: Known,
    /// Requests of a batch that the store has to be asked about.
    unknown: Vec<usize>,
    /// If the data have checksums.
    bounce: Option<Bounce>,
    /// What the store is to be asked.
    asks: Vec<(u32, Ask)>,
    /// The losses that whoever has this channel was told of, by a flush that failed; and those that flushes
    /// tell of that are answered and not yet taken.
    told_losses: u64,
    telling: u64,
}

/// One place of a channel's table.
#[derive(Clone, Copy, Debug)]
struct Work {
    request: Request,
    /// How much of the place's part of the table is used.
    used: u32,
    /// What went wrong without the store's knowing.
    outcome: Outcome,
    stage: Stage,
}

/// What is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The place is free.
    Idle,
    /// That it is done.
    Asked,
    /// That what was done survives.
    Forced,
}

impl VolumeChannel {
    pub(super) fn open(
        open: &Arc<OpenStore>,
        info: &VolumeInfo,
        parent: Option<&Outside>,
        limits: &Limits,
        block_count: Arc<AtomicU64>,
    ) -> Result<Self, String> {
        let volume = info.id;
        let readers = Readers::new();
        let (desk, mut below) = open.way(Some(readers.seat()))?;
        if info.reach > 0 {
            below = Box::new(Below::new(below, parent, &open.shape)?);
        }
        let epoch = open.shared.lock().epoch(volume);
        let per_block = u32::try_from(open.shape.blocks_in_page).unwrap_or(1);
        let bell = desk.bell.descriptor(0).map_or(WakeSource::Nothing, WakeSource::Descriptor);
        let wake = Joined::of([below.wake_source(), bell])?;
        let depth = limits.depth_max;
        let bounce = || Bounce::new(&open.regions, depth, limits.request_blocks_max);
        let bounce = info.has_checksums.then(bounce).transpose()?;
        let work = Work {
            request: Request::NOTHING,
            used: 0,
            outcome: Outcome::SUCCESS,
            stage: Stage::Idle,
        };
        Ok(Self {
            open: Arc::clone(open),
            desk,
            volume,
            below: Some(below),
            wake,
            works: vec![work; depth as usize].into(),
            free: (0..depth).rev().collect(),
            ready: Ready::with_depth(depth),
            transfers: Transfers::with_capacity(2 * depth as usize),
            queue: VecDeque::with_capacity(2 * depth as usize),
            table: vec![Segment::default(); depth as usize * room(limits)].into(),
            notes: VecDeque::with_capacity(2 * depth as usize),
            is_deaf: false,
            known: Known::new(readers, epoch, limits, per_block),
            unknown: Vec::with_capacity(depth as usize),
            bounce,
            asks: Vec::new(),
            told_losses: open.shared.losses(),
            telling: 0,
            limits: limits.clone(),
            block_count,
        })
    }

    /// Sorts requests into reads of which this channel knows where their blocks lie, and what the store
    /// has to be asked about.
    #[inline]
    fn sort(&mut self, requests: &[Request]) {
        for (index, request) in requests.iter().enumerate() {
            match self.known.find(request) {
                Some(at) => self.read(request, at),
                None => self.unknown.push(index),
            }
        }
        if !self.known.batch.is_empty() && !self.begin_reads(0) {
            self.unknown.clear();
            self.unknown.extend(0..requests.len());
        }
    }

    /// Puts a read into the batch.
    #[inline]
    fn read(&mut self, request: &Request, at: u64) {
        if let Some(slot) = self.free.pop() {
            self.known.add(slot, request, at);
        }
    }

    /// Whether the reads of the batch from `first` on may go; they are taken out if not.
    #[inline]
    fn begin_reads(&mut self, first: usize) -> bool {
        self.known.begin(first, self.open.shared.transaction(), &mut self.free)
    }

    /// Has the store, which is at hand, tell where the blocks of a read lie, and puts it into the batch.
    fn learn(&mut self, state: &mut State, request: &Request) -> bool {
        if request.operation != Operation::Read || request.blocks == 0 {
            return false;
        }
        let Some(run) = state.store.mapped_run(self.volume, request.lba) else { return false };
        self.known.keep(request.lba, run);
        let Some(at) = self.known.find(request) else { return false };
        let first = self.known.batch.len();
        self.read(request, at);
        self.begin_reads(first)
    }

    /// Sends the batch to the device, which looks at the memory that it names. What it does not take
    /// waits.
    #[inline]
    fn read_batch(&mut self, now: Instant, segments: &[Segment]) {
        let taken = match &mut self.below {
            Some(below) if self.queue.is_empty() => below.submit(now, &self.known.batch, segments),
            _ => 0,
        };
        if taken < self.known.batch.len() {
            self.put_off(taken, segments);
        }
        self.known.batch.clear();
    }

    /// Keeps the reads of the batch from `first` on until there is room.
    #[cold]
    fn put_off(&mut self, first: usize, segments: &[Segment]) {
        for index in first..self.known.batch.len() {
            let read = self.known.batch[index];
            let slot = slot_of(read.token);
            let own = read.segment_first as usize..;
            let own = segments.get(own).and_then(|own| own.get(..read.segment_count.into()));
            let Some(own) = own.filter(|own| own.len() <= self.limits.segments_max.into()) else {
                let (token, outcome) = (self.known.give_up(slot), Outcome::INVALID_FIELD);
                self.free.push(slot);
                self.ready.push(Answer { token, outcome, result: 0 });
                continue;
            };
            let first = self.first(slot);
            self.table[first..][..own.len()].copy_from_slice(own);
            let segment_first = u32::try_from(first).unwrap_or(u32::MAX);
            self.queue.push_back(Request { segment_first, ..read });
        }
    }

    /// Asks the store about requests whose data pass through this channel's memory.
    fn ask_summed(&mut self, requests: &[Request], segments: &[Segment]) {
        let mut unknown = std::mem::take(&mut self.unknown);
        let mut asks = std::mem::take(&mut self.asks);
        for request in unknown.drain(..).map(|index| &requests[index]) {
            let Some((slot, ask)) = self.take(request, segments) else { continue };
            match self.take_data(slot) {
                Ok(()) => asks.push((slot, ask)),
                Err(NoSuchMemory(_)) => self.answer(slot, Outcome::DATA_TRANSFER_ERROR),
            }
        }
        self.unknown = unknown;
        self.enter(|state, desk| {
            asks.drain(..).for_each(|(slot, ask)| state.ask(desk, slot, ask));
        });
        self.asks = asks;
        self.read_notes();
    }

    /// Takes what is to be written from whoever asked.
    fn take_data(&self, slot: u32) -> Result<(), NoSuchMemory> {
        let request = &self.works[slot as usize].request;
        match &self.bounce {
            Some(bounce) if request.operation == Operation::Write => {
                bounce.take(slot, request.blocks.into(), self.own(slot))
            }
            _ => Ok(()),
        }
    }

    /// Gives what was read, and is what was written, to whoever asked.
    fn give_data(&self, slot: u32) -> Outcome {
        let request = &self.works[slot as usize].request;
        let Some(bounce) = &self.bounce else { return Outcome::SUCCESS };
        let (blocks, own) = (request.blocks.into(), self.own(slot));
        let done = match request.operation {
            Operation::Read => bounce.give(slot, blocks, own).map(|()| true),
            Operation::Compare => bounce.is_same(slot, blocks, own),
            _ => Ok(true),
        };
        match done {
            Ok(true) => Outcome::SUCCESS,
            Ok(false) => Outcome::COMPARE_FAILURE,
            Err(NoSuchMemory(_)) => Outcome::DATA_TRANSFER_ERROR,
        }
    }

    /// The segments that came with a request.
    fn own(&self, slot: u32) -> &[Segment] {
        let count = self.works[slot as usize].request.segment_count;
        &self.table[self.first(slot)..][..usize::from(count)]
    }

    /// Takes one request about which the store has to be asked; there is a place for it.
    fn take(&mut self, request: &Request, segments: &[Segment]) -> Option<(u32, Ask)> {
        let (slot, _) = self.place(request, segments, Stage::Asked)?;
        let (volume, block, blocks) = (self.volume, request.lba, u64::from(request.blocks));
        let ask = match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => {
                Ask::Read { volume, block, blocks }
            }
            Operation::Write => Ask::Write { volume, block, blocks },
            Operation::Flush => Ask::Flush,
            _ => Ask::Trim { volume, block, blocks },
        };
        Some((slot, ask))
    }

    /// A place for a request, and how many segments it has; or the answer, if it needs none.
    #[inline]
    fn place(
        &mut self,
        request: &Request,
        segments: &[Segment],
        stage: Stage,
    ) -> Option<(u32, u16)> {
        self.limits.block_count = self.block_count.load(Ordering::Relaxed);
        let own = match check(&self.limits, request, segments) {
            Ok(own) if request.blocks > 0 || request.operation == Operation::Flush => own,
            done => {
                let outcome = done.err().unwrap_or_default();
                self.ready.push(Answer { token: request.token, outcome, result: 0 });
                return None;
            }
        };
        let slot = self.free.pop()?;
        let first = self.first(slot);
        self.table[first..][..own.len()].copy_from_slice(own);
        let segment_count = u16::try_from(own.len()).unwrap_or(u16::MAX);
        self.works[slot as usize] = Work {
            request: Request { segment_count, ..*request },
            used: segment_count.into(),
            outcome: Outcome::SUCCESS,
            stage,
        };
        Some((slot, segment_count))
    }

    /// Where the part of the table begins that belongs to a place.
    fn first(&self, slot: u32) -> usize {
        slot as usize * room(&self.limits)
    }

    /// Asks the store about the requests of a batch of which this channel does not know enough.
    fn ask(&mut self, requests: &[Request], segments: &[Segment]) {
        if self.bounce.is_some() {
            return self.ask_summed(requests, segments);
        }
        let open = Arc::clone(&self.open);
        let mut state = open.shared.lock_to_tell();
        let mut unknown = std::mem::take(&mut self.unknown);
        for request in unknown.drain(..).map(|index| &requests[index]) {
            if !self.learn(&mut state, request)
                && let Some((slot, ask)) = self.take(request, segments)
            {
                state.ask(&self.desk, slot, ask);
            }
        }
        self.unknown = unknown;
        open.shared.sort(&mut state);
        state.take_notes(&self.desk, &mut self.notes);
        drop(state);
        self.read_notes();
    }

    /// Tells the store something under the lock, and takes what it says to this channel.
    fn enter(&mut self, tell: impl FnOnce(&mut State, &Desk)) {
        let mut state = self.open.shared.lock_to_tell();
        tell(&mut state, &self.desk);
        self.open.shared.sort(&mut state);
        state.take_notes(&self.desk, &mut self.notes);
    }

    /// Does what it is told.
    fn read_notes(&mut self) {
        while let Some(note) = self.notes.pop_front() {
            match note {
                Note::Do(
                    Action::ReadData { io, token, offset, at, blocks, .. }
                    | Action::WriteData { io, token, offset, at, blocks, .. },
                ) => self.send(io, token, offset..offset + blocks, at),
                Note::Do(Action::ReadParent { io, token, offset, block, blocks }) => {
                    let at = BLOCKS_MAX + block;
                    self.send(io, token, offset..offset + blocks, at);
                }
                Note::Do(Action::Zero { token, offset, blocks }) => {
                    self.zero(token, offset..offset + blocks);
                }
                Note::Do(_) => {}
                Note::Ended(slot, outcome) => self.end(slot, outcome.err()),
                Note::More(more) => self.reach_further(more),
            }
        }
    }

    /// There is one device more. What is under way goes on.
    fn reach_further(&mut self, more: More) {
        let Some(below) = self.below.take() else { return };
        let reads = self.known.under_way();
        let moves = self.transfers.under_way();
        // It is told to end a sleep by what it watches now; what it cannot watch keeps it awake.
        let source = more.channel.wake_source();
        let is_silent = matches!(source, WakeSource::Nothing);
        self.is_deaf |= is_silent || self.wake.add(source).is_err();
        self.below = Some(more.behind(below, reads + moves - self.queue.len()));
    }

    /// Sends a part of a request to the device.
    fn send(&mut self, io: u64, token: u64, blocks: std::ops::Range<u64>, at: u64) {
        let operation = match self.works[slot_of(token) as usize].request.operation {
            Operation::Compare | Operation::Verify if self.bounce.is_some() => Operation::Read,
            operation => operation,
        };
        let (first, count) = self.part(token, &blocks);
        let through = if self.bounce.is_some() { self.table[first] } else { Segment::default() };
        let number = self.transfers.begin(io, through);
        let per_page = self.open.shape.blocks_in_page;
        let blocks = (blocks.end - blocks.start) * per_page;
        self.queue.push_back(Request {
            token: number.into(),
            lba: at * per_page,
            operand: 0,
            segment_first: u32::try_from(first).unwrap_or(u32::MAX),
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            segment_count: u16::try_from(count).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation,
            flags: base::Flags::NONE,
        });
    }

    /// The segments of some blocks of a request: the first one, and how many.
    fn part(&mut self, token: u64, blocks: &std::ops::Range<u64>) -> (usize, usize) {
        let slot = slot_of(token);
        let first = self.first(slot);
        let Work { request, used, .. } = self.works[slot as usize];
        let own = usize::from(request.segment_count);
        if let Some(bounce) = &self.bounce {
            self.table[first + used as usize] = bounce.part(slot, blocks);
            self.works[slot as usize].used = used + 1;
            return (first + used as usize, 1);
        }
        if blocks.end - blocks.start == u64::from(request.blocks) {
            return (first, own);
        }
        let room = room(&self.limits);
        let (whole, cut) = self.table[first..first + room].split_at_mut(own);
        let mut pieces = Pieces::of(whole);
        let page = u64::from(PAGE_BYTES);
        let Ok(()) = pieces.take_each(blocks.start * page, |_, _| Ok::<(), Never>(()));
        let begin = used as usize - own;
        let mut end = begin;
        let Ok(()) = pieces.take_each((blocks.end - blocks.start) * page, |piece, _| {
            cut[end] = piece;
            end += 1;
            Ok::<(), Never>(())
        });
        self.works[slot as usize].used = u32::try_from(own + end).unwrap_or(u32::MAX);
        (first + own + begin, end - begin)
    }

    /// Does a part of a request that finds zeroes.
    fn zero(&mut self, token: u64, blocks: std::ops::Range<u64>) {
        let (first, count) = self.part(token, &blocks);
        let work = &mut self.works[slot_of(token) as usize];
        let regions = &self.open.regions;
        let is_compare = work.request.operation == Operation::Compare && self.bounce.is_none();
        for segment in &self.table[first..first + count] {
            let done = match is_compare {
                true => is_zero(regions, *segment),
                false => regions.fill(*segment, 0).map(|()| true),
            };
            match done {
                Ok(true) => {}
                Ok(false) => work.outcome = Outcome::COMPARE_FAILURE,
                Err(_) => work.outcome = Outcome::DATA_TRANSFER_ERROR,
            }
        }
    }

    /// The store has answered; what has to survive is asked to.
    fn end(&mut self, slot: u32, error: Option<StoreError>) {
        let Work { request, outcome, stage, .. } = self.works[slot as usize];
        let is_flush = request.operation == Operation::Flush;
        let losses = self.open.shared.losses();
        let outcome = match error {
            // The store has all that survived. What this channel wrote before need not be among that.
            None if is_flush && losses != self.told_losses => Outcome::WRITE_FAULT,
            Some(error) => error.outcome(),
            None if self.bounce.is_some() && outcome.is_success() => self.give_data(slot),
            None => outcome,
        };
        let changes = matches!(
            request.operation,
            Operation::Write | Operation::Deallocate | Operation::WriteZeroes
        );
        let is_forced = request.flags.has(base::Flags::FUA) && changes;
        if is_forced && stage == Stage::Asked && outcome.is_success() {
            self.works[slot as usize].stage = Stage::Forced;
            return self.enter(|state, desk| state.ask(desk, slot, Ask::Flush));
        }
        if is_flush && outcome == Outcome::WRITE_FAULT {
            self.telling = losses;
        }
        self.answer(slot, outcome);
    }

    /// Answers, and frees the place.
    fn answer(&mut self, slot: u32, outcome: Outcome) {
        let work = &mut self.works[slot as usize];
        work.stage = Stage::Idle;
        self.free.push(slot);
        self.ready.push(Answer { token: work.request.token, outcome, result: 0 });
    }

    /// Takes what the device has answered. Answers to known reads go to whoever asked.
    #[inline]
    fn look_below(&mut self, now: Instant, answers: &mut Answers) {
        let Some(below) = &mut self.below else { return };
        let first = answers.len();
        below.poll(now, answers);
        let (transfers, bounce) = (&mut self.transfers, self.bounce.as_ref());
        self.known.end(answers, first, &mut self.free, |token, outcome| {
            transfers.end(token, outcome, bounce);
        });
    }

    /// Hands down what waits, as much as the device takes.
    #[inline]
    fn hand_down(&mut self, now: Instant) {
        if let Some(below) = &mut self.below
            && !self.queue.is_empty()
        {
            let taken = below.submit(now, self.queue.make_contiguous(), &self.table);
            self.queue.drain(..taken);
        }
    }
}

impl Backend for VolumeChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // An answer that waits to be polled has given its place back, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let count = requests.len().min(room);
        self.sort(&requests[..count]);
        if !self.unknown.is_empty() {
            self.ask(requests, segments);
        }
        self.hand_down(now);
        if !self.known.batch.is_empty() {
            self.read_batch(now, segments);
        }
        count
    }

    fn flush(&mut self) {
        if let Some(below) = &mut self.below {
            below.flush();
        }
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let before = answers.len();
        // What waits comes before what a device brings that always brings something.
        if self.ready.len() > 0 {
            self.ready.give(answers);
        }
        self.look_below(now, answers);
        if self.transfers.have_ended() || self.desk.has_notes() {
            let shared = &self.open.shared;
            let mut state = shared.lock_to_tell();
            self.transfers.tell(&mut state.store);
            shared.sort(&mut state);
            state.take_notes(&self.desk, &mut self.notes);
            drop(state);
            self.read_notes();
        }
        if !self.queue.is_empty() {
            self.hand_down(now);
            self.flush();
        }
        if self.ready.len() > 0 {
            self.ready.give(answers);
        }
        if self.telling != 0 && self.ready.len() == 0 {
            // What is flushed from now on is flushed by somebody who knows.
            self.told_losses = std::mem::take(&mut self.telling);
        }
        answers.len() - before
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 || !self.queue.is_empty() {
            return Instant::default();
        }
        self.below.as_ref().map_or(Instant::NEVER, |below| below.wake_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.below.as_ref().is_some_and(|below| below.is_done_by_kernel())
    }

    fn arm(&mut self) -> bool {
        // The bell first, then the notes that it would ring for.
        let hears = self.desk.bell.unmask(0);
        let busy_below = self.below.as_mut().is_some_and(|below| below.arm());
        let busy = self.ready.len() > 0 || !self.queue.is_empty() || self.desk.has_notes();
        !hears || busy || busy_below || self.is_deaf
    }

    fn disarm(&mut self) {
        self.desk.bell.mask(0);
        if let Some(below) = &mut self.below {
            below.disarm();
        }
    }
}

impl Drop for VolumeChannel {
    /// First the device ends what it has; then the store learns that nobody is left to answer to.
    fn drop(&mut self) {
        self.below = None;
        let noted = self.notes.drain(..).filter_map(|note| match note {
            Note::Do(action) => transfer_of(&action),
            Note::Ended(..) | Note::More(_) => None,
        });
        let none = Transfers::with_capacity(0);
        let untold = std::mem::replace(&mut self.transfers, none).into_untold();
        self.open.shared.leave(&self.desk, noted.chain(untold));
    }
}

/// Whether there is nothing but zeroes in a segment.
fn is_zero(regions: &Regions, segment: Segment) -> Result<bool, NoSuchMemory> {
    let (mut chunk, mut done) = ([0; 512], 0);
    while done < segment.len_bytes {
        let len = (segment.len_bytes - done).min(512);
        let part = segment.slice(done, len).ok_or(NoSuchMemory(segment))?;
        let found = &mut chunk[..len as usize];
        regions.load(part, found)?;
        if found.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        done += len;
    }
    Ok(true)
}

type Never = std::convert::Infallible;

/// Segments that a place has room for: its own, and each cut at every block.
fn room(limits: &Limits) -> usize {
    2 * usize::from(limits.segments_max) + limits.request_blocks_max as usize
}
