//! Small spaces, walked through from end to end: every register load at which a device may vanish,
//! every completion that may be lost, every operation of a medium at which the power may fail, every
//! request at which a process may end.
//!
//! How large each space is, an honest run tells.

use base::Durability;

use crate::course::{Step, Wish};
use crate::evil::{Fault, Gate, Mischief, QueueKind, Target};
use crate::scenario::{Must, Scenario};
use crate::workload::Mix;
use crate::world::WorldOptions;

/// All of them, in a fixed order.
pub fn all() -> Vec<Scenario> {
    [vanishing(), lost_completions(), power_cuts(), crashes()].concat()
}

/// A session with a reset in its midst and a shutdown at its end, faults on all the way.
const WHOLE: &[Step] = &[
    Step::Attach,
    Step::WorkSome(20),
    Step::Ask(Wish::Reset),
    Step::Work,
    Step::Ask(Wish::ShutDown),
    Step::AwaitEnd,
];
const HEALED: &[Step] = &[Step::Repent, Step::Recover, Step::Review, Step::Again, Step::ShutDown];

fn base() -> Scenario {
    Scenario::session("enumeration/base", &[]).world(|options| {
        options.profile.count = 40;
        options.host.queue_pairs = 2;
    })
}

/// The device vanishes for good, or is out of sight for a moment, at each register load of a whole
/// life.
fn vanishing() -> Vec<Scenario> {
    let honest = base().steps(WHOLE).run();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for read in 0..honest.counters.reads {
        let gone = Mischief::always(Fault::Gone).skip(read);
        table.push(named(format!("vanish/read-{read}")).plan(&[gone]).steps(&steps));
        let masked = Mischief::always(Fault::Masked).skip(2 * read).times(1);
        table.push(named(format!("mask/access-{}", 2 * read)).plan(&[masked]).steps(&steps));
    }
    for (name, gates) in [
        ("io", (1..=honest.counters.io_completions).map(Gate::IoCompletions).collect::<Vec<_>>()),
        ("admin", (1..=honest.counters.admin_completions).map(Gate::AdminCompletions).collect()),
    ] {
        for (number, gate) in (1..).zip(gates) {
            let gone = Mischief::always(Fault::Gone).gate(gate);
            let name = format!("vanish/{name}-completion-{number}");
            table.push(named(name).plan(&[gone]).steps(&steps));
        }
    }
    table
}

/// Each completion of a whole life is swallowed, one at a time.
fn lost_completions() -> Vec<Scenario> {
    let honest = base().steps(WHOLE).run();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for (name, queue, count) in [
        ("io", QueueKind::Io, honest.counters.io_completions),
        ("admin", QueueKind::Admin, honest.counters.admin_completions),
    ] {
        for number in 0..count {
            let lost = Mischief {
                target: Target { queue, opcode: None },
                ..Mischief::always(Fault::Swallow).skip(number).times(1)
            };
            let name = format!("lost/{name}-completion-{number}");
            table.push(named(name).plan(&[lost]).steps(&steps));
        }
    }
    table
}

/// The power fails after each operation of a medium in a session of writes and flushes; what was
/// flushed is there when it is back.
fn power_cuts() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Stable)]
    {
        let change = |options: &mut WorldOptions| {
            options.medium.durability = durability;
            options.profile.mix = Mix::Flushes;
            options.profile.span = 24;
        };
        let honest = base().world(change).steps(&[Step::Attach, Step::Work]).run();
        for done in 0..honest.medium_done {
            let steps = [
                Step::Attach,
                Step::CutPowerAfter(done),
                Step::Work,
                Step::CutPower,
                Step::RestorePower,
                Step::Recover,
                Step::Review,
                Step::Again,
                Step::ShutDown,
            ];
            let scenario = named(format!("power/{name}/after-{done}")).world(change).steps(&steps);
            table.push(Scenario { musts: vec![Must::Attach, Must::Reattach], ..scenario });
        }
    }
    table
}

/// The process ends after each request of a session.
fn crashes() -> Vec<Scenario> {
    let scenario = |submitted| {
        let steps = [Step::Attach, Step::WorkSome(submitted), Step::Crash];
        named(format!("crash/after-{submitted}")).steps(&[&steps[..], HEALED].concat())
    };
    (0..40).map(scenario).collect()
}

fn named(name: String) -> Scenario {
    Scenario { name: format!("enumeration/{name}"), ..base() }
}

#[cfg(test)]
mod tests {
    use super::all;

    #[test]
    fn nothing_breaks_wherever_it_strikes() {
        let mut broken = Vec::new();
        for scenario in all() {
            if let Some(failure) = scenario.run().failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }

    #[test]
    fn the_spaces_are_as_large_as_a_life_is_long() {
        let names: Vec<String> = all().into_iter().map(|scenario| scenario.name).collect();
        for space in ["vanish/read", "vanish/io", "vanish/admin", "lost/io", "power/volatile"] {
            let count = names.iter().filter(|name| name.contains(space)).count();
            assert!(count >= 12, "{space}: {count}");
        }
    }
}
