//! Making a volume thick, and moving its blocks into exclusive clusters.
//!
//! ```text
//!   quiesce | plan | read shared blocks | write them to new clusters | update the map | resume writes
//! ```

use super::{
    ClusterMove, RequestTask, TaskPause, TaskState, TaskStepResult, TaskWaitReason, transfer,
};
use crate::commit_cost::ReserveToLeave;
use crate::format::flags;
use crate::mapping::{MappedRun, PendingAllocation, ReadSource};
use crate::pool::{DeviceAction, IoPurpose, Pool, PoolResponse};
use crate::space_map::CHANGE_BLOCKS;
use crate::thick::{ClusterCopy, MakeExclusiveStep};
use crate::volume_catalog::CommandProgress;

impl Pool {
    pub(super) fn thicken_task(
        &mut self,
        task: &mut RequestTask,
        name: &str,
    ) -> Result<TaskStepResult, TaskPause> {
        let account = self.sum_usage(task, name)?;
        let body = self.books.expect_volume_by_name(name)?;
        let is_thick = body.has_flag(flags::THICK);
        if is_thick {
            // A rollback may have restored a snapshot from before the volume became thick.
            body.expect_no_parent()?;
        }
        if is_thick && body.owed == account.missing {
            return Ok(TaskStepResult::Done(PoolResponse::Volume(body.info())));
        }
        self.check_not_stopped()?;
        self.check_may_change()?;
        let gives_back = is_thick && account.missing < body.owed;
        let leaves = if gives_back { ReserveToLeave::Nothing } else { ReserveToLeave::Most };
        self.books.fill_metadata_reserve(CHANGE_BLOCKS, leaves)?;
        let made = self
            .books
            .try_change_with_commit_space(|books| books.convert_to_thick(name, account.missing))?;
        let response = match made {
            CommandProgress::Made(Some(info)) => PoolResponse::Volume(info),
            CommandProgress::Made(None) | CommandProgress::Again => PoolResponse::Done,
        };
        task.state = TaskState::Durable(response);
        Ok(TaskStepResult::Wait(TaskWaitReason::Commit(self.books.generation)))
    }

