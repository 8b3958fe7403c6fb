//! Simulated reactors and threads that carry out migrations with a delay.

use tenmil_base::{Random, Span};
use tenmil_linux::CpuList;

use super::super::{
    ELAPSED, Options, Policy, ReactorLoad, SchedulerSnapshot, ThreadLoad, ThreadScheduler, seconds,
};
use crate::thread_scheduler::{Migration, MigrationReason};

/// Fractions of a percent in which loads are counted here, so that shared cores come out exact.
const FINE: u64 = 1_000;

pub(super) struct SimulatedMachine {
    random: Random,
    seed: u64,
    tell: bool,
    scheduler: ThreadScheduler,
    pub(super) threads: Vec<SimulatedThread>,
    pub(super) cores: Vec<SimulatedCore>,
    pub(super) quota: Option<u32>,
    /// Whether pairs of cores are hardware threads of one physical core.
    halves: bool,
    /// Periods since the beginning, one per second.
    pub(super) now: u64,
    pub(super) last_order: u64,
    pub(super) migrations: u64,
    still: bool,
}

/// A core with its reactor.
pub(super) struct SimulatedCore {
    pub(super) taken: bool,
    node: u32,
}

/// A light thread.
pub(super) struct SimulatedThread {
    pub(super) home: u32,
    /// Load in percent if it had a core for itself.
    pub(super) demand: u64,
    pub(super) mask: Option<CpuList>,
    node: Option<u32>,
    /// Time of its last migration request, and of its arrival.
    ordered: Option<u64>,
    arrives: u64,
}

impl SimulatedMachine {
    pub(super) fn new(mut random: Random, seed: u64, tell: bool) -> Self {
        let large = random.chance(1, 6);
        let (cores_max, threads_max) = if large { (12, 40) } else { (4, 7) };
        let count = u32::try_from(1 + random.below(cores_max)).unwrap();
        let threads = 1 + random.below(threads_max);
        let halves = random.chance(1, 2);
        let mut options = Options {
            policy: Policy::Dynamic,
            migration_interval: Span::from_secs(random.below(6)),
            ..Options::default()
        };
        if random.chance(1, 3) {
            options.scheduling_core = Some(draw_core(&mut random, count));
        }
        if random.chance(1, 4) && count > 1 {
            let isolated = draw_core(&mut random, count);
            if options.scheduling_core != Some(isolated) {
                options.isolated = [isolated].into_iter().collect();
            }
        }
        let nodes = 1 + random.below(2);
        let node = |core: u32| if nodes == 1 { 0 } else { core / 2 % 2 };
        let cores =
            (0..count).map(|core| SimulatedCore { taken: false, node: node(core) }).collect();
        let scheduler = ThreadScheduler::new(options, (0..count).collect()).unwrap();
        let mut world = Self {
            random,
            seed,
            tell,
            scheduler,
            threads: Vec::new(),
            cores,
            quota: None,
            halves,
            now: 0,
            last_order: 0,
            migrations: 0,
            still: false,
        };
        for _ in 0..threads {
            world.add_thread();
        }
        world
    }

    /// Whether all placements can be enumerated.
    pub(super) fn is_exhaustively_checkable(&self) -> bool {
        self.cores.len() <= 4 && self.threads.len() <= 7
    }

    fn active_cores(&self) -> u32 {
        u32::try_from(self.cores.len()).unwrap()
    }

    pub(super) fn policy(&self) -> Policy {
        self.scheduler.options().policy
    }

    fn add_thread(&mut self) {
        let home = self.scheduler.choose_core_for_new_thread(None, &CpuList::default()).unwrap();
        let node = self.random.chance(1, 3).then(|| u32::from(self.random.chance(1, 2)));
        let demand = draw_demand(&mut self.random);
        let thread = SimulatedThread { home, demand, mask: None, node, ordered: None, arrives: 0 };
        self.threads.push(thread);
    }

    /// Makes a random change.
    pub(super) fn change_something(&mut self) {
        let index = usize::try_from(self.random.below(self.threads.len() as u64)).unwrap();
        let count = self.active_cores();
        match self.random.below(20) {
            0..8 => self.threads[index].demand = draw_demand(&mut self.random),
            8..10 => self.threads[index].mask = draw_mask(&mut self.random, count),
            10 => {
                let core = draw_core(&mut self.random, count) as usize;
                self.cores[core].taken ^= true;
            }
            11 => {
                let quota = u32::try_from(1 + self.random.below(4)).unwrap();
                self.quota = self.random.chance(1, 2).then_some(quota);
            }
            12 => {
                let policy =
                    if self.random.chance(1, 4) { Policy::Static } else { Policy::Dynamic };
                let options = Options { policy, ..self.scheduler.options().clone() };
                self.scheduler.set_options(options).unwrap();
            }
            _ => {}
        }
    }

