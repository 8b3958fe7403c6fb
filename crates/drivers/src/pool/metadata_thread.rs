//! Metadata thread of a pool: reads and writes its metadata, and flushes.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span, WakeSource,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::{Clock, Sleeper};
use tenmil_volume::{ActionResult, DeviceAction, PoolRequest};

use super::capacity_events::{self, CapacityEvent};
use super::device_reservations::PoolReservations;
use super::missing_device::MissingDevice;
use super::pool_shared::{ClientInbox, ClientMessage, PoolShared};
use super::stop_events::PoolStopEvent;
use super::{PAGE_BYTES, PageGeometry};

/// The metadata thread of an open pool.
pub(super) struct MetadataThread {
    /// The device of the pool.
    device: String,
    pub(super) shared: Arc<PoolShared>,
    inbox: Arc<ClientInbox>,
    backend: Box<dyn IoChannel>,
    geometry: PageGeometry,
    regions: RegionTable,
    entry_memory: Region,
    jobs: Box<[PendingIo]>,
    /// Free entries for one page, and for many.
    small: Vec<u32>,
    large: Vec<u32>,
    waiting: VecDeque<DeviceAction>,
    /// Requests that the device has not accepted yet.
    queue: VecDeque<Request>,
    /// Segments of each entry, one for each part.
    table: Box<[Segment]>,
    completions: CompletionBatch,
    messages: VecDeque<ClientMessage>,
    /// Devices were added whose wake source is not watched yet.
    has_more: bool,
    /// Number of stops that were reported, and whether one was reported without its recovery.
    reported_stops: u64,
    is_stop_reported: bool,
    /// Time of the next recovery attempt, while the pool is stopped.
    recovers_at: Instant,
    /// What is released once the superblocks name no owner.
    reserved: Option<Arc<PoolReservations>>,
}

/// I/O of an entry.
#[derive(Clone, Copy, Debug)]
struct PendingIo {
    io: u64,
    /// A page is read, whose contents go to the pool.
    reads: bool,
    /// Requests that have not completed.
    left: u32,
    status: IoStatus,
    /// For retries: operation, page and length in bytes.
    work: (Operation, u64, u32),
    /// Number of retries, and the time of the next one.
    tries: u32,
    again_at: Option<Instant>,
}

impl PendingIo {
    const NONE: Self = Self {
        io: 0,
        reads: false,
        left: 0,
        status: IoStatus::SUCCESS,
        work: (Operation::Flush, 0, 0),
        tries: 0,
        again_at: None,
    };
}

/// Entries for one page.
const SMALL: u32 = 32;
/// Entries for many pages.
const LARGE: u32 = 8;
/// Pages of an entry for many: the maximum of one metadata write.
const LARGE_PAGES: u32 = 64;
/// Bytes of the superblocks at the start.
const SLOTS_BYTES: u32 = 2 * PAGE_BYTES;
const PAGE: usize = PAGE_BYTES as usize;
/// Maximum number of completions per poll.
const COMPLETIONS_MAX: usize = 64;
/// Maximum sleep, and the maximum while reads are awaited before a recovery.
const SLEEP_MAX: Span = Span::from_secs(1);
const SLEEP_RECOVERING: Span = Span::from_ms(2);
/// Number and interval of retries after a transport error. The device has timeouts of its own.
const TRIES_MAX: u32 = 3;
const TRY_AGAIN_AFTER: Span = Span::from_ms(500);
/// Interval of recovery attempts.
const RECOVER_AFTER: Span = Span::from_secs(2);

impl MetadataThread {
    pub(super) fn new(
        device: &str,
        shared: Arc<PoolShared>,
        (inbox, backend): (Arc<ClientInbox>, Box<dyn IoChannel>),
        geometry: PageGeometry,
        regions: &RegionTable,
    ) -> Result<Self, Error> {
        let pages = SMALL + LARGE * LARGE_PAGES;
        let memory = regions.allocate_region((pages * PAGE_BYTES) as usize);
        let places = (SMALL + LARGE) as usize;
        Ok(Self {
            device: device.into(),
            inbox,
            shared,
            backend,
            geometry,
            regions: regions.clone(),
            entry_memory: memory.map_err(Error::environment)?,
            jobs: vec![PendingIo::NONE; places].into(),
            small: (0..SMALL).rev().collect(),
            large: (SMALL..SMALL + LARGE).rev().collect(),
            waiting: VecDeque::new(),
            queue: VecDeque::new(),
            table: vec![Segment::default(); places * LARGE_PAGES as usize].into(),
            completions: CompletionBatch::with_capacity(COMPLETIONS_MAX),
            messages: VecDeque::new(),
            has_more: false,
            reported_stops: 0,
            is_stop_reported: false,
            recovers_at: Instant::default(),
            reserved: None,
        })
    }

