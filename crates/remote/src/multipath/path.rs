//! One path: a controller that is called, brought up, asked how well it leads to the namespace, and
//! called again when it has gone.
//!
//! ```text
//!   Away ── retry ──▶ Calling ──▶ There: ready ── ANA log ──▶ up ── lost ──▶ down, and up again
//!     ▲                  │                │
//!     └── not reached ───┴── given up, or it leads elsewhere
//! ```

use std::sync::Arc;

use base::{Dma, Instant, Memory, Outcome, Segment, Span};
use dma::DevicePool;
use nvme::{ControllerOptions, Event, Namespace};
use wire::Layout;
use wire::Status;
use wire::admin::GetLogPage;
use wire::log::ana::{AnaGroup, AnaHeader, AnaState};

use super::route::Access;
use crate::caches::Caches;
use crate::dial::Dial;
use crate::options::Options;
use crate::remote::{Calling, Remote};

/// Where a path begins, and what it may use.
pub struct PathSetup {
    /// Memory for its rings and lists.
    pub pool: DevicePool,
    /// Makes what calls it: once for each controller that is found there.
    pub dial: Box<dyn FnMut() -> Box<dyn Dial> + Send>,
}

/// A path.
pub(super) struct Path {
    setup: PathSetup,
    /// What controllers may have in their caches, and the number of this path.
    caches: (Arc<Caches>, usize),
    pub(super) stage: Stage,
    /// How well it leads there; `None` if nobody knows.
    pub(super) access: Option<Access>,
    /// When a change will have taken too long (ANATT).
    change_until: Option<Instant>,
    log: Log,
    /// Before this, the log page is not read again.
    log_at: Instant,
    page: Option<Segment>,
    /// Whether it was told that it is down.
    is_told_down: bool,
    /// Whether it was told that it leads elsewhere.
    is_told_unfit: bool,
    /// Nobody is called any more.
    is_ending: bool,
    /// Which connection the thread is woken by.
    pub(super) watched: u64,
}

/// What stands at its other end.
pub(super) enum Stage {
    /// Nothing, until then.
    Away { until: Instant },
    /// Somebody who is called.
    Calling(Box<Calling>),
    /// A controller.
    There(Box<Remote>),
}

/// How far the log page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Log {
    Known,
    Wanted,
    /// What is read may be old when it comes, if it is doubted meanwhile.
    Asked {
        is_doubted: bool,
        piece: Piece,
    },
}

/// A part of the log page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Piece {
    /// So many groups were read before, and the one that matters was not among them.
    before: u32,
    /// So many there are, as the page says at its beginning: 65535 at most.
    groups: u32,
}

/// What comes of a look at a path.
pub(super) enum News {
    /// It can be used, or is better or worse than before.
    Access(Access),
    /// It cannot be used.
    Down(String),
    /// It leads elsewhere.
    Unfit(String),
    /// Something else that its controller says.
    Controller(Event),
}

/// The token of the command that reads the log page, which no owner's command has.
const LOG_TOKEN: u64 = u64::MAX;
const LOG_PAGE: u8 = 0x0c;
/// Return Groups Only (Base 2.1 §5.1.12.1.13).
const GROUPS_ONLY: u8 = 1;
#[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
const HEADER_BYTES: u32 = AnaHeader::BYTES as u32;
#[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
const GROUP_BYTES: u32 = AnaGroup::BYTES as u32;
/// Groups that are read at a time: as many as every controller transfers, with the header.
const GROUPS_AT_ONCE: u32 = 127;
/// Before somebody who leads elsewhere is called again.
const UNFIT_PAUSE: Span = Span::from_secs(30);
/// Between two looks at the log page.
const LOG_PAUSE: Span = Span::from_ms(200);
/// For a controller that does not say how long a change takes (ANATT).
const CHANGE_DEFAULT: Span = Span::from_secs(10);

