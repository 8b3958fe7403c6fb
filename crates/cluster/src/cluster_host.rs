//! Host: the production multipath driver and queues, and a program that reads, writes and flushes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Random,
    Request, RequestFlags, Segment, Span,
};
use tenmil_drivers::Mirror;
use tenmil_nvme_fabrics::PathEvent;
use tenmil_sim::block_stamp::{BlockContent, BlockStamp};

use crate::access_path::DiskOrMirrorAccess;
use crate::cluster_network::ClusterNetwork;
use crate::cluster_plan::HostPlan;
use crate::cluster_simulation::RunFailure;
use crate::consistency_checker::{BlockRead, ConsistencyChecker, WriteEnd};
use crate::disk_access::{ExportAddress, MultipathAccess};
use crate::injected_bugs::InjectedBugs;
use crate::mirror_legs::{MirrorAccess, MirrorSetup};
use crate::run_history::{RecordScope, RunHistory};
use crate::sim_disk::BLOCK_BYTES;

/// A host.
pub(crate) struct ClusterHost {
    number: usize,
    disk: usize,
    plan: HostPlan,
    seed: u64,
    access_path: DiskOrMirrorAccess,
    ops: BTreeMap<u64, HostRequest>,
    free: Vec<u32>,
    completions: CompletionBatch,
    random: Random,
    next_at: Instant,
    goal: HostGoal,
    /// Legs of its mirror that were in sync when it was looked at last.
    in_sync: Option<u8>,
    /// When a path was lost last.
    path_lost_at: Option<Instant>,
    /// Successful flushes since the goal was set.
    flushed: u64,
    /// Next block of the audit.
    audited: u64,
}

/// Goal of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostGoal {
    /// Read, write and flush.
    Io,
    /// Submit no further requests.
    Drain,
    /// Flush until one succeeds.
    Flush,
    /// Read all blocks once.
    Audit,
    /// Disconnect.
    Close,
}

/// State shared by all hosts of a run.
pub(crate) struct HostsShared<'a> {
    /// Checker.
    pub(crate) checker: &'a mut ConsistencyChecker,
    /// History.
    pub(crate) history: &'a Mutex<RunHistory>,
    /// Number of the last write.
    pub(crate) writes: &'a mut u64,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct HostRequest {
    operation: Operation,
    first: u64,
    blocks: u64,
    begun: Instant,
    slot: u32,
    is_forced: bool,
}

/// Maximum number of requests in flight.
const SLOTS: u32 = 12;
/// Maximum blocks per request.
const SLOT_BLOCKS: u32 = 64;
/// Time limit of any request, whatever happens to the peer.
const BOUND: Span = Span::from_secs(60);
/// Fill byte of memory that no request owns.
const CANARY: u8 = 0xa5;
/// Pause of the program after a failure.
const FAILURE_PAUSE: Span = Span::from_ms(50);
const COMPLETIONS_MAX: usize = 16;
/// Blocks per read of the audit.
const AUDIT_BLOCKS: u64 = 8;

impl ClusterHost {
    /// A host that begins to call the processes that serve its disk, or the legs of its mirror if it has
    /// more than one address. It opens the mirror then.
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub(crate) fn new(
        (number, seed, bugs): (usize, u64, InjectedBugs),
        plan: &HostPlan,
        (disk, addresses): (usize, &[ExportAddress]),
        network: &ClusterNetwork,
        (now, begins_at): (Instant, Instant),
    ) -> Result<Self, String> {
        let bytes = SLOTS as usize * SLOT_BLOCKS as usize * BLOCK_BYTES;
        let (names, memory) = ((number, bugs), (network, bytes));
        let access_path = match addresses {
            [address] => DiskOrMirrorAccess::Paths(Box::new(MultipathAccess::new(
                names, plan, address, memory, now,
            )?)),
            _ => {
                let legs = MirrorAccess::new(names, plan, addresses, memory, (now, begins_at))?;
                DiskOrMirrorAccess::Mirror(Box::new(legs))
            }
        };
        let host = Self {
            number,
            disk,
            plan: plan.clone(),
            seed,
            access_path,
            ops: BTreeMap::new(),
            free: (0..SLOTS).collect(),
            completions: CompletionBatch::with_capacity(COMPLETIONS_MAX),
            random: Random::new(seed.wrapping_add(number as u64 + 1)),
            next_at: begins_at,
            goal: HostGoal::Io,
            in_sync: None,
            path_lost_at: None,
            flushed: 0,
            audited: 0,
        };
        (0..SLOTS).for_each(|slot| host.fill_with_canary(slot));
        Ok(host)
    }

