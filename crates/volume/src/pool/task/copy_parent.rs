//! Copying blocks from a volume's parent into the volume, from its end on.
//!
//! ```text
//!   quiesce | find the last gap | read it from the parent | write it like any data | shrink the overlap
//! ```
//!
//! Clusters for which the parent has only zeroes are not written, and use no space: after the overlap
//! they read as zeroes anyway.
//!
//! Writes to the volume and trims wait meanwhile. If the shrunk overlap is not yet durable after a power
//! loss, the next request finds the copied blocks already mapped.

use std::ops::Range;

use super::{
    ParentCopy, RequestTask, TaskPause, TaskState, TaskStepResult, TaskWaitReason, transfer,
};
use crate::commit_cost::ReserveToLeave;
use crate::pool::{DeviceAction, IoPurpose, Pool, PoolResponse};
use crate::space_map::CHANGE_BLOCKS;

impl Pool {
    pub(super) fn copy_parent_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_not_stopped()?;
        if task.quiets.is_empty() {
            self.books.expect_volume(volume)?;
            self.traffic.entry(volume).or_default().quieting += 1;
            task.quiets.push(volume);
        }
        // Once it counts as a writer itself, its own writes must not block it.
        if task.writes_to.is_none() && self.traffic.entry(volume).or_default().writes > 0 {
            return Ok(TaskStepResult::Wait(TaskWaitReason::Volume(volume)));
        }
        let Some(filling) = task.filling.clone() else {
            return self.begin_parent_copy(id, task, volume, blocks);
        };
        let first = filling.blocks.start;
        if !filling.is_read {
            if let TaskState::Transfers(_, failed, _) = task.state {
                transfer::transfer_result(failed, "read blocks of a volume's parent")?;
            }
            task.filling = Some(ParentCopy { is_read: true, ..filling });
            task.state = TaskState::Start;
        }
        while let Some(part) =
            task.filling.as_ref().and_then(|filling| filling.parts.last().cloned())
        {
            match self.write_task(id, task, volume, part.start, part.end - part.start)? {
                TaskStepResult::Done(_) => (task.state, task.summed) = (TaskState::Start, None),
                wait @ TaskStepResult::Wait(_) => return Ok(wait),
            }
            task.filling.as_mut().map(|filling| filling.parts.pop());
        }
        // Unmapped blocks after the overlap read as zeroes, as these did before.
        self.shrink_parent_overlap(volume, first)
    }

    /// Called once no writes are in flight: finds the blocks to copy, and starts to read them.
    fn begin_parent_copy(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        let (body, _) = self.writable_range(volume, 0, 0)?;
        let range = self.books.last_parent_run(&body, blocks.max(1))?;
        if range.is_empty() {
            return self.shrink_parent_overlap(volume, range.start);
        }
        self.traffic.entry(volume).or_default().writes += 1;
        task.writes_to = Some(volume);
        task.mine.1 = body.cluster_blocks();
        let (io, token) = (self.start_io(IoPurpose::Data(id)), task.token);
        let (block, blocks) = (range.start, range.end - range.start);
        self.actions.push_back(DeviceAction::ReadParent { io, token, offset: 0, block, blocks });
        let parts = vec![range.clone()];
        task.filling = Some(ParentCopy { blocks: range, parts, is_read: false });
        task.state = TaskState::Transfers(1, None, Vec::new());
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    /// Sets the overlap, since all blocks from `to` on belong to the volume itself.
    fn shrink_parent_overlap(&mut self, volume: u64, to: u64) -> Result<TaskStepResult, TaskPause> {
        if self.books.expect_volume(volume)?.reach > to {
            self.check_may_change()?;
            self.books.fill_metadata_reserve(CHANGE_BLOCKS, ReserveToLeave::Half)?;
            self.books
                .try_change_with_commit_space(|books| books.shrink_parent_overlap(volume, to))?;
        }
        Ok(TaskStepResult::Done(PoolResponse::Filled(to)))
    }
}

impl ParentCopy {
    /// Excludes from the writes the clusters for which these blocks contain only zeroes.
    pub(super) fn exclude_zero_clusters(&mut self, holds: &[bool], unit: u64) {
        let unit_of = |index: usize| (self.blocks.start + index as u64) / unit.max(1);
        let mut parts: Vec<Range<u64>> = Vec::new();
        for index in (0..holds.len()).filter(|index| holds[*index]) {
            let of_unit = unit_of(index) * unit..(unit_of(index) + 1) * unit;
            let (start, end) =
                (of_unit.start.max(self.blocks.start), of_unit.end.min(self.blocks.end));
            match parts.last_mut() {
                Some(last) if last.end >= start => last.end = end,
                _ => parts.push(start..end),
            }
        }
        parts.reverse();
        self.parts = parts;
    }
}
