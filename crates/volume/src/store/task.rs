//! What is asked, step by step.

use std::ops::Range;

use base::Outcome;

use super::{Action, Answer, Ask, Commit, End, Purpose, Store, Usage};
use crate::books::Stop;
use crate::error::StoreError;
use crate::format::{VolumeBody, flags, unpadded};
use crate::plan::Segment;
use crate::space::CHANGE_BLOCKS;
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
    /// Units set aside that it uses, and how many blocks each has.
    mine: (Vec<u64>, u64),
    /// How often it has waited for room.
    retries: u32,
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
    /// The next key, and what was counted before it.
    Counting(u64, u64),
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

/// How often a task may wait for room while blocks are being given back.
const RETRIES_MAX: u32 = 1000;

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
        Self { token, ask, state: State::Start, began, writes_to, quiets, mine, retries }
    }
}

impl Store {
    /// Goes on with a task as far as it goes.
    pub(super) fn run(&mut self, id: u64) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        let wait = match self.step(id, &mut task) {
            Ok(Next::Done(answer)) => return self.finish(task, Ok(answer)),
            Ok(Next::Wait(wait)) | Err(Halt::Wait(wait)) => wait,
            Err(Halt::Stop(Stop::Need(address))) => Wait::Page(address),
            Err(Halt::Stop(Stop::Error(error))) => return self.finish(task, Err(*error)),
            Err(Halt::Stop(Stop::Full)) => {
                if !self.may_find_room(&mut task) {
                    let error = self.books.no_space();
                    return self.finish(task, Err(error));
                }
                Wait::Commit(self.books.generation)
            }
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
        let patience = if is_swept { 2 } else { RETRIES_MAX };
        !self.stopped && task.retries <= patience && self.books.space.awaits_commit()
    }

