//! The copying itself.
//!
//! ```text
//!   hole of the source ── hole of the target too: kept
//!                     └── else: Zeroed
//!   data ── Read, and again block by block where that fails ── run by run: Written, Zeroed or kept
//!
//!   0 ──────────── until ─────────────── next ───────────── size
//!     dealt with         jobs in flight       not begun
//! ```
//!
//! Now and then the target flushes; what had been dealt with before the flush was submitted is then
//! surely there, and that is recorded.

use std::ops::Range;

use base::{Answer, Extent, Holds, Instant, Memory, Operation, Outcome, Segment, Span};
use dma::Region;

use super::drive::Work;
use super::geometry::Geometry;
use super::outcome::{Ending, Tally, Which};
use super::side::{Ask, Sides};
use super::{CopyOptions, Devices, OnError};

/// Keeps how far a copy surely is.
pub trait Keep {
    /// Everything up to `until` is on the target, except for `lost`, which is zeroes there. Durable
    /// when this returns.
    ///
    /// # Errors
    ///
    /// A line, if that could not be kept.
    fn keep(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String>;
}

/// A copy under way.
pub(super) struct Pass<'a> {
    devices: &'a Devices,
    geometry: Geometry,
    options: &'a CopyOptions,
    keep: &'a mut dyn Keep,
    sides: Sides,
    answers: Vec<(Which, Answer)>,
    jobs: Box<[Job]>,
    /// Zeroes, a chunk of them, and the memory of all jobs.
    zeroes: Segment,
    _memory: Region,
    next: u64,
    /// What the source holds from `next` on, and up to where.
    ahead: (u64, Holds),
    tally: Tally,
    flush: Flush,
    flush_next: Instant,
    /// The first place that something went wrong at.
    failed_at: u64,
    ending: Option<Ending>,
    /// Whether the target has failed to write, zero or flush, whatever ended the copy. A flush
    /// after one that failed may succeed and yet not cover what that one was to (fsync(2)); so
    /// none is asked for, and nothing is recorded, from here on.
    target_is_lost: bool,
    is_over: bool,
}

/// A part of the source on its way.
struct Job {
    /// Where it lies.
    at: u64,
    /// How long it is, in bytes of the source.
    len: u64,
    /// How much of it has been read, and how much has gone on from there.
    read: u64,
    done: u64,
    /// How much is read, written or zeroed at the moment.
    piece: u64,
    buffer: Segment,
    awaits: Awaits,
}

/// What a job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaits {
    /// To be used.
    Nothing,
    Read,
    Written,
    Zeroed,
}

/// Where the target is with flushing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    /// It flushes nothing; everything up to here has been recorded.
    Idle { recorded: u64 },
    /// Everything up to here will be on it once it answers.
    Awaited { until: u64 },
}

/// The token of a flush; those of jobs are their numbers.
const FLUSH: u64 = u64::MAX;
/// Zeroes are looked for in pieces of so many bytes.
const GRAIN: u64 = 64 << 10;
/// Holes that are gone past in one turn.
const HOLES_MAX: usize = 64;
/// How often the target flushes, and how far the copy is is recorded.
const FLUSH_EVERY: Span = Span::from_secs(5);

impl<'a> Pass<'a> {
    /// A copy that goes on from where `from` says.
    pub(super) fn new(
        devices: &'a Devices,
        options: &'a CopyOptions,
        geometry: Geometry,
        from: Tally,
        keep: &'a mut dyn Keep,
    ) -> Result<Self, String> {
        let sides = Sides::open(&*devices.source, &*devices.target)?;
        let chunk = usize::try_from(geometry.chunk).unwrap_or(usize::MAX);
        let len_bytes = chunk.saturating_mul(geometry.depth + 1);
        let memory = devices.regions.allocate(len_bytes).map_err(|error| error.to_string())?;
        let part = |index: usize| Segment {
            region: memory.id(),
            offset: index as u64 * geometry.chunk,
            len_bytes: u32::try_from(geometry.chunk).unwrap_or(u32::MAX),
        };
        let job = |index| Job { buffer: part(index + 1), ..Job::unused() };
        let zeroes = part(0);
        devices.regions.fill(zeroes, 0).map_err(|_| "a buffer is out of reach".to_owned())?;
        let next = from.until;
        Ok(Self {
            geometry,
            options,
            keep,
            sides,
            answers: Vec::new(),
            jobs: (0..geometry.depth).map(job).collect(),
            zeroes,
            _memory: memory,
            next,
            ahead: (next, Holds::Data),
            tally: Tally { is_flushed: false, ..from },
            flush: Flush::Idle { recorded: next },
            flush_next: Instant::NEVER,
            failed_at: u64::MAX,
            ending: None,
            target_is_lost: false,
            is_over: false,
            devices,
        })
    }

