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

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Weak};

/// The bytes of one stream that wait to be consumed.
pub(crate) struct Inbox {
    pool: Inboxes,
    memory: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    /// What waits while there is no memory: a piece of a header, usually.
    stash: Vec<u8>,
}

/// The memory that inboxes are lent: each thread has its own of it, which no other thread touches, so
/// lending costs neither a lock nor an atomic operation.
#[derive(Clone)]
pub(crate) struct Inboxes {
    shape: Arc<Shape>,
}

struct Shape {
    len_bytes: usize,
    count_max: usize,
}

/// What a thread has of a pool.
struct Share {
    shape: Weak<Shape>,
    /// What nobody has just now.
    free: Vec<Box<[u8]>>,
    /// How many more may be made.
    unmade: usize,
}

thread_local! {
    static SHARES: RefCell<Vec<Share>> = const { RefCell::new(Vec::new()) };
}

/// So few bytes do not keep memory lent. A header with its digest is at most 132.
const STASH_MAX: usize = 512;
/// So many bytes are moved to the front whenever something is received behind them.
const MOVED_MAX: usize = 4096;

impl Inboxes {
    /// A pool of up to `count_max` pieces of `len_bytes` for each thread, made when they are first
    /// needed.
    pub(crate) fn new(len_bytes: usize, count_max: usize) -> Self {
        assert!(len_bytes >= 2 * STASH_MAX, "{len_bytes} bytes are no room to receive into");
        Self { shape: Arc::new(Shape { len_bytes, count_max }) }
    }

    /// Whether this thread has memory that nobody uses.
    pub(crate) fn has_free(&self) -> bool {
        self.with(|share| share.unmade > 0 || !share.free.is_empty()).unwrap_or(false)
    }

    /// Does something with this thread's share. Nothing if the thread is ending.
    #[inline]
    fn with<R>(&self, act: impl FnOnce(&mut Share) -> R) -> Option<R> {
        let act = |shares: &RefCell<Vec<Share>>| {
            let shares = &mut *shares.borrow_mut();
            let mine = Arc::as_ptr(&self.shape);
            let place = shares.iter().position(|share| share.shape.as_ptr() == mine);
            let place = place.unwrap_or_else(|| self.begin(shares));
            act(&mut shares[place])
        };
        SHARES.try_with(act).ok()
    }

    /// The first use by this thread. Where that is kept.
    #[cold]
    fn begin(&self, shares: &mut Vec<Share>) -> usize {
        shares.retain(|share| share.shape.strong_count() > 0);
        let (shape, unmade) = (Arc::downgrade(&self.shape), self.shape.count_max);
        shares.push(Share { shape, free: Vec::new(), unmade });
        shares.len() - 1
    }

    #[inline]
    fn take(&self) -> Option<Box<[u8]>> {
        let taken = self.with(|share| share.free.pop().or_else(|| self.make(share)));
        taken.flatten()
    }

    #[cold]
    fn make(&self, share: &mut Share) -> Option<Box<[u8]>> {
        share.unmade = share.unmade.checked_sub(1)?;
        Some(vec![0; self.shape.len_bytes].into_boxed_slice())
    }

    #[inline]
    fn give_back(&self, memory: Box<[u8]>) {
        self.with(|share| share.free.push(memory));
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

    /// Gives memory back unless much waits in it. Whether it has none of its thread's.
    pub(crate) fn let_go(&mut self) -> bool {
        self.settle();
        self.memory.is_none()
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
        out.debug_struct("Inboxes")
            .field("len_bytes", &self.shape.len_bytes)
            .field("count_max", &self.shape.count_max)
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
    fn each_thread_has_memory_of_its_own_and_an_inbox_may_go_where_it_has_let_go() {
        let pool = Inboxes::new(4096, 1);
        let (mut one, mut other) = (Inbox::new(pool.clone()), Inbox::new(pool.clone()));
        assert_eq!(put(&mut one, &[1; 4096]), 4096);
        assert!(!one.let_go(), "much waits");
        one.consume(4096 - 3);
        assert!(one.let_go() && pool.has_free());
        assert_eq!(put(&mut other, b"here"), 4);
        std::thread::scope(|scope| {
            let theirs = scope.spawn(|| {
                assert_eq!(put(&mut one, b"there"), 5);
                assert_eq!(one.bytes(), b"\x01\x01\x01there");
                one.consume(8);
                pool.has_free()
            });
            assert!(theirs.join().unwrap());
        });
        assert!(!pool.has_free(), "what came back there is not lent here");
        assert_eq!(other.bytes(), b"here");
    }

    #[test]
    fn pools_that_have_gone_leave_nothing_with_their_threads() {
        for _ in 0..10 {
            put(&mut Inbox::new(Inboxes::new(4096, 2)), b"abc");
        }
        assert_eq!(super::SHARES.with_borrow(Vec::len), 1);
    }

    #[test]
    #[should_panic(expected = "4 consumed of 3 bytes")]
    fn more_than_waits_cannot_be_consumed() {
        let mut inbox = Inbox::new(Inboxes::new(4096, 1));
        put(&mut inbox, b"abc");
        inbox.consume(4);
    }
}
