//! CPU frequency governor: lowest frequency for idle cores, highest for busy ones.
//!
//! Decided from the same loads as the plan, once per period. [`tenmil_linux::frequency_control`] applies the
//! decision through the kernel's files.
//!
//! | state of the reactor | frequency |
//! |---|---|
//! | its core was taken away | as found: the core is no longer ours |
//! | no thread, or only negligible load | lowest |
//! | has threads and is not idle | highest |
//! | collects idle threads, while others are busy | highest: others wait for it |
//! | collects idle threads, and is the only busy one | up above the core limit, down below the load limit |
//!
//! Otherwise the frequency stays. Load rises when a core is slowed down, and without the gap
//! between the limits that would immediately be a reason to speed it up again.

use tenmil_linux::frequency_control::FrequencyRequest;

use crate::thread_scheduler::{Options, ReactorLoad, SchedulerSnapshot, SchedulingPlan};

/// Below this load, in parts per thousand, a reactor sleeps nearly all the time.
const IDLE_PERMILLE: u64 = 10;

/// Frequency request per core after a period, from its loads and the plan.
pub fn frequency_requests(
    options: &Options,
    snapshot: &SchedulerSnapshot,
    plan: &SchedulingPlan,
) -> Vec<(u32, FrequencyRequest)> {
    let request = |reactor: &ReactorLoad| {
        let others = snapshot.reactors.iter().filter(|other| other.core != reactor.core);
        let load_limit = u64::from(options.load_limit) * 10;
        let others_busy =
            others.into_iter().any(|other| snapshot.load_permille(other) >= load_limit);
        let load = CoreLoad {
            permille: snapshot.load_permille(reactor),
            load_limit,
            core_limit: u64::from(options.core_limit) * 10,
        };
        let arrives = plan.migrations.iter().any(|order| order.to == reactor.core);
        let speed = if reactor.taken {
            FrequencyRequest::Restore
        } else if plan.empty.contains(reactor.core) {
            FrequencyRequest::Lowest
        } else if plan.idle_core == Some(reactor.core) {
            if others_busy { FrequencyRequest::Highest } else { load.request_of_scheduling_core() }
        } else {
            load.request_of_working_reactor(arrives)
        };
        (reactor.core, speed)
    };
    snapshot.reactors.iter().map(request).collect()
}

struct CoreLoad {
    permille: u64,
    load_limit: u64,
    core_limit: u64,
}

impl CoreLoad {
    /// Request for a reactor with work of its own.
    fn request_of_working_reactor(&self, arrives: bool) -> FrequencyRequest {
        if arrives || self.permille >= self.load_limit {
            FrequencyRequest::Highest
        } else if self.permille < IDLE_PERMILLE {
            FrequencyRequest::Lowest
        } else {
            FrequencyRequest::Keep
        }
    }

    /// Request for the reactor that collects idle threads.
    fn request_of_scheduling_core(&self) -> FrequencyRequest {
        if self.permille > self.core_limit {
            FrequencyRequest::Up
        } else if self.permille < self.load_limit {
            FrequencyRequest::Down
        } else {
            FrequencyRequest::Keep
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;
    use tenmil_linux::CpuList;
    use tenmil_linux::frequency_control::FrequencyRequest::{
        self, Down, Highest, Keep, Lowest, Restore, Up,
    };

    use super::frequency_requests;
    use crate::thread_scheduler::{
        Options, Policy, ReactorLoad, SchedulerSnapshot, ThreadLoad, ThreadScheduler,
    };

    /// Reactors with one thread each, with these loads in percent; `None` has no thread.
    fn requests_for_loads(
        policy: Policy,
        loads: &[Option<u64>],
        taken: Option<usize>,
    ) -> Vec<FrequencyRequest> {
        let mut snapshot = SchedulerSnapshot { elapsed: 100, ..SchedulerSnapshot::default() };
        for (core, load) in (0..).zip(loads) {
            let busy = load.unwrap_or_default();
            snapshot.reactors.push(ReactorLoad { core, busy, ..ReactorLoad::default() });
            let mask = Some(CpuList::from_iter([core]));
            let thread =
                ThreadLoad { id: u64::from(core), home: core, busy, mask, ..ThreadLoad::default() };
            snapshot.threads.extend(load.map(|_| thread));
        }
        if let Some(taken) = taken {
            snapshot.reactors[taken].taken = true;
        }
        let options = Options { policy, ..Options::default() };
        let cores = snapshot.reactors.iter().map(|reactor| reactor.core).collect();
        let mut scheduler = ThreadScheduler::new(options.clone(), cores).unwrap();
        let plan = scheduler.plan(Instant::default(), &snapshot);
        frequency_requests(&options, &snapshot, &plan).into_iter().map(|(_, speed)| speed).collect()
    }

    #[test]
    fn idle_cores_get_the_lowest_frequency_and_busy_ones_the_highest() {
        let loads = [Some(30), None, Some(20), Some(100), Some(0), Some(10)];
        let expected = [Highest, Lowest, Highest, Highest, Lowest, Keep];
        assert_eq!(requests_for_loads(Policy::Static, &loads, None), expected);
        assert_eq!(requests_for_loads(Policy::Dynamic, &loads, None), expected);
    }

    #[test]
    fn scheduling_core_changes_frequency_only_while_it_works_alone() {
        for (load, speed) in [(81, Up), (80, Keep), (20, Keep), (19, Down), (0, Down)] {
            assert_eq!(
                requests_for_loads(Policy::Dynamic, &[Some(load), None], None),
                [speed, Lowest]
            );
        }
        assert_eq!(
            requests_for_loads(Policy::Dynamic, &[Some(5), Some(20)], None),
            [Highest, Highest]
        );
        assert_eq!(requests_for_loads(Policy::Static, &[Some(81), None], None), [Highest, Lowest]);
    }

    #[test]
    fn offline_core_keeps_its_frequency() {
        assert_eq!(requests_for_loads(Policy::Static, &[Some(50), Some(50)], Some(1))[1], Restore);
        // Its thread arrives on the other core, which was unused before.
        let mut snapshot = SchedulerSnapshot { elapsed: 100, ..SchedulerSnapshot::default() };
        for core in 0..2 {
            let reactor = ReactorLoad { core, taken: core == 1, ..ReactorLoad::default() };
            snapshot.reactors.push(reactor);
        }
        snapshot.threads.push(ThreadLoad { id: 0, home: 1, busy: 50, ..ThreadLoad::default() });
        let mut scheduler = ThreadScheduler::new(Options::default(), (0..2).collect()).unwrap();
        let plan = scheduler.plan(Instant::default(), &snapshot);
        assert_eq!(plan.migrations.len(), 1);
        assert_eq!(frequency_requests(&Options::default(), &snapshot, &plan)[0], (0, Highest));
    }
}
