//! A mirror that a host has over several targets: the real mirror over the real paths.
//!
//! ```text
//!   program ── queue ──▶ block::Mirror ──┬── paths ── network ── target ── disk     one for each leg
//!                                        └── paths ── network ── target ── disk
//! ```
//!
//! The mirror reads and writes its superblocks while it is opened, and the opener steps the world
//! meanwhile.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Request, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_drivers::Mirror;
use tenmil_drivers::mirror::{MirrorLegDevice, MirrorOptions};
use tenmil_nvme_fabrics::{FabricsChannel, Multipath, PathEvent, QueueRequest};
use tenmil_volume::PoolOwner;
use tenmil_volume::format::OwnerRecord;

use crate::cluster_network::ClusterNetwork;
use crate::cluster_plan::HostPlan;
use crate::disk_access::{ExportAddress, MultipathAccess};
use crate::injected_bugs::InjectedBugs;

/// The legs of a host's mirror.
pub(crate) struct MirrorAccess {
    /// All its memory.
    pub(crate) regions: RegionTable,
    /// That for data.
    pub(crate) memory: Segment,
    /// The mirror's channel, while it is open.
    pub(crate) queue: Option<Box<dyn IoChannel>>,
    mirror: Option<Mirror>,
    legs: Vec<SharedLegPaths>,
    /// When the mirror is opened, if its legs are there.
    opens_at: Instant,
    /// When it is opened with those legs that are there.
    opens_without_at: Instant,
    setup: MirrorSetup,
    /// Times that the open mirror has lost completed writes on all legs, by its own account.
    losses: u64,
    /// Since when each leg may lack what was completed: its power was lost, and no flush that began later has
    /// succeeded.
    exposed: Vec<Option<Instant>>,
}

/// What opens a mirror.
#[derive(Clone)]
pub(crate) struct MirrorSetup {
    regions: RegionTable,
    legs: Vec<SharedLegPaths>,
    options: MirrorOptions,
}

type SharedLegPaths = Arc<Mutex<LegPaths>>;

/// The paths of one leg.
struct LegPaths {
    multipath: Multipath,
    /// The first queue, by which the leg's size becomes known.
    first: Option<QueueRequest>,
    limits: Option<Limits>,
    fail_fast: Span,
}

/// A leg as the mirror has it.
struct LegDevice {
    paths: SharedLegPaths,
    limits: Limits,
}

/// A channel to a leg: a queue, as soon as there is one.
struct LegChannel {
    paths: SharedLegPaths,
    limits: Limits,
    ticket: QueueRequest,
    queue: Option<FabricsChannel>,
    /// When what cannot be sent fails.
    until: Option<Instant>,
    failed: VecDeque<IoCompletion>,
}

/// Regions of a host with a mirror: queues, data, and what each channel of the mirror takes.
const REGIONS_MAX: usize = 256;
/// How long an absent leg is waited for.
const WAIT_FOR_LEGS: Span = Span::from_secs(1);
const OPEN_AGAIN: Span = Span::from_ms(300);
/// A mirror's channel, the look at superblocks, and one of a channel that is being given up.
const QUEUE_PAIRS: u16 = 4;

impl MirrorAccess {
    /// Legs at these addresses, each of which begins to be called, and so many bytes for data.
    ///
    /// # Errors
    ///
    /// If there is no memory for it.
    pub(crate) fn new(
        (number, bugs): (usize, InjectedBugs),
        plan: &HostPlan,
        addresses: &[ExportAddress],
        (network, bytes): (&ClusterNetwork, usize),
        (now, opens_at): (Instant, Instant),
    ) -> Result<Self, String> {
        let regions = RegionTable::new(REGIONS_MAX);
        let mapping =
            MemoryMapping::new(bytes, MemoryBacking::Private).map_err(|error| error.to_string())?;
        let memory = regions.add_mapping(mapping).map_err(|error| format!("{error:?}"))?;
        let leg = |address: &ExportAddress| {
            let reached = (network, &regions, QUEUE_PAIRS);
            let mut multipath =
                MultipathAccess::with_paths_to_all((number, bugs), plan, address, reached, now)?;
            let first = Some(multipath.open_queue());
            let fail_fast = plan.fail_fast;
            Ok(Arc::new(Mutex::new(LegPaths { multipath, first, limits: None, fail_fast })))
        };
        let legs = addresses.iter().map(leg).collect::<Result<Vec<_>, String>>()?;
        let record =
            OwnerRecord { pid: u32::try_from(number + 1).unwrap_or(1), ..OwnerRecord::NONE };
        // A host that starts again is the owner that it was.
        let opener = Some(PoolOwner { id: number as u128 + 1, record });
        let mut options = MirrorOptions::default();
        options.opener = opener;
        options.bugs.starts_without_legs = bugs.mirror_starts_from_stale_leg;
        options.bugs.ignores_failed_flush = bugs.mirror_keeps_lossy_leg;
        let setup = MirrorSetup { regions: regions.clone(), legs: legs.clone(), options };
        Ok(Self {
            regions,
            memory,
            queue: None,
            mirror: None,
            losses: 0,
            exposed: vec![None; legs.len()],
            legs,
            opens_at,
            opens_without_at: opens_at.after(WAIT_FOR_LEGS),
            setup,
        })
    }

