//! The ring of a mailbox.
//!
//! ```text
//!   position   0   1   2   3   4   5   6   7   8   ...      (64 bits, never wraps)
//!                      head            tail
//!                       |               |
//!   slots      [   ][   ][ m ][ m ][ . ][ m ][   ][   ]     slot = position & mask
//!                                    |
//!                                    reserved, not yet published
//! ```
//!
//! A sender reserves positions by moving the tail, writes its messages and publishes each by storing
//! `position + 1` beside it, in the same cache line. The receiver looks at the number beside the
//! message it wants next, and at nothing else: a message costs the visit of its own line. It says
//! how far it is in `head`, which senders load only when the ring looks full to them.

use std::fmt;
use std::mem::MaybeUninit;

use super::sync::{Arc, AtomicU64, Ordering, UnsafeCell, give_way};

/// The end of a mailbox that messages are put into. Clones put into the same mailbox.
pub struct Sender<M> {
    ring: Arc<Ring<M>>,
}

/// The end of a mailbox that messages are taken out of. There is one.
pub struct Receiver<M> {
    ring: Arc<Ring<M>>,
    /// The position of the next message.
    head: u64,
}

struct Ring<M> {
    /// What senders write.
    front: Line<Front>,
    /// The position up to which slots are free again; only the receiver writes it.
    head: Line<AtomicU64>,
    slots: Box<[Slot<M>]>,
}

struct Front {
    /// The next position to be reserved, and [`CLOSED`].
    tail: AtomicU64,
    /// The head as some sender saw it last: never ahead of it.
    head_seen: AtomicU64,
}

/// A message of up to 24 bytes and its number share half a cache line, and never straddle two.
#[repr(C, align(32))]
struct Slot<M> {
    /// One more than the position of the message that is here.
    published: AtomicU64,
    message: UnsafeCell<MaybeUninit<M>>,
}

/// A pair of cache lines, since processors fetch them by the pair.
#[repr(align(128))]
struct Line<T>(T);

/// In the tail: the receiver is gone. Positions do not grow into it within centuries.
const CLOSED: u64 = 1 << 63;

// SAFETY: a message moves from the sender's thread to the receiver's, so it has to be `Send`. A slot
// is reached by one thread at a time: by the sender that reserved its position until it publishes,
// by the receiver from then until it moves the head, and nobody reserves it before that.
unsafe impl<M: Send> Send for Ring<M> {}
// SAFETY: as above; through a shared ring nobody gets a reference to a message.
unsafe impl<M: Send> Sync for Ring<M> {}

/// Makes a mailbox with room for at least `capacity` messages: the next power of two, at least one.
pub fn mailbox<M: Send>(capacity: usize) -> (Sender<M>, Receiver<M>) {
    let ring = Arc::new(Ring::new(capacity.max(1).next_power_of_two()));
    (Sender { ring: Arc::clone(&ring) }, Receiver { ring, head: 0 })
}

impl<M> Sender<M> {
    /// What a message costs in memory.
    pub(super) const SLOT_BYTES: usize = size_of::<Slot<M>>();

    /// Puts a message in, or gives it back if the mailbox is full or its receiver is gone.
    ///
    /// Nobody is woken: see [`Bell`](crate::Bell).
    #[inline]
    pub fn send(&self, message: M) -> Result<(), M> {
        match self.ring.reserve(1) {
            Some((position, _)) => {
                self.ring.publish(position, message);
                Ok(())
            }
            None => Err(message),
        }
    }

    /// Puts in as many as there is room for, from the front of `messages`, and says how many that
    /// were. They arrive in a row. What stays in `messages` was not sent.
    #[inline]
    pub fn send_many(&self, messages: &mut Vec<M>) -> usize {
        let Some((first, count)) = self.ring.reserve(messages.len() as u64) else { return 0 };
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(messages.len());
        for (position, message) in (first..).zip(messages.drain(..count)) {
            self.ring.publish(position, message);
        }
        count
    }

    /// Whether the receiver is gone, so that nothing can be sent any more.
    pub fn is_closed(&self) -> bool {
        self.ring.front.0.tail.load(Ordering::Relaxed) & CLOSED != 0
    }
}

impl<M> Clone for Sender<M> {
    fn clone(&self) -> Self {
        Self { ring: Arc::clone(&self.ring) }
    }
}

impl<M> fmt::Debug for Sender<M> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Sender").field("capacity", &self.ring.slots.len()).finish()
    }
}

impl<M> Receiver<M> {
    /// Takes the next message.
    #[inline]
    pub fn receive(&mut self) -> Option<M> {
        let message = self.take()?;
        self.ring.head.0.store(self.head, Ordering::Release);
        Some(message)
    }

    /// Takes up to `max` messages, appends them to `into`, and says how many they were.
    #[inline]
    pub fn receive_many(&mut self, into: &mut Vec<M>, max: usize) -> usize {
        let before = self.head;
        let mut count = 0;
        while count < max
            && let Some(message) = self.take()
        {
            into.push(message);
            count += 1;
        }
        if self.head != before {
            self.ring.head.0.store(self.head, Ordering::Release);
        }
        count
    }

