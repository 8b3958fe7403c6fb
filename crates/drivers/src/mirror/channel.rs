//! I/O channel of a mirror: a request table, and a channel to each leg.

mod background;
mod legs;
mod losses;
mod write_epochs;

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Error, Instant, Interrupts, IoChannel, IoCompletion, IoStatus,
    Limits, Operation, Request, Segment, WakeSource,
};
use tenmil_linux::EventVectors;

use self::background::Background;
use self::legs::{Legs, RequestOwner};
use self::write_epochs::WriteEpochs;
use super::owner::Owner;
use super::request::{MirrorRequest, RequestStage, is_loss, is_the_callers};
use super::shared::{ChannelMemory, LegMasks, Load, Shared};
use super::state::{ChannelEntry, WriteAdmission, WriteVerdict};
use crate::validate::check;
use tenmil_block::CompletionQueue;

/// I/O channel of a mirror.
pub(super) struct MirrorChannel {
    shared: Arc<Shared>,
    limits: Limits,
    legs: Legs,
    requests: Box<[MirrorRequest]>,
    free: Vec<u32>,
    ready: CompletionQueue,
    /// Writes of this channel in flight.
    tally: WriteEpochs,
    load: Load,
    /// Writes that could be sent to no leg.
    stillborn: Vec<u32>,
    /// Requests that wait for a state change.
    waiting: Vec<u32>,
    new_events: u64,
    /// Number of write losses reported on this channel.
    losses: u64,
    /// Number of leg returns that this channel has handled.
    returns: u64,
    /// Time of this iteration.
    now: Instant,
    masks: LegMasks,
    /// It is the channel of the maintenance thread.
    is_owner: bool,
    background: Background,
    /// Completions polled from a leg.
    below: CompletionBatch,
    /// Raised by a closing channel, whose maintenance work another one has to take over.
    waker: EventVectors,
    /// Ends the maintenance thread and releases ownership after the last channel. Dropped last.
    pub(super) owner: Option<Arc<Owner>>,
}

impl MirrorChannel {
    pub(super) fn open(shared: &Arc<Shared>) -> Result<Self, Error> {
        let limits = shared.limits.clone();
        let depth = limits.depth_max;
        let waker = EventVectors::new(1)
            .map_err(|error| format!("a descriptor: {error}"))
            .map_err(Error::environment)?;
        waker.mask(0);
        let legs = Legs::open(shared, ChannelMemory::new(shared)?, &waker)?;
        let tally = WriteEpochs::new();
        let load = Load::default();
        let member = ChannelEntry {
            write_epoch: tally.register().clone(),
            load: load.clone(),
            waker: waker.clone(),
        };
        shared.lock().members.push(member);
        Ok(Self {
            waker,
            legs,
            requests: vec![MirrorRequest::idle(); depth as usize].into(),
            free: (0..depth).rev().collect(),
            ready: CompletionQueue::with_depth(depth),
            tally,
            load,
            stillborn: Vec::new(),
            waiting: Vec::with_capacity(depth as usize),
            new_events: 0,
            losses: shared.losses_reported(),
            returns: shared.returns(),
            now: Instant::default(),
            masks: shared.masks(),
            is_owner: false,
            background: Background::default(),
            below: CompletionBatch::with_capacity(depth as usize + 32),
            shared: Arc::clone(shared),
            limits,
            owner: None,
        })
    }

    /// Opens the channel of the maintenance thread.
    pub(super) fn open_for_owner(shared: &Arc<Shared>) -> Result<Self, Error> {
        let mut channel = Self::open(shared)?;
        channel.is_owner = true;
        shared.own(&mut shared.lock(), Some(channel.waker.clone()));
        Ok(channel)
    }

