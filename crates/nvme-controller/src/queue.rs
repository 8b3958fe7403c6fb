//! I/O queue in memory: one completion queue and the submission queues that use it, in front of an
//! [`Executor`].
//!
//! ```text
//!   tail doorbell ─▶ fetch ─▶ begin ─▶ Executor ─▶ block device
//!   head doorbell ─▶ free entries ◀─ post ◀─┘
//! ```
//!
//! Only a transport whose queues are rings in memory has one: [`MemoryTransport`](crate::transport::MemoryTransport).
//! An entry of the completion queue is reserved before a command is fetched: every fetched command can be
//! completed. A submission queue is a stream of the executor, of the same index.

/// Barrier used by `shadow`; the model of the rings substitutes a model checker's.
use core::sync::atomic as sync;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{AccessCompletion, AccessFault, AccessProgress, Instant, RingMemory};
use tenmil_wire::Command;

use crate::controller::WakeFn;
use crate::controller::transport_interface::{AdminResult, ErrorReport, InvalidDoorbell, IoTotals};
use crate::doorbell::DoorbellPage;
use crate::executor::{Executor, ExecutorConfig, ExecutorContext};
use crate::namespace::{NamespaceSnapshot, VersionedValueReader};
use ring::{CompletionQueue, SubmissionQueue};
use shadow_doorbell::ShadowDoorbell;

mod abort;
mod fetch;
pub(crate) mod ring;
mod shadow_doorbell;
#[cfg(test)]
mod tests;

/// Completion queue with its submission queues, nearly always exactly one.
#[derive(Debug)]
pub struct Queue<H: RingMemory> {
    executor: Executor<H>,
    submissions: Vec<SubmissionQueue<H::Entries>>,
    completion: CompletionQueue<H::Entries>,
    doorbells: Arc<DoorbellPage>,
    /// Maximum commands fetched from one submission queue at a time.
    burst: u32,
    /// Completions posted since the last poll reported them; some are posted between polls.
    posted: u32,
    /// Fetched command that cannot begin yet, with its submission queue. While it is held, no other
    /// command is fetched.
    held: Option<(usize, Command)>,
    /// Pending host accesses to a remote ring.
    ring_accesses: u32,
    is_paused: bool,
}

/// Configuration of a queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Completion queue identifier, which also identifies the queue within its controller.
    pub cqid: u16,
    /// Entries of the completion queue: at least 2.
    pub entries: u32,
    /// IOVA of its first entry.
    pub address: u64,
    /// Maximum commands fetched from one submission queue at a time.
    pub burst: u32,
    /// Configuration of its executor.
    pub executor: ExecutorConfig,
}

/// Result of one queue poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollStats {
    /// Commands fetched.
    pub taken: u32,
    /// Completions that became visible to the host since the last poll.
    pub posted: u32,
    /// Work was done, or more work is known to be pending: poll again at once.
    pub is_busy: bool,
    /// Commands are in flight.
    pub is_pending: bool,
}

/// Event from an I/O queue to its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueEvent {
    /// A command completed with an error status.
    Error(ErrorReport),
    /// The host wrote an invalid doorbell or an invalid value.
    InvalidDoorbell(InvalidDoorbell),
    /// Reservation command with its data, completed through [`Queue::complete_reservation_command`].
    Reservation {
        /// Identifies the command in the completion.
        ticket: u32,
        /// The command.
        command: Command,
        /// Parameter data: the reservation keys.
        bytes: Vec<u8>,
    },
    /// A block device could not be opened; its namespace is not ready.
    OpenFailed(String),
    /// Ring memory is not accessible: the queue has stopped, and the controller has to fail.
    RingFault(AccessFault),
}

/// Maximum bursts fetched in a poll, as long as every command completes synchronously.
const BURSTS: u32 = 4;
/// Maximum host-access completions handled in one poll.
const ENDED_MAX: usize = 256;

/// Access identifiers of the rings: the upper bits select the kind. Those with neither are the executor's.
const TICKET_FETCH: u32 = 1 << 30;
const TICKET_POST: u32 = 2 << 30;
const TICKET_KIND: u32 = 3 << 30;

