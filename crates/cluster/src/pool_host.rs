//! Host with a pool on its disk and a volume in the pool: the production pool engine over the
//! production multipath driver.
//!
//! ```text
//!   program ── request ──▶ pool engine ── device action ──▶ multipath ──▶ network
//!             ◀─ response ───┘          ◀── result ─────────────┘
//! ```
//!
//! A pool whose device has failed recovers by itself, and one flush fails for what may be lost. The host
//! that takes the pool over does so by force, and the former owner, which knows nothing of it, only
//! flushes from then on.

mod device_io;
mod loss_recovery;
mod takeover;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tenmil_base::{ChannelWakeup, CompletionBatch, Instant, IoChannel, Random, Span};
use tenmil_sim::block_stamp::{BlockContent, BlockStamp};
use tenmil_volume::format::{BLOCK_BYTES, OwnerRecord};
use tenmil_volume::{
    ClaimCondition, CreateStep, DeviceAction, Pool, PoolConfig, PoolError, PoolOpening, PoolOwner,
    PoolRequest, VolumeOp,
};

use crate::cluster_host::{HostGoal, HostsShared};
use crate::cluster_plan::HostPlan;
use crate::cluster_simulation::RunFailure;
use crate::consistency_checker::{BlockRead, WriteEnd};
use crate::disk_access::MultipathAccess;
use crate::injected_bugs::InjectedBugs;
use crate::run_history::RecordScope;
use crate::sim_disk::{BLOCK_BYTES as SECTOR_BYTES, SimDisk};

use self::loss_recovery::LossRecovery;

/// A host with a pool.
pub(crate) struct PoolHost {
    number: usize,
    disk: usize,
    plan: HostPlan,
    seed: u64,
    bugs: InjectedBugs,
    link: MultipathAccess,
    random: Random,
    stage: PoolStage,
    /// Actions of the pool that wait for a free transfer slot.
    backlog: VecDeque<DeviceAction>,
    /// Transfers in flight, by token.
    under_way: BTreeMap<u64, (DeviceTransfer, u32, Instant)>,
    free: Vec<u32>,
    ops: BTreeMap<u64, OutstandingRequest>,
    next_token: u64,
    next_at: Instant,
    goal: HostGoal,
    /// Owner identifier under which this host has opened the pool.
    me: u128,
    /// The host takes the pool from its owner.
    has_force: bool,
    is_cut_off: bool,
    /// The disk is reserved, and another host is about to take the pool over: this one keeps on writing,
    /// and what it reads proves nothing any more.
    is_preempted: bool,
    openings: u64,
    /// Blocks were written for the first time since the last flush, so the next flush commits.
    is_dirty: bool,
    touched: BTreeSet<u64>,
    flushed: u64,
    audited: u64,
    volume: Option<u64>,
    recovery: LossRecovery,
}

enum PoolStage {
    /// The pool has not been opened.
    Idle,
    /// The pool is opened at this time.
    Pausing(Instant),
    Opening(Box<PoolOpening>),
    Open(Box<Pool>),
    /// Another host owns the pool, and this host knows.
    Fenced,
}

/// A transfer in flight.
enum DeviceTransfer {
    Open,
    Action(DeviceAction),
}

/// A request of the program.
struct OutstandingRequest {
    kind: RequestKind,
    first: u64,
    blocks: u64,
    begun: Instant,
    data: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Claim,
    Find,
    Create,
    Read,
    Write,
    Flush,
}

/// Maximum number of transfers in flight.
const SLOTS: u32 = 12;
/// Maximum bytes per transfer.
const SLOT_BYTES: u32 = 128 << 10;
/// Bytes of data memory of a host.
pub(crate) const MEMORY_BYTES: usize = (SLOTS * SLOT_BYTES) as usize;
const SECTORS: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;
const CACHE_BYTES: usize = 1 << 20;
const VOLUME_BLOCKS: u64 = 64;
const VOLUME: &str = "v";
/// Time limit of any request.
const BOUND: Span = Span::from_secs(60);
const PAUSE: Span = Span::from_ms(50);

