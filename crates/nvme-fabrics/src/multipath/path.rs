//! One path: its controller is connected, its ANA state is read, and it is reconnected after a loss.
//!
//! ```text
//!   Disconnected ─ delay ─▶ Connecting ─▶ Connected: ready ─ ANA log ─▶ up ─ lost ─▶ down, up again
//!     ▲                       │               │
//!     └── not connected ──────┴───────────────┴── given up, or another namespace
//! ```
//!
//! The controller of the only path is not replaced once it was up: if it is given up, the device is gone.

use std::sync::Arc;

use tenmil_base::{Dma, Error, Instant, IoStatus, Memory, Segment, Span};
use tenmil_dma::DevicePool;
use tenmil_nvme_host::{
    ControllerError, ControllerOptions, ControllerState, Event, Namespace, ResetCause,
};
use tenmil_wire::Layout;
use tenmil_wire::Status;
use tenmil_wire::admin::GetLogPage;
use tenmil_wire::log::ana::{AnaGroup, AnaHeader, AnaState};

use super::path_selector::PathAnaState;
use crate::cache_tracker::CacheTracker;
use crate::connector::Connector;
use crate::fabrics_controller::{ConnectError, ConnectingController, FabricsController};
use crate::options::Options;

/// Resources of a path.
pub struct PathSetup {
    /// Memory for the data of its commands.
    pub pool: DevicePool,
    /// Creates the connector, once for each controller.
    pub make_connector: Box<dyn FnMut() -> Box<dyn Connector> + Send>,
}

/// A path.
pub(super) struct Path {
    setup: PathSetup,
    /// Cache state of all controllers, and the index of this path.
    caches: (Arc<CacheTracker>, usize),
    pub(super) stage: PathStage,
    /// ANA state; `None` if unknown.
    pub(super) access: Option<PathAnaState>,
    /// End of the permitted ANA transition time (ANATT).
    transition_until: Option<Instant>,
    log: AnaLogState,
    /// The log page is not read again before this time.
    log_read_at: Instant,
    log_page: Option<Segment>,
    /// Why the path is down, as last reported.
    reported: Option<String>,
    /// The path was reported as mismatched.
    is_mismatch_reported: bool,
    /// Why it is not up, as an error of its own.
    error: Option<Error>,
    /// It is the only path of its device.
    is_only: bool,
    has_been_up: bool,
    /// No more connects.
    has_stopped: bool,
    /// Number of the connection that the thread watches.
    pub(super) watched_connection: u64,
    /// Number of attempts to connect that failed, and how many of those were the current controller's.
    failed_connects: u64,
    failed_reconnects: u64,
}

/// Connection stage of a path.
pub(super) enum PathStage {
    /// Waiting to reconnect until this time.
    Disconnected { until: Instant },
    /// A connect in progress.
    Connecting(Box<ConnectingController>),
    /// A connected controller.
    Connected(Box<FabricsController>),
}

/// State of the ANA log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnaLogState {
    Known,
    Wanted,
    /// Read in progress; its result is stale if a change is noticed meanwhile.
    Reading {
        is_stale: bool,
        chunk: AnaLogChunk,
    },
}

/// Part of the log page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AnaLogChunk {
    /// Number of groups read before, without the relevant one.
    before: u32,
    /// Total number of groups, according to the header: at most 65535.
    groups: u32,
}

/// Result of polling a path.
pub(super) enum PathUpdate {
    /// It is usable, or its ANA state has changed.
    Access(PathAnaState),
    /// It is not usable.
    Down(String),
    /// It leads to another namespace.
    NamespaceMismatch(String),
    /// It was the only one, and its controller is gone.
    Removed(String),
    /// Another event of its controller.
    Controller(Event),
}

/// Why a controller has not the namespace of the other paths.
#[derive(Debug)]
pub(super) struct NamespaceMismatch {
    pub(super) error: Error,
    /// It has no such namespace, rather than another one.
    pub(super) is_missing: bool,
}

