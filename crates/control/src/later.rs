//! Answers that come later.
//!
//! A method's function must not wait. One whose answer takes a while leaves word here, and whoever does
//! the work fills it in, from a thread of its own; the connection that asked goes on to its next line
//! when the answer is there, and all others go on meanwhile.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::event::Announcer;
use crate::refusal::{Code, Refusal};

type Answer = Result<Value, Refusal>;

/// Where a method's function leaves word that its answer comes later.
#[derive(Debug, Default)]
pub struct Later(RefCell<Option<Pending>>);

/// An answer that is waited for.
#[derive(Debug)]
pub(crate) struct Pending(Arc<Mutex<Option<Answer>>>);

/// The other half: whoever has it owes an answer. If it is lost, the answer is a refusal.
#[derive(Debug)]
pub(crate) struct Promise {
    place: Arc<Mutex<Option<Answer>>>,
    /// Wakes whoever serves.
    announcer: Announcer,
}

impl Later {
    /// Leaves word. What the function returns beside is not looked at.
    pub(crate) fn leave(&self, pending: Pending) {
        self.0.replace(Some(pending));
    }

    /// The word that was left.
    pub(crate) fn take(&self) -> Option<Pending> {
        self.0.take()
    }
}

impl Pending {
    /// Whether the answer is there.
    pub(crate) fn is_there(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The answer, once.
    pub(crate) fn take(&self) -> Option<Answer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Promise {
    /// A promise, and what waits for it to be kept.
    pub(crate) fn new(announcer: Announcer) -> (Self, Pending) {
        let place = Arc::default();
        (Self { place: Arc::clone(&place), announcer }, Pending(place))
    }

    /// Keeps it.
    pub(crate) fn keep(self, answer: Answer) {
        self.put(answer);
    }

    fn put(&self, answer: Answer) {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(answer);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let text = "the process ends, and has not done it; expected one that goes on";
        self.put(Err(Refusal::peer(Code::Gone, text)));
        self.announcer.wake();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Later, Promise};
    use crate::event::announcements;
    use crate::refusal::Code;

    #[test]
    fn a_promise_is_kept_once_and_one_that_is_lost_is_a_refusal() {
        let (announcer, _announced) = announcements().unwrap();
        let (promise, pending) = Promise::new(announcer.clone());
        assert!(!pending.is_there() && pending.take().is_none());
        promise.keep(Ok(json!(7)));
        assert!(pending.is_there());
        assert_eq!(pending.take(), Some(Ok(json!(7))));
        assert_eq!(pending.take(), None);

        let (promise, pending) = Promise::new(announcer);
        let later = Later::default();
        later.leave(pending);
        drop(promise);
        let pending = later.take().unwrap();
        assert_eq!(pending.take().unwrap().unwrap_err().code, Code::Gone);
        assert!(later.take().is_none());
    }
}
