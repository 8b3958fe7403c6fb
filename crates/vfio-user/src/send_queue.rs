//! Send queue of messages.

use std::collections::VecDeque;

use crate::header::Header;

/// Message to send next, or the rest of one.
#[derive(Debug)]
pub struct OutgoingMessage<'a, F> {
    /// Remaining bytes.
    pub bytes: &'a [u8],
    /// Descriptors to send with the first byte; empty once that was sent.
    pub files: &'a [F],
}

#[derive(Debug)]
pub(crate) struct SendQueue<F> {
    queue: VecDeque<QueuedMessage<F>>,
    /// Bytes of the first message that were sent.
    sent_bytes: usize,
    waiting_bytes: usize,
}

#[derive(Debug)]
struct QueuedMessage<F> {
    bytes: Vec<u8>,
    files: Vec<F>,
}

/// Number of queued bytes above which the peer is not read from.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// Number of queued messages above which the peer is not read from.
const WAITING_MAX: usize = 1024;

impl<F> SendQueue<F> {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), sent_bytes: 0, waiting_bytes: 0 }
    }

    pub(crate) fn push(&mut self, header: Header, body: &[u8], files: Vec<F>) {
        let bytes = header.encode_message(body);
        self.waiting_bytes += bytes.len();
        self.queue.push_back(QueuedMessage { bytes, files });
    }

    /// Whether the peer does not read what is queued, so that no more is received from it.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting_bytes > WAITING_BYTES_MAX || self.queue.len() > WAITING_MAX
    }

    pub(crate) fn next_outgoing(&self) -> Option<OutgoingMessage<'_, F>> {
        let first = self.queue.front()?;
        let files = if self.sent_bytes == 0 { &first.files[..] } else { &[] };
        Some(OutgoingMessage { bytes: &first.bytes[self.sent_bytes..], files })
    }

    /// Records that `count` bytes of the next message were sent.
    pub(crate) fn record_sent(&mut self, count: usize) {
        self.sent_bytes += count;
        self.waiting_bytes -= count;
        if self.queue.front().is_some_and(|first| self.sent_bytes >= first.bytes.len()) {
            self.queue.pop_front();
            self.sent_bytes = 0;
        }
    }
}
