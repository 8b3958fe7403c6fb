//! Tasks: the execution of requests, step by step.

mod copy_parent;
mod grow;
mod make_exclusive;
mod transfer;

use std::ops::Range;

use tenmil_base::IoStatus;

use super::{Pool, PoolRequest, PoolResponse, PoolUsage, VolumeRun};
use crate::commit_cost::ReserveToLeave;
use crate::error::PoolError;
use crate::format::{Record, VolumeBody, decode_name, flags};
use crate::mapping::{PendingAllocation, ReadSource, WriteRun};
use crate::metadata::TransactionStop;
use crate::space_map::CHANGE_BLOCKS;
use crate::space_usage::{SpaceUsage, UsageScan};
use crate::thick::ClusterCopy;
use crate::volume_catalog::{CATALOGUE, CommandProgress, VolumeInfo, VolumeOp};

/// Request in progress.
#[derive(Debug)]
pub(super) struct RequestTask {
    token: u64,
    ask: PoolRequest,
    state: TaskState,
    /// Transaction in which its transfers began.
    began: Option<u64>,
    /// Volume that it writes to.
    writes_to: Option<u64>,
    /// Volumes whose writes it blocks.
    quiets: Vec<u64>,
    /// Allocated clusters that it uses, with their first blocks, and the number of blocks per cluster.
    mine: (Vec<(u64, u64)>, u64),
    /// Number of times it has waited for free space.
    retries: u32,
    /// Maximum number of waits for free space while nothing is being freed.
    time_limit: u32,
    /// Whether it only needs space from the reserve of a thick volume.
    is_provisioned: bool,
    /// Clusters of a thick volume with data in flight.
    moves: Option<Box<ClusterMove>>,
    /// Blocks being copied from a parent.
    filling: Option<ParentCopy>,
    /// Checksums of the transferred data, if the volume has them.
    summed: Option<Box<TransferChecksums>>,
}

/// Copy of blocks from a parent into a volume.
#[derive(Clone, Debug)]
struct ParentCopy {
    blocks: Range<u64>,
    /// Parts with data that remain to be written; the last one is the next.
    parts: Vec<Range<u64>>,
    /// Whether the data are in the requester's buffer.
    is_read: bool,
}

/// Clusters of a thick volume whose blocks move into exclusive clusters.
#[derive(Debug)]
struct ClusterMove {
    /// First block of the first one, which is the start of the requester's buffer.
    first: u64,
    moves: Vec<ClusterCopy>,
    is_written: bool,
}

/// Checksums of transferred data: for reads the expected ones, for writes those computed so far.
#[derive(Debug, Default)]
struct TransferChecksums {
    sums: Vec<u32>,
    /// Parts in flight.
    parts: Vec<TransferPart>,
    /// Blocks with a checksum mismatch.
    wrong: Vec<VolumeRun>,
}

/// Part of a transfer. Blocks are relative to the start of the request.
#[derive(Clone, Copy, Debug)]
struct TransferPart {
    io: u64,
    run: VolumeRun,
}

/// State of a task, named after its next step.
#[derive(Debug)]
enum TaskState {
    Start,
    /// Number of transfers in flight, the error of one that failed, and the segments.
    Transfers(u64, Option<IoStatus>, Vec<WriteRun>),
    /// Segments that remain to be entered in the map.
    Map(Vec<WriteRun>),
    /// The next block.
    From(u64),
    /// The next key, and the volumes found before it.
    Listing(u64, Vec<VolumeInfo>),
    /// The sums so far.
    Counting(UsageScan),
    /// Waits for the commit that adds the space, and then for another one.
    Grown,
    /// Waits for the commit, and then completes with this response.
    Durable(PoolResponse),
}

/// Condition that a task waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum TaskWaitReason {
    Page(u64),
    /// This transaction is durable.
    Commit(u64),
    /// The commit is assembled.
    Apply,
    /// The writes to this volume, or a change of it, have ended.
    Volume(u64),
    /// Its own transfers.
    Transfers,
}

/// Result of a step.
enum TaskStepResult {
    Done(PoolResponse),
    Wait(TaskWaitReason),
}

/// Reason why a step was not made.
enum TaskPause {
    Stop(TransactionStop),
    Wait(TaskWaitReason),
}

