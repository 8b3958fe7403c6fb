//! Merge scheduler: sends adjacent requests of a batch as one.

use std::collections::VecDeque;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, IoCompletion, Limits, Operation, Request,
    RequestFlags, Segment,
};

use crate::completion_queue::CompletionQueue;
use crate::internal_token::{OWN_FIRST, index_of_internal_token, internal_token};

/// Scheduler that merges reads, or writes, that are adjacent both in a batch and on the device, within
/// the limits of the channel below. The batch is the plug: nothing is held for the next one, and a larger
/// batch allows more merging. Requests that do not merge go down unchanged.
///
/// FUA writes are not merged, and no request is merged across another one of the batch, so requests are
/// never reordered. If a merged read fails, its members are sent again one by one, so that none fails
/// because of another. If a merged write fails, all of its members fail: data written there since must
/// not be overwritten by a retry.
pub struct MergeScheduler<B> {
    below: B,
    limits: Limits,
    runs: Box<[MergedRequest]>,
    free: Vec<u16>,
    /// Failed runs whose members are sent one by one.
    failed: VecDeque<u16>,
    ready: CompletionQueue,
    /// Requests accepted and not completed.
    under_way: usize,
}

/// Requests that went down as one.
#[derive(Debug)]
struct MergedRequest {
    /// The members, each with its segment index relative to the segments below.
    members: Vec<Request>,
    segments: Vec<Segment>,
    /// Members sent again after a failure.
    sent: usize,
}

/// Maximum number of merged requests in flight.
const RUNS: u16 = 64;
/// Maximum number of requests in a merged one.
const MEMBERS_MAX: usize = 64;

impl<B: IoChannel> MergeScheduler<B> {
    /// Creates a scheduler over `below`. Allocates here and never again.
    pub fn new(below: B) -> Self {
        let limits = below.limits().clone();
        let run = || MergedRequest {
            members: Vec::with_capacity(MEMBERS_MAX),
            segments: Vec::with_capacity(limits.segments_max.into()),
            sent: 0,
        };
        Self {
            runs: (0..RUNS).map(|_| run()).collect(),
            free: (0..RUNS).rev().collect(),
            failed: VecDeque::with_capacity(RUNS.into()),
            ready: CompletionQueue::with_depth(limits.depth_max),
            under_way: 0,
            below,
            limits,
        }
    }

    /// The number of leading requests that go down unchanged, and of those after them that merge into
    /// one.
    fn count_unchanged_and_mergeable(
        &self,
        requests: &[Request],
        segments: &[Segment],
    ) -> (usize, usize) {
        let may_merge = !self.free.is_empty();
        let mut from = 0;
        while from < requests.len()
            && let Some(index) = find_mergeable_or_internal(requests, from)
        {
            let request = &requests[index];
            if request.token >= OWN_FIRST {
                return (index, 1);
            }
            let next = requests.get(index + 1);
            let follows = |next| self.is_contiguous(request, next, segments);
            if may_merge
                && next.is_some_and(follows)
                && request_segments(request, segments).is_some()
            {
                return (index, self.mergeable_count(&requests[index..], segments));
            }
            from = index + 1;
        }
        (requests.len(), 0)
    }

    /// The number of leading requests that merge into one.
    fn mergeable_count(&self, requests: &[Request], segments: &[Segment]) -> usize {
        let Some(first) = requests.first() else { return 0 };
        let mut whole = *first;
        let mut count = 1;
        for next in requests[1..].iter().take(MEMBERS_MAX - 1) {
            if !self.is_contiguous(&whole, next, segments) {
                break;
            }
            whole.blocks += next.blocks;
            whole.segment_count += next.segment_count;
            count += 1;
        }
        count
    }

