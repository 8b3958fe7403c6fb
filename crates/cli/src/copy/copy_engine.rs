//! Copy engine: the state machine that reads, writes, zeroes and flushes.
//!
//! ```text
//!   hole of the source ── also a hole of the target: kept
//!                     └── otherwise: Zeroed
//!   data ── Read, and again block by block on an error ── per run: Written, Zeroed or kept
//!
//!   0 ──────────── until ─────────────── next ───────────── size
//!         done           chunks in flight      not started
//! ```
//!
//! The target is flushed periodically. Everything that was done before a flush was submitted is durable
//! when it completes, and the checkpoint records that.

use std::ops::Range;

use tenmil_base::{
    BlockExtent, ExtentKind, Instant, IoCompletion, IoStatus, Memory, Operation, Segment, Span,
};
use tenmil_dma::Region;

use super::byte_channel::{ByteRequest, CopyChannels};
use super::copy_loop::CopyOrComparison;
use super::copy_result::{CopyAbort, CopySide, CopyStats};
use super::request_sizes::CopyRequestSizes;
use super::{CopyDevices, CopyOptions, ReadErrorPolicy};

/// Stores the checkpoint of a copy.
pub trait CheckpointSink {
    /// Records that everything up to `until` is on the target, except `lost`, which is zeroes there.
    /// Durable on return.
    ///
    /// # Errors
    ///
    /// If the checkpoint could not be stored.
    fn store_checkpoint(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String>;
}

/// Copy in progress.
pub(super) struct CopyEngine<'a> {
    devices: &'a CopyDevices,
    geometry: CopyRequestSizes,
    options: &'a CopyOptions,
    keep: &'a mut dyn CheckpointSink,
    sides: CopyChannels,
    completions: Vec<(CopySide, IoCompletion)>,
    jobs: Box<[CopyChunk]>,
    /// A chunk of zeroes; its region also holds the buffers of all chunks.
    zeroes: Segment,
    _memory: Region,
    next: u64,
    /// Extent of the source at `next`: its end and what it holds.
    ahead: (u64, ExtentKind),
    tally: CopyStats,
    flush: FlushState,
    flush_next: Instant,
    /// Lowest offset at which something failed.
    failed_at: u64,
    ending: Option<CopyAbort>,
    /// Whether a write, zero or flush of the target has failed, whatever ended the copy. A flush that
    /// follows a failed one may succeed without covering the same data (fsync(2)); so no flush is
    /// submitted and nothing is recorded after that.
    target_is_lost: bool,
    is_over: bool,
}

/// Part of the source in flight.
struct CopyChunk {
    /// Byte offset in the source.
    at: u64,
    /// Length in bytes of the source.
    len: u64,
    /// Bytes read, and bytes of them that are done on the target.
    read: u64,
    done: u64,
    /// Bytes being read, written or zeroed now.
    part: u64,
    buffer: Segment,
    awaits: ChunkState,
}

/// State of a chunk: the completion it awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkState {
    /// Unused.
    Unused,
    Read,
    Written,
    Zeroed,
}

/// State of the target's flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlushState {
    /// No flush is in flight; everything up to `recorded` is in the checkpoint.
    Idle { recorded: u64 },
    /// A flush is in flight; everything up to `until` is durable when it completes.
    Awaited { until: u64 },
}

/// Token of a flush; the tokens of chunks are their indices.
const FLUSH: u64 = u64::MAX;
/// Granularity in bytes of the search for zeroes in the data.
const GRAIN: u64 = 64 << 10;
/// Maximum number of holes skipped per step.
const HOLES_MAX: usize = 64;
/// Interval of flushes and checkpoints.
const FLUSH_EVERY: Span = Span::from_secs(5);

