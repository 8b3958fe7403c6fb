//! Scheduler: placement of light threads on reactors.
//!
//! Once per period a balancer collects a [`SchedulerSnapshot`] of loads, and [`ThreadScheduler::plan`] computes
//! migrations. Nothing here reads a clock, a file or a counter, so thousands of schedules can be
//! simulated in a second.
//!
//! A plan consists of these steps, in this order:
//!
//! | step | policy | a thread is migrated if |
//! |---|---|---|
//! | masks | both | its core was taken away, or is not in its mask |
//! | idle | dynamic | it is idle and the scheduling core has capacity |
//! | relief | dynamic | its reactor is over the limit, or the CPU quota permits fewer busy reactors |
//! | emptying | dynamic | all threads of its reactor fit elsewhere, so that one more reactor can sleep |
//! | locality | dynamic | its memory is on another node and a reactor there has capacity |
//! | siblings | dynamic | both hardware threads of its core are busy and another core is unused |
//!
//! The last three are made only while all limits are kept. Guarantees:
//!
//! - A thread is migrated at most once per plan, and not within [`Options::migration_interval`] of its last
//!   migration. This holds for every reason: a core that is taken away and returned every second
//!   does not cause a migration every second, since the kernel runs a reactor without a core
//!   wherever it can.
//! - With constant loads planning converges: no migration undoes another.
//! - No migration puts a reactor over the limit in order to relieve another one, except where all
//!   are over it, or where a quota or a mask leaves no choice.

mod affinity;
mod build_placement;
mod consolidate;
mod core_share;
mod dynamic_policy;
mod options;
mod placement;
mod repack_search;
mod snapshot;

use tenmil_base::Instant;
use tenmil_linux::CpuList;

pub use options::{Options, OptionsError, Policy};
pub use snapshot::{
    Migration, MigrationReason, ReactorLoad, SchedulerEvent, SchedulerSnapshot, SchedulingPlan,
    ThreadLoad,
};

use build_placement::{SchedulerHistory, SchedulingInput};
use placement::Placement;

/// Scheduler: makes plans, with the state kept between them.
#[derive(Clone, Debug)]
pub struct ThreadScheduler {
    options: Options,
    reactors: CpuList,
    history: SchedulerHistory,
    /// Core from which the placement of the next new thread starts.
    next: u32,
}

impl ThreadScheduler {
    /// Creates a scheduler for reactors on these cores.
    pub fn new(options: Options, reactors: CpuList) -> Result<Self, OptionsError> {
        options.validate(&reactors)?;
        Ok(Self { options, reactors, history: SchedulerHistory::default(), next: 0 })
    }

    /// Current options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Changes the options, including the policy, from the next plan on. Inconsistent options are
    /// rejected and change nothing. Threads stay where they are; rest times follow the new options.
    pub fn set_options(&mut self, options: Options) -> Result<(), OptionsError> {
        options.validate(&self.reactors)?;
        self.options = options;
        Ok(())
    }

    /// Plans for the period that ended at `now`.
    pub fn plan(&mut self, now: Instant, snapshot: &SchedulerSnapshot) -> SchedulingPlan {
        let mut events = Vec::new();
        let period = SchedulingInput { now, snapshot, options: &self.options };
        let mut board = self.history.build_placement(&period, &mut events);
        board.enforce_affinity();
        let consolidates = self.options.policy == Policy::Dynamic && !board.reactors.is_empty();
        if consolidates {
            apply_dynamic_policy(&mut board);
        }
        let idle_core = consolidates.then(|| board.reactors[board.idle_reactor].core);
        for order in &board.migrations {
            self.history.record_migration_request(order.thread, now);
        }
        let empty = board
            .reactors
            .iter()
            .filter(|reactor| reactor.threads == 0)
            .map(|reactor| reactor.core);
        SchedulingPlan { empty: empty.collect(), migrations: board.migrations, idle_core, events }
    }

    /// Core for a new thread: round-robin over the reactors permitted by its mask. `None` if the
    /// mask has no available core with a reactor.
    pub fn choose_core_for_new_thread(
        &mut self,
        mask: Option<&CpuList>,
        taken: &CpuList,
    ) -> Option<u32> {
        let isolated = |core: &u32| self.options.isolated.contains(*core);
        let open = self
            .reactors
            .iter()
            .filter(|core| !taken.contains(*core) && mask.is_none_or(|mask| mask.contains(*core)));
        let (shared, alone): (Vec<u32>, Vec<u32>) = open.partition(|core| !isolated(core));
        let cores = if shared.is_empty() && mask.is_some() { alone } else { shared };
        let core = cores.iter().find(|core| **core >= self.next).or(cores.first()).copied()?;
        self.next = core + 1;
        Some(core)
    }
}

fn apply_dynamic_policy(board: &mut Placement) {
    board.consolidate_idle();
    board.bring_within_limits();
    if board.is_within_limits() {
        board.vacate_reactors();
        board.move_to_memory_node();
        board.move_off_busy_siblings();
    }
}

#[cfg(test)]
mod tests;
