//! What a channel does for the mirror beside its own requests: it writes superblocks, and does one
//! task of the background.

use base::{Answer, Instant, Operation};

use super::MirrorChannel;
use super::legs::Place;
use crate::backend::mirror::meta::Meta;
use crate::backend::mirror::shared::Shared;
use crate::backend::mirror::superblock::{COPIES_AT, NoSuperblock, SUPERBLOCK_BYTES, Superblock};
use crate::backend::mirror::tend::Task;
use crate::backend::mirror::work::is_loss;

/// What this channel has taken on.
#[derive(Debug, Default)]
pub(super) struct Background {
    commit: Option<Group>,
    task: Option<(Task, Group)>,
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
    /// The channel is gone: someone else begins again.
    pub(super) fn abandon(&self, meta: &mut Meta, shared: &Shared) {
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
    /// Does what is due, as far as nobody else does it.
    pub(super) fn look_after(&mut self, meta: &mut Meta) {
        if self.now >= self.shared.tend_at() {
            let shared = self.shared.clone();
            let task = meta.tend(&shared, self.now);
            self.do_tasks(meta, task);
        }
        self.write_superblocks(meta);
    }

    /// Begins to write superblocks, if that is to be done.
    fn write_superblocks(&mut self, meta: &mut Meta) {
        while meta.needs_commit() {
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
                return;
            }
            meta.end_commit(&shared, group.failed);
        }
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
        let (legs, missing) = match task {
            Task::Probe { leg } => {
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
            Task::Probe { .. } => {
                let found = (failed == 0).then(|| self.probed());
                meta.end_probe(&shared, self.now, found)
            }
            _ => meta.end_task(&shared, self.now, failed),
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
