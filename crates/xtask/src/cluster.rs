//! `cargo xtask cluster`: a group of three gateways with etcd or Ceph, under verified load, with faults.
//!
//! ```text
//!   tenmil perf --verify ──3 paths──▶ gateway a, b, c ──NVMe/TCP──▶ tenmil serve: one device each ANA group
//!                                       │ relay each: passes on, or nothing
//!                                       ▼
//!                                      etcd
//!
//!   tenmil perf --verify ──3 paths──▶ gateway a, b, c ──librbd────▶ Ceph: one image each ANA group, and the store
//! ```
//!
//! In each round one fault hits a gateway or the store while the load runs. The load must end without an error and
//! with every block as it was written; the longest latency of an I/O is the time in which the hosts went on.
//! Everything listens on loopback. What is missing is named, and the exit code is 2.

mod faults;
mod gateways;
mod relay;
mod services;

use std::path::PathBuf;

use tenmil_base::{Random, Span};
use tenmil_linux::Clock;
use tenmil_rpc::GroupStoreUri;

use crate::operate::Report;
use faults::{Fault, check_median, run_fault};
use gateways::Gateways;
use services::ServiceKind;

/// Directory of all files.
const DIRECTORY: &str = "target/cluster";

/// Options of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask cluster                               three rounds of each fault
  cargo xtask cluster --only kill --rounds 20       gateways that are killed
  cargo xtask cluster --binary target/release/tenmil --rounds 25 --seed 7
  cargo xtask cluster --ceph --only pause           images and the store of the group in a Ceph cluster
  cargo xtask cluster --pools                       volumes of pools that each gateway reaches
Needs etcd; with --ceph, ceph-mon, ceph-osd and ceph-common.")]
pub(crate) struct ClusterOptions {
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/debug/tenmil")]
    binary: PathBuf,
    /// Serve images of a Ceph cluster of one node, which has the store of the group, too
    #[arg(long)]
    ceph: bool,
    /// Serve volumes, with a pool on each device
    #[arg(long, conflicts_with = "ceph")]
    pools: bool,
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
    let kind = match (options.ceph, options.pools) {
        (true, _) => ServiceKind::Ceph,
        (false, true) => ServiceKind::EtcdWithPools,
        (false, false) => ServiceKind::Etcd,
    };
    let mut gateways = Gateways::start(&options.binary, &root.join(DIRECTORY), kind)?;
    let mut report = Report::default();
    let what = format!("{} is a store as the one in memory", kind.name());
    report.check(&what, check_store(&gateways.store_uri()));
    let mut random = Random::new(options.seed);
    for fault in Fault::ALL {
        if options.only.is_some_and(|only| only != fault) || !fault.is_possible_with(kind) {
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

/// The checks that the store in memory passes, on another group of the same store.
fn check_store(uri: &str) -> Result<String, String> {
    let uri = GroupStoreUri::parse(uri).map_err(|error| error.text)?;
    let store = uri.open("conformance", Clock::start(), Span::from_secs(2));
    let mut store = store.map_err(|error| error.text)?.map;
    let mut wait = |time: Span| std::thread::sleep(std::time::Duration::from_nanos(time.ns));
    tenmil_group::check_store(&mut *store, &mut wait, Span::from_secs(2))?;
    Ok(String::new())
}
