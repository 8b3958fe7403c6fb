use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use tenmil_base::{Instant, Random, Span};
use tenmil_linux::{Clock, CpuList};

use super::{ExecutorHandle, JoinError, JoinHandle, SpawnTaskError, SpawnTaskErrorKind};
use crate::simulation::{SimReactorState, Simulation};
use crate::{Event, ReactorId, ReactorOptions, Reactors, ThreadBuilder, ThreadHandle};

fn spawn_task<F>(tasks: &ExecutorHandle, future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tasks.spawn_task(future).unwrap()
}

/// A thread with an executor, in a simulation of `reactors`.
fn start_executor(world: &Simulation, tasks_max: u32) -> (ThreadHandle, ExecutorHandle) {
    let thread = world.directory.spawn(ThreadBuilder::new("async")).unwrap();
    let tasks = ExecutorHandle::start_on_thread(&thread, "tasks", tasks_max).unwrap();
    (thread, tasks)
}

/// What a task waits for until a test supplies it.
#[derive(Clone, Default)]
struct TestSignal(Arc<Mutex<(u64, Option<Waker>)>>);

impl TestSignal {
    fn set(&self) {
        let waker = {
            let mut inner = self.0.lock().unwrap();
            inner.0 += 1;
            inner.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn take_if_set(&self) {
        poll_fn(|context| {
            let mut inner = self.0.lock().unwrap();
            if inner.0 > 0 {
                inner.0 -= 1;
                return Poll::Ready(());
            }
            inner.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Yields to other tasks.
async fn yield_once() {
    let mut given = false;
    poll_fn(|context| {
        if std::mem::replace(&mut given, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

fn poll_join_handle<T>(handle: &mut JoinHandle<T>) -> Option<Result<T, JoinError>> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(handle).poll(&mut context) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

#[test]
fn task_runs_to_completion_and_returns_its_result() {
    let mut world = Simulation::new_adaptive(1, 1);
    let (_, tasks) = start_executor(&world, 4);
    let inner = tasks.clone();
    let mut handle = spawn_task(&tasks, async move {
        let parts = [spawn_task(&inner, async { 20 }), spawn_task(&inner, async { 22 })];
        let mut sum = 0;
        for part in parts {
            sum += part.await.unwrap();
        }
        sum
    });
    assert!(!handle.is_finished());
    world.run_until_idle();
    assert!(handle.is_finished());
    assert_eq!((poll_join_handle(&mut handle), tasks.task_count()), (Some(Ok(42)), 0));
}

#[test]
fn idle_executor_sleeps_and_is_woken_from_another_thread() {
    let mut world = Simulation::new_adaptive(2, 1);
    let (_, tasks) = start_executor(&world, 4);
    let signal = TestSignal::default();
    let theirs = signal.clone();
    let mut handle = spawn_task(&tasks, async move {
        for _ in 0..100 {
            theirs.take_if_set().await;
        }
    });
    for _ in 0..100 {
        assert_eq!(world.run_until_idle(), Instant::NEVER, "nothing but a wake-up ends this sleep");
        assert_eq!(poll_join_handle(&mut handle), None);
        signal.set();
    }
    world.run_until_idle();
    assert_eq!(poll_join_handle(&mut handle), Some(Ok(())));
}

#[test]
fn wake_while_going_to_sleep_is_noticed() {
    let mut world = Simulation::new_adaptive(10, 1);
    let (_, tasks) = start_executor(&world, 4);
    let on_the_way = |stage| {
        [
            matches!(stage, SimReactorState::WantsSleep(_)),
            matches!(stage, SimReactorState::SleepAnnounced(_)),
        ]
    };
    for step in [0, 1] {
        let signal = TestSignal::default();
        let theirs = signal.clone();
        let mut handle = spawn_task(&tasks, async move { theirs.take_if_set().await });
        while !on_the_way(world.reactor_states()[0])[step] {
            world.step_all(1);
        }
        signal.set();
        world.run_until_idle();
        assert_eq!(poll_join_handle(&mut handle), Some(Ok(())), "step {step}");
    }
}

#[test]
fn sleep_lasts_the_requested_time() {
    let mut world = Simulation::new_adaptive(3, 1);
    let (_, tasks) = start_executor(&world, 4);
    let (inner, clock) = (tasks.clone(), Arc::clone(&world.now_ns));
    let now = move || clock.load(Ordering::Relaxed);
    let mut handle = spawn_task(&tasks, async move {
        let mut taken = Vec::new();
        for span in [Span::from_us(30), Span::from_ms(20), Span::from_secs(3)] {
            let began = now();
            inner.sleep(span).await.unwrap();
            taken.push((span.ns, now() - began));
        }
        taken
    });
    world.run_for(Span::from_secs(4));
    let taken = poll_join_handle(&mut handle).unwrap().unwrap();
    assert_eq!(taken.len(), 3);
    for (asked, took) in taken {
        assert!((asked..asked + 20_000).contains(&took), "asked {asked}, took {took}");
    }
}

#[test]
fn dropped_sleep_leaves_no_timer() {
    let mut world = Simulation::new_adaptive(4, 1);
    let (_, tasks) = start_executor(&world, 4);
    let inner = tasks.clone();
    let _handle = spawn_task(&tasks, async move {
        for turn in 0..100 {
            let mut sleep = inner.sleep(Span::from_secs(3600));
            let _ = poll_fn(|context| Poll::Ready(Pin::new(&mut sleep).poll(context))).await;
            if turn % 2 == 0 {
                yield_once().await;
            }
        }
        pending::<()>().await;
    });
    world.run_until_idle();
    assert_eq!(tasks.0.lock_timers().earliest_deadline(), Instant::NEVER);
    assert_eq!(tasks.0.lock_timers().wake_all().len(), 0);
}

#[test]
fn panicking_task_is_reported_and_others_continue() {
    let mut world = Simulation::new_adaptive(5, 1);
    let (_, tasks) = start_executor(&world, 4);
    let signal = TestSignal::default();
    let theirs = signal.clone();
    let mut other = spawn_task(&tasks, async move { theirs.take_if_set().await });
    let mut bad = spawn_task(&tasks, async { assert_eq!(1, 2, "on purpose") });
    world.run_until_idle();
    let Some(Err(JoinError::Panicked { panic })) = poll_join_handle(&mut bad) else {
        panic!("it did")
    };
    assert!(panic.contains("on purpose"), "{panic}");
    let reported = world.events().into_iter().find_map(|event| match event {
        Event::TaskPanicked { executor, panic, .. } => Some((executor, panic)),
        _ => None,
    });
    assert_eq!(reported, Some(("tasks".to_owned(), panic)));
    signal.set();
    world.run_until_idle();
    assert_eq!((poll_join_handle(&mut other), tasks.task_count()), (Some(Ok(())), 0));
}

#[test]
fn panic_in_task_drop_is_reported() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }
    let mut world = Simulation::new_adaptive(6, 1);
    let (_, tasks) = start_executor(&world, 1);
    let bomb = Bomb;
    let handle = spawn_task(&tasks, async move {
        let _bomb = bomb;
        pending::<()>().await;
    });
    world.run_until_idle();
    drop(handle);
    world.run_until_idle();
    assert!(world.event_kinds().contains(&"task-panicked"));
    assert_eq!(tasks.task_count(), 0);
    let mut next = spawn_task(&tasks, async {});
    world.run_until_idle();
    assert_eq!(poll_join_handle(&mut next), Some(Ok(())));
}

#[test]
fn full_executor_returns_the_future() {
    let mut world = Simulation::new_adaptive(7, 1);
    let (_, tasks) = start_executor(&world, 2);
    let one = spawn_task(&tasks, pending::<()>());
    let two = spawn_task(&tasks, pending::<()>());
    let SpawnTaskError { kind: why, future } = tasks.spawn_task(std::future::ready(3)).unwrap_err();
    assert_eq!(why, SpawnTaskErrorKind::TableFull { tasks_max: 2 });
    drop((one, two));
    world.run_until_idle();
    assert_eq!(tasks.task_count(), 0, "those whose handles were dropped are gone");
    let mut three = spawn_task(&tasks, future);
    world.run_until_idle();
    assert_eq!(poll_join_handle(&mut three), Some(Ok(3)));
}

#[test]
fn detached_task_continues() {
    let mut world = Simulation::new_adaptive(8, 1);
    let (_, tasks) = start_executor(&world, 2);
    let done = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&done);
    spawn_task(&tasks, async move {
        yield_once().await;
        theirs.store(true, Ordering::Relaxed);
    })
    .detach();
    world.run_until_idle();
    assert!(done.load(Ordering::Relaxed));
}

#[test]
fn waiting_joins_are_notified_when_the_thread_ends() {
    let mut world = Simulation::new_adaptive(9, 1);
    let (thread, tasks) = start_executor(&world, 4);
    let counted = Arc::new(());
    let held = Arc::clone(&counted);
    let mut handle = spawn_task(&tasks, async move {
        pending::<()>().await;
        drop(held);
    });
    let mut sleep = tasks.sleep(Span::from_secs(1));
    let mut poll_sleep =
        || Pin::new(&mut sleep).poll(&mut Context::from_waker(Waker::noop())).map(Result::err);
    assert!(poll_sleep().is_pending());
    world.run_until_idle();
    let mut late = spawn_task(&tasks, async {});
    world.directory.end_thread(thread.id()).unwrap();
    world.run_until_idle();
    assert!(tasks.has_ended());
    assert_eq!(poll_join_handle(&mut handle), Some(Err(JoinError::Gone)));
    assert!(poll_join_handle(&mut late).is_some(), "it has ended, or it has been dropped");
    assert_eq!(poll_sleep(), Poll::Ready(Some(JoinError::Gone)));
    assert_eq!(tasks.spawn_task(async {}).unwrap_err().kind, SpawnTaskErrorKind::ThreadGone);
    assert_eq!(Arc::strong_count(&counted), 1, "all tasks were dropped");
    assert!(ExecutorHandle::start_on_thread(&thread, "late", 1).is_err());
}

/// State shared by the tasks of a seed.
struct RandomTaskState {
    signals: Vec<TestSignal>,
    polled: AtomicU64,
    alive: AtomicU64,
    /// While set, tasks do not end by themselves.
    trouble: AtomicBool,
}

/// A task with random behavior, which must not be polled after its end.
struct LifetimeCheckedTask<F> {
    inner: Pin<Box<F>>,
    lot: Arc<RandomTaskState>,
    is_over: bool,
}

impl<F: Future> Future for LifetimeCheckedTask<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        assert!(!self.is_over, "polled after its end");
        self.lot.polled.fetch_add(1, Ordering::Relaxed);
        let polled = self.inner.as_mut().poll(context);
        self.is_over = polled.is_ready();
        polled
    }
}

impl<F> Drop for LifetimeCheckedTask<F> {
    fn drop(&mut self) {
        self.lot.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lifetime_checked_task(
    lot: &Arc<RandomTaskState>,
    tasks: &ExecutorHandle,
    me: usize,
    seed: u64,
) -> impl Future<Output = u64> + Send + use<> {
    lot.alive.fetch_add(1, Ordering::Relaxed);
    let (shared, tasks) = (Arc::clone(lot), tasks.clone());
    let inner = Box::pin(async move {
        let mut random = Random::new(seed);
        let mut steps = 0;
        while shared.trouble.load(Ordering::Relaxed) && !random.chance(1, 40) {
            steps += 1;
            let other = usize::try_from(random.below(shared.signals.len() as u64)).unwrap();
            match random.below(5) {
                0 => tasks.sleep(Span { ns: random.below(300_000) }).await.unwrap(),
                1 => shared.signals[other].set(),
                2 => drop(tasks.sleep(Span::from_ms(1))),
                3 => yield_once().await,
                _ => shared.signals[me].take_if_set().await,
            }
        }
        steps
    });
    LifetimeCheckedTask { inner, lot: Arc::clone(lot), is_over: false }
}

const TASKS: usize = 9;

/// Random wakes, drops, timers and migrations; then everything must end.
fn run_random_tasks(seed: u64) -> u64 {
    let mut world = Simulation::new_adaptive(seed, 2);
    let (thread, tasks) = start_executor(&world, u32::try_from(TASKS).unwrap());
    let lot = Arc::new(RandomTaskState {
        signals: (0..TASKS).map(|_| TestSignal::default()).collect(),
        polled: AtomicU64::new(0),
        alive: AtomicU64::new(0),
        trouble: AtomicBool::new(true),
    });
    let mut random = Random::new(!seed);
    let mut handles: Vec<Option<JoinHandle<u64>>> = (0..TASKS).map(|_| None).collect();
    for _ in 0..400 {
        world.step_random_reactor();
        let index = usize::try_from(random.below(TASKS as u64)).unwrap();
        match random.below(72) {
            0..6 => lot.signals[index].set(),
            6..12 => handles[index] = None,
            12..24 if handles[index].is_none() => {
                let task = lifetime_checked_task(&lot, &tasks, index, random.below(u64::MAX));
                handles[index] = tasks.spawn_task(task).ok();
            }
            24..30 => {
                let to = ReactorId(u32::try_from(random.below(2)).unwrap());
                // It may be there already, or on its way.
                let _ = world.directory.migrate_thread(thread.id(), to);
            }
            30 => drop(world.run_to_next_deadline(world.now().after(Span::from_ms(1)))),
            _ => {}
        }
    }
    lot.trouble.store(false, Ordering::Relaxed);
    (0..1_000).for_each(|_| lot.signals.iter().for_each(TestSignal::set));
    world.run_for(Span::from_ms(10));
    for mut handle in handles.into_iter().flatten() {
        let ended =
            poll_join_handle(&mut handle).unwrap_or_else(|| panic!("seed {seed}: a task was lost"));
        assert!(ended.is_ok(), "seed {seed}: {ended:?}");
    }
    assert_eq!(lot.alive.load(Ordering::Relaxed), 0, "seed {seed}: a task was kept");
    assert_eq!(tasks.task_count(), 0, "seed {seed}");
    assert!(!world.event_kinds().contains(&"task-panicked"), "seed {seed}: {:?}", world.events());
    assert_eq!(world.run_until_idle(), Instant::NEVER, "seed {seed}: an alarm was left behind");
    lot.polled.load(Ordering::Relaxed)
}

#[test]
fn random_tasks_are_never_lost_or_polled_after_completion() {
    let seeds = if cfg!(miri) { 3 } else { 3_000 };
    let polled: u64 = (0..seeds).map(run_random_tasks).sum();
    assert!(polled > seeds * 40, "{polled} polls are too few to tell");
}

#[test]
fn same_seed_gives_the_same_run() {
    assert_eq!(run_random_tasks(17), run_random_tasks(17));
}

#[test]
fn wakes_from_another_os_thread_arrive_at_a_sleeping_reactor() {
    let cores = CpuList::from_iter(CpuList::allowed_cpus().iter().take(1));
    let options = ReactorOptions { pin: false, ..ReactorOptions::default() };
    let reactors = Reactors::start_on_cores(&cores, &options, &Clock::start()).unwrap();
    let thread = reactors.spawn(ThreadBuilder::new("async")).unwrap();
    let tasks = ExecutorHandle::start_on_thread(&thread, "tasks", 4).unwrap();
    let (there, back) = (TestSignal::default(), Arc::new(AtomicU64::new(0)));
    let (theirs, count) = (there.clone(), Arc::clone(&back));
    let rounds = if cfg!(miri) { 10 } else { 20_000 };
    let handle = spawn_task(&tasks, async move {
        for _ in 0..rounds {
            theirs.take_if_set().await;
            count.fetch_add(1, Ordering::Release);
        }
        count.load(Ordering::Relaxed)
    });
    for round in 0..rounds {
        there.set();
        // Sometimes long enough for it to fall asleep.
        if round % 1_000 == 0 {
            let asleep = || reactors.sample().reactors[0].sleeping;
            while back.load(Ordering::Acquire) <= round || !asleep() {
                tenmil_linux::named_thread::yield_cpu();
            }
        }
    }
    assert_eq!(handle.wait(), Ok(rounds));
    drop(reactors);
    assert!(tasks.has_ended());
}
