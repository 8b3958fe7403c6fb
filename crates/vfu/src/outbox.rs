//! Messages on their way out.

use std::collections::VecDeque;

use crate::header::Header;

/// A message, or what is left of one, to be sent next.
#[derive(Debug)]
pub struct Outgoing<'a, F> {
    /// What is left of it.
    pub bytes: &'a [u8],
    /// Descriptors that go with its first byte; none once that has been sent.
    pub files: &'a [F],
}

#[derive(Debug)]
pub(crate) struct Outbox<F> {
    queue: VecDeque<Whole<F>>,
    /// Of the first.
    sent: usize,
    waiting_bytes: usize,
}

#[derive(Debug)]
struct Whole<F> {
    bytes: Vec<u8>,
    files: Vec<F>,
}

/// A peer that lets so many bytes wait is read from no more.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// A peer that lets so many messages wait is read from no more.
const WAITING_MAX: usize = 1024;

impl<F> Outbox<F> {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), sent: 0, waiting_bytes: 0 }
    }

    pub(crate) fn push(&mut self, header: Header, body: &[u8], files: Vec<F>) {
        let bytes = header.message(body);
        self.waiting_bytes += bytes.len();
        self.queue.push_back(Whole { bytes, files });
    }

    /// Whether the peer takes what is meant for it too slowly to be asked for more.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting_bytes > WAITING_BYTES_MAX || self.queue.len() > WAITING_MAX
    }

    pub(crate) fn next(&self) -> Option<Outgoing<'_, F>> {
        let first = self.queue.front()?;
        let files = if self.sent == 0 { &first.files[..] } else { &[] };
        Some(Outgoing { bytes: &first.bytes[self.sent..], files })
    }

    /// So many bytes of the next message have been sent.
    pub(crate) fn sent(&mut self, count: usize) {
        self.sent += count;
        self.waiting_bytes -= count;
        if self.queue.front().is_some_and(|first| self.sent >= first.bytes.len()) {
            self.queue.pop_front();
            self.sent = 0;
        }
    }
}
