//! `tenmil sim`: the driver against controllers that violate their contract.
//!
//! Faults and invariants are in the crate `sim`; this module selects, counts and reports the runs. Runs
//! with several hosts and targets are in the crate `cluster`.

mod cluster_seeds;

use std::io::{self, Write};

use tenmil_linux::Clock;
use tenmil_sim::scenario::Scenario;
use tenmil_sim::test_run::RunRecord;
use tenmil_sim::{exhaustive_scenarios, random_scenarios, scenarios};

use tenmil_base::Error;

/// Options of `tenmil sim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimOptions {
    /// Number of seeds to run after the scripted scenarios.
    pub seeds: u64,
    /// Run this seed only.
    pub seed: Option<u64>,
    /// Run only scenarios whose name contains this, and no seeds.
    pub scenario: Option<String>,
    /// List the scenarios and run none.
    pub list: bool,
    /// Inject driver bugs, each of which must be found.
    pub canary: bool,
    /// Run hosts against target processes instead of the driver against a controller.
    pub cluster: bool,
    /// Reintroduce known cluster bugs, each of which must be found.
    pub injected_bugs: bool,
}

/// Runs the selected scenarios and seeds and reports the result. Fails if any invariant was violated.
pub fn run_simulation(options: &SimOptions, out: &mut dyn Write) -> Result<(), Error> {
    if options.cluster {
        return cluster_seeds::run_cluster_seeds(options, out);
    }
    let reported = |error: io::Error| Error::environment(format!("write the report: {error}"));
    let scripted = selected_scenarios(options);
    if options.list {
        return scripted.iter().try_for_each(|one| writeln!(out, "{}", one.name)).map_err(reported);
    }
    if scripted.is_empty() {
        let text = options.scenario.as_deref().unwrap_or_default();
        return Err(Error::usage(format!(
            "--scenario {text}: no scenario is called that, expected a part of one that --list shows"
        )));
    }
    let clock = Clock::start();
    let begun = clock.now();
    let mut failed = 0_u64;
    let scripted = if options.seed.is_some() { Vec::new() } else { scripted };
    for scenario in &scripted {
        failed += u64::from(!run_scenario(scenario, out).map_err(reported)?);
    }
    let (first, seeds) = match options.seed {
        Some(seed) => (seed, 1),
        None if options.scenario.is_some() || options.canary => (0, 0),
        None => (0, options.seeds),
    };
    for further in 0..seeds {
        failed +=
            u64::from(!check_repeatability(first.wrapping_add(further), out).map_err(reported)?);
    }
    let seconds = clock.now().since(begun).as_secs_f64();
    let count = scripted.len() as u64;
    let told_all = match options.canary {
        true => writeln!(
            out,
            "{count} bugs planted, {} found, in {seconds:.1} s",
            count.saturating_sub(failed)
        ),
        false => writeln!(
            out,
            "{count} scenarios and {seeds} seeds, each seed twice, in {seconds:.1} s: {failed} failed"
        ),
    };
    told_all.map_err(reported)?;
    match failed {
        0 => Ok(()),
        _ => Err(Error::remote(format!("{failed} simulated runs broke a promise"))),
    }
}

/// The selected scripted scenarios, in a fixed order.
fn selected_scenarios(options: &SimOptions) -> Vec<Scenario> {
    let part = if options.canary { Some("canary/") } else { options.scenario.as_deref() };
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
        Some(seed) => writeln!(out, "    again: tenmil sim --seed {seed}")?,
        None => writeln!(out, "    again: tenmil sim --scenario {}", scenario.name)?,
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
