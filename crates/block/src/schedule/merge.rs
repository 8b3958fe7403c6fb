//! Neighbours in a batch, sent as one request.

use std::collections::VecDeque;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Flags, Instant, Limits, Operation, Request, Segment,
    WakeSource,
};

use crate::backend::ready::Ready;
use crate::own::{OWN_FIRST, own_number, own_token};

/// Makes one request of reads, or of writes, that follow each other in a batch and on the device, as
/// far as the backend below takes it in one. The batch is the plug: nothing is held back for the
/// next one, and a caller that wants more merged hands over more at once. What does not merge goes
/// down as it is.
///
/// Forced writes are not merged, and neither is anything across another request in the batch, so
/// nothing ever changes places. If a merged read fails, its members are sent once more each by
/// itself: none fails for the sake of another. A merged write that fails has failed for all of them,
/// because what was written in its place since must not be overwritten.
pub struct Merge<B> {
    below: B,
    limits: Limits,
    runs: Box<[Run]>,
    free: Vec<u16>,
    /// Runs that have failed, and whose members are sent by themselves.
    failed: VecDeque<u16>,
    ready: Ready,
    /// Requests that were taken and whose answers were not given.
    under_way: usize,
}

/// Requests that went down as one.
#[derive(Debug)]
struct Run {
    /// Each with the number of its first segment among those below.
    members: Vec<Request>,
    segments: Vec<Segment>,
    /// How many members were sent again after a failure.
    sent: usize,
}

/// Merged requests under way at once.
const RUNS: u16 = 64;
/// Requests in a merged one.
const MEMBERS_MAX: usize = 64;

impl<B: Backend> Merge<B> {
    /// Merges for `below`. Allocates here and never again.
    pub fn new(below: B) -> Self {
        let limits = below.limits().clone();
        let run = || Run {
            members: Vec::with_capacity(MEMBERS_MAX),
            segments: Vec::with_capacity(limits.segments_max.into()),
            sent: 0,
        };
        Self {
            runs: (0..RUNS).map(|_| run()).collect(),
            free: (0..RUNS).rev().collect(),
            failed: VecDeque::with_capacity(RUNS.into()),
            ready: Ready::with_depth(limits.depth_max),
            under_way: 0,
            below,
            limits,
        }
    }

    /// How many requests at the front go down as they are, and how many after those make one.
    fn plan(&self, requests: &[Request], segments: &[Segment]) -> (usize, usize) {
        let may_merge = !self.free.is_empty();
        let mut from = 0;
        while from < requests.len()
            && let Some(index) = from_here(requests, from)
        {
            let request = &requests[index];
            if request.token >= OWN_FIRST {
                return (index, 1);
            }
            let next = requests.get(index + 1);
            let follows = |next| self.follows(request, next, segments);
            if may_merge && next.is_some_and(follows) && own(request, segments).is_some() {
                return (index, self.length(&requests[index..], segments));
            }
            from = index + 1;
        }
        (requests.len(), 0)
    }

    /// How many requests at the front make one.
    fn length(&self, requests: &[Request], segments: &[Segment]) -> usize {
        let Some(first) = requests.first() else { return 0 };
        let mut whole = *first;
        let mut count = 1;
        for next in requests[1..].iter().take(MEMBERS_MAX - 1) {
            if !self.follows(&whole, next, segments) {
                break;
            }
            whole.blocks += next.blocks;
            whole.segment_count += next.segment_count;
            count += 1;
        }
        count
    }

    /// Whether `next` can be part of the request that `whole` has become.
    #[inline]
    fn follows(&self, whole: &Request, next: &Request, segments: &[Segment]) -> bool {
        if whole.lba.wrapping_add(u64::from(whole.blocks)) != next.lba {
            return false;
        }
        let Limits { request_blocks_max, segments_max, optimal_boundary_blocks, .. } = self.limits;
        let blocks = u64::from(whole.blocks) + u64::from(next.blocks);
        let boundary = u64::from(optimal_boundary_blocks);
        matches!(whole.operation, Operation::Read | Operation::Write)
            && (whole.operation, whole.flags) == (next.operation, next.flags)
            && !whole.flags.has(Flags::FUA)
            && (whole.metadata_count, next.metadata_count) == (0, 0)
            && (whole.blocks > 0 && next.blocks > 0 && next.token < OWN_FIRST)
            && blocks <= u64::from(request_blocks_max)
            && u32::from(whole.segment_count) + u32::from(next.segment_count) <= segments_max.into()
            && (boundary == 0 || whole.lba % boundary + blocks <= boundary)
            && own(next, segments).is_some()
    }

