//! Virtqueue as a poller on a reactor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{CompletionBatch, Instant, IoChannel, Span, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::RemoteEventFd;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller, PollerWake};

use super::guest_memory_table::GuestMemoryTable;
use super::queue_mailbox::{QueueCommands, QueueEndState, QueueMailbox};
use super::request_table::{QueueFault, RequestTable};

/// Virtqueue with its I/O channel. Its light thread ends on command or after a ring error, once all
/// requests have completed.
pub(super) struct VirtqueuePoller {
    /// First field, so it is dropped first: afterwards the device no longer accesses the memory.
    backend: Box<dyn IoChannel>,
    /// `None` once nothing is accessed any more.
    work: Option<ActiveQueue>,
    /// Kick eventfd, if the driver has one.
    kick: Option<RemoteEventFd>,
    /// Call eventfd, if the driver has one.
    call: Option<RemoteEventFd>,
    mailbox: Arc<QueueMailbox>,
    phase: QueuePhase,
    completions: CompletionBatch,
    watch: PollSet,
    /// Mean latency of the I/O channel.
    latency: MeanLatency,
    iterations: u32,
}

/// Requests of the queue, and the memory they lie in.
struct ActiveQueue {
    slots: RequestTable<RegionTable>,
    table: Arc<GuestMemoryTable>,
}

#[derive(Debug, PartialEq, Eq)]
enum QueuePhase {
    /// Takes requests.
    Running,
    /// Takes no new requests and completes the outstanding ones.
    Draining,
    /// Completes nothing any more, for this reason.
    Failed(String),
}

/// Constructor arguments of a virtqueue.
pub(super) struct VirtqueueParts {
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) slots: RequestTable<RegionTable>,
    pub(super) table: Arc<GuestMemoryTable>,
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<RemoteEventFd>,
    pub(super) mailbox: Arc<QueueMailbox>,
}

/// Largest number of completions polled at once.
const BATCH: usize = 256;
const KICK: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };
/// Number of iterations between checks for truncated memory; a power of two.
const MEMORY_CHECK_INTERVAL: u32 = 256;

impl VirtqueuePoller {
    pub(super) fn new(parts: VirtqueueParts) -> io::Result<Self> {
        let VirtqueueParts { backend, slots, table, kick, call, mailbox } = parts;
        let watch = PollSet::new()?;
        let kick = kick.map(|kick| RemoteEventFd::new(kick.try_clone()?)).transpose()?;
        if let Some(kick) = &kick {
            watch.add(kick, KICK, READABLE)?;
        }
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        Ok(Self {
            backend,
            work: Some(ActiveQueue { slots, table }),
            kick,
            call,
            mailbox,
            phase: QueuePhase::Running,
            completions: CompletionBatch::with_capacity(BATCH),
            watch,
            latency: MeanLatency::default(),
            iterations: 0,
        })
    }

