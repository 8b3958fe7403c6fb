//! Reservations that persist through power loss, and their absence where that is not supported.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tenmil_base::Error;

use tenmil_wire::admin::{GetFeatures, SetFeatures};
use tenmil_wire::feature::Feature;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationReport, ReservationStatusExtended,
    ReservationType,
};
use tenmil_wire::{Command, Layout, Status, TypedCommand};

use super::fixture::{ControllerFixture, FakeBlockDevice};
use crate::controller::transport_interface::{AdminOutcome, QueueCommandId};
use crate::controller::{
    ControllerConfig, HostIdentity, PersistRequest, ReservationPersistenceMode, ReservationStore,
};
use crate::namespace::Reservation;

/// Reservation store that outlives subsystems, with configurable properties. It writes on request.
#[derive(Clone, Default)]
pub(super) struct FakeReservationStore(Arc<Mutex<FakeReservationStoreState>>);

#[derive(Default)]
struct FakeReservationStoreState {
    record: Option<Vec<u8>>,
    /// Records that have been submitted and are not written.
    wanted: VecDeque<(Option<Vec<u8>>, PersistRequest)>,
    stores: u32,
    is_shut: bool,
}

impl FakeReservationStore {
    pub(super) fn pending_write_count(&self) -> usize {
        self.0.lock().unwrap().wanted.len()
    }

    pub(super) fn store_count(&self) -> u32 {
        self.0.lock().unwrap().stores
    }

    /// The next submitted record.
    pub(super) fn take_pending_write(&self) -> (Option<Vec<u8>>, PersistRequest) {
        self.0.lock().unwrap().wanted.pop_front().expect("something is to be written")
    }

    /// Writes a record without a completion.
    pub(super) fn set_record(&self, record: Option<Vec<u8>>) {
        let mut inside = self.0.lock().unwrap();
        inside.stores += 1;
        inside.record = record;
    }

    /// Writes the next record.
    pub(super) fn complete_write(&self) {
        let (record, stored) = self.take_pending_write();
        self.set_record(record);
        stored.complete_write(Ok(()));
    }

    /// Fails to write the next record.
    pub(super) fn fail_write(&self) {
        self.take_pending_write()
            .1
            .complete_write(Err(Error::environment("the drawer is stuck".to_owned())));
    }

    /// Accepts records, or rejects them.
    pub(super) fn set_rejects_writes(&self, is_shut: bool) {
        self.0.lock().unwrap().is_shut = is_shut;
    }
}

impl ReservationStore for FakeReservationStore {
    fn load(&self) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.0.lock().unwrap().record.clone())
    }

    fn start_store(
        &mut self,
        record: Option<Vec<u8>>,
        stored: PersistRequest,
    ) -> Result<(), PersistRequest> {
        let mut inside = self.0.lock().unwrap();
        if inside.is_shut {
            return Err(stored);
        }
        inside.wanted.push_back((record, stored));
        Ok(())
    }
}

fn fixture_with_persistence(persistence: ReservationPersistenceMode) -> ControllerFixture {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.namespaces[0].persistence = persistence;
    };
    let mut bench = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        change,
        ControllerConfig::default(),
    );
    bench.controller.set_host(HostIdentity::Extended(7));
    bench
}

pub(super) fn fixture_with_store(drawer: &FakeReservationStore) -> ControllerFixture {
    fixture_with_persistence(ReservationPersistenceMode::Durable(Box::new(drawer.clone())))
}

/// Registers host 5 with the contents of `drawer`, if there are any.
fn register(
    bench: &mut ControllerFixture,
    drawer: Option<&FakeReservationStore>,
    (rrega, cptpl): (RegisterAction, ChangePersistence),
) -> Status {
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5).crkey(5));
    run_reservation_command(bench, drawer, &command.to_command(), keys.as_bytes())
}

fn acquire(bench: &mut ControllerFixture, drawer: Option<&FakeReservationStore>) -> Status {
    let command = ReservationAcquire {
        nsid: 1,
        racqa: AcquireAction::Acquire,
        iekey: false,
        disnsrs: false,
        rtype: ReservationType::ExclusiveAccess,
    };
    let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(5));
    run_reservation_command(bench, drawer, &command.to_command(), keys.as_bytes())
}

/// Runs a command to its end, including the writes that it requires.
fn run_reservation_command(
    bench: &mut ControllerFixture,
    drawer: Option<&FakeReservationStore>,
    command: &Command,
    sent: &[u8],
) -> Status {
    let from = QueueCommandId { queue: 1, ticket: 9 };
    let now = bench.now;
    if let Some(end) =
        bench.controller.execute_reservation_command(now, from, command, &mut sent.to_vec())
    {
        return end.status.without_crd_more_dnr();
    }
    drawer.expect("nothing else has to be waited for").complete_write();
    bench.poll_times(1);
    let reservation_completions =
        bench.controller.next_reservation_completion().expect("it has been written");
    assert_eq!(reservation_completions.from, from);
    reservation_completions.end.status.without_crd_more_dnr()
}

pub(super) fn visible_reservation(bench: &ControllerFixture) -> Option<Reservation> {
    bench.controller.namespaces().reader().get().get(1).unwrap().reservation
}

const PERSIST: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::Persist);
const PASS: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::None);
const CLEAR: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::Clear);

