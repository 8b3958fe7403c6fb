//! Whether loads can be placed within the limits at all: exhaustive search.

use super::machine::SimulatedMachine;

/// Whether there is a placement with all shared cores at 79 % or less, and no more busy ones than
/// the quota.
pub(super) fn has_placement_within_limits(world: &SimulatedMachine) -> bool {
    let working = world.threads.iter().filter(|thread| thread.demand > 0);
    let threads: Vec<(u64, Vec<usize>)> = working
        .map(|thread| {
            let cores = world.is_allowed_on(thread);
            (thread.demand, cores.iter().map(|core| core as usize).collect())
        })
        .collect();
    let quota = world.quota.map_or(usize::MAX, |quota| quota as usize);
    can_place_remaining(&threads, &mut vec![(0, 0); world.cores.len()], quota)
}

fn can_place_remaining(
    threads: &[(u64, Vec<usize>)],
    cores: &mut Vec<(u64, u32)>,
    quota: usize,
) -> bool {
    let Some(((demand, allowed), rest)) = threads.split_first() else {
        return cores.iter().filter(|core| core.1 > 0).count() <= quota;
    };
    allowed.iter().any(|core| {
        let before = cores[*core];
        let fits = before.1 == 0 || before.0 + demand <= 79;
        cores[*core] = (before.0 + demand, before.1 + 1);
        let found = fits && can_place_remaining(rest, cores, quota);
        cores[*core] = before;
        found
    })
}
