//! Answers on their way from whoever polled them to the channel whose they are.
//!
//! ```text
//!   written by who has the lock      head ─┐
//!   | tag, outcome | result | … | … | … | … |
//!                     tail ─┘      read by the channel, which has no lock
//! ```
//!
//! It never fills up: a channel has no more answers to come than it has tags, and there is a place
//! for each.

use base::{Answer, Answers, Outcome};

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// The answers of one channel that others have polled.
#[derive(Debug)]
pub(super) struct Inbox {
    places: Box<[Place]>,
    head: Head,
}

/// On a line of its own: the channel looks at it every turn.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Head(AtomicU64);

#[derive(Debug, Default)]
struct Place {
    /// The tag, and the outcome above it.
    first: AtomicU64,
    result: AtomicU32,
}

impl Inbox {
    /// An inbox for a channel with `tags` tags.
    pub(super) fn new(tags: u32) -> Self {
        let count = tags.next_power_of_two();
        Self { places: (0..count).map(|_| Place::default()).collect(), head: Head::default() }
    }

    /// Puts an answer in. Only whoever has the lock of the context does.
    #[inline]
    pub(super) fn put(&self, answer: Answer) {
        let head = self.head.0.load(Ordering::Relaxed);
        let place = self.place(head);
        // The channel has read what was here: it has submitted again since, under the lock that is
        // held now.
        place.first.store(answer.token | u64::from(answer.outcome.0) << 32, Ordering::Relaxed);
        place.result.store(answer.result, Ordering::Relaxed);
        // Pairs with the load in `take`: who sees the head sees the places below it.
        self.head.0.store(head + 1, Ordering::Release);
    }

    /// Whether there is anything that was not taken yet.
    #[inline]
    pub(super) fn has_more(&self, tail: u64) -> bool {
        self.head.0.load(Ordering::Acquire) != tail
    }

    /// Takes answers out, oldest first, and returns how many that were.
    #[inline]
    pub(super) fn take(&self, tail: &mut u64, answers: &mut Answers) -> usize {
        let head = self.head.0.load(Ordering::Acquire);
        let mut count = 0;
        while *tail != head && answers.room() > 0 {
            let place = self.place(*tail);
            let first = place.first.load(Ordering::Relaxed);
            #[expect(clippy::cast_possible_truncation, reason = "cut as they were put together")]
            let (token, outcome) = (u64::from(first as u32), Outcome((first >> 32) as u16));
            answers.push(Answer { token, outcome, result: place.result.load(Ordering::Relaxed) });
            *tail += 1;
            count += 1;
        }
        count
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below the count of places")]
    fn place(&self, number: u64) -> &Place {
        &self.places[number as usize & (self.places.len() - 1)]
    }
}
