//! Job driver: executes the steps of multi-request commands, at once or after a host access or a request
//! has completed.

use tenmil_base::{
    AccessCompletion, AccessId, AccessProgress, HostMemory, Instant, IoStatus, Operation, Request,
    Segment,
};
use tenmil_wire::Status;

use super::command_context::{CommandContext, ControllerCopyBuffer, WaitReason};
use super::job::{CommandJob, DataLocation, JobEvent, JobStep, SubRequest};
use super::{CommandDataLocation, Executor, TICKET_LIST};
use crate::bounce_pool::BouncePool;
use crate::data_pointer_walk::{CopyState, DataPointerWalk, Direction, LocalBuffer, WalkStep};
use crate::queue::QueueEvent;

/// Result of a step.
enum JobStepResult {
    /// Finished, with the event for the job.
    Now(JobEvent),
    /// Deferred: the context waits.
    Later,
    /// Failed with this status.
    Failed(Status),
}

impl<H: HostMemory> Executor<H> {
    /// Advances the job of a context after `event` until it waits or ends.
    pub(super) fn drive_job(&mut self, now: Instant, index: u16, mut event: JobEvent) {
        loop {
            let context = self.contexts.get(index);
            context.wait = WaitReason::Nothing;
            // An aborted job ends at its next event, with the status of the abort.
            let step = match context.cancelled {
                Some(status) => JobStep::End(status, 0),
                None => context.job.next_step(event, &context.command, &context.bytes),
            };
            let step_result = match step {
                JobStep::Walk { len_bytes, direction } => {
                    self.walk_data_pointer(index, len_bytes, direction)
                }
                JobStep::ResolveDirect => self.resolve_ranges(index),
                JobStep::TakeBuffer { is_zeroed } => self.allocate_bounce_buffer(index, is_zeroed),
                JobStep::FromHost(len) | JobStep::ToHost(len) => {
                    self.begin_host_copy(index, ControllerCopyBuffer::Buffer, len)
                }
                JobStep::Compare(len) => {
                    self.begin_host_copy(index, ControllerCopyBuffer::Compare, len)
                }
                JobStep::ReadParameters(len) => {
                    context.bytes.clear();
                    context.bytes.resize(len as usize, 0);
                    self.begin_host_copy(index, ControllerCopyBuffer::Bytes, len)
                }
                JobStep::WriteResult(len) => {
                    let len = context.padded_result_len(len);
                    self.begin_host_copy(index, ControllerCopyBuffer::Bytes, len)
                }
                JobStep::Submit(sub_request) => self.submit_sub_request(now, index, sub_request),
                JobStep::FlushFrom(channel) => self.flush_from_channel(now, index, channel),
                JobStep::Forward => self.forward_to_controller(index),
                JobStep::End(status, result) => {
                    self.finish_job(now, index, status, result);
                    return;
                }
            };
            event = match step_result {
                JobStepResult::Now(event) => event,
                JobStepResult::Later => return,
                JobStepResult::Failed(status) => {
                    self.finish_job(now, index, status, 0);
                    return;
                }
            };
        }
    }

    /// Handles the completion of a request that belongs to a context.
    pub(super) fn handle_request_completion(&mut self, now: Instant, index: u16, status: IoStatus) {
        let context = self.contexts.get(index);
        if context.wait == WaitReason::Backend {
            let event = match context.job {
                CommandJob::FlushAll(_) => JobEvent::Flushed(Some((context.channel, status))),
                _ => JobEvent::RequestCompleted(status),
            };
            self.drive_job(now, index, event);
        }
    }

