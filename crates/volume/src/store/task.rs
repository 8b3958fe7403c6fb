//! What is asked, step by step.

mod fill;
mod grow;
mod own;
mod transfer;

use std::ops::Range;

use base::Outcome;

use super::{Answer, Ask, Run, Store, Usage};
use crate::account::{Account, Tally};
use crate::books::Stop;
use crate::cost::Leaves;
use crate::error::StoreError;
use crate::format::{Record, VolumeBody, flags, unpadded};
use crate::plan::{Grant, Segment, Source};
use crate::space::CHANGE_BLOCKS;
use crate::thick::Move;
use crate::volumes::{CATALOGUE, Change, Progress, VolumeInfo};

/// A question under way.
#[derive(Debug)]
pub(super) struct Task {
    token: u64,
    ask: Ask,
    state: State,
    /// The transaction in which its transfers began.
    began: Option<u64>,
    /// The volume that it writes to.
    writes_to: Option<u64>,
    /// The volume that it keeps from being written to.
    quiets: Option<u64>,
    /// Units set aside that it uses, with their first blocks, and how many blocks each has.
    mine: (Vec<(u64, u64)>, u64),
    /// How often it has waited for room.
    retries: u32,
    /// How often it may wait for room while nothing is being given back.
    patience: u32,
    /// Whether it needs no room but what is kept for a thick volume.
    is_promised: bool,
    /// Units of a thick volume for which data are on their way.
    moves: Option<Box<Moving>>,
    /// Blocks of a parent that are copied.
    filling: Option<Filling>,
    /// The checksums of what it moves, if the volume has them.
    summed: Option<Box<Summed>>,
}

/// Blocks of a parent that are copied into a volume.
#[derive(Clone, Debug)]
struct Filling {
    blocks: Range<u64>,
    /// Parts of them that hold data and have still to be written; the last one is the next.
    parts: Vec<Range<u64>>,
    /// Whether whoever asked has them.
    is_read: bool,
}

/// Units of a thick volume that are to have all of their blocks in units of its own.
#[derive(Debug)]
struct Moving {
    /// The first block of the first one, which is the first that whoever asked keeps.
    first: u64,
    moves: Vec<Move>,
    is_written: bool,
}

/// The checksums of what is moved: of what is read, as they should be; of what is written, as far as
/// that has been done.
#[derive(Debug, Default)]
struct Summed {
    sums: Vec<u32>,
    /// What is under way.
    parts: Vec<Part>,
    /// Blocks that are not what was written.
    wrong: Vec<Run>,
}

/// A part of what is moved. Blocks are counted from the first one that was asked for.
#[derive(Clone, Copy, Debug)]
struct Part {
    io: u64,
    run: Run,
}

/// Named for what comes next.
#[derive(Debug)]
enum State {
    Start,
    /// So many transfers have not ended, and one may have gone wrong.
    Transfers(u64, Option<Outcome>, Vec<Segment>),
    /// These have still to be entered in the map.
    Map(Vec<Segment>),
    /// This block is the next one.
    From(u64),
    /// The next key, and what was found before it.
    Listing(u64, Vec<VolumeInfo>),
    /// What has been added up.
    Counting(Tally),
    /// The commit from which on there is more room, and then another one.
    Grown,
    /// The commit, and then this is the answer.
    Durable(Answer),
}

/// What a task waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    Page(u64),
    /// This transaction is durable.
    Commit(u64),
    /// The commit is put together.
    Apply,
    /// The writes to this volume, or a change of it, have ended.
    Volume(u64),
    /// Its own transfers.
    Transfers,
}

/// What comes of a step.
enum Next {
    Done(Answer),
    Wait(Wait),
}

/// Why a step was not made.
enum Halt {
    Stop(Stop),
    Wait(Wait),
}

/// How often a task may wait for room while blocks are being given back, or if it is promised room and
/// takes turns with others of which the same is true.
const RETRIES_MAX: u32 = 1000;
/// How often one may that finds none and is promised none.
const PATIENCE: u32 = 2;
/// How often a write to a thick volume may that finds its units left by a snapshot, but not durably.
const PATIENCE_FOR_UNITS: u32 = 16;

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Stop(error.into())
    }
}

impl From<Wait> for Halt {
    fn from(wait: Wait) -> Self {
        Self::Wait(wait)
    }
}

