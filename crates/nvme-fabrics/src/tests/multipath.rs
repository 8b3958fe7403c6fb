//! Several paths to one namespace, in simulated time.

use std::sync::Arc;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_host::{ControllerOptions, FastPathOptions, QueuePairOptions, QueueSizes};
use tenmil_sim::sim_network::{LinkFault, LinkSide};
use tenmil_wire::log::ana::AnaState;
use tenmil_wire::{Completion, Status};

use super::bed::{HOST, SUBSYSTEM};
use super::target::{BLOCK, Target, load, pattern, quiet};
use super::turning::Turning;
use crate::caches::CacheScope;
use crate::multipath::{
    FabricsChannel, IoPolicy, Multipath, MultipathOptions, PathAnaState, PathEvent, PathSetup,
};
use crate::options::Options;
use crate::timeout_policy::TimeoutPolicy;

const TURN: Span = Span::from_us(50);
pub(super) const DETECT: Span = Span::from_secs(1);

/// A host with targets that are paths to one namespace.
pub(super) struct Field {
    pub(super) targets: Vec<Target>,
    pub(super) regions: RegionTable,
    memory: Segment,
    pub(super) now: Instant,
    pub(super) multipath: Multipath,
    pub(super) queues: Vec<FabricsChannel>,
    pub(super) events: Vec<PathEvent>,
    pub(super) completions: Vec<IoCompletion>,
    /// Whether queues without requests in flight are polled.
    polls_always: bool,
    unflushed: usize,
}

impl Field {
    pub(super) fn new(count: usize, io_policy: IoPolicy) -> Self {
        Self::with(count, io_policy, QueueSizes::default(), CacheScope::Shared)
    }

    /// With a volatile cache in each controller, whatever `cache` assumes.
    pub(super) fn with_caches(count: usize, io_policy: IoPolicy, cache: CacheScope) -> Self {
        Self::caching(count, io_policy, cache).up()
    }

    /// The same, before it is connected.
    pub(super) fn caching(count: usize, io_policy: IoPolicy, cache: CacheScope) -> Self {
        let field = Self::with(count, io_policy, QueueSizes::default(), cache);
        let durable = Arc::clone(&field.targets[0].state().durable);
        for target in &field.targets {
            let mut state = target.state();
            state.durable = Arc::clone(&durable);
            state.identity = state.identity.clone().with(|it| it.vwcp(true));
        }
        field
    }

    /// Whether all traffic of a host is a sign of life, or only Keep Alive.
    pub(super) fn heard_in_traffic(self, is_heard_in_traffic: bool) -> Self {
        for target in &self.targets {
            let mut state = target.state();
            state.identity = state.identity.clone().with(|it| it.tbkas(is_heard_in_traffic));
        }
        self
    }

    fn with(count: usize, io_policy: IoPolicy, sizes: QueueSizes, cache: CacheScope) -> Self {
        Self::failing_fast(count, (io_policy, sizes, cache), TimeoutPolicy::default().fail_fast)
    }

    /// With this fast I/O fail timeout.
    fn failing_fast(
        count: usize,
        (io_policy, sizes, cache): (IoPolicy, QueueSizes, CacheScope),
        fail_fast: Span,
    ) -> Self {
        let regions = RegionTable::new(count + 1);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let first = Target::new();
        let targets: Vec<Target> = (0..count).map(|_| Target::new()).collect();
        for target in &targets {
            target.state().disk = Arc::clone(&first.state().disk);
        }
        let now = Instant { ns: 1_000_000 };
        let setups = targets.iter().map(|target| setup(target, &regions)).collect();
        let mut options = Options::new(SUBSYSTEM, HOST, [7; 16]);
        options.policy.detect = DETECT;
        options.policy.retry = Span::from_ms(100);
        options.policy.fail_fast = fail_fast;
        let wishes = MultipathOptions {
            options,
            controller: ControllerOptions { queue_pairs: 4, ..ControllerOptions::default() },
            namespace: 1,
            io_policy,
            cache,
            queue: QueuePairOptions {
                depth: 32,
                vector: None,
                techniques: FastPathOptions::default(),
            },
            sizes,
        };
        let multipath = Multipath::begin(setups, wishes, now).unwrap();
        let (queues, events, completions) = (Vec::new(), Vec::new(), Vec::new());
        let (polls_always, unflushed) = (true, 0);
        Self {
            targets,
            regions,
            memory,
            now,
            multipath,
            queues,
            events,
            completions,
            polls_always,
            unflushed,
        }
    }

