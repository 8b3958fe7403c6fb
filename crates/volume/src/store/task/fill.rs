//! Copying what a volume's parent has into the volume, from its end on.
//!
//! ```text
//!   quiet | find the last gap | read it from the parent | write it like any data | lower the reach
//! ```
//!
//! Nobody writes to the volume meanwhile, nor trims it. What was copied and is not durable with the reach
//! that says so is found to be there already when it is asked for again.

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
        if !filling.is_read {
            if let State::Transfers(_, failed, _) = task.state {
                transfer::ended(failed, "read blocks of a volume's parent")?;
            }
            task.filling = Some(Filling { is_read: true, ..filling.clone() });
            task.state = State::Start;
        }
        let (first, count) = (filling.blocks.start, filling.blocks.end - filling.blocks.start);
        match self.write(id, task, volume, first, count)? {
            Next::Done(_) => self.lower_reach(volume, first),
            wait @ Next::Wait(_) => Ok(wait),
        }
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
        task.filling = Some(Filling { blocks: range, is_read: false });
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