    /// Retries contexts that wait for a buffer, for space in a block device, or for exclusivity.
    pub fn retry_waiting(&mut self, now: Instant) {
        while let Some(&index) = self.buffer_waiters.front() {
            let WaitReason::Buffer { is_zeroed } = self.contexts.get(index).wait else {
                self.buffer_waiters.pop_front();
                continue;
            };
            let Some(event) =
                allocate_context_bounce(&self.buffers, self.contexts.get(index), is_zeroed)
            else {
                break;
            };
            self.buffer_waiters.pop_front();
            self.drive_job(now, index, event);
        }
        for _ in 0..self.capacity_waiters.len() {
            let Some(index) = self.capacity_waiters.pop_front() else { break };
            if let WaitReason::BackendFull(request) = self.contexts.get(index).wait {
                self.try_submit(now, index, request);
            }
        }
        self.try_start_pair(now);
    }

    /// Completes the command of a context whose memory is not accessed anymore.
    pub(super) fn finish_job(&mut self, now: Instant, index: u16, status: Status, result: u32) {
        let context = self.contexts.get(index);
        let slot = context.slot;
        if let Some(buffer) = context.buffer.take() {
            self.buffers.release_buffer(buffer);
        }
        self.contexts.release(index);
        self.complete_command(slot, status, result);
        self.handle_pair_completion(now, index, status);
    }

    /// Handles the completion of a host access that belongs to a context.
    pub(crate) fn handle_access_completion(&mut self, now: Instant, ended: AccessCompletion) {
        let Some((index, context)) = self.contexts.find(ended.id.0 >> 4) else { return };
        let step_result = match (context.wait, ended.id.0 & 0xf) {
            (WaitReason::List { len_bytes }, TICKET_LIST) => {
                context.wait = WaitReason::Nothing;
                match ended.result {
                    Ok(()) => {
                        let list = &mut self.scratch[..len_bytes as usize];
                        self.host.copy_out_read_data(ended.id, list);
                        // A cancelled command starts no further access.
                        match (
                            context.cancelled,
                            context.walk.supply_list(list, &mut context.ranges),
                        ) {
                            (None, Ok(next)) => self.supply_lists(index, next),
                            (Some(status), _) | (None, Err(status)) => {
                                JobStepResult::Failed(status)
                            }
                        }
                    }
                    Err(_) => JobStepResult::Failed(Status::DATA_TRANSFER_ERROR),
                }
            }
            (WaitReason::Host(copy_target), _) => {
                let (host_copy, direction) = (&mut context.host_copy, context.direction);
                let mut target = local_copy_buffer(
                    &self.buffers,
                    copy_target,
                    context.buffer,
                    &mut context.bytes,
                    &mut context.differs,
                );
                host_copy.handle_access_completion(
                    &mut self.host,
                    ended,
                    direction,
                    &mut target,
                    &mut self.scratch,
                );
                self.continue_host_copy(index, copy_target)
            }
            _ => return,
        };
        match step_result {
            JobStepResult::Now(event) => self.drive_job(now, index, event),
            JobStepResult::Later => {}
            JobStepResult::Failed(status) => {
                let status = self.contexts.get(index).cancelled.unwrap_or(status);
                self.finish_job(now, index, status, 0);
            }
        }
    }

    /// Determines the host ranges of the data.
    fn walk_data_pointer(
        &mut self,
        index: u16,
        len_bytes: u32,
        direction: Direction,
    ) -> JobStepResult {
        let context = self.contexts.get(index);
        context.direction = direction;
        let started = match context.data {
            CommandDataLocation::Pointers => DataPointerWalk::start(
                &context.command,
                len_bytes,
                direction,
                self.page_shift,
                &mut context.ranges,
            ),
            CommandDataLocation::Segment(segment) => {
                let is_exact = matches!(context.job, CommandJob::Transfer(_));
                DataPointerWalk::for_segment(segment, len_bytes, is_exact, &mut context.ranges)
            }
        };
        match started {
            Ok((walk, next)) => {
                context.walk = walk;
                self.supply_lists(index, next)
            }
            Err(status) => JobStepResult::Failed(status),
        }
    }

