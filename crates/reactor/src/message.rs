//! Messages, and the handles they are sent by.

use std::fmt;
use std::sync::Arc;

use crate::context::Context;
use crate::directory::{ReactorId, ThreadId, ThreadRecord};
use crate::poller::PollerId;

/// What is sent to a light thread.
///
/// ```text
///   0       4         8                    16                   24
///   | kind  | poller  | word 0             | word 1             |
///   | kind  |         | closure: data      | its table          |
/// ```
pub enum Message {
    /// A closure that runs on the thread.
    Call(Call),
    /// Two words for a poller; nothing is allocated. Dropped if the poller is gone.
    Words {
        /// Whose [`Poller::message`](crate::Poller::message) takes them.
        poller: PollerId,
        /// The words.
        words: [u64; 2],
    },
}

/// A closure that runs on a light thread.
pub type Call = Box<dyn FnOnce(&mut Context<'_>) + Send>;

// With its number it fills half a cache line in a mailbox.
const _: () = assert!(size_of::<Message>() == 24);

/// A light thread, for those who send to it: other light threads and OS threads alike. Clones are
/// the same thread.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<ThreadRecord>);

impl Handle {
    /// Sends a message, or gives it back if the mailbox is full or the thread
    /// [is gone](Self::is_gone). The messages of one sender arrive in their order, wherever the
    /// thread goes meanwhile.
    ///
    /// No system call while the thread's reactor polls; one if it sleeps.
    #[inline]
    pub fn send(&self, message: Message) -> Result<(), Message> {
        self.0.mail.send(message)?;
        self.0.ring();
        Ok(())
    }

    /// Sends as many as there is room for, from the front of `messages`, and says how many that
    /// were. One bell for all of them.
    #[inline]
    pub fn send_many(&self, messages: &mut Vec<Message>) -> usize {
        let count = self.0.mail.send_many(messages);
        if count > 0 {
            self.0.ring();
        }
        count
    }

    /// Sends a closure.
    pub fn call(
        &self,
        call: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) -> Result<(), Message> {
        self.send(Message::Call(Box::new(call)))
    }

    /// Wakes the thread's reactor if it sleeps. To be called after a store that a poller of the
    /// thread sees when it is polled or [armed](crate::Poller::arm).
    #[inline]
    pub fn ring(&self) {
        self.0.ring();
    }

    /// Whether the thread has ended. What was sent to it and had not been run is dropped.
    pub fn is_gone(&self) -> bool {
        self.0.mail.is_closed()
    }

    /// The thread's number.
    pub fn id(&self) -> ThreadId {
        self.0.id
    }

    /// The thread's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Where the thread lives, or was going to when this was asked.
    pub fn home(&self) -> ReactorId {
        self.0.home()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Handle").field("id", &self.id()).field("name", &self.name()).finish()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(_) => out.write_str("Call(..)"),
            Self::Words { poller, words } => {
                out.debug_struct("Words").field("poller", poller).field("words", words).finish()
            }
        }
    }
}
