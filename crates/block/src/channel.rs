//! A channel: the software queue of one thread.
//!
//! ```text
//!   submit   check the range and the claim ─> take tags ─> requests with tags for tokens ─> context
//!   poll     answers with tokens again <─ give tags back, count <──────────────────────────── context
//! ```
//!
//! Both go by batches, and what comes alone has a way without what a batch is set up for. What a
//! request needs beyond that, because its device is held still, resized or gone, because it is
//! neither read nor write, or because it must be refused, is looked at beside the fast way.

mod fenced;
mod losses;
mod slow;
mod tags;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::{
    Answers, Backend, DoorbellCounts, Flags, Instant, Limits, Operation, Request, Segment, Support,
    WakeSource,
};
use host::watch::{Interest, Watch};

pub(crate) use self::losses::Losses;
use self::tags::{Tags, Traits};
use crate::backend::ready::Ready;
use crate::context::{Lane, SharedContext};
use crate::device::{ChannelId, Grant, Mode, Port};
use crate::fence::{Fence, Waiting};
use crate::lock::Held;
use crate::map::Type;

/// One thread's way to a device.
pub struct Channel {
    tags: Tags,
    /// The default one, and those for reads and for what is polled, if they are others.
    lanes: Vec<Lane>,
    gate: Gate,
    /// Requests on their way to a context.
    outgoing: Vec<Request>,
    port: Arc<Port>,
    grant: Arc<Grant>,
    /// `attention` as of the last look.
    seen: u64,
    block_shift: u32,
    read_lane: u8,
    poll_lane: u8,
    /// Whether every request takes the slow way.
    is_slow: bool,
    /// Whether every answer is looked at: that, or flushes are in flight.
    is_careful: bool,
    /// Flushes in flight.
    flushes: usize,
    /// Losses of the device that its client has been told, or was opened after.
    told: u64,
    /// The bell of the device would not be heard.
    is_deaf: bool,
    is_removed: bool,
    /// Answers to what was never submitted, or was given up.
    refused: Ready,
    holds: Vec<Held>,
    fences: Vec<Fence>,
    /// The fence around its own writes, once its client has gone.
    fence: Option<u64>,
    /// Requests that wait for a fence.
    waiting: Vec<Waiting>,
    limits: Limits,
    wake: Wake,
}

/// What the fast way asks of a batch.
#[derive(Clone, Copy, Debug)]
struct Gate {
    /// Bits that no kind of request in it may have.
    banned: u16,
    block_count: u64,
    /// What the device can do and the claim allows.
    support: Support,
    is_read_only: bool,
}

/// What wakes the thread of a channel.
enum Wake {
    /// The bell of the device.
    Bell,
    /// That, and what the contexts have.
    Several(OwnedFd),
}

/// Requests that are prepared at once. They and their slots fit into a first-level cache.
const BATCH_MAX: usize = 128;
/// The bit of a kind that says [`Flags::POLLED`].
const POLLED_KIND: u16 = (Flags::POLLED.0 as u16) << 8;
const _: () = assert!(
    Operation::Read as u8 == 0 && Operation::Write as u8 == 1,
    "of these two and no other operation no bit is set but the lowest"
);

/// Block numbers from here on could make a sum overflow.
const LBA_HIGH: u64 = 1 << 63;

/// Operations that change blocks.
pub(crate) const WRITING: Support = Support::of(&[
    Operation::Write,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::WriteUncorrectable,
    Operation::Copy,
    Operation::CompareAndWrite,
]);

