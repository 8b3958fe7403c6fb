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

use super::bench::{Bench, Shelf};
use crate::controller::interface::{AdminOutcome, CommandOrigin};
use crate::controller::{
    ControllerConfig, HostIdentity, PersistRequest, Persistence, ReservationStore,
};
use crate::namespace::Reservation;

/// Reservation store that outlives subsystems, with configurable properties. It writes on request.
#[derive(Clone, Default)]
pub(super) struct Drawer(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    record: Option<Vec<u8>>,
    /// Records that have been submitted and are not written.
    wanted: VecDeque<(Option<Vec<u8>>, PersistRequest)>,
    stores: u32,
    is_shut: bool,
}

impl Drawer {
    pub(super) fn wanted(&self) -> usize {
        self.0.lock().unwrap().wanted.len()
    }

    pub(super) fn stores(&self) -> u32 {
        self.0.lock().unwrap().stores
    }

    /// The next submitted record.
    pub(super) fn take(&self) -> (Option<Vec<u8>>, PersistRequest) {
        self.0.lock().unwrap().wanted.pop_front().expect("something is to be written")
    }

    /// Writes a record without a completion.
    pub(super) fn put(&self, record: Option<Vec<u8>>) {
        let mut inside = self.0.lock().unwrap();
        inside.stores += 1;
        inside.record = record;
    }

    /// Writes the next record.
    pub(super) fn write(&self) {
        let (record, stored) = self.take();
        self.put(record);
        stored.finish(Ok(()));
    }

    /// Fails to write the next record.
    pub(super) fn fail(&self) {
        self.take().1.finish(Err(Error::environment("the drawer is stuck".to_owned())));
    }

    /// Accepts records, or rejects them.
    pub(super) fn shut(&self, is_shut: bool) {
        self.0.lock().unwrap().is_shut = is_shut;
    }
}

impl ReservationStore for Drawer {
    fn load(&self) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.0.lock().unwrap().record.clone())
    }

    fn store(
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

fn bench(persistence: Persistence) -> Bench {
    let change = |config: &mut crate::controller::SubsystemConfig| {
        config.namespaces[0].persistence = persistence;
    };
    let mut bench = Bench::with(vec![Shelf::new()], change, ControllerConfig::default());
    bench.controller.set_host(HostIdentity::Extended(7));
    bench
}

pub(super) fn load_reservations(drawer: &Drawer) -> Bench {
    bench(Persistence::Durable(Box::new(drawer.clone())))
}

/// Registers host 5 with the contents of `drawer`, if there are any.
fn register(
    bench: &mut Bench,
    drawer: Option<&Drawer>,
    (rrega, cptpl): (RegisterAction, ChangePersistence),
) -> Status {
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5).crkey(5));
    reserve(bench, drawer, &command.to_command(), keys.as_bytes())
}

fn acquire(bench: &mut Bench, drawer: Option<&Drawer>) -> Status {
    let command = ReservationAcquire {
        nsid: 1,
        racqa: AcquireAction::Acquire,
        iekey: false,
        disnsrs: false,
        rtype: ReservationType::ExclusiveAccess,
    };
    let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(5));
    reserve(bench, drawer, &command.to_command(), keys.as_bytes())
}

/// Runs a command to its end, including the writes that it requires.
fn reserve(bench: &mut Bench, drawer: Option<&Drawer>, command: &Command, sent: &[u8]) -> Status {
    let from = CommandOrigin { queue: 1, ticket: 9 };
    let now = bench.now;
    if let Some(end) = bench.controller.reservation(now, from, command, &mut sent.to_vec()) {
        return end.status.code();
    }
    drawer.expect("nothing else has to be waited for").write();
    bench.turns(1);
    let reservation_completions =
        bench.controller.next_reservation_completion().expect("it has been written");
    assert_eq!(reservation_completions.from, from);
    reservation_completions.end.status.code()
}

pub(super) fn seen(bench: &Bench) -> Option<Reservation> {
    bench.controller.namespaces().reader().get().get(1).unwrap().reservation
}

const PERSIST: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::Persist);
const PASS: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::None);
const CLEAR: (RegisterAction, ChangePersistence) =
    (RegisterAction::Register, ChangePersistence::Clear);

#[test]
fn what_is_to_persist_is_there_in_the_next_life() {
    let drawer = Drawer::default();
    let mut first = load_reservations(&drawer);
    assert_eq!(register(&mut first, Some(&drawer), PERSIST), Status::SUCCESS);
    assert_eq!(acquire(&mut first, Some(&drawer)), Status::SUCCESS);
    let before = seen(&first);
    assert!(before.is_some_and(|reservation| reservation.is_holder));
    drop(first);
    let mut second = load_reservations(&drawer);
    // The host is identified only now.
    let mut other = second.second(2);
    other.set_host(HostIdentity::Extended(8));
    assert_eq!(seen(&second), before);
    assert!(other.namespaces().reader().get().get(1).unwrap().reservation.is_some());
    // From now on it does not persist.
    let status = register(&mut second, Some(&drawer), CLEAR);
    assert_eq!((status, drawer.load()), (Status::SUCCESS, Ok(None)));
    drop((second, other));
    assert_eq!(seen(&load_reservations(&drawer)), None);
}

