//! A number that one thread counts and any thread reads.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Span;

/// A word with one writer. It carries no other data, so it orders nothing; a load and a store, and
/// never one that is both: what two add at once may be added once.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Stores a value. To be called by one thread at a time.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to it, past the end of numbers if it must. To be called by one thread at a time.
    #[inline]
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }
}

impl From<Span> for Count {
    fn from(span: Span) -> Self {
        Self(AtomicU64::new(span.ns))
    }
}

#[cfg(test)]
mod tests {
    use super::Count;
    use crate::Span;

    #[test]
    fn it_counts_from_where_it_was_set() {
        let count = Count::from(Span { ns: 7 });
        count.add(5);
        assert_eq!(count.get(), 12);
        count.set(u64::MAX);
        count.add(2);
        assert_eq!(count.get(), 1, "it goes round");
    }
}
