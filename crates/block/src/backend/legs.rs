//! One thread's way to a device that stands on several, each of which has some of the blocks.

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Operation, Outcome, Request,
    Segment, Support, WakeSource,
};

use crate::backend::joined::Joined;
use crate::backend::pieces::Pieces;
use crate::backend::range::check;
use crate::backend::ready::Ready;

/// A channel. What a leg does not take waits in an outbox; while one is not empty, no more requests
/// are taken, so an outbox is as large as a batch and no larger.
pub(crate) struct LegsChannel<D> {
    legs: Box<[Leg]>,
    deal: D,
    limits: Limits,
    parents: Box<[Parent]>,
    free: Vec<u32>,
    /// What came up from a leg.
    below: Answers,
    ready: Ready,
    wake: Joined,
}

/// Which leg has which blocks.
pub(crate) trait Deal: Send {
    /// A bit that the tokens of children have, and none of those that the first leg was given by
    /// somebody else; zero if it was given none.
    const MARK: u64 = 0;

    /// On which leg a block is, and how many from there on are next to each other.
    fn place(&self, lba: u64) -> (usize, u64);

    /// What `blocks` from `lba` on are on a leg: the first block there, and how many.
    fn part(&self, leg: usize, lba: u64, blocks: u32) -> (u64, u32);
}

/// A leg and what is on its way there.
struct Leg {
    channel: Box<dyn Backend>,
    /// Children, with the number of their parent for a token.
    requests: Vec<Request>,
    /// How many of them the leg has taken.
    sent: usize,
    segments: Vec<Segment>,
    /// Children that the leg has taken and not answered.
    owed: usize,
}

/// A request under way.
#[derive(Clone, Copy, Debug, Default)]
struct Parent {
    token: u64,
    /// Legs that have not answered.
    left: u32,
    /// The first error.
    outcome: Outcome,
}

/// Requests that are cut up at once.
const BATCH: usize = 64;
/// Requests under way, at most: each has a place on every leg.
const DEPTH_MAX: u32 = 4096;

/// What all of several devices can do that agree on their blocks: the first one's limits where the
/// others have none that are stricter.
pub(crate) fn common_limits<'a>(legs: impl IntoIterator<Item = &'a Limits>) -> Option<Limits> {
    let mut legs = legs.into_iter();
    let mut limits = legs.next()?.clone();
    for leg in legs {
        limits.request_blocks_max = limits.request_blocks_max.min(leg.request_blocks_max);
        limits.segments_max = limits.segments_max.min(leg.segments_max);
        limits.depth_max = limits.depth_max.min(leg.depth_max);
        limits.durability = limits.durability.weaker(leg.durability);
        limits.support = limits.support.common(leg.support);
        limits.atomic_write_blocks = limits.atomic_write_blocks.min(leg.atomic_write_blocks);
    }
    limits.depth_max = limits.depth_max.min(DEPTH_MAX);
    limits.support = limits.support.without(Support::of(&[Operation::CompareAndWrite]));
    Some(limits)
}

impl<D: Deal> LegsChannel<D> {
    pub(crate) fn new(
        legs: Vec<Box<dyn Backend>>,
        deal: D,
        limits: Limits,
    ) -> Result<Self, String> {
        let wake = Joined::of(legs.iter().map(|leg| leg.wake_source()))?;
        let depth = limits.depth_max as usize;
        let leg = |channel: Box<dyn Backend>| {
            // A batch ends before the table could overflow, and one request always fits.
            let segments = usize::from(channel.limits().segments_max) + 4 * BATCH;
            Leg {
                channel,
                requests: Vec::with_capacity(BATCH),
                sent: 0,
                segments: Vec::with_capacity(segments),
                owed: 0,
            }
        };
        Ok(Self {
            legs: legs.into_iter().map(leg).collect(),
            deal,
            parents: vec![Parent::default(); depth].into(),
            free: (0..limits.depth_max).rev().collect(),
            below: Answers::with_capacity(depth),
            ready: Ready::with_depth(limits.depth_max),
            limits,
            wake,
        })
    }

    /// Puts a channel in the place of the first leg, of which nothing was asked yet: one that owes
    /// answers to what it was given by somebody else, whose tokens lack [`Deal::MARK`].
    pub(crate) fn put_first(&mut self, channel: Box<dyn Backend>, owed: usize) {
        // What cannot be heard keeps its thread awake.
        if self.wake.add(channel.wake_source()).is_err() {
            self.wake = Joined::Nothing;
        }
        let depth = u32::try_from(owed).unwrap_or(u32::MAX).saturating_add(self.limits.depth_max);
        self.ready = Ready::with_depth(depth);
        (self.legs[0].channel, self.legs[0].owed) = (channel, owed);
    }

    /// Cuts up requests from the front of `requests` until a batch is full; returns how many.
    fn cut_up(&mut self, requests: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in requests.iter().take(BATCH) {
            // An answer that waits to be polled has given its place back, and still counts.
            if self.free.len() <= self.ready.len() || !self.has_room() {
                break;
            }
            count += 1;
            match check(&self.limits, request, segments) {
                Err(outcome) => self.end(request.token, outcome),
                Ok(own) => self.begin(request, own),
            }
        }
        count
    }

    /// Whether every outbox has room for a child with as many segments as there can be.
    fn has_room(&self) -> bool {
        self.legs.iter().all(|leg| {
            let room = leg.segments.capacity() - leg.segments.len();
            room >= usize::from(leg.channel.limits().segments_max)
        })
    }

