//! What a seed stands for: machines, hosts, and what happens to them when.

mod draw;

use base::{Instant, Random, Span};
use remote::Spread;

use self::draw::Draw;
use crate::bugs::InjectedBugs;
use crate::disk::DiskOptions;
use crate::network::{CableOptions, Harm};

/// A run, wholly determined by its seed.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// What is likely to be found.
    pub(crate) kind: Kind,
    /// Machines with disks.
    pub(crate) machines: Vec<MachinePlan>,
    /// Hosts that read and write.
    pub(crate) hosts: Vec<HostPlan>,
    pub(crate) cables: CableOptions,
    pub(crate) faults: Vec<(Instant, FaultEvent)>,
    /// When hosts stop to work.
    pub(crate) until: Instant,
    pub(crate) bugs: InjectedBugs,
}

/// A machine: disks, and the processes that serve them.
#[derive(Clone, Debug)]
pub(crate) struct MachinePlan {
    pub(crate) disks: Vec<DiskOptions>,
    /// A pool is on the first one: hosts have it open.
    pub(crate) is_pool: bool,
    /// They are one mirror, which is served under the first slot.
    pub(crate) is_mirror: bool,
    /// For each namespace, the tenant and the namespace identifier under which it is served at first.
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
    /// Which disk of that machine.
    pub(crate) disk: usize,
    /// The machines of the other legs, if it has a mirror over several.
    pub(crate) other_legs: Vec<usize>,
    pub(crate) depth: usize,
    /// Its disk is a mirror: two writes of one block at a time may leave each leg with another of
    /// them, and until a write is answered reads find it on one leg and not on the other.
    pub(crate) is_mirrored: bool,
    /// The longest pause between two requests.
    pub(crate) think: Span,
    /// Blocks that it uses.
    pub(crate) blocks: u64,
    pub(crate) request_blocks_max: u64,
    pub(crate) spread: Spread,
    /// Of 16 requests so many are reads, and so many flushes.
    pub(crate) reads: u64,
    pub(crate) flushes: u64,
    /// Of 16 writes so many are forced to the medium.
    pub(crate) forced: u64,
    pub(crate) detect: Span,
    pub(crate) fail_fast: Span,
    pub(crate) io_timeout: Span,
}

/// Something that happens to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultEvent {
    /// A process is killed and started again.
    Kill { process: usize, down: Span },
    /// A machine loses its power, and gets it back.
    LosePower { machine: usize, down: Span },
    /// The processes of a machine are killed and started with its disks exchanged.
    Swap { machine: usize, down: Span },
    /// Only this process is: another one of its machine goes on with the disks as they are.
    SwapOne { process: usize, down: Span },
    /// A disk is unplugged, or plugged in again.
    Unplug { disk: usize, is_absent: bool },
    /// A host is killed, without a word, and starts again.
    RestartHost { host: usize, down: Span },
    /// The second host takes the pool over while the first one is cut off for so long; so much later the
    /// machine loses its power for a while.
    TakeOver { span: Span, outage: Option<(Span, Span)> },
    /// A host acquires a reservation on its disk.
    Reserve { host: usize },
    /// A host releases it.
    Release { host: usize },
    /// A process executes nothing for a while.
    Pause { process: usize, span: Span },
    /// Nothing passes between a host and a process.
    Partition { host: usize, process: usize, span: Span },
    /// Connections are harmed.
    Harm { host: usize, process: usize, harm: Harm },
}

/// What is likely to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Whatever is drawn.
    Any,
    /// Writes that stay in the disk when their association has long ended.
    SlowDisk,
    /// Two processes serve one disk: a write is under way in one while its host goes on by the other.
    TwoWays,
    /// A mirror whose legs come and go.
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

impl Plan {
    /// The run of this seed.
    pub fn of(seed: u64, bugs: InjectedBugs) -> Self {
        let mut draw = Draw::new(Random::new(seed ^ 0xc1u64.rotate_left(56)));
        let kind = draw.pick(&[
            Kind::Any,
            Kind::Any,
            Kind::SlowDisk,
            Kind::TwoWays,
            Kind::Tenants,
            Kind::Exchange,
            Kind::Mirror,
            Kind::MirrorOverTargets,
            Kind::Pool,
        ]);
        let machine = draw.machine(kind);
        let machines = vec![machine; if kind == Kind::MirrorOverTargets { 2 } else { 1 }];
        let hosts = draw.hosts(kind, &machines);
        let cables = CableOptions {
            delay: Span::from_us(draw.pick(&[10, 50, 200])),
            jitter: Span::from_us(draw.pick(&[0, 20, 500])),
            splits: draw.chance(4),
            release: Span::from_ms(draw.pick(&[0, 0, 1, 100])),
        };
        let secs = match kind {
            Kind::SlowDisk => 20,
            Kind::Pool => 6,
            Kind::Mirror => 8,
            Kind::MirrorOverTargets => 10,
            Kind::TwoWays | Kind::Tenants | Kind::Exchange => draw.pick(&[4, 8]),
            Kind::Any => draw.pick(&[4, 10, 20]),
        };
        let until = Instant { ns: secs * 1_000_000_000 };
        let faults = draw.faults(kind, &machines, hosts.len(), until);
        Self { seed, kind, machines, hosts, cables, faults, until, bugs }
    }

    /// What kind of run it is: which bugs it is likely to find.
    pub fn kind(&self) -> String {
        format!("{:?}", self.kind)
    }

    /// How many processes there are, on all machines.
    pub(crate) fn processes(&self) -> usize {
        self.machines.iter().map(|machine| machine.processes).sum()
    }
}
