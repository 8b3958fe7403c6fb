//! Registers that lie.

use crate::evil::{Fault, Gate, Mischief, lies};
use crate::scenario::{Must, Scenario};

/// Lies told from the first look on.
pub(super) fn table() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, fault) in [
        ("never-ready", lies::NEVER_READY),
        ("never-not-ready", lies::NEVER_NOT_READY),
        ("fatal", lies::FATAL),
        ("shutdown-stuck", lies::SHUTDOWN_STUCK),
        ("shutdown-reserved", lies::SHUTDOWN_RESERVED),
        ("status-reserved", lies::STATUS_RESERVED),
        ("no-entries", lies::NO_ENTRIES),
        ("two-entries", lies::TWO_ENTRIES),
        ("no-time", lies::NO_TIME),
        ("stride-max", lies::STRIDE_MAX),
        ("no-command-set", lies::NO_COMMAND_SET),
        ("large-pages", lies::LARGE_PAGES),
        ("pages-backwards", lies::PAGES_BACKWARDS),
        ("cap-zero", lies::CAP_ZERO),
        ("version-zero", lies::VERSION_ZERO),
        ("version-high", lies::VERSION_HIGH),
        ("crto-zero", lies::CRTO_ZERO),
        ("gone", Fault::Gone),
        ("masked", Fault::Masked),
    ] {
        for (moment, gate) in [
            ("start", Gate::Always),
            ("io", Gate::IoCompletions(20)),
        ] {
            table.push(Scenario::session(format!("registers/{name}/{moment}"), &[Must::Strike(1)]).plan(&[Mischief::always(fault).gate(gate)]));
        }
    }
    table
}
