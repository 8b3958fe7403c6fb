//! What a seed stands for: machines, hosts, and what happens to them when.

use base::{Instant, Random, Span};
use remote::Spread;
use sim::network::Direction;

use crate::bugs::InjectedBugs;
use crate::disk::DiskOptions;
use crate::network::{CableOptions, Harm};

/// A run, wholly determined by its seed.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
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
    pub(crate) processes: usize,
    pub(crate) quiesce: Span,
}

/// A host.
#[derive(Clone, Debug)]
pub(crate) struct HostPlan {
    pub(crate) machine: usize,
    /// Which disk of that machine.
    pub(crate) disk: usize,
    pub(crate) depth: usize,
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
    /// A process executes nothing for a while.
    Pause { process: usize, span: Span },
    /// Nothing passes between a host and a process.
    Partition { host: usize, process: usize, span: Span },
    /// Connections are harmed.
    Harm { host: usize, process: usize, harm: Harm },
}

/// What is likely to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Whatever is drawn.
    Any,
    /// Writes that stay in the disk when their association has long ended.
    SlowDisk,
    /// Two processes serve one disk: a write is under way in one while its host goes on by the other.
    TwoWays,
}

/// How often each kind of fault comes, among all.
struct Weights([u64; 7]);

struct Draw(Random);

impl Plan {
    /// The run of this seed.
    pub fn of(seed: u64, bugs: InjectedBugs) -> Self {
        let mut draw = Draw(Random::new(seed ^ 0xc1u64.rotate_left(56)));
        let kind = draw.pick(&[Kind::Any, Kind::Any, Kind::SlowDisk, Kind::TwoWays]);
        let machines = vec![draw.machine(kind)];
        let hosts: Vec<HostPlan> =
            (0..draw.pick(&[1, 1, 2])).map(|_| draw.host(kind, &machines)).collect();
        let cables = CableOptions {
            delay: Span::from_us(draw.pick(&[10, 50, 200])),
            jitter: Span::from_us(draw.pick(&[0, 20, 500])),
            splits: draw.chance(4),
            release: Span::from_ms(draw.pick(&[0, 0, 1, 100])),
        };
        let secs = match kind {
            Kind::SlowDisk => 20,
            Kind::TwoWays => draw.pick(&[4, 8]),
            Kind::Any => draw.pick(&[4, 10, 20]),
        };
        let until = Instant { ns: secs * 1_000_000_000 };
        let faults = draw.faults(kind, &machines, hosts.len(), until);
        Self { seed, machines, hosts, cables, faults, until, bugs }
    }

