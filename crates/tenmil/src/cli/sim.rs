//! `tenmil sim`.

use clap::Args;

use super::perf::whole;
use crate::simulation::SimOptions;

/// Run the driver against a simulated controller that breaks its contract in every way we know.
///
/// All scripted scenarios first, then a swarm of seeds. A seed repeats its run bit for bit.
/// With --cluster: hosts, pools, mirrors and tenants with reservations, and target processes with the
/// disks they serve, over a network that fails.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SimArguments {
    /// How many seeds to run after the scenarios
    #[arg(long, value_name = "N", default_value = "200", value_parser = whole::<u64>)]
    seeds: u64,

    /// Run this seed alone
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>, conflicts_with = "scenario")]
    seed: Option<u64>,

    /// Run only scenarios whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    scenario: Option<String>,

    /// Name the scenarios and run none
    #[arg(long)]
    list: bool,

    /// Plant bugs, one at a time, each of which must be found
    #[arg(long)]
    canary: bool,

    /// Run hosts against target processes that are killed, lose power and are partitioned
    #[arg(long, conflicts_with_all = ["scenario", "list", "canary"])]
    cluster: bool,

    /// With --cluster: put known bugs back, one at a time, each of which must be found by one of the
    /// seeds
    #[arg(long, requires = "cluster", conflicts_with = "seed")]
    injected_bugs: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil sim                       all scenarios and 200 seeds
  tenmil sim --seed 4711           one run again
  tenmil sim --scenario identify   some scenarios
  tenmil sim --canary              proof that a bug would be found
  tenmil sim --cluster --seeds 300 hosts and targets, 300 seeds
  tenmil sim --cluster --seed 11   one of those runs again";

impl SimArguments {
    pub(super) fn options(&self) -> SimOptions {
        SimOptions {
            seeds: self.seeds,
            seed: self.seed,
            scenario: self.scenario.clone(),
            list: self.list,
            canary: self.canary,
            cluster: self.cluster,
            injected_bugs: self.injected_bugs,
        }
    }
}
