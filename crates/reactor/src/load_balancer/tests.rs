//! A balancer over reactors in simulated time.
//!
//! All reactors share one clock that work advances, so their loads add up to one core at most;
//! limits are set accordingly.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::Span;
use tenmil_linux::cpu_topology::{AvailableCpus, CpuLocation};
use tenmil_linux::frequency_control::{FrequencyError, FrequencyRequest};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_linux::{Clock, CpuList};

use super::{BalancerError, BalancerHandle, CpuPlatform, new_balancer, start_balancer};
use crate::simulation::Simulation;
use crate::thread_scheduler::{self, Options, Policy};
use crate::{
    Context, Event, Message, PollResult, Poller, PollerBuilder, ReactorId, ReactorOptions,
    Reactors, ThreadBuilder, ThreadHandle,
};

type SharedCount = Arc<AtomicU64>;

fn count_of(tally: &SharedCount) -> u64 {
    tally.load(Ordering::Relaxed)
}

/// Works for this many parts per thousand of each millisecond, by advancing the clock.
struct BusyPoller {
    clock: SharedCount,
    permille: SharedCount,
    polls: SharedCount,
}

impl Poller for BusyPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let permille = count_of(&self.permille);
        self.clock.fetch_add(permille * 1_000, Ordering::Relaxed);
        if permille > 0 { PollResult::Busy } else { PollResult::Idle }
    }
}

/// Platform controlled by a test.
#[derive(Clone, Default)]
struct FakePlatform {
    ours: Arc<Mutex<AvailableCpus>>,
    requests: Arc<Mutex<Vec<(u32, FrequencyRequest)>>>,
}

impl CpuPlatform for FakePlatform {
    fn available_cpus(&mut self) -> AvailableCpus {
        self.ours.lock().unwrap().clone()
    }

    fn controls_frequency(&self) -> bool {
        true
    }

    fn request_frequencies(
        &mut self,
        requests: Vec<(u32, FrequencyRequest)>,
    ) -> Vec<FrequencyError> {
        *self.requests.lock().unwrap() = requests;
        Vec::new()
    }
}

impl FakePlatform {
    fn take_cpu_offline(&self, cores: CpuList) {
        self.ours.lock().unwrap().cores = cores;
    }

    fn frequency_request_of(&self, core: u32) -> FrequencyRequest {
        let requests = self.requests.lock().unwrap();
        requests.iter().find(|request| request.0 == core).unwrap().1
    }
}

struct BalancedReactors {
    world: Simulation,
    reported: FakePlatform,
    steering: BalancerHandle,
}

fn test_options() -> Options {
    Options {
        policy: Policy::Dynamic,
        period: Span::from_ms(20),
        load_limit: 5,
        core_limit: 40,
        core_busy: 90,
        migration_interval: Span::from_ms(60),
        ..Options::default()
    }
}

/// Time after which the placement must be final.
const A_WHILE: Span = Span::from_ms(400);

impl BalancedReactors {
    fn new(seed: u64, reactors: u32, options: Options) -> Self {
        let world = Simulation::new_adaptive(seed, reactors);
        let reported = FakePlatform::default();
        reported.take_cpu_offline((0..reactors).collect());
        // Two cores per NUMA node.
        let place = |core| CpuLocation { core, node: Some(core / 2), ..CpuLocation::default() };
        let places = (0..reactors).map(place).collect();
        let (balancer, steering) = new_balancer(options, places, reported.clone()).unwrap();
        let plan =
            ThreadBuilder::new("balancer").on_reactor(ReactorId(reactors - 1)).add_poller(balancer);
        world.directory.spawn(plan).unwrap();
        Self { world, reported, steering }
    }

