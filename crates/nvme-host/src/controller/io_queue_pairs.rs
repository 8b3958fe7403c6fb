//! I/O queue pairs: creation, resumption after a reset, and deletion, with one state machine per queue
//! pair. The steps of a creation and of a deletion are those of its [transport](QueueTransports).
//!
//! ```text
//!   Wanted --> Creating, step by step --> Running --> Draining
//!     ^               '-- failed in a later step:        |
//!     |                   RollingBack                    v
//!     '-- reset, once the owner has released    Deleting, step by step --> gone
//! ```

use tenmil_base::{Dma, Instant, Mmio};
use tenmil_wire::Status;

use super::admin_queue_pair::AdminCommandPurpose;
use super::queue_transports::{IoQueueParams, IoQueueSetup, QueueStep, StepResult};
use super::{CmbUnavailable, Controller, Phase, QueueTransports};
use crate::error::{RequestError, ResetCause};
use crate::event::Event;
use crate::fast_path_options::FastPathOptions;
use crate::queue_link::{ControllerLinkEnd, QueueState, create_link};
use crate::queue_pair::{AttachmentOf, QueueMemory, QueuePair, Transport};

/// Options of a new I/O queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Entries of each ring; one command fewer can be outstanding.
    pub depth: u32,
    /// Interrupt vector for its completions; `None` for a queue that is only polled.
    pub vector: Option<u16>,
    /// Fast-path switches.
    pub techniques: FastPathOptions,
}

/// Queue pair, as tracked by the controller.
pub(super) struct IoQueue<T: Transport> {
    pub(super) id: u16,
    pub(super) link: ControllerLinkEnd<AttachmentOf<T>>,
    depth: u32,
    /// Its rings, if it has any.
    memory: Option<QueueMemory>,
    vector: Option<u16>,
    /// The queue pair, until its owner takes it.
    pair: Option<QueuePair<T>>,
    progress: QueueProgress,
    has_run: bool,
}

/// Queue pair deleted from the device, whose owner may still access its rings.
#[derive(Debug)]
pub(super) struct RetiredQueue<A> {
    link: ControllerLinkEnd<A>,
    memory: Option<QueueMemory>,
}

/// State of a queue pair, named for what it awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueProgress {
    /// The owner's release of the queue pair, and a ready controller.
    Wanted,
    /// The result of this step.
    Creating { step: u8 },
    /// Nothing.
    Running,
    /// The result of this step of the deletion, after the creation has failed with a status.
    RollingBack { step: u8, status: Status },
    /// Completion of all commands in flight.
    Draining { until: Instant },
    /// The result of this step.
    Deleting { step: u8 },
}

/// Maximum queues that are created or deleted at once: so many slots of the admin queue are reserved.
const CHANGING_MAX: usize = 2;

impl QueueProgress {
    /// Whether a step of a creation or deletion has been started.
    const fn is_changing(self) -> bool {
        matches!(self, Self::Creating { .. } | Self::RollingBack { .. } | Self::Deleting { .. })
    }
}

