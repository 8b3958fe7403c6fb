//! I/O channels to the legs of a mirror, with a queue for each.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{
    ChannelGroup, CompletionBatch, Error, Instant, IoChannel, Memory, Operation, Request, Segment,
    WakeSource,
};
use tenmil_linux::EventFdVectors;

use crate::combined_wake_source::CombinedWakeSource;
use crate::mirror::mirror_shared::{ChannelMemory, MirrorShared};

/// I/O channels to the legs, with one segment table for all.
pub(super) struct LegChannels {
    legs: Box<[LegChannel]>,
    wake: CombinedWakeSource,
    shared: Arc<MirrorShared>,
    own: ChannelMemory,
    /// Segments of each slot, followed by those of background work.
    table: Vec<Segment>,
    segments_max: u32,
    /// Round-robin start among legs with equal load.
    turn: u8,
}

struct LegChannel {
    backend: Option<Box<dyn IoChannel>>,
    /// Requests that it has not accepted yet.
    queue: VecDeque<Request>,
    under_way: u32,
    /// Losses that flushes need not report any more.
    acknowledged: u64,
}

/// Owner of a leg request, encoded in its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestOwner {
    /// A slot of the request table.
    Request(u32),
    /// The superblocks that this channel writes.
    Commit,
    /// The maintenance task of this channel.
    Task,
    /// A flush that makes a leg report what it lost before it returned.
    Report,
    /// The read of a superblock copy before this channel writes the next ones.
    SuperblockRead {
        /// Index of the copy.
        copy: u8,
    },
}

const COMMIT: u64 = 1 << 32;
const TASK: u64 = 1 << 33;
const REPORT: u64 = 1 << 34;
const POLL_INTERVAL: [u64; 2] = [1 << 35, 1 << 36];

impl RequestOwner {
    pub(super) fn from_token(token: u64) -> Self {
        match u32::try_from(token) {
            Ok(slot) => Self::Request(slot),
            Err(_) if token == COMMIT => Self::Commit,
            Err(_) if token == REPORT => Self::Report,
            Err(_) if token == POLL_INTERVAL[0] => Self::SuperblockRead { copy: 0 },
            Err(_) if token == POLL_INTERVAL[1] => Self::SuperblockRead { copy: 1 },
            Err(_) => Self::Task,
        }
    }

    fn token(self) -> u64 {
        match self {
            Self::Request(slot) => slot.into(),
            Self::Commit => COMMIT,
            Self::Task => TASK,
            Self::Report => REPORT,
            Self::SuperblockRead { copy } => POLL_INTERVAL[usize::from(copy & 1)],
        }
    }
}

impl LegChannels {
    /// Opens a channel to each leg that has one left. Their wake sources are combined with `waker`.
    pub(super) fn open(
        shared: &Arc<MirrorShared>,
        own: ChannelMemory,
        waker: &EventFdVectors,
    ) -> Result<Self, Error> {
        let depth = shared.limits.depth_max;
        let segments_max = u32::from(shared.limits.segments_max);
        let legs = shared.media.iter().map(|medium| LegChannel {
            backend: medium.as_ref().and_then(|medium| medium.channel().ok()),
            queue: VecDeque::with_capacity(depth as usize + 8),
            under_way: 0,
            acknowledged: 0,
        });
        let legs: Box<[LegChannel]> = ChannelGroup::open_together(|| legs.collect());
        let mut table = vec![Segment::default(); (depth * segments_max) as usize];
        for leg in (0..).take(legs.len()) {
            table
                .extend([own.superblock_copy_segment(leg, 0), own.superblock_copy_segment(leg, 1)]);
        }
        table.extend((0..).take(legs.len()).map(|leg| own.superblock_segment(leg)));
        table.extend([own.chunk_segment(); 2]);
        let backends = legs.iter().filter_map(|leg| leg.backend.as_ref());
        let waker = waker.descriptor(0).map_or(WakeSource::None, WakeSource::Descriptor);
        let wake = CombinedWakeSource::from_sources(
            backends.map(|backend| backend.wake_source()).chain([waker]),
        )?;
        Ok(Self { legs, wake, shared: Arc::clone(shared), own, table, segments_max, turn: 0 })
    }

    pub(super) fn leg_count(&self) -> usize {
        self.legs.len()
    }

