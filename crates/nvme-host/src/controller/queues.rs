//! I/O queue pairs: creation, resumption after a reset, and deletion, with one state machine per queue
//! pair.
//!
//! ```text
//!   Wanted --> CompletionAwaited --> SubmissionAwaited --> Running --> Draining
//!     ^               '-- failed         '-- failed: RollingBack         |
//!     '---------------- reset, once the owner has released -----'        v
//!        gone <-- CompletionDeletionAwaited <-- SubmissionDeletionAwaited
//! ```

use tenmil_base::{Dma, Doorbell, Instant, IoCompletion, IoStatus, Mmio};
use tenmil_wire::admin::{CreateIoCompletionQueue, CreateIoSubmissionQueue, QueuePriority};
use tenmil_wire::admin::{DeleteIoCompletionQueue, DeleteIoSubmissionQueue};
use tenmil_wire::register::offset;
use tenmil_wire::{Command, Status, TypedCommand};

use super::admin::Purpose;
use super::{Controller, Phase};
use crate::error::{RequestError, ResetCause};
use crate::event::Event;
use crate::fast_path::FastPathOptions;
use crate::queue_link::{ControllerLinkEnd, QueueLinkEnd, QueueState, link};
use crate::queue_pair::{
    DoorbellSide, QueueDoorbell, QueueMemory, QueuePair, QueueSetup, Rings, ShadowSlot,
};

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
pub(super) struct IoQueue<D: Dma, B: Doorbell> {
    pub(super) id: u16,
    pub(super) link: ControllerLinkEnd,
    memory: QueueMemory,
    vector: Option<u16>,
    /// The queue pair, until its owner takes it.
    pair: Option<QueuePair<Rings<D, B>>>,
    progress: QueueProgress,
    has_run: bool,
}

/// Queue pair deleted from the device, whose owner may still access its rings.
#[derive(Debug)]
pub(super) struct RetiredQueue {
    link: ControllerLinkEnd,
    memory: QueueMemory,
}

/// State of creation and deletion, named after the result that they wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueProgress {
    /// The owner's release of the rings, and a ready controller.
    Wanted,
    CompletionAwaited,
    SubmissionAwaited,
    /// Nothing.
    Running,
    /// Deletion of the completion queue, after the submission queue could not be created.
    RollingBack(Status),
    /// Completion of all commands in flight.
    Draining {
        until: Instant,
    },
    SubmissionDeletionAwaited,
    CompletionDeletionAwaited,
}