impl<T: Transport> IoQueue<T> {
    fn params(&self) -> IoQueueParams {
        let Self { id, depth, memory, vector, .. } = *self;
        IoQueueParams { id, depth, memory, vector }
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Starts to create a queue pair and returns its identifier. [`Event::QueuePairCreated`] or
    /// [`Event::QueuePairRefused`] follows.
    pub fn create_queue_pair(
        &mut self,
        now: Instant,
        options: QueuePairOptions,
    ) -> Result<u16, RequestError> {
        let (Phase::Ready, Some(capabilities)) = (&self.phase, self.capabilities) else {
            return Err(RequestError::NotReady);
        };
        let (found, min, max) = (options.depth.into(), 2, capabilities.depth_max.into());
        if !(min..=max).contains(&found) {
            return Err(RequestError::OutOfRange { what: "queue depth", found, min, max });
        }
        let id = (1..=self.granted)
            .find(|id| self.queues.iter().all(|queue| queue.id != *id))
            .ok_or(RequestError::QueueLimit { granted: self.granted })?;
        let (controller_end, queue_end) = create_link(id);
        let (memory, rings_in_host_memory) = self.allocate_queue_memory(options.depth)?;
        let setup = IoQueueSetup {
            id,
            depth: options.depth,
            memory,
            doorbell_stride: self.doorbell_stride,
            shadows: self.memory.shadows.filter(|_| self.uses_shadow_doorbells),
            techniques: options.techniques,
            signals: queue_end.signals().clone(),
        };
        let transport = match Q::create_io_transport(&mut self.mmio, &self.dma, setup) {
            Ok(transport) => transport,
            Err(refusal) => {
                memory.into_iter().for_each(|rings| self.buffer.release(&self.dma, rings));
                return Err(refusal);
            }
        };
        let pair = QueuePair::with_transport(transport, queue_end, self.options.io_timeout);
        if let Some(why) = rings_in_host_memory {
            self.push_event(Event::RingInHostMemory { id, why });
        }
        // An owner may have failed a flush for the loss already, on a queue pair that is gone.
        self.has_lost_writes &= self.queues.iter().all(|queue| queue.link.has_lost_writes());
        if self.has_lost_writes {
            controller_end.record_lost_writes();
        }
        self.queues.push(IoQueue {
            id,
            link: controller_end,
            depth: options.depth,
            memory,
            vector: options.vector,
            pair: Some(pair),
            progress: QueueProgress::Wanted,
            has_run: false,
        });
        self.advance_queues(now);
        Ok(id)
    }

    /// Memory of the rings of a queue, if it has any. Also returns why the submission ring is not in the
    /// controller memory buffer, if it was requested there.
    fn allocate_queue_memory(
        &mut self,
        depth: u32,
    ) -> Result<(Option<QueueMemory>, Option<CmbUnavailable>), RequestError> {
        if !Q::HAS_RINGS {
            return Ok((None, None));
        }
        let (memory, rings_in_host_memory) = self.allocate_rings(depth);
        let no_memory = RequestError::Memory { len_bytes: depth.saturating_mul(64 + 16) };
        Ok((Some(memory.ok_or(no_memory)?), rings_in_host_memory))
    }

    /// Returns a created queue pair, which may move to another thread. Once per queue pair.
    pub fn take_queue_pair(&mut self, id: u16) -> Option<QueuePair<Q::Io>> {
        let queue = self.queues.iter_mut().find(|queue| queue.id == id)?;
        if queue.progress == QueueProgress::Running { queue.pair.take() } else { None }
    }

    /// Starts to delete a queue pair. It accepts no more commands; commands in flight get time to
    /// complete, and the deletion aborts the rest. [`Event::QueuePairDeleted`] follows.
    pub fn delete_queue_pair(&mut self, now: Instant, id: u16) -> Result<(), RequestError> {
        let Phase::Ready = self.phase else { return Err(RequestError::NotReady) };
        let until = now.after(self.options.quiesce_timeout);
        let queue = self.queues.iter_mut().find(|queue| queue.id == id);
        let queue = queue.ok_or(RequestError::NoSuchQueue { id })?;
        if queue.progress != QueueProgress::Running {
            return Err(RequestError::NotReady);
        }
        queue.link.set_state(QueueState::Quiescing);
        queue.progress = QueueProgress::Draining { until };
        self.advance_queues(now);
        Ok(())
    }

    /// Advances every queue pair as far as possible.
    pub(super) fn advance_queues(&mut self, now: Instant) {
        for index in 0..self.queues.len() {
            let changing = self.queues.iter().filter(|queue| queue.progress.is_changing());
            if changing.count() >= CHANGING_MAX {
                return;
            }
            let is_ready = matches!(self.phase, Phase::Ready);
            let queue = &mut self.queues[index];
            if let Some(pair) = &mut queue.pair {
                pair.check_state(now);
            }
            let link = &queue.link;
            match queue.progress {
                QueueProgress::Wanted if is_ready && link.has_acknowledged() => {
                    self.start_creation(now, index, 0);
                }
                // The queue pair was dropped: completions of its commands in flight will never be read.
                QueueProgress::Running if link.is_dropped() => {
                    queue.progress = QueueProgress::Draining { until: now };
                }
                QueueProgress::Draining { until }
                    if now >= until || link.has_acknowledged() && link.in_flight() == 0 =>
                {
                    // Rings stay in use until they are deleted: the device completes there what the
                    // deletion aborts. A connection is closed instead.
                    if !Q::HAS_RINGS {
                        link.freeze();
                    }
                    self.start_deletion(now, index, QueueProgress::Deleting { step: 0 });
                }
                _ => {}
            }
        }
    }

    fn start_creation(&mut self, now: Instant, index: usize, step: u8) {
        let queue = &mut self.queues[index];
        queue.progress = QueueProgress::Creating { step };
        let params = queue.params();
        let started = Q::start_create_step(&mut self.mmio, &self.dma, params, step);
        self.start_step(now, params.id, started);
    }

    /// Starts the step of the deletion that `progress` awaits.
    fn start_deletion(&mut self, now: Instant, index: usize, progress: QueueProgress) {
        let queue = &mut self.queues[index];
        queue.progress = progress;
        let (QueueProgress::Deleting { step } | QueueProgress::RollingBack { step, .. }) = progress
        else {
            unreachable!("{progress:?} awaits no step of a deletion")
        };
        let id = queue.id;
        let started = Q::start_delete_step(&mut self.mmio, id, step);
        self.start_step(now, id, started);
    }

    fn start_step(&mut self, now: Instant, id: u16, step: QueueStep) {
        match step {
            QueueStep::Command(command) => {
                self.admin.submit_internal_with_data(
                    now,
                    AdminCommandPurpose::Queue { id },
                    command,
                    None,
                );
            }
            QueueStep::Started => {}
        }
    }

    /// Handles the result of a step of a queue's creation or deletion.
    pub(super) fn handle_queue_result(&mut self, now: Instant, id: u16, result: StepResult<Q::Io>) {
        let Some(index) = self.queues.iter().position(|queue| queue.id == id) else { return };
        match (self.queues[index].progress, result) {
            (QueueProgress::Creating { step }, Ok(_)) if step + 1 < Q::STEPS => {
                self.start_creation(now, index, step + 1);
            }
            (QueueProgress::Creating { .. }, Ok(attachment)) => {
                self.set_queue_running(index, attachment)
            }
            (QueueProgress::Creating { step: 0 }, Err(status)) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (QueueProgress::Creating { step }, Err(status)) => {
                let step = Q::STEPS - step;
                self.start_deletion(now, index, QueueProgress::RollingBack { step, status });
            }
            (QueueProgress::RollingBack { step, status }, Ok(_)) if step + 1 < Q::STEPS => {
                let progress = QueueProgress::RollingBack { step: step + 1, status };
                self.start_deletion(now, index, progress);
            }
            (QueueProgress::RollingBack { status, .. }, Ok(_)) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (QueueProgress::Deleting { step }, Ok(_)) if step + 1 < Q::STEPS => {
                self.start_deletion(now, index, QueueProgress::Deleting { step: step + 1 });
            }
            (QueueProgress::Deleting { .. }, Ok(_)) => {
                self.retire(index, Event::QueuePairDeleted { id });
            }
            // A queue that was not deleted may still be written to; only a reset ends that.
            (_, result) => {
                let status = result.err().unwrap_or(Status::SUCCESS);
                self.reset_with_cause(now, ResetCause::QueueDeletionFailed { id, status });
            }
        }
    }

    fn set_queue_running(&mut self, index: usize, attachment: Option<AttachmentOf<Q::Io>>) {
        let queue = &mut self.queues[index];
        queue.link.run(attachment);
        queue.progress = QueueProgress::Running;
        let id = queue.id;
        let has_run = core::mem::replace(&mut queue.has_run, true);
        self.push_event(match has_run {
            false => Event::QueuePairCreated { id },
            true => Event::QueuePairResumed { id },
        });
    }

    /// Handles a reset, which has removed all queues from the device: those being deleted are gone, the
    /// others will be created again.
    pub(super) fn release_queues(&mut self) {
        for index in (0..self.queues.len()).rev() {
            let queue = &mut self.queues[index];
            let id = queue.id;
            match queue.progress {
                QueueProgress::RollingBack { status, .. } => {
                    self.retire(index, Event::QueuePairRefused { id, status });
                }
                QueueProgress::Draining { .. } | QueueProgress::Deleting { .. } => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                _ if queue.link.is_dropped() => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                QueueProgress::Wanted | QueueProgress::Creating { .. } | QueueProgress::Running => {
                    queue.link.set_state(QueueState::Released);
                    queue.progress = QueueProgress::Wanted;
                }
            }
        }
    }

    /// Ends all queue pairs of a controller that will not return.
    pub(super) fn end_queues(&mut self) {
        self.admin.link.set_state(QueueState::Dead);
        for queue in core::mem::take(&mut self.queues) {
            self.release_queue(queue);
        }
    }

    /// Removes a queue pair that the device has released and that is not created again.
    fn retire(&mut self, index: usize, event: Event) {
        let queue = self.queues.remove(index);
        self.release_queue(queue);
        self.push_event(event);
    }

    fn release_queue(&mut self, queue: IoQueue<Q::Io>) {
        let IoQueue { link, memory, pair, .. } = queue;
        link.set_state(QueueState::Dead);
        drop(pair);
        self.retired.push(RetiredQueue { link, memory });
        self.release_retired();
    }

    /// Frees the rings that are not accessed anymore.
    pub(super) fn release_retired(&mut self) {
        let (dma, buffer) = (&self.dma, &mut self.buffer);
        self.retired.retain(|retired| {
            let is_free = retired.link.has_acknowledged() || retired.link.is_dropped();
            if is_free {
                retired.memory.into_iter().for_each(|rings| buffer.release(dma, rings));
            }
            !is_free
        });
    }

    /// Whether a queue pair waits for something that no interrupt announces.
    pub(super) fn needs_queue_polling(&self) -> bool {
        self.queues.iter().any(|queue| matches!(queue.progress, QueueProgress::Draining { .. }))
    }

    /// Starts to delete every running queue pair.
    pub(super) fn drain_queues(&mut self, until: Instant) {
        for queue in &mut self.queues {
            if queue.progress == QueueProgress::Running {
                queue.link.set_state(QueueState::Quiescing);
                queue.progress = QueueProgress::Draining { until };
            }
        }
    }

    /// Whether any queue pair exists in the device or is changing its state.
    pub(super) fn has_queues(&self) -> bool {
        self.queues.iter().any(|queue| queue.progress != QueueProgress::Wanted)
    }
}
