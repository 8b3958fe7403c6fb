//! Transmission: requests in, replies out, each with a slot of its own.
//!
//! ```text
//!   header ─→ admit ─→ refused: its payload is skipped, and an error goes back
//!                  └─→ slot and memory, or wait ─→ payload, if it is a write
//!                        ─→ pieces ─→ backend ─→ the last answer ─→ outbox ─→ sent: free again
//! ```

mod admit;

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Answer, Flags, Memory, Operation, Request, Segment};
use dma::Regions;
use wire::nbd::reply::extent_bytes;
use wire::nbd::{ChunkHeader, Command, CommandFlags, ErrorCode, Extent, Malformed, RequestHeader};

use super::answer::{Failure, Header};
use super::export::Export;
use super::haggling::{ALLOCATION, Terms};
use super::inbox::Inbox;
use super::memory::{Holding, Layout, SLOTS, SMALL_BYTES, Store, cut};
use super::outbox::Outbox;
use admit::{Admitted, admit};

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
    /// The client has said that it ends.
    is_ended: bool,
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
}

/// What comes next from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaits {
    Header,
    /// Data for a slot, from this byte on.
    Payload {
        slot: u16,
        done_bytes: u32,
    },
    /// Data that nobody wants; then the slot tells of its failure.
    Refused {
        slot: u16,
        left_bytes: u32,
    },
}

/// What is where? Asked by a client, and not to be answered on the way of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// To be given back with the answer.
    pub slot: u16,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub len_bytes: u32,
    /// How many extents may be told.
    pub extents_max: usize,
}

/// Requests that are built for one call of the backend.
const BATCH: usize = 256;
/// Segments of the largest of them: a piece of 1 MiB in large memory.
const SEGMENTS: usize = BATCH * 4;
/// Extents that are told at once.
const EXTENTS_MAX: usize = SMALL_BYTES as usize / 8;

