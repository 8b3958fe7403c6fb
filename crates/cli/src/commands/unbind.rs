//! `tenmil unbind`: binds NVMe devices back to their former drivers.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::pci::{self, PciAddress, UnbindSelection};

use super::write_stdout;
use tenmil_base::Error;

/// Bind NVMe devices back to their former drivers, also after a crash.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct UnbindArguments {
    /// PCI addresses, such as 0000:5e:00.0
    #[arg(value_name = "ADDRESS", required_unless_present = "all", conflicts_with = "all")]
    addresses: Vec<PciAddress>,

    /// All devices that `tenmil bind` has bound since boot
    #[arg(long)]
    all: bool,

    /// Bind to this driver instead of the recorded one
    #[arg(long, value_name = "DRIVER", conflicts_with = "all")]
    to: Option<String>,

    /// Show what would be done; change nothing
    #[arg(long)]
    dry_run: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  sudo tenmil unbind --all                    every disk back to the driver that had it
  sudo tenmil unbind 0000:5e:00.0 --dry-run   the steps
  sudo tenmil unbind 0000:5e:00.0 --to nvme   one that another program has bound";

/// Runs `unbind`, or prints the plan with `--dry-run`.
pub(super) fn run_unbind(
    arguments: &UnbindArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let machine = KernelFiles::live_system();
    let mut addresses = arguments.addresses.clone();
    addresses.sort_unstable();
    addresses.dedup();
    let which = match &arguments.to {
        _ if arguments.all => UnbindSelection::All,
        Some(driver) => UnbindSelection::To(addresses, driver.clone()),
        None => UnbindSelection::These(addresses),
    };
    if arguments.dry_run {
        let plans = pci::plan_unbind(&machine, &which)?;
        let text = if arguments.json { plans_as_json(&plans) } else { plans_as_text(&plans) };
        write_stdout(out, &text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (given, error) = pci::unbind_functions(&machine, &which);
    let text = if arguments.json { unbound_as_json(&given) } else { unbound_as_text(&given) };
    write_stdout(out, &text)?;
    error?;
    if given.is_empty() && !arguments.json {
        write_stdout(out, NOTHING)?;
    }
    Ok(ExitCode::SUCCESS)
}

const NOTHING: &str = "no SSD is recorded as bound\n";

type UnbindPlan = (PciAddress, Vec<pci::BindStep>);

fn plans_as_text(plans: &[UnbindPlan]) -> String {
    let mut text = String::new();
    for (address, steps) in plans {
        let _ = writeln!(text, "{address}: would be given back by these steps");
        steps.iter().for_each(|step| text += &format!("  {}\n", step.shell_command(*address)));
    }
    if plans.is_empty() { NOTHING.into() } else { text }
}

fn plans_as_json(plans: &[UnbindPlan]) -> String {
    let plan = |(address, steps): &UnbindPlan| {
        let steps: Vec<String> = steps.iter().map(|step| step.shell_command(*address)).collect();
        json!({ "address": address.to_string(), "steps": steps })
    };
    format!("{:#}\n", json!({ "dry_run": plans.iter().map(plan).collect::<Vec<_>>() }))
}

fn unbound_as_text(given: &[PciAddress]) -> String {
    given.iter().map(|address| format!("{address}: given back\n")).collect()
}

fn unbound_as_json(given: &[PciAddress]) -> String {
    let given: Vec<String> = given.iter().map(ToString::to_string).collect();
    format!("{:#}\n", json!({ "given_back": given }))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::pci::BindStep;

    use super::{NOTHING, plans_as_text};

    #[test]
    fn dry_run_shows_the_unbind_steps() {
        let plans = [("5e:00.0".parse().unwrap(), vec![BindStep::RemoveRecord])];
        assert_eq!(
            plans_as_text(&plans),
            "0000:5e:00.0: would be given back by these steps\n  remove the record in /run/tenmil\n"
        );
        assert_eq!(plans_as_text(&[]), NOTHING);
    }
}
