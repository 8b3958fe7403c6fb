//! What each step of a plan does, and then whole schedules.

mod rules;
mod simulated;
mod surroundings;

use base::{Instant, Span};
use host::Cores;

use super::{Move, Options, Plan, Policy, ReactorLoad, Reason, Scheduler, Snapshot, ThreadLoad};

/// Loads are given in percent of a period.
const ELAPSED: u64 = 100;

fn cores(text: &str) -> Cores {
    Cores::parse(text).unwrap()
}

fn at(secs: u64) -> Instant {
    Instant::default().after(Span::from_secs(secs))
}

fn dynamic() -> Options {
    Options { policy: Policy::Dynamic, ..Options::default() }
}

fn scheduler(options: Options, reactors: u32) -> Scheduler {
    Scheduler::new(options, (0..reactors).collect()).unwrap()
}

/// Reactors on cores 0, 1, 2 …, and threads of which each is given as home and load.
fn snapshot(reactors: u32, threads: &[(u32, u64)]) -> Snapshot {
    let busy = |core| threads.iter().filter(|thread| thread.0 == core).map(|thread| thread.1).sum();
    let reactor = |core| ReactorLoad { core, busy: busy(core), ..ReactorLoad::default() };
    let thread = |(id, (home, busy)): (u64, &(u32, u64))| ThreadLoad {
        id,
        home: *home,
        busy: *busy,
        ..ThreadLoad::default()
    };
    Snapshot {
        elapsed: ELAPSED,
        quota: None,
        reactors: (0..reactors).map(reactor).collect(),
        threads: (0..).zip(threads).map(thread).collect(),
    }
}

fn order(thread: u64, from: u32, to: u32, reason: Reason) -> Move {
    Move { thread, from, to, reason }
}

/// The plan of a scheduler that has seen nothing before.
fn plan(options: Options, snapshot: &Snapshot) -> Plan {
    let reactors = snapshot.reactors.iter().map(|reactor| reactor.core).collect();
    Scheduler::new(options, reactors).unwrap().plan(at(0), snapshot)
}
