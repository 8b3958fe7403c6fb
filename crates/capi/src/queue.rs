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
use crate::in_flight::InFlightCounters;
use crate::io::{
    Completion, Io, IoSegment, TENMIL_IO_DEALLOCATE, TENMIL_IO_FUA, TENMIL_OP_READ,
    TENMIL_OP_WRITE, data_copies, operation_of,
};
use crate::program_memory::RangeLookup;
use crate::status::class_of;

/// Fields in the order in which they are dropped: the channel waits until its requests have ended.
pub(crate) struct Queue {
    channel: Box<dyn IoChannel>,
    slots: SlotTable,
    /// Requests and segments of the batch that is being submitted.
    requests: Vec<Request>,
    segments: Vec<Segment>,
    completions: CompletionBatch,
    /// Completions that have been returned, of those in `completions`.
    returned: usize,
    ranges: RangeLookup,
    counters: InFlightCounters,
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

/// I/Os in flight, by the token of their request.
struct SlotTable {
    slots: Box<[Slot]>,
    free: Vec<u32>,
    /// Counters of I/Os with several segments, by slot.
    several: Box<[Vec<u32>]>,
}

/// I/O in flight.
#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    /// Counter of its memory, or [`NONE`] or [`SEVERAL`].
    counter: u32,
    is_in_flight: bool,
}

const _: () = assert!(size_of::<Slot>() == 16);

/// The I/O has no memory.
const NONE: u32 = u32::MAX;
/// The counters are those of each of its segments.
const SEVERAL: u32 = u32::MAX - 1;

/// Maximum number of completions that a poll of the channel returns.
const BATCH_MAX: usize = 256;

/// Maximum depth of a queue. The counters of memory have 16 bits.
pub(crate) const DEPTH_MAX: u32 = 32_768;

