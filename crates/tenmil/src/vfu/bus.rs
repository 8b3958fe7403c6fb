//! What a controller of another process is reached by.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{RegionId, Vector};
use dma::{DeviceKind, Regions};
use host::{Clock, EventVectors};

use super::link::{Link, Offer};
use super::name::VfuName;
use super::registers::{Register, Registers};
use super::vector::MessageVector;
use crate::Refused;
use crate::attached::Bus;

/// A connection, and what is offered over it.
#[derive(Clone)]
pub(super) struct VfuBus {
    link: Link,
    regions: Regions,
    offer: Arc<Offer>,
}

impl VfuBus {
    pub(super) fn connect(
        name: &VfuName,
        regions: &Regions,
        clock: Clock,
    ) -> Result<Self, Refused> {
        let (link, offer) = Link::connect(name, regions, clock)?;
        Ok(Self { link, regions: regions.clone(), offer: Arc::new(offer) })
    }
}

impl Bus for VfuBus {
    type Registers = Registers;
    type Doorbell = Register;

    const KIND: DeviceKind = DeviceKind::Emulated;

    fn name(&self) -> &str {
        self.link.name()
    }

    fn what(&self) -> &'static str {
        "a controller of another process, over vfio-user"
    }

    fn registers(&self) -> Registers {
        Registers::new(self.link.clone(), &self.regions, self.offer.doorbells.clone())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.link.descriptor()
    }

    fn carry(&self) {
        self.link.carry();
    }

    fn lost(&self) -> Option<String> {
        self.link.lost()
    }

    fn lose(&self, why: &str) {
        self.link.lose(why);
    }

    fn show(&self, region: RegionId) -> Result<u64, Refused> {
        self.link.show(region).map_err(Refused::peer)
    }

    fn hide(&self, region: RegionId) -> bool {
        self.link.hide(region).is_ok()
    }

    /// We say no more; the process that serves has let go of our memory once it has closed, too.
    fn cut_off(&self) -> bool {
        self.link.lose("the device would not stop, so the connection was ended");
        self.link.has_ended()
    }

    fn reconnect(&self) {}

    fn maps_doorbells(&self) -> bool {
        self.offer.doorbells.is_some()
    }

    fn vectors(&self) -> u32 {
        // Without a table that can be reached they cannot be masked.
        if self.offer.table_offset > 0 { self.offer.vectors } else { 0 }
    }

    fn vector(&self, number: u16) -> Result<(Box<dyn Vector + Send>, EventVectors), String> {
        let vector = MessageVector::new(&self.link, self.offer.table_offset, number)?;
        let event = vector.event();
        Ok((Box::new(vector), event))
    }
}