    /// Whether there is nothing to be taken. A message that is just being put in counts as absent;
    /// its sender rings afterwards.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.ring.is_published(self.head)
    }

    /// For how many messages there is room.
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    /// The next message, whose slot stays taken until the head is stored.
    #[inline]
    fn take(&mut self) -> Option<M> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the position is published; it is read once, since the head moves on at once; and
        // no sender reserves its slot before the head is stored.
        let message = unsafe { self.ring.read(self.head) };
        self.head += 1;
        Some(message)
    }
}

impl<M> Drop for Receiver<M> {
    /// Closes the mailbox and drops what was not received: all of it, also what a sender is just
    /// putting in, for whom it waits. Senders may be kept for long, and somebody may wait for an
    /// answer to what they sent.
    fn drop(&mut self) {
        // Nobody reserves anything behind this tail any more.
        let tail = self.ring.front.0.tail.fetch_or(CLOSED, Ordering::Relaxed);
        while self.head < tail {
            match self.receive() {
                Some(message) => drop(message),
                None => give_way(),
            }
        }
    }
}

impl<M> fmt::Debug for Receiver<M> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Receiver").field("capacity", &self.ring.slots.len()).finish()
    }
}

impl<M> Ring<M> {
    fn new(capacity: usize) -> Self {
        let slot = |_| Slot {
            // One more than a position is never 0, so nothing is published.
            published: AtomicU64::new(0),
            message: UnsafeCell::new(MaybeUninit::uninit()),
        };
        let front = Front { tail: AtomicU64::new(0), head_seen: AtomicU64::new(0) };
        Self {
            front: Line(front),
            head: Line(AtomicU64::new(0)),
            slots: (0..capacity).map(slot).collect(),
        }
    }

    #[inline]
    fn slot(&self, position: u64) -> &Slot<M> {
        #[expect(clippy::cast_possible_truncation, reason = "the mask is narrower")]
        let index = position as usize & (self.slots.len() - 1);
        &self.slots[index]
    }

    /// Reserves up to `wanted` positions in a row: the first, and how many. `None` if there is no
    /// room at all, or no receiver.
    #[inline]
    fn reserve(&self, wanted: u64) -> Option<(u64, u64)> {
        let tail = &self.front.0.tail;
        // The tail carries no data from thread to thread, so it needs no order.
        let mut first = tail.load(Ordering::Relaxed);
        loop {
            if first & CLOSED != 0 {
                return None;
            }
            let count = self.room(first, wanted).min(wanted);
            if count == 0 {
                return None;
            }
            let next = first + count;
            match tail.compare_exchange_weak(first, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some((first, count)),
                Err(found) => first = found,
            }
        }
    }

    /// How many slots are free from `tail` on. Looks at the receiver's line only if the head that
    /// was seen last leaves less than `wanted`.
    #[inline]
    fn room(&self, tail: u64, wanted: u64) -> u64 {
        // A tail that others have moved on since may lie behind the head: then reserving fails. A
        // head seen may be older than the one before it: then there seems to be less room.
        let capacity = self.slots.len() as u64;
        let behind = |head| capacity.saturating_sub(tail.saturating_sub(head));
        // Acquires what the receiver released with the head, maybe by way of the sender that stored
        // this: the messages before it have been read, so that their slots may be written.
        let room = behind(self.front.0.head_seen.load(Ordering::Acquire));
        if room >= wanted {
            return room;
        }
        let head = self.head.0.load(Ordering::Acquire);
        self.front.0.head_seen.store(head, Ordering::Release);
        behind(head)
    }

    /// Writes a message to a position that the caller has reserved, and shows it.
    #[inline]
    fn publish(&self, position: u64, message: M) {
        let slot = self.slot(position);
        // SAFETY: only the sender that reserved the position comes here for it; the position before
        // it in this slot was read (see `room`), and the receiver reads no position that is not
        // published. So nobody else is in the cell, and nothing in it is dropped.
        slot.message.with_mut(|cell| unsafe { cell.cast::<M>().write(message) });
        // Pairs with the load in `is_published`.
        slot.published.store(position + 1, Ordering::Release);
    }

    /// Whether the message of a position can be read.
    #[inline]
    fn is_published(&self, position: u64) -> bool {
        self.slot(position).published.load(Ordering::Acquire) == position + 1
    }

    /// Moves a message out.
    ///
    /// # Safety
    ///
    /// The position must be published and not have been read, and its slot must not be free yet.
    #[inline]
    unsafe fn read(&self, position: u64) -> M {
        // SAFETY: published means written, and that its sender is done with the cell; the rest is
        // the caller's promise.
        self.slot(position).message.with_mut(|cell| unsafe { cell.cast::<M>().read() })
    }
}

impl<M> Drop for Ring<M> {
    /// Drops what is left where a message panicked while the receiver dropped it.
    fn drop(&mut self) {
        let head = self.head.0.load(Ordering::Relaxed);
        let tail = self.front.0.tail.load(Ordering::Relaxed) & !CLOSED;
        for position in head..tail {
            if self.is_published(position) {
                // SAFETY: published, not read since the receiver stored its head and went, and
                // nobody reserves anything any more.
                drop(unsafe { self.read(position) });
            }
        }
    }
}
