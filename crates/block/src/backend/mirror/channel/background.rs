//! What a channel does for the mirror beside its own requests: it writes superblocks, and does one
//! task of the background.

use base::{Answer, Instant, Operation};

use super::MirrorChannel;
use super::legs::Place;
use crate::backend::mirror::commit::legs_of;
use crate::backend::mirror::fence::Copies;
use crate::backend::mirror::meta::Meta;
use crate::backend::mirror::shared::Shared;
use crate::backend::mirror::superblock::{COPIES_AT, NoSuperblock, SUPERBLOCK_BYTES, Superblock};
use crate::backend::mirror::tend::Task;
use crate::backend::mirror::work::is_loss;

/// What this channel has taken on.
#[derive(Debug, Default)]
pub(super) struct Background {
    look: Option<Look>,
    commit: Option<Group>,
    task: Option<(Task, Group)>,
}

/// A look at the superblocks before the next ones are written.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Legs that are looked at.
    legs: u8,
    awaited: u32,
    /// Legs of which a copy could not be read, for each copy.
    failed: [u8; 2],
}

/// Requests to several legs that end together.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    awaited: u32,
    failed: u8,
    /// Those of them that have lost completed writes.
    lost: u8,
}

impl Background {
    /// Whether what it has under way there is a flush.
    pub(super) fn flushes(&self, place: Place) -> bool {
        let is_task = !matches!(place, Place::Commit | Place::Look { .. });
        let task = self.task.filter(|_| is_task);
        task.is_some_and(|(task, _)| task.flushes() || matches!(task, Task::Probe { .. }))
    }

    /// The channel is gone: someone else begins again.
    pub(super) fn abandon(&self, meta: &mut Meta, shared: &Shared) {
        if self.look.is_some() {
            meta.abandon_look();
            shared.tell();
        }
        if self.commit.is_some() {
            meta.abandon_commit(shared);
        }
        if self.task.is_some() {
            meta.abandon_task(shared);
        }
        shared.tend_again_at(Instant::default());
    }
}

impl Group {
    fn ended(&mut self, operation: Operation, leg: u8, answer: &Answer) -> bool {
        self.awaited -= 1;
        if !answer.outcome.is_success() {
            self.failed |= leg;
            self.lost |= if is_loss(operation, answer.outcome) { leg } else { 0 };
        }
        self.awaited == 0
    }
}

impl MirrorChannel {
    /// Looks whether superblocks are to be written.
    pub(in crate::backend::mirror) fn look(&mut self) {
        let shared = self.shared.clone();
        self.write_superblocks(&mut shared.lock());
    }

    /// Whether it has a task of the background under way.
    #[cfg(test)]
    pub(in crate::backend::mirror) fn is_tending(&self) -> bool {
        self.background.task.is_some()
    }

    /// Does what is due, as far as nobody else does it.
    pub(super) fn look_after(&mut self, meta: &mut Meta) {
        if meta.owner.is_some() && !self.is_owner {
            // This channel is not polled once its client waits for nothing.
            if meta.needs_commit() {
                self.shared.tend_again_at(Instant::default());
            }
            return meta.call_owner();
        }
        if self.now >= self.shared.tend_at() {
            let shared = self.shared.clone();
            let task = meta.tend(&shared, self.now);
            self.do_tasks(meta, task);
        }
        self.write_superblocks(meta);
    }

    /// Begins to write superblocks, if that is to be done: first it is looked who has the mirror.
    fn write_superblocks(&mut self, meta: &mut Meta) {
        while meta.needs_commit() {
            let legs = meta.begin_look();
            let mut look = Look { legs, awaited: 0, failed: [0; 2] };
            for leg in legs_of(legs) {
                look.awaited += self.legs.send_look(leg, COPIES_AT);
            }
            if look.awaited > 0 {
                self.background.look = Some(look);
                return;
            }
            meta.abandon_look();
            if self.write_looked(meta) {
                return;
            }
        }
    }

