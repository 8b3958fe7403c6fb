//! Exported device as seen by the listeners, the sessions and the control interface.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Error;
use tenmil_base::{BlockDevice, ErrorCategory, Instant, Limits, Operation, OperationSet};
use tenmil_block::{
    AdaptationOptions, AdaptedDevice, Bdev, BdevDescriptor, BdevEvent, BounceBufferAllocator,
    Claim, IoStats, QosLimiter, QosLimits,
};
use tenmil_dma::RegionTable;
use tenmil_reactor::ThreadHandle;

use super::export::Export;
use super::session_handle::{ConnectionSample, SessionCommand, SessionHandle};
use super::transmission::NbdStats;
use crate::slow_io::ExportSlowIo;

/// Block device behind an export. It holds one claim on the device: exclusive for writing, or
/// shared for reading. Every connection opens an I/O channel of its own.
pub struct ExportedDevice {
    export: Arc<Export>,
    uri: String,
    device: Bdev,
    limiter: QosLimiter,
    descriptor: Arc<BdevDescriptor>,
    medium: Arc<dyn BlockDevice>,
    is_adapted: bool,
    sessions: Mutex<Vec<SessionEntry>>,
    connections: AtomicU64,
    is_removed: AtomicBool,
    slow_io: ExportSlowIo,
    /// Requests of ended connections, if the statistics of the device include those of other servers.
    own_counters: Option<Mutex<NbdStats>>,
}

/// Configuration of an export.
pub struct ExportConfig<'a> {
    /// Export name; clients may also use the empty name.
    pub name: String,
    /// Description for people.
    pub description: String,
    /// URI that the device was opened with.
    pub uri: String,
    /// The device.
    pub device: &'a Bdev,
    /// Rate limits of all clients together.
    pub limits: QosLimits,
    /// Whether clients may only read.
    pub is_read_only: bool,
    /// Whether clients may resize the export.
    pub allows_resize: bool,
    /// Memory for bounce buffers, if the device needs them.
    pub regions: &'a RegionTable,
}

/// Session and the handle that wakes its light thread.
pub(super) struct SessionEntry {
    session: Arc<SessionHandle>,
    thread: Option<ThreadHandle>,
}

/// Size of a bounce buffer, in bytes, and the number of them.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

impl ExportedDevice {
    /// Opens the device for export.
    ///
    /// # Errors
    ///
    /// If another claim on the device conflicts, such a device cannot be exported, or memory is
    /// exhausted.
    pub fn new(config: ExportConfig<'_>) -> Result<Self, Error> {
        let claim = if config.is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = config
            .device
            .open(claim, "nbd")
            .map_err(|refused| Error::new(refused.category(), refused.to_string()))?;
        Self::from_descriptor(config, descriptor)
    }

    /// Exports a device that is open on `descriptor`, whose claim the export shares.
    ///
    /// # Errors
    ///
    /// If such a device cannot be exported, or memory is exhausted.
    pub fn from_descriptor(
        config: ExportConfig<'_>,
        descriptor: BdevDescriptor,
    ) -> Result<Self, Error> {
        let ExportConfig { name, description, uri, device, limits, is_read_only, .. } = config;
        let limiter = QosLimiter::new(limits);
        let descriptor = Arc::new(descriptor.with_limiter(limiter.clone()));
        let (allows_resize, regions) = (config.allows_resize, config.regions);
        if allows_resize && !descriptor.is_resizable() {
            let text = "its size cannot be changed, expected a writable file";
            return Err(Error::new(ErrorCategory::Usage, text));
        }
        let is_adapted = has_unsupported_requests(&descriptor.limits());
        let medium: Arc<dyn BlockDevice> = if is_adapted {
            let memory = BounceBufferAllocator::new(regions, BUFFER_BYTES, BUFFERS)?;
            let options = AdaptationOptions::default();
            Arc::new(AdaptedDevice::new(device, Arc::clone(&descriptor), memory, options)?)
        } else {
            Arc::clone(&descriptor) as Arc<dyn BlockDevice>
        };
        let export = Export::new(name, description, medium.limits(), is_read_only)
            .map_err(|text| Error::new(ErrorCategory::Usage, text))?;
        let zeroes_fast = descriptor.limits().operations.has(Operation::WriteZeroes);
        let export = if zeroes_fast { export } else { export.without_fast_zero() };
        let export = export.with_hole_reporting(medium.hole_reporting());
        let export = if allows_resize { export.with_resize_allowed() } else { export };
        Ok(Self {
            export: Arc::new(export),
            uri,
            device: device.clone(),
            limiter,
            descriptor,
            medium,
            is_adapted,
            sessions: Mutex::default(),
            connections: AtomicU64::new(0),
            is_removed: AtomicBool::new(false),
            slow_io: ExportSlowIo::default(),
            own_counters: None,
        })
    }

