//! A controller behind a network, as a register bank: what a store to CC means is said over the wire,
//! and what CSTS reads is what was heard.
//!
//! ```text
//!   driver   CAP, VS, CC, CSTS          admin ring              doorbells
//!              │  cached                   │                        │ words in memory
//!   front    life: dial, Connect,       admin: each command     berths: one for each I/O queue,
//!            properties, losing,        over the wire, but      with a connection of its own,
//!            waiting for its end        for those that make     made here and served by the
//!                                       and unmake queues       thread of the queue
//! ```
//!
//! CSTS.RDY goes to 0 once no connection is left, and the old controller can do nothing any more of
//! what it was told: it has confirmed CC.EN=0, or its time is over, or nothing was under way that
//! could do harm. So whatever the driver was told about a reset of an SSD in this machine holds here.
//!
//! | file | what of it |
//! |---|---|
//! | `life` | from a dialled stream to a ready controller, and to its end |
//! | `admin` | the admin ring, and the properties that share its connection |
//! | `queues` | I/O queues: opened, handed over, closed |

mod admin;
mod life;
mod queues;

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{Dma, Instant, Mmio, Segment, Span, Wake, WakeSource};
use dma::SharedHostMemory;
use wire::cache::CacheInstance;
use wire::register::{
    self, AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, ReadyTimeouts,
    offset,
};

use crate::berth::{Closed, News};
use crate::caches::{Association, Caches};
use crate::dial::Dial;
use crate::farewell::Farewell;
use crate::opening::{self, CONNECT_BYTES};
use crate::options::Options;
use crate::reach::Reach;
use crate::rings::{Bell, RingPlaces};
use admin::AdminLane;
pub(crate) use admin::RING_DEPTH as ADMIN_DEPTH;
use life::{Stage, Wanted};
use queues::Queue;

/// The registers of a controller behind a network, and everything behind them that is not the way of
/// an I/O.
pub struct Front {
    dial: Box<dyn Dial>,
    options: Options,
    reach: Reach,
    news: Arc<News>,
    stage: Stage,
    registers: Registers,
    admin: Option<AdminLane>,
    /// What controllers may have in their caches, and over which path this one is reached.
    caches: Arc<Caches>,
    path: usize,
    /// The controller that the admin connection leads to.
    association: Option<Arc<Association>>,
    /// Admin connections that are over, but for memory that is still read.
    partings: Vec<Farewell>,
    /// The same of queues that are gone, with what is to be reported of them.
    left: Vec<(u16, Farewell, Closed)>,
    queues: BTreeMap<u16, Queue>,
    bells: BTreeMap<u16, Bell>,
    /// Where the data of Connect lie: of the admin queue, and of the others.
    page: Segment,
    /// Which controller it is.
    cntlid: u16,
    /// What its Identify data say that matters here.
    learnt: Learnt,
    /// Since when it has been lost, or reset, if it has not been brought up since.
    lost_since: Option<Instant>,
    /// It has been brought up before: so it is called again if it cannot be reached.
    is_known: bool,
    /// Why it was lost last, or could not be reached.
    why: Option<String>,
    /// It was lost with something outstanding that would do harm if it were executed late.
    may_linger: bool,
    /// Since when nothing has been said to it.
    silent_since: Instant,
    /// The driver has stored to CC.
    wanted: Option<Wanted>,
    /// Before this, nobody is called again.
    next_try: Instant,
    /// How long it may take to get ready (CAP.TO).
    ready_within: Span,
    /// Something has happened that the driver finds in CSTS.
    has_changed: bool,
    counts: Counts,
}

/// What the driver reads and writes.
#[derive(Clone, Copy, Debug)]
struct Registers {
    cap: Capabilities,
    vs: u32,
    cc: Configuration,
    csts: ControllerStatus,
    aqa: u32,
    admin: RingPlaces,
    /// All of them read as ones: nobody will ever come back.
    is_gone: bool,
}