    /// Supplies the lists that the data pointer walk needs.
    fn supply_lists(&mut self, index: u16, mut next: WalkStep) -> JobStepResult {
        let context = self.contexts.get(index);
        loop {
            let WalkStep::List { iova, len_bytes } = next else {
                return JobStepResult::Now(JobEvent::Walked);
            };
            let list = &mut self.scratch[..len_bytes as usize];
            match self.host.read(AccessId(u32::from(index) << 4 | TICKET_LIST), iova, list) {
                Ok(AccessProgress::Done) => {
                    match context.walk.supply_list(list, &mut context.ranges) {
                        Ok(following) => next = following,
                        Err(status) => return JobStepResult::Failed(status),
                    }
                }
                Ok(AccessProgress::Pending) => {
                    context.wait = WaitReason::List { len_bytes };
                    return JobStepResult::Later;
                }
                Err(_) => return JobStepResult::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
    }

    /// Resolves the host ranges to segments. Every range is resolved before any data moves, so that a
    /// command with a partly inaccessible buffer fails without effect.
    fn resolve_ranges(&mut self, index: u16) -> JobStepResult {
        let CommandContext { ranges, segments, .. } = self.contexts.get(index);
        segments.clear();
        let mut is_direct = true;
        for range in ranges.as_slice() {
            if range.is_bucket {
                is_direct = false;
                continue;
            }
            match self.host.resolve(range.iova, range.len_bytes) {
                Ok(Some(segment)) => append_segment(segments, segment),
                Ok(None) => is_direct = false,
                Err(_) => return JobStepResult::Failed(Status::DATA_TRANSFER_ERROR),
            }
        }
        JobStepResult::Now(JobEvent::Resolved(is_direct.then_some(segments.len())))
    }

    fn allocate_bounce_buffer(&mut self, index: u16, is_zeroed: bool) -> JobStepResult {
        if self.buffers.buffer_count() == 0 {
            return JobStepResult::Failed(Status::DATA_TRANSFER_ERROR);
        }
        let context = self.contexts.get(index);
        if self.buffer_waiters.is_empty()
            && let Some(event) = allocate_context_bounce(&self.buffers, context, is_zeroed)
        {
            return JobStepResult::Now(event);
        }
        context.wait = WaitReason::Buffer { is_zeroed };
        self.buffer_waiters.push_back(index);
        JobStepResult::Later
    }

    fn begin_host_copy(
        &mut self,
        index: u16,
        copy_target: ControllerCopyBuffer,
        len_bytes: u32,
    ) -> JobStepResult {
        self.contexts.get(index).host_copy.begin(len_bytes);
        self.continue_host_copy(index, copy_target)
    }

    fn continue_host_copy(
        &mut self,
        index: u16,
        copy_target: ControllerCopyBuffer,
    ) -> JobStepResult {
        let context = self.contexts.get(index);
        let (tickets, direction) = (u32::from(index) << 4, context.direction);
        let mut target = local_copy_buffer(
            &self.buffers,
            copy_target,
            context.buffer,
            &mut context.bytes,
            &mut context.differs,
        );
        let copy_state = context.host_copy.start_accesses(
            &mut self.host,
            tickets,
            &context.ranges,
            direction,
            &mut target,
            &mut self.scratch,
        );
        match copy_state {
            CopyState::Done => JobStepResult::Now(JobEvent::Copied { differs: context.differs }),
            CopyState::Waiting => {
                context.wait = WaitReason::Host(copy_target);
                JobStepResult::Later
            }
            CopyState::Failed => JobStepResult::Failed(Status::DATA_TRANSFER_ERROR),
        }
    }

    fn submit_sub_request(
        &mut self,
        now: Instant,
        index: u16,
        sub_request: SubRequest,
    ) -> JobStepResult {
        let context = self.contexts.get(index);
        let has_segments = match sub_request.data {
            DataLocation::None => {
                context.part.clear();
                true
            }
            DataLocation::HostMemory { at_bytes, len_bytes } => {
                context.collect_segments(at_bytes, len_bytes)
            }
            DataLocation::Buffer { len_bytes } => {
                context.part.clear();
                context.part.extend(context.buffer.and_then(|buffer| buffer.slice(0, len_bytes)));
                !context.part.is_empty()
            }
        };
        if !has_segments {
            return JobStepResult::Failed(Status::INTERNAL_ERROR);
        }
        let request = Request {
            token: context.slot.into(),
            lba: sub_request.lba,
            operand: sub_request.operand,
            blocks: sub_request.blocks,
            segment_first: 0,
            segment_count: u16::try_from(context.part.len()).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation: sub_request.operation,
            flags: sub_request.flags,
        };
        self.try_submit(now, index, request);
        JobStepResult::Later
    }

    fn try_submit(&mut self, now: Instant, index: u16, request: Request) {
        let context = self.contexts.get(index);
        let channel = self.namespace_table.channel(context.channel);
        if channel.is_some_and(|channel| channel.submit_unbatched(now, &request, &context.part)) {
            context.wait = WaitReason::Backend;
        } else {
            context.wait = WaitReason::BackendFull(request);
            self.capacity_waiters.push_back(index);
        }
    }

    /// Flushes the next block device, from channel `from` on, that has a volatile cache or supports
    /// Flush.
    fn flush_from_channel(&mut self, now: Instant, index: u16, from: u16) -> JobStepResult {
        let found = self.namespace_table.available_channels().find(|(number, channel)| {
            *number >= from && (channel.can_flush() || channel.loses_unflushed_writes())
        });
        let Some((number, channel)) = found else {
            return JobStepResult::Now(JobEvent::Flushed(None));
        };
        if !channel.can_flush() {
            return JobStepResult::Now(JobEvent::Flushed(Some((number, IoStatus::INVALID_OPCODE))));
        }
        self.contexts.get(index).channel = number;
        let flags = tenmil_base::RequestFlags::NONE;
        let (operation, data) = (Operation::Flush, DataLocation::None);
        self.submit_sub_request(
            now,
            index,
            SubRequest { operation, flags, lba: 0, operand: 0, blocks: 0, data },
        )
    }

    fn forward_to_controller(&mut self, index: u16) -> JobStepResult {
        let context = self.contexts.get(index);
        context.wait = WaitReason::Controller;
        let (command, bytes) = (context.command, context.bytes.clone());
        self.push_event(QueueEvent::Reservation { ticket: index.into(), command, bytes });
        JobStepResult::Later
    }
}

/// Appends a segment, or extends the last one if they are adjacent.
fn append_segment(segments: &mut Vec<Segment>, segment: Segment) {
    match segments.last_mut() {
        Some(last)
            if last.region == segment.region
                && last.offset + u64::from(last.len_bytes) == segment.offset =>
        {
            last.len_bytes += segment.len_bytes;
        }
        _ => segments.push(segment),
    }
}

/// Allocates a bounce buffer for a context.
fn allocate_context_bounce(
    buffers: &BouncePool,
    context: &mut CommandContext,
    is_zeroed: bool,
) -> Option<JobEvent> {
    let buffer = buffers.allocate_buffer()?;
    if is_zeroed && buffers.memory().fill(buffer, 0).is_err() {
        // The pool refers to memory that does not exist: the block device will reject the segment.
        debug_assert!(false, "a buffer outside its memory");
    }
    context.buffer = Some(buffer);
    Some(JobEvent::BufferAllocated(buffer.len_bytes))
}

/// Controller-side buffer of a copy.
fn local_copy_buffer<'a>(
    buffers: &'a BouncePool,
    copy_target: ControllerCopyBuffer,
    buffer: Option<Segment>,
    bytes: &'a mut [u8],
    differs: &'a mut bool,
) -> LocalBuffer<'a> {
    let segment = buffer.unwrap_or_default();
    match copy_target {
        ControllerCopyBuffer::Bytes => LocalBuffer::Bytes(bytes),
        ControllerCopyBuffer::Buffer => LocalBuffer::Buffer(buffers.memory(), segment),
        ControllerCopyBuffer::Compare => {
            LocalBuffer::Expected { memory: buffers.memory(), segment, differs }
        }
    }
}