impl Path {
    pub(super) fn new(setup: PathSetup, caches: (Arc<Caches>, usize), now: Instant) -> Self {
        Self {
            setup,
            caches,
            stage: Stage::Away { until: now },
            access: None,
            change_until: None,
            log: Log::Known,
            log_at: now,
            page: None,
            is_told_down: false,
            is_told_unfit: false,
            is_ending: false,
            watched: 0,
        }
    }

    pub(super) fn remote(&mut self) -> Option<&mut Remote> {
        match &mut self.stage {
            Stage::There(remote) => Some(remote),
            _ => None,
        }
    }

    /// Does a bounded amount of work. What has happened, if something has.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        options: &Options,
        wishes: ControllerOptions,
        fits: &mut dyn FnMut(&mut Remote) -> Result<u32, String>,
    ) -> Option<News> {
        match &mut self.stage {
            Stage::Away { until } if now < *until || self.is_ending => None,
            Stage::Away { .. } => self.call(now, options, wishes),
            Stage::Calling(calling) => match calling.turn(now)? {
                Ok(remote) => {
                    self.stage = Stage::There(Box::new(remote));
                    None
                }
                Err(error) => self.miss(now, options, error.to_string()),
            },
            Stage::There(remote) => match remote.poll(now) {
                Some(event) => self.handle(now, options, event, fits),
                None => self.look(now, fits),
            },
        }
    }

    fn call(&mut self, now: Instant, options: &Options, wishes: ControllerOptions) -> Option<News> {
        let dial = (self.setup.dial)();
        let (pool, caches) = (self.setup.pool.clone(), self.caches.clone());
        match Calling::begin_over(pool, dial, options.clone(), wishes, caches, now) {
            Ok(calling) => {
                self.stage = Stage::Calling(Box::new(calling));
                None
            }
            Err(error) => self.miss(now, options, error.to_string()),
        }
    }

    /// Nobody was reached.
    fn miss(&mut self, now: Instant, options: &Options, why: String) -> Option<News> {
        self.stage = Stage::Away { until: now.after(options.policy.retry) };
        self.tell_down(why)
    }

    /// Once each time.
    fn tell_down(&mut self, why: String) -> Option<News> {
        // What a controller takes for a change it takes as long as it lives.
        (self.access, self.change_until) = (None, None);
        (!core::mem::replace(&mut self.is_told_down, true)).then_some(News::Down(why))
    }

    fn handle(
        &mut self,
        now: Instant,
        options: &Options,
        event: Event,
        fits: &mut dyn FnMut(&mut Remote) -> Result<u32, String>,
    ) -> Option<News> {
        let Stage::There(remote) = &mut self.stage else { return None };
        match event {
            Event::Ready | Event::Recovered => match fits(remote) {
                Ok(_) => self.arrive(now),
                Err(why) => {
                    self.leave();
                    self.stage = Stage::Away { until: now.after(UNFIT_PAUSE) };
                    let is_new = !core::mem::replace(&mut self.is_told_unfit, true);
                    is_new.then_some(News::Unfit(why))
                }
            },
            Event::NamespaceAttached { .. } | Event::NamespaceDetached { .. } => {
                match fits(remote) {
                    Ok(_) => self.arrive(now),
                    Err(_) => self.is(now, Access::Inaccessible),
                }
            }
            Event::AccessChanged | Event::NamespaceChanged { .. } => {
                self.doubt();
                None
            }
            Event::AdminCompleted(answer) if answer.token == LOG_TOKEN => {
                self.handle_log(now, answer.outcome, fits)
            }
            Event::ResetStarted { .. } => {
                let why = remote.why().unwrap_or_else(|| "its controller is being reset".into());
                self.tell_down(why)
            }
            Event::Dead(_) | Event::Removed | Event::ShutDown { .. } => {
                let why = remote.why().unwrap_or_else(|| "its controller is gone".into());
                self.leave();
                self.stage = Stage::Away { until: now.after(options.policy.retry) };
                self.tell_down(why)
            }
            other => Some(News::Controller(other)),
        }
    }

    /// Calls nobody any more. What stands there is left to be shut down.
    pub(super) fn call_no_more(&mut self) {
        self.is_ending = true;
        if !matches!(self.stage, Stage::There(_)) {
            self.stage = Stage::Away { until: Instant::NEVER };
        }
    }

    /// Lets go of the controller.
    fn leave(&mut self) {
        if let (Stage::There(remote), Some(page)) = (&mut self.stage, self.page.take()) {
            remote.reach().release(page);
        }
        (self.access, self.change_until, self.log) = (None, None, Log::Known);
        self.watched = 0;
    }

    /// The controller is ready, for the first time or again.
    fn arrive(&mut self, now: Instant) -> Option<News> {
        self.log_at = now;
        if self.reports() {
            self.log = Log::Wanted;
            return None;
        }
        self.log = Log::Known;
        self.is(now, Access::Optimized)
    }

    /// Whether its controller says how well it leads there.
    fn reports(&mut self) -> bool {
        let identity = self.remote().and_then(|remote| remote.controller().identity());
        identity.is_some_and(|identity| identity.page.anars())
    }

    /// It may lead there better or worse than was said.
    pub(super) fn doubt(&mut self) {
        self.log = match self.log {
            Log::Known | Log::Wanted => Log::Wanted,
            Log::Asked { piece, .. } => Log::Asked { is_doubted: true, piece },
        };
    }

    /// Reads the log page if somebody wants to know, and looks whether a change takes too long.
    fn look(
        &mut self,
        now: Instant,
        fits: &mut dyn FnMut(&mut Remote) -> Result<u32, String>,
    ) -> Option<News> {
        if self.log == Log::Wanted && now >= self.log_at {
            if !self.reports() {
                return self.judge(now, fits);
            }
            self.read(now, Piece::default());
        }
        if self.change_until.is_some_and(|until| now >= until) {
            self.change_until = None;
            self.log = Log::Wanted;
            self.log_at = now.after(CHANGE_DEFAULT);
            self.access = Some(Access::Inaccessible);
            return Some(News::Access(Access::Inaccessible));
        }
        None
    }

    /// Where there is no log page, it leads there as long as it leads to the same namespace.
    fn judge(
        &mut self,
        now: Instant,
        fits: &mut dyn FnMut(&mut Remote) -> Result<u32, String>,
    ) -> Option<News> {
        (self.log, self.log_at) = (Log::Known, now.after(LOG_PAUSE));
        let Stage::There(remote) = &mut self.stage else { return None };
        let access = if fits(remote).is_ok() { Access::Optimized } else { Access::Inaccessible };
        self.is(now, access)
    }

    /// Reads a piece of the groups.
    fn read(&mut self, now: Instant, piece: Piece) {
        self.log_at = now.after(LOG_PAUSE);
        let Stage::There(remote) = &mut self.stage else { return };
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
            self.log = Log::Asked { is_doubted: false, piece };
        }
    }

    fn handle_log(
        &mut self,
        now: Instant,
        outcome: Outcome,
        fits: &mut dyn FnMut(&mut Remote) -> Result<u32, String>,
    ) -> Option<News> {
        let asked = core::mem::replace(&mut self.log, Log::Wanted);
        let Log::Asked { is_doubted, piece } = asked else { return None };
        let (Stage::There(remote), Some(page)) = (&mut self.stage, self.page) else { return None };
        if !outcome.is_success() {
            // What is refused for good is not asked for again before something has happened.
            if !is_doubted && Status(outcome.0).dnr() {
                self.log = Log::Known;
            }
            return None;
        }
        let Ok(group) = fits(remote) else {
            // It is looked at again when its namespaces change.
            self.log = if is_doubted { Log::Wanted } else { Log::Known };
            return self.is(now, Access::Inaccessible);
        };
        let mut bytes = vec![0; page.len_bytes as usize];
        remote.reach().load(page, &mut bytes).ok()?;
        let found = access_of(&bytes, group);
        let next = piece.next(&bytes);
        if found.is_none() && next.before < next.groups {
            // In doubt nothing is said before it was read from its beginning.
            if !is_doubted {
                self.read(now, next);
            }
            return None;
        }
        if !is_doubted {
            self.log = Log::Known;
        }
        // A controller whose namespaces are in no group reports nothing of them.
        self.is(now, found.unwrap_or(Access::Inaccessible))
    }

    /// How well it leads there is known.
    fn is(&mut self, now: Instant, access: Access) -> Option<News> {
        if access != Access::Change {
            self.change_until = None;
        } else if self.change_until.is_none() && self.access != Some(Access::Inaccessible) {
            let allowed = self.remote().and_then(|remote| {
                let identity = remote.controller().identity()?;
                Some(Span::from_secs(identity.page.anatt().into())).filter(|span| span.ns > 0)
            });
            self.change_until = Some(now.after(allowed.unwrap_or(CHANGE_DEFAULT)));
        } else if self.change_until.is_none() {
            // It has taken too long already.
            return Some(News::Access(Access::Inaccessible));
        }
        (self.is_told_down, self.is_told_unfit) = (false, false);
        self.access = Some(access);
        Some(News::Access(access))
    }

    pub(super) fn wake_at(&mut self, now: Instant) -> Instant {
        let at = match &mut self.stage {
            Stage::Away { .. } if self.is_ending => Instant::NEVER,
            Stage::Away { until } => *until,
            Stage::Calling(calling) => calling.wake_at(now),
            Stage::There(remote) => remote.wake_at(now),
        };
        let log = if self.log == Log::Wanted { self.log_at } else { Instant::NEVER };
        at.min(log).min(self.change_until.unwrap_or(Instant::NEVER))
    }
}

