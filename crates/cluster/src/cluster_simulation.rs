//! A run: all components are polled at one instant until there is no progress, and then time jumps.

mod faults;
mod takeover;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Instant, Random, Span};
use tenmil_dma::RegionTable;
use tenmil_serve::tcp::MemoryDirectory;

use crate::cluster_host::{ClusterHost, HostGoal, HostsShared};
use crate::cluster_network::ClusterNetwork;
use crate::cluster_plan::{ClusterPlan, FaultEvent, MachinePlan};
use crate::consistency_checker::ConsistencyChecker;
use crate::disk_access::{ExportAddress, MultipathAccess};
use crate::exports::ExportOpener;
use crate::injected_bugs::InjectedBugs;
use crate::pool_host::{self, PoolHost};
use crate::reservation_client::{DesiredReservation, ReservationClient};
use crate::run_history::{RecordScope, RunHistory};
use crate::sim_disk::SimDisk;
use crate::target_process::{TargetProcess, subsystem_nqn};

use self::takeover::TakeoverStage;

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// Seed.
    pub seed: u64,
    /// Hash of the history. Equal for equal runs.
    pub hash: u64,
    /// Number of records in the history.
    pub events: usize,
    /// Violation, if there was one.
    pub failure: Option<String>,
    /// Records that concern the violation, oldest first. Empty for a successful run.
    pub history: Vec<String>,
}

/// A violation and its scope.
#[derive(Clone, Debug)]
pub(crate) struct RunFailure {
    pub(crate) scope: RecordScope,
    pub(crate) text: String,
}

struct ClusterSimulation {
    plan: ClusterPlan,
    now: Instant,
    network: ClusterNetwork,
    disks: Vec<SimDisk>,
    processes: Vec<ProcessSlot>,
    machines: Vec<MachineDiskOrder>,
    hosts: Vec<ClusterHost>,
    /// Hosts that use a pool.
    pools: Vec<PoolHost>,
    goal: HostGoal,
    /// Reservation programs by host.
    registrants: BTreeMap<usize, ReservationClient>,
    checker: ConsistencyChecker,
    history: Arc<Mutex<RunHistory>>,
    writes: u64,
    /// Scheduled actions. The second number keeps the order of actions at the same time.
    agenda: BTreeMap<(Instant, u64), ScheduledAction>,
    actions: u64,
    lives: u64,
    /// A mirror is being opened, and the world is turned for it.
    is_opening: bool,
    /// What the opening of a reserved pool waits for.
    takeover: Option<TakeoverStage>,
}

/// A target process, running or not.
struct ProcessSlot {
    machine: usize,
    /// Number of its current incarnation, which identifies it to its disks.
    life: u64,
    process: Option<TargetProcess>,
    /// Storage of its reservations.
    state: MemoryDirectory,
    /// It alone serves the disks of its machine exchanged.
    is_exchanged: bool,
}

/// Disks of a machine.
struct MachineDiskOrder {
    /// Disk that is exported in each slot.
    order: Vec<usize>,
    /// The order was changed and not all processes have started since.
    is_reordered: bool,
}

#[derive(Clone, Copy, Debug)]
enum ScheduledAction {
    Fault(FaultEvent),
    Start(usize),
    RestorePower(usize),
}

/// Minimum time step.
const STEP_MIN: Span = Span::from_us(1);
/// Maximum time step while a component waits without progress.
const STEP_MAX: Span = Span::from_ms(1);
/// Maximum time between two iterations, for deadlines that no component reports.
const TICK: Span = Span::from_ms(10);
/// Time limit for all hosts to reach a goal.
const TIME_LIMIT: Span = Span::from_secs(120);
/// Maximum number of history lines in a report.
const LINES_MAX: usize = 200;
const BEGIN: Instant = Instant { ns: 1_000_000 };

/// Executes a plan. A run with a violation is repeated, so that its history includes the NVMe/TCP
/// PDUs.
pub fn run_plan(plan: &ClusterPlan) -> RunOutcome {
    let first = run_plan_once(plan, false);
    if first.failure.is_some() { run_plan_once(plan, true) } else { first }
}

/// Complete history of a run.
#[cfg(test)]
pub(crate) fn run_and_list_history(plan: &ClusterPlan) -> Vec<String> {
    let history = Arc::new(Mutex::new(RunHistory::new(false)));
    let _ = ClusterSimulation::new(plan, &history).and_then(|mut world| world.run_to_end());
    lock(&history).last_lines(&RecordScope::ALL, usize::MAX)
}

