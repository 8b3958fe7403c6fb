//! Events of a bdev, delivered to each descriptor.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::{fmt, io};

use tenmil_base::Interrupts;
use tenmil_linux::EventFdVectors;

/// An event of a bdev.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BdevEvent {
    /// The device has been resized.
    Resized {
        /// New size in blocks.
        block_count: u64,
    },
    /// The device has been removed: requests in flight are completed, and later ones fail. The holder
    /// drops its channels and the descriptor.
    Removed,
    /// The device below has lost data.
    MediumError {
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// The device below was replaced, or its contents have changed.
    MediumChanged,
    /// Older events were dropped because they were not consumed.
    Overflowed {
        /// Number of dropped events.
        lost: u64,
    },
}

/// Bounded event queue of one descriptor. An overflow is reported as an event.
pub(super) struct BdevEventQueue {
    waiting: Mutex<EventBacklog>,
    waker: EventFdVectors,
}

#[derive(Debug, Default)]
struct EventBacklog {
    events: VecDeque<BdevEvent>,
    lost: u64,
}

/// Maximum number of queued events. An overflow is counted separately.
const WAITING_MAX: usize = 64;

impl BdevEventQueue {
    pub(super) fn new() -> io::Result<Self> {
        let waiting = EventBacklog { events: VecDeque::with_capacity(WAITING_MAX), lost: 0 };
        Ok(Self { waiting: Mutex::new(waiting), waker: EventFdVectors::new(1)? })
    }

    /// Appends an event; a full queue drops the oldest.
    pub(super) fn push(&self, event: BdevEvent) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.events.len() == WAITING_MAX {
            waiting.events.pop_front();
            waiting.lost += 1;
        }
        waiting.events.push_back(event);
        self.waker.clone().raise(0);
    }

    /// Removes the oldest event. After the last one, the descriptor is not readable until the next event.
    pub(super) fn next(&self) -> Option<BdevEvent> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = std::mem::take(&mut waiting.lost);
        let event = if lost > 0 {
            Some(BdevEvent::Overflowed { lost })
        } else {
            waiting.events.pop_front()
        };
        if waiting.events.is_empty() {
            // `push` holds the same lock, so the barrier inside `unmask` is not needed here.
            self.waker.unmask(0);
        }
        event
    }

    pub(super) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.waker.descriptor(0)
    }
}

impl fmt::Debug for BdevEventQueue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("EventQueue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{BdevEvent, BdevEventQueue, WAITING_MAX};

    fn resized_event(block_count: usize) -> BdevEvent {
        BdevEvent::Resized { block_count: block_count as u64 }
    }

    #[test]
    fn bdev_events_are_in_order_and_losses_are_reported() {
        let queue = BdevEventQueue::new().unwrap();
        assert_eq!(queue.next(), None);
        (0..WAITING_MAX + 3).for_each(|index| queue.push(resized_event(index)));
        assert_eq!(queue.next(), Some(BdevEvent::Overflowed { lost: 3 }));
        for index in 3..WAITING_MAX + 3 {
            assert_eq!(queue.next(), Some(resized_event(index)));
        }
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn event_descriptor_is_readable_until_the_queue_is_empty() {
        let queue = BdevEventQueue::new().unwrap();
        let is_ready = || {
            let watch = tenmil_linux::poll_set::PollSet::new().unwrap();
            let readable = tenmil_linux::poll_set::Interest { readable: true, writable: false };
            watch.add(queue.event_fd().unwrap(), 0, readable).unwrap();
            let mut found = Vec::new();
            watch.wait(Some(Span::default()), &mut found).unwrap();
            !found.is_empty()
        };
        for _ in 0..2 {
            assert!(!is_ready());
            queue.push(BdevEvent::MediumChanged);
            queue.push(BdevEvent::Removed);
            assert!(is_ready());
            assert_eq!(queue.next(), Some(BdevEvent::MediumChanged));
            assert!(is_ready(), "one is left");
            assert_eq!(queue.next(), Some(BdevEvent::Removed));
        }
        assert!(!is_ready());
    }
}
