//! How fast each core is to run: slowest where nobody works, fastest where somebody does.
//!
//! Decided from the same loads as the plan, once in a period. Who carries it out, by the files of
//! the kernel, is [`host::frequency`].
//!
//! | a reactor that | runs |
//! |---|---|
//! | has lost its core | as fast as it was found: the core is no longer ours |
//! | holds no thread, or threads that do nothing worth counting | as slowly as it may |
//! | holds threads and is not idle | as fast as it may |
//! | is where idle threads gather, while others are busy | as fast as it may: others wait for it |
//! | is where idle threads gather, and works alone | a step faster above the core limit, a step slower below the load limit |
//!
//! In between a speed stays. A load grows when its core is made slower, and a rule without a gap
//! would take that for a reason to make it faster again.

use host::frequency::Speed;

use crate::schedule::{Options, Plan, ReactorLoad, Snapshot};

/// Below this a reactor sleeps nearly all the time, in parts of a thousand.
const SLEEPS_BELOW: u64 = 10;

/// What each core is to do after a period, given its loads and what was planned.
pub fn decide(options: &Options, snapshot: &Snapshot, plan: &Plan) -> Vec<(u32, Speed)> {
    let wish = |reactor: &ReactorLoad| {
        let others = snapshot.reactors.iter().filter(|other| other.core != reactor.core);
        let load_limit = u64::from(options.load_limit) * 10;
        let others_busy = others.into_iter().any(|other| snapshot.permille(other) >= load_limit);
        let load = Load {
            permille: snapshot.permille(reactor),
            load_limit,
            core_limit: u64::from(options.core_limit) * 10,
        };
        let arrives = plan.moves.iter().any(|order| order.to == reactor.core);
        let speed = if reactor.taken {
            Speed::Found
        } else if plan.empty.contains(reactor.core) {
            Speed::Lowest
        } else if plan.gathering == Some(reactor.core) {
            if others_busy { Speed::Highest } else { load.step() }
        } else {
            load.speed(arrives)
        };
        (reactor.core, speed)
    };
    snapshot.reactors.iter().map(wish).collect()
}

struct Load {
    permille: u64,
    load_limit: u64,
    core_limit: u64,
}

impl Load {
    /// For a reactor that works for itself.
    fn speed(&self, arrives: bool) -> Speed {
        if arrives || self.permille >= self.load_limit {
            Speed::Highest
        } else if self.permille < SLEEPS_BELOW {
            Speed::Lowest
        } else {
            Speed::Keep
        }
    }

    /// For the reactor where idle threads gather.
    fn step(&self) -> Speed {
        if self.permille > self.core_limit {
            Speed::Up
        } else if self.permille < self.load_limit {
            Speed::Down
        } else {
            Speed::Keep
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Instant;
    use host::Cores;
    use host::frequency::Speed::{self, Down, Found, Highest, Keep, Lowest, Up};

    use super::decide;
    use crate::schedule::{Options, Policy, ReactorLoad, Scheduler, Snapshot, ThreadLoad};

    /// Reactors with one thread each, of these loads in percent; `None` holds none.
    fn speeds(policy: Policy, loads: &[Option<u64>], taken: Option<usize>) -> Vec<Speed> {
        let mut snapshot = Snapshot { elapsed: 100, ..Snapshot::default() };
        for (core, load) in (0..).zip(loads) {
            let busy = load.unwrap_or_default();
            snapshot.reactors.push(ReactorLoad { core, busy, ..ReactorLoad::default() });
            let mask = Some(Cores::from_iter([core]));
            let thread =
                ThreadLoad { id: u64::from(core), home: core, busy, mask, ..ThreadLoad::default() };
            snapshot.threads.extend(load.map(|_| thread));
        }
        if let Some(taken) = taken {
            snapshot.reactors[taken].taken = true;
        }
        let options = Options { policy, ..Options::default() };
        let cores = snapshot.reactors.iter().map(|reactor| reactor.core).collect();
        let mut scheduler = Scheduler::new(options.clone(), cores).unwrap();
        let plan = scheduler.plan(Instant::default(), &snapshot);
        decide(&options, &snapshot, &plan).into_iter().map(|(_, speed)| speed).collect()
    }

    #[test]
    fn empty_reactors_run_slowest_and_loaded_ones_fastest() {
        let loads = [Some(30), None, Some(20), Some(100), Some(0), Some(10)];
        let expected = [Highest, Lowest, Highest, Highest, Lowest, Keep];
        assert_eq!(speeds(Policy::Static, &loads, None), expected);
        assert_eq!(speeds(Policy::Dynamic, &loads, None), expected);
    }

    #[test]
    fn the_gathering_core_takes_steps_while_it_works_alone() {
        for (load, speed) in [(81, Up), (80, Keep), (20, Keep), (19, Down), (0, Down)] {
            assert_eq!(speeds(Policy::Dynamic, &[Some(load), None], None), [speed, Lowest]);
        }
        assert_eq!(speeds(Policy::Dynamic, &[Some(5), Some(20)], None), [Highest, Highest]);
        assert_eq!(speeds(Policy::Static, &[Some(81), None], None), [Highest, Lowest]);
    }

    #[test]
    fn a_core_that_was_taken_is_left_as_it_was_found() {
        assert_eq!(speeds(Policy::Static, &[Some(50), Some(50)], Some(1))[1], Found);
        // Its thread arrives on the other core, which nobody used before.
        let mut snapshot = Snapshot { elapsed: 100, ..Snapshot::default() };
        for core in 0..2 {
            let reactor = ReactorLoad { core, taken: core == 1, ..ReactorLoad::default() };
            snapshot.reactors.push(reactor);
        }
        snapshot.threads.push(ThreadLoad { id: 0, home: 1, busy: 50, ..ThreadLoad::default() });
        let mut scheduler = Scheduler::new(Options::default(), (0..2).collect()).unwrap();
        let plan = scheduler.plan(Instant::default(), &snapshot);
        assert_eq!(plan.moves.len(), 1);
        assert_eq!(decide(&Options::default(), &snapshot, &plan)[0], (0, Highest));
    }
}
