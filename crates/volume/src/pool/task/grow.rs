//! Growth of a pool: more devices, or more space on the existing ones.
//!
//! ```text
//!   labels, durable | commit g: in one superblock | commit g + 1: in the other one, too
//!                                                                        completed ^
//! ```
//!
//! The space is usable after the first commit. After the second, no superblock on the first device
//! contains the old end of the pool, so blocks that were superblocks there may be allocated.

use super::{RequestTask, TaskPause, TaskState, TaskStepResult, TaskWaitReason};
use crate::device_table::DeviceTable;
use crate::error::PoolError;
use crate::metadata::{Metadata, TransactionStop};
use crate::pool::{Pool, PoolResponse};

impl Pool {
    pub(super) fn grow_task(
        &mut self,
        task: &mut RequestTask,
        devices: &DeviceTable,
    ) -> Result<TaskStepResult, TaskPause> {
        if matches!(task.state, TaskState::Start) {
            if [&self.books.devices, &self.durable_superblock.devices].map(|has| **has == *devices)
                == [true; 2]
            {
                return Ok(TaskStepResult::Done(PoolResponse::Done));
            }
            self.check_not_stopped()?;
            self.check_may_change()?;
            self.books.apply_device_table(devices)?;
            task.state = TaskState::Grown;
        } else {
            task.state = TaskState::Durable(PoolResponse::Done);
        }
        Ok(TaskStepResult::Wait(TaskWaitReason::Commit(self.books.generation)))
    }
}

impl Metadata {
    /// Replaces the current devices.
    fn apply_device_table(&mut self, devices: &DeviceTable) -> Result<(), TransactionStop> {
        devices.check()?;
        if !devices.is_extension_of(&self.devices) {
            let (blocks, found) = (self.superblock.blocks, devices.blocks());
            return Err(PoolError::NotGrown { blocks, found }.into());
        }
        let end = self.superblock.first_device_reserved_blocks();
        devices.store_to_superblock(&mut self.superblock);
        self.devices = devices.clone().into();
        self.space.grow(self.generation + 1, end, &self.superblock);
        if self.full < crate::tree_edit::FULL {
            self.raise_reserve();
        }
        Ok(())
    }
}