    /// With what is released once the superblocks name no owner.
    pub(super) fn with_reservations(self, reserved: &Arc<PoolReservations>) -> Self {
        Self { reserved: Some(Arc::clone(reserved)), ..self }
    }

    /// Runs until it is stopped; then makes everything that was written durable, unless that takes
    /// too long, and ends.
    pub(super) fn run(
        mut self,
        stop: &tenmil_linux::StopFlag,
        clock: &Clock,
        sleeper: &mut Sleeper,
        closing_max: Span,
    ) {
        if let WakeSource::Descriptor(descriptor) = self.backend.wake_source() {
            // Without it, sleeps are short.
            let _ = sleeper.sources().add_source(descriptor, 0);
        }
        while !stop.is_stopped() {
            if !self.run_iteration(clock.now()) {
                self.sleep(stop, clock, sleeper);
            }
            if std::mem::take(&mut self.has_more)
                && let WakeSource::Descriptor(descriptor) = self.backend.wake_source()
            {
                // Without it, sleeps are short.
                let _ = sleeper.sources().add_source(descriptor, 0);
            }
        }
        let until = clock.now().after(closing_max);
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_to_submit();
        state.submit_request(&self.inbox, 0, PoolRequest::Release);
        shared.dispatch_actions(&mut state);
        drop(state);
        while self.messages.is_empty() && clock.now() < until {
            self.run_iteration(clock.now());
        }
        let is_released = matches!(self.messages.front(), Some(ClientMessage::Ended(_, Ok(_))));
        if let Some(reserved) = self.reserved.take_if(|_| is_released) {
            reserved.release();
        }
        if let WakeSource::Descriptor(descriptor) = self.backend.wake_source() {
            let _ = sleeper.sources().remove_source(descriptor);
        }
        shared.unregister_client(&self.inbox, core::iter::empty());
    }

    /// One iteration. Returns false if there was nothing to do.
    fn run_iteration(&mut self, now: Instant) -> bool {
        if let Some(new_events) = self.take_work() {
            new_events.emit();
        }
        self.retry_recovery_if_due(now);
        self.retry_failed_io(now);
        self.add_device_channels();
        let mut did = false;
        while let Some(action) = self.waiting.pop_front() {
            if !self.start_action(&action) {
                self.waiting.push_front(action);
                break;
            }
            did = true;
        }
        if !self.queue.is_empty() {
            let taken = self.backend.submit(now, self.queue.make_contiguous(), &self.table);
            self.queue.drain(..taken);
            did |= taken > 0;
        }
        self.backend.flush_submissions();
        self.backend.poll(now, &mut self.completions);
        did |= self.handle_device_completions(now);
        // Here also without readers; the pages read are durable, whatever was lost.
        if self.shared.has_unrecovered_loss(&*self.backend) {
            self.shared.handle_loss();
        }
        did
    }

    /// Takes new work. Returns a capacity event if the state has changed. Checked here at least once a
    /// second, and not on the I/O path.
    fn take_work(&mut self) -> Option<CapacityEvent> {
        let mut state = self.shared.lock();
        state.take_page_actions(&mut self.waiting);
        state.take_messages(&self.inbox, &mut self.messages);
        let (stops, stopped) = (state.store.device_error_stop_count(), state.store.is_stopped());
        let is_event = stops > self.reported_stops || (self.is_stop_reported && !stopped);
        if let Some(why) = state.store.last_stop_error().filter(|_| is_event) {
            let recovered = (!stopped).then(|| state.store.generation());
            let (device, store, why) = (self.device.clone(), state.store.name(), why.clone());
            drop(state);
            let new_events = PoolStopEvent { device, store, why, recovered };
            if stops > self.reported_stops && recovered.is_some() && !self.is_stop_reported {
                // It has recovered before the stop could be reported.
                PoolStopEvent { recovered: None, ..new_events.clone() }.emit();
            }
            (self.reported_stops, self.is_stop_reported) = (stops, stopped);
            new_events.emit();
            return None;
        }
        let notice = capacity_events::has_subscriber().then(|| state.store.next_notice())??;
        Some(CapacityEvent::new(&self.device, state.store.name(), &notice))
    }

    /// While the pool is stopped, retries the recovery at intervals, and reports ended reads to the pool.
    fn retry_recovery_if_due(&mut self, now: Instant) {
        if !self.is_stop_reported {
            self.recovers_at = now.after(RECOVER_AFTER);
            return;
        }
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_to_submit();
        if !state.store.is_recovering() && now >= self.recovers_at {
            self.recovers_at = now.after(RECOVER_AFTER);
            state.store.start_recovery();
        }
        shared.dispatch_actions(&mut state);
    }

