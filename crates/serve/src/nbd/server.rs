//! NBD server: accepts connections and starts a session for each. With TLS, a thread runs the handshake
//! before that.

#[cfg(feature = "tls")]
mod tls_handshakes;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Error, Segment, Span};
use tenmil_block::BdevEvent;
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::{ListenAddress, SocketStream, StreamListener};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_reactor::{PollerBuilder, Registry, ThreadBuilder};

use super::buffer_pool::{BufferPool as Memory, POOL_BYTES};
use super::connection::NegotiationStart;
use super::connection_memory::MEMORY_BYTES;
use super::export_set::{ExportSet, OfferedExports};
use super::exported_device::ExportedDevice;
use super::session::{Session, SessionParts};
use super::session_handle::{ExportEvent, NbdEvent, SessionHandle};
use super::session_stream::SessionStream;
use super::slow_query::SlowQueries;
use super::tls_config::NbdTls;
use crate::acceptor::{AcceptHandler, Acceptor};
use crate::peer_network::connection_limit_key_of_peer;

/// Configuration of a server.
pub struct ServerConfig {
    /// Listeners.
    pub listen_sockets: Vec<StreamListener>,
    /// Exports, which all of these listeners offer.
    pub exports: Vec<Arc<ExportedDevice>>,
    /// Region table for connection memory: one region per connection, and one for the shared pool.
    pub regions: RegionTable,
    /// Reactors that run the sessions.
    pub reactors: Arc<Registry>,
    /// Clock of the reactors, for deadlines.
    pub clock: Clock,
    /// Largest number of connections.
    pub connections_max: usize,
    /// Largest number of connections from one address (for IPv6: one /64). Unix sockets are not
    /// counted.
    pub per_address_max: usize,
    /// How long a client may ask for nothing. None: as long as its end of the connection is there.
    pub idle_max: Option<Span>,
    /// TLS; `None` if there is only plaintext. It needs the feature `tls`.
    pub tls: Option<NbdTls>,
}

/// Running server. Dropping it stops accepting; sessions continue until their clients disconnect or
/// the reactors stop.
pub struct Server {
    /// Accept threads by listener number.
    acceptors: BTreeMap<u16, Acceptor>,
    /// Threads that handle the events of the devices, by export name.
    watchers: BTreeMap<String, Acceptor>,
    starter: Arc<SessionStarter>,
    events: Receiver<ExportEvent>,
    #[cfg(feature = "tls")]
    handshakes: Option<Arc<tls_handshakes::TlsHandshakes>>,
    /// Certificate and keys, if it has TLS.
    #[cfg(feature = "tls")]
    credentials: Option<tls_handshakes::TlsCredentials>,
}

/// State of the accept thread of a listener.
struct AcceptState {
    starter: Arc<SessionStarter>,
    /// Number of the listener.
    listener: u16,
    /// Whether its clients must use TLS.
    #[cfg(feature = "tls")]
    requires_tls: bool,
    #[cfg(feature = "tls")]
    handshakes: Option<Arc<tls_handshakes::TlsHandshakes>>,
}

/// State of the thread that handles the events of a device.
struct DeviceWatcher {
    starter: Arc<SessionStarter>,
    device: Arc<ExportedDevice>,
}

/// What starts sessions, on the accept thread or that of TLS handshakes.
struct SessionStarter {
    config: ServerConfig,
    exports: ExportSet,
    pool: Arc<ThreadPool>,
    /// Pool for large requests of all connections.
    memory: Arc<Memory>,
    leased: Arc<ConnectionCounter>,
    event_sender: Mutex<Sender<ExportEvent>>,
}

/// Memory of a connection, freed on drop.
#[derive(Debug)]
pub(super) struct ConnectionMemoryLease {
    leased: Arc<ConnectionCounter>,
    address: Option<IpAddr>,
    /// `None` once it has been leaked.
    memory: Option<Region>,
}

