//! A volume for the tests of devices that are placed on others: created when there is none yet.

use std::sync::Arc;

use tenmil_base::Span;

use crate::pool::{OpenPool, PageGeometry, VolumeOp, VolumeRef, create_pool, open_volume};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// Opens `stored:[URI]`, or `stored:[URI],[URI]`, as the volume `v` of the pool on the devices, with half
/// as many blocks as they have, and creates both first if there is no pool.
pub(crate) struct PoolVolumeType {
    /// Maximum time of the last flush when it is closed; zero simulates a power failure.
    pub(crate) closing_max: Span,
}

impl PoolVolumeType {
    /// Closes in order.
    pub(crate) const ORDERLY: Self = Self { closing_max: Span::from_secs(30) };
}

impl DeviceType for PoolVolumeType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let (device, others) = (&uri.children()[0], &uri.children()[1..]);
        let below = opener.open(device)?;
        let geometry = PageGeometry::from_limits(device, &below.medium.limits())?;
        let place = VolumeRef::pool_on(device);
        if create_pool::open_pool_store(opener, &place, &*below.medium, &geometry, None).is_err() {
            let steps = create_pool::pool_create_steps(device, "tests", &geometry)?;
            create_pool::run_create_steps(opener, device, &*below.medium, &geometry, steps)?;
        }
        let open = Arc::new(OpenPool::open_on_device(opener, &place, below, self.closing_max)?);
        if open.devices().len() == 1 && !others.is_empty() {
            open.grow_pool(opener, others, true)?;
        }
        if open.find_volume("v").is_err() {
            let pages = open.devices().iter().map(|device| device.blocks).sum::<u64>();
            let (name, blocks) = ("v".into(), pages / 2);
            open.execute_volume_op(VolumeOp::Create {
                name,
                blocks,
                unit: 4,
                uuid: 1,
                checksums: false,
            })?;
        }
        open_volume(opener, &open, (uri, "v"), true)
    }
}
