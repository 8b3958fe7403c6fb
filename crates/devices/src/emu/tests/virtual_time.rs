//! Both sides of an emulated SSD on one thread, interleaved by a seed: each step of one side may
//! occur between any two steps of the other side going to sleep.
//!
//! ```text
//!   device   poll ── arm ── check once more ── asleep ── woken by a doorbell or a deadline
//!   host     think ── submit ── ring ── poll ── unmask and check ── asleep ── woken by the vector
//! ```
//!
//! Time is simulated.

use tenmil_base::{CompletionBatch, Error, Instant, Random, Request, Span};

use super::harness::{EmulationHarness, InjectedBug, LOST_AFTER, READ};

#[derive(Clone, Copy, Debug)]
enum HostPhase {
    /// Idle until this time.
    Thinking(Instant),
    Submitted,
    /// Polls this number of times, then goes to sleep.
    Polling(u32),
    /// No completion was found; about to unmask the interrupt.
    Tired,
    Asleep(Instant),
}

struct HostHarness {
    harness: EmulationHarness,
    host_phase: HostPhase,
    completions: CompletionBatch,
    random: Random,
    now: Instant,
    begun: Instant,
    completed: u32,
    latest: Span,
    /// Number of sleeps of the host.
    sleeps: u32,
    looks_once: bool,
}

impl HostHarness {
    fn new(seed: u64, injected_bug: InjectedBug) -> Self {
        let harness = EmulationHarness::new(seed, injected_bug);
        let now = harness.now;
        Self {
            harness,
            host_phase: HostPhase::Thinking(now),
            completions: CompletionBatch::with_capacity(8),
            random: Random::new(seed),
            now,
            begun: now,
            completed: 0,
            latest: Span::default(),
            sleeps: 0,
            looks_once: injected_bug == InjectedBug::HostLooksOnce,
        }
    }

    /// Runs until a number of commands have completed, or one was lost.
    fn run(&mut self, commands: u32) -> Result<(), Error> {
        while self.completed < commands {
            let waits = !matches!(self.host_phase, HostPhase::Thinking(_));
            if waits && self.now.since(self.begun) > LOST_AFTER {
                let (device, host) = (self.harness.device.is, self.host_phase);
                return Err(Error::environment(format!(
                    "device {device:?}, host {host:?}, after {}",
                    self.completed
                )));
            }
            match (self.harness.device.can_step(self.now), self.can_host_step()) {
                (true, true) if self.random.chance(1, 2) => self.harness.device.step(self.now),
                (_, true) => self.step_host(),
                (true, false) => {
                    // The host is idle, so the time step may be larger.
                    self.harness.device.step(self.now);
                    self.now.ns += self.random.below(20_000);
                }
                (false, false) => self.now = self.next_deadline(),
            }
            self.now.ns += 50 + self.random.below(300);
        }
        Ok(())
    }

    fn can_host_step(&self) -> bool {
        match self.host_phase {
            HostPhase::Thinking(until) => self.now >= until,
            HostPhase::Asleep(until) => self.harness.host_sleeper.is_woken() || self.now >= until,
            _ => true,
        }
    }

    fn next_deadline(&self) -> Instant {
        let device = self.harness.device.deadline();
        match self.host_phase {
            HostPhase::Thinking(until) => device.min(until),
            HostPhase::Asleep(until) => device.min(until).min(self.begun.after(LOST_AFTER)),
            _ => device,
        }
        .max(self.now)
    }

    fn step_host(&mut self) {
        self.host_phase = match self.host_phase {
            HostPhase::Thinking(_) => {
                self.begun = self.now;
                let (token, lba) = (u64::from(self.completed), self.random.below(1 << 20));
                let request = Request { token, lba, ..READ };
                assert_eq!(
                    self.harness.queue.submit(self.now, &[request], &[self.harness.buffer]),
                    1
                );
                HostPhase::Submitted
            }
            HostPhase::Submitted => {
                self.harness.queue.flush_submissions();
                // The poll time may end at any time, before the completion or at the same instant.
                let scale = 1 << self.random.below(10);
                HostPhase::Polling(u32::try_from(self.random.below(scale)).unwrap())
            }
            HostPhase::Polling(polls) => self.poll(polls),
            HostPhase::Tired => self.try_sleep(),
            HostPhase::Asleep(_) => {
                self.harness.queue.disarm();
                self.poll(3)
            }
        };
    }

    fn poll(&mut self, polls: u32) -> HostPhase {
        if self.harness.queue.poll(self.now, &mut self.completions) > 0 {
            let tokens: Vec<_> =
                self.completions.drain().map(|completion| completion.token).collect();
            assert_eq!(tokens, [u64::from(self.completed)]);
            self.completed += 1;
            self.latest = self.latest.max(self.now.since(self.begun));
            // From one microsecond to four milliseconds, log-uniform.
            let scale = 1_u64 << (10 + self.random.below(12));
            let gap = Span { ns: scale + self.random.below(scale) };
            return HostPhase::Thinking(self.now.after(gap));
        }
        if polls > 0 { HostPhase::Polling(polls - 1) } else { HostPhase::Tired }
    }

    fn try_sleep(&mut self) -> HostPhase {
        let has_work = self.harness.queue.arm();
        if has_work && !self.looks_once {
            self.harness.queue.disarm();
            return HostPhase::Polling(0);
        }
        self.sleeps += 1;
        HostPhase::Asleep(self.harness.queue.wake_at())
    }
}

#[test]
fn million_simulated_gaps_lose_no_wakeup() {
    for seed in 0..20 {
        let mut host_harness = HostHarness::new(seed, InjectedBug::Nothing);
        let ran = host_harness.run(50_000);
        assert_eq!(ran, Ok(()), "seed {seed}");
        assert!(host_harness.latest < Span::from_ms(20), "seed {seed}: {}", host_harness.latest);
        let (device, host) = (host_harness.harness.device.sleeps, host_harness.sleeps);
        assert!(device > 1_000 && host > 1_000, "seed {seed}: {device} and {host} are no test");
    }
}

#[test]
fn every_injected_handshake_bug_is_detected() {
    for injected_bug in InjectedBug::MISTAKES {
        for seed in 0..4 {
            let ran = HostHarness::new(seed, injected_bug).run(50_000);
            assert!(ran.is_err(), "{injected_bug:?}, seed {seed}: nothing was forgotten");
        }
    }
}
