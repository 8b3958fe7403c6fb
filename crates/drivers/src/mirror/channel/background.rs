//! Background work of a channel for its mirror: ownership checks, superblock writes, and one maintenance
//! task.

use tenmil_base::{Instant, IoCompletion, Operation};

use super::MirrorChannel;
use super::legs::RequestOwner;
use crate::mirror::commit::legs_of;
use crate::mirror::fence::Copies;
use crate::mirror::maintenance::MaintenanceTask;
use crate::mirror::request::is_loss;
use crate::mirror::shared::Shared;
use crate::mirror::state::MirrorState;
use tenmil_volume::mirror::{COPIES_AT, NoSuperblock, SUPERBLOCK_BYTES, Superblock};

/// Background work in progress on this channel.
#[derive(Debug, Default)]
pub(super) struct Background {
    look: Option<SuperblockRead>,
    commit: Option<RequestGroup>,
    task: Option<(MaintenanceTask, RequestGroup)>,
}

/// An ownership check before a commit.
#[derive(Clone, Copy, Debug)]
struct SuperblockRead {
    /// Legs being checked.
    legs: u8,
    awaited: u32,
    /// Legs with an unreadable copy, for each copy.
    failed: [u8; 2],
}

/// Requests to several legs that end together.
#[derive(Clone, Copy, Debug, Default)]
struct RequestGroup {
    awaited: u32,
    failed: u8,
    /// Legs among them that have lost completed writes.
    lost: u8,
}

impl Background {
    /// Whether its request in flight there is a flush.
    pub(super) fn flushes(&self, place: RequestOwner) -> bool {
        let is_task = !matches!(place, RequestOwner::Commit | RequestOwner::SuperblockRead { .. });
        let task = self.task.filter(|_| is_task);
        task.is_some_and(|(task, _)| {
            task.flushes() || matches!(task, MaintenanceTask::Probe { .. })
        })
    }

    /// The channel is closed: another channel starts again.
    pub(super) fn abandon(&self, meta: &mut MirrorState, shared: &Shared) {
        if self.look.is_some() {
            meta.abandon_owner_check();
            shared.wake_all();
        }
        if self.commit.is_some() {
            meta.abandon_commit(shared);
        }
        if self.task.is_some() {
            meta.abandon_task(shared);
        }
        shared.set_maintenance_due(Instant::default());
    }
}

impl RequestGroup {
    fn ended(&mut self, operation: Operation, leg: u8, completion: &IoCompletion) -> bool {
        self.awaited -= 1;
        if !completion.status.is_success() {
            self.failed |= leg;
            self.lost |= if is_loss(operation, completion.status) { leg } else { 0 };
        }
        self.awaited == 0
    }
}

impl MirrorChannel {
    /// Starts a commit if one is needed.
    pub(in crate::mirror) fn start_commit_if_needed(&mut self) {
        let shared = self.shared.clone();
        self.write_superblocks(&mut shared.lock());
    }

    /// Whether a maintenance task is in progress on this channel.
    #[cfg(test)]
    pub(in crate::mirror) fn is_tending(&self) -> bool {
        self.background.task.is_some()
    }

    /// Performs maintenance that is due, unless it is in progress elsewhere.
    pub(super) fn maintain(&mut self, meta: &mut MirrorState) {
        if meta.owner.is_some() && !self.is_owner {
            // A client's channel is not polled once the client waits for nothing, so the maintenance
            // thread does it.
            if meta.needs_commit() {
                self.shared.set_maintenance_due(Instant::default());
            }
            return meta.call_owner();
        }
        if self.now >= self.shared.maintenance_due() {
            let shared = self.shared.clone();
            let task = meta.next_task(&shared, self.now);
            self.do_tasks(meta, task);
        }
        self.write_superblocks(meta);
    }

    /// Starts a commit if one is needed: the ownership check comes first.
    fn write_superblocks(&mut self, meta: &mut MirrorState) {
        while meta.needs_commit() {
            let legs = meta.begin_owner_check();
            let mut look = SuperblockRead { legs, awaited: 0, failed: [0; 2] };
            for leg in legs_of(legs) {
                look.awaited += self.legs.send_superblock_read(leg, COPIES_AT);
            }
            if look.awaited > 0 {
                self.background.look = Some(look);
                return;
            }
            meta.abandon_owner_check();
            if self.write_looked(meta) {
                return;
            }
        }
    }

    /// Writes the superblocks. Returns false if all writes have ended already.
    fn write_looked(&mut self, meta: &mut MirrorState) -> bool {
        let shared = self.shared.clone();
        let mut group = RequestGroup::default();
        for superblock in meta.begin_commit(&shared) {
            let at = COPIES_AT[superblock.copy()];
            if self.legs.send_superblock(superblock.leg, at, &superblock.encode()) {
                group.awaited += 1;
            } else {
                group.failed |= 1 << superblock.leg;
            }
        }
        if group.awaited > 0 {
            self.background.commit = Some(group);
            return true;
        }
        meta.end_commit(&shared, group.failed);
        false
    }

