//! Receive buffers between the kernel and the consumer.
//!
//! ```text
//!    buffer memory   [ consumed | unconsumed | free ]
//!                               ^start       ^end
//! ```
//!
//! A stream holds memory of the pool only while needed: when all is consumed, it is returned; when
//! few bytes are left and nothing more is available, they move to a small stash. The pool is a
//! stack, so a thread with many connections works in memory that is in its cache.

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Weak};

/// Unconsumed bytes of one stream.
pub(crate) struct RecvBuffer {
    pool: RecvBufferPool,
    memory: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    /// Unconsumed bytes without pool memory: usually part of a header.
    stash: Vec<u8>,
}

/// Pool of receive buffer memory: each thread has its own part, so allocation needs neither a lock
/// nor an atomic operation.
#[derive(Clone)]
pub(crate) struct RecvBufferPool {
    shape: Arc<BufferShape>,
}

struct BufferShape {
    len_bytes: usize,
    count_max: usize,
}

/// Part of the pool that belongs to one thread.
struct ThreadCache {
    shape: Weak<BufferShape>,
    /// Free buffers.
    free: Vec<Box<[u8]>>,
    /// Number of buffers that may still be allocated.
    remaining: usize,
}

thread_local! {
    static SHARES: RefCell<Vec<ThreadCache>> = const { RefCell::new(Vec::new()) };
}

/// Unconsumed bytes up to this length are moved to the stash. A header with its digest is at most
/// 132 bytes.
const STASH_MAX: usize = 512;
/// Unconsumed bytes up to this length are moved to the front before a receive.
const COMPACT_MAX: usize = 4096;

impl RecvBufferPool {
    /// Creates a pool of up to `count_max` buffers of `len_bytes` per thread, allocated on demand.
    pub(crate) fn new(len_bytes: usize, count_max: usize) -> Self {
        assert!(len_bytes >= 2 * STASH_MAX, "{len_bytes} bytes are too few to receive into");
        Self { shape: Arc::new(BufferShape { len_bytes, count_max }) }
    }

    /// Whether this thread has a free buffer.
    pub(crate) fn has_free(&self) -> bool {
        self.with_thread_cache(|share| share.remaining > 0 || !share.free.is_empty())
            .unwrap_or(false)
    }

    /// Runs `act` on this thread's part; `None` if the thread is exiting.
    #[inline]
    fn with_thread_cache<R>(&self, act: impl FnOnce(&mut ThreadCache) -> R) -> Option<R> {
        let act = |shares: &RefCell<Vec<ThreadCache>>| {
            let shares = &mut *shares.borrow_mut();
            let mine = Arc::as_ptr(&self.shape);
            let place = shares.iter().position(|share| share.shape.as_ptr() == mine);
            let place = place.unwrap_or_else(|| self.register_thread(shares));
            act(&mut shares[place])
        };
        SHARES.try_with(act).ok()
    }

    /// Registers the first use by this thread and returns the index of its part.
    #[cold]
    fn register_thread(&self, shares: &mut Vec<ThreadCache>) -> usize {
        shares.retain(|share| share.shape.strong_count() > 0);
        let (shape, unmade) = (Arc::downgrade(&self.shape), self.shape.count_max);
        shares.push(ThreadCache { shape, free: Vec::new(), remaining: unmade });
        shares.len() - 1
    }

    #[inline]
    fn take_memory(&self) -> Option<Box<[u8]>> {
        let taken = self
            .with_thread_cache(|share| share.free.pop().or_else(|| self.allocate_memory(share)));
        taken.flatten()
    }

    #[cold]
    fn allocate_memory(&self, share: &mut ThreadCache) -> Option<Box<[u8]>> {
        share.remaining = share.remaining.checked_sub(1)?;
        Some(vec![0; self.shape.len_bytes].into_boxed_slice())
    }

    #[inline]
    fn return_memory(&self, memory: Box<[u8]>) {
        self.with_thread_cache(|share| share.free.push(memory));
    }
}

impl RecvBuffer {
    pub(crate) fn new(pool: RecvBufferPool) -> Self {
        Self { pool, memory: None, start: 0, end: 0, stash: Vec::new() }
    }

    /// Unconsumed bytes, oldest first.
    #[inline]
    pub(crate) fn unconsumed_bytes(&self) -> &[u8] {
        match &self.memory {
            Some(memory) => &memory[self.start..self.end],
            None => &self.stash,
        }
    }

