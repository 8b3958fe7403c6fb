//! Tests of each step of a plan, and of whole schedules.

mod affinity_and_topology;
mod rules;
mod simulated;

use tenmil_base::{Instant, Span};
use tenmil_linux::CpuList;

use super::{
    Migration, MigrationReason, Options, Policy, ReactorLoad, SchedulerSnapshot, SchedulingPlan,
    ThreadLoad, ThreadScheduler,
};

/// Loads are in percent of a period.
const ELAPSED: u64 = 100;

fn core_list(text: &str) -> CpuList {
    CpuList::parse(text).unwrap()
}

fn seconds(secs: u64) -> Instant {
    Instant::default().after(Span::from_secs(secs))
}

fn dynamic_options() -> Options {
    Options { policy: Policy::Dynamic, ..Options::default() }
}

fn new_scheduler(options: Options, reactors: u32) -> ThreadScheduler {
    ThreadScheduler::new(options, (0..reactors).collect()).unwrap()
}

/// Reactors on cores 0, 1, 2 …, and threads given as home and load.
fn snapshot(reactors: u32, threads: &[(u32, u64)]) -> SchedulerSnapshot {
    let busy = |core| threads.iter().filter(|thread| thread.0 == core).map(|thread| thread.1).sum();
    let reactor = |core| ReactorLoad { core, busy: busy(core), ..ReactorLoad::default() };
    let thread = |(id, (home, busy)): (u64, &(u32, u64))| ThreadLoad {
        id,
        home: *home,
        busy: *busy,
        ..ThreadLoad::default()
    };
    SchedulerSnapshot {
        elapsed: ELAPSED,
        quota: None,
        reactors: (0..reactors).map(reactor).collect(),
        threads: (0..).zip(threads).map(thread).collect(),
    }
}

fn migration_of(thread: u64, from: u32, to: u32, reason: MigrationReason) -> Migration {
    Migration { thread, from, to, reason }
}

/// Plan of a new scheduler.
fn plan_with_new_scheduler(options: Options, snapshot: &SchedulerSnapshot) -> SchedulingPlan {
    let reactors = snapshot.reactors.iter().map(|reactor| reactor.core).collect();
    ThreadScheduler::new(options, reactors).unwrap().plan(seconds(0), snapshot)
}