/// Connection counts, in total and by address.
#[derive(Debug, Default)]
pub(super) struct ConnectionCounter(Mutex<ConnectionCounts>);

#[derive(Debug, Default)]
struct ConnectionCounts {
    all: usize,
    addresses: BTreeMap<IpAddr, usize>,
}

impl ConnectionCounter {
    fn lock_counts(&self) -> MutexGuard<'_, ConnectionCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Error of a program without the TLS library.
#[cfg(not(feature = "tls"))]
const WITHOUT_TLS: &str = "NBD over TLS: this program was built without the feature `tls`, expected one \
     that was built with `cargo build --features tls`";

/// Threads that execute slow queries: block status and resize.
const QUERY_THREADS: usize = 2;
/// Largest number of queries waiting for them.
const QUESTIONS_MAX: usize = 1024;

impl Server {
    /// Starts the server.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    pub fn start(mut config: ServerConfig) -> io::Result<Self> {
        let (event_sender, events) = channel();
        let listen_sockets = std::mem::take(&mut config.listen_sockets);
        let exports = std::mem::take(&mut config.exports);
        let pool = Arc::new(ThreadPool::new(QUERY_THREADS, QUESTIONS_MAX));
        let memory = Memory::new(&config.regions, POOL_BYTES)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let memory = Arc::new(memory);
        let tls = config.tls.take();
        let starter = SessionStarter {
            config,
            exports: ExportSet::default(),
            pool,
            memory,
            leased: Arc::default(),
            event_sender: Mutex::new(event_sender),
        };
        let starter = Arc::new(starter);
        #[cfg(not(feature = "tls"))]
        if tls.is_some() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, WITHOUT_TLS));
        }
        let required: Vec<bool> = tls.as_ref().map(|tls| tls.required.clone()).unwrap_or_default();
        #[cfg(feature = "tls")]
        let (credentials, handshakes) = match tls {
            None => (None, None),
            Some(tls) => {
                let credentials = tls_handshakes::TlsCredentials::new(&tls)
                    .map_err(|error| io::Error::other(error.to_string()))?;
                let handshakes =
                    tls_handshakes::TlsHandshakes::start(&starter, credentials.clone())?;
                (Some(credentials), Some(Arc::new(handshakes)))
            }
        };
        let mut server = Self {
            acceptors: BTreeMap::new(),
            watchers: BTreeMap::new(),
            starter,
            events,
            #[cfg(feature = "tls")]
            handshakes,
            #[cfg(feature = "tls")]
            credentials,
        };
        let listeners: Vec<u16> = (0..).take(listen_sockets.len()).collect();
        for device in exports {
            server
                .add_export(device, listeners.clone())
                .map_err(|error| io::Error::other(error.to_string()))?;
        }
        for (number, socket) in listeners.into_iter().zip(listen_sockets) {
            let requires_tls = required.get(usize::from(number)).copied().unwrap_or(false);
            server.open_listener(socket, number, requires_tls)?;
        }
        Ok(server)
    }

    /// Starts accepting on another listener. Its clients must use TLS if `requires_tls`, and may if the
    /// server has it.
    ///
    /// # Errors
    ///
    /// The error of the kernel, or `Unsupported` if TLS is required and the server has none.
    pub fn open_listener(
        &mut self,
        socket: StreamListener,
        number: u16,
        requires_tls: bool,
    ) -> io::Result<()> {
        if requires_tls && !self.has_tls() {
            let text =
                "the server has no certificate and no key, expected one: its clients must use TLS";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let handler = AcceptState {
            starter: Arc::clone(&self.starter),
            listener: number,
            #[cfg(feature = "tls")]
            requires_tls,
            #[cfg(feature = "tls")]
            handshakes: self.handshakes.clone(),
        };
        self.acceptors.insert(number, Acceptor::start("nbd", vec![socket], None, handler)?);
        Ok(())
    }

    /// Stops accepting on a listener. Its connections stay.
    pub fn close_listener(&mut self, number: u16) {
        self.acceptors.remove(&number);
    }

    /// Adds an export, which these listeners offer.
    ///
    /// # Errors
    ///
    /// If an export has that name, or the kernel has no more threads.
    pub fn add_export(
        &mut self,
        device: Arc<ExportedDevice>,
        listeners: Vec<u16>,
    ) -> Result<(), Error> {
        let name = device.export().name().to_owned();
        self.starter.exports.add(Arc::clone(&device), listeners)?;
        let watcher =
            DeviceWatcher { starter: Arc::clone(&self.starter), device: Arc::clone(&device) };
        let event_fd = device.descriptor().event_fd();
        match Acceptor::start("nbd-device", Vec::new(), event_fd, watcher) {
            Ok(watcher) => {
                self.watchers.insert(name, watcher);
                Ok(())
            }
            Err(error) => {
                self.starter.exports.remove(&name);
                Err(Error::environment(error))
            }
        }
    }

    /// Removes an export, and disconnects its clients after their outstanding requests. The device closes
    /// when the last of them has gone and the result is dropped.
    pub fn remove_export(&mut self, name: &str) -> Option<Arc<ExportedDevice>> {
        let removed = self.starter.exports.remove(name);
        self.watchers.remove(name);
        removed
    }

    /// The exports.
    #[must_use]
    pub fn exports(&self) -> &ExportSet {
        &self.starter.exports
    }

    fn has_tls(&self) -> bool {
        #[cfg(feature = "tls")]
        return self.credentials.is_some();
        #[cfg(not(feature = "tls"))]
        false
    }

    /// Replaces the certificate and the keys, for clients that connect from now on. Connected clients
    /// stay, and so does which listeners require TLS.
    ///
    /// # Errors
    ///
    /// If the certificate or a key cannot be used, or the server was started without TLS. Nothing has
    /// changed then.
    pub fn replace_tls(&self, tls: &NbdTls) -> Result<(), Error> {
        #[cfg(feature = "tls")]
        if let Some(credentials) = &self.credentials {
            return credentials.replace(tls).map_err(|error| Error::usage(error.to_string()));
        }
        let _ = tls;
        Err(Error::usage("the server was started without TLS, expected one with it"))
    }

    /// Listen addresses in the order of their numbers, with ports chosen by the kernel filled in.
    #[must_use]
    pub fn addresses(&self) -> Vec<ListenAddress> {
        self.acceptors.values().flat_map(|acceptor| acceptor.addresses().iter().cloned()).collect()
    }

    /// Next event, if any.
    pub fn next_event(&self) -> Option<NbdEvent> {
        self.next_export_event().map(|next| next.event)
    }

    /// Next event with the name of its export, if any.
    pub fn next_export_event(&self) -> Option<ExportEvent> {
        self.events.try_recv().ok()
    }
}

