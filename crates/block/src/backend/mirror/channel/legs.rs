//! A channel to each leg of a mirror, and what waits to go down it.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Answers, Backend, Instant, Memory, Operation, Request, Segment, WakeSource};
use host::EventVectors;

use crate::backend::joined::Joined;
use crate::backend::mirror::shared::{Own, Shared};

/// The channels to the legs, with one table of segments for all.
pub(super) struct Legs {
    legs: Box<[Leg]>,
    wake: Joined,
    shared: Arc<Shared>,
    own: Own,
    /// The segments of each place, then those of the background.
    table: Vec<Segment>,
    segments_max: u32,
    /// Which leg goes first when several have as little to do.
    turn: u8,
}

struct Leg {
    backend: Option<Box<dyn Backend>>,
    /// What it has not taken yet.
    queue: VecDeque<Request>,
    under_way: u32,
    /// Losses that no flush fails for any more.
    heeded: u64,
}

/// What a request to a leg belongs to, as told by its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A place in the table of requests.
    Work(u32),
    /// The superblocks that this channel writes.
    Commit,
    /// The task of the background that this channel does.
    Task,
    /// A flush that has a leg report what it lost before it came back.
    Report,
    /// A look at a copy of a leg's superblock, before this channel writes the next ones.
    Look {
        /// Which copy.
        copy: u8,
    },
}

const COMMIT: u64 = 1 << 32;
const TASK: u64 = 1 << 33;
const REPORT: u64 = 1 << 34;
const LOOK: [u64; 2] = [1 << 35, 1 << 36];

impl Place {
    pub(super) fn of(token: u64) -> Self {
        match u32::try_from(token) {
            Ok(slot) => Self::Work(slot),
            Err(_) if token == COMMIT => Self::Commit,
            Err(_) if token == REPORT => Self::Report,
            Err(_) if token == LOOK[0] => Self::Look { copy: 0 },
            Err(_) if token == LOOK[1] => Self::Look { copy: 1 },
            Err(_) => Self::Task,
        }
    }

    fn token(self) -> u64 {
        match self {
            Self::Work(slot) => slot.into(),
            Self::Commit => COMMIT,
            Self::Task => TASK,
            Self::Report => REPORT,
            Self::Look { copy } => LOOK[usize::from(copy & 1)],
        }
    }
}

impl Legs {
    /// A channel to each leg that has one to give. What wakes for them is joined with `bell`.
    pub(super) fn open(
        shared: &Arc<Shared>,
        own: Own,
        bell: &EventVectors,
    ) -> Result<Self, String> {
        let depth = shared.limits.depth_max;
        let segments_max = u32::from(shared.limits.segments_max);
        let legs = shared.media.iter().map(|medium| Leg {
            backend: medium.as_ref().and_then(|medium| medium.channel().ok()),
            queue: VecDeque::with_capacity(depth as usize + 8),
            under_way: 0,
            heeded: 0,
        });
        let legs: Box<[Leg]> = legs.collect();
        let mut table = vec![Segment::default(); (depth * segments_max) as usize];
        for leg in (0..).take(legs.len()) {
            table.extend([own.look(leg, 0), own.look(leg, 1)]);
        }
        table.extend((0..).take(legs.len()).map(|leg| own.superblock(leg)));
        table.extend([own.chunk(); 2]);
        let backends = legs.iter().filter_map(|leg| leg.backend.as_ref());
        let bell = bell.descriptor(0).map_or(WakeSource::Nothing, WakeSource::Descriptor);
        let wake = Joined::of(backends.map(|backend| backend.wake_source()).chain([bell]))?;
        Ok(Self { legs, wake, shared: Arc::clone(shared), own, table, segments_max, turn: 0 })
    }

    pub(super) fn count(&self) -> usize {
        self.legs.len()
    }

    /// Keeps the segments of a request for as long as its place is taken, and returns where.
    #[inline]
    pub(super) fn keep(&mut self, slot: u32, segments: &[Segment]) -> u32 {
        let first = slot * self.segments_max;
        self.table[first as usize..][..segments.len()].copy_from_slice(segments);
        first
    }

    /// Sends a request of the mirror to some legs. Returns those that have no channel.
    #[inline]
    pub(super) fn send_to(&mut self, legs: u8, place: Place, request: &Request) -> u8 {
        let below = Request {
            token: place.token(),
            lba: request.lba + self.shared.shape.first,
            ..*request
        };
        // What a leg reads as after a deallocation is up to the leg, and legs have to be alike.
        let below = match request.operation {
            Operation::Deallocate => Request {
                operation: Operation::WriteZeroes,
                flags: request.flags.and(base::Flags::DEALLOCATE),
                ..below
            },
            Operation::Flush => Request { lba: 0, ..below },
            _ => below,
        };
        self.push(legs, &below, false)
    }