fn run_plan_once(plan: &ClusterPlan, has_packets: bool) -> RunOutcome {
    let history = Arc::new(Mutex::new(RunHistory::new(has_packets)));
    let ended = ClusterSimulation::new(plan, &history).and_then(|mut world| world.run_to_end());
    let history = lock(&history);
    let (hash, events) = (history.running_hash(), history.event_count());
    let (failure, lines) = match ended {
        Ok(()) => (None, Vec::new()),
        Err(RunFailure { scope, text }) => (Some(text), history.last_lines(&scope, LINES_MAX)),
    };
    RunOutcome { seed: plan.seed, hash, events, failure, history: lines }
}

impl ClusterSimulation {
    fn new(plan: &ClusterPlan, history: &Arc<Mutex<RunHistory>>) -> Result<Self, RunFailure> {
        tenmil_nvme_fabrics::reset_for_simulation();
        let mut random = Random::new(plan.seed);
        let counts = (plan.hosts.len(), plan.process_count());
        let network = ClusterNetwork::new(plan.cables, counts, random.fork(), Arc::clone(history));
        let options = plan.machines.iter().flat_map(|machine| &machine.disks);
        let disks: Vec<SimDisk> = options.map(|disk| SimDisk::new(*disk, random.fork())).collect();
        let owners = plan.machines.iter().enumerate();
        let owners = owners.flat_map(|(machine, it)| (0..it.processes).map(move |_| machine));
        let slot = |machine| ProcessSlot {
            machine,
            life: 0,
            process: None,
            state: MemoryDirectory::default(),
            is_exchanged: false,
        };
        let machine = |of: &MachinePlan| MachineDiskOrder {
            order: (0..of.disks.len()).collect(),
            is_reordered: false,
        };
        let mut world = Self {
            plan: plan.clone(),
            now: BEGIN,
            network,
            disks,
            processes: owners.map(slot).collect(),
            machines: plan.machines.iter().map(machine).collect(),
            hosts: Vec::new(),
            pools: Vec::new(),
            goal: HostGoal::Io,
            registrants: BTreeMap::new(),
            checker: ConsistencyChecker::default(),
            history: Arc::clone(history),
            writes: 0,
            agenda: BTreeMap::new(),
            actions: 0,
            lives: 0,
            is_opening: false,
            takeover: None,
        };
        world.network.advance_to(BEGIN);
        world.format_mirrors()?;
        for process in 0..world.processes.len() {
            world.start_process(process)?;
        }
        for (at, fault) in &plan.faults {
            world.schedule(*at, ScheduledAction::Fault(*fault));
        }
        for number in 0..plan.hosts.len() {
            if world.plan.machines[plan.hosts[number].machine].is_pool {
                let host = world.new_pool_host(number)?;
                world.pools.push(host);
                if plan.is_reserved {
                    let registrant = ReservationClient::new(number, world.disk_of(number));
                    world.registrants.insert(number, registrant.map_err(failure_of_simulation)?);
                }
                continue;
            }
            let host = world.new_host(number, BEGIN)?;
            world.hosts.push(host);
            let registrant = ReservationClient::new(number, world.disk_of(number))
                .map_err(failure_of_simulation)?;
            world.registrants.insert(number, registrant);
        }
        world.reserve_pool_disk();
        Ok(world)
    }

    fn run_to_end(&mut self) -> Result<(), RunFailure> {
        let until = self.plan.until;
        self.run_until(until, |_| false)?;
        self.agenda.retain(|_, action| !matches!(action, ScheduledAction::Fault(_)));
        self.network.end_partitions();
        self.disks.iter().for_each(SimDisk::plug_in_without_delays);
        self.record_event(RecordScope::ALL, "the faults end".into());
        self.run_until_goal(HostGoal::Drain)?;
        self.run_until_goal(HostGoal::Flush)?;
        for machine in 0..self.plan.machines.len() {
            self.lose_power(machine, Span::from_ms(200));
        }
        self.run_until_goal(HostGoal::Audit)?;
        if let Some(stray) = self.network.reused_unreleased_memory().first() {
            return Err(failure_of_simulation(format!("memory was used again too early: {stray}")));
        }
        self.run_until_goal(HostGoal::Close)?;
        self.hosts.clear();
        self.pools.clear();
        self.registrants.clear();
        self.check_no_leaks()
    }