/// Creates a pool on an empty disk.
pub(crate) fn create_pool_on_disk(disk: &SimDisk, blocks: u64) -> Result<(), String> {
    let new = PoolConfig { name: "pool".into(), uuid: 0x9001, blocks };
    for step in new.create_steps().map_err(|error| error.to_string())? {
        if let CreateStep::Write { at, bytes } = step {
            disk.write_initial(at * SECTORS, &bytes[..]);
        }
    }
    Ok(())
}

impl PoolHost {
    /// Creates a host that opens the pool at once, or when it takes the pool over.
    pub(crate) fn new(
        (number, seed, bugs): (usize, u64, InjectedBugs),
        plan: &HostPlan,
        disk: usize,
        (link, is_first): (MultipathAccess, bool),
        now: Instant,
    ) -> Self {
        Self {
            number,
            disk,
            plan: plan.clone(),
            seed,
            bugs,
            link,
            random: Random::new(seed.wrapping_add(100 + number as u64)),
            stage: if is_first { PoolStage::Pausing(now) } else { PoolStage::Idle },
            backlog: VecDeque::new(),
            under_way: BTreeMap::new(),
            free: (0..SLOTS).collect(),
            ops: BTreeMap::new(),
            next_token: 0,
            next_at: now,
            goal: HostGoal::Io,
            me: 0,
            has_force: false,
            is_cut_off: false,
            is_preempted: false,
            openings: 0,
            is_dirty: false,
            touched: BTreeSet::new(),
            flushed: 0,
            audited: 0,
            volume: None,
            recovery: LossRecovery::default(),
        }
    }

    /// Sets the goal.
    pub(crate) fn set_goal(&mut self, goal: HostGoal, now: Instant) {
        (self.goal, self.flushed, self.audited, self.next_at) = (goal, 0, 0, now);
        if goal == HostGoal::Close {
            (self.stage, self.link.queue) = (PoolStage::Idle, None);
            self.ops.clear();
            self.link.multipath.shut_down(now);
        }
    }

    /// Whether the goal is reached.
    pub(crate) fn is_done(&mut self, is_owner: bool) -> bool {
        let is_quiet = self.ops.is_empty();
        match self.goal {
            HostGoal::Io => false,
            HostGoal::Close => !self.link.multipath.is_shutting_down(),
            _ if !is_owner => is_quiet,
            HostGoal::Drain => is_quiet,
            HostGoal::Flush => is_quiet && self.flushed > 0,
            HostGoal::Audit => is_quiet && self.audited >= VOLUME_BLOCKS,
        }
    }

    /// Disk of the pool.
    pub(crate) fn disk_index(&self) -> usize {
        self.disk
    }

    fn begin_request(&mut self) {
        let opening = PoolOpening::new(self.volume_blocks(), CACHE_BYTES);
        self.openings += 1;
        let id = u128::from(self.openings) << 8 | (self.number as u128 + 1);
        let bugs = tenmil_volume::InjectedBugs { ignore_fence: self.bugs.pool_ignores_fence };
        let record = OwnerRecord { pid: u32::try_from(id).unwrap_or(1), ..OwnerRecord::NONE };
        let opening = opening.for_writing(PoolOwner { id, record }).with_bugs(bugs);
        self.me = id;
        self.stage = PoolStage::Opening(Box::new(opening));
    }

    fn volume_blocks(&self) -> u64 {
        self.plan.blocks / SECTORS
    }