    /// Accepts one request; the caller has checked that there is a free slot.
    fn take(&mut self, request: &Request, segments: &[Segment]) {
        let own = match check(&self.limits, request, segments) {
            Ok(own) if request.blocks > 0 || request.operation == Operation::Flush => own,
            done => return self.complete(request.token, done.err().unwrap_or_default(), 0),
        };
        let Some(slot) = self.free.pop() else { return };
        let segment_first = self.legs.keep(slot, own);
        let losses = self.losses;
        self.requests[slot as usize] =
            MirrorRequest { losses, ..MirrorRequest::of(Request { segment_first, ..*request }) };
        match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => self.read(slot),
            Operation::Flush => {
                self.enter();
                self.legs.ack_losses();
                self.write_counted(slot);
            }
            _ => self.request_write(slot),
        }
    }

    fn complete(&mut self, token: u64, status: IoStatus, result: u32) {
        self.ready.push(IoCompletion { token, status, result });
    }

    /// Registers a write in flight of this channel. The masks loaded after it are at least as new as
    /// everything that was closed before another thread saw the registration.
    fn enter(&mut self) {
        self.tally.enter(&self.shared);
        self.masks = self.shared.masks();
    }

    fn request_write(&mut self, slot: u32) {
        self.enter();
        let Request { lba, blocks, .. } = self.requests[slot as usize].request;
        // Regions that are open can be written without the lock; closed ones need permission under it.
        let (first, count) = self.shared.geometry.regions_of(lba, blocks.into());
        if !self.shared.closed.any(first, count) {
            return self.write_counted(slot);
        }
        self.request_permission(slot);
    }

    /// Requests permission to write under the lock.
    fn request_permission(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.requests[slot as usize];
        let range = (work.request.lba, u64::from(work.request.blocks));
        match meta.admit(&shared, self.tally.register(), slot, range) {
            WriteAdmission::Go => {
                self.masks = shared.masks();
                self.write_counted(slot);
            }
            WriteAdmission::Registered => {
                self.masks = shared.masks();
                self.write(slot, RequestStage::WrittenUnderCopy);
            }
            WriteAdmission::Wait => {
                if work.stage != RequestStage::Admitted {
                    (work.stage, work.failures) = (RequestStage::Admitted, meta.failures);
                }
                self.waiting.push(slot);
            }
            WriteAdmission::Refused => {
                work.stage = RequestStage::Admitted;
                drop(meta);
                return self.end(slot, IoStatus::RESERVATION_CONFLICT);
            }
        }
        self.maintain(&mut meta);
    }

    /// Sends a write or a flush to all legs, counted in the current write epoch.
    fn write_counted(&mut self, slot: u32) {
        let bucket = self.tally.begin();
        self.write(slot, RequestStage::Written { bucket });
    }

    /// Sends a write or a flush to all legs.
    fn write(&mut self, slot: u32, stage: RequestStage) {
        let status = self.without_legs();
        let work = &mut self.requests[slot as usize];
        let missing =
            self.legs.send_to(self.masks.write, RequestOwner::Request(slot), &work.request);
        (work.stage, work.awaited, work.failed) = (stage, self.masks.write & !missing, missing);
        if work.awaited == 0 {
            work.status = status;
            self.stillborn.push(slot);
        }
    }

    fn read(&mut self, slot: u32) {
        let MirrorRequest { request, failed, .. } = self.requests[slot as usize];
        let mut from = self.masks.read & !failed;
        if self.is_unequal(request.lba, request.blocks) {
            // If the source leg fails, all reads have to use the same next leg.
            from &= from.wrapping_neg();
        }
        let (leg, status) = (self.legs.idlest(from), self.without_legs());
        let missing = self.legs.send_to(leg, RequestOwner::Request(slot), &request);
        let work = &mut self.requests[slot as usize];
        work.awaited = leg;
        if work.stage != RequestStage::ReadAgain {
            work.stage = RequestStage::Read;
        }
        if leg == 0 || missing != 0 {
            work.failed |= leg;
            if work.status.is_success() {
                work.status = status;
            }
            self.end_read(slot);
        }
    }

    /// Status of a request that can be sent to no leg.
    const fn without_legs(&self) -> IoStatus {
        match self.masks.read {
            0 => IoStatus::RESERVATION_CONFLICT,
            _ => IoStatus::PATH_ERROR,
        }
    }

    /// Status of a write whose required superblock update failed on all legs.
    const fn without_record(&self) -> IoStatus {
        match self.masks.read {
            0 => IoStatus::RESERVATION_CONFLICT,
            _ => IoStatus::WRITE_FAULT,
        }
    }

    /// Whether legs may differ in the regions of these blocks.
    fn is_unequal(&self, lba: u64, blocks: u32) -> bool {
        let (first, count) = self.shared.geometry.regions_of(lba, blocks.into());
        self.masks.unequal && self.shared.unequal.any(first, count)
    }

    /// Handles a completion from a leg.
    fn ended(&mut self, slot: u32, leg: u8, completion: &IoCompletion) {
        let work = &mut self.requests[slot as usize];
        work.awaited &= !leg;
        if completion.status.is_success() {
            work.done |= leg;
            work.result = completion.result;
        } else {
            work.failed |= leg;
            work.lost |= if is_loss(work.request.operation, completion.status) { leg } else { 0 };
            let tells_more =
                is_the_callers(completion.status) || completion.status == IoStatus::COMPARE_FAILURE;
            if work.status.is_success() || tells_more {
                work.status = completion.status;
            }
        }
        match work.stage {
            RequestStage::Read | RequestStage::ReadAgain => self.end_read(slot),
            _ if work.awaited == 0 => self.end_write(slot),
            _ => {}
        }
    }

    fn end_read(&mut self, slot: u32) {
        // A leg that failed meanwhile may have returned, and have lost unflushed writes, before it
        // executed this read.
        self.masks = self.shared.masks();
        let work = &mut self.requests[slot as usize];
        work.done &= self.masks.read;
        if work.status == IoStatus::COMPARE_FAILURE && work.failed & self.masks.read == 0 {
            work.status = IoStatus::PATH_ERROR;
        }
        let work = *work;
        if work.done != 0 {
            if work.failed != 0 {
                let Request { lba, blocks, .. } = work.request;
                let mut meta = self.shared.lock();
                meta.repair(&self.shared, lba, blocks);
                meta.call_owner();
            }
            return self.end(slot, IoStatus::SUCCESS);
        }
        let is_final = is_the_callers(work.status) || work.status == IoStatus::COMPARE_FAILURE;
        if is_final || self.masks.read & !work.failed == 0 {
            // Data read from a leg that another owner has taken over is undefined.
            let is_void = work.status.is_success();
            return self.end(slot, if is_void { self.without_legs() } else { work.status });
        }
        let Request { lba, blocks, .. } = work.request;
        let source_failed = work.failed & self.masks.source() != 0;
        let is_first = work.stage == RequestStage::Read;
        if is_first && blocks > 1 && source_failed && self.is_unequal(lba, blocks) {
            return self.repair_first(slot);
        }
        self.read(slot);
    }

    /// The source could not read all of these blocks. The readable ones must not come from another leg,
    /// which may have older data, so the blocks are made equal first.
    fn repair_first(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.requests[slot as usize];
        (work.stage, work.failures) = (RequestStage::Repaired, meta.failures);
        meta.repair_now(&shared, work.request.lba, work.request.blocks);
        self.waiting.push(slot);
        self.maintain(&mut meta);
    }

    /// Restarts the read once any leg may be read.
    fn read_repaired(&mut self, slot: u32) {
        let Request { lba, blocks, .. } = self.requests[slot as usize].request;
        self.masks = self.shared.masks();
        let is_unequal = self.is_unequal(lba, blocks);
        if is_unequal && self.shared.lock().is_repairing((lba, blocks.into())) {
            return self.waiting.push(slot);
        }
        // Legs may have failed and returned in the meantime.
        let work = &mut self.requests[slot as usize];
        (work.stage, work.failed, work.status) = (RequestStage::ReadAgain, 0, IoStatus::SUCCESS);
        self.read(slot);
    }

    /// Handles the completion of a write or a flush on all legs.
    fn end_write(&mut self, slot: u32) {
        let work = self.requests[slot as usize];
        // Fast path: all legs succeeded, and every leg that a superblock may state to be in sync has it.
        if work.failed == 0 && self.shared.masks().claimed & !work.done == 0 {
            return self.end(slot, IoStatus::SUCCESS);
        }
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let Request { lba, blocks, operation, .. } = work.request;
        if operation == Operation::Flush && meta.bugs.ignores_failed_flush && work.done != 0 {
            drop(meta);
            return self.end(slot, IoStatus::SUCCESS);
        }
        let at_fault = is_the_callers(work.status);
        self.legs.notice_losses(work.lost);
        if meta.have_lost(&shared, work.lost) && self.losses == shared.losses() {
            shared.add_loss();
        }
        let verdict =
            if at_fault { WriteVerdict::Bad } else { meta.judge(&shared, work.done, work.failed) };
        match verdict {
            WriteVerdict::Good => {
                drop(meta);
                return self.end(slot, IoStatus::SUCCESS);
            }
            WriteVerdict::Bad => {
                if operation != Operation::Flush {
                    meta.mark_divergent(&shared, lba, blocks.into());
                }
                if work.status.is_conflict() {
                    // Another host has reserved the legs, and may own the mirror: before superblocks are
                    // written they are read.
                    meta.request_commit();
                    self.maintain(&mut meta);
                }
                meta.call_owner();
                drop(meta);
                self.masks = shared.masks();
                let is_done = work.status.is_success();
                return self.end(slot, if is_done { self.without_record() } else { work.status });
            }
            WriteVerdict::Wait => {}
        }
        let work = &mut self.requests[slot as usize];
        // Some leg failed: the write completes only after the superblocks record that leg as stale.
        let bucket = match work.stage {
            RequestStage::Written { bucket } => Some(bucket),
            RequestStage::Recorded { bucket } => bucket,
            _ => None,
        };
        if !matches!(work.stage, RequestStage::Recorded { .. }) {
            work.failures = meta.failures;
        }
        work.stage = RequestStage::Recorded { bucket };
        self.waiting.push(slot);
        self.maintain(&mut meta);
    }

    /// Completes a request and frees its slot.
    fn end(&mut self, slot: u32, status: IoStatus) {
        let MirrorRequest { request, result, stage, losses, .. } = self.requests[slot as usize];
        let status = match request.operation {
            Operation::Flush => self.flushed(losses, status),
            Operation::Read | Operation::Compare | Operation::Verify => status,
            _ => {
                if losses < self.losses && status.is_success() {
                    self.require_report(losses);
                }
                status
            }
        };
        match stage {
            RequestStage::Written { bucket } | RequestStage::Recorded { bucket: Some(bucket) } => {
                self.tally.end(bucket);
            }
            RequestStage::WrittenUnderCopy | RequestStage::Recorded { bucket: None } => {
                self.shared.lock().unregister(self.tally.register(), slot);
            }
            RequestStage::Idle
            | RequestStage::Read
            | RequestStage::Repaired
            | RequestStage::ReadAgain
            | RequestStage::Admitted => {}
        }
        self.requests[slot as usize].stage = RequestStage::Idle;
        self.free.push(slot);
        self.complete(request.token, status, result);
    }

    /// Status of a flush. If all legs may have lost writes during or before it, every channel reports
    /// that once.
    fn flushed(&mut self, losses: u64, status: IoStatus) -> IoStatus {
        let all = self.shared.losses();
        if status.is_success() && losses == all {
            return status;
        }
        if losses != all {
            self.losses = all;
            self.shared.report_losses(all);
            return IoStatus::WRITE_FAULT;
        }
        status
    }

    /// Handles the return of legs. Each reports its earlier losses once on every channel. This flush
    /// makes it report them now, while all of that is copied, and not to a later flush.
    fn have_reports(&mut self) {
        self.returns = self.shared.returns();
        let LegMasks { read, write, .. } = self.shared.masks();
        let flush = Request { operation: Operation::Flush, ..Request::PLACEHOLDER };
        self.legs.send_to(write & !read, RequestOwner::Report, &flush);
    }

    /// Whether what is sent from there is a flush of a leg.
    fn is_flush(&self, place: RequestOwner) -> bool {
        match place {
            RequestOwner::Request(slot) => {
                self.requests[slot as usize].request.operation == Operation::Flush
            }
            RequestOwner::Report => true,
            place => self.background.flushes(place),
        }
    }

    /// A leg that has come back has answered a flush that asked for what it lost before. That is copied
    /// anyhow; what it has lost since is not, if this is the only flush that fails for it.
    fn reported(&mut self, leg: usize, completion: &IoCompletion) {
        if !is_loss(Operation::Flush, completion.status)
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

    /// Whether the channel must be polled without a wake-up: the event that a request waits for is often
    /// caused by another channel.
    fn is_restless(&self) -> bool {
        !self.ready.is_empty() || !self.waiting.is_empty() || !self.stillborn.is_empty()
    }

    /// Re-evaluates all requests that wait for a state change.
    fn reevaluate(&mut self) {
        let new_events = self.shared.event_count();
        if new_events == self.new_events || self.waiting.is_empty() {
            return;
        }
        self.new_events = new_events;
        self.enter();
        for slot in std::mem::take(&mut self.waiting) {
            let MirrorRequest { stage, failures, status, .. } = self.requests[slot as usize];
            if self.shared.lock().failures != failures {
                let status = if status.is_success() { self.without_record() } else { status };
                self.end(slot, status);
            } else if stage == RequestStage::Admitted {
                self.request_permission(slot);
            } else if stage == RequestStage::Repaired {
                self.read_repaired(slot);
            } else {
                // The failed legs have been recorded.
                let work = &mut self.requests[slot as usize];
                (work.failed, work.lost) = (0, 0);
                self.end_write(slot);
            }
        }
        self.tally.leave_epoch(&self.shared);
    }
}

