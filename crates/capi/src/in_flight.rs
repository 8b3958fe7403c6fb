//! Number of I/Os in flight for each piece of memory, counted by each queue for itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Counters of one queue, by index: one for each page of the buffers of the library and one for each piece
/// of registered memory. Only the thread of the queue writes them.
#[derive(Clone, Debug)]
pub(crate) struct InFlightCounters(Arc<[AtomicU16]>);

impl InFlightCounters {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| AtomicU16::new(0)).collect())
    }

    /// Counts an I/O that starts. Only the thread of the queue calls this.
    #[inline]
    pub(crate) fn add(&self, index: u32) {
        let counter = &self.0[index as usize];
        // A load and a store are enough: there is no other writer.
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Counts an I/O that has ended. Only the thread of the queue calls this.
    #[inline]
    pub(crate) fn remove(&self, index: u32) {
        let counter = &self.0[index as usize];
        counter.store(counter.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Relaxed);
    }

    /// Number of I/Os that use one of the counters. Called by any thread: exact if the program has ordered
    /// its submissions before the call, as it must before it frees the memory.
    pub(crate) fn sum(&self, first: u32, count: u32) -> u32 {
        let counters = &self.0[first as usize..][..count as usize];
        counters.iter().map(|counter| u32::from(counter.load(Ordering::Relaxed))).sum()
    }

    /// Whether the queue has been closed, so that nothing else refers to its counters.
    pub(crate) fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}
