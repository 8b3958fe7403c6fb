//! Data transfers: reads, writes, trims and flushes.

use tenmil_base::IoStatus;

use super::{
    PATIENCE_FOR_UNITS, RETRIES_MAX, RequestTask, TIME_LIMIT, TaskPause, TaskState, TaskStepResult,
    TaskWaitReason, TransferChecksums, TransferPart,
};
use crate::commit_cost::ReserveToLeave;
use crate::error::PoolError;
use crate::format::{decode_name, flags};
use crate::mapping::{ReadSource, WriteRun};
use crate::metadata::TransactionStop;
use crate::pool::{
    ActionResult, CommitState, DeviceAction, IoPurpose, Pool, PoolRequest, PoolResponse, VolumeRun,
};
use crate::space_map::{CHANGE_BLOCKS, CHECKSUM_BLOCKS};

impl Pool {
    pub(super) fn read_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_no_writes_lost()?;
        if let TaskState::Transfers(_, failed, _) = &task.state {
            let done = transfer_result(*failed, "read blocks of a volume")?;
            return self.verify_checksums(task, volume, block).map(|()| done);
        }
        let (body, range) = self.volume_and_range(volume, block, blocks)?;
        let is_summed = body.has_flag(flags::CHECKSUMS);
        if is_summed {
            let sums = self.books.data_checksums(&body, &range)?;
            task.summed =
                Some(Box::new(TransferChecksums { sums, ..TransferChecksums::default() }));
        }
        let pieces = self.books.plan_read(&body, range)?;
        let mut transfers = 0;
        for piece in pieces {
            let (offset, blocks, token) = (piece.block - block, piece.blocks, task.token);
            if piece.from == ReadSource::Nothing {
                self.actions.push_back(DeviceAction::Zero { token, offset, blocks });
                continue;
            }
            let io = self.start_io(IoPurpose::Data(id));
            let action = if let ReadSource::Store(at) = piece.from {
                record_part(task, io, VolumeRun { block: offset, blocks, at });
                DeviceAction::ReadData { io, token, offset, at, blocks, is_summed }
            } else {
                DeviceAction::ReadParent { io, token, offset, block: piece.block, blocks }
            };
            self.actions.push_back(action);
            transfers += 1;
        }
        if transfers == 0 {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        }
        self.count_transaction_transfer(task);
        task.state = TaskState::Transfers(transfers, None, Vec::new());
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    pub(super) fn write_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        match &mut task.state {
            TaskState::Transfers(_, failed, segments) => {
                let (segments, failed) = (std::mem::take(segments), *failed);
                if failed.is_some() {
                    let spoilt = segments.iter().map(|part| part.at..part.at + part.blocks);
                    spoilt.for_each(|blocks| self.books.space.mark_bad(blocks));
                }
                transfer_result(failed, "write blocks of a volume")?;
                task.state = TaskState::Map(segments);
                self.map_written(task, volume, block)
            }
            TaskState::Map(_) => self.map_written(task, volume, block),
            _ => self.begin_write(id, task, volume, block, blocks),
        }
    }

    fn begin_write(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_not_stopped()?;
        let (body, range) = self.writable_range(volume, block, blocks)?;
        if range.is_empty() {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        }
        if task.writes_to.is_none() {
            let traffic = self.traffic.entry(volume).or_default();
            if traffic.quieting > 0 {
                return Ok(TaskStepResult::Wait(TaskWaitReason::Volume(volume)));
            }
            traffic.writes += 1;
            task.writes_to = Some(volume);
            task.mine.1 = body.cluster_blocks();
        }
        let is_summed = body.has_flag(flags::CHECKSUMS);
        if is_summed && task.began.is_none() {
            // The blocks found free in its clusters must remain free until it has written them.
            self.count_transaction_transfer(task);
        }
        let Self { books, pending, .. } = self;
        let planned = books.plan_write(&body, &range, pending, &mut task.mine.0);
        if body.has_flag(flags::THICK)
            && planned == Err(TransactionStop::Full)
            && books.space.has_undurable_decrements()
        {
            task.time_limit = PATIENCE_FOR_UNITS;
        }
        let segments = planned?;
        // A write that allocates no cluster of a thick volume uses the reserve for the map.
        task.set_uses_reservation(body.has_flag(flags::THICK) && task.mine.0.is_empty());
        let leaves =
            if task.is_provisioned { ReserveToLeave::Provisioned } else { ReserveToLeave::Most };
        if segments.iter().any(|segment| segment.is_new) && self.books.is_below_reserve(leaves) {
            // The data have space, but the map might not.
            return Err(TransactionStop::Full.into());
        }
        if task.began.is_none() {
            self.count_transaction_transfer(task);
        }
        if is_summed {
            let sums = vec![0; usize::try_from(blocks).unwrap_or(0)];
            task.summed =
                Some(Box::new(TransferChecksums { sums, ..TransferChecksums::default() }));
        }
        // A copy from the parent is written from its position in the buffer that holds all blocks read.
        let kept = task.filling.as_ref().map_or(0, |filling| block - filling.blocks.start);
        for segment in &segments {
            let io = self.start_io(IoPurpose::Data(id));
            let WriteRun { at, blocks, .. } = *segment;
            let (token, offset) = (task.token, segment.block - block);
            let from = kept + offset;
            let action = DeviceAction::WriteData { io, token, offset: from, at, blocks, is_summed };
            self.actions.push_back(action);
            record_part(task, io, VolumeRun { block: offset, blocks, at });
        }
        if segments.is_empty() {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        }
        task.state = TaskState::Transfers(segments.len() as u64, None, segments);
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    /// Makes the map refer to the written data.
    fn map_written(
        &mut self,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_not_stopped()?;
        let sums = task.summed.as_ref().map_or(&[][..], |summed| &summed.sums);
        let needed = if sums.is_empty() { CHANGE_BLOCKS } else { CHECKSUM_BLOCKS };
        let leaves =
            if task.is_provisioned { ReserveToLeave::Provisioned } else { ReserveToLeave::Half };
        let TaskState::Map(segments) = &mut task.state else {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        };
        while let Some(segment) = segments.last_mut() {
            if segment.is_new {
                self.check_may_change()?;
                self.books.fill_metadata_reserve(needed, leaves)?;
                let first = usize::try_from(segment.block - block).unwrap_or(usize::MAX);
                let sums = sums.get(first..).unwrap_or_default();
                let end = self.books.try_change_with_commit_space(|books| {
                    books.map_write_run(volume, segment, sums)
                })?;
                let done = end - segment.block;
                (segment.block, segment.at) = (end, segment.at + done);
                segment.blocks = segment.blocks.saturating_sub(done);
            }
            if !segment.is_new || segment.blocks == 0 {
                segments.pop();
            }
        }
        let (units, unit) = &task.mine;
        for &(number, at) in units {
            if let Some(grant) = self.pending.get_mut(&(volume, number, at))
                && !grant.is_mapped
            {
                grant.is_mapped = true;
                self.books.space.fresh += unit;
            }
        }
        Ok(TaskStepResult::Done(PoolResponse::Done))
    }

    pub(super) fn trim_task(
        &mut self,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_not_stopped()?;
        let (body, range) = self.writable_range(volume, block, blocks)?;
        if body.reach > 0 && task.writes_to.is_none() {
            // A copy from the parent in progress must not restore trimmed blocks.
            let traffic = self.traffic.entry(volume).or_default();
            if traffic.quieting > 0 {
                return Ok(TaskStepResult::Wait(TaskWaitReason::Volume(volume)));
            }
            traffic.writes += 1;
            task.writes_to = Some(volume);
        }
        let is_summed = body.has_flag(flags::CHECKSUMS);
        let needed = if is_summed { CHECKSUM_BLOCKS } else { CHANGE_BLOCKS };
        if matches!(task.state, TaskState::Start) {
            task.state = TaskState::From(range.start);
        }
        task.set_uses_reservation(body.has_flag(flags::THICK));
        let leaves =
            if task.is_provisioned { ReserveToLeave::Provisioned } else { ReserveToLeave::Half };
        let TaskState::From(at) = &mut task.state else {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        };
        while *at < range.end {
            self.check_may_change()?;
            self.books.fill_metadata_reserve(needed, leaves)?;
            let rest = *at..range.end;
            if self.books.is_below_reserve(ReserveToLeave::Most)
                && self.books.is_leaf_shared_from(volume, rest.start)?
            {
                // Copying shared nodes would use space.
                return Err(TransactionStop::Full.into());
            }
            *at = self
                .books
                .try_step_with_commit_space(|books| books.unmap_in_leaf(volume, &rest))?;
        }
        Ok(TaskStepResult::Done(PoolResponse::Done))
    }

    pub(super) fn flush_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
    ) -> Result<TaskStepResult, TaskPause> {
        if let TaskState::Transfers(_, failed, _) = &task.state {
            let ended = transfer_result(*failed, "flush the device");
            if let Err(TaskPause::Stop(TransactionStop::Error(error))) = &ended {
                // No later flush would report what the device has lost now.
                self.has_lost_writes |= *failed == Some(IoStatus::WRITE_FAULT);
                self.stop_pool(error);
            }
            return ended;
        }
        // Before any change, there is nothing to commit, and no write is needed.
        if self.stopped || !self.is_unchanged_since_commit() {
            self.check_not_stopped()?;
        }
        // A commit ends with a flush, which covers the data as well.
        if !self.is_unchanged_since_commit() {
            task.state = TaskState::Durable(PoolResponse::Done);
            return Ok(TaskStepResult::Wait(TaskWaitReason::Commit(self.books.generation)));
        }
        if !matches!(self.commit, CommitState::Idle) {
            // Its last flush may have begun before the last data write ended.
            return Ok(TaskStepResult::Wait(TaskWaitReason::Commit(
                self.durable_superblock.generation + 1,
            )));
        }
        let io = self.start_io(IoPurpose::Flush(id));
        self.actions.push_back(DeviceAction::Flush { io });
        task.state = TaskState::Transfers(1, None, Vec::new());
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    /// Handles the end of a transfer of a task, and continues the task after the last one.
    pub(in crate::pool) fn handle_transfer(&mut self, id: u64, io: u64, end: ActionResult<'_>) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let TaskState::Transfers(left, failed, _) = &mut task.state else { return };
        *left -= 1;
        let is_last = *left == 0;
        if let ActionResult::Failed(status) = end {
            *failed = Some(status);
            if status.is_conflict() && task.ask.writes_blocks() {
                // Another host has reserved the device, and may own the store: the superblocks are read.
                self.stop_pool(&PoolError::Device { what: "write blocks of a volume", status });
            }
        } else if let Some(summed) = task.summed.as_mut().filter(|summed| summed.has_checksum(io)) {
            let writes =
                matches!(task.ask, PoolRequest::Write { .. } | PoolRequest::CopyFromParent { .. });
            let took = summed.store_or_compare_checksums(io, end, writes);
            *failed = failed.or(if took { None } else { Some(IoStatus::INTERNAL_ERROR) });
        } else if let (ActionResult::Contents(holds), Some(filling)) = (end, &mut task.filling) {
            filling.exclude_zero_clusters(holds, task.mine.1);
        }
        if is_last {
            self.run_task(id);
        }
    }

    /// Fails if the data read do not match the checksums.
    fn verify_checksums(
        &mut self,
        task: &RequestTask,
        volume: u64,
        block: u64,
    ) -> Result<(), TaskPause> {
        let wrong = task.summed.iter().flat_map(|summed| &summed.wrong).min_by_key(|run| run.block);
        let Some(wrong) = wrong else { return Ok(()) };
        let name = decode_name(&self.books.expect_volume(volume)?.name);
        let VolumeRun { block: offset, blocks, at } = *wrong;
        Err(PoolError::Corrupt { name, block: block + offset, blocks, at }.into())
    }

    pub(super) fn count_transaction_transfer(&mut self, task: &mut RequestTask) {
        *self.transfers.entry(self.books.generation).or_default() += 1;
        task.began = Some(self.books.generation);
    }
}