impl Piece {
    /// The one behind this one, of which a page was read.
    fn next(self, page: &[u8]) -> Self {
        let told = AnaHeader::parse(page).map_or(0, |header| u32::from(header.ngrps()));
        let read = page.len().saturating_sub(AnaHeader::BYTES) / AnaGroup::BYTES;
        Self {
            before: self.before.saturating_add(u32::try_from(read).unwrap_or(u32::MAX)),
            groups: if self.before == 0 { told } else { self.groups },
        }
    }
}

/// How many groups a controller has.
fn groups_of(remote: &mut Remote) -> u32 {
    remote.controller().identity().map_or(0, |identity| identity.page.nanagrpid())
}

/// What a log page says of a group, from whichever group on it was read.
fn access_of(page: &[u8], group: u32) -> Option<Access> {
    let groups = page.get(AnaHeader::BYTES..)?.chunks_exact(AnaGroup::BYTES);
    let known = groups.filter_map(|bytes| AnaGroup::parse(bytes).ok());
    let known = known.into_iter().find(|known| known.grpid() == group)?;
    Some(match known.state() {
        AnaState::Optimized => Access::Optimized,
        AnaState::NonOptimized => Access::NonOptimized,
        AnaState::PersistentLoss => Access::PersistentLoss,
        AnaState::Change => Access::Change,
        AnaState::Inaccessible | AnaState::Reserved(_) => Access::Inaccessible,
    })
}

/// Whether two controllers show the same namespace. The error says what differs.
pub(super) fn is_same(one: &Namespace, other: &Namespace) -> Result<(), String> {
    let nothing = nvme::Names::default();
    if one.names != other.names {
        return Err("its names (EUI64, NGUID, UUID) are others than those of the first path".into());
    }
    if one.names == nothing && !(one.is_shared && other.is_shared) {
        return Err("it has no name and is not shared (NMIC), so it may be another".into());
    }
    let shape = |it: &Namespace| (it.block_size, it.metadata_size);
    if shape(one) != shape(other) {
        let ((expected, _), (found, _)) = (shape(one), shape(other));
        return Err(format!(
            "its blocks are of {found} bytes, expected {expected}, as the first path"
        ));
    }
    Ok(())
}
