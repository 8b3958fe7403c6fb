//! Creation and deletion of I/O queues: the checks that do not depend on existing queues (Base 2.1 §5.2.1
//! to §5.2.4).

use tenmil_wire::admin::{
    CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue, QueuePriority,
};
use tenmil_wire::{Command, Status, TypedCommand};

use super::Controller;
use super::commands::{CommandResult, PAGE_BYTES};
use super::transport_interface::{
    AdminOutcome, CreateCompletionQueue, CreateSubmissionQueue, Priority,
};

/// Queue counts granted to a host (feature 07h).
#[derive(Clone, Copy, Debug)]
pub(super) struct GrantedQueues {
    pub(super) submission: u16,
    pub(super) completion: u16,
    /// A queue exists, so the counts are fixed until the next reset.
    pub(super) is_fixed: bool,
}

impl GrantedQueues {
    pub(super) const fn new(count_max: u16) -> Self {
        Self { submission: count_max, completion: count_max, is_fixed: false }
    }

    /// Grants the requested counts, up to `count_max` (Base 2.1 §5.1.25.2.1). Both are 0's based.
    pub(super) fn negotiate(&mut self, dword: u32, count_max: u16) -> Result<u32, Status> {
        let [sub_low, sub_high, comp_low, comp_high] = dword.to_le_bytes();
        let requested = [[sub_low, sub_high], [comp_low, comp_high]].map(u16::from_le_bytes);
        if requested.contains(&u16::MAX) {
            return Err(Status::INVALID_FIELD);
        }
        if self.is_fixed {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        [self.submission, self.completion] = requested.map(|count| (count + 1).min(count_max));
        Ok(self.completion_dword0())
    }

    /// Granted counts, both 0's based.
    pub(super) fn completion_dword0(&self) -> u32 {
        u32::from(self.submission - 1) | u32::from(self.completion - 1) << 16
    }
}

impl Controller {
    pub(super) fn check_create_completion_queue(&self, command: &Command) -> CommandResult {
        let create = CreateIoCompletionQueue::parse(command)?;
        check_queue_id(create.qid, self.granted.completion, Status::INVALID_QUEUE_IDENTIFIER)?;
        let entries = self.decode_qsize(create.qsize)?;
        let address = check_queue_address(create.pc, command.prp1())?;
        if create.ien && create.iv >= self.config.vectors {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        Ok(AdminOutcome::CreateCompletionQueue(CreateCompletionQueue {
            cqid: create.qid,
            entries,
            address,
            vector: create.ien.then_some(create.iv),
        }))
    }

    pub(super) fn check_create_submission_queue(&self, command: &Command) -> CommandResult {
        let create = CreateIoSubmissionQueue::parse(command)?;
        check_queue_id(create.qid, self.granted.submission, Status::INVALID_QUEUE_IDENTIFIER)?;
        let invalid_completion = if create.cqid == 0 || create.cqid > self.config.io_queues_max {
            Status::INVALID_QUEUE_IDENTIFIER
        } else {
            Status::COMPLETION_QUEUE_INVALID
        };
        check_queue_id(create.cqid, self.granted.completion, invalid_completion)?;
        let entries = self.decode_qsize(create.qsize)?;
        let address = check_queue_address(create.pc, command.prp1())?;
        if create.nvmsetid != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let priority = match create.qprio {
            QueuePriority::Urgent => Priority::Urgent,
            QueuePriority::High => Priority::High,
            QueuePriority::Medium => Priority::Medium,
            QueuePriority::Low | QueuePriority::Reserved(_) => Priority::Low,
        };
        Ok(AdminOutcome::CreateSubmissionQueue(CreateSubmissionQueue {
            sqid: create.qid,
            entries,
            address,
            cqid: create.cqid,
            priority,
        }))
    }

    pub(super) fn check_delete_submission_queue(&self, command: &Command) -> CommandResult {
        let sqid = DeleteIoSubmissionQueue::parse(command)?.qid;
        check_queue_id(sqid, self.granted.submission, Status::INVALID_QUEUE_IDENTIFIER)?;
        Ok(AdminOutcome::DeleteSubmissionQueue { sqid })
    }

    pub(super) fn check_delete_completion_queue(&self, command: &Command) -> CommandResult {
        let cqid = DeleteIoCompletionQueue::parse(command)?.qid;
        check_queue_id(cqid, self.granted.completion, Status::INVALID_QUEUE_IDENTIFIER)?;
        Ok(AdminOutcome::DeleteCompletionQueue { cqid })
    }

    /// Decodes QSIZE (0's based): at least two entries.
    fn decode_qsize(&self, qsize: u16) -> Result<u32, Status> {
        let entries = u32::from(qsize) + 1;
        if (2..=self.config.queue_entries_max).contains(&entries) {
            Ok(entries)
        } else {
            Err(Status::INVALID_QUEUE_SIZE)
        }
    }
}

fn check_queue_id(qid: u16, count_max: u16, status: Status) -> Result<(), Status> {
    if (1..=count_max).contains(&qid) { Ok(()) } else { Err(status) }
}

/// Checks that a queue is contiguous (CAP.CQR) and page-aligned.
fn check_queue_address(pc: bool, prp1: u64) -> Result<u64, Status> {
    if !pc {
        return Err(Status::INVALID_FIELD);
    }
    if prp1.is_multiple_of(u64::from(PAGE_BYTES)) {
        Ok(prp1)
    } else {
        Err(Status::PRP_OFFSET_INVALID)
    }
}