    /// Time at which it must be polled without an event.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let queue = self.link.queue.as_ref().map_or(Instant::NEVER, ChannelWakeup::wake_at);
        let next = match self.stage {
            PoolStage::Pausing(until) => until,
            PoolStage::Open(_) => self.next_at.min(self.recovery.wake_at()),
            _ => Instant::NEVER,
        };
        let next = if next > now { next } else { Instant::NEVER };
        self.link.multipath.wake_at(now).min(queue).min(next)
    }

    /// Performs pending work. Returns true if there was any.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub(crate) fn poll_pool(
        &mut self,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) -> Result<bool, RunFailure> {
        let mut is_busy = false;
        while let Some(event) = self.link.multipath.poll(now) {
            is_busy = true;
            if event.is_for_operator() {
                self.record_event(now, &event.to_string(), shared);
            }
        }
        if self.goal == HostGoal::Close {
            return Ok(is_busy);
        }
        is_busy |= self.link.take_new_queue();
        let Some(mut queue) = self.link.queue.take() else { return Ok(is_busy) };
        let mut completions = CompletionBatch::with_capacity(16);
        queue.poll(now, &mut completions);
        self.handle_loss_count(queue.known_write_loss_count(), !completions.is_empty());
        for response in completions.drain() {
            is_busy = true;
            self.handle_transfer_completion(now, response, shared)?;
        }
        is_busy |= self.recover_if_stopped(now, shared);
        is_busy |= self.continue_requests(now, shared)?;
        is_busy |= self.submit_transfers(now, &mut queue);
        queue.flush_submissions();
        self.link.queue = Some(queue);
        self.check_request_age(now)?;
        Ok(is_busy)
    }

    fn continue_requests(
        &mut self,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) -> Result<bool, RunFailure> {
        if let PoolStage::Pausing(until) = self.stage {
            if now < until {
                return Ok(false);
            }
            self.begin_request();
            return Ok(true);
        }
        let mut is_busy = false;
        while self.should_submit(now, shared) {
            is_busy = true;
            self.submit_random(now, shared);
        }
        while let PoolStage::Open(store) = &mut self.stage {
            if let Some(action) = store.next_action() {
                let is_commit = matches!(action, DeviceAction::WritePages { .. });
                if is_commit && self.volume.is_some() && !self.is_preempted {
                    // After a take-over only flushes are requested, so a commit of metadata by this
                    // host is a violation.
                    let kept = shared.checker.check_pool_owner((self.number, self.disk), now);
                    kept.map_err(|why| RunFailure {
                        scope: RecordScope::disk(self.disk),
                        text: why,
                    })?;
                }
                match action {
                    DeviceAction::Zero { token, offset, blocks } => {
                        self.zero_read_data(token, offset, blocks)
                    }
                    action => self.backlog.push_back(action),
                }
            } else if let Some((token, response)) = store.next_response() {
                self.handle_completion(now, token, response, shared)?;
            } else {
                break;
            }
            is_busy = true;
        }
        Ok(is_busy)
    }

    fn should_submit(&self, now: Instant, shared: &HostsShared<'_>) -> bool {
        let PoolStage::Open(_) = self.stage else { return false };
        if now < self.next_at {
            return false;
        }
        if self.volume.is_none() {
            return self.ops.is_empty();
        }
        let is_former = shared.checker.pool_owner(self.disk).is_some_and(|it| it != self.number);
        match self.goal {
            HostGoal::Io if self.is_preempted => self.ops.len() < self.plan.depth.min(4),
            HostGoal::Io if is_former => self.ops.is_empty(),
            HostGoal::Io if self.is_cut_off => false,
            HostGoal::Io => self.ops.len() < self.plan.depth.min(4),
            HostGoal::Flush => !is_former && self.ops.is_empty() && self.flushed == 0,
            HostGoal::Audit => !is_former && self.ops.is_empty() && self.audited < VOLUME_BLOCKS,
            HostGoal::Drain | HostGoal::Close => false,
        }
    }

    /// Submits a random request to the pool.
    fn submit_random(&mut self, now: Instant, shared: &mut HostsShared<'_>) {
        let (kind, first, blocks) = self.draw_request(shared);
        let overlaps =
            |op: &OutstandingRequest| op.first < first + blocks && first < op.first + op.blocks;
        // The order of concurrent writes to one block would be unknown.
        if kind == RequestKind::Write && self.ops.values().any(overlaps) {
            self.next_at = now.after(Span::from_us(100));
            return;
        }
        *shared.writes += 1;
        let token = *shared.writes;
        let mut data = vec![0; usize::try_from(blocks).unwrap_or(0) * BLOCK_BYTES];
        if kind == RequestKind::Write {
            for (lba, sector) in (first * SECTORS..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
                BlockStamp { seed: self.stamp_seed(), lba, token, version: self.number as u64 }
                    .write_block(sector);
            }
            let range = (first * SECTORS, (first + blocks) * SECTORS);
            shared.checker.record_write_begin(token, (self.number, self.disk), range, now);
            for block in first..first + blocks {
                self.is_dirty |= self.touched.insert(block);
            }
        }
        let volume = self.volume.unwrap_or(0);
        let ask = match kind {
            RequestKind::Claim => PoolRequest::Claim,
            RequestKind::Find => PoolRequest::Find(VOLUME.into()),
            RequestKind::Create => PoolRequest::Change(VolumeOp::Create {
                name: VOLUME.into(),
                blocks: VOLUME_BLOCKS,
                unit: 1,
                uuid: 5,
                checksums: false,
            }),
            RequestKind::Read => PoolRequest::Read { volume, block: first, blocks },
            RequestKind::Write => PoolRequest::Write { volume, block: first, blocks },
            RequestKind::Flush => PoolRequest::Flush,
        };
        let pause = match self.goal {
            HostGoal::Io => Span { ns: self.random.below(self.plan.think.ns) },
            _ => Span::from_us(1),
        };
        self.next_at = now.after(pause);
        let op = OutstandingRequest { kind, first, blocks, begun: now, data };
        self.record_request(now, token, &op, "begins", shared);
        self.ops.insert(token, op);
        if let PoolStage::Open(store) = &mut self.stage {
            store.submit(token, ask);
        }
    }

    fn draw_request(&mut self, shared: &HostsShared<'_>) -> (RequestKind, u64, u64) {
        if self.volume.is_none() {
            // A superblock of a claim that has failed may name this host.
            let has_claimed = shared.checker.pool_owner(self.disk) == Some(self.number);
            return match (has_claimed, self.flushed) {
                (false, _) => (RequestKind::Claim, 0, 0),
                // The lookup of the volume has failed.
                (true, u64::MAX) => (RequestKind::Create, 0, 0),
                (true, _) => (RequestKind::Find, 0, 0),
            };
        }
        let is_former = shared.checker.pool_owner(self.disk).is_some_and(|it| it != self.number);
        if is_former && !self.is_preempted {
            return (RequestKind::Flush, 0, 0);
        }
        match self.goal {
            HostGoal::Flush => return (RequestKind::Flush, 0, 0),
            HostGoal::Audit => return (RequestKind::Read, self.audited, 4),
            _ => {}
        }
        let blocks = 1 + self.random.below(4);
        let first = self.random.below(VOLUME_BLOCKS - blocks);
        match self.random.below(16) {
            drawn if drawn < self.plan.flushes => (RequestKind::Flush, 0, 0),
            drawn if drawn < self.plan.flushes + self.plan.reads && !self.is_preempted => {
                (RequestKind::Read, first, blocks)
            }
            _ => (RequestKind::Write, first, blocks),
        }
    }

    /// Handles the response to a request.
    fn handle_completion(
        &mut self,
        now: Instant,
        token: u64,
        response: Result<tenmil_volume::PoolResponse, PoolError>,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        let Some(op) = self.ops.remove(&token) else { return Ok(()) };
        let reported = match &response {
            Ok(_) => "ends".to_owned(),
            Err(error) => format!("fails: {error}"),
        };
        if op.kind != RequestKind::Read || response.is_err() {
            self.record_request(now, token, &op, &reported, shared);
        }
        match (op.kind, &response) {
            (RequestKind::Claim, Ok(_)) => {
                shared.checker.record_pool_claim((self.number, self.disk), now);
                self.record_unflushed_may_be_lost(now, shared);
            }
            (
                RequestKind::Find | RequestKind::Create,
                Ok(tenmil_volume::PoolResponse::Volume(info)),
            ) => {
                (self.volume, self.flushed) = (Some(info.id), 0);
            }
            (RequestKind::Find, Err(PoolError::NoVolume(_))) => self.flushed = u64::MAX,
            (RequestKind::Write, _) => {
                let is_success = response.is_ok();
                let (is_durable, may_flicker) = (false, true);
                let end = WriteEnd { ended: now, is_success, is_durable, may_flicker };
                let ended = shared.checker.record_write_end(token, end);
                ended.map_err(|(lba, why)| self.block_violation(lba, &why.to_string()))?;
            }
            (RequestKind::Flush, _) if self.must_flush_fail(response.is_ok()) => {
                shared.checker.record_flush_failure(
                    self.number,
                    self.disk,
                    now.after(Span { ns: 1 }),
                );
            }
            (RequestKind::Flush, Ok(_)) => {
                (self.flushed, self.is_dirty) = (self.flushed + 1, false);
                // A request that commits nothing does not check the owner of the pool, and guarantees nothing.
                if shared.checker.pool_owner(self.disk).is_none_or(|it| it == self.number) {
                    shared.checker.record_flush(self.number, self.disk, op.begun, now);
                }
            }
            (RequestKind::Read, Ok(_)) => self.check_read(now, token, &op, shared)?,
            _ => {}
        }
        if let Err(error) = response {
            self.next_at = self.next_at.max(now.after(PAUSE));
            self.close_if_superseded(now, &error, shared);
        }
        Ok(())
    }

    /// Leaves the pool if it has another owner. A claim that fails because of the device is repeated: its
    /// superblock may be durable, and then no other owner continues.
    fn close_if_superseded(
        &mut self,
        now: Instant,
        error: &PoolError,
        shared: &mut HostsShared<'_>,
    ) {
        if matches!(error, PoolError::TakenOver { .. } | PoolError::Owned { .. }) {
            self.close_pool(now, shared);
            self.stage = PoolStage::Fenced;
            self.record_event(now, "leaves the pool to its new owner", shared);
        }
    }

    /// Closes the pool. Uncommitted data may be lost.
    fn close_pool(&mut self, now: Instant, shared: &mut HostsShared<'_>) {
        for (token, op) in std::mem::take(&mut self.ops) {
            if op.kind == RequestKind::Write {
                let (is_success, is_durable, may_flicker) = (false, false, true);
                let end = WriteEnd { ended: now, is_success, is_durable, may_flicker };
                // Reads of this write were checked when they completed.
                let _ = shared.checker.record_write_end(token, end);
            }
        }
        self.backlog.clear();
        self.volume = None;
        self.flushed = 0;
        (self.is_dirty, self.touched) = (false, BTreeSet::new());
        self.record_unflushed_may_be_lost(now, shared);
    }

    /// Records that unflushed data may be lost, and that this host knows. Does nothing if another
    /// host owns the pool, whose data are not affected.
    fn record_unflushed_may_be_lost(&self, now: Instant, shared: &mut HostsShared<'_>) {
        if shared.checker.pool_owner(self.disk).is_some_and(|it| it != self.number) {
            return;
        }
        shared.checker.record_power_loss(self.disk, now);
        shared.checker.record_flush_failure(self.number, self.disk, now.after(Span { ns: 1 }));
    }

    fn check_read(
        &mut self,
        now: Instant,
        token: u64,
        op: &OutstandingRequest,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        if self.is_preempted {
            return Ok(());
        }
        let mut found = Vec::new();
        for (lba, sector) in (op.first * SECTORS..).zip(op.data.chunks_exact(SECTOR_BYTES)) {
            match BlockStamp::decode_block(sector) {
                BlockContent::Zeroes => found.push((lba, 0)),
                BlockContent::Stamped(it) if it.seed == self.stamp_seed() && it.lba == lba => {
                    found.push((lba, it.token));
                }
                other => {
                    let text = format!("found {other:?}, expected a write to this block");
                    return Err(self.block_violation(lba, &text));
                }
            }
        }
        let mut values: Vec<u64> = found.iter().map(|(_, value)| *value).collect();
        values.dedup();
        self.record_request(now, token, op, &format!("ends: {values:?}"), shared);
        for (lba, found) in found {
            let read = BlockRead { disk: self.disk, lba, found, begun: op.begun, ended: now };
            let checked = shared.checker.check_read(read);
            checked.map_err(|why| self.block_violation(lba, &why.to_string()))?;
        }
        if self.goal == HostGoal::Audit {
            self.audited = op.first + op.blocks;
        }
        Ok(())
    }

    fn stamp_seed(&self) -> u64 {
        self.seed << 8 | self.disk as u64
    }

    /// Handles the end of reading the superblocks.
    fn handle_opened(&mut self, now: Instant, shared: &mut HostsShared<'_>) {
        let stage = std::mem::replace(&mut self.stage, PoolStage::Pausing(now.after(PAUSE)));
        let PoolStage::Opening(opening) = stage else { return };
        match opening.finish() {
            Ok(opened) => {
                let mut store = opened.store;
                // The previous incarnation of this host has ended.
                let before = store.owner().map(|owner| owner.id);
                let is_mine = before.is_some_and(|id| id & 0xff == self.number as u128 + 1);
                store.set_claim_condition(match before {
                    Some(id) if is_mine => ClaimCondition::Over(id),
                    Some(_) if self.has_force => ClaimCondition::Force,
                    _ => ClaimCondition::Free,
                });
                let text = format!("opens the pool, owner {:?}", store.owner().map(|it| it.id));
                self.record_event(now, &text, shared);
                self.record_unflushed_may_be_lost(now, shared);
                self.recovery.reset_at_open(store.device_error_stop_count());
                self.stage = PoolStage::Open(Box::new(store));
            }
            Err(error) => {
                self.record_event(now, &format!("does not open the pool: {error}"), shared)
            }
        }
    }

    fn block_violation(&self, lba: u64, why: &str) -> RunFailure {
        let Self { number, disk, .. } = *self;
        let text = format!("host {number}, sector {lba} of the volume on disk {disk}: {why}");
        RunFailure {
            scope: RecordScope { host: None, disk: Some(disk), blocks: Some(lba..lba + 1) },
            text,
        }
    }

    fn check_request_age(&self, now: Instant) -> Result<(), RunFailure> {
        let late = self.ops.values().find(|op| now.since(op.begun) > BOUND);
        let Some(op) = late else { return Ok(()) };
        let text = format!(
            "host {}: {:?} on the pool has not completed, expected its completion within {BOUND}",
            self.number, op.kind
        );
        Err(RunFailure { scope: RecordScope::host(self.number), text })
    }

    fn record_event(&self, now: Instant, what: &str, shared: &mut HostsShared<'_>) {
        let scope = RecordScope { host: None, disk: Some(self.disk), blocks: None };
        shared.add_record(now, scope, format!("host {}: {what}", self.number));
    }

    fn record_request(
        &self,
        now: Instant,
        token: u64,
        op: &OutstandingRequest,
        what: &str,
        shared: &mut HostsShared<'_>,
    ) {
        let (number, kind) = (self.number, format!("{:?}", op.kind).to_lowercase());
        let range = op.first * SECTORS..(op.first + op.blocks) * SECTORS;
        let (blocks, place) = match op.blocks {
            0 => (None, "the pool".to_owned()),
            _ => (Some(range.clone()), format!("{}..{} of the volume", range.start, range.end)),
        };
        let scope = RecordScope { host: None, disk: Some(self.disk), blocks };
        shared.add_record(now, scope, format!("host {number}: w{token} {kind} {place} {what}"));
    }
}