    /// The same, once all paths are connected and a queue uses them all.
    pub(super) fn ready(count: usize, io_policy: IoPolicy) -> Self {
        Self::new(count, io_policy).up()
    }

    /// Whether controllers reset each other at the request of their host.
    pub(super) fn joined(self, is_joined: bool) -> Self {
        if is_joined {
            Target::join(&self.targets);
        }
        self
    }

    /// Waits until all paths are connected and a queue uses them all.
    pub(super) fn up(mut self) -> Self {
        let count = self.targets.len();
        let field = &mut self;
        field.turn_until(|field| (0..count).all(|path| field.multipath.access(path).is_some()));
        field.add_queue();
        field.turn_until(|field| field.queues[0].open_paths() == count);
        self
    }

    pub(super) fn add_queue(&mut self) {
        let ticket = self.multipath.open_queue();
        self.turn_until(|field| {
            let taken = field.multipath.take_queue(ticket);
            field.queues.extend(taken);
            !field.queues.is_empty()
        });
    }

    /// The part of the memory for request number `number`, of this number of blocks.
    pub(super) fn place(&self, number: u64, blocks: u32) -> Segment {
        let len = blocks * u32::try_from(BLOCK).unwrap();
        self.memory.slice(u32::try_from(number).unwrap() * len, len).unwrap()
    }

    pub(super) fn submit(&mut self, op: Operation, lba: u64, place: Segment, token: u64) -> bool {
        let request = Request { lba, operation: op, ..read(place, token) };
        let taken = self.queues[0].submit(self.now, &[request], &[place]);
        self.queues[0].flush();
        self.unflushed += taken;
        taken == 1
    }

    /// Executes one request and waits for its completion.
    #[track_caller]
    pub(super) fn run(&mut self, operation: Operation, lba: u64, place: Segment) -> IoStatus {
        self.turn_until(|field| field.submit(operation, lba, place, 4711));
        self.turn_until(|field| {
            field.completions.iter().any(|completion| completion.token == 4711)
        });
        let at = self.completions.iter().position(|completion| completion.token == 4711).unwrap();
        self.completions.remove(at).status
    }

    #[track_caller]
    fn exchange(&mut self, lba: u64, seed: u64) {
        let (from, to) = (self.place(0, 8), self.place(1, 8));
        let bytes = pattern(seed, from.len_bytes as usize);
        self.regions.store(from, &bytes).unwrap();
        self.regions.fill(to, 0).unwrap();
        assert_eq!(self.run(Operation::Write, lba, from), IoStatus::SUCCESS);
        assert_eq!(self.run(Operation::Read, lba, to), IoStatus::SUCCESS);
        assert!(load(&self.regions, to) == bytes);
    }

    fn executed(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.state().executed).collect()
    }

    pub(super) fn set_access(&self, path: usize, ana: AnaState) {
        let mut state = self.targets[path].state();
        (state.ana, state.ana_has_changed) = (ana, true);
    }

    /// Refuses connections of the path, and cuts the existing ones.
    pub(super) fn take_away(&self, path: usize) {
        self.targets[path].state().is_away = true;
        self.targets[path].cut();
    }
}

impl Turning for Field {
    fn now(&mut self) -> &mut Instant {
        &mut self.now
    }

