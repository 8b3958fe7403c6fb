//! `tenmil list --follow`: NVMe functions as they come, change and go.
//!
//! The kernel's messages are hints. After each that may matter, and when some were lost, all
//! functions are looked at anew and what differs is told; one that goes and comes back before that
//! look is told of twice, because the message says that it went.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use base::{Instant, Span};
use host::Clock;
use host::machine::Machine;
use host::pci::{Address, Function};
use host::uevent::{Heard, Listener, Uevent};
use host::watch::{Interest, Watch};
use serde_json::{Value, json};

use super::functions::{self, Headline};
use crate::Refused;
use crate::cli::write_out;

/// How a function differs from what was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// It was there when we began.
    There,
    Came,
    /// Its driver or its controller is another one, or is in another state.
    Changed,
    Gone,
}

/// What is known of the functions of this machine.
#[derive(Debug, Default)]
struct Known {
    functions: BTreeMap<Address, Function>,
}

/// What ends it, beside Ctrl-C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until {
    pub(super) count: Option<u64>,
    pub(super) time: Option<Span>,
}

/// How long one wait lasts; between two, Ctrl-C is looked at.
const WAIT: Span = Span::from_ms(200);
/// As many messages are taken before what they say is printed.
const HEARD_MAX: usize = 1024;

