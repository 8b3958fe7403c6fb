//! Faults of machines, processes and connections, and their recovery.

use std::collections::BTreeMap;

use tenmil_base::Span;

use super::{ClusterSimulation, ScheduledAction, failure_of_simulation};
use crate::cluster_network::{ConnectionFault, PortPower};
use crate::cluster_plan::FaultEvent;
use crate::cluster_simulation::RunFailure;
use crate::disk_access::ExportAddress;
use crate::exports::{ExportBlocks, SimExport};
use crate::reservation_client::DesiredReservation;
use crate::run_history::RecordScope;
use crate::sim_disk::SimDisk;
use crate::target_process::{ProcessOptions, TargetProcess, subsystem_nqn};

impl ClusterSimulation {
    pub(super) fn inject_fault(&mut self, fault: FaultEvent) -> Result<(), RunFailure> {
        let now = self.now;
        match fault {
            FaultEvent::Kill { process, down } => self.kill_process(process, down),
            FaultEvent::LosePower { machine, down } => self.lose_power(machine, down),
            FaultEvent::TakeOver { span, outage } => self.take_over(span, outage),
            FaultEvent::Unplug { disk, is_absent } => {
                self.disks[disk].set_unplugged(is_absent);
                let what = if is_absent { "unplugged" } else { "plugged in" };
                self.record_event(RecordScope::ALL, format!("disk {disk} is {what}"));
            }
            FaultEvent::Swap { machine, down } => self.swap_disks_of_machine(machine, down),
            FaultEvent::RestartHost { host, down } => self.restart_host(host, down)?,
            FaultEvent::SwapOne { process, down } => self.restart_with_disks_swapped(process, down),
            FaultEvent::Reserve { host } => {
                self.request_reservation(host, DesiredReservation::Held)
            }
            FaultEvent::Release { host } => {
                self.request_reservation(host, DesiredReservation::Released)
            }
            FaultEvent::Pause { process, span } => {
                let until = now.after(span);
                if let Some(running) = &mut self.processes[process].process {
                    running.pause_until(until);
                    self.record_event(
                        RecordScope::ALL,
                        format!("target {process} is stopped for {span}"),
                    );
                }
            }
            FaultEvent::Partition { host, process, span } => {
                self.network.partition(host, process, span);
                let text = format!("host {host} and target {process} are partitioned for {span}");
                self.record_event(RecordScope::host(host), text);
            }
            FaultEvent::Harm { host, process, harm } => {
                self.network.inject_fault(host, process, harm);
                let what = match harm {
                    ConnectionFault::Reset => "are reset".to_owned(),
                    ConnectionFault::Vanish => "lose all that is sent".to_owned(),
                    ConnectionFault::Delay(direction, span) => {
                        format!("carry nothing {direction:?} for {span}")
                    }
                };
                let text = format!("connections of host {host} to target {process} {what}");
                self.record_event(RecordScope::host(host), text);
            }
        }
        Ok(())
    }

