//! One path: its controller is connected, its ANA state is read, and it is reconnected after a loss.
//!
//! ```text
//!   Disconnected ─ delay ─▶ Connecting ─▶ Connected: ready ─ ANA log ─▶ up ─ lost ─▶ down, up again
//!     ▲                       │               │
//!     └── not connected ──────┴───────────────┴── given up, or another namespace
//! ```

use std::sync::Arc;

use tenmil_base::{Dma, Error, Instant, IoStatus, Memory, Segment, Span};
use tenmil_dma::DevicePool;
use tenmil_nvme_host::{ControllerOptions, Event, Namespace};
use tenmil_wire::Layout;
use tenmil_wire::Status;
use tenmil_wire::admin::GetLogPage;
use tenmil_wire::log::ana::{AnaGroup, AnaHeader, AnaState};

use super::path_selector::PathAnaState;
use crate::caches::CacheTracker;
use crate::connector::Connector;
use crate::controller::{Connecting, FabricsController};
use crate::options::Options;

/// Resources of a path.
pub struct PathSetup {
    /// Memory for its rings and lists.
    pub pool: DevicePool,
    /// Creates the connector, once for each controller.
    pub dial: Box<dyn FnMut() -> Box<dyn Connector> + Send>,
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
    change_until: Option<Instant>,
    log: AnaLogState,
    /// The log page is not read again before this time.
    log_at: Instant,
    page: Option<Segment>,
    /// The path was reported as down.
    is_told_down: bool,
    /// The path was reported as mismatched.
    is_told_unfit: bool,
    /// No more connects.
    is_ending: bool,
    /// Number of the connection that the thread watches.
    pub(super) watched: u64,
}

/// Connection stage of a path.
pub(super) enum PathStage {
    /// Waiting to reconnect until this time.
    Disconnected { until: Instant },
    /// A connect in progress.
    Connecting(Box<Connecting>),
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
        is_doubted: bool,
        piece: LogChunk,
    },
}

/// Part of the log page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LogChunk {
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
    Unfit(String),
    /// Another event of its controller.
    Controller(Event),
}

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
const GROUPS_AT_ONCE: u32 = 127;
/// Interval of reconnects to a path with another namespace.
const UNFIT_PAUSE: Span = Span::from_secs(30);
/// Minimum interval of log page reads.
const LOG_PAUSE: Span = Span::from_ms(200);
/// ANA transition time for a controller that does not report one (ANATT).
const CHANGE_DEFAULT: Span = Span::from_secs(10);

impl Path {
    pub(super) fn new(setup: PathSetup, caches: (Arc<CacheTracker>, usize), now: Instant) -> Self {
        Self {
            setup,
            caches,
            stage: PathStage::Disconnected { until: now },
            access: None,
            change_until: None,
            log: AnaLogState::Known,
            log_at: now,
            page: None,
            is_told_down: false,
            is_told_unfit: false,
            is_ending: false,
            watched: 0,
        }
    }

    pub(super) fn remote(&mut self) -> Option<&mut FabricsController> {
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
        wishes: ControllerOptions,
        fits: &mut dyn FnMut(&mut FabricsController) -> Result<u32, Error>,
    ) -> Option<PathUpdate> {
        match &mut self.stage {
            PathStage::Disconnected { until } if now < *until || self.is_ending => None,
            PathStage::Disconnected { .. } => self.call(now, options, wishes),
            PathStage::Connecting(calling) => match calling.turn(now)? {
                Ok(remote) => {
                    self.stage = PathStage::Connected(Box::new(remote));
                    None
                }
                Err(error) => self.miss(now, options, error.to_string()),
            },
            PathStage::Connected(remote) => match remote.poll(now) {
                Some(event) => self.handle(now, options, event, fits),
                None => self.read_ana_log(now, fits),
            },
        }
    }

    fn call(
        &mut self,
        now: Instant,
        options: &Options,
        wishes: ControllerOptions,
    ) -> Option<PathUpdate> {
        let dial = (self.setup.dial)();
        let (pool, caches) = (self.setup.pool.clone(), self.caches.clone());
        match Connecting::begin_over(pool, dial, options.clone(), wishes, caches, now) {
            Ok(calling) => {
                self.stage = PathStage::Connecting(Box::new(calling));
                None
            }
            Err(error) => self.miss(now, options, error.to_string()),
        }
    }

    /// The connect has failed.
    fn miss(&mut self, now: Instant, options: &Options, why: String) -> Option<PathUpdate> {
        self.stage = PathStage::Disconnected { until: now.after(options.policy.retry) };
        self.tell_down(why)
    }

    /// Reports the path as down, once.
    fn tell_down(&mut self, why: String) -> Option<PathUpdate> {
        // The transition time applies as long as the controller is connected.
        (self.access, self.change_until) = (None, None);
        (!core::mem::replace(&mut self.is_told_down, true)).then_some(PathUpdate::Down(why))
    }

