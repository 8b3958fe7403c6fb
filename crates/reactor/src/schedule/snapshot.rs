//! What a plan is made from, and what it says.

use std::fmt;

use base::Instant;
use host::Cores;

use super::share::{self, WHOLE};

/// Loads of one period, and where everything is at its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The length of the period, in the ticks that everything here is counted in.
    pub elapsed: u64,
    /// Processors' worth of time that the control group allows. `None` is no limit.
    pub quota: Option<f64>,
    /// All reactors, each with a core of its own.
    pub reactors: Vec<ReactorLoad>,
    /// All light threads.
    pub threads: Vec<ThreadLoad>,
}

/// A reactor's part of a [`Snapshot`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReactorLoad {
    /// Its core.
    pub core: u32,
    /// Ticks of the period in which it found work. The rest it was idle, polling or asleep.
    pub busy: u64,
    /// Whether its core has been taken from us: no longer in the cpuset, or switched off.
    pub taken: bool,
    /// The cores that share its physical core. May be empty, and may name the core itself.
    pub siblings: Cores,
    /// The memory node that it is near to.
    pub node: Option<u32>,
}

/// A light thread's part of a [`Snapshot`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadLoad {
    /// Its number.
    pub id: u64,
    /// The core of the reactor it is on, or on its way to.
    pub home: u32,
    /// Ticks of the period in which it worked.
    pub busy: u64,
    /// Where it may be. `None` is anywhere.
    pub mask: Option<Cores>,
    /// The memory node where its data is, if that is known.
    pub node: Option<u32>,
    /// When it last arrived on a reactor by a move.
    pub last_move: Option<Instant>,
    /// Whether it is on its way and cannot be given another order yet.
    pub moving: bool,
}

/// What to do after a period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Orders, at most one for a thread.
    pub moves: Vec<Move>,
    /// Cores of the reactors that hold no thread once the orders are carried out: they may sleep
    /// until somebody rings.
    pub empty: Cores,
    /// The core where idle threads gather, under a policy that gathers them.
    pub gathering: Option<u32>,
    /// What people should hear of.
    pub events: Vec<Event>,
}

/// An order to move a light thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which thread.
    pub thread: u64,
    /// The core it is on.
    pub from: u32,
    /// The core to go to.
    pub to: u32,
    /// Why.
    pub reason: Reason,
}

/// Why a thread moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Its core was taken from us.
    CoreTaken,
    /// Its mask does not have its core.
    Mask,
    /// More reactors are busy than the quota has processors.
    Quota,
    /// It is idle, and idle threads gather.
    Idle,
    /// Its reactor has more to do than the limit, or another one has and needs its place.
    Overload,
    /// Everything on its reactor fits elsewhere.
    Emptying,
    /// Its memory is near to where it goes.
    Node,
    /// The other half of its physical core is busy.
    Sibling,
}

/// What people should hear of. Each is told when it begins, not every period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// No reactor's core is both in a thread's mask and ours; the thread runs where it can.
    MaskUnmatched {
        /// Which thread.
        thread: u64,
        /// Its mask.
        mask: Cores,
    },
    /// The mask of a thread that had none can be honoured again.
    MaskMatched {
        /// Which thread.
        thread: u64,
    },
    /// A reactor's core was taken from us.
    CoreTaken {
        /// Which core.
        core: u32,
    },
    /// A reactor's core was given back.
    CoreReturned {
        /// Which core.
        core: u32,
    },
    /// The cpuset has none of the reactors' cores. They run wherever the kernel lets them, so they
    /// are planned for as if they had kept their cores.
    NoCoreLeft,
}

impl Snapshot {
    /// The part of the period that a reactor was busy for, in parts of a thousand.
    pub fn permille(&self, reactor: &ReactorLoad) -> u64 {
        share::of(reactor.busy, self.elapsed) * 1000 / WHOLE
    }
}

impl Event {
    /// One word for what happened.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::MaskUnmatched { .. } => "mask-unmatched",
            Self::MaskMatched { .. } => "mask-matched",
            Self::CoreTaken { .. } => "core-taken",
            Self::CoreReturned { .. } => "core-returned",
            Self::NoCoreLeft => "no-core-left",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::CoreTaken => "core taken",
            Self::Mask => "mask",
            Self::Quota => "quota",
            Self::Idle => "idle",
            Self::Overload => "overload",
            Self::Emptying => "emptying",
            Self::Node => "node",
            Self::Sibling => "sibling",
        })
    }
}

impl fmt::Display for Move {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, from, to, reason } = self;
        write!(out, "move thread {thread} from core {from} to core {to}: {reason}")
    }
}

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MaskUnmatched { thread, mask } => {
                write!(out, "thread {thread}: no reactor is left in its mask {mask}")
            }
            Self::MaskMatched { thread } => write!(out, "thread {thread}: back in its mask"),
            Self::CoreTaken { core } => write!(out, "core {core}: taken from this process"),
            Self::CoreReturned { core } => write!(out, "core {core}: given back to this process"),
            Self::NoCoreLeft => write!(out, "cpuset: has none of the reactors' cores"),
        }
    }
}
