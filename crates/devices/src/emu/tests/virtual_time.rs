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

use super::stage::{FORGOTTEN, Planted, READ, Stage};

#[derive(Clone, Copy, Debug)]
enum Host {
    /// Idle until this time.
    Thinking(Instant),
    Submitted,
    /// Polls this number of times, then goes to sleep.
    Polling(u32),
    /// No completion was found; about to unmask the interrupt.
    Tired,
    Asleep(Instant),
}

struct World {
    stage: Stage,
    host_is: Host,
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

impl World {
    fn new(seed: u64, planted: Planted) -> Self {
        let stage = Stage::new(seed, planted);
        let now = stage.now;
        Self {
            stage,
            host_is: Host::Thinking(now),
            completions: CompletionBatch::with_capacity(8),
            random: Random::new(seed),
            now,
            begun: now,
            completed: 0,
            latest: Span::default(),
            sleeps: 0,
            looks_once: planted == Planted::HostLooksOnce,
        }
    }

    /// Runs until a number of commands have completed, or one was lost.
    fn run(&mut self, commands: u32) -> Result<(), Error> {
        while self.completed < commands {
            let waits = !matches!(self.host_is, Host::Thinking(_));
            if waits && self.now.since(self.begun) > FORGOTTEN {
                let (device, host) = (self.stage.device.is, self.host_is);
                return Err(Error::environment(format!(
                    "device {device:?}, host {host:?}, after {}",
                    self.completed
                )));
            }
            match (self.stage.device.can_step(self.now), self.can_host_step()) {
                (true, true) if self.random.chance(1, 2) => self.stage.device.step(self.now),
                (_, true) => self.step_host(),
                (true, false) => {
                    // The host is idle, so the time step may be larger.
                    self.stage.device.step(self.now);
                    self.now.ns += self.random.below(20_000);
                }
                (false, false) => self.now = self.next_deadline(),
            }
            self.now.ns += 50 + self.random.below(300);
        }
        Ok(())
    }

    fn can_host_step(&self) -> bool {
        match self.host_is {
            Host::Thinking(until) => self.now >= until,
            Host::Asleep(until) => self.stage.host_nap.is_woken() || self.now >= until,
            _ => true,
        }
    }

    fn next_deadline(&self) -> Instant {
        let device = self.stage.device.deadline();
        match self.host_is {
            Host::Thinking(until) => device.min(until),
            Host::Asleep(until) => device.min(until).min(self.begun.after(FORGOTTEN)),
            _ => device,
        }
        .max(self.now)
    }

    fn step_host(&mut self) {
        self.host_is = match self.host_is {
            Host::Thinking(_) => {
                self.begun = self.now;
                let (token, lba) = (u64::from(self.completed), self.random.below(1 << 20));
                let request = Request { token, lba, ..READ };
                assert_eq!(self.stage.queue.submit(self.now, &[request], &[self.stage.buffer]), 1);
                Host::Submitted
            }
            Host::Submitted => {
                self.stage.queue.flush();
                // The poll time may end at any time, before the completion or at the same instant.
                let scale = 1 << self.random.below(10);
                Host::Polling(u32::try_from(self.random.below(scale)).unwrap())
            }
            Host::Polling(polls) => self.poll(polls),
            Host::Tired => self.fall_asleep(),
            Host::Asleep(_) => {
                self.stage.queue.disarm();
                self.poll(3)
            }
        };
    }

    fn poll(&mut self, polls: u32) -> Host {
        if self.stage.queue.poll(self.now, &mut self.completions) > 0 {
            let tokens: Vec<_> =
                self.completions.drain().map(|completion| completion.token).collect();
            assert_eq!(tokens, [u64::from(self.completed)]);
            self.completed += 1;
            self.latest = self.latest.max(self.now.since(self.begun));
            // From one microsecond to four milliseconds, log-uniform.
            let scale = 1_u64 << (10 + self.random.below(12));
            let gap = Span { ns: scale + self.random.below(scale) };
            return Host::Thinking(self.now.after(gap));
        }
        if polls > 0 { Host::Polling(polls - 1) } else { Host::Tired }
    }

    fn fall_asleep(&mut self) -> Host {
        let has_work = self.stage.queue.arm();
        if has_work && !self.looks_once {
            self.stage.queue.disarm();
            return Host::Polling(0);
        }
        self.sleeps += 1;
        Host::Asleep(self.stage.queue.wake_at())
    }
}

#[test]
fn in_a_million_gaps_of_simulated_time_nothing_is_forgotten() {
    for seed in 0..20 {
        let mut world = World::new(seed, Planted::Nothing);
        let ran = world.run(50_000);
        assert_eq!(ran, Ok(()), "seed {seed}");
        assert!(world.latest < Span::from_ms(20), "seed {seed}: {}", world.latest);
        let (device, host) = (world.stage.device.sleeps, world.sleeps);
        assert!(device > 1_000 && host > 1_000, "seed {seed}: {device} and {host} are no test");
    }
}

#[test]
fn every_mistake_in_the_handshake_is_found() {
    for planted in Planted::MISTAKES {
        for seed in 0..4 {
            let ran = World::new(seed, planted).run(50_000);
            assert!(ran.is_err(), "{planted:?}, seed {seed}: nothing was forgotten");
        }
    }
}
