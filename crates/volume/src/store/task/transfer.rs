//! Data: reads, writes, trims and flushes.

use base::Outcome;

use super::{
    Halt, Next, PATIENCE, PATIENCE_FOR_UNITS, Part, RETRIES_MAX, State, Summed, Task, Wait,
};
use crate::books::Stop;
use crate::cost::Leaves;
use crate::error::StoreError;
use crate::format::{flags, unpadded};
use crate::plan::{Segment, Source};
use crate::space::{CHANGE_BLOCKS, CHECKSUM_BLOCKS};
use crate::store::{Action, Answer, Ask, Commit, End, Purpose, Run, Store};

impl Store {
    pub(super) fn read(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        if let State::Transfers(_, failed, _) = &task.state {
            let done = ended(*failed, "read blocks of a volume")?;
            return self.judge(task, volume, block).map(|()| done);
        }
        let (body, range) = self.volume_and_range(volume, block, blocks)?;
        let is_summed = body.has(flags::CHECKSUMS);
        if is_summed {
            let sums = self.books.sums(&body, &range)?;
            task.summed = Some(Box::new(Summed { sums, ..Summed::default() }));
        }
        let pieces = self.books.plan_read(&body, range)?;
        let mut transfers = 0;
        for piece in pieces {
            let (offset, blocks, token) = (piece.block - block, piece.blocks, task.token);
            if piece.from == Source::Nothing {
                self.actions.push_back(Action::Zero { token, offset, blocks });
                continue;
            }
            let io = self.enter(Purpose::Data(id));
            let action = if let Source::Store(at) = piece.from {
                note_part(task, io, Run { block: offset, blocks, at });
                Action::ReadData { io, token, offset, at, blocks, is_summed }
            } else {
                Action::ReadParent { io, token, offset, block: piece.block, blocks }
            };
            self.actions.push_back(action);
            transfers += 1;
        }
        if transfers == 0 {
            return Ok(Next::Done(Answer::Done));
        }
        self.begin_transfers(task);
        task.state = State::Transfers(transfers, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    pub(super) fn write(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        match &mut task.state {
            State::Transfers(_, failed, segments) => {
                let (segments, failed) = (std::mem::take(segments), *failed);
                if failed.is_some() {
                    let spoilt = segments.iter().map(|part| part.at..part.at + part.blocks);
                    spoilt.for_each(|blocks| self.books.space.spoil(blocks));
                }
                ended(failed, "write blocks of a volume")?;
                task.state = State::Map(segments);
                self.map(task, volume, block)
            }
            State::Map(_) => self.map(task, volume, block),
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
        self.expect_open()?;
        let (body, range) = self.writable(volume, block, blocks)?;
        if range.is_empty() {
            return Ok(Next::Done(Answer::Done));
        }
        if task.writes_to.is_none() {
            let traffic = self.traffic.entry(volume).or_default();
            if traffic.quieting > 0 {
                return Ok(Next::Wait(Wait::Volume(volume)));
            }
            traffic.writes += 1;
            task.writes_to = Some(volume);
            task.mine.1 = body.unit();
        }
        let is_summed = body.has(flags::CHECKSUMS);
        if is_summed && task.began.is_none() {
            // What is found to be free in its units must be so until it is written.
            self.begin_transfers(task);
        }
        let Self { books, pending, .. } = self;
        let planned = books.plan_write(&body, &range, pending, &mut task.mine.0);
        if body.has(flags::THICK) && planned == Err(Stop::Full) && books.space.has_lowered() {
            task.patience = PATIENCE_FOR_UNITS;
        }
        let segments = planned?;
        // What takes no unit of a thick volume was promised room for the map.
        task.promise(body.has(flags::THICK) && task.mine.0.is_empty());
        let leaves = if task.is_promised { Leaves::Promised } else { Leaves::Most };
        if segments.iter().any(|segment| segment.is_new) && self.books.is_low(leaves) {
            // There is room for the data, but there might be none for the map.
            return Err(Stop::Full.into());
        }
        if task.began.is_none() {
            self.begin_transfers(task);
        }
        if is_summed {
            let sums = vec![0; usize::try_from(blocks).unwrap_or(0)];
            task.summed = Some(Box::new(Summed { sums, ..Summed::default() }));
        }
        // What is filled keeps its place among all that was read.
        let kept = task.filling.as_ref().map_or(0, |filling| block - filling.blocks.start);
        for segment in &segments {
            let io = self.enter(Purpose::Data(id));
            let Segment { at, blocks, .. } = *segment;
            let (token, offset) = (task.token, segment.block - block);
            let from = kept + offset;
            let action = Action::WriteData { io, token, offset: from, at, blocks, is_summed };
            self.actions.push_back(action);
            note_part(task, io, Run { block: offset, blocks, at });
        }
        if segments.is_empty() {
            return Ok(Next::Done(Answer::Done));
        }
        task.state = State::Transfers(segments.len() as u64, None, segments);
        Ok(Next::Wait(Wait::Transfers))
    }

    /// The data are there: has the map refer to them.
    fn map(&mut self, task: &mut Task, volume: u64, block: u64) -> Result<Next, Halt> {
        self.expect_open()?;
        let sums = task.summed.as_ref().map_or(&[][..], |summed| &summed.sums);
        let needed = if sums.is_empty() { CHANGE_BLOCKS } else { CHECKSUM_BLOCKS };
        let leaves = if task.is_promised { Leaves::Promised } else { Leaves::Half };
        let State::Map(segments) = &mut task.state else { return Ok(Next::Done(Answer::Done)) };
        while let Some(segment) = segments.last_mut() {
            if segment.is_new {
                self.may_change()?;
                self.books.fill_pool(needed, leaves)?;
                let first = usize::try_from(segment.block - block).unwrap_or(usize::MAX);
                let sums = sums.get(first..).unwrap_or_default();
                let end = self
                    .books
                    .attempt_with_room(|books| books.map_segment(volume, segment, sums))?;
                let done = end - segment.block;
                (segment.block, segment.at) = (end, segment.at + done);
                segment.blocks = segment.blocks.saturating_sub(done);
            }
            if !segment.is_new || segment.blocks == 0 {
                segments.pop();
            }
        }
        let (units, unit) = &task.mine;
        for &(number, at) in units {
            if let Some(grant) = self.pending.get_mut(&(volume, number, at))
                && !grant.is_mapped
            {
                grant.is_mapped = true;
                self.books.space.fresh += unit;
            }
        }
        Ok(Next::Done(Answer::Done))
    }

    pub(super) fn trim(
        &mut self,
        task: &mut Task,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        self.expect_open()?;
        let (body, range) = self.writable(volume, block, blocks)?;
        if body.reach > 0 && task.writes_to.is_none() {
            // What is copied from the parent must not come back.
            let traffic = self.traffic.entry(volume).or_default();
            if traffic.quieting > 0 {
                return Ok(Next::Wait(Wait::Volume(volume)));
            }
            traffic.writes += 1;
            task.writes_to = Some(volume);
        }
        let is_summed = body.has(flags::CHECKSUMS);
        let needed = if is_summed { CHECKSUM_BLOCKS } else { CHANGE_BLOCKS };
        if matches!(task.state, State::Start) {
            task.state = State::From(range.start);
        }
        task.promise(body.has(flags::THICK));
        let leaves = if task.is_promised { Leaves::Promised } else { Leaves::Half };
        let State::From(at) = &mut task.state else { return Ok(Next::Done(Answer::Done)) };
        while *at < range.end {
            self.may_change()?;
            self.books.fill_pool(needed, leaves)?;
            let rest = *at..range.end;
            if self.books.is_low(Leaves::Most) && self.books.is_shared_from(volume, rest.start)? {
                // It would take room to copy what others keep.
                return Err(Stop::Full.into());
            }
            *at = self.books.attempt_in_steps(|books| books.unmap(volume, &rest))?;
        }
        Ok(Next::Done(Answer::Done))
    }

    pub(super) fn flush(&mut self, id: u64, task: &mut Task) -> Result<Next, Halt> {
        if let State::Transfers(_, failed, _) = &task.state {
            let ended = ended(*failed, "flush the device");
            if let Err(Halt::Stop(Stop::Error(error))) = &ended {
                // What the device has lost now, no later flush would bring to light.
                self.stop(error);
            }
            return ended;
        }
        // Before anything was changed there is nothing to commit, and nothing need be written.
        if self.stopped || !self.is_clean() {
            self.expect_open()?;
        }
        if !self.is_clean() {
            task.state = State::Durable(Answer::Done);
            return Ok(Next::Wait(Wait::Commit(self.books.generation)));
        }
        if !matches!(self.commit, Commit::Idle) {
            // Its last flush may have begun before the last write of data had ended.
            return Ok(Next::Wait(Wait::Commit(self.durable.generation + 1)));
        }
        let io = self.enter(Purpose::Flush(id));
        self.actions.push_back(Action::Flush { io });
        task.state = State::Transfers(1, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    /// A transfer of a task has ended; once all have, it goes on.
    pub(in crate::store) fn handle_transfer(&mut self, id: u64, io: u64, end: End<'_>) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Transfers(left, failed, _) = &mut task.state else { return };
        *left -= 1;
        let is_last = *left == 0;
        if let End::Failed(outcome) = end {
            *failed = Some(outcome);
            if outcome.is_conflict() && task.ask.writes_blocks() {
                // Another host has reserved the device, and may own the store: the superblocks are read.
                self.stop(&StoreError::Device { what: "write blocks of a volume", outcome });
            }
        } else if let Some(summed) = task.summed.as_mut().filter(|summed| summed.has(io)) {
            let writes = matches!(task.ask, Ask::Write { .. } | Ask::Fill { .. });
            let took = summed.take(io, end, writes);
            *failed = failed.or(if took { None } else { Some(Outcome::INTERNAL_ERROR) });
        } else if let (End::Contents(holds), Some(filling)) = (end, &mut task.filling) {
            filling.note_contents(holds, task.mine.1);
        }
        if is_last {
            self.run(id);
        }
    }

    /// Whether all that was read is what was written.
    fn judge(&mut self, task: &Task, volume: u64, block: u64) -> Result<(), Halt> {
        let wrong = task.summed.iter().flat_map(|summed| &summed.wrong).min_by_key(|run| run.block);
        let Some(wrong) = wrong else { return Ok(()) };
        let name = unpadded(&self.books.expect_volume(volume)?.name);
        let Run { block: offset, blocks, at } = *wrong;
        Err(StoreError::Corrupt { name, block: block + offset, blocks, at }.into())
    }

    pub(super) fn begin_transfers(&mut self, task: &mut Task) {
        *self.transfers.entry(self.books.generation).or_default() += 1;
        task.began = Some(self.books.generation);
    }
}

impl Task {
    /// Whether it needs no room but what is kept for a thick volume, of which many others need some.
    fn promise(&mut self, is_promised: bool) {
        self.is_promised = is_promised;
        self.patience = if is_promised { RETRIES_MAX } else { PATIENCE };
    }
}

impl Summed {
    /// Whether a transfer has checksums on record: what comes from a parent has not.
    fn has(&self, io: u64) -> bool {
        self.parts.iter().any(|part| part.io == io)
    }

    /// Takes the checksums of a part that has been moved. False if it was not told as many as there
    /// are blocks.
    fn take(&mut self, io: u64, end: End<'_>, writes: bool) -> bool {
        let Some(Part { run, .. }) = self.parts.iter().find(|part| part.io == io) else {
            return false;
        };
        let first = usize::try_from(run.block).unwrap_or(usize::MAX);
        let count = usize::try_from(run.blocks).unwrap_or(usize::MAX);
        let known = first.checked_add(count).and_then(|end| self.sums.get_mut(first..end));
        let (Some(known), End::Sums(found)) = (known, end) else { return false };
        if found.len() != known.len() {
            return false;
        }
        if writes {
            known.copy_from_slice(found);
            return true;
        }
        for ((index, known), found) in (0..).zip(&*known).zip(found) {
            if known == found {
                continue;
            }
            let (block, at) = (run.block + index, run.at + index);
            match self.wrong.last_mut() {
                Some(last) if last.block + last.blocks == block && last.at + last.blocks == at => {
                    last.blocks += 1;
                }
                _ => self.wrong.push(Run { block, blocks: 1, at }),
            }
        }
        true
    }
}

/// Notes what is under way, if its checksums are wanted.
fn note_part(task: &mut Task, io: u64, run: Run) {
    if let Some(summed) = &mut task.summed {
        summed.parts.push(Part { io, run });
    }
}

pub(super) fn ended(failed: Option<Outcome>, what: &'static str) -> Result<Next, Halt> {
    match failed {
        Some(outcome) => Err(StoreError::Device { what, outcome }.into()),
        None => Ok(Next::Done(Answer::Done)),
    }
}
