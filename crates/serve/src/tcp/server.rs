//! NVMe/TCP server: accepts connections and assigns them to reactors. A connection at a port with TLS
//! gets there by way of a thread that runs its handshake.

#[cfg(feature = "tls")]
mod tls_handshakes;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tenmil_base::{Error, Stream};

use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket::{
    self, ListenAddress, SocketOptions, SocketStreamFactory, StreamListener,
};
use tenmil_reactor::{PollerBuilder, ReactorId, Registry, ThreadBuilder};

use super::dh_threads::dh_threads;
use super::event::TargetEvent;
use super::security::PortSecurity;
use super::service::Service;
use crate::acceptor::{AcceptHandler, Acceptor};

/// Configuration of a server.
pub struct ServerConfig {
    /// Listeners, each with its port number of the service.
    pub listen_sockets: Vec<(StreamListener, u16)>,
    /// Service to run.
    pub service: Service,
    /// Region table for the memory of the service.
    pub regions: RegionTable,
    /// Socket options.
    pub sockets: SocketOptions,
    /// Placement of connections on reactors.
    pub placement: PlacementPolicy,
    /// Reactors that run the connections.
    pub reactors: Arc<Registry>,
    /// Clock of the reactors, for deadlines.
    pub clock: Clock,
}

/// Placement of a connection on a reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementPolicy {
    /// The reactor on the processor that receives the socket's packets; round-robin if there is
    /// none.
    #[default]
    Near,
    /// One reactor for all connections of a receive queue (NAPI id), assigned round-robin; without
    /// a receive queue, as on loopback, like [`Near`](Self::Near).
    Queue,
    /// Round-robin.
    Spread,
}

/// Running server. Dropping it stops accepting; connections continue until their hosts disconnect
/// or the reactors stop.
#[derive(Debug)]
pub struct Server {
    pub(super) dispatcher: Arc<ReactorSelector>,
    /// Accept threads by port number.
    acceptors: BTreeMap<u16, Acceptor>,
    #[cfg(feature = "tls")]
    handshakes: Arc<tls_handshakes::TlsHandshakes>,
}

/// State shared by the accept threads.
pub(super) struct ReactorSelector {
    config: ServerConfig,
    /// Socket factory of each reactor.
    sockets: Vec<(ReactorId, SocketStreamFactory)>,
    next: AtomicUsize,
    /// Reactor by receive queue.
    queues: Mutex<BTreeMap<u32, usize>>,
    /// Whether connections without a receive queue were reported.
    is_reported: AtomicBool,
}

/// State of an accept thread.
struct PortAcceptor {
    dispatcher: Arc<ReactorSelector>,
    /// Port number of its listener.
    port: u16,
    #[cfg(feature = "tls")]
    handshakes: Arc<tls_handshakes::TlsHandshakes>,
}

/// Mailbox capacity of a connection's light thread; it receives hardly any messages.
const MAILBOX_CAPACITY: usize = 16;

impl Server {
    /// Starts the server. Authentications of its service are computed on threads, not on reactors.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    pub fn start(mut config: ServerConfig) -> io::Result<Self> {
        let sockets = |reactor| {
            (reactor, SocketStreamFactory::new(config.regions.clone(), config.sockets.clone()))
        };
        let sockets = config.reactors.reactors().map(sockets).collect();
        let listen_sockets = std::mem::take(&mut config.listen_sockets);
        config.service.set_dh_executor(dh_threads());
        let dispatcher = Arc::new(ReactorSelector {
            config,
            sockets,
            next: AtomicUsize::new(0),
            queues: Mutex::default(),
            is_reported: AtomicBool::new(false),
        });
        let mut server = Self {
            #[cfg(feature = "tls")]
            handshakes: Arc::new(tls_handshakes::TlsHandshakes::start(&dispatcher)?),
            dispatcher,
            acceptors: BTreeMap::new(),
        };
        for (listen_socket, port) in listen_sockets {
            server.open_listener(listen_socket, port)?;
        }
        Ok(server)
    }

    /// Starts accepting on another listener as this port, replacing its previous listener.
    ///
    /// # Errors
    ///
    /// The error of the kernel, or `Unsupported` if the port has TLS and the feature `tls` is missing.
    pub fn open_listener(&mut self, listen_socket: StreamListener, port: u16) -> io::Result<()> {
        if self.dispatcher.port_security(port).accepts_tls() && !cfg!(feature = "tls") {
            return Err(io::Error::new(io::ErrorKind::Unsupported, WITHOUT_TLS));
        }
        let handler = PortAcceptor {
            dispatcher: Arc::clone(&self.dispatcher),
            port,
            #[cfg(feature = "tls")]
            handshakes: Arc::clone(&self.handshakes),
        };
        self.acceptors
            .insert(port, Acceptor::start("nvme-tcp", vec![listen_socket], None, handler)?);
        Ok(())
    }

    /// Stops accepting on a port. Its connections stay.
    pub fn close_listener(&mut self, port: u16) {
        self.acceptors.remove(&port);
    }

    /// Listen addresses in the order of port numbers, with ports chosen by the kernel filled in.
    #[must_use]
    pub fn addresses(&self) -> Vec<ListenAddress> {
        self.acceptors.values().flat_map(|acceptor| acceptor.addresses().iter().cloned()).collect()
    }
}

