//! Ring buffer of a mailbox.
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
//! A sender reserves positions by advancing the tail, writes its messages, and publishes each by
//! storing `position + 1` beside it, in the same cache line. The receiver reads only the number
//! beside the next message, so a message costs one cache line transfer. It publishes its progress
//! in `head`, which senders load only when the ring appears full to them.

use std::fmt;
use std::mem::MaybeUninit;

use super::sync::{Arc, AtomicU64, Ordering, UnsafeCell, yield_cpu};

/// Sending end of a mailbox. Clones send to the same mailbox.
pub struct Sender<M> {
    ring: Arc<MailboxRing<M>>,
}

/// Receiving end of a mailbox. There is exactly one.
pub struct Receiver<M> {
    ring: Arc<MailboxRing<M>>,
    /// Position of the next message.
    head: u64,
}

struct MailboxRing<M> {
    /// Words written by senders.
    producer: CachePair<ProducerState>,
    /// Position up to which slots are free again; written by the receiver only.
    head: CachePair<AtomicU64>,
    slots: Box<[MessageSlot<M>]>,
}

struct ProducerState {
    /// Next position to be reserved, and the bit [`CLOSED`].
    tail: AtomicU64,
    /// Cached head as last loaded by a sender: never ahead of the real one.
    head_seen: AtomicU64,
}

/// Slot of one message. A message of up to 24 bytes and its number share half a cache line and
/// never straddle two.
#[repr(C, align(32))]
struct MessageSlot<M> {
    /// One more than the position of the message in this slot.
    published: AtomicU64,
    message: UnsafeCell<MaybeUninit<M>>,
}

/// Pair of cache lines: CPUs prefetch lines in pairs.
#[repr(align(128))]
struct CachePair<T>(T);

/// Bit of the tail: the receiver is gone. Positions do not reach it within centuries.
const CLOSED: u64 = 1 << 63;

// SAFETY: a message moves from the sender's thread to the receiver's, so it must be `Send`. A slot
// is accessed by one thread at a time: by the sender that reserved its position until it publishes,
// by the receiver from then until it advances the head; the position is not reserved before that.
unsafe impl<M: Send> Send for MailboxRing<M> {}
// SAFETY: as above; a shared ring gives out no reference to a message.
unsafe impl<M: Send> Sync for MailboxRing<M> {}

/// Creates a mailbox with capacity for at least `capacity` messages: the next power of two.
pub fn mailbox<M: Send>(capacity: usize) -> (Sender<M>, Receiver<M>) {
    let ring = Arc::new(MailboxRing::new(capacity.max(1).next_power_of_two()));
    (Sender { ring: Arc::clone(&ring) }, Receiver { ring, head: 0 })
}

impl<M> Sender<M> {
    /// Memory per message.
    pub(super) const SLOT_BYTES: usize = size_of::<MessageSlot<M>>();

    /// Sends a message, or returns it if the mailbox is full or its receiver is gone.
    ///
    /// Does not wake the receiver: see [`Notifier`](crate::Notifier).
    #[inline]
    pub fn send(&self, message: M) -> Result<(), M> {
        match self.ring.reserve_positions(1) {
            Some((position, _)) => {
                self.ring.publish_message(position, message);
                Ok(())
            }
            None => Err(message),
        }
    }

    /// Sends as many messages as fit, from the front of `messages`, and returns their number. They
    /// arrive contiguously. Messages that do not fit stay in `messages`.
    #[inline]
    pub fn send_many(&self, messages: &mut Vec<M>) -> usize {
        let Some((first, count)) = self.ring.reserve_positions(messages.len() as u64) else {
            return 0;
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(messages.len());
        for (position, message) in (first..).zip(messages.drain(..count)) {
            self.ring.publish_message(position, message);
        }
        count
    }

    /// Whether the receiver is gone, so that every send fails.
    pub fn is_closed(&self) -> bool {
        self.ring.producer.0.tail.load(Ordering::Relaxed) & CLOSED != 0
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
    /// Receives the next message.
    #[inline]
    pub fn receive(&mut self) -> Option<M> {
        let message = self.take_next()?;
        self.ring.head.0.store(self.head, Ordering::Release);
        Some(message)
    }

    /// Receives up to `max` messages, appends them to `into`, and returns their number.
    #[inline]
    pub fn receive_many(&mut self, into: &mut Vec<M>, max: usize) -> usize {
        let before = self.head;
        let mut count = 0;
        while count < max
            && let Some(message) = self.take_next()
        {
            into.push(message);
            count += 1;
        }
        if self.head != before {
            self.ring.head.0.store(self.head, Ordering::Release);
        }
        count
    }

    /// Whether no message can be received. A message that is being written counts as absent; its
    /// sender notifies afterwards.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.ring.is_published(self.head)
    }

    /// Number of messages that fit.
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    /// Receives the next message; its slot stays occupied until the head is stored.
    #[inline]
    fn take_next(&mut self) -> Option<M> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the position is published; it is read once, since the head advances at once; and
        // no sender reserves its slot before the head is stored.
        let message = unsafe { self.ring.take_message(self.head) };
        self.head += 1;
        Some(message)
    }
}

