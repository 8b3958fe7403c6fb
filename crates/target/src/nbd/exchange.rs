//! Transmission: requests in, replies out, each with a slot of its own.
//!
//! ```text
//!   header ─→ admit ─→ refused: its payload is skipped, and an error goes back
//!                  └─→ slot and memory, or wait ─→ payload, if it is a write
//!                        ─→ pieces ─→ backend ─→ the last answer ─→ outbox ─→ sent: free again
//! ```

mod admit;
mod intake;
mod pieces;

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Answer, Flags, Memory, Operation, Request, Segment};
use dma::Regions;
use wire::nbd::reply::extent_bytes;
use wire::nbd::{ChunkHeader, Command, CommandFlags, ErrorCode, Extent, RequestHeader};

use super::answer::{Failure, Header};
use super::export::Export;
use super::haggling::{ALLOCATION, Terms};
use super::inbox::Inbox;
use super::memory::{Holding, Layout, SLOTS, SMALL_BYTES, Store, cut};
use super::outbox::Outbox;
use super::pool::Pool;
use intake::Awaits;

/// The requests of a connection.
#[derive(Debug)]
pub(super) struct Exchange {
    export: Arc<Export>,
    terms: Terms,
    regions: Regions,
    layout: Layout,
    store: Store,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    awaits: Awaits,
    /// Slots whose pieces are not all with the backend, in order.
    queue: VecDeque<u16>,
    /// Pieces that the backend has not taken yet, and the table of their segments.
    requests: Vec<Request>,
    segments: Vec<Segment>,
    questions: VecDeque<Question>,
    /// Pieces that the backend has and has not answered.
    in_flight: usize,
    /// Headers that were taken.
    headers: u64,
    /// The client has said that it ends.
    is_ended: bool,
    done: Done,
}

/// What was answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes that they moved.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes that they moved.
    pub written_bytes: u64,
    /// Everything else that succeeded.
    pub others: u64,
    /// Requests that did not.
    pub errors: u64,
}

/// A request that is under way.
#[derive(Clone, Copy, Debug)]
struct Slot {
    header: RequestHeader,
    holding: Holding,
    operation: Operation,
    flags: Flags,
    /// Where the next piece begins, counted from the first byte of the request.
    next_byte: u32,
    /// Pieces that are not answered yet, those that do not exist yet included.
    pieces: u32,
    failure: Option<Failure>,
    /// A flush follows when all pieces are answered: a forced trim, which NVMe has no bit for.
    then_flush: bool,
}

/// Asked by a client, and not to be answered on the way of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// To be given back with the answer.
    pub slot: u16,
    /// What is asked.
    pub about: About,
}

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// What is where?
    Extents {
        /// The first byte.
        offset: u64,
        /// How many.
        len_bytes: u32,
        /// How many extents may be told.
        extents_max: usize,
    },
    /// Will the export be so long?
    Size {
        /// Bytes: some, and whole blocks.
        bytes: u64,
    },
}

/// Requests that are built for one call of the backend.
const BATCH: usize = 256;
/// Segments of the largest of them: a piece of 1 MiB in large memory.
const SEGMENTS: usize = BATCH * 4;
/// Extents that are told at once.
const EXTENTS_MAX: usize = SMALL_BYTES as usize / 8;

impl Exchange {
    pub(super) fn new(
        export: Arc<Export>,
        terms: Terms,
        regions: Regions,
        layout: Layout,
        pool: Arc<Pool>,
    ) -> Self {
        let nothing = Slot {
            header: RequestHeader {
                flags: CommandFlags::NONE,
                command: Command::READ,
                cookie: 0,
                offset: 0,
                len_bytes: 0,
            },
            holding: Holding::Small,
            operation: Operation::Read,
            flags: Flags::NONE,
            next_byte: 0,
            pieces: 0,
            failure: None,
            then_flush: false,
        };
        Self {
            export,
            terms,
            regions,
            layout,
            store: Store::new(layout, pool),
            slots: vec![nothing; usize::from(SLOTS)].into(),
            free: (0..SLOTS).rev().collect(),
            awaits: Awaits::Header,
            queue: VecDeque::with_capacity(usize::from(SLOTS)),
            requests: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(SEGMENTS),
            questions: VecDeque::with_capacity(usize::from(SLOTS)),
            in_flight: 0,
            headers: 0,
            is_ended: false,
            done: Done::default(),
        }
    }