    /// Writes a superblock to one leg, before all that waits. False if it has no channel.
    pub(super) fn send_superblock(&mut self, leg: u8, at: u64, bytes: &[u8]) -> bool {
        let segment = self.own.superblock(leg);
        let written = store_padded(&self.shared, segment, bytes);
        let places = self.table.len() - self.legs.len() - 2;
        let request = self.request(Place::Commit, Operation::Write, at, places + usize::from(leg));
        let request = Request { flags: base::Flags::FUA, ..request };
        written && self.push(1 << leg, &request, true) == 0
    }

    /// Reads both copies of a leg's superblock, before all that waits. Returns how many reads that are.
    pub(super) fn send_look(&mut self, leg: u8, copies: [u64; 2]) -> u32 {
        let places = self.table.len() - 3 * self.legs.len() - 2 + 2 * usize::from(leg);
        let mut sent = 0;
        for (copy, at) in (0..).zip(copies) {
            let segment = places + usize::from(copy);
            let request = self.request(Place::Look { copy }, Operation::Read, at, segment);
            sent += u32::from(self.push(1 << leg, &request, true) == 0);
        }
        sent
    }

    /// The bytes of a copy that a look has read.
    pub(super) fn looked(&self, leg: u8, copy: u8, into: &mut [u8; 4096]) -> bool {
        let head = self.own.look(leg, copy).slice(0, 4096);
        head.is_some_and(|head| self.shared.regions.load(head, into).is_ok())
    }

    /// Flushes a leg, which also has it report what it lost before, and reads both copies of its
    /// superblock into the chunk. False if the leg has no channel.
    pub(super) fn send_probe(&mut self, leg: u8, copies: [u64; 2]) -> bool {
        let size = self.shared.superblock_bytes();
        let chunk = self.own.chunk();
        let last = self.table.len() - 2;
        let mut missing = self.send_chunk(leg, Operation::Flush, 0, 0);
        for (index, at) in copies.into_iter().enumerate() {
            let skip = if index == 0 { 0 } else { size };
            self.table[last + index] = chunk.slice(skip, size).unwrap_or_default();
            let request = self.request(Place::Task, Operation::Read, at, last + index);
            missing |= self.push(leg, &request, true);
        }
        missing == 0
    }

    /// A request of the background for blocks of the mirror, with the chunk as its memory.
    pub(super) fn send_chunk(
        &mut self,
        legs: u8,
        operation: Operation,
        lba: u64,
        blocks: u32,
    ) -> u8 {
        let last = self.table.len() - 2;
        let len_bytes = blocks * self.shared.shape.block_size;
        self.table[last] = self.own.chunk().slice(0, len_bytes).unwrap_or_default();
        let moves = operation != Operation::Flush;
        let request = self.request(Place::Task, operation, 0, last);
        let request = Request { lba, blocks, segment_count: u16::from(moves), ..request };
        self.send_to(legs, Place::Task, &request)
    }

    /// The bytes of a copy of a superblock that a probe has read.
    pub(super) fn probed(&self, copy: usize, into: &mut [u8; 4096]) -> bool {
        let segment = self.table[self.table.len() - 2 + copy];
        let head = segment.slice(0, 4096);
        head.is_some_and(|head| self.shared.regions.load(head, into).is_ok())
    }

    /// A request for a superblock at a byte of a leg, with one segment of the table.
    fn request(&self, place: Place, operation: Operation, at: u64, segment: usize) -> Request {
        let block_size = self.shared.shape.block_size;
        Request {
            token: place.token(),
            lba: at / u64::from(block_size),
            operand: 0,
            segment_first: u32::try_from(segment).unwrap_or(u32::MAX),
            blocks: self.shared.superblock_bytes() / block_size,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: base::Flags::NONE,
        }
    }