    fn format_mirrors(&self) -> Result<(), RunFailure> {
        for machine in 0..self.plan.machines.len() {
            if self.plan.machines[machine].is_mirror {
                let regions = RegionTable::new(8);
                let (process, bugs, now) = (0, InjectedBugs::default(), self.now);
                let mut opening = ExportOpener { process, regions: &regions, bugs, now };
                let disks = &self.disks[self.disks_of(machine)];
                opening.create_mirror(disks, 7 + machine as u128).map_err(failure_of_simulation)?;
            }
        }
        for (number, host) in self.plan.hosts.iter().enumerate() {
            if !host.other_legs.is_empty() {
                let regions = RegionTable::new(8);
                let (process, bugs, now) = (0, InjectedBugs::default(), self.now);
                let mut opening = ExportOpener { process, regions: &regions, bugs, now };
                let legs = self.disks_of_host(number);
                let disks: Vec<SimDisk> =
                    legs.iter().map(|disk| self.disks[*disk].clone()).collect();
                opening
                    .create_mirror(&disks, 70 + number as u128)
                    .map_err(failure_of_simulation)?;
            }
        }
        Ok(())
    }

    fn new_pool_host(&self, number: usize) -> Result<PoolHost, RunFailure> {
        let (disk, plan) = (self.disk_of(number), &self.plan.hosts[number]);
        if number == 0 {
            let sectors = plan.blocks;
            pool_host::create_pool_on_disk(&self.disks[disk], sectors / 8)
                .map_err(failure_of_simulation)?;
        }
        let address = self.address_of(disk);
        let memory = (&self.network, pool_host::MEMORY_BYTES);
        let link = MultipathAccess::new((number, self.plan.bugs), plan, &address, memory, self.now);
        let link = (link.map_err(failure_of_simulation)?, number == 0 && !self.plan.is_reserved);
        let ids = (number, self.plan.seed, self.plan.bugs);
        Ok(PoolHost::new(ids, plan, disk, link, self.now))
    }

    /// A host that begins to work then.
    fn new_host(&self, number: usize, begins_at: Instant) -> Result<ClusterHost, RunFailure> {
        let legs = self.disks_of_host(number);
        let addresses: Vec<ExportAddress> =
            legs.iter().map(|disk| self.address_of(*disk)).collect();
        let (ids, plan) = ((number, self.plan.seed, self.plan.bugs), &self.plan.hosts[number]);
        let times = (self.now, begins_at);
        let made = ClusterHost::new(ids, plan, (legs[0], &addresses), &self.network, times);
        made.map_err(failure_of_simulation)
    }

    /// Index of the disk of a host among all disks.
    fn disk_of(&self, host: usize) -> usize {
        let plan = &self.plan.hosts[host];
        self.disks_of(plan.machine).start + plan.disk
    }

    /// The disks of a host: one, or those of all legs of its mirror.
    fn disks_of_host(&self, host: usize) -> Vec<usize> {
        let others = self.plan.hosts[host].other_legs.iter();
        let others = others.map(|machine| self.disks_of(*machine).start);
        std::iter::once(self.disk_of(host)).chain(others).collect()
    }

    /// Where a disk is served now.
    fn address_of(&self, disk: usize) -> ExportAddress {
        let machines = 0..self.plan.machines.len();
        let machine = machines.rev().find(|machine| self.disks_of(*machine).start <= disk);
        let machine = machine.unwrap_or(0);
        let index = disk - self.disks_of(machine).start;
        let slot = self.machines[machine].order.iter().position(|at| *at == index);
        let (tenant, nsid) = self.plan.machines[machine].slots[slot.unwrap_or(index)];
        let mut processes = self.processes_of(machine);
        if self.plan.machines[machine].is_shared_out {
            let own = processes.start + slot.unwrap_or(index);
            processes = own..own + 1;
        }
        ExportAddress {
            process: processes.start,
            processes: processes.len(),
            subsystem: subsystem_nqn(tenant),
            nsid,
            authentication: self.plan.authentication,
        }
    }