    /// Counts the requests of its own clients, for a device that another server exports too. They have no
    /// latencies then.
    #[must_use]
    pub fn with_own_counters(self) -> Self {
        Self { own_counters: Some(Mutex::default()), ..self }
    }

    /// Export properties that clients see.
    pub fn export(&self) -> &Arc<Export> {
        &self.export
    }

    /// URI that the device was opened with.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Block device that connections open I/O channels of.
    pub fn block_device(&self) -> &Arc<dyn BlockDevice> {
        &self.medium
    }

    /// Whether requests are split or emulated before they reach the device.
    pub fn is_adapted(&self) -> bool {
        self.is_adapted
    }

    /// I/O statistics of all connections together, including closed ones.
    pub fn io_stats(&self) -> IoStats {
        let mut stats = match &self.own_counters {
            None => self.device.statistics(),
            Some(ended) => {
                let mut sum = *ended.lock().unwrap_or_else(PoisonError::into_inner);
                self.connections().iter().for_each(|connection| sum.add(&connection.done));
                sum.to_io_stats()
            }
        };
        (stats.limited, stats.limit_wait) = self.limiter.waits();
        stats
    }

    /// Slow requests, and the time from which they are.
    pub fn slow_io(&self) -> &ExportSlowIo {
        &self.slow_io
    }

    /// Number of connections since the start.
    pub fn connections_total(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Snapshots of the current connections.
    pub fn connections(&self) -> Vec<ConnectionSample> {
        self.sessions().iter().map(|entry| entry.session.sample()).collect()
    }

    /// Closes a connection: outstanding requests complete, and nothing more is received. Returns
    /// false if there is no connection with this id.
    pub fn disconnect_client(&self, connection: u64) -> bool {
        let sessions = self.sessions();
        let found = sessions.iter().find(|entry| entry.session.id() == connection);
        if let Some(entry) = found {
            entry.send_command(SessionCommand::Disconnect);
        }
        found.is_some()
    }

    /// Rate limits of all connections together.
    pub fn qos_limits(&self) -> QosLimits {
        self.limiter.limits()
    }

    /// Changes the rate limits, also of connected clients and of requests that wait.
    pub fn set_qos_limits(&self, now: Instant, limits: QosLimits) {
        self.limiter.set(now, limits);
    }

    /// Resizes the device. Blocks until outstanding requests past a new, lower end have completed.
    ///
    /// # Errors
    ///
    /// If the device cannot have this size; the size is then unchanged.
    pub fn resize(&self, size_bytes: u64) -> Result<(), Error> {
        let block_size = u64::from(self.export.block_size());
        if !size_bytes.is_multiple_of(block_size) {
            let text = format!("resize to {size_bytes} bytes: expected a multiple of {block_size}");
            return Err(Error::usage(text));
        }
        self.descriptor.resize(size_bytes / block_size)?;
        // Before the event is handled: the client that requested the resize may use the new range
        // as soon as its reply arrives.
        self.export.set_block_count(self.descriptor.limits().block_count);
        Ok(())
    }

    /// Removes the device: outstanding requests complete within a second, and all clients are
    /// disconnected.
    pub fn remove_and_disconnect(&self) {
        self.is_removed.store(true, Ordering::Relaxed);
        self.device.remove();
    }

    /// Whether the device has been removed. Nothing else is published by it.
    pub(super) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    /// Open descriptor, the source of device events.
    pub(super) fn descriptor(&self) -> &BdevDescriptor {
        &self.descriptor
    }

    /// Handles a device event.
    pub(super) fn handle_event(&self, event: &BdevEvent) {
        match event {
            BdevEvent::Resized { block_count } => self.export.set_block_count(*block_count),
            BdevEvent::Removed => {
                self.is_removed.store(true, Ordering::Relaxed);
                self.sessions()
                    .iter()
                    .for_each(|entry| entry.send_command(SessionCommand::DeviceRemoved));
            }
            // The lost events are unknown, so the size is read again.
            BdevEvent::Overflowed { .. } => {
                self.export.set_block_count(self.device.current_limits().block_count)
            }
            BdevEvent::MediumError { .. } | BdevEvent::MediumChanged => {}
        }
    }

    /// The device in the block layer.
    pub fn device(&self) -> &Bdev {
        &self.device
    }

    /// Registers a session.
    pub(super) fn add_session(&self, entry: SessionEntry) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.sessions().push(entry);
    }