/// Maximum number of waits for free space while blocks are being freed, or for a task with reserved space
/// that takes turns with others of the same kind.
const RETRIES_MAX: u32 = 1000;
/// Maximum number of waits for a task without reserved space while nothing is being freed.
const TIME_LIMIT: u32 = 2;
/// Maximum number of waits for a write to a thick volume whose clusters were freed by a snapshot, but not
/// durably.
const PATIENCE_FOR_UNITS: u32 = 16;

impl From<TransactionStop> for TaskPause {
    fn from(stop: TransactionStop) -> Self {
        Self::Stop(stop)
    }
}

impl From<PoolError> for TaskPause {
    fn from(error: PoolError) -> Self {
        Self::Stop(error.into())
    }
}

impl From<TaskWaitReason> for TaskPause {
    fn from(wait: TaskWaitReason) -> Self {
        Self::Wait(wait)
    }
}

impl RequestTask {
    pub(super) const fn new(token: u64, ask: PoolRequest) -> Self {
        let mine = (Vec::new(), 0);
        let (began, writes_to, retries) = (None, None, 0);
        let (state, summed) = (TaskState::Start, None);
        let (time_limit, is_provisioned, moves, filling) = (TIME_LIMIT, false, None, None);
        Self {
            token,
            ask,
            state,
            began,
            writes_to,
            quiets: Vec::new(),
            mine,
            retries,
            time_limit,
            is_provisioned,
            moves,
            filling,
            summed,
        }
    }
}

impl RequestTask {
    /// Whether nothing was done for it that a recovery would undo.
    fn has_no_effects_yet(&self) -> bool {
        let holds = [self.began, self.writes_to].iter().any(Option::is_some);
        let holds = holds || !self.quiets.is_empty() || !self.mine.0.is_empty();
        matches!(self.state, TaskState::Start) && !holds
    }
}