    /// Whether `next` can be merged into `whole`.
    #[inline]
    fn is_contiguous(&self, whole: &Request, next: &Request, segments: &[Segment]) -> bool {
        if whole.lba.wrapping_add(u64::from(whole.blocks)) != next.lba {
            return false;
        }
        let Limits { request_blocks_max, segments_max, optimal_boundary_blocks, .. } = self.limits;
        let blocks = u64::from(whole.blocks) + u64::from(next.blocks);
        let boundary = u64::from(optimal_boundary_blocks);
        matches!(whole.operation, Operation::Read | Operation::Write)
            && (whole.operation, whole.flags) == (next.operation, next.flags)
            && !whole.flags.has(RequestFlags::FUA)
            && (whole.metadata_count, next.metadata_count) == (0, 0)
            && (whole.blocks > 0 && next.blocks > 0 && next.token < OWN_FIRST)
            && blocks <= u64::from(request_blocks_max)
            && u32::from(whole.segment_count) + u32::from(next.segment_count) <= segments_max.into()
            && (boundary == 0 || whole.lba % boundary + blocks <= boundary)
            && request_segments(next, segments).is_some()
    }

    /// Sends adjacent requests as one. Returns false if the channel below has no free entry.
    fn merge_requests(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> bool {
        let Some(&index) = self.free.last() else { return false };
        let run = &mut self.runs[usize::from(index)];
        run.members.clear();
        run.segments.clear();
        run.sent = 0;
        let mut blocks = 0;
        for request in requests {
            let own = request_segments(request, segments).unwrap_or_default();
            let segment_first = u32::try_from(run.segments.len()).unwrap_or(u32::MAX);
            run.segments.extend_from_slice(own);
            run.members.push(Request { segment_first, ..*request });
            blocks += request.blocks;
        }
        let whole = Request {
            token: internal_token(index.into()),
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

    /// Consumes a completion from below if it belongs to a merged request.
    fn split_completion(&mut self, completion: &IoCompletion) -> bool {
        let index =
            index_of_internal_token(completion.token).and_then(|number| u16::try_from(number).ok());
        let Some(index) = index else { return false };
        let Some(run) = self.runs.get_mut(usize::from(index)) else { return false };
        match &run.members[..] {
            [only] => self.ready.push(IoCompletion { token: only.token, ..*completion }),
            [first, ..]
                if first.operation == Operation::Read && !completion.status.is_success() =>
            {
                // An unreadable block must not fail the other members: they are sent one by one.
                self.failed.push_back(index);
                return true;
            }
            members => {
                let IoCompletion { status, result, .. } = *completion;
                let each =
                    members.iter().map(|one| IoCompletion { token: one.token, status, result });
                self.ready.extend(each);
            }
        }
        self.free.push(index);
        true
    }

    /// Sends the members of failed runs one by one, as the channel below accepts them.
    fn resubmit_separately(&mut self, now: Instant) {
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
            self.below.flush_submissions();
        }
    }
}

/// The first request from index `from` on that needs attention: the next one is adjacent to it, or its
/// token is in the internal range.
#[inline]
fn find_mergeable_or_internal(requests: &[Request], from: usize) -> Option<usize> {
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
fn request_segments<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    segments.get(request.segment_first as usize..)?.get(..usize::from(request.segment_count))
}

impl<B: IoChannel> IoChannel for MergeScheduler<B> {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let room = self.limits.depth_max as usize - self.under_way;
        let requests = &requests[..requests.len().min(room)];
        let mut taken = 0;
        while taken < requests.len() && self.failed.is_empty() {
            let rest = &requests[taken..];
            let (plain, run) = self.count_unchanged_and_mergeable(rest, segments);
            if plain > 0 {
                let count = self.below.submit(now, &rest[..plain], segments);
                taken += count;
                if count < plain {
                    break;
                }
            } else if self.merge_requests(now, &rest[..run], segments) {
                taken += run;
            } else {
                break;
            }
        }
        self.under_way += taken;
        taken
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let before = completions.as_slice().len();
        let mut count = self.below.poll(now, completions);
        if self.free.len() < self.runs.len() || !self.ready.is_empty() {
            completions.remove_if(before, |completion| self.split_completion(completion));
            self.resubmit_separately(now);
            self.ready.drain_into(completions);
            count = completions.as_slice().len() - before;
        }
        self.under_way -= count;
        count
    }
}

impl<B: IoChannel> ChannelWakeup for MergeScheduler<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.below)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.below)
    }

    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() { Instant::default() } else { self.below.wake_at() }
    }

    fn arm(&mut self) -> bool {
        let needs_polling = !self.failed.is_empty() && self.below.wake_at() == Instant::NEVER;
        needs_polling || !self.ready.is_empty() || self.below.arm()
    }
}
