//! Plan of a run: machines, hosts, and scheduled faults, drawn from a seed.

mod plan_generator;

use tenmil_base::{Instant, Random, Span};
use tenmil_nvme_fabrics::IoPolicy;

use self::plan_generator::PlanGenerator;
use crate::cluster_authentication::ClusterAuthentication;
use crate::cluster_network::{ConnectionFault, ConnectionOptions};
use crate::injected_bugs::InjectedBugs;
use crate::sim_disk::DiskOptions;

/// Plan of a run, completely determined by its seed.
#[derive(Clone, Debug)]
pub struct ClusterPlan {
    /// Seed.
    pub seed: u64,
    /// Focus of the run.
    pub(crate) kind: ScenarioKind,
    /// Machines with disks.
    pub(crate) machines: Vec<MachinePlan>,
    /// Hosts that read and write.
    pub(crate) hosts: Vec<HostPlan>,
    pub(crate) cables: ConnectionOptions,
    /// Authentication of hosts and targets.
    pub(crate) authentication: ClusterAuthentication,
    pub(crate) faults: Vec<(Instant, FaultEvent)>,
    /// The owner of a pool reserves its disk, and a takeover preempts it.
    pub(crate) is_reserved: bool,
    /// Time at which hosts stop working.
    pub(crate) until: Instant,
    pub(crate) bugs: InjectedBugs,
}

/// A machine: disks, and the processes that export them.
#[derive(Clone, Debug)]
pub(crate) struct MachinePlan {
    pub(crate) disks: Vec<DiskOptions>,
    /// The first disk holds a pool, which hosts open.
    pub(crate) is_pool: bool,
    /// The disks are the legs of one mirror, which is exported in the first slot.
    pub(crate) is_mirror: bool,
    /// Initial tenant and namespace identifier of each namespace.
    pub(crate) slots: Vec<(usize, u32)>,
    pub(crate) processes: usize,
    /// Each of them serves one disk, and not all.
    pub(crate) is_shared_out: bool,
    pub(crate) quiesce: Span,
}

/// A host.
#[derive(Clone, Debug)]
pub(crate) struct HostPlan {
    pub(crate) machine: usize,
    /// Index of its disk on that machine.
    pub(crate) disk: usize,
    /// The machines of the other legs, if it has a mirror over several.
    pub(crate) other_legs: Vec<usize>,
    pub(crate) depth: usize,
    /// Its disk is a mirror: concurrent writes to one block may leave the legs different, and until
    /// a write completes reads may find it on one leg and not on the other.
    pub(crate) is_mirrored: bool,
    /// Maximum pause between two requests.
    pub(crate) think: Span,
    /// Number of blocks in use.
    pub(crate) blocks: u64,
    pub(crate) request_blocks_max: u64,
    pub(crate) io_policy: IoPolicy,
    /// Number of reads, and of flushes, in 16 requests.
    pub(crate) reads: u64,
    pub(crate) flushes: u64,
    /// Number of FUA writes in 16 writes.
    pub(crate) forced: u64,
    pub(crate) detect: Span,
    pub(crate) fail_fast: Span,
    pub(crate) io_timeout: Span,
}

/// A scheduled fault or action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultEvent {
    /// A process is killed and restarted.
    Kill { process: usize, down: Span },
    /// A machine loses its power and gets it back.
    LosePower { machine: usize, down: Span },
    /// The processes of a machine are killed and restarted with its disks exchanged.
    Swap { machine: usize, down: Span },
    /// Only this process is: another one of its machine goes on with the disks as they are.
    SwapOne { process: usize, down: Span },
    /// A disk is unplugged, or plugged in again.
    Unplug { disk: usize, is_absent: bool },
    /// A host is killed, without a word, and starts again.
    RestartHost { host: usize, down: Span },
    /// The second host takes the pool over while the first one is cut off for so long; so much later the
    /// machine loses its power for a while. If the disk is reserved, the first one keeps on writing.
    TakeOver { span: Span, outage: Option<(Span, Span)> },
    /// A host acquires a reservation on its disk.
    Reserve { host: usize },
    /// A host releases its reservation.
    Release { host: usize },
    /// A process is stopped for a while.
    Pause { process: usize, span: Span },
    /// A host and a process are partitioned.
    Partition { host: usize, process: usize, span: Span },
    /// Connections between a host and a process are disturbed.
    Harm { host: usize, process: usize, harm: ConnectionFault },
}

/// Focus of a run, which determines the bugs it is likely to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioKind {
    /// Everything at random.
    Any,
    /// Writes that stay in the disk long after their association has ended.
    SlowDisk,
    /// Two processes export one disk: a write is in flight in one while the host continues through
    /// the other.
    SharedDisk,
    /// A mirror whose legs are unplugged and plugged in.
    Mirror,
    /// A mirror of a host over two targets.
    MirrorOverTargets,
    /// A pool that a second host takes over.
    Pool,
    /// Several tenants with reservations, whose disks are exchanged.
    Tenants,
    /// Two processes serve two disks, and one of them is started with these exchanged.
    Exchange,
}

impl ClusterPlan {
    /// Draws the plan of this seed.
    pub fn from_seed(seed: u64, bugs: InjectedBugs) -> Self {
        let mut draw = PlanGenerator::new(Random::new(seed ^ 0xc1u64.rotate_left(56)));
        let kind = draw.random_choice(&[
            ScenarioKind::Any,
            ScenarioKind::Any,
            ScenarioKind::SlowDisk,
            ScenarioKind::SharedDisk,
            ScenarioKind::Tenants,
            ScenarioKind::Exchange,
            ScenarioKind::Mirror,
            ScenarioKind::MirrorOverTargets,
            ScenarioKind::Pool,
        ]);
        let machine = draw.draw_machine(kind);
        let machines = vec![machine; if kind == ScenarioKind::MirrorOverTargets { 2 } else { 1 }];
        let hosts = draw.draw_hosts(kind, &machines);
        let cables = ConnectionOptions {
            delay: Span::from_us(draw.random_choice(&[10, 50, 200])),
            jitter: Span::from_us(draw.random_choice(&[0, 20, 500])),
            splits: draw.one_in(4),
            release: Span::from_ms(draw.random_choice(&[0, 0, 1, 100])),
        };
        let secs = match kind {
            ScenarioKind::SlowDisk => 20,
            ScenarioKind::Pool => 6,
            ScenarioKind::Mirror => 8,
            ScenarioKind::MirrorOverTargets => 10,
            ScenarioKind::SharedDisk | ScenarioKind::Tenants | ScenarioKind::Exchange => {
                draw.random_choice(&[4, 8])
            }
            ScenarioKind::Any => draw.random_choice(&[4, 10, 20]),
        };
        let until = Instant { ns: secs * 1_000_000_000 };
        let faults = draw.draw_faults(kind, &machines, hosts.len(), until);
        let is_reserved = kind == ScenarioKind::Pool && draw.one_in(2);
        let authentication = ClusterAuthentication::from_seed(seed);
        Self {
            seed,
            kind,
            machines,
            hosts,
            cables,
            authentication,
            faults,
            is_reserved,
            until,
            bugs,
        }
    }

    /// Name of the focus.
    pub fn plan_kind(&self) -> String {
        format!("{:?}", self.kind)
    }

    /// Number of processes on all machines.
    pub(crate) fn process_count(&self) -> usize {
        self.machines.iter().map(|machine| machine.processes).sum()
    }
}
