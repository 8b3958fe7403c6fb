//! Open pool, as a state machine without I/O: requests and I/O results in, actions and completions out.
//!
//! ```text
//!   submit(token, request) --> | tasks | --> next_action()   action for the device
//!   complete(io, result)   --> |       | --> next_response()   token and status
//! ```
//!
//! A task is tried. If a page is missing, the page is read, and the task is tried again afterwards. Only
//! tasks wait, never the pool. Data never pass through the pool: an action identifies the token, and
//! which of its blocks go where.
//!
//! A write is completed when its data are on the device and the map in memory refers to them. It is
//! durable once a flush submitted later is completed. A [`VolumeOp`](crate::VolumeOp) is completed once
//! it is durable.
//!
//! A frequent reader may cache [runs](Pool::mapped_run) of a map and read from the device directly, as
//! long as the volume is not among the [`remapped`](Pool::next_invalidated_volume) ones. It reports the oldest such
//! read to the pool, which reuses no block that the read may access.
//!
//! The driver of a pool executes [`next_action`](Pool::next_action) until it returns `None` before it
//! takes [`next_response`](Pool::next_response): zeroes for a read are an action without a completion.

mod commit;
mod ownership;
mod request;
mod stop_recovery;
mod task;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tenmil_base::IoStatus;

use crate::capacity_monitor::{CapacityMonitor, CapacityNotice};
use crate::commit_cost::ReserveToLeave;
use crate::device_table::DeviceTable;
use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{OwnerRecord, Page, SLOTS, Superblock, decode_name, flags};
use crate::mapping::PendingAllocations;
use crate::metadata::{Metadata, TransactionStop};
use crate::ownership::{ClaimCondition, InjectedBugs, PoolOwner};
use crate::space_map::{CHANGE_BLOCKS, POOL_BLOCKS};
use crate::tree_edit::FULL;
use commit::{CommitSnapshot, CommitState};
pub use request::{ActionResult, DeviceAction, PoolRequest, PoolResponse, PoolUsage, VolumeRun};
use stop_recovery::RecoveryState;
use task::{RequestTask, TaskWaitReason};

/// Open pool.
#[derive(Debug)]
pub struct Pool {
    books: Metadata,
    /// Contents of the last durable superblock.
    durable_superblock: CommitSnapshot,
    tasks: BTreeMap<u64, RequestTask>,
    ready: VecDeque<u64>,
    next_task: u64,
    on_page: BTreeMap<u64, Vec<u64>>,
    /// Tasks that wait for a transaction to be durable.
    on_commit: Vec<(u64, u64)>,
    /// Tasks that wait until a commit is assembled.
    on_apply: Vec<u64>,
    traffic: BTreeMap<u64, VolumeActivity>,
    pending: PendingAllocations,
    /// Number of data transfers in flight, by the transaction in which they began.
    transfers: BTreeMap<u64, u64>,
    /// Transaction in which the oldest read that bypasses the pool began.
    oldest_read: u64,
    /// Transactions with pinned metadata, one entry per reader.
    held: Vec<u64>,
    ios: BTreeMap<u64, IoPurpose>,
    next_io: u64,
    commit: CommitState,
    wants_commit: bool,
    /// The superblock at the start of the last commit.
    frozen: Superblock,
    /// Whether deferred freeing has found all remaining entries corrupt, or has no space. It is retried
    /// after the next commit.
    is_sweep_stuck: bool,
    stopped: bool,
    /// Reason why the pool rejects changes, if it does.
    stopped_by: Option<PoolError>,
    /// Number of stops caused by the device, reason of the last one, state of the recovery from it, and
    /// tasks that wait for the recovery.
    losses: u64,
    last_stop: Option<PoolError>,
    recovery: RecoveryState,
    paused: VecDeque<u64>,
    /// The device has lost completed writes since the durable state was read: a block may be older than
    /// the map that refers to it, and belong to another volume. No read is answered from it.
    has_lost_writes: bool,
    /// Recovered, but nothing has become durable since.
    is_unproven: bool,
    /// The writing owner here, and whether the pool may be taken over from another one.
    me: Option<PoolOwner>,
    claim: ClaimCondition,
    bugs: InjectedBugs,
    level: CapacityMonitor,
    /// Whether the superblock that the pool was opened with is known to be durable.
    is_anchored: bool,
    actions: VecDeque<DeviceAction>,
    responses: VecDeque<(u64, Result<PoolResponse, PoolError>)>,
}

