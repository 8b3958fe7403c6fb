//! Namespace of a remote controller as a block device, over one or several paths.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Limits, Request,
    ReservationControl, ReservationHolder, Segment,
};
use tenmil_nvme_fabrics::FabricsChannel;

use super::paths::NamespacePaths;
use super::reservations::{ReservableNamespace, ReservationQueue};

/// Remote namespace as a block device.
pub(super) struct RemoteDevice {
    /// The channel from which the limits were read; the first user gets it. Dropped before the
    /// controllers.
    first: Mutex<Option<RemoteChannel>>,
    paths: Arc<NamespacePaths>,
    limits: Limits,
    reserved: Option<ReservableNamespace>,
}

/// I/O channel, which keeps the controllers connected.
struct RemoteChannel {
    channel: FabricsChannel,
    /// Dropped after the channel.
    paths: Arc<NamespacePaths>,
}

impl RemoteDevice {
    pub(super) fn new(paths: NamespacePaths) -> Result<Self, Error> {
        let paths = Arc::new(paths);
        let channel = paths.first_channel()?;
        let limits = channel.limits().clone();
        let reserved = paths.reservable_namespace();
        let first = RemoteChannel { channel, paths: Arc::clone(&paths) };
        Ok(Self { first: Mutex::new(Some(first)), paths, limits, reserved })
    }

    /// How its connections are secured; `None` if they are not.
    pub(super) fn security_description(&self) -> Option<String> {
        self.paths.security_description()
    }

    fn namespace_and_reservation_queue(
        &self,
    ) -> Result<(&ReservableNamespace, ReservationQueue), Error> {
        let namespace = self
            .reserved
            .as_ref()
            .ok_or("the namespace takes no reservations")
            .map_err(Error::environment)?;
        let queue = self
            .paths
            .reservation_queue()
            .map_err(|refused| refused.text)
            .map_err(Error::environment)?;
        Ok((namespace, queue))
    }
}

impl BlockDevice for RemoteDevice {
    fn limits(&self) -> Limits {
        self.paths.size_watch().limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(first) = first {
            return Ok(Box::new(first));
        }
        let channel = self.paths.open_channel(self.limits());
        let channel = channel.map_err(|refused| refused.text).map_err(Error::environment)?;
        Ok(Box::new(RemoteChannel { channel, paths: Arc::clone(&self.paths) }))
    }

    fn channels_max(&self) -> u32 {
        self.paths.queues_max()
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.paths.supports_kernel_buffers()
    }

    fn identity(&self) -> Option<String> {
        self.paths.identity()
    }

    fn failure_reason(&self) -> Option<String> {
        self.paths.failure()
    }

    fn reservations(&self) -> Option<&dyn ReservationControl> {
        self.reserved.is_some().then_some(self)
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        Ok(self.paths.size_watch().block_count(&self.limits))
    }
}

impl ReservationControl for RemoteDevice {
    fn holder(&self) -> Result<Option<ReservationHolder>, Error> {
        let (namespace, queue) = self.namespace_and_reservation_queue()?;
        namespace.holder(queue)
    }

    fn acquire(&self, key: u64, preempted: Option<u64>) -> Result<bool, Error> {
        let (namespace, queue) = self.namespace_and_reservation_queue()?;
        namespace.acquire(queue, key, preempted)
    }

    fn release_and_unregister(&self, key: u64) -> Result<(), Error> {
        let (namespace, queue) = self.namespace_and_reservation_queue()?;
        namespace.release(queue, key)
    }
}

impl IoChannel for RemoteChannel {
    fn limits(&self) -> &Limits {
        self.channel.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel.submit(now, requests, segments)
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.channel.poll(now, completions)
    }
}

impl ChannelWakeup for RemoteChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.channel)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.channel)
    }
}

impl Drop for RemoteChannel {
    /// Waits until no request can access memory any more: either the peer completes all requests,
    /// or the admin thread finds it lost.
    fn drop(&mut self) {
        while !self.channel.drain(self.paths.now()) {
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}