    /// What has been done, and why it ended if that was early.
    pub(super) fn end(self) -> (Tally, Option<Ending>) {
        (self.tally, self.ending)
    }

    /// Whether something has ended it early.
    #[cfg(test)]
    pub(super) fn has_ended(&self) -> bool {
        self.ending.is_some()
    }

    fn fail(&mut self, at: u64, ending: Ending) {
        self.target_is_lost |= matches!(ending, Ending::Failed { side: Which::Target, .. });
        self.failed_at = self.failed_at.min(at);
        // What failed says more than that somebody wanted it to end.
        if matches!(self.ending, None | Some(Ending::Interrupted)) {
            self.ending = Some(ending);
        }
    }

    /// Up to where everything has been dealt with.
    fn until(&self) -> u64 {
        let jobs = self.jobs.iter().filter(|job| job.awaits != Awaits::Nothing);
        let first = jobs.map(|job| job.at).min().unwrap_or(self.next);
        first.min(self.failed_at)
    }

    /// Begins jobs as long as there are any, and room. Says whether one was begun.
    fn begin(&mut self) -> bool {
        let before = self.next;
        for _ in 0..HOLES_MAX {
            if self.ending.is_some() || self.next >= self.geometry.size {
                break;
            }
            let unused = |job: &Job| job.awaits == Awaits::Nothing;
            let Some(index) = self.jobs.iter().position(unused) else { break };
            let (until, holds) = self.look_ahead();
            match holds {
                Holds::Data => self.begin_read(index, until),
                Holds::Zeroes | Holds::Hole => self.begin_zeroes(index, until),
            }
        }
        self.next != before
    }

    /// What the source holds from `next` on, and up to where, in whole units.
    fn look_ahead(&mut self) -> (u64, Holds) {
        if self.next < self.ahead.0 {
            return self.ahead;
        }
        let (geometry, at) = (&self.geometry, self.next);
        let block = geometry.source_block;
        let extent = self.devices.source.extent(at / block);
        let Extent { blocks, holds } = extent.unwrap_or(Extent { blocks: 1, holds: Holds::Data });
        let end = at.saturating_add(blocks.saturating_mul(block));
        let whole = geometry.floor(end);
        self.ahead = match holds {
            Holds::Data => (geometry.ceiling(end.max(at + 1)), Holds::Data),
            zeroes if whole > at => (whole, zeroes),
            // Part of a unit may be a hole and the rest not.
            _ => (geometry.ceiling(at + 1), Holds::Data),
        };
        self.ahead
    }

    fn begin_read(&mut self, index: usize, until: u64) {
        let len = (until - self.next).min(self.geometry.chunk);
        let job = &mut self.jobs[index];
        (job.at, job.len, job.read, job.done, job.piece) = (self.next, len, 0, 0, len);
        self.next += len;
        self.read(index);
    }

    /// Zeroes from `next` on: a job, unless there are zeroes on the target already.
    fn begin_zeroes(&mut self, index: usize, until: u64) {
        let at = self.next;
        let kept = self.geometry.floor(self.zeroes_of_target(at, until));
        if kept > at {
            self.tally.kept += kept - at;
            self.next = kept;
            return;
        }
        let len = (until - at).min(self.geometry.zero_chunk);
        let job = &mut self.jobs[index];
        (job.at, job.len, job.read, job.done) = (at, len, len, 0);
        self.next += len;
        self.zero(index, len);
    }

    /// Up to where the target reads as zeroes from `at` on, as far as it knows; `at` if it does not.
    fn zeroes_of_target(&self, at: u64, until: u64) -> u64 {
        let block = self.geometry.target_block;
        match self.devices.target.extent(at / block) {
            Ok(Extent { blocks, holds: Holds::Zeroes | Holds::Hole }) => {
                at.saturating_add(blocks.saturating_mul(block)).min(until)
            }
            _ => at,
        }
    }

    /// Reads the next piece of a job.
    fn read(&mut self, index: usize) {
        let job = &mut self.jobs[index];
        let piece = job.piece.min(job.len - job.read);
        (job.piece, job.awaits) = (piece, Awaits::Read);
        let memory = slice(job.buffer, job.read, piece);
        let (token, operation, at) = (index as u64, Operation::Read, job.at + job.read);
        self.sides.source.ask(&Ask { token, operation, at, len_bytes: piece, memory });
    }