    /// Answers, and gives back what the task held.
    fn finish(&mut self, task: Task, outcome: Result<Answer, StoreError>) {
        let (units, unit) = &task.mine;
        for number in units {
            let key = (task.writes_to.unwrap_or(0), *number);
            let Some(grant) = self.pending.get_mut(&key) else { continue };
            grant.users -= 1;
            if grant.users == 0 {
                let at = grant.at;
                self.pending.remove(&key);
                self.books.space.pending.remove(at..at + unit);
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
        if let State::Durable(answer) = &task.state {
            return Ok(Next::Done(answer.clone()));
        }
        match task.ask.clone() {
            Ask::Change(change) => self.change(task, &change),
            Ask::Find(name) => Ok(Next::Done(Answer::Volume(self.books.lookup(&name)?.info()))),
            Ask::List => self.list(task),
            Ask::Unique(name) => self.count_unique(task, &name),
            Ask::Usage => Ok(Next::Done(Answer::Usage(self.usage()))),
            Ask::Read { volume, block, blocks } => self.read(id, task, volume, block, blocks),
            Ask::Write { volume, block, blocks } => self.write(id, task, volume, block, blocks),
            Ask::Trim { volume, block, blocks } => self.trim(task, volume, block, blocks),
            Ask::Flush => self.flush(id, task),
        }
    }

    fn change(&mut self, task: &mut Task, change: &Change) -> Result<Next, Halt> {
        self.refuse_if_stopped()?;
        self.may_change()?;
        if let (Some(name), None) = (change.quiets(), task.quiets) {
            let body = self.books.lookup(name)?;
            self.traffic.entry(body.id).or_default().quieting += 1;
            task.quiets = Some(body.id);
        }
        if let Some(id) = task.quiets
            && self.traffic.entry(id).or_default().writes > 0
        {
            return Ok(Next::Wait(Wait::Volume(id)));
        }
        let gives_back = matches!(change, Change::Delete { .. } | Change::Resize { .. });
        let made = loop {
            self.books.fill_pool(CHANGE_BLOCKS, gives_back)?;
            if let Progress::Made(made) = self.books.attempt(|books| books.change(change))? {
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

    fn count_unique(&mut self, task: &mut Task, name: &str) -> Result<Next, Halt> {
        let (mut key, mut sum) =
            if let State::Counting(key, sum) = task.state { (key, sum) } else { (0, 0) };
        let body = self.books.lookup(name)?;
        while key < u64::MAX {
            let (next, blocks) = self.books.unique_from(&body, key)?;
            (key, sum) = (next, sum + blocks);
            task.state = State::Counting(key, sum);
        }
        Ok(Next::Done(Answer::Blocks(sum)))
    }

    fn usage(&self) -> Usage {
        let (_, durable) = &self.durable;
        Usage {
            blocks: durable.blocks,
            used: durable.used,
            free: self.books.space.free(&self.books.superblock),
            kept: self.books.space.kept,
            volumes: self.books.superblock.volumes,
        }
    }

    fn read(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        if let State::Transfers(_, failed, _) = &task.state {
            return ended(*failed, "read blocks of a volume");
        }
        let (_, range) = self.volume_and_range(volume, block, blocks)?;
        let body = self.books.expect_volume(volume)?;
        let pieces = self.books.plan_read(&body, range)?;
        let mut transfers = 0;
        for piece in pieces {
            let (offset, blocks, token) = (piece.block - block, piece.blocks, task.token);
            let Some(at) = piece.at else {
                self.actions.push_back(Action::Zero { token, offset, blocks });
                continue;
            };
            let io = self.enter(Purpose::Data(id));
            self.actions.push_back(Action::ReadData { io, token, offset, at, blocks });
            transfers += 1;
        }
        if transfers == 0 {
            return Ok(Next::Done(Answer::Done));
        }
        self.begin_transfers(task);
        task.state = State::Transfers(transfers, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    fn write(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        match &mut task.state {
            State::Transfers(_, failed, segments) => {
                let segments = std::mem::take(segments);
                ended(*failed, "write blocks of a volume")?;
                task.state = State::Map(segments);
                self.map(task, volume)
            }
            State::Map(_) => self.map(task, volume),
            _ => self.begin_write(id, task, volume, block, blocks),
        }
    }

    fn begin_write(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        self.refuse_if_stopped()?;
        let (body, range) = self.writable(volume, block, blocks)?;
        if task.writes_to.is_none() {
            let traffic = self.traffic.entry(volume).or_default();
            if traffic.quieting > 0 {
                return Ok(Next::Wait(Wait::Volume(volume)));
            }
            traffic.writes += 1;
            task.writes_to = Some(volume);
            task.mine.1 = body.unit();
            self.begin_transfers(task);
        }
        let Self { books, pending, .. } = self;
        let segments = books.plan_write(&body, &range, pending, &mut task.mine.0)?;
        for segment in &segments {
            let io = self.enter(Purpose::Data(id));
            let Segment { at, blocks, .. } = *segment;
            let (token, offset) = (task.token, segment.block - block);
            self.actions.push_back(Action::WriteData { io, token, offset, at, blocks });
        }
        if segments.is_empty() {
            return Ok(Next::Done(Answer::Done));
        }
        task.state = State::Transfers(segments.len() as u64, None, segments);
        Ok(Next::Wait(Wait::Transfers))
    }

    /// The data are there: has the map refer to them.
    fn map(&mut self, task: &mut Task, volume: u64) -> Result<Next, Halt> {
        self.refuse_if_stopped()?;
        let State::Map(segments) = &mut task.state else { return Ok(Next::Done(Answer::Done)) };
        while let Some(segment) = segments.last_mut() {
            if segment.is_new {
                self.may_change()?;
                self.books.fill_pool(CHANGE_BLOCKS, true)?;
                let end = self.books.attempt(|books| books.map_segment(volume, segment))?;
                let done = end - segment.block;
                (segment.block, segment.at) = (end, segment.at + done);
                segment.blocks = segment.blocks.saturating_sub(done);
            }
            if !segment.is_new || segment.blocks == 0 {
                segments.pop();
            }
        }
        let (units, unit) = &task.mine;
        for number in units {
            if let Some(grant) = self.pending.get_mut(&(volume, *number))
                && !grant.is_mapped
            {
                grant.is_mapped = true;
                self.books.space.fresh += unit;
            }
        }
        Ok(Next::Done(Answer::Done))
    }

    fn trim(
        &mut self,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        self.refuse_if_stopped()?;
        let (_, range) = self.writable(volume, block, blocks)?;
        if matches!(task.state, State::Start) {
            task.state = State::From(range.start);
        }
        let State::From(at) = &mut task.state else { return Ok(Next::Done(Answer::Done)) };
        while *at < range.end {
            self.may_change()?;
            self.books.fill_pool(CHANGE_BLOCKS, true)?;
            *at = self.books.attempt(|books| books.unmap(volume, &(*at..range.end)))?;
        }
        Ok(Next::Done(Answer::Done))
    }

    fn flush(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        if let State::Transfers(_, failed, _) = &task.state {
            return ended(*failed, "flush the device");
        }
        self.refuse_if_stopped()?;
        if !self.is_clean() {
            task.state = State::Durable(Answer::Done);
            return Ok(Next::Wait(Wait::Commit(self.books.generation)));
        }
        if !matches!(self.commit, Commit::Idle) {
            // Its last flush may have begun before the last write of data had ended.
            return Ok(Next::Wait(Wait::Commit(self.durable.0 + 1)));
        }
        let io = self.enter(Purpose::Flush(id));
        self.actions.push_back(Action::Flush { io });
        task.state = State::Transfers(1, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    /// A transfer of a task has ended; once all have, it goes on.
    pub(super) fn handle_transfer(&mut self, id: u64, end: End<'_>) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Transfers(left, failed, _) = &mut task.state else { return };
        *left -= 1;
        if let End::Failed(outcome) = end {
            *failed = Some(outcome);
        }
        if *left == 0 {
            self.run(id);
        }
    }

    fn begin_transfers(&mut self, task: &mut Task) {
        *self.transfers.entry(self.books.generation).or_default() += 1;
        task.began = Some(self.books.generation);
    }

    fn refuse_if_stopped(&self) -> Result<(), Halt> {
        if self.stopped { Err(StoreError::Stopped.into()) } else { Ok(()) }
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

fn ended(failed: Option<Outcome>, what: &'static str) -> Result<Next, Halt> {
    match failed {
        Some(outcome) => Err(StoreError::Device { what, outcome }.into()),
        None => Ok(Next::Done(Answer::Done)),
    }
}
