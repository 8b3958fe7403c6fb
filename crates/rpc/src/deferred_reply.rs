//! Deferred responses.
//!
//! A method's function must not block. A method that takes a while registers a deferred response,
//! which another thread completes. The response is sent then; other connections are not affected.

use std::cell::RefCell;
use std::task::Poll;

use serde_json::Value;
use tenmil_base::{OneshotReceiver, OneshotSender, oneshot};

use crate::error::{ErrorCode, RpcError};
use crate::event::EventSender;

type MethodResult = Result<Value, RpcError>;

/// Slot in which a method's function registers that its response is deferred.
#[derive(Debug, Default)]
pub struct DeferredReplySlot {
    pending: RefCell<Option<PendingReply>>,
    /// Description of the client that waits.
    client: String,
}

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

impl DeferredReplySlot {
    /// A slot for the response to a client, which the description names in events and logs.
    pub fn for_client(client: impl Into<String>) -> Self {
        Self { pending: RefCell::default(), client: client.into() }
    }

    /// Description of the client that waits; empty if it is not known.
    pub(crate) fn client(&self) -> &str {
        &self.client
    }

    /// Registers a deferred response. The return value of the function is then ignored.
    pub(crate) fn defer(&self, pending: PendingReply) {
        self.pending.replace(Some(pending));
    }

    /// Removes the registered response.
    pub(crate) fn take_pending(&self) -> Option<PendingReply> {
        self.pending.take()
    }
}

impl PendingReply {
    /// Whether the response is available.
    #[cfg(test)]
    pub(crate) fn is_available(&self) -> bool {
        self.0.is_complete()
    }

    /// Removes the response, if it is available.
    pub(crate) fn take_result(&self) -> Option<MethodResult> {
        let Poll::Ready(response) = self.0.try_take() else { return None };
        let text = "the process ends, and has not done it; expected one that goes on";
        Some(response.unwrap_or_else(|| Err(RpcError::remote(ErrorCode::ConnectionClosed, text))))
    }
}

impl ReplySender {
    /// Creates a sender and its pending response.
    pub(crate) fn new(announcer: EventSender) -> (Self, PendingReply) {
        let (sender, receiver) = oneshot();
        (Self { response: Some(sender), announcer }, PendingReply(receiver))
    }

    /// Completes the response.
    pub(crate) fn send_reply(mut self, answer: MethodResult) {
        if let Some(response) = self.response.take() {
            response.send(answer);
        }
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        drop(self.response.take());
        self.announcer.wake_server();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{DeferredReplySlot, ReplySender};
    use crate::error::ErrorCode;
    use crate::event::event_channel;

    #[test]
    fn deferred_reply_is_sent_once_and_a_dropped_sender_is_an_error() {
        let (announcer, _announced) = event_channel().unwrap();
        let (promise, pending) = ReplySender::new(announcer.clone());
        assert!(!pending.is_available() && pending.take_result().is_none());
        promise.send_reply(Ok(json!(7)));
        assert!(pending.is_available());
        assert_eq!(pending.take_result(), Some(Ok(json!(7))));

        let (promise, pending) = ReplySender::new(announcer);
        let later = DeferredReplySlot::default();
        later.defer(pending);
        drop(promise);
        let pending = later.take_pending().unwrap();
        assert_eq!(pending.take_result().unwrap().unwrap_err().code, ErrorCode::ConnectionClosed);
        assert!(later.take_pending().is_none());
    }
}
