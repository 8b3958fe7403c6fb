//! Channel of a device with rate limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Operation, Request, Segment, Span,
};

use super::token_bucket::{
    BucketTicks, instant_to_ticks, ns_to_ticks, rescale_reservation_end, ticks_to_instant,
};
use super::{BUCKETS, IoClass, RECHECK_INTERVAL, SharedBuckets};

/// Channel that submits no more than the limits allow. Requests that it does not accept can be submitted
/// again at [`wake_at`](ChannelWakeup::wake_at). Without limits, a batch costs one load and goes down
/// unchanged.
pub struct RateLimitedChannel<B> {
    below: B,
    shared: Arc<SharedBuckets>,
    class: IoClass,
    block_size: u32,
    /// The value of `changes` that this channel has applied, and the limits as of it.
    seen: u64,
    rates: [u64; BUCKETS],
    has_limits: bool,
    /// Reservations of reads and of writes.
    slices: [ReservedSlice; 2],
    /// When a rejected caller should retry.
    retry_at: Instant,
    /// Requests that were rejected by the last submission, and when.
    waiting: u64,
    waiting_since: Instant,
}

/// A reservation: when it starts and what it permits.
#[derive(Clone, Copy, Debug, Default)]
struct ReservedSlice {
    /// Start time in each bucket.
    at: [BucketTicks; BUCKETS],
    /// Requests permitted.
    count: u64,
    /// Bytes paid for and not used; negative if more were used.
    bytes: i64,
    /// Bytes that are, or will be, paid for with this reservation.
    price: u64,
    /// The reservation is from the guaranteed minimum; what it permits has still to be paid from the main
    /// bucket.
    is_minimum: bool,
}

/// The largest slice, unless a single request is larger.
const SLICE: BucketTicks = ns_to_ticks(Span::from_ms(1));

/// Side of a request, which selects its slice: reads, writes, or none.
const READS: usize = 0;
const WRITES: usize = 1;
const UNLIMITED: usize = 2;

/// The side of each operation, by index.
const SIDES: [usize; Operation::ALL.len()] = {
    let mut sides = [WRITES; Operation::ALL.len()];
    sides[Operation::Flush as usize] = UNLIMITED;
    sides[Operation::Read as usize] = READS;
    sides[Operation::Compare as usize] = READS;
    sides[Operation::Verify as usize] = READS;
    sides
};

/// How many times an operation transfers its blocks, by index.
const TRANSFERS: [u64; Operation::ALL.len()] = {
    let mut moves = [0; Operation::ALL.len()];
    moves[Operation::Read as usize] = 1;
    moves[Operation::Write as usize] = 1;
    moves[Operation::Compare as usize] = 1;
    moves[Operation::Copy as usize] = 1;
    moves[Operation::CompareAndWrite as usize] = 1;
    moves
};

#[inline]
fn direction_of_request(request: &Request) -> usize {
    SIDES[request.operation as usize]
}

/// The blocks that a request transfers.
#[inline]
fn transferred_blocks(request: &Request) -> u64 {
    TRANSFERS[request.operation as usize] * u64::from(request.blocks)
}

/// The buckets of a side: those of the total, and its own.
const fn buckets_of_direction(side: usize) -> [usize; 4] {
    [0, 1, 2 + 2 * side, 3 + 2 * side]
}

/// Requests that may go down, and what they use of the slices.
#[derive(Default)]
struct RequestTotals {
    count: usize,
    requests: [u64; 3],
    blocks: [u64; 3],
}

/// Whether a bucket counts bytes.
const fn is_byte_bucket(bucket: usize) -> bool {
    bucket % 2 == 1
}

impl<B: IoChannel> RateLimitedChannel<B> {
    pub(super) fn new(below: B, shared: Arc<SharedBuckets>, class: IoClass) -> Self {
        Self {
            block_size: below.limits().block_size,
            below,
            shared,
            class,
            seen: 0,
            rates: [0; BUCKETS],
            has_limits: false,
            slices: [ReservedSlice::default(); 2],
            retry_at: Instant::NEVER,
            waiting: 0,
            waiting_since: Instant::default(),
        }
    }

    /// Counts how long the rejected requests have waited until now.
    fn count_wait(&mut self, now: Instant) {
        if self.waiting > 0 {
            let ns = self.waiting.saturating_mul(now.since(self.waiting_since).ns);
            self.shared.limit_wait_ns.fetch_add(ns, Ordering::Relaxed);
            self.waiting_since = now;
        }
    }

