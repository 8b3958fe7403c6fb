//! One namespace's medium as one queue uses it: requests are gathered and handed over in batches.

use core::iter::Zip;
use core::slice::IterMut;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{
    Answers, Backend, Durability, Instant, Limits, Medium, Operation, Request, Segment, WakeSource,
};

use crate::namespace::CacheVoucher;

/// A channel to the medium of one namespace.
pub(super) struct Channel {
    pub(super) nsid: u32,
    pub(super) limits: Limits,
    medium: Arc<dyn Medium>,
    backend: Box<dyn Backend>,
    /// Requests gathered this turn, and those that the medium had no room for.
    requests: Box<[Request]>,
    /// The segment of the request at the same place: a gathered request has at most one.
    segments: Box<[Segment]>,
    /// How many places there are, once there are any: they are made when the first is needed.
    depth: usize,
    /// How many have been gathered.
    gathered: usize,
    /// What is told of a flush that failed.
    pub(super) cache: Option<Arc<CacheVoucher>>,
    /// Requests that the medium has taken and not answered.
    outstanding: u32,
    /// The namespace is gone or has another medium: no new command goes here.
    pub(super) is_retired: bool,
    wants_flush: bool,
    /// The medium signals its answers: the thread sleeps, or is about to.
    is_armed: bool,
    /// The descriptor of the medium has been handed out.
    is_known: bool,
}

/// A channel during a loop that gathers requests that are alike, with what changes in registers.
pub(super) struct Gathering<'a> {
    places: Zip<IterMut<'a, Request>, IterMut<'a, Segment>>,
    /// The number of the next place.
    at: u32,
    gathered: &'a mut usize,
    like: Request,
}

impl Channel {
    /// Opens a channel on which `depth` commands may be gathered.
    pub(super) fn open(nsid: u32, medium: &Arc<dyn Medium>, depth: usize) -> Result<Self, String> {
        let backend = medium.channel()?;
        Ok(Self {
            nsid,
            limits: backend.limits().clone(),
            medium: medium.clone(),
            backend,
            requests: Box::default(),
            segments: Box::default(),
            depth,
            gathered: 0,
            cache: None,
            outstanding: 0,
            is_retired: false,
            wants_flush: false,
            is_armed: false,
            is_known: false,
        })
    }

    /// Whether this channel leads to `medium`.
    pub(super) fn leads_to(&self, medium: &Arc<dyn Medium>) -> bool {
        Arc::ptr_eq(&self.medium, medium)
    }

