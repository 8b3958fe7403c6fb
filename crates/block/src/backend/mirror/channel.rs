//! One thread's way to a mirror: a table of requests, and a channel to each leg.

mod background;
mod legs;
mod losses;
mod tally;

use std::sync::Arc;

use base::{
    Answer, Answers, Backend, Instant, Interrupts, Limits, Operation, Outcome, Request, Segment,
    WakeSource,
};
use host::EventVectors;

use self::background::Background;
use self::legs::{Legs, Place};
use self::tally::Tally;
use super::meta::{Admission, Member, Verdict};
use super::owner::Owner;
use super::shared::{Load, Masks, Own, Shared};
use super::work::{Stage, Work, is_loss, is_the_callers};
use crate::backend::range::check;
use crate::backend::ready::Ready;

/// A channel of a mirror.
pub(super) struct MirrorChannel {
    shared: Arc<Shared>,
    limits: Limits,
    legs: Legs,
    works: Box<[Work]>,
    free: Vec<u32>,
    ready: Ready,
    /// Writes of this channel that are under way.
    tally: Tally,
    load: Load,
    /// Writes that no leg had a channel for.
    stillborn: Vec<u32>,
    /// Requests that wait for news.
    waiting: Vec<u32>,
    news: u64,
    /// Losses that have been reported on this channel.
    losses: u64,
    /// How often legs had come back when this channel last noticed.
    returns: u64,
    /// When this turn is.
    now: Instant,
    masks: Masks,
    /// Whether it is that of the thread that looks after the mirror.
    is_owner: bool,
    background: Background,
    /// What came up from a leg.
    below: Answers,
    /// Rung by a channel that closes: what it would have done for the mirror, another has to do.
    bell: EventVectors,
    /// Gives the mirror up after the last channel. Dropped last.
    pub(super) owner: Option<Arc<Owner>>,
}

impl MirrorChannel {
    pub(super) fn open(shared: &Arc<Shared>) -> Result<Self, String> {
        let limits = shared.limits.clone();
        let depth = limits.depth_max;
        let bell = EventVectors::new(1).map_err(|error| format!("a descriptor: {error}"))?;
        bell.mask(0);
        let legs = Legs::open(shared, Own::new(shared)?, &bell)?;
        let tally = Tally::new();
        let load = Load::default();
        let member = Member { seat: tally.seat().clone(), load: load.clone(), bell: bell.clone() };
        shared.lock().members.push(member);
        Ok(Self {
            bell,
            legs,
            works: vec![Work::idle(); depth as usize].into(),
            free: (0..depth).rev().collect(),
            ready: Ready::with_depth(depth),
            tally,
            load,
            stillborn: Vec::new(),
            waiting: Vec::with_capacity(depth as usize),
            news: 0,
            losses: shared.losses_reported(),
            returns: shared.returns(),
            now: Instant::default(),
            masks: shared.masks(),
            is_owner: false,
            background: Background::default(),
            below: Answers::with_capacity(depth as usize + 32),
            shared: Arc::clone(shared),
            limits,
            owner: None,
        })
    }

    /// The channel of the thread that looks after the mirror from now on.
    pub(super) fn open_for_owner(shared: &Arc<Shared>) -> Result<Self, String> {
        let mut channel = Self::open(shared)?;
        channel.is_owner = true;
        shared.own(&mut shared.lock(), Some(channel.bell.clone()));
        Ok(channel)
    }