impl Task {
    pub(super) const fn new(token: u64, ask: Ask) -> Self {
        let mine = (Vec::new(), 0);
        let (began, writes_to, quiets, retries) = (None, None, None, 0);
        let (state, summed) = (State::Start, None);
        let (patience, is_promised, moves, filling) = (PATIENCE, false, None, None);
        Self {
            token,
            ask,
            state,
            began,
            writes_to,
            quiets,
            mine,
            retries,
            patience,
            is_promised,
            moves,
            filling,
            summed,
        }
    }
}

impl Task {
    /// Whether nothing was done for it that a recovery would undo.
    fn has_not_begun(&self) -> bool {
        let holds = [self.began, self.writes_to, self.quiets].iter().any(Option::is_some);
        matches!(self.state, State::Start) && !holds && self.mine.0.is_empty()
    }
}

impl Store {
    /// Goes on with a task as far as it goes.
    pub(super) fn run(&mut self, id: u64) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        if self.is_recovering() && task.has_not_begun() {
            self.tasks.insert(id, task);
            return self.paused.push_back(id);
        }
        let step = self.step(id, &mut task);
        if !matches!(step, Err(Halt::Stop(Stop::Need(_)))) {
            self.books.cache.settle();
        }
        let wait = match step {
            Ok(Next::Done(answer)) => return self.finish(task, Ok(answer)),
            Ok(Next::Wait(wait)) | Err(Halt::Wait(wait)) => wait,
            Err(Halt::Stop(Stop::Need(address))) => Wait::Page(address),
            Err(Halt::Stop(Stop::Error(error))) => return self.finish(task, Err(*error)),
            Err(Halt::Stop(Stop::Short(error))) if !self.may_find_room(&mut task) => {
                return self.finish(task, Err(*error));
            }
            Err(Halt::Stop(Stop::Full)) if !self.may_find_room(&mut task) => {
                let error = self.books.no_space();
                self.level.note_refused();
                return self.finish(task, Err(error));
            }
            Err(Halt::Stop(Stop::Full | Stop::Short(_))) => Wait::Commit(self.books.generation),
        };
        self.tasks.insert(id, task);
        self.wait(id, wait);
    }

    /// Ends a task that waits, with an error.
    pub(super) fn fail(&mut self, id: u64, error: StoreError) {
        if let Some(task) = self.tasks.remove(&id) {
            self.finish(task, Err(error));
        }
    }

    /// Whether a commit could bring room for a task that has found none.
    fn may_find_room(&self, task: &mut Task) -> bool {
        task.retries += 1;
        let is_swept = self.books.superblock.work.is_none();
        let patience = if is_swept { task.patience } else { RETRIES_MAX };
        !self.stopped && task.retries <= patience && self.books.space.awaits_commit()
    }

    /// Answers, and gives back what the task held.
    fn finish(&mut self, task: Task, outcome: Result<Answer, StoreError>) {
        let (units, unit) = &task.mine;
        for &(number, at) in units {
            let key = (task.writes_to.unwrap_or(0), number, at);
            let Some(grant) = self.pending.get_mut(&key) else { continue };
            grant.users -= 1;
            let Grant { users, is_mapped, .. } = *grant;
            if users == 0 {
                self.pending.remove(&key);
                match is_mapped {
                    true => self.books.space.pending.remove(at..at + unit),
                    false => self.books.space.give_back(at..at + unit),
                }
            }
        }
        if let Some(id) = task.writes_to {
            self.traffic.entry(id).or_default().writes -= 1;
            self.stir(id);
        }
        self.end_quiet(task.quiets);
        if let Some(began) = task.began {
            let transfers = self.transfers.entry(began).or_default();
            *transfers -= 1;
            if *transfers == 0 {
                self.transfers.remove(&began);
            }
            self.release();
        }
        self.answers.push_back((task.token, outcome));
    }

    /// Lets those go on that waited for what happens to a volume.
    fn stir(&mut self, id: u64) {
        if let Some(traffic) = self.traffic.get_mut(&id) {
            self.ready.extend(traffic.waiting.drain(..));
            if traffic.writes == 0 && traffic.quieting == 0 {
                self.traffic.remove(&id);
            }
        }
    }

    fn end_quiet(&mut self, id: Option<u64>) {
        let Some(id) = id else { return };
        self.traffic.entry(id).or_default().quieting -= 1;
        self.stir(id);
    }

    fn step(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        if self.is_taken_over() {
            return Err(self.why_stopped().into());
        }
        if let State::Durable(answer) = &task.state {
            // Nothing comes behind that it is given up.
            self.stopped |= task.ask == Ask::Release;
            return Ok(Next::Done(answer.clone()));
        }
        match task.ask.clone() {
            Ask::Change(change) => self.change(task, &change),
            Ask::Find(name) => Ok(Next::Done(Answer::Volume(self.books.lookup(&name)?.info()))),
            Ask::List => self.list(task),
            Ask::Account(name) => self.account(task, &name),
            Ask::Usage => Ok(Next::Done(Answer::Usage(self.usage()))),
            Ask::Thicken(name) => self.thicken(task, &name),
            Ask::Own { volume, block, blocks } => self.own(id, task, volume, block, blocks),
            Ask::Parent { volume } => self.parent(volume),
            Ask::Fill { volume, blocks } => self.fill(id, task, volume, blocks),
            Ask::Extent { volume, block } => self.extent(volume, block),
            Ask::Difference { volume, base, block } => self.difference(task, volume, base, block),
            Ask::Read { volume, block, blocks } => self.read(id, task, volume, block, blocks),
            Ask::Write { volume, block, blocks } => self.write(id, task, volume, block, blocks),
            Ask::Trim { volume, block, blocks } => self.trim(task, volume, block, blocks),
            Ask::Flush => self.flush(id, task),
            Ask::Claim => self.expect_open().map(|()| Next::Done(Answer::Done)),
            Ask::Release => self.give_up(id, task),
            Ask::Grow(devices) => self.grow(task, &devices),
        }
    }

    fn change(&mut self, task: &mut Task, change: &Change) -> Result<Next, Halt> {
        self.expect_open()?;
        self.may_change()?;
        if let Some(name) = change.quiets() {
            // While it waited, the name may have gone to another volume.
            let id = self.books.lookup(name)?.id;
            if task.quiets != Some(id) {
                self.end_quiet(task.quiets.take());
                self.traffic.entry(id).or_default().quieting += 1;
                task.quiets = Some(id);
            }
        }
        if let Some(id) = task.quiets
            && self.traffic.entry(id).or_default().writes > 0
        {
            return Ok(Next::Wait(Wait::Volume(id)));
        }
        let gives_back = matches!(change, Change::Delete { .. } | Change::Resize { .. });
        let leaves = if gives_back { Leaves::Nothing } else { Leaves::Most };
        let made = loop {
            self.books.fill_pool(CHANGE_BLOCKS, leaves)?;
            let progress = self.books.attempt_in_steps(|books| books.change(change))?;
            if let Progress::Made(made) = progress {
                break made;
            }
            self.may_change()?;
        };
        self.end_quiet(task.quiets.take());
        let answer = made.map_or(Answer::Done, Answer::Volume);
        task.state = State::Durable(answer);
        Ok(Next::Wait(Wait::Commit(self.books.generation)))
    }

    fn list(&mut self, task: &mut Task) -> Result<Next, Halt> {
        if matches!(task.state, State::Start) {
            task.state = State::Listing(0, Vec::new());
        }
        let State::Listing(key, found) = &mut task.state else {
            return Ok(Next::Done(Answer::Done));
        };
        while let Some(line) =
            self.books.next_run(&CATALOGUE, self.books.superblock.catalogue, *key)?
        {
            found.push(self.books.volume_at(line.key, line.child())?.info());
            *key = line.key + 1;
        }
        Ok(Next::Done(Answer::Volumes(std::mem::take(found))))
    }

    fn account(&mut self, task: &mut Task, name: &str) -> Result<Next, Halt> {
        Ok(Next::Done(Answer::Account(self.add_up(task, name)?)))
    }

    /// The room of a volume, as far as it has not been added up yet.
    fn add_up(&mut self, task: &mut Task, name: &str) -> Result<Account, Halt> {
        let mut tally = if let State::Counting(tally) = task.state { tally } else { Tally::BEGIN };
        let body = self.books.lookup(name)?;
        while let Some(further) = self.books.tally(&body, &tally)? {
            tally = further;
            task.state = State::Counting(tally);
            // What was added up is not looked at again.
            self.books.cache.settle();
        }
        Ok(tally.account(&body))
    }

    fn extent(&mut self, volume: u64, block: u64) -> Result<Next, Halt> {
        let body = self.books.expect_volume(volume)?;
        let run = self.books.next_run(&body.tree(), body.map, block)?;
        let run = run.unwrap_or(Record { key: u64::MAX, value: 0, extra: 0 });
        let is_mapped = run.key <= block;
        let is_parents = !is_mapped && block < body.reach;
        let (at, end) = if is_mapped {
            let at = Some(run.place() + (block - run.key)).filter(|_| run.is_written());
            (at, run.key + run.extra)
        } else {
            (None, run.key.min(if is_parents { body.reach } else { u64::MAX }))
        };
        let blocks = end.min(body.blocks).saturating_sub(block);
        Ok(Next::Done(Answer::Extent { blocks, at, is_parents }))
    }

    fn parent(&mut self, volume: u64) -> Result<Next, Halt> {
        let body = self.books.expect_volume(volume)?;
        Ok(Next::Done(Answer::Parent(self.books.parent(&body)?)))
    }

    fn difference(
        &mut self,
        task: &mut Task,
        volume: u64,
        base: u64,
        block: u64,
    ) -> Result<Next, Halt> {
        let body = self.books.expect_volume(volume)?;
        let base = match base {
            0 => None,
            id => Some(self.books.expect_volume(id)?),
        };
        let mut at = if let State::From(at) = task.state { at } else { block };
        while at < body.blocks {
            let stretch = self.books.compare_from(base.as_ref(), &body, at)?;
            if let Some(from) = stretch.changed {
                let blocks = stretch.end - at;
                let is_mapped = matches!(from, Source::Store(_));
                let is_parents = from == Source::Parent;
                let changed = Answer::Changed { block: at, blocks, is_mapped, is_parents };
                return Ok(Next::Done(changed));
            }
            at = stretch.end;
            task.state = State::From(at);
            // What was compared is not looked at again.
            self.books.cache.settle();
        }
        let (block, is_mapped, is_parents) = (body.blocks, false, false);
        Ok(Next::Done(Answer::Changed { block, blocks: 0, is_mapped, is_parents }))
    }

    pub(super) fn usage(&self) -> Usage {
        let durable = &self.durable.superblock;
        Usage {
            blocks: durable.blocks,
            used: durable.used,
            free: self.books.space.free(&self.books.superblock),
            kept: self.books.space.kept,
            promised: self.books.reserve(),
            volumes: self.books.superblock.volumes,
            thresholds: self.books.superblock.thresholds(),
        }
    }

    /// Whether the store takes changes: not once it has stopped, and not before it is anchored.
    fn expect_open(&mut self) -> Result<(), Halt> {
        if self.stopped {
            return Err(self.why_stopped().into());
        }
        if !self.is_anchored {
            self.may_claim()?;
            self.anchor();
            return Err(Wait::Apply.into());
        }
        Ok(())
    }

    /// What is answered to whoever wants a change.
    fn why_stopped(&self) -> StoreError {
        let why = self.stopped_by.clone();
        let is_lasting =
            matches!(why, Some(StoreError::TakenOver { .. } | StoreError::WentBack { .. }));
        why.filter(|_| is_lasting).unwrap_or(StoreError::Stopped)
    }

    fn give_up(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        if matches!(task.state, State::Transfers(..)) {
            return self.flush(id, task);
        }
        if self.stopped || !self.disown() {
            // There is nothing to give up, and yet all that was answered is to survive.
            return self.flush(id, task);
        }
        task.state = State::Durable(Answer::Done);
        Ok(Next::Wait(Wait::Commit(self.books.generation)))
    }

    fn volume_and_range(
        &mut self,
        volume: u64,
        block: u64,
        count: u64,
    ) -> Result<(VolumeBody, Range<u64>), Halt> {
        let body = self.books.expect_volume(volume)?;
        match block.checked_add(count).filter(|end| *end <= body.blocks) {
            Some(end) => Ok((body, block..end)),
            None => {
                let (name, blocks) = (unpadded(&body.name), body.blocks);
                Err(StoreError::OutOfRange { name, block, count, blocks }.into())
            }
        }
    }

    fn writable(
        &mut self,
        volume: u64,
        block: u64,
        count: u64,
    ) -> Result<(VolumeBody, Range<u64>), Halt> {
        let (body, range) = self.volume_and_range(volume, block, count)?;
        if body.has(flags::READ_ONLY) {
            return Err(StoreError::ReadOnly(unpadded(&body.name)).into());
        }
        Ok((body, range))
    }
}