impl<'a> CopyEngine<'a> {
    /// Creates a copy that continues from `from`.
    pub(super) fn new(
        devices: &'a CopyDevices,
        options: &'a CopyOptions,
        geometry: CopyRequestSizes,
        from: CopyStats,
        keep: &'a mut dyn CheckpointSink,
    ) -> Result<Self, String> {
        let sides = CopyChannels::open(&*devices.source, &*devices.target)?;
        let chunk = usize::try_from(geometry.chunk).unwrap_or(usize::MAX);
        let len_bytes = chunk.saturating_mul(geometry.depth + 1);
        let memory =
            devices.regions.allocate_region(len_bytes).map_err(|error| error.to_string())?;
        let part = |index: usize| Segment {
            region: memory.id(),
            offset: index as u64 * geometry.chunk,
            len_bytes: u32::try_from(geometry.chunk).unwrap_or(u32::MAX),
        };
        let job = |index| CopyChunk { buffer: part(index + 1), ..CopyChunk::unused() };
        let zeroes = part(0);
        devices.regions.fill(zeroes, 0).map_err(|_| "a buffer is out of reach".to_owned())?;
        let next = from.until;
        Ok(Self {
            geometry,
            options,
            keep,
            sides,
            completions: Vec::new(),
            jobs: (0..geometry.depth).map(job).collect(),
            zeroes,
            _memory: memory,
            next,
            ahead: (next, ExtentKind::Data),
            tally: CopyStats { is_flushed: false, ..from },
            flush: FlushState::Idle { recorded: next },
            flush_next: Instant::NEVER,
            failed_at: u64::MAX,
            ending: None,
            target_is_lost: false,
            is_over: false,
            devices,
        })
    }

    /// The statistics, and the reason for an early end.
    pub(super) fn into_result(self) -> (CopyStats, Option<CopyAbort>) {
        (self.tally, self.ending)
    }

    /// Whether the copy has ended early.
    #[cfg(test)]
    pub(super) fn has_ended_early(&self) -> bool {
        self.ending.is_some()
    }

    fn record_failure(&mut self, at: u64, ending: CopyAbort) {
        self.target_is_lost |= matches!(ending, CopyAbort::Failed { side: CopySide::Target, .. });
        self.failed_at = self.failed_at.min(at);
        // A failure takes precedence over a cancel.
        if matches!(self.ending, None | Some(CopyAbort::Interrupted)) {
            self.ending = Some(ending);
        }
    }

    /// Offset up to which everything is done.
    fn done_offset(&self) -> u64 {
        let jobs = self.jobs.iter().filter(|job| job.awaits != ChunkState::Unused);
        let first = jobs.map(|job| job.at).min().unwrap_or(self.next);
        first.min(self.failed_at)
    }

    /// Starts chunks as long as there are unused ones and data. Returns whether one was started.
    fn start_chunks(&mut self) -> bool {
        let before = self.next;
        for _ in 0..HOLES_MAX {
            if self.ending.is_some() || self.next >= self.geometry.size {
                break;
            }
            let unused = |job: &CopyChunk| job.awaits == ChunkState::Unused;
            let Some(index) = self.jobs.iter().position(unused) else { break };
            let (until, holds) = self.next_extent();
            match holds {
                ExtentKind::Data => self.begin_read(index, until),
                ExtentKind::Zeroes | ExtentKind::Hole => self.begin_zeroes(index, until),
            }
        }
        self.next != before
    }

    /// End and content of the source's extent at `next`, in whole units.
    fn next_extent(&mut self) -> (u64, ExtentKind) {
        if self.next < self.ahead.0 {
            return self.ahead;
        }
        let (geometry, at) = (&self.geometry, self.next);
        let block = geometry.source_block;
        let extent = self.devices.source.block_status(at / block);
        let BlockExtent { blocks, kind: holds } =
            extent.unwrap_or(BlockExtent { blocks: 1, kind: ExtentKind::Data });
        let end = at.saturating_add(blocks.saturating_mul(block));
        let whole = geometry.round_down(end);
        self.ahead = match holds {
            ExtentKind::Data => (geometry.round_up(end.max(at + 1)), ExtentKind::Data),
            zeroes if whole > at => (whole, zeroes),
            // A hole that covers only part of a unit is copied as data.
            _ => (geometry.round_up(at + 1), ExtentKind::Data),
        };
        self.ahead
    }