impl IoChannel for MirrorChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // A completion that waits to be polled has freed its slot, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let count = requests.len().min(room);
        self.now = now;
        self.masks = self.shared.masks();
        for request in &requests[..count] {
            self.take(request, segments);
        }
        self.tally.leave_epoch(&self.shared);
        self.load.add(count);
        self.legs.submit(now);
        count
    }

    fn flush(&mut self) {
        self.legs.flush();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.now = now;
        let mut below = std::mem::replace(&mut self.below, CompletionBatch::with_capacity(0));
        for leg in 0..self.legs.count() {
            let count = self.legs.poll(leg, now, &mut below);
            let has_lost = count > 0 && self.legs.has_lost(leg);
            for completion in below.drain() {
                let place = RequestOwner::of(completion.token);
                if completion.status == IoStatus::WRITE_FAULT && self.is_flush(place) {
                    self.legs.acknowledge_losses(leg);
                }
                match place {
                    RequestOwner::Request(slot) => {
                        if has_lost {
                            self.notice_loss(slot, leg);
                        }
                        self.ended(slot, 1 << leg, &completion);
                    }
                    RequestOwner::Report => self.reported(leg, &completion),
                    place => {
                        if has_lost && !self.is_flush(place) {
                            self.notice_background_loss(leg);
                        }
                        self.background_ended(place, 1 << leg, &completion);
                    }
                }
            }
        }
        self.below = below;
        while let Some(slot) = self.stillborn.pop() {
            self.end_write(slot);
        }
        self.reevaluate();
        if self.shared.returns() != self.returns {
            self.have_reports();
        }
        if now >= self.shared.maintenance_due() && (self.is_owner || !self.shared.has_owner()) {
            let shared = Arc::clone(&self.shared);
            self.maintain(&mut shared.lock());
        }
        self.tally.leave_epoch(&self.shared);
        self.legs.submit(now);
        self.legs.flush();
        self.ready.drain_into(completions)
    }

    /// Losses on all legs at once: any other leaves a leg that has everything.
    fn losses(&self) -> u64 {
        self.shared.losses()
    }

    fn ack_losses(&mut self, count: u64) {
        self.acknowledge(count);
    }
}

