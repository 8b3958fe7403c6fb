//! I/O channel of a mirror: a request table, and a channel to each leg.

mod background_tasks;
mod leg_channels;
mod loss_tracking;
mod write_epochs;

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Error, Instant, Interrupts, IoChannel, IoCompletion, IoStatus,
    Limits, Operation, Request, Segment, WakeSource,
};
use tenmil_linux::EventFdVectors;

use self::background_tasks::BackgroundTask;
use self::leg_channels::{LegChannels, RequestOwner};
use self::write_epochs::ChannelWriteEpochs;
use super::maintenance_thread::MaintenanceThread;
use super::mirror_request::{
    MirrorRequest, RequestStage, is_invalid_request_status, reports_write_loss,
};
use super::mirror_shared::{ChannelMemory, LegMasks, MirrorShared, SubmittedRequestCount};
use super::mirror_state::{ChannelEntry, WriteAdmission, WriteVerdict};
use crate::request_validation::valid_request_segments;
use tenmil_block::CompletionQueue;

/// I/O channel of a mirror.
pub(super) struct MirrorChannel {
    shared: Arc<MirrorShared>,
    limits: Limits,
    legs: LegChannels,
    requests: Box<[MirrorRequest]>,
    free: Vec<u32>,
    ready: CompletionQueue,
    /// Writes of this channel in flight.
    tally: ChannelWriteEpochs,
    load: SubmittedRequestCount,
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
    background: BackgroundTask,
    /// Completions polled from a leg.
    below: CompletionBatch,
    /// Raised by a closing channel, whose maintenance work another one has to take over.
    waker: EventFdVectors,
    /// Ends the maintenance thread and releases ownership after the last channel. Dropped last.
    pub(super) owner: Option<Arc<MaintenanceThread>>,
}

impl MirrorChannel {
    pub(super) fn open(shared: &Arc<MirrorShared>) -> Result<Self, Error> {
        let limits = shared.limits.clone();
        let depth = limits.depth_max;
        let waker = EventFdVectors::new(1)
            .map_err(|error| format!("a descriptor: {error}"))
            .map_err(Error::environment)?;
        waker.mask(0);
        let legs = LegChannels::open(shared, ChannelMemory::new(shared)?, &waker)?;
        let tally = ChannelWriteEpochs::new();
        let load = SubmittedRequestCount::default();
        let member = ChannelEntry {
            write_epoch: tally.oldest_write_epoch().clone(),
            load: load.clone(),
            waker: waker.clone(),
        };
        shared.lock().members.push(member);
        Ok(Self {
            waker,
            legs,
            requests: vec![MirrorRequest::free_entry(); depth as usize].into(),
            free: (0..depth).rev().collect(),
            ready: CompletionQueue::with_depth(depth),
            tally,
            load,
            stillborn: Vec::new(),
            waiting: Vec::with_capacity(depth as usize),
            new_events: 0,
            losses: shared.reported_loss_count(),
            returns: shared.leg_return_count(),
            now: Instant::default(),
            masks: shared.masks(),
            is_owner: false,
            background: BackgroundTask::default(),
            below: CompletionBatch::with_capacity(depth as usize + 32),
            shared: Arc::clone(shared),
            limits,
            owner: None,
        })
    }

    /// Opens the channel of the maintenance thread.
    pub(super) fn open_for_maintenance(shared: &Arc<MirrorShared>) -> Result<Self, Error> {
        let mut channel = Self::open(shared)?;
        channel.is_owner = true;
        shared.set_maintenance_waker(&mut shared.lock(), Some(channel.waker.clone()));
        Ok(channel)
    }

