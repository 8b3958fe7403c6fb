//! Queue: an I/O channel with the I/Os in flight of a program.
//!
//! ```text
//!   submit   check, resolve memory, take a slot ─> requests, slots as tokens ──> IoChannel
//!   poll     tokens of the program <─ free slots <────────────────────────────── IoChannel
//! ```

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, Limits, Operation, OperationSet, Request,
    RequestFlags, Segment, WakeSource,
};
use tenmil_linux::Clock;

use crate::device::Device;
use crate::failure::Failure;
use crate::io::{
    Completion, Io, IoSegment, TENMIL_IO_DEALLOCATE, TENMIL_IO_FUA, TENMIL_OP_READ,
    TENMIL_OP_WRITE, data_copies, operation_of,
};
use crate::program_memory::{MemoryRun, RangeLookup};
use crate::slot_table::{MemoryIndex, NO_MEMORY, SlotTable};
use crate::status::class_of;

/// Fields in the order in which they are dropped: the channel waits until its requests have ended.
pub(crate) struct Queue {
    channel: Box<dyn IoChannel>,
    slots: SlotTable,
    /// Requests of the batch that is being submitted.
    requests: Box<[Request]>,
    /// Segments of the batch. The first ones, as many as there are requests, are the single segments of requests
    /// with the same index.
    segments: Vec<Segment>,
    /// What the first requests and their segments have in common, as many as are `ready`, since an earlier
    /// batch: most I/Os differ in block and memory only.
    template: BatchTemplate,
    ready: usize,
    /// Memory of the segments of an I/O with several.
    indices: Vec<MemoryIndex>,
    completions: CompletionBatch,
    /// Completions that have been returned, of those in `completions`.
    returned: usize,
    ranges: RangeLookup,
    block_shift: u32,
    supported: OperationSet,
    /// Blocks of the largest I/O, and of the largest whose length fits into a segment.
    blocks_max: u32,
    blocks_fast_max: u32,
    /// Number of blocks that I/Os must lie within, if the channel does not check that.
    checked_block_count: u64,
    clock: Clock,
    /// The channel is armed: the thread may sleep.
    is_armed: bool,
    device: Arc<Device>,
}

/// What the I/Os of a batch have in common.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct BatchTemplate {
    shape: u64,
    /// Region and length.
    segment: Segment,
}

/// Maximum number of completions that a poll of the channel returns.
const BATCH_MAX: usize = 256;

/// Maximum depth of a queue.
pub(crate) const DEPTH_MAX: u32 = 32_768;

impl Queue {
    pub(crate) fn new(device: Arc<Device>, channel: Box<dyn IoChannel>, depth: u32) -> Self {
        let limits = channel.limits();
        let (block_shift, supported) = (limits.block_size.trailing_zeros(), limits.operations);
        let blocks_max = limits.request_blocks_max;
        let checked_block_count = if device.is_direct { limits.block_count } else { u64::MAX };
        let memory = &device.context.memory;
        let depth = depth as usize;
        let (ranges, clock) = (memory.lookup(), device.context.clock);
        Self {
            channel,
            slots: memory.add_queue(depth),
            requests: vec![Request::PLACEHOLDER; depth].into_boxed_slice(),
            segments: vec![Segment::default(); depth],
            template: BatchTemplate::default(),
            ready: 0,
            indices: Vec::new(),
            completions: CompletionBatch::with_capacity(depth.min(BATCH_MAX)),
            returned: 0,
            ranges,
            block_shift,
            supported,
            blocks_max,
            blocks_fast_max: blocks_max.min(u32::MAX >> block_shift),
            checked_block_count,
            clock,
            is_armed: false,
            device,
        }
    }

    pub(crate) fn depth(&self) -> usize {
        self.slots.depth()
    }

    /// Number of I/Os that were submitted and whose completion has not been returned.
    pub(crate) fn in_flight(&self) -> usize {
        self.depth() - self.slots.free_count()
    }

    /// Limits of the channel.
    pub(crate) fn limits(&self) -> &Limits {
        self.channel.limits()
    }

