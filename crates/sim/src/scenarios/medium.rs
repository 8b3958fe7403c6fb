//! Media that fail, and media that lie. An error is an outcome; a lie is found by the stamps on the
//! blocks, or the harness is blind.

use base::{Operation, Outcome, Span};

use crate::medium::{MediumFault, MediumMischief};
use crate::scenario::{Must, Scenario};
use crate::workload::Mix;

/// Blocks of the medium that lies.
const BLOCKS: u64 = 512;

pub(super) fn table() -> Vec<Scenario> {
    [errors(), lies()].concat()
}

fn errors() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (operation_name, operation) in
        [("read", Operation::Read), ("write", Operation::Write), ("flush", Operation::Flush)]
    {
        for (error, outcome) in [
            ("unrecovered-read", Outcome::UNRECOVERED_READ),
            ("write-fault", Outcome::WRITE_FAULT),
            ("internal", Outcome::INTERNAL_ERROR),
            ("capacity", Outcome::CAPACITY_EXCEEDED),
        ] {
            for (often, times) in [("once", 1), ("for-good", u32::MAX)] {
                let musts = [Must::Attach, Must::Fail, Must::Hush("ResetStarted"), Must::Survive];
                let fails = MediumMischief::on(operation, MediumFault::Fail(outcome)).times(times);
                let name = format!("medium/error/{operation_name}/{error}/{often}");
                let scenario = Scenario::session(name, &musts);
                table.push(scenario.world(|options| options.medium.mischief = vec![fails]));
            }
        }
    }
    table
}

fn lies() -> Vec<Scenario> {
    let rows = [
        ("lost", MediumFault::Lose, Mix::Flushes, "is stale"),
        // Three blocks before their place, so that a review from the first block on meets them there.
        ("misdirected", MediumFault::Misdirect { by: BLOCKS - 3 }, Mix::Writes, "holds block"),
        ("torn", MediumFault::Tear, Mix::Flushes, "is torn"),
    ];
    let mut table = Vec::new();
    for (name, fault, mix, found) in rows {
        for (often, skip) in [("early", 10), ("late", 18)] {
            let lie = MediumMischief::on(Operation::Write, fault).skip(skip);
            let scenario =
                Scenario::session(format!("medium/lie/{name}/{often}"), &[Must::Find(found)]);
            table.push(scenario.world(|options| {
                // A torn block has two parts at least.
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
