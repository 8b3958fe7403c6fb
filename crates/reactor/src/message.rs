//! Messages to light threads, and the handles that send them.

use std::fmt;
use std::sync::Arc;

use crate::context::Context;
use crate::poller::PollerId;
use crate::registry::{ReactorId, ThreadCounters, ThreadId};

/// Message to a light thread.
///
/// ```text
///   0       4         8                    16                   24
///   | kind  | poller  | word 0             | word 1             |
///   | kind  |         | closure: data      | its vtable         |
/// ```
pub enum Message {
    /// Closure that runs on the thread.
    Call(MessageFn),
    /// Two words for a poller, without an allocation. Dropped if the poller is gone.
    Data {
        /// Poller whose [`Poller::handle_message`](crate::Poller::handle_message) receives them.
        poller: PollerId,
        /// The words.
        words: [u64; 2],
    },
}

/// Closure that runs on a light thread.
pub type MessageFn = Box<dyn FnOnce(&mut Context<'_>) + Send>;

// With its sequence number it fills half a cache line in a mailbox.
const _: () = assert!(size_of::<Message>() == 24);

/// Handle of a light thread, for senders on other light threads and OS threads. Clones refer to the
/// same thread.
#[derive(Clone)]
pub struct ThreadHandle(pub(crate) Arc<ThreadCounters>);

impl ThreadHandle {
    /// Sends a message, or returns it if the mailbox is full or the thread [is
    /// gone](Self::has_ended). Messages of one sender arrive in order, even if the thread migrates.
    ///
    /// Makes no system call while the thread's reactor polls, and one if it sleeps.
    #[inline]
    pub fn send(&self, message: Message) -> Result<(), Message> {
        self.0.mail.send(message)?;
        self.0.notify_thread();
        Ok(())
    }

    /// Sends as many messages as fit, from the front of `messages`, and returns their number.
    /// Notifies once for all of them.
    #[inline]
    pub fn send_many(&self, messages: &mut Vec<Message>) -> usize {
        let count = self.0.mail.send_many(messages);
        if count > 0 {
            self.0.notify_thread();
        }
        count
    }

    /// Sends a closure.
    pub fn send_closure(
        &self,
        call: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) -> Result<(), Message> {
        self.send(Message::Call(Box::new(call)))
    }

    /// Wakes the thread's reactor if it sleeps. Call after a store that a poller of the thread sees
    /// when it is polled or [armed](crate::Poller::arm).
    #[inline]
    pub fn notify_reactor(&self) {
        self.0.notify_thread();
    }

    /// Whether the thread has ended. Messages that it had not run are dropped.
    pub fn has_ended(&self) -> bool {
        self.0.mail.is_closed()
    }

    /// Thread number.
    pub fn id(&self) -> ThreadId {
        self.0.id
    }

    /// Thread name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Reactor of the thread at the time of the call; it may migrate later.
    pub fn reactor(&self) -> ReactorId {
        self.0.current_reactor()
    }
}

impl fmt::Debug for ThreadHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Handle").field("id", &self.id()).field("name", &self.name()).finish()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(_) => out.write_str("Call(..)"),
            Self::Data { poller, words } => {
                out.debug_struct("Words").field("poller", poller).field("words", words).finish()
            }
        }
    }
}