    /// Stores the segments of a request for as long as its slot is in use, and returns their index.
    #[inline]
    pub(super) fn store_segments(&mut self, slot: u32, segments: &[Segment]) -> u32 {
        let first = slot * self.segments_max;
        self.table[first as usize..][..segments.len()].copy_from_slice(segments);
        first
    }

    /// Sends a request of the mirror to some legs. Returns those that have no channel.
    #[inline]
    pub(super) fn send_to(&mut self, legs: u8, place: RequestOwner, request: &Request) -> u8 {
        let below = Request {
            token: place.token(),
            lba: request.lba + self.shared.geometry.first,
            ..*request
        };
        // The data of deallocated blocks depends on the leg, and legs have to be equal, so zeroes are
        // written.
        let below = match request.operation {
            Operation::Deallocate => Request {
                operation: Operation::WriteZeroes,
                flags: request.flags.union(tenmil_base::RequestFlags::DEALLOCATE),
                ..below
            },
            Operation::Flush => Request { lba: 0, ..below },
            _ => below,
        };
        self.queue_for_legs(legs, &below, false)
    }

    /// Writes a superblock to one leg, ahead of queued requests. Returns false if it has no channel.
    pub(super) fn queue_superblock_write(&mut self, leg: u8, at: u64, bytes: &[u8]) -> bool {
        let segment = self.own.superblock_segment(leg);
        let written = store_padded(&self.shared, segment, bytes);
        let places = self.table.len() - self.legs.len() - 2;
        let request = self.superblock_request(
            RequestOwner::Commit,
            Operation::Write,
            at,
            places + usize::from(leg),
        );
        let request = Request { flags: tenmil_base::RequestFlags::FUA, ..request };
        written && self.queue_for_legs(1 << leg, &request, true) == 0
    }

    /// Reads both superblock copies of a leg, ahead of queued requests. Returns the number of reads sent.
    pub(super) fn queue_superblock_reads(&mut self, leg: u8, copies: [u64; 2]) -> u32 {
        let places = self.table.len() - 3 * self.legs.len() - 2 + 2 * usize::from(leg);
        let mut sent = 0;
        for (copy, at) in (0..).zip(copies) {
            let segment = places + usize::from(copy);
            let request = self.superblock_request(
                RequestOwner::SuperblockRead { copy },
                Operation::Read,
                at,
                segment,
            );
            sent += u32::from(self.queue_for_legs(1 << leg, &request, true) == 0);
        }
        sent
    }

    /// Loads a superblock copy that [`queue_superblock_reads`](Self::queue_superblock_reads) has read.
    pub(super) fn load_superblock_copy(&self, leg: u8, copy: u8, into: &mut [u8; 4096]) -> bool {
        let head = self.own.superblock_copy_segment(leg, copy).slice(0, 4096);
        head.is_some_and(|head| self.shared.regions.load(head, into).is_ok())
    }

    /// Flushes a leg, which makes it report earlier losses, and reads both superblock copies into the
    /// chunk buffer. Returns false if the leg has no channel.
    pub(super) fn send_probe(&mut self, leg: u8, copies: [u64; 2]) -> bool {
        let size = self.shared.superblock_bytes();
        let chunk = self.own.chunk_segment();
        let last = self.table.len() - 2;
        let mut missing = self.queue_chunk_request(leg, Operation::Flush, 0, 0);
        for (index, at) in copies.into_iter().enumerate() {
            let skip = if index == 0 { 0 } else { size };
            self.table[last + index] = chunk.slice(skip, size).unwrap_or_default();
            let request =
                self.superblock_request(RequestOwner::Task, Operation::Read, at, last + index);
            missing |= self.queue_for_legs(leg, &request, true);
        }
        missing == 0
    }

    /// Sends a background request for blocks of the mirror, with the chunk buffer as its memory.
    pub(super) fn queue_chunk_request(
        &mut self,
        legs: u8,
        operation: Operation,
        lba: u64,
        blocks: u32,
    ) -> u8 {
        let last = self.table.len() - 2;
        let len_bytes = blocks * self.shared.geometry.block_size;
        self.table[last] = self.own.chunk_segment().slice(0, len_bytes).unwrap_or_default();
        let moves = operation != Operation::Flush;
        let request = self.superblock_request(RequestOwner::Task, operation, 0, last);
        let request = Request { lba, blocks, segment_count: u16::from(moves), ..request };
        self.send_to(legs, RequestOwner::Task, &request)
    }

