//! Input and output of a plan.

use std::fmt;

use tenmil_base::Instant;
use tenmil_linux::CpuList;

use super::core_share::{self, WHOLE};

/// Loads of one period, and the placement at its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerSnapshot {
    /// Length of the period, in the ticks that all loads are counted in.
    pub elapsed: u64,
    /// CPU quota of the control group, in CPUs. `None` is unlimited.
    pub quota: Option<f64>,
    /// All reactors, each with its own core.
    pub reactors: Vec<ReactorLoad>,
    /// All light threads.
    pub threads: Vec<ThreadLoad>,
}

/// Load of a reactor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReactorLoad {
    /// Its core.
    pub core: u32,
    /// Ticks of the period in which it found work. In the rest it was polling idly or asleep.
    pub busy: u64,
    /// Whether its core was taken away: removed from the cpuset, or offline.
    pub taken: bool,
    /// CPUs that share its physical core. May be empty, and may include the core itself.
    pub siblings: CpuList,
    /// NUMA node.
    pub node: Option<u32>,
}

/// Load of a light thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadLoad {
    /// Thread number.
    pub id: u64,
    /// Core of its current reactor, or of the one it is migrating to.
    pub home: u32,
    /// Ticks of the period in which it worked.
    pub busy: u64,
    /// Permitted cores. `None` is any.
    pub mask: Option<CpuList>,
    /// NUMA node of its data, if known.
    pub node: Option<u32>,
    /// Time of its last arrival by migration.
    pub last_migration: Option<Instant>,
    /// Whether it is migrating and cannot be migrated again yet.
    pub moving: bool,
}

/// Result of planning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulingPlan {
    /// Migrations, at most one per thread.
    pub migrations: Vec<Migration>,
    /// Cores of the reactors without threads after these migrations: they may sleep until notified.
    pub empty: CpuList,
    /// Core that collects idle threads, if the policy does so.
    pub idle_core: Option<u32>,
    /// Events to report.
    pub events: Vec<SchedulerEvent>,
}

/// Migration of a light thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Thread number.
    pub thread: u64,
    /// Current core.
    pub from: u32,
    /// New core.
    pub to: u32,
    /// Reason.
    pub reason: MigrationReason,
}

/// Reason for a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MigrationReason {
    /// Its core was taken away.
    CoreTaken,
    /// Its core is not in its mask.
    Mask,
    /// More reactors are busy than the CPU quota permits.
    Quota,
    /// The thread is idle, and idle threads are collected.
    Idle,
    /// Its reactor is over the limit, or another one is and needs the capacity.
    Overload,
    /// All threads of its reactor fit elsewhere.
    Vacate,
    /// Its memory is on the NUMA node of the new core.
    Node,
    /// The other hardware thread of its physical core is busy.
    Sibling,
}

/// Scheduler event. Reported when the condition begins, not every period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchedulerEvent {
    /// No available core with a reactor is in a thread's mask; the thread runs elsewhere.
    AffinityUnsatisfied {
        /// Thread number.
        thread: u64,
        /// Its mask.
        mask: CpuList,
    },
    /// The mask of such a thread can be honored again.
    AffinityRestored {
        /// Thread number.
        thread: u64,
    },
    /// The core of a reactor was taken away.
    CoreOffline {
        /// The core.
        core: u32,
    },
    /// The core of a reactor was returned.
    CoreOnline {
        /// The core.
        core: u32,
    },
    /// The cpuset contains none of the reactors' cores. The kernel runs them elsewhere, so they are
    /// planned as if they had kept their cores.
    NoUsableCores,
}

impl SchedulerSnapshot {
    /// Load of a reactor in parts per thousand of the period.
    pub fn load_permille(&self, reactor: &ReactorLoad) -> u64 {
        core_share::share_of_elapsed(reactor.busy, self.elapsed) * 1000 / WHOLE
    }
}

impl SchedulerEvent {
    /// Name of the kind of event.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::AffinityUnsatisfied { .. } => "affinity-unsatisfied",
            Self::AffinityRestored { .. } => "mask-matched",
            Self::CoreOffline { .. } => "core-offline",
            Self::CoreOnline { .. } => "core-online",
            Self::NoUsableCores => "no-usable-cores",
        }
    }
}

impl fmt::Display for MigrationReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::CoreTaken => "core taken",
            Self::Mask => "mask",
            Self::Quota => "quota",
            Self::Idle => "idle",
            Self::Overload => "overload",
            Self::Vacate => "emptying",
            Self::Node => "node",
            Self::Sibling => "sibling",
        })
    }
}

impl fmt::Display for Migration {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, from, to, reason } = self;
        write!(out, "move thread {thread} from core {from} to core {to}: {reason}")
    }
}

impl fmt::Display for SchedulerEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AffinityUnsatisfied { thread, mask } => {
                write!(out, "thread {thread}: no reactor is left in its mask {mask}")
            }
            Self::AffinityRestored { thread } => write!(out, "thread {thread}: back in its mask"),
            Self::CoreOffline { core } => write!(out, "core {core}: taken from this process"),
            Self::CoreOnline { core } => write!(out, "core {core}: given back to this process"),
            Self::NoUsableCores => write!(out, "cpuset: has none of the reactors' cores"),
        }
    }
}
