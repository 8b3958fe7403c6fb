//! Making a volume thick, and having its blocks lie in units of its own.
//!
//! ```text
//!   quiet | plan | read what is shared | write it to new units | enter it in the map | let writes go on
//! ```

use super::{Halt, Moving, Next, State, Task, Wait, transfer};
use crate::cost::Leaves;
use crate::format::flags;
use crate::plan::{Grant, Piece, Source};
use crate::space::CHANGE_BLOCKS;
use crate::store::{Action, Answer, Purpose, Store};
use crate::thick::{Move, Owning};
use crate::volumes::Progress;

impl Store {
    pub(super) fn thicken(&mut self, task: &mut Task, name: &str) -> Result<Next, Halt> {
        let account = self.add_up(task, name)?;
        let body = self.books.lookup(name)?;
        let is_thick = body.has(flags::THICK);
        if is_thick {
            // A snapshot of before it was may have been gone back to.
            body.expect_no_parent()?;
        }
        if is_thick && body.owed == account.missing {
            return Ok(Next::Done(Answer::Volume(body.info())));
        }
        self.expect_open()?;
        self.may_change()?;
        let gives_back = is_thick && account.missing < body.owed;
        let leaves = if gives_back { Leaves::Nothing } else { Leaves::Most };
        self.books.fill_pool(CHANGE_BLOCKS, leaves)?;
        let made = self.books.attempt_with_room(|books| books.thicken(name, account.missing))?;
        let answer = match made {
            Progress::Made(Some(info)) => Answer::Volume(info),
            Progress::Made(None) | Progress::Again => Answer::Done,
        };
        task.state = State::Durable(answer);
        Ok(Next::Wait(Wait::Commit(self.books.generation)))
    }

    pub(super) fn own(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        if let State::Transfers(_, failed, _) = task.state {
            let what = match task.moves.as_ref().is_some_and(|moving| moving.is_written) {
                true => "write copies of blocks of a volume",
                false => "read blocks of a volume",
            };
            if failed.is_some() {
                self.spoil_copies(task);
            }
            transfer::ended(failed, what)?;
            task.state = State::Start;
        }
        self.expect_open()?;
        if task.quiets.is_none() {
            self.books.expect_volume(volume)?;
            self.traffic.entry(volume).or_default().quieting += 1;
            task.quiets = Some(volume);
        }
        if task.writes_to.is_none() && self.traffic.entry(volume).or_default().writes > 0 {
            return Ok(Next::Wait(Wait::Volume(volume)));
        }
        match &task.moves {
            None => self.begin_own(id, task, volume, block, blocks),
            Some(moving) if !moving.is_written => self.write_copies(id, task),
            Some(_) => self.map_copies(task, volume),
        }
    }

    /// Nobody writes to the volume: sees what is to be done, and does it if nothing is to be copied.
    fn begin_own(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        let (body, _) = self.writable(volume, block, 0)?;
        if !body.has(flags::THICK) {
            return Ok(Next::Done(Answer::Owned(body.blocks)));
        }
        body.expect_no_parent()?;
        let mut from = block;
        let owning = loop {
            match self.books.plan_own(&body, from, blocks)? {
                // A damaged tree may part a unit.
                Owning::Nothing(to) if to < body.blocks => from = to.next_multiple_of(body.unit()),
                owning => break owning,
            }
            self.books.cache.settle();
        };
        self.may_change()?;
        match owning {
            Owning::Nothing(to) => Ok(Next::Done(Answer::Owned(to))),
            Owning::Hole(hole) => {
                self.books.fill_pool(CHANGE_BLOCKS, Leaves::Promised)?;
                let end = self.books.attempt_with_room(|books| books.fill_hole(volume, &hole))?;
                Ok(Next::Done(Answer::Owned(end)))
            }
            Owning::Moves(moves) => {
                if task.writes_to.is_none() {
                    self.traffic.entry(volume).or_default().writes += 1;
                    task.writes_to = Some(volume);
                    task.mine.1 = body.unit();
                }
                let moves = self.find_places(task, moves, (volume, body.unit(), body.owed))?;
                let first = moves.first().map_or(block, |one| one.number * body.unit());
                task.moves = Some(Box::new(Moving { first, moves, is_written: false }));
                self.begin_transfers(task);
                self.read_copies(id, task)
            }
        }
    }