    pub(super) fn make_exclusive_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        if let TaskState::Transfers(_, failed, _) = task.state {
            let what = match task.moves.as_ref().is_some_and(|moving| moving.is_written) {
                true => "write copies of blocks of a volume",
                false => "read blocks of a volume",
            };
            if failed.is_some() {
                self.mark_failed_targets_bad(task);
            }
            transfer::transfer_result(failed, what)?;
            task.state = TaskState::Start;
        }
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
        match &task.moves {
            None => self.begin_make_exclusive(id, task, volume, block, blocks),
            Some(moving) if !moving.is_written => self.write_copies(id, task),
            Some(_) => self.map_copies(task, volume),
        }
    }

    /// Called once no writes are in flight: determines the next step, and does it if nothing has to be
    /// copied.
    fn begin_make_exclusive(
        &mut self,
        id: u64,
        task: &mut RequestTask,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        let (body, _) = self.writable_range(volume, block, 0)?;
        if !body.has_flag(flags::THICK) {
            return Ok(TaskStepResult::Done(PoolResponse::Owned(body.blocks)));
        }
        body.expect_no_parent()?;
        let mut from = block;
        let owning = loop {
            match self.books.plan_make_exclusive(&body, from, blocks)? {
                // A corrupt tree may split a cluster.
                MakeExclusiveStep::Nothing(to) if to < body.blocks => {
                    from = to.next_multiple_of(body.cluster_blocks())
                }
                owning => break owning,
            }
            self.books.cache.end_step();
        };
        self.check_may_change()?;
        match owning {
            MakeExclusiveStep::Nothing(to) => Ok(TaskStepResult::Done(PoolResponse::Owned(to))),
            MakeExclusiveStep::Hole(hole) => {
                self.books.fill_metadata_reserve(CHANGE_BLOCKS, ReserveToLeave::Provisioned)?;
                let end = self
                    .books
                    .try_change_with_commit_space(|books| books.allocate_hole(volume, &hole))?;
                Ok(TaskStepResult::Done(PoolResponse::Owned(end)))
            }
            MakeExclusiveStep::Moves(moves) => {
                if task.writes_to.is_none() {
                    self.traffic.entry(volume).or_default().writes += 1;
                    task.writes_to = Some(volume);
                    task.mine.1 = body.cluster_blocks();
                }
                let moves = self.allocate_copy_targets(
                    task,
                    moves,
                    (volume, body.cluster_blocks(), body.owed),
                )?;
                let first = moves.first().map_or(block, |one| one.number * body.cluster_blocks());
                task.moves = Some(Box::new(ClusterMove { first, moves, is_written: false }));
                self.count_transaction_transfer(task);
                self.read_copies(id, task)
            }
        }
    }

    /// Allocates clusters for those that have none.
    fn allocate_copy_targets(
        &mut self,
        task: &mut RequestTask,
        mut moves: Vec<ClusterCopy>,
        (volume, unit, owed): (u64, u64, u64),
    ) -> Result<Vec<ClusterCopy>, TaskPause> {
        for one in moves.iter_mut().filter(|one| one.at.is_none()) {
            // After a wait, the step runs again: clusters from the first run are kept.
            let mut mine = task.mine.0.iter();
            let at = match mine.find(|(number, _)| *number == one.number) {
                Some((_, at)) => *at,
                None => {
                    let at = self.books.allocate_clusters(unit, 1, owed)?.start;
                    let grant = PendingAllocation { users: 1, is_mapped: false, taken: u32::MAX };
                    self.pending.insert((volume, one.number, at), grant);
                    task.mine.0.push((one.number, at));
                    at
                }
            };
            one.at = Some(at);
        }
        Ok(moves)
    }

    fn read_copies(
        &mut self,
        id: u64,
        task: &mut RequestTask,
    ) -> Result<TaskStepResult, TaskPause> {
        let Some(moving) = &task.moves else { return Ok(TaskStepResult::Done(PoolResponse::Done)) };
        let pieces = moving.moves.iter().flat_map(|one| &one.copies);
        let reads =
            merge_contiguous(pieces.map(|piece| (piece.block, piece.blocks, copy_source(piece))));
        let (token, first) = (task.token, moving.first);
        for &(block, blocks, at) in &reads {
            let (io, offset, is_summed) =
                (self.start_io(IoPurpose::Data(id)), block - first, false);
            self.actions.push_back(DeviceAction::ReadData {
                io,
                token,
                offset,
                at,
                blocks,
                is_summed,
            });
        }
        if reads.is_empty() {
            return self.write_copies(id, task);
        }
        task.state = TaskState::Transfers(reads.len() as u64, None, Vec::new());
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    fn write_copies(
        &mut self,
        id: u64,
        task: &mut RequestTask,
    ) -> Result<TaskStepResult, TaskPause> {
        let unit = task.mine.1;
        let Some(moving) = &mut task.moves else {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        };
        moving.is_written = true;
        let writes = merge_contiguous(copy_targets(&moving.moves, unit));
        let (token, first) = (task.token, moving.first);
        for &(block, blocks, at) in &writes {
            let (io, offset, is_summed) =
                (self.start_io(IoPurpose::Data(id)), block - first, false);
            self.actions.push_back(DeviceAction::WriteData {
                io,
                token,
                offset,
                at,
                blocks,
                is_summed,
            });
        }
        if writes.is_empty() {
            let volume = task.writes_to.unwrap_or(0);
            return self.map_copies(task, volume);
        }
        task.state = TaskState::Transfers(writes.len() as u64, None, Vec::new());
        Ok(TaskStepResult::Wait(TaskWaitReason::Transfers))
    }

    /// Marks the targets of failed copies as bad: the writes may still reach the device later.
    fn mark_failed_targets_bad(&mut self, task: &RequestTask) {
        let Some(moving) = task.moves.as_ref().filter(|moving| moving.is_written) else { return };
        for (_, blocks, at) in merge_contiguous(copy_targets(&moving.moves, task.mine.1)) {
            self.books.space.mark_bad(at..at + blocks);
        }
    }

    /// Makes the map refer to the finished copies, one cluster at a time.
    fn map_copies(
        &mut self,
        task: &mut RequestTask,
        volume: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        let unit = task.mine.1;
        let Some(moving) = &task.moves else { return Ok(TaskStepResult::Done(PoolResponse::Done)) };
        let end = moving.moves.last().map_or(0, |one| (one.number + 1) * unit);
        let to = end.min(self.books.expect_volume(volume)?.blocks);
        for one in &moving.moves {
            let Some(at) = one.at else { continue };
            let key = (volume, one.number, at);
            let is_new = self.pending.contains_key(&key);
            self.check_may_change()?;
            self.books.fill_metadata_reserve(CHANGE_BLOCKS, ReserveToLeave::Provisioned)?;
            let is_moved = self.books.try_change_with_commit_space(|books| {
                books.map_exclusive_copy(volume, one, at, is_new)
            })?;
            if let Some(grant) = self.pending.get_mut(&key).filter(|_| is_moved)
                && !grant.is_mapped
            {
                grant.is_mapped = true;
                self.books.space.fresh += unit;
            }
        }
        Ok(TaskStepResult::Done(PoolResponse::Owned(to)))
    }
}

/// Source block of a piece to copy.
fn copy_source(piece: &MappedRun) -> Option<u64> {
    if let ReadSource::Store(at) = piece.from { Some(at) } else { None }
}

/// Targets of copies: first block, number of blocks, and place.
fn copy_targets(
    moves: &[ClusterCopy],
    unit: u64,
) -> impl Iterator<Item = (u64, u64, Option<u64>)> + '_ {
    let goes_to = move |one: &ClusterCopy, piece: &MappedRun| {
        let at = one.at.map(|at| at + (piece.block - one.number * unit));
        (piece.block, piece.blocks, at)
    };
    moves.iter().flat_map(move |one| one.copies.iter().map(move |piece| goes_to(one, piece)))
}

/// Same, with contiguous ones merged.
fn merge_contiguous(pieces: impl Iterator<Item = (u64, u64, Option<u64>)>) -> Vec<(u64, u64, u64)> {
    let mut joined: Vec<(u64, u64, u64)> = Vec::new();
    for (block, blocks, at) in pieces {
        let Some(at) = at else { continue };
        match joined.last_mut() {
            Some((first, count, place)) if *first + *count == block && *place + *count == at => {
                *count += blocks;
            }
            _ => joined.push((block, blocks, at)),
        }
    }
    joined
}
