//! Fair shares: how many commands each host may have executing, while one host would displace the others.
//!
//! ```text
//!   queue ── demand ──▶ review, every few milliseconds ── allowed ──▶ queue
//! ```
//!
//! Devices and reactors serve commands in the order of their arrival, so a host gets the share that it has
//! of the commands in flight. A host with many queues and a high depth would take nearly all of it.
//! While the hosts of a reactor have more commands than [`ServiceLimits::fair_depth`] together, that depth
//! is divided among them by max-min fairness: hosts that need less than an equal share have what they need,
//! and the others divide the rest equally. None is restricted to less than the smallest demand, so hosts
//! with the same depth do not restrict each other.
//!
//! The queues of a restricted host take turns of a millisecond: few commands on each of many queues would
//! arrive and be answered one by one, and take several times the processor time of the same number on one
//! queue, which the other hosts lack. A queue in its turn starts what those before it have still executing
//! leave of the share.
//!
//! An equal number of executing commands is not an equal rate: the next command of a restricted host is
//! ready when one completes, and those of the others cross the network first. So a restricted host starts
//! commands at the rate of the fastest host that is not restricted, in batches, and beyond that only
//! between two polls in which no other host has started any, which is idle time of the reactor.
//!
//! Without contention a queue loads four words when it starts commands, stores its demand if that grows, and
//! stores the numbers of its commands in each poll that changes them. One that grows beyond what it was
//! allowed has the shares reviewed at once.
//!
//! [`ServiceLimits::fair_depth`]: super::ServiceLimits::fair_depth

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Instant, Span};

use super::connection_handle::ConnectionHandle;

/// Shares of all queues of a service.
#[derive(Debug)]
pub(super) struct FairShares {
    /// Commands of all hosts of a reactor together, while hosts are restricted; 0 for no restriction.
    depth: u32,
    /// Time of the next review in nanoseconds, and of the next one that a restricted queue may cause.
    review_at: AtomicU64,
    early_review_at: AtomicU64,
    state: Mutex<SharingQueues>,
}

#[derive(Debug, Default)]
struct SharingQueues {
    queues: Vec<SharingQueue>,
    /// When their rates were measured.
    reviewed_at: Instant,
    /// Number of reviews, by which the queues of a restricted host take turns.
    reviews: usize,
}

/// Share of one queue, until it is dropped.
#[derive(Debug)]
pub(super) struct QueueShare {
    shares: Arc<FairShares>,
    words: Arc<ShareWords>,
}

/// What a queue and the review exchange. All accesses are relaxed: the words order nothing else, and an old
/// value is as good as a new one.
#[derive(Debug)]
struct ShareWords {
    /// Most commands that the queue had since the last review: executing and ready.
    demand: AtomicU32,
    /// Commands that it has, and those of them that execute.
    outstanding: AtomicU32,
    executing: AtomicU32,
    /// Commands that it has started, modulo 2³².
    started: AtomicU32,
    /// Commands that it may have executing.
    allowed: AtomicU32,
    /// Whether its host has more than its share.
    is_restricted: AtomicBool,
    /// Share of the restricted host, if it is this queue's turn.
    turn: Mutex<Option<Turn>>,
}

/// Share of a restricted host on a reactor.
#[derive(Debug)]
struct Turn {
    /// Commands that all its queues may have executing.
    level: u32,
    queues: Arc<[Arc<ShareWords>]>,
    pace: Pace,
}

/// When a queue of a restricted host may start its next command.
#[derive(Debug)]
struct Pace {
    /// Queues of the reactor's hosts that are not restricted, and the commands that they had started when
    /// this was last asked.
    others: Arc<[Arc<ShareWords>]>,
    others_started: u32,
    /// Time between two commands of the fastest of those hosts.
    interval: Span,
    next_at: Instant,
}

#[derive(Debug)]
struct SharingQueue {
    host: Arc<str>,
    handle: Arc<ConnectionHandle>,
    words: Arc<ShareWords>,
    /// Demand, which fades over some reviews if nothing starts.
    demand: u32,
    /// Commands started until the last review, and their number per second of late.
    started: u32,
    rate: u64,
}

/// Queues of one host on one reactor.
#[derive(Debug, Default)]
struct HostDemand {
    demand: u32,
    /// Commands that it starts per second.
    rate: u64,
    /// Queues with a demand, and how many of them have been assigned a part, which may be none.
    active: usize,
    assigned: usize,
    /// All its queues, once one was restricted, and when the next command of any may start.
    queues: Option<Arc<[Arc<ShareWords>]>>,
    next_at: Instant,
}

