//! The power of the device fails and comes back. A cut at every single operation of a session is
//! enumerated elsewhere.

use base::Durability;

use crate::course::Step;
use crate::scenario::{Must, Scenario};
use crate::workload::Mix;

pub(super) fn table() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (durability_name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Stable)]
    {
        for (mix_name, mix) in [("writes", Mix::Writes), ("flushes", Mix::Flushes)] {
            for done in [0, 1, 5, 20, 50] {
                let name = format!("power/{durability_name}/{mix_name}/after-{done}");
                let scenario = Scenario::session(name, &[Must::Attach, Must::Reattach])
                    .world(|options| {
                        options.medium.durability = durability;
                        options.profile.mix = mix;
                    })
                    .steps(&[
                        Step::Attach,
                        Step::CutPowerAfter(done),
                        Step::Work,
                        Step::CutPower,
                        Step::RestorePower,
                        Step::Recover,
                        Step::Review,
                        Step::Again,
                        Step::ShutDown,
                    ]);
                table.push(scenario);
            }
        }
    }
    table
}
