//! Bounce buffers: controller memory for data that a block device cannot access in host memory.
//!
//! The pool is created at start and shared by all queues of a controller. A command that finds it empty
//! waits in a queue. Data passes through a buffer part by part, so one buffer of any size is enough for
//! every command to make progress.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Memory, Segment};

/// Bounce buffer pool of a controller.
#[derive(Clone)]
pub struct BouncePool {
    memory: Arc<dyn Memory>,
    free: Arc<Mutex<Vec<Segment>>>,
    buffer_count: usize,
}

impl BouncePool {
    /// Creates a pool of these segments of `memory`. Each should hold at least one block; block devices
    /// access them like any other segment.
    pub fn new(memory: Arc<dyn Memory>, segments: Vec<Segment>) -> Self {
        let buffer_count = segments.len();
        Self { memory, free: Arc::new(Mutex::new(segments)), buffer_count }
    }

    /// Allocates a buffer, if one is free.
    pub(crate) fn allocate_buffer(&self) -> Option<Segment> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns a buffer that is not accessed anymore.
    pub(crate) fn release_buffer(&self, segment: Segment) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(segment);
    }

    /// Number of buffers, free or not.
    pub fn buffer_count(&self) -> usize {
        self.buffer_count
    }

    /// Number of free buffers.
    pub fn free_count(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn memory(&self) -> &dyn Memory {
        &*self.memory
    }
}

impl fmt::Debug for BouncePool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "BouncePool {{ {} of {} free }}", self.free_count(), self.buffer_count)
    }
}