    pub(super) fn request_reservation(&mut self, host: usize, wanted: DesiredReservation) {
        let (now, checker) = (self.now, &mut self.checker);
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.set_requested(wanted, now, checker);
        }
    }

    /// Kills the processes of a machine and restarts them with its disks in another order.
    fn swap_disks_of_machine(&mut self, machine: usize, down: Span) {
        let processes = self.processes_of(machine);
        let is_running = |process: usize| self.processes[process].process.is_some();
        if !processes.clone().all(is_running) || self.machines[machine].is_reordered {
            return;
        }
        processes.for_each(|process| self.kill_process(process, down));
        let state = &mut self.machines[machine];
        state.order.reverse();
        state.is_reordered = true;
        self.record_event(
            RecordScope::ALL,
            format!("the disks of machine {machine} are exchanged"),
        );
    }

    /// A process is killed, and starts with the disks in the other order than now. Its hosts are not notified.
    fn restart_with_disks_swapped(&mut self, process: usize, down: Span) {
        let slot = &mut self.processes[process];
        slot.is_exchanged = !slot.is_exchanged;
        let order = if slot.is_exchanged { "exchanged" } else { "as before" };
        self.record_event(
            RecordScope::ALL,
            format!("target {process} is to serve its disks {order}"),
        );
        self.kill_process(process, down);
    }

    /// A process does not start with the disks exchanged: all start with them as before.
    fn restart_with_original_disk_order(&mut self, process: usize, machine: usize) {
        self.record_event(RecordScope::ALL, format!("the disks of machine {machine} go back"));
        let state = &mut self.machines[machine];
        state.order.reverse();
        state.is_reordered = false;
        let again = Span::from_ms(300);
        self.processes_of(machine).for_each(|process| self.kill_process(process, again));
        self.schedule(self.now.after(again), ScheduledAction::Start(process));
    }

    /// The hosts of a machine begin anew, with where their disks are now.
    fn restart_hosts(&mut self, machine: usize) -> Result<(), RunFailure> {
        for number in 0..self.hosts.len() {
            if self.plan.hosts[number].machine != machine {
                continue;
            }
            let mut host = self.new_host(number, self.now)?;
            host.set_goal(self.goal, self.now);
            self.hosts[number] = host;
            self.checker.record_host_restart(number, self.disk_of(number), self.now);
            let address = self.address_of(self.disk_of(number));
            let ExportAddress { subsystem, nsid, .. } = address;
            let text = format!(
                "host {number} starts again: its disk is namespace {nsid} of {subsystem} now; what \
                 it had in flight does not complete"
            );
            self.record_event(RecordScope::host(number), text);
        }
        Ok(())
    }

    /// A host crashes without notice, and starts again later.
    fn restart_host(&mut self, host: usize, down: Span) -> Result<(), RunFailure> {
        if self.is_opening {
            let again = ScheduledAction::Fault(FaultEvent::RestartHost { host, down });
            self.schedule(self.now.after(Span::from_ms(1)), again);
            return Ok(());
        }
        let disk = self.disk_of(host);
        if self.hosts[host].may_lose_unflushed() {
            self.checker.record_power_loss(disk, self.now);
        }
        self.checker.record_host_restart(host, disk, self.now);
        self.hosts[host] = self.new_host(host, self.now.after(down))?;
        let text = format!("host {host} is killed; what it had in flight does not complete");
        self.record_event(RecordScope::host(host), text);
        Ok(())
    }

    /// A disk has lost what it had not flushed. A mirror loses something only if no other leg has it.
    fn record_unflushed_loss(&mut self, disk: usize) {
        let now = self.now;
        for host in 0..self.hosts.len() {
            let legs = self.disks_of_host(host);
            let leg = legs.iter().position(|it| *it == disk).filter(|_| legs.len() > 1);
            if let Some(leg) = leg {
                if self.hosts[host].handle_leg_power_loss(leg, now) {
                    self.checker.record_power_loss(legs[0], now);
                }
                return;
            }
        }
        self.checker.record_power_loss(disk, now);
    }

    /// A process crashes without notice.
    fn crash_process(&mut self, process: usize) -> bool {
        let slot = &mut self.processes[process];
        let Some(ended) = slot.process.take() else { return false };
        slot.state.discard_pending_writes();
        self.disks.iter().for_each(|disk| disk.kill_process(slot.life));
        drop(ended);
        true
    }

    fn kill_process(&mut self, process: usize, down: Span) {
        if self.processes[process].process.is_none() {
            return;
        }
        self.record_event(RecordScope::ALL, format!("target {process} is killed"));
        self.network.set_port(process, PortPower::Refuses);
        self.crash_process(process);
        self.schedule(self.now.after(down), ScheduledAction::Start(process));
    }

    pub(super) fn lose_power(&mut self, machine: usize, down: Span) {
        let processes = self.processes_of(machine);
        let is_running = |process: usize| self.processes[process].process.is_some();
        if !processes.clone().any(is_running) {
            return;
        }
        self.record_event(RecordScope::ALL, format!("machine {machine} loses its power"));
        for process in processes {
            self.network.set_port(process, PortPower::Dark);
            self.crash_process(process);
            let is_start = |action: &ScheduledAction| matches!(action, ScheduledAction::Start(it) if *it == process);
            self.agenda.retain(|_, action| !is_start(action));
        }
        for disk in self.disks_of(machine) {
            self.disks[disk].lose_power();
            self.record_unflushed_loss(disk);
        }
        self.schedule(self.now.after(down), ScheduledAction::RestorePower(machine));
    }

    pub(super) fn restore_power(&mut self, machine: usize) -> Result<(), RunFailure> {
        self.record_event(RecordScope::ALL, format!("machine {machine} has power again"));
        for process in self.processes_of(machine) {
            self.network.set_port(process, PortPower::Refuses);
            self.start_process(process)?;
        }
        Ok(())
    }

    pub(super) fn start_process(&mut self, process: usize) -> Result<(), RunFailure> {
        if self.processes[process].process.is_some() {
            return Ok(());
        }
        self.lives += 1;
        let machine = self.processes[process].machine;
        let disks = self.disks_of(machine);
        let mut subsystems = BTreeMap::<String, Vec<SimExport>>::new();
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
                true => ExportBlocks::Mirror(self.disks[disks.clone()].to_vec()),
                false => ExportBlocks::Disk(self.disks[number].clone()),
            };
            let export = SimExport { nsid: *nsid, number, blocks };
            subsystems.entry(subsystem_nqn(*tenant)).or_default().push(export);
        }
        let options = ProcessOptions {
            port: process,
            id: self.lives,
            quiesce: plan.quiesce,
            subsystems,
            now: self.now,
            state: self.processes[process].state.clone(),
            authentication: (self.plan.authentication, self.plan.hosts.len()),
            bugs: self.plan.bugs,
        };
        let is_reordered = self.machines[machine].is_reordered;
        let started = match TargetProcess::start_service(options, &self.network) {
            // The stored reservations belong to another disk, so the service does not start: undo
            // the exchange.
            Err(why) if is_reordered => {
                self.record_event(
                    RecordScope::ALL,
                    format!("target {process} does not start: {why}"),
                );
                self.restart_with_original_disk_order(process, machine);
                return Ok(());
            }
            // A mirror does not start without a leg that is up to date: retry.
            Err(why) if self.disks[disks].iter().any(SimDisk::is_absent) => {
                self.record_event(
                    RecordScope::ALL,
                    format!("target {process} does not start: {why}"),
                );
                self.schedule(self.now.after(Span::from_ms(500)), ScheduledAction::Start(process));
                return Ok(());
            }
            started => started.map_err(failure_of_simulation)?,
        };
        let slot = &mut self.processes[process];
        (slot.life, slot.process) = (self.lives, Some(started));
        self.record_event(RecordScope::ALL, format!("target {process} starts"));
        let is_running = |process: usize| self.processes[process].process.is_some();
        if is_reordered && self.processes_of(machine).all(is_running) {
            self.machines[machine].is_reordered = false;
            self.restart_hosts(machine)?;
        }
        Ok(())
    }
}
