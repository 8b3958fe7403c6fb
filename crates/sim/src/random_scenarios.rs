//! Random test runs: everything is drawn from a seed, so a failing seed fails again.

use tenmil_base::{Durability, IoStatus, Operation, Random, Span};
use tenmil_nvme_host::{CompletionDoorbell, FastPathOptions};
use tenmil_wire::AdminOpcode;

use crate::device_memory::DataAccessMode;
use crate::fault_injector::{
    BogusCid, CorruptionMethod, DataCorruption, DmaFault, Fault, FaultTarget, FaultTrigger,
    PlannedFault, QueueKind, ReleaseTrigger, lies,
};
use crate::scenario::Scenario;
use crate::sim_medium::{MediumFault, PlannedMediumFault};
use crate::simulation::WorldOptions;
use crate::test_run::{OwnerAction, RunStep};
use crate::workload::{DataLayout, OperationMix, WorkloadProfile};

/// Test run of this seed.
pub fn random_scenario(seed: u64) -> Scenario {
    let mut draw = RandomDraw(Random::new(seed ^ 0x5eed_0000_0000_0000));
    let mut options = WorldOptions { seed, ..WorldOptions::default() };
    draw.draw_host_options(&mut options);
    draw.draw_device_options(&mut options);
    draw.draw_medium_options(&mut options);
    draw.draw_workload_profile(&mut options);
    for _ in 0..draw.random_below(4) {
        options.plan.push(draw.draw_planned_fault());
    }
    let steps = draw.draw_steps(&mut options);
    if steps.contains(&RunStep::Crash) {
        // A request of the host that crashed may still be in the medium when the next host enables the
        // controller, whose CAP.TO covers the slowest one.
        let slowest = options.medium.mischief.iter().filter_map(|planned| match planned.fault {
            MediumFault::Delay(delay) => Some(Span { ns: delay.ns + 500_000_000 }),
            _ => None,
        });
        let ready = slowest.max().unwrap_or_default().max(options.function.ready_timeout);
        options.function.ready_timeout = ready;
    }
    Scenario { name: format!("swarm/{seed}"), options, steps, musts: Vec::new() }
}

struct RandomDraw(Random);

impl RandomDraw {
    fn random_below(&mut self, bound: u32) -> u32 {
        u32::try_from(self.0.below(bound.into())).unwrap_or(0)
    }

    fn random_chance(&mut self, one_in: u64) -> bool {
        self.0.chance(1, one_in)
    }

    fn random_choice<T: Copy>(&mut self, choices: &[T]) -> T {
        let index = usize::try_from(self.0.below(choices.len() as u64)).unwrap_or(0);
        choices[index]
    }

    fn draw_host_options(&mut self, options: &mut WorldOptions) {
        let host = &mut options.host;
        host.queue_pairs = self.random_choice(&[1, 1, 2, 4]);
        host.queue_depth = self.random_choice(&[2, 3, 4, 8, 32, 64]);
        host.interrupts = self.random_chance(3);
        host.controller.shadow_doorbells = self.random_chance(4);
        host.controller.resets_max = self.random_choice(&[0, 1, 4]);
        host.techniques = FastPathOptions {
            doorbell_batching: !self.random_chance(4),
            completion_doorbell: self.random_choice(&[
                CompletionDoorbell::Each,
                CompletionDoorbell::Poll,
                CompletionDoorbell::Deferred,
            ]),
        };
    }

    fn draw_device_options(&mut self, options: &mut WorldOptions) {
        let function = &mut options.function;
        function.reach = match self.random_below(4) {
            0 => DataAccessMode::Copied,
            1 => DataAccessMode::Late(Span::from_us(self.0.below(200))),
            _ => DataAccessMode::Direct,
        };
        function.transfer_bytes_max = self.random_choice(&[8 << 10, 16 << 10, 64 << 10]);
        function.io_queues_max = self.random_choice(&[1, 2, 4]);
        function.queue_entries_max = self.random_choice(&[2, 4, 64, 256]);
        function.sgls = self.random_chance(2);
        options.device.posting.1 = Span::from_us(1 + self.0.below(50));
        options.device.configuration_lag = Span::from_us(self.0.below(100_000));
    }

