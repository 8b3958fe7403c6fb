//! A store gains devices, or room on those that it has.
//!
//! ```text
//!   labels, durable | commit g: the superblock counts them | commit g + 1: and so does the other one
//!                                                                        answered ^
//! ```
//!
//! After the first commit the room is there. After the second no superblock on the first device says
//! that the store ends where it ended, so blocks that were superblocks there may be given out.

use super::{Halt, Next, State, Task, Wait};
use crate::books::{Books, Stop};
use crate::devices::Devices;
use crate::error::StoreError;
use crate::store::{Answer, Store};

impl Store {
    pub(super) fn grow(&mut self, task: &mut Task, devices: &Devices) -> Result<Next, Halt> {
        if matches!(task.state, State::Start) {
            if [&self.books.devices, &self.durable.devices].map(|has| **has == *devices)
                == [true; 2]
            {
                return Ok(Next::Done(Answer::Done));
            }
            self.expect_open()?;
            self.may_change()?;
            self.books.take_devices(devices)?;
            task.state = State::Grown;
        } else {
            task.state = State::Durable(Answer::Done);
        }
        Ok(Next::Wait(Wait::Commit(self.books.generation)))
    }
}

impl Books {
    /// Takes devices in the place of those that there are.
    fn take_devices(&mut self, devices: &Devices) -> Result<(), Stop> {
        devices.check()?;
        if !devices.follow(&self.devices) {
            let (blocks, found) = (self.superblock.blocks, devices.blocks());
            return Err(StoreError::NotGrown { blocks, found }.into());
        }
        let end = self.superblock.front();
        devices.note(&mut self.superblock);
        self.devices = devices.clone().into();
        self.space.grow(self.generation + 1, end, &self.superblock);
        if self.full < crate::edit::FULL {
            self.keep_more();
        }
        Ok(())
    }
}