    /// Whether nothing is gathered and nothing is owed.
    pub(super) fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.gathered == 0
    }

    /// Whether the medium knows a flush.
    pub(super) fn can_flush(&self) -> bool {
        self.limits.support.has(Operation::Flush)
    }

    /// Whether writes are lost without one.
    pub(super) fn must_flush(&self) -> bool {
        self.limits.durability == Durability::VolatileCache
    }

    /// Gathers a request with one segment or none. The table of commands is no larger than the
    /// room that was made when the channel was opened.
    pub(super) fn gather(&mut self, request: Request, segment: Segment) {
        let mut gathering = self.gather_many(request);
        gathering.put(request.token, request.lba, segment);
        gathering.finish(1);
    }

    /// For a loop that gathers many requests that are like this one but for token, first block and
    /// memory.
    #[inline(always)]
    pub(super) fn gather_many(&mut self, like: Request) -> Gathering<'_> {
        if self.requests.is_empty() {
            self.make_places();
        }
        let Self { requests, segments, gathered, .. } = self;
        let places = requests[*gathered..].iter_mut().zip(segments[*gathered..].iter_mut());
        Gathering { places, at: index(*gathered), gathered, like }
    }

    #[cold]
    fn make_places(&mut self) {
        self.requests = vec![Request::NOTHING; self.depth].into();
        self.segments = vec![Segment::default(); self.depth].into();
    }

    /// Hands over a single request with segments of its own. False means that the medium is full.
    pub(super) fn submit_one(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
    ) -> bool {
        let is_taken = self.backend.submit(now, core::slice::from_ref(request), segments) > 0;
        self.outstanding += u32::from(is_taken);
        self.wants_flush |= is_taken;
        is_taken
    }

    /// Hands over what was gathered.
    #[inline]
    pub(super) fn submit(&mut self, now: Instant) {
        if self.gathered > 0 {
            let requests = &self.requests[..self.gathered];
            let taken = self.backend.submit(now, requests, &self.segments);
            self.forget(taken.min(self.gathered));
        }
        if self.wants_flush {
            self.wants_flush = false;
            self.backend.flush();
        }
    }

    /// Polls for answers.
    #[inline]
    pub(super) fn poll(&mut self, now: Instant, answers: &mut Answers) {
        if self.outstanding > 0 {
            let before = answers.as_slice().len();
            self.backend.poll(now, answers);
            let count = index(answers.as_slice().len() - before);
            self.outstanding = self.outstanding.saturating_sub(count);
        }
    }

    /// Takes the gathered requests back that the medium has not seen: their tokens.
    pub(super) fn recall(&mut self) -> Vec<u64> {
        let count = core::mem::take(&mut self.gathered);
        self.requests[..count].iter().map(|request| request.token).collect()
    }

    /// Closes what the medium still writes here to everyone.
    pub(super) fn fence_writes(&mut self) {
        if self.outstanding > 0 {
            self.backend.fence_writes();
        }
    }

    /// When the medium wants to be polled even if nothing happens.
    pub(super) fn wake_at(&self) -> Instant {
        if self.outstanding > 0 { self.backend.wake_at() } else { Instant::NEVER }
    }

    /// Gets ready for a sleep of the thread. True if it must stay awake: an answer is there, or may
    /// come without a sign, or requests wait that no answer will make room for.
    pub(super) fn arm(&mut self) -> bool {
        if self.outstanding == 0 {
            return self.gathered > 0;
        }
        if matches!(self.backend.wake_source(), WakeSource::Nothing) {
            return true;
        }
        self.is_armed = true;
        self.backend.arm()
    }

    /// Whether an answer is owed that would not be signalled.
    pub(super) fn is_unheard(&self) -> bool {
        self.outstanding > 0 && !self.is_armed
    }

    /// The thread is awake.
    pub(super) fn disarm(&mut self) {
        if core::mem::take(&mut self.is_armed) {
            self.backend.disarm();
        }
    }

    /// The medium's descriptor, if it has one and this is the first time of asking.
    pub(super) fn new_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let is_known = core::mem::replace(&mut self.is_known, true);
        match self.backend.wake_source() {
            WakeSource::Descriptor(descriptor) if !is_known => Some(descriptor),
            _ => None,
        }
    }

    #[inline]
    fn forget(&mut self, taken: usize) {
        self.outstanding += index(taken);
        self.wants_flush |= taken > 0;
        if taken < self.gathered {
            self.close_up(taken);
        }
        self.gathered -= taken;
    }

    /// Moves what the medium did not take to the front.
    #[cold]
    fn close_up(&mut self, taken: usize) {
        self.requests.copy_within(taken..self.gathered, 0);
        self.segments.copy_within(taken..self.gathered, 0);
        for (place, request) in (0..).zip(&mut self.requests[..self.gathered - taken]) {
            request.segment_first = place;
        }
    }
}

impl Gathering<'_> {
    /// Gathers one more.
    #[inline(always)]
    pub(super) fn put(&mut self, token: u64, lba: u64, segment: Segment) {
        let place = self.places.next();
        let (request, place) = place.expect("there is room for every command of the table");
        *request = Request { token, lba, segment_first: self.at, ..self.like };
        *place = segment;
        self.at += 1;
    }

    /// The end of the loop, in which `count` were gathered.
    #[inline(always)]
    pub(super) fn finish(self, count: u32) {
        *self.gathered += count as usize;
    }
}

impl core::fmt::Debug for Channel {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("Channel")
            .field("nsid", &self.nsid)
            .field("gathered", &self.gathered)
            .field("outstanding", &self.outstanding)
            .field("is_retired", &self.is_retired)
            .finish_non_exhaustive()
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "bounded by the table of commands")]
fn index(len: usize) -> u32 {
    len as u32
}