    /// Records that `rejected` requests wait after `taken` were accepted.
    fn record_waiting(&mut self, now: Instant, taken: usize, rejected: usize) {
        let (taken, rejected) = (taken as u64, rejected as u64);
        let new = rejected.saturating_sub(self.waiting.saturating_sub(taken));
        self.shared.limited.fetch_add(new, Ordering::Relaxed);
        (self.waiting, self.waiting_since) = (rejected, now);
    }

    /// Applies changed limits. Existing reservations keep their start; buckets that were unlimited before
    /// are reserved now.
    fn apply_rate_changes(&mut self, now: BucketTicks, changes: u64) {
        self.seen = changes;
        let old = self.rates;
        self.rates = std::array::from_fn(|index| self.shared.buckets[index].rate());
        self.has_limits = self.rates != [0; BUCKETS];
        let changed_at = self.shared.changed_at.load(Ordering::Relaxed);
        if !self.has_limits || self.class == IoClass::Background {
            // The background has paid for little, and pays again.
            self.slices = [ReservedSlice::default(); 2];
        }
        for side in [0, 1] {
            if self.slices[side].count == 0 {
                continue;
            }
            for index in buckets_of_direction(side) {
                let (at, rate) = (self.slices[side].at[index], self.rates[index]);
                self.slices[side].at[index] = if old[index] == 0 && rate > 0 {
                    self.shared.buckets[index].reserve_units(
                        now,
                        rate,
                        self.slice_units(side, index),
                    )
                } else {
                    rescale_reservation_end(at, changed_at, old[index], rate)
                };
            }
        }
    }

    /// The cost of a slice in the units of a bucket.
    fn slice_units(&self, side: usize, bucket: usize) -> u64 {
        let ReservedSlice { count, price, .. } = self.slices[side];
        if is_byte_bucket(bucket) { price } else { count }
    }

    /// The leading requests that may go down now. If there are none, a reservation has been made.
    fn count_admitted_or_reserve(
        &mut self,
        now: BucketTicks,
        requests: &[Request],
    ) -> RequestTotals {
        let mut left =
            [self.permitted_requests(now, READS), self.permitted_requests(now, WRITES), u64::MAX];
        if let Some(half) =
            requests.first().map(direction_of_request).filter(|half| *half != UNLIMITED)
            && self.slices[half].count == 0
        {
            self.reserve_slice(now, half, requests);
            left[half] = self.permitted_requests(now, half);
        }
        let mut admitted = RequestTotals::default();
        for request in requests {
            let side = direction_of_request(request);
            if admitted.requests[side] == left[side] {
                break;
            }
            admitted.requests[side] += 1;
            admitted.blocks[side] += transferred_blocks(request);
            admitted.count += 1;
        }
        admitted
    }

    /// The number of requests of a slice that may go down now.
    fn permitted_requests(&mut self, now: BucketTicks, side: usize) -> u64 {
        let slice = &self.slices[side];
        if slice.count == 0 {
            return 0;
        }
        let has_come = buckets_of_direction(side).iter().all(|index| slice.at[*index] <= now);
        if slice.is_minimum && (has_come || self.has_background_surplus(now, side)) {
            self.pay_for_slice(now, side);
            return self.slices[side].count;
        }
        if has_come { slice.count } else { 0 }
    }

    /// Whether the foreground has no reservation in the future, so that tokens are left for the
    /// background.
    fn has_background_surplus(&self, now: BucketTicks, side: usize) -> bool {
        let is_free = |index: usize| {
            self.rates[index] == 0 || self.shared.buckets[index].reserved_until() <= now
        };
        buckets_of_direction(side).into_iter().all(is_free)
    }