impl Queue {
    pub(crate) fn new(device: Arc<Device>, channel: Box<dyn IoChannel>, depth: u32) -> Self {
        let limits = channel.limits();
        let (block_shift, supported) = (limits.block_size.trailing_zeros(), limits.operations);
        let blocks_max = limits.request_blocks_max;
        let checked_block_count = if device.is_direct { limits.block_count } else { u64::MAX };
        let memory = &device.context.memory;
        let (ranges, counters, clock) = (memory.lookup(), memory.add_queue(), device.context.clock);
        let depth = depth as usize;
        Self {
            channel,
            slots: SlotTable::new(depth),
            requests: Vec::with_capacity(depth),
            segments: Vec::with_capacity(depth),
            completions: CompletionBatch::with_capacity(depth.min(BATCH_MAX)),
            returned: 0,
            ranges,
            counters,
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
        self.slots.slots.len()
    }

    /// Number of I/Os that were submitted and whose completion has not been returned.
    pub(crate) fn in_flight(&self) -> usize {
        self.depth() - self.slots.free.len()
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
        self.requests.clear();
        self.segments.clear();
        let most = ios.len().min(self.slots.free.len());
        let mut refused = None;
        for io in &ios[..most] {
            // SAFETY: the caller promises the same of the segments.
            if let Err(why) = unsafe { self.prepare(io) } {
                refused = Some(why);
                break;
            }
        }
        let prepared = self.requests.len();
        match refused {
            Some(why) if prepared == 0 => return Err(*why),
            _ if prepared == 0 => return Ok(0),
            _ => {}
        }
        let now = self.clock.now();
        let taken = self.channel.submit(now, &self.requests, &self.segments);
        self.channel.flush_submissions();
        // In reverse, so that slots are reused in the same order.
        for request in self.requests[taken..].iter().rev() {
            self.slots.release(slot_of(request.token), &self.counters);
        }
        Ok(taken)
    }

    /// Checks an I/O, and appends its request and its segments.
    ///
    /// # Safety
    ///
    /// Its segments are valid for reads, or their number is zero.
    #[inline]
    unsafe fn prepare(&mut self, io: &Io) -> Result<(), Box<Failure>> {
        let end = io.lba.checked_add(io.blocks.into());
        let is_plain = io.operation <= TENMIL_OP_WRITE
            && io.flags & !TENMIL_IO_FUA == 0
            && io.segment_count == 0
            && io.blocks.wrapping_sub(1) < self.blocks_fast_max
            && end.is_some_and(|end| end <= self.checked_block_count);
        let operation =
            if io.operation == TENMIL_OP_READ { Operation::Read } else { Operation::Write };
        if !is_plain || !self.supported.has(operation) {
            // SAFETY: the caller promises the same of the segments.
            return unsafe { self.prepare_any(io) };
        }
        let len_bytes = io.blocks << self.block_shift;
        let Some((segment, counter)) = self.ranges.segment_at(io.data.addr(), len_bytes) else {
            return Err(unknown_memory(io, io.data.addr(), len_bytes.into()));
        };
        let first = self.segments.len();
        self.segments.push(segment);
        self.counters.add(counter);
        self.push_request(io, operation, first, 1, counter);
        Ok(())
    }

    /// The general case of [`prepare`](Self::prepare).
    ///
    /// # Safety
    ///
    /// Its segments are valid for reads, or their number is zero.
    #[inline(never)]
    unsafe fn prepare_any(&mut self, io: &Io) -> Result<(), Box<Failure>> {
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
        let len_bytes = (u64::from(io.blocks) << self.block_shift) * data_copies(operation);
        let first = self.segments.len();
        let counter = if len_bytes == 0 {
            if !io.data.is_null() || io.segment_count != 0 {
                return Err(memory_without_data(io));
            }
            NONE
        } else if io.segment_count == 0 {
            let found = u32::try_from(len_bytes)
                .ok()
                .and_then(|len_bytes| self.ranges.segment_at(io.data.addr(), len_bytes));
            let Some((segment, counter)) = found else {
                return Err(unknown_memory(io, io.data.addr(), len_bytes));
            };
            self.segments.push(segment);
            self.counters.add(counter);
            counter
        } else {
            // SAFETY: the caller promises the same of the segments.
            unsafe { self.add_segments(io, len_bytes) }?;
            SEVERAL
        };
        let count = self.segments.len() - first;
        self.push_request(io, operation, first, count, counter);
        Ok(())
    }

    /// Takes a slot, and appends the request.
    #[inline]
    fn push_request(
        &mut self,
        io: &Io,
        operation: Operation,
        first: usize,
        count: usize,
        counter: u32,
    ) {
        let slot = self.slots.take(io.token, counter);
        #[expect(clippy::cast_possible_truncation, reason = "a queue has less than 2^31 segments")]
        self.requests.push(Request {
            token: u64::from(slot),
            lba: io.lba,
            operand: if operation == Operation::Copy { io.source_lba } else { 0 },
            segment_first: first as u32,
            blocks: io.blocks,
            segment_count: count as u16,
            metadata_count: 0,
            operation,
            flags: RequestFlags(io.flags),
        });
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

    /// Appends the segments of an I/O, and counts it for each under the slot that it will have.
    ///
    /// # Safety
    ///
    /// Its segments are valid for reads.
    #[inline(never)]
    unsafe fn add_segments(&mut self, io: &Io, len_bytes: u64) -> Result<(), Box<Failure>> {
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
        // The slot that `take` will return.
        let next = self.slots.free.last().copied().unwrap_or(0) as usize;
        self.slots.several[next].clear();
        let refused = 'refused: {
            for piece in pieces {
                let found = u32::try_from(piece.len)
                    .ok()
                    .filter(|len_bytes| *len_bytes > 0)
                    .and_then(|len_bytes| self.ranges.segment_at(piece.data.addr(), len_bytes));
                let Some((segment, counter)) = found else {
                    break 'refused unknown_memory(io, piece.data.addr(), piece.len);
                };
                let Some(left) = rest.checked_sub(piece.len) else {
                    break 'refused wrong_segments(io, len_bytes, pieces);
                };
                rest = left;
                self.segments.push(segment);
                self.slots.several[next].push(counter);
            }
            if rest == 0 {
                self.slots.several[next].iter().for_each(|counter| self.counters.add(*counter));
                return Ok(());
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
        for (completion, into) in waiting[..count].iter().zip(into) {
            let IoCompletion { token, status, result } = *completion;
            let token = self.slots.release(slot_of(token), &self.counters);
            let status_class = class_of(status);
            into.write(Completion { token, result, status: status.0, status_class });
        }
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

impl SlotTable {
    fn new(depth: usize) -> Self {
        let unused = Slot { token: 0, counter: NONE, is_in_flight: false };
        let count = u32::try_from(depth).unwrap_or(u32::MAX);
        Self {
            slots: vec![unused; depth].into_boxed_slice(),
            free: (0..count).rev().collect(),
            several: vec![Vec::new(); depth].into_boxed_slice(),
        }
    }

    /// Takes a slot for an I/O. The caller has checked that one is free.
    #[inline]
    fn take(&mut self, token: u64, counter: u32) -> u32 {
        let Some(slot) = self.free.pop() else { unreachable!("the caller has checked it") };
        self.slots[slot as usize] = Slot { token, counter, is_in_flight: true };
        slot
    }

    /// Releases the slot of an I/O and the counters of its memory. Returns the token of the program.
    ///
    /// # Panics
    ///
    /// If the I/O is not in flight: a channel completes every request once.
    #[inline]
    fn release(&mut self, slot: usize, counters: &InFlightCounters) -> u64 {
        let entry = &mut self.slots[slot];
        let Slot { token, counter, .. } = *entry;
        assert!(std::mem::replace(&mut entry.is_in_flight, false), "one completion for a request");
        match counter {
            NONE => {}
            SEVERAL => self.several[slot].iter().for_each(|counter| counters.remove(*counter)),
            counter => counters.remove(counter),
        }
        #[expect(clippy::cast_possible_truncation, reason = "an index of the table")]
        self.free.push(slot as u32);
        token
    }
}

/// Slot of the token of a request.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "tokens are indices of the slot table")]
fn slot_of(token: u64) -> usize {
    token as usize
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
