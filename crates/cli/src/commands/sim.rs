//! `tenmil sim`: runs the driver in the simulator.

use clap::Args;

use super::control_options::ControlOptions;
use super::perf::parse_integer;
use crate::simulation::SimOptions;

/// Run the driver against a simulated controller that violates its contract in every known way.
///
/// Runs all scripted scenarios first, then random seeds. A seed reproduces its run bit for bit. With
/// --cluster: hosts, pools, mirrors and tenants with reservations, and target processes with the disks
/// they serve, over a network that fails.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SimArguments {
    /// Number of seeds to run after the scenarios
    #[arg(long, value_name = "N", default_value = "200", value_parser = parse_integer::<u64>)]
    seeds: u64,

    /// Run this seed only
    #[arg(long, value_name = "SEED", value_parser = parse_integer::<u64>, conflicts_with = "scenario")]
    seed: Option<u64>,

    /// Run only scenarios whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    scenario: Option<String>,

    /// List the scenarios and run none
    #[arg(long)]
    list: bool,

    /// Run hosts against target processes that crash, lose power and are partitioned
    #[arg(long, conflicts_with_all = ["scenario", "list"])]
    cluster: bool,

    /// Inject bugs, one at a time, each of which must be found; with --cluster, known bugs of the past,
    /// each by one of the seeds
    #[arg(long, conflicts_with = "seed")]
    injected_bugs: bool,

    #[command(flatten)]
    pub(super) control: ControlOptions,
}

const EXAMPLES: &str = "\
Examples:
  tenmil sim                       all scenarios and 200 seeds
  tenmil sim --seed 4711           one run again
  tenmil sim --scenario identify   some scenarios
  tenmil sim --injected-bugs     proof that a bug would be found
  tenmil sim --cluster --seeds 300 hosts and targets, 300 seeds
  tenmil sim --cluster --seed 11   one of those runs again";

impl SimArguments {
    pub(super) fn options(&self) -> SimOptions {
        SimOptions {
            seeds: self.seeds,
            seed: self.seed,
            scenario: self.scenario.clone(),
            list: self.list,
            canary: self.injected_bugs && !self.cluster,
            cluster: self.cluster,
            injected_bugs: self.injected_bugs && self.cluster,
        }
    }
}
