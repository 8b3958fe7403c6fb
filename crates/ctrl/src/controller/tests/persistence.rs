//! Reservations that persist through a loss of power, and where that is not to be had.

use std::sync::{Arc, Mutex};

use wire::admin::{GetFeatures, SetFeatures};
use wire::feature::Feature;
use wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationType,
};
use wire::{Status, Typed};

use super::bench::{Bench, Shelf};
use crate::controller::{ControllerConfig, HostIdentity, Keeper, Persistence};
use crate::namespace::Reservation;

/// A place that outlives subsystems, and what it is like.
#[derive(Clone, Default)]
struct Drawer(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    record: Option<Vec<u8>>,
    stores: u32,
    is_stuck: bool,
}

impl Keeper for Drawer {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.lock().unwrap().record.clone())
    }

    fn store(&mut self, record: Option<&[u8]>) -> Result<(), String> {
        let mut inside = self.0.lock().unwrap();
        if inside.is_stuck {
            return Err("the drawer is stuck".to_owned());
        }
        inside.stores += 1;
        inside.record = record.map(<[u8]>::to_vec);
        Ok(())
    }
}

fn bench(persistence: Persistence) -> Bench {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.namespaces[0].persistence = persistence;
    };
    let mut bench = Bench::with(vec![Shelf::new()], change, ControllerConfig::default());
    bench.controller.set_host(HostIdentity::Extended(7));
    bench
}

fn kept(drawer: &Drawer) -> Bench {
    bench(Persistence::Kept(Box::new(drawer.clone())))
}

fn register(bench: &mut Bench, rrega: RegisterAction, cptpl: ChangePersistence) -> Status {
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5).crkey(5));
    let mut data = keys.as_bytes().to_vec();
    bench.controller.reservation(bench.now, &command.to_command(), &mut data).status.code()
}

fn acquire(bench: &mut Bench) -> Status {
    let command = ReservationAcquire {
        nsid: 1,
        racqa: AcquireAction::Acquire,
        iekey: false,
        disnsrs: false,
        rtype: ReservationType::ExclusiveAccess,
    };
    let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(5));
    let mut data = keys.as_bytes().to_vec();
    bench.controller.reservation(bench.now, &command.to_command(), &mut data).status.code()
}

fn seen(bench: &Bench) -> Option<Reservation> {
    bench.controller.namespaces().reader().get().get(1).unwrap().reservation
}

const REGISTER: RegisterAction = RegisterAction::Register;
const PERSIST: ChangePersistence = ChangePersistence::Persist;

#[test]
fn what_is_to_persist_is_there_in_the_next_life() {
    let drawer = Drawer::default();
    let mut first = kept(&drawer);
    assert_eq!(register(&mut first, REGISTER, PERSIST), Status::SUCCESS);
    assert_eq!(acquire(&mut first), Status::SUCCESS);
    let before = seen(&first);
    assert!(before.is_some_and(|reservation| reservation.is_holder));
    drop(first);
    let mut second = kept(&drawer);
    // Its host is told who it is only now.
    let mut other = second.second(2);
    other.set_host(HostIdentity::Extended(8));
    assert_eq!(seen(&second), before);
    assert!(other.namespaces().reader().get().get(1).unwrap().reservation.is_some());
    // From now on it does not.
    let status = register(&mut second, REGISTER, ChangePersistence::Clear);
    assert_eq!((status, drawer.load()), (Status::SUCCESS, Ok(None)));
    drop((second, other));
    assert_eq!(seen(&kept(&drawer)), None);
}

#[test]
fn what_does_not_persist_is_not_written_down() {
    let drawer = Drawer::default();
    let mut bench = kept(&drawer);
    assert_eq!(register(&mut bench, REGISTER, ChangePersistence::None), Status::SUCCESS);
    assert_eq!(acquire(&mut bench), Status::SUCCESS);
    assert_eq!(drawer.0.lock().unwrap().stores, 0);
    // A feature says so as well.
    let set = SetFeatures {
        nsid: 1,
        fid: Feature::ReservationPersistence.code(),
        cdw11: 1,
        ..SetFeatures::default()
    };
    assert_eq!(bench.run(set), Ok(0));
    assert_eq!(drawer.0.lock().unwrap().stores, 1);
    // What changes nothing is not written again.
    assert_eq!(acquire(&mut bench), Status::SUCCESS);
    assert_eq!(drawer.0.lock().unwrap().stores, 1);
}

#[test]
fn what_cannot_be_written_down_does_not_change() {
    let drawer = Drawer::default();
    let mut bench = kept(&drawer);
    assert_eq!(register(&mut bench, REGISTER, PERSIST), Status::SUCCESS);
    drawer.0.lock().unwrap().is_stuck = true;
    assert_eq!(acquire(&mut bench), Status::INTERNAL_ERROR);
    assert_eq!(seen(&bench), None);
    drawer.0.lock().unwrap().is_stuck = false;
    assert_eq!(acquire(&mut bench), Status::SUCCESS);
}

#[test]
fn where_nothing_persists_hosts_are_told_so() {
    let mut bench = bench(Persistence::None);
    assert_eq!(register(&mut bench, REGISTER, PERSIST), Status::INVALID_FIELD);
    assert_eq!(register(&mut bench, REGISTER, ChangePersistence::None), Status::SUCCESS);
    assert_eq!(acquire(&mut bench), Status::SUCCESS);
    let feature = Feature::ReservationPersistence.code();
    let get = GetFeatures { nsid: 1, fid: feature, ..GetFeatures::default() };
    assert_eq!(bench.run(get), Ok(0));
    let set = SetFeatures { nsid: 1, fid: feature, cdw11: 1, ..SetFeatures::default() };
    assert_eq!(bench.run(set).map_err(Status::code), Err(Status::INVALID_FIELD));
    let namespace = |persistence| {
        let mut bench = self::bench(persistence);
        let identify = wire::admin::Identify { nsid: 1, ..wire::admin::Identify::default() };
        let page = bench.get(identify).unwrap();
        wire::identify::IdentifyNamespace::from_bytes(page.first_chunk().unwrap()).ptpls()
    };
    assert!(!namespace(Persistence::None) && namespace(Persistence::Simulated));
}

#[test]
fn a_record_that_cannot_be_read_is_refused_and_not_forgotten() {
    let drawer = Drawer::default();
    drawer.0.lock().unwrap().record = Some(b"nonsense".to_vec());
    let config = crate::controller::SubsystemConfig::new("T1", Vec::new());
    let subsystem = crate::controller::Subsystem::new(config).unwrap();
    let namespace = crate::controller::NamespaceConfig {
        persistence: Persistence::Kept(Box::new(drawer)),
        ..crate::controller::NamespaceConfig::new(Arc::new(Shelf::new()))
    };
    let refused = subsystem.check_namespace(&namespace).unwrap_err();
    assert!(refused.contains("its reservations cannot be read: its CRC-32C is"), "{refused}");
}
