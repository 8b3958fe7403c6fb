//! `tenmil bind`: binds NVMe devices to vfio-pci.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tenmil_base::{Error, Span};
use tenmil_block::overwrite::{DeviceEdges, END_BYTES, probe_signatures};
use tenmil_block::uri::Uri;
use tenmil_linux::StepTiming;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::pci::{self, BindPlan, BindRequest, BoundDevice, DiskSignature, PciAddress};
use tenmil_linux::storage_file::read_first_and_last_bytes;

use super::write_stdout;
use tenmil_devices::pcie::PcieUri;
use tenmil_linux::storage_file::error_text;

/// Bind NVMe devices to vfio-pci, unless they are in use.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct BindArguments {
    /// PCI addresses, such as 0000:5e:00.0; either all of them are bound or none
    #[arg(value_name = "ADDRESS", required = true, num_args = 1..)]
    addresses: Vec<PciAddress>,

    /// Show what would be done and what prevents it; change nothing
    #[arg(long)]
    dry_run: bool,

    /// Owner of the VFIO device node, a user name or number [default: the user that invoked sudo]
    #[arg(long, value_name = "USER")]
    owner: Option<String>,

    /// Bind even if the disk with this serial number is in use; its users lose it
    #[arg(long, value_name = "SERIAL")]
    even_if_in_use: Vec<String>,

    /// Work without an IOMMU: the SSD and its driver can read and write all memory
    #[arg(long)]
    unsafe_no_iommu: bool,

    /// Afterwards attach each SSD, read its first block, and print the time of every step
    #[arg(long, conflicts_with = "dry_run")]
    r#try: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil list                                SSDs, and the processes that use them
  tenmil bind 0000:5e:00.0 --dry-run         the steps, or why it is refused
  sudo tenmil bind 0000:5e:00.0              bind it; the user of sudo becomes its owner
  sudo tenmil bind 0000:5e:00.0 --try        and measure the time until it responds
  sudo tenmil unbind 0000:5e:00.0            give it back

The SSD goes to the kernel's driver vfio-pci, which lets programs drive it; `pcie:ADDRESS` names it
then, as in `tenmil perf pcie:0000:5e:00.0`. docs/operator/bind-an-ssd.md lists the refusals.";

