//! Reservations that must be durable before their commands complete.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tenmil_base::Error;

use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::{
    NamespaceConfig, PersistRequest, ReservationPersistenceMode, ReservationStore,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationType,
};
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{
    BLOCKS, TestTarget, connect_data, io_config, io_connect, pattern, read_or_write_command,
    service_limits,
};
use crate::tcp::TargetEvent;

/// Store that completes a write only when the test does.
#[derive(Clone, Default)]
struct SlowReservationStore(Arc<Mutex<VecDeque<PersistRequest>>>);

impl ReservationStore for SlowReservationStore {
    fn load(&self) -> Result<Option<Vec<u8>>, Error> {
        Ok(None)
    }

    fn start_store(
        &mut self,
        _: Option<Vec<u8>>,
        stored: PersistRequest,
    ) -> Result<(), PersistRequest> {
        self.0.lock().unwrap().push_back(stored);
        Ok(())
    }
}

/// Two hosts with an I/O queue each, over a store that the test controls.
struct ReservationTest {
    rig: TestTarget,
    drawer: SlowReservationStore,
    /// Admin and I/O connection of each host.
    admin: [usize; 2],
    io: [usize; 2],
}

impl ReservationTest {
    fn new() -> Self {
        let mut subsystem = None;
        let mut rig = TestTarget::with_options(service_limits(), |config| {
            subsystem = Some(config.subsystem.clone());
            config
        });
        let (subsystem, drawer) = (subsystem.unwrap(), SlowReservationStore::default());
        assert!(subsystem.remove_namespace(1));
        let medium = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
        let persistence = ReservationPersistenceMode::Durable(Box::new(drawer.clone()));
        let namespace =
            NamespaceConfig { nsid: Some(1), persistence, ..NamespaceConfig::new(medium) };
        subsystem.add_namespace(namespace).unwrap();
        let [one, two] = [1, 2].map(|host| rig.connect_host_with_io_queue(host));
        let mut race = Self { rig, drawer, admin: [one.0, two.0], io: [one.1, two.1] };
        for host in [0, 1] {
            let tag = race.register(host);
            race.complete_oldest_store_write(Ok(()));
            assert_eq!(race.completion_status(host, tag), Some(Status::SUCCESS));
        }
        race
    }

    fn submit(&mut self, host: usize, command: &Command, keys: &[u8]) -> u16 {
        let tag = self.rig.lines[self.io[host]].submit(command, DataDirection::FromHost(16), keys);
        self.rig.run_until_idle();
        tag
    }

    fn register(&mut self, host: usize) -> u16 {
        let command = ReservationRegister {
            nsid: 1,
            rrega: RegisterAction::Register,
            iekey: false,
            disnsrs: false,
            cptpl: ChangePersistence::Persist,
        };
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(host as u64 + 1));
        self.submit(host, &command.to_command(), keys.as_bytes())
    }

    fn acquire(&mut self, host: usize) -> u16 {
        let command = ReservationAcquire {
            nsid: 1,
            racqa: AcquireAction::Acquire,
            iekey: false,
            disnsrs: false,
            rtype: ReservationType::WriteExclusive,
        };
        let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(host as u64 + 1));
        self.submit(host, &command.to_command(), keys.as_bytes())
    }

    /// Completes the oldest write of the store.
    fn complete_oldest_store_write(&mut self, written: Result<(), &str>) {
        let stored = self.drawer.0.lock().unwrap().pop_front().expect("one is to be written");
        stored.complete_write(written.map_err(Error::environment));
        self.rig.run_until_idle();
    }

    fn completion_status(&mut self, host: usize, tag: u16) -> Option<Status> {
        let ended = self.rig.lines[self.io[host]].done.remove(&tag);
        ended.map(|(completion, _)| completion.status())
    }

    /// Whether a write of the host succeeds.
    fn may_write(&mut self, host: usize) -> bool {
        let (bytes, write) = (pattern(1, 512), read_or_write_command(IoOpcode::Write.code(), 0, 1));
        let io = self.io[host];
        let (completion, _) =
            self.rig.execute_command(io, &write, DataDirection::FromHost(512), &bytes);
        match completion.status().without_crd_more_dnr() {
            Status::SUCCESS => true,
            Status::RESERVATION_CONFLICT => false,
            other => panic!("a write ended with {other:?}"),
        }
    }

    /// Disconnects all hosts and checks that everything is released.
    fn disconnect_all_and_assert_empty(mut self) {
        self.rig.lines.clear();
        self.rig.assert_all_released();
    }
}

