//! Events that were not sent to a subscriber yet.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use hyper::body::Bytes;

/// Queue of one subscriber.
pub(super) struct EventQueue {
    /// Kinds to which it has subscribed; all if there are none.
    kinds: Vec<String>,
    unsent: RefCell<VecDeque<Bytes>>,
    unsent_bytes: Cell<usize>,
    has_ended: Cell<bool>,
    /// Task that waits for an event.
    waker: RefCell<Option<Waker>>,
}

/// Number of unsent bytes at which a subscriber is disconnected. The text of an event is shared by all
/// queues.
const UNSENT_MAX: usize = 256 << 10;
/// Kind of the last event, which every subscriber receives.
const LAST: &str = crate::event::ENDING.name;

impl EventQueue {
    pub(super) fn new(kinds: Vec<String>) -> Self {
        Self {
            kinds,
            unsent: RefCell::default(),
            unsent_bytes: Cell::new(0),
            has_ended: Cell::new(false),
            waker: RefCell::new(None),
        }
    }

    /// Queues an event of a subscribed kind. Returns false if too much is unsent.
    pub(super) fn queue_event(&self, kind: &str, text: &Bytes) -> bool {
        if !self.kinds.is_empty() && kind != LAST && self.kinds.iter().all(|one| one != kind) {
            return true;
        }
        let unsent_bytes = self.unsent_bytes.get() + text.len();
        if unsent_bytes > UNSENT_MAX {
            return false;
        }
        self.unsent_bytes.set(unsent_bytes);
        self.unsent.borrow_mut().push_back(text.clone());
        self.wake();
        true
    }

    /// Ends the stream after the queued events.
    pub(super) fn end(&self) {
        self.has_ended.set(true);
        self.wake();
    }

    /// Next event, or none at the end.
    pub(super) fn poll_next(&self, context: &Context<'_>) -> Poll<Option<Bytes>> {
        if let Some(text) = self.unsent.borrow_mut().pop_front() {
            self.unsent_bytes.set(self.unsent_bytes.get() - text.len());
            return Poll::Ready(Some(text));
        }
        if self.has_ended.get() {
            return Poll::Ready(None);
        }
        self.waker.replace(Some(context.waker().clone()));
        Poll::Pending
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use hyper::body::Bytes;

    use super::{EventQueue, UNSENT_MAX};

    #[test]
    fn only_subscribed_kinds_and_the_last_event_are_queued() {
        let queue = EventQueue::new(vec!["a".into()]);
        for kind in ["a", "b", "shutdown"] {
            assert!(queue.queue_event(kind, &Bytes::from(kind)));
        }
        queue.end();
        let context = Context::from_waker(Waker::noop());
        for expected in [Some("a"), Some("shutdown"), None] {
            assert_eq!(queue.poll_next(&context), Poll::Ready(expected.map(Bytes::from)));
        }
    }

    #[test]
    fn queue_is_bounded_in_bytes() {
        let queue = EventQueue::new(Vec::new());
        let text = Bytes::from(vec![b'x'; UNSENT_MAX / 2]);
        assert!(queue.queue_event("a", &text) && queue.queue_event("a", &text));
        assert!(!queue.queue_event("a", &Bytes::from("x")));
        assert!(queue.poll_next(&Context::from_waker(Waker::noop())).is_ready());
        assert!(queue.queue_event("a", &text), "there is room again");
    }
}
