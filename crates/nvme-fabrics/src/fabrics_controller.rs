//! A remote controller: connecting, and managing it.

use core::fmt;
use std::sync::Arc;

use tenmil_base::{Error, ErrorCategory, Instant, SecureChannel, SharedWaker, Span, WakeSource};
use tenmil_dma::DevicePool;
use tenmil_nvme_host::{
    Controller, ControllerError, ControllerOptions, ControllerState, Event, QueueSizes,
};
use tenmil_wire::admin::CrossControllerReset;

use crate::cache_tracker::{CacheScope, CacheTracker};
use crate::connector::Connector;
use crate::fabrics_queue_pair::FabricsQueuePair;
use crate::host_transport::{ConnectionQueues, ConnectionStats, HostTransport};
use crate::options::{InvalidNqn, Options};
use crate::remote_dma::RemoteDma;

/// The driver of a remote controller.
pub type RemoteController = Controller<HostTransport, RemoteDma, ConnectionQueues>;

/// A connected remote controller, managed by one thread.
pub struct FabricsController {
    controller: RemoteController,
    dma: RemoteDma,
    /// Command timeout.
    io_timeout: Span,
    /// The namespace that queues are used for; the first one that was requested.
    namespace: Option<u32>,
}

/// A controller that is being connected.
pub struct ConnectingController {
    transport: Option<HostTransport>,
    dma: RemoteDma,
    controller_options: ControllerOptions,
    peer: String,
}

/// Why a controller could not be connected.
#[derive(Clone, Debug, PartialEq)]
pub enum ConnectError {
    /// An NQN is invalid.
    Name(InvalidNqn),
    /// Memory for its queues is exhausted.
    Memory,
    /// The peer does not respond, or rejects the connection.
    Peer {
        /// Name of the peer.
        peer: String,
        /// Cause, and how to fix it if that is known.
        error: Error,
    },
    /// It responds with invalid data.
    Controller {
        /// Name of the peer.
        peer: String,
        /// The error.
        error: ControllerError,
    },
}

impl ConnectingController {
    /// Starts to connect. Memory for commands is allocated in `pool`; data may be in any memory mapped
    /// there. Options in `controller_options` that are unsuitable for a network are replaced.
    ///
    /// # Errors
    ///
    /// If an NQN is invalid, or memory is exhausted.
    pub fn begin(
        pool: DevicePool,
        connector: Box<dyn Connector>,
        options: Options,
        controller_options: ControllerOptions,
        now: Instant,
    ) -> Result<Self, ConnectError> {
        let caches = CacheTracker::new(CacheScope::Separate, options.injected_bugs);
        Self::begin_on_path(pool, connector, options, controller_options, (caches, 0), now)
    }

    /// Like [`begin`](Self::begin), for one path of a multipath device.
    pub(crate) fn begin_on_path(
        pool: DevicePool,
        connector: Box<dyn Connector>,
        options: Options,
        controller_options: ControllerOptions,
        caches_and_path: (Arc<CacheTracker>, usize),
        now: Instant,
    ) -> Result<Self, ConnectError> {
        options.check_nqns().map_err(ConnectError::Name)?;
        let controller_options = fabrics_controller_options(controller_options, &options);
        let (dma, peer) = (RemoteDma::new(pool), connector.peer());
        let transport = HostTransport::new(connector, options, dma.clone(), caches_and_path, now)
            .ok_or(ConnectError::Memory)?;
        Ok(Self { transport: Some(transport), dma, controller_options, peer })
    }

    /// Advances the connect. `None` while it is in progress; not to be called after a result.
    pub fn poll(&mut self, now: Instant) -> Option<Result<FabricsController, ConnectError>> {
        let transport = self.transport.as_mut()?;
        transport.poll(now);
        if transport.has_given_up() {
            let error = transport.last_error().cloned();
            let error = error.unwrap_or_else(|| Error::remote("the controller did not respond"));
            return Some(Err(ConnectError::Peer { peer: self.peer.clone(), error }));
        }
        if !transport.is_connected() {
            return None;
        }
        let (transport, dma) = (self.transport.take()?, self.dma.clone());
        let controller =
            RemoteController::with_queue_transports(transport, dma, self.controller_options);
        let dma = self.dma.clone();
        let (peer, io_timeout) = (self.peer.clone(), self.controller_options.io_timeout);
        Some(match controller {
            Ok(controller) => {
                Ok(FabricsController { controller, dma, io_timeout, namespace: None })
            }
            Err(error) => Err(ConnectError::Controller { peer, error }),
        })
    }

