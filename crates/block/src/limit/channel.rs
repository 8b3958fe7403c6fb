//! One channel of a device that has limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Operation, Request, Segment, Span,
    WakeSource,
};

use super::bucket::{Ticks, instant_of, rescaled, ticks, ticks_of};
use super::{BUCKETS, Class, LOOK_AGAIN, Shared};

/// A backend that takes no more than the limits allow; what it does not take may be submitted again
/// at [`wake_at`](Backend::wake_at). Without limits a batch costs one load and goes down as it is.
pub struct Limited<B> {
    below: B,
    shared: Arc<Shared>,
    class: Class,
    block_size: u32,
    /// The change up to which this channel knows the limits, and what they are.
    seen: u64,
    rates: [u64; BUCKETS],
    has_limits: bool,
    /// What reads, and what writes.
    slices: [Slice; 2],
    /// When somebody who was turned away should try again.
    retry_at: Instant,
}

/// A place in line, and what may go when it comes.
#[derive(Clone, Copy, Debug, Default)]
struct Slice {
    /// When it comes, bucket by bucket.
    at: [Ticks; BUCKETS],
    /// Requests.
    count: u64,
    /// Bytes that were paid for and have not gone yet; less than none if more have gone.
    bytes: i64,
    /// Bytes that are, or will be, paid for with this place.
    price: u64,
    /// The place is in the line of the floor, and what goes has still to be paid in the other.
    is_floor: bool,
}

/// The largest slice, unless a single request is larger.
const SLICE: Ticks = ticks(Span::from_ms(1));

/// Which slice a request is taken from: that of reads, that of writes, or none.
const READS: usize = 0;
const WRITES: usize = 1;
const FREE: usize = 2;

/// The side of every operation, by its number.
const SIDES: [usize; Operation::ALL.len()] = {
    let mut sides = [WRITES; Operation::ALL.len()];
    sides[Operation::Flush as usize] = FREE;
    sides[Operation::Read as usize] = READS;
    sides[Operation::Compare as usize] = READS;
    sides[Operation::Verify as usize] = READS;
    sides
};

/// How often an operation moves its blocks as bytes, by its number.
const MOVES: [u64; Operation::ALL.len()] = {
    let mut moves = [0; Operation::ALL.len()];
    moves[Operation::Read as usize] = 1;
    moves[Operation::Write as usize] = 1;
    moves[Operation::Compare as usize] = 1;
    moves[Operation::Copy as usize] = 1;
    moves[Operation::CompareAndWrite as usize] = 1;
    moves
};

#[inline]
fn side(request: &Request) -> usize {
    SIDES[request.operation as usize]
}

/// The blocks that a request moves.
#[inline]
fn blocks_of(request: &Request) -> u64 {
    MOVES[request.operation as usize] * u64::from(request.blocks)
}

/// The buckets that a side draws from: those of all, and its own.
const fn buckets_of(side: usize) -> [usize; 4] {
    [0, 1, 2 + 2 * side, 3 + 2 * side]
}

/// Requests that may go, and what they take from the slices.
#[derive(Default)]
struct Admitted {
    count: usize,
    requests: [u64; 3],
    blocks: [u64; 3],
}

/// Whether a bucket counts bytes.
const fn counts_bytes(bucket: usize) -> bool {
    bucket % 2 == 1
}

impl<B: Backend> Limited<B> {
    pub(super) fn new(below: B, shared: Arc<Shared>, class: Class) -> Self {
        Self {
            block_size: below.limits().block_size,
            below,
            shared,
            class,
            seen: 0,
            rates: [0; BUCKETS],
            has_limits: false,
            slices: [Slice::default(); 2],
            retry_at: Instant::NEVER,
        }
    }

