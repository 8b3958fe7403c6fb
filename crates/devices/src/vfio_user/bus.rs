//! vfio-user access to a controller.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tenmil_base::{InterruptVector, RegionId};
use tenmil_dma::{DeviceKind, RegionTable};
use tenmil_linux::{Clock, EventFdVectors};

use super::connection::{ConnectionHandle, ServerFeatures};
use super::registers::{Registers, VfioUserDoorbell};
use super::vector::VfioUserInterruptVector;
use super::vfio_user_uri::VfioUserUri;
use crate::attached_controller::ControllerBus;
use tenmil_base::Error;

/// A vfio-user connection and the features of the server.
#[derive(Clone)]
pub(super) struct VfioUserBus {
    link: ConnectionHandle,
    regions: RegionTable,
    offer: Arc<ServerFeatures>,
}

impl VfioUserBus {
    pub(super) fn connect(
        name: &VfioUserUri,
        regions: &RegionTable,
        clock: Clock,
    ) -> Result<Self, Error> {
        let (link, offer) = ConnectionHandle::connect(name, regions, clock)?;
        Ok(Self { link, regions: regions.clone(), offer: Arc::new(offer) })
    }
}

impl ControllerBus for VfioUserBus {
    type Registers = Registers;
    type Doorbell = VfioUserDoorbell;

    const KIND: DeviceKind = DeviceKind::Emulated;

    fn name(&self) -> &str {
        self.link.name()
    }

    fn describe(&self) -> &'static str {
        "a controller of another process, over vfio-user"
    }

    fn registers(&self) -> Registers {
        Registers::new(self.link.clone(), &self.regions, self.offer.doorbells.clone())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.link.descriptor()
    }

    fn process_messages(&self) {
        self.link.drive_io();
    }

    fn lost_reason(&self) -> Option<String> {
        self.link.lost_reason()
    }

    fn mark_lost(&self, why: &str) {
        self.link.mark_lost(why);
    }

    fn map(&self, region: RegionId) -> Result<u64, Error> {
        self.link.map_region(region).map_err(Error::remote)
    }

    fn unmap(&self, region: RegionId) -> bool {
        self.link.unmap_region(region).is_ok()
    }

    /// Closes the sending direction. The server has released all memory once it has closed its side
    /// as well.
    fn revoke_dma_access(&self) -> bool {
        self.link.mark_lost("the device would not stop, so the connection was ended");
        self.link.has_server_closed()
    }

    fn restore_dma_access(&self) {}

    fn are_doorbells_mapped_memory(&self) -> bool {
        self.offer.doorbells.is_some()
    }

    fn interrupt_vector_count(&self) -> u32 {
        // Vectors cannot be masked without an accessible table.
        if self.offer.table_offset > 0 { self.offer.vectors } else { 0 }
    }

    fn vector(
        &self,
        number: u16,
    ) -> Result<(Box<dyn InterruptVector + Send>, EventFdVectors), Error> {
        let vector = VfioUserInterruptVector::new(&self.link, self.offer.table_offset, number)?;
        let event = vector.event();
        Ok((Box::new(vector), event))
    }
}