    /// Gives each leg its part of a request.
    fn begin(&mut self, request: &Request, own: &[Segment]) {
        let is_flush = request.operation == Operation::Flush;
        if request.blocks == 0 && !is_flush {
            return self.end(request.token, Outcome::SUCCESS);
        }
        let Some(number) = self.free.pop() else { return };
        let mut left = 0;
        for (index, leg) in self.legs.iter_mut().enumerate() {
            let (lba, blocks) = match is_flush {
                true => (request.lba, request.blocks),
                false => self.deal.part(index, request.lba, request.blocks),
            };
            if blocks > 0 || is_flush {
                let segment_first = u32::try_from(leg.segments.len()).unwrap_or(u32::MAX);
                let (token, segment_count) = (D::MARK | u64::from(number), 0);
                // The source of a copy stays: there are copies only where there is one leg.
                let child =
                    Request { token, lba, blocks, segment_first, segment_count, ..*request };
                leg.requests.push(child);
                left += 1;
            }
        }
        self.parents[number as usize] =
            Parent { token: request.token, left, outcome: Outcome::SUCCESS };
        self.deal_out(request, own);
    }

    /// Cuts the memory of a request at the ends of the chunks and deals it out to the legs' children
    /// that were just made.
    fn deal_out(&mut self, request: &Request, own: &[Segment]) {
        if let [leg] = &mut *self.legs {
            leg.segments.extend_from_slice(own);
            if let Some(child) = leg.requests.last_mut() {
                child.segment_count = request.segment_count;
            }
            return;
        }
        let mut pieces = Pieces::of(own);
        let (mut lba, end) = (request.lba, request.lba + u64::from(request.blocks));
        while lba < end && !own.is_empty() {
            let (leg, left) = self.deal.place(lba);
            let blocks = left.min(end - lba);
            let len_bytes = blocks * u64::from(self.limits.block_size);
            let leg = &mut self.legs[leg];
            let before = leg.segments.len();
            pieces.take_into(len_bytes, &mut leg.segments);
            if let Some(child) = leg.requests.last_mut() {
                let more = u16::try_from(leg.segments.len() - before).unwrap_or(u16::MAX);
                child.segment_count = child.segment_count.saturating_add(more);
            }
            lba += blocks;
        }
    }

    /// Sends what lies in the outboxes, as far as the legs take it. Returns whether all of it went.
    fn send(&mut self, now: Instant) -> bool {
        let mut all = true;
        for leg in &mut self.legs {
            let taken = leg.channel.submit(now, &leg.requests[leg.sent..], &leg.segments);
            leg.sent += taken;
            leg.owed += taken;
            if leg.sent == leg.requests.len() {
                leg.requests.clear();
                leg.segments.clear();
                leg.sent = 0;
            } else {
                all = false;
            }
        }
        all
    }

    fn has_unsent(&self) -> bool {
        self.legs.iter().any(|leg| !leg.requests.is_empty())
    }

    fn end(&mut self, token: u64, outcome: Outcome) {
        self.ready.push(Answer { token, outcome, result: 0 });
    }

    /// Counts the answers of a leg.
    fn count_down(&mut self) {
        let Self { parents, free, ready, below, .. } = self;
        for answer in below.drain() {
            if answer.token & D::MARK != D::MARK {
                ready.push(answer);
                continue;
            }
            let Ok(number) = u32::try_from(answer.token ^ D::MARK) else { continue };
            let parent = &mut parents[number as usize];
            parent.left -= 1;
            if parent.outcome.is_success() {
                parent.outcome = answer.outcome;
            }
            if parent.left == 0 {
                free.push(number);
                let Parent { token, outcome, .. } = *parent;
                ready.push(Answer { token, outcome, result: 0 });
            }
        }
    }
}

impl<D: Deal> Backend for LegsChannel<D> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut done = 0;
        if self.has_unsent() && !self.send(now) {
            return done;
        }
        while done < requests.len() {
            let count = self.cut_up(&requests[done..], segments);
            done += count;
            if count == 0 || !self.send(now) {
                break;
            }
        }
        done
    }

    fn flush(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.channel.flush());
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        for index in 0..self.legs.len() {
            let leg = &mut self.legs[index];
            leg.owed -= leg.channel.poll(now, &mut self.below);
            self.count_down();
        }
        if self.has_unsent() {
            self.send(now);
            self.flush();
        }
        self.ready.give(answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        let each = self.legs.iter().map(|leg| leg.channel.doorbells());
        each.fold(DoorbellCounts::default(), DoorbellCounts::plus)
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 {
            return Instant::default();
        }
        self.legs.iter().map(|leg| leg.channel.wake_at()).min().unwrap_or(Instant::NEVER)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.legs.iter().all(|leg| leg.channel.is_done_by_kernel())
    }

    fn arm(&mut self) -> bool {
        // A leg that has not taken everything wakes us when it answers something, if it owes
        // anything; else nobody would.
        let mut busy = self.ready.len() > 0;
        for leg in &mut self.legs {
            busy |= leg.channel.arm() || (!leg.requests.is_empty() && leg.owed == 0);
        }
        busy
    }

    fn disarm(&mut self) {
        self.legs.iter_mut().for_each(|leg| leg.channel.disarm());
    }

    /// All legs, and if one cannot, why: the owner goes on with all or none.
    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.legs.iter_mut().try_for_each(|leg| leg.channel.acknowledge_losses())
    }
}