    /// Repeats I/O that failed with a transport error.
    fn retry_failed_io(&mut self, now: Instant) {
        for place in 0..SMALL + LARGE {
            let job = &mut self.jobs[place as usize];
            if job.again_at.is_none_or(|at| at > now) {
                continue;
            }
            (job.again_at, job.status, job.tries) = (None, IoStatus::SUCCESS, job.tries + 1);
            let (operation, at, len) = job.work;
            if operation == Operation::Flush {
                self.queue_request(place, operation, 0, Segment::default());
            } else {
                let memory = self.entry_segment(place).slice(0, len).unwrap_or_default();
                self.queue_parts(place, operation, at, memory);
            }
        }
    }

    /// Adds channels to new devices. Other messages are the response to the last flush, and stay in the
    /// queue.
    fn add_device_channels(&mut self) {
        for note in std::mem::take(&mut self.messages) {
            let ClientMessage::More(more) = note else {
                self.messages.push_back(note);
                continue;
            };
            let Ok(none) = MissingDevice(self.backend.limits().clone()).channel() else { continue };
            let below = std::mem::replace(&mut self.backend, none);
            let owed: usize = self.jobs.iter().map(|job| job.left as usize).sum();
            self.geometry.request_pages = self.geometry.request_pages.min(more.request_pages);
            self.backend = more.combine_with_previous(below, owed - self.queue.len());
            self.has_more = true;
        }
    }

    /// Sleeps until there is work.
    fn sleep(&mut self, stop: &tenmil_linux::StopFlag, clock: &Clock, sleeper: &mut Sleeper) {
        let under_way = self.jobs.iter().any(|job| job.left > 0);
        let is_silent = matches!(self.backend.wake_source(), WakeSource::None);
        if under_way && is_silent {
            return tenmil_linux::named_thread::yield_cpu();
        }
        // The sleep is announced before the queues are checked: work that is queued in between ends it at
        // once.
        sleeper.announce_sleep();
        let stuck = self.waiting.len();
        self.shared.lock().take_page_actions(&mut self.waiting);
        let has_work = self.waiting.len() > stuck || !self.queue.is_empty() || stop.is_stopped();
        let busy_below = !is_silent && self.backend.arm();
        if has_work || busy_below {
            sleeper.cancel_sleep();
        } else {
            let most = if self.shared.lock().store.is_recovering() {
                SLEEP_RECOVERING
            } else if self.jobs.iter().any(|job| job.again_at.is_some()) {
                TRY_AGAIN_AFTER
            } else {
                SLEEP_MAX
            };
            let left = self.backend.wake_at().since(clock.now()).min(most);
            sleeper.sleep_until_ready(left, &mut Vec::new());
        }
        self.backend.disarm();
    }

