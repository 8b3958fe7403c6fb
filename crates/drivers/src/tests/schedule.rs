//! Schedulers as devices.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Error, IoChannel, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener, Scheduler};

/// Opens `merge:[URI]`, and the same for the other schedulers.
pub(crate) struct ScheduledKind;

struct Scheduled {
    below: Arc<dyn BlockDevice>,
    scheduler: Scheduler,
}

impl DeviceType for ScheduledKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let opened = opener.open(uri.single_child()?)?;
        let scheduler = uri.scheme().parse()?;
        let description = format!("{scheduler}: over {}", opened.description);
        let medium = Scheduled { below: opened.medium.clone(), scheduler };
        Ok(opened.with_stacked_device(Arc::new(medium), description))
    }
}

impl BlockDevice for Scheduled {
    fn limits(&self) -> Limits {
        self.channel().unwrap().limits().clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(self.scheduler.wrap_channel(self.below.channel()?))
    }
}