    /// A thread that works for `permille` of each millisecond; its load, and its poll counter.
    fn spawn_busy_thread(
        &self,
        on: u32,
        permille: u64,
        mask: Option<CpuList>,
    ) -> (ThreadHandle, SharedCount, SharedCount) {
        let (load, polls) = (Arc::new(AtomicU64::new(permille)), SharedCount::default());
        let worker = BusyPoller {
            clock: Arc::clone(&self.world.now_ns),
            permille: Arc::clone(&load),
            polls: Arc::clone(&polls),
        };
        let timed = PollerBuilder::polled_each_period("work", Span::from_ms(1), worker);
        let mut plan = ThreadBuilder::new("worker").on_reactor(ReactorId(on)).add_poller(timed);
        plan.mask = mask;
        (self.world.directory.spawn(plan).unwrap(), load, polls)
    }

    fn reactor_of_thread(&self, handle: &ThreadHandle) -> u32 {
        let sample = self.world.directory.sample_statistics(self.world.now());
        sample.threads.iter().find(|thread| thread.id == handle.id()).unwrap().home.0
    }

    fn thread_counts(&self, handles: &[&ThreadHandle]) -> Vec<u32> {
        handles.iter().map(|handle| self.reactor_of_thread(handle)).collect()
    }
}

#[test]
fn idle_threads_are_consolidated_and_empty_reactors_sleep() {
    let mut balanced = BalancedReactors::new(1, 3, test_options());
    let handles: Vec<ThreadHandle> =
        (0..3).map(|core| balanced.spawn_busy_thread(core, 0, None).0).collect();
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.thread_counts(&handles.iter().collect::<Vec<_>>()), [0, 0, 0]);
    let plan = balanced.steering.last_plan();
    assert_eq!((plan.empty, plan.idle_core), ((1..3).collect(), Some(0)));
    let frequencies = [0, 1, 2].map(|core| balanced.reported.frequency_request_of(core));
    assert_eq!(
        frequencies,
        [FrequencyRequest::Down, FrequencyRequest::Lowest, FrequencyRequest::Lowest]
    );
    let asked =
        [(0, FrequencyRequest::Down), (1, FrequencyRequest::Lowest), (2, FrequencyRequest::Lowest)];
    assert_eq!(
        balanced.steering.last_frequency_requests(),
        asked,
        "the current requests are the same"
    );

    let sleeps =
        |world: &Simulation| world.directory.sample_statistics(world.now()).reactors[2].wakes;
    let before = sleeps(&balanced.world);
    balanced.world.run_for(A_WHILE);
    assert_eq!(sleeps(&balanced.world), before, "nothing wakes an empty reactor");
}

#[test]
fn thread_migrates_to_the_numa_node_of_its_memory() {
    let mut balanced = BalancedReactors::new(6, 4, test_options());
    let (_busy, _, _) = balanced.spawn_busy_thread(0, 200, None);
    let worker = BusyPoller {
        clock: Arc::clone(&balanced.world.now_ns),
        permille: Arc::new(AtomicU64::new(200)),
        polls: SharedCount::default(),
    };
    let timed = PollerBuilder::polled_each_period("work", Span::from_ms(1), worker);
    let plan = ThreadBuilder::new("far").numa_node(1).on_reactor(ReactorId(1)).add_poller(timed);
    let far = balanced.world.directory.spawn(plan).unwrap();
    balanced.world.run_for(A_WHILE);
    assert!([2, 3].contains(&balanced.reactor_of_thread(&far)), "node 1 has cores 2 and 3");
}

#[test]
fn pinned_thread_is_not_planned_to_migrate() {
    let mut balanced = BalancedReactors::new(8, 2, test_options());
    let worker = BusyPoller {
        clock: Arc::clone(&balanced.world.now_ns),
        permille: SharedCount::default(),
        polls: SharedCount::default(),
    };
    let tied = PollerBuilder::polled_each_period("work", Span::from_ms(1), worker)
        .pinned("it has a descriptor");
    let plan = ThreadBuilder::new("tied").on_reactor(ReactorId(1)).add_poller(tied);
    let tied = balanced.world.directory.spawn(plan).unwrap();
    let (free, _, _) = balanced.spawn_busy_thread(1, 0, None);
    for _ in 0..20 {
        balanced.world.run_for(Span::from_ms(20));
        let migrations = balanced.steering.last_plan().migrations;
        assert!(
            migrations.iter().all(|order| order.thread != u64::from(tied.id().0)),
            "{migrations:?}"
        );
    }
    assert_eq!(balanced.thread_counts(&[&tied, &free]), [1, 0]);
}

