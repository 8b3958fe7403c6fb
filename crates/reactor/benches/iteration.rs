//! Cost of an iteration, and CPU time of an idle process.
//!
//! `cargo bench -p tenmil-reactor --bench iteration [-- SECONDS]`
//!
//! Iterations are compared in one run, in alternating rounds, on one core. The idle process has two
//! reactors (one, if there is only one core), 8 threads and 32 pollers, and idles for 30 seconds,
//! or the given time, in each of the three poll modes; its CPU time is read from
//! `/proc/self/task/*/schedstat`.

use std::hint::black_box;
use std::os::fd::OwnedFd;

use tenmil_base::{Instant, Span};
use tenmil_linux::{Clock, CpuList, EventFdVectors, EventLoop, NamedThread, NextStep};
use tenmil_reactor::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerWake, Reactor, ReactorOptions,
    Reactors, ThreadBuilder, TimeSource, UnstartedReactors,
};

/// Poller that never finds work: it loads one word, as a queue loads its next entry.
struct IdlePoller(u64);

/// Poller that waits for a deadline that is never reached.
struct NeverDuePoller(Instant);

const ROUNDS: usize = 1_000;
const TURNS: u32 = 20_000;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let seconds = arguments.next().map_or(30, |text| text.parse().expect("a number of seconds"));
    let clock = Clock::start();
    let cores = CpuList::allowed_cpus();
    NamedThread::spawn("turns", cores.iter().last(), move |_| bench_iterations(&clock))
        .expect("a thread")
        .join();
    let first_two: CpuList = cores.iter().take(2).collect();
    for poll in [PollMode::Adaptive, PollMode::Hybrid, PollMode::Always] {
        bench_idle_cpu_share(poll, &first_two, Span::from_secs(seconds), &clock);
    }
}

/// Nanoseconds per iteration: the clock alone, no poller, one poller, and one beside 100 timed
/// ones.
fn bench_iterations(clock: &Clock) {
    let timed = |count, period| reactor_for_bench(1, count, period, clock);
    let mut cases: [(&str, Option<(Reactor, UnstartedReactors)>); 6] = [
        ("the clock alone", None),
        ("no poller", Some(reactor_for_bench(0, 0, Span::default(), clock))),
        ("1 active poller", Some(timed(0, Span::default()))),
        ("1 active, 100 timed every 10 ms", Some(timed(100, Span::from_ms(10)))),
        ("1 active, 100 timed every 1 ms", Some(timed(100, Span::from_ms(1)))),
        ("8 active pollers", Some(reactor_for_bench(8, 0, Span::default(), clock))),
    ];
    let mut results = [(); 6].map(|()| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        for ((_, reactor), results) in cases.iter_mut().zip(&mut results) {
            let begin = clock.now();
            match reactor {
                None => (0..TURNS).for_each(|_| _ = black_box(clock.now())),
                Some((reactor, _)) => run_iteration_turns(reactor, clock),
            }
            results.push(clock.now().since(begin).ns);
        }
    }
    println!("a turn, in nanoseconds, {ROUNDS} rounds of {TURNS} turns");
    println!("{:<34} {:>8} {:>8} {:>8}", "", "least", "median", "90 %");
    for ((name, _), mut results) in cases.iter().zip(results) {
        results.sort_unstable();
        let at =
            |numerator: usize| results[(ROUNDS - 1) * numerator / 10] as f64 / f64::from(TURNS);
        println!("{name:<34} {:>8.2} {:>8.2} {:>8.2}", at(0), at(5), at(9));
    }
}

#[inline]
fn run_iteration_turns(reactor: &mut Reactor, clock: &Clock) {
    // As in `tenmil_linux::event_loop::run`.
    let mut now = clock.now();
    for _ in 0..TURNS {
        let wait = reactor.iterate(now);
        assert!(wait == NextStep::Again, "{wait:?}");
        if reactor.needs_clock() {
            now = clock.now();
        }
    }
}

/// A reactor with one thread, on this OS thread. The rest of its set keeps its notifier alive.
fn reactor_for_bench(
    active: u32,
    timed: u32,
    period: Span,
    clock: &Clock,
) -> (Reactor, UnstartedReactors) {
    let options = ReactorOptions { poll: PollMode::Always, ..ReactorOptions::default() };
    let stopwatch = TimeSource::Clock(*clock);
    let mut assembly =
        UnstartedReactors::new(&[0], &options, &stopwatch, clock.now()).expect("a reactor");
    let mut plan = ThreadBuilder::new("bench");
    for _ in 0..active {
        plan = plan.add_poller(PollerBuilder::polled_each_iteration(
            "active",
            PollerWake::Messages,
            IdlePoller(0),
        ));
    }
    for _ in 0..timed {
        plan = plan.add_poller(PollerBuilder::polled_each_period("timed", period, IdlePoller(0)));
    }
    assembly.registry.spawn(plan).expect("room");
    let (reactor, _) = assembly.reactors.remove(0);
    (reactor, assembly)
}

/// Share of one core used by an idle process.
fn bench_idle_cpu_share(poll: PollMode, cores: &CpuList, span: Span, clock: &Clock) {
    let options = ReactorOptions { poll, ..ReactorOptions::default() };
    let reactors = Reactors::start_on_cores(cores, &options, clock).expect("reactors");
    let vectors = EventFdVectors::new(8).expect("descriptors");
    for number in 0_u16..8 {
        let descriptor = vectors.descriptor(number).expect("a vector");
        let descriptor: OwnedFd = descriptor.try_clone_to_owned().expect("a descriptor");
        let plan = ThreadBuilder::new(&format!("thread-{number}"))
            .add_poller(PollerBuilder::polled_each_iteration(
                "queue",
                PollerWake::Descriptor(descriptor),
                IdlePoller(0),
            ))
            .add_poller(PollerBuilder::polled_each_iteration(
                "inbox",
                PollerWake::Messages,
                IdlePoller(0),
            ))
            .add_poller(PollerBuilder::polled_each_iteration(
                "deadline",
                PollerWake::Deadline,
                NeverDuePoller(Instant::NEVER),
            ))
            .add_poller(PollerBuilder::polled_each_period(
                "statistics",
                Span::from_ms(100),
                IdlePoller(0),
            ));
        reactors.spawn(plan).expect("room");
    }
    let (begin, begin_ns) = (clock.now(), cpu_time_ns());
    tenmil_linux::named_thread::sleep(span);
    let (end, end_ns) = (clock.now(), cpu_time_ns());
    let sample = reactors.sample();
    let sleeps: u64 = sample.reactors.iter().map(|reactor| reactor.sleeps).sum();
    let pollers: usize = sample.threads.iter().map(|thread| thread.pollers.len()).sum();
    let share = (end_ns - begin_ns) as f64 * 100.0 / end.since(begin).ns as f64;
    println!(
        "idle, {:<9} {} reactors, {} threads, {pollers} pollers: {share:.2} % of a core over {span}, \
         {sleeps} sleeps",
        format!("{poll}:"),
        sample.reactors.len(),
        sample.threads.len(),
    );
    reactors.stop();
}

/// CPU time of all threads of this process.
fn cpu_time_ns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a list of tasks");
    let spent = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    tasks.flatten().filter_map(spent).sum()
}

impl Poller for IdlePoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        if black_box(self.0) == 0 { PollResult::Idle } else { PollResult::Busy }
    }
}

impl Poller for NeverDuePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if context.now() >= self.0 { PollResult::Busy } else { PollResult::Idle }
    }

    fn wake_at(&self) -> Instant {
        self.0
    }
}
