//! I/O queues: what a driver does by commands on the admin ring becomes a connection of its own.
//!
//! ```text
//!   Create Completion Queue ──▶ its place is noted
//!   Create Submission Queue ──▶ dial, ICReq, Connect ──▶ handed over to the queue's thread ──▶ success
//!   Delete Submission Queue ──▶ the queue's thread closes ──▶ success; or not, if the controller may
//!                               still do what it was told: then only a reset ends that
//! ```

use std::sync::Arc;

use base::Instant;
use wire::admin::{
    CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue,
};
use wire::{Command, Status, Typed};

use super::Front;
use crate::berth::{Berth, Order, Serving};
use crate::lane::Lane;
use crate::opening::{NotOpened, Opened, Opening, Plan};
use crate::rings::{Bell, RingPlaces, Rings, slots_of};
use crate::silence::Silence;

/// An I/O queue, as the controller's thread knows it.
pub(super) struct Queue {
    berth: Arc<Berth>,
    places: RingPlaces,
    progress: Progress,
}

/// Named after what is awaited.
enum Progress {
    /// That it is created.
    Nothing,
    /// Its connection, to answer the command with this identifier.
    Connection { cid: u16, opening: Box<Opening> },
    /// Nothing: its thread serves it.
    Served,
    /// That its thread has closed it: to answer a command, or because all is over.
    Closed { cid: Option<u16> },
}

impl Queue {
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.progress {
            Progress::Connection { opening, .. } => opening.wake_at(now),
            Progress::Closed { .. } => now.after(base::Span::from_ms(1)),
            Progress::Nothing | Progress::Served => Instant::NEVER,
        }
    }

    fn is_closed(&self) -> bool {
        matches!(self.progress, Progress::Nothing)
    }
}

impl Front {
    /// The device's end of queue `id`, for the thread that has its other end. Once each.
    pub(crate) fn lane(&mut self, id: u16) -> Lane {
        Lane::new(Arc::clone(&self.queue(id).berth))
    }

    fn queue(&mut self, id: u16) -> &mut Queue {
        let news = &self.news;
        self.queues.entry(id).or_insert_with(|| Queue {
            berth: Berth::new(news),
            places: RingPlaces::default(),
            progress: Progress::Nothing,
        })
    }

    pub(super) fn handle_queue_command(&mut self, now: Instant, command: &Command) {
        let cid = command.cid();
        if let Ok(create) = CreateIoCompletionQueue::parse(command) {
            let places = &mut self.queue(create.qid).places;
            places.completion = command.prp1();
            places.completion_depth = u32::from(create.qsize) + 1;
            self.answer_here(cid, Status::SUCCESS);
        } else if let Ok(create) = CreateIoSubmissionQueue::parse(command) {
            let places = &mut self.queue(create.qid).places;
            places.submission = command.prp1();
            places.submission_depth = u32::from(create.qsize) + 1;
            self.open_queue(now, create.qid, cid);
        } else if let Ok(delete) = DeleteIoSubmissionQueue::parse(command) {
            let queue = self.queue(delete.qid);
            queue.berth.order(Order::Close);
            queue.progress = Progress::Closed { cid: Some(cid) };
        } else if DeleteIoCompletionQueue::parse(command).is_ok() {
            self.answer_here(cid, Status::SUCCESS);
        }
    }

    fn open_queue(&mut self, now: Instant, id: u16, cid: u16) {
        let data = self.connect_data(false);
        let depth = slots_of(self.queue(id).places.submission_depth);
        let in_capsule_bytes = self.learnt.in_capsule_bytes;
        let plan = Plan { queue: id, depth, in_capsule_bytes, data };
        self.counts.dialled += 1;
        let opening = Opening::begin(&mut *self.dial, &self.options, plan, now);
        self.queue(id).progress = Progress::Connection { cid, opening: Box::new(opening) };
    }

    /// Goes on with the queues that are being opened or closed.
    pub(super) fn turn_queues(&mut self, now: Instant) {
        let ids: Vec<u16> = self.queues.keys().copied().collect();
        for id in ids {
            let queue = self.queue(id);
            match &mut queue.progress {
                Progress::Connection { .. } => self.turn_opening(now, id),
                Progress::Closed { cid } => {
                    let cid = *cid;
                    let Some(closed) = queue.berth.closed() else { continue };
                    queue.progress = Progress::Nothing;
                    // Until now its thread may have gone on sending.
                    self.silent_since = now;
                    self.end_queue(cid, closed.may_linger);
                }
                Progress::Nothing | Progress::Served => {}
            }
        }
    }

