//! A simulated SSD that violates the specification, and the driver on top of it. The simulation
//! runs in simulated time from a single seed, so every run can be repeated exactly.

use std::error::Error;

use tenmil_sim::swarm;

const SEED: u64 = 4711;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let scenario = swarm::scenario(SEED);
    let run = scenario.run();
    // A violation by the driver would be a completion that is delivered twice or never, a buffer
    // released too early, or wrong data.
    if let Some(failure) = &run.failure {
        return Err(format!("seed {SEED}: {failure}").into());
    }
    println!(
        "the device misbehaved {} times in {} events, and the driver said:",
        run.deeds, run.events
    );
    run.told.iter().for_each(|line| println!("  {line}"));
    let counts = &run.counts;
    println!(
        "{} requests: {} done, {} failed, {} aborted; {} accesses to memory turned away",
        counts.submitted, counts.succeeded, counts.failed, counts.aborted, run.blocked
    );
    let again = scenario.run();
    assert_eq!((run.hash, run.events), (again.hash, again.events), "a seed repeats its run");
    println!("the same again, event for event: {:016x}", run.hash);
    Ok(())
}
