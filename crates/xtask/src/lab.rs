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

use std::path::{Path, PathBuf};
use std::time::Instant;

use console::{Check, Verdict};
use guest::End;
use parts::{Kernel, Parts};
use scenario::{SCENARIOS, Scenario};

/// Where everything lies.
const ROOM: &str = "target/lab";
/// How often a kernel is started that ends before the script begins. QEMU's emulation of several
/// processors may lose one while it patches its own code, which says nothing of what is to be tried.
const BOOTS_MAX: u32 = 3;
/// The initramfs of all scenarios for the kernel of a suite, in there.
fn image(room: &Path, suite: &str) -> PathBuf {
    room.join(format!("initramfs-{suite}"))
}

/// What to boot.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask lab                 the short ones, a few minutes
  cargo xtask lab --all           every scenario
  cargo xtask lab linux-target    that one
  cargo xtask lab --list          what there is")]
pub(crate) struct Options {
    /// Scenarios, by name; without any, the short ones.
    names: Vec<String>,
    /// Every scenario.
    #[arg(long, conflicts_with = "names")]
    all: bool,
    /// Say which scenarios there are, and end.
    #[arg(long)]
    list: bool,
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
            let which = if scenario.is_short { "" } else { " (with --all)" };
            println!("{:<16} {}{which}", scenario.name, scenario.about);
        }
        return Ok(true);
    }
    let chosen = choose(options)?;
    let room = Path::new(ROOM);
    std::fs::create_dir_all(room).map_err(|why| format!("make {ROOM}: {why}"))?;
    let room = room.canonicalize().map_err(|why| format!("find {ROOM}: {why}"))?;
    let mut suites = vec![options.suite.as_str()];
    for suite in chosen.iter().filter_map(|scenario| scenario.suite) {
        if !suites.contains(&suite) {
            suites.push(suite);
        }
    }
    let parts = Parts::gather(&room, &suites, options.binary.as_deref())?;
    for suite in suites {
        let bytes = parts.pack(suite, &image(&room, suite))?;
        let Kernel { version, .. } = parts.kernel(suite)?;
        println!("lab: Linux {version}, initramfs of {} MiB", bytes >> 20);
    }
    let mut tally = Tally::default();
    for scenario in chosen {
        let suite = scenario.suite.unwrap_or(&options.suite);
        tally.add(boot(scenario, &parts, (&room, suite))?);
    }
    println!("lab: {} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    Ok(tally.failed == 0)
}

/// Checks of all guests, counted.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    fn count(&mut self, check: &Check) {
        match check.verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed => self.failed += 1,
            Verdict::Skipped => self.skipped += 1,
        }
    }
}

fn choose(options: &Options) -> Result<Vec<&'static Scenario>, String> {
    if options.names.is_empty() {
        return Ok(SCENARIOS.iter().filter(|known| options.all || known.is_short).collect());
    }
    let find = |name: &String| {
        SCENARIOS.iter().find(|known| known.name == name).ok_or_else(|| {
            let known: Vec<_> = SCENARIOS.iter().map(|known| known.name).collect();
            format!("scenario '{name}': none has that name, expected one of {}", known.join(", "))
        })
    };
    options.names.iter().map(find).collect()
}

fn boot(scenario: &Scenario, parts: &Parts, (room, suite): (&Path, &str)) -> Result<Tally, String> {
    println!("\nlab {}: {}", scenario.name, scenario.about);
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut boots_left = BOOTS_MAX;
    let end = loop {
        boots_left -= 1;
        let end = guest::run(scenario, parts, (room, suite), &mut |check| {
            println!("  {check}");
            tally.count(check);
        })?;
        let has_begun = tally.passed + tally.failed + tally.skipped > 0;
        if end != End::Early || has_begun || boots_left == 0 {
            break end;
        }
        println!("  note: the guest's kernel has not come up, and is started once more");
    };
    if let Some(why) = end.complaint(scenario) {
        println!("  {}", Check { verdict: Verdict::Failed, what: why });
        tally.failed += 1;
    }
    let seconds = begun.elapsed().as_secs();
    println!(
        "  {seconds} s of at most {}, console in {ROOM}/{}.log",
        scenario.seconds_max, scenario.name
    );
    Ok(tally)
}
