//! Binding of a host identifier to one NQN.

use tenmil_wire::TypedCommand;
use tenmil_wire::io::reservation::{
    ChangePersistence, RegisterAction, RegisterKeys, ReservationRegister,
};

use super::bench::{Bench, Shelf};
use super::persistence::Drawer;
use crate::controller::interface::{AdminResult, CommandOrigin};
use crate::controller::{
    Controller, ControllerConfig, HostInUse, NamespaceConfig, Persistence, ReservationStore,
};

const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";
const ID: u128 = 7;

fn bench(drawer: &Drawer) -> Bench {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.namespaces[0].persistence = Persistence::Durable(Box::new(drawer.clone()));
    };
    Bench::with(vec![Shelf::new()], change, ControllerConfig::default())
}

fn register(
    bench: &Bench,
    controller: &mut Controller,
    cptpl: ChangePersistence,
) -> Option<AdminResult> {
    let rrega = RegisterAction::Register;
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let mut keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5)).as_bytes().to_vec();
    let from = CommandOrigin { queue: 1, ticket: 0 };
    controller.reservation(bench.now, from, &command.to_command(), &mut keys)
}

fn mark_in_use(registered_in: Option<u32>) -> Result<(), HostInUse> {
    Err(HostInUse { nqn: ONE.to_owned(), registered_in })
}

#[test]
fn an_identifier_is_its_nqns_while_that_is_connected_or_registered() {
    let bench = bench(&Drawer::default());
    let (mut one, mut again, mut two) = (bench.second(2), bench.second(3), bench.second(4));
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    assert_eq!(again.connect_host(ONE, ID), Ok(()), "another path");
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(None));
    assert_eq!(two.connect_host("", ID), mark_in_use(None));
    assert_eq!(two.connect_host(TWO, ID + 1), Ok(()));
    drop((one, again));
    let mut one = bench.second(2);
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    assert_eq!(register(&bench, &mut one, ChangePersistence::None), Some(AdminResult::OK));
    drop(one);
    let mut late = bench.second(5);
    assert_eq!(late.connect_host(TWO, ID), mark_in_use(Some(1)));
    assert_eq!(late.connect_host(ONE, ID), Ok(()));
}

#[test]
fn zero_is_nobodys_identifier() {
    let bench = bench(&Drawer::default());
    let (mut one, mut two) = (bench.second(2), bench.second(3));
    assert_eq!((one.connect_host(ONE, 0), two.connect_host(TWO, 0)), (Ok(()), Ok(())));
}

/// A host that disconnects before its registration is durable is registered nevertheless.
#[test]
fn an_identifier_is_its_nqns_while_a_registration_is_being_written() {
    let drawer = Drawer::default();
    let bench = bench(&drawer);
    let mut one = bench.second(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&bench, &mut one, ChangePersistence::Persist), None);
    drop(one);
    let mut two = bench.second(3);
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(Some(1)));
    drawer.write();
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(Some(1)));
}

#[test]
fn an_identifier_is_its_nqns_in_the_next_life() {
    let drawer = Drawer::default();
    let first = bench(&drawer);
    let mut one = first.second(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.write();
    drop((one, first));
    let next = bench(&drawer);
    let mut two = next.second(2);
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(Some(1)));
    assert_eq!(two.connect_host(ONE, ID), Ok(()));
}

#[test]
fn a_registrant_of_an_old_record_belongs_to_the_first_nqn_that_comes() {
    let drawer = Drawer::default();
    let first = bench(&drawer);
    let mut one = first.second(2);
    one.set_host(crate::controller::HostIdentity::Extended(ID));
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.write();
    drop((one, first));
    let next = bench(&drawer);
    let (mut one, mut two) = (next.second(2), next.second(3));
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    drop(one);
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(Some(1)));
}

/// What is being written is what holds next, and its registrants get their names too.
#[test]
fn a_registrant_of_an_old_record_keeps_its_nqn_when_a_registration_under_way_is_written() {
    let drawer = Drawer::default();
    let first = bench(&drawer);
    let mut one = first.second(2);
    one.set_host(crate::controller::HostIdentity::Extended(ID));
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.write();
    drop((one, first));
    let next = bench(&drawer);
    let (mut one, mut two) = (next.second(2), next.second(3));
    two.connect_host(TWO, ID + 1).unwrap();
    assert_eq!(register(&next, &mut two, ChangePersistence::Persist), None);
    assert_eq!(one.connect_host(ONE, ID), Ok(()));
    drawer.write();
    drop((one, two));
    let mut two = next.second(4);
    two.poll(next.now);
    assert_eq!(two.connect_host(TWO, ID), mark_in_use(Some(1)));
}

#[test]
fn a_namespace_whose_registrant_has_a_connected_identifier_of_another_nqn_is_not_added() {
    let drawer = Drawer::default();
    let first = bench(&drawer);
    let mut one = first.second(2);
    one.connect_host(ONE, ID).unwrap();
    assert_eq!(register(&first, &mut one, ChangePersistence::Persist), None);
    drawer.write();
    drop((one, first));
    let next = Bench::new();
    let mut two = next.second(2);
    two.connect_host(TWO, ID).unwrap();
    let persistence = Persistence::Durable(Box::new(drawer.clone()) as Box<dyn ReservationStore>);
    let config =
        NamespaceConfig { persistence, ..NamespaceConfig::new(std::sync::Arc::new(Shelf::new())) };
    let refused = next.subsystem.add_namespace(config).unwrap_err();
    assert!(refused.text.contains(ONE) && refused.text.contains(TWO), "{refused}");
}
