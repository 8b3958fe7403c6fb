//! `tenmil sim`: the driver against controllers that break their promises.
//!
//! What can go wrong, and how it shows, is in the `sim` crate; here runs are chosen, counted and
//! told. Runs of several hosts and targets are in the `cluster` crate.

mod clusters;

use std::io::{self, Write};

use host::Clock;
use sim::course::Record;
use sim::scenario::Scenario;
use sim::{enumeration, scenarios, swarm};

use crate::Refused;

/// What `tenmil sim` is asked to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimOptions {
    /// How many seeds to run after the scripted scenarios.
    pub seeds: u64,
    /// Run this seed alone.
    pub seed: Option<u64>,
    /// Run only scenarios whose name contains this, and no seeds.
    pub scenario: Option<String>,
    /// Name the scenarios and run none.
    pub list: bool,
    /// Plant a bug that must be found.
    pub canary: bool,
    /// Run hosts against target processes instead of the driver against a controller.
    pub cluster: bool,
    /// Put known bugs of a cluster back, each of which must be found.
    pub injected_bugs: bool,
}

/// Runs what `options` ask for and says how it went. Fails if any promise was broken.
pub fn run(options: &SimOptions, out: &mut dyn Write) -> Result<(), Refused> {
    if options.cluster {
        return clusters::run(options, out);
    }
    let told = |error: io::Error| Refused::machine(format!("write the report: {error}"));
    let scripted = chosen(options);
    if options.list {
        return scripted.iter().try_for_each(|one| writeln!(out, "{}", one.name)).map_err(told);
    }
    if scripted.is_empty() {
        let text = options.scenario.as_deref().unwrap_or_default();
        return Err(Refused::caller(format!(
            "--scenario {text}: no scenario is called that, expected a part of one that --list shows"
        )));
    }
    let clock = Clock::start();
    let begun = clock.now();
    let mut failed = 0_u64;
    let scripted = if options.seed.is_some() { Vec::new() } else { scripted };
    for scenario in &scripted {
        failed += u64::from(!holds(scenario, out).map_err(told)?);
    }
    let (first, seeds) = match options.seed {
        Some(seed) => (seed, 1),
        None if options.scenario.is_some() || options.canary => (0, 0),
        None => (0, options.seeds),
    };
    for further in 0..seeds {
        failed += u64::from(!repeats(first.wrapping_add(further), out).map_err(told)?);
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
    told_all.map_err(told)?;
    match failed {
        0 => Ok(()),
        _ => Err(Refused::peer(format!("{failed} simulated runs broke a promise"))),
    }
}

/// The scripted runs that `options` name, in their fixed order.
fn chosen(options: &SimOptions) -> Vec<Scenario> {
    let part = if options.canary { Some("canary/") } else { options.scenario.as_deref() };
    let mut all = [scenarios::all(), enumeration::all()].concat();
    all.retain(|one| part.is_none_or(|part| one.name.contains(part)));
    all
}

/// Runs a scenario. False, and said why, if it did not go as it must.
fn holds(scenario: &Scenario, out: &mut dyn Write) -> io::Result<bool> {
    has_held(scenario, &scenario.run(), out)
}

/// False, and said why, if a run did not go as it must.
fn has_held(scenario: &Scenario, record: &Record, out: &mut dyn Write) -> io::Result<bool> {
    let Some(failure) = &record.failure else { return Ok(true) };
    writeln!(out, "{}: {failure}", scenario.name)?;
    record.tail.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
    match scenario.name.strip_prefix("swarm/") {
        Some(seed) => writeln!(out, "    again: tenmil sim --seed {seed}")?,
        None => writeln!(out, "    again: tenmil sim --scenario {}", scenario.name)?,
    }
    Ok(false)
}

/// Runs a seed twice. False, and said why, if it broke a promise or was not the same both times.
fn repeats(seed: u64, out: &mut dyn Write) -> io::Result<bool> {
    let scenario = swarm::scenario(seed);
    let first = scenario.run();
    if !has_held(&scenario, &first, out)? {
        return Ok(false);
    }
    let second = scenario.run();
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
