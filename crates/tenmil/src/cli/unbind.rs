//! `tenmil unbind`.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use host::machine::Machine;
use host::pci::{self, Address, Which};
use serde_json::json;

use super::write_out;
use crate::Refused;

/// Give SSDs back to the drivers that had them, also after a crash.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct UnbindArguments {
    /// Where they sit, such as 0000:5e:00.0
    #[arg(value_name = "ADDRESS", required_unless_present = "all", conflicts_with = "all")]
    addresses: Vec<Address>,

    /// All that `tenmil bind` has taken since the machine started
    #[arg(long)]
    all: bool,

    /// Give them to this driver, whatever is recorded, or if nothing is
    #[arg(long, value_name = "DRIVER", conflicts_with = "all")]
    to: Option<String>,

    /// Say what would be done; change nothing
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

/// Gives back, or says what would be done.
pub(super) fn run(arguments: &UnbindArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let machine = Machine::this();
    let mut addresses = arguments.addresses.clone();
    addresses.sort();
    addresses.dedup();
    let which = match &arguments.to {
        _ if arguments.all => Which::All,
        Some(driver) => Which::To(addresses, driver.clone()),
        None => Which::These(addresses),
    };
    if arguments.dry_run {
        let plans = pci::plan_back(&machine, &which)?;
        let text = if arguments.json { plans_as_json(&plans) } else { plans_as_text(&plans) };
        write_out(out, &text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (given, error) = pci::unbind(&machine, &which);
    let text = if arguments.json { given_as_json(&given) } else { given_as_text(&given) };
    write_out(out, &text)?;
    error?;
    if given.is_empty() && !arguments.json {
        write_out(out, NOTHING)?;
    }
    Ok(ExitCode::SUCCESS)
}

const NOTHING: &str = "no SSD is recorded as bound\n";

type Plan = (Address, Vec<pci::Step>);

fn plans_as_text(plans: &[Plan]) -> String {
    let mut text = String::new();
    for (address, steps) in plans {
        let _ = writeln!(text, "{address}: would be given back by these steps");
        steps.iter().for_each(|step| text += &format!("  {}\n", step.shown(*address)));
    }
    if plans.is_empty() { NOTHING.into() } else { text }
}

fn plans_as_json(plans: &[Plan]) -> String {
    let plan = |(address, steps): &Plan| {
        let steps: Vec<String> = steps.iter().map(|step| step.shown(*address)).collect();
        json!({ "address": address.to_string(), "steps": steps })
    };
    format!("{:#}\n", json!({ "dry_run": plans.iter().map(plan).collect::<Vec<_>>() }))
}

fn given_as_text(given: &[Address]) -> String {
    given.iter().map(|address| format!("{address}: given back\n")).collect()
}

fn given_as_json(given: &[Address]) -> String {
    let given: Vec<String> = given.iter().map(ToString::to_string).collect();
    format!("{:#}\n", json!({ "given_back": given }))
}

#[cfg(test)]
mod tests {
    use host::pci::Step;

    use super::{NOTHING, plans_as_text};

    #[test]
    fn a_dry_run_shows_the_steps() {
        let plans = [("5e:00.0".parse().unwrap(), vec![Step::Forget])];
        assert_eq!(
            plans_as_text(&plans),
            "0000:5e:00.0: would be given back by these steps\n  remove the record in /run/tenmil\n"
        );
        assert_eq!(plans_as_text(&[]), NOTHING);
    }
}
