//! A run: everything is turned at one instant until nothing moves, and then time jumps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Random, Span};
use ctrl::controller::Persistence;

use crate::bugs::InjectedBugs;
use crate::checker::Checker;
use crate::disk::Disk;
use crate::history::{History, Scope};
use crate::host::{Goal, Host, Shared};
use crate::network::{Harm, Network, Port};
use crate::plan::{FaultEvent, Plan};
use crate::process::{Export, Process, ProcessOptions};

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// The hash of the history. Equal for equal runs.
    pub hash: u64,
    /// Records in the history.
    pub events: usize,
    /// Which promise was broken, if one was.
    pub failure: Option<String>,
    /// Of a run that has failed: what concerns that, oldest first.
    pub history: Vec<String>,
}

/// A promise that was broken, and what it concerns.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) scope: Scope,
    pub(crate) text: String,
}

struct World {
    plan: Plan,
    now: Instant,
    network: Network,
    disks: Vec<Disk>,
    processes: Vec<ProcessSlot>,
    hosts: Vec<Host>,
    checker: Checker,
    history: Arc<Mutex<History>>,
    writes: u64,
    /// What happens when; the second number keeps the order of what happens at once.
    agenda: BTreeMap<(Instant, u64), Action>,
    actions: u64,
    lives: u64,
}

/// A process that runs or not.
struct ProcessSlot {
    machine: usize,
    /// Its current life, as its disks know it.
    life: u64,
    process: Option<Process>,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Fault(FaultEvent),
    Start(usize),
    RestorePower(usize),
}

/// By how much time moves on at least.
const STEP_MIN: Span = Span::from_us(1);
/// By how much more while somebody waits and nothing moves.
const STEP_MAX: Span = Span::from_ms(1);
/// How long nobody is turned at most: for deadlines that nobody tells.
const TICK: Span = Span::from_ms(10);
/// How long it may take until all hosts have reached a goal.
const PATIENCE: Span = Span::from_secs(120);
/// Lines of a history that is shown.
const LINES_MAX: usize = 200;
const BEGIN: Instant = Instant { ns: 1_000_000 };

/// Runs a plan. The history of a run that fails has the NVMe/TCP units in it, too.
pub fn run(plan: &Plan) -> Outcome {
    let first = run_once(plan, false);
    if first.failure.is_some() { run_once(plan, true) } else { first }
}

/// All that happens in a run.
#[cfg(test)]
pub(crate) fn history_of(plan: &Plan) -> Vec<String> {
    let history = Arc::new(Mutex::new(History::new(false)));
    let _ = World::new(plan, &history).and_then(|mut world| world.run());
    lock(&history).lines(&Scope::ALL, usize::MAX)
}

fn run_once(plan: &Plan, has_packets: bool) -> Outcome {
    let history = Arc::new(Mutex::new(History::new(has_packets)));
    let ended = World::new(plan, &history).and_then(|mut world| world.run());
    let history = lock(&history);
    let (hash, events) = (history.hash(), history.events());
    let (failure, lines) = match ended {
        Ok(()) => (None, Vec::new()),
        Err(Failure { scope, text }) => (Some(text), history.lines(&scope, LINES_MAX)),
    };
    Outcome { seed: plan.seed, hash, events, failure, history: lines }
}

impl World {
    fn new(plan: &Plan, history: &Arc<Mutex<History>>) -> Result<Self, Failure> {
        let mut random = Random::new(plan.seed);
        let counts = (plan.hosts.len(), plan.processes());
        let network = Network::new(plan.cables, counts, random.fork(), Arc::clone(history));
        let options = plan.machines.iter().flat_map(|machine| &machine.disks);
        let disks: Vec<Disk> = options.map(|disk| Disk::new(*disk, random.fork())).collect();
        let owners = plan.machines.iter().enumerate();
        let owners = owners.flat_map(|(machine, it)| (0..it.processes).map(move |_| machine));
        let slot = |machine| ProcessSlot { machine, life: 0, process: None };
        let mut world = Self {
            plan: plan.clone(),
            now: BEGIN,
            network,
            disks,
            processes: owners.map(slot).collect(),
            hosts: Vec::new(),
            checker: Checker::default(),
            history: Arc::clone(history),
            writes: 0,
            agenda: BTreeMap::new(),
            actions: 0,
            lives: 0,
        };
        world.network.advance(BEGIN);
        for process in 0..world.processes.len() {
            world.start(process)?;
        }
        for (at, fault) in &plan.faults {
            world.schedule(*at, Action::Fault(*fault));
        }
        for (number, host) in plan.hosts.iter().enumerate() {
            let processes = world.processes_of(host.machine);
            let disk = world.disks_of(host.machine).start + host.disk;
            let nsid = u32::try_from(host.disk + 1).unwrap_or(1);
            let ids = (number, plan.seed, plan.bugs);
            let made = Host::new(ids, host, (disk, nsid), processes, &world.network, BEGIN);
            world.hosts.push(made.map_err(broken)?);
        }
        Ok(world)
    }