impl<H: RingMemory> Queue<H> {
    /// Creates a queue without submission queues. `host` is a separate channel to host memory with its
    /// own access identifiers, `doorbells` are those of the controller.
    pub fn new(
        mut host: H,
        config: &QueueConfig,
        doorbells: Arc<DoorbellPage>,
        shared: ExecutorContext,
        namespaces: VersionedValueReader<NamespaceSnapshot>,
    ) -> Result<Self, AccessFault> {
        let completion =
            CompletionQueue::open(&mut host, config.cqid, config.entries, config.address)?;
        doorbells.clear_head(config.cqid);
        Ok(Self {
            executor: Executor::new(host, &config.executor, shared, namespaces),
            submissions: Vec::new(),
            completion,
            doorbells,
            burst: config.burst.max(1),
            posted: 0,
            held: None,
            ring_accesses: 0,
            is_paused: false,
        })
    }

    /// Completion queue identifier, which identifies the queue.
    pub fn cqid(&self) -> u16 {
        self.completion.id
    }

    /// Adds an empty submission queue.
    pub fn add_submission_queue(
        &mut self,
        sqid: u16,
        entries: u32,
        address: u64,
    ) -> Result<(), AccessFault> {
        let queue = SubmissionQueue::open(&mut self.executor.host, sqid, entries, address)?;
        self.doorbells.clear_tail(sqid);
        // Nearly every queue has one submission queue; a growing `Vec` would start with capacity for
        // four.
        self.submissions.reserve_exact(1);
        self.submissions.push(queue);
        self.executor.add_command_stream();
        Ok(())
    }