/// Checks the namespace of a controller. Returns its ANA group.
pub(super) type NamespaceCheck<'a> =
    &'a mut dyn FnMut(&mut FabricsController) -> Result<u32, NamespaceMismatch>;

/// The token of the Get Log Page command; commands of the owner do not use it.
const LOG_TOKEN: u64 = u64::MAX;
const LOG_PAGE: u8 = 0x0c;
/// Return Groups Only (NVM Express Base 2.1, section 5.1.12.1.13).
const GROUPS_ONLY: u8 = 1;
#[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
const HEADER_BYTES: u32 = AnaHeader::BYTES as u32;
#[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
const GROUP_BYTES: u32 = AnaGroup::BYTES as u32;
/// Groups read at a time: with the header, within the transfer limit of every controller.
const GROUPS_PER_READ: u32 = 127;
/// Interval of reconnects to a path with another namespace.
const MISMATCH_RETRY_INTERVAL: Span = Span::from_secs(30);
/// Minimum interval of log page reads.
const LOG_READ_INTERVAL: Span = Span::from_ms(200);
/// Reason given when a controller was removed without an error of its transport.
const NOT_THERE: &str =
    "a register reads as ones, expected the value of a controller that is there";
/// ANA transition time for a controller that does not report one (ANATT).
const TRANSITION_TIME_DEFAULT: Span = Span::from_secs(10);

impl Path {
    pub(super) fn new(
        setup: PathSetup,
        caches: (Arc<CacheTracker>, usize),
        is_only: bool,
        now: Instant,
    ) -> Self {
        Self {
            setup,
            caches,
            stage: PathStage::Disconnected { until: now },
            access: None,
            transition_until: None,
            log: AnaLogState::Known,
            log_read_at: now,
            log_page: None,
            reported: None,
            is_mismatch_reported: false,
            error: None,
            is_only,
            has_been_up: false,
            has_stopped: false,
            watched_connection: 0,
            failed_connects: 0,
            failed_reconnects: 0,
        }
    }

    pub(super) fn connected_controller(&mut self) -> Option<&mut FabricsController> {
        match &mut self.stage {
            PathStage::Connected(remote) => Some(remote),
            _ => None,
        }
    }