    fn begin_read(&mut self, index: usize, until: u64) {
        let len = (until - self.next).min(self.geometry.chunk);
        let job = &mut self.jobs[index];
        (job.at, job.len, job.read, job.done, job.part) = (self.next, len, 0, 0, len);
        self.next += len;
        self.submit_read(index);
    }

    /// Zeroes the range from `next` on, unless the target reports zeroes already.
    fn begin_zeroes(&mut self, index: usize, until: u64) {
        let at = self.next;
        let kept = self.geometry.round_down(self.target_zeroes_end(at, until));
        if kept > at {
            self.tally.kept += kept - at;
            self.next = kept;
            return;
        }
        let len = (until - at).min(self.geometry.zero_chunk);
        let job = &mut self.jobs[index];
        (job.at, job.len, job.read, job.done) = (at, len, len, 0);
        self.next += len;
        self.submit_zeroes(index, len);
    }

    /// End of the range from `at` that the target reports as zeroes; `at` if there is none.
    fn target_zeroes_end(&self, at: u64, until: u64) -> u64 {
        let block = self.geometry.target_block;
        match self.devices.target.block_status(at / block) {
            Ok(BlockExtent { blocks, kind: ExtentKind::Zeroes | ExtentKind::Hole }) => {
                at.saturating_add(blocks.saturating_mul(block)).min(until)
            }
            _ => at,
        }
    }

    /// Reads the next piece of a chunk.
    fn submit_read(&mut self, index: usize) {
        let job = &mut self.jobs[index];
        let part = job.part.min(job.len - job.read);
        (job.part, job.awaits) = (part, ChunkState::Read);
        let memory = subsegment(job.buffer, job.read, part);
        let (token, operation, at) = (index as u64, Operation::Read, job.at + job.read);
        self.sides.source.submit(&ByteRequest { token, operation, at, len_bytes: part, memory });
    }

    fn handle_read(&mut self, index: usize, status: IoStatus) {
        let job = &mut self.jobs[index];
        if status.is_success() {
            self.tally.read += job.part;
            job.read += job.part;
        } else if is_device_removed(status) {
            return self.fail_chunk(index, CopySide::Source, Operation::Read, status);
        } else if job.part > self.geometry.source_block {
            // Read again block by block, so that exactly the unreadable blocks are skipped or reported.
            job.part = self.geometry.source_block;
        } else if self.options.on_error == ReadErrorPolicy::Stop {
            return self.fail_chunk(index, CopySide::Source, Operation::Read, status);
        } else {
            let (at, part) = (job.at + job.read, job.part);
            let memory = subsegment(job.buffer, job.read, part);
            if self.devices.regions.fill(memory, 0).is_err() {
                return self.fail_chunk(index, CopySide::Source, Operation::Read, status);
            }
            job.read += part;
            self.tally.record_unreadable(at..at + part);
        }
        if self.jobs[index].read < self.jobs[index].len {
            self.submit_read(index);
        } else {
            self.zero_padding(index);
            self.write_next_run(index);
        }
    }

    /// Zeroes the part of the last target block behind the end of the source.
    fn zero_padding(&mut self, index: usize) {
        let job = &self.jobs[index];
        let padded = self.geometry.round_up_to_target_block(job.len);
        if padded > job.len {
            let rest = subsegment(job.buffer, job.len, padded - job.len);
            if self.devices.regions.fill(rest, 0).is_err() {
                self.fail_chunk(
                    index,
                    CopySide::Source,
                    Operation::Read,
                    IoStatus::DATA_TRANSFER_ERROR,
                );
            }
        }
    }