    /// Sets a goal for all hosts and runs until they have reached it.
    fn run_until_goal(&mut self, goal: HostGoal) -> Result<(), RunFailure> {
        let now = self.now;
        self.goal = goal;
        // Released first: a Flush of another host conflicts with a Write Exclusive reservation, so the
        // goals after this one could not be reached.
        if goal == HostGoal::Drain && !self.plan.is_reserved {
            for registrant in self.registrants.values_mut() {
                registrant.set_requested(DesiredReservation::Released, now, &mut self.checker);
            }
        }
        self.hosts.iter_mut().for_each(|host| host.set_goal(goal, now));
        self.pools.iter_mut().for_each(|host| host.set_goal(goal, now));
        let end = now.after(TIME_LIMIT);
        self.run_until(end, |world| {
            world.hosts.iter_mut().all(ClusterHost::is_done)
                && world.are_pools_done()
                && world.registrants.values().all(ReservationClient::is_done)
        })?;
        if let Some((host, _)) = self.registrants.iter().find(|(_, it)| !it.is_done()) {
            return Err(RunFailure {
                scope: RecordScope::host(*host),
                text: format!("host {host} has not released its reservation within {TIME_LIMIT}"),
            });
        }
        if let Some(takeover) = self.takeover {
            return Err(failure_of_simulation(format!(
                "host 1 has not taken the pool over within {TIME_LIMIT}: found it {takeover:?}, expected a \
                 claim"
            )));
        }
        if !self.are_pools_done() {
            let text =
                format!("the hosts of the pool have not reached {goal:?} within {TIME_LIMIT}");
            return Err(failure_of_simulation(text));
        }
        match self.hosts.iter_mut().position(|host| !host.is_done()) {
            None => Ok(()),
            Some(host) => Err(RunFailure {
                scope: RecordScope::host(host),
                text: format!("host {host} has not reached {goal:?} within {TIME_LIMIT}"),
            }),
        }
    }

    fn are_pools_done(&mut self) -> bool {
        let checker = &self.checker;
        if self.takeover.is_some() {
            return false;
        }
        let mut pools = self.pools.iter_mut().enumerate();
        pools.all(|(number, host)| {
            host.is_done(checker.pool_owner(host.disk_index()) == Some(number))
        })
    }

    /// Checks that no resources are left after all hosts have ended.
    fn check_no_leaks(&mut self) -> Result<(), RunFailure> {
        let end = self.now.after(TIME_LIMIT);
        let is_clean = |world: &mut Self| {
            let mut running = world.processes.iter().filter_map(|slot| slot.process.as_ref());
            // A mirror performs background I/O from time to time.
            running.all(|process| process.leaked_resources().is_none())
                && world.disks.iter().all(|disk| disk.in_flight_requests() == 0)
        };
        self.run_until(end, is_clean)?;
        for (number, slot) in self.processes.iter().enumerate() {
            if let Some(leak) = slot.process.as_ref().and_then(TargetProcess::leaked_resources) {
                return Err(failure_of_simulation(format!(
                    "target {number} after the last host: {leak}"
                )));
            }
        }
        match self.disks.iter().position(|disk| disk.in_flight_requests() > 0) {
            Some(disk) => {
                Err(failure_of_simulation(format!("disk {disk} has requests without a submitter")))
            }
            None => Ok(()),
        }
    }

    fn run_until(
        &mut self,
        end: Instant,
        mut is_enough: impl FnMut(&mut Self) -> bool,
    ) -> Result<(), RunFailure> {
        let mut step = STEP_MIN;
        while self.now < end && !is_enough(self) {
            self.step_and_advance(&mut step)?;
            self.open_mirrors()?;
        }
        Ok(())
    }

    /// Steps every component once, and advances time to the next deadline.
    fn step_and_advance(&mut self, step: &mut Span) -> Result<(), RunFailure> {
        let is_busy = self.poll_all()?;
        let wake = self.wake_at();
        *step = if is_busy || wake > self.now {
            STEP_MIN
        } else {
            Span { ns: (2 * step.ns).min(STEP_MAX.ns) }
        };
        let soonest = self.now.after(*step);
        let next = if is_busy { soonest } else { wake.min(self.now.after(TICK)).max(soonest) };
        self.now = next;
        Ok(())
    }

    /// Opens the mirrors that hosts want to open. What that waits for comes as the world is turned.
    fn open_mirrors(&mut self) -> Result<(), RunFailure> {
        for number in 0..self.hosts.len() {
            let Some(setup) = self.hosts[number].take_mirror_setup(self.now) else { continue };
            let (mut step, mut broken) = (STEP_MIN, Ok(()));
            self.is_opening = true;
            let opened = setup.open_mirror(&mut || {
                match &broken {
                    Ok(()) => broken = self.step_and_advance(&mut step),
                    // It ends when its time is over.
                    Err(_) => self.now = self.now.after(Span::from_secs(1)),
                }
                self.now
            });
            self.is_opening = false;
            broken?;
            let mut shared = HostsShared {
                checker: &mut self.checker,
                history: &self.history,
                writes: &mut self.writes,
            };
            self.hosts[number].handle_mirror_opened(opened, self.now, &mut shared);
        }
        Ok(())
    }

