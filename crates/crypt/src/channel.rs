//! One thread's way to an encrypted device.
//!
//! ```text
//!   write:  caller's memory ─▶ a few units at a time, encrypted ─▶ bounce buffer ─▶ device
//!   read:   device ─▶ bounce buffer ─▶ a few units at a time, decrypted ─▶ caller's memory
//! ```
//!
//! Every request that moves data has a buffer of its own, so the caller's memory never holds what
//! the device holds, and the device never sees what the caller's memory holds.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Memory, Operation, Outcome, Request,
    Segment, WakeSource,
};
use dma::{Region, Regions};

use crate::cipher::{Direction, UNIT_BYTES, Xts};
use crate::key::{Key, wipe};

/// A channel.
pub(crate) struct CryptChannel {
    inner: Box<dyn Backend>,
    limits: Limits,
    regions: Regions,
    encrypt: Xts,
    decrypt: Xts,
    /// A buffer for each place, one behind the other. Only pages that were used take memory.
    buffers: Region,
    places: Box<[Place]>,
    free: Vec<u32>,
    /// The buffers as the device is told about them, one for each place.
    table: Box<[Segment]>,
    /// What the device has not taken yet.
    unsent: VecDeque<Request>,
    ready: VecDeque<Answer>,
    below: Answers,
    scratch: Box<[u8; SCRATCH_BYTES]>,
}

/// A request under way.
struct Place {
    request: Request,
    segments: Vec<Segment>,
}

/// Bytes in the largest request.
pub(crate) const BUFFER_BYTES: u32 = 128 << 10;
/// Requests under way, each with a buffer.
pub(crate) const DEPTH_MAX: u32 = 256;
/// 32 pages and the one that an unaligned start adds.
pub(crate) const SEGMENTS_MAX: u16 = 33;
/// How much is encrypted at once: it stays in the nearest cache.
const SCRATCH_BYTES: usize = 8 * UNIT_BYTES;

impl CryptChannel {
    pub(crate) fn new(
        inner: Box<dyn Backend>,
        key: &Key,
        regions: Regions,
        limits: Limits,
    ) -> Result<Self, String> {
        let cipher =
            |way| Xts::new(key, way).ok_or("crypt: AWS-LC refuses the key, or has no memory");
        let depth = limits.depth_max;
        let idle = || Place {
            request: Request::NOTHING,
            segments: Vec::with_capacity(SEGMENTS_MAX.into()),
        };
        let size = depth as usize * BUFFER_BYTES as usize;
        let buffers = regions.allocate(size).map_err(|error| format!("crypt: {error}"))?;
        Ok(Self {
            encrypt: cipher(Direction::Encrypt)?,
            decrypt: cipher(Direction::Decrypt)?,
            buffers,
            places: (0..depth).map(|_| idle()).collect(),
            free: (0..depth).rev().collect(),
            table: vec![Segment::default(); depth as usize].into(),
            unsent: VecDeque::with_capacity(depth as usize),
            ready: VecDeque::with_capacity(2 * depth as usize),
            below: Answers::with_capacity(depth as usize),
            scratch: Box::new([0; SCRATCH_BYTES]),
            inner,
            limits,
            regions,
        })
    }

    /// Takes one request; there is a place for it.
    fn take(&mut self, request: &Request, segments: &[Segment]) -> Result<(), Outcome> {
        if !self.limits.support.has(request.operation) {
            return Err(Outcome::INVALID_OPCODE);
        }
        let own = if moves(request) { self.check(request, segments)? } else { &[] };
        let place = self.free.pop().ok_or(Outcome::INTERNAL_ERROR)?;
        let Place { request: kept, segments } = &mut self.places[place as usize];
        *kept = *request;
        segments.clear();
        segments.extend_from_slice(own);
        let mut below = Request { token: place.into(), ..*request };
        if moves(request) {
            let len_bytes = request.blocks * self.limits.block_size;
            let offset = u64::from(place) * u64::from(BUFFER_BYTES);
            self.table[place as usize] = Segment { offset, region: self.buffers.id(), len_bytes };
            (below.segment_first, below.segment_count) = (place, 1);
            if request.operation != Operation::Read
                && let Err(outcome) = self.translate(place, Direction::Encrypt)
            {
                self.free.push(place);
                return Err(outcome);
            }
        }
        self.unsent.push_back(below);
        Ok(())
    }

