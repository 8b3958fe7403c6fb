//! Counter with one writer and many readers.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Span;

/// Statistics word with one writer. It carries no other data, so it orders nothing. Updated by a
/// load and a store, not atomically: of concurrent additions one may be lost.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Stores a value. One thread at a time may call it.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to the value, wrapping. One thread at a time may call it.
    #[inline]
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }
}

impl From<Span> for Counter {
    fn from(span: Span) -> Self {
        Self(AtomicU64::new(span.ns))
    }
}

#[cfg(test)]
mod tests {
    use super::Counter;
    use crate::Span;

    #[test]
    fn counter_adds_to_the_value_that_was_set() {
        let count = Counter::from(Span { ns: 7 });
        count.add(5);
        assert_eq!(count.get(), 12);
        count.set(u64::MAX);
        count.add(2);
        assert_eq!(count.get(), 1, "it goes round");
    }
}
