//! Creation and deletion of I/O queues, and their shadow doorbells (Base 2.1 §5.2.1 to §5.2.5).

use tenmil_base::{Instant, Interrupts, RingMemory};
use tenmil_wire::Status;
use tenmil_wire::register::{CommandSetSelected, Configuration};

use super::controller_state::PAGE_SHIFT_MIN;
use super::{InterruptingQueue, MemoryTransport, QueueDeletion};
use crate::controller::transport_interface::{
    AdminResult, CreateCompletionQueue, CreateSubmissionQueue,
};
use crate::doorbell::STRIDE;
use crate::executor::{ExecutorConfig, ExecutorContext};
use crate::queue::{Queue, QueueConfig};

/// CC.IOSQES and CC.IOCQES as powers of two (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;

impl<H: RingMemory + Clone, I: Interrupts> MemoryTransport<H, I> {
    pub(super) fn create_completion_queue(
        &mut self,
        create: CreateCompletionQueue,
    ) -> Result<(), Status> {
        let cc = self.check_entry_size(|cc| cc.iocqes() == COMPLETION_ENTRY_SHIFT)?;
        if self.find_completion_queue(create.cqid).is_some() {
            return Err(Status::INVALID_QUEUE_IDENTIFIER.with_dnr());
        }
        let entries = u16::try_from(create.entries).unwrap_or(u16::MAX);
        let config = QueueConfig {
            cqid: create.cqid,
            entries: create.entries,
            address: create.address,
            burst: self.fetch_burst_max(),
            executor: ExecutorConfig {
                page_shift: PAGE_SHIFT_MIN + cc.mps(),
                transfer_bytes_max: self.controller.configuration().transfer_bytes_max,
                in_flight_max: self.config.in_flight_max.min(entries),
                contexts_max: self.config.contexts_max,
            },
        };
        let shared = ExecutorContext {
            fused_arbiter: self.controller.fused_arbiter(),
            is_write_through: self.is_write_through.clone(),
            buffers: self.buffers.clone(),
            io_stats: None,
        };
        let namespaces = self.controller.namespaces().reader();
        let doorbells = self.bar.doorbells().clone();
        let queue = Queue::new(self.host.clone(), &config, doorbells, shared, namespaces);
        let queue = queue.map_err(|_| Status::INVALID_FIELD.with_dnr())?;
        self.queues.push(InterruptingQueue { queue, vector: create.vector });
        self.queue_change_count = self.queue_change_count.wrapping_add(1);
        self.controller.note_queue_created();
        self.set_completion_shadow_doorbell(create.cqid)
    }

    pub(super) fn create_submission_queue(
        &mut self,
        create: CreateSubmissionQueue,
    ) -> Result<(), Status> {
        self.check_entry_size(|cc| cc.iosqes() == SUBMISSION_ENTRY_SHIFT)?;
        if self.completion_queue_of(create.sqid).is_some() {
            return Err(Status::INVALID_QUEUE_IDENTIFIER.with_dnr());
        }
        let is_deleting = self.is_deleting(create.cqid);
        let signalled = self.find_completion_queue(create.cqid).filter(|_| !is_deleting);
        let signalled = signalled.ok_or(Status::COMPLETION_QUEUE_INVALID.with_dnr())?;
        let added =
            signalled.queue.add_submission_queue(create.sqid, create.entries, create.address);
        added.map_err(|_| Status::INVALID_FIELD.with_dnr())?;
        self.queue_change_count = self.queue_change_count.wrapping_add(1);
        self.controller.note_queue_created();
        self.set_submission_shadow_doorbell(create.sqid)
    }

    /// Starts to delete a submission queue. Returns its completion queue.
    pub(super) fn close_submission_queue(
        &mut self,
        now: Instant,
        sqid: u16,
    ) -> Result<u16, Status> {
        let is_closing = self.deletions.iter().any(|deletion| {
            matches!(deletion, QueueDeletion::Submission { sqid: closing, .. } if *closing == sqid)
        });
        let cqid = self.completion_queue_of(sqid).filter(|_| !is_closing);
        let cqid = cqid.ok_or(Status::INVALID_QUEUE_IDENTIFIER.with_dnr())?;
        if let Some(signalled) = self.find_completion_queue(cqid) {
            signalled.queue.close_submission_queue(now, sqid);
        }
        Ok(cqid)
    }

    /// Checks that a completion queue may be deleted: it exists and no submission queue uses it.
    pub(super) fn check_delete_completion_queue(&mut self, cqid: u16) -> Result<(), Status> {
        let is_deleting = self.is_deleting(cqid);
        let signalled = self.find_completion_queue(cqid).filter(|_| !is_deleting);
        let signalled = signalled.ok_or(Status::INVALID_QUEUE_IDENTIFIER.with_dnr())?;
        if signalled.queue.submission_queues().next().is_some() {
            return Err(Status::INVALID_QUEUE_DELETION.with_dnr());
        }
        Ok(())
    }

    /// Completes the deletions of queues that have drained.
    #[inline]
    pub(super) fn finish_deletions(&mut self, now: Instant) -> bool {
        !self.deletions.is_empty() && self.advance_deletions(now)
    }

