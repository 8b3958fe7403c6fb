//! An emulated SSD whose host runs on a reactor, both on one thread, interleaved by a seed: each
//! step of one side may occur between any two steps of the other side going to sleep.
//!
//! ```text
//!   device    poll ── arm ── check once more ── asleep ── woken by a doorbell or a deadline
//!   reactor   poll ── arm ── arm its poller  ── asleep ── woken by the vector or a deadline
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    CompletionBatch, Error, Instant, IoChannel, IoStatus, Random, Request, Segment, Span,
};
use tenmil_linux::{EventLoop, NextStep, Sleeper};
use tenmil_reactor::{
    Context, PollResult, Poller, PollerBuilder, PollerWake, Reactor, ReactorOptions, ThreadBuilder,
    TimeSource, UnstartedReactors,
};

use super::harness::{
    Device, EmulationHarness, HarnessController, InjectedBug, LOST_AFTER, READ, SimulatedSleeper,
};

struct ReactorHarness {
    device: Device,
    reactor: Reactor,
    sleeper: Sleeper,
    reactor_phase: ReactorPhase,
    reactor_sleeper: SimulatedSleeper,
    looks_once: bool,
    record: Arc<Mutex<PollerRecord>>,
    random: Random,
    now: Instant,
    /// The same, for the statistics of the reactor.
    stopwatch: Arc<AtomicU64>,
    /// Number of sleeps of the reactor.
    sleeps: u32,
    /// Submission time of the command in flight, as of the last step.
    submitted: Option<Instant>,
    /// The device thread does nothing before this time.
    held_until: Instant,
    _controller: HarnessController,
}

/// State of the reactor's OS thread.
#[derive(Clone, Copy, Debug)]
enum ReactorPhase {
    Iterating,
    /// No work was found; about to arm.
    Tired(Instant),
    Announced(Instant),
    Asleep(Instant),
}

/// State of the poller.
#[derive(Debug, Default)]
struct PollerRecord {
    completed: u64,
    latest: Span,
    /// Submission time of the command in flight.
    pending: Option<Instant>,
}

/// One command at a time, each after a gap.
struct GapPoller {
    queue: Box<dyn IoChannel>,
    buffer: Segment,
    completions: CompletionBatch,
    random: Random,
    due: Instant,
    record: Arc<Mutex<PollerRecord>>,
}

/// Longest gap.
const GAP_MAX: Span = Span::from_ms(50);

impl ReactorHarness {
    fn new(seed: u64, injected_bug: InjectedBug) -> Self {
        let harness = EmulationHarness::new(seed, injected_bug);
        let EmulationHarness { device, queue, host_sleeper, buffer, now, controller } = harness;
        let stopwatch = Arc::new(AtomicU64::new(now.ns));
        let simulated = TimeSource::Simulated(Arc::clone(&stopwatch));
        let assembly =
            UnstartedReactors::new(&[0], &ReactorOptions::default(), &simulated, now).unwrap();
        let (reactor, sleeper) = assembly.reactors.into_iter().next().unwrap();
        let record = Arc::<Mutex<PollerRecord>>::default();
        let woken_by = PollerWake::from_source(queue.wake_source()).unwrap();
        let gaps = GapPoller {
            queue,
            buffer,
            completions: CompletionBatch::with_capacity(8),
            random: Random::new(!seed),
            due: now,
            record: Arc::clone(&record),
        };
        let plan = ThreadBuilder::new("gaps")
            .add_poller(PollerBuilder::polled_each_iteration("gaps", woken_by, gaps));
        assembly.registry.spawn(plan).unwrap();
        Self {
            device,
            reactor,
            sleeper,
            reactor_phase: ReactorPhase::Iterating,
            reactor_sleeper: host_sleeper,
            looks_once: injected_bug == InjectedBug::HostLooksOnce,
            record,
            random: Random::new(seed),
            now,
            stopwatch,
            sleeps: 0,
            submitted: None,
            held_until: now,
            _controller: controller,
        }
    }

    /// Runs until a number of commands have completed, or one was lost.
    fn run(&mut self, commands: u64) -> Result<(), Error> {
        loop {
            let PollerRecord { completed, pending, .. } = *self.record.lock().unwrap();
            if completed >= commands {
                return Ok(());
            }
            if pending.is_some_and(|begun| self.now.since(begun) > LOST_AFTER) {
                let (device, reactor) = (self.device.is, self.reactor_phase);
                return Err(Error::environment(format!(
                    "device {device:?}, reactor {reactor:?}, after {completed}"
                )));
            }
            self.step(pending);
        }
    }

    /// One step of either side, and a small time step.
    fn step(&mut self, pending: Option<Instant>) {
        if pending.is_some() && pending != self.submitted {
            // The thread is scheduled sooner or later, so completions arrive at any later time.
            self.held_until = self.now.after(Span { ns: 1 << self.random.below(20) });
        }
        self.submitted = pending;
        let can_device_step = self.now >= self.held_until && self.device.can_step(self.now);
        // While both sides only poll, they do not affect each other.
        let little = if pending.is_some() { 300 } else { 1 << self.random.below(14) };
        let passes = match (can_device_step, self.can_reactor_step()) {
            (true, true) if self.random.chance(1, 2) => {
                self.device.step(self.now);
                little
            }
            (_, true) => {
                self.step_reactor();
                little
            }
            (true, false) => {
                self.device.step(self.now);
                20_000
            }
            (false, false) => {
                self.now = self.next_deadline(pending).max(self.now);
                0
            }
        };
        self.now.ns += 50 + self.random.below(passes);
        self.stopwatch.store(self.now.ns, Ordering::Relaxed);
    }