/// Runs `bind`, or prints the plan with `--dry-run`.
pub(super) fn run_bind(arguments: &BindArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let machine = KernelFiles::live_system();
    // With sudo, the invoking user becomes the owner of the device node.
    let sudo = std::env::var("SUDO_UID").ok().filter(|uid| uid != "0");
    let owner = arguments.owner.as_ref().or(sudo.as_ref());
    let owner = owner.map(|user| uid_of(&machine, user)).transpose()?;
    let terms = BindRequest {
        owner,
        no_iommu: arguments.unsafe_no_iommu,
        even_if_in_use: &arguments.even_if_in_use,
        signatures: &disk_signatures,
    };
    let mut addresses = arguments.addresses.clone();
    addresses.sort_unstable();
    addresses.dedup();
    if arguments.dry_run {
        let verdicts = pci::plan_bind(&machine, &addresses, &terms)?;
        let text = if arguments.json { plans_as_json(&verdicts) } else { plans_as_text(&verdicts) };
        write_stdout(out, &text)?;
        let first = verdicts.iter().flat_map(|verdict| &verdict.obstacles).next();
        let code = |obstacle: &pci::BindObstacle| ExitCode::from(obstacle.category().exit_code());
        return Ok(first.map_or(ExitCode::SUCCESS, code));
    }
    let bound = pci::bind_functions(&machine, &addresses, &terms)?;
    let tried = bound.iter().map(|one| arguments.r#try.then(|| read_first_block(one, arguments)));
    let tried: Vec<Option<TrialReadResult>> = tried.collect();
    let all = || bound.iter().zip(&tried);
    let text = if arguments.json { bound_as_json(all()) } else { bound_as_text(all()) };
    write_stdout(out, &text)?;
    // A failed trial is reported after the output, because the devices stay bound.
    let failed = tried.into_iter().flatten().find_map(Result::err);
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Steps up to the first block read, with their durations, or the error that ended them.
type TrialReadResult = Result<Vec<StepTiming>, Error>;

fn read_first_block(bound: &BoundDevice, arguments: &BindArguments) -> TrialReadResult {
    let (address, unsafely) = (bound.address, arguments.unsafe_no_iommu);
    let flag = if unsafely { "?unsafe-no-iommu=yes" } else { "" };
    let uri: Uri = format!("{}:{address}{flag}", PcieUri::SCHEME).parse()?;
    let driven = tenmil_devices::pcie::time_first_read(&PcieUri::from_uri(&uri)?)?;
    Ok(bound.timings.iter().cloned().chain(driven).collect())
}

#[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
fn milliseconds(span: Span) -> f64 {
    span.ns as f64 / 1e6
}

fn total_time(took: &[StepTiming]) -> Span {
    Span { ns: took.iter().map(|one| one.span.ns).sum() }
}

/// Signatures found on the disk or partition at `path`.
fn disk_signatures(path: &Path) -> Result<Vec<DiskSignature>, String> {
    let (head, tail, size_bytes) =
        read_first_and_last_bytes(path, END_BYTES).map_err(|error| error_text(&error))?;
    let found = probe_signatures(&DeviceEdges { head: &head, tail: &tail, size_bytes });
    let mark = |one: &tenmil_block::overwrite::Signature| DiskSignature {
        text: one.to_string(),
        is_member: one.is_array_member(),
    };
    Ok(found.iter().map(mark).collect())
}

fn uid_of(machine: &KernelFiles, user: &str) -> Result<u32, Error> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    // `name:password:uid:…` (passwd(5)).
    let users = machine.read_trimmed("etc/passwd").unwrap_or_default();
    let line = users.lines().find(|line| line.split(':').next() == Some(user));
    let number = line.and_then(|line| line.split(':').nth(2)?.parse().ok());
    number.ok_or_else(|| {
        Error::usage(format!("--owner {user}: no such user in /etc/passwd, expected one"))
            .with_hint("`id -u NAME` prints the number of a user, which --owner accepts too")
    })
}

fn plans_as_text(verdicts: &[BindPlan]) -> String {
    let mut text = String::new();
    for verdict in verdicts {
        let address = verdict.address;
        let current = verdict.function.as_ref().and_then(|function| function.driver.as_deref());
        let _ = match verdict.obstacles.len() {
            0 if verdict.steps.is_empty() => {
                writeln!(text, "{address}: has driver {} already; nothing is to be done", pci::VFIO)
            }
            0 => writeln!(
                text,
                "{address}: driver {} would become {}, by these steps",
                current.unwrap_or("none"),
                pci::VFIO
            ),
            _ => writeln!(text, "{address}: is not taken"),
        };
        for obstacle in &verdict.obstacles {
            let _ = writeln!(text, "  {obstacle}\n    {}", obstacle.fix());
        }
        if verdict.obstacles.is_empty() {
            for step in &verdict.steps {
                let _ = writeln!(text, "  {}", step.shell_command(address));
            }
        }
        verdict.notes.iter().for_each(|note| text += &format!("  note: {note}\n"));
    }
    text
}

fn plans_as_json(verdicts: &[BindPlan]) -> String {
    let verdicts: Vec<_> = verdicts
        .iter()
        .map(|verdict| {
            let obstacles = verdict.obstacles.iter().map(|one| {
                json!({
                    "found": one.to_string(),
                    "remedy": one.fix(),
                    "overridden_by_serial": one.is_overridden_by_serial(),
                })
            });
            let steps = verdict.steps.iter().map(|step| step.shell_command(verdict.address));
            json!({
                "address": verdict.address.to_string(),
                "driver": verdict.function.as_ref().and_then(|one| one.driver.as_deref()),
                "next_driver": pci::VFIO,
                "obstacles": obstacles.collect::<Vec<_>>(),
                "steps": steps.collect::<Vec<_>>(),
                "notes": verdict.notes,
            })
        })
        .collect();
    format!("{:#}\n", json!({ "dry_run": verdicts }))
}

fn bound_as_text<'a>(
    bound: impl Iterator<Item = (&'a BoundDevice, &'a Option<TrialReadResult>)>,
) -> String {
    let mut text = String::new();
    for (one, tried) in bound {
        let (address, driver) = (one.address, one.original_driver.as_deref().unwrap_or("none"));
        let _ = if one.is_new {
            writeln!(text, "{address}: bound to {}, before to {driver}", pci::VFIO)
        } else {
            writeln!(text, "{address}: is bound to {} already", pci::VFIO)
        };
        one.notes.iter().for_each(|note| text += &format!("  note: {note}\n"));
        let Some(Ok(took)) = tried else { continue };
        let _ = writeln!(
            text,
            "  its first block was read in {:.1} ms",
            milliseconds(total_time(took))
        );
        for StepTiming { step, span } in took {
            let _ = writeln!(text, "  {:>8.1} ms  {step}", milliseconds(*span));
        }
    }
    text
}