#[test]
fn overloaded_reactor_sheds_threads_and_gets_them_back() {
    let mut balanced = BalancedReactors::new(2, 2, test_options());
    let (one, load, _) = balanced.spawn_busy_thread(0, 250, None);
    let (two, _, _) = balanced.spawn_busy_thread(0, 250, None);
    balanced.world.run_for(A_WHILE);
    let homes = balanced.thread_counts(&[&one, &two]);
    assert_eq!(homes.iter().sum::<u32>(), 1, "one on each: {homes:?}");
    assert_eq!(balanced.reported.frequency_request_of(1), FrequencyRequest::Highest);
    load.store(0, Ordering::Relaxed);
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.thread_counts(&[&one, &two]), [0, 0]);
}

#[test]
fn threads_leave_an_offline_core_even_against_their_mask() {
    let mut balanced =
        BalancedReactors::new(3, 2, Options { policy: Policy::Static, ..test_options() });
    let (free, _, polls) = balanced.spawn_busy_thread(1, 100, None);
    let (bound, _, _) = balanced.spawn_busy_thread(1, 10, Some([1].into_iter().collect()));
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.thread_counts(&[&free, &bound]), [1, 1], "the static policy lets them be");
    balanced.reported.take_cpu_offline([0].into_iter().collect());
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.thread_counts(&[&free, &bound]), [0, 0]);
    let reported = |balanced: &BalancedReactors, what: &thread_scheduler::SchedulerEvent| {
        balanced.world.events().contains(&Event::Schedule(what.clone()))
    };
    assert!(reported(&balanced, &thread_scheduler::SchedulerEvent::CoreOffline { core: 1 }));
    let thread = u64::from(bound.id().0);
    let mask = [1].into_iter().collect();
    assert!(reported(
        &balanced,
        &thread_scheduler::SchedulerEvent::AffinityUnsatisfied { thread, mask }
    ));
    assert_eq!(balanced.reported.frequency_request_of(1), FrequencyRequest::Restore);

    balanced.reported.take_cpu_offline((0..2).collect());
    let before = count_of(&polls);
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.thread_counts(&[&free, &bound]), [0, 1]);
    assert!(reported(&balanced, &thread_scheduler::SchedulerEvent::AffinityRestored { thread }));
    assert!(count_of(&polls) > before + 300, "it went on working");
}

#[test]
fn policy_can_be_changed_while_running() {
    let fixed = Options { policy: Policy::Static, ..test_options() };
    let mut balanced = BalancedReactors::new(4, 2, fixed.clone());
    let (idle, _, _) = balanced.spawn_busy_thread(1, 0, None);
    balanced.world.run_for(A_WHILE);
    assert_eq!(balanced.reactor_of_thread(&idle), 1);
    for _ in 0..2 {
        balanced.steering.set_options(test_options()).unwrap();
        balanced.world.run_for(A_WHILE);
        assert_eq!(balanced.reactor_of_thread(&idle), 0);
        balanced.steering.set_options(fixed.clone()).unwrap();
        balanced.world.directory.migrate_thread(idle.id(), ReactorId(1)).unwrap();
        balanced.world.run_for(A_WHILE);
        assert_eq!(balanced.reactor_of_thread(&idle), 1, "static again: it is not moved back");
    }
    let wrong = Options { scheduling_core: Some(9), ..test_options() };
    assert!(balanced.steering.set_options(wrong).is_err());
    assert_eq!(balanced.steering.options(), fixed);
}

