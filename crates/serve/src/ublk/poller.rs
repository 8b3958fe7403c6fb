//! ublk queue as a poller on a reactor.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;

use tenmil_base::{CompletionBatch, Instant, IoChannel, Segment, Span, WakeSource};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::ublk::FetchedTag;
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller, PollerWake};

use super::queue_driver::QueueDriver;
use super::server::UblkEvent;
use super::tags::{TagAction, TagTable};

/// ublk queue with its I/O channel. Its light thread ends when the kernel has aborted all of its tags.
pub(super) struct QueuePoller<D> {
    /// First field, so it is dropped first: afterwards the device no longer accesses the memory.
    backend: Box<dyn IoChannel>,
    driver: D,
    tags: TagTable,
    number: u16,
    fetched: Vec<FetchedTag>,
    completions: CompletionBatch,
    watch: PollSet,
    /// Mean latency of the I/O channel.
    latency: MeanLatency,
    /// Whether the initial fetch commands were issued, by this thread.
    has_fetched: bool,
    /// Zero copy state, until the first copied bytes have been reported.
    copy_report: Option<ZeroCopyBuffers>,
    event_sender: Sender<UblkEvent>,
    zero_copy: Option<ZeroCopyBuffers>,
    _memory: Region,
}

/// Largest number of completions polled at once.
const BATCH: usize = 256;
const KERNEL: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// Constructor arguments of a queue.
pub(super) struct QueueParts<D> {
    pub(super) number: u16,
    pub(super) driver: D,
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) tags: TagTable,
    pub(super) memory: Region,
    pub(super) zero_copy: Option<ZeroCopyBuffers>,
    pub(super) event_sender: Sender<UblkEvent>,
}

/// Buffers of the kernel's requests, and the region table that counts how much was copied
/// nevertheless.
#[derive(Clone)]
pub(super) struct ZeroCopyBuffers {
    pub(super) regions: RegionTable,
    pub(super) whole: Segment,
}

impl ZeroCopyBuffers {
    fn copied_bytes(&self) -> u64 {
        self.regions.copied_bytes(self.whole.region)
    }
}

impl<D: QueueDriver> QueuePoller<D> {
    pub(super) fn new(parts: QueueParts<D>) -> io::Result<Self> {
        let QueueParts { number, driver, backend, tags, memory, zero_copy, event_sender } = parts;
        let tags = tags.with_zero_copy(zero_copy.as_ref().map(|zero_copy| zero_copy.whole));
        let watch = PollSet::new()?;
        watch.add(driver.wake_source(), KERNEL, READABLE)?;
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        Ok(Self {
            backend,
            driver,
            number,
            fetched: Vec::with_capacity(usize::from(tags.queue_depth())),
            tags,
            completions: CompletionBatch::with_capacity(BATCH),
            watch,
            latency: MeanLatency::default(),
            has_fetched: false,
            copy_report: zero_copy.clone(),
            event_sender,
            zero_copy,
            _memory: memory,
        })
    }