/// Prints what is there, and then what happens.
pub(super) fn run(until: Until, is_json: bool, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let machine = |error| Refused::machine(format!("listen to the kernel's messages: {error}"));
    // It listens before it looks: what happens in between is heard.
    let mut listener = Listener::new().map_err(machine)?;
    let watch = Watch::new().map_err(machine)?;
    watch.add(&listener, 0, Interest { readable: true, writable: false }).map_err(machine)?;
    let clock = Clock::kernel();
    let end = until.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = until.count.unwrap_or(u64::MAX);
    let (mut known, mut ready) = (Known::default(), Vec::new());
    for (_, function) in known.look(Function::all(&Machine::this())) {
        write_out(out, &line(clock.now(), Change::There, &function, is_json))?;
    }
    while left > 0 && clock.now() < end && !host::signal::interrupted() {
        let wait = WAIT.min(end.since(clock.now()));
        watch.wait(Some(wait), &mut ready).map_err(machine)?;
        for (change, function) in known.listen(&mut listener).map_err(machine)? {
            if left > 0 {
                left -= 1;
                write_out(out, &line(clock.now(), change, &function, is_json))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Known {
    /// Takes what the kernel has said, and tells what is different now.
    fn listen(&mut self, listener: &mut Listener) -> std::io::Result<Vec<(Change, Function)>> {
        let (mut told, mut is_due) = (Vec::new(), false);
        for _ in 0..HEARD_MAX {
            let heard = listener.hear()?;
            if heard == Heard::Nothing {
                break;
            }
            is_due |= self.take(heard, &mut told);
        }
        if is_due {
            told.extend(self.look(Function::all(&Machine::this())));
        }
        Ok(told)
    }

    /// Takes one thing that was heard. True if all functions are to be looked at anew.
    fn take(&mut self, heard: Heard<'_>, told: &mut Vec<(Change, Function)>) -> bool {
        match heard {
            Heard::Nothing => false,
            Heard::Lost => true,
            Heard::Uevent(uevent) => {
                told.extend(self.hear(&uevent).map(|function| (Change::Gone, function)));
                matters(&uevent)
            }
        }
    }

    /// The function that a message says is gone, if it was known.
    fn hear(&mut self, uevent: &Uevent<'_>) -> Option<Function> {
        if (uevent.subsystem, uevent.action) != ("pci", "remove") {
            return None;
        }
        self.functions.remove(&uevent.name().parse().ok()?)
    }

    /// What differs from `found`, which is known from now on.
    fn look(&mut self, found: Vec<Function>) -> Vec<(Change, Function)> {
        let found: BTreeMap<_, _> = found.into_iter().map(|one| (one.address, one)).collect();
        let before = std::mem::replace(&mut self.functions, found);
        let gone = before.values().filter(|one| !self.functions.contains_key(&one.address));
        let gone = gone.map(|one| (Change::Gone, one.clone()));
        let there = self.functions.values().filter_map(|one| match before.get(&one.address) {
            None => Some((Change::Came, one.clone())),
            Some(old) if state(old) != state(one) => Some((Change::Changed, one.clone())),
            Some(_) => None,
        });
        gone.chain(there).collect()
    }
}

/// What of a function is worth a line when it becomes something else.
fn state(function: &Function) -> impl PartialEq + '_ {
    (&function.driver, &function.controller)
}

/// Whether a message may be about an NVMe function, its driver or its controller.
fn matters(uevent: &Uevent<'_>) -> bool {
    matches!(uevent.subsystem, "pci" | "nvme")
}

fn line(now: Instant, change: Change, function: &Function, is_json: bool) -> String {
    if is_json {
        return format!("{}\n", as_json(now, change, function));
    }
    format!("{:<8}{}\n", change.word(), Headline(function))
}

fn as_json(now: Instant, change: Change, function: &Function) -> Value {
    json!({
        "event": change.word(),
        "at_ns": now.ns,
        "address": function.address.to_string(),
        "function": functions::as_json(function),
    })
}

impl Change {
    fn word(self) -> &'static str {
        match self {
            Self::There => "there",
            Self::Came => "came",
            Self::Changed => "changed",
            Self::Gone => "gone",
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Instant;
    use host::pci::{Controller, Function};
    use host::uevent::Uevent;

    use super::{Change, Heard, Known, line};

    fn function(address: &str, driver: Option<&str>) -> Function {
        Function {
            address: address.parse().unwrap(),
            vendor: 0x1b36,
            device: 0x10,
            driver: driver.map(str::to_owned),
            driver_override: None,
            group: None,
            numa_node: None,
            virtual_functions: 0,
            controller: None,
            disks: Vec::new(),
        }
    }

    fn changes(told: Vec<(Change, Function)>) -> Vec<(Change, String)> {
        told.into_iter().map(|(change, one)| (change, one.address.to_string())).collect()
    }

    #[test]
    fn what_comes_changes_and_goes_is_told_once() {
        let mut known = Known::default();
        let (one, two) = (function("0000:01:00.0", Some("nvme")), function("0000:02:00.0", None));
        let told = changes(known.look(vec![one.clone()]));
        assert_eq!(told, [(Change::Came, "0000:01:00.0".to_owned())]);
        assert_eq!(known.look(vec![one.clone()]), []);
        let taken = function("0000:01:00.0", Some("vfio-pci"));
        let told = changes(known.look(vec![taken.clone(), two.clone()]));
        assert_eq!(told[0], (Change::Changed, "0000:01:00.0".to_owned()));
        assert_eq!(told[1..], [(Change::Came, "0000:02:00.0".to_owned())]);
        let named = Function { controller: Some(Controller::default()), ..two.clone() };
        assert_eq!(changes(known.look(vec![taken, named]))[0].0, Change::Changed);
        let told = changes(known.look(vec![two]));
        assert_eq!(told[0], (Change::Gone, "0000:01:00.0".to_owned()));
    }

    #[test]
    fn one_that_goes_and_comes_back_between_two_looks_is_told_of_twice() {
        let mut known = Known::default();
        let one = function("0000:01:00.0", None);
        known.look(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:00:05.0/0000:01:00.0";
        let uevent = Uevent { action: "remove", path, subsystem: "pci" };
        assert_eq!(known.hear(&uevent), Some(one.clone()));
        assert_eq!(known.hear(&uevent), None, "it is not known any more");
        assert_eq!(changes(known.look(vec![one.clone()]))[0].0, Change::Came);
        for other in [
            Uevent { action: "unbind", ..uevent },
            Uevent { subsystem: "net", ..uevent },
            Uevent { path: "/devices/pci0000:00/0000:00:05.0", ..uevent },
            Uevent { path: "/devices/pci0000:00/what", ..uevent },
        ] {
            assert_eq!(known.hear(&other), None, "{other:?}");
        }
    }

    #[test]
    fn what_was_lost_and_what_is_about_functions_and_controllers_is_looked_after() {
        let (mut known, mut told) = (Known::default(), Vec::new());
        let one = function("0000:01:00.0", None);
        known.look(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:01:00.0";
        let uevent = |action, subsystem| Heard::Uevent(Uevent { action, path, subsystem });
        assert!(known.take(Heard::Lost, &mut told), "nobody knows what has changed");
        assert!(known.take(uevent("add", "pci"), &mut told));
        assert!(known.take(uevent("change", "nvme"), &mut told));
        assert!(!known.take(uevent("remove", "net"), &mut told));
        assert!(!known.take(uevent("add", "block"), &mut told));
        assert!(!known.take(Heard::Nothing, &mut told));
        assert_eq!(told, []);
        assert!(known.take(uevent("remove", "pci"), &mut told));
        assert_eq!(told, [(Change::Gone, one)]);
    }

    #[test]
    fn a_change_is_one_line() {
        let one = function("0000:01:00.0", Some("nvme"));
        let text = line(Instant { ns: 7 }, Change::Came, &one, false);
        assert_eq!(text, "came    0000:01:00.0  1b36:0010, driver nvme, no IOMMU group\n");
        let text = line(Instant { ns: 7 }, Change::Gone, &one, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["event"], &json["at_ns"]), (&"gone".into(), &7.into()));
        assert_eq!(json["function"]["driver"], "nvme");
        assert!(json["function"].get("used_by").is_none(), "nobody looked who uses it");
        assert_eq!(text.lines().count(), 1);
    }
}
