//! I/O channel of an encrypted device.
//!
//! ```text
//!   write:  caller's memory ─▶ a few units at a time, encrypted ─▶ bounce buffer ─▶ device
//!   read:   device ─▶ bounce buffer ─▶ a few units at a time, decrypted ─▶ caller's memory
//! ```
//!
//! Every data request has a bounce buffer of its own, so the caller's memory never holds
//! ciphertext, and the device never accesses plaintext.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Memory, Operation, Request, Segment,
};
use tenmil_dma::{Region, RegionTable};

use crate::cipher::{CipherDirection, UNIT_BYTES, XtsCipher};
use crate::key::{XtsKey, zeroize};

/// I/O channel of an encrypted device.
pub(crate) struct CryptChannel {
    inner: Box<dyn IoChannel>,
    limits: Limits,
    regions: RegionTable,
    encrypt: XtsCipher,
    decrypt: XtsCipher,
    /// Bounce buffers, one per slot, contiguous. Only used pages take memory.
    buffers: Region,
    slots: Box<[RequestSlot]>,
    free: Vec<u32>,
    /// Segment table passed to the underlying device, one buffer per slot.
    table: Box<[Segment]>,
    /// Requests that the underlying device has not accepted yet.
    unsent: VecDeque<Request>,
    ready: VecDeque<IoCompletion>,
    completions: CompletionBatch,
    scratch: Box<[u8; SCRATCH_BYTES]>,
}

/// Request in progress.
struct RequestSlot {
    request: Request,
    segments: Vec<Segment>,
}

/// Maximum request length in bytes.
pub(crate) const BUFFER_BYTES: u32 = 128 << 10;
/// Maximum number of requests in progress, each with a buffer.
pub(crate) const DEPTH_MAX: u32 = 256;
/// 32 pages and one more for an unaligned start.
pub(crate) const SEGMENTS_MAX: u16 = 33;
/// Bytes encrypted at a time: they stay in the L1 cache.
const SCRATCH_BYTES: usize = 8 * UNIT_BYTES;

impl CryptChannel {
    pub(crate) fn new(
        inner: Box<dyn IoChannel>,
        key: &XtsKey,
        regions: RegionTable,
        limits: Limits,
    ) -> Result<Self, Error> {
        let cipher =
            |way| XtsCipher::new(key, way).ok_or("crypt: AWS-LC refuses the key, or has no memory");
        let depth = limits.depth_max;
        let idle = || RequestSlot {
            request: Request::PLACEHOLDER,
            segments: Vec::with_capacity(SEGMENTS_MAX.into()),
        };
        let size = depth as usize * BUFFER_BYTES as usize;
        let buffers = regions
            .allocate_region(size)
            .map_err(|error| format!("crypt: {error}"))
            .map_err(Error::environment)?;
        Ok(Self {
            encrypt: cipher(CipherDirection::Encrypt).map_err(Error::environment)?,
            decrypt: cipher(CipherDirection::Decrypt).map_err(Error::environment)?,
            buffers,
            slots: (0..depth).map(|_| idle()).collect(),
            free: (0..depth).rev().collect(),
            table: vec![Segment::default(); depth as usize].into(),
            unsent: VecDeque::with_capacity(depth as usize),
            ready: VecDeque::with_capacity(2 * depth as usize),
            completions: CompletionBatch::with_capacity(depth as usize),
            scratch: Box::new([0; SCRATCH_BYTES]),
            inner,
            limits,
            regions,
        })
    }

    /// Starts one request, for which a slot is free.
    fn start_request(&mut self, request: &Request, segments: &[Segment]) -> Result<(), IoStatus> {
        if !self.limits.operations.has(request.operation) {
            return Err(IoStatus::INVALID_OPCODE);
        }
        let own = if transfers_data(request) {
            self.valid_data_segments(request, segments)?
        } else {
            &[]
        };
        let place = self.free.pop().ok_or(IoStatus::INTERNAL_ERROR)?;
        let RequestSlot { request: kept, segments } = &mut self.slots[place as usize];
        *kept = *request;
        segments.clear();
        segments.extend_from_slice(own);
        let mut below = Request { token: place.into(), ..*request };
        if transfers_data(request) {
            let len_bytes = request.blocks * self.limits.block_size;
            let offset = u64::from(place) * u64::from(BUFFER_BYTES);
            self.table[place as usize] = Segment { offset, region: self.buffers.id(), len_bytes };
            (below.segment_first, below.segment_count) = (place, 1);
            // Writes and compares are encrypted here, reads are decrypted at completion.
            if request.operation != Operation::Read
                && let Err(status) = self.crypt_slot_data(place, CipherDirection::Encrypt)
            {
                self.free.push(place);
                return Err(status);
            }
        }
        self.unsent.push_back(below);
        Ok(())
    }

