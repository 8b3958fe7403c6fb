//! Admin commands between the ring and the controller, and what the controller wants done about
//! queues.

use base::{HostMemory, Instant, Interrupts};
use wire::{AdminOpcode, Command, Status};

use super::admin::Wanted;
use super::{Deletion, MemoryFrontEnd};
use crate::controller::contract::{AdminEnd, AdminStep};

/// Admin commands that are looked at in one turn.
const ADMIN_MAX: usize = 16;

impl<H: HostMemory + Clone, I: Interrupts> MemoryFrontEnd<H, I> {
    /// Serves the admin queue. True if there was anything to do.
    #[inline]
    pub(super) fn turn_admin(&mut self, now: Instant) -> bool {
        let doorbells = self.bar.doorbells();
        let is_at_rest = self.admin.as_ref().is_none_or(|admin| admin.is_at_rest(doorbells));
        !is_at_rest && self.serve_admin(now)
    }

    #[cold]
    fn serve_admin(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        for _ in 0..ADMIN_MAX {
            let Some(admin) = &mut self.admin else { return is_busy };
            let Some(wanted) = admin.next_wanted(self.bar.doorbells()) else { break };
            is_busy = true;
            self.satisfy(now, Some(wanted));
        }
        is_busy |= self.signal_admin();
        is_busy
    }

    /// Answers commands that have been waiting: long ones, event requests, deletions, aborts.
    pub(super) fn tend_admin(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        while let Some(done) = self.controller.next_done() {
            self.end(now, done.cid, done.end);
            is_busy = true;
        }
        while self.admin.as_ref().is_some_and(|admin| admin.has_parked()) {
            let Some(result) = self.controller.next_event() else { break };
            let Some(cid) = self.admin.as_mut().and_then(|admin| admin.take_parked()) else {
                break;
            };
            self.end(now, cid, AdminEnd::with(result));
            is_busy = true;
        }
        is_busy |= self.finish_deletions(now);
        if self.admin.as_ref().is_some_and(|admin| admin.broken().is_some()) {
            self.fail(now, "the admin queue is not there any more");
        }
        is_busy
    }

    /// Ends a command that was waiting.
    pub(super) fn end(&mut self, now: Instant, cid: u16, end: AdminEnd) {
        let wanted = self.admin.as_mut().and_then(|admin| admin.complete(cid, end));
        self.satisfy(now, wanted);
    }

    /// Does what the admin queue wants, and what it wants because of that.
    fn satisfy(&mut self, now: Instant, mut wanted: Option<Wanted>) {
        while let Some(wish) = wanted {
            wanted = match wish {
                Wanted::Data(command) => {
                    let data = self.controller.data(&command);
                    self.admin.as_mut().and_then(|admin| admin.begin(data))
                }
                Wanted::Execution(command, bytes) => self.execute(now, command, bytes),
                Wanted::Report(report) => {
                    self.controller.report_error(now, &report);
                    None
                }
                Wanted::InvalidDoorbell(kind) => {
                    self.controller.invalid_doorbell(now, kind);
                    None
                }
            };
        }
    }

    /// The admin queue is signalled by vector 0, and never held back.
    fn signal_admin(&mut self) -> bool {
        let posted = self.admin.as_mut().map_or(0, |admin| admin.take_posted());
        if posted > 0 {
            self.vectors.signal(&self.bar, 0);
        }
        posted > 0
    }

    fn execute(&mut self, now: Instant, command: Command, mut bytes: Vec<u8>) -> Option<Wanted> {
        let opcode = AdminOpcode::from_u8(command.opcode());
        if opcode == Some(AdminOpcode::GetLogPage) {
            self.tell_traffic(now);
        }
        let step = self.controller.execute(now, &command, &mut bytes);
        if opcode == Some(AdminOpcode::SetFeatures) {
            self.configure();
        }
        self.wants_tending = true;
        let end = match step {
            AdminStep::Done(end) => end,
            AdminStep::CreateCompletionQueue(create) => {
                end_of(self.create_completion_queue(create))
            }
            AdminStep::CreateSubmissionQueue(create) => {
                end_of(self.create_submission_queue(create))
            }
            AdminStep::DoorbellBuffers { shadow, event_index } => {
                end_of(self.set_doorbell_buffers(shadow, event_index))
            }
            AdminStep::Abort { sqid, cid } => {
                let is_aborted = self.abort(now, sqid, cid);
                self.controller.abort_ended();
                AdminEnd::with(u32::from(!is_aborted))
            }
            AdminStep::DeleteSubmissionQueue { sqid } => {
                match self.close_submission_queue(now, sqid) {
                    Ok(cqid) => {
                        let cid = command.cid();
                        return self.waits(Some(Deletion::Submission { cid, cqid, sqid }));
                    }
                    Err(status) => AdminEnd::refused(status),
                }
            }
            AdminStep::DeleteCompletionQueue { cqid } => match self.may_delete(cqid) {
                Ok(()) => {
                    return self.waits(Some(Deletion::Completion { cid: command.cid(), cqid }));
                }
                Err(status) => AdminEnd::refused(status),
            },
            AdminStep::AsyncEvent => {
                if let Some(admin) = &mut self.admin {
                    admin.park(command.cid());
                }
                return None;
            }
            AdminStep::Later => return self.waits(None),
            // Only controllers behind connections are reset by others.
            AdminStep::Reset(_) => AdminEnd::refused(Status::INVALID_OPCODE.with_dnr()),
        };
        self.admin.as_mut().and_then(|admin| admin.executed(end, bytes))
    }

    fn waits(&mut self, deletion: Option<Deletion>) -> Option<Wanted> {
        if let Some(admin) = &mut self.admin {
            admin.waits();
        }
        self.deletions.extend(deletion);
        None
    }

    /// Tries to abort a command of any queue (Base 2.1 §5.1.1).
    fn abort(&mut self, now: Instant, sqid: u16, cid: u16) -> bool {
        if sqid != 0 {
            return self.abort_io(now, sqid, cid);
        }
        let is_parked = self.admin.as_mut().is_some_and(|admin| admin.unpark(cid));
        if is_parked {
            self.controller.event_request_aborted();
            self.end(now, cid, AdminEnd::refused(Status::ABORT_REQUESTED));
        }
        is_parked
    }

    /// What queues have done goes into the health log before it is read.
    fn tell_traffic(&mut self, now: Instant) {
        for served in &mut self.queues {
            self.controller.add_traffic(&served.queue.take_traffic(now));
        }
    }
}

fn end_of(result: Result<(), Status>) -> AdminEnd {
    result.map_or_else(AdminEnd::refused, |()| AdminEnd::OK)
}