    fn handle(
        &mut self,
        now: Instant,
        options: &Options,
        event: Event,
        fits: &mut dyn FnMut(&mut FabricsController) -> Result<u32, Error>,
    ) -> Option<PathUpdate> {
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        match event {
            Event::Ready | Event::Recovered => match fits(remote) {
                Ok(_) => self.arrive(now),
                Err(why) => {
                    self.leave();
                    self.stage = PathStage::Disconnected { until: now.after(UNFIT_PAUSE) };
                    let is_new = !core::mem::replace(&mut self.is_told_unfit, true);
                    is_new.then_some(PathUpdate::Unfit(why.to_string()))
                }
            },
            Event::NamespaceAttached { .. } | Event::NamespaceDetached { .. } => {
                match fits(remote) {
                    Ok(_) => self.arrive(now),
                    Err(_) => self.is(now, PathAnaState::Inaccessible),
                }
            }
            Event::AccessChanged | Event::NamespaceChanged { .. } => {
                self.refresh_ana();
                None
            }
            Event::AdminCompleted(answer) if answer.token == LOG_TOKEN => {
                self.handle_log(now, answer.status, fits)
            }
            Event::ResetStarted { .. } => {
                let why = remote.why().unwrap_or_else(|| "its controller is being reset".into());
                self.tell_down(why)
            }
            Event::Dead(_) | Event::Removed | Event::ShutDown { .. } => {
                let why = remote.why().unwrap_or_else(|| "its controller is gone".into());
                self.leave();
                self.stage = PathStage::Disconnected { until: now.after(options.policy.retry) };
                self.tell_down(why)
            }
            other => Some(PathUpdate::Controller(other)),
        }
    }

    /// Stops reconnecting. A connected controller remains, to be shut down.
    pub(super) fn stop_reconnecting(&mut self) {
        self.is_ending = true;
        if !matches!(self.stage, PathStage::Connected(_)) {
            self.stage = PathStage::Disconnected { until: Instant::NEVER };
        }
    }

    /// Releases the controller.
    fn leave(&mut self) {
        if let (PathStage::Connected(remote), Some(page)) = (&mut self.stage, self.page.take()) {
            remote.reach().release(page);
        }
        (self.access, self.change_until, self.log) = (None, None, AnaLogState::Known);
        self.watched = 0;
    }

    /// The controller is ready, initially or after a recovery.
    fn arrive(&mut self, now: Instant) -> Option<PathUpdate> {
        self.log_at = now;
        if self.reports() {
            self.log = AnaLogState::Wanted;
            return None;
        }
        self.log = AnaLogState::Known;
        self.is(now, PathAnaState::Optimized)
    }

    /// Whether its controller supports ANA reporting.
    fn reports(&mut self) -> bool {
        let identity = self.remote().and_then(|remote| remote.controller().identity());
        identity.is_some_and(|identity| identity.page.anars())
    }

    /// Requests a new read of the ANA log.
    pub(super) fn refresh_ana(&mut self) {
        self.log = match self.log {
            AnaLogState::Known | AnaLogState::Wanted => AnaLogState::Wanted,
            AnaLogState::Reading { piece, .. } => AnaLogState::Reading { is_doubted: true, piece },
        };
    }

    /// Reads the log page if requested, and checks the transition time.
    fn read_ana_log(
        &mut self,
        now: Instant,
        fits: &mut dyn FnMut(&mut FabricsController) -> Result<u32, Error>,
    ) -> Option<PathUpdate> {
        if self.log == AnaLogState::Wanted && now >= self.log_at {
            if !self.reports() {
                return self.judge(now, fits);
            }
            self.read(now, LogChunk::default());
        }
        if self.change_until.is_some_and(|until| now >= until) {
            self.change_until = None;
            self.log = AnaLogState::Wanted;
            self.log_at = now.after(CHANGE_DEFAULT);
            self.access = Some(PathAnaState::Inaccessible);
            return Some(PathUpdate::Access(PathAnaState::Inaccessible));
        }
        None
    }

    /// Without ANA reporting, the path is optimized as long as it leads to the same namespace.
    fn judge(
        &mut self,
        now: Instant,
        fits: &mut dyn FnMut(&mut FabricsController) -> Result<u32, Error>,
    ) -> Option<PathUpdate> {
        (self.log, self.log_at) = (AnaLogState::Known, now.after(LOG_PAUSE));
        let PathStage::Connected(remote) = &mut self.stage else { return None };
        let access =
            if fits(remote).is_ok() { PathAnaState::Optimized } else { PathAnaState::Inaccessible };
        self.is(now, access)
    }

    /// Reads a part of the groups.
    fn read(&mut self, now: Instant, piece: LogChunk) {
        self.log_at = now.after(LOG_PAUSE);
        let PathStage::Connected(remote) = &mut self.stage else { return };
        let page = match self.page {
            Some(page) => page,
            None => {
                let count = GROUPS_AT_ONCE.min(groups_of(remote)).max(1);
                let Some(page) = remote.reach().allocate(HEADER_BYTES + count * GROUP_BYTES) else {
                    return;
                };
                *self.page.insert(page)
            }
        };
        let lpo = u64::from(piece.before) * u64::from(GROUP_BYTES);
        let log = GetLogPage { lsp: GROUPS_ONLY, lpo, ..GetLogPage::new(LOG_PAGE, page.len_bytes) };
        if remote.controller().get_log_page(now, LOG_TOKEN, log, page).is_ok() {
            self.log = AnaLogState::Reading { is_doubted: false, piece };
        }
    }

