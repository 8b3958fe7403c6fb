//! I/O queue pairs: created, resumed after a reset, deleted, each a small machine of its own.
//!
//! ```text
//!   Wanted --> CompletionAwaited --> SubmissionAwaited --> Running --> Draining
//!     ^               '-- refused        '-- refused: Withdrawing        |
//!     '---------------- reset, once the owner has let go ------'         v
//!        gone <-- CompletionDeletionAwaited <-- SubmissionDeletionAwaited
//! ```

use base::{Answer, Dma, Doorbell, Instant, Mmio, Outcome};
use wire::admin::{CreateIoCompletionQueue, CreateIoSubmissionQueue, QueuePriority};
use wire::admin::{DeleteIoCompletionQueue, DeleteIoSubmissionQueue};
use wire::register::offset;
use wire::{Command, Status, Typed};

use super::admin::Purpose;
use super::{Controller, Phase};
use crate::error::{Refusal, ResetCause};
use crate::event::Event;
use crate::link::{ControllerEnd, Order, QueueEnd, link};
use crate::queue_pair::{QueueDoorbell, QueueMemory, QueuePair, QueueSetup, ShadowPlace, Side};
use crate::techniques::Techniques;

/// An I/O queue pair to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Entries in each ring; one command fewer can be outstanding.
    pub depth: u32,
    /// The interrupt vector of its completions; `None` for a queue that is only polled.
    pub vector: Option<u16>,
    /// What makes it fast.
    pub techniques: Techniques,
}

/// A queue pair as the controller half sees it.
pub(super) struct IoQueue<D: Dma, B: Doorbell> {
    pub(super) id: u16,
    pub(super) link: ControllerEnd,
    memory: QueueMemory,
    vector: Option<u16>,
    /// Until its owner takes it.
    pair: Option<QueuePair<D, B>>,
    progress: Progress,
    has_run: bool,
}

/// A queue pair that is gone from the device, whose owner may still touch its rings.
#[derive(Debug)]
pub(super) struct Retired {
    link: ControllerEnd,
    memory: QueueMemory,
}

