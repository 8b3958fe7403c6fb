//! Background work of a channel for its mirror: ownership checks, superblock writes, and one maintenance
//! task.

use tenmil_base::{Instant, IoCompletion, Operation};

use super::MirrorChannel;
use super::leg_channels::RequestOwner;
use crate::mirror::maintenance::MaintenanceIo;
use crate::mirror::mirror_request::reports_write_loss;
use crate::mirror::mirror_shared::MirrorShared;
use crate::mirror::mirror_state::MirrorState;
use crate::mirror::ownership::SuperblockCopies;
use crate::mirror::superblock_commit::leg_numbers_in;
use tenmil_volume::mirror::{COPIES_AT, MirrorSuperblock, SUPERBLOCK_BYTES, SuperblockError};

/// Background work in progress on this channel.
#[derive(Debug, Default)]
pub(super) struct BackgroundTask {
    look: Option<OwnerCheckRead>,
    commit: Option<RequestGroup>,
    task: Option<(MaintenanceIo, RequestGroup)>,
}

/// An ownership check before a commit.
#[derive(Clone, Copy, Debug)]
struct OwnerCheckRead {
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

impl BackgroundTask {
    /// Whether its request in flight there is a flush.
    pub(super) fn is_flush(&self, place: RequestOwner) -> bool {
        let is_task = !matches!(place, RequestOwner::Commit | RequestOwner::SuperblockRead { .. });
        let task = self.task.filter(|_| is_task);
        task.is_some_and(|(task, _)| task.is_flush() || matches!(task, MaintenanceIo::Probe { .. }))
    }

