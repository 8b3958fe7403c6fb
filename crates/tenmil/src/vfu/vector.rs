//! A vector of the other process's controller, to sleep on.

use std::os::fd::BorrowedFd;

use base::Vector;
use host::EventVectors;
use vfu::region_index;

use super::link::Link;

/// A vector, masked in the controller's own table while its host polls. What is posted while it is
/// masked is remembered there and signalled when it is unmasked, so nothing is missed though both are
/// messages that arrive later.
pub(super) struct MessageVector {
    event: EventVectors,
    link: Link,
    /// Where in BAR 0 its control word lies.
    control: u64,
}

/// Bytes of an entry of the table, and of what stands before its control word.
const ENTRY_BYTES: u64 = 16;
const CONTROL: u64 = 12;
const MASKED: u32 = 1;

impl MessageVector {
    /// Has the other process signal vector `number` of the table at `table_offset`.
    pub(super) fn new(link: &Link, table_offset: u32, number: u16) -> Result<Self, String> {
        let event = EventVectors::new(1).map_err(|error| error.to_string())?;
        let descriptor = event.descriptor(0).ok_or("no descriptor is left")?;
        let control = u64::from(table_offset) + u64::from(number) * ENTRY_BYTES + CONTROL;
        link.post(region_index::BAR0, control, &MASKED.to_le_bytes());
        link.set_vector(number, descriptor)?;
        Ok(Self { link: link.clone(), control, event })
    }

    /// What is slept on, to be raised once when the controller is lost.
    pub(super) fn event(&self) -> EventVectors {
        self.event.clone()
    }
}

impl Vector for MessageVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        // It has one, or there would be no vector.
        self.event.descriptor(0).unwrap_or_else(|| self.link.descriptor())
    }

    fn unmask(&mut self) -> bool {
        self.event.clear(0);
        self.link.post(region_index::BAR0, self.control, &0_u32.to_le_bytes());
        self.link.lost().is_none()
    }

    fn mask(&mut self) {
        self.link.post(region_index::BAR0, self.control, &MASKED.to_le_bytes());
    }
}
