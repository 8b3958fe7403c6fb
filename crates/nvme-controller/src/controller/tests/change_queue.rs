//! Changes of reservations that wait: for a slow disk, for each other, and for hosts that have
//! disconnected.

use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationReport, ReservationStatusExtended,
    ReservationType,
};
use tenmil_wire::log::event::ReservationEvent;
use tenmil_wire::{Command, Status, TypedCommand};

use super::fixture::ControllerFixture;
use super::persistence::{FakeReservationStore, fixture_with_store, visible_reservation};
use crate::controller::transport_interface::{AdminResult, QueueCommandId, TransportAction};
use crate::controller::{
    Controller, HostIdentity, NamespaceConfig, ReservationPersistenceMode, ReservationStore,
};

/// Two hosts, each with a controller and its own number as key, and a drawer for persistent records.
struct TwoHostsFixture {
    bench: ControllerFixture,
    other: Controller,
    drawer: FakeReservationStore,
}

impl TwoHostsFixture {
    /// Host 1 is registered with persistence; host 2 is registered.
    fn new() -> Self {
        let drawer = FakeReservationStore::default();
        let mut bench = fixture_with_store(&drawer);
        let mut other = bench.open_second_controller(2);
        bench.controller.set_host(HostIdentity::Extended(1));
        other.set_host(HostIdentity::Extended(2));
        let mut race = Self { bench, other, drawer };
        for host in [1, 2] {
            assert_eq!(race.submit_reservation(host, 0, &register_command(host)), None);
            race.drawer.complete_write();
            assert_eq!(race.completions_of(host), [(0, Status::SUCCESS)]);
        }
        race
    }

    fn controller(&mut self, host: u64) -> &mut Controller {
        if host == 1 { &mut self.bench.controller } else { &mut self.other }
    }

    fn submit_reservation(
        &mut self,
        host: u64,
        ticket: u32,
        (command, keys): &ReservationCommand,
    ) -> Option<AdminResult> {
        let now = self.bench.now;
        let from = QueueCommandId { queue: 1, ticket };
        self.controller(host).execute_reservation_command(now, from, command, &mut keys.clone())
    }

    /// Completions of a host.
    fn completions_of(&mut self, host: u64) -> Vec<(u32, Status)> {
        let now = self.bench.now;
        let controller = self.controller(host);
        controller.poll(now);
        let reservation_completions =
            std::iter::from_fn(|| controller.next_reservation_completion());
        reservation_completions
            .map(|reservation_completions| {
                (
                    reservation_completions.from.ticket,
                    reservation_completions.end.status.without_crd_more_dnr(),
                )
            })
            .collect()
    }

    /// The reservation as seen by host 1.
    fn is_held_by_first_host(&self) -> Option<bool> {
        visible_reservation(&self.bench).map(|reservation| reservation.is_holder)
    }

    fn registrant_count(&mut self) -> u16 {
        let report = ReservationReport { nsid: 1, numd: 255, eds: true, disnsrs: false };
        let (now, mut data) = (self.bench.now, Vec::new());
        let from = QueueCommandId { queue: 1, ticket: 99 };
        let end = self.bench.controller.execute_reservation_command(
            now,
            from,
            &report.to_command(),
            &mut data,
        );
        assert_eq!(end, Some(AdminResult::OK), "a report waits for nothing");
        ReservationStatusExtended::from_bytes(data.first_chunk().unwrap()).regstrnt()
    }
}

type ReservationCommand = (Command, Vec<u8>);

fn register_command(host: u64) -> ReservationCommand {
    registration_command(host, RegisterAction::Register)
}

fn unregister_command(host: u64) -> ReservationCommand {
    registration_command(host, RegisterAction::Unregister)
}

fn registration_command(host: u64, rrega: RegisterAction) -> ReservationCommand {
    let cptpl = ChangePersistence::Persist;
    let command = ReservationRegister { nsid: 1, rrega, iekey: false, disnsrs: false, cptpl };
    let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(host).crkey(host));
    (command.to_command(), keys.as_bytes().to_vec())
}

fn acquire_command(host: u64, racqa: AcquireAction, victim: u64) -> ReservationCommand {
    let rtype = ReservationType::ExclusiveAccess;
    let command = ReservationAcquire { nsid: 1, racqa, iekey: false, disnsrs: false, rtype };
    let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(host).prkey(victim));
    (command.to_command(), keys.as_bytes().to_vec())
}