    fn turn_opening(&mut self, now: Instant, id: u16) {
        let Self { queues, options, reach, .. } = self;
        let Some(queue) = queues.get_mut(&id) else { return };
        let Progress::Connection { cid, opening } = &mut queue.progress else { return };
        let Some(ended) = opening.turn(now, options, reach.pool()) else { return };
        let cid = *cid;
        queue.progress = Progress::Nothing;
        match ended {
            Ok(opened) => self.serve(now, id, cid, opened),
            // A controller whose queues cannot be connected is not there.
            Err(NotOpened { why, is_final: false }) => self.fail(now, why),
            Err(NotOpened { why, is_final: true }) => {
                self.why = Some(why);
                self.answer_here(cid, Status::INTERNAL_ERROR);
            }
        }
    }

    /// Hands a connection over to the thread of its queue.
    fn serve(&mut self, now: Instant, id: u16, cid: u16, opened: Opened) {
        let bell: Bell = self.bell(id);
        // The queue pair has let go of its rings, and rings nothing before it is told to run.
        base::Doorbell::ring(&mut bell.clone(), 0);
        let (memory, places) = (self.memory(), self.queue(id).places);
        let Some(rings) = Rings::new(memory, places, bell, id) else {
            return self.answer_here(cid, Status::INVALID_FIELD);
        };
        let Some(association) = self.association.clone() else {
            return self.answer_here(cid, Status::INTERNAL_ERROR);
        };
        let slots = slots_of(places.submission_depth);
        let silence = Silence::new(&self.options.policy, slots, now);
        let queue = self.queue(id);
        let exchange = *opened.exchange;
        queue.berth.order(Order::Serve(Box::new(Serving {
            rings,
            exchange,
            silence,
            association,
        })));
        queue.progress = Progress::Served;
        self.answer_here(cid, Status::SUCCESS);
    }

    /// A queue is closed, and with it perhaps something that may still be executed.
    fn end_queue(&mut self, cid: Option<u16>, may_linger: bool) {
        self.may_linger |= may_linger;
        match cid {
            Some(cid) if may_linger => self.answer_here(cid, Status::INTERNAL_ERROR),
            Some(cid) => self.answer_here(cid, Status::SUCCESS),
            None => {}
        }
    }

    /// Reports the connections as closed that queues have left, and whose memory nobody reads any more.
    pub(super) fn end_left(&mut self, now: Instant) {
        let Self { left, queues, .. } = self;
        for (id, _, closed) in left.extract_if(.., |(_, farewell, _)| farewell.is_over(now)) {
            if let Some(queue) = queues.get(&id) {
                queue.berth.report(closed);
            }
        }
    }

    /// Looks which queues were lost: with one of them goes the controller.
    pub(super) fn heed_queues(&mut self, now: Instant) {
        let mut lost = None;
        for (id, queue) in &mut self.queues {
            if let Some((farewell, closed)) = queue.berth.take_left() {
                self.left.push((*id, farewell, closed));
            }
            if !matches!(queue.progress, Progress::Served) {
                continue;
            }
            if let Some(closed) = queue.berth.lost() {
                self.may_linger |= closed.may_linger;
                queue.progress = Progress::Nothing;
                lost = lost.or(closed.lost);
            }
        }
        if let Some(why) = lost {
            self.fail(now, why);
        }
    }

    /// Has every queue closed.
    pub(super) fn close_queues(&mut self) {
        for queue in self.queues.values_mut() {
            match queue.progress {
                Progress::Connection { .. } => queue.progress = Progress::Nothing,
                Progress::Served => {
                    queue.berth.order(Order::Close);
                    queue.progress = Progress::Closed { cid: None };
                }
                Progress::Closed { .. } => queue.progress = Progress::Closed { cid: None },
                Progress::Nothing => {}
            }
        }
    }

    /// Looks whether those that were to close have.
    pub(super) fn note_closed_queues(&mut self) {
        for queue in self.queues.values_mut() {
            if matches!(queue.progress, Progress::Closed { .. }) && queue.berth.closed().is_some() {
                queue.progress = Progress::Nothing;
            }
        }
    }

    pub(super) fn are_queues_closed(&self) -> bool {
        self.queues.values().all(Queue::is_closed)
    }
}