    /// Performs a bounded amount of work. Returns an update, if any.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        options: &Options,
        controller_options: ControllerOptions,
        check: NamespaceCheck<'_>,
    ) -> Option<PathUpdate> {
        match &mut self.stage {
            PathStage::Disconnected { until } if now < *until || self.has_stopped => None,
            PathStage::Disconnected { .. } => self.begin_connect(now, options, controller_options),
            PathStage::Connecting(connecting) => match connecting.poll(now)? {
                Ok(remote) => {
                    self.stage = PathStage::Connected(Box::new(remote));
                    self.failed_reconnects = 0;
                    None
                }
                Err(error) => self.handle_connect_error(now, options, error),
            },
            PathStage::Connected(remote) => {
                let event = remote.poll(now);
                let failed = remote.connection_stats().failed;
                self.failed_connects += failed - self.failed_reconnects;
                self.failed_reconnects = failed;
                match event {
                    Some(event) => self.handle_controller_event(now, options, event, check),
                    None => self.read_ana_log(now, check),
                }
            }
        }
    }

    /// Number of attempts to connect that failed.
    pub(super) fn failed_connects(&self) -> u64 {
        self.failed_connects
    }

    fn begin_connect(
        &mut self,
        now: Instant,
        options: &Options,
        controller_options: ControllerOptions,
    ) -> Option<PathUpdate> {
        let make_connector = (self.setup.make_connector)();
        let (pool, caches) = (self.setup.pool.clone(), self.caches.clone());
        match ConnectingController::begin_on_path(
            pool,
            make_connector,
            options.clone(),
            controller_options,
            caches,
            now,
        ) {
            Ok(connecting) => {
                self.stage = PathStage::Connecting(Box::new(connecting));
                None
            }
            Err(error) => self.handle_connect_error(now, options, error),
        }
    }

    /// The connect has failed.
    fn handle_connect_error(
        &mut self,
        now: Instant,
        options: &Options,
        error: ConnectError,
    ) -> Option<PathUpdate> {
        self.stage = PathStage::Disconnected { until: now.after(options.policy.retry) };
        self.failed_connects += 1;
        let why = error.to_string();
        self.error = Some(error.into());
        self.report_down(why, false)
    }

    /// Reports the path as down: once, unless the cause is a better one than was reported.
    fn report_down(&mut self, why: String, is_precise: bool) -> Option<PathUpdate> {
        // The transition time applies as long as the controller is connected.
        (self.access, self.transition_until) = (None, None);
        let is_reported = match &self.reported {
            Some(reported) => !is_precise || *reported == why,
            None => false,
        };
        if is_reported {
            return None;
        }
        self.reported = Some(why.clone());
        Some(PathUpdate::Down(why))
    }

    /// Handles a reset of its controller.
    fn handle_reset(&mut self, cause: ResetCause) -> Option<PathUpdate> {
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        // Invalid data from the peer is the more precise cause; the last error is the reason of the
        // transport.
        let found = match cause {
            ResetCause::InvalidData(found) => Some(found.to_string()),
            _ => None,
        };
        let is_precise = found.is_some();
        let error = found.map(Error::remote).or_else(|| remote.last_error());
        let error = error.unwrap_or_else(|| Error::remote("its controller is being reset"));
        let why = error.text.clone();
        self.error = Some(error.with_context(remote.peer()));
        self.report_down(why, is_precise)
    }

    /// Handles the end of its controller.
    fn handle_controller_end(
        &mut self,
        now: Instant,
        options: &Options,
        error: Option<ControllerError>,
    ) -> Option<PathUpdate> {
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        // Before the first time, the transport knows the cause; afterwards it may be that of an earlier
        // loss.
        let last_error = remote.last_error();
        let error = match error {
            Some(error) if self.has_been_up => Error::remote(error),
            Some(error) => last_error.unwrap_or_else(|| Error::remote(error)),
            None if self.has_been_up => {
                last_error.unwrap_or_else(|| Error::remote("the controller was removed"))
            }
            None => last_error.unwrap_or_else(|| Error::remote(NOT_THERE)),
        };
        let why = error.text.clone();
        self.error = Some(error.with_context(remote.peer()));
        if self.is_only && self.has_been_up && !self.has_stopped {
            self.has_stopped = true;
            (self.access, self.transition_until) = (None, None);
            self.log = AnaLogState::Known;
            return Some(PathUpdate::Removed(why));
        }
        self.release_controller();
        self.stage = PathStage::Disconnected { until: now.after(options.policy.retry) };
        self.report_down(why, false)
    }

    /// Handles a controller that is ready and has not the namespace.
    fn handle_mismatch(
        &mut self,
        now: Instant,
        is_recovered: bool,
        mismatch: &NamespaceMismatch,
    ) -> Option<PathUpdate> {
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        let identity = remote.controller().identity();
        let has_notices =
            identity.is_some_and(|identity| identity.page.namespace_attribute_notices());
        if is_recovered && mismatch.is_missing && has_notices {
            // A target that has restarted may report the namespace a moment later.
            return self.set_ana_state(now, PathAnaState::Inaccessible);
        }
        let why = mismatch.error.text.clone();
        let text = format!("{}: {why}", remote.peer());
        self.error = Some(Error::new(mismatch.error.category, text));
        self.release_controller();
        self.stage = PathStage::Disconnected { until: now.after(MISMATCH_RETRY_INTERVAL) };
        let is_new = !core::mem::replace(&mut self.is_mismatch_reported, true);
        is_new.then_some(PathUpdate::NamespaceMismatch(why))
    }

    fn handle_controller_event(
        &mut self,
        now: Instant,
        options: &Options,
        event: Event,
        check: NamespaceCheck<'_>,
    ) -> Option<PathUpdate> {
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        match event {
            Event::Ready | Event::Recovered => match check(remote) {
                Ok(_) => self.handle_ready(now),
                Err(mismatch) => self.handle_mismatch(now, event == Event::Recovered, &mismatch),
            },
            Event::NamespaceAttached { .. } | Event::NamespaceDetached { .. } => {
                match check(remote) {
                    Ok(_) => self.handle_ready(now),
                    Err(_) => self.set_ana_state(now, PathAnaState::Inaccessible),
                }
            }
            Event::AccessChanged | Event::NamespaceChanged { .. } => {
                self.refresh_ana();
                None
            }
            Event::AdminCompleted(completion) if completion.token == LOG_TOKEN => {
                self.handle_ana_log_chunk(now, completion.status, check)
            }
            Event::ResetStarted { cause } => self.handle_reset(cause),
            Event::Dead(error) => self.handle_controller_end(now, options, Some(error)),
            Event::Removed => self.handle_controller_end(now, options, None),
            Event::ShutDown { .. } => {
                self.release_controller();
                self.stage = PathStage::Disconnected { until: now.after(options.policy.retry) };
                match self.has_stopped {
                    true => Some(PathUpdate::Controller(event)),
                    false => self.report_down("its controller was shut down".to_owned(), false),
                }
            }
            other => Some(PathUpdate::Controller(other)),
        }
    }

    /// Why it is not up.
    pub(super) fn down_reason(&self) -> Option<&Error> {
        self.error.as_ref()
    }

    /// Whether it was up and is not connected: its controller was given up.
    pub(super) fn is_abandoned(&self) -> bool {
        self.has_been_up && !self.has_stopped && !matches!(self.stage, PathStage::Connected(_))
    }

    /// Stops reconnecting. A connected controller remains, to be shut down.
    pub(super) fn stop_reconnecting(&mut self) {
        self.has_stopped = true;
        if !matches!(self.stage, PathStage::Connected(_)) {
            self.stage = PathStage::Disconnected { until: Instant::NEVER };
        }
    }

    /// Releases the controller.
    fn release_controller(&mut self) {
        if let (PathStage::Connected(remote), Some(log_page)) =
            (&mut self.stage, self.log_page.take())
        {
            remote.dma().release(log_page);
        }
        (self.access, self.transition_until, self.log) = (None, None, AnaLogState::Known);
        self.watched_connection = 0;
    }

    /// The controller is ready, initially or after a recovery.
    fn handle_ready(&mut self, now: Instant) -> Option<PathUpdate> {
        self.log_read_at = now;
        if self.supports_ana() {
            self.log = AnaLogState::Wanted;
            return None;
        }
        self.log = AnaLogState::Known;
        self.set_ana_state(now, PathAnaState::Optimized)
    }

    /// Whether its controller supports ANA reporting.
    fn supports_ana(&mut self) -> bool {
        let identity =
            self.connected_controller().and_then(|remote| remote.controller().identity());
        identity.is_some_and(|identity| identity.page.anars())
    }

    /// Requests a new read of the ANA log.
    pub(super) fn refresh_ana(&mut self) {
        self.log = match self.log {
            AnaLogState::Known | AnaLogState::Wanted => AnaLogState::Wanted,
            AnaLogState::Reading { chunk, .. } => AnaLogState::Reading { is_stale: true, chunk },
        };
    }

    /// Reads the log page if requested, and checks the transition time.
    fn read_ana_log(&mut self, now: Instant, check: NamespaceCheck<'_>) -> Option<PathUpdate> {
        if self.log == AnaLogState::Wanted && now >= self.log_read_at {
            if !self.supports_ana() {
                return self.check_without_ana(now, check);
            }
            self.read_ana_log_chunk(now, AnaLogChunk::default());
        }
        if self.transition_until.is_some_and(|until| now >= until) {
            self.transition_until = None;
            self.log = AnaLogState::Wanted;
            self.log_read_at = now.after(TRANSITION_TIME_DEFAULT);
            self.access = Some(PathAnaState::Inaccessible);
            return Some(PathUpdate::Access(PathAnaState::Inaccessible));
        }
        None
    }

    /// Without ANA reporting, the path is optimized as long as it leads to the same namespace.
    fn check_without_ana(&mut self, now: Instant, check: NamespaceCheck<'_>) -> Option<PathUpdate> {
        (self.log, self.log_read_at) = (AnaLogState::Known, now.after(LOG_READ_INTERVAL));
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        let access = if check(remote).is_ok() {
            PathAnaState::Optimized
        } else {
            PathAnaState::Inaccessible
        };
        self.set_ana_state(now, access)
    }

    /// Reads a part of the groups.
    fn read_ana_log_chunk(&mut self, now: Instant, chunk: AnaLogChunk) {
        self.log_read_at = now.after(LOG_READ_INTERVAL);
        let PathStage::Connected(remote) = &mut self.stage else { return };
        let log_page = match self.log_page {
            Some(log_page) => log_page,
            None => {
                let count = GROUPS_PER_READ.min(ana_group_count(remote)).max(1);
                let Some(log_page) = remote.dma().allocate(HEADER_BYTES + count * GROUP_BYTES)
                else {
                    return;
                };
                *self.log_page.insert(log_page)
            }
        };
        let lpo = u64::from(chunk.before) * u64::from(GROUP_BYTES);
        let log =
            GetLogPage { lsp: GROUPS_ONLY, lpo, ..GetLogPage::new(LOG_PAGE, log_page.len_bytes) };
        if remote.controller().submit_get_log_page(now, LOG_TOKEN, log, log_page).is_ok() {
            self.log = AnaLogState::Reading { is_stale: false, chunk };
        }
    }

    fn handle_ana_log_chunk(
        &mut self,
        now: Instant,
        status: IoStatus,
        check: NamespaceCheck<'_>,
    ) -> Option<PathUpdate> {
        let log = core::mem::replace(&mut self.log, AnaLogState::Wanted);
        let AnaLogState::Reading { is_stale, chunk } = log else { return None };
        let (PathStage::Connected(remote), Some(log_page)) = (&mut self.stage, self.log_page)
        else {
            return None;
        };
        if !status.is_success() {
            // After a permanent rejection, it is not read again before another change.
            if !is_stale && Status(status.0).dnr() {
                self.log = AnaLogState::Known;
            }
            if remote.controller().state() != ControllerState::Ready {
                return None;
            }
            // Without the log page, the status of a command reports that a path is not accessible.
            return self.set_ana_state(now, self.access.unwrap_or(PathAnaState::Optimized));
        }
        let Ok(group) = check(remote) else {
            // It is checked again when its namespaces change.
            self.log = if is_stale { AnaLogState::Wanted } else { AnaLogState::Known };
            return self.set_ana_state(now, PathAnaState::Inaccessible);
        };
        let mut bytes = vec![0; log_page.len_bytes as usize];
        remote.dma().load(log_page, &mut bytes).ok()?;
        let found = ana_state_of(&bytes, group);
        let next = chunk.next_chunk(&bytes);
        if found.is_none() && next.before < next.groups {
            // If a change was noticed, the page is read from its beginning before a state is reported.
            if !is_stale {
                self.read_ana_log_chunk(now, next);
            }
            return None;
        }
        if !is_stale {
            self.log = AnaLogState::Known;
        }
        // A controller reports no group for a namespace that is in none.
        self.set_ana_state(now, found.unwrap_or(PathAnaState::Inaccessible))
    }

    /// Sets the ANA state.
    fn set_ana_state(&mut self, now: Instant, access: PathAnaState) -> Option<PathUpdate> {
        if access != PathAnaState::Change {
            self.transition_until = None;
        } else if self.transition_until.is_none() && self.access != Some(PathAnaState::Inaccessible)
        {
            let allowed = self.connected_controller().and_then(|remote| {
                let identity = remote.controller().identity()?;
                Some(Span::from_secs(identity.page.anatt().into())).filter(|span| span.ns > 0)
            });
            self.transition_until = Some(now.after(allowed.unwrap_or(TRANSITION_TIME_DEFAULT)));
        } else if self.transition_until.is_none() {
            // The transition time has expired already.
            return Some(PathUpdate::Access(PathAnaState::Inaccessible));
        }
        (self.reported, self.error, self.is_mismatch_reported) = (None, None, false);
        (self.access, self.has_been_up) = (Some(access), true);
        Some(PathUpdate::Access(access))
    }

    pub(super) fn wake_at(&mut self, now: Instant) -> Instant {
        let at = match &mut self.stage {
            PathStage::Disconnected { .. } if self.has_stopped => Instant::NEVER,
            PathStage::Disconnected { until } => *until,
            PathStage::Connecting(connecting) => connecting.wake_at(now),
            PathStage::Connected(remote) => remote.wake_at(now),
        };
        let log = if self.log == AnaLogState::Wanted { self.log_read_at } else { Instant::NEVER };
        at.min(log).min(self.transition_until.unwrap_or(Instant::NEVER))
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.release_controller();
    }
}

