//! Random generation of plans.

use tenmil_base::{Instant, Random, Span};
use tenmil_nvme_fabrics::IoPolicy;
use tenmil_sim::network::Direction;

use super::{FaultEvent, HostPlan, Kind, MachinePlan};
use crate::disk::DiskOptions;
use crate::network::Disturbance;

/// Relative frequency of each kind of fault.
struct Weights([u64; 7]);

/// Random choices of a plan.
pub(super) struct Draw(Random);

impl Draw {
    pub(super) const fn new(random: Random) -> Self {
        Self(random)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.below(bound as u64)).unwrap_or(0)
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.0.chance(1, one_in)
    }

    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn span(&mut self, least_ms: u64, most_ms: u64) -> Span {
        Span::from_ms(least_ms + self.0.below(most_ms - least_ms))
    }

    pub(super) fn machine(&mut self, kind: Kind) -> MachinePlan {
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
        if matches!(kind, Kind::Mirror | Kind::MirrorOverTargets | Kind::Pool) {
            disk.slow_one_in = 0;
        }
        if kind == Kind::SharedDisk {
            disk.slow_one_in = self.pick(&[2, 4]);
        }
        let processes = match kind {
            Kind::SlowDisk => self.pick(&[1, 2]),
            Kind::SharedDisk | Kind::Exchange => 2,
            Kind::Mirror | Kind::MirrorOverTargets | Kind::Pool => 1,
            Kind::Any | Kind::Tenants => self.pick(&[1, 1, 2]),
        };
        let quiesce = match kind {
            Kind::SharedDisk => Span::from_ms(1_000),
            _ => Span::from_ms(self.pick(&[200, 1_000])),
        };
        if kind == Kind::Tenants {
            let slots = if self.chance(2) { vec![(0, 1), (1, 1)] } else { vec![(0, 1), (0, 2)] };
            // A reservation is known to one process only.
            let (disks, is_shared_out) = (vec![disk; 2], processes > 1);
            let (is_mirror, is_pool) = (false, false);
            return MachinePlan {
                disks,
                is_pool,
                is_mirror,
                slots,
                processes,
                is_shared_out,
                quiesce,
            };
        }
        if processes > 1 {
            // Fencing in one process does not cover the other one: only the quiesce time (CQT)
            // keeps late writes away.
            disk.slow_max = Span { ns: quiesce.ns / 10 * 9 };
        }
        let is_mirror = kind == Kind::Mirror;
        let slots = match kind {
            Kind::Exchange if self.chance(2) => vec![(0, 1), (1, 1)],
            Kind::Exchange => vec![(0, 1), (0, 2)],
            _ => vec![(0, 1)],
        };
        let disks = vec![disk; if is_mirror { 2 } else { slots.len() }];
        let (is_pool, is_shared_out) = (kind == Kind::Pool, false);
        MachinePlan { disks, is_pool, is_mirror, slots, processes, is_shared_out, quiesce }
    }

    pub(super) fn hosts(&mut self, kind: Kind, machines: &[MachinePlan]) -> Vec<HostPlan> {
        if kind == Kind::Tenants {
            // Two hosts use the first disk, and another one the second.
            let host = |disk| HostPlan { disk, ..self.any_host(0, machines) };
            return [0, 0, 1].map(host).to_vec();
        }
        if kind == Kind::Exchange {
            let host = |disk| HostPlan { disk, ..self.any_host(0, machines) };
            return [0, 1].map(host).to_vec();
        }
        if kind == Kind::Pool {
            let (blocks, think) = (4096, Span::from_ms(10));
            let host = |_| HostPlan { blocks, think, ..self.any_host(0, machines) };
            return [0, 1].map(host).to_vec();
        }
        if kind == Kind::Mirror {
            let host = self.any_host(0, machines);
            return vec![HostPlan { disk: 0, is_mirrored: true, ..host }];
        }
        if kind == Kind::MirrorOverTargets {
            let fail_fast = Span::from_ms(self.pick(&[500, 2_000]));
            let host = HostPlan { fail_fast, ..self.any_host(0, machines) };
            return vec![HostPlan { is_mirrored: true, other_legs: vec![1], ..host }];
        }
        (0..self.pick(&[1, 1, 2])).map(|_| self.host(kind, machines)).collect()
    }

    fn host(&mut self, kind: Kind, machines: &[MachinePlan]) -> HostPlan {
        let machine = self.below(machines.len());
        let host = self.any_host(machine, machines);
        match kind {
            Kind::SharedDisk => HostPlan {
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
            other_legs: Vec::new(),
            depth: self.pick(&[1, 4, 12]),
            is_mirrored: false,
            think: Span::from_us(self.pick(&[2_000, 20_000, 60_000])),
            blocks: self.pick(&[8, 24, 64]),
            request_blocks_max: self.pick(&[1, 8, 24]),
            io_policy: self.pick(&[
                IoPolicy::ActivePassive,
                IoPolicy::RoundRobin,
                IoPolicy::QueueDepth,
            ]),
            reads: self.pick(&[2, 6, 8]),
            flushes: self.pick(&[1, 2]),
            forced: self.pick(&[0, 0, 2]),
            detect: Span::from_ms(self.pick(&[500, 1_000, 2_000])),
            fail_fast: Span::from_secs(self.pick(&[2, 8])),
            io_timeout: Span::from_ms(self.pick(&[1_000, 2_000, 8_000])),
        }
    }

    pub(super) fn faults(
        &mut self,
        kind: Kind,
        machines: &[MachinePlan],
        hosts: usize,
        until: Instant,
    ) -> Vec<(Instant, FaultEvent)> {
        // Each kind of fault is enabled or not, so that some runs have many of one kind.
        let mut weights =
            Weights([(); 7].map(|()| if self.chance(2) { 1 + self.0.below(4) } else { 0 }));
        if kind == Kind::SharedDisk {
            // Connection resets are detected while the data that were sent are in flight.
            weights.0[4] = 20;
        }
        let processes: usize = machines.iter().map(|machine| machine.processes).sum();
        let count = match kind {
            Kind::SlowDisk => self.below(6),
            Kind::SharedDisk => 6 + self.below(12),
            Kind::Any => self.below(12),
            Kind::MirrorOverTargets => self.below(6),
            Kind::Tenants | Kind::Mirror | Kind::Exchange => self.below(4),
            Kind::Pool => 0,
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
                4 => FaultEvent::Harm { host, process, harm: Disturbance::Reset },
                5 => FaultEvent::Harm { host, process, harm: Disturbance::Vanish },
                _ => {
                    let direction = self.pick(&[Direction::Upstream, Direction::Downstream]);
                    let harm = Disturbance::Delay(direction, self.span(1, 5_000));
                    FaultEvent::Harm { host, process, harm }
                }
            };
            faults.push((at, event));
        }
        if kind == Kind::Tenants {
            self.reservations(until, &mut faults);
        }
        if kind == Kind::Exchange {
            self.exchanges(until, &mut faults);
        }
        if kind == Kind::Mirror {
            self.legs(&mut faults);
        }
        if kind == Kind::MirrorOverTargets {
            self.targets(&mut faults);
        }
        if kind == Kind::Pool {
            self.takeover(&mut faults);
        }
        faults.sort_by_key(|(at, _)| *at);
        faults
    }

    /// A process is started with its disks exchanged while another one goes on, and later as before.
    fn exchanges(&mut self, until: Instant, faults: &mut Vec<(Instant, FaultEvent)>) {
        for _ in 0..1 + self.below(2) {
            let process = self.below(2);
            let first = 500_000_000 + self.0.below(until.ns / 2);
            let second = first + self.span(300, 2_000).ns;
            for ns in [first, second.min(until.ns - 1)] {
                let swap = FaultEvent::SwapOne { process, down: self.span(0, 300) };
                faults.push((Instant { ns }, swap));
            }
        }
    }

    /// The pool is taken over from a host that is cut off; its target is killed, or its machine loses its
    /// power, before, within and after that perhaps.
    fn takeover(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        for _ in 0..self.below(3) {
            let hit = self.hit();
            faults.push((ms(300 + self.0.below(700)), hit));
        }
        let span = self.span(10, 1_500);
        let outage = (Span::from_us(self.0.below(20_000)), self.span(10, 500));
        let outage = self.chance(2).then_some(outage);
        faults.push((ms(1_000 + self.0.below(1_000)), FaultEvent::TakeOver { span, outage }));
        for _ in 0..self.below(3) {
            let hit = self.hit();
            faults.push((ms(3_000 + self.0.below(2_500)), hit));
        }
    }

    /// The target of a pool is killed, or its machine loses its power.
    fn hit(&mut self) -> FaultEvent {
        let down = self.span(10, 500);
        match self.chance(3) {
            true => FaultEvent::Kill { process: 0, down },
            false => FaultEvent::LosePower { machine: 0, down },
        }
    }

    /// Adds a leg that misses writes and may be the only one present at a restart.
    fn legs(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        let stale = self.below(2);
        let plug = |disk, is_absent| FaultEvent::Unplug { disk, is_absent };
        let lost = 300 + self.0.below(1_500);
        let ended = lost + 100 + self.0.below(1_500);
        faults.push((ms(lost), plug(stale, true)));
        if self.chance(4) {
            // It is plugged in while the other one is in use.
            faults.push((ms(ended - self.0.below(100)), plug(stale, false)));
        }
        let down = self.span(20, 400);
        faults.push((
            ms(ended),
            match self.chance(2) {
                true => FaultEvent::LosePower { machine: 0, down },
                false => FaultEvent::Kill { process: 0, down },
            },
        ));
        faults.push((ms(ended + 10), plug(stale, false)));
        if !self.chance(4) {
            faults.push((ms(ended + 10), plug(1 - stale, true)));
            faults.push((ms(ended + 1_000 + self.0.below(2_000)), plug(1 - stale, false)));
        }
    }

    /// The target of a leg is out of reach for a while; then perhaps the host starts again while only that
    /// one is there, and then perhaps the other one loses its power.
    fn targets(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        let stale = self.below(2);
        let other = 1 - stale;
        let lost = 300 + self.0.below(1_500);
        let gone = match self.below(3) {
            0 => FaultEvent::LosePower { machine: stale, down: self.span(50, 3_000) },
            1 => FaultEvent::Kill { process: stale, down: self.span(50, 3_000) },
            _ => FaultEvent::Partition { host: 0, process: stale, span: self.span(500, 4_000) },
        };
        faults.push((ms(lost), gone));
        let mut at = lost + 200 + self.0.below(3_500);
        if self.chance(2) {
            let down = self.span(300, 3_000);
            faults
                .push((ms(at - self.0.below(20)), FaultEvent::LosePower { machine: other, down }));
            let restart = FaultEvent::RestartHost { host: 0, down: self.span(10, 300) };
            faults.push((ms(at), restart));
            at += 500 + self.0.below(3_000);
        }
        if self.chance(2) {
            let down = self.span(50, 2_000);
            let machine = self.below(2);
            faults.push((ms(at), FaultEvent::LosePower { machine, down }));
        }
    }

    /// The first host has a reservation, the third perhaps, and the disks are exchanged.
    fn reservations(&mut self, until: Instant, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        faults.push((ms(200 + self.0.below(1_000)), FaultEvent::Reserve { host: 0 }));
        if self.chance(2) {
            faults.push((ms(200 + self.0.below(1_000)), FaultEvent::Reserve { host: 2 }));
        }
        if self.chance(4) {
            faults.push((ms(200 + self.0.below(3_000)), FaultEvent::Reserve { host: 1 }));
        }
        if self.chance(4) {
            faults.push((ms(2_000 + self.0.below(2_000)), FaultEvent::Release { host: 0 }));
        }
        for _ in 0..1 + self.below(2) {
            let at = Instant { ns: 1_500_000_000 + self.0.below(until.ns - 1_500_000_000) };
            let down = self.span(10, 500);
            faults.push((at, FaultEvent::Swap { machine: 0, down }));
        }
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
