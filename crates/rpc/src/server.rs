//! Control server: a thread that serves the API over HTTP/1.1 and sleeps while idle.
//!
//! ```text
//!   Unix socket ─┐                                   ┌─ Api::answer ── method of the table
//!   Unix socket ─┼─ ControlListener ── connection ───┼─ deferred reply ◄── other thread, eventfd
//!   TCP port  ───┘   limits     [TLS]  hyper, bounds └─ event stream ◄── EventReceiver, eventfd
//! ```
//!
//! It shares no lock and no memory with the data path except through the parts of the
//! [`ProcessParts`]. Every connection is a task of one thread, so a client that sends more than others
//! delays only itself; a method must not block. All memory of a connection is bounded: head and body of
//! a request, and unsent events. A client that is too slow in either direction is disconnected.

mod admission;
mod connection;
mod control_stream;
mod event_stream;
mod listener;
mod reply_body;
mod request_checks;

use core::fmt;
use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use tenmil_base::Interrupts;
use tenmil_linux::clock::utc_now;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::{Clock, EventFdVectors, NamedThread, StopFlag};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::{JoinSet, LocalSet};

use crate::api::Api;
use crate::event::{ENDING, Event, EventReceiver};
use crate::method::MethodRegistry;
use crate::process_parts::ProcessParts;
use crate::readiness::Readiness;
use admission::Connections;
use listener::accept_connections;

pub use listener::ControlListeners;
pub use request_checks::ControlToken;

/// Running control server. Dropping it notifies subscribed clients, closes all connections, removes
/// the sockets and joins the thread.
#[derive(Debug)]
pub struct RpcServer {
    paths: Vec<PathBuf>,
    addresses: Vec<(SocketAddr, bool)>,
    readiness: Readiness,
    wake: EventFdVectors,
    thread: Option<NamedThread<()>>,
}

/// Error of starting a server.
#[derive(Debug)]
pub struct ServerError {
    /// What the server was to listen at.
    pub(crate) address: String,
    pub(crate) error: io::Error,
}

/// State that all tasks of the server share.
pub(crate) struct ServerState {
    api: Api,
    token: Option<ControlToken>,
    connections: Connections,
    clock: Clock,
    /// Number of bytes of all bodies that are being received.
    body_bytes: Cell<usize>,
    /// Notified when deferred replies may be available.
    replies: Notify,
    #[cfg(feature = "otlp")]
    exporter: Option<crate::otlp::Exporter>,
    tasks: RefCell<JoinSet<()>>,
}

/// Number of events sent before other tasks run.
const EVENTS_MAX: usize = 64;
/// Time limit for sending what remains when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);

impl RpcServer {
    /// Serves `table` and `state` as process `pid` in `directory`, and forwards events.
    pub fn start(
        directory: &RuntimeDirectory,
        pid: u32,
        table: &'static MethodRegistry,
        state: ProcessParts,
        announcements: EventReceiver,
    ) -> Result<Self, ServerError> {
        let mut listeners = ControlListeners::new();
        listeners.add_process_socket(directory, pid, None)?;
        Self::start_at(listeners, table, state, announcements)
    }

    /// Serves `table` and `state` at these listeners, and forwards events.
    pub fn start_at(
        listeners: ControlListeners,
        table: &'static MethodRegistry,
        state: ProcessParts,
        announcements: EventReceiver,
    ) -> Result<Self, ServerError> {
        let refused = |error| ServerError { address: "the control thread".to_owned(), error };
        let (paths, addresses) = (listeners.paths(), listeners.addresses());
        let wake = announcements.wake.clone();
        let readiness = Readiness::new();
        let api = Api::new(table, state.with_part(readiness.clone()));
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().enable_time().build().map_err(refused)?;
        let thread = NamedThread::spawn("control", None, move |stop| {
            let serve = run_server(api, listeners, announcements, stop);
            // Without epoll the thread ends, and clients see closed connections.
            let _ = runtime.block_on(LocalSet::new().run_until(serve));
        });
        let thread = Some(thread.map_err(refused)?);
        Ok(Self { paths, addresses, readiness, wake, thread })
    }

    /// Path of the first socket.
    pub fn socket_path(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// TCP addresses, with the ports that were selected, and whether each has TLS.
    pub fn tcp_addresses(&self) -> &[(SocketAddr, bool)] {
        &self.addresses
    }

    /// Readiness of the process, as `/readyz` reports it. It is starting until it is set.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().set();
        self.wake.raise(0);
        // Dropping the thread joins it.
        drop(thread);
    }
}

