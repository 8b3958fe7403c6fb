//! Event queues, owned by the caller.

/// Events of one end, oldest first. Bounded, so that an iteration does bounded work; one additional
/// entry is reserved for the end of the connection, which is reported once.
#[derive(Debug)]
pub struct EventQueue<E> {
    events: Vec<E>,
    capacity: usize,
}

/// Largest number of events caused by one PDU. Parsing stops while there is less space.
pub const EVENTS_PER_PDU: usize = 3;

impl<E> EventQueue<E> {
    /// Creates a queue for `capacity` events, at least [`EVENTS_PER_PDU`]. Memory grows to the
    /// largest number ever queued.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(EVENTS_PER_PDU);
        Self { events: Vec::new(), capacity }
    }

    /// Remaining space.
    #[inline]
    #[must_use]
    pub fn remaining_capacity(&self) -> usize {
        self.capacity.saturating_sub(self.events.len())
    }

    /// Appends an event.
    ///
    /// # Panics
    ///
    /// If [`remaining_capacity`](Self::remaining_capacity) is zero.
    #[inline(always)]
    pub(crate) fn push(&mut self, event: E) {
        assert!(
            self.remaining_capacity() > 0,
            "an end parses a PDU only with space for its events"
        );
        self.events.push(event);
    }

    /// Appends the end of the connection, for which an entry is reserved.
    #[inline]
    pub(crate) fn push_close(&mut self, event: E) {
        self.events.push(event);
    }

    /// Events, oldest first.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[E] {
        &self.events
    }

    /// Removes all events.
    #[inline]
    pub fn clear(&mut self) {
        self.events.clear();
    }
}