/// What Identify Controller says about queues and about the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Learnt {
    /// The most data in a capsule of an I/O queue.
    pub(crate) in_capsule_bytes: u32,
    /// How long after its host has sent the last byte a controller may go on with what it was told.
    pub(crate) quiet: Span,
    /// By what another controller may be asked to end it, without its number: CIU and CIRN.
    pub(crate) instance: Option<(u8, u64)>,
}

/// How often what has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Streams that were asked for.
    pub dialled: u64,
    /// Times that a controller was connected to.
    pub connected: u64,
    /// Times that one was lost.
    pub lost: u64,
}

impl Front {
    /// A front that begins to connect with its first [`turn`](Self::turn). `None` if there is no
    /// memory left.
    pub(crate) fn new(
        dial: Box<dyn Dial>,
        options: Options,
        reach: Reach,
        (caches, path): (Arc<Caches>, usize),
        now: Instant,
    ) -> Option<Self> {
        let page = reach.allocate(2 * CONNECT_BYTES)?;
        let quiet = options.policy.detect;
        let learnt = Learnt { in_capsule_bytes: 0, quiet, instance: None };
        Some(Self {
            dial,
            options,
            reach,
            news: Arc::default(),
            stage: Stage::Pausing { until: now },
            registers: Registers::new(),
            admin: None,
            caches,
            path,
            association: None,
            partings: Vec::new(),
            left: Vec::new(),
            queues: BTreeMap::new(),
            bells: BTreeMap::new(),
            page,
            cntlid: 0,
            learnt,
            lost_since: None,
            is_known: false,
            why: None,
            may_linger: false,
            silent_since: now,
            wanted: None,
            next_try: now,
            ready_within: Span::default(),
            has_changed: false,
            counts: Counts::default(),
        })
    }

    /// Does a bounded amount of work.
    pub(crate) fn turn(&mut self, now: Instant) {
        self.partings.retain_mut(|farewell| !farewell.is_over(now));
        self.turn_admin(now);
        if !self.left.is_empty() {
            self.end_left(now);
        }
        if self.news.take() {
            self.heed_queues(now);
        }
        self.turn_queues(now);
        self.live(now);
        self.reach.set_holds(self.holds());
    }

    /// When to turn even if nothing comes.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let admin = self.admin.as_ref().map_or(Instant::NEVER, AdminLane::wake_at);
        let queues = self.queues.values().map(|queue| queue.wake_at(now));
        let left = self.left.iter().map(|(_, farewell, _)| farewell);
        let partings = self.partings.iter().chain(left).map(Farewell::wake_at);
        queues.chain(partings).fold(admin.min(self.stage_wake_at(now)), Instant::min)
    }

    /// Nobody will turn it any more: closes what can be closed.
    pub(crate) fn abandon(&mut self) {
        self.part_admin();
        self.close_queues();
        self.note_closed_queues();
        // What the old controller still does touches no memory of ours.
        self.reach.set_holds(!self.are_queues_closed() || !self.partings.is_empty());
    }

    /// Whether something has happened that the driver finds in CSTS, since this was last asked.
    pub(crate) fn take_change(&mut self) -> bool {
        core::mem::take(&mut self.has_changed)
    }

    /// What the controller has said about itself.
    pub(crate) fn learn(&mut self, page: &wire::identify::IdentifyController) {
        self.learnt = Learnt::of(page, self.options.policy.detect);
    }

    /// Which instance of a cache its namespace writes through.
    pub(crate) fn identify_cache(&self, instance: Option<CacheInstance>) {
        if let Some(association) = &self.association {
            self.caches.identify(association, instance);
        }
    }

    /// What controllers may have in their caches.
    pub(crate) fn caches(&self) -> &Arc<Caches> {
        &self.caches
    }

    /// It has been brought up completely: whatever was lost is no more.
    pub(crate) fn recovered(&mut self) {
        self.lost_since = None;
        self.is_known = true;
    }

    /// Since when nobody is connected that was before.
    pub(crate) fn lost_since(&self) -> Option<Instant> {
        self.lost_since
    }

    /// Why it was lost last, or could not be reached.
    pub(crate) fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn peer(&self) -> String {
        self.dial.peer()
    }

    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Who is woken when a queue has something to tell.
    pub(crate) fn wakes(&self, sleeper: Arc<dyn Wake + Send + Sync>) {
        self.news.wakes(sleeper);
    }

    /// What wakes a thread that waits for the admin connection.
    pub(crate) fn wake_source(&self) -> WakeSource<'_> {
        self.admin.as_ref().map_or(WakeSource::Nothing, AdminLane::wake_source)
    }

    pub(crate) fn arm(&mut self) -> bool {
        self.news.is_there() || self.admin.as_mut().is_some_and(|admin| admin.exchange.arm())
    }

    pub(crate) fn disarm(&mut self) {
        if let Some(admin) = &mut self.admin {
            admin.exchange.disarm();
        }
    }

    fn memory(&self) -> SharedHostMemory {
        SharedHostMemory::new(self.reach.pool())
    }

    /// Stores what Connect carries, for the admin queue or for the others.
    fn connect_data(&self, is_admin: bool) -> Segment {
        let (at, cntlid) = match is_admin {
            true => (0, wire::fabrics::CNTLID_DYNAMIC),
            false => (CONNECT_BYTES, self.cntlid),
        };
        // Two of them fit by its size.
        let place = self.page.slice(at, CONNECT_BYTES).unwrap_or_default();
        opening::store_connect_data(self.reach.pool(), place, &self.options, cntlid);
        place
    }

    fn bell(&mut self, queue: u16) -> Bell {
        self.bells.entry(queue).or_default().clone()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.abandon();
        self.reach.release(self.page);
    }
}

