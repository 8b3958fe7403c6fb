//! `tenmil list --follow`: NVMe functions as they are added, changed and removed.
//!
//! Kernel uevents are hints only. After each relevant one, and when some were lost, all functions are
//! read again and the differences are printed. A function that is removed and added again before that
//! is reported twice, because the removal is taken from the uevent itself.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use serde_json::{Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::clock::utc_now;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::pci::{Address, Function};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::uevent::{Listener, Uevent, UeventResult};

use super::functions::{self, FunctionLine};
use crate::commands::write_out;

/// Change of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FunctionChange {
    /// Present at the start.
    There,
    Added,
    /// Its driver, its controller or the state of the controller has changed.
    Changed,
    Removed,
}

/// Last known functions of this machine.
#[derive(Debug, Default)]
struct KnownFunctions {
    functions: BTreeMap<Address, Function>,
}

/// Limits after which the command ends, besides Ctrl-C.
#[derive(Clone, Copy, Debug)]
pub(super) struct FollowLimit {
    pub(super) count: Option<u64>,
    pub(super) time: Option<Span>,
}

/// Longest wait for a uevent; Ctrl-C is checked between two waits.
const WAIT: Span = Span::from_ms(200);
/// Maximum number of uevents handled before changes are printed.
const UEVENTS_MAX: usize = 1024;