    /// Takes one request; there is a place for it.
    fn take(&mut self, request: &Request, segments: &[Segment]) {
        let own = match check(&self.limits, request, segments) {
            Ok(own) if request.blocks > 0 || request.operation == Operation::Flush => own,
            done => return self.answer(request.token, done.err().unwrap_or_default(), 0),
        };
        let Some(slot) = self.free.pop() else { return };
        let segment_first = self.legs.keep(slot, own);
        let losses = self.losses;
        self.works[slot as usize] =
            Work { losses, ..Work::of(Request { segment_first, ..*request }) };
        match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => self.read(slot),
            Operation::Flush => {
                self.enter();
                self.legs.heed_losses();
                self.write_counted(slot);
            }
            _ => self.ask_to_write(slot),
        }
    }

    fn answer(&mut self, token: u64, outcome: Outcome, result: u32) {
        self.ready.push(Answer { token, outcome, result });
    }

    /// From here on this channel has a write under way, as far as others can tell, and what it looks
    /// at is at least as new as what they had closed before.
    fn enter(&mut self) {
        self.tally.enter(&self.shared);
        self.masks = self.shared.masks();
    }

    fn ask_to_write(&mut self, slot: u32) {
        self.enter();
        let Request { lba, blocks, .. } = self.works[slot as usize].request;
        let (first, count) = self.shared.shape.regions_of(lba, blocks.into());
        if !self.shared.closed.any(first, count) {
            return self.write_counted(slot);
        }
        self.ask(slot);
    }

    /// Asks whoever holds the lock for the right to write.
    fn ask(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.works[slot as usize];
        let range = (work.request.lba, u64::from(work.request.blocks));
        match meta.admit(&shared, self.tally.seat(), slot, range) {
            Admission::Go => {
                self.masks = shared.masks();
                self.write_counted(slot);
            }
            Admission::Registered => {
                self.masks = shared.masks();
                self.write(slot, Stage::WrittenUnderCopy);
            }
            Admission::Wait => {
                if work.stage != Stage::Admitted {
                    (work.stage, work.failures) = (Stage::Admitted, meta.failures);
                }
                self.waiting.push(slot);
            }
            Admission::Refused => {
                work.stage = Stage::Admitted;
                drop(meta);
                return self.end(slot, Outcome::RESERVATION_CONFLICT);
            }
        }
        self.look_after(&mut meta);
    }

    /// Sends a write or a flush to all legs, as one of this channel's writes.
    fn write_counted(&mut self, slot: u32) {
        let bucket = self.tally.begin();
        self.write(slot, Stage::Written { bucket });
    }

    /// Sends a write or a flush to all legs.
    fn write(&mut self, slot: u32, stage: Stage) {
        let nobody = self.without_legs();
        let work = &mut self.works[slot as usize];
        let missing = self.legs.send_to(self.masks.write, Place::Work(slot), &work.request);
        (work.stage, work.awaited, work.failed) = (stage, self.masks.write & !missing, missing);
        if work.awaited == 0 {
            work.outcome = nobody;
            self.stillborn.push(slot);
        }
    }

    fn read(&mut self, slot: u32) {
        let Work { request, failed, .. } = self.works[slot as usize];
        let mut from = self.masks.read & !failed;
        if self.is_unequal(request.lba, request.blocks) {
            // If the source cannot, all have to turn to the same one again.
            from &= from.wrapping_neg();
        }
        let (leg, nobody) = (self.legs.idlest(from), self.without_legs());
        let missing = self.legs.send_to(leg, Place::Work(slot), &request);
        let work = &mut self.works[slot as usize];
        work.awaited = leg;
        if work.stage != Stage::ReadAgain {
            work.stage = Stage::Read;
        }
        if leg == 0 || missing != 0 {
            work.failed |= leg;
            if work.outcome.is_success() {
                work.outcome = nobody;
            }
            self.end_read(slot);
        }
    }

    /// What a request is answered with that no leg can be sent.
    const fn without_legs(&self) -> Outcome {
        match self.masks.read {
            0 => Outcome::RESERVATION_CONFLICT,
            _ => Outcome::PATH_ERROR,
        }
    }

    /// What a write is answered with of which no leg can record what it needs.
    const fn without_record(&self) -> Outcome {
        match self.masks.read {
            0 => Outcome::RESERVATION_CONFLICT,
            _ => Outcome::WRITE_FAULT,
        }
    }

    /// Whether legs may differ in the regions of these blocks.
    fn is_unequal(&self, lba: u64, blocks: u32) -> bool {
        let (first, count) = self.shared.shape.regions_of(lba, blocks.into());
        self.masks.unequal && self.shared.unequal.any(first, count)
    }

    /// A leg has answered.
    fn ended(&mut self, slot: u32, leg: u8, answer: &Answer) {
        let work = &mut self.works[slot as usize];
        work.awaited &= !leg;
        if answer.outcome.is_success() {
            work.done |= leg;
            work.result = answer.result;
        } else {
            work.failed |= leg;
            work.lost |= if is_loss(work.request.operation, answer.outcome) { leg } else { 0 };
            let tells_more =
                is_the_callers(answer.outcome) || answer.outcome == Outcome::COMPARE_FAILURE;
            if work.outcome.is_success() || tells_more {
                work.outcome = answer.outcome;
            }
        }
        match work.stage {
            Stage::Read | Stage::ReadAgain => self.end_read(slot),
            _ if work.awaited == 0 => self.end_write(slot),
            _ => {}
        }
    }

    fn end_read(&mut self, slot: u32) {
        // A leg that was given up meanwhile may have come back, and have forgotten what it had not
        // flushed, before it carried this out.
        self.masks = self.shared.masks();
        let work = &mut self.works[slot as usize];
        work.done &= self.masks.read;
        if work.outcome == Outcome::COMPARE_FAILURE && work.failed & self.masks.read == 0 {
            work.outcome = Outcome::PATH_ERROR;
        }
        let work = *work;
        if work.done != 0 {
            if work.failed != 0 {
                let Request { lba, blocks, .. } = work.request;
                let mut meta = self.shared.lock();
                meta.repair(&self.shared, lba, blocks);
                meta.call_owner();
            }
            return self.end(slot, Outcome::SUCCESS);
        }
        let is_final = is_the_callers(work.outcome) || work.outcome == Outcome::COMPARE_FAILURE;
        if is_final || self.masks.read & !work.failed == 0 {
            // What was read from a leg that is somebody else's by now may be anything.
            let is_void = work.outcome.is_success();
            return self.end(slot, if is_void { self.without_legs() } else { work.outcome });
        }
        let Request { lba, blocks, .. } = work.request;
        let source_failed = work.failed & self.masks.source() != 0;
        let is_first = work.stage == Stage::Read;
        if is_first && blocks > 1 && source_failed && self.is_unequal(lba, blocks) {
            return self.repair_first(slot);
        }
        self.read(slot);
    }

    /// The source could not read all of these blocks, and what it could must not come from another
    /// leg, which may have older ones: they are made equal first.
    fn repair_first(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.works[slot as usize];
        (work.stage, work.failures) = (Stage::Repaired, meta.failures);
        meta.repair_now(&shared, work.request.lba, work.request.blocks);
        self.waiting.push(slot);
        self.look_after(&mut meta);
    }

    /// Begins again once it has become safe to read from any leg.
    fn read_repaired(&mut self, slot: u32) {
        let Request { lba, blocks, .. } = self.works[slot as usize].request;
        self.masks = self.shared.masks();
        let is_unequal = self.is_unequal(lba, blocks);
        if is_unequal && self.shared.lock().is_repairing((lba, blocks.into())) {
            return self.waiting.push(slot);
        }
        // While this one waited legs may have gone and come back.
        let work = &mut self.works[slot as usize];
        (work.stage, work.failed, work.outcome) = (Stage::ReadAgain, 0, Outcome::SUCCESS);
        self.read(slot);
    }

    /// All legs have answered a write or a flush.
    fn end_write(&mut self, slot: u32) {
        let work = self.works[slot as usize];
        if work.failed == 0 && self.shared.masks().claimed & !work.done == 0 {
            return self.end(slot, Outcome::SUCCESS);
        }
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let Request { lba, blocks, operation, .. } = work.request;
        if operation == Operation::Flush && meta.bugs.ignores_failed_flush && work.done != 0 {
            drop(meta);
            return self.end(slot, Outcome::SUCCESS);
        }
        let at_fault = is_the_callers(work.outcome);
        self.legs.notice_losses(work.lost);
        if meta.have_lost(&shared, work.lost) && self.losses == shared.losses() {
            shared.add_loss();
        }
        let verdict =
            if at_fault { Verdict::Bad } else { meta.judge(&shared, work.done, work.failed) };
        match verdict {
            Verdict::Good => {
                drop(meta);
                return self.end(slot, Outcome::SUCCESS);
            }
            Verdict::Bad => {
                if operation != Operation::Flush {
                    meta.suspect(&shared, lba, blocks.into());
                }
                if work.outcome.is_conflict() {
                    // Another host has reserved the legs, and may own the mirror: before superblocks are
                    // written they are read.
                    meta.want();
                    self.look_after(&mut meta);
                }
                meta.call_owner();
                drop(meta);
                self.masks = shared.masks();
                let is_done = work.outcome.is_success();
                return self.end(slot, if is_done { self.without_record() } else { work.outcome });
            }
            Verdict::Wait => {}
        }
        let work = &mut self.works[slot as usize];
        let bucket = match work.stage {
            Stage::Written { bucket } => Some(bucket),
            Stage::Recorded { bucket } => bucket,
            _ => None,
        };
        if !matches!(work.stage, Stage::Recorded { .. }) {
            work.failures = meta.failures;
        }
        work.stage = Stage::Recorded { bucket };
        self.waiting.push(slot);
        self.look_after(&mut meta);
    }

    /// Answers a request and frees its place.
    fn end(&mut self, slot: u32, outcome: Outcome) {
        let Work { request, result, stage, losses, .. } = self.works[slot as usize];
        let outcome = match request.operation {
            Operation::Flush => self.flushed(losses, outcome),
            Operation::Read | Operation::Compare | Operation::Verify => outcome,
            _ => {
                if losses < self.losses && outcome.is_success() {
                    self.owe_report(losses);
                }
                outcome
            }
        };
        match stage {
            Stage::Written { bucket } | Stage::Recorded { bucket: Some(bucket) } => {
                self.tally.end(bucket);
            }
            Stage::WrittenUnderCopy | Stage::Recorded { bucket: None } => {
                self.shared.lock().unregister(self.tally.seat(), slot);
            }
            Stage::Idle | Stage::Read | Stage::Repaired | Stage::ReadAgain | Stage::Admitted => {}
        }
        self.works[slot as usize].stage = Stage::Idle;
        self.free.push(slot);
        self.answer(request.token, outcome, result);
    }

    /// What a flush is answered. While it was under way, or before, all legs may have lost writes:
    /// every channel reports that once.
    fn flushed(&mut self, losses: u64, outcome: Outcome) -> Outcome {
        let all = self.shared.losses();
        if outcome.is_success() && losses == all {
            return outcome;
        }
        if losses != all {
            self.losses = all;
            self.shared.report_losses(all);
            return Outcome::WRITE_FAULT;
        }
        outcome
    }

    /// Legs have come back. What each has lost before, it reports once on every channel: now, while
    /// all of that is copied, and not to a flush that comes later.
    fn have_reports(&mut self) {
        self.returns = self.shared.returns();
        let Masks { read, write, .. } = self.shared.masks();
        let flush = Request { operation: Operation::Flush, ..Request::NOTHING };
        self.legs.heed_losses();
        self.legs.send_to(write & !read, Place::Report, &flush);
    }

    /// Whether what is sent from there is a flush of a leg.
    fn is_flush(&self, place: Place) -> bool {
        match place {
            Place::Work(slot) => self.works[slot as usize].request.operation == Operation::Flush,
            Place::Report => true,
            place => self.background.flushes(place),
        }
    }

    /// A leg that has come back has answered a flush that asked for what it lost before. That is copied
    /// anyhow; what it has lost since is not, if this is the only flush that fails for it.
    fn reported(&mut self, leg: usize, answer: &Answer) {
        if !is_loss(Operation::Flush, answer.outcome)
            || self.legs.losses(leg) <= self.shared.repaired_losses(leg)
        {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        self.legs.notice_losses(1 << leg);
        if meta.have_lost(&shared, 1 << leg) {
            shared.add_loss();
        }
        meta.call_owner();
    }

    /// Whether there is something to poll for that nobody would wake this thread for: what a request
    /// waits for is often done by another one.
    fn is_restless(&self) -> bool {
        self.ready.len() > 0 || !self.waiting.is_empty() || !self.stillborn.is_empty()
    }

    /// Looks again at everything that waits for news.
    fn hear(&mut self) {
        let news = self.shared.news();
        if news == self.news || self.waiting.is_empty() {
            return;
        }
        self.news = news;
        self.enter();
        for slot in std::mem::take(&mut self.waiting) {
            let Work { stage, failures, outcome, .. } = self.works[slot as usize];
            if self.shared.lock().failures != failures {
                let outcome = if outcome.is_success() { self.without_record() } else { outcome };
                self.end(slot, outcome);
            } else if stage == Stage::Admitted {
                self.ask(slot);
            } else if stage == Stage::Repaired {
                self.read_repaired(slot);
            } else {
                // Which legs failed has been seen to.
                let work = &mut self.works[slot as usize];
                (work.failed, work.lost) = (0, 0);
                self.end_write(slot);
            }
        }
        self.tally.settle(&self.shared);
    }
}