#[test]
fn persistent_reservation_is_restored_after_restart() {
    let drawer = FakeReservationStore::default();
    let mut first = fixture_with_store(&drawer);
    assert_eq!(register(&mut first, Some(&drawer), PERSIST), Status::SUCCESS);
    assert_eq!(acquire(&mut first, Some(&drawer)), Status::SUCCESS);
    let before = visible_reservation(&first);
    assert!(before.is_some_and(|reservation| reservation.is_holder));
    drop(first);
    let mut second = fixture_with_store(&drawer);
    // The host is identified only now.
    let mut other = second.open_second_controller(2);
    other.set_host(HostIdentity::Extended(8));
    assert_eq!(visible_reservation(&second), before);
    assert!(other.namespaces().reader().get().get(1).unwrap().reservation.is_some());
    // From now on it does not persist.
    let status = register(&mut second, Some(&drawer), CLEAR);
    assert_eq!((status, drawer.load()), (Status::SUCCESS, Ok(None)));
    drop((second, other));
    assert_eq!(visible_reservation(&fixture_with_store(&drawer)), None);
}

#[test]
fn non_persistent_reservation_is_not_recorded() {
    let drawer = FakeReservationStore::default();
    let mut bench = fixture_with_store(&drawer);
    assert_eq!(register(&mut bench, None, PASS), Status::SUCCESS);
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
    assert_eq!(drawer.store_count(), 0);
    // The feature also enables it, and is not completed before it is durable.
    assert_eq!(bench.submit(&set_persistence_command(), &[]).0, AdminOutcome::Deferred);
    bench.poll_times(3);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    drawer.complete_write();
    assert_eq!(bench.poll_until_deferred_completion(), (7, Ok(0)));
    assert_eq!(drawer.store_count(), 1);
    // A command that changes nothing causes no write.
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
}

fn set_persistence_command() -> Command {
    let fid = Feature::ReservationPersistence.code();
    let set = SetFeatures { nsid: 1, fid, cdw11: 1, ..SetFeatures::default() };
    set.to_command().with_cid(7)
}

#[test]
fn persistence_feature_fails_if_the_record_cannot_be_written() {
    let drawer = FakeReservationStore::default();
    let mut bench = fixture_with_store(&drawer);
    assert_eq!(bench.submit(&set_persistence_command(), &[]).0, AdminOutcome::Deferred);
    drawer.fail_write();
    assert_eq!(bench.poll_until_deferred_completion(), (7, Err(Status::INTERNAL_ERROR)));
    let fid = Feature::ReservationPersistence.code();
    let get = GetFeatures { nsid: 1, fid, ..GetFeatures::default() };
    assert_eq!(bench.run_without_data(get), Ok(0));
    // After a reset it is set nevertheless, without a completion.
    assert_eq!(bench.submit(&set_persistence_command(), &[]).0, AdminOutcome::Deferred);
    bench.controller.reset(bench.now);
    drawer.complete_write();
    bench.poll_times(3);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    assert_eq!(bench.run_without_data(get), Ok(1));
}

#[test]
fn reservation_persistence_is_not_reported_without_a_store() {
    let mut bench = fixture_with_persistence(ReservationPersistenceMode::None);
    // Linux requests it with every registration, whatever the namespace supports.
    assert_eq!(register(&mut bench, None, PERSIST), Status::SUCCESS);
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
    let report = ReservationReport { nsid: 1, numd: 15, eds: true, disnsrs: false };
    let mut page = Vec::new();
    let (now, from) = (bench.now, QueueCommandId { queue: 1, ticket: 9 });
    let end =
        bench.controller.execute_reservation_command(now, from, &report.to_command(), &mut page);
    assert_eq!(end.unwrap().status, Status::SUCCESS);
    assert_eq!(ReservationStatusExtended::parse(&page).unwrap().ptpls(), 0);
    let feature = Feature::ReservationPersistence.code();
    let get = GetFeatures { nsid: 1, fid: feature, ..GetFeatures::default() };
    assert_eq!(bench.run_without_data(get), Ok(0));
    let set = SetFeatures { nsid: 1, fid: feature, cdw11: 1, ..SetFeatures::default() };
    assert_eq!(
        bench.run_without_data(set).map_err(Status::without_crd_more_dnr),
        Err(Status::INVALID_FIELD)
    );
    let namespace = |persistence| {
        let mut bench = fixture_with_persistence(persistence);
        let identify =
            tenmil_wire::admin::Identify { nsid: 1, ..tenmil_wire::admin::Identify::default() };
        let page = bench.run_for_data(identify).unwrap();
        tenmil_wire::identify::IdentifyNamespace::from_bytes(page.first_chunk().unwrap()).ptpls()
    };
    assert!(
        !namespace(ReservationPersistenceMode::None)
            && namespace(ReservationPersistenceMode::Emulated)
    );
}

#[test]
fn unreadable_reservation_record_is_rejected_and_kept() {
    let drawer = FakeReservationStore::default();
    drawer.0.lock().unwrap().record = Some(b"nonsense".to_vec());
    let config = crate::controller::SubsystemConfig::new("T1", Vec::new());
    let subsystem = crate::controller::Subsystem::new(config).unwrap();
    let namespace = crate::controller::NamespaceConfig {
        persistence: ReservationPersistenceMode::Durable(Box::new(drawer)),
        ..crate::controller::NamespaceConfig::new(Arc::new(FakeBlockDevice::new()))
    };
    let refused = subsystem.check_namespace(&namespace).unwrap_err();
    assert!(refused.text.contains("its reservations cannot be read: its CRC-32C is"), "{refused}");
}