impl<M: Mmio, D: Dma> Controller<M, D> {
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
        let (controller_end, queue_end) = link(id);
        let (memory, kept_out) = self.allocate_rings(options.depth);
        let memory = memory
            .ok_or(RequestError::Memory { len_bytes: options.depth.saturating_mul(64 + 16) })?;
        let pair = match self.set_up(id, memory, queue_end, options.techniques) {
            Ok(pair) => pair,
            Err(refusal) => {
                self.buffer.release(&self.dma, memory);
                return Err(refusal);
            }
        };
        if let Some(why) = kept_out {
            self.tell(Event::RingInHostMemory { id, why });
        }
        // An owner may have failed a flush for the loss already, on a queue pair that is gone.
        self.has_lost_writes &= self.queues.iter().all(|queue| queue.link.has_lost_writes());
        if self.has_lost_writes {
            controller_end.lose_writes();
        }
        self.queues.push(IoQueue {
            id,
            link: controller_end,
            memory,
            vector: options.vector,
            pair: Some(pair),
            progress: QueueProgress::Wanted,
            has_run: false,
        });
        self.advance_queues(now);
        Ok(id)
    }

    fn set_up(
        &mut self,
        id: u16,
        memory: QueueMemory,
        link: QueueLinkEnd,
        techniques: FastPathOptions,
    ) -> Result<QueuePair<Rings<D, M::Doorbell>>, RequestError> {
        let setup = QueueSetup {
            memory,
            submission_doorbell: self.doorbell(id, DoorbellSide::Submission)?,
            completion_doorbell: self.doorbell(id, DoorbellSide::Completion)?,
            link,
            timeout: self.options.io_timeout,
            techniques,
        };
        Ok(QueuePair::new(&self.dma, setup))
    }

    fn doorbell(
        &mut self,
        id: u16,
        side: DoorbellSide,
    ) -> Result<QueueDoorbell<D, M::Doorbell>, RequestError> {
        let stride = self.doorbell_stride;
        let at = match side {
            DoorbellSide::Submission => offset::submission_doorbell_offset(id, stride),
            DoorbellSide::Completion => offset::completion_doorbell_offset(id, stride),
        };
        let at = u32::try_from(at).map_err(|_| RequestError::NoSuchQueue { id })?;
        let register = self.mmio.doorbell(at);
        let Some([shadows, event_indexes]) =
            self.memory.shadows.filter(|_| self.uses_shadow_doorbells)
        else {
            return Ok(QueueDoorbell::Register(register));
        };
        let place = ShadowSlot::of(shadows, event_indexes, id, side, stride.into())
            .ok_or(RequestError::NoSuchQueue { id })?;
        Ok(QueueDoorbell::shadow(&self.dma, register, place))
    }

    /// Returns a created queue pair, which may move to another thread. Once per queue pair.
    pub fn take_queue_pair(&mut self, id: u16) -> Option<QueuePair<Rings<D, M::Doorbell>>> {
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
            // Two slots of the admin queue are reserved for these commands.
            if self.admin.count(|purpose| matches!(purpose, Purpose::Queue { .. })) >= 2 {
                return;
            }
            let is_ready = matches!(self.phase, Phase::Ready);
            let queue = &mut self.queues[index];
            if let Some(pair) = &mut queue.pair {
                pair.check_state(now);
            }
            let (id, link) = (queue.id, &queue.link);
            match queue.progress {
                QueueProgress::Wanted if is_ready && link.has_acknowledged() => {
                    let command = CreateIoCompletionQueue {
                        qid: id,
                        qsize: zero_based(queue.memory.completion_depth),
                        pc: true,
                        ien: queue.vector.is_some(),
                        iv: queue.vector.unwrap_or(0),
                    };
                    let Some(iova) = self.dma.iova(queue.memory.completion) else { continue };
                    queue.progress = QueueProgress::CompletionAwaited;
                    self.send(now, id, command.to_command().with_prp(iova, 0));
                }
                // The queue pair was dropped: completions of its commands in flight will never be read.
                QueueProgress::Running if link.is_dropped() => {
                    queue.progress = QueueProgress::Draining { until: now };
                }
                QueueProgress::Draining { until }
                    if now >= until || link.has_acknowledged() && link.in_flight() == 0 =>
                {
                    queue.progress = QueueProgress::SubmissionDeletionAwaited;
                    self.send(now, id, DeleteIoSubmissionQueue { qid: id }.to_command());
                }
                _ => {}
            }
        }
    }

    fn send(&mut self, now: Instant, id: u16, command: Command) {
        self.admin.send(now, Purpose::Queue { id }, command);
    }

    /// Handles the completion of a queue creation or deletion.
    pub(super) fn handle_queue_completion(&mut self, now: Instant, id: u16, answer: IoCompletion) {
        let status = Status(answer.status.0);
        let Some(index) = self.queues.iter().position(|queue| queue.id == id) else { return };
        let queue = &mut self.queues[index];
        match (queue.progress, answer.status) {
            (QueueProgress::CompletionAwaited, IoStatus::SUCCESS) => {
                let command = CreateIoSubmissionQueue {
                    qid: id,
                    qsize: zero_based(queue.memory.submission_depth),
                    pc: true,
                    qprio: QueuePriority::Medium,
                    cqid: id,
                    ..CreateIoSubmissionQueue::default()
                };
                // It has had an address since it was allocated.
                let iova = self.dma.iova(queue.memory.submission).unwrap_or(0);
                queue.progress = QueueProgress::SubmissionAwaited;
                self.send(now, id, command.to_command().with_prp(iova, 0));
            }
            (QueueProgress::CompletionAwaited, _) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (QueueProgress::SubmissionAwaited, IoStatus::SUCCESS) => self.run(index),
            (QueueProgress::SubmissionAwaited, _) => {
                queue.progress = QueueProgress::RollingBack(status);
                self.send(now, id, DeleteIoCompletionQueue { qid: id }.to_command());
            }
            (QueueProgress::RollingBack(status), IoStatus::SUCCESS) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (QueueProgress::SubmissionDeletionAwaited, IoStatus::SUCCESS) => {
                queue.progress = QueueProgress::CompletionDeletionAwaited;
                self.send(now, id, DeleteIoCompletionQueue { qid: id }.to_command());
            }
            (QueueProgress::CompletionDeletionAwaited, IoStatus::SUCCESS) => {
                self.retire(index, Event::QueuePairDeleted { id });
            }
            // A queue that was not deleted may still be written to; only a reset ends that.
            (_, _) => self.reset_because(now, ResetCause::QueueDeletionFailed { id, status }),
        }
    }

    fn run(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        queue.link.set_state(QueueState::Running);
        queue.progress = QueueProgress::Running;
        let id = queue.id;
        let has_run = core::mem::replace(&mut queue.has_run, true);
        self.tell(match has_run {
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
                QueueProgress::RollingBack(status) => {
                    self.retire(index, Event::QueuePairRefused { id, status });
                }
                QueueProgress::Draining { .. }
                | QueueProgress::SubmissionDeletionAwaited
                | QueueProgress::CompletionDeletionAwaited => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                _ if queue.link.is_dropped() => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                QueueProgress::Wanted
                | QueueProgress::CompletionAwaited
                | QueueProgress::SubmissionAwaited
                | QueueProgress::Running => {
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
            self.bury(queue);
        }
    }

    /// Removes a queue pair that the device has released and that is not created again.
    fn retire(&mut self, index: usize, event: Event) {
        let queue = self.queues.remove(index);
        self.bury(queue);
        self.tell(event);
    }

    fn bury(&mut self, queue: IoQueue<D, M::Doorbell>) {
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
                buffer.release(dma, retired.memory);
            }
            !is_free
        });
    }

    /// Whether a queue pair waits for something that no interrupt announces.
    pub(super) fn queues_are_moving(&self) -> bool {
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

/// Depth, 0's based as in the commands. It was checked when the queue pair was created.
fn zero_based(depth: u32) -> u16 {
    u16::try_from(depth - 1).unwrap_or(u16::MAX)
}