    /// What opens the mirror, if that is due.
    pub(crate) fn take_mirror_setup(&mut self, now: Instant) -> Option<MirrorSetup> {
        if self.mirror.is_some() || now < self.opens_at {
            return None;
        }
        let known = self.legs.iter().filter(|leg| lock(leg).has_path_and_size()).count();
        let is_due = known == self.legs.len() || known > 0 && now >= self.opens_without_at;
        is_due.then(|| self.setup.clone())
    }

    /// It was opened, or was not: what is to be noted.
    pub(crate) fn handle_opened(&mut self, opened: Result<Mirror, String>, now: Instant) -> String {
        let opened = opened
            .and_then(|mirror| Ok((mirror.channel().map_err(|error| error.to_string())?, mirror)));
        match opened {
            Ok((queue, mirror)) => {
                let text = format!("opens its mirror: {}", mirror.description());
                self.losses = queue.known_write_loss_count();
                (self.queue, self.mirror) = (Some(queue), Some(mirror));
                text
            }
            Err(why) => {
                self.opens_at = now.after(OPEN_AGAIN);
                format!("does not open its mirror: {why}")
            }
        }
    }

    /// Which legs are in sync, and how many regions are still to be copied.
    pub(crate) fn in_sync_mask_and_remaining_regions(&self) -> Option<(u8, u64)> {
        self.mirror.as_ref().map(Mirror::in_sync_mask_and_remaining_regions)
    }

    /// A leg loses its power. Whether no other one has all that was completed.
    pub(crate) fn handle_power_loss(&mut self, leg: usize, now: Instant) -> bool {
        self.exposed[leg] = Some(now);
        let (in_sync, _) = self.in_sync_mask_and_remaining_regions().unwrap_or_default();
        let has_all = |other: usize| in_sync >> other & 1 == 1 && self.exposed[other].is_none();
        !(0..self.legs.len()).any(has_all)
    }

    /// Whether every leg in sync may lack what was completed: another one that had it was given up.
    pub(crate) fn may_in_sync_legs_lack_writes(&self) -> bool {
        let (in_sync, _) = self.in_sync_mask_and_remaining_regions().unwrap_or_default();
        let lacks = |leg: usize| in_sync >> leg & 1 == 0 || self.exposed[leg].is_some();
        in_sync != 0 && (0..self.legs.len()).all(lacks)
    }

    /// Whether the mirror has lost completed writes since the last call; it counts so many.
    pub(crate) fn has_new_losses(&mut self, losses: u64) -> bool {
        std::mem::replace(&mut self.losses, losses) < losses
    }

    /// Whether a leg may lack what was completed: if the host ends now, which one is unknown.
    pub(crate) fn may_lose_unflushed(&self) -> bool {
        self.exposed.iter().any(Option::is_some)
    }

    /// A flush that began then has succeeded.
    pub(crate) fn record_flush(&mut self, begun: Instant) {
        for exposed in &mut self.exposed {
            *exposed = exposed.filter(|since| *since >= begun);
        }
    }