    /// Identifiers of the submission queues.
    pub fn submission_queues(&self) -> impl Iterator<Item = u16> + '_ {
        self.submissions.iter().map(|queue| queue.id)
    }

    /// Sets the shadow doorbell of submission queue `sqid`, or of the queue's head. Returns an error if
    /// the memory is not accessible, and `Ok(false)` if it is not shared.
    pub fn set_shadow(
        &mut self,
        sqid: Option<u16>,
        doorbell: u64,
        event_index: u64,
    ) -> Result<bool, AccessFault> {
        let Some(shadow) = ShadowDoorbell::open(&mut self.executor.host, doorbell, event_index)?
        else {
            return Ok(false);
        };
        match sqid {
            None => self.completion.set_shadow(shadow),
            Some(sqid) => {
                if let Some(queue) = self.submissions.iter_mut().find(|queue| queue.id == sqid) {
                    queue.set_shadow(shadow);
                }
            }
        }
        Ok(true)
    }

    /// Sets the callback that wakes the queue's thread when a queue of the subsystem with a fused pair
    /// waits for a poll of this one.
    pub fn set_waker(&self, waker: WakeFn) {
        self.executor.set_waker(waker);
    }

    /// Sets the maximum number of commands fetched from one submission queue at a time (feature 01h).
    pub fn set_arbitration_burst(&mut self, burst: u32) {
        self.burst = burst.max(1);
    }

    /// Stops or resumes fetching commands. Commands already fetched continue.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    /// Polls the queue: performs a bounded amount of work.
    pub fn poll(&mut self, now: Instant) -> PollStats {
        self.executor.begin_iteration(now);
        let mut is_busy = false;
        if self.executor.has_commands_in_contexts() || self.ring_accesses > 0 {
            is_busy |= self.poll_host_access(now);
            self.executor.retry_waiting(now);
            self.post_finished();
        }
        let mut taken = 0;
        for _ in 0..BURSTS {
            let count = self.fetch_burst(now);
            taken += count;
            if self.executor.in_flight_count() > 0 {
                self.executor.submit_all_channels(now);
                is_busy |= self.poll_executor(now);
            }
            self.post_finished();
            // A further burst is fetched only if all commands completed at once: the host can process
            // these completions meanwhile.
            if count < self.burst || self.executor.in_flight_count() > 0 {
                break;
            }
        }
        let is_pending = self.executor.in_flight_count() > 0 || self.ring_accesses > 0;
        is_busy |= taken > 0 || self.posted > 0;
        // A stopped queue does not access host memory anymore.
        if !is_busy && !self.executor.is_stopping() {
            is_busy = self.publish_event_indices();
        }
        PollStats { taken, posted: core::mem::take(&mut self.posted), is_busy, is_pending }
    }

    /// Next event for the controller.
    #[inline]
    pub fn next_event(&mut self) -> Option<QueueEvent> {
        self.executor.next_event()
    }

    /// Completes the command of [`QueueEvent::Reservation`], with the data of a report.
    pub fn complete_reservation_command(
        &mut self,
        now: Instant,
        ticket: u32,
        end: AdminResult,
        bytes: &[u8],
    ) {
        self.executor.complete_reservation_command(now, ticket, end, bytes);
        self.post_finished();
    }

    /// I/O totals since the last call.
    pub fn take_io_totals(&mut self) -> IoTotals {
        self.executor.take_io_totals()
    }

    /// Earliest deadline of the block devices that have requests in flight.
    pub fn wake_at(&self) -> Instant {
        self.executor.wake_at()
    }

    /// Whether events are pending.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.executor.has_events()
    }

    /// Enables completion signals before the thread sleeps: see [`Executor::arm_wakeup`].
    pub fn arm_wakeup(&mut self) -> bool {
        self.executor.arm_wakeup(self.held.is_some())
    }

    /// Whether, since [`arm_wakeup`](Self::arm_wakeup), something is pending that has no wake-up.
    pub fn has_pending_without_wakeup(&mut self) -> bool {
        self.executor.has_pending_without_wakeup(self.held.is_some())
    }

    /// Disables completion signals after the thread has woken.
    pub fn disarm_wakeup(&mut self) {
        self.executor.disarm_wakeup();
    }

    /// See [`Executor::for_each_new_wake_fd`].
    pub fn for_each_new_wake_fd(&mut self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.executor.for_each_new_wake_fd(each);
    }

    /// Handles completed host accesses. Returns whether there were any.
    fn poll_host_access(&mut self, now: Instant) -> bool {
        for count in 0..ENDED_MAX {
            let Some(ended) = self.executor.host.poll() else { return count > 0 };
            let number = ended.id.0 & !TICKET_KIND;
            match ended.id.0 & TICKET_KIND {
                TICKET_FETCH => self.handle_fetch_completion(ended, number),
                TICKET_POST => {
                    self.ring_accesses = self.ring_accesses.saturating_sub(1);
                    let fault = AccessFault { iova: 0, len_bytes: 16 };
                    self.handle_store_result(
                        ended.result.map(|()| AccessProgress::Done).map_err(|_| fault),
                    );
                }
                _ => self.executor.handle_access_completion(now, ended),
            }
        }
        true
    }

    fn handle_fetch_completion(&mut self, ended: AccessCompletion, sqid: u32) {
        self.ring_accesses = self.ring_accesses.saturating_sub(1);
        if let Err(fault) = ended.result {
            self.stop_after_ring_fault(fault);
        }
        let queue = self.submissions.iter_mut().find(|queue| u32::from(queue.id) == sqid);
        if let Some(queue) = queue {
            queue.handle_entries_read(&mut self.executor.host, ended);
        }
    }

    /// Publishes event indices before the queue goes idle. Returns whether new commands or completion
    /// entries appeared meanwhile.
    #[inline]
    fn publish_event_indices(&mut self) -> bool {
        self.executor.close_retired_channels();
        let mut has_new_work = false;
        for queue in &mut self.submissions {
            has_new_work |= queue.publish_event_index() && self.held.is_none();
        }
        // The head matters only to a queue that waits for free completion entries; it is then read, and
        // any entries it frees are worth another poll.
        let free_count = self.completion.free_count();
        if self.completion.publish_event_index()
            && free_count as usize <= self.executor.in_flight_count()
        {
            if self.completion.read_doorbell(&self.doorbells).is_some() {
                self.executor.push_event(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
            }
            has_new_work |= self.completion.free_count() > free_count;
        }
        has_new_work
    }

    /// Stops the queue after a ring access failed.
    #[cold]
    fn stop_after_ring_fault(&mut self, fault: AccessFault) {
        if !self.executor.is_stopping() {
            self.executor.set_stopping();
            self.executor.push_event(QueueEvent::RingFault(fault));
        }
    }
}