    /// Latest time of the next call of `poll`.
    #[must_use]
    pub fn wake_at(&self, now: Instant) -> Instant {
        self.transport.as_ref().map_or(Instant::NEVER, |transport| transport.wake_at(now))
    }

    /// Wake source of the waiting thread, once there is a stream.
    #[must_use]
    pub fn wake_source(&self) -> WakeSource<'_> {
        self.transport.as_ref().map_or(WakeSource::None, HostTransport::wake_source)
    }
}

impl FabricsController {
    /// Performs a bounded amount of work and returns the next event of the controller.
    pub fn poll(&mut self, now: Instant) -> Option<Event> {
        let transport = self.controller.mmio();
        transport.poll(now);
        if transport.take_state_change() {
            self.controller.request_csts_poll();
        }
        let event = self.controller.poll(now);
        if let Some(Event::Ready | Event::Recovered) = event {
            self.apply_identity();
        }
        // Sends at once the admin commands that the poll has submitted.
        self.controller.mmio().poll(now);
        event
    }

    fn apply_identity(&mut self) {
        let page = self.controller.identity().map(|identity| identity.page.clone());
        self.set_cache_instance();
        let transport = self.controller.mmio();
        if let Some(page) = page {
            transport.set_identified_controller(&page);
        }
        transport.note_recovered();
    }

    /// Reports the cache instance of its namespace, if a queue may have written.
    fn set_cache_instance(&mut self) {
        let Some(nsid) = self.namespace else { return };
        let instance = self.controller.namespace(nsid).and_then(|known| known.cache_instance);
        self.controller.mmio().set_cache_instance(instance);
    }

    /// Latest time of the next poll.
    pub fn wake_at(&mut self, now: Instant) -> Instant {
        let controller = self.controller.wake_at();
        controller.min(self.controller.mmio().wake_at(now))
    }