    /// Time of the next event, if both sides sleep or are held.
    fn next_deadline(&self, pending: Option<Instant>) -> Instant {
        let forgotten = pending.map_or(Instant::NEVER, |begun| begun.after(LOST_AFTER));
        let is_held = self.now < self.held_until;
        let device = if is_held { self.held_until } else { self.device.deadline() };
        device.min(self.reactor_deadline()).min(forgotten)
    }

    fn can_reactor_step(&self) -> bool {
        self.reactor_sleeper.is_woken() || self.now >= self.reactor_deadline()
    }

    /// Wake-up time of the reactor. The current time if it does not sleep.
    fn reactor_deadline(&self) -> Instant {
        match self.reactor_phase {
            ReactorPhase::Asleep(until) => until,
            _ => Instant::default(),
        }
    }

    fn step_reactor(&mut self) {
        self.reactor_phase = match self.reactor_phase {
            ReactorPhase::Iterating => match self.reactor.iterate(self.now) {
                NextStep::SleepUntil(until) => ReactorPhase::Tired(until),
                wait => {
                    assert_eq!(wait, NextStep::Again, "in adaptive mode, and never ordered to end");
                    ReactorPhase::Iterating
                }
            },
            ReactorPhase::Tired(until) => {
                self.sleeper.announce_sleep();
                ReactorPhase::Announced(until)
            }
            ReactorPhase::Announced(until) => {
                if self.reactor.arm(self.now) && !self.looks_once {
                    self.wake_reactor()
                } else {
                    self.sleeps += 1;
                    ReactorPhase::Asleep(until)
                }
            }
            ReactorPhase::Asleep(_) => self.wake_reactor(),
        };
    }

    fn wake_reactor(&mut self) -> ReactorPhase {
        self.sleeper.cancel_sleep();
        self.reactor.disarm(&[]);
        ReactorPhase::Iterating
    }
}

impl Poller for GapPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let mut record = self.record.lock().unwrap();
        let token = record.completed;
        if let Some(begun) = record.pending {
            if self.queue.poll(now, &mut self.completions) == 0 {
                return PollResult::Idle;
            }
            let completions: Vec<_> = self
                .completions
                .drain()
                .map(|completion| (completion.token, completion.status))
                .collect();
            assert_eq!(completions, [(token, IoStatus::SUCCESS)]);
            record.completed += 1;
            record.pending = None;
            record.latest = record.latest.max(now.since(begun));
            // From one microsecond to 50 milliseconds, log-uniform.
            let scale = 1_u64 << (10 + self.random.below(16));
            let gap = Span { ns: scale + self.random.below(scale) };
            self.due = now.after(gap.min(GAP_MAX));
        } else if now >= self.due {
            let request = Request { token, lba: self.random.below(1 << 20), ..READ };
            assert_eq!(self.queue.submit(now, &[request], &[self.buffer]), 1);
            record.pending = Some(now);
        } else {
            return PollResult::Idle;
        }
        PollResult::Busy
    }

    fn flush(&mut self) {
        self.queue.flush_submissions();
    }

    fn arm(&mut self) -> PollResult {
        let is_behind = self.queue.arm();
        let is_pending = self.record.lock().unwrap().pending.is_some();
        PollResult::from_count(usize::from(is_pending && is_behind))
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_at(&self) -> Instant {
        let is_pending = self.record.lock().unwrap().pending.is_some();
        if is_pending { self.queue.wake_at() } else { self.due }
    }
}

/// No command is lost in this number of gaps, and both sides have slept.
fn run_with_gaps(seed: u64, commands: u64) {
    let mut reactor_harness = ReactorHarness::new(seed, InjectedBug::Nothing);
    assert_eq!(reactor_harness.run(commands), Ok(()), "seed {seed}");
    let (latest, sleeps) = (reactor_harness.record.lock().unwrap().latest, reactor_harness.sleeps);
    let device = reactor_harness.device.sleeps;
    println!(
        "seed {seed}: {commands} gaps, latest {latest}; the device slept {device} times, the \
         reactor {sleeps}"
    );
    assert!(latest < Span::from_ms(20), "seed {seed}: {latest}");
    let enough = commands / 20;
    assert!(
        u64::from(device.min(sleeps)) > enough,
        "seed {seed}: {device} and {sleeps} sleeps are no test"
    );
}

#[test]
fn reactor_and_ssd_lose_no_wakeup_in_simulated_gaps() {
    (0..20).for_each(|seed| run_with_gaps(seed, 2_000));
}

/// Twenty minutes: `.ci/nightly gaps`. With `short`, a hundredth of it.
#[test]
#[ignore = "takes twenty minutes"]
fn reactor_and_ssd_lose_no_wakeup_in_twenty_million_gaps() {
    let is_short = std::env::var_os("TENMIL_GAPS_SHORT").is_some();
    let commands = if is_short { 10_000 } else { 1_000_000 };
    (0..20).for_each(|seed| run_with_gaps(seed, commands));
}

#[test]
fn every_injected_bug_between_reactor_and_ssd_is_detected() {
    for injected_bug in InjectedBug::MISTAKES {
        for seed in 0..4 {
            let ran = ReactorHarness::new(seed, injected_bug).run(50_000);
            assert!(ran.is_err(), "{injected_bug:?}, seed {seed}: nothing was forgotten");
        }
    }
}