    /// Sends neighbours as one. False if there is no room for it.
    fn merge(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> bool {
        let Some(&index) = self.free.last() else { return false };
        let run = &mut self.runs[usize::from(index)];
        run.members.clear();
        run.segments.clear();
        run.sent = 0;
        let mut blocks = 0;
        for request in requests {
            let own = own(request, segments).unwrap_or_default();
            let segment_first = u32::try_from(run.segments.len()).unwrap_or(u32::MAX);
            run.segments.extend_from_slice(own);
            run.members.push(Request { segment_first, ..*request });
            blocks += request.blocks;
        }
        let whole = Request {
            token: own_token(index.into()),
            blocks,
            segment_first: 0,
            segment_count: u16::try_from(run.segments.len()).unwrap_or(u16::MAX),
            ..requests[0]
        };
        if self.below.submit(now, &[whole], &run.segments) == 0 {
            return false;
        }
        self.free.pop();
        true
    }

    /// Takes an answer from below if it is one to a merged request.
    fn take_answer(&mut self, answer: &Answer) -> bool {
        let index = own_number(answer.token).and_then(|number| u16::try_from(number).ok());
        let Some(index) = index else { return false };
        let Some(run) = self.runs.get_mut(usize::from(index)) else { return false };
        match &run.members[..] {
            [only] => self.ready.push(Answer { token: only.token, ..*answer }),
            [first, ..] if first.operation == Operation::Read && !answer.outcome.is_success() => {
                self.failed.push_back(index);
                return true;
            }
            members => {
                let Answer { outcome, result, .. } = *answer;
                let each = members.iter().map(|one| Answer { token: one.token, outcome, result });
                self.ready.extend(each);
            }
        }
        self.free.push(index);
        true
    }

    /// Sends the members of failed runs by themselves, as far as there is room below.
    fn send_again(&mut self, now: Instant) {
        let mut has_sent = false;
        while let Some(&index) = self.failed.front() {
            let run = &mut self.runs[usize::from(index)];
            let count = self.below.submit(now, &run.members[run.sent..], &run.segments);
            run.sent += count;
            has_sent |= count > 0;
            if run.sent < run.members.len() {
                break;
            }
            self.failed.pop_front();
            self.free.push(index);
        }
        if has_sent {
            self.below.flush();
        }
    }
}

/// The first request from number `from` on that has to be looked at: the next one begins where it
/// ends, or its token is not the caller's to use.
#[inline]
fn from_here(requests: &[Request], from: usize) -> Option<usize> {
    let notable = |pair: &[Request]| match pair {
        [one, next] => {
            one.token >= OWN_FIRST || one.lba.wrapping_add(u64::from(one.blocks)) == next.lba
        }
        _ => false,
    };
    let last = || requests.last().filter(|last| last.token >= OWN_FIRST);
    match requests[from..].windows(2).position(notable) {
        Some(index) => Some(from + index),
        None => last().map(|_| requests.len() - 1),
    }
}

/// The segments of a request.
fn own<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    segments.get(request.segment_first as usize..)?.get(..usize::from(request.segment_count))
}

impl<B: Backend> Backend for Merge<B> {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let room = self.limits.depth_max as usize - self.under_way;
        let requests = &requests[..requests.len().min(room)];
        let mut taken = 0;
        while taken < requests.len() && self.failed.is_empty() {
            let rest = &requests[taken..];
            let (plain, run) = self.plan(rest, segments);
            if plain > 0 {
                let count = self.below.submit(now, &rest[..plain], segments);
                taken += count;
                if count < plain {
                    break;
                }
            } else if self.merge(now, &rest[..run], segments) {
                taken += run;
            } else {
                break;
            }
        }
        self.under_way += taken;
        taken
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let before = answers.as_slice().len();
        let mut count = self.below.poll(now, answers);
        if self.free.len() < self.runs.len() || self.ready.len() > 0 {
            answers.sift(before, |answer| self.take_answer(answer));
            self.send_again(now);
            self.ready.give(answers);
            count = answers.as_slice().len() - before;
        }
        self.under_way -= count;
        count
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.below.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 { Instant::default() } else { self.below.wake_at() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.below.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.below.is_done_by_kernel()
    }

    fn arm(&mut self) -> bool {
        let nobody_wakes = !self.failed.is_empty() && self.below.wake_at() == Instant::NEVER;
        nobody_wakes || self.ready.len() > 0 || self.below.arm()
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }
}
