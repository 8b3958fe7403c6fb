//! vfio-user server.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use tenmil_base::Error;

use tenmil_base::BlockDevice;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_nvme_controller::controller::Subsystem;
use tenmil_reactor::{PollerBuilder, Registry, ThreadBuilder, ThreadHandle};

use super::client_memory::DmaMappings;
use super::endpoint::Endpoint;
use super::irq_eventfds::IrqEventFds;
use super::nvme_pci_function::{ControllerOptions, NvmePciFunction};
use super::poller::EndpointPoller;
use crate::endpoint_event::EndpointEvent;

/// Configuration of a server.
pub struct ServerConfig {
    /// Listener on a Unix socket.
    pub listen_socket: StreamListener,
    /// Block devices of the namespaces, in order from NSID 1.
    pub media: Vec<Arc<dyn BlockDevice>>,
    /// Properties of the controller.
    pub options: ControllerOptions,
    /// Region table for client memory; one region per mapping.
    pub regions: RegionTable,
    /// Reactors that run the device.
    pub reactors: Arc<Registry>,
    /// Clock of the reactors, for deadlines.
    pub clock: Clock,
}

/// Running device. It runs until the reactors stop.
pub struct Server {
    address: ListenAddress,
    notified: Receiver<EndpointEvent>,
    subsystem: Subsystem,
    thread: ThreadHandle,
}

/// Mailbox capacity of the device's light thread; it receives hardly any messages.
const MAILBOX: usize = 16;
/// Capacity of the event channel.
const EVENTS_MAX: usize = 64;

impl Server {
    /// Starts the server.
    ///
    /// # Errors
    ///
    /// If the controller cannot be created with these options, or the error of the kernel.
    pub fn start(config: ServerConfig) -> Result<Self, Error> {
        let ServerConfig { listen_socket, media, options, regions, reactors, clock } = config;
        let (tell, notified) = sync_channel(EVENTS_MAX);
        let address = listen_socket.address().clone();
        let mappings = DmaMappings::new(regions.clone());
        let irqs = IrqEventFds::new(options.queues.saturating_add(1));
        let device =
            NvmePciFunction::new(media, &options, &mappings, irqs.clone(), &regions, clock.now())?;
        let subsystem = device.subsystem.clone();
        let endpoint = Endpoint::new(device, mappings, irqs, regions, tell);
        let host = EndpointPoller::new(listen_socket, endpoint).map_err(Error::environment)?;
        let poller_wake = host.poller_wake().map_err(Error::environment)?;
        let registration = PollerBuilder::polled_each_iteration("device", poller_wake, host);
        let builder =
            ThreadBuilder::new("vfio-user").mailbox_size(MAILBOX).add_poller(registration);
        let thread = reactors.spawn(builder).map_err(Error::environment)?;
        Ok(Self { address, notified, subsystem, thread })
    }

    /// Listen address.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Reports a grown namespace to the controller, which notifies its client.
    pub fn report_namespace_resize(&self, nsid: u32) {
        self.subsystem.reread_namespace_size(nsid);
        // The reactor may be asleep; it notices the change when it polls.
        self.thread.notify_reactor();
    }

    /// Next event, if any.
    pub fn next_event(&self) -> Option<EndpointEvent> {
        self.notified.try_recv().ok()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerConfig")
            .field("listen_socket", &self.listen_socket)
            .finish_non_exhaustive()
    }
}