    pub(crate) fn next_event(&mut self, now: Instant) -> Option<(usize, PathEvent)> {
        self.legs.iter().enumerate().find_map(|(leg, paths)| Some((leg, lock(paths).poll(now)?)))
    }

    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let wakes = self.legs.iter().map(|leg| lock(leg).multipath.wake_at(now));
        let opens_at = if self.mirror.is_none() { self.opens_at } else { Instant::NEVER };
        let opens_at = if opens_at > now { opens_at } else { Instant::NEVER };
        wakes.fold(opens_at, Instant::min)
    }

    pub(crate) fn shut_down(&mut self, now: Instant) {
        (self.queue, self.mirror, self.opens_at) = (None, None, Instant::NEVER);
        self.legs.iter().for_each(|leg| lock(leg).multipath.shut_down(now));
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        self.legs.iter().any(|leg| lock(leg).multipath.is_shutting_down())
    }
}

impl MirrorSetup {
    /// Opens the mirror; `now` steps the world until time has advanced.
    pub(crate) fn open_mirror(&self, now: &mut dyn FnMut() -> Instant) -> Result<Mirror, String> {
        let leg = |(number, paths): (usize, &SharedLegPaths)| {
            let limits = lock(paths).limits.clone();
            let medium = limits.ok_or("no path leads there").map(|limits| {
                Arc::new(LegDevice { paths: Arc::clone(paths), limits }) as Arc<dyn BlockDevice>
            });
            MirrorLegDevice {
                name: format!("leg {number}"),
                medium: medium.map_err(tenmil_base::Error::environment),
            }
        };
        let legs: Vec<MirrorLegDevice> = self.legs.iter().enumerate().map(leg).collect();
        Mirror::open(&self.regions, &legs, &self.options, now).map_err(|error| error.to_string())
    }
}

impl LegPaths {
    fn poll(&mut self, now: Instant) -> Option<PathEvent> {
        let first = self.first.and_then(|ticket| self.multipath.take_queue(ticket));
        if let Some(queue) = first {
            (self.first, self.limits) = (None, Some(queue.limits().clone()));
        }
        self.multipath.poll(now)
    }

    /// Whether a path leads there, and the size is known.
    fn has_path_and_size(&self) -> bool {
        self.limits.is_some() && self.multipath.ana_state(0).is_some()
    }
}

impl BlockDevice for LegDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        let ticket = lock(&self.paths).multipath.open_queue();
        let (paths, limits) = (Arc::clone(&self.paths), self.limits.clone());
        let (queue, until, failed) = (None, None, VecDeque::new());
        Ok(Box::new(LegChannel { paths, limits, ticket, queue, until, failed }))
    }
}

impl IoChannel for LegChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if let Some(queue) = &mut self.queue {
            return queue.submit(now, requests, segments);
        }
        let fail_fast = lock(&self.paths).fail_fast;
        if now < *self.until.get_or_insert(now.after(fail_fast)) {
            return 0;
        }
        let failed = |request: &Request| IoCompletion {
            token: request.token,
            status: IoStatus::PATH_ERROR,
            result: 0,
        };
        self.failed.extend(requests.iter().map(failed));
        requests.len()
    }

    fn flush_submissions(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.flush_submissions();
        }
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let before = completions.len();
        self.failed.drain(..).for_each(|completion| completions.push(completion));
        if self.queue.is_none() {
            self.queue = lock(&self.paths).multipath.take_queue(self.ticket);
        }
        if let Some(queue) = &mut self.queue {
            queue.poll(now, completions);
        }
        completions.len() - before
    }

    fn known_write_loss_count(&self) -> u64 {
        self.queue.as_ref().map_or(0, IoChannel::known_write_loss_count)
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        if let Some(queue) = &mut self.queue {
            queue.ack_repaired_write_losses(count);
        }
    }
}

impl ChannelWakeup for LegChannel {
    fn wake_at(&self) -> Instant {
        self.queue.as_ref().map_or(Instant::NEVER, ChannelWakeup::wake_at)
    }
}

impl Drop for LegChannel {
    fn drop(&mut self) {
        if self.queue.is_none() {
            lock(&self.paths).multipath.close_queue(self.ticket);
        }
    }
}

fn lock(paths: &SharedLegPaths) -> MutexGuard<'_, LegPaths> {
    paths.lock().unwrap_or_else(PoisonError::into_inner)
}