impl AnaLogChunk {
    /// The part after this one, of which a page was read.
    fn next_chunk(self, log_page: &[u8]) -> Self {
        let total = AnaHeader::parse(log_page).map_or(0, |header| u32::from(header.ngrps()));
        let read = log_page.len().saturating_sub(AnaHeader::BYTES) / AnaGroup::BYTES;
        Self {
            before: self.before.saturating_add(u32::try_from(read).unwrap_or(u32::MAX)),
            groups: if self.before == 0 { total } else { self.groups },
        }
    }
}

/// Number of ANA groups of a controller.
fn ana_group_count(remote: &mut FabricsController) -> u32 {
    remote.controller().identity().map_or(0, |identity| identity.page.nanagrpid())
}

/// The ANA state of a group in a log page, which may start at any group.
fn ana_state_of(log_page: &[u8], group: u32) -> Option<PathAnaState> {
    let groups = log_page.get(AnaHeader::BYTES..)?.chunks_exact(AnaGroup::BYTES);
    let known = groups.filter_map(|bytes| AnaGroup::parse(bytes).ok());
    let known = known.into_iter().find(|known| known.grpid() == group)?;
    Some(match known.state() {
        AnaState::Optimized => PathAnaState::Optimized,
        AnaState::NonOptimized => PathAnaState::NonOptimized,
        AnaState::PersistentLoss => PathAnaState::PersistentLoss,
        AnaState::Change => PathAnaState::Change,
        AnaState::Inaccessible | AnaState::Reserved(_) => PathAnaState::Inaccessible,
    })
}

/// Compares the namespace on two controllers, or on one path before and after a reconnect. The error
/// states the difference.
pub(super) fn check_same_namespace(
    first: &Namespace,
    other: &Namespace,
    is_same_path: bool,
) -> Result<(), Error> {
    let no_names = tenmil_nvme_host::NamespaceIds::default();
    if first.names != other.names {
        return Err(Error::remote(
            "its names (EUI64, NGUID, UUID) are others than those of the first path",
        ));
    }
    let is_shared = first.is_shared && other.is_shared;
    if first.names == no_names && !is_shared && !is_same_path {
        return Err(Error::remote("it has no name and is not shared (NMIC), so it may be another"));
    }
    let block_format = |it: &Namespace| (it.block_size, it.metadata_size);
    if block_format(first) != block_format(other) {
        let ((expected, _), (found, _)) = (block_format(first), block_format(other));
        return Err(Error::environment(format!(
            "its blocks are of {found} bytes, expected {expected}, as the first path"
        )));
    }
    Ok(())
}