    fn turn(&mut self) {
        self.now = self.now.after(TURN);
        self.targets.iter().for_each(|target| target.turn(self.now));
        self.events.extend(self.multipath.poll(self.now));
        let mut completions = CompletionBatch::with_capacity(16);
        for queue in &mut self.queues {
            if !self.polls_always && self.unflushed == 0 {
                continue;
            }
            queue.poll(self.now, &mut completions);
            self.unflushed -= completions.len();
            self.completions.extend(completions.drain());
            queue.flush();
        }
    }

    fn story(&self) -> String {
        format!("{:?}", self.events)
    }
}

/// A read of the first blocks.
fn read(place: Segment, token: u64) -> Request {
    Request {
        token,
        lba: 0,
        operand: 0,
        segment_first: 0,
        blocks: place.len_bytes / u32::try_from(BLOCK).unwrap(),
        segment_count: 1,
        metadata_count: 0,
        operation: Operation::Read,
        flags: RequestFlags::NONE,
    }
}

fn setup(target: &Target, regions: &RegionTable) -> PathSetup {
    let pool =
        regions.add_mapping(MemoryMapping::new(4 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), pool, DeviceKind::Emulated, store);
    pool.map_on_demand();
    let (target, regions) = (target.clone(), regions.clone());
    PathSetup { pool, make_connector: Box::new(move || target.dial(&regions)) }
}

#[test]
fn requests_go_where_the_spread_says() {
    for (io_policy, expected) in [
        (IoPolicy::ActivePassive, [20, 0, 0]),
        (IoPolicy::RoundRobin, [6, 7, 7]),
        (IoPolicy::QueueDepth, [6, 7, 7]),
    ] {
        let mut field = Field::ready(3, io_policy);
        for number in 0..20 {
            assert!(field.submit(Operation::Read, 0, field.place(number, 1), number));
        }
        field.turn_until(|field| field.completions.len() == 20);
        assert_eq!(field.executed(), expected, "{io_policy:?}");
        assert!(field.completions.iter().all(|completion| completion.status.is_success()));
    }
}

#[test]
fn whoever_polls_only_for_what_is_owed_finds_connections_that_were_made_meanwhile() {
    let mut field = Field::new(2, IoPolicy::ActivePassive);
    field.polls_always = false;
    field.turn_until(|field| (0..2).all(|path| field.multipath.access(path).is_some()));
    field.add_queue();
    field.exchange(0, 1);
    // Both disconnect and reconnect while there are no requests.
    for path in 0..2 {
        field.take_away(path);
    }
    field.turn_for(Span::from_secs(3));
    for path in 0..2 {
        field.targets[path].state().is_away = false;
    }
    field.turn_for(Span::from_secs(3));
    field.exchange(8, 2);
    assert!(field.executed().iter().sum::<u64>() >= 4);
}

