//! Events, in a place that the owner keeps.

/// Events of one end, oldest first. Bounded: a turn does bounded work. There is always a place for
/// the end of the connection, which comes once.
#[derive(Debug)]
pub struct Events<E> {
    places: Vec<E>,
    capacity: usize,
}

/// What one unit may lead to. An end reads no further while there is not room for so many.
pub const EVENTS_PER_UNIT: usize = 3;

impl<E> Events<E> {
    /// An empty place for `capacity` events, but never fewer than one unit may lead to. It has memory
    /// for as many as there ever were.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(EVENTS_PER_UNIT);
        Self { places: Vec::new(), capacity }
    }

    /// Room left.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.capacity.saturating_sub(self.places.len())
    }

    /// Appends an event.
    ///
    /// # Panics
    ///
    /// If there is no [`room`](Self::room).
    #[inline]
    pub(crate) fn push(&mut self, event: E) {
        assert!(self.room() > 0, "an end looks at room() before it reads");
        self.places.push(event);
    }

    /// Appends the end of the connection, which needs no room.
    #[inline]
    pub(crate) fn push_end(&mut self, event: E) {
        self.places.push(event);
    }

    /// The events, oldest first.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[E] {
        &self.places
    }

    /// Forgets the events.
    #[inline]
    pub fn clear(&mut self) {
        self.places.clear();
    }
}
