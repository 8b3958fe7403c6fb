//! `cargo xtask lab`: interoperability tests with real kernels, in QEMU guests without hardware
//! acceleration.
//!
//! ```text
//!   parts: kernel and modules · busybox, fio, nvme · static tenmil ──▶ archive ──▶ initramfs
//!                                                                                    │
//!   scenario: guest script, devices, time limit ──▶ guest: QEMU, console ◀───────────┘
//!                                                      └──▶ checks ──▶ report
//! ```
//!
//! All files are in `target/lab`, with the console log of each guest. A guest needs no network, no disk
//! and no privileges on the host.

mod check_totals;
mod cpio_archive;
mod guest_console;
mod guest_images;
mod qemu_guest;
mod qemu_monitor;
mod scenario;

use std::path::{Path, PathBuf};
use std::time::Instant;

use check_totals::{CheckTotals, ScenarioError};
use guest_console::{CheckResult, CheckStatus};
use guest_images::GuestImages;
use qemu_guest::VmExit;
use scenario::{LabScenario, SCENARIOS};

/// Directory of all files.
const ROOM: &str = "target/lab";
/// Maximum number of boot attempts if a guest ends before its script begins. QEMU's multi-threaded
/// emulation may lose a CPU while the kernel patches its own code, which is not what is tested.
const BOOTS_MAX: u32 = 3;

/// Options of `cargo xtask lab`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask lab                 the short lab: some of one scenario of each kind
  cargo xtask lab --all           every scenario, whole
  cargo xtask lab linux-target    that one
  cargo xtask lab --short pcie    that one as the short lab has it
  cargo xtask lab --list          what there is")]
pub(crate) struct LabOptions {
    /// Scenarios, by name; without any, the short run
    names: Vec<String>,
    /// Run all scenarios
    #[arg(long, conflicts_with = "names")]
    all: bool,
    /// Run the short variant of the named scenarios
    #[arg(long, requires = "names")]
    short: bool,
    /// List the scenarios and exit
    #[arg(long)]
    list: bool,
    /// Multiply the time limits, for a busy machine
    #[arg(long, value_name = "TIMES", default_value_t = 1)]
    patience: u64,
    /// Use this program instead of building a static tenmil
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Use this program for the scenarios with TLS, if that of --binary was built without it
    #[arg(long, value_name = "PATH", requires = "binary")]
    secure_binary: Option<PathBuf>,
    /// Debian suite of the kernel, if a scenario names no other
    #[arg(long, default_value = "trixie")]
    suite: String,
}

/// Runs the selected scenarios in turn; returns true if every check passed.
pub(crate) fn run_lab(options: &LabOptions) -> Result<bool, String> {
    if options.list {
        for scenario in &SCENARIOS {
            let short = scenario.shortened().map(|short| short.seconds_max);
            let which = short.map_or(String::new(), |most| format!(" (short: {most} s at most)"));
            let (name, kind) = (scenario.name, scenario.kind.name());
            println!("{name:<16} {kind:<12} {}{which}", scenario.about);
        }
        return Ok(true);
    }
    let mut chosen = select_scenarios(options)?;
    for scenario in &mut chosen {
        scenario.seconds_max = scenario.seconds_max.saturating_mul(options.patience.max(1));
    }
    let room = Path::new(ROOM);
    std::fs::create_dir_all(room).map_err(|why| format!("make {ROOM}: {why}"))?;
    let room = room.canonicalize().map_err(|why| format!("find {ROOM}: {why}"))?;
    let tenmil = (options.binary.as_deref(), options.secure_binary.as_deref());
    let mut parts = match GuestImages::prepare(&room, &options.suite, tenmil) {
        Ok(parts) => parts,
        Err(ScenarioError::Unavailable(why)) => return Err(why),
        Err(ScenarioError::Failed(why)) => {
            println!("lab: {why}");
            return Ok(false);
        }
    };
    println!("lab: {}", parts.tool_versions());
    let tally = run_scenarios(&chosen, &mut |scenario, tally| {
        run_scenario(scenario, &mut parts, &room, tally)
    });
    println!("\nlab: {tally}");
    tally.verdict()
}