fn bound_as_json<'a>(
    bound: impl Iterator<Item = (&'a BoundDevice, &'a Option<TrialReadResult>)>,
) -> String {
    let steps = |took: &[StepTiming]| {
        let steps = took.iter().map(|one| json!({ "step": one.step, "ns": one.span.ns }));
        steps.collect::<Vec<_>>()
    };
    let bound: Vec<_> = bound
        .map(|(one, tried)| {
            let tried = tried.as_ref().map(|tried| match tried {
                Ok(took) => {
                    json!({ "first_block_ns": total_time(took).ns, "steps": steps(took) })
                }
                Err(refused) => json!({ "error": refused.text }),
            });
            json!({
                "address": one.address.to_string(),
                "former_driver": one.original_driver,
                "driver": pci::VFIO,
                "is_new": one.is_new,
                "notes": one.notes,
                "steps": steps(&one.timings),
                "tried": tried,
            })
        })
        .collect();
    format!("{:#}\n", json!({ "bound": bound }))
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::StepTiming;
    use tenmil_linux::kernel_files::KernelFiles;
    use tenmil_linux::pci::{BindObstacle, BindPlan, BindStep, BoundDevice, PciAddress};

    use super::{
        TrialReadResult, bound_as_json, bound_as_text, plans_as_json, plans_as_text, uid_of,
    };
    use tenmil_base::Error;

    fn test_address() -> PciAddress {
        "5e:00.0".parse().unwrap()
    }

    fn test_plan(obstacles: Vec<BindObstacle>, steps: Vec<BindStep>) -> BindPlan {
        let mut verdict = BindPlan::empty_plan(test_address());
        (verdict.obstacles, verdict.steps) = (obstacles, steps);
        verdict.notes.push("mind".into());
        verdict
    }

    #[test]
    fn dry_run_shows_steps_or_obstacles_with_their_fix() {
        let taken = test_plan(Vec::new(), vec![BindStep::Unbind { driver: "nvme".into() }]);
        let refused = test_plan(vec![BindObstacle::NoIommu], Vec::new());
        let text = plans_as_text(&[taken, refused, test_plan(Vec::new(), Vec::new())]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "0000:5e:00.0: driver none would become vfio-pci, by these steps");
        assert_eq!(lines[1], "  echo 0000:5e:00.0 > /sys/bus/pci/drivers/nvme/unbind");
        assert_eq!(lines[2], "  note: mind");
        assert_eq!(lines[3], "0000:5e:00.0: is not taken");
        assert_eq!(lines[4], "  it has no IOMMU group, expected an IOMMU that is on");
        assert!(lines[5].starts_with("    Switch on VT-d"), "{text}");
        assert_eq!(lines[7], "0000:5e:00.0: has driver vfio-pci already; nothing is to be done");
        let json = plans_as_json(&[test_plan(vec![BindObstacle::NoIommu], Vec::new())]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["dry_run"][0]["obstacles"][0]["overridden_by_serial"], false);
    }

    #[test]
    fn owner_is_a_number_or_a_known_user_name() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        let users = "root:x:0:0::/:/bin/sh\nann:x:1007:7::/:/bin/sh\n";
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(root.path().join("etc/passwd"))
            .and_then(|mut file| std::io::Write::write_all(&mut file, users.as_bytes()))
            .unwrap();
        let machine = KernelFiles::under_root(root.path());
        assert_eq!(uid_of(&machine, "ann"), Ok(1007));
        assert_eq!(uid_of(&machine, "12"), Ok(12));
        assert_eq!(
            uid_of(&machine, "bob").unwrap_err().text,
            "--owner bob: no such user in /etc/passwd, expected one"
        );
    }

    fn step_timing(step: &str, us: u64) -> StepTiming {
        StepTiming { step: step.to_owned(), span: Span::from_us(us) }
    }

    #[test]
    fn trial_read_is_reported_by_step_and_its_failure_in_json() {
        let bound = BoundDevice {
            address: test_address(),
            original_driver: Some("nvme".to_owned()),
            is_new: true,
            notes: Vec::new(),
            timings: vec![step_timing("unbind it", 1250)],
        };
        let text = |tried| bound_as_text([(&bound, &tried)].into_iter());
        let json = |tried| bound_as_json([(&bound, &tried)].into_iter());
        assert_eq!(text(None), "0000:5e:00.0: bound to vfio-pci, before to nvme\n");
        assert!(json(None).contains("\"ns\": 1250000") && json(None).contains("\"tried\": null"));
        let whole: fn() -> TrialReadResult =
            || Ok(vec![step_timing("unbind it", 1250), step_timing("read it", 300)]);
        let reported_values = text(Some(whole()));
        assert!(
            reported_values
                .ends_with("read in 1.6 ms\n       1.2 ms  unbind it\n       0.3 ms  read it\n"),
            "{reported_values}"
        );
        assert!(json(Some(whole())).contains("\"first_block_ns\": 1550000"));
        let failed = || Some(Err(Error::remote("it does not answer")));
        assert_eq!(text(failed()), text(None), "the error comes by itself");
        assert!(json(failed()).contains("\"error\": \"it does not answer\""));
    }
}
