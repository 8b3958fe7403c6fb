//! Several paths to one namespace, in simulated time.

use std::sync::Arc;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_host::{ControllerOptions, Event, FastPathOptions, QueuePairOptions, QueueSizes};
use tenmil_sim::sim_network::{LinkFault, LinkTransferDirection};
use tenmil_wire::log::ana::AnaState;
use tenmil_wire::{Completion, Status};

use super::simulated_time::SimulatedTime;
use super::single_path_host::{HOST, SUBSYSTEM};
use super::target::{BLOCK, Target, load_host_memory, max_execution_time, pattern};
use crate::cache_tracker::CacheScope;
use crate::multipath::{
    FabricsChannel, IoPolicy, Multipath, MultipathOptions, PathAnaState, PathEvent, PathSetup,
};
use crate::options::Options;
use crate::timeout_policy::TimeoutPolicy;

const STEP: Span = Span::from_us(50);
pub(super) const DETECT: Span = Span::from_secs(1);

/// A host with targets that are paths to one namespace.
pub(super) struct MultipathHost {
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

impl MultipathHost {
    pub(super) fn new(count: usize, io_policy: IoPolicy) -> Self {
        Self::with_queue_sizes(count, io_policy, QueueSizes::default(), CacheScope::Shared)
    }

    /// With a volatile cache in each controller, whatever `cache` assumes.
    pub(super) fn with_caches(count: usize, io_policy: IoPolicy, cache: CacheScope) -> Self {
        Self::unconnected_with_caches(count, io_policy, cache).connect_all()
    }

    /// The same, before it is connected.
    pub(super) fn unconnected_with_caches(
        count: usize,
        io_policy: IoPolicy,
        cache: CacheScope,
    ) -> Self {
        let host = Self::with_queue_sizes(count, io_policy, QueueSizes::default(), cache);
        let durable = Arc::clone(&host.targets[0].state().durable);
        for target in &host.targets {
            let mut state = target.state();
            state.durable = Arc::clone(&durable);
            state.identity = state.identity.clone().with(|it| it.vwcp(true));
        }
        host
    }

    /// Whether all traffic of a host is a sign of life, or only Keep Alive.
    pub(super) fn with_traffic_based_keep_alive(self, is_traffic_based: bool) -> Self {
        for target in &self.targets {
            let mut state = target.state();
            state.identity = state.identity.clone().with(|it| it.tbkas(is_traffic_based));
        }
        self
    }

    fn with_queue_sizes(
        count: usize,
        io_policy: IoPolicy,
        sizes: QueueSizes,
        cache: CacheScope,
    ) -> Self {
        Self::with_fast_io_fail_timeout(
            count,
            (io_policy, sizes, cache),
            TimeoutPolicy::default().fail_fast,
        )
    }