    /// Writes the next run of the data read: nonzero data, or zeroes.
    fn write_next_run(&mut self, index: usize) {
        loop {
            let job = &self.jobs[index];
            if job.awaits == ChunkState::Unused {
                return;
            }
            let (done, len) = (job.done, self.geometry.round_up_to_target_block(job.len));
            if done >= len {
                self.jobs[index].awaits = ChunkState::Unused;
                return;
            }
            let (until, is_zero) = self.next_run(&self.jobs[index], done, len);
            let at = self.jobs[index].at + done;
            if !is_zero {
                return self.submit_write(index, until - done);
            }
            // Zeroes that the target holds already are not written again.
            if self.target_zeroes_end(at, at + until - done) < at + until - done {
                return self.submit_zeroes(index, until - done);
            }
            self.tally.kept += until - done;
            self.jobs[index].done = until;
        }
    }

    /// End of the run from `from` that is all zeroes or all data, in pieces, and which of the two.
    fn next_run(&self, job: &CopyChunk, from: u64, len: u64) -> (u64, bool) {
        if !self.options.sparse {
            return (len, false);
        }
        let grain = GRAIN.max(self.geometry.unit);
        let is_zero = |at: u64| {
            let part = grain.min(len - at);
            let (bytes, zeroes) =
                (subsegment(job.buffer, at, part), subsegment(self.zeroes, 0, part));
            self.devices.regions.segments_equal(bytes, zeroes).unwrap_or(false)
        };
        let first = is_zero(from);
        let mut until = from + grain.min(len - from);
        while until < len && is_zero(until) == first {
            until += grain.min(len - until);
        }
        (until, first)
    }

    fn submit_write(&mut self, index: usize, part: u64) {
        let job = &mut self.jobs[index];
        (job.part, job.awaits) = (part, ChunkState::Written);
        let memory = subsegment(job.buffer, job.done, part);
        let (token, operation, at) = (index as u64, Operation::Write, job.at + job.done);
        self.tally.is_flushed = false;
        self.sides.target.submit(&ByteRequest { token, operation, at, len_bytes: part, memory });
    }

    /// Zeroes the next `part` of a chunk, by WriteZeroes or by writing zeroes.
    fn submit_zeroes(&mut self, index: usize, part: u64) {
        let has_zeroes = self.geometry.has_zeroes;
        let most = if has_zeroes { self.geometry.zero_chunk } else { self.geometry.chunk };
        let part = self.geometry.round_up_to_target_block(part).min(most);
        let job = &mut self.jobs[index];
        (job.part, job.awaits) = (part, ChunkState::Zeroed);
        let (operation, memory) = if has_zeroes {
            (Operation::WriteZeroes, Segment::default())
        } else {
            (Operation::Write, subsegment(self.zeroes, 0, part))
        };
        let (token, at) = (index as u64, job.at + job.done);
        self.tally.is_flushed = false;
        self.sides.target.submit(&ByteRequest { token, operation, at, len_bytes: part, memory });
    }

    fn handle_write(&mut self, index: usize, status: IoStatus) {
        let job = &mut self.jobs[index];
        let is_write = job.awaits == ChunkState::Written;
        if !status.is_success() {
            let operation = if is_write || !self.geometry.has_zeroes {
                Operation::Write
            } else {
                Operation::WriteZeroes
            };
            return self.fail_chunk(index, CopySide::Target, operation, status);
        }
        let counted = if is_write { &mut self.tally.written } else { &mut self.tally.zeroed };
        *counted += job.part;
        job.done += job.part;
        self.write_next_run(index);
    }

    fn fail_chunk(&mut self, index: usize, side: CopySide, operation: Operation, status: IoStatus) {
        let job = &mut self.jobs[index];
        job.awaits = ChunkState::Unused;
        let (first, offset) = (job.at, if side == CopySide::Source { job.read } else { job.done });
        let range = first + offset..first + offset + job.part;
        self.record_failure(first, CopyAbort::Failed { side, operation, range, status });
    }

