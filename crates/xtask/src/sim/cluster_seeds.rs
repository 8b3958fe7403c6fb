//! `cargo xtask sim --cluster`: runs, counts and reports cluster seeds.

use std::io::{self, Write};
use std::time::Instant;

use tenmil_cluster::{ClusterPlan, InjectedBugs, RunOutcome};

use super::SimOptions;

/// Runs the seeds and reports the result. Returns whether no invariant was violated and every injected bug was
/// found.
pub(super) fn run_cluster_seeds(options: &SimOptions, out: &mut dyn Write) -> io::Result<bool> {
    let begun = Instant::now();
    if options.injected_bugs {
        let (all, found) = count_injected_bugs_found(options.seeds, out)?;
        let seconds = begun.elapsed().as_secs_f64();
        writeln!(out, "{all} bugs injected, {found} found, in {seconds:.1} s")?;
        return Ok(found == all);
    }
    let (first, count) = options.seed.map_or((0, options.seeds), |seed| (seed, 1));
    let mut failed = 0_u64;
    for further in 0..count {
        let seed = first.wrapping_add(further);
        let plan = ClusterPlan::from_seed(seed, InjectedBugs::default());
        let result = tenmil_cluster::run_plan(&plan);
        if result.failure.is_some() {
            failed += 1;
            report_outcome(&result, out)?;
        } else if options.seed.is_some() {
            let (RunOutcome { events, hash, .. }, kind) = (result, plan.plan_kind());
            writeln!(out, "cluster/{seed} ({kind}): {events} events with hash {hash:016x}")?;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    writeln!(out, "{count} seeds in {seconds:.1} s: {failed} failed")?;
    Ok(failed == 0)
}

/// Reintroduces each known bug. Returns the number of bugs and the number found.
fn count_injected_bugs_found(seeds: u64, out: &mut dyn Write) -> io::Result<(u64, u64)> {
    let (mut all, mut found) = (0, 0);
    for (name, bugs) in InjectedBugs::all_with_names() {
        all += 1;
        match bugs.first_seed(seeds) {
            Some(RunOutcome { seed, failure, .. }) => {
                found += 1;
                let failure = failure.unwrap_or_default();
                writeln!(out, "{name}: found by seed {seed}: {failure}")?;
            }
            None => writeln!(out, "{name}: not found by {seeds} seeds")?,
        }
    }
    Ok((all, found))
}

fn report_outcome(result: &RunOutcome, out: &mut dyn Write) -> io::Result<()> {
    let RunOutcome { seed, failure, history, .. } = result;
    let failure = failure.as_deref().unwrap_or_default();
    writeln!(out, "cluster/{seed}: {failure}")?;
    history.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
    writeln!(out, "    again: cargo xtask sim --cluster --seed {seed}")
}
