//! Which light thread runs on which reactor.
//!
//! Once in a period somebody collects a [`Snapshot`] of loads, and [`Scheduler::plan`] makes orders
//! of it. Nothing here reads a clock, a file or a counter, so that thousands of schedules can be
//! played through in a second.
//!
//! What a plan does, in this order:
//!
//! | step | policy | a thread moves when |
//! |---|---|---|
//! | masks | both | its core was taken from us, or is not in its mask |
//! | idle | dynamic | it is idle and the scheduling core has room |
//! | relief | dynamic | its reactor is over the limit, or more reactors are busy than the quota has processors |
//! | emptying | dynamic | all that is on its reactor fits elsewhere, so that one more can sleep |
//! | nearness | dynamic | its memory is on another node and there is room |
//! | siblings | dynamic | both halves of its physical core are busy and another core is not in use |
//!
//! The last three are made only while all limits are kept. What may be relied on:
//!
//! - A thread gets one order at most in a plan, and none within [`Options::rest`] of its last move.
//!   That holds for every reason: a core that is taken and given back every second moves nothing
//!   every second, since the kernel runs a reactor without a core wherever it can.
//! - While loads hold still plans come to an end: no order undoes another.
//! - Nothing is planned that would put a reactor over the limit to make another emptier, except
//!   where all are over it, or where a quota or a mask leaves no choice.

mod balance;
mod board;
mod layout;
mod options;
mod required;
mod setup;
mod share;
mod snapshot;
mod tidy;

use base::Instant;
use host::Cores;

pub use options::{Options, OptionsError, Policy};
pub use snapshot::{Event, Move, Plan, ReactorLoad, Reason, Snapshot, ThreadLoad};

use board::Board;
use setup::{Memory, Period};

/// Makes plans, and remembers what one plan has to know of those before.
#[derive(Clone, Debug)]
pub struct Scheduler {
    options: Options,
    reactors: Cores,
    memory: Memory,
    /// Where the next new thread goes: the first core from this one on.
    next: u32,
}

impl Scheduler {
    /// A scheduler for reactors on these cores.
    pub fn new(options: Options, reactors: Cores) -> Result<Self, OptionsError> {
        options.check(&reactors)?;
        Ok(Self { options, reactors, memory: Memory::default(), next: 0 })
    }

    /// The settings in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Changes the settings, the policy among them, from the next plan on. Settings that do not go
    /// together are refused and change nothing. Threads stay where they are; what has moved rests
    /// as long as the new settings say.
    pub fn set_options(&mut self, options: Options) -> Result<(), OptionsError> {
        options.check(&self.reactors)?;
        self.options = options;
        Ok(())
    }

    /// Orders for what happened in the period that ended now.
    pub fn plan(&mut self, now: Instant, snapshot: &Snapshot) -> Plan {
        let mut events = Vec::new();
        let period = Period { now, snapshot, options: &self.options };
        let mut board = self.memory.board(&period, &mut events);
        board.honour_masks();
        let gathers = self.options.policy == Policy::Dynamic && !board.rooms.is_empty();
        if gathers {
            balance(&mut board);
        }
        let gathering = gathers.then(|| board.rooms[board.gathering].core);
        for order in &board.moves {
            self.memory.ordered(order.thread, now);
        }
        let empty = board.rooms.iter().filter(|room| room.held == 0).map(|room| room.core);
        Plan { empty: empty.collect(), moves: board.moves, gathering, events }
    }

    /// Where a new thread begins: the reactors its mask allows take turns. `None` if the mask has
    /// no reactor's core that is ours.
    pub fn place(&mut self, mask: Option<&Cores>, taken: &Cores) -> Option<u32> {
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

fn balance(board: &mut Board) {
    board.gather_idle();
    board.relieve();
    if board.is_within() {
        board.empty_rooms();
        board.go_near();
        board.spread_siblings();
    }
}

#[cfg(test)]
mod tests;