    /// Submits I/Os from the front, and returns how many were accepted: fewer if the queue is full, or one is
    /// invalid. The first one is refused with an error.
    ///
    /// # Safety
    ///
    /// The segments of each are valid for reads, or their number is zero.
    pub(crate) unsafe fn submit(&mut self, ios: &[Io]) -> Result<usize, Failure> {
        self.disarm();
        self.ranges.renew(&self.device.context.memory);
        self.segments.truncate(self.requests.len());
        let ios = &ios[..ios.len().min(self.slots.free_count())];
        let mut prepared = 0;
        while let Some(io) = ios.get(prepared) {
            let run = self.prepare_run(prepared, &ios[prepared..]);
            prepared += run;
            if run > 0 {
                continue;
            }
            // SAFETY: the caller promises the same of the segments.
            match unsafe { self.prepare_any(prepared, io) } {
                Ok(()) => prepared += 1,
                Err(why) if prepared == 0 => return Err(*why),
                // The I/Os before it are submitted.
                Err(_) => break,
            }
        }
        if prepared == 0 {
            return Ok(0);
        }
        let now = self.clock.now();
        let taken = self.channel.submit(now, &self.requests[..prepared], &self.segments);
        self.channel.flush_submissions();
        // In reverse, so that slots are reused in the same order.
        let rest = self.requests[taken..prepared].iter().rev();
        self.slots.release_each(rest.map(|request| request.token), |_| {});
        Ok(taken)
    }

    /// Prepares the leading I/Os that are reads or writes like the first one, each in one piece of the memory
    /// that was used last. Their requests begin at index `first`. Returns their number.
    #[inline]
    fn prepare_run(&mut self, first: usize, ios: &[Io]) -> usize {
        let Some(io) = ios.first() else { return 0 };
        let Io { blocks, operation, flags, .. } = *io;
        let kind = if operation == TENMIL_OP_READ { Operation::Read } else { Operation::Write };
        if operation > TENMIL_OP_WRITE
            || flags & !TENMIL_IO_FUA != 0
            || io.segment_count != 0
            || blocks.wrapping_sub(1) >= self.blocks_fast_max
            || !self.supported.has(kind)
        {
            return 0;
        }
        let Some(lba_max) = self.checked_block_count.checked_sub(blocks.into()) else { return 0 };
        let len_bytes = blocks << self.block_shift;
        let Some(memory) = self.ranges.run_of(len_bytes) else { return 0 };
        let template = BatchTemplate {
            shape: shape_of(io),
            segment: Segment { region: memory.region, offset: 0, len_bytes },
        };
        if first + ios.len() <= self.ready && self.template == template {
            let (requests, segments) = (&mut self.requests[first..], &mut self.segments[first..]);
            return prepare_ready(&mut self.slots, ios, (requests, segments), &memory, lba_max);
        }
        let request = Request {
            blocks,
            segment_count: 1,
            operation: kind,
            flags: RequestFlags(flags),
            ..Request::PLACEHOLDER
        };
        let requests = self.requests[first..].iter_mut().zip(first..);
        let mut prepared = ios.iter().zip(requests).zip(&mut self.segments[first..]);
        let count = self.slots.take_each(|slot| {
            let ((io, (into, index)), segment) = prepared.next()?;
            if shape_of(io) != template.shape || io.lba > lba_max {
                return None;
            }
            let (offset, memory_index) = memory.find(io.data.addr())?;
            let (token, segment_first) = (slot.into(), index_of(index));
            *into = Request { token, lba: io.lba, segment_first, ..request };
            *segment = Segment { offset, ..template.segment };
            Some((io.token, memory_index))
        });
        if first == 0 {
            (self.template, self.ready) = (template, count);
        } else {
            self.ready = self.ready.min(first);
        }
        count
    }

    /// Checks any I/O, and prepares its request with this index and its segments.
    ///
    /// # Safety
    ///
    /// Its segments are valid for reads, or their number is zero.
    #[inline(never)]
    unsafe fn prepare_any(&mut self, index: usize, io: &Io) -> Result<(), Box<Failure>> {
        let operation = match operation_of(io.operation) {
            Some(operation) if self.supported.has(operation) => operation,
            _ => return Err(unsupported(io)),
        };
        if io.flags & !(TENMIL_IO_FUA | TENMIL_IO_DEALLOCATE) != 0 {
            return Err(unknown_flags(io));
        }
        let end = io.lba.checked_add(io.blocks.into());
        if self.checked_block_count != u64::MAX
            && (io.blocks > self.blocks_max || end.is_none_or(|end| end > self.checked_block_count))
        {
            return Err(self.outside_limits(io));
        }
        self.ready = self.ready.min(index);
        let len_bytes = (u64::from(io.blocks) << self.block_shift) * data_copies(operation);
        let (slot, first, count) = if len_bytes == 0 {
            if !io.data.is_null() || io.segment_count != 0 {
                return Err(memory_without_data(io));
            }
            (self.slots.take(io.token, NO_MEMORY), index, 0)
        } else if io.segment_count == 0 {
            let found = u32::try_from(len_bytes)
                .ok()
                .and_then(|len_bytes| self.ranges.segment_at(io.data.addr(), len_bytes));
            let Some((segment, memory)) = found else {
                return Err(unknown_memory(io, io.data.addr(), len_bytes));
            };
            self.segments[index] = segment;
            (self.slots.take(io.token, memory), index, 1)
        } else {
            let first = self.segments.len();
            // SAFETY: the caller promises the same of the segments.
            (unsafe { self.add_segments(io, len_bytes) }?, first, self.segments.len() - first)
        };
        #[expect(clippy::cast_possible_truncation, reason = "no more than an I/O may have")]
        let segment_count = count as u16;
        self.requests[index] = Request {
            token: slot.into(),
            lba: io.lba,
            operand: if operation == Operation::Copy { io.source_lba } else { 0 },
            segment_first: index_of(first),
            blocks: io.blocks,
            segment_count,
            metadata_count: 0,
            operation,
            flags: RequestFlags(io.flags),
        };
        Ok(())
    }