    fn advance_deletions(&mut self, now: Instant) -> bool {
        let mut ended = Vec::new();
        let Self { deletions, queues, controller, .. } = self;
        deletions.retain(|deletion| {
            let (cid, is_gone) = match *deletion {
                QueueDeletion::Submission { cid, cqid, sqid } => {
                    let signalled =
                        queues.iter_mut().find(|signalled| signalled.queue.cqid() == cqid);
                    (
                        cid,
                        signalled
                            .is_none_or(|signalled| signalled.queue.remove_submission_queue(sqid)),
                    )
                }
                QueueDeletion::Completion { cid, cqid } => {
                    let is_empty = |signalled: &InterruptingQueue<H>| {
                        signalled.queue.cqid() == cqid && signalled.queue.is_drained()
                    };
                    let at = queues.iter().position(is_empty);
                    if let Some(at) = at {
                        drop(queues.remove(at));
                        controller.drop_queue_reservation_commands(cqid);
                    }
                    (cid, at.is_some())
                }
            };
            ended.extend(is_gone.then_some(cid));
            !is_gone
        });
        self.queue_change_count =
            self.queue_change_count.wrapping_add(u32::from(!ended.is_empty()));
        for cid in &ended {
            self.complete_deferred_admin(now, *cid, AdminResult::OK);
        }
        !ended.is_empty()
    }

    pub(super) fn set_doorbell_buffers(
        &mut self,
        shadow: u64,
        event_index: u64,
    ) -> Result<(), Status> {
        self.shadow = Some((shadow, event_index));
        let cqids: Vec<u16> = self.queues.iter().map(|signalled| signalled.queue.cqid()).collect();
        let result = cqids.into_iter().try_for_each(|cqid| {
            self.set_completion_shadow_doorbell(cqid)?;
            let sqids: Vec<u16> = self
                .find_completion_queue(cqid)
                .map_or_else(Vec::new, |signalled| signalled.queue.submission_queues().collect());
            sqids.into_iter().try_for_each(|sqid| self.set_submission_shadow_doorbell(sqid))
        });
        if result.is_err() {
            self.shadow = None;
        }
        result
    }

    pub(super) fn try_abort_io_command(&mut self, now: Instant, sqid: u16, cid: u16) -> bool {
        self.queues.iter_mut().any(|signalled| signalled.queue.try_abort_command(now, sqid, cid))
    }

    /// Whether doorbell `index` belongs to an existing queue.
    pub fn has_doorbell(&self, index: usize) -> bool {
        let Ok(qid) = u16::try_from(index / 2) else { return false };
        match (qid, index % 2) {
            (0, _) => true,
            (_, 0) => self.completion_queue_of(qid).is_some(),
            _ => self.queues.iter().any(|signalled| signalled.queue.cqid() == qid),
        }
    }

    fn set_completion_shadow_doorbell(&mut self, cqid: u16) -> Result<(), Status> {
        self.set_shadow_doorbell(cqid, None, 2 * u64::from(cqid) + 1)
    }

    fn set_submission_shadow_doorbell(&mut self, sqid: u16) -> Result<(), Status> {
        let cqid = self.completion_queue_of(sqid).unwrap_or(0);
        self.set_shadow_doorbell(cqid, Some(sqid), 2 * u64::from(sqid))
    }

    /// Sets the shadow doorbell of a queue; shadow doorbells have the same stride as the registers.
    fn set_shadow_doorbell(
        &mut self,
        cqid: u16,
        sqid: Option<u16>,
        index: u64,
    ) -> Result<(), Status> {
        let Some((shadow, event_index)) = self.shadow else { return Ok(()) };
        let refused = Status::INVALID_FIELD.with_dnr();
        let place = |base: u64| base.checked_add(index * (4 << STRIDE)).ok_or(refused);
        let (shadow, event_index) = (place(shadow)?, place(event_index)?);
        let Some(signalled) = self.find_completion_queue(cqid) else { return Ok(()) };
        match signalled.queue.set_shadow(sqid, shadow, event_index) {
            Ok(true) => Ok(()),
            // Memory that is not shared cannot be polled.
            Ok(false) | Err(_) => Err(refused),
        }
    }

    fn check_entry_size(
        &self,
        is_right: impl Fn(&Configuration) -> bool,
    ) -> Result<Configuration, Status> {
        let cc = Configuration(self.bar.cc());
        if cc.css() == CommandSetSelected::AdminOnly {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if is_right(&cc) { Ok(cc) } else { Err(Status::INVALID_QUEUE_SIZE.with_dnr()) }
    }

    /// Whether a completion queue is being deleted.
    fn is_deleting(&self, cqid: u16) -> bool {
        self.deletions.iter().any(|deletion| {
            matches!(deletion, QueueDeletion::Completion { cqid: deleting, .. } if *deleting == cqid)
        })
    }

    pub(super) fn find_completion_queue(&mut self, cqid: u16) -> Option<&mut InterruptingQueue<H>> {
        self.queues.iter_mut().find(|signalled| signalled.queue.cqid() == cqid)
    }

    /// Completion queue used by a submission queue.
    fn completion_queue_of(&self, sqid: u16) -> Option<u16> {
        let has_it = |signalled: &&InterruptingQueue<H>| {
            signalled.queue.submission_queues().any(|id| id == sqid)
        };
        self.queues.iter().find(has_it).map(|signalled| signalled.queue.cqid())
    }
}
