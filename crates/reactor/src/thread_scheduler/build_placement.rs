//! Conversion of a snapshot to a working placement.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Instant;
use tenmil_linux::CpuList;

use super::core_share::{self, CoreShare, SLACK};
use super::options::Options;
use super::placement::{Placement, ReactorSlot, ThreadSlot};
use super::snapshot::{ReactorLoad, SchedulerEvent, SchedulerSnapshot, ThreadLoad};

/// Maximum overload factor up to which a thread's earlier load is still assumed.
const OVERLOAD_MAX: CoreShare = 16;

/// Input of one scheduling period.
pub(super) struct SchedulingInput<'a> {
    pub(super) now: Instant,
    pub(super) snapshot: &'a SchedulerSnapshot,
    pub(super) options: &'a Options,
}

/// State kept between plans.
#[derive(Clone, Debug, Default)]
pub(super) struct SchedulerHistory {
    threads: BTreeMap<u64, ThreadHistory>,
    taken: BTreeSet<u32>,
    unmatched: BTreeSet<u64>,
    no_core_left: bool,
}

/// State kept of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct ThreadHistory {
    /// Its load when it was last measurable.
    load: CoreShare,
    /// Whether it counts as idle.
    idle: bool,
    /// Time of its last migration request.
    ordered: Option<Instant>,
}

impl SchedulerHistory {
    /// Records a migration request.
    pub(super) fn record_migration_request(&mut self, thread: u64, now: Instant) {
        self.threads.entry(thread).or_default().ordered = Some(now);
    }

    /// Builds the placement, and reports changes since the last plan.
    pub(super) fn build_placement(
        &mut self,
        period: &SchedulingInput<'_>,
        events: &mut Vec<SchedulerEvent>,
    ) -> Placement {
        let SchedulingInput { snapshot, options, .. } = *period;
        let reactors = self.reactor_slots(period, events);
        let idle_core = scheduling_reactor(&reactors, options.scheduling_core);
        let quota = reactors_within_quota(snapshot.quota, reactors.len());
        let mut board = Placement {
            reactors,
            threads: Vec::new(),
            migrations: Vec::new(),
            idle_reactor: idle_core,
            quota,
            limit: options.overload_limit_share(),
            busy: options.idle_limit_share(),
        };
        // A set, since there may be thousands of threads.
        let living: BTreeSet<u64> = snapshot.threads.iter().map(|thread| thread.id).collect();
        self.threads.retain(|id, _| living.contains(id));
        self.unmatched.retain(|id| self.threads.contains_key(id));
        for thread in &snapshot.threads {
            // A thread on an unknown reactor cannot be migrated.
            let Some(reactor) =
                board.reactors.iter().position(|reactor| reactor.core == thread.home)
            else {
                continue;
            };
            let slot = self.thread_slot(period, thread, reactor, &board.reactors, events);
            let target = &mut board.reactors[reactor];
            target.thread_load += slot.load;
            target.active_threads += usize::from(slot.has_load());
            target.threads += 1;
            // The load that is not due to threads is the reactor's own.
            target.own_load = target
                .own_load
                .saturating_sub(core_share::share_of_elapsed(thread.busy, snapshot.elapsed));
            board.threads.push(slot);
        }
        board
    }

    fn reactor_slots(
        &mut self,
        period: &SchedulingInput<'_>,
        events: &mut Vec<SchedulerEvent>,
    ) -> Vec<ReactorSlot> {
        let SchedulingInput { snapshot, options, .. } = *period;
        let none_left = snapshot.reactors.iter().all(|reactor| reactor.taken);
        for reactor in &snapshot.reactors {
            let core = reactor.core;
            if reactor.taken && self.taken.insert(core) {
                events.push(SchedulerEvent::CoreOffline { core });
            } else if !reactor.taken && self.taken.remove(&core) {
                events.push(SchedulerEvent::CoreOnline { core });
            }
        }
        if none_left && !std::mem::replace(&mut self.no_core_left, none_left) {
            events.push(SchedulerEvent::NoUsableCores);
        }
        self.no_core_left = none_left;
        let slot = |reactor: &ReactorLoad| {
            let own = core_share::share_of_elapsed(reactor.busy, snapshot.elapsed);
            ReactorSlot {
                core: reactor.core,
                open: none_left || !reactor.taken,
                isolated: options.isolated.contains(reactor.core),
                may_hide_demand: own >= options.sibling_busy_limit_share(),
                node: reactor.node,
                siblings: sibling_reactors(reactor, &snapshot.reactors),
                own_load: own,
                load_min: 0,
                thread_load: 0,
                active_threads: 0,
                threads: 0,
            }
        };
        snapshot.reactors.iter().map(slot).collect()
    }

