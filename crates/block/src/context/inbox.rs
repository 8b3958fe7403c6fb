//! Inbox of completions for a channel, filled by other channels of the same context.
//!
//! ```text
//!   written by the lock holder      head ─┐
//!   | tag, status  | result | … | … | … | … |
//!                     tail ─┘      read by the channel, without the lock
//! ```
//!
//! It cannot overflow: a channel has at most as many pending completions as tags, and there is an entry
//! for each.

use tenmil_base::{CompletionBatch, IoCompletion, IoStatus};

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// Completions of one channel that others have polled.
#[derive(Debug)]
pub(super) struct CompletionInbox {
    batches: Box<[InboxEntry]>,
    head: InboxHead,
}

/// In a cache line of its own: the channel loads it in every iteration.
#[derive(Debug, Default)]
#[repr(align(128))]
struct InboxHead(AtomicU64);

#[derive(Debug, Default)]
struct InboxEntry {
    /// The tag, with the status above it.
    first: AtomicU64,
    result: AtomicU32,
}

impl CompletionInbox {
    /// An inbox for a channel with `tags` tags.
    pub(super) fn new(tags: u32) -> Self {
        let count = tags.next_power_of_two();
        Self {
            batches: (0..count).map(|_| InboxEntry::default()).collect(),
            head: InboxHead::default(),
        }
    }

    /// Appends a completion. The caller holds the lock of the context.
    #[inline]
    pub(super) fn push_completions(&self, completion: IoCompletion) {
        let head = self.head.0.load(Ordering::Relaxed);
        let batch = self.entry(head);
        // The channel has read the previous contents: it has submitted again since, under the lock that
        // is held now.
        batch
            .first
            .store(completion.token | u64::from(completion.status.0) << 32, Ordering::Relaxed);
        batch.result.store(completion.result, Ordering::Relaxed);
        // Release pairs with the acquire in `take`: a reader that sees the head sees the entries below
        // it.
        self.head.0.store(head + 1, Ordering::Release);
    }

    /// Whether there are unread completions.
    #[inline]
    pub(super) fn has_more(&self, tail: u64) -> bool {
        self.head.0.load(Ordering::Acquire) != tail
    }

    /// Takes completions, oldest first, and returns their number.
    #[inline]
    pub(super) fn take_completions(
        &self,
        tail: &mut u64,
        completions: &mut CompletionBatch,
    ) -> usize {
        let head = self.head.0.load(Ordering::Acquire);
        let mut count = 0;
        while *tail != head && completions.remaining() > 0 {
            let batch = self.entry(*tail);
            let first = batch.first.load(Ordering::Relaxed);
            #[expect(clippy::cast_possible_truncation, reason = "cut as they were put together")]
            let (token, status) = (u64::from(first as u32), IoStatus((first >> 32) as u16));
            completions.push(IoCompletion {
                token,
                status,
                result: batch.result.load(Ordering::Relaxed),
            });
            *tail += 1;
            count += 1;
        }
        count
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the count of places")]
    fn entry(&self, number: u64) -> &InboxEntry {
        &self.batches[number as usize & (self.batches.len() - 1)]
    }
}
