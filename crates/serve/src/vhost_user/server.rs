//! vhost-user server.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use tenmil_base::BlockDevice;
use tenmil_base::Error;
use tenmil_block::{AdaptationOptions, AdaptedDevice, Bdev, BdevDescriptor, BounceBufferAllocator};
use tenmil_dma::RegionTable;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_reactor::{PollerBuilder, Registry, ThreadBuilder};
use tenmil_vhost_user::virtio_blk::ID_BYTES;

use super::disk::VirtioDisk;
use super::endpoint::Endpoint;
use super::poller::EndpointPoller;
use super::queue_mailbox::EndpointEvents;
use super::vhost_block_device::VhostBlockDevice;
use crate::endpoint_event::EndpointEvent;

/// Configuration of a server.
pub struct ServerConfig {
    /// Listener on a Unix socket.
    pub listen_socket: StreamListener,
    /// Block device to export.
    pub medium: Arc<dyn BlockDevice>,
    /// Whether the disk is read-only.
    pub is_read_only: bool,
    /// Device id string that the guest sees: see [`device_id_of_uri`].
    pub id: [u8; ID_BYTES],
    /// Region table for front-end memory; one region per memory region of the front end.
    pub regions: RegionTable,
    /// Reactors that run the disk.
    pub reactors: Arc<Registry>,
}

/// Running disk. It runs until the reactors stop.
#[derive(Debug)]
pub struct Server {
    address: ListenAddress,
    queues: u16,
    reported: Receiver<EndpointEvent>,
    events: Arc<EndpointEvents>,
}

/// Largest number of queues: QEMU creates one per processor and requires that many.
const QUEUES_MAX: u32 = 64;
/// Mailbox capacity of the endpoint's light thread; it receives no messages.
const MAILBOX: usize = 16;
/// Capacity of the event channel.
const EVENTS_MAX: usize = 64;
/// Size of a bounce buffer, in bytes, and the number of them.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

/// Wraps a device so that it accepts requests of any length, as guests issue them, by splitting and
/// emulating what it cannot do at once.
///
/// # Errors
///
/// If memory is exhausted.
pub fn adapt_device(
    device: &Bdev,
    descriptor: impl Into<Arc<BdevDescriptor>>,
    regions: &RegionTable,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let memory = BounceBufferAllocator::new(regions, BUFFER_BYTES, BUFFERS)?;
    Ok(Arc::new(AdaptedDevice::new(device, descriptor, memory, AdaptationOptions::default())?))
}

/// Device id string for a URI: the same for every server of that URI.
pub fn device_id_of_uri(uri: &str) -> [u8; ID_BYTES] {
    let number = crate::ublk::uri_hash(uri) >> 8;
    let mut id = [0; ID_BYTES];
    id.copy_from_slice(format!("tenmil{number:014x}").as_bytes());
    id
}

impl Server {
    /// Starts the server.
    ///
    /// # Errors
    ///
    /// If the device cannot be exported as such a disk, or the error of the kernel.
    pub fn start(config: ServerConfig) -> Result<Self, Error> {
        let ServerConfig { listen_socket, medium, is_read_only, id, regions, reactors } = config;
        let (reported, new_events) = sync_channel(EVENTS_MAX);
        let address = listen_socket.address().clone();
        let disk = VirtioDisk::new(medium.limits(), is_read_only, id)?;
        let queues = u16::try_from(medium.channels_max().clamp(1, QUEUES_MAX)).unwrap_or(1);
        let events = Arc::<EndpointEvents>::default();
        let device = VhostBlockDevice {
            disk,
            medium,
            queues,
            regions,
            reactors: Arc::clone(&reactors),
            events: Arc::clone(&events),
        };
        let endpoint = Endpoint::new(device, reported);
        let poller = EndpointPoller::new(listen_socket, endpoint).map_err(Error::environment)?;
        let poller_wake = poller.poller_wake().map_err(Error::environment)?;
        let registration = PollerBuilder::polled_each_iteration("disk", poller_wake, poller);
        let builder =
            ThreadBuilder::new("vhost-user").mailbox_size(MAILBOX).add_poller(registration);
        // Set before the first poll, which may start virtqueues.
        let mailbox = Arc::clone(&events);
        let builder = builder.run_first(move |context| {
            let thread = context.thread_handle();
            mailbox.set_waker(Arc::new(move || thread.notify_reactor()));
        });
        reactors.spawn(builder).map_err(Error::environment)?;
        Ok(Self { address, queues, reported: new_events, events })
    }

    /// Listen address.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Largest number of queues of a front end.
    pub fn queues_max(&self) -> u16 {
        self.queues
    }

    /// Reports a new size of the device: virtqueues use it, and the front end is notified if it
    /// supports that.
    pub fn notify_resize(&self) {
        self.events.send(|is_resized| *is_resized = true);
    }

    /// Next event, if any.
    pub fn next_event(&self) -> Option<EndpointEvent> {
        self.reported.try_recv().ok()
    }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerConfig")
            .field("listen_socket", &self.listen_socket)
            .finish_non_exhaustive()
    }
}
