//! A volume for the tests of devices that are placed on others: created when there is none yet.

use std::sync::Arc;

use tenmil_base::Span;

use crate::pool::{OpenPool, PageGeometry, VolumeOp, VolumeRef, create, open_volume};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// Opens `stored:[URI]`, or `stored:[URI],[URI]`, as the volume `v` of the pool on the devices, with half
/// as many blocks as they have, and creates both first if there is no pool.
pub(crate) struct StoredKind {
    /// Maximum time of the last flush when it is closed; zero simulates a power failure.
    pub(crate) closing_max: Span,
}

impl StoredKind {
    /// Closes in order.
    pub(crate) const ORDERLY: Self = Self { closing_max: Span::from_secs(30) };
}

impl DeviceType for StoredKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let (device, others) = (&uri.children()[0], &uri.children()[1..]);
        let below = opener.open(device)?;
        let geometry = PageGeometry::of(device, &below.medium.limits())?;
        let place = VolumeRef::on(device);
        if create::read_pool(opener, &place, &*below.medium, &geometry, None).is_err() {
            let steps = create::steps(device, "tests", &geometry)?;
            create::format(opener, device, &*below.medium, &geometry, steps)?;
        }
        let open = Arc::new(OpenPool::over(opener, &place, below, self.closing_max)?);
        if open.devices().len() == 1 && !others.is_empty() {
            open.grow(opener, others, true)?;
        }
        if open.find("v").is_err() {
            let pages = open.devices().iter().map(|device| device.blocks).sum::<u64>();
            let (name, blocks) = ("v".into(), pages / 2);
            open.change(VolumeOp::Create { name, blocks, unit: 4, uuid: 1, checksums: false })?;
        }
        open_volume(opener, &open, (uri, "v"), true)
    }
}
