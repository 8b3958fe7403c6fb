//! The requests of a queue, by the head of their chain. No I/O but on memory.
//!
//! ```text
//!   ring ── take, mark ──▶ is it sensible? ── yes ──▶ request ── backend ──▶ answer ──┐
//!     ▲                          └── no ──────────────────────────────────────────────┤
//!     └── publish, unmark ◀── push ◀── status ◀────────────────────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::fmt;

use base::{Answer, Memory, Request, Segment};
use vhost::blk::{HEADER_BYTES, Header, Kind, STRETCH_BYTES, Status, Stretch};
use vhost::inflight::Record;
use vhost::{Broken, Chain, Ring, Space};

use super::disk::{Ask, Disk, status};

/// A queue.
#[derive(Debug)]
pub(super) struct Slots<M> {
    memory: M,
    disk: Disk,
    features: u64,
    ring: Ring<M>,
    record: Option<Record<M>>,
    /// Heads that another process had in flight, oldest first.
    again: VecDeque<u16>,
    /// By head; none that is free.
    slots: Box<[Option<Slot>]>,
    chain: Chain,
    /// What the backend is to do next, and the table that it points into.
    requests: Vec<Request>,
    segments: Vec<Segment>,
    /// Requests that the backend has.
    in_flight: usize,
    /// Something was pushed and not published.
    is_unpublished: bool,
}

/// A request that the backend has, or is to have.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Where its guest looks how it ended.
    status: Segment,
    /// Bytes of data that it will have written there, if it goes well.
    written: u32,
}

/// What a queue is made of.
#[derive(Debug)]
pub(super) struct Parts<M> {
    pub(super) memory: M,
    pub(super) disk: Disk,
    pub(super) features: u64,
    pub(super) ring: Ring<M>,
    pub(super) size: u16,
    /// What keeps what is in flight, and what it has kept.
    pub(super) record: Option<(Record<M>, Vec<u16>)>,
}

/// Why nothing more can be taken from a queue, or given to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Its ring makes no sense.
    Ring(Broken),
    /// The backend has answered what it was not asked.
    Unasked(u64),
}

/// Chains that are taken at once.
const BATCH: usize = 64;

impl<M: Memory + Clone> Slots<M> {
    /// A queue, which begins with what another process had in flight.
    ///
    /// # Errors
    ///
    /// If that cannot be.
    pub(super) fn new(parts: Parts<M>) -> Result<Self, Broken> {
        let Parts { memory, disk, features, ring, size, record } = parts;
        let (record, again) = record.unzip();
        let again: VecDeque<u16> = again.unwrap_or_default().into();
        if let Some(found) = again.iter().copied().find(|head| *head >= size) {
            return Err(Broken::Descriptor { found, size });
        }
        Ok(Self {
            memory,
            disk,
            features,
            ring,
            record,
            again,
            slots: vec![None; usize::from(size)].into(),
            chain: Chain::default(),
            requests: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(BATCH),
            in_flight: 0,
            is_unpublished: false,
        })
    }

    /// The disk has so many blocks from now on.
    pub(super) fn resize(&mut self, block_count: u64) {
        self.disk.resize(block_count);
    }

    /// Takes chains, unless the backend has not taken all of those before: what was in flight in
    /// another process first, and new ones if they are wanted. How many that were.
    #[inline]
    pub(super) fn receive(&mut self, space: &Space, wants_new: bool) -> Result<usize, Fault> {
        if !self.requests.is_empty() {
            return Ok(0);
        }
        self.segments.clear();
        for count in 0..BATCH {
            let head = match self.again.pop_front() {
                Some(head) => head,
                None if !wants_new => return Ok(count),
                None => match self.ring.take()? {
                    None => return Ok(count),
                    Some(head) => {
                        self.mark(head)?;
                        head
                    }
                },
            };
            self.begin(head, space)?;
        }
        Ok(BATCH)
    }

    #[inline]
    fn mark(&mut self, head: u16) -> Result<(), Broken> {
        if self.slots[usize::from(head)].is_some() {
            return Err(Broken::Twice { head });
        }
        match &mut self.record {
            Some(record) => record.begin(head),
            None => Ok(()),
        }
    }

