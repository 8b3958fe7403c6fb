//! Instructions per iteration of a reactor, counted and not timed: with what the flight recorder, the watchdog
//! and the accounting of every reactor cost while nothing is recorded and nothing stalls.
//!
//! Each count is of one call with as many iterations as its name ends with; `.ci/instructions` divides.

#![expect(missing_docs, reason = "the macros make items of their own")]

use gungraun::{library_benchmark, library_benchmark_group, main};
use tenmil_base::{Instant, Span};
use tenmil_linux::{Clock, EventLoop};
use tenmil_reactor::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerWake, Reactor, ReactorOptions,
    ThreadBuilder, TimeSource, UnstartedReactors,
};

/// Poller that finds work in every poll, or never.
struct FixedPoller(PollResult);

impl Poller for FixedPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.0
    }
}

/// A reactor with one poller, the rest of its set, and the time; warmed up by a few iterations.
struct RunningReactor {
    reactor: Reactor,
    _others: UnstartedReactors,
    now: Instant,
}

impl RunningReactor {
    fn new(found: PollResult) -> Box<Self> {
        let options = ReactorOptions { poll: PollMode::Always, ..ReactorOptions::default() };
        let clock = Clock::on_kernel_clock();
        let now = clock.now();
        let made = UnstartedReactors::new(&[0], &options, &TimeSource::Clock(clock), now);
        let mut others = made.expect("a reactor");
        let poller = FixedPoller(found);
        let poller = PollerBuilder::polled_each_iteration("bench", PollerWake::Messages, poller);
        others.registry.spawn(ThreadBuilder::new("bench").add_poller(poller)).expect("room");
        let (reactor, _) = others.reactors.remove(0);
        let mut this = Box::new(Self { reactor, _others: others, now });
        this.iterate(16);
        this
    }

    fn idle(_: u32) -> Box<Self> {
        Self::new(PollResult::Idle)
    }

    fn busy(_: u32) -> Box<Self> {
        Self::new(PollResult::Busy)
    }

    #[inline(never)]
    fn iterate(&mut self, count: u32) {
        for _ in 0..count {
            self.reactor.iterate(self.now);
            if self.reactor.needs_clock() {
                self.now = self.now.after(Span { ns: 500 });
            }
        }
    }
}

// The poller has nothing to do.
#[library_benchmark]
#[bench::idle_128(args = (128), setup = RunningReactor::idle)]
// The poller has done something in each iteration, as a queue under load.
#[bench::busy_128(args = (128), setup = RunningReactor::busy)]
fn reactor(mut running: Box<RunningReactor>) -> Box<RunningReactor> {
    running.iterate(128);
    running
}

library_benchmark_group!(name = turn; benchmarks = reactor);
main!(library_benchmark_groups = turn);
