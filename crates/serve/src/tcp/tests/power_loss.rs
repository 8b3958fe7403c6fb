//! Persistence of reservations through a power loss: the next process restores exactly what was
//! reported to the hosts.

use std::path::Path;
use std::sync::Arc;

use tenmil_base::Span;
use tenmil_drivers::RamDevice;
use tenmil_linux::Clock;
use tenmil_nvme_controller::controller::{NamespaceConfig, ReservationPersistenceMode};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationReport, ReservationStatusExtended,
    ReservationType, report_registrants_extended,
};
use tenmil_wire::{Command, Completion, IoOpcode, Status, TypedCommand};

use super::test_target::{BLOCKS, NQN, TestTarget, pattern, read_or_write_command};
use crate::tcp::StateDirectory;

/// Service that keeps reservations in a directory, and two hosts with an I/O queue each.
struct ReservationHosts {
    rig: TestTarget,
    io: [usize; 2],
    _directory: StateDirectory,
}

/// Namespace whose reservations persist through a power loss, and one whose reservations do not.
const KEPT: u32 = 1;
const FORGOTTEN: u32 = 2;

/// Reservation type; registrants with controller ID, key and whether they hold the reservation;
/// PTPLS.
type ReportedReservations = (u8, Vec<(u8, u64, bool)>, u8);

impl ReservationHosts {
    fn start_after_power_loss(path: &Path) -> Self {
        let directory = StateDirectory::open(path).unwrap();
        let (mut rig, subsystem) = TestTarget::with_subsystem();
        assert!(subsystem.remove_namespace(1));
        for nsid in [KEPT, FORGOTTEN] {
            let medium = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
            let persistence = ReservationPersistenceMode::Durable(
                directory.reservation_store(NQN, nsid, "a disk"),
            );
            let namespace =
                NamespaceConfig { nsid: Some(nsid), persistence, ..NamespaceConfig::new(medium) };
            subsystem.add_namespace(namespace).unwrap();
        }
        let io = [1, 2].map(|host| rig.connect_host_with_io_queue(host).1);
        Self { rig, io, _directory: directory }
    }

    /// Runs a command to completion, however slow the disk is.
    fn execute_command(
        &mut self,
        host: usize,
        command: &Command,
        data: DataDirection,
        bytes: &[u8],
    ) -> (Completion, Vec<u8>) {
        let (clock, line) = (Clock::start(), self.io[host]);
        let tag = self.rig.lines[line].submit(command, data, bytes);
        let until = clock.now().after(Span::from_secs(20));
        loop {
            self.rig.run_until_idle();
            if let Some(ended) = self.rig.lines[line].done.remove(&tag) {
                return ended;
            }
            assert!(clock.now() < until, "a command has not ended");
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    fn register(&mut self, host: usize, nsid: u32, cptpl: ChangePersistence) {
        let command = ReservationRegister {
            nsid,
            rrega: RegisterAction::Register,
            iekey: false,
            disnsrs: false,
            cptpl,
        };
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(reservation_key_of(host)));
        let data = DataDirection::FromHost(16);
        let (completion, _) =
            self.execute_command(host, &command.to_command(), data, keys.as_bytes());
        assert_eq!(completion.status(), Status::SUCCESS);
    }

    fn acquire(&mut self, host: usize, nsid: u32) {
        let command = ReservationAcquire {
            nsid,
            racqa: AcquireAction::Acquire,
            iekey: false,
            disnsrs: false,
            rtype: ReservationType::WriteExclusive,
        };
        let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(reservation_key_of(host)));
        let data = DataDirection::FromHost(16);
        let (completion, _) =
            self.execute_command(host, &command.to_command(), data, keys.as_bytes());
        assert_eq!(completion.status(), Status::SUCCESS);
    }

    fn read_report(&mut self, nsid: u32) -> ReportedReservations {
        let command = ReservationReport { nsid, numd: 63, eds: true, disnsrs: false };
        let (completion, bytes) =
            self.execute_command(0, &command.to_command(), DataDirection::ToHost(256), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        let header = ReservationStatusExtended::from_bytes(bytes.first_chunk().unwrap());
        let row = |row: tenmil_wire::io::reservation::RegistrantExtended| {
            (row.hostid()[0], row.rkey(), row.holds())
        };
        (
            header.rtype().code(),
            report_registrants_extended(&bytes).map(row).collect(),
            header.ptpls(),
        )
    }

    fn may_write(&mut self, host: usize, nsid: u32) -> bool {
        let write = read_or_write_command(IoOpcode::Write.code(), 0, 1).with_nsid(nsid);
        let (completion, _) =
            self.execute_command(host, &write, DataDirection::FromHost(512), &pattern(1, 512));
        completion.status() == Status::SUCCESS
    }
}

fn reservation_key_of(host: usize) -> u64 {
    0x1000 + host as u64
}

/// Copy of the files of a directory in their current state.
fn state_snapshot(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

#[test]
fn only_reservations_with_ptpl_survive_power_loss() {
    let directory = tempfile::tempdir().unwrap();
    let mut before = ReservationHosts::start_after_power_loss(directory.path());
    for (nsid, cptpl) in [(KEPT, ChangePersistence::Persist), (FORGOTTEN, ChangePersistence::None)]
    {
        before.register(0, nsid, cptpl);
        before.register(1, nsid, ChangePersistence::None);
        before.acquire(1, nsid);
    }
    let is_held: ReportedReservations =
        (1, vec![(1, reservation_key_of(0), false), (2, reservation_key_of(1), true)], 1);
    assert_eq!(before.read_report(KEPT), is_held);
    let is_held_so_far = (is_held.0, is_held.1.clone(), 0);
    assert_eq!(before.read_report(FORGOTTEN), is_held_so_far);
    assert!(!before.may_write(0, KEPT) && !before.may_write(0, FORGOTTEN));
    // Power loss while all hosts are connected.
    let left = state_snapshot(directory.path());
    let mut after = ReservationHosts::start_after_power_loss(left.path());
    assert_eq!(after.read_report(KEPT), is_held);
    assert_eq!(after.read_report(FORGOTTEN), (0, Vec::new(), 0));
    assert!(!after.may_write(0, KEPT) && after.may_write(1, KEPT));
    assert!(after.may_write(0, FORGOTTEN));
    // Persistence that was cleared stays cleared after another power loss.
    after.register(0, KEPT, ChangePersistence::Clear);
    let mut last = ReservationHosts::start_after_power_loss(state_snapshot(left.path()).path());
    assert_eq!(last.read_report(KEPT), (0, Vec::new(), 0));
    assert!(last.may_write(0, KEPT));
}
