//! Requests of a virtqueue, by the head of their descriptor chain. Accesses memory only.
//!
//! ```text
//!   ring ── take, mark ──▶ valid? ── yes ──▶ request ── I/O channel ──▶ completion ──┐
//!     ▲                      └── no ───────────────────────────────────────────────┤
//!     └── publish, unmark ◀── push ◀── status ◀──────────────────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::fmt;

use tenmil_base::{IoCompletion, Memory, Request, Segment};
use tenmil_vhost_user::inflight::InflightLog;
use tenmil_vhost_user::virtio_blk::{
    BlkRequestHeader, BlkRequestType, BlkStatus, DiscardSegment, HEADER_BYTES, STRETCH_BYTES,
};
use tenmil_vhost_user::{DescriptorChain, GuestMemory, Vring, VringError};

use super::disk::{DiskRequest, VirtioDisk, virtio_status};

/// Request table of a virtqueue.
#[derive(Debug)]
pub(super) struct RequestTable<M> {
    memory: M,
    disk: VirtioDisk,
    features: u64,
    ring: Vring<M>,
    record: Option<InflightLog<M>>,
    /// Heads that an earlier process had in flight, oldest first.
    again: VecDeque<u16>,
    /// Outstanding requests by head.
    slots: Box<[Option<RequestSlot>]>,
    chain: DescriptorChain,
    /// Requests to submit, and their segment table.
    requests: Vec<Request>,
    segments: Vec<Segment>,
    /// Requests submitted and not completed.
    in_flight: usize,
    /// Whether used entries were added and not published.
    is_unpublished: bool,
}

/// Outstanding virtio-blk request.
#[derive(Clone, Copy, Debug)]
struct RequestSlot {
    /// Location of its status byte.
    status: Segment,
    /// Bytes of data written to guest memory on success.
    written: u32,
}

/// Constructor arguments of a queue.
#[derive(Debug)]
pub(super) struct QueueParts<M> {
    pub(super) memory: M,
    pub(super) disk: VirtioDisk,
    pub(super) features: u64,
    pub(super) ring: Vring<M>,
    pub(super) size: u16,
    /// Inflight record, and the heads that were in flight.
    pub(super) record: Option<(InflightLog<M>, Vec<u16>)>,
}

/// Why a virtqueue cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueFault {
    /// The driver violated the ring's rules.
    Ring(VringError),
    /// The I/O channel completed a request that was not submitted.
    Unasked(u64),
}

/// Largest number of chains taken at once.
const BATCH: usize = 64;

impl<M: Memory + Clone> RequestTable<M> {
    /// Creates the table. It starts with the requests that an earlier process had in flight.
    ///
    /// # Errors
    ///
    /// If their record is invalid.
    pub(super) fn new(parts: QueueParts<M>) -> Result<Self, VringError> {
        let QueueParts { memory, disk, features, ring, size, record } = parts;
        let (record, again) = record.unzip();
        let again: VecDeque<u16> = again.unwrap_or_default().into();
        if let Some(found) = again.iter().copied().find(|head| *head >= size) {
            return Err(VringError::Descriptor { found, size });
        }
        Ok(Self {
            memory,
            disk,
            features,
            ring,
            record,
            again,
            slots: vec![None; usize::from(size)].into(),
            chain: DescriptorChain::default(),
            requests: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(BATCH),
            in_flight: 0,
            is_unpublished: false,
        })
    }

    /// Changes the number of blocks.
    pub(super) fn set_block_count(&mut self, block_count: u64) {
        self.disk.set_block_count(block_count);
    }

    /// Takes chains, if the I/O channel has accepted all earlier requests: first those of an
    /// earlier process, then new ones if `wants_new`. Returns how many.
    #[inline]
    pub(super) fn receive_chains(
        &mut self,
        space: &GuestMemory,
        wants_new: bool,
    ) -> Result<usize, QueueFault> {
        if !self.requests.is_empty() {
            return Ok(0);
        }
        self.segments.clear();
        for count in 0..BATCH {
            let head = match self.again.pop_front() {
                Some(head) => head,
                None if !wants_new => return Ok(count),
                None => match self.ring.take_head()? {
                    None => return Ok(count),
                    Some(head) => {
                        self.mark_in_flight(head)?;
                        head
                    }
                },
            };
            self.parse_chain(head, space)?;
        }
        Ok(BATCH)
    }

    #[inline]
    fn mark_in_flight(&mut self, head: u16) -> Result<(), VringError> {
        if self.slots[usize::from(head)].is_some() {
            return Err(VringError::DuplicateHead { head });
        }
        match &mut self.record {
            Some(record) => record.mark_in_flight(head),
            None => Ok(()),
        }
    }