    /// Polls all components once. Returns true if there was progress.
    fn poll_all(&mut self) -> Result<bool, RunFailure> {
        let now = self.now;
        let mut is_busy = false;
        // Faults first, then network and disks, then processes and hosts, so that each sees the
        // effects at the same instant.
        while let Some(entry) = self.agenda.first_entry().filter(|entry| entry.key().0 <= now) {
            let action = entry.remove();
            self.execute_action(action)?;
            is_busy = true;
        }
        self.network.advance_to(now);
        self.disks.iter().for_each(|disk| disk.advance_to(now));
        for (port, slot) in self.processes.iter_mut().enumerate() {
            if let Some(process) = &mut slot.process {
                is_busy |= process.poll_process(now, port, &self.network);
            }
        }
        for index in 0..self.hosts.len() {
            let mut shared = HostsShared {
                checker: &mut self.checker,
                history: &self.history,
                writes: &mut self.writes,
            };
            is_busy |= self.hosts[index].poll_host(now, &mut shared)?;
        }
        is_busy |= self.poll_reservation_clients()?;
        is_busy |= self.poll_takeover();
        for index in 0..self.pools.len() {
            let mut shared = HostsShared {
                checker: &mut self.checker,
                history: &self.history,
                writes: &mut self.writes,
            };
            is_busy |= self.pools[index].poll_pool(now, &mut shared)?;
        }
        Ok(is_busy)
    }

    fn poll_reservation_clients(&mut self) -> Result<bool, RunFailure> {
        let mut is_busy = false;
        for host in 0..self.plan.hosts.len() {
            let address = self.address_of(self.disk_of(host));
            let Some(registrant) = self.registrants.get_mut(&host) else { continue };
            let mut shared = HostsShared {
                checker: &mut self.checker,
                history: &self.history,
                writes: &mut self.writes,
            };
            let reached = (&address, &self.network);
            is_busy |= registrant.poll_client(self.now, reached, &mut shared)?;
        }
        Ok(is_busy)
    }

    fn wake_at(&mut self) -> Instant {
        let now = self.now;
        let agenda = self.agenda.first_key_value().map_or(Instant::NEVER, |((at, _), _)| *at);
        let disks = self.disks.iter().map(SimDisk::wake_at);
        let hosts = self.hosts.iter_mut().map(|host| host.wake_at(now));
        let running = self.processes.iter().filter_map(|slot| slot.process.as_ref());
        let agenda =
            running.map(TargetProcess::wake_at).filter(|at| *at > now).fold(agenda, Instant::min);
        let registrants = self.registrants.values_mut().map(|it| it.wake_at(now));
        let pools = self.pools.iter_mut().map(|host| host.wake_at(now));
        let hosts = hosts.chain(pools);
        let first = disks.chain(hosts).chain(registrants).fold(agenda, Instant::min);
        first.min(self.network.wake_at())
    }

    fn schedule(&mut self, at: Instant, action: ScheduledAction) {
        self.actions += 1;
        self.agenda.insert((at, self.actions), action);
    }

    fn execute_action(&mut self, action: ScheduledAction) -> Result<(), RunFailure> {
        match action {
            ScheduledAction::Fault(fault) => self.inject_fault(fault),
            ScheduledAction::Start(process) => self.start_process(process),
            ScheduledAction::RestorePower(machine) => self.restore_power(machine),
        }
    }

    fn disks_of(&self, machine: usize) -> Range<usize> {
        let count = |of: &MachinePlan| of.disks.len();
        let first = self.plan.machines[..machine].iter().map(count).sum();
        first..first + count(&self.plan.machines[machine])
    }

    fn processes_of(&self, machine: usize) -> Range<usize> {
        let first = self.plan.machines[..machine].iter().map(|of| of.processes).sum();
        first..first + self.plan.machines[machine].processes
    }

    fn record_event(&self, scope: RecordScope, text: String) {
        lock(&self.history).add_record(self.now, scope, text);
    }
}

impl InjectedBugs {
    /// First of `seeds` seeds that finds the bug, if any does.
    pub fn first_seed(self, seeds: u64) -> Option<RunOutcome> {
        let mut statuses = (0..seeds).map(|seed| run_plan(&ClusterPlan::from_seed(seed, self)));
        statuses.find(|status| status.failure.is_some())
    }
}

fn failure_of_simulation(text: String) -> RunFailure {
    RunFailure { scope: RecordScope::ALL, text }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