impl<M> Drop for Receiver<M> {
    /// Closes the mailbox and drops all remaining messages, including those being written, for
    /// which it waits. Senders may live for long, and a message may carry the only way to complete
    /// a request.
    fn drop(&mut self) {
        // CLOSED is set, so no position behind this tail is reserved.
        let tail = self.ring.producer.0.tail.fetch_or(CLOSED, Ordering::Relaxed);
        while self.head < tail {
            match self.receive() {
                Some(message) => drop(message),
                None => yield_cpu(),
            }
        }
    }
}

impl<M> fmt::Debug for Receiver<M> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Receiver").field("capacity", &self.ring.slots.len()).finish()
    }
}

impl<M> MailboxRing<M> {
    fn new(capacity: usize) -> Self {
        let slot = |_| MessageSlot {
            // One more than a position is never 0, so no slot is published.
            published: AtomicU64::new(0),
            message: UnsafeCell::new(MaybeUninit::uninit()),
        };
        let front = ProducerState { tail: AtomicU64::new(0), head_seen: AtomicU64::new(0) };
        Self {
            producer: CachePair(front),
            head: CachePair(AtomicU64::new(0)),
            slots: (0..capacity).map(slot).collect(),
        }
    }

    #[inline]
    fn slot(&self, position: u64) -> &MessageSlot<M> {
        #[expect(clippy::cast_possible_truncation, reason = "the mask is narrower")]
        let index = position as usize & (self.slots.len() - 1);
        &self.slots[index]
    }

    /// Reserves up to `wanted` consecutive positions: the first, and their number. `None` if the
    /// ring is full or closed.
    #[inline]
    fn reserve_positions(&self, wanted: u64) -> Option<(u64, u64)> {
        let tail = &self.producer.0.tail;
        // The tail carries no data between threads, so relaxed order suffices.
        let mut first = tail.load(Ordering::Relaxed);
        loop {
            if first & CLOSED != 0 {
                return None;
            }
            let count = self.free_slots(first, wanted).min(wanted);
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

    /// Number of free slots from `tail` on. Loads the receiver's cache line only if the cached head
    /// leaves less than `wanted`.
    #[inline]
    fn free_slots(&self, tail: u64, wanted: u64) -> u64 {
        // A stale tail may lie behind the head: then the reservation's exchange fails. A stale
        // cached head makes the ring appear fuller than it is.
        let capacity = self.slots.len() as u64;
        let behind = |head| capacity.saturating_sub(tail.saturating_sub(head));
        // Acquires what the receiver released with the head, possibly through the sender that
        // stored this value: the messages before it have been read, so their slots may be written.
        let room = behind(self.producer.0.head_seen.load(Ordering::Acquire));
        if room >= wanted {
            return room;
        }
        let head = self.head.0.load(Ordering::Acquire);
        self.producer.0.head_seen.store(head, Ordering::Release);
        behind(head)
    }

    /// Writes a message to a position reserved by the caller, and publishes it.
    #[inline]
    fn publish_message(&self, position: u64, message: M) {
        let slot = self.slot(position);
        // SAFETY: only the sender that reserved the position calls this for it; the previous
        // message in this slot was read (see `room`), and the receiver reads no unpublished
        // position. So no other thread accesses the cell, and it holds no value that would need
        // dropping.
        slot.message.with_mut(|cell| unsafe { cell.cast::<M>().write(message) });
        // Pairs with the load in `is_published`.
        slot.published.store(position + 1, Ordering::Release);
    }

    /// Whether the message at a position can be read.
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
    unsafe fn take_message(&self, position: u64) -> M {
        // SAFETY: published means written and no longer accessed by its sender; the rest is the
        // caller's obligation.
        self.slot(position).message.with_mut(|cell| unsafe { cell.cast::<M>().read() })
    }
}

impl<M> Drop for MailboxRing<M> {
    /// Drops remaining messages after the drop of a message panicked in the receiver's drop.
    fn drop(&mut self) {
        let head = self.head.0.load(Ordering::Relaxed);
        let tail = self.producer.0.tail.load(Ordering::Relaxed) & !CLOSED;
        for position in head..tail {
            if self.is_published(position) {
                // SAFETY: published, not read since the receiver stored its head and was dropped,
                // and CLOSED prevents further reservations.
                drop(unsafe { self.take_message(position) });
            }
        }
    }
}
