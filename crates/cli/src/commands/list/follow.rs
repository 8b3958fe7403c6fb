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
use tenmil_linux::pci::{NvmeFunction, PciAddress};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::uevent::{Uevent, UeventListener, UeventResult};

use super::nvme_functions::{self, NvmeFunctionLine};
use crate::commands::write_stdout;

/// Change of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PciFunctionChange {
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
    functions: BTreeMap<PciAddress, NvmeFunction>,
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
pub(super) fn follow_functions(
    until: FollowLimit,
    is_json: bool,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let machine = |error| Error::environment(format!("listen to the kernel's messages: {error}"));
    // The socket is opened before the first read, so that no change in between is missed.
    let mut listener = UeventListener::new().map_err(machine)?;
    let watch = PollSet::new().map_err(machine)?;
    watch.add(&listener, 0, Interest { readable: true, writable: false }).map_err(machine)?;
    let clock = Clock::on_kernel_clock();
    let end = until.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = until.count.unwrap_or(u64::MAX);
    let (mut known, mut ready) = (KnownFunctions::default(), Vec::new());
    for (_, function) in known.update(NvmeFunction::all_nvme_functions(&KernelFiles::live_system()))
    {
        write_stdout(out, &change_line(clock.now(), PciFunctionChange::There, &function, is_json))?;
    }
    while left > 0 && clock.now() < end && !tenmil_linux::signal::is_stop_requested() {
        let wait = WAIT.min(end.since(clock.now()));
        watch.wait(Some(wait), &mut ready).map_err(machine)?;
        for (change, function) in known.handle_uevents(&mut listener).map_err(machine)? {
            if left > 0 {
                left -= 1;
                write_stdout(out, &change_line(clock.now(), change, &function, is_json))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl KnownFunctions {
    /// Handles pending uevents and returns the changes.
    fn handle_uevents(
        &mut self,
        listener: &mut UeventListener,
    ) -> std::io::Result<Vec<(PciFunctionChange, NvmeFunction)>> {
        let (mut changes, mut is_due) = (Vec::new(), false);
        for _ in 0..UEVENTS_MAX {
            let heard = listener.recv()?;
            if heard == UeventResult::WouldBlock {
                break;
            }
            is_due |= self.handle_uevent(heard, &mut changes);
        }
        if is_due {
            changes
                .extend(self.update(NvmeFunction::all_nvme_functions(&KernelFiles::live_system())));
        }
        Ok(changes)
    }

    /// Handles one uevent. Returns whether all functions have to be read again.
    fn handle_uevent(
        &mut self,
        heard: UeventResult<'_>,
        changes: &mut Vec<(PciFunctionChange, NvmeFunction)>,
    ) -> bool {
        match heard {
            UeventResult::WouldBlock => false,
            UeventResult::Overflow => true,
            UeventResult::Uevent(uevent) => {
                changes.extend(
                    self.removed_by(&uevent).map(|function| (PciFunctionChange::Removed, function)),
                );
                may_concern_nvme(&uevent)
            }
        }
    }

    /// The known function that a uevent reports as removed.
    fn removed_by(&mut self, uevent: &Uevent<'_>) -> Option<NvmeFunction> {
        if (uevent.subsystem, uevent.action) != ("pci", "remove") {
            return None;
        }
        self.functions.remove(&uevent.device_name().parse().ok()?)
    }

    /// Replaces the known functions by `found` and returns the differences.
    fn update(&mut self, found: Vec<NvmeFunction>) -> Vec<(PciFunctionChange, NvmeFunction)> {
        let found: BTreeMap<_, _> = found.into_iter().map(|one| (one.address, one)).collect();
        let before = std::mem::replace(&mut self.functions, found);
        let gone = before.values().filter(|one| !self.functions.contains_key(&one.address));
        let gone = gone.map(|one| (PciFunctionChange::Removed, one.clone()));
        let there = self.functions.values().filter_map(|one| match before.get(&one.address) {
            None => Some((PciFunctionChange::Added, one.clone())),
            Some(old) if compared_properties(old) != compared_properties(one) => {
                Some((PciFunctionChange::Changed, one.clone()))
            }
            Some(_) => None,
        });
        gone.chain(there).collect()
    }
}

/// Properties of a function whose change is reported.
fn compared_properties(function: &NvmeFunction) -> impl PartialEq + '_ {
    (&function.driver, &function.controller)
}

/// Whether a uevent may concern an NVMe function, its driver or its controller.
fn may_concern_nvme(uevent: &Uevent<'_>) -> bool {
    matches!(uevent.subsystem, "pci" | "nvme")
}

fn change_line(
    now: Instant,
    change: PciFunctionChange,
    function: &NvmeFunction,
    is_json: bool,
) -> String {
    if is_json {
        return format!("{}\n", change_json(now, change, function));
    }
    format!("{:<8}{}\n", change.text(), NvmeFunctionLine(function))
}

fn change_json(now: Instant, change: PciFunctionChange, function: &NvmeFunction) -> Value {
    json!({
        "event": change.text(),
        "time": utc_now().to_string(),
        "monotonic_ns": now.ns,
        "address": function.address.to_string(),
        "function": nvme_functions::function_json(function),
    })
}

impl PciFunctionChange {
    fn text(self) -> &'static str {
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
    use tenmil_linux::pci::{KernelController, NvmeFunction};
    use tenmil_linux::uevent::Uevent;

    use super::{KnownFunctions, PciFunctionChange, UeventResult, change_line};

    fn test_function(address: &str, driver: Option<&str>) -> NvmeFunction {
        NvmeFunction {
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

    fn change_texts(
        changes: Vec<(PciFunctionChange, NvmeFunction)>,
    ) -> Vec<(PciFunctionChange, String)> {
        changes.into_iter().map(|(change, one)| (change, one.address.to_string())).collect()
    }

    #[test]
    fn added_changed_and_removed_functions_are_reported_once() {
        let mut known = KnownFunctions::default();
        let (one, two) =
            (test_function("0000:01:00.0", Some("nvme")), test_function("0000:02:00.0", None));
        let changes = change_texts(known.update(vec![one.clone()]));
        assert_eq!(changes, [(PciFunctionChange::Added, "0000:01:00.0".to_owned())]);
        assert_eq!(known.update(vec![one.clone()]), []);
        let taken = test_function("0000:01:00.0", Some("vfio-pci"));
        let changes = change_texts(known.update(vec![taken.clone(), two.clone()]));
        assert_eq!(changes[0], (PciFunctionChange::Changed, "0000:01:00.0".to_owned()));
        assert_eq!(changes[1..], [(PciFunctionChange::Added, "0000:02:00.0".to_owned())]);
        let named = NvmeFunction { controller: Some(KernelController::default()), ..two.clone() };
        assert_eq!(change_texts(known.update(vec![taken, named]))[0].0, PciFunctionChange::Changed);
        let changes = change_texts(known.update(vec![two]));
        assert_eq!(changes[0], (PciFunctionChange::Removed, "0000:01:00.0".to_owned()));
    }

    #[test]
    fn removal_and_return_between_two_checks_are_both_reported() {
        let mut known = KnownFunctions::default();
        let one = test_function("0000:01:00.0", None);
        known.update(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:00:05.0/0000:01:00.0";
        let uevent = Uevent { action: "remove", path, subsystem: "pci" };
        assert_eq!(known.removed_by(&uevent), Some(one.clone()));
        assert_eq!(known.removed_by(&uevent), None, "it is not known any more");
        assert_eq!(change_texts(known.update(vec![one.clone()]))[0].0, PciFunctionChange::Added);
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
    fn lost_uevents_and_related_uevents_cause_a_rescan() {
        let (mut known, mut changes) = (KnownFunctions::default(), Vec::new());
        let one = test_function("0000:01:00.0", None);
        known.update(vec![one.clone()]);
        let path = "/devices/pci0000:00/0000:01:00.0";
        let uevent = |action, subsystem| UeventResult::Uevent(Uevent { action, path, subsystem });
        assert!(
            known.handle_uevent(UeventResult::Overflow, &mut changes),
            "it is unknown what has changed"
        );
        assert!(known.handle_uevent(uevent("add", "pci"), &mut changes));
        assert!(known.handle_uevent(uevent("change", "nvme"), &mut changes));
        assert!(!known.handle_uevent(uevent("remove", "net"), &mut changes));
        assert!(!known.handle_uevent(uevent("add", "block"), &mut changes));
        assert!(!known.handle_uevent(UeventResult::WouldBlock, &mut changes));
        assert_eq!(changes, []);
        assert!(known.handle_uevent(uevent("remove", "pci"), &mut changes));
        assert_eq!(changes, [(PciFunctionChange::Removed, one)]);
    }

    #[test]
    fn change_is_printed_on_one_line() {
        let one = test_function("0000:01:00.0", Some("nvme"));
        let text = change_line(Instant { ns: 7 }, PciFunctionChange::Added, &one, false);
        assert_eq!(text, "added   0000:01:00.0  1b36:0010, driver nvme, no IOMMU group\n");
        let text = change_line(Instant { ns: 7 }, PciFunctionChange::Removed, &one, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["event"], &json["monotonic_ns"]), (&"removed".into(), &7.into()));
        assert!(json["time"].as_str().unwrap().ends_with('Z'), "UTC");
        assert_eq!(json["function"]["driver"], "nvme");
        assert!(
            json["function"].get("used_by").is_none(),
            "users of a removed function are not looked up"
        );
        assert_eq!(text.lines().count(), 1);
    }
}