    fn thread_slot(
        &mut self,
        period: &SchedulingInput<'_>,
        thread: &ThreadLoad,
        reactor: usize,
        reactors: &[ReactorSlot],
        events: &mut Vec<SchedulerEvent>,
    ) -> ThreadSlot {
        let SchedulingInput { now, snapshot, options } = *period;
        let known = self.threads.entry(thread.id).or_default();
        let seen = core_share::share_of_elapsed(thread.busy, snapshot.elapsed);
        // On a saturated reactor a thread may have wanted more time than it got, so its earlier
        // measured load counts if that was larger. If it was much larger, the thread has become
        // quieter since: an overload by that factor is unlikely.
        let squeezed = reactors[reactor].may_hide_demand && seen * OVERLOAD_MAX >= known.load;
        known.load = if squeezed { seen.max(known.load) } else { seen };
        // Hysteresis: an idle thread must exceed the limit by SLACK to count as active.
        let idle_below = options.idle_limit_share() + if known.idle { SLACK } else { 0 };
        known.idle = known.load < idle_below;
        let last = known.ordered.max(thread.last_migration);
        let rested = last.is_none_or(|last| now.since(last) >= options.migration_interval);
        let (load, idle) = (known.load, known.idle);
        let allowed = self.allowed_reactors(thread, reactor, reactors, events);
        ThreadSlot {
            id: thread.id,
            reactor,
            load,
            idle,
            movable: rested && !thread.moving,
            is_unbalanced: reactors[reactor].isolated && allowed[reactor],
            node: thread.node,
            allowed,
        }
    }

    /// Reactors on which a thread may run: those of its mask, as far as possible.
    fn allowed_reactors(
        &mut self,
        thread: &ThreadLoad,
        home: usize,
        reactors: &[ReactorSlot],
        events: &mut Vec<SchedulerEvent>,
    ) -> Vec<bool> {
        let Some(mask) = &thread.mask else {
            self.report_affinity_restored(thread.id, events);
            return reactors_without_mask(reactors);
        };
        let asked = reactors_of_mask(mask, reactors);
        if asked.contains(&true) {
            self.report_affinity_restored(thread.id, events);
            return asked;
        }
        if self.unmatched.insert(thread.id) {
            events.push(SchedulerEvent::AffinityUnsatisfied {
                thread: thread.id,
                mask: mask.clone(),
            });
        }
        reactors_near_closed_mask(mask, home, reactors)
    }

    fn report_affinity_restored(&mut self, thread: u64, events: &mut Vec<SchedulerEvent>) {
        if self.unmatched.remove(&thread) {
            events.push(SchedulerEvent::AffinityRestored { thread });
        }
    }
}

/// Open reactors of a mask; isolated ones only if it names no others.
pub(super) fn reactors_of_mask(mask: &CpuList, reactors: &[ReactorSlot]) -> Vec<bool> {
    let named = |reactor: &ReactorSlot| reactor.open && mask.contains(reactor.core);
    let shared = reactors.iter().any(|reactor| named(reactor) && !reactor.isolated);
    reactors.iter().map(|reactor| named(reactor) && (!shared || !reactor.isolated)).collect()
}

/// Open reactors that are not isolated, or all open ones if there are no others.
pub(super) fn reactors_without_mask(reactors: &[ReactorSlot]) -> Vec<bool> {
    let shared = reactors.iter().any(|reactor| reactor.open && !reactor.isolated);
    reactors.iter().map(|reactor| reactor.open && (!shared || !reactor.isolated)).collect()
}

/// Reactors for a thread whose mask has no open reactor: near its mask's cores, and its current
/// one.
fn reactors_near_closed_mask(mask: &CpuList, home: usize, reactors: &[ReactorSlot]) -> Vec<bool> {
    let meant =
        |node| reactors.iter().any(|reactor| reactor.node == node && mask.contains(reactor.core));
    let is_near = |reactor: &ReactorSlot| {
        reactor.open && !reactor.isolated && reactor.node.is_some() && meant(reactor.node)
    };
    let mut allowed: Vec<bool> = reactors.iter().map(is_near).collect();
    if !allowed.contains(&true) {
        allowed = reactors_without_mask(reactors);
    }
    allowed[home] |= reactors[home].open && !reactors[home].isolated;
    allowed
}

fn sibling_reactors(reactor: &ReactorLoad, reactors: &[ReactorLoad]) -> Vec<usize> {
    let shares =
        |other: &ReactorLoad| other.core != reactor.core && reactor.siblings.contains(other.core);
    (0..reactors.len()).filter(|other| shares(&reactors[*other])).collect()
}

/// Reactor on the scheduling core, or the first suitable substitute.
fn scheduling_reactor(reactors: &[ReactorSlot], scheduling_core: Option<u32>) -> usize {
    let chosen = |reactor: &ReactorSlot| reactor.open && scheduling_core == Some(reactor.core);
    let shared = |reactor: &ReactorSlot| reactor.open && !reactor.isolated;
    let first = |suits: &dyn Fn(&ReactorSlot) -> bool| {
        let suiting = (0..reactors.len()).filter(|reactor| suits(&reactors[*reactor]));
        suiting.min_by_key(|reactor| reactors[*reactor].core)
    };
    first(&chosen)
        .or_else(|| first(&shared))
        .or_else(|| first(&|reactor| reactor.open))
        .unwrap_or(0)
}

/// Number of reactors that a quota can keep busy: its whole CPUs, at least one.
fn reactors_within_quota(quota: Option<f64>, reactors: usize) -> usize {
    let Some(quota) = quota else { return reactors };
    let fits = |count: &usize| u32::try_from(*count).is_ok_and(|count| f64::from(count) <= quota);
    (1..=reactors).take_while(fits).count().max(1)
}
