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
use super::exported_device::ExportedDevice;
use super::session::{Session, SessionParts};
use super::session_handle::{NbdEvent, SessionHandle};
use super::session_stream::SessionStream;
use super::slow_query::SlowQueries;
use super::tls_config::NbdTls;
use crate::acceptor::{AcceptHandler, Acceptor};
use crate::peer_network::connection_limit_key_of_peer;

/// Configuration of a server.
pub struct ServerConfig {
    /// Listeners.
    pub listen_sockets: Vec<StreamListener>,
    /// Exported device.
    pub exported_device: Arc<ExportedDevice>,
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
    acceptor: Acceptor,
    events: Receiver<NbdEvent>,
    /// Certificate and keys, if it has TLS.
    #[cfg(feature = "tls")]
    credentials: Option<tls_handshakes::TlsCredentials>,
}

/// State of the accept thread.
struct AcceptState {
    starter: Arc<SessionStarter>,
    #[cfg(feature = "tls")]
    handshakes: Option<tls_handshakes::TlsHandshakes>,
}

/// What starts sessions, on the accept thread or that of TLS handshakes.
struct SessionStarter {
    config: ServerConfig,
    pool: Arc<ThreadPool>,
    /// Pool for large requests of all connections.
    memory: Arc<Memory>,
    leased: Arc<ConnectionCounter>,
    event_sender: Mutex<Sender<NbdEvent>>,
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
        let exported_device = Arc::clone(&config.exported_device);
        let pool = Arc::new(ThreadPool::new(QUERY_THREADS, QUESTIONS_MAX));
        let memory = Memory::new(&config.regions, POOL_BYTES)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let memory = Arc::new(memory);
        let tls = config.tls.take();
        let starter = SessionStarter {
            config,
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
        #[cfg(feature = "tls")]
        let (credentials, handshakes) = match tls {
            None => (None, None),
            Some(tls) => {
                let credentials = tls_handshakes::TlsCredentials::new(&tls)
                    .map_err(|error| io::Error::other(error.to_string()))?;
                let handshakes = tls_handshakes::TlsHandshakes::start(
                    &starter,
                    tls.required,
                    credentials.clone(),
                )?;
                (Some(credentials), Some(handshakes))
            }
        };
        let handler = AcceptState {
            #[cfg(feature = "tls")]
            handshakes,
            starter,
        };
        let acceptor = Acceptor::start(
            "nbd",
            listen_sockets,
            exported_device.descriptor().event_fd(),
            handler,
        )?;
        Ok(Self {
            acceptor,
            events,
            #[cfg(feature = "tls")]
            credentials,
        })
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

    /// Listen addresses, with ports chosen by the kernel filled in.
    pub fn addresses(&self) -> &[ListenAddress] {
        self.acceptor.addresses()
    }

    /// Next event, if any.
    pub fn next_event(&self) -> Option<NbdEvent> {
        self.events.try_recv().ok()
    }
}

impl AcceptHandler for AcceptState {
    /// Applies device events to the export and reports them.
    fn handle_device_event(&mut self) {
        let exported_device = &self.starter.config.exported_device;
        while let Some(event) = exported_device.descriptor().next_event() {
            exported_device.handle_event(&event);
            match event {
                BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => {
                    self.emit(NbdEvent::Resized {
                        size_bytes: exported_device.export().size_bytes(),
                    });
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

    fn handle_accepted_socket(&mut self, socket: OwnedFd, listener: usize) -> Result<(), Error> {
        #[cfg(feature = "tls")]
        if let Some(handshakes) = &self.handshakes {
            return handshakes.add(socket, listener);
        }
        #[cfg(not(feature = "tls"))]
        let _ = listener;
        self.starter.start_plaintext(socket, NegotiationStart::Greeting)
    }

    fn report_error(&self, text: String) {
        self.emit(NbdEvent::Error(text));
    }
}

impl AcceptState {
    fn emit(&self, new_event: NbdEvent) {
        self.starter.emit(new_event);
    }
}

impl SessionStarter {
    fn emit(&self, new_event: NbdEvent) {
        // The receiver may be gone; then the event is dropped.
        let _ = self.lock_event_sender().send(new_event);
    }

    fn lock_event_sender(&self) -> MutexGuard<'_, Sender<NbdEvent>> {
        self.event_sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the session of a client without TLS.
    fn start_plaintext(&self, socket: OwnedFd, start: NegotiationStart) -> Result<(), Error> {
        let regions = self.config.regions.clone();
        let stream = SocketStream::new(socket, regions).map_err(Error::environment)?;
        let peer = stream.peer();
        self.start_session(stream, &peer, start)
    }

    fn start_session(
        &self,
        stream: impl SessionStream,
        peer: &str,
        start: NegotiationStart,
    ) -> Result<(), Error> {
        let ServerConfig { exported_device, regions, reactors, clock, .. } = &self.config;
        let ServerConfig { connections_max, per_address_max, .. } = &self.config;
        let medium = exported_device.block_device();
        let most = (*connections_max).min(medium.channels_max() as usize);
        let memory_lease =
            ConnectionMemoryLease::allocate(&self.leased, regions, peer, (most, *per_address_max))?;
        let id = exported_device.allocate_connection_id();
        let event_sender = self.lock_event_sender().clone();
        let handle = Arc::new(SessionHandle::new(id, peer.to_owned(), event_sender));
        let session = Session::new(SessionParts {
            stream,
            start,
            backend: medium.channel()?,
            exported_device: Arc::clone(exported_device),
            handle: Arc::clone(&handle),
            regions: regions.clone(),
            slow_queries: SlowQueries::new(Arc::clone(exported_device), Arc::clone(&self.pool)),
            memory_lease,
            pool: Arc::clone(&self.memory),
            idle_max: self.config.idle_max,
            now: clock.now(),
        });
        let session = session.map_err(Error::environment)?;
        let poller_wake = session.poller_wake().map_err(Error::environment)?;
        handle.report_connected();
        exported_device.add_session(handle);
        let registration = PollerBuilder::polled_each_iteration("connection", poller_wake, session);
        let config =
            ThreadBuilder::new(&format!("nbd-{id}")).mailbox_size(MAILBOX).add_poller(registration);
        let thread = reactors.spawn(config).map_err(Error::environment)?;
        exported_device.set_session_thread(id, thread);
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
        out.debug_struct("Server").field("acceptor", &self.acceptor).finish_non_exhaustive()
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