    /// Removes a session and returns it.
    pub(super) fn take_session(&self, connection: u64) -> Option<SessionEntry> {
        let mut sessions = self.sessions();
        let at = sessions.iter().position(|entry| entry.id() == connection)?;
        self.connections.fetch_sub(1, Ordering::Relaxed);
        Some(sessions.remove(at))
    }

    /// Sets the handle that wakes the session.
    pub(super) fn set_session_thread(&self, connection: u64, thread: &ThreadHandle) {
        let mut sessions = self.sessions();
        if let Some(entry) = sessions.iter_mut().find(|entry| entry.id() == connection) {
            entry.set_thread(thread.clone());
        }
    }

    /// Removes a session.
    pub(super) fn remove_session(&self, connection: u64) {
        let mut sessions = self.sessions();
        let Some(at) = sessions.iter().position(|entry| entry.id() == connection) else { return };
        let removed = sessions.remove(at);
        if let Some(ended) = &self.own_counters {
            ended.lock().unwrap_or_else(PoisonError::into_inner).add(&removed.sample().done);
        }
    }

    fn sessions(&self) -> MutexGuard<'_, Vec<SessionEntry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionEntry {
    pub(super) fn new(session: Arc<SessionHandle>) -> Self {
        Self { session, thread: None }
    }

    pub(super) fn id(&self) -> u64 {
        self.session.id()
    }

    pub(super) fn sample(&self) -> ConnectionSample {
        self.session.sample()
    }

    /// Sets the handle that wakes the session, and delivers commands that were sent before.
    pub(super) fn set_thread(&mut self, thread: ThreadHandle) {
        thread.notify_reactor();
        self.thread = Some(thread);
    }

    pub(super) fn send_command(&self, command: SessionCommand) {
        self.session.send_command(command);
        if let Some(thread) = &self.thread {
            thread.notify_reactor();
        }
    }
}

/// Whether clients may issue requests that the device cannot execute as they are. Sessions split
/// requests to the device's size themselves, and their memory is aligned.
fn has_unsupported_requests(limits: &Limits) -> bool {
    let has = |operation| limits.operations.has(operation);
    let missing = |operation, from: OperationSet| {
        !has(operation) && limits.operations.intersection(from) == from && limits.metadata_size == 0
    };
    limits.optimal_boundary_blocks > 0
        || missing(Operation::WriteZeroes, OperationSet::from_operations(&[Operation::Write]))
        || missing(Operation::Verify, OperationSet::from_operations(&[Operation::Read]))
}

impl fmt::Debug for ExportedDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { export, device, is_adapted, .. } = self;
        out.debug_struct("ExportedDevice")
            .field("export", export)
            .field("device", device)
            .field("is_adapted", is_adapted)
            .finish_non_exhaustive()
    }
}