    /// The segments of a request that moves data, which must be as long as its blocks.
    fn check<'a>(
        &self,
        request: &Request,
        segments: &'a [Segment],
    ) -> Result<&'a [Segment], Outcome> {
        let end = request.lba.checked_add(request.blocks.into());
        if end.is_none_or(|end| end > self.limits.block_count) {
            return Err(Outcome::LBA_OUT_OF_RANGE);
        }
        let first = request.segment_first as usize;
        let own = segments.get(first..first + usize::from(request.segment_count));
        let own = own.ok_or(Outcome::INVALID_FIELD)?;
        let len_bytes: u64 = own.iter().map(|segment| u64::from(segment.len_bytes)).sum();
        let good = request.blocks <= self.limits.request_blocks_max
            && request.segment_count <= SEGMENTS_MAX
            && request.metadata_count == 0
            && len_bytes == u64::from(request.blocks) * u64::from(self.limits.block_size);
        if good { Ok(own) } else { Err(Outcome::INVALID_FIELD) }
    }

    /// Moves the data of a place between its buffer and its caller's memory, encrypted on one side.
    fn translate(&mut self, place: u32, direction: Direction) -> Result<(), Outcome> {
        let Place { request, segments } = &self.places[place as usize];
        let buffer = self.table[place as usize];
        let mut memory = Walk { segments, skip_bytes: 0 };
        let units = u64::from(self.limits.block_size) / UNIT_BYTES as u64;
        let mut unit = request.lba * units;
        let mut done = 0;
        while done < buffer.len_bytes {
            let left = (buffer.len_bytes - done) as usize;
            let scratch = &mut self.scratch[..left.min(SCRATCH_BYTES)];
            let len_bytes = u32::try_from(scratch.len()).map_err(|_| Outcome::INTERNAL_ERROR)?;
            let piece = buffer.slice(done, len_bytes).ok_or(Outcome::INTERNAL_ERROR)?;
            let (cipher, regions) = match direction {
                Direction::Encrypt => (&mut self.encrypt, &self.regions),
                Direction::Decrypt => (&mut self.decrypt, &self.regions),
            };
            let moved = match direction {
                Direction::Encrypt => memory.load(regions, scratch),
                Direction::Decrypt => regions.load(piece, scratch).is_ok(),
            };
            if !moved {
                return Err(Outcome::DATA_TRANSFER_ERROR);
            }
            if !cipher.apply(unit, scratch) {
                return Err(Outcome::INTERNAL_ERROR);
            }
            let moved = match direction {
                Direction::Encrypt => regions.store(piece, scratch).is_ok(),
                Direction::Decrypt => memory.store(regions, scratch),
            };
            if !moved {
                return Err(Outcome::DATA_TRANSFER_ERROR);
            }
            done += len_bytes;
            unit += u64::from(len_bytes) / UNIT_BYTES as u64;
        }
        Ok(())
    }

    /// The device has answered.
    fn ended(&mut self, answer: &Answer) {
        let Ok(place) = u32::try_from(answer.token) else { return };
        let Request { token, operation, blocks, .. } = self.places[place as usize].request;
        let mut outcome = answer.outcome;
        if outcome.is_success() && operation == Operation::Read && blocks > 0 {
            outcome = self.translate(place, Direction::Decrypt).err().unwrap_or_default();
        }
        self.free.push(place);
        self.ready.push_back(Answer { token, outcome, ..*answer });
    }

    fn send(&mut self, now: Instant) {
        if !self.unsent.is_empty() {
            let taken = self.inner.submit(now, self.unsent.make_contiguous(), &self.table);
            self.unsent.drain(..taken);
        }
    }
}

/// Whether a request has data in memory.
const fn moves(request: &Request) -> bool {
    matches!(request.operation, Operation::Read | Operation::Write | Operation::Compare)
}

impl Backend for CryptChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // An answer that waits to be polled has given its place back, and still counts.
        let count = requests.len().min(self.free.len().saturating_sub(self.ready.len()));
        for request in &requests[..count] {
            if let Err(outcome) = self.take(request, segments) {
                self.ready.push_back(Answer { token: request.token, outcome, result: 0 });
            }
        }
        self.send(now);
        count
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let mut below = std::mem::replace(&mut self.below, Answers::with_capacity(0));
        self.inner.poll(now, &mut below);
        below.drain().for_each(|answer| self.ended(&answer));
        self.below = below;
        if !self.unsent.is_empty() {
            self.send(now);
            self.inner.flush();
        }
        let count = answers.room().min(self.ready.len());
        self.ready.drain(..count).for_each(|answer| answers.push(answer));
        count
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.inner.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { self.inner.wake_at() } else { Instant::default() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.inner.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.inner.is_done_by_kernel()
    }

    fn arm(&mut self) -> bool {
        let busy = !self.ready.is_empty() || !self.unsent.is_empty();
        self.inner.arm() || busy
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.inner.acknowledge_losses()
    }
}

impl Drop for CryptChannel {
    fn drop(&mut self) {
        wipe(&mut self.scratch[..]);
    }
}

/// A walk through segments in steps that have nothing to do with where they are cut.
struct Walk<'a> {
    segments: &'a [Segment],
    skip_bytes: u32,
}

impl Walk<'_> {
    fn load(&mut self, regions: &Regions, mut into: &mut [u8]) -> bool {
        while !into.is_empty() {
            let Some(piece) = self.take(into.len()) else { return false };
            let (part, rest) = into.split_at_mut(piece.len_bytes as usize);
            if regions.load(piece, part).is_err() {
                return false;
            }
            into = rest;
        }
        true
    }

    fn store(&mut self, regions: &Regions, mut from: &[u8]) -> bool {
        while !from.is_empty() {
            let Some(piece) = self.take(from.len()) else { return false };
            let (part, rest) = from.split_at(piece.len_bytes as usize);
            if regions.store(piece, part).is_err() {
                return false;
            }
            from = rest;
        }
        true
    }

    /// At most `len` bytes off the front, without crossing the end of a segment.
    fn take(&mut self, len: usize) -> Option<Segment> {
        loop {
            let (first, rest) = self.segments.split_first()?;
            let left = first.len_bytes - self.skip_bytes;
            if left == 0 {
                (self.segments, self.skip_bytes) = (rest, 0);
                continue;
            }
            let count = left.min(u32::try_from(len).unwrap_or(u32::MAX));
            let piece = first.slice(self.skip_bytes, count)?;
            self.skip_bytes += count;
            return Some(piece);
        }
    }
}