    /// Handles a completion of an ownership check. After the last one, the superblocks are written,
    /// unless another owner has the mirror.
    fn read_ended(&mut self, copy: u8, leg: u8, completion: &IoCompletion) {
        let Some(look) = &mut self.background.look else { return };
        if !completion.status.is_success() {
            look.failed[usize::from(copy & 1)] |= leg;
        }
        look.awaited -= 1;
        if look.awaited > 0 {
            return;
        }
        let SuperblockRead { legs, failed, .. } = *look;
        self.background.look = None;
        let found: Vec<(u8, Copies)> =
            legs_of(legs).map(|leg| (leg, self.copies(leg, failed))).collect();
        let shared = self.shared.clone();
        let mut meta = shared.lock();
        // Legs that joined after the check began have not been checked: then a new check is started.
        if meta.end_owner_check(&shared, &found) && meta.needs_commit() && meta.was_looked_at(legs)
        {
            self.write_looked(&mut meta);
        }
        // Work that waited for it is due now.
        shared.set_maintenance_due(Instant::default());
        self.maintain(&mut meta);
    }

    fn copies(&self, leg: u8, failed: [u8; 2]) -> Copies {
        [0, 1].map(|copy| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            let is_read = failed[usize::from(copy)] & 1 << leg == 0;
            let is_read = is_read && self.legs.looked(leg, copy, &mut bytes);
            is_read.then(|| Superblock::decode(&bytes))
        })
    }

    /// Starts a task, and the following ones while each ends at once.
    fn do_tasks(&mut self, meta: &mut MirrorState, task: Option<MaintenanceTask>) {
        let mut next = task;
        while let Some(task) = next {
            let group = self.begin(task);
            if group.awaited > 0 {
                self.background.task = Some((task, group));
                return;
            }
            next = self.end_task(meta, task, group.failed);
        }
    }

    fn begin(&mut self, task: MaintenanceTask) -> RequestGroup {
        if task.flushes() {
            self.legs.ack_losses();
        }
        let (legs, missing) = match task {
            MaintenanceTask::Probe { leg } => {
                self.legs.acknowledge_all_losses(leg);
                let sent = self.legs.send_probe(leg, COPIES_AT);
                let failed = if sent { 0 } else { leg };
                return RequestGroup { awaited: 3 * u32::from(sent), failed, lost: 0 };
            }
            MaintenanceTask::Flush { legs } => {
                (legs, self.legs.send_chunk(legs, Operation::Flush, 0, 0))
            }
            MaintenanceTask::Read { leg, lba, blocks } => {
                (leg, self.legs.send_chunk(leg, Operation::Read, lba, blocks))
            }
            MaintenanceTask::Write { legs, lba, blocks } => {
                (legs, self.legs.send_chunk(legs, Operation::Write, lba, blocks))
            }
        };
        RequestGroup { awaited: (legs & !missing).count_ones(), failed: missing, lost: 0 }
    }

    fn end_task(
        &mut self,
        meta: &mut MirrorState,
        task: MaintenanceTask,
        failed: u8,
    ) -> Option<MaintenanceTask> {
        let shared = self.shared.clone();
        match task {
            MaintenanceTask::Probe { leg } => {
                // After its flush, which counts losses that were not counted yet.
                if failed == 0 {
                    let number = leg.trailing_zeros() as usize;
                    shared.repair_losses(number, self.legs.losses(number));
                }
                let found = (failed == 0).then(|| self.probed());
                let found = found.filter(|found| self.may_be_joined(meta, leg, found));
                meta.end_probe(&shared, self.now, found)
            }
            _ => meta.end_task(&shared, self.now, failed),
        }
    }

    /// Whether the device of a leg that answers again is reserved, if it is to be.
    fn may_be_joined(
        &self,
        meta: &MirrorState,
        leg: u8,
        found: &Result<Superblock, NoSuperblock>,
    ) -> bool {
        let medium = self.shared.media.get(leg.trailing_zeros() as usize).and_then(Option::as_ref);
        match (medium, found) {
            // One that another owner has claimed since is left alone, and not reserved.
            (Some(medium), Ok(found)) if found.uuid == meta.uuid && meta.may_rejoin(found) => {
                self.shared.reserved.is_ready(medium, found)
            }
            _ => true,
        }
    }

    fn probed(&self) -> Result<Superblock, NoSuperblock> {
        let mut copies = [[0; SUPERBLOCK_BYTES]; 2];
        for (index, copy) in copies.iter_mut().enumerate() {
            if !self.legs.probed(index, copy) {
                return Err(NoSuperblock::Absent);
            }
        }
        Superblock::newer([&copies[0], &copies[1]])
    }

    /// Handles a completion of background work.
    pub(super) fn background_ended(
        &mut self,
        place: RequestOwner,
        leg: u8,
        completion: &IoCompletion,
    ) {
        let shared = self.shared.clone();
        if let RequestOwner::SuperblockRead { copy } = place {
            return self.read_ended(copy, leg, completion);
        }
        if place == RequestOwner::Commit {
            let Some(group) = &mut self.background.commit else { return };
            if !group.ended(Operation::Write, leg, completion) {
                return;
            }
            let failed = group.failed;
            self.background.commit = None;
            let mut meta = shared.lock();
            meta.end_commit(&shared, failed);
            // Work that waited for it is due now.
            shared.set_maintenance_due(Instant::default());
            self.maintain(&mut meta);
        } else {
            let Some((task, group)) = &mut self.background.task else { return };
            let operation = if task.flushes() { Operation::Flush } else { Operation::Write };
            if !group.ended(operation, leg, completion) {
                return;
            }
            let (task, RequestGroup { failed, lost, .. }) = (*task, *group);
            self.background.task = None;
            let mut meta = shared.lock();
            self.legs.notice_losses(lost);
            if meta.have_lost(&shared, lost) {
                // The legs report it to no other channel.
                shared.add_loss();
            }
            let next = self.end_task(&mut meta, task, failed);
            self.do_tasks(&mut meta, next);
            self.write_superblocks(&mut meta);
        }
    }
}