impl AcceptHandler for PortAcceptor {
    fn handle_accepted_socket(&mut self, socket: OwnedFd, _: usize) -> Result<(), Error> {
        let security = self.dispatcher.port_security(self.port);
        if !security.accepts_tls() {
            return self.dispatcher.open_connection(socket, self.port, |stream| stream);
        }
        #[cfg(feature = "tls")]
        return self.handshakes.add(socket, self.port, security);
        #[cfg(not(feature = "tls"))]
        Err(Error::environment(WITHOUT_TLS))
    }

    fn report_error(&self, text: String) {
        self.dispatcher.config.service.emit(TargetEvent::Notice(text));
    }
}

impl ReactorSelector {
    /// Which connections a port accepts.
    fn port_security(&self, port: u16) -> PortSecurity {
        self.config.service.port_security(port)
    }

    /// Starts a connection on a reactor, with the stream that `wrap` makes of that of the socket.
    fn open_connection(
        &self,
        socket: OwnedFd,
        port: u16,
        wrap: impl FnOnce(Box<dyn Stream>) -> Box<dyn Stream>,
    ) -> Result<(), Error> {
        let (reactor, sockets) = self.select_reactor(&socket);
        let stream = wrap(sockets.new_stream(socket).map_err(Error::environment)?);
        let is_thread_bound = stream.is_thread_bound();
        let ServerConfig { service, reactors, clock, .. } = &self.config;
        // The service reports the rejection.
        let Ok(mut connection) = service.accept_stream(stream, port, clock.now()) else {
            return Ok(());
        };
        let poller_wake = connection.create_wake_set().map_err(Error::environment)?;
        let handle = Arc::clone(connection.connection_handle());
        let name = format!("tcp-{}", connection.id());
        let registration =
            PollerBuilder::polled_each_iteration("connection", poller_wake, connection);
        let registration = match is_thread_bound {
            true => registration.pinned("its socket belongs to the io_uring of that reactor"),
            false => registration,
        };
        let config = ThreadBuilder::new(&name)
            .on_reactor(reactor)
            .mailbox_size(MAILBOX_CAPACITY)
            .add_poller(registration);
        let thread = reactors.spawn(config).map_err(Error::environment)?;
        handle.set_thread(thread);
        Ok(())
    }

    /// Selects the reactor of a connection.
    fn select_reactor(&self, socket: &OwnedFd) -> (ReactorId, SocketStreamFactory) {
        let index = match self.config.placement {
            PlacementPolicy::Spread => None,
            PlacementPolicy::Near => {
                self.reactor_near_cpu(socket::RxPlacement::of_socket(socket).cpu)
            }
            PlacementPolicy::Queue => self.reactor_of_queue(socket::RxPlacement::of_socket(socket)),
        };
        self.sockets[index.unwrap_or_else(|| self.next_round_robin_reactor())].clone()
    }

    fn next_round_robin_reactor(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.sockets.len()
    }

    fn reactor_near_cpu(&self, cpu: Option<u32>) -> Option<usize> {
        let near = self.config.reactors.reactor_on(cpu?)?;
        self.sockets.iter().position(|(id, _)| *id == near)
    }

    /// Reactor that runs the connections of the same receive queue.
    pub(super) fn reactor_of_queue(&self, placement: socket::RxPlacement) -> Option<usize> {
        let Some(queue) = placement.napi_id else {
            if !self.is_reported.swap(true, Ordering::Relaxed) {
                self.config.service.emit(TargetEvent::Error(WITHOUT_QUEUE.to_owned()));
            }
            return self.reactor_near_cpu(placement.cpu);
        };
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        Some(*queues.entry(queue).or_insert_with(|| self.next_round_robin_reactor()))
    }
}

/// Error of a program without the TLS library.
const WITHOUT_TLS: &str = "accept TLS connections: this program was built without the feature `tls`, \
     expected one that was built with `cargo build --features tls`";

/// Report about connections without the property that placement relies on.
const WITHOUT_QUEUE: &str = "a connection has no receive queue (SO_INCOMING_NAPI_ID is 0, as on \
     loopback), expected one for placement=queue: such connections go to the reactor on the processor \
     that handles their packets";

impl fmt::Debug for ReactorSelector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Dispatcher").field("config", &self.config).finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerConfig")
            .field("listen_sockets", &self.listen_sockets)
            .finish_non_exhaustive()
    }
}