impl AcceptHandler for DeviceWatcher {
    /// Applies device events to the export and reports them.
    fn handle_device_event(&mut self) {
        let device = Arc::clone(&self.device);
        while let Some(event) = device.descriptor().next_event() {
            device.handle_event(&event);
            match event {
                BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => {
                    self.emit(NbdEvent::Resized { size_bytes: device.export().size_bytes() });
                }
                BdevEvent::Removed => self.emit(NbdEvent::Removed),
                BdevEvent::MediumError { lba, blocks } => {
                    let text = format!("the medium has lost {blocks} blocks from {lba} on");
                    self.emit(NbdEvent::Error(text));
                }
                BdevEvent::MediumChanged => {
                    self.emit(NbdEvent::Error("the medium has been changed".to_owned()));
                }
            }
        }
    }

    fn handle_accepted_socket(&mut self, _: OwnedFd, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn report_error(&self, text: String) {
        self.emit(NbdEvent::Error(text));
    }
}

impl DeviceWatcher {
    fn emit(&self, event: NbdEvent) {
        self.starter.emit_of_export(self.device.export().name(), event);
    }
}

impl AcceptHandler for AcceptState {
    fn handle_accepted_socket(&mut self, socket: OwnedFd, _: usize) -> Result<(), Error> {
        #[cfg(feature = "tls")]
        if let Some(handshakes) = &self.handshakes {
            return handshakes.add(socket, self.listener, self.requires_tls);
        }
        self.starter.start_plaintext(socket, self.listener, NegotiationStart::Greeting)
    }