/// Purpose of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IoPurpose {
    Page(u64),
    Data(u64),
    Flush(u64),
    Commit,
    Recover,
}

/// Activity on a volume.
#[derive(Debug, Default)]
struct VolumeActivity {
    /// Writes that are planned and not done.
    writes: u64,
    /// Changes that wait for those, or are in progress.
    quieting: u64,
    /// Tasks that wait for either.
    waiting: Vec<u64>,
}

impl Pool {
    /// Creates the pool that a superblock describes.
    pub(crate) fn new(
        store: u128,
        generation: u64,
        superblock: Superblock,
        devices: Arc<DeviceTable>,
        cache_bytes: usize,
    ) -> Self {
        let owner = OwnerRecord::NONE;
        let durable_superblock =
            CommitSnapshot { generation, superblock, devices: Arc::clone(&devices), owner };
        Self {
            books: Metadata::new(store, generation, superblock, devices, cache_bytes),
            durable_superblock,
            tasks: BTreeMap::new(),
            ready: VecDeque::new(),
            next_task: 0,
            on_page: BTreeMap::new(),
            on_commit: Vec::new(),
            on_apply: Vec::new(),
            traffic: BTreeMap::new(),
            pending: PendingAllocations::new(),
            transfers: BTreeMap::new(),
            oldest_read: u64::MAX,
            held: Vec::new(),
            ios: BTreeMap::new(),
            next_io: 0,
            commit: CommitState::Idle,
            wants_commit: false,
            frozen: superblock,
            is_sweep_stuck: false,
            stopped: false,
            stopped_by: None,
            losses: 0,
            last_stop: None,
            recovery: RecoveryState::Idle,
            paused: VecDeque::new(),
            has_lost_writes: false,
            is_unproven: false,
            me: None,
            claim: ClaimCondition::Free,
            bugs: InjectedBugs::default(),
            level: CapacityMonitor::default(),
            is_anchored: false,
            actions: VecDeque::new(),
            responses: VecDeque::new(),
        }
    }

    /// Splits tree nodes as soon as they have more than this number of records, at least 4, instead of
    /// when they are full. The trees of a small pool become as high as those of a large one, for tests.
    #[must_use]
    pub fn with_node_records_max(mut self, records: usize) -> Self {
        self.books.full = records.clamp(4, FULL);
        self.books.raise_reserve();
        self
    }

    /// UUID of the pool.
    pub const fn uuid(&self) -> u128 {
        self.books.store
    }

    /// Name of the pool.
    pub fn name(&self) -> String {
        decode_name(&self.books.superblock.name)
    }

    /// Generation of the last durable transaction.
    pub const fn generation(&self) -> u64 {
        self.durable_superblock.generation
    }

    /// Number of blocks in the pool, including superblocks.
    pub const fn blocks(&self) -> u64 {
        self.durable_superblock.superblock.blocks
    }

    /// Devices of the pool, according to the last durable superblock.
    pub fn devices(&self) -> &DeviceTable {
        &self.durable_superblock.devices
    }

    /// Devices of the pool once the open transaction is durable.
    pub fn uncommitted_devices(&self) -> &DeviceTable {
        &self.books.devices
    }

    /// First block beyond every superblock so far, including the one being written.
    pub(crate) const fn end_of_pool(&self) -> u64 {
        self.books.superblock.blocks
    }

    /// Blocks with the copies of the last durable superblock.
    pub const fn superblock_addresses(&self) -> [u64; 2] {
        Superblock::superblock_addresses(
            self.durable_superblock.generation,
            self.durable_superblock.superblock.first_device_reserved_blocks(),
        )
    }

