//! Copying what a volume's parent has into the volume, from its end on.
//!
//! ```text
//!   quiet | find the last gap | read it from the parent | write it like any data | lower the reach
//! ```
//!
//! Units of which the parent has nothing but zeroes are not written, and take no room: behind the reach
//! they read as zeroes without.
//!
//! Nobody writes to the volume meanwhile, nor trims it. What was copied and is not durable with the reach
//! that says so is found to be there already when it is asked for again.

use std::ops::Range;

use super::{Filling, Halt, Next, State, Task, Wait, transfer};
use crate::cost::Leaves;
use crate::space::CHANGE_BLOCKS;
use crate::store::{Action, Answer, Purpose, Store};

impl Store {
    pub(super) fn fill(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        self.expect_open()?;
        if task.quiets.is_none() {
            self.books.expect_volume(volume)?;
            self.traffic.entry(volume).or_default().quieting += 1;
            task.quiets = Some(volume);
        }
        if task.writes_to.is_none() && self.traffic.entry(volume).or_default().writes > 0 {
            return Ok(Next::Wait(Wait::Volume(volume)));
        }
        let Some(filling) = task.filling.clone() else {
            return self.begin_fill(id, task, volume, blocks);
        };
        let first = filling.blocks.start;
        if !filling.is_read {
            if let State::Transfers(_, failed, _) = task.state {
                transfer::ended(failed, "read blocks of a volume's parent")?;
            }
            task.filling = Some(Filling { is_read: true, ..filling });
            task.state = State::Start;
        }
        while let Some(part) =
            task.filling.as_ref().and_then(|filling| filling.parts.last().cloned())
        {
            match self.write(id, task, volume, part.start, part.end - part.start)? {
                Next::Done(_) => (task.state, task.summed) = (State::Start, None),
                wait @ Next::Wait(_) => return Ok(wait),
            }
            task.filling.as_mut().map(|filling| filling.parts.pop());
        }
        // What is not mapped behind the reach reads as zeroes, as the rest did.
        self.lower_reach(volume, first)
    }

    /// Nobody writes to the volume: finds what is to be copied, and has it read.
    fn begin_fill(
        &mut self,
        id: u64,
        task: &mut Task,
        volume: u64,
        blocks: u64,
    ) -> Result<Next, Halt> {
        let (body, _) = self.writable(volume, 0, 0)?;
        let range = self.books.last_of_parent(&body, blocks.max(1))?;
        if range.is_empty() {
            return self.lower_reach(volume, range.start);
        }
        self.traffic.entry(volume).or_default().writes += 1;
        task.writes_to = Some(volume);
        task.mine.1 = body.unit();
        let (io, token) = (self.enter(Purpose::Data(id)), task.token);
        let (block, blocks) = (range.start, range.end - range.start);
        self.actions.push_back(Action::ReadParent { io, token, offset: 0, block, blocks });
        let parts = vec![range.clone()];
        task.filling = Some(Filling { blocks: range, parts, is_read: false });
        task.state = State::Transfers(1, None, Vec::new());
        Ok(Next::Wait(Wait::Transfers))
    }

    /// All from a block on is the volume's own.
    fn lower_reach(&mut self, volume: u64, to: u64) -> Result<Next, Halt> {
        if self.books.expect_volume(volume)?.reach > to {
            self.may_change()?;
            self.books.fill_pool(CHANGE_BLOCKS, Leaves::Half)?;
            self.books.attempt_with_room(|books| books.lower_reach(volume, to))?;
        }
        Ok(Next::Done(Answer::Filled(to)))
    }
}

impl Filling {
    /// Leaves out of what is written the units of which these blocks hold nothing but zeroes.
    pub(super) fn note_contents(&mut self, holds: &[bool], unit: u64) {
        let unit_of = |index: usize| (self.blocks.start + index as u64) / unit.max(1);
        let mut parts: Vec<Range<u64>> = Vec::new();
        for index in (0..holds.len()).filter(|index| holds[*index]) {
            let of_unit = unit_of(index) * unit..(unit_of(index) + 1) * unit;
            let (start, end) =
                (of_unit.start.max(self.blocks.start), of_unit.end.min(self.blocks.end));
            match parts.last_mut() {
                Some(last) if last.end >= start => last.end = end,
                _ => parts.push(start..end),
            }
        }
        parts.reverse();
        self.parts = parts;
    }
}