    /// Begins to write superblocks. False if all have ended already.
    fn write_looked(&mut self, meta: &mut Meta) -> bool {
        let shared = self.shared.clone();
        let mut group = Group::default();
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

    /// A leg has answered a look; after the last one superblocks are written, unless somebody else has
    /// the mirror.
    fn look_ended(&mut self, copy: u8, leg: u8, answer: &Answer) {
        let Some(look) = &mut self.background.look else { return };
        if !answer.outcome.is_success() {
            look.failed[usize::from(copy & 1)] |= leg;
        }
        look.awaited -= 1;
        if look.awaited > 0 {
            return;
        }
        let Look { legs, failed, .. } = *look;
        self.background.look = None;
        let found: Vec<(u8, Copies)> =
            legs_of(legs).map(|leg| (leg, self.copies(leg, failed))).collect();
        let shared = self.shared.clone();
        let mut meta = shared.lock();
        if meta.end_look(&shared, &found) && meta.needs_commit() && meta.was_looked_at(legs) {
            self.write_looked(&mut meta);
        }
        // Whatever waited for it is due now.
        shared.tend_again_at(Instant::default());
        self.look_after(&mut meta);
    }

    fn copies(&self, leg: u8, failed: [u8; 2]) -> Copies {
        [0, 1].map(|copy| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            let is_read = failed[usize::from(copy)] & 1 << leg == 0;
            let is_read = is_read && self.legs.looked(leg, copy, &mut bytes);
            is_read.then(|| Superblock::decode(&bytes))
        })
    }

    /// Begins a task, and the ones after it as long as they end at once.
    fn do_tasks(&mut self, meta: &mut Meta, task: Option<Task>) {
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

    fn begin(&mut self, task: Task) -> Group {
        if task.flushes() {
            self.legs.heed_losses();
        }
        let (legs, missing) = match task {
            Task::Probe { leg } => {
                self.legs.heed_all_losses(leg);
                let sent = self.legs.send_probe(leg, COPIES_AT);
                let failed = if sent { 0 } else { leg };
                return Group { awaited: 3 * u32::from(sent), failed, lost: 0 };
            }
            Task::Flush { legs } => (legs, self.legs.send_chunk(legs, Operation::Flush, 0, 0)),
            Task::Read { leg, lba, blocks } => {
                (leg, self.legs.send_chunk(leg, Operation::Read, lba, blocks))
            }
            Task::Write { legs, lba, blocks } => {
                (legs, self.legs.send_chunk(legs, Operation::Write, lba, blocks))
            }
        };
        Group { awaited: (legs & !missing).count_ones(), failed: missing, lost: 0 }
    }

    fn end_task(&mut self, meta: &mut Meta, task: Task, failed: u8) -> Option<Task> {
        let shared = self.shared.clone();
        match task {
            Task::Probe { leg } => {
                // After its flush, which has counted what was lost and not counted yet.
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
        meta: &Meta,
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
                return Err(NoSuperblock::Raw);
            }
        }
        Superblock::newer([&copies[0], &copies[1]])
    }

    /// A leg has answered a request of the background.
    pub(super) fn background_ended(&mut self, place: Place, leg: u8, answer: &Answer) {
        let shared = self.shared.clone();
        if let Place::Look { copy } = place {
            return self.look_ended(copy, leg, answer);
        }
        if place == Place::Commit {
            let Some(group) = &mut self.background.commit else { return };
            if !group.ended(Operation::Write, leg, answer) {
                return;
            }
            let failed = group.failed;
            self.background.commit = None;
            let mut meta = shared.lock();
            meta.end_commit(&shared, failed);
            // Whatever waited for it is due now.
            shared.tend_again_at(Instant::default());
            self.look_after(&mut meta);
        } else {
            let Some((task, group)) = &mut self.background.task else { return };
            let operation = if task.flushes() { Operation::Flush } else { Operation::Write };
            if !group.ended(operation, leg, answer) {
                return;
            }
            let (task, Group { failed, lost, .. }) = (*task, *group);
            self.background.task = None;
            let mut meta = shared.lock();
            self.legs.notice_losses(lost);
            if meta.have_lost(&shared, lost) {
                // Nobody else hears of it from the legs.
                shared.add_loss();
            }
            let next = self.end_task(&mut meta, task, failed);
            self.do_tasks(&mut meta, next);
            self.write_superblocks(&mut meta);
        }
    }
}