    #[inline]
    fn push(&mut self, legs: u8, request: &Request, first: bool) -> u8 {
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

    /// Of some legs the one with the fewest requests under way; of those as idle, each in its turn.
    #[inline]
    pub(super) fn idlest(&mut self, legs: u8) -> u8 {
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

    /// How often a leg has lost completed writes, as it counts them.
    pub(super) fn losses(&self, leg: usize) -> u64 {
        self.legs[leg].backend.as_ref().map_or(0, |backend| backend.losses())
    }

    /// Whether a leg has lost completed writes, and no channel has acted on that.
    #[inline]
    pub(super) fn has_lost(&self, leg: usize) -> bool {
        self.losses(leg) > self.shared.noticed_losses(leg)
    }

    /// The losses of some legs are acted on. The caller holds the lock of the mirror.
    pub(super) fn notice_losses(&self, legs: u8) {
        for leg in (0..self.legs.len()).filter(|leg| legs >> leg & 1 == 1) {
            self.shared.notice_losses(leg, self.losses(leg));
        }
    }

    /// Before a flush is sent: has no leg fail it for what it lost before it came back.
    ///
    /// A leg reports a loss once on every channel. A channel of the mirror that nobody polls while a leg
    /// loses writes and comes back would hear of it when the leg is in sync, and have to give it up again:
    /// nothing in a failed flush tells an old loss from a new one, and a new one must not be ignored.
    ///
    /// So losses are ordered by the leg's own count. `repaired_losses` is the count at the end of the
    /// probe that found the leg. Then it was neither in sync nor written, so that
    ///
    /// - whatever those losses have taken was completed by the leg before, and lies in regions that are
    ///   dirty: a region becomes clean only after a flush of all legs that has not failed. These are copied
    ///   before the leg is read, and the flush before it is in sync makes the copies durable. A write to it
    ///   that was under way when it was given up lies in a dirty region, too.
    /// - a loss of what is written from then on, by whichever channel, the copying included, is counted
    ///   higher, and each channel fails a flush for it, as ever: none is excused beyond that count.
    /// - a later return of the leg stores a higher count, for which the same is true. So it does not matter
    ///   which of them a channel sees, and when; a channel that is never used holds up nothing.
    ///
    /// A loss that is older and was counted later is taken for a new one: the leg is copied to once more.
    /// So is one that a leg reports without counting it; for these there are the flushes that a channel
    /// sends of its own when a leg comes back.
    pub(super) fn heed_losses(&mut self) {
        for (index, leg) in self.legs.iter_mut().enumerate() {
            let repaired = self.shared.repaired_losses(index);
            if repaired > leg.heeded
                && let Some(backend) = &mut leg.backend
            {
                leg.heeded = repaired;
                backend.heed_losses(repaired);
            }
        }
    }

    /// Before a leg is looked for that was given up: it fails no flush for what it is known to have lost. All
    /// of that is copied to it before it is read again, as above.
    pub(super) fn heed_all_losses(&mut self, leg: u8) {
        let number = leg.trailing_zeros() as usize;
        if let Some(backend) = self.legs.get_mut(number).and_then(|leg| leg.backend.as_mut()) {
            backend.heed_losses(backend.losses());
        }
    }

    /// A leg has failed a flush of this channel for lost writes, which the mirror acts on: the next flush
    /// says what is true from then on. A leg that cannot acknowledge it fails all of them, until it is
    /// given up and looked for.
    #[cold]
    pub(super) fn acknowledge_losses(&mut self, leg: usize) {
        if let Some(backend) = &mut self.legs[leg].backend {
            let _ = backend.acknowledge_losses();
        }
    }

    /// Hands down what waits, as much as the legs take.
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

    pub(super) fn poll(&mut self, leg: usize, now: Instant, answers: &mut Answers) -> usize {
        let Leg { backend, under_way, .. } = &mut self.legs[leg];
        let count = backend.as_mut().map_or(0, |backend| backend.poll(now, answers));
        *under_way -= u32::try_from(count).unwrap_or(0);
        count
    }

    fn backends(&mut self) -> impl Iterator<Item = &mut Box<dyn Backend>> {
        self.legs.iter_mut().filter_map(|leg| leg.backend.as_mut())
    }

    pub(super) fn flush(&mut self) {
        self.backends().for_each(|backend| backend.flush());
    }

    /// Ends all channels, and with them whatever is under way.
    pub(super) fn close(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.backend = None);
    }

    pub(super) fn wake_at(&self) -> Instant {
        let at = |leg: &Leg| match &leg.backend {
            Some(_) if !leg.queue.is_empty() => Instant::default(),
            // Some of it may be the mirror's own, of which whoever asks for this knows nothing.
            Some(backend) if leg.under_way > 0 && is_silent(backend) => Instant::default(),
            Some(backend) => backend.wake_at(),
            None => Instant::NEVER,
        };
        self.legs.iter().map(at).min().unwrap_or(Instant::NEVER)
    }

    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    pub(super) fn arm(&mut self) -> bool {
        let must_not_sleep = self.legs.iter().any(|leg| !leg.queue.is_empty());
        self.backends().fold(must_not_sleep, |busy, backend| backend.arm() || busy)
    }

    pub(super) fn disarm(&mut self) {
        self.backends().for_each(|backend| backend.disarm());
    }
}

/// Whether nothing wakes whoever waits for it.
fn is_silent(backend: &impl Backend) -> bool {
    matches!(backend.wake_source(), WakeSource::Nothing)
}

/// Stores bytes at the start of a segment and zeroes behind them.
fn store_padded(shared: &Shared, segment: Segment, bytes: &[u8]) -> bool {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let head = segment.slice(0, len);
    shared.regions.fill(segment, 0).is_ok()
        && head.is_some_and(|head| shared.regions.store(head, bytes).is_ok())
}
