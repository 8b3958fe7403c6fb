//! Power failures of the device. Failures after every single operation are enumerated elsewhere.

use tenmil_base::Durability;

use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::CourseStep;
use crate::workload::Mix;

pub(super) fn table() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (durability_name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Persistent)]
    {
        for (mix_name, mix) in [("writes", Mix::Writes), ("flushes", Mix::Flushes)] {
            for done in [0, 1, 5, 20, 50] {
                let name = format!("power/{durability_name}/{mix_name}/after-{done}");
                let scenario =
                    Scenario::session(name, &[ScenarioCheck::Attach, ScenarioCheck::Reattach])
                        .world(|options| {
                            options.medium.durability = durability;
                            options.profile.mix = mix;
                        })
                        .steps(&[
                            CourseStep::Attach,
                            CourseStep::CutPowerAfter(done),
                            CourseStep::Work,
                            CourseStep::CutPower,
                            CourseStep::RestorePower,
                            CourseStep::Recover,
                            CourseStep::ReadBack,
                            CourseStep::Again,
                            CourseStep::ShutDown,
                        ]);
                table.push(scenario);
            }
        }
    }
    table
}