impl ChannelWakeup for MirrorChannel {
    fn wake_at(&self) -> Instant {
        if self.is_restless() {
            return Instant::default();
        }
        if self.shared.has_owner() && !self.is_owner {
            return self.legs.wake_at();
        }
        self.legs.wake_at().min(self.shared.maintenance_due())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.legs.wake_source()
    }

    fn arm(&mut self) -> bool {
        // Armed before the deadline is read: a thread that raises the waker has stored the deadline
        // before.
        let hears = self.waker.unmask(0);
        self.legs.arm() || self.is_restless() || !hears
    }

    fn disarm(&mut self) {
        self.waker.mask(0);
        self.legs.disarm();
    }
}

impl Drop for MirrorChannel {
    /// Closes the legs first, which ends their requests; then hands over the unfinished work of this
    /// channel.
    fn drop(&mut self) {
        self.legs.close();
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let write_epoch = self.tally.register();
        meta.members.retain(|other| !other.write_epoch.is(write_epoch));
        meta.registered.retain(|write| !write.write_epoch.is(write_epoch));
        for work in self.requests.iter().filter(|work| work.may_differ()) {
            meta.mark_divergent(&shared, work.request.lba, work.request.blocks.into());
        }
        if self.is_owner {
            shared.own(&mut meta, None);
        }
        self.background.abandon(&mut meta, &shared);
        shared.wake_all();
        // Other channels may sleep until a time that was valid while this one was active.
        meta.members.iter_mut().for_each(|other| other.waker.raise(0));
    }
}