    /// Turns a chain into a request, or completes it at once.
    #[inline]
    fn parse_chain(&mut self, head: u16, space: &GuestMemory) -> Result<(), QueueFault> {
        self.ring.resolve_chain(head, space, &mut self.chain)?;
        let DescriptorChain { readable_bytes: readable, writable_bytes: writable, .. } = self.chain;
        if readable < HEADER_BYTES.into() || writable == 0 {
            return Err(VringError::Short { head, readable, writable }.into());
        }
        // The status is the last writable byte, whatever the descriptors (VIRTIO 1.2 §5.2.6, §2.7.4).
        let Some(status) = self.chain.writable.last_mut().and_then(split_last_byte) else {
            return Err(VringError::Short { head, readable, writable }.into());
        };
        let mut bytes = [0; HEADER_BYTES as usize];
        gather_bytes(&self.memory, &self.chain.readable, 0, &mut bytes)?;
        let header = BlkRequestHeader::parse(bytes);
        let first = self.segments.len();
        let asked = match header.kind {
            BlkRequestType::Read => {
                let data = self.chain.writable.iter().filter(|piece| piece.len_bytes > 0);
                self.segments.extend(data);
                let count = self.segments.len() - first;
                self.disk.validate_transfer(header, writable - 1, count, self.features).map(Some)
            }
            BlkRequestType::Write => {
                append_segments_after(&self.chain.readable, HEADER_BYTES, &mut self.segments);
                let (count, len_bytes) =
                    (self.segments.len() - first, readable - u64::from(HEADER_BYTES));
                self.disk.validate_transfer(header, len_bytes, count, self.features).map(Some)
            }
            BlkRequestType::Flush => Ok(self.disk.validate_flush()),
            BlkRequestType::Discard | BlkRequestType::WriteZeroes => {
                self.parse_discard(header.kind, readable)?.map(Some)
            }
            BlkRequestType::GetId => return self.handle_get_id(head, status),
            BlkRequestType::Other(_) => Err(BlkStatus::UNSUPPORTED),
        };
        match asked {
            Ok(Some(ask)) => {
                let is_read = ask.operation == tenmil_base::Operation::Read;
                let written = if is_read { writable - 1 } else { 0 };
                let written = u32::try_from(written).unwrap_or(u32::MAX);
                self.slots[usize::from(head)] = Some(RequestSlot { status, written });
                self.queue_request(head, ask, first);
                Ok(())
            }
            Ok(None) => self.complete_chain(head, status, BlkStatus::OK, 0),
            Err(why) => {
                self.segments.truncate(first);
                self.complete_chain(head, status, why, 0)
            }
        }
    }

    #[inline]
    fn queue_request(&mut self, head: u16, ask: DiskRequest, first: usize) {
        let DiskRequest { operation, flags, lba, blocks } = ask;
        let count = self.segments.len() - first;
        self.requests.push(Request {
            token: head.into(),
            lba,
            operand: 0,
            segment_first: u32::try_from(first).unwrap_or(u32::MAX),
            blocks,
            segment_count: u16::try_from(count).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation,
            flags,
        });
    }

    /// Parses a discard or write-zeroes request: exactly one segment, as the configuration space
    /// announces.
    fn parse_discard(
        &self,
        kind: BlkRequestType,
        readable: u64,
    ) -> Result<Result<DiskRequest, BlkStatus>, QueueFault> {
        if readable != u64::from(HEADER_BYTES + STRETCH_BYTES) {
            return Ok(Err(BlkStatus::UNSUPPORTED));
        }
        let mut bytes = [0; STRETCH_BYTES as usize];
        gather_bytes(&self.memory, &self.chain.readable, HEADER_BYTES, &mut bytes)?;
        Ok(self.disk.validate_discard(kind, DiscardSegment::parse(bytes)))
    }

    fn handle_get_id(&mut self, head: u16, status: Segment) -> Result<(), QueueFault> {
        let id = self.disk.device_id();
        let mut written = 0;
        for piece in &self.chain.writable {
            let rest = &id[written..];
            let count = rest.len().min(piece.len_bytes as usize);
            let len_bytes = u32::try_from(count).unwrap_or(0);
            let place = Segment { len_bytes, ..*piece };
            self.memory.store(place, &rest[..count]).map_err(|_| VringError::Unmapped)?;
            written += count;
        }
        let written = u32::try_from(written).unwrap_or(0);
        self.complete_chain(head, status, BlkStatus::OK, written)
    }

