//! A simulated SSD that breaks its promises, and the driver that has to live with it: in simulated
//! time, out of one number, so that whatever happened happens again.

use std::error::Error;

use sim::swarm;

const SEED: u64 = 4711;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let scenario = swarm::scenario(SEED);
    let run = scenario.run();
    // A broken promise of the driver would be one of these: an answer that came twice or never, a
    // buffer given back too early, data that are not what was written.
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
