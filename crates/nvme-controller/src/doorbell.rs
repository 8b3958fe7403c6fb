//! Doorbells, laid out with one cache line per queue pair.
//!
//! ```text
//!   0        4                  32       36                 64
//!   | tail   |                  | head   |                  |      one cache line per queue pair
//!   SQ y tail at 1000h + (2y) × 32        CQ y head at 1000h + (2y + 1) × 32
//! ```
//!
//! The stride of 32 bytes (CAP.DSTRD = 3, Base 2.1 §3.1.4.1) prevents false sharing: a host that writes
//! one queue pair's doorbells does not take the cache line of the next pair.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::Wake;

/// Doorbells of one controller, shared with the host.
#[derive(Debug)]
pub struct DoorbellPage {
    pairs: Box<[DoorbellPair]>,
}

/// Tail and head doorbell of one queue identifier.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct DoorbellPair {
    tail: AtomicU32,
    _pad: [u32; 7],
    head: AtomicU32,
}

/// Handle to one doorbell, resolved once: a write costs only a bounds check. `W` wakes the device's
/// thread if it may sleep.
#[derive(Clone, Debug)]
pub struct DoorbellHandle<W = ()> {
    page: Arc<DoorbellPage>,
    /// `2 × qid`, plus one for a completion queue.
    index: usize,
    device: W,
}

/// CAP.DSTRD: doorbells are `4 << STRIDE` bytes apart (Base 2.1 §3.1.4.1).
pub const STRIDE: u8 = 3;

/// Bytes of the two doorbells of a queue identifier.
pub(crate) const PAIR_BYTES: u32 = 8 << STRIDE;

const _: () = assert!(size_of::<DoorbellPair>() == PAIR_BYTES as usize, "as drawn");
const _: () = assert!(core::mem::offset_of!(DoorbellPair, head) == 4 << STRIDE, "as drawn");

impl DoorbellPage {
    /// Creates the doorbells of the admin queue and of I/O queues 1 to `queues`.
    pub fn new(queues: u16) -> Arc<Self> {
        let pairs = (0..=queues).map(|_| DoorbellPair::default()).collect();
        Arc::new(Self { pairs })
    }

    /// Number of queue identifiers that have doorbells.
    pub fn pair_count(&self) -> u32 {
        u32::try_from(self.pairs.len()).unwrap_or(u32::MAX)
    }

    /// Writes doorbell `index`: twice the queue identifier, plus one for a completion queue. Returns
    /// false if it does not exist.
    #[inline]
    pub fn write_doorbell(&self, index: usize, value: u32) -> bool {
        let Some(pair) = self.pairs.get(index / 2) else { return false };
        let doorbell = if index.is_multiple_of(2) { &pair.tail } else { &pair.head };
        // Pairs with the acquire load of the queue, which then sees the entries stored before.
        doorbell.store(value, Ordering::Release);
        true
    }

    /// Last value written to the tail doorbell of submission queue `qid`.
    #[inline]
    pub(crate) fn tail(&self, qid: usize) -> u32 {
        self.pairs.get(qid).map_or(0, |pair| pair.tail.load(Ordering::Acquire))
    }

    /// Last value written to the head doorbell of completion queue `qid`.
    #[inline]
    pub(crate) fn head(&self, qid: usize) -> u32 {
        // Acquire: the host has read the entries it frees before the queue overwrites them.
        self.pairs.get(qid).map_or(0, |pair| pair.head.load(Ordering::Acquire))
    }

    /// Resets the tail doorbell of a new submission queue.
    pub(crate) fn clear_tail(&self, qid: u16) {
        self.write_doorbell(usize::from(qid) * 2, 0);
    }

    /// Resets the head doorbell of a new completion queue.
    pub(crate) fn clear_head(&self, qid: u16) {
        self.write_doorbell(usize::from(qid) * 2 + 1, 0);
    }
}

impl<W> DoorbellHandle<W> {
    /// Creates a handle to doorbell `index` of `page`; `device` wakes the device's thread. Writes to a
    /// doorbell that does not exist have no effect.
    pub fn new(page: Arc<DoorbellPage>, index: usize, device: W) -> Self {
        Self { page, index, device }
    }
}

impl<W: Wake> tenmil_base::Doorbell for DoorbellHandle<W> {
    #[inline]
    fn ring(&mut self, value: u32) {
        self.page.write_doorbell(self.index, value);
        self.device.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::{DoorbellHandle, DoorbellPage};
    use tenmil_base::Doorbell;

    #[test]
    fn each_doorbell_is_independent_and_a_nonexistent_one_is_ignored() {
        let page = DoorbellPage::new(2);
        for index in 0..6_u32 {
            DoorbellHandle::new(page.clone(), index as usize, ()).ring(index + 10);
        }
        let seen: Vec<_> = (0..3).map(|qid| (page.tail(qid), page.head(qid))).collect();
        assert_eq!(seen, [(10, 11), (12, 13), (14, 15)]);
        assert!(!page.write_doorbell(6, 1));
        page.clear_tail(1);
        page.clear_head(2);
        let seen: Vec<_> = (0..3).map(|qid| (page.tail(qid), page.head(qid))).collect();
        assert_eq!(seen, [(10, 11), (0, 13), (14, 0)]);
    }
}