    /// UUID of the pool, and the last durable superblock.
    pub(crate) const fn uuid_and_durable_superblock(&self) -> (u128, Superblock) {
        (self.books.store, self.durable_superblock.superblock)
    }

    /// Generation of the open transaction.
    pub const fn open_generation(&self) -> u64 {
        self.books.generation
    }

    /// The run of a volume's map that contains a block, if it is mapped and no read is needed to find it.
    /// Always `None` for a volume with checksums: its data must pass through the component that verifies
    /// them.
    pub fn mapped_run(&mut self, volume: u64, block: u64) -> Option<VolumeRun> {
        if self.is_recovering() || self.is_taken_over() || self.has_lost_writes {
            return None;
        }
        let body =
            self.books.find_volume(volume).ok().flatten().filter(|body| block < body.blocks)?;
        if body.has_flag(flags::CHECKSUMS) {
            return None;
        }
        let run = self.books.next_run(&body.map_tree(), body.map, block).ok().flatten()?;
        self.books.cache.end_step();
        let blocks = run.extra.min(body.blocks.saturating_sub(run.key));
        let is_there = run.key <= block && run.is_written();
        is_there.then_some(VolumeRun { block: run.key, blocks, at: run.value })
    }

    /// A volume with mapped blocks that may have moved or been unmapped: cached runs of it are invalid.
    /// The caller must drain this before it delivers a completion.
    pub fn next_invalidated_volume(&mut self) -> Option<u64> {
        self.books.remapped.pop_first()
    }

    /// Next notice about capacity. The caller polls it from time to time, preferably until it returns
    /// `None`: the pool does not check its fill level otherwise.
    pub fn next_notice(&mut self) -> Option<CapacityNotice> {
        let PoolUsage { blocks, free, kept, provisioned, thresholds, .. } = self.pool_usage_task();
        let kept = kept + provisioned;
        let room = blocks.saturating_sub(2 * SLOTS + kept);
        let taken = room.saturating_sub(free.saturating_sub(kept));
        self.level.next(thresholds, taken, room)
    }

    /// Sets the transaction in which the oldest direct read in flight began, a read by cached runs;
    /// `u64::MAX` if there are no such reads.
    pub fn set_oldest_direct_read(&mut self, transaction: u64) {
        if std::mem::replace(&mut self.oldest_read, transaction) < transaction {
            self.release_freed_blocks();
            self.reread_when_idle();
        }
    }

    /// The state of the last durable superblock, as a separate read-only pool. Until
    /// [`unpin_metadata`](Self::unpin_metadata) is called with its generation, none of its metadata is
    /// overwritten, whatever happens to this pool.
    #[must_use]
    pub fn pinned_read_only_pool(&mut self) -> Self {
        let CommitSnapshot { generation, superblock, devices, .. } =
            self.durable_superblock.clone();
        self.held.push(generation);
        Self::new(self.books.store, generation, superblock, devices, 0)
    }

    /// Ends one reader's pin on the metadata of a transaction.
    pub fn unpin_metadata(&mut self, generation: u64) {
        if let Some(place) = self.held.iter().position(|held| *held == generation) {
            self.held.swap_remove(place);
        }
        self.release_freed_blocks();
        self.reread_when_idle();
    }

    /// Whether free space is short because of pinned metadata: the reader should unpin them.
    pub fn is_space_short_by_pin(&self) -> bool {
        let space = &self.books.space;
        let (held, free) = (
            space.pinned_metadata_blocks(self.durable_superblock.generation),
            space.free_blocks(&self.books.superblock),
        );
        held > 0 && free < space.kept + held + self.books.thick_reserved_blocks()
    }

    /// Bytes of metadata in memory.
    pub fn memory_bytes(&self) -> usize {
        let pages = self.books.cache.len() + self.books.dirty.len() + self.books.writing.len();
        pages * crate::format::BLOCK_BYTES
    }