const TAKE: AcquireAction = AcquireAction::Acquire;

#[test]
fn reservation_change_is_not_visible_before_it_is_durable() {
    let mut race = TwoHostsFixture::new();
    assert_eq!(race.submit_reservation(1, 5, &acquire_command(1, TAKE, 0)), None);
    assert_eq!((race.completions_of(1), race.is_held_by_first_host()), (vec![], None));
    assert_eq!(race.registrant_count(), 2);
    race.drawer.complete_write();
    assert_eq!(race.is_held_by_first_host(), Some(true), "before anybody has turned");
    assert_eq!(race.completions_of(1), [(5, Status::SUCCESS)]);
    assert_eq!(race.completions_of(1), [], "once");
}

#[test]
fn second_of_two_racing_changes_applies_to_the_result_of_the_first() {
    for first_is_written in [true, false] {
        let mut race = TwoHostsFixture::new();
        assert_eq!(race.submit_reservation(2, 1, &acquire_command(2, TAKE, 0)), None);
        assert_eq!(race.submit_reservation(1, 2, &acquire_command(1, TAKE, 0)), None);
        assert_eq!(race.drawer.pending_write_count(), 1, "one record at a time");
        if first_is_written {
            race.drawer.complete_write();
            assert_eq!(race.completions_of(2), [(1, Status::SUCCESS)]);
            assert_eq!(race.completions_of(1), [(2, Status::RESERVATION_CONFLICT)]);
        } else {
            race.drawer.fail_write();
            assert_eq!(race.completions_of(2), [(1, Status::INTERNAL_ERROR)]);
            assert_eq!((race.completions_of(1), race.is_held_by_first_host()), (vec![], None));
            race.drawer.complete_write();
            assert_eq!(race.completions_of(1), [(2, Status::SUCCESS)]);
        }
        assert_eq!(race.is_held_by_first_host(), Some(!first_is_written));
        assert_eq!(race.drawer.pending_write_count(), 0);
    }
}

#[test]
fn queued_changes_apply_in_order_and_volatile_ones_immediately() {
    let mut race = TwoHostsFixture::new();
    assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
    // A repeated acquire changes nothing, and with another key it is rejected.
    assert_eq!(race.submit_reservation(1, 2, &acquire_command(1, TAKE, 0)), None);
    assert_eq!(race.submit_reservation(1, 3, &acquire_command(7, TAKE, 0)), None);
    assert_eq!(
        race.submit_reservation(2, 4, &acquire_command(2, AcquireAction::PreemptAndAbort, 1)),
        None
    );
    race.drawer.complete_write();
    let conflict = Status::RESERVATION_CONFLICT;
    let expected = [(1, Status::SUCCESS), (2, Status::SUCCESS), (3, conflict)];
    assert_eq!(race.completions_of(1), expected);
    assert_eq!(race.completions_of(2), []);
    assert_eq!(race.bench.controller.next_transport_action(), None, "nothing is preempted yet");
    race.drawer.complete_write();
    assert_eq!(race.completions_of(2), [], "the queues of host 1 may still write");
    race.completions_of(1);
    let aborted = race.bench.controller.next_transport_action();
    assert!(matches!(aborted, Some(TransportAction::AbortNamespace { nsid: 1, .. })));
    assert_eq!(race.completions_of(2), []);
    drop(aborted);
    assert_eq!(race.completions_of(2), [(4, Status::SUCCESS)]);
    race.completions_of(1);
    assert_eq!(
        race.bench.controller.next_transport_action(),
        Some(TransportAction::CheckPreempted)
    );
    assert_eq!(race.bench.controller.next_transport_action(), None);
    assert_eq!(race.is_held_by_first_host(), Some(false));
    // One notification: of the preemption, and none of the failures.
    let page = tenmil_wire::log::LogPage::ReservationNotification;
    let get = tenmil_wire::admin::GetLogPage { lid: page.code(), numd: 15, ..Default::default() };
    let notice = race.bench.run_for_data(get).unwrap();
    assert_eq!(notice[8], ReservationEvent::RegistrationPreempted.code());
}