const UNRESTRICTED: u32 = u32::MAX;
/// What any queue may have executing, so that few commands never cause a review.
const ALLOWED_MIN: u32 = 16;
/// Commands that a queue of a restricted host may have executing in its turn, if the host has so many.
const PART_OF_QUEUE: usize = 8;
/// Time between reviews if queues ask for more than they are allowed.
const EARLY_REVIEW_INTERVAL: Span = Span::from_us(200);
/// Time between reviews while the queues of a host take turns.
const TURN_INTERVAL: Span = Span::from_ms(1);
/// Time over which a rate is measured, and for which a host may start fewer commands than at its rate, and
/// make up for it later.
const RATE_TIME: Span = Span::from_ms(8);
const CREDIT_TIME: Span = Span::from_ms(2);
/// Most time between two commands of a restricted host whose share is not used up.
const COMMAND_INTERVAL_MAX: Span = Span::from_ms(1);
/// Time between reviews, and the same for each queue: a review is at most a few thousandths of the time.
const REVIEW_INTERVAL: Span = Span::from_ms(5);
const REVIEW_INTERVAL_OF_QUEUE: Span = Span::from_us(50);

impl FairShares {
    pub(super) fn new(depth: u32) -> Arc<Self> {
        let (review_at, early_review_at) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { depth, review_at, early_review_at, state: Mutex::default() })
    }

    /// Adds a queue of a host.
    pub(super) fn join(self: &Arc<Self>, host: &str, handle: &Arc<ConnectionHandle>) -> QueueShare {
        let words = Arc::new(ShareWords {
            demand: AtomicU32::new(0),
            outstanding: AtomicU32::new(0),
            executing: AtomicU32::new(0),
            started: AtomicU32::new(0),
            allowed: AtomicU32::new(if self.depth == 0 { UNRESTRICTED } else { ALLOWED_MIN }),
            is_restricted: AtomicBool::new(false),
            turn: Mutex::default(),
        });
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let queues = &mut state.queues;
        let known = queues.iter().find(|queue| &*queue.host == host);
        let host = known.map_or_else(|| host.into(), |queue| Arc::clone(&queue.host));
        let (handle, shared) = (Arc::clone(handle), Arc::clone(&words));
        queues.push(SharingQueue { host, handle, words: shared, demand: 0, started: 0, rate: 0 });
        QueueShare { shares: Arc::clone(self), words }
    }

    /// Divides the depth again. The queue that calls it at the right time does it for all.
    #[cold]
    fn review(&self, now: Instant) {
        let Ok(mut state) = self.state.try_lock() else { return };
        let SharingQueues { queues, reviewed_at, reviews } = &mut *state;
        *reviews = reviews.wrapping_add(1);
        let elapsed = now.since(*reviewed_at);
        *reviewed_at = now;
        let of_queues = REVIEW_INTERVAL_OF_QUEUE.ns * queues.len() as u64;
        let next = now.after(REVIEW_INTERVAL.max(Span { ns: of_queues }));
        self.review_at.store(next.ns, Ordering::Relaxed);
        let early = now.after(EARLY_REVIEW_INTERVAL.max(Span { ns: of_queues / 5 }));
        self.early_review_at.store(early.ns, Ordering::Relaxed);
        if self.depth == 0 {
            return;
        }
        let mut total = 0_u32;
        for queue in queues.iter_mut() {
            // Commands that are long at their device count as well.
            let outstanding = queue.words.outstanding.load(Ordering::Relaxed);
            let demand = queue.words.demand.swap(0, Ordering::Relaxed).max(outstanding);
            queue.demand = demand.max(queue.demand / 4 * 3);
            queue.measure_rate(elapsed);
            total = total.saturating_add(queue.demand);
        }
        if total <= self.depth {
            return queues.iter().for_each(SharingQueue::set_unrestricted);
        }
        let mut reactors: BTreeMap<Option<u32>, BTreeMap<Arc<str>, HostDemand>> = BTreeMap::new();
        let places: Vec<Option<u32>> = queues.iter().map(|queue| queue.handle.reactor()).collect();
        for (queue, reactor) in queues.iter().zip(&places).filter(|(queue, _)| queue.demand > 0) {
            let hosts = reactors.entry(*reactor).or_default();
            let host = hosts.entry(Arc::clone(&queue.host)).or_default();
            host.demand = host.demand.saturating_add(queue.demand);
            host.rate = host.rate.saturating_add(queue.rate);
            host.active += 1;
        }
        queues.iter().filter(|queue| queue.demand == 0).for_each(SharingQueue::set_unrestricted);
        let mut take_turns = false;
        for (reactor, hosts) in &mut reactors {
            let level = fair_level(self.depth, hosts.values().map(|host| host.demand).collect());
            let has_turns =
                |host: &HostDemand| host.demand > level && host.queues_in_turn(level) < host.active;
            take_turns |= hosts.values().any(has_turns);
            let of_reactor = queues
                .iter()
                .zip(&places)
                .filter(|(_, place)| **place == *reactor)
                .map(|(queue, _)| queue);
            let unrestricted = hosts.values().filter(|host| host.demand <= level);
            let fastest = unrestricted.map(|host| host.rate).max().unwrap_or_default();
            let interval = Span { ns: 1_000_000_000 / fastest.max(1) }.min(COMMAND_INTERVAL_MAX);
            let is_restricted = |queue: &SharingQueue| {
                hosts.get(&queue.host).is_some_and(|host| host.demand > level)
            };
            let others = of_reactor.clone().filter(|queue| !is_restricted(queue));
            let others: Arc<[_]> = others.map(|queue| Arc::clone(&queue.words)).collect();
            for queue in of_reactor.clone().filter(|queue| queue.demand > 0) {
                let Some(host) = hosts.get_mut(&queue.host).filter(|host| host.demand > level)
                else {
                    queue.set_unrestricted();
                    continue;
                };
                let part = host.next_part(level, *reviews);
                if host.queues.is_none() {
                    let of_host = of_reactor.clone().filter(|other| other.host == queue.host);
                    let all: Arc<[_]> = of_host.map(|other| Arc::clone(&other.words)).collect();
                    host.next_at =
                        all.iter().filter_map(|words| words.next_at()).max().unwrap_or(now);
                    host.queues = Some(all);
                }
                let Some(all) = &host.queues else { continue };
                let in_turn = host.queues_in_turn(level) as u64;
                let pace = Pace {
                    others: Arc::clone(&others),
                    others_started: count_started(&others),
                    interval: Span { ns: interval.ns * in_turn },
                    next_at: host.next_at,
                };
                queue.words.restrict(part, Turn { level, queues: Arc::clone(all), pace });
            }
        }
        if take_turns {
            let next = now.after(TURN_INTERVAL.max(Span { ns: of_queues }));
            self.review_at.store(next.ns, Ordering::Relaxed);
        }
    }
}