impl ServerError {
    /// Kind of the error.
    pub fn kind(&self) -> io::ErrorKind {
        self.error.kind()
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.address;
        match self.error.kind() {
            io::ErrorKind::AddrInUse => {
                write!(out, "listen at {address}: in use by another process, expected a free one")
            }
            io::ErrorKind::AlreadyExists => {
                write!(out, "listen at {address}: found a file that is no socket, expected none")
            }
            _ => write!(out, "listen at {address}: {}", self.error),
        }
    }
}

impl core::error::Error for ServerError {}

/// Serves until `stop` is set.
async fn run_server(
    api: Api,
    listeners: ControlListeners,
    announcements: EventReceiver,
    stop: &StopFlag,
) -> io::Result<()> {
    let (listeners, token) = listeners.into_parts();
    let state = Rc::new(ServerState {
        #[cfg(feature = "otlp")]
        exporter: crate::otlp::Exporter::of_parts(api.parts()),
        api,
        token,
        connections: Connections::default(),
        clock: crate::event::event_clock(),
        body_bytes: Cell::new(0),
        replies: Notify::new(),
        tasks: RefCell::new(JoinSet::new()),
    });
    let mut accepting = JoinSet::new();
    for listener in listeners {
        accepting.spawn_local(accept_connections(Rc::clone(&state), listener));
    }
    #[cfg(feature = "otlp")]
    accepting.spawn_local(run_exporter(Rc::clone(&state)));
    let forwarded = forward_events(&state, &announcements, stop).await;
    // The sockets are removed with the listeners.
    accepting.shutdown().await;
    let text = "the process stops serving".to_owned();
    state.broadcast(&Event { kind: ENDING, text, about: json!({}) });
    state.connections.finish_all();
    #[cfg(feature = "otlp")]
    if let Some(exporter) = &state.exporter {
        crate::otlp::flush_at_end(exporter, STOP_TIMEOUT).await;
    }
    let mut tasks = state.tasks.take();
    let finish = async { while tasks.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STOP_TIMEOUT, finish).await;
    forwarded
}

/// Sends metrics and spans to the collector, if there is one.
#[cfg(feature = "otlp")]
async fn run_exporter(state: Rc<ServerState>) {
    if let Some(exporter) = &state.exporter {
        crate::otlp::run_exporter(exporter).await;
    }
}

/// Forwards events, and tells the waiting tasks that deferred replies may be available, whenever the
/// eventfd is signaled.
async fn forward_events(
    state: &ServerState,
    announcements: &EventReceiver,
    stop: &StopFlag,
) -> io::Result<()> {
    let wake = watch_descriptor(WakeFd(announcements.wake.clone()), Interest::READABLE)?;
    loop {
        // Checked first, so that what was emitted before the stop is sent.
        let is_stopped = stop.is_stopped();
        state.replies.notify_waiters();
        let mut sent = 0;
        while let Some(event) = announcements.next() {
            state.broadcast(&event);
            sent += 1;
            if sent % EVENTS_MAX == 0 {
                tokio::task::yield_now().await;
            }
        }
        if is_stopped {
            return Ok(());
        }
        wake.readable().await?.clear_ready();
        // Signals are masked: unmasking first ensures that a later event signals again, and
        // everything emitted before is handled before the next wait.
        announcements.wake.unmask(0);
    }
}

impl ServerState {
    /// Sends an event to subscribed clients, and its spans to the collector.
    fn broadcast(&self, event: &Event) {
        #[cfg(feature = "otlp")]
        if let Some(exporter) = &self.exporter {
            exporter.record(event);
        }
        if !self.connections.has_subscribers() {
            return;
        }
        let text = event.to_stream_text(self.clock.now(), utc_now());
        self.connections.send_event(event.kind.name, &text.into());
    }
}

/// Registers an open descriptor with the runtime.
#[expect(deprecated, reason = "what replaces it is unsafe; all of `T` own their descriptor")]
fn watch_descriptor<T: AsRawFd>(descriptor: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(descriptor, interest)
}

/// Eventfd of an event queue.
struct WakeFd(EventFdVectors);

impl AsRawFd for WakeFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.descriptor(0).map_or(-1, |descriptor| descriptor.as_raw_fd())
    }
}

#[cfg(test)]
mod tests;