    /// Loads a superblock copy that a probe has read.
    pub(super) fn load_probed_copy(&self, copy: usize, into: &mut [u8; 4096]) -> bool {
        let segment = self.table[self.table.len() - 2 + copy];
        let head = segment.slice(0, 4096);
        head.is_some_and(|head| self.shared.regions.load(head, into).is_ok())
    }

    /// A superblock request at a byte offset of a leg, with one segment of the table.
    fn superblock_request(
        &self,
        place: RequestOwner,
        operation: Operation,
        at: u64,
        segment: usize,
    ) -> Request {
        let block_size = self.shared.geometry.block_size;
        Request {
            token: place.token(),
            lba: at / u64::from(block_size),
            operand: 0,
            segment_first: u32::try_from(segment).unwrap_or(u32::MAX),
            blocks: self.shared.superblock_bytes() / block_size,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: tenmil_base::RequestFlags::NONE,
        }
    }

    #[inline]
    fn queue_for_legs(&mut self, legs: u8, request: &Request, first: bool) -> u8 {
        let mut missing = legs;
        for (leg, bit) in self.legs.iter_mut().zip((0_u32..).map(|index| 1_u8 << index)) {
            if legs & bit == 0 || leg.backend.is_none() {
                continue;
            }
            missing &= !bit;
            leg.under_way += 1;
            if first { leg.queue.push_front(*request) } else { leg.queue.push_back(*request) }
        }
        missing
    }

    /// The leg with the fewest requests in flight; among equals, round-robin.
    #[inline]
    pub(super) fn least_busy_leg(&mut self, legs: u8) -> u8 {
        self.turn = self.turn.wrapping_add(1);
        let count = u8::try_from(self.legs.len()).unwrap_or(u8::MAX);
        let mut best = (u32::MAX, 0);
        for step in 0..count {
            let leg = (self.turn.wrapping_add(step)) % count;
            let under_way = self.legs[usize::from(leg)].under_way;
            if legs & (1 << leg) != 0 && under_way < best.0 {
                best = (under_way, 1 << leg);
            }
        }
        best.1
    }

    /// A leg's own count of losses of completed writes.
    pub(super) fn leg_loss_count(&self, leg: usize) -> u64 {
        self.legs[leg].backend.as_ref().map_or(0, |backend| backend.known_write_loss_count())
    }

    /// Whether a leg has lost completed writes, and no channel has acted on that.
    #[inline]
    pub(super) fn has_unhandled_losses(&self, leg: usize) -> bool {
        self.leg_loss_count(leg) > self.shared.handled_loss_count(leg)
    }

    /// The losses of some legs are acted on. The caller holds the lock of the mirror.
    pub(super) fn record_losses_handled(&self, legs: u8) {
        for leg in (0..self.legs.len()).filter(|leg| legs >> leg & 1 == 1) {
            self.shared.record_handled_losses(leg, self.leg_loss_count(leg));
        }
    }

    /// Before a flush is sent: has no leg fail it for what it lost before it came back.
    ///
    /// A leg reports a loss once on every channel. If a channel of the mirror is not polled while a leg
    /// loses writes and returns, it would see the report only when the leg is in sync, and fail the leg
    /// again. A failed flush does not tell an old loss from a new one, and a new one must not be ignored.
    ///
    /// So losses are ordered by the leg's own count. `repaired_losses` is the count at the end of the
    /// probe that found the leg. At that time the leg was neither in sync nor written, so that
    ///
    /// - everything affected by those losses was completed by the leg before, and is in dirty regions: a
    ///   region becomes clean only after a successful flush of all legs. These regions are copied before
    ///   the leg is read, and the flush before it is in sync makes the copies durable. A write to it that
    ///   was in flight when it failed is in a dirty region, too.
    /// - a loss of later writes, by any channel and including the copies, has a higher count, and each
    ///   channel fails a flush for it as usual: no loss beyond that count is excused.
    /// - a later return of the leg stores a higher count, with the same properties. So it does not matter
    ///   which of them a channel sees, and when; an unused channel delays nothing.
    ///
    /// An older loss that is counted late is treated as a new one: the leg is resynchronized once more.
    /// The same holds for a loss that a leg reports without counting it; for those, each channel sends a
    /// flush of its own when a leg returns.
    pub(super) fn acknowledge_repaired_losses(&mut self) {
        for (index, leg) in self.legs.iter_mut().enumerate() {
            let repaired = self.shared.repaired_loss_count(index);
            if repaired > leg.acknowledged
                && let Some(backend) = &mut leg.backend
            {
                leg.acknowledged = repaired;
                backend.ack_repaired_write_losses(repaired);
            }
        }
    }