    /// From now on nothing changes except by migrations.
    pub(super) fn stop_changes(&mut self) {
        self.still = true;
        self.last_order = self.now;
    }

    /// Advances by a period, and carries out the migrations at its end.
    pub(super) fn run_period(&mut self) {
        self.now += 1;
        let snapshot = self.snapshot();
        let plan = self.scheduler.plan(seconds(self.now), &snapshot);
        let mut ordered: Vec<u64> = plan.migrations.iter().map(|order| order.thread).collect();
        ordered.sort_unstable();
        ordered.dedup();
        assert_eq!(ordered.len(), plan.migrations.len(), "seed {}: two orders for one", self.seed);
        for order in &plan.migrations {
            self.execute_plan(order);
        }
        let held: CpuList = self.threads.iter().map(|thread| thread.home).collect();
        let empty: CpuList =
            (0..self.active_cores()).filter(|core| !held.contains(*core)).collect();
        assert_eq!(plan.empty, empty, "seed {}", self.seed);
    }

    fn execute_plan(&mut self, order: &Migration) {
        let Self { seed, now, .. } = *self;
        if self.tell {
            println!("{now:>4} {order}");
        }
        let takes = if self.random.chance(1, 3) { 1 } else { 0 };
        let rest = self.scheduler.options().migration_interval.ns / 1_000_000_000;
        let to = &self.cores[order.to as usize];
        assert!(!to.taken || self.cores.iter().all(|core| core.taken), "seed {seed}: {order}");
        assert!(order.from != order.to, "seed {seed}: {order}");
        if self.policy() == Policy::Static {
            let needed =
                [MigrationReason::Mask, MigrationReason::CoreTaken].contains(&order.reason);
            assert!(needed, "seed {seed}: static, and {order}");
        }
        let index = usize::try_from(order.thread).unwrap();
        let thread = &mut self.threads[index];
        assert!(thread.arrives <= now, "seed {seed}: on its way already: {order}");
        assert_eq!(thread.home, order.from, "seed {seed}: it is not there: {order}");
        let rested = thread.ordered.is_none_or(|before| now - before >= rest);
        assert!(rested, "seed {seed}: twice within {rest} s: {order}");
        thread.home = order.to;
        thread.ordered = Some(now);
        thread.arrives = now + takes;
        self.last_order = now;
        self.migrations += 1;
    }

    /// Measured loads: on an overloaded core every thread gets a share.
    fn snapshot(&self) -> SchedulerSnapshot {
        let reactor = |core: u32| ReactorLoad {
            core,
            busy: self.demand_on(core).min(ELAPSED) * FINE,
            taken: self.cores[core as usize].taken,
            siblings: [core, core ^ 1].into_iter().filter(|_| self.halves).collect(),
            node: Some(self.cores[core as usize].node),
        };
        let thread = |(id, thread): (u64, &SimulatedThread)| ThreadLoad {
            id,
            home: thread.home,
            busy: thread.demand * FINE * ELAPSED / self.demand_on(thread.home).max(ELAPSED),
            mask: thread.mask.clone(),
            node: thread.node,
            last_migration: None,
            moving: thread.arrives > self.now,
        };
        SchedulerSnapshot {
            elapsed: ELAPSED * FINE,
            quota: self.quota.map(f64::from),
            reactors: (0..self.active_cores()).map(reactor).collect(),
            threads: (0..).zip(&self.threads).map(thread).collect(),
        }
    }

    fn demand_on(&self, core: u32) -> u64 {
        let here = self.threads.iter().filter(|thread| thread.home == core);
        here.map(|thread| thread.demand).sum()
    }

    /// Cores on which a thread may be in a valid placement, computed independently.
    pub(super) fn is_allowed_on(&self, thread: &SimulatedThread) -> CpuList {
        let none_left = self.cores.iter().all(|core| core.taken);
        let open = |core: &u32| none_left || !self.cores[*core as usize].taken;
        let isolated = &self.scheduler.options().isolated;
        let all: CpuList = (0..self.active_cores()).filter(open).collect();
        let asked =
            thread.mask.as_ref().map_or_else(|| all.clone(), |mask| mask.intersection(&all));
        let shared = |cores: &CpuList| -> CpuList {
            let found: CpuList = cores.iter().filter(|core| !isolated.contains(*core)).collect();
            if found.is_empty() { cores.clone() } else { found }
        };
        if !asked.is_empty() {
            return shared(&asked);
        }
        // No core of the mask is left: near a named one, or the current one.
        let node = |core: u32| self.cores.get(core as usize).map(|core| core.node);
        let named = |core| {
            thread
                .mask
                .as_ref()
                .is_some_and(|mask| mask.iter().any(|other| node(other) == node(core)))
        };
        let near = |core: &u32| named(*core) && !isolated.contains(*core);
        let near: CpuList = all.iter().filter(near).collect();
        let stays = all.contains(thread.home) && !isolated.contains(thread.home);
        let home = stays.then_some(thread.home);
        let found = if near.is_empty() { shared(&all) } else { near };
        found.iter().chain(home).collect()
    }