impl Registers {
    /// As long as nobody is connected.
    fn new() -> Self {
        Self {
            cap: Capabilities::zeroed(),
            vs: 0,
            cc: Configuration::zeroed(),
            csts: ControllerStatus::zeroed(),
            aqa: 0,
            admin: RingPlaces::default(),
            is_gone: false,
        }
    }

    /// CAP as the driver finds it: what is said about queues comes from the controller, what is said
    /// about time from how long we are ready to wait.
    fn learn(&mut self, cap: Capabilities, vs: u32, options: &Options, quiet: Span) {
        // Closing takes one question, one answer, and the end of the old controller.
        let closing = Span { ns: 2 * options.policy.detect.ns + quiet.ns };
        self.cap = Capabilities::zeroed().with(|presented| {
            presented
                .mqes(cap.mqes())
                .cqr(true)
                .to(u8::try_from(units(closing)).unwrap_or(u8::MAX))
                .css_nvm(cap.css_nvm())
                .css_io(cap.css_io())
                .css_none(cap.css_none())
                .crwms(true)
        });
        self.vs = vs;
    }

    /// Where the driver says that the admin rings are.
    fn admin_rings(&self) -> RingPlaces {
        let aqa = AdminQueueAttributes(self.aqa);
        RingPlaces {
            submission_depth: u32::from(aqa.asqs()) + 1,
            completion_depth: u32::from(aqa.acqs()) + 1,
            ..self.admin
        }
    }

    fn ready_timeouts(options: &Options) -> u32 {
        let longest =
            Span { ns: options.policy.give_up.ns.saturating_add(options.policy.connect.ns) };
        let units = u16::try_from(units(longest)).unwrap_or(u16::MAX);
        ReadyTimeouts::zeroed().with(|timeouts| timeouts.crwmt(units)).0
    }
}

/// In units of 500 ms, with two to spare: who waits for us gives up after us.
fn units(span: Span) -> u64 {
    span.ns / (u64::from(register::TIMEOUT_UNIT_MS) * 1_000_000) + 2
}

