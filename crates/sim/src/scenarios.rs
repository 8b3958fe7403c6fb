//! All scripted test runs, in tables. Each table combines faults with triggers and workloads, and
//! states the expected result for each row.

mod aborts;
mod admin;
mod completions;
mod events;
mod identify;
mod injected_bugs;
mod medium;
mod memory;
mod no_faults;
mod owner;
mod power;
mod registers;
mod removal;

use tenmil_base::Span;

use crate::scenario::Scenario;
use crate::workload::{Mix, Profile};
use crate::world::WorldOptions;

/// All scenarios in a fixed order.
pub fn all() -> Vec<Scenario> {
    [
        no_faults::table(),
        registers::table(),
        removal::table(),
        completions::table(),
        admin::table(),
        identify::table(),
        events::table(),
        aborts::table(),
        medium::table(),
        memory::table(),
        owner::table(),
        power::table(),
        injected_bugs::table(),
    ]
    .concat()
}

/// A slow medium: the driver polls its registers many times while requests are in flight.
fn slow(options: &mut WorldOptions) {
    options.medium.latency = (Span::from_ms(2), Span::from_ms(30));
}

/// Workloads that the tables are combined with.
const WORK: [(&str, Mix, (u32, u32)); 4] = [
    ("reads", Mix::Reads, (1, 8)),
    ("writes", Mix::Writes, (1, 8)),
    ("flushes", Mix::Flushes, (1, 8)),
    // Above MDTS: each request becomes several commands.
    ("split", Mix::ReadsAndWrites, (200, 256)),
];

fn work(options: &mut WorldOptions, mix: Mix, blocks: (u32, u32)) {
    let span = options.profile.span.max(2 * u64::from(blocks.1));
    options.profile = Profile { mix, blocks, span, ..options.profile };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all;

    /// No scripted run has a violation, all expectations are met, and a second run is identical.
    #[test]
    fn every_scenario_holds_and_repeats() {
        let mut broken = Vec::new();
        for scenario in all() {
            let record = scenario.run();
            if let Some(failure) = record.failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
            if scenario.run().hash != record.hash {
                broken.push(format!("{}: the second run is another", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }

    #[test]
    fn there_are_more_than_two_hundred_of_them_each_with_a_name_of_its_own() {
        let names: BTreeSet<String> = all().into_iter().map(|scenario| scenario.name).collect();
        assert_eq!(names.len(), all().len());
        assert!(names.len() > 200, "{}", names.len());
    }
}