    /// Prints the placement.
    pub(super) fn print_placement(&self) {
        let options = self.scheduler.options();
        println!("{options:?} quota {:?}", self.quota);
        for (core, at) in self.cores.iter().enumerate() {
            println!("core {core}: node {} taken {}", at.node, at.taken);
        }
        for (id, thread) in self.threads.iter().enumerate() {
            let SimulatedThread { home, demand, mask, node, .. } = thread;
            println!("thread {id}: core {home}, {demand} %, mask {mask:?}, node {node:?}");
        }
    }

    /// No thread is on a taken core, or outside its mask.
    pub(super) fn check_thread_placement(&self) {
        for thread in &self.threads {
            let allowed = self.is_allowed_on(thread);
            let Self { seed, .. } = self;
            let home = thread.home;
            assert!(allowed.contains(home), "seed {seed}: on {home}, expected one of {allowed}");
        }
    }

    /// No shared core is over the limit, and the quota is obeyed.
    pub(super) fn check_limits(&self) {
        let Self { seed, .. } = self;
        let isolated = &self.scheduler.options().isolated;
        for core in (0..self.active_cores()).filter(|core| !isolated.contains(*core)) {
            let wanted = self.demand_on(core);
            assert!(
                wanted <= 80 || self.loaded_thread_count_on(core) <= 1,
                "seed {seed}: core {core} is to do {wanted} %, expected 80 % at most",
            );
        }
        let busy =
            (0..self.active_cores()).filter(|core| self.loaded_thread_count_on(*core) > 0).count();
        let quota = self.quota.unwrap_or(self.active_cores()) as usize;
        assert!(busy <= quota, "seed {seed}: {busy} cores are busy, expected {quota} at most");
    }

    fn loaded_thread_count_on(&self, core: u32) -> usize {
        self.threads.iter().filter(|thread| thread.home == core && thread.demand > 0).count()
    }

    /// Threads without load are on the scheduling core, and idle ones too if there is room.
    pub(super) fn check_consolidated(&self) {
        let Self { seed, .. } = self;
        let options = self.scheduler.options();
        let none_left = self.cores.iter().all(|core| core.taken);
        let open = |core: &u32| none_left || !self.cores[*core as usize].taken;
        let shared = |core: &u32| open(core) && !options.isolated.contains(*core);
        let chosen = options.scheduling_core.filter(open);
        let Some(idle_core) = chosen.or_else(|| (0..self.active_cores()).find(shared)) else {
            return;
        };
        let busy =
            (0..self.active_cores()).filter(|core| self.loaded_thread_count_on(*core) > 0).count();
        let wakes = self.loaded_thread_count_on(idle_core) == 0
            && busy >= self.quota.unwrap_or(u32::MAX) as usize;
        for thread in self.threads.iter().filter(|thread| thread.home != idle_core) {
            let reactor = self.demand_on(idle_core) + thread.demand <= 75 && !wakes;
            let consolidates = thread.demand == 0 || (thread.demand < 20 && reactor);
            assert!(
                !consolidates || !self.is_allowed_on(thread).contains(idle_core),
                "seed {seed}: a thread of {} % is on core {}, expected {idle_core}",
                thread.demand,
                thread.home,
            );
        }
    }
}

fn draw_core(random: &mut Random, count: u32) -> u32 {
    u32::try_from(random.below(u64::from(count))).unwrap()
}

fn draw_demand(random: &mut Random) -> u64 {
    match random.below(8) {
        0..2 => 0,
        2..4 => 1 + random.below(19),
        4..7 => 20 + random.below(50),
        _ => 20 + random.below(81),
    }
}

fn draw_mask(random: &mut Random, count: u32) -> Option<CpuList> {
    let mask = (0..count + 1).filter(|_| random.chance(1, 2)).collect::<CpuList>();
    (!mask.is_empty() && random.chance(2, 3)).then_some(mask)
}