    /// The channel is closed: another channel starts again.
    pub(super) fn abandon(&self, meta: &mut MirrorState, shared: &MirrorShared) {
        if self.look.is_some() {
            meta.abandon_owner_check();
            shared.wake_all();
        }
        if self.commit.is_some() {
            meta.abandon_commit(shared);
        }
        if self.task.is_some() {
            meta.abandon_maintenance_io(shared);
        }
        shared.set_maintenance_due(Instant::default());
    }
}

impl RequestGroup {
    fn handle_completion(
        &mut self,
        operation: Operation,
        leg: u8,
        completion: &IoCompletion,
    ) -> bool {
        self.awaited -= 1;
        if !completion.status.is_success() {
            self.failed |= leg;
            self.lost |= if reports_write_loss(operation, completion.status) { leg } else { 0 };
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
    pub(in crate::mirror) fn is_maintenance_running(&self) -> bool {
        self.background.task.is_some()
    }

    /// Performs maintenance that is due, unless it is in progress elsewhere.
    pub(super) fn run_maintenance(&mut self, meta: &mut MirrorState) {
        if meta.owner.is_some() && !self.is_owner {
            // A client's channel is not polled once the client waits for nothing, so the maintenance
            // thread does it.
            if meta.needs_commit() {
                self.shared.set_maintenance_due(Instant::default());
            }
            return meta.wake_maintenance();
        }
        if self.now >= self.shared.maintenance_due() {
            let shared = self.shared.clone();
            let task = meta.next_maintenance_io(&shared, self.now);
            self.start_maintenance_ios(meta, task);
        }
        self.write_superblocks(meta);
    }

    /// Starts a commit if one is needed: the ownership check comes first.
    fn write_superblocks(&mut self, meta: &mut MirrorState) {
        while meta.needs_commit() {
            let legs = meta.begin_owner_check();
            let mut look = OwnerCheckRead { legs, awaited: 0, failed: [0; 2] };
            for leg in leg_numbers_in(legs) {
                look.awaited += self.legs.queue_superblock_reads(leg, COPIES_AT);
            }
            if look.awaited > 0 {
                self.background.look = Some(look);
                return;
            }
            meta.abandon_owner_check();
            if self.write_checked_superblocks(meta) {
                return;
            }
        }
    }

    /// Writes the superblocks. Returns false if all writes have ended already.
    fn write_checked_superblocks(&mut self, meta: &mut MirrorState) -> bool {
        let shared = self.shared.clone();
        let mut group = RequestGroup::default();
        for superblock in meta.begin_commit(&shared) {
            let at = COPIES_AT[superblock.copy_index()];
            if self.legs.queue_superblock_write(superblock.leg, at, &superblock.encode()) {
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
    fn handle_superblocks_read(&mut self, copy: u8, leg: u8, completion: &IoCompletion) {
        let Some(look) = &mut self.background.look else { return };
        if !completion.status.is_success() {
            look.failed[usize::from(copy & 1)] |= leg;
        }
        look.awaited -= 1;
        if look.awaited > 0 {
            return;
        }
        let OwnerCheckRead { legs, failed, .. } = *look;
        self.background.look = None;
        let found: Vec<(u8, SuperblockCopies)> = leg_numbers_in(legs)
            .map(|leg| (leg, self.load_superblock_copies(leg, failed)))
            .collect();
        let shared = self.shared.clone();
        let mut meta = shared.lock();
        // Legs that joined after the check began have not been checked: then a new check is started.
        if meta.end_owner_check(&shared, &found)
            && meta.needs_commit()
            && meta.are_commit_targets_checked(legs)
        {
            self.write_checked_superblocks(&mut meta);
        }
        // Work that waited for it is due now.
        shared.set_maintenance_due(Instant::default());
        self.run_maintenance(&mut meta);
    }

    fn load_superblock_copies(&self, leg: u8, failed: [u8; 2]) -> SuperblockCopies {
        [0, 1].map(|copy| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            let is_read = failed[usize::from(copy)] & 1 << leg == 0;
            let is_read = is_read && self.legs.load_superblock_copy(leg, copy, &mut bytes);
            is_read.then(|| MirrorSuperblock::decode(&bytes))
        })
    }

    /// Starts a task, and the following ones while each ends at once.
    fn start_maintenance_ios(&mut self, meta: &mut MirrorState, task: Option<MaintenanceIo>) {
        let mut next = task;
        while let Some(task) = next {
            let group = self.start_maintenance_io(task);
            if group.awaited > 0 {
                self.background.task = Some((task, group));
                return;
            }
            next = self.finish_maintenance_io(meta, task, group.failed);
        }
    }

    fn start_maintenance_io(&mut self, task: MaintenanceIo) -> RequestGroup {
        if task.is_flush() {
            self.legs.acknowledge_repaired_losses();
        }
        let (legs, missing) = match task {
            MaintenanceIo::Probe { leg } => {
                self.legs.acknowledge_all_losses(leg);
                let sent = self.legs.send_probe(leg, COPIES_AT);
                let failed = if sent { 0 } else { leg };
                return RequestGroup { awaited: 3 * u32::from(sent), failed, lost: 0 };
            }
            MaintenanceIo::Flush { legs } => {
                (legs, self.legs.queue_chunk_request(legs, Operation::Flush, 0, 0))
            }
            MaintenanceIo::Read { leg, lba, blocks } => {
                (leg, self.legs.queue_chunk_request(leg, Operation::Read, lba, blocks))
            }
            MaintenanceIo::Write { legs, lba, blocks } => {
                (legs, self.legs.queue_chunk_request(legs, Operation::Write, lba, blocks))
            }
        };
        RequestGroup { awaited: (legs & !missing).count_ones(), failed: missing, lost: 0 }
    }

    fn finish_maintenance_io(
        &mut self,
        meta: &mut MirrorState,
        task: MaintenanceIo,
        failed: u8,
    ) -> Option<MaintenanceIo> {
        let shared = self.shared.clone();
        match task {
            MaintenanceIo::Probe { leg } => {
                // After its flush, which counts losses that were not counted yet.
                if failed == 0 {
                    let number = leg.trailing_zeros() as usize;
                    shared.record_repaired_losses(number, self.legs.leg_loss_count(number));
                }
                let found = (failed == 0).then(|| self.probed_superblock());
                let found = found.filter(|found| self.is_reserved_for_rejoin(meta, leg, found));
                meta.handle_probe_result(&shared, self.now, found)
            }
            _ => meta.handle_maintenance_io_end(&shared, self.now, failed),
        }
    }

    /// Whether the device of a leg that answers again is reserved, if it is to be.
    fn is_reserved_for_rejoin(
        &self,
        meta: &MirrorState,
        leg: u8,
        found: &Result<MirrorSuperblock, SuperblockError>,
    ) -> bool {
        let medium = self.shared.media.get(leg.trailing_zeros() as usize).and_then(Option::as_ref);
        match (medium, found) {
            // One that another owner has claimed since is left alone, and not reserved.
            (Some(medium), Ok(found))
                if found.uuid == meta.uuid && meta.is_leg_not_claimed_by_other(found) =>
            {
                self.shared.reserved.may_leg_rejoin(medium, found)
            }
            _ => true,
        }
    }

    fn probed_superblock(&self) -> Result<MirrorSuperblock, SuperblockError> {
        let mut copies = [[0; SUPERBLOCK_BYTES]; 2];
        for (index, copy) in copies.iter_mut().enumerate() {
            if !self.legs.load_probed_copy(index, copy) {
                return Err(SuperblockError::Absent);
            }
        }
        MirrorSuperblock::newest_of_copies([&copies[0], &copies[1]])
    }

    /// Handles a completion of background work.
    pub(super) fn handle_background_completion(
        &mut self,
        place: RequestOwner,
        leg: u8,
        completion: &IoCompletion,
    ) {
        let shared = self.shared.clone();
        if let RequestOwner::SuperblockRead { copy } = place {
            return self.handle_superblocks_read(copy, leg, completion);
        }
        if place == RequestOwner::Commit {
            let Some(group) = &mut self.background.commit else { return };
            if !group.handle_completion(Operation::Write, leg, completion) {
                return;
            }
            let failed = group.failed;
            self.background.commit = None;
            let mut meta = shared.lock();
            meta.end_commit(&shared, failed);
            // Work that waited for it is due now.
            shared.set_maintenance_due(Instant::default());
            self.run_maintenance(&mut meta);
        } else {
            let Some((task, group)) = &mut self.background.task else { return };
            let operation = if task.is_flush() { Operation::Flush } else { Operation::Write };
            if !group.handle_completion(operation, leg, completion) {
                return;
            }
            let (task, RequestGroup { failed, lost, .. }) = (*task, *group);
            self.background.task = None;
            let mut meta = shared.lock();
            self.legs.record_losses_handled(lost);
            if meta.handle_leg_losses(&shared, lost) {
                // The legs report it to no other channel.
                shared.record_all_leg_loss();
            }
            let next = self.finish_maintenance_io(&mut meta, task, failed);
            self.start_maintenance_ios(&mut meta, next);
            self.write_superblocks(&mut meta);
        }
    }
}
