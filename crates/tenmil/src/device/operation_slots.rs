//! Table with one slot for each operation in flight.
//!
//! ```text
//!              future                poller              poller               future
//!   Empty ──▶ Sent ──────────────▶ Submitted ─────────▶ Completed ────────▶ Empty
//!              index in the          device may           waker woken
//!              mailbox               access the memory
//! ```
//!
//! A future that is dropped before the completion marks its slot as unwanted; the poller then
//! empties and frees the slot. The poller never blocks on the lock of a slot or of the wait queue:
//! it retries in its next iteration.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Waker;

use tenmil_base::{Limits, Operation, Request, RequestFlags};
use tenmil_linux::{Receiver, Sender, mailbox};
use tenmil_reactor::ThreadHandle;

use super::buffer::{Buffer, BufferPool};
use super::error::IoErrorKind;
use super::slot_wait_queue::SlotWaitQueue;

/// State shared by the handles and the poller of a device.
pub(super) struct SharedDeviceState {
    pub(super) name: Arc<str>,
    pub(super) thread: ThreadHandle,
    pub(super) limits: Limits,
    pub(super) buffers: BufferPool,
    /// Mailbox with space for every slot and for one `CLOSE_TOKEN`.
    pub(super) incoming: Sender<u32>,
    slots: Box<[Mutex<OperationSlot>]>,
    line: Mutex<SlotWaitQueue>,
    is_removed: AtomicBool,
}

/// One operation in flight.
#[derive(Default)]
pub(super) struct OperationSlot {
    pub(super) stage: SlotState,
    pub(super) order: Option<SlotRequest>,
    pub(super) waker: Option<Waker>,
    /// The future was dropped.
    pub(super) is_unwanted: bool,
}

/// State of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SlotState {
    /// The slot is free.
    #[default]
    Empty,
    /// The request waits in the mailbox.
    Sent,
    /// The poller has received the request, and the device may access the buffer.
    Submitted,
    /// The operation has ended with this result.
    Completed(Result<(), IoErrorKind>),
}

/// Operation, its parameters and its buffer.
#[derive(Debug)]
pub(super) struct SlotRequest {
    pub(super) operation: Operation,
    pub(super) lba: u64,
    /// First source block of a copy.
    pub(super) operand: u64,
    pub(super) blocks: u32,
    pub(super) flags: RequestFlags,
    pub(super) buffer: Option<Buffer>,
}

/// Maximum number of slots, independent of the depth of the device.
const SLOTS_MAX: u32 = 1024;

/// Mailbox token without a slot: the last handle was dropped and the device is to be closed.
pub(super) const CLOSE_TOKEN: u32 = u32::MAX;

impl SharedDeviceState {
    pub(super) fn new(
        thread: &ThreadHandle,
        name: &str,
        limits: &Limits,
        buffers: &BufferPool,
    ) -> (Self, Receiver<u32>) {
        let count = limits.depth_max.clamp(1, SLOTS_MAX);
        let (incoming, receiver) = mailbox(count as usize + 1);
        let shared = Self {
            name: name.into(),
            thread: thread.clone(),
            limits: limits.clone(),
            buffers: buffers.clone(),
            incoming,
            slots: (0..count).map(|_| Mutex::default()).collect(),
            line: Mutex::new(SlotWaitQueue::new(count)),
            is_removed: AtomicBool::new(false),
        };
        (shared, receiver)
    }

    pub(super) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// Marks the device as removed. Must be called before the last pass over all slots: `is_removed`
    /// under the lock of a slot then sees the flag, or the pass sees the request.
    pub(super) fn set_removed(&self) {
        self.is_removed.store(true, Ordering::Release);
    }

    pub(super) fn lock_slot(&self, index: u32) -> MutexGuard<'_, OperationSlot> {
        self.slots[index as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_wait_queue(&self) -> MutexGuard<'_, SlotWaitQueue> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the slot if it is not locked already.
    pub(super) fn try_lock_slot(&self, index: u32) -> Option<MutexGuard<'_, OperationSlot>> {
        try_lock(&self.slots[index as usize])
    }

    /// Locks the wait queue if it is not locked already.
    pub(super) fn try_lock_wait_queue(&self) -> Option<MutexGuard<'_, SlotWaitQueue>> {
        try_lock(&self.line)
    }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl SlotRequest {
    /// Request whose token is the slot `index`.
    pub(super) fn block_request(&self, index: u32) -> Request {
        Request {
            token: u64::from(index),
            lba: self.lba,
            operand: self.operand,
            segment_first: index,
            blocks: self.blocks,
            segment_count: u16::from(self.buffer.is_some()),
            metadata_count: 0,
            operation: self.operation,
            flags: self.flags,
        }
    }
}
