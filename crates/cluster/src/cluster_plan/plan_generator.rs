//! Random generation of plans.

use tenmil_base::{Instant, Random, Span};
use tenmil_nvme_fabrics::IoPolicy;
use tenmil_sim::sim_network::LinkTransferDirection;

use super::{FaultEvent, HostPlan, MachinePlan, ScenarioKind};
use crate::cluster_network::ConnectionFault;
use crate::sim_disk::DiskOptions;

/// Relative frequency of each kind of fault.
struct FaultWeights([u64; 7]);

/// Random choices of a plan.
pub(super) struct PlanGenerator(Random);

impl PlanGenerator {
    pub(super) const fn new(random: Random) -> Self {
        Self(random)
    }

    fn random_below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.below(bound as u64)).unwrap_or(0)
    }

    pub(super) fn one_in(&mut self, one_in: u64) -> bool {
        self.0.chance(1, one_in)
    }

    pub(super) fn random_choice<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.random_below(choices.len())]
    }

    fn random_span(&mut self, least_ms: u64, most_ms: u64) -> Span {
        Span::from_ms(least_ms + self.0.below(most_ms - least_ms))
    }

    pub(super) fn draw_machine(&mut self, kind: ScenarioKind) -> MachinePlan {
        let mut disk = DiskOptions {
            block_count: 4096,
            latency: (Span::from_us(5), Span::from_us(self.random_choice(&[50, 500, 5_000]))),
            slow_one_in: self.random_choice(&[0, 0, 50, 400]),
            slow_max: Span::from_secs(self.random_choice(&[1, 8, 20])),
        };
        if kind == ScenarioKind::SlowDisk {
            disk.slow_one_in = self.random_choice(&[10, 30]);
            disk.slow_max = Span::from_secs(self.random_choice(&[8, 20]));
        }
        if matches!(
            kind,
            ScenarioKind::Mirror | ScenarioKind::MirrorOverTargets | ScenarioKind::Pool
        ) {
            disk.slow_one_in = 0;
        }
        if kind == ScenarioKind::SharedDisk {
            disk.slow_one_in = self.random_choice(&[2, 4]);
        }
        let processes = match kind {
            ScenarioKind::SlowDisk => self.random_choice(&[1, 2]),
            ScenarioKind::SharedDisk | ScenarioKind::Exchange => 2,
            ScenarioKind::Mirror | ScenarioKind::MirrorOverTargets | ScenarioKind::Pool => 1,
            ScenarioKind::Any | ScenarioKind::Tenants => self.random_choice(&[1, 1, 2]),
        };
        let quiesce = match kind {
            ScenarioKind::SharedDisk => Span::from_ms(1_000),
            _ => Span::from_ms(self.random_choice(&[200, 1_000])),
        };
        if kind == ScenarioKind::Tenants {
            let slots = if self.one_in(2) { vec![(0, 1), (1, 1)] } else { vec![(0, 1), (0, 2)] };
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
        let is_mirror = kind == ScenarioKind::Mirror;
        let slots = match kind {
            ScenarioKind::Exchange if self.one_in(2) => vec![(0, 1), (1, 1)],
            ScenarioKind::Exchange => vec![(0, 1), (0, 2)],
            _ => vec![(0, 1)],
        };
        let disks = vec![disk; if is_mirror { 2 } else { slots.len() }];
        let (is_pool, is_shared_out) = (kind == ScenarioKind::Pool, false);
        MachinePlan { disks, is_pool, is_mirror, slots, processes, is_shared_out, quiesce }
    }

    pub(super) fn draw_hosts(
        &mut self,
        kind: ScenarioKind,
        machines: &[MachinePlan],
    ) -> Vec<HostPlan> {
        if kind == ScenarioKind::Tenants {
            // Two hosts use the first disk, and another one the second.
            let host = |disk| HostPlan { disk, ..self.draw_host_on(0, machines) };
            return [0, 0, 1].map(host).to_vec();
        }
        if kind == ScenarioKind::Exchange {
            let host = |disk| HostPlan { disk, ..self.draw_host_on(0, machines) };
            return [0, 1].map(host).to_vec();
        }
        if kind == ScenarioKind::Pool {
            let (blocks, think) = (4096, Span::from_ms(10));
            let host = |_| HostPlan { blocks, think, ..self.draw_host_on(0, machines) };
            return [0, 1].map(host).to_vec();
        }
        if kind == ScenarioKind::Mirror {
            let host = self.draw_host_on(0, machines);
            return vec![HostPlan { disk: 0, is_mirrored: true, ..host }];
        }
        if kind == ScenarioKind::MirrorOverTargets {
            let fail_fast = Span::from_ms(self.random_choice(&[500, 2_000]));
            let host = HostPlan { fail_fast, ..self.draw_host_on(0, machines) };
            return vec![HostPlan { is_mirrored: true, other_legs: vec![1], ..host }];
        }
        (0..self.random_choice(&[1, 1, 2])).map(|_| self.draw_host(kind, machines)).collect()
    }

    fn draw_host(&mut self, kind: ScenarioKind, machines: &[MachinePlan]) -> HostPlan {
        let machine = self.random_below(machines.len());
        let host = self.draw_host_on(machine, machines);
        match kind {
            ScenarioKind::SharedDisk => HostPlan {
                depth: self.random_choice(&[4, 12]),
                think: Span::from_us(self.random_choice(&[500, 2_000, 20_000])),
                blocks: self.random_choice(&[4, 8]),
                request_blocks_max: self.random_choice(&[1, 4]),
                reads: self.random_choice(&[4, 8]),
                ..host
            },
            _ => host,
        }
    }

    fn draw_host_on(&mut self, machine: usize, machines: &[MachinePlan]) -> HostPlan {
        HostPlan {
            machine,
            disk: self.random_below(machines[machine].disks.len()),
            other_legs: Vec::new(),
            depth: self.random_choice(&[1, 4, 12]),
            is_mirrored: false,
            think: Span::from_us(self.random_choice(&[2_000, 20_000, 60_000])),
            blocks: self.random_choice(&[8, 24, 64]),
            request_blocks_max: self.random_choice(&[1, 8, 24]),
            io_policy: self.random_choice(&[
                IoPolicy::ActivePassive,
                IoPolicy::RoundRobin,
                IoPolicy::QueueDepth,
            ]),
            reads: self.random_choice(&[2, 6, 8]),
            flushes: self.random_choice(&[1, 2]),
            forced: self.random_choice(&[0, 0, 2]),
            detect: Span::from_ms(self.random_choice(&[500, 1_000, 2_000])),
            fail_fast: Span::from_secs(self.random_choice(&[2, 8])),
            io_timeout: Span::from_ms(self.random_choice(&[1_000, 2_000, 8_000])),
        }
    }

    pub(super) fn draw_faults(
        &mut self,
        kind: ScenarioKind,
        machines: &[MachinePlan],
        hosts: usize,
        until: Instant,
    ) -> Vec<(Instant, FaultEvent)> {
        // Each kind of fault is enabled or not, so that some runs have many of one kind.
        let mut weights =
            FaultWeights([(); 7].map(|()| if self.one_in(2) { 1 + self.0.below(4) } else { 0 }));
        if kind == ScenarioKind::SharedDisk {
            // Connection resets are detected while the data that were sent are in flight.
            weights.0[4] = 20;
        }
        let processes: usize = machines.iter().map(|machine| machine.processes).sum();
        let count = match kind {
            ScenarioKind::SlowDisk => self.random_below(6),
            ScenarioKind::SharedDisk => 6 + self.random_below(12),
            ScenarioKind::Any => self.random_below(12),
            ScenarioKind::MirrorOverTargets => self.random_below(6),
            ScenarioKind::Tenants | ScenarioKind::Mirror | ScenarioKind::Exchange => {
                self.random_below(4)
            }
            ScenarioKind::Pool => 0,
        };
        let mut faults = Vec::new();
        for _ in 0..count {
            let at = Instant { ns: 300_000_000 + self.0.below(until.ns - 300_000_000) };
            let (host, process) = (self.random_below(hosts), self.random_below(processes));
            let Some(kind) = weights.draw_weighted_index(&mut self.0) else { break };
            let event = match kind {
                0 => FaultEvent::Kill { process, down: self.random_span(0, 3_000) },
                1 => {
                    let machine = self.random_below(machines.len());
                    FaultEvent::LosePower { machine, down: self.random_span(50, 4_000) }
                }
                2 => FaultEvent::Pause { process, span: self.random_span(10, 6_000) },
                3 => FaultEvent::Partition { host, process, span: self.random_span(10, 8_000) },
                4 => FaultEvent::Harm { host, process, harm: ConnectionFault::Reset },
                5 => FaultEvent::Harm { host, process, harm: ConnectionFault::Vanish },
                _ => {
                    let direction = self.random_choice(&[
                        LinkTransferDirection::Upstream,
                        LinkTransferDirection::Downstream,
                    ]);
                    let harm = ConnectionFault::Delay(direction, self.random_span(1, 5_000));
                    FaultEvent::Harm { host, process, harm }
                }
            };
            faults.push((at, event));
        }
        if kind == ScenarioKind::Tenants {
            self.draw_reservation_faults(until, &mut faults);
        }
        if kind == ScenarioKind::Exchange {
            self.draw_disk_swaps(until, &mut faults);
        }
        if kind == ScenarioKind::Mirror {
            self.draw_leg_faults(&mut faults);
        }
        if kind == ScenarioKind::MirrorOverTargets {
            self.draw_target_faults(&mut faults);
        }
        if kind == ScenarioKind::Pool {
            self.draw_pool_takeover(&mut faults);
        }
        faults.sort_by_key(|(at, _)| *at);
        faults
    }

    /// A process is started with its disks exchanged while another one goes on, and later as before.
    fn draw_disk_swaps(&mut self, until: Instant, faults: &mut Vec<(Instant, FaultEvent)>) {
        for _ in 0..1 + self.random_below(2) {
            let process = self.random_below(2);
            let first = 500_000_000 + self.0.below(until.ns / 2);
            let second = first + self.random_span(300, 2_000).ns;
            for ns in [first, second.min(until.ns - 1)] {
                let swap = FaultEvent::SwapOne { process, down: self.random_span(0, 300) };
                faults.push((Instant { ns }, swap));
            }
        }
    }

    /// The pool is taken over from a host that is cut off; its target is killed, or its machine loses its
    /// power, before, within and after that perhaps.
    fn draw_pool_takeover(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        for _ in 0..self.random_below(3) {
            let hit = self.draw_target_fault();
            faults.push((ms(300 + self.0.below(700)), hit));
        }
        let span = self.random_span(10, 1_500);
        let outage = (Span::from_us(self.0.below(20_000)), self.random_span(10, 500));
        let outage = self.one_in(2).then_some(outage);
        faults.push((ms(1_000 + self.0.below(1_000)), FaultEvent::TakeOver { span, outage }));
        for _ in 0..self.random_below(3) {
            let hit = self.draw_target_fault();
            faults.push((ms(3_000 + self.0.below(2_500)), hit));
        }
    }

    /// The target of a pool is killed, or its machine loses its power.
    fn draw_target_fault(&mut self) -> FaultEvent {
        let down = self.random_span(10, 500);
        match self.one_in(3) {
            true => FaultEvent::Kill { process: 0, down },
            false => FaultEvent::LosePower { machine: 0, down },
        }
    }

    /// Adds a leg that misses writes and may be the only one present at a restart.
    fn draw_leg_faults(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        let stale = self.random_below(2);
        let plug = |disk, is_absent| FaultEvent::Unplug { disk, is_absent };
        let lost = 300 + self.0.below(1_500);
        let ended = lost + 100 + self.0.below(1_500);
        faults.push((ms(lost), plug(stale, true)));
        if self.one_in(4) {
            // It is plugged in while the other one is in use.
            faults.push((ms(ended - self.0.below(100)), plug(stale, false)));
        }
        let down = self.random_span(20, 400);
        faults.push((
            ms(ended),
            match self.one_in(2) {
                true => FaultEvent::LosePower { machine: 0, down },
                false => FaultEvent::Kill { process: 0, down },
            },
        ));
        faults.push((ms(ended + 10), plug(stale, false)));
        if !self.one_in(4) {
            faults.push((ms(ended + 10), plug(1 - stale, true)));
            faults.push((ms(ended + 1_000 + self.0.below(2_000)), plug(1 - stale, false)));
        }
    }

    /// The target of a leg is out of reach for a while; then perhaps the host starts again while only that
    /// one is there, and then perhaps the other one loses its power.
    fn draw_target_faults(&mut self, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        let stale = self.random_below(2);
        let other = 1 - stale;
        let lost = 300 + self.0.below(1_500);
        let gone = match self.random_below(3) {
            0 => FaultEvent::LosePower { machine: stale, down: self.random_span(50, 3_000) },
            1 => FaultEvent::Kill { process: stale, down: self.random_span(50, 3_000) },
            _ => FaultEvent::Partition {
                host: 0,
                process: stale,
                span: self.random_span(500, 4_000),
            },
        };
        faults.push((ms(lost), gone));
        let mut at = lost + 200 + self.0.below(3_500);
        if self.one_in(2) {
            let down = self.random_span(300, 3_000);
            faults
                .push((ms(at - self.0.below(20)), FaultEvent::LosePower { machine: other, down }));
            let restart = FaultEvent::RestartHost { host: 0, down: self.random_span(10, 300) };
            faults.push((ms(at), restart));
            at += 500 + self.0.below(3_000);
        }
        if self.one_in(2) {
            let down = self.random_span(50, 2_000);
            let machine = self.random_below(2);
            faults.push((ms(at), FaultEvent::LosePower { machine, down }));
        }
    }

    /// The first host has a reservation, the third perhaps, and the disks are exchanged.
    fn draw_reservation_faults(&mut self, until: Instant, faults: &mut Vec<(Instant, FaultEvent)>) {
        let ms = |ms: u64| Instant { ns: ms * 1_000_000 };
        faults.push((ms(200 + self.0.below(1_000)), FaultEvent::Reserve { host: 0 }));
        if self.one_in(2) {
            faults.push((ms(200 + self.0.below(1_000)), FaultEvent::Reserve { host: 2 }));
        }
        if self.one_in(4) {
            faults.push((ms(200 + self.0.below(3_000)), FaultEvent::Reserve { host: 1 }));
        }
        if self.one_in(4) {
            faults.push((ms(2_000 + self.0.below(2_000)), FaultEvent::Release { host: 0 }));
        }
        for _ in 0..1 + self.random_below(2) {
            let at = Instant { ns: 1_500_000_000 + self.0.below(until.ns - 1_500_000_000) };
            let down = self.random_span(10, 500);
            faults.push((at, FaultEvent::Swap { machine: 0, down }));
        }
    }
}

impl FaultWeights {
    fn draw_weighted_index(&self, random: &mut Random) -> Option<usize> {
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