    fn handle_log(
        &mut self,
        now: Instant,
        outcome: IoStatus,
        fits: &mut dyn FnMut(&mut FabricsController) -> Result<u32, Error>,
    ) -> Option<PathUpdate> {
        let asked = core::mem::replace(&mut self.log, AnaLogState::Wanted);
        let AnaLogState::Reading { is_doubted, piece } = asked else { return None };
        let (PathStage::Connected(remote), Some(page)) = (&mut self.stage, self.page) else {
            return None;
        };
        if !outcome.is_success() {
            // After a permanent rejection, it is not read again before another change.
            if !is_doubted && Status(outcome.0).dnr() {
                self.log = AnaLogState::Known;
            }
            return None;
        }
        let Ok(group) = fits(remote) else {
            // It is checked again when its namespaces change.
            self.log = if is_doubted { AnaLogState::Wanted } else { AnaLogState::Known };
            return self.is(now, PathAnaState::Inaccessible);
        };
        let mut bytes = vec![0; page.len_bytes as usize];
        remote.reach().load(page, &mut bytes).ok()?;
        let found = access_of(&bytes, group);
        let next = piece.next(&bytes);
        if found.is_none() && next.before < next.groups {
            // If a change was noticed, the page is read from its beginning before a state is reported.
            if !is_doubted {
                self.read(now, next);
            }
            return None;
        }
        if !is_doubted {
            self.log = AnaLogState::Known;
        }
        // A controller reports no group for a namespace that is in none.
        self.is(now, found.unwrap_or(PathAnaState::Inaccessible))
    }

    /// Sets the ANA state.
    fn is(&mut self, now: Instant, access: PathAnaState) -> Option<PathUpdate> {
        if access != PathAnaState::Change {
            self.change_until = None;
        } else if self.change_until.is_none() && self.access != Some(PathAnaState::Inaccessible) {
            let allowed = self.remote().and_then(|remote| {
                let identity = remote.controller().identity()?;
                Some(Span::from_secs(identity.page.anatt().into())).filter(|span| span.ns > 0)
            });
            self.change_until = Some(now.after(allowed.unwrap_or(CHANGE_DEFAULT)));
        } else if self.change_until.is_none() {
            // The transition time has expired already.
            return Some(PathUpdate::Access(PathAnaState::Inaccessible));
        }
        (self.is_told_down, self.is_told_unfit) = (false, false);
        self.access = Some(access);
        Some(PathUpdate::Access(access))
    }

    pub(super) fn wake_at(&mut self, now: Instant) -> Instant {
        let at = match &mut self.stage {
            PathStage::Disconnected { .. } if self.is_ending => Instant::NEVER,
            PathStage::Disconnected { until } => *until,
            PathStage::Connecting(calling) => calling.wake_at(now),
            PathStage::Connected(remote) => remote.wake_at(now),
        };
        let log = if self.log == AnaLogState::Wanted { self.log_at } else { Instant::NEVER };
        at.min(log).min(self.change_until.unwrap_or(Instant::NEVER))
    }
}

impl LogChunk {
    /// The part after this one, of which a page was read.
    fn next(self, page: &[u8]) -> Self {
        let told = AnaHeader::parse(page).map_or(0, |header| u32::from(header.ngrps()));
        let read = page.len().saturating_sub(AnaHeader::BYTES) / AnaGroup::BYTES;
        Self {
            before: self.before.saturating_add(u32::try_from(read).unwrap_or(u32::MAX)),
            groups: if self.before == 0 { told } else { self.groups },
        }
    }
}

/// Number of ANA groups of a controller.
fn groups_of(remote: &mut FabricsController) -> u32 {
    remote.controller().identity().map_or(0, |identity| identity.page.nanagrpid())
}

/// The ANA state of a group in a log page, which may start at any group.
fn access_of(page: &[u8], group: u32) -> Option<PathAnaState> {
    let groups = page.get(AnaHeader::BYTES..)?.chunks_exact(AnaGroup::BYTES);
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

/// Compares the namespace on two controllers. The error states the difference.
pub(super) fn is_same(one: &Namespace, other: &Namespace) -> Result<(), Error> {
    let nothing = tenmil_nvme_host::NamespaceIds::default();
    if one.names != other.names {
        return Err(Error::remote(
            "its names (EUI64, NGUID, UUID) are others than those of the first path",
        ));
    }
    if one.names == nothing && !(one.is_shared && other.is_shared) {
        return Err(Error::remote("it has no name and is not shared (NMIC), so it may be another"));
    }
    let shape = |it: &Namespace| (it.block_size, it.metadata_size);
    if shape(one) != shape(other) {
        let ((expected, _), (found, _)) = (shape(one), shape(other));
        return Err(Error::environment(format!(
            "its blocks are of {found} bytes, expected {expected}, as the first path"
        )));
    }
    Ok(())
}