#[test]
fn failed_record_write_leaves_the_reservation_unchanged() {
    let mut race = TwoHostsFixture::new();
    assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
    race.drawer.fail_write();
    assert_eq!(race.completions_of(1), [(1, Status::INTERNAL_ERROR)]);
    let why = "the drawer is stuck".to_owned();
    assert_eq!(
        race.bench.controller.next_transport_action(),
        Some(TransportAction::PersistFailed { why })
    );
    assert_eq!(race.is_held_by_first_host(), None);
    // The record cannot be stored, or the store has disappeared.
    race.drawer.set_rejects_writes(true);
    let end = race.submit_reservation(1, 2, &acquire_command(1, TAKE, 0)).unwrap();
    assert_eq!(end.status, Status::INTERNAL_ERROR);
    let anonymous = TransportAction::PersistFailed {
        why: "keep reservations: no store accepts them".to_owned(),
    };
    assert_eq!(race.completions_of(1), [], "it has ended already");
    assert_eq!(race.bench.controller.next_transport_action(), Some(anonymous.clone()));
    race.drawer.set_rejects_writes(false);
    assert_eq!(race.submit_reservation(1, 3, &acquire_command(1, TAKE, 0)), None);
    drop(race.drawer.take_pending_write());
    assert_eq!(race.completions_of(1), [(3, Status::INTERNAL_ERROR)]);
    assert_eq!(race.bench.controller.next_transport_action(), Some(anonymous));
    assert_eq!(race.submit_reservation(1, 4, &acquire_command(1, TAKE, 0)), None);
    race.drawer.complete_write();
    assert_eq!(race.completions_of(1), [(4, Status::SUCCESS)]);
}

#[test]
fn next_change_rewrites_the_record_after_a_failed_write() {
    let mut race = TwoHostsFixture::new();
    let before = race.drawer.load();
    assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
    // The record was written, but that could not be confirmed.
    let (record, stored) = race.drawer.take_pending_write();
    race.drawer.set_record(record);
    stored.complete_write(Err(tenmil_base::Error::environment("no room")));
    assert_eq!(race.completions_of(1), [(1, Status::INTERNAL_ERROR)]);
    assert_ne!(race.drawer.load(), before);
    // A rejected command does not repair that: nothing is durable yet. An accepted one does.
    assert!(race.submit_reservation(1, 2, &acquire_command(7, TAKE, 0)).is_some());
    let release = tenmil_wire::io::reservation::ReservationRelease {
        nsid: 1,
        rrela: tenmil_wire::io::reservation::ReleaseAction::Release,
        iekey: false,
        disnsrs: false,
        rtype: ReservationType::ExclusiveAccess,
    };
    let nothing = (release.to_command(), 1_u64.to_le_bytes().to_vec());
    assert_eq!(race.submit_reservation(1, 3, &nothing), None);
    race.drawer.complete_write();
    assert_eq!((race.completions_of(1), race.drawer.load()), (vec![(3, Status::SUCCESS)], before));
    assert!(race.submit_reservation(1, 4, &nothing).is_some(), "it is certain again");
}

#[test]
fn controller_reset_drops_its_pending_reservation_changes() {
    for goes in [
        |race: &mut TwoHostsFixture| race.bench.controller.reset(race.bench.now),
        |race: &mut TwoHostsFixture| {
            race.bench.controller.drop_queue_reservation_commands(1);
        },
    ] {
        let mut race = TwoHostsFixture::new();
        assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
        assert_eq!(race.submit_reservation(1, 2, &unregister_command(1)), None);
        assert_eq!(race.submit_reservation(2, 3, &acquire_command(2, TAKE, 0)), None);
        goes(&mut race);
        // A reset makes the controller forget the identity of its host.
        race.bench.controller.set_host(HostIdentity::Extended(1));
        race.drawer.complete_write();
        assert_eq!(race.is_held_by_first_host(), Some(true), "it was being written");
        assert_eq!(race.registrant_count(), 2, "the other had not begun");
        assert_eq!(race.completions_of(1), []);
        assert_eq!(race.completions_of(2), [(3, Status::RESERVATION_CONFLICT)]);
        // It had been decided, and not been completed.
        assert_eq!(race.submit_reservation(1, 4, &unregister_command(1)), None);
        race.drawer.complete_write();
        goes(&mut race);
        assert_eq!(race.completions_of(1), []);
        assert_eq!(race.drawer.pending_write_count(), 0);
    }
    let mut race = TwoHostsFixture::new();
    assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
    assert_eq!(race.submit_reservation(1, 2, &unregister_command(1)), None);
    race.drawer.complete_write();
    race.drawer.complete_write();
    race.bench.poll_times(1);
    race.bench.controller.drop_queue_reservation_commands(2);
    assert_eq!(race.completions_of(1).len(), 2, "another queue is not this one");
}