impl Channel {
    /// A channel for whoever has this claim.
    pub(crate) fn open(grant: Arc<Grant>, limits: Limits) -> Result<Self, String> {
        let shared = Arc::clone(&grant.shared);
        let port = shared.enter(&grant.holder)?;
        // From here on dropping the channel gives the place back.
        let tags = limits.depth_max;
        let support = limits.support;
        let gate = Gate {
            banned: banned(support),
            block_count: 0,
            support,
            is_read_only: grant.claim.is_read_only(),
        };
        let mut channel = Self {
            tags: Tags::new(tags),
            lanes: Vec::with_capacity(3),
            gate,
            outgoing: Vec::new(),
            port,
            grant,
            seen: 0,
            block_shift: limits.block_size.trailing_zeros(),
            read_lane: 0,
            poll_lane: 0,
            is_slow: true,
            is_careful: true,
            flushes: 0,
            told: shared.losses.count(),
            is_deaf: false,
            is_removed: false,
            refused: Ready::with_depth(tags),
            holds: Vec::new(),
            fences: Vec::new(),
            fence: None,
            waiting: Vec::new(),
            limits,
            wake: Wake::Bell,
        };
        channel.open_lanes()?;
        channel.wake = channel.join_descriptors()?;
        channel.port.is_open.store(true, Ordering::Release);
        channel.attend();
        Ok(channel)
    }

    fn open_lanes(&mut self) -> Result<(), String> {
        let options = &self.grant.shared.options;
        let (is_mq, map) = (options.mode != Mode::Single, options.map);
        for of in [Type::Default, Type::Read, Type::Poll] {
            // The old way there is one queue, and one lock before it.
            let context = if is_mq { map.context(of, self.port.index) } else { Some(0) };
            let is_wanted = is_mq || of == Type::Default;
            let Some(context) = context.filter(|_| is_wanted) else { continue };
            let is_owned = is_mq && map.is_owned(of, context, options.channels_max);
            let lane = self.open_lane(of, context, is_owned)?;
            let index = u8::try_from(self.lanes.len()).unwrap_or(0);
            match of {
                Type::Default => {}
                Type::Read => self.read_lane = index,
                Type::Poll => self.poll_lane = index,
            }
            self.lanes.push(lane);
        }
        Ok(())
    }

    fn open_lane(&self, of: Type, context: u32, is_owned: bool) -> Result<Lane, String> {
        let shared = &self.grant.shared;
        let is_polled = of == Type::Poll;
        if is_owned {
            return Ok(Lane::owned(shared.way()?, is_polled));
        }
        let context = shared.context(of, context);
        let member =
            SharedContext::join(context, &self.port, self.limits.depth_max, || shared.way())?;
        Ok(Lane::shared(member, is_polled))
    }

    /// One descriptor for all that may wake the thread.
    fn join_descriptors(&self) -> Result<Wake, String> {
        let refuse = |error: std::io::Error| format!("wait for a channel: {error}");
        let watch = Watch::new().map_err(refuse)?;
        let readable = Interest { readable: true, writable: false };
        let mut added = Vec::new();
        let mut add = |descriptor: BorrowedFd<'_>| added.push(watch.add(descriptor, 0, readable));
        self.lanes.iter().for_each(|lane| lane.descriptors(&mut add));
        if added.is_empty() {
            return Ok(Wake::Bell);
        }
        added.extend(self.port.bell.descriptor(0).map(|bell| watch.add(bell, 0, readable)));
        added.into_iter().collect::<Result<(), _>>().map_err(refuse)?;
        Ok(Wake::Several(watch.into()))
    }

    /// Which channel of its device it is.
    pub fn id(&self) -> ChannelId {
        ChannelId(self.port.index)
    }

    /// The lane of the first request, and how many at the front go the same way.
    #[inline]
    fn route(&self, requests: &[Request]) -> (usize, usize) {
        if self.lanes.len() <= 1 {
            return (0, requests.len());
        }
        let Some(lane) = requests.first().map(|first| self.lane_of(first)) else { return (0, 0) };
        let same = requests.iter().take_while(|request| self.lane_of(request) == lane);
        (lane, same.count())
    }

    #[inline]
    fn lane_of(&self, request: &Request) -> usize {
        let lane = if request.flags.has(Flags::POLLED) && self.poll_lane > 0 {
            self.poll_lane
        } else if request.operation as u8 == Operation::Read as u8 {
            self.read_lane
        } else {
            0
        };
        usize::from(lane)
    }

    /// How many of so many requests there are tags for.
    #[inline]
    pub(super) fn room_for(&mut self, count: usize) -> usize {
        if self.tags.room() < count + self.refused.len() && self.tags.may_grow() {
            self.tags.grow(count + self.refused.len());
        }
        self.tags.room().saturating_sub(self.refused.len())
    }