    /// Takes note of changed limits. A place in line keeps its turn; where there was no limit
    /// before, one is taken now.
    fn adapt(&mut self, now: Ticks, changes: u64) {
        self.seen = changes;
        let old = self.rates;
        self.rates = std::array::from_fn(|index| self.shared.buckets[index].rate());
        self.has_limits = self.rates != [0; BUCKETS];
        let changed_at = self.shared.changed_at.load(Ordering::Relaxed);
        if !self.has_limits || self.class == Class::Background {
            // What the background had paid for is little, and it pays again.
            self.slices = [Slice::default(); 2];
        }
        for side in [0, 1] {
            if self.slices[side].count == 0 {
                continue;
            }
            for index in buckets_of(side) {
                let (at, rate) = (self.slices[side].at[index], self.rates[index]);
                self.slices[side].at[index] = if old[index] == 0 && rate > 0 {
                    self.shared.buckets[index].reserve(now, rate, self.units(side, index))
                } else {
                    rescaled(at, changed_at, old[index], rate)
                };
            }
        }
    }

    /// What a slice is worth in the units of a bucket.
    fn units(&self, side: usize, bucket: usize) -> u64 {
        let Slice { count, price, .. } = self.slices[side];
        if counts_bytes(bucket) { price } else { count }
    }

    /// The requests at the front that may go now. If none may, a place in line has been taken.
    fn admit(&mut self, now: Ticks, requests: &[Request]) -> Admitted {
        let mut left = [self.due(now, READS), self.due(now, WRITES), u64::MAX];
        if let Some(half) = requests.first().map(side).filter(|half| *half != FREE)
            && self.slices[half].count == 0
        {
            self.draw(now, half, requests);
            left[half] = self.due(now, half);
        }
        let mut admitted = Admitted::default();
        for request in requests {
            let side = side(request);
            if admitted.requests[side] == left[side] {
                break;
            }
            admitted.requests[side] += 1;
            admitted.blocks[side] += blocks_of(request);
            admitted.count += 1;
        }
        admitted
    }

    /// How many requests of a slice may go now.
    fn due(&mut self, now: Ticks, side: usize) -> u64 {
        let slice = &self.slices[side];
        if slice.count == 0 {
            return 0;
        }
        let has_come = buckets_of(side).iter().all(|index| slice.at[*index] <= now);
        if slice.is_floor && (has_come || self.is_left_over(now, side)) {
            self.pay(now, side);
            return self.slices[side].count;
        }
        if has_come { slice.count } else { 0 }
    }

    /// Whether nobody stands in line before the background.
    fn is_left_over(&self, now: Ticks, side: usize) -> bool {
        let is_free = |index: usize| {
            self.rates[index] == 0 || self.shared.buckets[index].given_until() <= now
        };
        buckets_of(side).into_iter().all(is_free)
    }