#[test]
fn removed_controller_leaves_no_pending_change() {
    let TwoHostsFixture { bench, other, drawer } = TwoHostsFixture::new();
    let mut race = TwoHostsFixture { bench, other, drawer };
    assert_eq!(race.submit_reservation(2, 1, &acquire_command(2, TAKE, 0)), None);
    assert_eq!(race.submit_reservation(2, 2, &unregister_command(2)), None);
    assert_eq!(race.submit_reservation(1, 3, &acquire_command(1, TAKE, 0)), None);
    race.other = race.bench.open_second_controller(3);
    race.drawer.complete_write();
    assert_eq!(race.completions_of(1), [(3, Status::RESERVATION_CONFLICT)]);
    assert_eq!(race.registrant_count(), 2);
}

#[test]
fn anonymous_host_is_removed_from_the_pending_record() {
    let mut race = TwoHostsFixture::new();
    let mut anonymous = race.bench.open_second_controller(3);
    // Without a host identifier, it remains registered only until its controller is reset.
    anonymous.set_host(HostIdentity::Anonymous(3));
    let (command, keys) = register_command(3);
    let (now, from) = (race.bench.now, QueueCommandId { queue: 1, ticket: 1 });
    assert_eq!(anonymous.execute_reservation_command(now, from, &command, &mut keys.clone()), None);
    anonymous.reset(now);
    race.drawer.complete_write();
    assert_eq!(race.registrant_count(), 2);
}

#[test]
fn removed_namespace_fails_pending_changes_and_ignores_late_write_results() {
    let mut race = TwoHostsFixture::new();
    assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
    assert_eq!(race.submit_reservation(2, 2, &unregister_command(2)), None);
    let (record, stored) = race.drawer.take_pending_write();
    let subsystem = race.bench.subsystem.clone();
    assert!(subsystem.remove_namespace(1));
    let gone = Status::INVALID_NAMESPACE_OR_FORMAT;
    assert_eq!(
        (race.completions_of(1), race.completions_of(2)),
        (vec![(1, gone)], vec![(2, gone)])
    );
    let again = NamespaceConfig {
        nsid: Some(1),
        persistence: ReservationPersistenceMode::Durable(Box::new(race.drawer.clone())),
        ..NamespaceConfig::new(std::sync::Arc::new(race.bench.shelves[0].clone()))
    };
    subsystem.add_namespace(again).unwrap();
    assert_eq!(race.submit_reservation(2, 3, &acquire_command(2, TAKE, 0)), None);
    race.drawer.set_record(record);
    stored.complete_write(Ok(()));
    assert_eq!((race.completions_of(1), race.completions_of(2)), (vec![], vec![]));
    race.drawer.complete_write();
    assert_eq!(race.completions_of(2), [(3, Status::SUCCESS)]);
}

#[test]
fn no_change_is_acknowledged_before_it_survives_power_loss() {
    for is_there in [false, true] {
        let mut race = TwoHostsFixture::new();
        assert_eq!(race.submit_reservation(1, 1, &acquire_command(1, TAKE, 0)), None);
        assert_eq!(race.submit_reservation(2, 2, &unregister_command(2)), None);
        let (record, stored) = race.drawer.take_pending_write();
        if is_there {
            race.drawer.set_record(record);
        }
        assert_eq!((race.completions_of(1), race.completions_of(2)), (vec![], vec![]));
        let TwoHostsFixture { bench, other, drawer } = race;
        drop((bench, other));
        // The writer reports its result after the recipient has disappeared.
        stored.complete_write(Ok(()));
        assert_eq!(drawer.pending_write_count(), 0);
        let mut next = fixture_with_store(&drawer);
        next.controller.set_host(HostIdentity::Extended(1));
        assert_eq!(visible_reservation(&next).is_some(), is_there);
    }
}
