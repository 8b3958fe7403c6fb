//! Completions.

use base::Span;
use crate::evil::{Fault, Invented, Mischief, Release};
use crate::scenario::{Must, Scenario};

/// Completions that lie.
pub(super) fn table() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, fault) in [
        ("duplicate", Fault::Duplicate),
        ("invent-outside", Fault::Invent(Invented::Outside)),
        ("invent-ended", Fault::Invent(Invented::Ended)),
        ("invent-in-flight", Fault::Invent(Invented::InFlight)),
        ("wrong-phase", Fault::WrongPhase),
        ("swallow", Fault::Swallow),
        ("hold-short", Fault::Hold(Release::After(Span::from_ms(50)))),
        ("hold-past", Fault::Hold(Release::After(Span::from_ms(120)))),
        ("hold-long", Fault::Hold(Release::After(Span::from_ms(10_000)))),
        ("hold-abort", Fault::Hold(Release::Aborted)),
        ("hold-reset", Fault::Hold(Release::Reset)),
        ("status", Fault::Status(0x281)),
        ("status-random", Fault::Status(0xffff)),
        ("result", Fault::Result(0xdead_beef)),
        ("head-1", Fault::Head(1)),
        ("head-far", Fault::Head(0x4000)),
        ("head-back", Fault::Head(0xffff)),
        ("queue-id", Fault::QueueId(7)),
        ("reserved", Fault::Reserved),
        ("flood", Fault::Flood),
    ] {
        for (often, skip, times) in [("once", 20, 1), ("thrice", 20, 3), ("always", 0, u32::MAX)] {
            table.push(Scenario::session(format!("completions/{name}/{often}"), &[Must::Strike(1)]).plan(&[Mischief::io(fault).skip(skip).times(times)]));
        }
    }
    table
}
