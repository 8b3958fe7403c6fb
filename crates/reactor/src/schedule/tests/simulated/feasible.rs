//! Whether loads can be placed within the limits at all: exhaustive search.

use super::world::World;

/// Whether there is a placement with all shared cores at 79 % or less, and no more busy ones than
/// the quota.
pub(super) fn can_be_within(world: &World) -> bool {
    let working = world.threads.iter().filter(|thread| thread.demand > 0);
    let threads: Vec<(u64, Vec<usize>)> = working
        .map(|thread| {
            let cores = world.may_be(thread);
            (thread.demand, cores.iter().map(|core| core as usize).collect())
        })
        .collect();
    let quota = world.quota.map_or(usize::MAX, |quota| quota as usize);
    arrange(&threads, &mut vec![(0, 0); world.cores.len()], quota)
}

fn arrange(threads: &[(u64, Vec<usize>)], cores: &mut Vec<(u64, u32)>, quota: usize) -> bool {
    let Some(((demand, allowed), rest)) = threads.split_first() else {
        return cores.iter().filter(|core| core.1 > 0).count() <= quota;
    };
    allowed.iter().any(|core| {
        let before = cores[*core];
        let fits = before.1 == 0 || before.0 + demand <= 79;
        cores[*core] = (before.0 + demand, before.1 + 1);
        let found = fits && arrange(rest, cores, quota);
        cores[*core] = before;
        found
    })
}
