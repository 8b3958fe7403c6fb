//! Running server of an export.

mod nbd;
mod nvme_tcp;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::Arc;

use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::thread_pool::PoolHandle;
use tenmil_reactor::{Context, PollResult, PollerBuilder, Registry, ThreadBuilder, ThreadHandle};

use crate::blocking;
use crate::device::Device;
use crate::export::{Export, ExportKind, NbdTls};
use crate::open_devices::DeviceClaim;
use crate::runtime::RuntimeServices;
use tenmil_base::{OneshotSender, oneshot};

/// A running server, from [`Runtime::serve`](crate::Runtime::serve). Dropping it stops it: it accepts no
/// more connections, closes those it has once their requests have completed, and closes devices that
/// nothing else has open. That happens on another thread; [`stop`](Self::stop) waits for it. A server
/// whose runtime is dropped serves no more.
///
/// ```
/// use tenmil::{Access, Export, Runtime};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::new()?;
/// rt.block_on(async {
///     let dev = rt.open("ram:16m", Access::ReadWrite).await?;
///     let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
///     println!("nvme connect to {}, or open {}", server.addresses()[0], server.uris()[0]);
///     server.stop().await;
///     Ok(())
/// })
/// # }
/// ```
pub struct Server {
    addresses: Vec<String>,
    uris: Vec<String>,
    /// None after it has been stopped.
    running: Option<RunningServer>,
    pool: PoolHandle,
}

/// Parts of a server that is running.
struct RunningServer {
    protocol: Box<dyn ProtocolServer>,
    /// Light thread that handles events.
    events: ThreadHandle,
    registry: Arc<Registry>,
    clock: Clock,
}

/// Server of one protocol.
trait ProtocolServer: Send {
    /// Stops accepting, and begins to close the connections.
    fn start_closing(&mut self);

    /// Whether all connections have been closed.
    fn is_closed(&self) -> bool;

    /// Replaces the certificate and the keys of NBD over TLS.
    fn replace_nbd_tls(&self, _: &NbdTls) -> Result<(), Error> {
        Err(Error::usage("the server does not serve NBD, expected one that does"))
    }
}

/// What a protocol has started: its server, where it listens, and how it is opened as a device; and the
/// function that handles the events of connections and devices.
struct StartedServer {
    protocol: Box<dyn ProtocolServer>,
    addresses: Vec<ListenAddress>,
    uris: Vec<String>,
    handle_events: Box<dyn FnMut() + Send>,
}

/// Interval at which events are handled: resized devices, log lines.
const EVENTS_INTERVAL: Span = Span::from_ms(250);

/// Time limit of closing the connections, and the interval at which that is checked.
const CLOSE_MAX: Span = Span::from_secs(3);
const CLOSE_INTERVAL: Span = Span::from_ms(2);

