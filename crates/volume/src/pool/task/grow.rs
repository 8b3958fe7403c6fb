//! Growth of a pool: more devices, or more space on the existing ones.
//!
//! ```text
//!   labels, durable | commit g: in one superblock | commit g + 1: in the other one, too
//!                                                                        completed ^
//! ```
//!
//! The space is usable after the first commit. After the second, no superblock on the first device
//! contains the old end of the pool, so blocks that were superblocks there may be allocated.

use super::{RequestTask, State, StepResult, TaskPause, WaitReason};
use crate::devices::Devices;
use crate::error::PoolError;
use crate::metadata::{Metadata, TxnStop};
use crate::pool::{Pool, PoolResponse};

impl Pool {
    pub(super) fn grow(
        &mut self,
        task: &mut RequestTask,
        devices: &Devices,
    ) -> Result<StepResult, TaskPause> {
        if matches!(task.state, State::Start) {
            if [&self.books.devices, &self.durable.devices].map(|has| **has == *devices)
                == [true; 2]
            {
                return Ok(StepResult::Done(PoolResponse::Done));
            }
            self.expect_open()?;
            self.may_change()?;
            self.books.take_devices(devices)?;
            task.state = State::Grown;
        } else {
            task.state = State::Durable(PoolResponse::Done);
        }
        Ok(StepResult::Wait(WaitReason::Commit(self.books.generation)))
    }
}

impl Metadata {
    /// Replaces the current devices.
    fn take_devices(&mut self, devices: &Devices) -> Result<(), TxnStop> {
        devices.check()?;
        if !devices.follow(&self.devices) {
            let (blocks, found) = (self.superblock.blocks, devices.blocks());
            return Err(PoolError::NotGrown { blocks, found }.into());
        }
        let end = self.superblock.front();
        devices.note(&mut self.superblock);
        self.devices = devices.clone().into();
        self.space.grow(self.generation + 1, end, &self.superblock);
        if self.full < crate::edit::FULL {
            self.raise_reserve();
        }
        Ok(())
    }
}
