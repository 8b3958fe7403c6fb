//! Event queues, owned by the caller.

/// Events of one end, oldest first. Bounded, so that an iteration does bounded work; one additional
/// place is reserved for the end of the connection, which is reported once.
#[derive(Debug)]
pub struct EventQueue<E> {
    places: Vec<E>,
    capacity: usize,
}

/// Largest number of events caused by one PDU. Parsing stops while there is less space.
pub const EVENTS_PER_UNIT: usize = 3;

impl<E> EventQueue<E> {
    /// Creates a queue for `capacity` events, at least [`EVENTS_PER_UNIT`]. Memory grows to the
    /// largest number ever queued.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(EVENTS_PER_UNIT);
        Self { places: Vec::new(), capacity }
    }

    /// Remaining space.
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
    #[inline(always)]
    pub(crate) fn push(&mut self, event: E) {
        assert!(self.room() > 0, "an end looks at room() before it reads");
        self.places.push(event);
    }

    /// Appends the end of the connection, which always has a place.
    #[inline]
    pub(crate) fn push_end(&mut self, event: E) {
        self.places.push(event);
    }

    /// Events, oldest first.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[E] {
        &self.places
    }

    /// Removes all events.
    #[inline]
    pub fn clear(&mut self) {
        self.places.clear();
    }
}