/// Named after what is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// That its owner lets go of the rings, and that the controller takes commands.
    Wanted,
    CompletionAwaited,
    SubmissionAwaited,
    /// Nothing.
    Running,
    /// The deletion of the completion queue, as the submission queue was refused.
    Withdrawing(Status),
    /// That everything in flight completes.
    Draining {
        until: Instant,
    },
    SubmissionDeletionAwaited,
    CompletionDeletionAwaited,
}

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Begins to create a queue pair and returns its identifier. [`Event::QueuePairCreated`] or
    /// [`Event::QueuePairRefused`] follows.
    pub fn create_queue_pair(
        &mut self,
        now: Instant,
        options: QueuePairOptions,
    ) -> Result<u16, Refusal> {
        let (Phase::Ready, Some(capabilities)) = (&self.phase, self.capabilities) else {
            return Err(Refusal::NotReady);
        };
        let (found, min, max) = (options.depth.into(), 2, capabilities.depth_max.into());
        if !(min..=max).contains(&found) {
            return Err(Refusal::OutOfRange { what: "queue depth", found, min, max });
        }
        let id = (1..=self.granted)
            .find(|id| self.queues.iter().all(|queue| queue.id != *id))
            .ok_or(Refusal::NoQueueLeft { granted: self.granted })?;
        let (controller_end, queue_end) = link(id);
        let (memory, kept_out) = self.allocate_rings(options.depth);
        let memory =
            memory.ok_or(Refusal::Memory { len_bytes: options.depth.saturating_mul(64 + 16) })?;
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
        // Its owner may have written over a queue pair that is gone.
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
            progress: Progress::Wanted,
            has_run: false,
        });
        self.move_queues(now);
        Ok(id)
    }

    fn set_up(
        &mut self,
        id: u16,
        memory: QueueMemory,
        link: QueueEnd,
        techniques: Techniques,
    ) -> Result<QueuePair<D, M::Doorbell>, Refusal> {
        let setup = QueueSetup {
            memory,
            submission_doorbell: self.doorbell(id, Side::Submission)?,
            completion_doorbell: self.doorbell(id, Side::Completion)?,
            link,
            timeout: self.options.io_timeout,
            techniques,
        };
        Ok(QueuePair::new(&self.dma, setup))
    }

    fn doorbell(&mut self, id: u16, side: Side) -> Result<QueueDoorbell<D, M::Doorbell>, Refusal> {
        let stride = self.doorbell_stride;
        let at = match side {
            Side::Submission => offset::submission_doorbell(id, stride),
            Side::Completion => offset::completion_doorbell(id, stride),
        };
        let at = u32::try_from(at).map_err(|_| Refusal::NoSuchQueue { id })?;
        let register = self.mmio.doorbell(at);
        let Some([shadows, event_indexes]) =
            self.memory.shadows.filter(|_| self.uses_shadow_doorbells)
        else {
            return Ok(QueueDoorbell::Register(register));
        };
        let place = ShadowPlace::of(shadows, event_indexes, id, side, stride.into())
            .ok_or(Refusal::NoSuchQueue { id })?;
        Ok(QueueDoorbell::shadow(&self.dma, register, place))
    }

    /// Hands over a queue pair that has been created: it may go to another thread. Once each.
    pub fn take_queue_pair(&mut self, id: u16) -> Option<QueuePair<D, M::Doorbell>> {
        let queue = self.queues.iter_mut().find(|queue| queue.id == id)?;
        if queue.progress == Progress::Running { queue.pair.take() } else { None }
    }

    /// Begins to delete a queue pair. It takes no more commands; what is in flight gets its time,
    /// and what is left then is ended by the controller. [`Event::QueuePairDeleted`] follows.
    pub fn delete_queue_pair(&mut self, now: Instant, id: u16) -> Result<(), Refusal> {
        let Phase::Ready = self.phase else { return Err(Refusal::NotReady) };
        let until = now.after(self.options.quiesce_timeout);
        let queue = self.queues.iter_mut().find(|queue| queue.id == id);
        let queue = queue.ok_or(Refusal::NoSuchQueue { id })?;
        if queue.progress != Progress::Running {
            return Err(Refusal::NotReady);
        }
        queue.link.give(Order::Quiesce);
        queue.progress = Progress::Draining { until };
        self.move_queues(now);
        Ok(())
    }

    /// Goes on with every queue pair that can.
    pub(super) fn move_queues(&mut self, now: Instant) {
        for index in 0..self.queues.len() {
            // Two slots of the admin queue are kept for this.
            if self.admin.count(|purpose| matches!(purpose, Purpose::Queue { .. })) >= 2 {
                return;
            }
            let is_ready = matches!(self.phase, Phase::Ready);
            let queue = &mut self.queues[index];
            if let Some(pair) = &mut queue.pair {
                pair.heed(now);
            }
            let (id, link) = (queue.id, &queue.link);
            match queue.progress {
                Progress::Wanted if is_ready && link.has_adopted() => {
                    let command = CreateIoCompletionQueue {
                        qid: id,
                        qsize: zero_based(queue.memory.completion_depth),
                        pc: true,
                        ien: queue.vector.is_some(),
                        iv: queue.vector.unwrap_or(0),
                    };
                    let Some(iova) = self.dma.iova(queue.memory.completion) else { continue };
                    queue.progress = Progress::CompletionAwaited;
                    self.send(now, id, command.to_command().with_prp(iova, 0));
                }
                // Nobody will ever know what becomes of what is in flight.
                Progress::Running if link.is_abandoned() => {
                    queue.progress = Progress::Draining { until: now };
                }
                Progress::Draining { until }
                    if now >= until || link.has_adopted() && link.in_flight() == 0 =>
                {
                    queue.progress = Progress::SubmissionDeletionAwaited;
                    self.send(now, id, DeleteIoSubmissionQueue { qid: id }.to_command());
                }
                _ => {}
            }
        }
    }

    fn send(&mut self, now: Instant, id: u16, command: Command) {
        self.admin.send(now, Purpose::Queue { id }, command);
    }

    /// One of the commands that make and unmake queues has ended.
    pub(super) fn handle_queue_answer(&mut self, now: Instant, id: u16, answer: Answer) {
        let status = Status(answer.outcome.0);
        let Some(index) = self.queues.iter().position(|queue| queue.id == id) else { return };
        let queue = &mut self.queues[index];
        match (queue.progress, answer.outcome) {
            (Progress::CompletionAwaited, Outcome::SUCCESS) => {
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
                queue.progress = Progress::SubmissionAwaited;
                self.send(now, id, command.to_command().with_prp(iova, 0));
            }
            (Progress::CompletionAwaited, _) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (Progress::SubmissionAwaited, Outcome::SUCCESS) => self.run(index),
            (Progress::SubmissionAwaited, _) => {
                queue.progress = Progress::Withdrawing(status);
                self.send(now, id, DeleteIoCompletionQueue { qid: id }.to_command());
            }
            (Progress::Withdrawing(status), Outcome::SUCCESS) => {
                self.retire(index, Event::QueuePairRefused { id, status });
            }
            (Progress::SubmissionDeletionAwaited, Outcome::SUCCESS) => {
                queue.progress = Progress::CompletionDeletionAwaited;
                self.send(now, id, DeleteIoCompletionQueue { qid: id }.to_command());
            }
            (Progress::CompletionDeletionAwaited, Outcome::SUCCESS) => {
                self.retire(index, Event::QueuePairDeleted { id });
            }
            // What was not deleted may still be written to: only a reset ends that.
            (_, _) => self.reset_because(now, ResetCause::DeletionRefused { id, status }),
        }
    }

    fn run(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        queue.link.give(Order::Run);
        queue.progress = Progress::Running;
        let id = queue.id;
        let has_run = core::mem::replace(&mut queue.has_run, true);
        self.tell(match has_run {
            false => Event::QueuePairCreated { id },
            true => Event::QueuePairResumed { id },
        });
    }

    /// A reset has taken all queues out of the device: those on their way out are gone, the others
    /// are wanted back.
    pub(super) fn release_queues(&mut self) {
        for index in (0..self.queues.len()).rev() {
            let queue = &mut self.queues[index];
            let id = queue.id;
            match queue.progress {
                Progress::Withdrawing(status) => {
                    self.retire(index, Event::QueuePairRefused { id, status });
                }
                Progress::Draining { .. }
                | Progress::SubmissionDeletionAwaited
                | Progress::CompletionDeletionAwaited => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                _ if queue.link.is_abandoned() => {
                    self.retire(index, Event::QueuePairDeleted { id });
                }
                Progress::Wanted
                | Progress::CompletionAwaited
                | Progress::SubmissionAwaited
                | Progress::Running => {
                    queue.link.give(Order::Release);
                    queue.progress = Progress::Wanted;
                }
            }
        }
    }

    /// The controller will not come back, so no queue pair will.
    pub(super) fn end_queues(&mut self) {
        self.admin.link.give(Order::Dead);
        for queue in core::mem::take(&mut self.queues) {
            self.bury(queue);
        }
    }

    /// The device has let go of a queue pair, and it is not wanted back.
    fn retire(&mut self, index: usize, event: Event) {
        let queue = self.queues.remove(index);
        self.bury(queue);
        self.tell(event);
    }

    fn bury(&mut self, queue: IoQueue<D, M::Doorbell>) {
        let IoQueue { link, memory, pair, .. } = queue;
        link.give(Order::Dead);
        drop(pair);
        self.retired.push(Retired { link, memory });
        self.release_retired();
    }

    /// Gives back the rings that nobody touches any more.
    pub(super) fn release_retired(&mut self) {
        let (dma, buffer) = (&self.dma, &mut self.buffer);
        self.retired.retain(|retired| {
            let is_free = retired.link.has_adopted() || retired.link.is_abandoned();
            if is_free {
                buffer.release(dma, retired.memory);
            }
            !is_free
        });
    }

    /// Whether a queue pair is waiting for something that comes without an interrupt.
    pub(super) fn queues_are_moving(&self) -> bool {
        self.queues.iter().any(|queue| matches!(queue.progress, Progress::Draining { .. }))
    }

    /// Begins to delete every queue pair that runs.
    pub(super) fn drain_queues(&mut self, until: Instant) {
        for queue in &mut self.queues {
            if queue.progress == Progress::Running {
                queue.link.give(Order::Quiesce);
                queue.progress = Progress::Draining { until };
            }
        }
    }

    /// Whether any queue pair still has something to come.
    pub(super) fn has_queues(&self) -> bool {
        self.queues.iter().any(|queue| queue.progress != Progress::Wanted)
    }
}

/// A depth as the commands carry it. It was checked when the queue pair was made.
fn zero_based(depth: u32) -> u16 {
    u16::try_from(depth - 1).unwrap_or(u16::MAX)
}
