//! `cargo xtask sim`: the driver against controllers that violate their contract.
//!
//! Faults and invariants are in the crate `sim`; this module selects, counts and reports the runs. Runs
//! with several hosts and targets are in the crate `cluster`.

mod cluster_seeds;

use std::io::{self, Write};
use std::time::Instant;

use tenmil_sim::scenario::Scenario;
use tenmil_sim::test_run::RunRecord;
use tenmil_sim::{exhaustive_scenarios, random_scenarios, scenarios};

/// Options of `cargo xtask sim`.
///
/// All scripted scenarios run first, then random seeds. A seed reproduces its run bit for bit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask sim                          all scenarios and 200 seeds
  cargo xtask sim --seed 4711              one run again
  cargo xtask sim --scenario identify      some scenarios
  cargo xtask sim --injected-bugs          proof that a bug would be found
  cargo xtask sim --cluster --seeds 300    hosts and targets, 300 seeds
  cargo xtask sim --cluster --seed 11      one of those runs again")]
pub(crate) struct SimOptions {
    /// Number of seeds to run after the scenarios
    #[arg(long, value_name = "N", default_value = "200")]
    seeds: u64,

    /// Run this seed only
    #[arg(long, value_name = "SEED", conflicts_with = "scenario")]
    seed: Option<u64>,

    /// Run only scenarios whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    scenario: Option<String>,

    /// List the scenarios and run none
    #[arg(long)]
    list: bool,

    /// Run hosts, pools, mirrors and tenants with reservations against target processes that crash, lose power and
    /// are partitioned
    #[arg(long, conflicts_with_all = ["scenario", "list"])]
    cluster: bool,

    /// Inject bugs, one at a time, each of which must be found; with --cluster, known bugs of the past,
    /// each by one of the seeds
    #[arg(long, conflicts_with = "seed")]
    injected_bugs: bool,
}

/// Runs the selected scenarios and seeds and reports the result. Returns whether no invariant was violated and
/// every injected bug was found.
pub(crate) fn run_sim(options: &SimOptions) -> Result<bool, String> {
    let out = &mut io::stdout().lock();
    let run = if options.cluster { cluster_seeds::run_cluster_seeds } else { run_scenarios };
    run(options, out).map_err(|why| format!("write the report: {why}"))
}

fn run_scenarios(options: &SimOptions, out: &mut dyn Write) -> io::Result<bool> {
    let scripted = selected_scenarios(options);
    if options.list {
        scripted.iter().try_for_each(|one| writeln!(out, "{}", one.name))?;
        return Ok(true);
    }
    if scripted.is_empty() {
        let text = options.scenario.as_deref().unwrap_or_default();
        return Err(io::Error::other(format!(
            "--scenario {text}: no scenario is called that, expected a part of one that --list shows"
        )));
    }
    let begun = Instant::now();
    let mut failed = 0_u64;
    let scripted = if options.seed.is_some() { Vec::new() } else { scripted };
    for scenario in &scripted {
        failed += u64::from(!run_scenario(scenario, out)?);
    }
    let (first, seeds) = match options.seed {
        Some(seed) => (seed, 1),
        None if options.scenario.is_some() || options.injected_bugs => (0, 0),
        None => (0, options.seeds),
    };
    for further in 0..seeds {
        failed += u64::from(!check_repeatability(first.wrapping_add(further), out)?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let count = scripted.len() as u64;
    if options.injected_bugs {
        let found = count.saturating_sub(failed);
        writeln!(out, "{count} bugs injected, {found} found, in {seconds:.1} s")?;
    } else {
        writeln!(
            out,
            "{count} scenarios and {seeds} seeds, each seed twice, in {seconds:.1} s: {failed} failed"
        )?;
    }
    Ok(failed == 0)
}

/// The selected scripted scenarios, in a fixed order.
fn selected_scenarios(options: &SimOptions) -> Vec<Scenario> {
    let part = if options.injected_bugs { Some("canary/") } else { options.scenario.as_deref() };
    let mut all = [scenarios::all_scenarios(), exhaustive_scenarios::all_scenarios()].concat();
    all.retain(|one| part.is_none_or(|part| one.name.contains(part)));
    all
}

/// Runs a scenario; returns false and reports the reason if it failed.
fn run_scenario(scenario: &Scenario, out: &mut dyn Write) -> io::Result<bool> {
    check_record(scenario, &scenario.execute(), out)
}

/// Checks the record of a run; returns false and reports the reason if it failed.
fn check_record(scenario: &Scenario, record: &RunRecord, out: &mut dyn Write) -> io::Result<bool> {
    let Some(failure) = &record.failure else { return Ok(true) };
    writeln!(out, "{}: {failure}", scenario.name)?;
    record.tail.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
    match scenario.name.strip_prefix("swarm/") {
        Some(seed) => writeln!(out, "    again: cargo xtask sim --seed {seed}")?,
        None => writeln!(out, "    again: cargo xtask sim --scenario {}", scenario.name)?,
    }
    Ok(false)
}

/// Runs a seed twice; returns false and reports the reason if it violated an invariant or the two runs
/// differ.
fn check_repeatability(seed: u64, out: &mut dyn Write) -> io::Result<bool> {
    let scenario = random_scenarios::random_scenario(seed);
    let first = scenario.execute();
    if !check_record(&scenario, &first, out)? {
        return Ok(false);
    }
    let second = scenario.execute();
    if (first.hash, first.events) != (second.hash, second.events) {
        writeln!(
            out,
            "swarm/{seed}: {} events with hash {:016x}, and then {} with {:016x}: expected the same",
            first.events, first.hash, second.events, second.hash
        )?;
        return Ok(false);
    }
    Ok(true)
}