#[test]
fn loads_are_sampled_once_per_period_and_changed_options_are_kept() {
    let mut balanced = BalancedReactors::new(5, 1, test_options());
    let mut looks = |period: Span| {
        balanced.steering.set_options(Options { period, ..test_options() }).unwrap();
        balanced.world.run_for(A_WHILE);
        let balancer = |world: &Simulation| {
            let mut sample = world.directory.sample_statistics(world.now());
            sample.threads.remove(0).pollers.remove(0)
        };
        let before = balancer(&balanced.world);
        assert_eq!(before.every, Some(period));
        balanced.world.run_for(A_WHILE);
        balancer(&balanced.world).polls - before.polls
    };
    for (period_ms, expected) in [(20, 19..=21), (80, 4..=6), (10, 39..=41)] {
        let polls = looks(Span::from_ms(period_ms));
        assert!(expected.contains(&polls), "{period_ms} ms: {polls}");
    }
}

#[test]
fn messages_stay_in_order_during_migrations() {
    for seed in 0..6 {
        let mut balanced = BalancedReactors::new(
            seed,
            3,
            Options { migration_interval: Span::default(), ..test_options() },
        );
        let (handle, load, polls) = balanced.spawn_busy_thread(0, 0, None);
        let (other, _, _) = balanced.spawn_busy_thread(0, 200, None);
        let arrived: Arc<Mutex<Vec<u64>>> = Arc::default();
        for number in 0..60 {
            load.store(number % 3 * 150, Ordering::Relaxed);
            let log = Arc::clone(&arrived);
            let note = move |_: &mut Context<'_>| log.lock().unwrap().push(number);
            assert!(handle.send(Message::Call(Box::new(note))).is_ok());
            if number % 10 == 0 {
                balanced.reported.take_cpu_offline((u32::from(number % 20 == 0)..3).collect());
            }
            balanced.world.run_for(Span::from_ms(11));
        }
        assert_eq!(*arrived.lock().unwrap(), (0..60).collect::<Vec<_>>(), "seed {seed}");
        let sample = balanced.world.directory.sample_statistics(balanced.world.now());
        assert_eq!(sample.threads.len(), 3, "seed {seed}: lost or doubled");
        let migrations: u64 = sample.threads.iter().map(|thread| thread.migrations).sum();
        assert!(migrations >= 10, "seed {seed}: only {migrations} moves");
        assert!(count_of(&polls) > 400, "seed {seed}: starved");
        assert_ne!(handle.id(), other.id());
    }
}

#[test]
fn idle_threads_are_consolidated_on_real_cpus() {
    let cores = CpuList::allowed_cpus();
    let reactors =
        Reactors::start_on_cores(&cores, &ReactorOptions::default(), &Clock::start()).unwrap();
    let (first, last) = (ReactorId(0), reactors.registry().reactors().last().unwrap());
    let thread = reactors.spawn(ThreadBuilder::new("idle").on_reactor(last)).unwrap();
    let pool = Arc::new(ThreadPool::new(1, 4));
    let options = Options { load_limit: 50, period: Span::from_ms(5), ..test_options() };
    let wrong = Options { load_limit: 90, ..options.clone() };
    let refused = start_balancer(reactors.registry(), wrong, None, Arc::clone(&pool)).unwrap_err();
    assert!(matches!(refused, BalancerError::Options(_)), "{refused}");
    let options = Options { core_limit: 80, ..options };
    let (_, steering) = start_balancer(reactors.registry(), options, None, pool).unwrap();

    let (send, homes) = std::sync::mpsc::channel();
    let ask = || {
        let send = send.clone();
        let tell = move |context: &mut Context<'_>| send.send(context.reactor_id()).unwrap();
        let later =
            move |context: &mut Context<'_>| drop(context.call_after(Span::from_ms(10), tell));
        assert!(thread.send_closure(later).is_ok());
        homes.recv().unwrap()
    };
    assert!((0..1_000).any(|_| ask() == first), "{:?}", steering.last_plan());
    reactors.stop();
}