    /// Flushes the target periodically, and once when no other work is left.
    fn flush_if_due(&mut self, now: Instant) {
        let FlushState::Idle { recorded } = self.flush else { return };
        if self.flush_next == Instant::NEVER {
            self.flush_next = now.after(FLUSH_EVERY);
        }
        let until = self.done_offset();
        let is_last = self.is_all_written();
        if !(is_last || now >= self.flush_next && until > recorded) {
            return;
        }
        self.flush_next = now.after(FLUSH_EVERY);
        if self.geometry.has_flush && !self.target_is_lost {
            self.flush = FlushState::Awaited { until };
            let (token, operation, memory) = (FLUSH, Operation::Flush, Segment::default());
            self.sides.target.submit(&ByteRequest {
                token,
                operation,
                at: 0,
                len_bytes: 0,
                memory,
            });
        } else if self.geometry.has_flush {
            self.is_over = is_last;
        } else {
            // A device without Flush has no volatile cache.
            self.store_checkpoint(until);
            self.is_over = is_last;
        }
    }

    fn is_all_written(&self) -> bool {
        let is_begun = self.next >= self.geometry.size || self.ending.is_some();
        is_begun && self.jobs.iter().all(|job| job.awaits == ChunkState::Unused)
    }

    fn handle_flush(&mut self, until: u64, status: IoStatus) {
        self.flush = FlushState::Idle { recorded: until };
        if !status.is_success() {
            let (side, operation) = (CopySide::Target, Operation::Flush);
            return self
                .record_failure(until, CopyAbort::Failed { side, operation, range: 0..0, status });
        }
        self.store_checkpoint(until);
        // Chunks completed since the flush was submitted are not covered by it; then another one
        // follows.
        let is_last = self.is_all_written() && until == self.done_offset();
        self.tally.is_flushed = is_last && !self.target_is_lost;
        self.is_over = is_last;
    }

    fn store_checkpoint(&mut self, until: u64) {
        self.tally.until = until;
        self.flush = FlushState::Idle { recorded: until };
        if let Err(text) = self.keep.store_checkpoint(until, &self.tally.lost) {
            self.record_failure(until, CopyAbort::Record(text));
        }
    }
}

impl CopyOrComparison for CopyEngine<'_> {
    fn advance(&mut self, now: Instant) -> bool {
        let begun = self.start_chunks();
        let mut completions = std::mem::take(&mut self.completions);
        let moved = self.sides.poll(now, &mut completions);
        for (_, IoCompletion { token, status, .. }) in completions.drain(..) {
            match (self.flush, usize::try_from(token)) {
                (FlushState::Awaited { until }, _) if token == FLUSH => {
                    self.handle_flush(until, status)
                }
                (_, Ok(index)) if index < self.jobs.len() => match self.jobs[index].awaits {
                    ChunkState::Unused => {}
                    ChunkState::Read => self.handle_read(index, status),
                    ChunkState::Written | ChunkState::Zeroed => self.handle_write(index, status),
                },
                _ => {}
            }
        }
        self.completions = completions;
        // After the completions of this step, so that a flush covers them.
        if !self.is_over {
            self.flush_if_due(now);
        }
        begun || moved
    }

    fn stop_submitting(&mut self) {
        if self.next < self.geometry.size {
            self.ending.get_or_insert(CopyAbort::Interrupted);
        }
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }

    fn done_and_total_bytes(&self) -> (u64, u64) {
        (self.done_offset(), self.geometry.size)
    }

    fn channels(&mut self) -> &mut CopyChannels {
        &mut self.sides
    }
}

impl CopyChunk {
    fn unused() -> Self {
        let (at, len, read, done, part) = (0, 0, 0, 0, 0);
        Self { at, len, read, done, part, buffer: Segment::default(), awaits: ChunkState::Unused }
    }
}

/// Whether the device was removed, so that retries are pointless.
fn is_device_removed(status: IoStatus) -> bool {
    matches!(status, IoStatus::NO_DEVICE | IoStatus::ABORTED_BY_HOST)
}

/// Part of a buffer, within its bounds.
fn subsegment(buffer: Segment, skip: u64, len: u64) -> Segment {
    let part = u32::try_from(skip).ok().zip(u32::try_from(len).ok());
    part.and_then(|(skip, len)| buffer.slice(skip, len)).unwrap_or_default()
}