    /// Whether the client has said that it ends.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Requests whose answers have not been sent.
    #[inline]
    pub(super) fn under_way(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// What was answered.
    pub(super) fn done(&self) -> &Done {
        &self.done
    }

    /// Pieces that the backend has and has not answered.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The number of the request of which a part has come and the rest is awaited from the client.
    #[inline]
    pub(super) fn awaited(&self, inbox: &Inbox) -> Option<u64> {
        let is_begun = match self.awaits {
            Awaits::Header => (1..RequestHeader::BYTES).contains(&(inbox.len() as usize)),
            Awaits::Payload { .. } | Awaits::Refused { .. } => true,
        };
        is_begun.then_some(self.headers)
    }

    /// Whether a request waits for memory that other connections have.
    #[inline]
    pub(super) fn waits_for_memory(&self) -> bool {
        self.store.is_short()
    }

    /// It may ask for memory again.
    pub(super) fn try_again(&mut self) {
        self.store.try_again();
    }

    /// Gives memory back that is not used.
    pub(super) fn release(&mut self) {
        self.store.release();
    }

    /// Nothing more will come: what had come only in part is forgotten.
    pub(super) fn cut_off(&mut self) {
        if let Awaits::Payload { slot, .. } | Awaits::Refused { slot, .. } = self.awaits {
            self.give_back(slot);
        }
        self.awaits = Awaits::Header;
        self.is_ended = true;
    }

    /// What the backend is to do next.
    #[inline]
    pub(super) fn requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// The backend has taken so many of them, off the front.
    #[inline]
    pub(super) fn taken(&mut self, count: usize) {
        self.in_flight += count;
        self.requests.drain(..count);
        let Some(first) = self.requests.first().map(|request| request.segment_first) else {
            return;
        };
        self.segments.drain(..first as usize);
        self.requests.iter_mut().for_each(|request| request.segment_first -= first);
    }

    /// The backend has answered.
    #[inline]
    pub(super) fn answer(&mut self, answer: Answer, outbox: &mut Outbox) {
        let slot = u16::try_from(answer.token & 0xffff).unwrap_or(0);
        let place = &mut self.slots[usize::from(slot)];
        self.in_flight -= 1;
        place.pieces -= 1;
        if !answer.outcome.is_success() {
            // A flush is of no offset, and a client that is told of one ends the connection.
            let offset = (place.operation != Operation::Flush)
                .then(|| place.header.offset + (answer.token >> 16));
            let writes = place.operation != Operation::Read;
            let failure = Failure::of(answer.outcome, writes, offset);
            // Of several, the first on the medium is told.
            if place.failure.is_none_or(|earlier| earlier.offset > failure.offset) {
                place.failure = Some(failure);
            }
        }
        if place.pieces == 0 {
            if place.then_flush && place.failure.is_none() {
                return self.flush_after(slot);
            }
            self.reply(slot, outbox);
        }
    }

    /// What was deallocated goes to stable storage before it is answered.
    #[cold]
    fn flush_after(&mut self, slot: u16) {
        let place = &mut self.slots[usize::from(slot)];
        (place.operation, place.flags, place.then_flush) = (Operation::Flush, Flags::NONE, false);
        self.begin(slot);
    }

    /// Queues the reply to a request that has come to its end.
    #[inline]
    fn reply(&mut self, slot: u16, outbox: &mut Outbox) {
        let place = &self.slots[usize::from(slot)];
        let RequestHeader { command, cookie, offset, len_bytes, .. } = place.header;
        let structured = self.terms.structured;
        let reads = command == Command::READ;
        let header = match place.failure {
            Some(failure) => Header::failed(structured, cookie, failure),
            None => Header::done(structured, cookie, reads.then_some((offset, len_bytes))),
        };
        self.done.count(command, place.failure.is_some(), len_bytes);
        self.queue_header(slot, &header, outbox);
        if reads && place.failure.is_none() {
            self.store.each((slot, place.holding), 0, len_bytes, |part| outbox.push(part));
        }
        outbox.end_of(slot);
    }

    fn queue_header(&self, slot: u16, header: &Header, outbox: &mut Outbox) {
        let bytes = header.as_slice();
        let len_bytes = u32::try_from(bytes.len()).expect("a header is short");
        let segment = cut(self.layout.header(slot), 0, len_bytes);
        let stored = self.regions.store(segment, bytes);
        stored.expect("a connection has its memory as long as it lives");
        outbox.push(segment);
    }

    /// The reply of a slot has been sent, or will not be: it is free again.
    #[inline]
    pub(super) fn give_back(&mut self, slot: u16) {
        let place = &mut self.slots[usize::from(slot)];
        self.store.give_back(std::mem::replace(&mut place.holding, Holding::Small));
        self.free.push(slot);
    }

    /// The next question about what is where.
    pub(super) fn next_question(&mut self) -> Option<Question> {
        self.questions.pop_front()
    }

    /// The answer to a question.
    pub(super) fn surveyed(&mut self, slot: u16, extents: &[Extent], outbox: &mut Outbox) {
        let cookie = self.slots[usize::from(slot)].header.cookie;
        if extents.is_empty() {
            let failure = Failure::new(ErrorCode::EIO, "it is not known what is where");
            self.slots[usize::from(slot)].failure = Some(failure);
            return self.reply(slot, outbox);
        }
        self.done.others += 1;
        let count = extents.len().min(EXTENTS_MAX);
        let bytes: Vec<u8> =
            extents[..count].iter().flat_map(|extent| extent_bytes(*extent)).collect();
        self.queue_header(slot, &Header::status(cookie, ALLOCATION, count), outbox);
        let len_bytes = u32::try_from(bytes.len()).expect("no more than small memory");
        self.store.each((slot, Holding::Small), 0, len_bytes, |part| {
            let stored = self.regions.store(part, &bytes);
            stored.expect("a connection has its memory as long as it lives");
            outbox.push(part);
        });
        outbox.end_of(slot);
    }

    /// The answer to a question about the size.
    pub(super) fn resized(&mut self, slot: u16, done: Result<(), ErrorCode>, outbox: &mut Outbox) {
        let failure = done.err().map(|error| Failure::new(error, "its size cannot be that"));
        self.slots[usize::from(slot)].failure = failure;
        self.reply(slot, outbox);
    }

    /// Whether pieces wait that no batch had room for.
    pub(super) fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            self.store.abandon();
        }
    }
}

impl Done {
    #[inline]
    fn count(&mut self, command: Command, is_failure: bool, len_bytes: u32) {
        if is_failure {
            self.errors += 1;
        } else if command == Command::READ {
            self.reads += 1;
            self.read_bytes += u64::from(len_bytes);
        } else if command == Command::WRITE {
            self.writes += 1;
            self.written_bytes += u64::from(len_bytes);
        } else {
            self.others += 1;
        }
    }
}

const _: () = assert!(RequestHeader::BYTES == 28 && ChunkHeader::BYTES + 4 + 14 < 256);
