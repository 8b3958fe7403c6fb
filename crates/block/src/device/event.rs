//! What a device tells those who hold it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::{fmt, io};

use base::Interrupts;
use host::EventVectors;

/// Something that has happened to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It has another size now.
    Resized {
        /// Blocks.
        block_count: u64,
    },
    /// It has gone: what was in flight is answered, and whatever is asked of it from now on is
    /// refused. The holder drops its channels and the descriptor.
    Removed,
    /// The medium has lost something.
    MediumError {
        /// First block.
        lba: u64,
        /// How many.
        blocks: u64,
    },
    /// There is another medium in it, or the same with other contents.
    MediumChanged,
    /// So many older events were dropped here because nobody took them.
    Overflowed {
        /// How many.
        lost: u64,
    },
}

/// The events of one descriptor: bounded, and an overflow is an event too.
pub(super) struct EventQueue {
    waiting: Mutex<Waiting>,
    bell: EventVectors,
}

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<Event>,
    lost: u64,
}

/// Events that wait at most. An overflow and a removal are kept beside them.
const WAITING_MAX: usize = 64;

impl EventQueue {
    pub(super) fn new() -> io::Result<Self> {
        let waiting = Waiting { events: VecDeque::with_capacity(WAITING_MAX), lost: 0 };
        Ok(Self { waiting: Mutex::new(waiting), bell: EventVectors::new(1)? })
    }

    /// Appends an event; the oldest makes room for it.
    pub(super) fn push(&self, event: Event) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.events.len() == WAITING_MAX {
            waiting.events.pop_front();
            waiting.lost += 1;
        }
        waiting.events.push_back(event);
        self.bell.clone().raise(0);
    }

    /// The oldest event. After the last one the descriptor is silent until the next.
    pub(super) fn next(&self) -> Option<Event> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = std::mem::take(&mut waiting.lost);
        let event =
            if lost > 0 { Some(Event::Overflowed { lost }) } else { waiting.events.pop_front() };
        if waiting.events.is_empty() {
            // Whoever pushes holds the same lock, so the barrier in here may as well be missing.
            self.bell.unmask(0);
        }
        event
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.bell.descriptor(0)
    }
}

impl fmt::Debug for EventQueue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("EventQueue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use base::Span;

    use super::{Event, EventQueue, WAITING_MAX};

    fn resized(block_count: usize) -> Event {
        Event::Resized { block_count: block_count as u64 }
    }

    #[test]
    fn events_come_in_their_order_and_none_is_lost_silently() {
        let queue = EventQueue::new().unwrap();
        assert_eq!(queue.next(), None);
        (0..WAITING_MAX + 3).for_each(|index| queue.push(resized(index)));
        assert_eq!(queue.next(), Some(Event::Overflowed { lost: 3 }));
        for index in 3..WAITING_MAX + 3 {
            assert_eq!(queue.next(), Some(resized(index)));
        }
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn the_descriptor_is_ready_until_the_last_event_is_taken() {
        let queue = EventQueue::new().unwrap();
        let is_ready = || {
            let watch = host::watch::Watch::new().unwrap();
            let readable = host::watch::Interest { readable: true, writable: false };
            watch.add(queue.descriptor().unwrap(), 0, readable).unwrap();
            let mut found = Vec::new();
            watch.wait(Some(Span::default()), &mut found).unwrap();
            !found.is_empty()
        };
        for _ in 0..2 {
            assert!(!is_ready());
            queue.push(Event::MediumChanged);
            queue.push(Event::Removed);
            assert!(is_ready());
            assert_eq!(queue.next(), Some(Event::MediumChanged));
            assert!(is_ready(), "one is left");
            assert_eq!(queue.next(), Some(Event::Removed));
        }
        assert!(!is_ready());
    }
}
