//! Communication between an endpoint and its virtqueues, which run on different threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Mailbox;
use tenmil_linux::RemoteEventFd;

/// Channel between a virtqueue and the endpoint.
#[derive(Debug)]
pub(super) struct QueueMailbox {
    pub(super) commands: Mailbox<QueueCommands>,
    ended: Mutex<Option<QueueEndState>>,
    endpoint: Arc<EndpointEvents>,
}

/// Events for the endpoint: virtqueues that have ended, and whether the device was resized.
pub(super) type EndpointEvents = Mailbox<bool>;

/// Commands to a virtqueue.
#[derive(Debug, Default)]
pub(super) struct QueueCommands {
    /// Stop once all requests taken have completed.
    pub(super) ends: bool,
    /// New call eventfd, if it has changed.
    pub(super) call: Option<Option<RemoteEventFd>>,
    /// New number of blocks, if it has changed.
    pub(super) block_count: Option<u64>,
}

/// Final state of a virtqueue that accesses nothing any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueueEndState {
    /// Next available index.
    pub(super) next: u16,
    /// Error, if the stop was not requested.
    pub(super) why: Option<String>,
}

impl QueueMailbox {
    pub(super) fn new(endpoint: &Arc<EndpointEvents>) -> Self {
        let (commands, ended) = (Mailbox::default(), Mutex::default());
        Self { commands, ended, endpoint: Arc::clone(endpoint) }
    }

    /// Records the end of the virtqueue.
    pub(super) fn record_end(&self, ended: QueueEndState) {
        *lock(&self.ended) = Some(ended);
        self.endpoint.send(|_| {});
    }

    /// Final state of the virtqueue, if it has ended.
    pub(super) fn end_state(&self) -> Option<QueueEndState> {
        lock(&self.ended).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