    /// Accepts one request; the caller has checked that there is a free slot.
    fn accept_request(&mut self, request: &Request, segments: &[Segment]) {
        let own = match valid_request_segments(&self.limits, request, segments) {
            Ok(own) if request.blocks > 0 || request.operation == Operation::Flush => own,
            done => return self.queue_completion(request.token, done.err().unwrap_or_default(), 0),
        };
        let Some(slot) = self.free.pop() else { return };
        let segment_first = self.legs.store_segments(slot, own);
        let losses = self.losses;
        self.requests[slot as usize] =
            MirrorRequest { losses, ..MirrorRequest::new(Request { segment_first, ..*request }) };
        match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => self.start_read(slot),
            Operation::Flush => {
                self.enter_write_epoch();
                self.legs.acknowledge_repaired_losses();
                self.start_counted_write(slot);
            }
            _ => self.start_write_if_region_open(slot),
        }
    }

    fn queue_completion(&mut self, token: u64, status: IoStatus, result: u32) {
        self.ready.push(IoCompletion { token, status, result });
    }

    /// Registers a write in flight of this channel. The masks loaded after it are at least as new as
    /// everything that was closed before another thread saw the registration.
    fn enter_write_epoch(&mut self) {
        self.tally.enter_current_epoch(&self.shared);
        self.masks = self.shared.masks();
    }

    fn start_write_if_region_open(&mut self, slot: u32) {
        self.enter_write_epoch();
        let Request { lba, blocks, .. } = self.requests[slot as usize].request;
        // Regions that are open can be written without the lock; closed ones need permission under it.
        let (first, count) = self.shared.geometry.regions_of(lba, blocks.into());
        if !self.shared.closed.any_set(first, count) {
            return self.start_counted_write(slot);
        }
        self.admit_write_under_lock(slot);
    }

    /// Requests permission to write under the lock.
    fn admit_write_under_lock(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.requests[slot as usize];
        let range = (work.request.lba, u64::from(work.request.blocks));
        match meta.admit_write(&shared, self.tally.oldest_write_epoch(), slot, range) {
            WriteAdmission::Go => {
                self.masks = shared.masks();
                self.start_counted_write(slot);
            }
            WriteAdmission::Registered => {
                self.masks = shared.masks();
                self.send_write_to_legs(slot, RequestStage::WrittenUnderCopy);
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
                return self.complete_request(slot, IoStatus::RESERVATION_CONFLICT);
            }
        }
        self.run_maintenance(&mut meta);
    }

    /// Sends a write or a flush to all legs, counted in the current write epoch.
    fn start_counted_write(&mut self, slot: u32) {
        let bucket = self.tally.begin_write();
        self.send_write_to_legs(slot, RequestStage::Written { bucket });
    }

    /// Sends a write or a flush to all legs.
    fn send_write_to_legs(&mut self, slot: u32, stage: RequestStage) {
        let status = self.status_without_legs();
        let work = &mut self.requests[slot as usize];
        let missing =
            self.legs.send_to(self.masks.write, RequestOwner::Request(slot), &work.request);
        (work.stage, work.awaited, work.failed) = (stage, self.masks.write & !missing, missing);
        if work.awaited == 0 {
            work.status = status;
            self.stillborn.push(slot);
        }
    }

    fn start_read(&mut self, slot: u32) {
        let MirrorRequest { request, failed, .. } = self.requests[slot as usize];
        let mut from = self.masks.read & !failed;
        if self.may_legs_differ(request.lba, request.blocks) {
            // If the source leg fails, all reads have to use the same next leg.
            from &= from.wrapping_neg();
        }
        let (leg, status) = (self.legs.least_busy_leg(from), self.status_without_legs());
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
            self.finish_read(slot);
        }
    }

    /// Status of a request that can be sent to no leg.
    const fn status_without_legs(&self) -> IoStatus {
        match self.masks.read {
            0 => IoStatus::RESERVATION_CONFLICT,
            _ => IoStatus::PATH_ERROR,
        }
    }

    /// Status of a write whose required superblock update failed on all legs.
    const fn commit_failed_status(&self) -> IoStatus {
        match self.masks.read {
            0 => IoStatus::RESERVATION_CONFLICT,
            _ => IoStatus::WRITE_FAULT,
        }
    }

    /// Whether legs may differ in the regions of these blocks.
    fn may_legs_differ(&self, lba: u64, blocks: u32) -> bool {
        let (first, count) = self.shared.geometry.regions_of(lba, blocks.into());
        self.masks.unequal && self.shared.unequal.any_set(first, count)
    }

    /// Handles a completion from a leg.
    fn handle_leg_completion(&mut self, slot: u32, leg: u8, completion: &IoCompletion) {
        let work = &mut self.requests[slot as usize];
        work.awaited &= !leg;
        if completion.status.is_success() {
            work.done |= leg;
            work.result = completion.result;
        } else {
            work.failed |= leg;
            work.lost |=
                if reports_write_loss(work.request.operation, completion.status) { leg } else { 0 };
            let tells_more = is_invalid_request_status(completion.status)
                || completion.status == IoStatus::COMPARE_FAILURE;
            if work.status.is_success() || tells_more {
                work.status = completion.status;
            }
        }
        match work.stage {
            RequestStage::Read | RequestStage::ReadAgain => self.finish_read(slot),
            _ if work.awaited == 0 => self.finish_write(slot),
            _ => {}
        }
    }

    fn finish_read(&mut self, slot: u32) {
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
                meta.queue_repair(&self.shared, lba, blocks);
                meta.wake_maintenance();
            }
            return self.complete_request(slot, IoStatus::SUCCESS);
        }
        let is_final =
            is_invalid_request_status(work.status) || work.status == IoStatus::COMPARE_FAILURE;
        if is_final || self.masks.read & !work.failed == 0 {
            // Data read from a leg that another owner has taken over is undefined.
            let is_void = work.status.is_success();
            return self.complete_request(
                slot,
                if is_void { self.status_without_legs() } else { work.status },
            );
        }
        let Request { lba, blocks, .. } = work.request;
        let source_failed = work.failed & self.masks.single_source_leg() != 0;
        let is_first = work.stage == RequestStage::Read;
        if is_first && blocks > 1 && source_failed && self.may_legs_differ(lba, blocks) {
            return self.queue_repair_and_wait(slot);
        }
        self.start_read(slot);
    }

    /// The source could not read all of these blocks. The readable ones must not come from another leg,
    /// which may have older data, so the blocks are made equal first.
    fn queue_repair_and_wait(&mut self, slot: u32) {
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let work = &mut self.requests[slot as usize];
        (work.stage, work.failures) = (RequestStage::Repaired, meta.failures);
        meta.queue_required_repair(&shared, work.request.lba, work.request.blocks);
        self.waiting.push(slot);
        self.run_maintenance(&mut meta);
    }

    /// Restarts the read once any leg may be read.
    fn restart_repaired_read(&mut self, slot: u32) {
        let Request { lba, blocks, .. } = self.requests[slot as usize].request;
        self.masks = self.shared.masks();
        let is_unequal = self.may_legs_differ(lba, blocks);
        if is_unequal && self.shared.lock().is_repairing((lba, blocks.into())) {
            return self.waiting.push(slot);
        }
        // Legs may have failed and returned in the meantime.
        let work = &mut self.requests[slot as usize];
        (work.stage, work.failed, work.status) = (RequestStage::ReadAgain, 0, IoStatus::SUCCESS);
        self.start_read(slot);
    }

    /// Handles the completion of a write or a flush on all legs.
    fn finish_write(&mut self, slot: u32) {
        let work = self.requests[slot as usize];
        // Fast path: all legs succeeded, and every leg that a superblock may state to be in sync has it.
        if work.failed == 0 && self.shared.masks().claimed & !work.done == 0 {
            return self.complete_request(slot, IoStatus::SUCCESS);
        }
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        let Request { lba, blocks, operation, .. } = work.request;
        if operation == Operation::Flush && meta.bugs.ignores_failed_flush && work.done != 0 {
            drop(meta);
            return self.complete_request(slot, IoStatus::SUCCESS);
        }
        let at_fault = is_invalid_request_status(work.status);
        self.legs.record_losses_handled(work.lost);
        if meta.handle_leg_losses(&shared, work.lost) && self.losses == shared.all_leg_loss_count()
        {
            shared.record_all_leg_loss();
        }
        let verdict = if at_fault {
            WriteVerdict::Bad
        } else {
            meta.conclude_write(&shared, work.done, work.failed)
        };
        match verdict {
            WriteVerdict::Good => {
                drop(meta);
                return self.complete_request(slot, IoStatus::SUCCESS);
            }
            WriteVerdict::Bad => {
                if operation != Operation::Flush {
                    meta.mark_divergent(&shared, lba, blocks.into());
                }
                if work.status.is_conflict() {
                    // Another host has reserved the legs, and may own the mirror: before superblocks are
                    // written they are read.
                    meta.request_commit();
                    self.run_maintenance(&mut meta);
                }
                meta.wake_maintenance();
                drop(meta);
                self.masks = shared.masks();
                let is_done = work.status.is_success();
                return self.complete_request(
                    slot,
                    if is_done { self.commit_failed_status() } else { work.status },
                );
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
        self.run_maintenance(&mut meta);
    }

    /// Completes a request and frees its slot.
    fn complete_request(&mut self, slot: u32, status: IoStatus) {
        let MirrorRequest { request, result, stage, losses, .. } = self.requests[slot as usize];
        let status = match request.operation {
            Operation::Flush => self.flush_status(losses, status),
            Operation::Read | Operation::Compare | Operation::Verify => status,
            _ => {
                if losses < self.losses && status.is_success() {
                    self.report_losses_since(losses);
                }
                status
            }
        };
        match stage {
            RequestStage::Written { bucket } | RequestStage::Recorded { bucket: Some(bucket) } => {
                self.tally.end_write(bucket);
            }
            RequestStage::WrittenUnderCopy | RequestStage::Recorded { bucket: None } => {
                self.shared.lock().unregister_channel(self.tally.oldest_write_epoch(), slot);
            }
            RequestStage::Idle
            | RequestStage::Read
            | RequestStage::Repaired
            | RequestStage::ReadAgain
            | RequestStage::Admitted => {}
        }
        self.requests[slot as usize].stage = RequestStage::Idle;
        self.free.push(slot);
        self.queue_completion(request.token, status, result);
    }

    /// Status of a flush. If all legs may have lost writes during or before it, every channel reports
    /// that once.
    fn flush_status(&mut self, losses: u64, status: IoStatus) -> IoStatus {
        let all = self.shared.all_leg_loss_count();
        if status.is_success() && losses == all {
            return status;
        }
        if losses != all {
            self.losses = all;
            self.shared.record_reported_losses(all);
            return IoStatus::WRITE_FAULT;
        }
        status
    }

    /// Handles the return of legs. Each reports its earlier losses once on every channel. This flush
    /// makes it report them now, while all of that is copied, and not to a later flush.
    fn flush_returned_legs(&mut self) {
        self.returns = self.shared.leg_return_count();
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
            place => self.background.is_flush(place),
        }
    }

    /// A leg that has come back has answered a flush that asked for what it lost before. That is copied
    /// anyhow; what it has lost since is not, if this is the only flush that fails for it.
    fn handle_returned_leg_flush(&mut self, leg: usize, completion: &IoCompletion) {
        if !reports_write_loss(Operation::Flush, completion.status)
            || self.legs.leg_loss_count(leg) <= self.shared.repaired_loss_count(leg)
        {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let mut meta = shared.lock();
        self.legs.record_losses_handled(1 << leg);
        if meta.handle_leg_losses(&shared, 1 << leg) {
            shared.record_all_leg_loss();
        }
        meta.wake_maintenance();
    }

    /// Whether the channel must be polled without a wake-up: the event that a request waits for is often
    /// caused by another channel.
    fn needs_polling_without_wake(&self) -> bool {
        !self.ready.is_empty() || !self.waiting.is_empty() || !self.stillborn.is_empty()
    }

    /// Re-evaluates all requests that wait for a state change.
    fn reevaluate_waiting(&mut self) {
        let new_events = self.shared.wake_count();
        if new_events == self.new_events || self.waiting.is_empty() {
            return;
        }
        self.new_events = new_events;
        self.enter_write_epoch();
        for slot in std::mem::take(&mut self.waiting) {
            let MirrorRequest { stage, failures, status, .. } = self.requests[slot as usize];
            if self.shared.lock().failures != failures {
                let status = if status.is_success() { self.commit_failed_status() } else { status };
                self.complete_request(slot, status);
            } else if stage == RequestStage::Admitted {
                self.admit_write_under_lock(slot);
            } else if stage == RequestStage::Repaired {
                self.restart_repaired_read(slot);
            } else {
                // The failed legs have been recorded.
                let work = &mut self.requests[slot as usize];
                (work.failed, work.lost) = (0, 0);
                self.finish_write(slot);
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
            self.accept_request(request, segments);
        }
        self.tally.leave_epoch(&self.shared);
        self.load.add(count);
        self.legs.submit(now);
        count
    }

    fn flush_submissions(&mut self) {
        self.legs.flush_submissions();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.now = now;
        let mut below = std::mem::replace(&mut self.below, CompletionBatch::with_capacity(0));
        for leg in 0..self.legs.leg_count() {
            let count = self.legs.poll(leg, now, &mut below);
            let has_lost = count > 0 && self.legs.has_unhandled_losses(leg);
            for completion in below.drain() {
                let place = RequestOwner::from_token(completion.token);
                if completion.status == IoStatus::WRITE_FAULT && self.is_flush(place) {
                    self.legs.accept_losses_of_leg(leg);
                }
                match place {
                    RequestOwner::Request(slot) => {
                        if has_lost {
                            self.handle_loss_found_by_request(slot, leg);
                        }
                        self.handle_leg_completion(slot, 1 << leg, &completion);
                    }
                    RequestOwner::Report => self.handle_returned_leg_flush(leg, &completion),
                    place => {
                        if has_lost && !self.is_flush(place) {
                            self.handle_loss_found_by_maintenance(leg);
                        }
                        self.handle_background_completion(place, 1 << leg, &completion);
                    }
                }
            }
        }
        self.below = below;
        while let Some(slot) = self.stillborn.pop() {
            self.finish_write(slot);
        }
        self.reevaluate_waiting();
        if self.shared.leg_return_count() != self.returns {
            self.flush_returned_legs();
        }
        if now >= self.shared.maintenance_due()
            && (self.is_owner || !self.shared.has_maintenance_thread())
        {
            let shared = Arc::clone(&self.shared);
            self.run_maintenance(&mut shared.lock());
        }
        self.tally.leave_epoch(&self.shared);
        self.legs.submit(now);
        self.legs.flush_submissions();
        self.ready.drain_into(completions)
    }

    /// Losses on all legs at once: any other leaves a leg that has everything.
    fn known_write_loss_count(&self) -> u64 {
        self.shared.all_leg_loss_count()
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.acknowledge_repaired_up_to(count);
    }
}

impl ChannelWakeup for MirrorChannel {
    fn wake_at(&self) -> Instant {
        if self.needs_polling_without_wake() {
            return Instant::default();
        }
        if self.shared.has_maintenance_thread() && !self.is_owner {
            return self.legs.wake_at();
        }
        self.legs.wake_at().min(self.shared.maintenance_due())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.legs.wake_source()
    }

    fn is_done_by_local_kernel(&self) -> bool {
        self.legs.is_kernel_io()
    }

    fn arm(&mut self) -> bool {
        // Armed before the deadline is read: a thread that raises the waker has stored the deadline
        // before.
        let hears = self.waker.unmask(0);
        self.legs.arm() || self.needs_polling_without_wake() || !hears
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
        let write_epoch = self.tally.oldest_write_epoch();
        meta.members.retain(|other| !other.write_epoch.is_same_channel(write_epoch));
        meta.registered.retain(|write| !write.write_epoch.is_same_channel(write_epoch));
        for work in self.requests.iter().filter(|work| work.may_have_partly_executed()) {
            meta.mark_divergent(&shared, work.request.lba, work.request.blocks.into());
        }
        if self.is_owner {
            shared.set_maintenance_waker(&mut meta, None);
        }
        self.background.abandon(&mut meta, &shared);
        shared.wake_all();
        // Other channels may sleep until a time that was valid while this one was active.
        meta.members.iter_mut().for_each(|other| other.waker.raise(0));
    }
}
