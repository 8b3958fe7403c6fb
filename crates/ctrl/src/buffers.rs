//! Bounce buffers: memory of the controller's own for data that a medium cannot reach in the host.
//!
//! The pool is made at start and shared by all queues of a controller. A command that finds it empty
//! waits for its turn; since data moves through a buffer part by part, one buffer of any size is
//! enough for every command to progress.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use base::{Memory, Segment};

/// A pool of bounce buffers.
#[derive(Clone)]
pub struct Buffers {
    memory: Arc<dyn Memory>,
    free: Arc<Mutex<Vec<Segment>>>,
    count: usize,
}

impl Buffers {
    /// A pool of these segments of `memory`. Each should hold at least one block; media reach them
    /// as they reach any other segment.
    pub fn new(memory: Arc<dyn Memory>, segments: Vec<Segment>) -> Self {
        let count = segments.len();
        Self { memory, free: Arc::new(Mutex::new(segments)), count }
    }

    /// Takes a buffer, if one is free.
    pub(crate) fn take(&self) -> Option<Segment> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Gives a buffer back that nobody touches any more.
    pub(crate) fn give(&self, segment: Segment) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(segment);
    }

    /// How many buffers there are, free or not.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many buffers are free.
    pub fn free(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn memory(&self) -> &dyn Memory {
        &*self.memory
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Buffers {{ {} of {} free }}", self.free(), self.count)
    }
}