impl Pool {
    /// Runs a task until it waits or is done.
    pub(super) fn run_task(&mut self, id: u64) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        if self.is_recovering() && task.has_no_effects_yet() {
            self.tasks.insert(id, task);
            return self.paused.push_back(id);
        }
        let step = self.step_task(id, &mut task);
        if !matches!(step, Err(TaskPause::Stop(TransactionStop::NeedPage(_)))) {
            self.books.cache.end_step();
        }
        let wait = match step {
            Ok(TaskStepResult::Done(response)) => return self.finish_task(task, Ok(response)),
            Ok(TaskStepResult::Wait(wait)) | Err(TaskPause::Wait(wait)) => wait,
            Err(TaskPause::Stop(TransactionStop::NeedPage(address))) => {
                TaskWaitReason::Page(address)
            }
            Err(TaskPause::Stop(TransactionStop::Error(error))) => {
                return self.finish_task(task, Err(*error));
            }
            Err(TaskPause::Stop(TransactionStop::NeedSpace(error)))
                if !self.may_commit_free_space(&mut task) =>
            {
                return self.finish_task(task, Err(*error));
            }
            Err(TaskPause::Stop(TransactionStop::Full))
                if !self.may_commit_free_space(&mut task) =>
            {
                let error = self.books.no_space_error();
                self.level.note_out_of_space();
                return self.finish_task(task, Err(error));
            }
            Err(TaskPause::Stop(TransactionStop::Full | TransactionStop::NeedSpace(_))) => {
                TaskWaitReason::Commit(self.books.generation)
            }
        };
        self.tasks.insert(id, task);
        self.add_waiter(id, wait);
    }

    /// Fails a waiting task.
    pub(super) fn fail_task(&mut self, id: u64, error: PoolError) {
        if let Some(task) = self.tasks.remove(&id) {
            self.finish_task(task, Err(error));
        }
    }

    /// Whether a commit could free space for a task that has found none.
    fn may_commit_free_space(&self, task: &mut RequestTask) -> bool {
        task.retries += 1;
        let is_swept = self.books.superblock.work.is_null();
        let time_limit = if is_swept { task.time_limit } else { RETRIES_MAX };
        !self.stopped && task.retries <= time_limit && self.books.space.would_commit_free_blocks()
    }

    /// Completes a task and releases its resources.
    fn finish_task(&mut self, task: RequestTask, status: Result<PoolResponse, PoolError>) {
        let (units, unit) = &task.mine;
        for &(number, at) in units {
            let key = (task.writes_to.unwrap_or(0), number, at);
            let Some(grant) = self.pending.get_mut(&key) else { continue };
            grant.users -= 1;
            let PendingAllocation { users, is_mapped, .. } = *grant;
            if users == 0 {
                self.pending.remove(&key);
                match is_mapped {
                    true => self.books.space.pending.remove(at..at + unit),
                    false => self.books.space.return_unused_cluster(at..at + unit),
                }
            }
        }
        if let Some(id) = task.writes_to {
            self.traffic.entry(id).or_default().writes -= 1;
            self.wake_volume_waiters(id);
        }
        self.end_quiesce(task.quiets);
        if let Some(began) = task.began {
            let transfers = self.transfers.entry(began).or_default();
            *transfers -= 1;
            if *transfers == 0 {
                self.transfers.remove(&began);
            }
            self.release_freed_blocks();
        }
        self.responses.push_back((task.token, status));
    }

    /// Resumes the tasks that wait for activity on a volume.
    fn wake_volume_waiters(&mut self, id: u64) {
        if let Some(traffic) = self.traffic.get_mut(&id) {
            self.ready.extend(traffic.waiting.drain(..));
            if traffic.writes == 0 && traffic.quieting == 0 {
                self.traffic.remove(&id);
            }
        }
    }

    fn end_quiesce(&mut self, volumes: Vec<u64>) {
        for id in volumes {
            self.traffic.entry(id).or_default().quieting -= 1;
            self.wake_volume_waiters(id);
        }
    }

    fn step_task(&mut self, id: u64, task: &mut RequestTask) -> Result<TaskStepResult, TaskPause> {
        if self.is_taken_over() {
            return Err(self.stopped_error().into());
        }
        if let TaskState::Durable(response) = &task.state {
            // No step follows the release of ownership.
            self.stopped |= task.ask == PoolRequest::Release;
            return Ok(TaskStepResult::Done(response.clone()));
        }
        match task.ask.clone() {
            PoolRequest::Change(change) => self.change_task(task, &change),
            PoolRequest::MayChange(change) => self.dry_run_change(&change),
            PoolRequest::Find(name) => Ok(TaskStepResult::Done(PoolResponse::Volume(
                self.books.expect_volume_by_name(&name)?.info(),
            ))),
            PoolRequest::List => self.list_task(task),
            PoolRequest::SpaceUsage(name) => self.usage_task(task, &name),
            PoolRequest::Usage => {
                Ok(TaskStepResult::Done(PoolResponse::Usage(self.pool_usage_task())))
            }
            PoolRequest::ReserveThick(name) => self.thicken_task(task, &name),
            PoolRequest::MakeExclusive { volume, block, blocks } => {
                self.make_exclusive_task(id, task, volume, block, blocks)
            }
            PoolRequest::Parent { volume } => self.parent_task(volume),
            PoolRequest::CopyFromParent { volume, blocks } => {
                self.copy_parent_task(id, task, volume, blocks)
            }
            PoolRequest::Extent { volume, block } => self.extent_task(volume, block),
            PoolRequest::Difference { volume, base, block } => {
                self.difference_task(task, volume, base, block)
            }
            PoolRequest::Read { volume, block, blocks } => {
                self.read_task(id, task, volume, block, blocks)
            }
            PoolRequest::Write { volume, block, blocks } => {
                self.write_task(id, task, volume, block, blocks)
            }
            PoolRequest::Trim { volume, block, blocks } => {
                self.trim_task(task, volume, block, blocks)
            }
            PoolRequest::Flush => self.flush_task(id, task),
            PoolRequest::Claim => {
                self.check_not_stopped().map(|()| TaskStepResult::Done(PoolResponse::Done))
            }
            PoolRequest::Release => self.abandon_task(id, task),
            PoolRequest::Grow(devices) => self.grow_task(task, &devices),
        }
    }

    fn change_task(
        &mut self,
        task: &mut RequestTask,
        change: &VolumeOp,
    ) -> Result<TaskStepResult, TaskPause> {
        self.check_not_stopped()?;
        self.check_may_change()?;
        // While it waited, a name may have gone to another volume.
        let names = change.volumes_to_quiesce().into_iter();
        let volumes = names.map(|name| Ok(self.books.expect_volume_by_name(name)?.id));
        let volumes = volumes.collect::<Result<Vec<u64>, TransactionStop>>()?;
        if task.quiets != volumes {
            self.end_quiesce(std::mem::take(&mut task.quiets));
            for id in &volumes {
                self.traffic.entry(*id).or_default().quieting += 1;
            }
            task.quiets = volumes;
        }
        // All of them are quiet at the same time.
        let has_writes = |id: &&u64| self.traffic.get(id).is_some_and(|it| it.writes > 0);
        if let Some(id) = task.quiets.iter().find(has_writes) {
            return Ok(TaskStepResult::Wait(TaskWaitReason::Volume(*id)));
        }
        let gives_back = matches!(change, VolumeOp::Delete { .. } | VolumeOp::Resize { .. });
        let leaves = if gives_back { ReserveToLeave::Nothing } else { ReserveToLeave::Most };
        let changes = match change {
            VolumeOp::Snapshots { members } => members.len() as u64,
            _ => 1,
        };
        let made = loop {
            self.books.fill_metadata_reserve(CHANGE_BLOCKS * changes, leaves)?;
            let progress =
                self.books.try_step_with_commit_space(|books| books.execute_volume_op(change))?;
            if let CommandProgress::Made(made) = progress {
                break made;
            }
            self.check_may_change()?;
        };
        self.end_quiesce(std::mem::take(&mut task.quiets));
        let response = made.map_or(PoolResponse::Done, PoolResponse::Volume);
        task.state = TaskState::Durable(response);
        Ok(TaskStepResult::Wait(TaskWaitReason::Commit(self.books.generation)))
    }

    /// Makes a change and takes it back. That it finds no space is left to the change itself, which may wait
    /// for a commit, unless a thick volume finds none and nothing is left to be freed.
    fn dry_run_change(&mut self, change: &VolumeOp) -> Result<TaskStepResult, TaskPause> {
        let tried = self.books.try_update(|books| {
            books.execute_volume_op(change)?;
            Err::<(), _>(TransactionStop::Full)
        });
        match tried {
            Err(stop @ (TransactionStop::Error(_) | TransactionStop::NeedPage(_))) => {
                Err(stop.into())
            }
            Err(TransactionStop::NeedSpace(error)) if self.are_deferred_frees_done() => {
                Err(TransactionStop::Error(error).into())
            }
            _ => Ok(TaskStepResult::Done(PoolResponse::Done)),
        }
    }

    fn list_task(&mut self, task: &mut RequestTask) -> Result<TaskStepResult, TaskPause> {
        if matches!(task.state, TaskState::Start) {
            task.state = TaskState::Listing(0, Vec::new());
        }
        let TaskState::Listing(key, found) = &mut task.state else {
            return Ok(TaskStepResult::Done(PoolResponse::Done));
        };
        while let Some(line) =
            self.books.next_run(&CATALOGUE, self.books.superblock.catalogue, *key)?
        {
            found.push(self.books.load_volume(line.key, line.child())?.info());
            *key = line.key + 1;
        }
        Ok(TaskStepResult::Done(PoolResponse::Volumes(std::mem::take(found))))
    }

    fn usage_task(
        &mut self,
        task: &mut RequestTask,
        name: &str,
    ) -> Result<TaskStepResult, TaskPause> {
        Ok(TaskStepResult::Done(PoolResponse::Account(self.sum_usage(task, name)?)))
    }

    /// Continues to add up the space usage of a volume.
    fn sum_usage(&mut self, task: &mut RequestTask, name: &str) -> Result<SpaceUsage, TaskPause> {
        let mut tally =
            if let TaskState::Counting(tally) = task.state { tally } else { UsageScan::BEGIN };
        let body = self.books.expect_volume_by_name(name)?;
        while let Some(further) = self.books.scan_next_leaf(&body, &tally)? {
            tally = further;
            task.state = TaskState::Counting(tally);
            // Pages already added up are not needed again.
            self.books.cache.end_step();
        }
        Ok(tally.space_usage(&body))
    }

    fn extent_task(&mut self, volume: u64, block: u64) -> Result<TaskStepResult, TaskPause> {
        let body = self.books.expect_volume(volume)?;
        let run = self.books.next_run(&body.map_tree(), body.map, block)?;
        let run = run.unwrap_or(Record { key: u64::MAX, value: 0, extra: 0 });
        let is_mapped = run.key <= block;
        let is_parents = !is_mapped && block < body.reach;
        let (at, end) = if is_mapped {
            let at = Some(run.first_address() + (block - run.key)).filter(|_| run.is_written());
            (at, run.key + run.extra)
        } else {
            (None, run.key.min(if is_parents { body.reach } else { u64::MAX }))
        };
        let blocks = end.min(body.blocks).saturating_sub(block);
        Ok(TaskStepResult::Done(PoolResponse::Extent { blocks, at, is_parents }))
    }

    fn parent_task(&mut self, volume: u64) -> Result<TaskStepResult, TaskPause> {
        let body = self.books.expect_volume(volume)?;
        Ok(TaskStepResult::Done(PoolResponse::Parent(self.books.parent(&body)?)))
    }

    fn difference_task(
        &mut self,
        task: &mut RequestTask,
        volume: u64,
        base: u64,
        block: u64,
    ) -> Result<TaskStepResult, TaskPause> {
        let body = self.books.expect_volume(volume)?;
        let base = match base {
            0 => None,
            id => Some(self.books.expect_volume(id)?),
        };
        let mut at = if let TaskState::From(at) = task.state { at } else { block };
        while at < body.blocks {
            let stretch = self.books.compare_from(base.as_ref(), &body, at)?;
            if let Some(from) = stretch.changed {
                let blocks = stretch.end - at;
                let is_mapped = matches!(from, ReadSource::Store(_));
                let is_parents = from == ReadSource::Parent;
                let changed = PoolResponse::Changed { block: at, blocks, is_mapped, is_parents };
                return Ok(TaskStepResult::Done(changed));
            }
            at = stretch.end;
            task.state = TaskState::From(at);
            // Pages already compared are not needed again.
            self.books.cache.end_step();
        }
        let (block, is_mapped, is_parents) = (body.blocks, false, false);
        Ok(TaskStepResult::Done(PoolResponse::Changed { block, blocks: 0, is_mapped, is_parents }))
    }

    pub(super) fn pool_usage_task(&self) -> PoolUsage {
        let durable = &self.durable_superblock.superblock;
        PoolUsage {
            blocks: durable.blocks,
            used: durable.used,
            free: self.books.space.free_blocks(&self.books.superblock),
            kept: self.books.space.kept,
            provisioned: self.books.thick_reserved_blocks(),
            volumes: self.books.superblock.volumes,
            thresholds: self.books.superblock.capacity_thresholds(),
        }
    }

    /// Fails if the pool rejects changes: after a stop, and before it is anchored.
    fn check_not_stopped(&mut self) -> Result<(), TaskPause> {
        if self.stopped {
            return Err(self.stopped_error().into());
        }
        if !self.is_anchored {
            self.check_may_claim()?;
            self.start_first_commit();
            return Err(TaskWaitReason::Apply.into());
        }
        Ok(())
    }

    /// Error for a change after a stop.
    fn stopped_error(&self) -> PoolError {
        let why = self.stopped_by.clone();
        let is_lasting =
            matches!(why, Some(PoolError::TakenOver { .. } | PoolError::WentBack { .. }));
        why.filter(|_| is_lasting).unwrap_or(PoolError::ReadOnlyAfterError)
    }

    fn abandon_task(
        &mut self,
        id: u64,
        task: &mut RequestTask,
    ) -> Result<TaskStepResult, TaskPause> {
        if matches!(task.state, TaskState::Transfers(..)) {
            return self.flush_task(id, task);
        }
        if self.stopped || !self.remove_owner_from_superblock() {
            // The pool has no owner to remove, but everything completed must still become durable.
            return self.flush_task(id, task);
        }
        task.state = TaskState::Durable(PoolResponse::Done);
        Ok(TaskStepResult::Wait(TaskWaitReason::Commit(self.books.generation)))
    }

    fn volume_and_range(
        &mut self,
        volume: u64,
        block: u64,
        count: u64,
    ) -> Result<(VolumeBody, Range<u64>), TaskPause> {
        let body = self.books.expect_volume(volume)?;
        match block.checked_add(count).filter(|end| *end <= body.blocks) {
            Some(end) => Ok((body, block..end)),
            None => {
                let (name, blocks) = (decode_name(&body.name), body.blocks);
                Err(PoolError::OutOfRange { name, block, count, blocks }.into())
            }
        }
    }

    fn writable_range(
        &mut self,
        volume: u64,
        block: u64,
        count: u64,
    ) -> Result<(VolumeBody, Range<u64>), TaskPause> {
        let (body, range) = self.volume_and_range(volume, block, count)?;
        if body.has_flag(flags::READ_ONLY) {
            return Err(PoolError::ReadOnly(decode_name(&body.name)).into());
        }
        Ok((body, range))
    }
}
