//! The table: one place for each operation that is under way.
//!
//! ```text
//!              future                poller              poller               future
//!   Empty ──▶ Sent ──────────────▶ Submitted ─────────▶ Answered ─────────▶ Empty
//!              its number is        the device may       its waker was
//!              in the mailbox       touch the memory     woken
//! ```
//!
//! A future that is dropped before the answer says that nobody wants it; the poller then empties the
//! place and gives it back. The poller never waits for the lock of a place or of the line: what it
//! cannot have now it tries again in its next turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Waker;

use base::{Flags, Limits, Operation, Request};
use host::{Receiver, Sender, mailbox};
use reactor::Handle;

use super::buffer::{Buffer, Buffers};
use super::line::Line;
use super::refused::Why;

/// What a device's handles and its poller share.
pub(super) struct Shared {
    pub(super) name: Arc<str>,
    pub(super) thread: Handle,
    pub(super) limits: Limits,
    pub(super) buffers: Buffers,
    /// Has room for each place, and for one more.
    pub(super) incoming: Sender<u32>,
    places: Box<[Mutex<Place>]>,
    line: Mutex<Line>,
    is_gone: AtomicBool,
}

/// One operation.
#[derive(Default)]
pub(super) struct Place {
    pub(super) stage: Stage,
    pub(super) order: Option<Order>,
    pub(super) waker: Option<Waker>,
    /// The future was dropped.
    pub(super) is_unwanted: bool,
}

/// How far an operation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// There is none.
    #[default]
    Empty,
    /// It is on its way to the poller.
    Sent,
    /// The poller has it, and the device may.
    Submitted,
    /// It has ended like this.
    Answered(Result<(), Why>),
}

/// What is to be done, and the memory for it.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) operation: Operation,
    pub(super) lba: u64,
    /// The first source block of a copy.
    pub(super) operand: u64,
    pub(super) blocks: u32,
    pub(super) flags: Flags,
    pub(super) buffer: Option<Buffer>,
}

/// Places in a table, however deep the device.
const PLACES_MAX: u32 = 1024;

/// No place: nobody has a handle any more, and the device is to be let go.
pub(super) const LET_GO: u32 = u32::MAX;

impl Shared {
    pub(super) fn new(
        thread: &Handle,
        name: &str,
        limits: &Limits,
        buffers: &Buffers,
    ) -> (Self, Receiver<u32>) {
        let count = limits.depth_max.clamp(1, PLACES_MAX);
        let (incoming, receiver) = mailbox(count as usize + 1);
        let shared = Self {
            name: name.into(),
            thread: thread.clone(),
            limits: limits.clone(),
            buffers: buffers.clone(),
            incoming,
            places: (0..count).map(|_| Mutex::default()).collect(),
            line: Mutex::new(Line::new(count)),
            is_gone: AtomicBool::new(false),
        };
        (shared, receiver)
    }

    pub(super) fn count(&self) -> usize {
        self.places.len()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// To be set before the places are gone through for the last time, so that whoever comes to one
    /// after that sees it.
    pub(super) fn set_gone(&self) {
        self.is_gone.store(true, Ordering::Release);
    }

    pub(super) fn place(&self, index: u32) -> MutexGuard<'_, Place> {
        self.places[index as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place, if nobody has it locked.
    pub(super) fn try_place(&self, index: u32) -> Option<MutexGuard<'_, Place>> {
        try_lock(&self.places[index as usize])
    }

    /// The line, if nobody has it locked.
    pub(super) fn try_line(&self) -> Option<MutexGuard<'_, Line>> {
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

impl Order {
    /// As a request of place `index`.
    pub(super) fn request(&self, index: u32) -> Request {
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