impl HostDemand {
    /// Number of active queues that have a part of `level` commands at a time.
    fn queues_in_turn(&self, level: u32) -> usize {
        (level as usize / PART_OF_QUEUE).clamp(1, self.active.max(1))
    }

    /// Part of the host's `level` commands for its next active queue: none unless it is its turn.
    fn next_part(&mut self, level: u32, reviews: usize) -> u32 {
        let in_turn = self.queues_in_turn(level);
        let place = (self.assigned + reviews.wrapping_mul(in_turn)) % self.active.max(1);
        self.assigned += 1;
        if place >= in_turn {
            return 0;
        }
        let (equal, rest) = (level as usize / in_turn, level as usize % in_turn);
        u32::try_from(equal + usize::from(place < rest)).unwrap_or(u32::MAX)
    }
}

impl SharingQueue {
    /// Counts the commands that were started since the last review.
    fn measure_rate(&mut self, elapsed: Span) {
        let started = self.words.started.load(Ordering::Relaxed);
        let count = u64::from(started.wrapping_sub(self.started));
        self.started = started;
        let before = self.rate.saturating_mul(RATE_TIME.ns);
        let total = before.saturating_add(count.saturating_mul(1_000_000_000));
        self.rate = total / RATE_TIME.ns.saturating_add(elapsed.ns).max(1);
    }

    /// Allows the queue what it needs. It may not grow without a review, so that a burst is restricted
    /// before it fills the device.
    fn set_unrestricted(&self) {
        self.words.set_unrestricted(self.demand.max(ALLOWED_MIN));
    }
}

impl ShareWords {
    fn set_unrestricted(&self, allowed: u32) {
        self.allowed.store(allowed, Ordering::Relaxed);
        if self.is_restricted.swap(false, Ordering::Relaxed) {
            self.end_turn();
        }
    }

    /// Allows `part` commands of the host's share.
    fn restrict(&self, part: u32, turn: Turn) {
        self.allowed.store(part, Ordering::Relaxed);
        self.is_restricted.store(true, Ordering::Relaxed);
        let turn = (part > 0).then_some(turn);
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = turn;
    }

    fn end_turn(&self) {
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// When the queue may start its next command, if it has its turn.
    fn next_at(&self) -> Option<Instant> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        turn.as_ref().map(|turn| turn.pace.next_at)
    }