    /// Whether a request that comes alone has a tag and can go the fast way.
    #[inline]
    fn may_go_alone(&self, request: &Request) -> bool {
        !self.is_slow
            && self.tags.room() > self.refused.len()
            && self.gate.lets_pass(Traits::of(request))
    }

    /// Submits a request that comes alone: nothing to be found out that a batch has in common.
    #[inline]
    fn submit_alone(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> usize {
        let mut sent = self.tags.lend_one(now, request);
        let lane = match self.lanes.as_mut_slice() {
            [lane] => lane,
            _ => {
                let lane = self.lane_of(request);
                &mut self.lanes[lane]
            }
        };
        if sent.flags.has(Flags::POLLED) {
            // It has told this layer what it had to tell.
            sent.flags.0 &= !Flags::POLLED.0;
        }
        let taken = lane.submit(now, std::slice::from_mut(&mut sent), segments);
        if taken == 0 {
            self.settle();
        } else {
            self.tags.take_one();
        }
        taken
    }

    /// Submits batch by batch: each of requests that go the same way. Not inlined: what comes alone
    /// does not pay for the room that its variables take.
    #[inline(never)]
    fn submit_batches(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut taken = 0;
        while taken < requests.len() {
            let rest = &requests[taken..];
            let room = self.room_for(rest.len());
            let (lane, same) = self.route(&rest[..rest.len().min(room).min(BATCH_MAX)]);
            if same == 0 {
                break;
            }
            let batch = &rest[..same];
            let fast = match self.is_slow {
                true => None,
                false => self.submit_batch(now, lane, batch, segments),
            };
            let count = fast.unwrap_or_else(|| self.submit_slowly(now, lane, batch, segments));
            taken += count;
            if count < same {
                break;
            }
        }
        self.settle();
        taken
    }

    /// Submits requests that all go the same way; they are no more than there are tags.
    #[inline]
    fn submit_batch(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> Option<usize> {
        let traits = self.tags.lend(now, requests, &mut self.outgoing);
        if !self.gate.lets_pass(traits) {
            return None;
        }
        Some(self.send(now, lane, traits, segments))
    }

    /// Hands over what was prepared, and returns how much of it was taken.
    #[inline]
    fn send(&mut self, now: Instant, lane: usize, traits: Traits, segments: &[Segment]) -> usize {
        if traits.kinds & POLLED_KIND != 0 {
            // It has told this layer what it had to tell.
            let kept = !Flags::POLLED.0;
            self.outgoing.iter_mut().for_each(|request| request.flags.0 &= kept);
        }
        let count = self.outgoing.len();
        let taken = self.lanes[lane].submit(now, &mut self.outgoing, segments);
        self.tags.take(count, taken);
        taken
    }

    /// Takes the answers of one lane, and gives them the tokens that their requests came with.
    #[inline(always)]
    fn poll_lane(&mut self, lane: usize, now: Instant, answers: &mut Answers) -> usize {
        let Self { tags, lanes, port, block_shift, .. } = self;
        let start = answers.len();
        if lanes[lane].poll(now, answers) == 0 {
            return 0;
        }
        let given = answers.after_mut(start);
        let count = given.len();
        match given {
            [answer] => tags.give_back_one(now, answer, *block_shift, &port.meter),
            given => tags.give_back(now, given, *block_shift, &port.meter),
        }
        count
    }

    /// Not inlined: whoever has one lane does not pay for a loop.
    #[inline(never)]
    fn poll_lanes(&mut self, now: Instant, answers: &mut Answers) -> usize {
        (0..self.lanes.len()).map(|lane| self.poll_lane(lane, now, answers)).sum()
    }

    /// Not inlined, as [`poll_lanes`](Self::poll_lanes).
    #[inline(never)]
    fn flush_lanes(&mut self) {
        self.lanes.iter_mut().for_each(Lane::flush);
    }

    /// Says how much may be in flight by the end of this turn, and whether there is reason to look
    /// what the device is about.
    #[inline]
    fn announce(&self, more: usize) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "both are depths")]
        let upper = (self.tags.in_flight() + more) as u32;
        self.port.in_flight.store(upper, Ordering::Relaxed);
        let shared = &self.grant.shared;
        // Between the store and the load: see `lock`.
        shared.barrier.light();
        shared.attention.0.load(Ordering::Relaxed) != self.seen
    }

    /// Says how much is in flight.
    #[inline]
    fn settle(&self) {
        #[expect(clippy::cast_possible_truncation, reason = "a depth")]
        let count = self.tags.in_flight() as u32;
        self.port.in_flight.store(count, Ordering::Release);
    }
}

