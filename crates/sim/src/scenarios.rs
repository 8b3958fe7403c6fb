//! All scripted test runs, in tables. Each table combines faults with triggers and workloads, and
//! states the expected result for each row.

mod aborts;
mod admin;
mod completions;
mod conforming_device;
mod events;
mod identify;
mod injected_bugs;
mod medium;
mod owner;
mod power;
mod registers;
mod removal;
mod stray_dma;

use tenmil_base::Span;

use crate::scenario::Scenario;
use crate::simulation::WorldOptions;
use crate::workload::{OperationMix, WorkloadProfile};

/// All scenarios in a fixed order.
pub fn all_scenarios() -> Vec<Scenario> {
    [
        conforming_device::conforming_scenarios(),
        registers::register_scenarios(),
        removal::removal_scenarios(),
        completions::completion_scenarios(),
        admin::admin_scenarios(),
        identify::identify_scenarios(),
        events::event_scenarios(),
        aborts::abort_scenarios(),
        medium::medium_scenarios(),
        stray_dma::stray_dma_scenarios(),
        owner::owner_scenarios(),
        power::power_scenarios(),
        injected_bugs::injected_bug_scenarios(),
    ]
    .concat()
}

/// A slow medium: the driver polls its registers many times while requests are in flight.
fn set_slow_medium(options: &mut WorldOptions) {
    options.medium.latency = (Span::from_ms(2), Span::from_ms(30));
}

/// Workloads that the tables are combined with.
const WORK: [(&str, OperationMix, (u32, u32)); 4] = [
    ("reads", OperationMix::Reads, (1, 8)),
    ("writes", OperationMix::Writes, (1, 8)),
    ("flushes", OperationMix::Flushes, (1, 8)),
    // Above MDTS: each request becomes several commands.
    ("split", OperationMix::ReadsAndWrites, (200, 256)),
];

fn set_workload(options: &mut WorldOptions, mix: OperationMix, blocks: (u32, u32)) {
    let span = options.profile.span.max(2 * u64::from(blocks.1));
    options.profile = WorkloadProfile { mix, blocks, span, ..options.profile };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all_scenarios;

    /// No scripted run has a violation, all expectations are met, and a second run is identical.
    #[test]
    fn every_scenario_passes_and_repeats() {
        let mut broken = Vec::new();
        for scenario in all_scenarios() {
            let record = scenario.execute();
            if let Some(failure) = record.failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
            if scenario.execute().hash != record.hash {
                broken.push(format!("{}: the second run is another", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }

    #[test]
    fn more_than_two_hundred_scenarios_have_unique_names() {
        let names: BTreeSet<String> =
            all_scenarios().into_iter().map(|scenario| scenario.name).collect();
        assert_eq!(names.len(), all_scenarios().len());
        assert!(names.len() > 200, "{}", names.len());
    }
}