    /// How many of `startable` commands may start now: what the queues of the restricted host leave of its
    /// share while `executing` commands of this one execute, and the pace allows.
    #[cold]
    fn left_of_share(&self, now: Instant, executing: usize, startable: usize) -> usize {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Turn { level, queues, pace }) = &mut *turn else { return 0 };
        let others = queues.iter().filter(|queue| !core::ptr::eq(&***queue, self));
        let others: u32 = others.map(|queue| queue.executing.load(Ordering::Relaxed)).sum();
        let left = (*level as usize).saturating_sub(others as usize + executing).min(startable);
        pace.take(now, left, startable.min(*level as usize).min(PART_OF_QUEUE))
    }
}

impl Pace {
    /// Takes up to `count` commands, and none if it is fewer than `batch`; if no other host has started a
    /// command since the last call, all of them.
    fn take(&mut self, now: Instant, count: usize, batch: usize) -> usize {
        let started = count_started(&self.others);
        let is_rest_idle = started == self.others_started;
        self.others_started = started;
        let earliest = Instant { ns: now.ns.saturating_sub(CREDIT_TIME.ns) };
        let next_at = self.next_at.max(earliest);
        let credit = now.since(next_at).ns / self.interval.ns.max(1);
        let taken = if is_rest_idle {
            count
        } else {
            count.min(usize::try_from(credit).unwrap_or(usize::MAX))
        };
        if !is_rest_idle && taken < batch {
            return 0;
        }
        let until = next_at.after(Span { ns: self.interval.ns * taken as u64 });
        // Commands that were started in idle time are not owed later.
        self.next_at = until.min(now.after(self.interval));
        taken
    }
}

/// Commands that some queues have started, modulo 2³².
fn count_started(queues: &[Arc<ShareWords>]) -> u32 {
    let started = queues.iter().map(|queue| queue.started.load(Ordering::Relaxed));
    started.fold(0, u32::wrapping_add)
}

impl QueueShare {
    /// The number of `ready` commands that may start while `executing` others execute. If it is none though
    /// none executes, it is some after a review.
    #[inline]
    pub(super) fn startable(&self, now: Instant, executing: usize, ready: usize) -> usize {
        let words = &*self.words;
        let demand = u32::try_from(executing + ready).unwrap_or(u32::MAX);
        if demand > words.demand.load(Ordering::Relaxed) {
            words.demand.store(demand, Ordering::Relaxed);
        }
        if now.ns >= self.shares.review_at.load(Ordering::Relaxed) {
            self.shares.review(now);
        }
        let mut allowed = words.allowed.load(Ordering::Relaxed);
        if demand > allowed {
            allowed = self.ask_for_more(now);
        }
        let startable = (allowed as usize).saturating_sub(executing).min(ready);
        if startable > 0 && words.is_restricted.load(Ordering::Relaxed) {
            return words.left_of_share(now, executing, startable);
        }
        startable
    }

    /// Time of the next review.
    pub(super) fn review_at(&self) -> Instant {
        Instant { ns: self.shares.review_at.load(Ordering::Relaxed) }
    }

    /// Publishes the numbers of outstanding and executing commands after one has changed.
    #[inline]
    pub(super) fn set_commands(&self, outstanding: usize, executing: usize) {
        let count = |commands: usize| u32::try_from(commands).unwrap_or(u32::MAX);
        self.words.outstanding.store(count(outstanding), Ordering::Relaxed);
        self.words.executing.store(count(executing), Ordering::Relaxed);
    }

    /// Counts commands that the queue has started.
    #[inline]
    pub(super) fn add_started(&self, count: usize) {
        let started = self.words.started.load(Ordering::Relaxed);
        let started = started.wrapping_add(u32::try_from(count).unwrap_or(u32::MAX));
        self.words.started.store(started, Ordering::Relaxed);
    }

    /// Has the shares reviewed, unless they were just now or the host has its share. Returns the commands
    /// that are allowed.
    #[cold]
    fn ask_for_more(&self, now: Instant) -> u32 {
        let is_restricted = self.words.is_restricted.load(Ordering::Relaxed);
        if !is_restricted && now.ns >= self.shares.early_review_at.load(Ordering::Relaxed) {
            self.shares.review(now);
        }
        self.words.allowed.load(Ordering::Relaxed)
    }
}

impl Drop for QueueShare {
    fn drop(&mut self) {
        let mut state = self.shares.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.queues.retain(|queue| !Arc::ptr_eq(&queue.words, &self.words));
        self.words.end_turn();
        self.words.executing.store(0, Ordering::Relaxed);
    }
}