impl Backend for MirrorChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // An answer that waits to be polled has given its place back, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let count = requests.len().min(room);
        self.now = now;
        self.masks = self.shared.masks();
        for request in &requests[..count] {
            self.take(request, segments);
        }
        self.tally.settle(&self.shared);
        self.load.add(count);
        self.legs.submit(now);
        count
    }

    fn flush(&mut self) {
        self.legs.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.now = now;
        let mut below = std::mem::replace(&mut self.below, Answers::with_capacity(0));
        for leg in 0..self.legs.count() {
            let count = self.legs.poll(leg, now, &mut below);
            let has_lost = count > 0 && self.legs.has_lost(leg);
            for answer in below.drain() {
                let place = Place::of(answer.token);
                if answer.outcome == Outcome::WRITE_FAULT && self.is_flush(place) {
                    self.legs.acknowledge_losses(leg);
                }
                match place {
                    Place::Work(slot) => {
                        if has_lost {
                            self.notice_loss(slot, leg);
                        }
                        self.ended(slot, 1 << leg, &answer);
                    }
                    Place::Report => self.reported(leg, &answer),
                    place => self.background_ended(place, 1 << leg, &answer),
                }
            }
        }
        self.below = below;
        while let Some(slot) = self.stillborn.pop() {
            self.end_write(slot);
        }
        self.hear();
        if self.shared.returns() != self.returns {
            self.have_reports();
        }
        if now >= self.shared.tend_at() && (self.is_owner || !self.shared.has_owner()) {
            let shared = Arc::clone(&self.shared);
            self.look_after(&mut shared.lock());
        }
        self.tally.settle(&self.shared);
        self.legs.submit(now);
        self.legs.flush();
        self.ready.give(answers)
    }

    fn wake_at(&self) -> Instant {
        if self.is_restless() {
            return Instant::default();
        }
        if self.shared.has_owner() && !self.is_owner {
            return self.legs.wake_at();
        }
        self.legs.wake_at().min(self.shared.tend_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.legs.wake_source()
    }

    fn arm(&mut self) -> bool {
        // The bell first, then the deadline that whoever rings it has stored before.
        let hears = self.bell.unmask(0);
        self.legs.arm() || self.is_restless() || !hears
    }

    fn disarm(&mut self) {
        self.bell.mask(0);
        self.legs.disarm();
    }
}

impl Drop for MirrorChannel {
    /// First the legs end what they have; then the others learn what this channel leaves behind.
    fn drop(&mut self) {
        self.legs.close();
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let seat = self.tally.seat();
        meta.members.retain(|other| !other.seat.is(seat));
        meta.registered.retain(|write| !write.seat.is(seat));
        for work in self.works.iter().filter(|work| work.may_differ()) {
            meta.suspect(&shared, work.request.lba, work.request.blocks.into());
        }
        if self.is_owner {
            shared.own(&mut meta, None);
        }
        self.background.abandon(&mut meta, &shared);
        shared.tell();
        // The others may be asleep until a time that was true when this one was awake.
        meta.members.iter_mut().for_each(|other| other.bell.raise(0));
    }
}