    fn draw_medium_options(&mut self, options: &mut WorldOptions) {
        let medium = &mut options.medium;
        medium.block_size = self.random_choice(&[512, 512, 1024, 4096]);
        medium.durability =
            self.random_choice(&[Durability::VolatileCache, Durability::Persistent]);
        // A medium with a small depth must be fast, or no timeout could be met.
        (medium.depth, medium.latency.1) = match self.random_below(4) {
            0 => (1, Span::from_us(2 + self.0.below(100))),
            1 => (4, Span::from_us(2 + self.0.below(400))),
            2 => (256, Span::from_us(2 + self.0.below(400))),
            _ => (256, Span::from_us(2 + self.0.below(30_000))),
        };
        medium.latency.0 = Span::from_us(2);
        medium.optimal_boundary_blocks = self.random_choice(&[0, 0, 8, 24]);
        while self.random_chance(4) {
            let fault = match self.random_below(3) {
                0 => MediumFault::Stall,
                1 => MediumFault::Delay(Span::from_ms(self.0.below(2_000))),
                _ => MediumFault::Fail(self.random_choice(&[
                    IoStatus::UNRECOVERED_READ,
                    IoStatus::WRITE_FAULT,
                    IoStatus::INTERNAL_ERROR,
                ])),
            };
            let operation = self.random_choice(&[
                None,
                Some(Operation::Read),
                Some(Operation::Write),
                Some(Operation::Flush),
            ]);
            let (skip, times) = (self.random_below(40), 1 + self.random_below(3));
            medium.mischief.push(PlannedMediumFault { fault, operation, skip, times });
        }
    }

    fn draw_workload_profile(&mut self, options: &mut WorldOptions) {
        let most = self.random_choice(&[1, 8, 32, 96]);
        options.profile = WorkloadProfile {
            count: 10 + self.0.below(60),
            depth: self.random_choice(&[1, 4, 16, 40]),
            mix: self.random_choice(&[
                OperationMix::Reads,
                OperationMix::Writes,
                OperationMix::ReadsAndWrites,
                OperationMix::Flushes,
                OperationMix::Everything,
            ]),
            blocks: (1, most),
            span: u64::from(most) * 2 + self.0.below(100),
            pieces: self.random_choice(&[DataLayout::Whole, DataLayout::Offset, DataLayout::Pages]),
        };
    }

    fn draw_planned_fault(&mut self) -> PlannedFault {
        let fault = self.draw_fault();
        let queue = self.random_choice(&[QueueKind::Any, QueueKind::Io, QueueKind::Admin]);
        let opcode = match fault {
            Fault::Event { .. } => Some(AdminOpcode::AsynchronousEventRequest.code()),
            Fault::CorruptData(_) => Some(self.random_choice(&[0x06, 0x02])),
            _ => None,
        };
        let count = self.random_below(30);
        let gate = self.random_choice(&[
            FaultTrigger::Always,
            FaultTrigger::Disables(1),
            FaultTrigger::Enables(2),
            FaultTrigger::Shutdowns(1),
            FaultTrigger::IoCompletions(count),
            FaultTrigger::AdminCompletions(count),
        ]);
        let (skip, times) = (self.random_below(20), self.random_choice(&[1, 1, 2, 5, 50]));
        let target = FaultTarget { queue, opcode };
        PlannedFault { fault, target, gate, skip, times }
    }