    fn run(&mut self) -> Result<(), Failure> {
        let until = self.plan.until;
        self.turn_until(until, |_| false)?;
        self.agenda.retain(|_, action| !matches!(action, Action::Fault(_)));
        self.network.heal();
        self.note(Scope::ALL, "the faults end".into());
        self.reach(Goal::Drain)?;
        self.reach(Goal::Flush)?;
        for machine in 0..self.plan.machines.len() {
            self.lose_power(machine, Span::from_ms(200));
        }
        self.reach(Goal::Audit)?;
        if let Some(stray) = self.network.strays().first() {
            return Err(broken(format!("memory was used again too early: {stray}")));
        }
        self.reach(Goal::Close)?;
        self.hosts.clear();
        self.check_end()
    }

    /// Has all hosts reach a goal.
    fn reach(&mut self, goal: Goal) -> Result<(), Failure> {
        let now = self.now;
        self.hosts.iter_mut().for_each(|host| host.set_goal(goal, now));
        let end = now.after(PATIENCE);
        self.turn_until(end, |world| world.hosts.iter_mut().all(Host::is_done))?;
        match self.hosts.iter_mut().position(|host| !host.is_done()) {
            None => Ok(()),
            Some(host) => Err(Failure {
                scope: Scope::host(host),
                text: format!("host {host} has not reached {goal:?} within {PATIENCE}"),
            }),
        }
    }

    /// After all hosts have gone nothing is left of them.
    fn check_end(&mut self) -> Result<(), Failure> {
        let end = self.now.after(PATIENCE);
        let is_clean = |world: &mut Self| {
            let mut running = world.processes.iter().filter_map(|slot| slot.process.as_ref());
            running.all(|process| process.leak().is_none())
        };
        self.turn_until(end, is_clean)?;
        for (number, slot) in self.processes.iter().enumerate() {
            if let Some(leak) = slot.process.as_ref().and_then(Process::leak) {
                return Err(broken(format!("target {number} after the last host: {leak}")));
            }
        }
        match self.disks.iter().position(|disk| disk.under_way() > 0) {
            Some(disk) => Err(broken(format!("disk {disk} has requests that nobody waits for"))),
            None => Ok(()),
        }
    }

    fn turn_until(
        &mut self,
        end: Instant,
        mut is_enough: impl FnMut(&mut Self) -> bool,
    ) -> Result<(), Failure> {
        let mut step = STEP_MIN;
        while self.now < end && !is_enough(self) {
            let is_busy = self.turn()?;
            let wake = self.wake_at();
            step = if is_busy || wake > self.now {
                STEP_MIN
            } else {
                Span { ns: (2 * step.ns).min(STEP_MAX.ns) }
            };
            let soonest = self.now.after(step);
            let next = if is_busy { soonest } else { wake.min(self.now.after(TICK)).max(soonest) };
            self.now = next;
        }
        Ok(())
    }

    /// Turns everybody once. True if anything was done.
    fn turn(&mut self) -> Result<bool, Failure> {
        let now = self.now;
        let mut is_busy = false;
        while let Some(entry) = self.agenda.first_entry().filter(|entry| entry.key().0 <= now) {
            let action = entry.remove();
            self.act(action)?;
            is_busy = true;
        }
        self.network.advance(now);
        self.disks.iter().for_each(|disk| disk.advance(now));
        for (port, slot) in self.processes.iter_mut().enumerate() {
            if let Some(process) = &mut slot.process {
                is_busy |= process.turn(now, port, &self.network);
            }
        }
        for index in 0..self.hosts.len() {
            let mut shared = Shared {
                checker: &mut self.checker,
                history: &self.history,
                writes: &mut self.writes,
            };
            is_busy |= self.hosts[index].turn(now, &mut shared)?;
        }
        Ok(is_busy)
    }

    fn wake_at(&mut self) -> Instant {
        let now = self.now;
        let agenda = self.agenda.first_key_value().map_or(Instant::NEVER, |((at, _), _)| *at);
        let disks = self.disks.iter().map(Disk::wake_at);
        let hosts = self.hosts.iter_mut().map(|host| host.wake_at(now));
        let first = disks.chain(hosts).fold(agenda, Instant::min);
        first.min(self.network.wake_at())
    }

    fn schedule(&mut self, at: Instant, action: Action) {
        self.actions += 1;
        self.agenda.insert((at, self.actions), action);
    }

    fn act(&mut self, action: Action) -> Result<(), Failure> {
        match action {
            Action::Fault(fault) => self.fault(fault),
            Action::Start(process) => return self.start(process),
            Action::RestorePower(machine) => return self.restore_power(machine),
        }
        Ok(())
    }