    fn after_read(&mut self, index: usize, outcome: Outcome) {
        let job = &mut self.jobs[index];
        if outcome.is_success() {
            self.tally.read += job.piece;
            job.read += job.piece;
        } else if is_gone(outcome) {
            return self.give_up(index, Which::Source, Operation::Read, outcome);
        } else if job.piece > self.geometry.source_block {
            // Block by block, to lose or to name no more than what cannot be read.
            job.piece = self.geometry.source_block;
        } else if self.options.on_error == OnError::Stop {
            return self.give_up(index, Which::Source, Operation::Read, outcome);
        } else {
            let (at, piece) = (job.at + job.read, job.piece);
            let memory = slice(job.buffer, job.read, piece);
            if self.devices.regions.fill(memory, 0).is_err() {
                return self.give_up(index, Which::Source, Operation::Read, outcome);
            }
            job.read += piece;
            self.tally.lose(at..at + piece);
        }
        if self.jobs[index].read < self.jobs[index].len {
            self.read(index);
        } else {
            self.pad(index);
            self.go_on(index);
        }
    }

    /// What is behind the end of the source, in the last block of the target, becomes zeroes.
    fn pad(&mut self, index: usize) {
        let job = &self.jobs[index];
        let padded = self.geometry.in_target(job.len);
        if padded > job.len {
            let rest = slice(job.buffer, job.len, padded - job.len);
            if self.devices.regions.fill(rest, 0).is_err() {
                self.give_up(index, Which::Source, Operation::Read, Outcome::DATA_TRANSFER_ERROR);
            }
        }
    }

    /// Writes the next run of what was read: data, or zeroes.
    fn go_on(&mut self, index: usize) {
        loop {
            let job = &self.jobs[index];
            if job.awaits == Awaits::Nothing {
                return;
            }
            let (done, len) = (job.done, self.geometry.in_target(job.len));
            if done >= len {
                self.jobs[index].awaits = Awaits::Nothing;
                return;
            }
            let (until, is_zero) = self.run(&self.jobs[index], done, len);
            let at = self.jobs[index].at + done;
            if !is_zero {
                return self.write(index, until - done);
            }
            if self.zeroes_of_target(at, at + until - done) < at + until - done {
                return self.zero(index, until - done);
            }
            self.tally.kept += until - done;
            self.jobs[index].done = until;
        }
    }

    /// Up to where a job's bytes are all zeroes or all not, piece by piece, and which.
    fn run(&self, job: &Job, from: u64, len: u64) -> (u64, bool) {
        if !self.options.sparse {
            return (len, false);
        }
        let grain = GRAIN.max(self.geometry.unit);
        let is_zero = |at: u64| {
            let piece = grain.min(len - at);
            let (bytes, zeroes) = (slice(job.buffer, at, piece), slice(self.zeroes, 0, piece));
            self.devices.regions.equal(bytes, zeroes).unwrap_or(false)
        };
        let first = is_zero(from);
        let mut until = from + grain.min(len - from);
        while until < len && is_zero(until) == first {
            until += grain.min(len - until);
        }
        (until, first)
    }

    fn write(&mut self, index: usize, piece: u64) {
        let job = &mut self.jobs[index];
        (job.piece, job.awaits) = (piece, Awaits::Written);
        let memory = slice(job.buffer, job.done, piece);
        let (token, operation, at) = (index as u64, Operation::Write, job.at + job.done);
        self.tally.is_flushed = false;
        self.sides.target.ask(&Ask { token, operation, at, len_bytes: piece, memory });
    }

    /// Makes zeroes of the next `piece` of a job, one way or the other.
    fn zero(&mut self, index: usize, piece: u64) {
        let has_zeroes = self.geometry.has_zeroes;
        let most = if has_zeroes { self.geometry.zero_chunk } else { self.geometry.chunk };
        let piece = self.geometry.in_target(piece).min(most);
        let job = &mut self.jobs[index];
        (job.piece, job.awaits) = (piece, Awaits::Zeroed);
        let (operation, memory) = if has_zeroes {
            (Operation::WriteZeroes, Segment::default())
        } else {
            (Operation::Write, slice(self.zeroes, 0, piece))
        };
        let (token, at) = (index as u64, job.at + job.done);
        self.tally.is_flushed = false;
        self.sides.target.ask(&Ask { token, operation, at, len_bytes: piece, memory });
    }

    fn after_written(&mut self, index: usize, outcome: Outcome) {
        let job = &mut self.jobs[index];
        let is_write = job.awaits == Awaits::Written;
        if !outcome.is_success() {
            let operation = if is_write || !self.geometry.has_zeroes {
                Operation::Write
            } else {
                Operation::WriteZeroes
            };
            return self.give_up(index, Which::Target, operation, outcome);
        }
        let counted = if is_write { &mut self.tally.written } else { &mut self.tally.zeroed };
        *counted += job.piece;
        job.done += job.piece;
        self.go_on(index);
    }