impl Learnt {
    fn of(page: &wire::identify::IdentifyController, detect: Span) -> Self {
        // IOCCSZ counts the command in (Base 2.1 §5.1.13.2.1); data that do not begin right behind
        // it are of no use to TCP (TCP 1.0 §3.3.1).
        let in_capsule = page.ioccsz().saturating_mul(16).saturating_sub(64);
        let in_capsule_bytes = if page.icdoff() == 0 { in_capsule } else { 0 };
        // Base 2.1 §9.6: three keep-alive times where any command counts as a sign of life (the
        // controller looks only at the end of each interval, and one may have begun just after the
        // last of them), and two where only Keep Alive does. One of them is for what was sent and
        // has yet to arrive: the host would have missed its answer in as long.
        let intervals = if page.tbkas() { 3 } else { 2 };
        // Controllers round up what they are asked for (§5.1.25.1.8).
        let step = Span::from_ms(KEEP_ALIVE_UNIT_MS * u64::from(page.kas().max(1)));
        let interval = detect.ns.next_multiple_of(step.ns);
        let quiesce = Span::from_ms(page.cqt().into());
        let quiet = Span { ns: intervals * interval + quiesce.ns };
        let instance = Some((page.ciu(), page.cirn())).filter(|(ciu, _)| *ciu != 0);
        Self { in_capsule_bytes, quiet, instance }
    }
}

/// The unit of KAS (Base 2.1 §5.1.13.2.1).
const KEEP_ALIVE_UNIT_MS: u64 = 100;

#[expect(clippy::cast_possible_truncation, reason = "property offsets end long before 4 GiB")]
const fn at(offset: usize) -> u32 {
    offset as u32
}

const CAP: u32 = at(offset::CAP);
const VS: u32 = at(offset::VS);
const CC: u32 = at(offset::CC);
const CSTS: u32 = at(offset::CSTS);
const AQA: u32 = at(offset::AQA);
const ASQ: u32 = at(offset::ASQ);
const ACQ: u32 = at(offset::ACQ);
const CRTO: u32 = at(offset::CRTO);

impl Mmio for Front {
    type Doorbell = Bell;

    fn read32(&mut self, offset: u32) -> u32 {
        if self.registers.is_gone {
            return register::ALL_ONES;
        }
        match offset {
            VS => self.registers.vs,
            CC => self.registers.cc.0,
            CSTS => self.registers.csts.0,
            AQA => self.registers.aqa,
            CRTO => Registers::ready_timeouts(&self.options),
            _ => 0,
        }
    }

    fn read64(&mut self, offset: u32) -> u64 {
        if self.registers.is_gone {
            return u64::MAX;
        }
        match offset {
            CAP => self.registers.cap.0,
            ASQ => self.registers.admin.submission,
            ACQ => self.registers.admin.completion,
            _ => 0,
        }
    }

    fn write32(&mut self, offset: u32, value: u32) {
        match offset {
            CC => self.configure(Configuration(value)),
            AQA => self.registers.aqa = value,
            _ => {}
        }
    }

    fn write64(&mut self, offset: u32, value: u64) {
        match offset {
            ASQ => self.registers.admin.submission = value,
            ACQ => self.registers.admin.completion = value,
            _ => {}
        }
    }

    /// Doorbells of completion queues are words that nobody looks at.
    fn doorbell(&mut self, offset: u32) -> Bell {
        let number = (offset - at(offset::DOORBELLS)) / 4;
        match (u16::try_from(number / 2), number % 2) {
            (Ok(queue), 0) => self.bell(queue),
            _ => Bell::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Span;
    use wire::identify::IdentifyController;

    use super::Learnt;

    #[test]
    fn an_old_controller_is_believed_dead_after_what_the_specification_says_and_not_before() {
        for (detect_ms, tbkas, kas, cqt, quiet_ms) in [
            // Ours, and Linux with its granularity of a second.
            (5000, true, 1, 1000, 16_000),
            (5000, true, 10, 0, 15_000),
            (1500, true, 10, 0, 6000),
            // One that counts Keep Alive only, and rounds up to ten seconds.
            (5000, false, 100, 0, 20_000),
            (5000, false, 1, 500, 10_500),
            // Who has no keep-alive time is believed to use the one that it was told.
            (5000, false, 0, 0, 10_000),
        ] {
            let page = IdentifyController::zeroed().with(|id| id.tbkas(tbkas).kas(kas).cqt(cqt));
            let found = Learnt::of(&page, Span::from_ms(detect_ms)).quiet;
            assert_eq!(found, Span::from_ms(quiet_ms), "{detect_ms} {tbkas} {kas} {cqt}");
        }
    }
}
