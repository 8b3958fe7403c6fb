//! Execution of admin commands for the memory transport, including the queue operations that the
//! controller requests.

use tenmil_base::{Instant, Interrupts, RingMemory};
use tenmil_wire::{AdminOpcode, Command, Status};

use super::admin_queue::AdminQueueRequest;
use super::{MemoryTransport, QueueDeletion};
use crate::controller::transport_interface::{AdminOutcome, AdminResult};

/// Maximum admin requests handled in one poll.
const ADMIN_MAX: usize = 16;

impl<H: RingMemory + Clone, I: Interrupts> MemoryTransport<H, I> {
    /// Polls the admin queue. Returns whether there was any work.
    #[inline]
    pub(super) fn poll_admin(&mut self, now: Instant) -> bool {
        let doorbells = self.bar.doorbells();
        let is_at_rest = self.admin.as_ref().is_none_or(|admin| admin.is_idle(doorbells));
        !is_at_rest && self.serve_admin(now)
    }

    #[cold]
    fn serve_admin(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        for _ in 0..ADMIN_MAX {
            let Some(admin) = &mut self.admin else { return is_busy };
            let Some(request) = admin.next_request(self.bar.doorbells()) else { break };
            is_busy = true;
            self.handle_admin_requests(now, Some(request));
        }
        is_busy |= self.signal_admin_vector();
        is_busy
    }

    /// Completes deferred commands: long ones, Asynchronous Event Requests, deletions, aborts.
    pub(super) fn poll_deferred_admin(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        while let Some(done) = self.controller.next_deferred_completion() {
            self.complete_deferred_admin(now, done.cid, done.end);
            is_busy = true;
        }
        while self.admin.as_ref().is_some_and(|admin| admin.has_event_requests()) {
            let Some(result) = self.controller.next_async_event_dword0() else { break };
            let Some(cid) = self.admin.as_mut().and_then(|admin| admin.take_event_request()) else {
                break;
            };
            self.complete_deferred_admin(now, cid, AdminResult::success_with(result));
            is_busy = true;
        }
        is_busy |= self.finish_deletions(now);
        if self.admin.as_ref().is_some_and(|admin| admin.access_fault().is_some()) {
            self.fail_controller(now, "the memory of the admin queue is not accessible");
        }
        is_busy
    }

    /// Completes a deferred command.
    pub(super) fn complete_deferred_admin(&mut self, now: Instant, cid: u16, end: AdminResult) {
        let request = self.admin.as_mut().and_then(|admin| admin.complete_deferred(cid, end));
        self.handle_admin_requests(now, request);
    }

    /// Handles a request of the admin queue, and the requests that follow from it.
    fn handle_admin_requests(&mut self, now: Instant, mut request: Option<AdminQueueRequest>) {
        while let Some(next) = request {
            request = match next {
                AdminQueueRequest::Data(command) => {
                    let data = self.controller.command_data_length(&command);
                    self.admin.as_mut().and_then(|admin| admin.handle_data_answer(data))
                }
                AdminQueueRequest::Execution(command, bytes) => {
                    self.execute_admin(now, command, bytes)
                }
                AdminQueueRequest::Report(report) => {
                    self.controller.record_error_completion(now, &report);
                    None
                }
                AdminQueueRequest::InvalidDoorbell(kind) => {
                    self.controller.record_invalid_doorbell(now, kind);
                    None
                }
            };
        }
    }

    /// Signals vector 0 for admin completions, without coalescing.
    fn signal_admin_vector(&mut self) -> bool {
        let posted = self.admin.as_mut().map_or(0, |admin| admin.take_posted_count());
        if posted > 0 {
            self.vectors.signal_vector(&self.bar, 0);
        }
        posted > 0
    }

    fn execute_admin(
        &mut self,
        now: Instant,
        command: Command,
        mut bytes: Vec<u8>,
    ) -> Option<AdminQueueRequest> {
        let opcode = AdminOpcode::from_u8(command.opcode());
        // The health log has to include all I/O so far.
        if opcode == Some(AdminOpcode::GetLogPage) {
            self.report_io_totals();
        }
        let step = self.controller.execute(now, &command, &mut bytes);
        if opcode == Some(AdminOpcode::SetFeatures) {
            self.apply_feature_values();
        }
        self.wants_housekeeping = true;
        let end = match step {
            AdminOutcome::Done(end) => end,
            AdminOutcome::CreateCompletionQueue(create) => {
                to_admin_result(self.create_completion_queue(create))
            }
            AdminOutcome::CreateSubmissionQueue(create) => {
                to_admin_result(self.create_submission_queue(create))
            }
            AdminOutcome::DoorbellBuffers { shadow, event_index } => {
                to_admin_result(self.set_doorbell_buffers(shadow, event_index))
            }
            AdminOutcome::Abort { sqid, cid } => {
                let is_aborted = self.try_abort_any(now, sqid, cid);
                self.controller.note_abort_completed();
                AdminResult::success_with(u32::from(!is_aborted))
            }
            AdminOutcome::DeleteSubmissionQueue { sqid } => {
                match self.close_submission_queue(now, sqid) {
                    Ok(cqid) => {
                        let cid = command.cid();
                        return self.defer_command(Some(QueueDeletion::Submission {
                            cid,
                            cqid,
                            sqid,
                        }));
                    }
                    Err(status) => AdminResult::failure(status),
                }
            }
            AdminOutcome::DeleteCompletionQueue { cqid } => {
                match self.check_delete_completion_queue(cqid) {
                    Ok(()) => {
                        return self.defer_command(Some(QueueDeletion::Completion {
                            cid: command.cid(),
                            cqid,
                        }));
                    }
                    Err(status) => AdminResult::failure(status),
                }
            }
            AdminOutcome::AsyncEvent => {
                if let Some(admin) = &mut self.admin {
                    admin.hold_event_request(command.cid());
                }
                return None;
            }
            AdminOutcome::Deferred => return self.defer_command(None),
            // Cross-controller reset exists only over fabrics.
            AdminOutcome::Reset(_) => AdminResult::failure(Status::INVALID_OPCODE.with_dnr()),
        };
        self.admin.as_mut().and_then(|admin| admin.handle_execution_result(end, bytes))
    }

    fn defer_command(&mut self, deletion: Option<QueueDeletion>) -> Option<AdminQueueRequest> {
        if let Some(admin) = &mut self.admin {
            admin.defer_completion();
        }
        self.deletions.extend(deletion);
        None
    }

    /// Tries to abort a command of any queue (Base 2.1 §5.1.1).
    fn try_abort_any(&mut self, now: Instant, sqid: u16, cid: u16) -> bool {
        if sqid != 0 {
            return self.try_abort_io_command(now, sqid, cid);
        }
        let is_parked = self.admin.as_mut().is_some_and(|admin| admin.abort_event_request(cid));
        if is_parked {
            self.controller.note_event_request_aborted();
            self.complete_deferred_admin(now, cid, AdminResult::failure(Status::ABORT_REQUESTED));
        }
        is_parked
    }

    /// Adds the I/O totals of the queues to the health log before it is read.
    fn report_io_totals(&mut self) {
        for signalled in &mut self.queues {
            self.controller.add_io_totals(&signalled.queue.take_io_totals());
        }
    }
}

fn to_admin_result(result: Result<(), Status>) -> AdminResult {
    result.map_or_else(AdminResult::failure, |()| AdminResult::OK)
}