    /// Reserves a slice for as many of `requests` as fit.
    fn reserve_slice(&mut self, now: BucketTicks, side: usize, requests: &[Request]) {
        let (count, bytes) = self.slice_capacity(now, side, requests);
        let slice = &mut self.slices[side];
        // Corrects over- and underpayment of the previous slice.
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX).max(slice.bytes);
        slice.price = bytes.abs_diff(slice.bytes);
        (slice.count, slice.bytes) = (count, bytes);
        slice.at = [0; BUCKETS];
        slice.is_minimum = false;
        // While the foreground uses the whole rate, the background gets only its minimum.
        if self.class == IoClass::Background && !self.has_background_surplus(now, side) {
            self.slices[side].is_minimum = true;
            for index in buckets_of_direction(side) {
                let (rate, units) = (self.rates[index], self.slice_units(side, index));
                if rate > 0 {
                    let at = self.shared.buckets[index].reserve_guaranteed(now, rate, units);
                    self.slices[side].at[index] = at;
                }
            }
        } else {
            self.pay_for_slice(now, side);
        }
    }

    /// Pays for a slice and sets its start time. The background has waited already and starts at once.
    fn pay_for_slice(&mut self, now: BucketTicks, side: usize) {
        for index in buckets_of_direction(side) {
            let (rate, units) = (self.rates[index], self.slice_units(side, index));
            if rate > 0 {
                let at = self.shared.buckets[index].reserve_units(now, rate, units);
                let waits = self.class == IoClass::Foreground;
                self.slices[side].at[index] = if waits { at } else { 0 };
            }
        }
        self.slices[side].is_minimum = false;
    }

    /// The number of `requests` that fit into a slice, and the bytes that they transfer.
    fn slice_capacity(&self, now: BucketTicks, half: usize, requests: &[Request]) -> (u64, u64) {
        let mut most = [u64::MAX; 2];
        for index in buckets_of_direction(half) {
            let (rate, most) = (self.rates[index], &mut most[index % 2]);
            if rate > 0 {
                *most = (*most).min(self.shared.buckets[index].burst_units(now, rate, SLICE));
            }
        }
        let (requests_max, blocks_max) = (most[0].max(1), most[1] / u64::from(self.block_size));
        let (mut count, mut blocks) = (0, 0_u64);
        for request in requests.iter().filter(|other| direction_of_request(other) == half) {
            let more = blocks + transferred_blocks(request);
            if count == requests_max || (count > 0 && more > blocks_max) {
                break;
            }
            (count, blocks) = (count + 1, more);
        }
        (count, blocks.saturating_mul(u64::from(self.block_size)))
    }

    /// Deducts sent requests from the slices.
    fn deduct_sent(&mut self, gone: &RequestTotals) {
        for (half, slice) in self.slices.iter_mut().enumerate() {
            slice.count -= gone.requests[half];
            let bytes = gone.blocks[half].saturating_mul(u64::from(self.block_size));
            slice.bytes = slice.bytes.saturating_sub_unsigned(bytes);
        }
    }

    /// Records when the caller that holds `first` should retry.
    fn record_retry_time(&mut self, now: Instant, first: &Request) {
        let side = direction_of_request(first);
        let slice = &self.slices[side];
        let last = |at: &dyn Fn(usize) -> BucketTicks| {
            buckets_of_direction(side).into_iter().map(at).max().unwrap_or_default()
        };
        let mut at = last(&|index| slice.at[index]);
        // The background may also send as soon as the reservations of the foreground end.
        if slice.is_minimum {
            at = at.min(last(&|index| match self.rates[index] {
                0 => 0,
                _ => self.shared.buckets[index].reserved_until(),
            }));
        }
        self.retry_at = ticks_to_instant(at).min(now.after(RECHECK_INTERVAL));
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
        self.count_wait(now);
        let mut taken = 0;
        while let Some(first) = requests.get(taken) {
            let rest = &requests[taken..];
            let admitted = self.count_admitted_or_reserve(instant_to_ticks(now), rest);
            if admitted.count == 0 {
                self.record_retry_time(now, first);
                break;
            }
            let count = self.below.submit(now, &rest[..admitted.count], segments);
            taken += count;
            if count < admitted.count {
                self.deduct_sent(&sum_requests_and_blocks(&rest[..count]));
                break;
            }
            self.deduct_sent(&admitted);
        }
        // What the device below did not accept has not been rejected by a limit.
        let is_limited = self.retry_at != Instant::NEVER;
        self.record_waiting(now, taken, if is_limited { requests.len() - taken } else { 0 });
        taken
    }
}

/// What requests use of the slices.
fn sum_requests_and_blocks(requests: &[Request]) -> RequestTotals {
    let mut sum = RequestTotals::default();
    for request in requests {
        sum.requests[direction_of_request(request)] += 1;
        sum.blocks[direction_of_request(request)] += transferred_blocks(request);
    }
    sum
}

impl<B: IoChannel> IoChannel for RateLimitedChannel<B> {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // Pairs with the release in `QosLimiter::set`.
        let changes = self.shared.changes.load(Ordering::Acquire);
        if changes != self.seen {
            self.count_wait(now);
            self.waiting = 0;
            self.apply_rate_changes(instant_to_ticks(now), changes);
        }
        if !self.has_limits {
            return self.below.submit(now, requests, segments);
        }
        self.submit_limited(now, requests, segments)
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        if now >= self.retry_at {
            // The rejected caller has been woken. If its retry is too early, this is set again.
            self.retry_at = Instant::NEVER;
        }
        self.below.poll(now, completions)
    }

    fn fence_writes(&mut self) {
        self.below.fence_writes();
    }
}

impl<B: IoChannel> ChannelWakeup for RateLimitedChannel<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.below)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.below)
    }

    fn wake_at(&self) -> Instant {
        self.retry_at.min(self.below.wake_at())
    }
}