    #[cold]
    fn outside_limits(&self, io: &Io) -> Box<Failure> {
        let Io { token, lba, blocks, .. } = io;
        let (most, count) = (self.blocks_max, self.checked_block_count);
        Box::new(Failure::usage(format_args!(
            "I/O {token:#x}: {blocks} blocks from {lba} on, expected at most {most} below {count}: the \
             device was opened with TENMIL_OPEN_DIRECT"
        )))
    }

    /// Appends the segments of an I/O, and takes a slot for it.
    ///
    /// # Safety
    ///
    /// Its segments are valid for reads.
    #[inline(never)]
    unsafe fn add_segments(&mut self, io: &Io, len_bytes: u64) -> Result<u32, Box<Failure>> {
        let (count, most) = (usize::from(io.segment_count), self.limits().segments_max);
        if io.segments.is_null() || !io.segments.is_aligned() || io.segment_count > most {
            return Err(Box::new(Failure::usage(format_args!(
                "I/O {:#x}: {count} segments at {:p}, expected at most {most} at an aligned address",
                io.token, io.segments
            ))));
        }
        // SAFETY: not null and aligned, as just checked; valid for reads, as the caller promises.
        let pieces = unsafe { std::slice::from_raw_parts(io.segments, count) };
        let (first, mut rest) = (self.segments.len(), len_bytes);
        self.indices.clear();
        let refused = 'refused: {
            for piece in pieces {
                let found = u32::try_from(piece.len)
                    .ok()
                    .filter(|len_bytes| *len_bytes > 0)
                    .and_then(|len_bytes| self.ranges.segment_at(piece.data.addr(), len_bytes));
                let Some((segment, memory)) = found else {
                    break 'refused unknown_memory(io, piece.data.addr(), piece.len);
                };
                let Some(left) = rest.checked_sub(piece.len) else {
                    break 'refused wrong_segments(io, len_bytes, pieces);
                };
                rest = left;
                self.segments.push(segment);
                self.indices.push(memory);
            }
            if rest == 0 {
                return Ok(self.slots.take_several(io.token, self.indices.iter().copied()));
            }
            wrong_segments(io, len_bytes, pieces)
        };
        self.segments.truncate(first);
        Err(refused)
    }

    /// Polls, and writes completions to the front of `into`. Returns their number.
    #[inline]
    pub(crate) fn poll(&mut self, into: &mut [MaybeUninit<Completion>]) -> usize {
        self.disarm();
        if self.returned == self.completions.len() {
            self.completions.clear();
            self.returned = 0;
            let now = self.clock.now();
            if self.channel.poll(now, &mut self.completions) == 0 {
                return 0;
            }
        }
        let waiting = &self.completions.as_slice()[self.returned..];
        let count = waiting.len().min(into.len());
        let waiting = &waiting[..count];
        let mut both = waiting.iter().zip(into);
        self.slots.release_each(waiting.iter().map(|completion| completion.token), |token| {
            if let Some((completion, into)) = both.next() {
                let IoCompletion { status, result, .. } = *completion;
                let status_class = class_of(status);
                into.write(Completion { token, result, status: status.0, status_class });
            }
        });
        self.returned += count;
        count
    }

    /// Prepares the sleep of the thread. None if a completion may be available: then it must poll. Otherwise
    /// the time until which it may sleep while the descriptor is not readable.
    pub(crate) fn arm(&mut self) -> Option<Instant> {
        if self.returned < self.completions.len() {
            return None;
        }
        if self.in_flight() == 0 {
            return Some(Instant::NEVER);
        }
        self.is_armed = true;
        let until = if self.channel.arm() { None } else { Some(self.channel.wake_at()) };
        if until.is_none() {
            self.disarm();
        }
        until
    }

    /// Nanoseconds until `at`.
    pub(crate) fn ns_until(&self, at: Instant) -> u64 {
        if at == Instant::NEVER { u64::MAX } else { at.since(self.clock.now()).ns }
    }

    /// Descriptor that becomes readable when an armed queue has completions. None if the device has none.
    pub(crate) fn event_fd(&self) -> Option<RawFd> {
        match self.channel.wake_source() {
            WakeSource::Descriptor(descriptor) => Some(descriptor.as_raw_fd()),
            WakeSource::None | WakeSource::Deadline => None,
        }
    }

    #[inline]
    fn disarm(&mut self) {
        if self.is_armed {
            self.is_armed = false;
            self.channel.disarm();
        }
    }
}