    /// Handles a completion. It is dropped if the queue has failed (`is_over`).
    #[inline]
    pub(super) fn handle_completion(
        &mut self,
        completion: IoCompletion,
        is_over: bool,
    ) -> Result<(), QueueFault> {
        let index = usize::try_from(completion.token).unwrap_or(usize::MAX);
        let slot = self.slots.get_mut(index).and_then(Option::take);
        let (Some(slot), Ok(head)) = (slot, u16::try_from(completion.token)) else {
            return Err(QueueFault::Unasked(completion.token));
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        if is_over {
            return Ok(());
        }
        let RequestSlot { status: place, written } = slot;
        let status = virtio_status(completion.status);
        let written = if status == BlkStatus::OK { written } else { 0 };
        self.complete_chain(head, place, status, written)
    }

    /// Completes a request to the guest. The status byte counts as written.
    #[inline]
    fn complete_chain(
        &mut self,
        head: u16,
        place: Segment,
        status: BlkStatus,
        written: u32,
    ) -> Result<(), QueueFault> {
        self.memory.store(place, &[status.0]).map_err(|_| VringError::Unmapped)?;
        self.ring.write_used(head, written + 1)?;
        if let Some(record) = &mut self.record {
            record.add_to_batch(head)?;
        }
        self.is_unpublished = true;
        Ok(())
    }

    /// Publishes the used entries. Returns whether the driver requests an interrupt.
    #[inline]
    pub(super) fn publish_used(&mut self) -> Result<bool, QueueFault> {
        if !self.is_unpublished {
            return Ok(false);
        }
        self.is_unpublished = false;
        self.ring.publish_used_index()?;
        if let Some(record) = &mut self.record {
            record.publish_batch(self.ring.used_index())?;
        }
        Ok(self.ring.needs_interrupt()?)
    }

    /// Enables kicks. Returns true if a chain is available already.
    pub(super) fn enable_kicks(&mut self) -> Result<bool, QueueFault> {
        Ok(self.ring.enable_kicks()? || !self.again.is_empty())
    }

    /// Disables kicks.
    pub(super) fn disable_kicks(&mut self) -> Result<(), QueueFault> {
        Ok(self.ring.disable_kicks()?)
    }

    /// Requests to submit, and their segment table.
    #[inline]
    pub(super) fn pending_requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// Records that the I/O channel accepted the first `count` of them.
    #[inline]
    pub(super) fn record_submitted(&mut self, count: usize) {
        self.in_flight += count;
        self.requests.drain(..count);
    }

    /// Requests submitted and not completed.
    #[inline]
    pub(super) fn in_flight_requests(&self) -> usize {
        self.in_flight
    }

    /// Whether everything taken has completed.
    pub(super) fn is_drained(&self) -> bool {
        self.in_flight == 0 && self.requests.is_empty() && self.again.is_empty()
    }

    /// Drops the requests that the I/O channel has not accepted.
    pub(super) fn drop_unsubmitted(&mut self) {
        self.requests.clear();
        self.again.clear();
    }

    /// Next available index.
    pub(super) fn vring_base(&self) -> u16 {
        self.ring.next_available_index()
    }
}

/// Splits the last byte off a segment.
#[inline]
fn split_last_byte(piece: &mut Segment) -> Option<Segment> {
    let last = piece.len_bytes.checked_sub(1)?;
    let byte = piece.slice(last, 1)?;
    piece.len_bytes = last;
    Some(byte)
}

/// Appends the segments after the first `skip` bytes of `pieces`.
#[inline]
fn append_segments_after(pieces: &[Segment], skip: u32, into: &mut Vec<Segment>) {
    let mut skip = skip;
    for piece in pieces {
        let here = skip.min(piece.len_bytes);
        skip -= here;
        into.extend(piece.slice(here, piece.len_bytes - here).filter(|rest| rest.len_bytes > 0));
    }
}

/// Loads bytes from `pieces`, starting at offset `skip`. The caller has checked the length.
#[inline]
fn gather_bytes<M: Memory>(
    memory: &M,
    pieces: &[Segment],
    skip: u32,
    into: &mut [u8],
) -> Result<(), VringError> {
    let (mut skip, mut rest) = (skip, into);
    for piece in pieces {
        let here = skip.min(piece.len_bytes);
        skip -= here;
        let left = piece.len_bytes - here;
        let count = u32::try_from(rest.len()).unwrap_or(u32::MAX).min(left);
        if count == 0 {
            continue;
        }
        let place = piece.slice(here, count).ok_or(VringError::Unmapped)?;
        let (first, others) = rest.split_at_mut(count as usize);
        memory.load(place, first).map_err(|_| VringError::Unmapped)?;
        rest = others;
    }
    if rest.is_empty() { Ok(()) } else { Err(VringError::Unmapped) }
}

impl From<VringError> for QueueFault {
    fn from(broken: VringError) -> Self {
        Self::Ring(broken)
    }
}

impl fmt::Display for QueueFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring(broken) => broken.fmt(out),
            Self::Unasked(token) => {
                write!(out, "the device completed {token}, which is not in flight")
            }
        }
    }
}
