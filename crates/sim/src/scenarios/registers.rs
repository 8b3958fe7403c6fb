//! Registers that lie: from the first look on, during a reset, with requests under way, during a
//! shutdown, and only for a while.

use nvme::State;

use crate::course::{SESSION, Step, Wish};
use crate::evil::{Fault, Gate, Mischief, lies};
use crate::scenario::{Must, Scenario};

const REFUSED: Must = Must::NoLanes;

pub(super) fn table() -> Vec<Scenario> {
    [from_the_start(), during_a_reset(), under_load(), during_a_shutdown(), for_a_while()].concat()
}

fn from_the_start() -> Vec<Scenario> {
    let refused = |why| vec![Must::Refuse(why), REFUSED, Must::Reattach, Must::Strike(1)];
    let fine = vec![Must::Attach, Must::Succeed, Must::Survive, Must::Strike(1)];
    let rows = [
        ("never-ready", lies::NEVER_READY, refused("expected RDY=1")),
        ("never-not-ready", lies::NEVER_NOT_READY, refused("expected RDY=0")),
        ("fatal", lies::FATAL, refused("fatal")),
        ("shutdown-status-stuck", lies::SHUTDOWN_STUCK, fine.clone()),
        ("shutdown-status-reserved", lies::SHUTDOWN_RESERVED, fine.clone()),
        ("status-reserved-bits", lies::STATUS_RESERVED, fine.clone()),
        ("no-entries", lies::NO_ENTRIES, refused("CAP.MQES is 0x0")),
        ("two-entries", lies::TWO_ENTRIES, fine.clone()),
        ("no-time", lies::NO_TIME, fine.clone()),
        ("stride-max", lies::STRIDE_MAX, fine.clone()),
        ("no-command-set", lies::NO_COMMAND_SET, refused("CAP.CSS is 0x0")),
        ("large-pages", lies::LARGE_PAGES, refused("CAP.MPSMIN is 0x4")),
        ("pages-backwards", lies::PAGES_BACKWARDS, refused("at most CAP.MPSMAX")),
        ("cap-zero", lies::CAP_ZERO, refused("CAP.MQES is 0x0")),
        ("version-zero", lies::VERSION_ZERO, refused("VS is 0x0")),
        ("version-high", lies::VERSION_HIGH, fine.clone()),
        ("crto-zero", lies::CRTO_ZERO, fine),
        ("masked", Fault::Masked, refused("CAP reads as all ones")),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, Vec<Must>)| {
        Scenario::session(format!("registers/start/{name}"), &musts)
            .plan(&[Mischief::always(fault)])
    };
    rows.into_iter().map(scenario).collect()
}

/// The lie begins when CC.EN is cleared for a reset that the owner asks for.
fn during_a_reset() -> Vec<Scenario> {
    let dead = [Must::Attach, Must::Stand(State::Dead), Must::Reattach, Must::Strike(1)];
    let fine = [Must::Attach, Must::Tell("Recovered"), Must::Survive, Must::Strike(1)];
    let rows = [
        ("never-ready", lies::NEVER_READY, dead),
        ("never-not-ready", lies::NEVER_NOT_READY, dead),
        ("fatal", lies::FATAL, dead),
        ("no-entries", lies::NO_ENTRIES, dead),
        ("stride-max", lies::STRIDE_MAX, dead),
        ("no-command-set", lies::NO_COMMAND_SET, dead),
        ("large-pages", lies::LARGE_PAGES, dead),
        ("cap-zero", lies::CAP_ZERO, dead),
        ("version-zero", lies::VERSION_ZERO, dead),
        ("version-high", lies::VERSION_HIGH, fine),
        ("no-time", lies::NO_TIME, fine),
        ("status-reserved-bits", lies::STATUS_RESERVED, fine),
        (
            "masked",
            Fault::Masked,
            [Must::Attach, Must::Stand(State::Removed), Must::Reattach, Must::Strike(1)],
        ),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, [Must; 4])| {
        // The capabilities are read before CC.EN is cleared, so those lie from the reset on.
        Scenario::session(format!("registers/reset/{name}"), &musts).world(super::slow).steps(&[
            Step::Attach,
            Step::WorkSome(20),
            Step::Arm(Mischief::always(fault)),
            Step::Ask(Wish::Reset),
            Step::Work,
            Step::Repent,
            Step::Recover,
            Step::Review,
            Step::Again,
            Step::ShutDown,
        ])
    };
    rows.into_iter().map(scenario).collect()
}

/// The lie begins while requests are under way, and nobody has asked for a reset.
fn under_load() -> Vec<Scenario> {
    let rows = [
        ("fatal", lies::FATAL, "Fatal"),
        ("ready-lost", lies::NEVER_READY, "NotReady"),
        ("masked", Fault::Masked, "Removed"),
    ];
    let mut table = Vec::new();
    for (name, fault, told) in rows {
        for (work, mix, blocks) in super::WORK {
            let musts = [Must::Attach, Must::Tell(told), Must::Abort, Must::Reattach];
            let name = format!("registers/load/{name}/{work}");
            let scenario = Scenario::session(name, &musts)
                .plan(&[Mischief::always(fault).gate(Gate::IoCompletions(10))])
                .world(super::slow)
                .world(|options| super::work(options, mix, blocks));
            table.push(scenario);
        }
    }
    table
}

/// The lie begins when CC.SHN is set.
fn during_a_shutdown() -> Vec<Scenario> {
    let unclean = [Must::Attach, Must::Succeed, Must::Tell("is_clean: false"), Must::Strike(1)];
    let clean = [Must::Attach, Must::Succeed, Must::Tell("is_clean: true"), Must::Strike(1)];
    let removed = [Must::Attach, Must::Succeed, Must::Tell("Removed"), Must::Strike(1)];
    let rows = [
        ("stuck", lies::SHUTDOWN_STUCK, unclean),
        ("reserved", lies::SHUTDOWN_RESERVED, unclean),
        ("fatal", lies::FATAL, clean),
        ("never-not-ready", lies::NEVER_NOT_READY, unclean),
        ("never-ready", lies::NEVER_READY, clean),
        ("masked", Fault::Masked, removed),
        ("gone", Fault::Gone, removed),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, [Must; 4])| {
        Scenario::session(format!("registers/shutdown/{name}"), &musts)
            .plan(&[Mischief::always(fault).gate(Gate::Shutdowns(1))])
            .steps(&[
                Step::Attach,
                Step::Work,
                Step::Ask(Wish::ShutDown),
                Step::AwaitEnd,
                Step::Repent,
                Step::Recover,
                Step::Review,
                Step::Again,
                Step::ShutDown,
            ])
    };
    rows.into_iter().map(scenario).collect()
}

/// The lie is told a few times, and then the truth.
fn for_a_while() -> Vec<Scenario> {
    let mut table = Vec::new();
    for times in [1, 3, 10] {
        let fine = [Must::Attach, Must::Succeed, Must::Survive, Must::Strike(1)];
        for (name, fault) in
            [("never-ready", lies::NEVER_READY), ("never-not-ready", lies::NEVER_NOT_READY)]
        {
            let scenario = Scenario::session(format!("registers/while/{name}/{times}"), &fine);
            table.push(scenario.plan(&[Mischief::always(fault).times(times)]).steps(SESSION));
        }
        let name = format!("registers/while/masked/{times}");
        let musts = [Must::Refuse("all ones"), Must::Reattach];
        // One look is enough: nobody waits for a controller that is not there.
        let masked = Mischief::always(Fault::Masked).times(times);
        table.push(Scenario::session(name, &musts).plan(&[masked]));
    }
    table
}