    fn give_up(&mut self, index: usize, side: Which, operation: Operation, outcome: Outcome) {
        let job = &mut self.jobs[index];
        job.awaits = Awaits::Nothing;
        let (first, offset) = (job.at, if side == Which::Source { job.read } else { job.done });
        let range = first + offset..first + offset + job.piece;
        self.fail(first, Ending::Failed { side, operation, range, outcome });
    }

    /// Has the target flush if it is time to, or if nothing else is left to do.
    fn tend_flush(&mut self, now: Instant) {
        let Flush::Idle { recorded } = self.flush else { return };
        if self.flush_next == Instant::NEVER {
            self.flush_next = now.after(FLUSH_EVERY);
        }
        let until = self.until();
        let is_last = self.nothing_is_left();
        if !(is_last || now >= self.flush_next && until > recorded) {
            return;
        }
        self.flush_next = now.after(FLUSH_EVERY);
        if self.geometry.has_flush && !self.target_is_lost {
            self.flush = Flush::Awaited { until };
            let (token, operation, memory) = (FLUSH, Operation::Flush, Segment::default());
            self.sides.target.ask(&Ask { token, operation, at: 0, len_bytes: 0, memory });
        } else if self.geometry.has_flush {
            self.is_over = is_last;
        } else {
            // A device without a flush has no cache either.
            self.record(until);
            self.is_over = is_last;
        }
    }

    fn nothing_is_left(&self) -> bool {
        let is_begun = self.next >= self.geometry.size || self.ending.is_some();
        is_begun && self.jobs.iter().all(|job| job.awaits == Awaits::Nothing)
    }

    fn after_flush(&mut self, until: u64, outcome: Outcome) {
        self.flush = Flush::Idle { recorded: until };
        if !outcome.is_success() {
            let (side, operation) = (Which::Target, Operation::Flush);
            return self.fail(until, Ending::Failed { side, operation, range: 0..0, outcome });
        }
        self.record(until);
        let is_last = self.nothing_is_left() && until == self.until();
        self.tally.is_flushed = is_last && !self.target_is_lost;
        self.is_over = is_last;
    }

    fn record(&mut self, until: u64) {
        self.tally.until = until;
        self.flush = Flush::Idle { recorded: until };
        if let Err(text) = self.keep.keep(until, &self.tally.lost) {
            self.fail(until, Ending::Record(text));
        }
    }
}

impl Work for Pass<'_> {
    fn step(&mut self, now: Instant) -> bool {
        let begun = self.begin();
        let mut answers = std::mem::take(&mut self.answers);
        let moved = self.sides.turn(now, &mut answers);
        for (_, Answer { token, outcome, .. }) in answers.drain(..) {
            match (self.flush, usize::try_from(token)) {
                (Flush::Awaited { until }, _) if token == FLUSH => self.after_flush(until, outcome),
                (_, Ok(index)) if index < self.jobs.len() => match self.jobs[index].awaits {
                    Awaits::Nothing => {}
                    Awaits::Read => self.after_read(index, outcome),
                    Awaits::Written | Awaits::Zeroed => self.after_written(index, outcome),
                },
                _ => {}
            }
        }
        self.answers = answers;
        if !self.is_over {
            self.tend_flush(now);
        }
        begun || moved
    }

    fn stop(&mut self) {
        if self.next < self.geometry.size {
            self.ending.get_or_insert(Ending::Interrupted);
        }
    }

    fn is_over(&self) -> bool {
        self.is_over
    }

    fn progress(&self) -> (u64, u64) {
        (self.until(), self.geometry.size)
    }

    fn sides(&mut self) -> &mut Sides {
        &mut self.sides
    }
}

impl Job {
    fn unused() -> Self {
        let (at, len, read, done, piece) = (0, 0, 0, 0, 0);
        Self { at, len, read, done, piece, buffer: Segment::default(), awaits: Awaits::Nothing }
    }
}

/// Whether there is nobody left to ask.
fn is_gone(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::NO_DEVICE | Outcome::ABORTED_BY_HOST)
}

/// A part of a buffer, which is never longer than that.
fn slice(buffer: Segment, skip: u64, len: u64) -> Segment {
    let part = u32::try_from(skip).ok().zip(u32::try_from(len).ok());
    part.and_then(|(skip, len)| buffer.slice(skip, len)).unwrap_or_default()
}
