//! A device that accepts and completes few requests at a time, as the interface permits.

use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Random,
    Request, RequestFlags, Segment,
};

use tenmil_base::Error;
use tenmil_block::{DeviceType, OpenedDevice, Opener, uri::Uri};

/// Accepts between none and three requests of each batch, and often completes them late.
pub(crate) struct PartialAcceptDevice {
    inner: Arc<dyn BlockDevice>,
    random: Mutex<Random>,
}

struct PartialAcceptChannel {
    inner: Box<dyn IoChannel>,
    random: Random,
}

/// Opens `reluctant:[URI]`.
pub(super) struct PartialAcceptDeviceType;

impl PartialAcceptDevice {
    pub(crate) fn new(inner: Arc<dyn BlockDevice>, seed: u64) -> Self {
        Self { inner, random: Mutex::new(Random::new(seed)) }
    }
}

impl DeviceType for PartialAcceptDeviceType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let below = opener.open(uri.single_child()?)?;
        let medium = PartialAcceptDevice::new(below.medium.clone(), opener.seed);
        let description = format!("reluctant: over {}", below.description);
        Ok(below.with_device_stacked_on(Arc::new(medium), description))
    }
}

impl BlockDevice for PartialAcceptDevice {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let random = self.random.lock().unwrap().fork();
        Ok(Box::new(PartialAcceptChannel { inner: self.inner.channel()?, random }))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.inner.block_status(lba)
    }
}

impl IoChannel for PartialAcceptChannel {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let reports = requests.iter().any(|request| request.flags.has(RequestFlags::HOLES));
        assert!(!reports, "this device reports no holes, and was not asked whether it does");
        let most = usize::try_from(self.random.below(4)).unwrap();
        self.inner.submit(now, &requests[..requests.len().min(most)], segments)
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        if self.random.chance(1, 3) { 0 } else { self.inner.poll(now, completions) }
    }
}

impl ChannelWakeup for PartialAcceptChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }

    fn is_done_by_local_kernel(&self) -> bool {
        false
    }
}