    /// Checks the segments of a data request, which must be as long as its blocks.
    fn valid_data_segments<'a>(
        &self,
        request: &Request,
        segments: &'a [Segment],
    ) -> Result<&'a [Segment], IoStatus> {
        let end = request.lba.checked_add(request.blocks.into());
        if end.is_none_or(|end| end > self.limits.block_count) {
            return Err(IoStatus::LBA_OUT_OF_RANGE);
        }
        let first = request.segment_first as usize;
        let own = segments.get(first..first + usize::from(request.segment_count));
        let own = own.ok_or(IoStatus::INVALID_FIELD)?;
        let len_bytes: u64 = own.iter().map(|segment| u64::from(segment.len_bytes)).sum();
        let good = request.blocks <= self.limits.request_blocks_max
            && request.segment_count <= SEGMENTS_MAX
            && request.metadata_count == 0
            && len_bytes == u64::from(request.blocks) * u64::from(self.limits.block_size);
        if good { Ok(own) } else { Err(IoStatus::INVALID_FIELD) }
    }

    /// Encrypts or decrypts the data of a slot between its buffer and its caller's memory.
    fn crypt_slot_data(&mut self, place: u32, direction: CipherDirection) -> Result<(), IoStatus> {
        let RequestSlot { request, segments } = &self.slots[place as usize];
        let buffer = self.table[place as usize];
        let mut memory = SegmentCursor { segments, skip_bytes: 0 };
        let units = u64::from(self.limits.block_size) / UNIT_BYTES as u64;
        let mut unit = request.lba * units;
        let mut done = 0;
        // In pieces that stay in the L1 cache; the caller's memory is never modified by a write.
        while done < buffer.len_bytes {
            let left = (buffer.len_bytes - done) as usize;
            let scratch = &mut self.scratch[..left.min(SCRATCH_BYTES)];
            let len_bytes = u32::try_from(scratch.len()).map_err(|_| IoStatus::INTERNAL_ERROR)?;
            let piece = buffer.slice(done, len_bytes).ok_or(IoStatus::INTERNAL_ERROR)?;
            let (cipher, regions) = match direction {
                CipherDirection::Encrypt => (&mut self.encrypt, &self.regions),
                CipherDirection::Decrypt => (&mut self.decrypt, &self.regions),
            };
            let moved = match direction {
                CipherDirection::Encrypt => memory.load(regions, scratch),
                CipherDirection::Decrypt => regions.load(piece, scratch).is_ok(),
            };
            if !moved {
                return Err(IoStatus::DATA_TRANSFER_ERROR);
            }
            if !cipher.apply_to_units(unit, scratch) {
                return Err(IoStatus::INTERNAL_ERROR);
            }
            let moved = match direction {
                CipherDirection::Encrypt => regions.store(piece, scratch).is_ok(),
                CipherDirection::Decrypt => memory.store(regions, scratch),
            };
            if !moved {
                return Err(IoStatus::DATA_TRANSFER_ERROR);
            }
            done += len_bytes;
            unit += u64::from(len_bytes) / UNIT_BYTES as u64;
        }
        Ok(())
    }

    /// Handles a completion of the underlying device.
    fn handle_completion(&mut self, completion: &IoCompletion) {
        let Ok(place) = u32::try_from(completion.token) else { return };
        let Request { token, operation, blocks, .. } = self.slots[place as usize].request;
        let mut status = completion.status;
        if status.is_success() && operation == Operation::Read && blocks > 0 {
            status =
                self.crypt_slot_data(place, CipherDirection::Decrypt).err().unwrap_or_default();
        }
        self.free.push(place);
        self.ready.push_back(IoCompletion { token, status, ..*completion });
    }

    fn submit_unsent(&mut self, now: Instant) {
        if !self.unsent.is_empty() {
            let taken = self.inner.submit(now, self.unsent.make_contiguous(), &self.table);
            self.unsent.drain(..taken);
        }
    }
}

/// Whether a request transfers data.
const fn transfers_data(request: &Request) -> bool {
    matches!(request.operation, Operation::Read | Operation::Write | Operation::Compare)
}

impl IoChannel for CryptChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // A completion that waits to be polled has freed its slot but still counts.
        let count = requests.len().min(self.free.len().saturating_sub(self.ready.len()));
        for request in &requests[..count] {
            if let Err(status) = self.start_request(request, segments) {
                self.ready.push_back(IoCompletion { token: request.token, status, result: 0 });
            }
        }
        self.submit_unsent(now);
        count
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut below = std::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
        self.inner.poll(now, &mut below);
        below.drain().for_each(|completion| self.handle_completion(&completion));
        self.completions = below;
        if !self.unsent.is_empty() {
            self.submit_unsent(now);
            self.inner.flush_submissions();
        }
        let count = completions.remaining().min(self.ready.len());
        self.ready.drain(..count).for_each(|completion| completions.push(completion));
        count
    }
}

impl ChannelWakeup for CryptChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }

    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { self.inner.wake_at() } else { Instant::default() }
    }

    fn arm(&mut self) -> bool {
        let busy = !self.ready.is_empty() || !self.unsent.is_empty();
        self.inner.arm() || busy
    }
}

impl Drop for CryptChannel {
    fn drop(&mut self) {
        zeroize(&mut self.scratch[..]);
    }
}

/// Cursor over a segment list, independent of the segment boundaries.
struct SegmentCursor<'a> {
    segments: &'a [Segment],
    skip_bytes: u32,
}

impl SegmentCursor<'_> {
    fn load(&mut self, regions: &RegionTable, mut into: &mut [u8]) -> bool {
        while !into.is_empty() {
            let Some(piece) = self.take_segment(into.len()) else { return false };
            let (part, rest) = into.split_at_mut(piece.len_bytes as usize);
            if regions.load(piece, part).is_err() {
                return false;
            }
            into = rest;
        }
        true
    }

    fn store(&mut self, regions: &RegionTable, mut from: &[u8]) -> bool {
        while !from.is_empty() {
            let Some(piece) = self.take_segment(from.len()) else { return false };
            let (part, rest) = from.split_at(piece.len_bytes as usize);
            if regions.store(piece, part).is_err() {
                return false;
            }
            from = rest;
        }
        true
    }

    /// Takes up to `len` bytes from the front, within one segment.
    fn take_segment(&mut self, len: usize) -> Option<Segment> {
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
