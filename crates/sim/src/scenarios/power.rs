//! Power failures of the device. Failures after every single operation are enumerated elsewhere.

use tenmil_base::Durability;

use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::RunStep;
use crate::workload::OperationMix;

pub(super) fn power_scenarios() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (durability_name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Persistent)]
    {
        for (mix_name, mix) in
            [("writes", OperationMix::Writes), ("flushes", OperationMix::Flushes)]
        {
            for done in [0, 1, 5, 20, 50] {
                let name = format!("power/{durability_name}/{mix_name}/after-{done}");
                let scenario = Scenario::default_session(
                    name,
                    &[ScenarioCheck::Attach, ScenarioCheck::Reattach],
                )
                .with_world(|options| {
                    options.medium.durability = durability;
                    options.profile.mix = mix;
                })
                .with_steps(&[
                    RunStep::Attach,
                    RunStep::CutPowerAfter(done),
                    RunStep::Work,
                    RunStep::CutPower,
                    RunStep::RestorePower,
                    RunStep::Recover,
                    RunStep::ReadBack,
                    RunStep::Again,
                    RunStep::ShutDown,
                ]);
                table.push(scenario);
            }
        }
    }
    table
}