impl Exchange {
    pub(super) fn new(export: Arc<Export>, terms: Terms, regions: Regions, layout: Layout) -> Self {
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
        };
        Self {
            export,
            terms,
            regions,
            layout,
            store: Store::new(layout),
            slots: vec![nothing; usize::from(SLOTS)].into(),
            free: (0..SLOTS).rev().collect(),
            awaits: Awaits::Header,
            queue: VecDeque::with_capacity(usize::from(SLOTS)),
            requests: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(SEGMENTS),
            questions: VecDeque::with_capacity(usize::from(SLOTS)),
            in_flight: 0,
            is_ended: false,
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

    /// Pieces that the backend has and has not answered.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Nothing more will come: what had come only in part is forgotten.
    pub(super) fn cut_off(&mut self) {
        if let Awaits::Payload { slot, .. } | Awaits::Refused { slot, .. } = self.awaits {
            self.give_back(slot);
        }
        self.awaits = Awaits::Header;
        self.is_ended = true;
    }

    /// Appends where the next bytes from the client belong, if that is not the inbox.
    #[inline]
    pub(super) fn payload_into(&self, into: &mut Vec<Segment>) {
        if let Awaits::Payload { slot, done_bytes } = self.awaits {
            let Slot { holding, header, .. } = self.slots[usize::from(slot)];
            let left = header.len_bytes - done_bytes;
            self.store.each((slot, holding), done_bytes, left, |part| into.push(part));
        }
    }

    /// Of `count` bytes that were received, those at the front lie where they belong. Returns how
    /// many have gone to the inbox.
    #[inline]
    pub(super) fn payload_received(&mut self, count: u32) -> u32 {
        let Awaits::Payload { slot, done_bytes } = self.awaits else { return count };
        let left = self.slots[usize::from(slot)].header.len_bytes - done_bytes;
        let taken = count.min(left);
        self.awaits = Awaits::Payload { slot, done_bytes: done_bytes + taken };
        count - taken
    }

    /// Reads what lies in the inbox, as far as there are slots and memory. Returns how many requests
    /// have come to something.
    #[inline]
    pub(super) fn take_in(
        &mut self,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
    ) -> Result<usize, Malformed> {
        let mut count = 0;
        while !self.is_ended {
            let went_on = match self.awaits {
                Awaits::Header => self.header(inbox, outbox)?,
                Awaits::Payload { slot, done_bytes } => self.payload(inbox, slot, done_bytes),
                Awaits::Refused { slot, left_bytes } => {
                    self.refused(inbox, outbox, slot, left_bytes)
                }
            };
            if !went_on {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    fn header(&mut self, inbox: &mut Inbox, outbox: &mut Outbox) -> Result<bool, Malformed> {
        let Some(slot) = self.free.last().copied() else { return Ok(false) };
        let Some(bytes) = inbox.peek(&self.regions) else { return Ok(false) };
        let header = RequestHeader::parse(&bytes)?;
        let admitted = admit(&self.export, self.terms, &header);
        let moves = match admitted {
            Ok(Admitted::Run { operation: Operation::Read | Operation::Write, .. }) => {
                header.len_bytes
            }
            _ => 0,
        };
        let Some(holding) = self.store.take(moves) else { return Ok(false) };
        inbox.take(28);
        self.free.pop();
        let place = &mut self.slots[usize::from(slot)];
        (place.header, place.holding, place.failure) = (header, holding, None);
        match admitted {
            Ok(Admitted::Run { operation, flags }) => {
                (place.operation, place.flags) = (operation, flags);
                if operation == Operation::Write {
                    self.awaits = Awaits::Payload { slot, done_bytes: 0 };
                } else {
                    self.begin(slot);
                }
            }
            Ok(Admitted::Nothing) => self.reply(slot, outbox),
            Ok(Admitted::Survey) => {
                let one = header.flags.has(CommandFlags::REQ_ONE);
                self.questions.push_back(Question {
                    slot,
                    offset: header.offset,
                    len_bytes: header.len_bytes,
                    extents_max: if one { 1 } else { EXTENTS_MAX },
                });
            }
            Ok(Admitted::End) => {
                self.free.push(slot);
                self.is_ended = true;
            }
            Err(failure) => {
                place.failure = Some(failure);
                self.awaits = Awaits::Refused { slot, left_bytes: header.payload_bytes() };
            }
        }
        Ok(true)
    }

    /// Copies what has come with other things to where it belongs.
    fn payload(&mut self, inbox: &mut Inbox, slot: u16, done_bytes: u32) -> bool {
        let Slot { header, holding, .. } = self.slots[usize::from(slot)];
        let left = header.len_bytes - done_bytes;
        let from = inbox.take(left);
        let mut copied = 0;
        self.store.each((slot, holding), done_bytes, from.len_bytes, |to| {
            let part = cut(from, copied, to.len_bytes);
            self.regions.copy(part, to).expect("a connection has its memory as long as it lives");
            copied += to.len_bytes;
        });
        if from.len_bytes == left {
            self.awaits = Awaits::Header;
            self.begin(slot);
            return true;
        }
        self.awaits = Awaits::Payload { slot, done_bytes: done_bytes + from.len_bytes };
        false
    }

    fn refused(
        &mut self,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        slot: u16,
        left_bytes: u32,
    ) -> bool {
        let left_bytes = left_bytes - inbox.take(left_bytes).len_bytes;
        if left_bytes > 0 {
            self.awaits = Awaits::Refused { slot, left_bytes };
            return false;
        }
        self.awaits = Awaits::Header;
        self.reply(slot, outbox);
        true
    }

    /// All of a request is there.
    #[inline]
    fn begin(&mut self, slot: u16) {
        let place = &mut self.slots[usize::from(slot)];
        place.next_byte = 0;
        place.pieces = match place.operation {
            Operation::Read | Operation::Write => {
                place.header.len_bytes.div_ceil(self.export.piece_bytes())
            }
            _ => 1,
        };
        self.queue.push_back(slot);
    }

    /// Builds requests from what is queued, as far as a batch reaches. Returns how many that were.
    #[inline]
    pub(super) fn fill(&mut self) -> usize {
        let before = self.requests.len();
        if before == 0 {
            self.segments.clear();
        }
        while self.requests.len() < BATCH
            && self.segments.len() + 4 <= SEGMENTS
            && let Some(slot) = self.queue.front().copied()
        {
            if self.piece(slot) {
                self.queue.pop_front();
            }
        }
        self.requests.len() - before
    }

    /// Builds the next piece of a request. Whether it is the last.
    #[inline]
    fn piece(&mut self, slot: u16) -> bool {
        let place = &mut self.slots[usize::from(slot)];
        let RequestHeader { offset, len_bytes, .. } = place.header;
        let moves = matches!(place.operation, Operation::Read | Operation::Write);
        let first = place.next_byte;
        let left = len_bytes - first;
        let count = if moves { left.min(self.export.piece_bytes()) } else { left };
        place.next_byte += count;
        let segment_first = self.segments.len();
        if moves {
            let segments = &mut self.segments;
            self.store.each((slot, place.holding), first, count, |part| segments.push(part));
        }
        let shift = self.export.block_size().trailing_zeros();
        let is_flush = place.operation == Operation::Flush;
        self.requests.push(Request {
            token: u64::from(first) << 16 | u64::from(slot),
            lba: if is_flush { 0 } else { (offset + u64::from(first)) >> shift },
            operand: 0,
            segment_first: u32::try_from(segment_first).expect("a batch is short"),
            blocks: if is_flush { 0 } else { count >> shift },
            segment_count: u16::try_from(self.segments.len() - segment_first)
                .expect("a piece is short"),
            metadata_count: 0,
            operation: place.operation,
            flags: place.flags,
        });
        count == left
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
            let offset = place.header.offset + (answer.token >> 16);
            let writes = place.operation != Operation::Read;
            let failure = Failure::of(answer.outcome, writes, offset);
            // Of several, the first on the medium is told.
            if place.failure.is_none_or(|earlier| earlier.offset > failure.offset) {
                place.failure = Some(failure);
            }
        }
        if place.pieces == 0 {
            self.reply(slot, outbox);
        }
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

    /// Whether pieces wait that no batch had room for.
    pub(super) fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }
}

const _: () = assert!(RequestHeader::BYTES == 28 && ChunkHeader::BYTES + 4 + 14 < 256);