#[test]
fn what_does_not_persist_is_not_written_down() {
    let drawer = Drawer::default();
    let mut bench = load_reservations(&drawer);
    assert_eq!(register(&mut bench, None, PASS), Status::SUCCESS);
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
    assert_eq!(drawer.stores(), 0);
    // The feature also enables it, and is not completed before it is durable.
    assert_eq!(bench.step(&persist_by_feature(), &[]).0, AdminOutcome::Deferred);
    bench.turns(3);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    drawer.write();
    assert_eq!(bench.wait(), (7, Ok(0)));
    assert_eq!(drawer.stores(), 1);
    // A command that changes nothing causes no write.
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
}

fn persist_by_feature() -> Command {
    let fid = Feature::ReservationPersistence.code();
    let set = SetFeatures { nsid: 1, fid, cdw11: 1, ..SetFeatures::default() };
    set.to_command().with_cid(7)
}

#[test]
fn a_feature_that_cannot_be_written_down_is_refused_and_not_set() {
    let drawer = Drawer::default();
    let mut bench = load_reservations(&drawer);
    assert_eq!(bench.step(&persist_by_feature(), &[]).0, AdminOutcome::Deferred);
    drawer.fail();
    assert_eq!(bench.wait(), (7, Err(Status::INTERNAL_ERROR)));
    let fid = Feature::ReservationPersistence.code();
    let get = GetFeatures { nsid: 1, fid, ..GetFeatures::default() };
    assert_eq!(bench.run(get), Ok(0));
    // After a reset it is set nevertheless, without a completion.
    assert_eq!(bench.step(&persist_by_feature(), &[]).0, AdminOutcome::Deferred);
    bench.controller.reset(bench.now);
    drawer.write();
    bench.turns(3);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    assert_eq!(bench.run(get), Ok(1));
}

#[test]
fn where_nothing_persists_hosts_are_told_so() {
    let mut bench = bench(Persistence::None);
    // Linux requests it with every registration, whatever the namespace supports.
    assert_eq!(register(&mut bench, None, PERSIST), Status::SUCCESS);
    assert_eq!(acquire(&mut bench, None), Status::SUCCESS);
    let report = ReservationReport { nsid: 1, numd: 15, eds: true, disnsrs: false };
    let mut page = Vec::new();
    let (now, from) = (bench.now, CommandOrigin { queue: 1, ticket: 9 });
    let end = bench.controller.reservation(now, from, &report.to_command(), &mut page);
    assert_eq!(end.unwrap().status, Status::SUCCESS);
    assert_eq!(ReservationStatusExtended::parse(&page).unwrap().ptpls(), 0);
    let feature = Feature::ReservationPersistence.code();
    let get = GetFeatures { nsid: 1, fid: feature, ..GetFeatures::default() };
    assert_eq!(bench.run(get), Ok(0));
    let set = SetFeatures { nsid: 1, fid: feature, cdw11: 1, ..SetFeatures::default() };
    assert_eq!(bench.run(set).map_err(Status::code), Err(Status::INVALID_FIELD));
    let namespace = |persistence| {
        let mut bench = self::bench(persistence);
        let identify =
            tenmil_wire::admin::Identify { nsid: 1, ..tenmil_wire::admin::Identify::default() };
        let page = bench.get(identify).unwrap();
        tenmil_wire::identify::IdentifyNamespace::from_bytes(page.first_chunk().unwrap()).ptpls()
    };
    assert!(!namespace(Persistence::None) && namespace(Persistence::Emulated));
}

#[test]
fn a_record_that_cannot_be_read_is_refused_and_not_forgotten() {
    let drawer = Drawer::default();
    drawer.0.lock().unwrap().record = Some(b"nonsense".to_vec());
    let config = crate::controller::SubsystemConfig::new("T1", Vec::new());
    let subsystem = crate::controller::Subsystem::new(config).unwrap();
    let namespace = crate::controller::NamespaceConfig {
        persistence: Persistence::Durable(Box::new(drawer)),
        ..crate::controller::NamespaceConfig::new(Arc::new(Shelf::new()))
    };
    let refused = subsystem.check_namespace(&namespace).unwrap_err();
    assert!(refused.text.contains("its reservations cannot be read: its CRC-32C is"), "{refused}");
}