    /// With this fast I/O fail timeout.
    fn with_fast_io_fail_timeout(
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
        let setups = targets.iter().map(|target| path_setup(target, &regions)).collect();
        let mut options = Options::new(SUBSYSTEM, HOST, [7; 16]);
        options.policy.detect = DETECT;
        options.policy.retry = Span::from_ms(100);
        options.policy.fail_fast = fail_fast;
        let requested_options = MultipathOptions {
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
        let multipath = Multipath::begin(setups, requested_options, now).unwrap();
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
    pub(super) fn connected(count: usize, io_policy: IoPolicy) -> Self {
        Self::new(count, io_policy).connect_all()
    }

    /// Whether controllers reset each other at the request of their host.
    pub(super) fn with_cross_controller_reset(self, has_cross_controller_reset: bool) -> Self {
        if has_cross_controller_reset {
            Target::enable_cross_controller_reset(&self.targets);
        }
        self
    }

    /// Waits until all paths are connected and a queue uses them all.
    pub(super) fn connect_all(mut self) -> Self {
        let count = self.targets.len();
        let host = &mut self;
        host.run_until(|host| (0..count).all(|path| host.multipath.ana_state(path).is_some()));
        host.add_queue();
        host.run_until(|host| host.queues[0].accepting_path_count() == count);
        self
    }

    pub(super) fn add_queue(&mut self) {
        let ticket = self.multipath.open_queue();
        self.run_until(|host| {
            let taken = host.multipath.take_queue(ticket);
            host.queues.extend(taken);
            !host.queues.is_empty()
        });
    }

    /// The part of the memory for request number `number`, of this number of blocks.
    pub(super) fn buffer(&self, number: u64, blocks: u32) -> Segment {
        let len = blocks * u32::try_from(BLOCK).unwrap();
        self.memory.slice(u32::try_from(number).unwrap() * len, len).unwrap()
    }

    pub(super) fn submit(&mut self, op: Operation, lba: u64, place: Segment, token: u64) -> bool {
        let request = Request { lba, operation: op, ..read_request(place, token) };
        let taken = self.queues[0].submit(self.now, &[request], &[place]);
        self.queues[0].flush_submissions();
        self.unflushed += taken;
        taken == 1
    }

    /// Executes one request and waits for its completion.
    #[track_caller]
    pub(super) fn run_request(
        &mut self,
        operation: Operation,
        lba: u64,
        place: Segment,
    ) -> IoStatus {
        self.run_until(|host| host.submit(operation, lba, place, 4711));
        self.run_until(|host| host.completions.iter().any(|completion| completion.token == 4711));
        let at = self.completions.iter().position(|completion| completion.token == 4711).unwrap();
        self.completions.remove(at).status
    }

    #[track_caller]
    fn write_and_verify(&mut self, lba: u64, seed: u64) {
        let (from, to) = (self.buffer(0, 8), self.buffer(1, 8));
        let bytes = pattern(seed, from.len_bytes as usize);
        self.regions.store(from, &bytes).unwrap();
        self.regions.fill(to, 0).unwrap();
        assert_eq!(self.run_request(Operation::Write, lba, from), IoStatus::SUCCESS);
        assert_eq!(self.run_request(Operation::Read, lba, to), IoStatus::SUCCESS);
        assert!(load_host_memory(&self.regions, to) == bytes);
    }

    fn executed_counts(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.state().executed).collect()
    }

    pub(super) fn set_ana_state(&self, path: usize, ana: AnaState) {
        let mut state = self.targets[path].state();
        (state.ana, state.ana_has_changed) = (ana, true);
    }

    /// Refuses connections of the path, and cuts the existing ones.
    pub(super) fn disconnect_path(&self, path: usize) {
        self.targets[path].state().refuses_connections = true;
        self.targets[path].cut();
    }
}

impl SimulatedTime for MultipathHost {
    fn now_mut(&mut self) -> &mut Instant {
        &mut self.now
    }

    fn step(&mut self) {
        self.now = self.now.after(STEP);
        self.targets.iter().for_each(|target| target.step(self.now));
        self.events.extend(self.multipath.poll(self.now));
        let mut completions = CompletionBatch::with_capacity(16);
        for queue in &mut self.queues {
            if !self.polls_always && self.unflushed == 0 {
                continue;
            }
            queue.poll(self.now, &mut completions);
            self.unflushed -= completions.len();
            self.completions.extend(completions.drain());
            queue.flush_submissions();
        }
    }