    /// Wake source of the managing thread. It changes with each reset.
    pub fn wake_source(&mut self) -> WakeSource<'_> {
        self.controller.mmio().wake_source()
    }

    /// Prepares for a sleep of its thread: data on the admin connection signals the wake source. Returns
    /// true if there is work already: then the thread must not sleep.
    pub fn arm(&mut self) -> bool {
        self.controller.mmio().arm()
    }

    /// Ends the preparation for a sleep.
    pub fn disarm(&mut self) {
        self.controller.mmio().disarm();
    }

    /// Sets the waker for events of queues, which may be raised by any thread.
    pub fn set_waker(&mut self, waker: SharedWaker) {
        self.controller.mmio().set_waker(waker);
    }

    /// The controller, for queue pairs, admin commands and shutdown.
    pub fn controller(&mut self) -> &mut RemoteController {
        &mut self.controller
    }

    /// Takes queue pair `id` with its connection, after its creation, for namespace `nsid`. Once for each
    /// queue pair. `None` if there is no such queue pair or namespace, or memory is exhausted.
    pub fn take_queue_pair(
        &mut self,
        id: u16,
        nsid: u32,
        sizes: QueueSizes,
    ) -> Option<FabricsQueuePair> {
        let limits = self.controller.identity()?.limits;
        let view = self.controller.namespace(nsid)?.view(&limits);
        let pair = self.controller.take_queue_pair(id)?;
        // Only one namespace can be covered by a cache instance.
        match self.namespace {
            Some(first) if first != nsid => self.controller.mmio().set_cache_instance(None),
            _ => self.namespace = Some(nsid),
        }
        self.controller.require_same_namespace(nsid);
        self.set_cache_instance();
        let is_direct = self.controller.mmio().options().direct;
        let queue_pair = FabricsQueuePair::new(pair, view, sizes, self.io_timeout)?;
        Some(queue_pair.set_send_on_flush(is_direct))
    }

    /// The memory that the controller may access.
    #[must_use]
    pub fn dma(&self) -> &RemoteDma {
        &self.dma
    }

    /// The old controller that another one would have to reset, so that none of its commands can take
    /// effect any more. `None` if there is none, or it has no instance number.
    pub(crate) fn controller_to_fence(&mut self, now: Instant) -> Option<CrossControllerReset> {
        self.controller.mmio().fencing_target(now)
    }

    /// Confirms that the old controller was reset. Returns false if it is a different one by now.
    pub(crate) fn confirm_fenced(&mut self, old_controller: CrossControllerReset) -> bool {
        self.controller.mmio().confirm_fenced(old_controller)
    }

    /// The cause of the last loss, if any.
    pub fn last_error(&mut self) -> Option<Error> {
        self.controller.mmio().last_error().cloned()
    }

    /// Since when the connection has been lost.
    pub fn lost_since(&mut self) -> Option<Instant> {
        self.controller.mmio().lost_since()
    }

    /// Name of the peer.
    pub fn peer(&mut self) -> String {
        self.controller.mmio().peer()
    }

    /// Secure channel of its admin connection; `None` for plaintext, or without a connection.
    pub fn secure_channel(&mut self) -> Option<SecureChannel> {
        self.controller.mmio().secure_channel().cloned()
    }

    /// Whether this host was authenticated over its admin connection.
    pub fn is_authenticated(&mut self) -> bool {
        self.controller.mmio().is_authenticated()
    }

    /// The controller identifier (CNTLID).
    pub fn cntlid(&mut self) -> u16 {
        self.controller.mmio().cntlid()
    }

    /// Connection statistics.
    pub fn connection_stats(&mut self) -> ConnectionStats {
        self.controller.mmio().stats()
    }

    /// The world-wide name of a namespace, if it exists and has one.
    pub fn namespace_name(&mut self, nsid: u32) -> Option<String> {
        let identity = self.controller.identity()?;
        self.controller.namespace(nsid)?.world_wide_name(identity)
    }

    /// The options of the connection.
    pub fn options(&mut self) -> Options {
        self.controller.mmio().options().clone()
    }

    /// Whether it is usable, or may become usable again.
    pub fn is_usable(&self) -> bool {
        !matches!(
            self.controller.state(),
            ControllerState::Dead | ControllerState::Removed | ControllerState::ShutDown
        )
    }
}

impl Drop for FabricsController {
    /// Closes its connections. Requests in flight on queues stay with the queues until those are dropped.
    fn drop(&mut self) {
        self.controller.freeze();
        self.controller.mmio().close();
    }
}

/// Controller options suitable for a fabrics controller.
fn fabrics_controller_options(
    controller_options: ControllerOptions,
    options: &Options,
) -> ControllerOptions {
    let policy = &options.policy;
    ControllerOptions {
        admin_depth: crate::host_transport::ADMIN_DEPTH,
        keep_alive: Some(policy.detect),
        keep_alive_is_set: true,
        // The transport reports changes of CSTS itself.
        status_interval: Span::from_secs(3600),
        // Reconnects are limited by time, not by number.
        resets_max: u32::MAX,
        cut_off_timeout: Span { ns: 4 * policy.detect.ns + policy.give_up.ns },
        shadow_doorbells: false,
        // Completions wake the waiting thread.
        interrupts: true,
        owner_counts_losses: true,
        is_discovery: options.is_discovery(),
        ..controller_options
    }
}

impl ConnectError {
    /// The category of the error.
    #[must_use]
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::Name(_) => ErrorCategory::Usage,
            Self::Memory => ErrorCategory::Environment,
            Self::Peer { .. } | Self::Controller { .. } => ErrorCategory::Remote,
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(out),
            Self::Memory => {
                out.write_str("connect to a controller: no memory is left for its queues")
            }
            Self::Peer { peer, error } => write!(out, "connect to {peer}: {error}"),
            Self::Controller { peer, error } => write!(out, "connect to {peer}: {error}"),
        }
    }
}

impl core::error::Error for ConnectError {}

impl From<ConnectError> for Error {
    fn from(failed: ConnectError) -> Self {
        let error = Self::new(failed.category(), &failed);
        match failed {
            ConnectError::Peer { error: Self { hint: Some(hint), .. }, .. } => {
                error.with_hint(hint)
            }
            _ => error,
        }
    }
}