/// Prints the present functions, then the changes.
pub(super) fn run(
    until: FollowLimit,
    is_json: bool,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::catch_interrupts()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let machine = |error| Error::environment(format!("listen to the kernel's messages: {error}"));
    // The socket is opened before the first read, so that no change in between is missed.
    let mut listener = Listener::new().map_err(machine)?;
    let watch = PollSet::new().map_err(machine)?;
    watch.add(&listener, 0, Interest { readable: true, writable: false }).map_err(machine)?;
    let clock = Clock::kernel();
    let end = until.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = until.count.unwrap_or(u64::MAX);
    let (mut known, mut ready) = (KnownFunctions::default(), Vec::new());
    for (_, function) in known.update(Function::all(&KernelFiles::live())) {
        write_out(out, &line(clock.now(), FunctionChange::There, &function, is_json))?;
    }
    while left > 0 && clock.now() < end && !tenmil_linux::signal::interrupted() {
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

impl KnownFunctions {
    /// Handles pending uevents and returns the changes.
    fn listen(
        &mut self,
        listener: &mut Listener,
    ) -> std::io::Result<Vec<(FunctionChange, Function)>> {
        let (mut changes, mut is_due) = (Vec::new(), false);
        for _ in 0..UEVENTS_MAX {
            let heard = listener.recv()?;
            if heard == UeventResult::WouldBlock {
                break;
            }
            is_due |= self.take(heard, &mut changes);
        }
        if is_due {
            changes.extend(self.update(Function::all(&KernelFiles::live())));
        }
        Ok(changes)
    }

    /// Handles one uevent. Returns whether all functions have to be read again.
    fn take(
        &mut self,
        heard: UeventResult<'_>,
        changes: &mut Vec<(FunctionChange, Function)>,
    ) -> bool {
        match heard {
            UeventResult::WouldBlock => false,
            UeventResult::Overflow => true,
            UeventResult::Uevent(uevent) => {
                changes.extend(
                    self.removed_by(&uevent).map(|function| (FunctionChange::Removed, function)),
                );
                matters(&uevent)
            }
        }
    }

    /// The known function that a uevent reports as removed.
    fn removed_by(&mut self, uevent: &Uevent<'_>) -> Option<Function> {
        if (uevent.subsystem, uevent.action) != ("pci", "remove") {
            return None;
        }
        self.functions.remove(&uevent.name().parse().ok()?)
    }

    /// Replaces the known functions by `found` and returns the differences.
    fn update(&mut self, found: Vec<Function>) -> Vec<(FunctionChange, Function)> {
        let found: BTreeMap<_, _> = found.into_iter().map(|one| (one.address, one)).collect();
        let before = std::mem::replace(&mut self.functions, found);
        let gone = before.values().filter(|one| !self.functions.contains_key(&one.address));
        let gone = gone.map(|one| (FunctionChange::Removed, one.clone()));
        let there = self.functions.values().filter_map(|one| match before.get(&one.address) {
            None => Some((FunctionChange::Added, one.clone())),
            Some(old) if state(old) != state(one) => Some((FunctionChange::Changed, one.clone())),
            Some(_) => None,
        });
        gone.chain(there).collect()
    }
}

/// Properties of a function whose change is reported.
fn state(function: &Function) -> impl PartialEq + '_ {
    (&function.driver, &function.controller)
}

/// Whether a uevent may concern an NVMe function, its driver or its controller.
fn matters(uevent: &Uevent<'_>) -> bool {
    matches!(uevent.subsystem, "pci" | "nvme")
}

fn line(now: Instant, change: FunctionChange, function: &Function, is_json: bool) -> String {
    if is_json {
        return format!("{}\n", as_json(now, change, function));
    }
    format!("{:<8}{}\n", change.word(), FunctionLine(function))
}

fn as_json(now: Instant, change: FunctionChange, function: &Function) -> Value {
    json!({
        "event": change.word(),
        "time": utc_now().to_string(),
        "monotonic_ns": now.ns,
        "address": function.address.to_string(),
        "function": functions::as_json(function),
    })
}

impl FunctionChange {
    fn word(self) -> &'static str {
        match self {
            Self::There => "present",
            Self::Added => "added",
            Self::Changed => "changed",
            Self::Removed => "removed",
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;
    use tenmil_linux::pci::{Controller, Function};
    use tenmil_linux::uevent::Uevent;

    use super::{FunctionChange, KnownFunctions, UeventResult, line};

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

    fn described(changes: Vec<(FunctionChange, Function)>) -> Vec<(FunctionChange, String)> {
        changes.into_iter().map(|(change, one)| (change, one.address.to_string())).collect()
    }

    #[test]
    fn what_comes_changes_and_goes_is_told_once() {
        let mut known = KnownFunctions::default();
        let (one, two) = (function("0000:01:00.0", Some("nvme")), function("0000:02:00.0", None));
        let changes = described(known.update(vec![one.clone()]));
        assert_eq!(changes, [(FunctionChange::Added, "0000:01:00.0".to_owned())]);
        assert_eq!(known.update(vec![one.clone()]), []);
        let taken = function("0000:01:00.0", Some("vfio-pci"));
        let changes = described(known.update(vec![taken.clone(), two.clone()]));
        assert_eq!(changes[0], (FunctionChange::Changed, "0000:01:00.0".to_owned()));
        assert_eq!(changes[1..], [(FunctionChange::Added, "0000:02:00.0".to_owned())]);
        let named = Function { controller: Some(Controller::default()), ..two.clone() };
        assert_eq!(described(known.update(vec![taken, named]))[0].0, FunctionChange::Changed);
        let changes = described(known.update(vec![two]));
        assert_eq!(changes[0], (FunctionChange::Removed, "0000:01:00.0".to_owned()));
    }

    #[test]
    fn one_that_goes_and_comes_back_between_two_looks_is_told_of_twice() {
        let mut known = KnownFunctions::default();
        let one = function("0000:01:00.0", None);
        known.update(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:00:05.0/0000:01:00.0";
        let uevent = Uevent { action: "remove", path, subsystem: "pci" };
        assert_eq!(known.removed_by(&uevent), Some(one.clone()));
        assert_eq!(known.removed_by(&uevent), None, "it is not known any more");
        assert_eq!(described(known.update(vec![one.clone()]))[0].0, FunctionChange::Added);
        for other in [
            Uevent { action: "unbind", ..uevent },
            Uevent { subsystem: "net", ..uevent },
            Uevent { path: "/devices/pci0000:00/0000:00:05.0", ..uevent },
            Uevent { path: "/devices/pci0000:00/what", ..uevent },
        ] {
            assert_eq!(known.removed_by(&other), None, "{other:?}");
        }
    }

    #[test]
    fn what_was_lost_and_what_is_about_functions_and_controllers_is_looked_after() {
        let (mut known, mut changes) = (KnownFunctions::default(), Vec::new());
        let one = function("0000:01:00.0", None);
        known.update(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:01:00.0";
        let uevent = |action, subsystem| UeventResult::Uevent(Uevent { action, path, subsystem });
        assert!(known.take(UeventResult::Overflow, &mut changes), "nobody knows what has changed");
        assert!(known.take(uevent("add", "pci"), &mut changes));
        assert!(known.take(uevent("change", "nvme"), &mut changes));
        assert!(!known.take(uevent("remove", "net"), &mut changes));
        assert!(!known.take(uevent("add", "block"), &mut changes));
        assert!(!known.take(UeventResult::WouldBlock, &mut changes));
        assert_eq!(changes, []);
        assert!(known.take(uevent("remove", "pci"), &mut changes));
        assert_eq!(changes, [(FunctionChange::Removed, one)]);
    }

    #[test]
    fn a_change_is_one_line() {
        let one = function("0000:01:00.0", Some("nvme"));
        let text = line(Instant { ns: 7 }, FunctionChange::Added, &one, false);
        assert_eq!(text, "added   0000:01:00.0  1b36:0010, driver nvme, no IOMMU group\n");
        let text = line(Instant { ns: 7 }, FunctionChange::Removed, &one, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["event"], &json["monotonic_ns"]), (&"removed".into(), &7.into()));
        assert!(json["time"].as_str().unwrap().ends_with('Z'), "UTC");
        assert_eq!(json["function"]["driver"], "nvme");
        assert!(json["function"].get("used_by").is_none(), "nobody looked who uses it");
        assert_eq!(text.lines().count(), 1);
    }
}