    /// Before a leg is looked for that was given up: it fails no flush for what it is known to have lost. All
    /// of that is copied to it before it is read again, as above.
    pub(super) fn acknowledge_all_losses(&mut self, leg: u8) {
        let number = leg.trailing_zeros() as usize;
        if let Some(backend) = self.legs.get_mut(number).and_then(|leg| leg.backend.as_mut()) {
            backend.ack_repaired_write_losses(backend.known_write_loss_count());
        }
    }

    /// No leg fails a flush of this channel for what some channel has acted on.
    pub(super) fn acknowledge_handled_losses(&mut self) {
        for (index, leg) in self.legs.iter_mut().enumerate() {
            if let Some(backend) = &mut leg.backend {
                backend.ack_repaired_write_losses(self.shared.handled_loss_count(index));
            }
        }
    }

    /// A leg has failed a flush of this channel for lost writes, which the mirror acts on: the next flush
    /// says what is true from then on. A leg that cannot acknowledge it fails all of them, until it is
    /// given up and looked for.
    #[cold]
    pub(super) fn accept_losses_of_leg(&mut self, leg: usize) {
        if let Some(backend) = &mut self.legs[leg].backend {
            let _ = backend.accept_write_losses();
        }
    }

    /// Submits queued requests, as far as the legs accept them.
    pub(super) fn submit(&mut self, now: Instant) {
        for leg in &mut self.legs {
            if let Some(backend) = &mut leg.backend
                && !leg.queue.is_empty()
            {
                let taken = backend.submit(now, leg.queue.make_contiguous(), &self.table);
                leg.queue.drain(..taken);
            }
        }
    }

    pub(super) fn poll(
        &mut self,
        leg: usize,
        now: Instant,
        completions: &mut CompletionBatch,
    ) -> usize {
        let LegChannel { backend, under_way, .. } = &mut self.legs[leg];
        let count = backend.as_mut().map_or(0, |backend| backend.poll(now, completions));
        *under_way -= u32::try_from(count).unwrap_or(0);
        count
    }

    fn open_channels(&mut self) -> impl Iterator<Item = &mut Box<dyn IoChannel>> {
        self.legs.iter_mut().filter_map(|leg| leg.backend.as_mut())
    }

    pub(super) fn flush_submissions(&mut self) {
        self.open_channels().for_each(|backend| backend.flush_submissions());
    }

    /// Closes all channels, which ends everything in flight.
    pub(super) fn close(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.backend = None);
    }

    pub(super) fn wake_at(&self) -> Instant {
        let at = |leg: &LegChannel| match &leg.backend {
            Some(_) if !leg.queue.is_empty() => Instant::default(),
            // Some of it may be background work, which the caller does not know of.
            Some(backend) if leg.under_way > 0 && has_no_wake_source(backend) => Instant::default(),
            Some(backend) => backend.wake_at(),
            None => Instant::NEVER,
        };
        self.legs.iter().map(at).min().unwrap_or(Instant::NEVER)
    }

    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    /// Whether the kernel does the work of every leg.
    pub(super) fn is_kernel_io(&self) -> bool {
        self.legs
            .iter()
            .filter_map(|leg| leg.backend.as_ref())
            .all(|backend| backend.is_done_by_local_kernel())
    }

    pub(super) fn arm(&mut self) -> bool {
        let must_not_sleep = self.legs.iter().any(|leg| !leg.queue.is_empty());
        self.open_channels().fold(must_not_sleep, |busy, backend| backend.arm() || busy)
    }

    pub(super) fn disarm(&mut self) {
        self.open_channels().for_each(|backend| backend.disarm());
    }
}

/// Whether the channel has no wake source.
fn has_no_wake_source(backend: &impl IoChannel) -> bool {
    matches!(backend.wake_source(), WakeSource::None)
}

/// Stores bytes at the start of a segment, padded with zeroes.
fn store_padded(shared: &MirrorShared, segment: Segment, bytes: &[u8]) -> bool {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let head = segment.slice(0, len);
    shared.regions.fill(segment, 0).is_ok()
        && head.is_some_and(|head| shared.regions.store(head, bytes).is_ok())
}
