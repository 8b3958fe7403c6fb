//! Faults of machines, processes and connections, and their recovery.

use std::collections::BTreeMap;

use tenmil_base::Span;

use super::{Action, World, broken};
use crate::disk::Disk;
use crate::exports::{Blocks, Export};
use crate::history::Scope;
use crate::link::Address;
use crate::network::{Disturbance, Port};
use crate::plan::FaultEvent;
use crate::process::{Process, ProcessOptions, subsystem_nqn};
use crate::registrant::RequestedState;
use crate::world::Failure;

impl World {
    pub(super) fn fault(&mut self, fault: FaultEvent) -> Result<(), Failure> {
        let now = self.now;
        match fault {
            FaultEvent::Kill { process, down } => self.kill(process, down),
            FaultEvent::LosePower { machine, down } => self.lose_power(machine, down),
            FaultEvent::TakeOver { span, outage } => self.take_over(span, outage),
            FaultEvent::Unplug { disk, is_absent } => {
                self.disks[disk].set_absent(is_absent);
                let what = if is_absent { "unplugged" } else { "plugged in" };
                self.note(Scope::ALL, format!("disk {disk} is {what}"));
            }
            FaultEvent::Swap { machine, down } => self.swap(machine, down),
            FaultEvent::RestartHost { host, down } => self.restart_host(host, down)?,
            FaultEvent::SwapOne { process, down } => self.swap_one(process, down),
            FaultEvent::Reserve { host } => self.want(host, RequestedState::Held),
            FaultEvent::Release { host } => self.want(host, RequestedState::Released),
            FaultEvent::Pause { process, span } => {
                let until = now.after(span);
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
                    Disturbance::Reset => "are reset".to_owned(),
                    Disturbance::Vanish => "lose all that is sent".to_owned(),
                    Disturbance::Delay(direction, span) => {
                        format!("carry nothing {direction:?} for {span}")
                    }
                };
                let text = format!("connections of host {host} to target {process} {what}");
                self.note(Scope::host(host), text);
            }
        }
        Ok(())
    }

    pub(super) fn want(&mut self, host: usize, wanted: RequestedState) {
        let (now, checker) = (self.now, &mut self.checker);
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.set_requested(wanted, now, checker);
        }
    }

    /// Kills the processes of a machine and restarts them with its disks in another order.
    fn swap(&mut self, machine: usize, down: Span) {
        let processes = self.processes_of(machine);
        let is_running = |process: usize| self.processes[process].process.is_some();
        if !processes.clone().all(is_running) || self.machines[machine].is_reordered {
            return;
        }
        processes.for_each(|process| self.kill(process, down));
        let state = &mut self.machines[machine];
        state.order.reverse();
        state.is_reordered = true;
        self.note(Scope::ALL, format!("the disks of machine {machine} are exchanged"));
    }

    /// A process is killed, and starts with the disks in the other order than now. Its hosts are not notified.
    fn swap_one(&mut self, process: usize, down: Span) {
        let slot = &mut self.processes[process];
        slot.is_exchanged = !slot.is_exchanged;
        let order = if slot.is_exchanged { "exchanged" } else { "as before" };
        self.note(Scope::ALL, format!("target {process} is to serve its disks {order}"));
        self.kill(process, down);
    }

    /// A process does not start with the disks exchanged: all start with them as before.
    fn undo_swap(&mut self, process: usize, machine: usize) {
        self.note(Scope::ALL, format!("the disks of machine {machine} go back"));
        let state = &mut self.machines[machine];
        state.order.reverse();
        state.is_reordered = false;
        let again = Span::from_ms(300);
        self.processes_of(machine).for_each(|process| self.kill(process, again));
        self.schedule(self.now.after(again), Action::Start(process));
    }

    /// The hosts of a machine begin anew, with where their disks are now.
    fn restart_hosts(&mut self, machine: usize) -> Result<(), Failure> {
        for number in 0..self.hosts.len() {
            if self.plan.hosts[number].machine != machine {
                continue;
            }
            let mut host = self.new_host(number, self.now)?;
            host.set_goal(self.goal, self.now);
            self.hosts[number] = host;
            self.checker.host_restarts(number, self.disk_of(number), self.now);
            let address = self.address_of(self.disk_of(number));
            let Address { subsystem, nsid, .. } = address;
            let text = format!(
                "host {number} starts again: its disk is namespace {nsid} of {subsystem} now; what \
                 it had in flight does not complete"
            );
            self.note(Scope::host(number), text);
        }
        Ok(())
    }

    /// A host crashes without notice, and starts again later.
    fn restart_host(&mut self, host: usize, down: Span) -> Result<(), Failure> {
        if self.is_opening {
            let again = Action::Fault(FaultEvent::RestartHost { host, down });
            self.schedule(self.now.after(Span::from_ms(1)), again);
            return Ok(());
        }
        let disk = self.disk_of(host);
        if self.hosts[host].is_exposed() {
            self.checker.power_lost(disk, self.now);
        }
        self.checker.host_restarts(host, disk, self.now);
        self.hosts[host] = self.new_host(host, self.now.after(down))?;
        let text = format!("host {host} is killed; what it had in flight does not complete");
        self.note(Scope::host(host), text);
        Ok(())
    }

    /// A disk has lost what it had not flushed. A mirror loses something only if no other leg has it.
    fn lose_unflushed(&mut self, disk: usize) {
        let now = self.now;
        for host in 0..self.hosts.len() {
            let legs = self.legs_of(host);
            let leg = legs.iter().position(|it| *it == disk).filter(|_| legs.len() > 1);
            if let Some(leg) = leg {
                if self.hosts[host].leg_lost_power(leg, now) {
                    self.checker.power_lost(legs[0], now);
                }
                return;
            }
        }
        self.checker.power_lost(disk, now);
    }

    /// A process crashes without notice.
    fn end_process(&mut self, process: usize) -> bool {
        let slot = &mut self.processes[process];
        let Some(ended) = slot.process.take() else { return false };
        slot.state.drop_pending();
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

    pub(super) fn lose_power(&mut self, machine: usize, down: Span) {
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
            self.lose_unflushed(disk);
        }
        self.schedule(self.now.after(down), Action::RestorePower(machine));
    }

    pub(super) fn restore_power(&mut self, machine: usize) -> Result<(), Failure> {
        self.note(Scope::ALL, format!("machine {machine} has power again"));
        for process in self.processes_of(machine) {
            self.network.set_port(process, Port::Refuses);
            self.start(process)?;
        }
        Ok(())
    }

    pub(super) fn start(&mut self, process: usize) -> Result<(), Failure> {
        if self.processes[process].process.is_some() {
            return Ok(());
        }
        self.lives += 1;
        let machine = self.processes[process].machine;
        let disks = self.disks_of(machine);
        let mut subsystems = BTreeMap::<String, Vec<Export>>::new();
        let plan = &self.plan.machines[machine];
        let mut order = self.machines[machine].order.clone();
        if self.processes[process].is_exchanged {
            order.reverse();
        }
        let own = process - self.processes_of(machine).start;
        let is_served = |slot: usize| !plan.is_shared_out || slot == own;
        let slots = plan.slots.iter().zip(&order).enumerate();
        for (_, ((tenant, nsid), index)) in slots.filter(|(slot, _)| is_served(*slot)) {
            let number = disks.start + index;
            let blocks = match plan.is_mirror {
                true => Blocks::Mirror(self.disks[disks.clone()].to_vec()),
                false => Blocks::Disk(self.disks[number].clone()),
            };
            let export = Export { nsid: *nsid, number, blocks };
            subsystems.entry(subsystem_nqn(*tenant)).or_default().push(export);
        }
        let options = ProcessOptions {
            port: process,
            id: self.lives,
            quiesce: plan.quiesce,
            subsystems,
            now: self.now,
            state: self.processes[process].state.clone(),
            bugs: self.plan.bugs,
        };
        let is_reordered = self.machines[machine].is_reordered;
        let started = match Process::start(options, &self.network) {
            // The stored reservations belong to another disk, so the service does not start: undo
            // the exchange.
            Err(why) if is_reordered => {
                self.note(Scope::ALL, format!("target {process} does not start: {why}"));
                self.undo_swap(process, machine);
                return Ok(());
            }
            // A mirror does not start without a leg that is up to date: retry.
            Err(why) if self.disks[disks].iter().any(Disk::is_absent) => {
                self.note(Scope::ALL, format!("target {process} does not start: {why}"));
                self.schedule(self.now.after(Span::from_ms(500)), Action::Start(process));
                return Ok(());
            }
            started => started.map_err(broken)?,
        };
        let slot = &mut self.processes[process];
        (slot.life, slot.process) = (self.lives, Some(started));
        self.note(Scope::ALL, format!("target {process} starts"));
        let is_running = |process: usize| self.processes[process].process.is_some();
        if is_reordered && self.processes_of(machine).all(is_running) {
            self.machines[machine].is_reordered = false;
            self.restart_hosts(machine)?;
        }
        Ok(())
    }
}