/// Runs one scenario after the other, whatever the results of the earlier ones.
fn run_scenarios(
    chosen: &[LabScenario],
    boot: &mut dyn FnMut(&LabScenario, &mut CheckTotals) -> Result<(), ScenarioError>,
) -> CheckTotals {
    let mut tally = CheckTotals::default();
    for scenario in chosen {
        if let Err(trouble) = boot(scenario, &mut tally) {
            let check = trouble.into_check_result(scenario.name);
            println!("  {check}");
            tally.count_check(&check);
        }
    }
    tally
}

fn select_scenarios(options: &LabOptions) -> Result<Vec<LabScenario>, String> {
    if options.all {
        return Ok(SCENARIOS.to_vec());
    }
    if options.names.is_empty() {
        return Ok(SCENARIOS.iter().filter_map(|known| known.shortened()).collect());
    }
    let find = |name: &String| {
        let found = SCENARIOS.iter().find(|known| known.name == name).ok_or_else(|| {
            let known: Vec<_> = SCENARIOS.iter().map(|known| known.name).collect();
            format!("scenario '{name}': none has that name, expected one of {}", known.join(", "))
        })?;
        if !options.short {
            return Ok(*found);
        }
        found.shortened().ok_or_else(|| format!("scenario '{name}': the short lab is without it"))
    };
    options.names.iter().map(find).collect()
}

fn run_scenario(
    scenario: &LabScenario,
    parts: &mut GuestImages,
    room: &Path,
    whole: &mut CheckTotals,
) -> Result<(), ScenarioError> {
    println!("\nlab {}: {}", scenario.name, scenario.about);
    let image = parts.image_of_scenario(scenario)?;
    let begun = Instant::now();
    let mut tally = CheckTotals::default();
    let mut boots_left = BOOTS_MAX;
    let end = loop {
        boots_left -= 1;
        let end = qemu_guest::run_guest(scenario, &image, room, &mut |check| {
            println!("  {check}");
            tally.count_check(check);
        });
        if end != Ok(VmExit::Crashed) || tally.has_any() || boots_left == 0 {
            break end;
        }
        println!("  note: the guest's kernel has not come up, and is started once more");
    };
    // Checks made before an error count, too.
    whole.add_totals(tally);
    if let Some(why) = end?.failure_text(scenario) {
        let check = CheckResult { verdict: CheckStatus::Failed, what: why };
        println!("  {check}");
        whole.count_check(&check);
    }
    let seconds = begun.elapsed().as_secs();
    println!(
        "  {seconds} s of at most {}, console in {ROOM}/{}.log",
        scenario.seconds_max, scenario.name
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_component_skips_only_its_scenarios_and_failures_are_kept() {
        let chosen = &SCENARIOS[..4];
        let mut begun = 0;
        let tally = run_scenarios(chosen, &mut |_, tally| {
            begun += 1;
            match begun {
                1 => {
                    tally.passed += 2;
                    Err(ScenarioError::Failed("tenmil is not ready".to_owned()))
                }
                2 => Err(ScenarioError::Unavailable("no mirror".to_owned())),
                3 => Err("no module".to_owned().into()),
                _ => {
                    tally.passed += 1;
                    Ok(())
                }
            }
        });
        assert_eq!(tally, CheckTotals { passed: 3, failed: 1, skipped: 2 });
        assert_eq!(tally.verdict(), Ok(false));
        let nothing = run_scenarios(chosen, &mut |_, _| {
            Err(ScenarioError::Unavailable("no mirror".to_owned()))
        });
        assert_eq!(nothing, CheckTotals { skipped: 4, ..CheckTotals::default() });
        assert!(nothing.verdict().is_err());
    }
}