/// The commands that a host may have executing if those of all are to be `depth` together.
fn fair_level(depth: u32, mut demands: Vec<u32>) -> u32 {
    demands.sort_unstable();
    let mut left = depth;
    let smallest = demands.first().copied().unwrap_or_default();
    for (hosts, demand) in (1..=demands.len()).rev().zip(&demands) {
        let equal = left / u32::try_from(hosts).unwrap_or(u32::MAX);
        if *demand > equal {
            return equal.max(smallest).max(1);
        }
        left -= demand;
    }
    UNRESTRICTED
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{FairShares, UNRESTRICTED, fair_level};
    use crate::tcp::connection_handle::ConnectionHandle;

    #[test]
    fn depth_is_divided_by_max_min_fairness() {
        let noisy = |others: u32, depth| {
            let mut demands = vec![others; 15];
            demands.push(1024);
            fair_level(depth, demands)
        };
        assert_eq!(noisy(4, 64), 4);
        assert_eq!(noisy(1, 64), 49);
        assert_eq!(noisy(32, 64), 32, "not below the smallest demand");
        assert_eq!(fair_level(64, vec![128, 128]), 128, "equal hosts do not restrict each other");
        assert_eq!(fair_level(64, vec![4, 128, 128]), 30);
        assert_eq!(fair_level(64, vec![10, 20]), UNRESTRICTED);
        assert_eq!(fair_level(2, vec![1, 1, 9, 9]), 1, "everybody makes progress");
    }

    #[test]
    fn noisy_host_is_restricted_on_all_its_queues_until_the_others_leave() {
        let (shares, handle) = (FairShares::new(64), ConnectionHandle::new());
        let noisy = [(); 8].map(|()| shares.join("noisy", &handle));
        let mut others: Vec<_> =
            (0..15).map(|number| shares.join(&format!("host {number}"), &handle)).collect();
        let mut now = Instant { ns: 1 };
        let mut round = |others: &[super::QueueShare]| {
            now = now.after(Span::from_ms(10));
            let started = noisy.each_ref().map(|queue| queue.startable(now, 0, 128));
            (started, others.iter().all(|queue| queue.startable(now, 0, 4) == 4))
        };
        round(&others);
        let mut of_queues = [0; 8];
        for _ in 0..24 {
            let (started, is_rest_served) = round(&others);
            assert!(is_rest_served, "the others have what they need");
            assert_eq!(started.iter().sum::<usize>(), 4, "an equal share");
            of_queues.iter_mut().zip(started).for_each(|(sum, count)| *sum += count);
        }
        assert_eq!(of_queues, [12; 8], "the queues take turns");
        others.clear();
        round(&others);
        assert_eq!(round(&others).0, [128; 8]);
    }

    /// In each step one of fifteen hosts starts a command, and the noisy host has all its commands ready.
    #[test]
    fn restricted_host_is_as_fast_as_the_fastest_unless_the_others_leave_time() {
        let (shares, handle) = (FairShares::new(64), ConnectionHandle::new());
        let noisy = [(); 8].map(|()| shares.join("noisy", &handle));
        let others: Vec<_> =
            (0..15).map(|number| shares.join(&format!("host {number}"), &handle)).collect();
        let mut now = Instant { ns: 1 };
        let mut count_started = |steps: usize, are_others_busy: bool| {
            let mut started = 0;
            for step in 0..steps {
                now = now.after(Span::from_us(10));
                if are_others_busy {
                    let other = &others[step % others.len()];
                    other.add_started(other.startable(now, 3, 1));
                }
                for queue in &noisy {
                    let count = queue.startable(now, 0, 128);
                    queue.add_started(count);
                    started += count;
                }
            }
            started
        };
        count_started(3_000, true);
        let started = count_started(15_000, true);
        assert!((900..=1_100).contains(&started), "{started}, expected 1 000 as of each other");
        let started = count_started(100, false);
        assert!(started >= 350, "{started} commands while no other host has any");
    }

    #[test]
    fn single_host_is_not_restricted() {
        let (shares, handle) = (FairShares::new(64), ConnectionHandle::new());
        let queues = [(); 4].map(|()| shares.join("only", &handle));
        for ms in 1..100 {
            let now = Instant { ns: ms * 1_000_000 };
            let startable = queues.each_ref().map(|queue| queue.startable(now, 28, 100));
            // The first review has seen one queue.
            assert!(ms == 1 || startable == [100; 4], "{startable:?}");
        }
    }
}