    /// Makes a request of a chain, or answers it at once.
    #[inline]
    fn begin(&mut self, head: u16, space: &Space) -> Result<(), Fault> {
        self.ring.follow(head, space, &mut self.chain)?;
        let Chain { readable_bytes: readable, writable_bytes: writable, .. } = self.chain;
        if readable < HEADER_BYTES.into() || writable == 0 {
            return Err(Broken::Short { head, readable, writable }.into());
        }
        let Some(status) = self.chain.writable.last_mut().and_then(cut_last) else {
            return Err(Broken::Short { head, readable, writable }.into());
        };
        let mut bytes = [0; HEADER_BYTES as usize];
        gather(&self.memory, &self.chain.readable, 0, &mut bytes)?;
        let header = Header::read(bytes);
        let first = self.segments.len();
        let asked = match header.kind {
            Kind::Read => {
                let data = self.chain.writable.iter().filter(|piece| piece.len_bytes > 0);
                self.segments.extend(data);
                let count = self.segments.len() - first;
                self.disk.transfer(header, writable - 1, count, self.features).map(Some)
            }
            Kind::Write => {
                append_after(&self.chain.readable, HEADER_BYTES, &mut self.segments);
                let (count, len_bytes) =
                    (self.segments.len() - first, readable - u64::from(HEADER_BYTES));
                self.disk.transfer(header, len_bytes, count, self.features).map(Some)
            }
            Kind::Flush => Ok(self.disk.flush()),
            Kind::Discard | Kind::WriteZeroes => self.stretch(header.kind, readable)?.map(Some),
            Kind::GetId => return self.tell_id(head, status),
            Kind::Other(_) => Err(Status::UNSUPPORTED),
        };
        match asked {
            Ok(Some(ask)) => {
                let is_read = ask.operation == base::Operation::Read;
                let written = if is_read { writable - 1 } else { 0 };
                let written = u32::try_from(written).unwrap_or(u32::MAX);
                self.slots[usize::from(head)] = Some(Slot { status, written });
                self.ask(head, ask, first);
                Ok(())
            }
            Ok(None) => self.end(head, status, Status::OK, 0),
            Err(why) => {
                self.segments.truncate(first);
                self.end(head, status, why, 0)
            }
        }
    }