    /// Sets the goal.
    pub(crate) fn set_goal(&mut self, goal: HostGoal, now: Instant) {
        (self.goal, self.flushed, self.audited, self.next_at) = (goal, 0, 0, now);
        if goal == HostGoal::Close {
            self.access_path.shut_down(now);
        }
    }

    /// Whether the goal is reached, which is never the case for `Io`.
    pub(crate) fn is_done(&mut self) -> bool {
        let is_idle = self.ops.is_empty();
        match self.goal {
            HostGoal::Io => false,
            HostGoal::Drain => is_idle,
            HostGoal::Flush => is_idle && self.flushed > 0,
            HostGoal::Audit => is_idle && self.audited >= self.plan.blocks,
            HostGoal::Close => !self.access_path.is_shutting_down(),
        }
    }

    /// Performs pending work. Returns true if there was any.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub(crate) fn poll_host(
        &mut self,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) -> Result<bool, RunFailure> {
        let mut is_busy = false;
        while let Some((leg, event)) = self.access_path.next_path_event(now) {
            is_busy = true;
            self.record_path_event(now, leg, &event, shared);
        }
        if self.goal != HostGoal::Close {
            is_busy |= self.access_path.take_multipath_queue();
        }
        if let Some(mut queue) = self.access_path.multipath_queue().take() {
            let mut completions =
                std::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
            queue.poll(now, &mut completions);
            let ended: Vec<IoCompletion> = completions.drain().collect();
            self.record_legs(now, queue.known_write_loss_count(), shared);
            self.completions = completions;
            for completion in ended {
                is_busy = true;
                self.handle_completion(now, completion, shared)?;
            }
            while self.wants_to_submit(now) && self.submit(now, &mut *queue, shared) {
                is_busy = true;
            }
            queue.flush_submissions();
            *self.access_path.multipath_queue() = Some(queue);
        }
        self.check_request_age(now)?;
        Ok(is_busy)
    }

    /// Time at which it must be polled without an event.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let next = if self.wants_to_submit(self.next_at) { self.next_at } else { Instant::NEVER };
        self.access_path.wake_at(now).min(next)
    }

    /// What opens its mirror, if that is to be opened.
    pub(crate) fn take_mirror_setup(&mut self, now: Instant) -> Option<MirrorSetup> {
        self.access_path.mirror_legs()?.take_mirror_setup(now)
    }

    /// Its mirror was opened, or was not.
    pub(crate) fn handle_mirror_opened(
        &mut self,
        opened: Result<Mirror, String>,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) {
        let Some(legs) = self.access_path.mirror_legs() else { return };
        let text = format!("host {}: {}", self.number, legs.handle_opened(opened, now));
        shared.add_record(now, RecordScope::host(self.number), text);
    }

    /// A leg of its mirror loses its power. Whether what was not flushed may be lost.
    pub(crate) fn handle_leg_power_loss(&mut self, leg: usize, now: Instant) -> bool {
        self.access_path.mirror_legs().is_none_or(|legs| legs.handle_power_loss(leg, now))
    }

    /// Whether what was not flushed may be lost if the host ends now.
    pub(crate) fn may_lose_unflushed(&mut self) -> bool {
        self.access_path.mirror_legs().is_some_and(|legs| legs.may_lose_unflushed())
    }

    fn record_legs(&mut self, now: Instant, losses: u64, shared: &mut HostsShared<'_>) {
        let Some((in_sync, left)) = self
            .access_path
            .mirror_legs()
            .and_then(|legs| legs.in_sync_mask_and_remaining_regions())
        else {
            return;
        };
        if self.access_path.mirror_legs().is_some_and(|legs| legs.has_new_losses(losses)) {
            // It fails a flush for that. A leg counts as lossy as well if it cannot prove that it kept its cache.
            shared.checker.record_power_loss(self.disk, now);
        }
        if self.in_sync.replace(in_sync) != Some(in_sync) {
            if self
                .access_path
                .mirror_legs()
                .is_some_and(|legs| legs.may_in_sync_legs_lack_writes())
            {
                shared.checker.record_power_loss(self.disk, now);
            }
            let legs: Vec<u8> = (0..8).filter(|leg| in_sync >> leg & 1 == 1).collect();
            let text = format!(
                "host {}: legs {legs:?} of its mirror are in sync, {left} regions are to be copied",
                self.number
            );
            shared.add_record(now, RecordScope::host(self.number), text);
        }
    }

    fn record_path_event(
        &mut self,
        now: Instant,
        leg: usize,
        event: &PathEvent,
        shared: &mut HostsShared<'_>,
    ) {
        if matches!(event, PathEvent::Down { .. }) {
            self.path_lost_at = Some(now);
        }
        if event.is_for_operator() {
            let leg = match &self.access_path {
                DiskOrMirrorAccess::Paths(_) => String::new(),
                DiskOrMirrorAccess::Mirror(_) => format!("leg {leg}, "),
            };
            let text = format!("host {}: {leg}{event}", self.number);
            shared.add_record(now, RecordScope::host(self.number), text);
        }
    }

    fn wants_to_submit(&self, now: Instant) -> bool {
        let wants = match self.goal {
            HostGoal::Io => self.ops.len() < self.plan.depth,
            HostGoal::Drain | HostGoal::Close => false,
            HostGoal::Flush => self.ops.is_empty() && self.flushed == 0,
            HostGoal::Audit => self.audited < self.plan.blocks,
        };
        wants && now >= self.next_at && !self.free.is_empty()
    }

    /// Submits one request. False if it was not taken.
    fn submit(
        &mut self,
        now: Instant,
        queue: &mut dyn IoChannel,
        shared: &mut HostsShared<'_>,
    ) -> bool {
        let Some(&slot) = self.free.last() else { return false };
        let (operation, first, blocks, is_forced) = self.draw_request();
        if self.plan.is_mirrored
            && operation == Operation::Write
            && self.has_write_in_flight(first, blocks)
        {
            self.next_at = now.after(Span::from_us(100));
            return false;
        }
        // The token identifies the write for the checker.
        let id = *shared.writes + 1;
        let segment = self.slot_segment(slot, blocks);
        if operation == Operation::Write {
            self.stamp_blocks(segment, first, id);
        }
        let request = Request {
            token: id,
            lba: first,
            blocks: u32::try_from(blocks).unwrap_or(0),
            segment_count: u16::from(operation != Operation::Flush),
            operation,
            flags: if is_forced { RequestFlags::FUA } else { RequestFlags::NONE },
            ..Request::PLACEHOLDER
        };
        let pause =
            if self.goal == HostGoal::Io { self.random.below(self.plan.think.ns) } else { 0 };
        if queue.submit(now, &[request], &[segment]) == 0 {
            self.fill_with_canary(slot);
            self.next_at = now.after(Span::from_ms(1));
            return false;
        }
        self.next_at = now.after(Span { ns: pause });
        *shared.writes = id;
        self.free.pop();
        let op = HostRequest { operation, first, blocks, begun: now, slot, is_forced };
        if operation == Operation::Write {
            let (who, range) = ((self.number, self.disk), (first, first + blocks));
            shared.checker.record_write_begin(id, who, range, now);
        }
        if self.goal == HostGoal::Audit {
            self.audited = first + blocks;
        }
        self.record_request(now, id, &op, "begins".into(), shared);
        self.ops.insert(id, op);
        true
    }

    /// Draws the next request.
    fn draw_request(&mut self) -> (Operation, u64, u64, bool) {
        match self.goal {
            HostGoal::Flush => return (Operation::Flush, 0, 0, false),
            HostGoal::Audit => {
                let blocks = AUDIT_BLOCKS.min(self.plan.blocks - self.audited);
                return (Operation::Read, self.audited, blocks, false);
            }
            _ => {}
        }
        let most = self.plan.request_blocks_max.min(self.plan.blocks);
        let blocks = 1 + self.random.below(most);
        let first = self.random.below(self.plan.blocks - blocks + 1);
        let drawn = self.random.below(16);
        if drawn < self.plan.flushes {
            (Operation::Flush, 0, 0, false)
        } else if drawn < self.plan.flushes + self.plan.reads {
            (Operation::Read, first, blocks, false)
        } else {
            let is_forced = self.random.below(16) < self.plan.forced;
            (Operation::Write, first, blocks, is_forced)
        }
    }

    /// Handles a completion. One for a request that is not in flight is a violation. The checker sees
    /// it before the buffer is reused.
    fn handle_completion(
        &mut self,
        now: Instant,
        completion: IoCompletion,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        let id = completion.token;
        let Some(op) = self.ops.remove(&id) else {
            let text = format!("host {}: request {id} completed twice", self.number);
            return Err(RunFailure { scope: RecordScope::host(self.number), text });
        };
        let is_success = completion.status.is_success();
        if !is_success {
            self.next_at = self.next_at.max(now.after(FAILURE_PAUSE));
        }
        let reported = if is_success {
            "ends".into()
        } else {
            format!("fails: {}", status_name(completion.status))
        };
        match op.operation {
            Operation::Write => {
                self.record_request(now, id, &op, reported, shared);
                let end = WriteEnd {
                    ended: now,
                    is_success,
                    is_durable: op.is_forced,
                    may_flicker: self.plan.is_mirrored || self.path_lost_at >= Some(op.begun),
                };
                let ended = shared.checker.record_write_end(id, end);
                let fail = |lba, why: &str| self.block_violation(lba, &format!("w{id}"), why);
                ended.map_err(|(lba, why)| fail(lba, &why.to_string()))?;
                let is_conflict =
                    completion.status.0 == tenmil_wire::Status::RESERVATION_CONFLICT.0;
                let kept = shared.checker.check_write_against_reservation(id, is_conflict);
                kept.map_err(|why| fail(op.first, &why))?;
            }
            Operation::Flush => {
                self.record_request(now, id, &op, reported, shared);
                if is_success {
                    self.flushed += 1;
                    if let Some(legs) = self.access_path.mirror_legs() {
                        legs.record_flush(op.begun);
                    }
                    shared.checker.record_flush(self.number, self.disk, op.begun, now);
                } else {
                    shared.checker.record_flush_failure(self.number, self.disk, now);
                }
            }
            _ if !is_success => {
                self.record_request(now, id, &op, reported, shared);
                if self.goal == HostGoal::Audit {
                    self.audited = self.audited.min(op.first);
                }
            }
            _ => self.check_read(now, id, &op, shared)?,
        }
        self.fill_with_canary(op.slot);
        self.free.push(op.slot);
        Ok(())
    }

    fn check_read(
        &mut self,
        now: Instant,
        id: u64,
        op: &HostRequest,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        let mut bytes = vec![0; usize::try_from(op.blocks).unwrap_or(0) * BLOCK_BYTES];
        let loaded =
            self.access_path.regions().load(self.slot_segment(op.slot, op.blocks), &mut bytes);
        let mut broken = loaded.err().map(|why| (op.first, invalid_segment_text(&why)));
        let mut found = Vec::new();
        for (lba, block) in (op.first..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            match self.write_id_of_block(lba, block) {
                Ok(value) => found.push((lba, value)),
                Err(why) => broken = broken.or(Some((lba, why))),
            }
        }
        let values: Vec<String> = found.iter().map(|(_, value)| format!("w{value}")).collect();
        self.record_request(now, id, op, format!("ends: {}", format_with_runs(&values)), shared);
        for (lba, found) in found {
            let read = BlockRead { disk: self.disk, lba, found, begun: op.begun, ended: now };
            let checked = shared.checker.check_read(read);
            broken = broken.or(checked.err().map(|why| (lba, why.to_string())));
        }
        let Some((lba, why)) = broken else { return Ok(()) };
        Err(self.block_violation(lba, &format!("r{id}"), &why))
    }

    /// Whether a write to any of these blocks is in flight.
    fn has_write_in_flight(&self, first: u64, blocks: u64) -> bool {
        let overlaps = |op: &HostRequest| op.first < first + blocks && first < op.first + op.blocks;
        self.ops.values().any(|op| op.operation == Operation::Write && overlaps(op))
    }

    /// Violation in one block, detected at the end of a request.
    fn block_violation(&self, lba: u64, request: &str, why: &str) -> RunFailure {
        let Self { number, disk, .. } = *self;
        let text = format!("host {number}, block {lba} of disk {disk} ({request}): {why}");
        RunFailure {
            scope: RecordScope { host: None, disk: Some(disk), blocks: Some(lba..lba + 1) },
            text,
        }
    }

    /// Write identifier that a block contains.
    fn write_id_of_block(&self, lba: u64, block: &[u8]) -> Result<u64, String> {
        match BlockStamp::decode_block(block) {
            BlockContent::Zeroes => Ok(0),
            BlockContent::Stamped(stamp) if stamp.seed == self.stamp_seed() && stamp.lba == lba => {
                Ok(stamp.token)
            }
            BlockContent::Stamped(BlockStamp { seed, lba, token, .. }) => Err(format!(
                "found w{token} of block {lba} of disk {}, expected a write to this block",
                seed & 0xff
            )),
            BlockContent::Torn { .. } | BlockContent::Garbage { .. } => {
                Err("found bytes that no host has written".to_owned())
            }
        }
    }

    /// Seed in the stamps of all blocks of its disk.
    fn stamp_seed(&self) -> u64 {
        self.seed << 8 | self.disk as u64
    }

    fn stamp_blocks(&self, segment: Segment, first: u64, token: u64) {
        let mut bytes = vec![0; segment.len_bytes as usize];
        for (lba, block) in (first..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            BlockStamp { seed: self.stamp_seed(), lba, token, version: self.number as u64 }
                .write_block(block);
        }
        // The segment is a part of the host's own memory.
        let _ = self.access_path.regions().store(segment, &bytes);
    }

    /// Fills memory that no request owns any more.
    fn fill_with_canary(&self, slot: u32) {
        let _ =
            self.access_path.regions().fill(self.slot_segment(slot, SLOT_BLOCKS.into()), CANARY);
    }

    fn slot_segment(&self, slot: u32, blocks: u64) -> Segment {
        let block_bytes = u32::try_from(BLOCK_BYTES).unwrap_or(0);
        let len = u32::try_from(blocks).unwrap_or(0) * block_bytes;
        let found = self.access_path.data_segment().slice(slot * SLOT_BLOCKS * block_bytes, len);
        found.unwrap_or(Segment { len_bytes: 0, ..self.access_path.data_segment() })
    }

    fn check_request_age(&self, now: Instant) -> Result<(), RunFailure> {
        let late = self.ops.iter().find(|(_, op)| now.since(op.begun) > BOUND);
        let Some((id, op)) = late else { return Ok(()) };
        let text = format!(
            "host {}: {} {id} was submitted {} ago and has not completed, expected its completion within {BOUND}",
            self.number,
            op.operation.name(),
            Span { ns: now.since(op.begun).ns / 1_000_000 * 1_000_000 },
        );
        Err(RunFailure { scope: RecordScope::host(self.number), text })
    }

    fn record_request(
        &self,
        now: Instant,
        id: u64,
        op: &HostRequest,
        what: String,
        shared: &mut HostsShared<'_>,
    ) {
        let (kind, name) = match op.operation {
            Operation::Write => ('w', if op.is_forced { "write with FUA" } else { "write" }),
            Operation::Read => ('r', "read"),
            _ => ('f', "flush"),
        };
        let (number, disk) = (self.number, self.disk);
        let (scope, place) = match op.operation {
            Operation::Flush => {
                (RecordScope { host: None, disk: Some(disk), blocks: None }, String::new())
            }
            _ => {
                let range = op.first..op.first + op.blocks;
                let place = format!(" {}..{}", range.start, range.end);
                (RecordScope { host: None, disk: Some(disk), blocks: Some(range) }, place)
            }
        };
        let text = format!("host {number}: {kind}{id} {name}{place} on disk {disk} {what}");
        shared.add_record(now, scope, text);
    }
}

impl HostsShared<'_> {
    pub(crate) fn add_record(&self, now: Instant, scope: RecordScope, text: String) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.add_record(now, scope, text);
    }
}

fn invalid_segment_text(why: &tenmil_base::InvalidSegment) -> String {
    format!("its memory is not there: {why:?}")
}

/// Name of a status.
fn status_name(status: IoStatus) -> String {
    tenmil_wire::Status(status.0).to_string()
}

/// Formats values, with runs of equal ones combined.
fn format_with_runs(values: &[String]) -> String {
    let mut reported: Vec<String> = Vec::new();
    let mut count = 0_usize;
    for (index, value) in values.iter().enumerate() {
        count += 1;
        if values.get(index + 1) != Some(value) {
            reported.push(if count > 1 { format!("{value} x{count}") } else { value.clone() });
            count = 0;
        }
    }
    reported.join(" ")
}