    /// Free space for the next receive. `None` if no buffer is free; empty if the buffer is full.
    #[inline]
    pub(crate) fn free_space(&mut self) -> Option<&mut [u8]> {
        if self.memory.is_none() {
            self.allocate()?;
        }
        let memory = self.memory.as_mut()?;
        let waiting = self.end - self.start;
        if self.start > 0 && (waiting <= COMPACT_MAX || self.end == memory.len()) {
            memory.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, waiting);
        }
        Some(&mut memory[self.end..])
    }

    fn allocate(&mut self) -> Option<()> {
        let mut memory = self.pool.take_memory()?;
        memory[..self.stash.len()].copy_from_slice(&self.stash);
        (self.start, self.end) = (0, self.stash.len());
        self.stash.clear();
        self.memory = Some(memory);
        Some(())
    }

    /// Marks `count` bytes of the free space as filled.
    #[inline]
    pub(crate) fn mark_filled(&mut self, count: usize) {
        self.end += count;
    }

    /// Consumes the first `count` bytes.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        let waiting = self.unconsumed_bytes().len();
        assert!(count <= waiting, "{count} consumed of {waiting} bytes");
        if self.memory.is_none() {
            self.stash.drain(..count);
            return;
        }
        self.start += count;
        if self.start == self.end {
            self.release();
        }
    }

    /// Releases the buffer unless many bytes are unconsumed; called when nothing more is available.
    #[inline]
    pub(crate) fn release_unless_large(&mut self) {
        let Some(memory) = &self.memory else { return };
        let waiting = &memory[self.start..self.end];
        if waiting.len() <= STASH_MAX {
            self.stash.extend_from_slice(waiting);
            self.release();
        }
    }

    /// Whether a receive is possible now.
    pub(crate) fn has_space(&self) -> bool {
        match &self.memory {
            Some(memory) => self.end - self.start < memory.len(),
            None => self.pool.has_free(),
        }
    }

    /// Releases the buffer unless many bytes are unconsumed. Returns whether no memory of this
    /// thread is held.
    pub(crate) fn release_before_thread_change(&mut self) -> bool {
        self.release_unless_large();
        self.memory.is_none()
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.return_memory(memory);
        }
        (self.start, self.end) = (0, 0);
    }
}

impl Drop for RecvBuffer {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for RecvBuffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Inbox")
            .field("waiting", &self.unconsumed_bytes().len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RecvBufferPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Inboxes")
            .field("len_bytes", &self.shape.len_bytes)
            .field("count_max", &self.shape.count_max)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{RecvBuffer, RecvBufferPool, STASH_MAX};

    fn fill_buffer(inbox: &mut RecvBuffer, bytes: &[u8]) -> usize {
        let Some(room) = inbox.free_space() else { return 0 };
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        inbox.mark_filled(count);
        count
    }

    #[test]
    fn buffer_holds_memory_only_while_bytes_are_unconsumed() {
        let pool = RecvBufferPool::new(4096, 1);
        let (mut one, mut other) = (RecvBuffer::new(pool.clone()), RecvBuffer::new(pool.clone()));
        assert_eq!(fill_buffer(&mut one, b"abc"), 3);
        assert!(!pool.has_free() && !other.has_space() && other.free_space().is_none());
        one.consume(3);
        assert_eq!(fill_buffer(&mut other, b"defg"), 4);
        assert!(one.free_space().is_none());
        other.consume(1);
        other.release_unless_large();
        assert_eq!(other.unconsumed_bytes(), b"efg", "what is left waits elsewhere");
        assert!(pool.has_free());
        assert_eq!(fill_buffer(&mut other, b"hi"), 2);
        assert_eq!(other.unconsumed_bytes(), b"efghi");
        drop(other);
        assert!(pool.has_free());
    }

    #[test]
    fn large_unconsumed_data_keeps_its_memory_and_order() {
        let pool = RecvBufferPool::new(4096, 1);
        let mut inbox = RecvBuffer::new(pool.clone());
        let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
        assert_eq!(fill_buffer(&mut inbox, &bytes), 4096);
        assert_eq!(fill_buffer(&mut inbox, &bytes), 0, "it is full");
        assert!(!inbox.has_space());
        inbox.release_unless_large();
        assert!(!pool.has_free(), "{} bytes wait", inbox.unconsumed_bytes().len());
        inbox.consume(4096 - STASH_MAX);
        assert_eq!(inbox.unconsumed_bytes(), &bytes[4096 - STASH_MAX..4096]);
        inbox.release_unless_large();
        assert!(pool.has_free());
        assert_eq!(fill_buffer(&mut inbox, &bytes[4096..]), 904);
        assert_eq!(inbox.unconsumed_bytes(), &bytes[4096 - STASH_MAX..]);
    }

    #[test]
    fn each_thread_has_its_own_memory_and_a_released_buffer_may_move() {
        let pool = RecvBufferPool::new(4096, 1);
        let (mut one, mut other) = (RecvBuffer::new(pool.clone()), RecvBuffer::new(pool.clone()));
        assert_eq!(fill_buffer(&mut one, &[1; 4096]), 4096);
        assert!(!one.release_before_thread_change(), "much waits");
        one.consume(4096 - 3);
        assert!(one.release_before_thread_change() && pool.has_free());
        assert_eq!(fill_buffer(&mut other, b"here"), 4);
        std::thread::scope(|scope| {
            let theirs = scope.spawn(|| {
                assert_eq!(fill_buffer(&mut one, b"there"), 5);
                assert_eq!(one.unconsumed_bytes(), b"\x01\x01\x01there");
                one.consume(8);
                pool.has_free()
            });
            assert!(theirs.join().unwrap());
        });
        assert!(!pool.has_free(), "what came back there is not lent here");
        assert_eq!(other.unconsumed_bytes(), b"here");
    }

    #[test]
    fn dropped_pool_leaves_no_memory_in_thread_caches() {
        for _ in 0..10 {
            fill_buffer(&mut RecvBuffer::new(RecvBufferPool::new(4096, 2)), b"abc");
        }
        assert_eq!(super::SHARES.with_borrow(Vec::len), 1);
    }

    #[test]
    #[should_panic(expected = "4 consumed of 3 bytes")]
    fn consuming_more_than_available_panics() {
        let mut inbox = RecvBuffer::new(RecvBufferPool::new(4096, 1));
        fill_buffer(&mut inbox, b"abc");
        inbox.consume(4);
    }
}