    /// How many processes there are, on all machines.
    pub(crate) fn processes(&self) -> usize {
        self.machines.iter().map(|machine| machine.processes).sum()
    }
}

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.below(bound as u64)).unwrap_or(0)
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.0.chance(1, one_in)
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn span(&mut self, least_ms: u64, most_ms: u64) -> Span {
        Span::from_ms(least_ms + self.0.below(most_ms - least_ms))
    }

    fn machine(&mut self, kind: Kind) -> MachinePlan {
        let mut disk = DiskOptions {
            block_count: 4096,
            latency: (Span::from_us(5), Span::from_us(self.pick(&[50, 500, 5_000]))),
            slow_one_in: self.pick(&[0, 0, 50, 400]),
            slow_max: Span::from_secs(self.pick(&[1, 8, 20])),
        };
        if kind == Kind::SlowDisk {
            disk.slow_one_in = self.pick(&[10, 30]);
            disk.slow_max = Span::from_secs(self.pick(&[8, 20]));
        }
        if kind == Kind::TwoWays {
            disk.slow_one_in = self.pick(&[2, 4]);
        }
        let processes = match kind {
            Kind::SlowDisk => self.pick(&[1, 2]),
            Kind::TwoWays => 2,
            Kind::Any => self.pick(&[1, 1, 2]),
        };
        let quiesce = match kind {
            Kind::TwoWays => Span::from_ms(1_000),
            _ => Span::from_ms(self.pick(&[200, 1_000])),
        };
        if processes > 1 {
            // What one process has told a disk another one does not know: only the time to quiesce
            // (CQT) keeps old writes away.
            disk.slow_max = Span { ns: quiesce.ns / 10 * 9 };
        }
        MachinePlan { disks: vec![disk], processes, quiesce }
    }

    fn host(&mut self, kind: Kind, machines: &[MachinePlan]) -> HostPlan {
        let machine = self.below(machines.len());
        let host = self.any_host(machine, machines);
        match kind {
            Kind::TwoWays => HostPlan {
                depth: self.pick(&[4, 12]),
                think: Span::from_us(self.pick(&[500, 2_000, 20_000])),
                blocks: self.pick(&[4, 8]),
                request_blocks_max: self.pick(&[1, 4]),
                reads: self.pick(&[4, 8]),
                ..host
            },
            _ => host,
        }
    }

    fn any_host(&mut self, machine: usize, machines: &[MachinePlan]) -> HostPlan {
        HostPlan {
            machine,
            disk: self.below(machines[machine].disks.len()),
            depth: self.pick(&[1, 4, 12]),
            think: Span::from_us(self.pick(&[2_000, 20_000, 60_000])),
            blocks: self.pick(&[8, 24, 64]),
            request_blocks_max: self.pick(&[1, 8, 24]),
            spread: self.pick(&[Spread::ActivePassive, Spread::RoundRobin, Spread::QueueDepth]),
            reads: self.pick(&[2, 6, 8]),
            flushes: self.pick(&[1, 2]),
            forced: self.pick(&[0, 0, 2]),
            detect: Span::from_ms(self.pick(&[500, 1_000, 2_000])),
            fail_fast: Span::from_secs(self.pick(&[2, 8])),
            io_timeout: Span::from_ms(self.pick(&[1_000, 2_000, 8_000])),
        }
    }

    fn faults(
        &mut self,
        kind: Kind,
        machines: &[MachinePlan],
        hosts: usize,
        until: Instant,
    ) -> Vec<(Instant, FaultEvent)> {
        // Each kind is there or not, so that some runs have much of one.
        let mut weights =
            Weights([(); 7].map(|()| if self.chance(2) { 1 + self.0.below(4) } else { 0 }));
        if kind == Kind::TwoWays {
            // Connections are reset: that is noticed while what was sent on them is under way.
            weights.0[4] = 20;
        }
        let processes: usize = machines.iter().map(|machine| machine.processes).sum();
        let count = match kind {
            Kind::SlowDisk => self.below(6),
            Kind::TwoWays => 6 + self.below(12),
            Kind::Any => self.below(12),
        };
        let mut faults = Vec::new();
        for _ in 0..count {
            let at = Instant { ns: 300_000_000 + self.0.below(until.ns - 300_000_000) };
            let (host, process) = (self.below(hosts), self.below(processes));
            let Some(kind) = weights.draw(&mut self.0) else { break };
            let event = match kind {
                0 => FaultEvent::Kill { process, down: self.span(0, 3_000) },
                1 => {
                    let machine = self.below(machines.len());
                    FaultEvent::LosePower { machine, down: self.span(50, 4_000) }
                }
                2 => FaultEvent::Pause { process, span: self.span(10, 6_000) },
                3 => FaultEvent::Partition { host, process, span: self.span(10, 8_000) },
                4 => FaultEvent::Harm { host, process, harm: Harm::Reset },
                5 => FaultEvent::Harm { host, process, harm: Harm::Vanish },
                _ => {
                    let direction = self.pick(&[Direction::There, Direction::Back]);
                    let harm = Harm::Delay(direction, self.span(1, 5_000));
                    FaultEvent::Harm { host, process, harm }
                }
            };
            faults.push((at, event));
        }
        faults.sort_by_key(|(at, _)| *at);
        faults
    }
}

impl Weights {
    fn draw(&self, random: &mut Random) -> Option<usize> {
        let sum: u64 = self.0.iter().sum();
        let mut drawn = random.below(sum);
        for (kind, weight) in self.0.iter().enumerate() {
            if drawn < *weight {
                return Some(kind);
            }
            drawn -= weight;
        }
        None
    }
}