    fn fault(&mut self, fault: FaultEvent) {
        match fault {
            FaultEvent::Kill { process, down } => self.kill(process, down),
            FaultEvent::LosePower { machine, down } => self.lose_power(machine, down),
            FaultEvent::Pause { process, span } => {
                let until = self.now.after(span);
                if let Some(running) = &mut self.processes[process].process {
                    running.pause(until);
                    self.note(Scope::ALL, format!("target {process} is stopped for {span}"));
                }
            }
            FaultEvent::Partition { host, process, span } => {
                self.network.partition(host, process, span);
                let text = format!("host {host} and target {process} are partitioned for {span}");
                self.note(Scope::host(host), text);
            }
            FaultEvent::Harm { host, process, harm } => {
                self.network.harm(host, process, harm);
                let what = match harm {
                    Harm::Reset => "are reset".to_owned(),
                    Harm::Vanish => "lose all that is sent".to_owned(),
                    Harm::Delay(direction, span) => {
                        format!("carry nothing {direction:?} for {span}")
                    }
                };
                let text = format!("connections of host {host} to target {process} {what}");
                self.note(Scope::host(host), text);
            }
        }
    }

    /// A process is gone, without a word.
    fn end_process(&mut self, process: usize) -> bool {
        let slot = &mut self.processes[process];
        let Some(ended) = slot.process.take() else { return false };
        self.disks.iter().for_each(|disk| disk.kill(slot.life));
        drop(ended);
        true
    }

    fn kill(&mut self, process: usize, down: Span) {
        if self.processes[process].process.is_none() {
            return;
        }
        self.note(Scope::ALL, format!("target {process} is killed"));
        self.network.set_port(process, Port::Refuses);
        self.end_process(process);
        self.schedule(self.now.after(down), Action::Start(process));
    }

    fn lose_power(&mut self, machine: usize, down: Span) {
        let processes = self.processes_of(machine);
        let is_running = |process: usize| self.processes[process].process.is_some();
        if !processes.clone().any(is_running) {
            return;
        }
        self.note(Scope::ALL, format!("machine {machine} loses its power"));
        for process in processes {
            self.network.set_port(process, Port::Dark);
            self.end_process(process);
            let is_start = |action: &Action| matches!(action, Action::Start(it) if *it == process);
            self.agenda.retain(|_, action| !is_start(action));
        }
        for disk in self.disks_of(machine) {
            self.disks[disk].lose_power();
            self.checker.power_lost(disk, self.now);
        }
        self.schedule(self.now.after(down), Action::RestorePower(machine));
    }

    fn restore_power(&mut self, machine: usize) -> Result<(), Failure> {
        self.note(Scope::ALL, format!("machine {machine} has power again"));
        for process in self.processes_of(machine) {
            self.network.set_port(process, Port::Refuses);
            self.start(process)?;
        }
        Ok(())
    }

    fn start(&mut self, process: usize) -> Result<(), Failure> {
        if self.processes[process].process.is_some() {
            return Ok(());
        }
        self.lives += 1;
        let machine = self.processes[process].machine;
        let export = |disk: usize| {
            let mut uuid = [0x11; 16];
            uuid[15] = u8::try_from(disk).unwrap_or(u8::MAX);
            Export { disk: self.disks[disk].clone(), uuid, persistence: Persistence::default() }
        };
        let namespaces = (1..).zip(self.disks_of(machine).map(export)).collect();
        let options = ProcessOptions {
            port: process,
            id: self.lives,
            quiesce: self.plan.machines[machine].quiesce,
            namespaces,
            bugs: self.plan.bugs,
        };
        let started = Process::start(options, &self.network).map_err(broken)?;
        let slot = &mut self.processes[process];
        (slot.life, slot.process) = (self.lives, Some(started));
        self.note(Scope::ALL, format!("target {process} starts"));
        Ok(())
    }

    fn disks_of(&self, machine: usize) -> Range<usize> {
        let count = |of: &crate::plan::MachinePlan| of.disks.len();
        let first = self.plan.machines[..machine].iter().map(count).sum();
        first..first + count(&self.plan.machines[machine])
    }

    fn processes_of(&self, machine: usize) -> Range<usize> {
        let first = self.plan.machines[..machine].iter().map(|of| of.processes).sum();
        first..first + self.plan.machines[machine].processes
    }

    fn note(&self, scope: Scope, text: String) {
        lock(&self.history).note(self.now, scope, text);
    }
}

impl InjectedBugs {
    /// The first of so many seeds that finds it, if one does.
    pub fn first_seed(self, seeds: u64) -> Option<Outcome> {
        let mut outcomes = (0..seeds).map(|seed| run(&Plan::of(seed, self)));
        outcomes.find(|outcome| outcome.failure.is_some())
    }
}

fn broken(text: String) -> Failure {
    Failure { scope: Scope::ALL, text }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
