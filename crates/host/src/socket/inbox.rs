//! Where bytes lie between the kernel and whoever consumes them.
//!
//! ```text
//!    lent memory   [ consumed | waiting bytes | room ]
//!                             ^start          ^end
//! ```
//!
//! An inbox has memory of the pool only while it needs it: all consumed, and it goes back; a few
//! bytes left and nothing more to come, and they move to a small place of their own. The pool gives
//! out last what came back last, so a thread with many connections works in memory that its cache
//! knows.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bytes of one stream that wait to be consumed.
pub(crate) struct Inbox {
    pool: Inboxes,
    memory: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    /// What waits while there is no memory: a piece of a header, usually.
    stash: Vec<u8>,
}

/// The memory that inboxes of one thread are lent.
#[derive(Clone)]
pub(crate) struct Inboxes {
    shared: Arc<Shared>,
}

struct Shared {
    len_bytes: usize,
    free: Mutex<Free>,
}

struct Free {
    memory: Vec<Box<[u8]>>,
    /// How many more may be made.
    unmade: usize,
}

/// So few bytes do not keep memory lent. A header with its digest is at most 132.
const STASH_MAX: usize = 512;
/// So many bytes are moved to the front whenever something is received behind them.
const MOVED_MAX: usize = 4096;

impl Inboxes {
    /// A pool of up to `count_max` pieces of `len_bytes`, made when they are first needed.
    pub(crate) fn new(len_bytes: usize, count_max: usize) -> Self {
        assert!(len_bytes >= 2 * STASH_MAX, "{len_bytes} bytes are no room to receive into");
        let free = Mutex::new(Free { memory: Vec::new(), unmade: count_max });
        Self { shared: Arc::new(Shared { len_bytes, free }) }
    }

    /// Whether there is memory that nobody has.
    pub(crate) fn has_free(&self) -> bool {
        let free = self.free();
        free.unmade > 0 || !free.memory.is_empty()
    }

    /// One user only, as a rule: never contended.
    fn free(&self) -> MutexGuard<'_, Free> {
        self.shared.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Box<[u8]>> {
        let mut free = self.free();
        free.memory.pop().or_else(|| {
            free.unmade = free.unmade.checked_sub(1)?;
            Some(vec![0; self.shared.len_bytes].into_boxed_slice())
        })
    }

    fn give_back(&self, memory: Box<[u8]>) {
        self.free().memory.push(memory);
    }
}

impl Inbox {
    pub(crate) fn new(pool: Inboxes) -> Self {
        Self { pool, memory: None, start: 0, end: 0, stash: Vec::new() }
    }

    /// What waits, oldest first.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.memory {
            Some(memory) => &memory[self.start..self.end],
            None => &self.stash,
        }
    }

    /// Room for what comes next. `None` if all memory is lent; empty if what waits fills it.
    #[inline]
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        if self.memory.is_none() {
            self.borrow()?;
        }
        let memory = self.memory.as_mut()?;
        let waiting = self.end - self.start;
        if self.start > 0 && (waiting <= MOVED_MAX || self.end == memory.len()) {
            memory.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, waiting);
        }
        Some(&mut memory[self.end..])
    }

    fn borrow(&mut self) -> Option<()> {
        let mut memory = self.pool.take()?;
        memory[..self.stash.len()].copy_from_slice(&self.stash);
        (self.start, self.end) = (0, self.stash.len());
        self.stash.clear();
        self.memory = Some(memory);
        Some(())
    }

    /// So many bytes of the room have been filled.
    #[inline]
    pub(crate) fn filled(&mut self, count: usize) {
        self.end += count;
    }

    /// The first `count` bytes are needed no more.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        let waiting = self.bytes().len();
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

    /// Nothing more comes for now: memory goes back unless much waits in it.
    #[inline]
    pub(crate) fn settle(&mut self) {
        let Some(memory) = &self.memory else { return };
        let waiting = &memory[self.start..self.end];
        if waiting.len() <= STASH_MAX {
            self.stash.extend_from_slice(waiting);
            self.release();
        }
    }

    /// Whether something can be received now.
    pub(crate) fn has_room(&self) -> bool {
        match &self.memory {
            Some(memory) => self.end - self.start < memory.len(),
            None => self.pool.has_free(),
        }
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give_back(memory);
        }
        (self.start, self.end) = (0, 0);
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Inbox").field("waiting", &self.bytes().len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Inboxes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = self.free();
        out.debug_struct("Inboxes")
            .field("len_bytes", &self.shared.len_bytes)
            .field("free", &free.memory.len())
            .field("unmade", &free.unmade)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Inbox, Inboxes, STASH_MAX};

    fn put(inbox: &mut Inbox, bytes: &[u8]) -> usize {
        let Some(room) = inbox.room() else { return 0 };
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        inbox.filled(count);
        count
    }

    #[test]
    fn an_inbox_has_memory_only_while_bytes_wait() {
        let pool = Inboxes::new(4096, 1);
        let (mut one, mut other) = (Inbox::new(pool.clone()), Inbox::new(pool.clone()));
        assert_eq!(put(&mut one, b"abc"), 3);
        assert!(!pool.has_free() && !other.has_room() && other.room().is_none());
        one.consume(3);
        assert_eq!(put(&mut other, b"defg"), 4);
        assert!(one.room().is_none());
        other.consume(1);
        other.settle();
        assert_eq!(other.bytes(), b"efg", "what is left waits elsewhere");
        assert!(pool.has_free());
        assert_eq!(put(&mut other, b"hi"), 2);
        assert_eq!(other.bytes(), b"efghi");
        drop(other);
        assert!(pool.has_free());
    }

    #[test]
    fn much_that_waits_keeps_its_memory_and_its_order() {
        let pool = Inboxes::new(4096, 1);
        let mut inbox = Inbox::new(pool.clone());
        let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
        assert_eq!(put(&mut inbox, &bytes), 4096);
        assert_eq!(put(&mut inbox, &bytes), 0, "it is full");
        assert!(!inbox.has_room());
        inbox.settle();
        assert!(!pool.has_free(), "{} bytes wait", inbox.bytes().len());
        inbox.consume(4096 - STASH_MAX);
        assert_eq!(inbox.bytes(), &bytes[4096 - STASH_MAX..4096]);
        inbox.settle();
        assert!(pool.has_free());
        assert_eq!(put(&mut inbox, &bytes[4096..]), 904);
        assert_eq!(inbox.bytes(), &bytes[4096 - STASH_MAX..]);
    }

    #[test]
    #[should_panic(expected = "4 consumed of 3 bytes")]
    fn more_than_waits_cannot_be_consumed() {
        let mut inbox = Inbox::new(Inboxes::new(4096, 1));
        put(&mut inbox, b"abc");
        inbox.consume(4);
    }
}