    #[inline]
    fn ask(&mut self, head: u16, ask: Ask, first: usize) {
        let Ask { operation, flags, lba, blocks } = ask;
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

    /// What discarding or zeroing comes to: one stretch, as configuration space says.
    fn stretch(&self, kind: Kind, readable: u64) -> Result<Result<Ask, Status>, Fault> {
        if readable != u64::from(HEADER_BYTES + STRETCH_BYTES) {
            return Ok(Err(Status::UNSUPPORTED));
        }
        let mut bytes = [0; STRETCH_BYTES as usize];
        gather(&self.memory, &self.chain.readable, HEADER_BYTES, &mut bytes)?;
        Ok(self.disk.stretch(kind, Stretch::read(bytes)))
    }

    fn tell_id(&mut self, head: u16, status: Segment) -> Result<(), Fault> {
        let id = self.disk.id();
        let mut written = 0;
        for piece in &self.chain.writable {
            let rest = &id[written..];
            let count = rest.len().min(piece.len_bytes as usize);
            let len_bytes = u32::try_from(count).unwrap_or(0);
            let place = Segment { len_bytes, ..*piece };
            self.memory.store(place, &rest[..count]).map_err(|_| Broken::Gone)?;
            written += count;
        }
        let written = u32::try_from(written).unwrap_or(0);
        self.end(head, status, Status::OK, written)
    }

    /// The backend has answered. It is forgotten if the ring is `is_over`.
    #[inline]
    pub(super) fn answered(&mut self, answer: Answer, is_over: bool) -> Result<(), Fault> {
        let index = usize::try_from(answer.token).unwrap_or(usize::MAX);
        let slot = self.slots.get_mut(index).and_then(Option::take);
        let (Some(slot), Ok(head)) = (slot, u16::try_from(answer.token)) else {
            return Err(Fault::Unasked(answer.token));
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        if is_over {
            return Ok(());
        }
        let Slot { status: place, written } = slot;
        let status = status(answer.outcome);
        let written = if status == Status::OK { written } else { 0 };
        self.end(head, place, status, written)
    }

    /// Tells the guest how a request ended. The status is one of the bytes that were written.
    #[inline]
    fn end(
        &mut self,
        head: u16,
        place: Segment,
        status: Status,
        written: u32,
    ) -> Result<(), Fault> {
        self.memory.store(place, &[status.0]).map_err(|_| Broken::Gone)?;
        self.ring.push(head, written + 1)?;
        if let Some(record) = &mut self.record {
            record.push(head)?;
        }
        self.is_unpublished = true;
        Ok(())
    }

    /// Lets the driver see what has ended. Whether it wants to be called about it.
    #[inline]
    pub(super) fn publish(&mut self) -> Result<bool, Fault> {
        if !self.is_unpublished {
            return Ok(false);
        }
        self.is_unpublished = false;
        self.ring.publish()?;
        if let Some(record) = &mut self.record {
            record.publish(self.ring.used())?;
        }
        Ok(self.ring.wants_call()?)
    }

    /// Asks for a kick with the next chain. True if there is one already.
    pub(super) fn ask_for_kicks(&mut self) -> Result<bool, Fault> {
        Ok(self.ring.ask_for_kicks()? || !self.again.is_empty())
    }

    /// Wants no kicks.
    pub(super) fn want_no_kicks(&mut self) -> Result<(), Fault> {
        Ok(self.ring.want_no_kicks()?)
    }

    /// What the backend is to do next, and the table that it points into.
    #[inline]
    pub(super) fn requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// The backend has taken so many of them, off the front.
    #[inline]
    pub(super) fn taken(&mut self, count: usize) {
        self.in_flight += count;
        self.requests.drain(..count);
    }

    /// Requests that the backend has.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether everything that was taken is answered.
    pub(super) fn is_still(&self) -> bool {
        self.in_flight == 0 && self.requests.is_empty() && self.again.is_empty()
    }

    /// What the backend has not taken is taken back.
    pub(super) fn forget_requests(&mut self) {
        self.requests.clear();
        self.again.clear();
    }

    /// The available entry to be taken next.
    pub(super) fn next(&self) -> u16 {
        self.ring.next()
    }
}

/// The last byte of a piece, which is cut off.
#[inline]
fn cut_last(piece: &mut Segment) -> Option<Segment> {
    let last = piece.len_bytes.checked_sub(1)?;
    let byte = piece.slice(last, 1)?;
    piece.len_bytes = last;
    Some(byte)
}

/// Appends what lies behind the first `skip` bytes of `pieces`.
#[inline]
fn append_after(pieces: &[Segment], skip: u32, into: &mut Vec<Segment>) {
    let mut skip = skip;
    for piece in pieces {
        let here = skip.min(piece.len_bytes);
        skip -= here;
        into.extend(piece.slice(here, piece.len_bytes - here).filter(|rest| rest.len_bytes > 0));
    }
}

/// Loads the bytes that begin `skip` into `pieces`, which has so many.
#[inline]
fn gather<M: Memory>(
    memory: &M,
    pieces: &[Segment],
    skip: u32,
    into: &mut [u8],
) -> Result<(), Broken> {
    let (mut skip, mut rest) = (skip, into);
    for piece in pieces {
        let here = skip.min(piece.len_bytes);
        skip -= here;
        let left = piece.len_bytes - here;
        let count = u32::try_from(rest.len()).unwrap_or(u32::MAX).min(left);
        if count == 0 {
            continue;
        }
        let place = piece.slice(here, count).ok_or(Broken::Gone)?;
        let (first, others) = rest.split_at_mut(count as usize);
        memory.load(place, first).map_err(|_| Broken::Gone)?;
        rest = others;
    }
    if rest.is_empty() { Ok(()) } else { Err(Broken::Gone) }
}

impl From<Broken> for Fault {
    fn from(broken: Broken) -> Self {
        Self::Ring(broken)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring(broken) => broken.fmt(out),
            Self::Unasked(token) => write!(out, "the device has answered {token}, unasked"),
        }
    }
}