impl Server {
    /// Starts a server. Blocks.
    pub(crate) fn start(services: RuntimeServices, export: Export) -> Result<Self, Error> {
        let what = export.protocol_and_address();
        let refuse = |why: Error| why.with_context(format!("serve {what}"));
        export.validate().map_err(refuse)?;
        let started = match &export.kind {
            ExportKind::NvmeTcp(subsystem) => {
                nvme_tcp::start_nvme_tcp_server(&services, &export, subsystem)
            }
            ExportKind::Nbd(exported) => nbd::start_nbd_server(&services, &export, exported),
        };
        let StartedServer { protocol, addresses, uris, mut handle_events } =
            started.map_err(refuse)?;
        let RuntimeServices { registry, pool, devices, .. } = services;
        let handle = move |_: &mut Context<'_>| {
            handle_events();
            PollResult::Idle
        };
        let poller = PollerBuilder::polled_each_period("events", EVENTS_INTERVAL, handle);
        let events = registry.spawn(ThreadBuilder::new("server-events").add_poller(poller));
        let events = events.map_err(|why| refuse(Error::environment(why.to_string())))?;
        let running = Some(RunningServer { protocol, events, registry, clock: devices.clock });
        let addresses = addresses.iter().map(ListenAddress::to_string).collect();
        Ok(Self { addresses, uris, running, pool })
    }

    /// Where it listens: an IP address with the port that was selected, or the path of a socket.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// let dev = rt.open("ram:16m", Access::ReadOnly).await?;
    /// let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
    /// assert!(server.addresses()[0].starts_with("127.0.0.1:"));
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// What clients open: over NVMe/TCP a URI for [`Runtime::open`](crate::Runtime::open) for each
    /// namespace, over NBD the URI of the export for NBD clients.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// let dev = rt.open("ram:16m", Access::ReadOnly).await?;
    /// let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
    /// let host = rt.open(&server.uris()[0], Access::ReadOnly).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn uris(&self) -> &[String] {
        &self.uris
    }

    /// Replaces the certificate and the keys of an NBD server with TLS, for clients that connect from now
    /// on. Connected clients stay, and so does whether clients must use TLS.
    ///
    /// # Errors
    ///
    /// If a part cannot be used, or the server was started without TLS. Nothing has changed then.
    ///
    /// ```no_run
    /// # fn renew(server: &tenmil::Server) -> Result<(), Box<dyn std::error::Error>> {
    /// let (chain, key) = (std::fs::read("server.pem")?, std::fs::read("server-key.pem")?);
    /// server.replace_nbd_tls(&tenmil::NbdTls::new().certificate(&chain, &key))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn replace_nbd_tls(&self, tls: &NbdTls) -> Result<(), Error> {
        let protocol = self.running.as_ref().map(|running| &running.protocol);
        let replaced = protocol.map_or(Ok(()), |protocol| protocol.replace_nbd_tls(tls));
        replaced.map_err(|why| why.with_context("replace TLS"))
    }

    /// Stops the server. The future completes when its address is free, its connections are closed and
    /// its devices released. Begins at once; the future need not be awaited.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// let dev = rt.open("ram:16m", Access::ReadOnly).await?;
    /// let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
    /// server.stop().await;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn stop(mut self) -> impl Future<Output = ()> + Send + use<> {
        let (stopped, later) = oneshot();
        self.begin_stop(Some(stopped));
        async move {
            later.await;
        }
    }

    fn begin_stop(&mut self, stopped: Option<OneshotSender<()>>) {
        let Some(mut running) = self.running.take() else { return };
        let stop = move || {
            running.stop_and_wait();
            drop(running);
            drop(stopped);
        };
        // If no thread can be started at all, it is stopped here.
        drop(self.pool.submit_reliable(blocking::blocking_task("stop", stop)));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.begin_stop(None);
    }
}

impl RunningServer {
    /// Stops the server. Blocks.
    fn stop_and_wait(&mut self) {
        self.protocol.start_closing();
        // Refused if the runtime has been dropped, which has ended the thread.
        let _ = self.registry.end_thread(self.events.id());
        let until = self.clock.now().after(CLOSE_MAX);
        while !(self.protocol.is_closed() && self.events.has_ended()) && self.clock.now() < until {
            tenmil_linux::named_thread::sleep(CLOSE_INTERVAL);
        }
    }
}

/// Claim of a device that is to be exported.
fn claim_of_device(services: &RuntimeServices, device: &Device) -> Result<Arc<DeviceClaim>, Error> {
    let name = device.name();
    let Some(claim) = device.device_claim() else {
        let text = format!("{name} is closed, expected an open device");
        return Err(Error::usage(text).with_hint("Open it again, with a runtime that is running."));
    };
    if !claim.regions.is_same_table(&services.devices.regions) {
        let text = format!("{name} was opened by another runtime, expected the one that serves it");
        return Err(Error::usage(text).with_hint("Open it with the runtime that serves it."));
    }
    Ok(claim)
}

/// Opens the listener of a server.
fn open_listener(address: &ListenAddress) -> Result<StreamListener, Error> {
    StreamListener::open(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Error::usage("the address is in use, expected a free one")
            .with_hint("Port 0 selects a free port."),
        io::ErrorKind::AlreadyExists => {
            Error::usage("a file that is no socket is there, expected none")
        }
        io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => Error::usage(error.to_string()),
        _ => Error::environment(error.to_string()),
    })
}

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("uris", &self.uris).finish_non_exhaustive()
    }
}
