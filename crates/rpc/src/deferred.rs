//! Deferred responses.
//!
//! A method's function must not block. A method that takes a while registers a deferred response,
//! which another thread completes. The connection that sent the request processes its next request
//! only then; other connections are not affected.

use std::cell::RefCell;
use std::task::Poll;

use serde_json::Value;
use tenmil_base::{OneshotReceiver, OneshotSender, oneshot};

use crate::error::{Code, RpcError};
use crate::event::EventSender;

type MethodResult = Result<Value, RpcError>;

/// Slot in which a method's function registers that its response is deferred.
#[derive(Debug, Default)]
pub struct DeferredReply(RefCell<Option<PendingReply>>);

/// Pending response of a deferred method.
#[derive(Debug)]
pub(crate) struct PendingReply(OneshotReceiver<MethodResult>);

/// Sender that completes a deferred response. If it is dropped without a response, the response is
/// an error.
#[derive(Debug)]
pub(crate) struct ReplySender {
    /// Taken when it is used or dropped, which precedes the wake-up.
    response: Option<OneshotSender<MethodResult>>,
    /// Wakes the server thread.
    announcer: EventSender,
}

impl DeferredReply {
    /// Registers a deferred response. The return value of the function is then ignored.
    pub(crate) fn defer(&self, pending: PendingReply) {
        self.0.replace(Some(pending));
    }

    /// Removes the registered response.
    pub(crate) fn take(&self) -> Option<PendingReply> {
        self.0.take()
    }
}

impl PendingReply {
    /// Whether the response is available.
    pub(crate) fn is_there(&self) -> bool {
        self.0.is_complete()
    }

    /// Removes the response, if it is available.
    pub(crate) fn take(&self) -> Option<MethodResult> {
        let Poll::Ready(response) = self.0.try_take() else { return None };
        let text = "the process ends, and has not done it; expected one that goes on";
        Some(response.unwrap_or_else(|| Err(RpcError::peer(Code::ConnectionClosed, text))))
    }
}

impl ReplySender {
    /// Creates a sender and its pending response.
    pub(crate) fn new(announcer: EventSender) -> (Self, PendingReply) {
        let (sender, receiver) = oneshot();
        (Self { response: Some(sender), announcer }, PendingReply(receiver))
    }

    /// Completes the response.
    pub(crate) fn keep(mut self, answer: MethodResult) {
        if let Some(response) = self.response.take() {
            response.send(answer);
        }
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        drop(self.response.take());
        self.announcer.wake();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{DeferredReply, ReplySender};
    use crate::error::Code;
    use crate::event::announcements;

    #[test]
    fn a_promise_is_kept_once_and_one_that_is_lost_is_a_refusal() {
        let (announcer, _announced) = announcements().unwrap();
        let (promise, pending) = ReplySender::new(announcer.clone());
        assert!(!pending.is_there() && pending.take().is_none());
        promise.keep(Ok(json!(7)));
        assert!(pending.is_there());
        assert_eq!(pending.take(), Some(Ok(json!(7))));

        let (promise, pending) = ReplySender::new(announcer);
        let later = DeferredReply::default();
        later.defer(pending);
        drop(promise);
        let pending = later.take().unwrap();
        assert_eq!(pending.take().unwrap().unwrap_err().code, Code::ConnectionClosed);
        assert!(later.take().is_none());
    }
}