impl RequestTask {
    /// Sets whether the task only needs space from a thick volume's reserve, which many other tasks may
    /// also need.
    fn set_uses_reservation(&mut self, is_provisioned: bool) {
        self.is_provisioned = is_provisioned;
        self.time_limit = if is_provisioned { RETRIES_MAX } else { TIME_LIMIT };
    }
}

impl TransferChecksums {
    /// Whether the volume has checksums for a transfer. Data from a parent have none.
    fn has_checksum(&self, io: u64) -> bool {
        self.parts.iter().any(|part| part.io == io)
    }

    /// Stores or compares the checksums of a transferred part. False if their number differs from the
    /// number of blocks.
    fn store_or_compare_checksums(&mut self, io: u64, end: ActionResult<'_>, writes: bool) -> bool {
        let Some(TransferPart { run, .. }) = self.parts.iter().find(|part| part.io == io) else {
            return false;
        };
        let first = usize::try_from(run.block).unwrap_or(usize::MAX);
        let count = usize::try_from(run.blocks).unwrap_or(usize::MAX);
        let known = first.checked_add(count).and_then(|end| self.sums.get_mut(first..end));
        let (Some(known), ActionResult::Sums(found)) = (known, end) else { return false };
        if found.len() != known.len() {
            return false;
        }
        if writes {
            known.copy_from_slice(found);
            return true;
        }
        for ((index, known), found) in (0..).zip(&*known).zip(found) {
            if known == found {
                continue;
            }
            let (block, at) = (run.block + index, run.at + index);
            match self.wrong.last_mut() {
                Some(last) if last.block + last.blocks == block && last.at + last.blocks == at => {
                    last.blocks += 1;
                }
                _ => self.wrong.push(VolumeRun { block, blocks: 1, at }),
            }
        }
        true
    }
}

/// Records a transfer in flight, if its checksums are needed.
fn record_part(task: &mut RequestTask, io: u64, run: VolumeRun) {
    if let Some(summed) = &mut task.summed {
        summed.parts.push(TransferPart { io, run });
    }
}

pub(super) fn transfer_result(
    failed: Option<IoStatus>,
    what: &'static str,
) -> Result<TaskStepResult, TaskPause> {
    match failed {
        Some(status) => Err(PoolError::Device { what, status }.into()),
        None => Ok(TaskStepResult::Done(PoolResponse::Done)),
    }
}
