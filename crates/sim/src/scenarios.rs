//! All scripted runs, by table. Each table crosses what can go wrong with when it does and with what
//! is going on meanwhile, and says for each row what must show.

mod aborts;
mod admin;
mod canary;
mod completions;
mod events;
mod honest;
mod identify;
mod medium;
mod memory;
mod owner;
mod power;
mod registers;
mod removal;

use base::Span;

use crate::scenario::Scenario;
use crate::workload::{Mix, Profile};
use crate::world::WorldOptions;

/// Every scenario there is, in a fixed order.
pub fn all() -> Vec<Scenario> {
    [
        honest::table(),
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
        canary::table(),
    ]
    .concat()
}

/// A medium so slow that the driver looks at its registers many times while requests are under way.
fn slow(options: &mut WorldOptions) {
    options.medium.latency = (Span::from_ms(2), Span::from_ms(30));
}

/// The kinds of work that the tables cross with.
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

    /// Every promise is kept in every scripted run, everything that must show does, and a second
    /// run is the first one bit for bit.
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
