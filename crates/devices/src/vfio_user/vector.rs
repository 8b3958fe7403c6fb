//! Interrupt vector of a vfio-user controller.

use std::os::fd::BorrowedFd;
use tenmil_base::Error;

use tenmil_base::InterruptVector;
use tenmil_linux::EventFdVectors;
use tenmil_vfio_user::region_index;

use super::connection::ConnectionHandle;

/// MSI-X vector that is masked in the vector table of the controller while the host polls. An
/// interrupt that occurs while the vector is masked stays pending in the controller and is signaled
/// on unmasking, so none is lost although both are asynchronous messages.
pub(super) struct VfioUserInterruptVector {
    event: EventFdVectors,
    link: ConnectionHandle,
    /// Offset of its Vector Control word in BAR 0.
    control: u64,
}

/// Size of an MSI-X table entry, and offset of its Vector Control word in bytes.
const ENTRY_BYTES: u64 = 16;
const CONTROL: u64 = 12;
const MASKED: u32 = 1;

impl VfioUserInterruptVector {
    /// Assigns an event descriptor to vector `number` of the table at `table_offset`.
    pub(super) fn new(
        link: &ConnectionHandle,
        table_offset: u32,
        number: u16,
    ) -> Result<Self, Error> {
        let event = EventFdVectors::new(1).map_err(Error::environment)?;
        let descriptor =
            event.descriptor(0).ok_or("no descriptor is left").map_err(Error::environment)?;
        let control = u64::from(table_offset) + u64::from(number) * ENTRY_BYTES + CONTROL;
        link.write_device_region_no_reply(region_index::BAR0, control, &MASKED.to_le_bytes());
        link.set_vector(number, descriptor)?;
        Ok(Self { link: link.clone(), control, event })
    }

    /// Event to sleep on. Signaled once when the controller is lost.
    pub(super) fn event(&self) -> EventFdVectors {
        self.event.clone()
    }
}

impl InterruptVector for VfioUserInterruptVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        // Always has a descriptor: the constructor fails without one.
        self.event.descriptor(0).unwrap_or_else(|| self.link.descriptor())
    }

    fn unmask(&mut self) -> bool {
        self.event.clear_signals(0);
        self.link.write_device_region_no_reply(
            region_index::BAR0,
            self.control,
            &0_u32.to_le_bytes(),
        );
        self.link.lost_reason().is_none()
    }

    fn mask(&mut self) {
        self.link.write_device_region_no_reply(
            region_index::BAR0,
            self.control,
            &MASKED.to_le_bytes(),
        );
    }
}