#[test]
fn queue_without_requests_uses_a_path_that_came_back_after_its_requests_had_failed() {
    for fail_fast in [Span::from_secs(1), Span::from_secs(30)] {
        let wishes = (IoPolicy::RoundRobin, QueueSizes::default(), CacheScope::Shared);
        let mut field = Field::failing_fast(2, wishes, fail_fast);
        field.polls_always = false;
        field.turn_until(|field| (0..2).all(|path| field.multipath.access(path).is_some()));
        field.add_queue();
        for round in 0..3 {
            field.exchange(0, round);
            let place = field.place(0, 8);
            field.targets.iter().for_each(|target| target.state().is_idle = true);
            // One on each path.
            (0..2).for_each(|lba| assert!(field.submit(Operation::Write, 8 * lba, place, lba)));
            field.turn_for(Span::from_ms(1));
            (0..2).for_each(|path| field.take_away(path));
            field.turn_until(|field| field.completions.len() == 2);
            for completion in field.completions.drain(..) {
                assert_eq!(completion.status, IoStatus::PATH_ERROR);
            }
            assert_eq!(field.run(Operation::Read, 0, place), IoStatus::PATH_ERROR, "at once");
            let come_back = |field: &Field, refuses: Option<Status>| {
                for target in &field.targets {
                    let mut state = target.state();
                    (state.is_away, state.is_idle, state.refuses) = (false, false, refuses);
                }
            };
            if round < 2 {
                come_back(&field, None);
                field.turn_until(|field| (0..2).all(|path| field.multipath.access(path).is_some()));
                field.turn_for(Span { ns: 2 * fail_fast.ns });
            } else {
                // Its controllers are given up, and it uses the next ones as soon as one is connected,
                // though it has no queue pair there yet.
                come_back(&field, Some(Status::CONNECT_INVALID_HOST.with_dnr()));
                field.turn_for(Span::from_secs(1));
                come_back(&field, None);
                field.turn_until(|field| (0..2).any(|path| field.multipath.access(path).is_some()));
                assert_eq!(field.queues[0].open_paths(), 0);
            }
            let begun = field.now;
            assert_eq!(field.run(Operation::Read, 0, place), IoStatus::SUCCESS, "round {round}");
            assert!(field.now.since(begun) < Span::from_ms(20), "{}", field.now.since(begun));
        }
    }
}

#[test]
fn a_non_optimized_path_is_taken_when_no_better_one_is_there_and_left_again() {
    let mut field = Field::new(2, IoPolicy::ActivePassive);
    field.targets[0].state().ana = AnaState::NonOptimized;
    field.turn_until(|field| (0..2).all(|path| field.multipath.access(path).is_some()));
    field.add_queue();
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    field.exchange(0, 1);
    assert_eq!(field.executed(), [0, 2]);
    field.take_away(1);
    field.exchange(8, 2);
    assert_eq!(field.executed(), [2, 2]);
    field.targets[1].state().is_away = false;
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    field.exchange(8, 3);
    assert_eq!(field.executed(), [2, 4]);
    let told: Vec<String> = field.events.iter().map(ToString::to_string).collect();
    for expected in [
        "path 0 is up, non-optimized",
        "path 1 is down: the network was cut",
        "path 0 instead of path 1",
        "path 1 is up, optimized",
        "path 1 instead of path 0",
    ] {
        assert!(told.iter().any(|told| told == expected), "{expected}: {told:?}");
    }
}

/// A read moves to another path at once. A write waits until the old controller has used up its time, or
/// has confirmed that it has stopped.
#[test]
fn a_read_goes_elsewhere_at_once_and_a_write_when_the_old_controller_can_do_nothing_any_more() {
    let [by_command, by_traffic] = [false, true].map(|by_traffic| quiet(DETECT, by_traffic));
    let soon = Span::from_ms(2);
    for (operation, is_heard_in_traffic, least, most) in [
        (Operation::Read, false, Span::default(), soon),
        (Operation::Flush, false, Span::default(), soon),
        (Operation::Write, false, by_command, Span { ns: by_command.ns + 100_000_000 }),
        (Operation::Write, true, by_traffic, Span { ns: by_traffic.ns + 100_000_000 }),
    ] {
        let field = Field::new(2, IoPolicy::ActivePassive);
        let mut field = field.heard_in_traffic(is_heard_in_traffic).up();
        field.targets[0].state().is_idle = true;
        let place = field.place(0, 8);
        assert!(field.submit(operation, 0, place, 1));
        field.turn_for(Span::from_ms(1));
        field.take_away(0);
        let cut_at = field.now;
        field.turn_until(|field| !field.completions.is_empty());
        let waited = field.now.since(cut_at);
        assert!((least..most).contains(&waited), "{operation:?}: {waited}");
        assert_eq!(field.completions[0].status, IoStatus::SUCCESS);
        assert_eq!(field.executed()[1], 1);
        field.turn_for(Span::from_secs(3));
        assert_eq!(field.completions.len(), 1, "once");
    }
}

