//! Schedulers as devices.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Error, IoChannel, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, IoScheduler, OpenedDevice, Opener};

/// Opens `merge:[URI]`, and the same for the other schedulers.
pub(crate) struct ScheduledDeviceType;

struct ScheduledDevice {
    below: Arc<dyn BlockDevice>,
    scheduler: IoScheduler,
}

impl DeviceType for ScheduledDeviceType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let opened = opener.open(uri.single_child()?)?;
        let scheduler = uri.scheme().parse()?;
        let description = format!("{scheduler}: over {}", opened.description);
        let medium = ScheduledDevice { below: opened.medium.clone(), scheduler };
        Ok(opened.with_device_stacked_on(Arc::new(medium), description))
    }
}

impl BlockDevice for ScheduledDevice {
    fn limits(&self) -> Limits {
        self.channel().unwrap().limits().clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(self.scheduler.wrap_channel(self.below.channel()?))
    }
}
