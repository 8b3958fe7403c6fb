//! `cargo xtask csi`: csi-sanity, the tests of the Kubernetes project for CSI drivers, against `tenmil-csi`.
//!
//! ```text
//!   csi-sanity ─gRPC─▶ tenmil-csi ─API─▶ tenmil serve: a pool in a file
//!                          │                  │
//!                          └─▶ /dev/loopN ◀───┘  NVMe/TCP: this program in place of `tenmil serve --listen ublk:`
//! ```
//!
//! It needs root for mounts, and Go for csi-sanity. What is missing is named, and the exit code is 2.

mod loop_disk;
mod processes;
mod sanity;

use std::path::{Path, PathBuf};

pub(crate) use self::loop_disk::{LoopDiskOptions, serve_loop_disk};
use self::processes::DriverStack;
pub(crate) use self::sanity::find_or_build as find_or_build_sanity;
use crate::operate::Report;
use tenmil_base::Random;

/// Directory of all files.
pub(crate) const DIRECTORY: &str = "target/csi";

/// Options of `cargo xtask csi`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask csi                            csi-sanity with file systems and with block devices
  cargo xtask csi --kills 20 --seed 7        and kill the driver while volumes are used
Needs root, and Go or csi-sanity.")]
pub(crate) struct CsiOptions {
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Program to run as `tenmil-csi`
    #[arg(long, default_value = "target/debug/tenmil-csi")]
    driver: PathBuf,
    /// csi-sanity, in place of one that is built
    #[arg(long, value_name = "PATH")]
    sanity: Option<PathBuf>,
    /// Only tests whose names match this pattern
    #[arg(long, value_name = "PATTERN")]
    focus: Option<String>,
    /// Rounds in which the driver is killed again and again
    #[arg(long, value_name = "N", default_value_t = 1)]
    kills: u32,
    /// Seed of the times of kills
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs the tests; returns true if none failed.
pub(crate) fn run_csi(options: &CsiOptions) -> Result<bool, String> {
    let directory = crate::book::repository_root()?.join(DIRECTORY);
    std::fs::create_dir_all(&directory).map_err(|why| format!("create {DIRECTORY}: {why}"))?;
    let program = |path: &Path| {
        path.canonicalize().map_err(|why| format!("{}: {why}; cargo build", path.display()))
    };
    let (tenmil, driver) = (program(&options.binary)?, program(&options.driver)?);
    let sanity = match &options.sanity {
        Some(path) => program(path)?,
        None => sanity::find_or_build(&directory)?,
    };
    let mut report = Report::default();
    for access in ["mount", "block"] {
        let stack = DriverStack::start(&tenmil, &driver, directory.join(access))?;
        let result = sanity::run(&sanity, &stack, access, options.focus.as_deref());
        report.check(&format!("csi-sanity, {access}"), result);
        report.check(&format!("nothing is left, {access}"), stack.check_nothing_is_left());
    }
    let mut stack = DriverStack::start(&tenmil, &driver, directory.join("data"))?;
    report.check("data of volumes, snapshots, clones", stack.run_self_test(0, None));
    let mut random = Random::new(options.seed);
    for round in 1..=options.kills {
        let result = stack.run_self_test(u64::from(round), Some(&mut random));
        report.check(&format!("the same, while the driver is killed, round {round}"), result);
    }
    report.check("nothing is left", stack.check_nothing_is_left());
    Ok(report.print_summary())
}