/// A connected controller ends the old one, if both support it.
#[test]
fn a_write_goes_elsewhere_as_soon_as_another_controller_has_reset_the_old_one() {
    let ok = Completion::new(0, Status::SUCCESS);
    let refused = Completion::new(0, Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
    let (quiet, soon) = (quiet(DETECT, false), Span::from_ms(50));
    for (no_reset, is_known, least, most, asked) in [
        (None, true, Span::default(), soon, [0, 1, 0]),
        (None, false, quiet, Span { ns: quiet.ns + soon.ns }, [0; 3]),
        // A reset that is delayed or rejected does not count as done; other controllers are tried, once
        // each.
        (Some(ok), true, quiet, Span { ns: quiet.ns + soon.ns }, [0, 1, 1]),
        (Some(refused), true, quiet, Span { ns: quiet.ns + soon.ns }, [0, 1, 1]),
    ] {
        let mut field = Field::new(3, IoPolicy::ActivePassive).joined(is_known).up();
        field.targets.iter().for_each(|target| target.state().no_reset = no_reset);
        field.targets[0].state().is_idle = true;
        let place = field.place(0, 8);
        assert!(field.submit(Operation::Write, 0, place, 1));
        field.turn_for(Span::from_ms(1));
        field.take_away(0);
        let cut_at = field.now;
        field.turn_until(|field| !field.completions.is_empty());
        let waited = field.now.since(cut_at);
        assert!((least..most).contains(&waited), "{no_reset:?}, {is_known}: {waited}");
        assert_eq!(field.completions[0].status, IoStatus::SUCCESS);
        let resets: Vec<u64> = field.targets.iter().map(|target| target.state().resets).collect();
        assert_eq!(resets, asked, "{no_reset:?}, {is_known}");
        let told = PathEvent::ControllerFenced { path: 0, by: 1 };
        assert_eq!(field.events.contains(&told), waited < soon);
        field.turn_for(Span::from_secs(3));
        assert_eq!(field.completions.len(), 1, "once");
    }
}

/// Without a dangerous command in flight, no reset is requested.
#[test]
fn no_controller_is_reset_for_nothing() {
    let mut field = Field::new(2, IoPolicy::ActivePassive).joined(true).up();
    field.exchange(0, 1);
    field.take_away(0);
    field.turn_for(Span::from_secs(3));
    assert_eq!(field.targets[1].state().resets, 0);
}

/// One request at a time can be split on a path: of a batch the next ones wait, and are on no path when
/// their path is lost.
#[test]
fn what_a_path_has_no_room_for_is_not_lost_with_it_and_answered_once() {
    for (io_policy, expected) in [(IoPolicy::ActivePassive, 1), (IoPolicy::RoundRobin, 6)] {
        let sizes = QueueSizes { parents: 1, ..QueueSizes::default() };
        let field = Field::with(2, io_policy, sizes, CacheScope::Shared);
        for target in &field.targets {
            let identity = target.state().identity.clone().with(|it| it.mdts(1));
            target.state().identity = identity;
        }
        let mut field = field.up();
        field.targets[0].state().is_idle = true;
        // A command moves at most 8 KiB.
        let place = field.place(0, 64);
        let requests: Vec<Request> = (0..6).map(|token| read(place, token)).collect();
        let taken = field.queues[0].submit(field.now, &requests, &[place]);
        field.unflushed += taken;
        field.queues[0].flush();
        assert_eq!(taken, expected, "{io_policy:?}: returned if all have the same path");
        field.turn_for(Span::from_ms(1));
        field.take_away(0);
        field.turn_until(|field| !field.completions.is_empty());
        field.turn_for(Span::from_secs(3));
        let mut told: Vec<u64> = field.completions.iter().map(|it| it.token).collect();
        told.sort_unstable();
        assert!(field.completions.iter().all(|completion| completion.status.is_success()));
        assert_eq!(told, (0..taken as u64).collect::<Vec<_>>(), "{io_policy:?}");
        field.completions.clear();
        field.exchange(0, 1);
    }
}

/// The admin connection is intact: the controller confirms that it has stopped.
#[test]
fn a_write_goes_elsewhere_as_soon_as_the_old_controller_says_that_it_has_stopped() {
    let mut field = Field::ready(2, IoPolicy::ActivePassive);
    field.targets[0].state().is_idle = true;
    let place = field.place(0, 8);
    assert!(field.submit(Operation::Write, 0, place, 1));
    field.turn_for(Span::from_ms(1));
    field.targets[0].state().networks[1].cut_links();
    let cut_at = field.now;
    field.turn_until(|field| !field.completions.is_empty());
    let waited = field.now.since(cut_at);
    assert!(waited < Span::from_ms(50), "{waited}");
    assert_eq!(field.executed(), [0, 1]);
}

/// A command that misses its deadline is given up, and its controller is reset: another controller gets
/// the write once the old one has confirmed that it has stopped, or has used up its time if it does not
/// confirm it.
#[test]
fn a_write_that_is_late_goes_elsewhere_when_its_controller_can_do_nothing_any_more() {
    for is_stuck in [false, true] {
        let mut field = Field::ready(2, IoPolicy::ActivePassive);
        {
            let mut state = field.targets[0].state();
            (state.is_idle, state.is_stuck) = (true, is_stuck);
        }
        let place = field.place(0, 8);
        assert!(field.submit(Operation::Write, 0, place, 1));
        field.turn_until(|field| !field.targets[0].state().is_wanted());
        let told_at = field.now;
        assert_eq!((field.completions.len(), field.executed()[1]), (0, 0), "stuck: {is_stuck}");
        field.turn_until(|field| field.executed()[1] > 0);
        let waited = field.now.since(told_at);
        let (least, most) = match is_stuck {
            false => (Span::default(), Span::from_ms(50)),
            true => (quiet(DETECT, false), Span { ns: 2 * quiet(DETECT, false).ns }),
        };
        assert!((least..most).contains(&waited), "stuck: {is_stuck}: {waited}");
        field.turn_until(|field| !field.completions.is_empty());
        assert_eq!(field.completions[0].status, IoStatus::SUCCESS);
        assert_eq!(field.executed(), [0, 1]);
    }
}

#[test]
fn a_path_that_does_not_lead_there_any_more_is_left_at_once_even_by_writes() {
    for ana in [AnaState::Inaccessible, AnaState::PersistentLoss, AnaState::Change] {
        let mut field = Field::ready(2, IoPolicy::ActivePassive);
        // Without a notice: the completions carry the state.
        field.targets[0].state().ana = ana;
        let begun = field.now;
        field.exchange(0, 1);
        assert!(field.now.since(begun) < Span::from_ms(2), "{}", field.now.since(begun));
        assert_eq!(field.executed(), [0, 2], "{ana:?}");
        field.turn_until(|field| field.multipath.access(0) != Some(PathAnaState::Optimized));
        // After a notice, the path is not tried.
        field.set_access(0, AnaState::Optimized);
        field.turn_until(|field| field.multipath.access(0) == Some(PathAnaState::Optimized));
        field.exchange(0, 2);
        assert_eq!(field.executed(), [2, 2], "{ana:?}");
    }
}

/// A transition may take as long as the controller declares (ANATT, two seconds), and requests are held.
#[test]
fn a_change_is_waited_for_as_long_as_it_may_take() {
    let mut field = Field::ready(1, IoPolicy::ActivePassive);
    field.set_access(0, AnaState::Change);
    let place = field.place(0, 8);
    field.turn_until(|field| field.multipath.access(0) == Some(PathAnaState::Change));
    field.turn();
    let _ = field.submit(Operation::Write, 0, place, 1);
    field.turn_for(Span::from_ms(1500));
    assert_eq!(
        (field.multipath.access(0), field.completions.len()),
        (Some(PathAnaState::Change), 0)
    );
    field.turn_for(Span::from_ms(1000));
    assert_eq!(field.multipath.access(0), Some(PathAnaState::Inaccessible));
    field.set_access(0, AnaState::NonOptimized);
    field.turn_until(|field| field.multipath.access(0) == Some(PathAnaState::NonOptimized));
    field.exchange(0, 1);
    assert_eq!(field.events.iter().filter(|event| **event == PathEvent::AllPathsDown).count(), 1);
}

#[test]
fn without_a_path_requests_fail_in_time_and_go_on_when_one_comes_back() {
    let mut field = Field::ready(2, IoPolicy::RoundRobin);
    (0..2).for_each(|path| field.take_away(path));
    field.turn_for(Span::from_ms(10));
    let (place, begun) = (field.place(0, 1), field.now);
    field.turn_until(|field| field.submit(Operation::Read, 0, place, 1));
    field.turn_until(|field| !field.completions.is_empty());
    assert_eq!(field.completions.remove(0).status, IoStatus::PATH_ERROR);
    let waited = field.now.since(begun);
    assert!(waited < Span::from_secs(31) && waited > Span::from_secs(29), "{waited}");
    assert!(field.multipath.is_usable(field.now) && field.multipath.down_since().is_some());
    field.targets[1].state().is_away = false;
    field.turn_until(|field| field.queues[0].open_paths() == 1);
    field.exchange(0, 1);
}

/// Also a path whose controller was given up meanwhile, and one that was never connected.
#[test]
fn a_path_that_comes_back_after_any_time_is_used_again() {
    let mut field = Field::new(2, IoPolicy::ActivePassive);
    field.targets[0].state().is_away = true;
    field.turn_until(|field| field.multipath.access(1).is_some());
    field.add_queue();
    field.turn_until(|field| field.queues[0].open_paths() == 1);
    field.exchange(0, 1);
    field.targets[0].state().is_away = false;
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    field.exchange(0, 2);
    assert_eq!(field.executed(), [2, 2]);
    field.take_away(0);
    for _ in 0..130 {
        field.turn_for(Span::from_secs(5));
    }
    field.exchange(0, 3);
    field.targets[0].state().is_away = false;
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    field.exchange(0, 4);
    assert_eq!(field.executed(), [4, 4]);
}

/// Two subsystems of the same name need not be the same.
#[test]
fn a_path_that_leads_elsewhere_is_not_used() {
    let mut field = Field::new(2, IoPolicy::RoundRobin);
    field.targets[1].state().nguid = 9;
    field.turn_until(|field| field.events.len() == 2);
    let told: Vec<String> = field.events.iter().map(ToString::to_string).collect();
    assert!(told[1].starts_with("path 1 is not used: its names"), "{told:?}");
    field.add_queue();
    field.turn_until(|field| field.queues[0].open_paths() == 1);
    field.exchange(0, 1);
    assert_eq!(field.executed()[1], 0);
}

#[test]
fn a_silent_path_is_left_when_it_is_noticed() {
    let mut field = Field::ready(2, IoPolicy::ActivePassive);
    for network in &field.targets[0].state().networks {
        network.inject_fault(LinkSide::Downstream, LinkFault::BlackHole);
    }
    let (place, begun) = (field.place(0, 8), field.now);
    assert!(field.submit(Operation::Read, 0, place, 1));
    field.turn_until(|field| !field.completions.is_empty());
    assert!(field.now.since(begun) <= Span { ns: DETECT.ns + 100_000_000 });
    assert_eq!(field.completions[0].status, IoStatus::SUCCESS);
}

#[test]
fn a_path_where_something_goes_wrong_rests_while_others_are_taken() {
    let mut field = Field::ready(2, IoPolicy::ActivePassive);
    field.targets[0].state().status_override = Some(Status::INTERNAL_PATH_ERROR);
    let begun = field.now;
    field.exchange(0, 1);
    assert!(field.now.since(begun) < Span::from_ms(2), "{}", field.now.since(begun));
    assert_eq!(field.executed(), [0, 2]);
    field.targets[0].state().status_override = None;
    field.turn_for(Span::from_ms(150));
    field.exchange(0, 2);
    assert_eq!(field.executed(), [2, 2], "rested");
}

#[test]
fn the_only_path_is_tried_again_after_a_rest_and_for_a_while() {
    let mut field = Field::ready(1, IoPolicy::ActivePassive);
    field.targets[0].state().status_override = Some(Status::INTERNAL_PATH_ERROR);
    let place = field.place(0, 8);
    assert!(field.submit(Operation::Write, 0, place, 1));
    field.turn_for(Span::from_secs(1));
    assert_eq!(field.completions, []);
    field.targets[0].state().status_override = None;
    field.turn_until(|field| !field.completions.is_empty());
    assert_eq!(field.completions[0].status, IoStatus::SUCCESS);
}

/// A log page is read in pieces of 127 groups until the group of the namespace is found.
#[test]
fn a_namespace_in_whichever_group_is_found_in_the_log_page() {
    for group in [1, 127, 128, 254, 255, 1000] {
        let field = Field::new(2, IoPolicy::ActivePassive);
        for target in &field.targets {
            let mut state = target.state();
            state.ana_group = group;
            state.identity = state.identity.clone().with(|it| it.anagrpmax(group).nanagrpid(group));
        }
        let mut field = field.up();
        assert_eq!(field.multipath.access(0), Some(PathAnaState::Optimized), "group {group}");
        field.set_access(0, AnaState::NonOptimized);
        field.turn_until(|field| field.multipath.access(0) == Some(PathAnaState::NonOptimized));
        field.exchange(0, 1);
        assert_eq!(field.executed(), [0, 2], "group {group}");
    }
}

/// Only a host can report that a host has aborted something.
#[test]
fn a_controller_that_says_that_we_have_reset_it_is_not_believed() {
    let mut field = Field::ready(1, IoPolicy::ActivePassive);
    field.targets[0].state().status_override = Some(Status::ABORTED_BY_HOST);
    let place = field.place(0, 8);
    let outcome = field.run(Operation::Write, 0, place);
    assert_eq!(outcome, IoStatus(Status::INTERNAL_PATH_ERROR.0));
}

/// Its namespace has changed: from then on, the path gets no requests.
#[test]
fn a_path_without_a_log_page_is_left_when_its_namespace_is_not_the_same_any_more() {
    let field = Field::new(2, IoPolicy::ActivePassive);
    for target in &field.targets {
        let identity = target
            .state()
            .identity
            .clone()
            .with(|it| it.anars(false).namespace_attribute_notices(true));
        target.state().identity = identity;
    }
    let mut field = field.up();
    assert_eq!(field.multipath.access(0), Some(PathAnaState::Optimized));
    field.targets[0].state().nguid = 9;
    field.targets[0].state().namespace_has_changed = true;
    field.turn_until(|field| field.multipath.access(0) == Some(PathAnaState::Inaccessible));
    field.exchange(0, 1);
    assert_eq!(field.executed(), [0, 2]);
}

#[test]
fn what_was_shut_down_is_not_called_again() {
    let mut field = Field::ready(2, IoPolicy::ActivePassive);
    field.queues.clear();
    field.turn();
    field.multipath.shut_down(field.now);
    field.turn_until(|field| !field.multipath.is_shutting_down());
    field.turn_for(Span::from_secs(2));
    assert!((0..2).all(|path| field.multipath.access(path).is_none()));
    assert!(field.targets.iter().all(|target| target.connections() == 0));
}