    fn draw_fault(&mut self) -> Fault {
        let release = ReleaseTrigger::After(Span::from_ms(self.0.below(500)));
        let bits = self.0.next_u64();
        let drawn = self.0.next_u64().to_le_bytes();
        let offset = self.random_choice(&[0x00, 0x08, 0x14, 0x1c, 0x68]);
        match self.random_below(26) {
            0 => Fault::Gone,
            1 => Fault::Masked,
            2 => Fault::Duplicate,
            3 => Fault::Bogus(BogusCid::Outside),
            4 => Fault::Bogus(BogusCid::Ended),
            5 => Fault::Bogus(BogusCid::InFlight),
            6 => Fault::WrongPhase,
            7 => Fault::Drop,
            8 => Fault::Hold(release),
            9 => Fault::Hold(ReleaseTrigger::Aborted),
            10 => Fault::Hold(ReleaseTrigger::Reset),
            11 => Fault::Status(u16::MAX),
            12 => Fault::Head(u16::from_le_bytes([drawn[0], drawn[1]])),
            13 => Fault::QueueId(u16::from_le_bytes([drawn[0], drawn[1]])),
            14 => Fault::Flood,
            15 => {
                let result = u32::from_le_bytes([drawn[0] & 7, drawn[1] & 3, drawn[2], 0]);
                Fault::Event { result, status: u16::from(drawn[3] & 1) }
            }
            16 => Fault::Dma(DmaFault::StrayWrite),
            17 => Fault::Dma(DmaFault::StrayRead),
            18 => Fault::Dma(DmaFault::ScribbleRing),
            19 => Fault::Interrupt { vector: u16::from(drawn[0]) },
            20 => Fault::Register { offset, mask: 0xff << (drawn[0] & 0x38), bits },
            21 => self.random_choice(&[lies::NEVER_READY, lies::NEVER_NOT_READY, lies::FATAL]),
            22 => lies::SHUTDOWN_STUCK,
            23 => Fault::Result(u32::from_le_bytes([drawn[0], drawn[1], drawn[2], drawn[3]])),
            24 => {
                let offset = u16::from_le_bytes([drawn[0], drawn[1] & 0x0f]);
                let mask = 0xff_u64 << (drawn[2] & 0x38);
                Fault::CorruptData(DataCorruption {
                    page: None,
                    how: CorruptionMethod::Poke { offset, mask, bits },
                })
            }
            _ => Fault::CorruptData(DataCorruption {
                page: Some(drawn[0] & 7),
                how: CorruptionMethod::Random,
            }),
        }
    }

    fn draw_steps(&mut self, options: &mut WorldOptions) -> Vec<RunStep> {
        let mut steps = vec![RunStep::Attach, RunStep::WorkPartly(self.0.below(30))];
        match self.random_below(8) {
            0 => steps.push(RunStep::Request(OwnerAction::Reset)),
            1 => steps.push(RunStep::Request(OwnerAction::ResetSubsystem)),
            2 => steps.push(RunStep::Request(OwnerAction::DeleteQueuePair)),
            3 => steps.push(RunStep::Request(OwnerAction::ShutDown)),
            4 => steps.push(RunStep::Request(OwnerAction::ShutDownAbruptly)),
            5 => steps.push(RunStep::Crash),
            6 => steps.extend([RunStep::CutPowerAfter(self.0.below(20))]),
            _ => {}
        }
        let cuts_power = matches!(steps.last(), Some(RunStep::CutPowerAfter(_)));
        steps.push(RunStep::Work);
        if cuts_power {
            steps.extend([RunStep::CutPower, RunStep::RestorePower]);
        }
        // A host trusts Identify data until the controller is initialized again, so a new host is
        // needed after a corruption.
        steps.extend([
            RunStep::StopFaults,
            RunStep::Renew,
            RunStep::ReadBack,
            RunStep::Again,
            RunStep::ShutDown,
        ]);
        // The effect of copies cannot be predicted, and torn writes are detected by design.
        options.medium.tears = false;
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::random_scenario;

    /// Runs each seed twice: there is no violation, and both runs are identical.
    #[test]
    fn random_scenarios_pass_and_repeat() {
        let mut broken = Vec::new();
        for seed in 0..400 {
            let scenario = random_scenario(seed);
            let record = scenario.execute();
            if let Some(failure) = &record.failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
            if scenario.execute().hash != record.hash {
                broken.push(format!("{}: the second run is another", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }
}