    /// Wake sources: the kernel and the I/O channel.
    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        PollerWake::from_source(WakeSource::Descriptor(self.watch.as_fd()))
    }

    /// Whether polling is useless, because the kernel delivers all completions.
    pub(super) fn does_kernel_deliver_completions(&self) -> bool {
        self.backend.is_done_by_local_kernel()
    }

    /// Issues the fetch commands. The kernel binds a queue to the thread that issues them first.
    #[cold]
    fn issue_fetches(&mut self) {
        self.has_fetched = true;
        for tag in 0..self.tags.queue_depth() {
            self.driver.fetch(tag);
        }
    }

    /// Receives requests from the kernel.
    #[inline]
    fn receive(&mut self) -> usize {
        self.driver.poll(&mut self.fetched);
        let Self { fetched, tags, driver, .. } = self;
        let count = fetched.len();
        for FetchedTag { tag, result } in fetched.drain(..) {
            let action = tags.handle_fetched(tag, result, |tag| driver.descriptor(tag));
            run_tag_actions(action, tags, driver);
        }
        count
    }

    #[inline]
    fn submit(&mut self, now: Instant) -> usize {
        let (requests, segments) = self.tags.pending_requests();
        if requests.is_empty() {
            return 0;
        }
        let accepted = self.backend.submit(now, requests, segments);
        self.tags.record_submitted(accepted);
        accepted
    }

    #[inline]
    fn commit_completions(&mut self, now: Instant) -> usize {
        if self.tags.in_flight_requests() == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.completions);
        self.latency.record_completions(count);
        let Self { completions, tags, driver, .. } = self;
        for completion in completions.drain() {
            let action = tags.handle_completion(completion);
            run_tag_actions(action, tags, driver);
        }
        if self.copy_report.is_some() && count > 0 {
            self.report_unexpected_copies();
        }
        count
    }

    /// Reports once that data were copied in spite of zero copy.
    fn report_unexpected_copies(&mut self) {
        let Some(zero_copy) = self.copy_report.take_if(|zero_copy| zero_copy.copied_bytes() > 0)
        else {
            return;
        };
        let copied = zero_copy.copied_bytes();
        self.emit_event(UblkEvent::Error(format!(
            "queue {}: the device driver has copied {copied} bytes of zero-copy requests, because the \
             kernel rejected their buffers",
            self.number
        )));
    }

    /// Ends the light thread once the kernel has aborted all tags, and reports errors.
    fn handle_kernel_abort(&mut self, context: &mut Context<'_>) -> usize {
        if let Some(text) = self.tags.next_error() {
            self.emit_event(UblkEvent::Error(format!("queue {}: {text}", self.number)));
        }
        if self.tags.is_stopped_by_kernel() && self.tags.in_flight_requests() == 0 {
            context.request_thread_end();
            return 1;
        }
        0
    }

    /// Whether progress requires another iteration without any wake-up. A channel that refuses
    /// requests with nothing in flight gives no wake-up, unless it names a time to retry.
    fn needs_iteration(&self) -> bool {
        let refuses = self.has_unsubmitted()
            && self.tags.in_flight_requests() == 0
            && self.backend.wake_at() == Instant::NEVER;
        refuses || !self.has_fetched
    }

    fn has_unsubmitted(&self) -> bool {
        !self.tags.pending_requests().0.is_empty()
    }

    fn emit_event(&self, new_events: UblkEvent) {
        // The receiver may be gone; then the event is dropped.
        let _ = self.event_sender.send(new_events);
    }
}

/// Executes the actions of a tag until there is none.
#[inline]
fn run_tag_actions(mut action: TagAction, tags: &mut TagTable, driver: &mut impl QueueDriver) {
    loop {
        action = match action {
            TagAction::Nothing => return,
            TagAction::CopyIn { tag, into } => {
                tags.handle_copy_done(tag, driver.copy_from_kernel(tag, into))
            }
            TagAction::CopyOut { tag, from } => {
                tags.handle_copy_done(tag, driver.copy_to_kernel(tag, from))
            }
            TagAction::Commit { tag, result } => return driver.commit_and_fetch(tag, result),
        }
    }
}

impl<D: QueueDriver> Poller for QueuePoller<D> {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        self.latency.account_in_flight(now, self.tags.in_flight_requests());
        let mut count = 0;
        if !self.has_fetched {
            self.issue_fetches();
            count += 1;
        }
        count += self.receive();
        count += self.submit(now);
        count += self.commit_completions(now);
        count += self.handle_kernel_abort(context);
        PollResult::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush_submissions();
        self.driver.flush();
    }

    fn arm(&mut self) -> PollResult {
        // Arm both in any case: a stale signal that was not consumed would end every wait at once.
        let has_answer = self.backend.arm();
        let has_request = self.driver.arm();
        let stays_awake = has_request
            || self.needs_iteration()
            || (self.tags.in_flight_requests() > 0 && has_answer);
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
    }

    fn wake_at(&self) -> Instant {
        let is_waiting = self.tags.in_flight_requests() > 0 || self.has_unsubmitted();
        if is_waiting { self.backend.wake_at() } else { Instant::NEVER }
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| self.tags.in_flight_requests() > 0)
    }

    /// Detaches once everything has completed. The light thread never migrates: it is pinned.
    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.tags.in_flight_requests() == 0
    }
}

impl<D> Drop for QueuePoller<D> {
    fn drop(&mut self) {
        let copied = self.zero_copy.as_ref().map_or(0, ZeroCopyBuffers::copied_bytes);
        let done = self.tags.completed_stats().move_to_copied(copied);
        let _ = self.event_sender.send(UblkEvent::QueueEnded { queue: self.number, done });
    }
}