    /// Whether no request, I/O or deferred free is pending.
    pub fn is_idle(&self) -> bool {
        let is_still = matches!(self.commit, CommitState::Idle) && !self.wants_commit;
        !self.has_tasks() && self.ios.is_empty() && is_still && self.are_deferred_frees_done()
    }

    /// Whether a request is not completed yet.
    pub fn has_tasks(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Whether all deferred frees are done, as far as possible at present.
    pub fn are_deferred_frees_done(&self) -> bool {
        self.stopped || self.is_sweep_stuck || self.books.superblock.work.is_null()
    }

    /// Submits a request. Its completion has the same `token`.
    pub fn submit(&mut self, token: u64, ask: PoolRequest) {
        let id = self.next_task;
        self.next_task += 1;
        self.tasks.insert(id, RequestTask::new(token, ask));
        self.ready.push_back(id);
    }

    /// The next action for the device, or `None` until the next submission or completion.
    pub fn next_action(&mut self) -> Option<DeviceAction> {
        if self.actions.is_empty() {
            self.run_tasks();
        }
        self.actions.pop_front()
    }

    /// The next completion. Requests may complete in any order.
    pub fn next_response(&mut self) -> Option<(u64, Result<PoolResponse, PoolError>)> {
        self.responses.pop_front()
    }

    /// Handles the result of an action. A result for an action that is not in flight is ignored.
    pub fn handle_action_result(&mut self, io: u64, end: ActionResult<'_>) {
        match self.ios.remove(&io) {
            Some(IoPurpose::Page(address)) => self.handle_page(address, end),
            Some(IoPurpose::Data(task) | IoPurpose::Flush(task)) => {
                self.handle_transfer(task, io, end)
            }
            Some(IoPurpose::Commit) => self.handle_commit_completion(end),
            Some(IoPurpose::Recover) => self.handle_recovery_read(end),
            None => {}
        }
        self.run_tasks();
    }

    fn handle_page(&mut self, address: u64, end: ActionResult<'_>) {
        let page = match end {
            ActionResult::Read(bytes) => Page::decode(bytes, self.books.store, address),
            ActionResult::Failed(status) => {
                Err(Corruption::at_address(address, CorruptionKind::ReadError(status)))
            }
            ActionResult::Done
            | ActionResult::Sums(_)
            | ActionResult::Slots(_)
            | ActionResult::Contents(_) => Err(Corruption::at_address(
                address,
                CorruptionKind::ReadError(IoStatus::INTERNAL_ERROR),
            )),
        };
        self.books.handle_read(address, page);
        // They run before anything else is read, so the page that they waited for is still cached.
        for task in self.on_page.remove(&address).unwrap_or_default() {
            self.run_task(task);
        }
        self.run_tasks();
        self.books.damaged.remove(&address);
    }

    /// Makes all progress that is possible now.
    fn run_tasks(&mut self) {
        loop {
            self.apply_refcounts();
            while let Some(task) = self.ready.pop_front() {
                self.run_task(task);
            }
            // Deferred freeing may itself require a commit first.
            if !self.begin_commit() && !self.free_deferred_step() && !self.begin_commit() {
                return self.reread_when_idle();
            }
        }
    }

    /// Reads a page, unless a read of it is in flight.
    fn read_page(&mut self, address: u64) {
        if !self.on_page.contains_key(&address) {
            let io = self.start_io(IoPurpose::Page(address));
            self.actions.push_back(DeviceAction::ReadPage { io, at: address });
            self.on_page.insert(address, Vec::new());
        }
    }

    fn start_io(&mut self, purpose: IoPurpose) -> u64 {
        let io = self.next_io;
        self.next_io += 1;
        self.ios.insert(io, purpose);
        io
    }

    /// Whether nothing has changed since the last commit began.
    fn is_unchanged_since_commit(&self) -> bool {
        let is_same = self.frozen == self.books.superblock;
        is_same && self.books.dirty.is_empty() && self.books.space.deltas.len() == 0
    }

    /// Registers a task as waiting.
    fn add_waiter(&mut self, task: u64, wait: TaskWaitReason) {
        match wait {
            TaskWaitReason::Page(address) => {
                self.read_page(address);
                self.on_page.entry(address).or_default().push(task);
            }
            TaskWaitReason::Commit(generation) => {
                let is_open = generation == self.books.generation;
                self.wants_commit |= is_open && !self.commit.accepts_changes();
                self.on_commit.push((generation, task));
            }
            TaskWaitReason::Apply => self.on_apply.push(task),
            TaskWaitReason::Volume(id) => self.traffic.entry(id).or_default().waiting.push(task),
            TaskWaitReason::Transfers => {}
        }
    }

    /// Fails with the reason why a change must wait: a commit is being assembled, or is so far behind
    /// that memory would fill up.
    fn check_may_change(&mut self) -> Result<(), TaskWaitReason> {
        let is_tight = !self.is_unchanged_since_commit() && !self.has_space_for_change()?;
        match &self.commit {
            CommitState::Applying => Err(TaskWaitReason::Apply),
            CommitState::Idle if is_tight || self.pending_commit_writes() > BACKLOG => {
                self.wants_commit = true;
                Err(TaskWaitReason::Apply)
            }
            CommitState::Idle => Ok(()),
            _ if is_tight || self.pending_commit_writes() > BACKLOG_MAX => {
                Err(TaskWaitReason::Commit(self.durable_superblock.generation + 1))
            }
            _ => Ok(()),
        }
    }

    /// Whether space is left for one more change and the commit after it.
    fn has_space_for_change(&mut self) -> Result<bool, TaskWaitReason> {
        match self.books.has_room_for_commit(POOL_BLOCKS) {
            Err(TransactionStop::NeedPage(address)) => Err(TaskWaitReason::Page(address)),
            // The next access to the corrupt page reports the error.
            has_space => Ok(has_space.unwrap_or(true)),
        }
    }

    /// Number of pages and ranges that the next commit has to write.
    fn pending_commit_writes(&self) -> usize {
        self.books.dirty.len() + self.books.space.deltas.len()
    }

    /// Frees a part of the deferred frees. False if there are none, or it has to wait.
    fn free_deferred_step(&mut self) -> bool {
        let is_done = self.books.superblock.work.is_null();
        if self.stopped || self.is_sweep_stuck || is_done {
            return false;
        }
        if !self.is_anchored {
            // An instance that may not claim the pool leaves it unchanged.
            if self.check_may_claim().is_ok() {
                self.start_first_commit();
            }
            return false;
        }
        if let Err(wait) = self.check_may_change() {
            if let TaskWaitReason::Page(address) = wait {
                self.read_page(address);
            }
            return false;
        }
        let swept = match self.books.fill_metadata_reserve(CHANGE_BLOCKS, ReserveToLeave::Nothing) {
            Ok(()) => self.books.try_step_with_commit_space(Metadata::step_deferred_free),
            Err(stop) => Err(stop),
        };
        match swept {
            Ok(did) => {
                let is_done = self.books.superblock.work.is_null();
                self.wants_commit |= is_done;
                self.is_sweep_stuck = !did && !is_done;
                self.books.cache.end_step();
                did
            }
            Err(TransactionStop::NeedPage(address)) => {
                self.read_page(address);
                false
            }
            Err(TransactionStop::Full | TransactionStop::NeedSpace(_)) => {
                self.is_sweep_stuck = self.is_unchanged_since_commit();
                self.wants_commit |= !self.is_sweep_stuck;
                false
            }
            // A check reports the corruption; no other deferred free is delayed by it.
            Err(TransactionStop::Error(_)) => {
                self.is_sweep_stuck = !self.books.skip_corrupt_deferred_entry();
                !self.is_sweep_stuck
            }
        }
    }
}

/// Maximum number of pages and ranges that may wait for a commit to begin while another is in progress.
const BACKLOG_MAX: usize = 4096;
/// Number of pages and ranges that starts a commit without a request.
const BACKLOG: usize = 1024;