    /// Sets units aside for those that have none.
    fn find_places(
        &mut self,
        task: &mut Task,
        mut moves: Vec<Move>,
        (volume, unit, owed): (u64, u64, u64),
    ) -> Result<Vec<Move>, Halt> {
        for one in moves.iter_mut().filter(|one| one.at.is_none()) {
            let mut mine = task.mine.0.iter();
            let at = match mine.find(|(number, _)| *number == one.number) {
                Some((_, at)) => *at,
                None => {
                    let at = self.books.take_units(unit, 1, owed)?.start;
                    let grant = Grant { users: 1, is_mapped: false, taken: u32::MAX };
                    self.pending.insert((volume, one.number, at), grant);
                    task.mine.0.push((one.number, at));
                    at
                }
            };
            one.at = Some(at);
        }
        Ok(moves)
    }

    fn read_copies(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        let Some(moving) = &task.moves else { return Ok(Next::Done(Answer::Done)) };
        let pieces = moving.moves.iter().flat_map(|one| &one.copies);
        let reads = joined(pieces.map(|piece| (piece.block, piece.blocks, place(piece))));
        let (token, first) = (task.token, moving.first);
        for &(block, blocks, at) in &reads {
            let (io, offset, is_summed) = (self.enter(Purpose::Data(id)), block - first, false);
            self.actions.push_back(Action::ReadData { io, token, offset, at, blocks, is_summed });
        }
        if reads.is_empty() {
            return self.write_copies(id, task);
        }
        task.state = State::Transfers(reads.len() as u64, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    fn write_copies(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        let unit = task.mine.1;
        let Some(moving) = &mut task.moves else { return Ok(Next::Done(Answer::Done)) };
        moving.is_written = true;
        let writes = joined(places(&moving.moves, unit));
        let (token, first) = (task.token, moving.first);
        for &(block, blocks, at) in &writes {
            let (io, offset, is_summed) = (self.enter(Purpose::Data(id)), block - first, false);
            self.actions.push_back(Action::WriteData { io, token, offset, at, blocks, is_summed });
        }
        if writes.is_empty() {
            let volume = task.writes_to.unwrap_or(0);
            return self.map_copies(task, volume);
        }
        task.state = State::Transfers(writes.len() as u64, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    /// A copy may not have been written, and may come to be written late.
    fn spoil_copies(&mut self, task: &Task) {
        let Some(moving) = task.moves.as_ref().filter(|moving| moving.is_written) else { return };
        for (_, blocks, at) in joined(places(&moving.moves, task.mine.1)) {
            self.books.space.spoil(at..at + blocks);
        }
    }

    /// The copies are there: has the map refer to them, a unit at a time.
    fn map_copies(&mut self, task: &mut Task, volume: u64) -> Result<Next, Halt> {
        let unit = task.mine.1;
        let Some(moving) = &task.moves else { return Ok(Next::Done(Answer::Done)) };
        let end = moving.moves.last().map_or(0, |one| (one.number + 1) * unit);
        let to = end.min(self.books.expect_volume(volume)?.blocks);
        for one in &moving.moves {
            let Some(at) = one.at else { continue };
            let key = (volume, one.number, at);
            let is_new = self.pending.contains_key(&key);
            self.may_change()?;
            self.books.fill_pool(CHANGE_BLOCKS, Leaves::Promised)?;
            let is_moved =
                self.books.attempt_with_room(|books| books.map_own(volume, one, at, is_new))?;
            if let Some(grant) = self.pending.get_mut(&key).filter(|_| is_moved)
                && !grant.is_mapped
            {
                grant.is_mapped = true;
                self.books.space.fresh += unit;
            }
        }
        Ok(Next::Done(Answer::Owned(to)))
    }
}

/// Where what is to be copied lies.
fn place(piece: &Piece) -> Option<u64> {
    if let Source::Store(at) = piece.from { Some(at) } else { None }
}

/// Where copies go: their first block, how many, and the place.
fn places(moves: &[Move], unit: u64) -> impl Iterator<Item = (u64, u64, Option<u64>)> + '_ {
    let goes_to = move |one: &Move, piece: &Piece| {
        let at = one.at.map(|at| at + (piece.block - one.number * unit));
        (piece.block, piece.blocks, at)
    };
    moves.iter().flat_map(move |one| one.copies.iter().map(move |piece| goes_to(one, piece)))
}

/// The same with those in one that lie together.
fn joined(pieces: impl Iterator<Item = (u64, u64, Option<u64>)>) -> Vec<(u64, u64, u64)> {
    let mut joined: Vec<(u64, u64, u64)> = Vec::new();
    for (block, blocks, at) in pieces {
        let Some(at) = at else { continue };
        match joined.last_mut() {
            Some((first, count, place)) if *first + *count == block && *place + *count == at => {
                *count += blocks;
            }
            _ => joined.push((block, blocks, at)),
        }
    }
    joined
}