    /// Wake sources: the driver and the I/O channel.
    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        PollerWake::from_source(WakeSource::Descriptor(self.watch.as_fd()))
    }

    /// Whether polling is useless, because the kernel delivers the completions.
    pub(super) fn does_kernel_deliver_completions(&self) -> bool {
        self.backend.is_done_by_local_kernel()
    }

    fn in_flight_requests(&self) -> usize {
        self.work.as_ref().map_or(0, |work| work.slots.in_flight_requests())
    }

    #[cold]
    fn apply_commands(&mut self, QueueCommands { ends, call, block_count }: QueueCommands) {
        if let Some((work, block_count)) = self.work.as_mut().zip(block_count) {
            work.slots.set_block_count(block_count);
        }
        if let Some(call) = call {
            self.call = call;
            // An interrupt through the old eventfd may have been missed.
            self.signal_guest();
        }
        if ends && self.phase == QueuePhase::Running {
            self.phase = QueuePhase::Draining;
        }
    }

    fn signal_guest(&self) {
        if let Some(call) = &self.call {
            call.signal();
        }
    }

    /// Takes requests, submits them, and publishes completions.
    #[inline]
    fn process_requests(&mut self, now: Instant) -> Result<usize, QueueFault> {
        let Some(ActiveQueue { slots, table }) = &mut self.work else { return Ok(0) };
        let is_over = matches!(self.phase, QueuePhase::Failed(_));
        let mut count = 0;
        if !is_over {
            count +=
                slots.receive_chains(table.guest_memory(), self.phase == QueuePhase::Running)?;
        }
        let (requests, segments) = slots.pending_requests();
        if !requests.is_empty() {
            let taken = self.backend.submit(now, requests, segments);
            slots.record_submitted(taken);
            count += taken;
        }
        if slots.in_flight_requests() > 0 {
            let ended = self.backend.poll(now, &mut self.completions);
            self.latency.record_completions(ended);
            count += ended;
            let mut reported = Ok(());
            for completion in self.completions.drain() {
                // Every completion must be counted, also after one that failed.
                reported =
                    reported.and(slots.handle_completion(completion, is_over || reported.is_err()));
            }
            reported?;
        }
        if !is_over && slots.publish_used()? {
            self.signal_guest();
        }
        Ok(count)
    }

    /// Fails the queue: the ring is invalid or its memory is gone, so it is not accessed any more.
    #[cold]
    fn fail_queue(&mut self, why: String) {
        if let Some(work) = &mut self.work {
            work.slots.drop_unsubmitted();
        }
        if !matches!(self.phase, QueuePhase::Failed(_)) {
            self.phase = QueuePhase::Failed(why);
        }
    }

    /// Checks whether the front end has truncated memory, which explains any other error.
    fn fail_if_memory_truncated(&mut self) {
        let failed = self.work.as_ref().and_then(|work| work.table.truncated_address());
        if let Some(endpoint) = failed {
            self.fail_queue(format!(
                "memory at {endpoint:#x} was made shorter than it was when mapped"
            ));
        }
    }

    #[cold]
    fn fail_with_fault(&mut self, fault: QueueFault) {
        self.fail_if_memory_truncated();
        self.fail_queue(fault.to_string());
    }

    /// Releases everything once all requests have completed, and reports the end. Returns whether
    /// the queue has ended.
    fn end_if_drained(&mut self) -> bool {
        if self.phase == QueuePhase::Running {
            return false;
        }
        let Some(work) = self.work.take_if(|work| work.slots.is_drained()) else {
            return self.work.is_none();
        };
        let next = work.slots.vring_base();
        drop(work);
        self.kick = None;
        self.call = None;
        let why = match std::mem::replace(&mut self.phase, QueuePhase::Draining) {
            QueuePhase::Failed(why) => Some(why),
            _ => None,
        };
        self.mailbox.record_end(QueueEndState { next, why });
        true
    }
}

impl Poller for VirtqueuePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        self.latency.account_in_flight(now, self.in_flight_requests());
        if let Some(orders) = self.mailbox.commands.take() {
            self.apply_commands(orders);
        }
        let mut count = match self.process_requests(now) {
            Ok(count) => count,
            Err(fault) => {
                self.fail_with_fault(fault);
                1
            }
        };
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations & (MEMORY_CHECK_INTERVAL - 1) == 0 {
            self.fail_if_memory_truncated();
        }
        if self.end_if_drained() {
            context.request_thread_end();
            count += 1;
        }
        PollResult::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush_submissions();
    }

    fn arm(&mut self) -> PollResult {
        self.fail_if_memory_truncated();
        // Stale signals would end every wait at once.
        if let Some(kick) = &self.kick {
            kick.clear_signals();
        }
        let has_answer = self.backend.arm() && self.in_flight_requests() > 0;
        let is_running = self.phase == QueuePhase::Running;
        let mut stays_awake = has_answer || (is_running && self.kick.is_none());
        if let Some(ActiveQueue { slots, .. }) = &mut self.work {
            // A channel that refuses requests with nothing in flight gives no wake-up.
            let is_refused =
                !slots.pending_requests().0.is_empty() && slots.in_flight_requests() == 0;
            stays_awake |= is_refused && self.backend.wake_at() == Instant::NEVER;
            match slots.enable_kicks() {
                Ok(has_more) => stays_awake |= has_more && is_running,
                Err(fault) => self.fail_with_fault(fault),
            }
        }
        // A queue that ends with nothing in flight gets no further wake-up.
        stays_awake |= self.phase != QueuePhase::Running && self.in_flight_requests() == 0;
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        if let Some(ActiveQueue { slots, .. }) = &mut self.work
            && let Err(fault) = slots.disable_kicks()
        {
            self.fail_with_fault(fault);
        }
    }

    fn wake_at(&self) -> Instant {
        let is_waiting = self.work.as_ref().is_some_and(|work| !work.slots.is_drained());
        if is_waiting { self.backend.wake_at() } else { Instant::NEVER }
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| self.in_flight_requests() > 0)
    }

    fn try_detach(&mut self, parting: DetachReason) -> bool {
        if parting == DetachReason::Exiting && self.phase == QueuePhase::Running {
            self.phase = QueuePhase::Draining;
        }
        match parting {
            DetachReason::Migrating => self.in_flight_requests() == 0,
            DetachReason::Exiting => self.end_if_drained(),
        }
    }
}

impl Drop for VirtqueuePoller {
    /// Reports the end in any case.
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            let next = work.slots.vring_base();
            drop(work);
            self.mailbox
                .record_end(QueueEndState { next, why: Some("its thread has ended".to_owned()) });
        }
    }
}