    fn event_log(&self) -> String {
        format!("{:?}", self.events)
    }
}

/// A read of the first blocks.
fn read_request(place: Segment, token: u64) -> Request {
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

fn path_setup(target: &Target, regions: &RegionTable) -> PathSetup {
    let pool =
        regions.add_mapping(MemoryMapping::new(4 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), pool, DeviceKind::Emulated, store);
    pool.map_on_demand();
    let (target, regions) = (target.clone(), regions.clone());
    PathSetup { pool, make_connector: Box::new(move || target.connector(&regions)) }
}

#[test]
fn requests_follow_the_io_policy() {
    for (io_policy, expected) in [
        (IoPolicy::ActivePassive, [20, 0, 0]),
        (IoPolicy::RoundRobin, [6, 7, 7]),
        (IoPolicy::QueueDepth, [6, 7, 7]),
    ] {
        let mut host = MultipathHost::connected(3, io_policy);
        for number in 0..20 {
            assert!(host.submit(Operation::Read, 0, host.buffer(number, 1), number));
        }
        host.run_until(|host| host.completions.len() == 20);
        assert_eq!(host.executed_counts(), expected, "{io_policy:?}");
        assert!(host.completions.iter().all(|completion| completion.status.is_success()));
    }
}

#[test]
fn caller_that_polls_only_with_requests_in_flight_uses_new_connections() {
    let mut host = MultipathHost::new(2, IoPolicy::ActivePassive);
    host.polls_always = false;
    host.run_until(|host| (0..2).all(|path| host.multipath.ana_state(path).is_some()));
    host.add_queue();
    host.write_and_verify(0, 1);
    // Both disconnect and reconnect while there are no requests.
    for path in 0..2 {
        host.disconnect_path(path);
    }
    host.run_for(Span::from_secs(3));
    for path in 0..2 {
        host.targets[path].state().refuses_connections = false;
    }
    host.run_for(Span::from_secs(3));
    host.write_and_verify(8, 2);
    assert!(host.executed_counts().iter().sum::<u64>() >= 4);
}

#[test]
fn idle_queue_uses_a_reconnected_path_after_its_requests_had_failed() {
    for fail_fast in [Span::from_secs(1), Span::from_secs(30)] {
        let requested_options = (IoPolicy::RoundRobin, QueueSizes::default(), CacheScope::Shared);
        let mut host = MultipathHost::with_fast_io_fail_timeout(2, requested_options, fail_fast);
        host.polls_always = false;
        host.run_until(|host| (0..2).all(|path| host.multipath.ana_state(path).is_some()));
        host.add_queue();
        for round in 0..3 {
            host.write_and_verify(0, round);
            let place = host.buffer(0, 8);
            host.targets.iter().for_each(|target| target.state().withholds_completions = true);
            // One on each path.
            (0..2).for_each(|lba| assert!(host.submit(Operation::Write, 8 * lba, place, lba)));
            host.run_for(Span::from_ms(1));
            (0..2).for_each(|path| host.disconnect_path(path));
            host.run_until(|host| host.completions.len() == 2);
            for completion in host.completions.drain(..) {
                assert_eq!(completion.status, IoStatus::PATH_ERROR);
            }
            assert_eq!(
                host.run_request(Operation::Read, 0, place),
                IoStatus::PATH_ERROR,
                "at once"
            );
            let accept_connections = |host: &MultipathHost, refuses: Option<Status>| {
                for target in &host.targets {
                    let mut state = target.state();
                    (state.refuses_connections, state.withholds_completions, state.refuses) =
                        (false, false, refuses);
                }
            };
            if round < 2 {
                accept_connections(&host, None);
                host.run_until(|host| (0..2).all(|path| host.multipath.ana_state(path).is_some()));
                host.run_for(Span { ns: 2 * fail_fast.ns });
            } else {
                // Its controllers are given up, and it uses the next ones as soon as one is connected,
                // though it has no queue pair there yet.
                accept_connections(&host, Some(Status::CONNECT_INVALID_HOST.with_dnr()));
                host.run_for(Span::from_secs(1));
                accept_connections(&host, None);
                host.run_until(|host| (0..2).any(|path| host.multipath.ana_state(path).is_some()));
                assert_eq!(host.queues[0].accepting_path_count(), 0);
            }
            let begun = host.now;
            assert_eq!(
                host.run_request(Operation::Read, 0, place),
                IoStatus::SUCCESS,
                "round {round}"
            );
            assert!(host.now.since(begun) < Span::from_ms(20), "{}", host.now.since(begun));
        }
    }
}

#[test]
fn non_optimized_path_is_used_only_without_an_optimized_one() {
    let mut host = MultipathHost::new(2, IoPolicy::ActivePassive);
    host.targets[0].state().ana = AnaState::NonOptimized;
    host.run_until(|host| (0..2).all(|path| host.multipath.ana_state(path).is_some()));
    host.add_queue();
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    host.write_and_verify(0, 1);
    assert_eq!(host.executed_counts(), [0, 2]);
    host.disconnect_path(1);
    host.write_and_verify(8, 2);
    assert_eq!(host.executed_counts(), [2, 2]);
    host.targets[1].state().refuses_connections = false;
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    host.write_and_verify(8, 3);
    assert_eq!(host.executed_counts(), [2, 4]);
    let reported: Vec<String> = host.events.iter().map(ToString::to_string).collect();
    for expected in [
        "path 0 is up, non-optimized",
        "path 1 is down: the network was cut",
        "path 0 instead of path 1",
        "path 1 is up, optimized",
        "path 1 instead of path 0",
    ] {
        assert!(reported.iter().any(|reported| reported == expected), "{expected}: {reported:?}");
    }
}

/// A read moves to another path at once. A write waits until the old controller has used up its time, or
/// has confirmed that it has stopped.
#[test]
fn read_fails_over_at_once_and_write_after_the_quiesce_time() {
    let [by_command, by_traffic] =
        [false, true].map(|by_traffic| max_execution_time(DETECT, by_traffic));
    let soon = Span::from_ms(2);
    for (operation, is_traffic_based, least, most) in [
        (Operation::Read, false, Span::default(), soon),
        (Operation::Flush, false, Span::default(), soon),
        (Operation::Write, false, by_command, Span { ns: by_command.ns + 100_000_000 }),
        (Operation::Write, true, by_traffic, Span { ns: by_traffic.ns + 100_000_000 }),
    ] {
        let host = MultipathHost::new(2, IoPolicy::ActivePassive);
        let mut host = host.with_traffic_based_keep_alive(is_traffic_based).connect_all();
        host.targets[0].state().withholds_completions = true;
        let place = host.buffer(0, 8);
        assert!(host.submit(operation, 0, place, 1));
        host.run_for(Span::from_ms(1));
        host.disconnect_path(0);
        let cut_at = host.now;
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(cut_at);
        assert!((least..most).contains(&waited), "{operation:?}: {waited}");
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
        assert_eq!(host.executed_counts()[1], 1);
        let counters = host.multipath.path_counters();
        assert_eq!((counters.retries(0), counters.retries(1), counters.unserved()), (1, 0, 0));
        host.run_for(Span::from_secs(3));
        assert_eq!(host.completions.len(), 1, "once");
    }
}

/// A connected controller ends the old one, if both support it.
#[test]
fn write_fails_over_once_another_controller_has_reset_the_old_one() {
    let ok = Completion::new(0, Status::SUCCESS);
    let refused = Completion::new(0, Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
    let (max_execution_time, soon) = (max_execution_time(DETECT, false), Span::from_ms(50));
    for (no_reset, is_known, least, most, asked) in [
        (None, true, Span::default(), soon, [0, 1, 0]),
        (None, false, max_execution_time, Span { ns: max_execution_time.ns + soon.ns }, [0; 3]),
        // A reset that is delayed or rejected does not count as done; other controllers are tried, once
        // each.
        (
            Some(ok),
            true,
            max_execution_time,
            Span { ns: max_execution_time.ns + soon.ns },
            [0, 1, 1],
        ),
        (
            Some(refused),
            true,
            max_execution_time,
            Span { ns: max_execution_time.ns + soon.ns },
            [0, 1, 1],
        ),
    ] {
        let mut host = MultipathHost::new(3, IoPolicy::ActivePassive)
            .with_cross_controller_reset(is_known)
            .connect_all();
        host.targets.iter().for_each(|target| target.state().no_reset = no_reset);
        host.targets[0].state().withholds_completions = true;
        let place = host.buffer(0, 8);
        assert!(host.submit(Operation::Write, 0, place, 1));
        host.run_for(Span::from_ms(1));
        host.disconnect_path(0);
        let cut_at = host.now;
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(cut_at);
        assert!((least..most).contains(&waited), "{no_reset:?}, {is_known}: {waited}");
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
        let resets: Vec<u64> = host.targets.iter().map(|target| target.state().resets).collect();
        assert_eq!(resets, asked, "{no_reset:?}, {is_known}");
        let reported = PathEvent::ControllerFenced { path: 0, by: 1 };
        assert_eq!(host.events.contains(&reported), waited < soon);
        host.run_for(Span::from_secs(3));
        assert_eq!(host.completions.len(), 1, "once");
    }
}

/// Without a dangerous command in flight, no reset is requested.
#[test]
fn old_controller_is_not_reset_without_outstanding_writes() {
    let mut host = MultipathHost::new(2, IoPolicy::ActivePassive)
        .with_cross_controller_reset(true)
        .connect_all();
    host.write_and_verify(0, 1);
    host.disconnect_path(0);
    host.run_for(Span::from_secs(3));
    assert_eq!(host.targets[1].state().resets, 0);
}

/// One request at a time can be split on a path: of a batch the next ones wait, and are on no path when
/// their path is lost.
#[test]
fn request_rejected_by_a_full_path_survives_its_loss_and_completes_once() {
    for (io_policy, expected) in [(IoPolicy::ActivePassive, 1), (IoPolicy::RoundRobin, 6)] {
        let sizes = QueueSizes { parents: 1, ..QueueSizes::default() };
        let host = MultipathHost::with_queue_sizes(2, io_policy, sizes, CacheScope::Shared);
        for target in &host.targets {
            let identity = target.state().identity.clone().with(|it| it.mdts(1));
            target.state().identity = identity;
        }
        let mut host = host.connect_all();
        host.targets[0].state().withholds_completions = true;
        // A command moves at most 8 KiB.
        let place = host.buffer(0, 64);
        let requests: Vec<Request> = (0..6).map(|token| read_request(place, token)).collect();
        let taken = host.queues[0].submit(host.now, &requests, &[place]);
        host.unflushed += taken;
        host.queues[0].flush_submissions();
        assert_eq!(taken, expected, "{io_policy:?}: returned if all have the same path");
        host.run_for(Span::from_ms(1));
        host.disconnect_path(0);
        host.run_until(|host| !host.completions.is_empty());
        host.run_for(Span::from_secs(3));
        let mut reported: Vec<u64> = host.completions.iter().map(|it| it.token).collect();
        reported.sort_unstable();
        assert!(host.completions.iter().all(|completion| completion.status.is_success()));
        assert_eq!(reported, (0..taken as u64).collect::<Vec<_>>(), "{io_policy:?}");
        host.completions.clear();
        host.write_and_verify(0, 1);
    }
}

/// The admin connection is intact: the controller confirms that it has stopped.
#[test]
fn write_fails_over_once_the_old_controller_confirms_disable() {
    let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
    host.targets[0].state().withholds_completions = true;
    let place = host.buffer(0, 8);
    assert!(host.submit(Operation::Write, 0, place, 1));
    host.run_for(Span::from_ms(1));
    host.targets[0].state().networks[1].cut_links();
    let cut_at = host.now;
    host.run_until(|host| !host.completions.is_empty());
    let waited = host.now.since(cut_at);
    assert!(waited < Span::from_ms(50), "{waited}");
    assert_eq!(host.executed_counts(), [0, 1]);
}

/// A command that misses its deadline is given up, and its controller is reset: another controller gets
/// the write once the old one has confirmed that it has stopped, or has used up its time if it does not
/// confirm it.
#[test]
fn overdue_write_fails_over_after_the_quiesce_time() {
    for ignores_disable in [false, true] {
        let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
        {
            let mut state = host.targets[0].state();
            (state.withholds_completions, state.ignores_disable) = (true, ignores_disable);
        }
        let place = host.buffer(0, 8);
        assert!(host.submit(Operation::Write, 0, place, 1));
        host.run_until(|host| !host.targets[0].state().is_enabled());
        let told_at = host.now;
        assert_eq!(
            (host.completions.len(), host.executed_counts()[1]),
            (0, 0),
            "stuck: {ignores_disable}"
        );
        host.run_until(|host| host.executed_counts()[1] > 0);
        let waited = host.now.since(told_at);
        let (least, most) = match ignores_disable {
            false => (Span::default(), Span::from_ms(50)),
            true => (
                max_execution_time(DETECT, false),
                Span { ns: 2 * max_execution_time(DETECT, false).ns },
            ),
        };
        assert!((least..most).contains(&waited), "stuck: {ignores_disable}: {waited}");
        host.run_until(|host| !host.completions.is_empty());
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
        assert_eq!(host.executed_counts(), [0, 1]);
        let is_overdue = |event: &PathEvent| {
            matches!(event, PathEvent::Controller { path: 0, event: Event::CommandOverdue { .. } })
        };
        assert_eq!(host.events.iter().filter(|event| is_overdue(event)).count(), 1);
    }
}

#[test]
fn inaccessible_path_is_left_at_once_even_by_writes() {
    for ana in [AnaState::Inaccessible, AnaState::PersistentLoss, AnaState::Change] {
        let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
        // Without a notice: the completions carry the state.
        host.targets[0].state().ana = ana;
        let begun = host.now;
        host.write_and_verify(0, 1);
        assert!(host.now.since(begun) < Span::from_ms(2), "{}", host.now.since(begun));
        assert_eq!(host.executed_counts(), [0, 2], "{ana:?}");
        host.run_until(|host| host.multipath.ana_state(0) != Some(PathAnaState::Optimized));
        // After a notice, the path is not tried.
        host.set_ana_state(0, AnaState::Optimized);
        host.run_until(|host| host.multipath.ana_state(0) == Some(PathAnaState::Optimized));
        host.write_and_verify(0, 2);
        assert_eq!(host.executed_counts(), [2, 2], "{ana:?}");
    }
}

/// A transition may take as long as the controller declares (ANATT, two seconds), and requests are held.
#[test]
fn ana_change_state_is_awaited_for_anatt() {
    let mut host = MultipathHost::connected(1, IoPolicy::ActivePassive);
    host.set_ana_state(0, AnaState::Change);
    let place = host.buffer(0, 8);
    host.run_until(|host| host.multipath.ana_state(0) == Some(PathAnaState::Change));
    host.step();
    let _ = host.submit(Operation::Write, 0, place, 1);
    host.run_for(Span::from_ms(1500));
    assert_eq!(
        (host.multipath.ana_state(0), host.completions.len()),
        (Some(PathAnaState::Change), 0)
    );
    host.run_for(Span::from_ms(1000));
    assert_eq!(host.multipath.ana_state(0), Some(PathAnaState::Inaccessible));
    host.set_ana_state(0, AnaState::NonOptimized);
    host.run_until(|host| host.multipath.ana_state(0) == Some(PathAnaState::NonOptimized));
    host.write_and_verify(0, 1);
    assert_eq!(host.events.iter().filter(|event| **event == PathEvent::AllPathsDown).count(), 1);
}

#[test]
fn without_a_path_requests_fail_in_time_and_succeed_after_reconnect() {
    let mut host = MultipathHost::connected(2, IoPolicy::RoundRobin);
    (0..2).for_each(|path| host.disconnect_path(path));
    host.run_for(Span::from_ms(10));
    let (place, begun) = (host.buffer(0, 1), host.now);
    host.run_until(|host| host.submit(Operation::Read, 0, place, 1));
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!(host.completions.remove(0).status, IoStatus::PATH_ERROR);
    assert_eq!(host.multipath.path_counters().unserved(), 1);
    let waited = host.now.since(begun);
    assert!(waited < Span::from_secs(31) && waited > Span::from_secs(29), "{waited}");
    assert!(host.multipath.is_usable(host.now) && host.multipath.down_since().is_some());
    let failed = [0, 1].map(|path| host.multipath.path_counters().failed_connects(path));
    // An attempt every 100 ms, and the time that it takes.
    assert!(failed.iter().all(|count| (200..=300).contains(count)), "{failed:?}");
    host.targets[1].state().refuses_connections = false;
    host.run_until(|host| host.queues[0].accepting_path_count() == 1);
    host.write_and_verify(0, 1);
    assert_eq!(host.multipath.path_counters().failed_connects(1), failed[1]);
}

/// Also a path whose controller was given up meanwhile, and one that was never connected.
#[test]
fn path_reconnected_after_any_time_is_used_again() {
    let mut host = MultipathHost::new(2, IoPolicy::ActivePassive);
    host.targets[0].state().refuses_connections = true;
    host.run_until(|host| host.multipath.ana_state(1).is_some());
    host.add_queue();
    host.run_until(|host| host.queues[0].accepting_path_count() == 1);
    host.write_and_verify(0, 1);
    host.targets[0].state().refuses_connections = false;
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    host.write_and_verify(0, 2);
    assert_eq!(host.executed_counts(), [2, 2]);
    host.disconnect_path(0);
    for _ in 0..130 {
        host.run_for(Span::from_secs(5));
    }
    host.write_and_verify(0, 3);
    host.targets[0].state().refuses_connections = false;
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    host.write_and_verify(0, 4);
    assert_eq!(host.executed_counts(), [4, 4]);
}

/// Two subsystems of the same name need not be the same.
#[test]
fn path_to_another_namespace_is_not_used() {
    let mut host = MultipathHost::new(2, IoPolicy::RoundRobin);
    host.targets[1].state().nguid = 9;
    host.run_until(|host| host.events.len() == 2);
    let reported: Vec<String> = host.events.iter().map(ToString::to_string).collect();
    assert!(reported[1].starts_with("path 1 is not used: its names"), "{reported:?}");
    host.add_queue();
    host.run_until(|host| host.queues[0].accepting_path_count() == 1);
    host.write_and_verify(0, 1);
    assert_eq!(host.executed_counts()[1], 0);
}

#[test]
fn silent_path_is_left_once_detected() {
    let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
    for network in &host.targets[0].state().networks {
        network.inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
    }
    let (place, begun) = (host.buffer(0, 8), host.now);
    assert!(host.submit(Operation::Read, 0, place, 1));
    host.run_until(|host| !host.completions.is_empty());
    assert!(host.now.since(begun) <= Span { ns: DETECT.ns + 100_000_000 });
    assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
}

#[test]
fn path_with_errors_backs_off_while_others_are_used() {
    let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
    host.targets[0].state().status_override = Some(Status::INTERNAL_PATH_ERROR);
    let begun = host.now;
    host.write_and_verify(0, 1);
    assert!(host.now.since(begun) < Span::from_ms(2), "{}", host.now.since(begun));
    assert_eq!(host.executed_counts(), [0, 2]);
    host.targets[0].state().status_override = None;
    host.run_for(Span::from_ms(150));
    host.write_and_verify(0, 2);
    assert_eq!(host.executed_counts(), [2, 2], "rested");
}

#[test]
fn only_path_is_retried_after_a_backoff_for_a_limited_time() {
    let mut host = MultipathHost::connected(1, IoPolicy::ActivePassive);
    host.targets[0].state().status_override = Some(Status::INTERNAL_PATH_ERROR);
    let place = host.buffer(0, 8);
    assert!(host.submit(Operation::Write, 0, place, 1));
    host.run_for(Span::from_secs(1));
    assert_eq!(host.completions, []);
    host.targets[0].state().status_override = None;
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
}

/// A log page is read in pieces of 127 groups until the group of the namespace is found.
#[test]
fn namespace_in_any_ana_group_is_found_in_the_log_page() {
    for group in [1, 127, 128, 254, 255, 1000] {
        let host = MultipathHost::new(2, IoPolicy::ActivePassive);
        for target in &host.targets {
            let mut state = target.state();
            state.ana_group = group;
            state.identity = state.identity.clone().with(|it| it.anagrpmax(group).nanagrpid(group));
        }
        let mut host = host.connect_all();
        assert_eq!(host.multipath.ana_state(0), Some(PathAnaState::Optimized), "group {group}");
        host.set_ana_state(0, AnaState::NonOptimized);
        host.run_until(|host| host.multipath.ana_state(0) == Some(PathAnaState::NonOptimized));
        host.write_and_verify(0, 1);
        assert_eq!(host.executed_counts(), [0, 2], "group {group}");
    }
}

/// Only a host can report that a host has aborted something.
#[test]
fn aborted_by_host_from_a_controller_becomes_a_path_error() {
    let mut host = MultipathHost::connected(1, IoPolicy::ActivePassive);
    host.targets[0].state().status_override = Some(Status::ABORTED_BY_HOST);
    let place = host.buffer(0, 8);
    let outcome = host.run_request(Operation::Write, 0, place);
    assert_eq!(outcome, IoStatus(Status::INTERNAL_PATH_ERROR.0));
}

/// Its namespace has changed: from then on, the path gets no requests.
#[test]
fn path_without_ana_log_is_left_when_its_namespace_changes() {
    let host = MultipathHost::new(2, IoPolicy::ActivePassive);
    for target in &host.targets {
        let identity = target
            .state()
            .identity
            .clone()
            .with(|it| it.anars(false).namespace_attribute_notices(true));
        target.state().identity = identity;
    }
    let mut host = host.connect_all();
    assert_eq!(host.multipath.ana_state(0), Some(PathAnaState::Optimized));
    host.targets[0].state().nguid = 9;
    host.targets[0].state().namespace_has_changed = true;
    host.run_until(|host| host.multipath.ana_state(0) == Some(PathAnaState::Inaccessible));
    host.write_and_verify(0, 1);
    assert_eq!(host.executed_counts(), [0, 2]);
}

#[test]
fn shut_down_paths_do_not_reconnect() {
    let mut host = MultipathHost::connected(2, IoPolicy::ActivePassive);
    host.queues.clear();
    host.step();
    host.multipath.shut_down(host.now);
    host.run_until(|host| !host.multipath.is_shutting_down());
    host.run_for(Span::from_secs(2));
    assert!((0..2).all(|path| host.multipath.ana_state(path).is_none()));
    assert!(host.targets.iter().all(|target| target.open_connection_count() == 0));
}