/// Prepares the leading I/Os of a run whose requests and segments are ready but for token, block and offset.
/// Returns their number.
///
/// Not inlined: the separate loop keeps its values in registers.
#[inline(never)]
fn prepare_ready(
    slots: &mut SlotTable,
    ios: &[Io],
    (requests, segments): (&mut [Request], &mut [Segment]),
    memory: &MemoryRun<'_>,
    lba_max: u64,
) -> usize {
    let shape = ios.first().map_or(0, shape_of);
    let mut prepared = ios.iter().zip(requests).zip(segments);
    slots.take_each(
        #[inline(always)]
        |slot| {
            let ((io, request), segment) = prepared.next()?;
            if shape_of(io) != shape || io.lba > lba_max {
                return None;
            }
            let (offset, index) = memory.find(io.data.addr())?;
            (request.token, request.lba, segment.offset) = (slot.into(), io.lba, offset);
            Some((io.token, index))
        },
    )
}

/// Index of a request or a segment.
#[expect(clippy::cast_possible_truncation, reason = "a queue has less than 2^31 segments")]
fn index_of(index: usize) -> u32 {
    index as u32
}

/// Everything that I/Os of a run have in common. The fields are adjacent: one load.
#[inline]
fn shape_of(io: &Io) -> u64 {
    let (count, operation) = (u64::from(io.segment_count), u64::from(io.operation));
    u64::from(io.blocks) | count << 32 | operation << 48 | u64::from(io.flags) << 56
}

#[cold]
fn unsupported(io: &Io) -> Box<Failure> {
    let Io { token, operation, .. } = io;
    Box::new(match operation_of(*operation) {
        Some(operation) => Failure::usage(format_args!(
            "I/O {token:#x}: the device has no {}, or is open read-only",
            operation.name()
        ))
        .with_hint(
            "The field `operations` of struct tenmil_device_info has what the device supports.",
        ),
        None => Failure::usage(format_args!(
            "I/O {token:#x}: operation is {operation}, expected one of TENMIL_OP_…"
        )),
    })
}

#[cold]
fn unknown_flags(io: &Io) -> Box<Failure> {
    let Io { token, flags, .. } = io;
    Failure::usage(format_args!("I/O {token:#x}: flags are {flags:#x}, expected TENMIL_IO_… only"))
        .boxed()
}

#[cold]
fn memory_without_data(io: &Io) -> Box<Failure> {
    let Io { token, blocks, .. } = io;
    Failure::usage(format_args!(
        "I/O {token:#x}: it has memory and transfers no data ({blocks} blocks), expected NULL"
    ))
    .boxed()
}

#[cold]
fn unknown_memory(io: &Io, address: usize, len_bytes: u64) -> Box<Failure> {
    Failure::usage(format_args!(
        "I/O {:#x}: {len_bytes} bytes at {address:#x}, expected a part of a buffer of \
         tenmil_buffer_alloc() or of registered memory, shorter than 4 GiB",
        io.token
    ))
    .with_hint("Register other memory by tenmil_memory_register().")
    .boxed()
}

#[cold]
fn wrong_segments(io: &Io, len_bytes: u64, pieces: &[IoSegment]) -> Box<Failure> {
    let sum = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.len));
    Failure::usage(format_args!(
        "I/O {:#x}: the segments have {sum} bytes, expected {len_bytes}, as long as the blocks",
        io.token
    ))
    .boxed()
}
