//! Media errors and silent media faults. An error is a status; a silent fault must be found by the
//! stamps.

use tenmil_base::{IoStatus, Operation, Span};

use crate::scenario::{Scenario, ScenarioCheck};
use crate::sim_medium::{MediumFault, PlannedMediumFault};
use crate::workload::OperationMix;

/// Blocks of the faulty medium.
const BLOCKS: u64 = 512;

pub(super) fn medium_scenarios() -> Vec<Scenario> {
    [media_errors(), silent_media_faults()].concat()
}

fn media_errors() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (operation_name, operation) in
        [("read", Operation::Read), ("write", Operation::Write), ("flush", Operation::Flush)]
    {
        for (error, status) in [
            ("unrecovered-read", IoStatus::UNRECOVERED_READ),
            ("write-fault", IoStatus::WRITE_FAULT),
            ("internal", IoStatus::INTERNAL_ERROR),
            ("capacity", IoStatus::CAPACITY_EXCEEDED),
        ] {
            for (often, times) in [("once", 1), ("for-good", u32::MAX)] {
                let musts = [
                    ScenarioCheck::Attach,
                    ScenarioCheck::Fail,
                    ScenarioCheck::NoEvent("ResetStarted"),
                    ScenarioCheck::Survive,
                ];
                let fails = PlannedMediumFault::for_operation(operation, MediumFault::Fail(status))
                    .with_count(times);
                let name = format!("medium/error/{operation_name}/{error}/{often}");
                let scenario = Scenario::default_session(name, &musts);
                table.push(scenario.with_world(|options| options.medium.mischief = vec![fails]));
            }
        }
    }
    table
}

fn silent_media_faults() -> Vec<Scenario> {
    let rows = [
        ("lost", MediumFault::LostWrite, OperationMix::Flushes, "is stale"),
        // Three blocks before their address, so that reading back from the first block on finds
        // them there.
        (
            "misdirected",
            MediumFault::Misdirect { by: BLOCKS - 3 },
            OperationMix::Writes,
            "holds block",
        ),
        ("torn", MediumFault::Tear, OperationMix::Flushes, "is torn"),
    ];
    let mut table = Vec::new();
    for (name, fault, mix, found) in rows {
        for (often, skip) in [("early", 10), ("late", 18)] {
            let lie = PlannedMediumFault::for_operation(Operation::Write, fault).with_skip(skip);
            let scenario = Scenario::default_session(
                format!("medium/lie/{name}/{often}"),
                &[ScenarioCheck::Find(found)],
            );
            table.push(scenario.with_world(|options| {
                // A torn block needs at least two parts.
                options.medium.block_size = 1024;
                options.medium.block_count = BLOCKS;
                options.profile.mix = mix;
                options.profile.span = 16;
                options.profile.blocks = (1, 1);
                options.medium.latency = (Span::from_us(5), Span::from_us(5));
                options.medium.mischief = vec![lie];
            }));
        }
    }
    table
}