#[test]
fn slow_reservation_store_delays_no_io() {
    let mut race = ReservationTest::new();
    let tag = race.acquire(0);
    assert_eq!(race.completion_status(0, tag), None);
    for _ in 0..20 {
        assert!(race.may_write(0) && race.may_write(1), "it is not in effect");
    }
    race.complete_oldest_store_write(Ok(()));
    assert_eq!(race.completion_status(0, tag), Some(Status::SUCCESS));
    assert!(race.may_write(0) && !race.may_write(1));
    race.disconnect_all_and_assert_empty();
}

#[test]
fn failed_reservation_store_fails_the_command_without_effect() {
    let mut race = ReservationTest::new();
    let tag = race.acquire(0);
    race.complete_oldest_store_write(Err("write r: no room"));
    assert_eq!(race.completion_status(0, tag), Some(Status::INTERNAL_ERROR));
    assert!(race.may_write(0) && race.may_write(1));
    let is_it = |new_events: &TargetEvent| matches!(new_events, TargetEvent::Error(why) if why.contains("no room"));
    assert!(race.rig.new_events.iter().any(is_it), "{:?}", race.rig.new_events);
    race.disconnect_all_and_assert_empty();
}

#[test]
fn first_of_two_racing_hosts_gets_the_reservation() {
    let mut race = ReservationTest::new();
    let (second, first) = (race.acquire(1), race.acquire(0));
    race.complete_oldest_store_write(Ok(()));
    assert_eq!(race.completion_status(1, second), Some(Status::SUCCESS));
    assert_eq!(race.completion_status(0, first), Some(Status::RESERVATION_CONFLICT));
    assert!(!race.may_write(0) && race.may_write(1));
    race.disconnect_all_and_assert_empty();
}

#[test]
fn reservation_command_being_persisted_is_not_aborted() {
    let mut race = ReservationTest::new();
    let tag = race.acquire(0);
    let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(tag) << 16 | 1);
    let (completion, _) = race.rig.execute_command(race.admin[0], &abort, DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 1));
    race.complete_oldest_store_write(Ok(()));
    assert_eq!(race.completion_status(0, tag), Some(Status::SUCCESS));
    race.disconnect_all_and_assert_empty();
}

#[test]
fn reservation_is_stored_if_its_host_disconnects_meanwhile() {
    // The host loses its I/O connection or its admin connection, or resets its controller.
    for way in 0..3 {
        let mut race = ReservationTest::new();
        race.acquire(0);
        let waits = race.acquire(1);
        match way {
            0 => race.rig.lines[race.io[0]].pipe = None,
            1 => race.rig.lines[race.admin[0]].pipe = None,
            _ => drop(race.rig.set_property(race.admin[0], offset::CC, 0)),
        }
        race.rig.run_until_idle();
        let left = race.rig.guests.len();
        assert_eq!(left, [3, 2, 3][way], "no command waits for the end of the store");
        race.complete_oldest_store_write(Ok(()));
        assert_eq!(race.completion_status(1, waits), Some(Status::RESERVATION_CONFLICT));
        assert!(!race.may_write(1), "it was written down");
        // After it has reconnected, the reservation it requested is in effect.
        let (_, io) = race.rig.connect_host_with_io_queue(1);
        race.io[0] = io;
        assert!(race.may_write(0));
        race.disconnect_all_and_assert_empty();
    }
}

#[test]
fn reconnected_queue_gets_no_completion_of_the_old_one() {
    let mut race = ReservationTest::new();
    race.acquire(0);
    race.rig.lines[race.io[0]].pipe = None;
    race.rig.run_until_idle();
    let cntlid = 1;
    let io = race.rig.open_connection(io_config());
    let data = connect_data(cntlid).with(|data| data.hostid([1; 16]));
    assert_eq!(race.rig.execute_connect(io, &io_connect(1), &data).status(), Status::SUCCESS);
    race.io[0] = io;
    // A new command with the slot of the abandoned one.
    let tag = race.register(0);
    race.complete_oldest_store_write(Ok(()));
    assert_eq!(race.completion_status(0, tag), None, "its own record is still to be written");
    race.complete_oldest_store_write(Ok(()));
    assert_eq!(race.completion_status(0, tag), Some(Status::SUCCESS));
    race.disconnect_all_and_assert_empty();
}