    /// Starts an action. Returns false if there is no free entry.
    fn start_action(&mut self, action: &DeviceAction) -> bool {
        let (io, at, bytes, operation) = match action {
            DeviceAction::ReadSlots { io } => return self.start_superblock_read(*io),
            DeviceAction::ReadPage { io, at } => (*io, *at, &[][..], Operation::Read),
            DeviceAction::WritePages { io, at, bytes } => (*io, *at, &bytes[..], Operation::Write),
            DeviceAction::Flush { io } => (*io, 0, &[][..], Operation::Flush),
            // These are executed by the clients.
            DeviceAction::ReadData { .. }
            | DeviceAction::ReadParent { .. }
            | DeviceAction::WriteData { .. }
            | DeviceAction::Zero { .. } => return true,
        };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).max(PAGE_BYTES);
        let free = if len > PAGE_BYTES { &mut self.large } else { &mut self.small };
        let Some(place) = free.pop() else { return false };
        let memory = self.entry_segment(place).slice(0, len).unwrap_or_default();
        let reads = operation == Operation::Read;
        let work = (operation, at, len);
        self.jobs[place as usize] = PendingIo { io, reads, work, ..PendingIo::NONE };
        if operation == Operation::Flush {
            self.queue_request(place, operation, 0, Segment::default());
        } else if operation == Operation::Write && self.regions.store(memory, bytes).is_err() {
            let job = &mut self.jobs[place as usize];
            job.status = IoStatus::DATA_TRANSFER_ERROR;
            self.report_io_result(place, None);
        } else {
            self.queue_parts(place, operation, at, memory);
        }
        true
    }

    /// Starts to read the superblocks at the start.
    fn start_superblock_read(&mut self, io: u64) -> bool {
        let Some(place) = self.large.pop() else { return false };
        let memory = self.entry_segment(place).slice(0, SLOTS_BYTES).unwrap_or_default();
        let work = (Operation::Read, 0, SLOTS_BYTES);
        self.jobs[place as usize] = PendingIo { io, reads: true, work, ..PendingIo::NONE };
        match self.shared.accept_losses_before_reread(&mut *self.backend) {
            Ok(()) => self.queue_parts(place, Operation::Read, 0, memory),
            Err(why) => {
                self.jobs[place as usize].status = IoStatus::WRITE_FAULT;
                self.report_io_result(place, Some(why));
            }
        }
        true
    }

    /// Splits a transfer by the request limit of the device.
    fn queue_parts(&mut self, place: u32, operation: Operation, at: u64, memory: Segment) {
        let step = self.geometry.request_pages.min(LARGE_PAGES) * PAGE_BYTES;
        let mut done = 0;
        while done < memory.len_bytes {
            let len = step.min(memory.len_bytes - done);
            let part = memory.slice(done, len).unwrap_or_default();
            self.queue_request(place, operation, at + u64::from(done / PAGE_BYTES), part);
            done += len;
        }
    }

    fn queue_request(&mut self, place: u32, operation: Operation, at: u64, memory: Segment) {
        let job = &mut self.jobs[place as usize];
        let segment_first = place * LARGE_PAGES + job.left;
        job.left += 1;
        self.table[segment_first as usize] = memory;
        let moves = operation != Operation::Flush;
        self.queue.push_back(Request {
            token: place.into(),
            lba: at * self.geometry.blocks_in_page,
            operand: 0,
            segment_first,
            blocks: memory.len_bytes / self.geometry.block_size,
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        });
    }

    /// The memory of an entry.
    fn entry_segment(&self, place: u32) -> Segment {
        let (first, pages) = match place.checked_sub(SMALL) {
            None => (place, 1),
            Some(large) => (SMALL + large * LARGE_PAGES, LARGE_PAGES),
        };
        let (at, len_bytes) = (first * PAGE_BYTES, pages * PAGE_BYTES);
        self.entry_memory.segment().slice(at, len_bytes).unwrap_or_default()
    }

    /// Handles completions of the device. Returns false if none has ended.
    fn handle_device_completions(&mut self, now: Instant) -> bool {
        let mut ended = Vec::new();
        for completion in self.completions.drain() {
            let Ok(place) = u32::try_from(completion.token) else { continue };
            let job = &mut self.jobs[place as usize];
            job.left -= 1;
            if !completion.status.is_success() {
                job.status = completion.status;
            }
            if job.left == 0 && is_retryable_path_error(job) {
                job.again_at = Some(now.after(TRY_AGAIN_AFTER));
            } else if job.left == 0 {
                ended.push(place);
            }
        }
        ended.iter().for_each(|place| self.report_io_result(*place, None));
        !ended.is_empty()
    }

    /// Reports the result of an action to the pool, and frees its entry. `unread` is why the durable state
    /// cannot be read again.
    fn report_io_result(&mut self, place: u32, unread: Option<String>) {
        let PendingIo { io, reads, status, .. } = self.jobs[place as usize];
        let (mut page, mut slots) = ([0; PAGE], [[0; PAGE]; 2]);
        // Single pages are read into entries for one page; other reads are of superblocks.
        let read = if place < SMALL { &mut page[..] } else { slots.as_flattened_mut() };
        let len_bytes = u32::try_from(read.len()).unwrap_or(u32::MAX);
        let memory = self.entry_segment(place).slice(0, len_bytes).unwrap_or_default();
        let end = if !status.is_success() {
            ActionResult::Failed(status)
        } else if !reads {
            ActionResult::Done
        } else if self.regions.load(memory, read).is_err() {
            ActionResult::Failed(IoStatus::DATA_TRANSFER_ERROR)
        } else if place < SMALL {
            ActionResult::Read(&page)
        } else {
            ActionResult::Slots(&slots)
        };
        if place < SMALL {
            self.small.push(place)
        } else {
            self.large.push(place)
        }
        let mut state = self.shared.lock_to_submit();
        state.store.handle_action_result(io, end);
        if let Some(why) = unread {
            state.store.reject_recovery(why.to_string());
        }
        self.shared.dispatch_actions(&mut state);
    }
}

/// Whether the error is one of the path to the device, which may be temporary and implies no data loss:
/// any path status, and for a flush every status but Write Fault, which reports lost writes.
fn is_retryable_path_error(job: &PendingIo) -> bool {
    let status = job.status.0 & 0x7ff;
    let is_path =
        status >> 8 == 3 || [IoStatus::INTERRUPTED.0, IoStatus::ABORTED.0].contains(&status);
    let is_flush = job.work.0 == Operation::Flush && job.status != IoStatus::WRITE_FAULT;
    !job.status.is_success() && job.tries < TRIES_MAX && (is_path || is_flush)
}
