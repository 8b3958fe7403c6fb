//! `cargo xtask ceph`: `rbd:` devices against a real Ceph cluster of one node.
//!
//! ```text
//!   tenmil perf, copy, volume ──librbd──▶ ceph-mon, ceph-osd ◀── rbd export, rbd status, rbd bench, fio
//!   tenmil serve ──librbd──────────────▶      in target/ceph
//!        ▲
//!        └── NVMe/TCP ── tenmil perf
//! ```
//!
//! Nothing is installed: packages that are missing are named, and the exit code is 2. Everything listens on loopback.

mod checks;
pub(crate) mod cluster;
mod failures;
pub(crate) mod programs;
mod speed;

use std::path::PathBuf;

use crate::operate::Report;
use cluster::{Cluster, ObjectStore};
use programs::Programs;

/// Directory of the cluster and of all files.
const DIRECTORY: &str = "target/ceph";

/// Options of `cargo xtask ceph`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask ceph                                  everything but the speed, with target/debug/tenmil
  cargo xtask ceph --only failures                  an OSD that is killed, a client that is blocklisted, lost locks
  cargo xtask ceph --only speed --binary target/release/tenmil
  cargo xtask ceph --store bluestore --only speed --binary target/release/tenmil
Needs ceph-mon, ceph-osd and ceph-common, and for the speed fio with its rbd engine.")]
pub(crate) struct CephOptions {
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Where the OSD stores objects
    #[arg(long, value_enum, default_value = "memstore")]
    store: ObjectStore,
    /// Part to run; without it, all but the speed
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Number of images that are open at once in the part `many`
    #[arg(long, default_value_t = 1000)]
    images: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Measurements of each kind, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Data, snapshots, clones, resizes
    Data,
    /// An OSD that is killed or stopped, a full cluster, a blocklisted client, lost locks, what cannot be opened
    Failures,
    /// Many images in one process
    Many,
    /// Rate and processor time beside `rbd bench` and fio
    Speed,
}

/// Runs the checks; returns true if none failed.
pub(crate) fn run_ceph(options: &CephOptions) -> Result<bool, String> {
    let is_wanted = |part| match options.only {
        Some(only) => only == part,
        None => part != Part::Speed,
    };
    let programs = Programs::find(&options.binary, is_wanted(Part::Speed))?;
    let root = crate::book::repository_root()?;
    let mut cluster = Cluster::start(&root.join(DIRECTORY), options.store)?;
    println!("cluster of {} with {}", cluster.version(), options.store.name());
    let mut report = Report::default();
    if is_wanted(Part::Data) {
        println!("data");
        checks::check_data(&programs, &cluster, &mut report)?;
    }
    if is_wanted(Part::Failures) {
        println!("failures");
        failures::check_failures(&programs, &mut cluster, &mut report)?;
    }
    if is_wanted(Part::Many) {
        println!("many images");
        checks::check_many(&programs, &cluster, options.images, &mut report)?;
    }
    if is_wanted(Part::Speed) {
        println!("speed");
        speed::measure_speed(&programs, &cluster, options.seconds, options.rounds, &mut report)?;
    }
    Ok(report.print_summary())
}
