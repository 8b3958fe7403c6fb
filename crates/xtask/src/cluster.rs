//! `cargo xtask cluster`: a group of three gateways with etcd, under verified load, with faults.
//!
//! ```text
//!   tenmil perf --verify ──3 paths──▶ gateway a, b, c ──NVMe/TCP──▶ tenmil serve: one device each ANA group
//!                                       │ relay each: passes on, or nothing
//!                                       ▼
//!                                      etcd
//! ```
//!
//! In each round one fault hits a gateway or etcd while the load runs. The load must end without an error and
//! with every block as it was written; the longest latency of an I/O is the time in which the hosts went on.
//! Everything listens on loopback. What is missing is named, and the exit code is 2.

mod faults;
mod gateways;
mod relay;

use std::path::PathBuf;

use tenmil_base::{Random, Span};
use tenmil_linux::Clock;
use tenmil_rpc::{EtcdStore, EtcdUrl};

use crate::operate::Report;
use faults::{Fault, check_median, run_fault};
use gateways::Gateways;

/// Directory of all files.
const DIRECTORY: &str = "target/cluster";

/// Options of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask cluster                               three rounds of each fault
  cargo xtask cluster --only kill --rounds 20       gateways that are killed
  cargo xtask cluster --binary target/release/tenmil --rounds 25 --seed 7
Needs etcd.")]
pub(crate) struct ClusterOptions {
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Fault; without it, each
    #[arg(long, value_enum)]
    only: Option<Fault>,
    /// Rounds of each fault
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Seed of the gateways that are hit
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs the rounds; returns true if none failed.
pub(crate) fn run_cluster(options: &ClusterOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    let mut gateways = Gateways::start(&options.binary, &root.join(DIRECTORY))?;
    let mut report = Report::default();
    report.check("etcd is a store as the one in memory", check_etcd(&gateways.etcd_url()));
    let mut random = Random::new(options.seed);
    for fault in Fault::ALL {
        if options.only.is_some_and(|only| only != fault) {
            continue;
        }
        let mut pauses = Vec::new();
        for round in 1..=options.rounds {
            let found = run_fault(&mut gateways, fault, random.next_u64());
            let text = found.as_ref().map(|pause| format!("longest I/O {} ms", pause / 1_000_000));
            report.check(&format!("{}, round {round}", fault.name()), text.map_err(String::clone));
            pauses.extend(found.ok());
        }
        let what = format!("median of the longest I/O, {}", fault.name());
        report.check(&what, check_median(fault, pauses));
    }
    Ok(report.print_summary())
}

/// The checks that the store in memory passes, on another group of the same etcd.
fn check_etcd(url: &str) -> Result<String, String> {
    let url = EtcdUrl::parse(url).map_err(|error| error.text)?;
    let mut store = EtcdStore::new(&url, "conformance", Clock::start(), Span::from_secs(2));
    let mut wait = |time: Span| std::thread::sleep(std::time::Duration::from_nanos(time.ns));
    tenmil_group::check_store(&mut store, &mut wait, Span::from_secs(2))?;
    Ok(String::new())
}
