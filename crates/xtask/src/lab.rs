//! Real kernels without hardware: Linux under QEMU's emulation, with our binary in its initramfs.
//!
//! ```text
//!   parts: kernel and modules · busybox, fio, nvme · static tenmil ──▶ archive ──▶ initramfs
//!                                                                                    │
//!   scenario: a script in the guest, devices, a limit ──▶ guest: QEMU, console ◀─────┘
//!                                                           └──▶ checks ──▶ report
//! ```
//!
//! Everything lies in `target/lab`; the console of each guest is kept there. A guest needs no
//! network and no disk, and no right of its own on the machine that it runs on.

mod archive;
mod console;
mod guest;
mod monitor;
mod parts;
mod scenario;
mod tally;

use std::path::{Path, PathBuf};
use std::time::Instant;

use console::{Check, Verdict};
use guest::End;
use parts::Parts;
use scenario::{SCENARIOS, Scenario};
use tally::{Tally, Trouble};

/// Where everything lies.
const ROOM: &str = "target/lab";
/// How often a kernel is started that ends before the script begins. QEMU's emulation of several
/// processors may lose one while it patches its own code, which says nothing of what is to be tried.
const BOOTS_MAX: u32 = 3;

/// What to boot.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask lab                 the short lab: some of one scenario of each kind
  cargo xtask lab --all           every scenario, whole
  cargo xtask lab linux-target    that one
  cargo xtask lab --short pcie    that one as the short lab has it
  cargo xtask lab --list          what there is")]
pub(crate) struct Options {
    /// Scenarios, by name; without any, the short lab.
    names: Vec<String>,
    /// Every scenario.
    #[arg(long, conflicts_with = "names")]
    all: bool,
    /// Those that are named as the short lab has them.
    #[arg(long, requires = "names")]
    short: bool,
    /// Say which scenarios there are, and end.
    #[arg(long)]
    list: bool,
    /// Give each so many times its limit, on a machine that others use as well.
    #[arg(long, value_name = "TIMES", default_value_t = 1)]
    patience: u64,
    /// A tenmil that is there, instead of building one without shared libraries.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// The Debian suite that the kernel comes from, where a scenario does not name another.
    #[arg(long, default_value = "trixie")]
    suite: String,
}

/// Boots what was asked for, one guest after the other; true if every check passed.
pub(crate) fn run(options: &Options) -> Result<bool, String> {
    if options.list {
        for scenario in &SCENARIOS {
            let short = scenario.shortened().map(|short| short.seconds_max);
            let which = short.map_or(String::new(), |most| format!(" (short: {most} s at most)"));
            let (name, kind) = (scenario.name, scenario.kind.name());
            println!("{name:<16} {kind:<12} {}{which}", scenario.about);
        }
        return Ok(true);
    }
    let mut chosen = choose(options)?;
    for scenario in &mut chosen {
        scenario.seconds_max = scenario.seconds_max.saturating_mul(options.patience.max(1));
    }
    let room = Path::new(ROOM);
    std::fs::create_dir_all(room).map_err(|why| format!("make {ROOM}: {why}"))?;
    let room = room.canonicalize().map_err(|why| format!("find {ROOM}: {why}"))?;
    let mut parts = match Parts::gather(&room, &options.suite, options.binary.as_deref()) {
        Ok(parts) => parts,
        Err(Trouble::Lacking(why)) => return Err(why),
        Err(Trouble::Failed(why)) => {
            println!("lab: {why}");
            return Ok(false);
        }
    };
    println!("lab: {}", parts.versions());
    let tally = each(&chosen, &mut |scenario, tally| boot(scenario, &mut parts, &room, tally));
    println!("\nlab: {tally}");
    tally.verdict()
}

/// Boots one scenario after the other, whatever becomes of those before it.
fn each(
    chosen: &[Scenario],
    boot: &mut dyn FnMut(&Scenario, &mut Tally) -> Result<(), Trouble>,
) -> Tally {
    let mut tally = Tally::default();
    for scenario in chosen {
        if let Err(trouble) = boot(scenario, &mut tally) {
            let check = trouble.check(scenario.name);
            println!("  {check}");
            tally.count(&check);
        }
    }
    tally
}

fn choose(options: &Options) -> Result<Vec<Scenario>, String> {
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

fn boot(
    scenario: &Scenario,
    parts: &mut Parts,
    room: &Path,
    whole: &mut Tally,
) -> Result<(), Trouble> {
    println!("\nlab {}: {}", scenario.name, scenario.about);
    let image = parts.image(scenario)?;
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut boots_left = BOOTS_MAX;
    let end = loop {
        boots_left -= 1;
        let end = guest::run(scenario, &image, room, &mut |check| {
            println!("  {check}");
            tally.count(check);
        });
        if end != Ok(End::Early) || tally.has_any() || boots_left == 0 {
            break end;
        }
        println!("  note: the guest's kernel has not come up, and is started once more");
    };
    // Whatever ended it, what was found before counts.
    whole.add(tally);
    if let Some(why) = end?.complaint(scenario) {
        let check = Check { verdict: Verdict::Failed, what: why };
        println!("  {check}");
        whole.count(&check);
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
    fn what_cannot_be_had_stops_only_those_who_need_it_and_failures_are_kept() {
        let chosen = &SCENARIOS[..4];
        let mut begun = 0;
        let tally = each(chosen, &mut |_, tally| {
            begun += 1;
            match begun {
                1 => {
                    tally.passed += 2;
                    Err(Trouble::Failed("tenmil is not ready".to_owned()))
                }
                2 => Err(Trouble::Lacking("no mirror".to_owned())),
                3 => Err("no module".to_owned().into()),
                _ => {
                    tally.passed += 1;
                    Ok(())
                }
            }
        });
        assert_eq!(tally, Tally { passed: 3, failed: 1, skipped: 2 });
        assert_eq!(tally.verdict(), Ok(false));
        let nothing = each(chosen, &mut |_, _| Err(Trouble::Lacking("no mirror".to_owned())));
        assert_eq!(nothing, Tally { skipped: 4, ..Tally::default() });
        assert!(nothing.verdict().is_err());
    }
}