    fn report_error(&self, text: String) {
        self.starter.emit(NbdEvent::Error(text));
    }
}

impl SessionStarter {
    /// Emits an event of all exports, or of the only one.
    fn emit(&self, event: NbdEvent) {
        let devices = self.exports.devices();
        let name = if let [only] = devices.as_slice() { only.export().name() } else { "" };
        self.emit_of_export(name, event);
    }

    fn emit_of_export(&self, export: &str, event: NbdEvent) {
        // The receiver may be gone; then the event is dropped.
        let _ = self.lock_event_sender().send(ExportEvent { export: export.to_owned(), event });
    }

    fn lock_event_sender(&self) -> MutexGuard<'_, Sender<ExportEvent>> {
        self.event_sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the session of a client without TLS.
    fn start_plaintext(
        &self,
        socket: OwnedFd,
        listener: u16,
        start: NegotiationStart,
    ) -> Result<(), Error> {
        let regions = self.config.regions.clone();
        let stream = SocketStream::new(socket, regions).map_err(Error::environment)?;
        let peer = stream.peer();
        self.start_session(stream, &peer, listener, start)
    }

    fn start_session(
        &self,
        stream: impl SessionStream,
        peer: &str,
        listener: u16,
        start: NegotiationStart,
    ) -> Result<(), Error> {
        if self.exports.is_empty_at(listener) {
            let text = format!("{peer}: the listener has no export any more, expected one");
            return Err(Error::usage(text));
        }
        let ServerConfig { regions, reactors, clock, connections_max, per_address_max, .. } =
            &self.config;
        let memory_lease = ConnectionMemoryLease::allocate(
            &self.leased,
            regions,
            peer,
            (*connections_max, *per_address_max),
        )?;
        let exports = &self.exports;
        let id = exports.allocate_connection_id();
        let event_sender = self.lock_event_sender().clone();
        let handle = Arc::new(SessionHandle::new(id, peer.to_owned(), event_sender));
        let registered = exports.add_session(Arc::clone(&handle), listener);
        if let Some(only) = &registered {
            handle.set_export(only.export().name());
        }
        let of_export = registered.clone();
        let is_registered = registered.is_some();
        let session = Session::new(SessionParts {
            stream,
            start,
            offered: OfferedExports::OfListener(exports.clone(), listener),
            exports: exports.clone(),
            registered,
            open_selected: Box::new(|device| device.block_device().channel()),
            handle: Arc::clone(&handle),
            regions: regions.clone(),
            slow_queries: SlowQueries::new(Arc::clone(&self.pool)),
            memory_lease,
            pool: Arc::clone(&self.memory),
            idle_max: self.config.idle_max,
            now: clock.now(),
        });
        let session = session.map_err(|why| {
            match &of_export {
                Some(device) => device.remove_session(id),
                None => exports.remove_session(id),
            }
            Error::environment(why)
        })?;
        let poller_wake = session.poller_wake().map_err(Error::environment)?;
        // With several exports it is reported when the client has selected one.
        if is_registered {
            handle.report_connected();
        }
        let registration = PollerBuilder::polled_each_iteration("connection", poller_wake, session);
        let config =
            ThreadBuilder::new(&format!("nbd-{id}")).mailbox_size(MAILBOX).add_poller(registration);
        let thread = reactors.spawn(config).map_err(Error::environment)?;
        exports.set_session_thread(id, &thread);
        Ok(())
    }
}

/// Mailbox capacity of a session's light thread; it receives hardly any messages.
const MAILBOX: usize = 16;

impl ConnectionMemoryLease {
    pub(super) fn allocate(
        leased: &Arc<ConnectionCounter>,
        regions: &RegionTable,
        peer: &str,
        (most, most_of_address): (usize, usize),
    ) -> Result<Self, Error> {
        let address = connection_limit_key_of_peer(peer);
        let mut counts = leased.lock_counts();
        let of_address = address.and_then(|address| counts.addresses.get(&address)).copied();
        let (all, of_address) = (counts.all, of_address.unwrap_or(0));
        if all >= most {
            return Err(Error::environment(format!(
                "{most} are connected, expected fewer (`--max-connections` allows more)"
            )));
        }
        if of_address >= most_of_address {
            return Err(Error::environment(format!(
                "connection of {peer}: {most_of_address} of its address are connected, expected fewer \
                 (`--connections-per-address` allows more)"
            )));
        }
        let memory = regions.allocate_region(MEMORY_BYTES as usize).map_err(Error::environment)?;
        counts.all += 1;
        if let Some(address) = address {
            *counts.addresses.entry(address).or_default() += 1;
        }
        drop(counts);
        Ok(Self { leased: Arc::clone(leased), address, memory: Some(memory) })
    }