impl Backend for Channel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.announce(requests.len()) {
            self.attend();
        }
        match requests {
            [request] if self.may_go_alone(request) => self.submit_alone(now, request, segments),
            _ => self.submit_batches(now, requests, segments),
        }
    }

    #[inline]
    fn flush(&mut self) {
        match self.lanes.as_mut_slice() {
            [lane] => lane.flush(),
            _ => self.flush_lanes(),
        }
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        if self.grant.shared.attention.0.load(Ordering::Relaxed) != self.seen {
            self.attend();
        }
        if self.is_careful {
            return self.poll_carefully(now, answers);
        }
        let depth = self.tags.in_flight();
        let mut found = match self.lanes.len() {
            1 => self.poll_lane(0, now, answers),
            _ => self.poll_lanes(now, answers),
        };
        if found > 0 {
            self.port.meter.polled(depth as u64);
            self.settle();
        }
        if self.refused.len() > 0 {
            found += self.poll_slowly(now, answers);
        }
        found
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.lanes.iter().map(Lane::doorbells).fold(DoorbellCounts::default(), DoorbellCounts::plus)
    }

    fn wake_at(&self) -> Instant {
        if self.refused.len() > 0 {
            return Instant::default();
        }
        let lanes = self.lanes.iter().map(Lane::wake_at).min().unwrap_or(Instant::NEVER);
        let waits = self.waiting.iter().map(|waiting| waiting.until).min();
        lanes.min(waits.unwrap_or(Instant::NEVER))
    }

    fn wake_source(&self) -> WakeSource<'_> {
        match &self.wake {
            Wake::Several(descriptor) => WakeSource::Descriptor(descriptor.as_fd()),
            Wake::Bell => {
                let bell = self.port.bell.descriptor(0);
                bell.map_or(WakeSource::Nothing, WakeSource::Descriptor)
            }
        }
    }

    fn is_done_by_kernel(&self) -> bool {
        self.lanes.iter().all(Lane::is_done_by_kernel)
    }

    fn arm(&mut self) -> bool {
        if self.grant.shared.attention.0.load(Ordering::Acquire) != self.seen {
            // What was held back may go on, or has been given up.
            self.attend();
            return true;
        }
        if self.refused.len() > 0 || self.is_deaf || self.may_go_on() {
            return true;
        }
        self.lanes.iter_mut().any(Lane::arm)
    }

    fn disarm(&mut self) {
        self.lanes.iter_mut().for_each(Lane::disarm);
    }

    fn fence_writes(&mut self) {
        self.end_client();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.lanes.iter_mut().try_for_each(Lane::acknowledge_losses)
    }
}

impl Gate {
    /// Whether there is nothing in a batch that would have to be looked at by itself.
    #[inline]
    fn lets_pass(&self, traits: Traits) -> bool {
        traits.kinds & self.banned == 0 && traits.lbas < LBA_HIGH && traits.end <= self.block_count
    }
}

/// The fast way is for reads and writes, as far as they are supported at all; flags do not matter.
/// One may read whoever may write.
fn banned(support: Support) -> u16 {
    let has = |operation| support.has(operation);
    match (has(Operation::Read), has(Operation::Write)) {
        (true, true) => 0xfe,
        (true, false) => 0xff,
        (false, _) => 0xffff,
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.lanes.clear();
        self.settle();
        // A fence stays that is around writes which nobody has answered.
        self.grant.shared.leave(&self.port);
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.tags.in_flight();
        out.debug_struct("Channel")
            .field("device", &self.grant.shared.name)
            .field("port", &self.port.index)
            .field("in_flight", &in_flight)
            .finish_non_exhaustive()
    }
}
