//! Binding of a host identifier to one NQN.

use tenmil_wire::TypedCommand;
use tenmil_wire::io::reservation::{
    ChangePersistence, RegisterAction, RegisterKeys, ReservationRegister,
};

use super::fixture::{ControllerFixture, FakeBlockDevice};
use super::persistence::FakeReservationStore;
use crate::controller::transport_interface::{AdminResult, QueueCommandId};
use crate::controller::{
    Controller, ControllerConfig, HostIdentifierInUse, NamespaceConfig, ReservationPersistenceMode,
    ReservationStore,
};

const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";
const ID: u128 = 7;

fn fixture_with_persistence(drawer: &FakeReservationStore) -> ControllerFixture {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.namespaces[0].persistence =
            ReservationPersistenceMode::Durable(Box::new(drawer.clone()));
    };
    ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        change,
        ControllerConfig::default(),
    )
}

fn register(
    bench: &ControllerFixture,
    controller: &mut Controller,
    cptpl: ChangePersistence,
) -> Option<AdminResult> {
    let rrega = RegisterAction::Register;
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let mut keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5)).as_bytes().to_vec();
    let from = QueueCommandId { queue: 1, ticket: 0 };
    controller.execute_reservation_command(bench.now, from, &command.to_command(), &mut keys)
}

fn in_use_error(registered_in: Option<u32>) -> Result<(), HostIdentifierInUse> {
    Err(HostIdentifierInUse { nqn: ONE.to_owned(), registered_in })
}

#[test]
fn host_identifier_belongs_to_its_nqn_while_connected_or_registered() {
    let bench = fixture_with_persistence(&FakeReservationStore::default());
    let (mut one, mut again, mut two) = (
        bench.open_second_controller(2),
        bench.open_second_controller(3),
        bench.open_second_controller(4),
    );
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    assert_eq!(again.connect_host(ONE, ID), Ok(()), "another path");
    assert_eq!(two.connect_host(TWO, ID), in_use_error(None));
    assert_eq!(two.connect_host("", ID), in_use_error(None));
    assert_eq!(two.connect_host(TWO, ID + 1), Ok(()));
    drop((one, again));
    let mut one = bench.open_second_controller(2);
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    assert_eq!(register(&bench, &mut one, ChangePersistence::None), Some(AdminResult::OK));
    drop(one);
    let mut late = bench.open_second_controller(5);
    assert_eq!(late.connect_host(TWO, ID), in_use_error(Some(1)));
    assert_eq!(late.connect_host(ONE, ID), Ok(()));
}

#[test]
fn zero_host_identifier_belongs_to_no_nqn() {
    let bench = fixture_with_persistence(&FakeReservationStore::default());
    let (mut one, mut two) = (bench.open_second_controller(2), bench.open_second_controller(3));
    assert_eq!((one.connect_host(ONE, 0), two.connect_host(TWO, 0)), (Ok(()), Ok(())));
}

/// A host that disconnects before its registration is durable is registered nevertheless.
#[test]
fn host_identifier_belongs_to_its_nqn_while_a_registration_is_written() {
    let drawer = FakeReservationStore::default();
    let bench = fixture_with_persistence(&drawer);
    let mut one = bench.open_second_controller(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&bench, &mut one, ChangePersistence::Persist), None);
    drop(one);
    let mut two = bench.open_second_controller(3);
    assert_eq!(two.connect_host(TWO, ID), in_use_error(Some(1)));
    drawer.complete_write();
    assert_eq!(two.connect_host(TWO, ID), in_use_error(Some(1)));
}

#[test]
fn host_identifier_belongs_to_its_nqn_after_a_restart() {
    let drawer = FakeReservationStore::default();
    let first = fixture_with_persistence(&drawer);
    let mut one = first.open_second_controller(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.complete_write();
    drop((one, first));
    let next = fixture_with_persistence(&drawer);
    let mut two = next.open_second_controller(2);
    assert_eq!(two.connect_host(TWO, ID), in_use_error(Some(1)));
    assert_eq!(two.connect_host(ONE, ID), Ok(()));
}

#[test]
fn registrant_of_an_old_record_is_bound_to_the_first_nqn_that_connects() {
    let drawer = FakeReservationStore::default();
    let first = fixture_with_persistence(&drawer);
    let mut one = first.open_second_controller(2);
    one.set_host(crate::controller::HostIdentity::Extended(ID));
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.complete_write();
    drop((one, first));
    let next = fixture_with_persistence(&drawer);
    let (mut one, mut two) = (next.open_second_controller(2), next.open_second_controller(3));
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    drop(one);
    assert_eq!(two.connect_host(TWO, ID), in_use_error(Some(1)));
}

/// What is being written is what holds next, and its registrants get their names too.
#[test]
fn pending_registration_keeps_the_nqn_of_an_old_records_registrant() {
    let drawer = FakeReservationStore::default();
    let first = fixture_with_persistence(&drawer);
    let mut one = first.open_second_controller(2);
    one.set_host(crate::controller::HostIdentity::Extended(ID));
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.complete_write();
    drop((one, first));
    let next = fixture_with_persistence(&drawer);
    let (mut one, mut two) = (next.open_second_controller(2), next.open_second_controller(3));
    two.connect_host(TWO, ID + 1).unwrap();
    assert_eq!(register(&next, &mut two, ChangePersistence::Persist), None);
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    drawer.complete_write();
    drop((one, two));
    let mut two = next.open_second_controller(4);
    two.poll(next.now);
    assert_eq!(two.connect_host(TWO, ID), in_use_error(Some(1)));
}

#[test]
fn namespace_with_a_registrant_bound_to_another_nqn_is_not_added() {
    let drawer = FakeReservationStore::default();
    let first = fixture_with_persistence(&drawer);
    let mut one = first.open_second_controller(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.complete_write();
    drop((one, first));
    let next = ControllerFixture::new();
    let mut two = next.open_second_controller(2);
    two.connect_host(TWO, ID).unwrap();
    let persistence =
        ReservationPersistenceMode::Durable(Box::new(drawer.clone()) as Box<dyn ReservationStore>);
    let config = NamespaceConfig {
        persistence,
        ..NamespaceConfig::new(std::sync::Arc::new(FakeBlockDevice::new()))
    };
    let refused = next.subsystem.add_namespace(config).unwrap_err();
    assert!(refused.text.contains(ONE) && refused.text.contains(TWO), "{refused}");
}