    pub(super) fn memory(&self) -> Segment {
        self.memory.as_ref().map_or_else(Segment::default, Region::segment)
    }

    /// Leaks the memory: it is neither reused nor unmapped.
    pub(super) fn leak(&mut self) {
        std::mem::forget(self.memory.take());
    }
}

impl Drop for ConnectionMemoryLease {
    fn drop(&mut self) {
        let mut counts = self.leased.lock_counts();
        counts.all -= 1;
        if let Some(address) = self.address
            && let Some(count) = counts.addresses.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                counts.addresses.remove(&address);
            }
        }
    }
}

impl ServerConfig {
    /// Default limit per address: half of all connections, but at least `PER_ADDRESS_MIN`.
    #[must_use]
    pub const fn default_per_address_max(connections_max: usize) -> usize {
        if connections_max / 2 > PER_ADDRESS_MIN { connections_max / 2 } else { PER_ADDRESS_MIN }
    }
}

/// Largest number of connections that a common client opens for itself.
const PER_ADDRESS_MIN: usize = 16;

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("acceptors", &self.acceptors).finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerConfig")
            .field("listen_sockets", &self.listen_sockets)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_dma::RegionTable;

    use super::{ConnectionCounter, ConnectionMemoryLease, ServerConfig};

    #[test]
    fn one_address_cannot_use_all_connections() {
        let (leased, regions) = (Arc::<ConnectionCounter>::default(), RegionTable::new(64));
        let take = |peer: &str| ConnectionMemoryLease::allocate(&leased, &regions, peer, (6, 2));
        let one = take("127.0.0.1:1").unwrap();
        let _two = take("127.0.0.1:2").unwrap();
        let refused = take("127.0.0.1:3").unwrap_err();
        let expected = "connection of 127.0.0.1:3: 2 of its address are connected, expected fewer \
                        (`--connections-per-address` allows more)";
        assert_eq!(refused, tenmil_base::Error::environment(expected));
        // IPv6 connections are counted per /64. Unix sockets have no limit per address, only the total.
        let _others = ["[2001:db8::1]:1", "[2001:db8::2]:1"].map(|peer| take(peer).unwrap());
        assert!(take("[2001:db8::3]:1").is_err());
        let _local = ["process 7", "process 7"].map(|peer| take(peer).unwrap());
        assert!(take("process 8").unwrap_err().text.contains("6 are connected"));
        drop(one);
        assert!(take("127.0.0.1:3").is_ok());
    }

    #[test]
    fn default_limit_of_one_address_is_half_of_the_connections() {
        assert_eq!([2, 64, 1000].map(ServerConfig::default_per_address_max), [16, 32, 500]);
    }
}