    /// Takes a slice for as many of `requests` as it may hold.
    fn draw(&mut self, now: Ticks, side: usize, requests: &[Request]) {
        let (count, bytes) = self.measure(now, side, requests);
        let slice = &mut self.slices[side];
        // What was paid too much or too little before is settled here.
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX).max(slice.bytes);
        slice.price = bytes.abs_diff(slice.bytes);
        (slice.count, slice.bytes) = (count, bytes);
        slice.at = [0; BUCKETS];
        slice.is_floor = false;
        if self.class == Class::Background && !self.is_left_over(now, side) {
            self.slices[side].is_floor = true;
            for index in buckets_of(side) {
                let (rate, units) = (self.rates[index], self.units(side, index));
                if rate > 0 {
                    let at = self.shared.buckets[index].reserve_floor(now, rate, units);
                    self.slices[side].at[index] = at;
                }
            }
        } else {
            self.pay(now, side);
        }
    }

    /// Pays for a slice, and takes the place in line that comes with it; the background has waited
    /// already and goes at once.
    fn pay(&mut self, now: Ticks, side: usize) {
        for index in buckets_of(side) {
            let (rate, units) = (self.rates[index], self.units(side, index));
            if rate > 0 {
                let at = self.shared.buckets[index].reserve(now, rate, units);
                let waits = self.class == Class::Foreground;
                self.slices[side].at[index] = if waits { at } else { 0 };
            }
        }
        self.slices[side].is_floor = false;
    }

    /// How many of `requests` a slice may hold, and how many bytes these move.
    fn measure(&self, now: Ticks, half: usize, requests: &[Request]) -> (u64, u64) {
        let mut most = [u64::MAX; 2];
        for index in buckets_of(half) {
            let (rate, most) = (self.rates[index], &mut most[index % 2]);
            if rate > 0 {
                *most = (*most).min(self.shared.buckets[index].units_at_once(now, rate, SLICE));
            }
        }
        let (requests_max, blocks_max) = (most[0].max(1), most[1] / u64::from(self.block_size));
        let (mut count, mut blocks) = (0, 0_u64);
        for request in requests.iter().filter(|other| side(other) == half) {
            let more = blocks + blocks_of(request);
            if count == requests_max || (count > 0 && more > blocks_max) {
                break;
            }
            (count, blocks) = (count + 1, more);
        }
        (count, blocks.saturating_mul(u64::from(self.block_size)))
    }

    /// Takes off the slices what has gone.
    fn spend(&mut self, gone: &Admitted) {
        for (half, slice) in self.slices.iter_mut().enumerate() {
            slice.count -= gone.requests[half];
            let bytes = gone.blocks[half].saturating_mul(u64::from(self.block_size));
            slice.bytes = slice.bytes.saturating_sub_unsigned(bytes);
        }
    }

    /// Notes when whoever holds `first` should try again.
    fn turn_away(&mut self, now: Instant, first: &Request) {
        let side = side(first);
        let slice = &self.slices[side];
        let last = |at: &dyn Fn(usize) -> Ticks| {
            buckets_of(side).into_iter().map(at).max().unwrap_or_default()
        };
        let mut at = last(&|index| slice.at[index]);
        if slice.is_floor {
            at = at.min(last(&|index| match self.rates[index] {
                0 => 0,
                _ => self.shared.buckets[index].given_until(),
            }));
        }
        self.retry_at = instant_of(at).min(now.after(LOOK_AGAIN));
    }

    /// Submits under limits.
    #[inline(never)]
    fn submit_limited(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        self.retry_at = Instant::NEVER;
        let mut taken = 0;
        while let Some(first) = requests.get(taken) {
            let rest = &requests[taken..];
            let admitted = self.admit(ticks_of(now), rest);
            if admitted.count == 0 {
                self.turn_away(now, first);
                break;
            }
            let count = self.below.submit(now, &rest[..admitted.count], segments);
            taken += count;
            if count < admitted.count {
                self.spend(&sum_of(&rest[..count]));
                break;
            }
            self.spend(&admitted);
        }
        taken
    }
}

/// What requests take from the slices.
fn sum_of(requests: &[Request]) -> Admitted {
    let mut sum = Admitted::default();
    for request in requests {
        sum.requests[side(request)] += 1;
        sum.blocks[side(request)] += blocks_of(request);
    }
    sum
}

impl<B: Backend> Backend for Limited<B> {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // Pairs with the release in `Limiter::set`.
        let changes = self.shared.changes.load(Ordering::Acquire);
        if changes != self.seen {
            self.adapt(ticks_of(now), changes);
        }
        if !self.has_limits {
            return self.below.submit(now, requests, segments);
        }
        self.submit_limited(now, requests, segments)
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        if now >= self.retry_at {
            // Whoever was turned away has been woken; if it tries again, it is told again.
            self.retry_at = Instant::NEVER;
        }
        self.below.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.below.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.retry_at.min(self.below.wake_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.below.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.below.is_done_by_kernel()
    }

    fn arm(&mut self) -> bool {
        self.below.arm()
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn fence_writes(&mut self) {
        self.below.fence_writes();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.below.acknowledge_losses()
    }
}
