//! Every type, role and action of reservations.

use tenmil_wire::Status;
use tenmil_wire::log::event::ReservationEvent as Notice;

use super::{HostId, REGISTRANTS_MAX, ReservationEffects, Reservations, is_held_by_all};
use crate::namespace::ReservationKind as Kind;

const A: HostId = HostId::Extended(0xa);
const B: HostId = HostId::Extended(0xb);
const C: HostId = HostId::Extended(0xc);
const STRANGER: HostId = HostId::Extended(0xd);

const KEY_A: u64 = 0xaa;
const KEY_B: u64 = 0xbb;
const INVALID: Status = Status::INVALID_FIELD;
const CONFLICT: Status = Status::RESERVATION_CONFLICT;

/// A, B and C are registered, B and C with the same key.
fn three() -> Reservations {
    let mut it = Reservations::default();
    for (host, key) in [(A, KEY_A), (B, KEY_B), (C, KEY_B)] {
        it.register(host, None, key).unwrap();
    }
    it
}

fn held_by_a(kind: Kind) -> Reservations {
    let mut it = three();
    it.acquire(A, KEY_A, kind).unwrap();
    it
}

fn told(effects: &ReservationEffects) -> &[(HostId, Notice)] {
    &effects.notices
}

#[test]
fn access_is_as_the_table_draws_it_for_every_type_and_role() {
    const YES: (bool, bool) = (true, true);
    const READ: (bool, bool) = (true, false);
    const NO: (bool, bool) = (false, false);
    let expected = [
        (Kind::WriteExclusive, YES, READ, READ),
        (Kind::ExclusiveAccess, YES, NO, NO),
        (Kind::WriteExclusiveRegistrantsOnly, YES, YES, READ),
        (Kind::ExclusiveAccessRegistrantsOnly, YES, YES, NO),
        (Kind::WriteExclusiveAllRegistrants, YES, YES, READ),
        (Kind::ExclusiveAccessAllRegistrants, YES, YES, NO),
    ];
    assert_eq!(expected.map(|(kind, ..)| kind), Kind::ALL);
    for (kind, holder, registrant, other) in expected {
        let it = held_by_a(kind);
        let access = |host| {
            let seen = it.relative_to(host).unwrap();
            (!seen.rejects_reads(), !seen.rejects_writes())
        };
        assert_eq!(access(A), holder, "{kind:?}");
        assert_eq!(access(B), registrant, "{kind:?}");
        assert_eq!(access(STRANGER), other, "{kind:?}");
        assert_eq!(it.is_holder(B), is_held_by_all(kind), "{kind:?}");
        assert!(!it.is_holder(STRANGER));
    }
    assert_eq!(three().relative_to(STRANGER), None, "without a reservation there is no conflict");
}

#[test]
fn a_second_registration_needs_the_same_key() {
    let mut it = three();
    assert_eq!(it.register(A, None, KEY_A), Ok(ReservationEffects::default()));
    assert_eq!(it.register(A, None, KEY_B), Err(CONFLICT));
    assert_eq!(it.register(STRANGER, None, 0), Err(INVALID));
    assert_eq!(it.registrants().count(), 3);
}

#[test]
fn registrations_are_bounded() {
    let mut it = Reservations::default();
    for id in 0..REGISTRANTS_MAX as u64 {
        it.register(HostId::Short(id + 1), None, 1).unwrap();
    }
    assert_eq!(it.register(A, None, 1), Err(Status::NOT_ENOUGH_RESOURCES));
    assert!(it.register(HostId::Short(1), None, 1).is_ok(), "those who are in may say so again");
}

#[test]
fn one_nqn_with_many_identifiers_leaves_room_for_other_hosts() {
    let nqn = |name: &str| super::HostNqn::from(name);
    let mut it = Reservations::default();
    let mut accepted = 0;
    for id in 0..2 * REGISTRANTS_MAX as u64 {
        accepted += usize::from(it.register(HostId::Short(id + 1), Some(&nqn("one")), 1).is_ok());
    }
    assert_eq!(accepted, super::REGISTRANTS_PER_NQN_MAX);
    it.register(A, Some(&nqn("another")), 1).unwrap();
    it.register(HostId::Short(1), Some(&nqn("one")), 1).expect("it is registered already");
    it.unregister(HostId::Short(1), None).unwrap();
    it.register(HostId::Short(900), Some(&nqn("one")), 1).expect("it has given one back");
}

/// Anonymous hosts may appear under any number of names.
#[test]
fn hosts_of_one_address_leave_room_for_others_whatever_their_names() {
    let site = |name: &str| super::OriginLimit { name: name.into(), count_max: 3 };
    let mut it = Reservations::default();
    let register = |it: &mut Reservations, id: u64, from: &str| {
        let (host, nqn) = (HostId::Short(id), super::HostNqn::from(format!("nqn.{id}")));
        it.check_origin(host, &site(from))?;
        it.register(host, Some(&nqn), 1)?;
        it.set_origin(host, &site(from));
        Ok(())
    };
    for id in 1..=3 {
        assert_eq!(register(&mut it, id, "192.0.2.1"), Ok(()));
    }
    assert_eq!(register(&mut it, 4, "192.0.2.1"), Err(Status::NOT_ENOUGH_RESOURCES));
    assert_eq!(register(&mut it, 2, "192.0.2.1"), Ok(()), "it is registered already");
    assert_eq!(register(&mut it, 4, "192.0.2.2"), Ok(()));
    it.unregister(HostId::Short(1), None).unwrap();
    assert_eq!(register(&mut it, 5, "192.0.2.1"), Ok(()), "one was given back");
}

#[test]
fn a_key_is_compared_unless_it_is_to_be_ignored() {
    let mut it = three();
    assert_eq!(it.replace(A, Some(1), 2), Err(CONFLICT));
    assert_eq!(it.replace(STRANGER, None, 2), Err(CONFLICT));
    assert_eq!(it.replace(A, Some(KEY_A), 0), Err(INVALID));
    it.replace(A, Some(KEY_A), 2).unwrap();
    it.replace(A, None, 3).unwrap();
    assert_eq!(it.registrants().next(), Some((A, 3)));
    assert_eq!(it.unregister(A, Some(2)), Err(CONFLICT));
    assert_eq!(it.unregister(STRANGER, None), Err(CONFLICT));
    it.unregister(A, None).unwrap();
    assert!(it.registrants().all(|(host, _)| host != A));
}

#[test]
fn every_action_but_register_wants_a_registrant_and_its_key() {
    let kind = Kind::WriteExclusive;
    for (host, key) in [(STRANGER, KEY_A), (A, KEY_B)] {
        let mut it = three();
        let before = it.clone();
        assert_eq!(it.acquire(host, key, kind), Err(CONFLICT));
        assert_eq!(it.preempt(host, key, KEY_B, kind, true), Err(CONFLICT));
        assert_eq!(it.release(host, key, kind), Err(CONFLICT));
        assert_eq!(it.clear(host, key), Err(CONFLICT));
        assert_eq!(it, before, "what is refused changes nothing");
    }
}

#[test]
fn a_reservation_is_taken_once_and_again_only_by_its_holder() {
    for kind in Kind::ALL {
        for again in Kind::ALL {
            let mut it = held_by_a(kind);
            let expected =
                if again == kind { Ok(ReservationEffects::default()) } else { Err(CONFLICT) };
            assert_eq!(it.acquire(A, KEY_A, again), expected, "{kind:?} {again:?}");
            let shared = is_held_by_all(kind) && again == kind;
            assert_eq!(it.acquire(B, KEY_B, again).is_ok(), shared, "{kind:?} {again:?}");
        }
    }
}

#[test]
fn a_holder_that_unregisters_releases_unless_others_hold_too() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let effects = it.unregister(A, Some(KEY_A)).unwrap();
        assert_eq!(it.held().is_some(), is_held_by_all(kind), "{kind:?}");
        let released = matches!(
            kind,
            Kind::WriteExclusiveRegistrantsOnly | Kind::ExclusiveAccessRegistrantsOnly
        );
        let notices = [(B, Notice::ReservationReleased), (C, Notice::ReservationReleased)];
        assert_eq!(told(&effects), if released { &notices[..] } else { &[] }, "{kind:?}");
        it.unregister(B, None).unwrap();
        it.unregister(C, None).unwrap();
        assert_eq!(it.held(), None, "the last registrant takes it along");
    }
}

#[test]
fn one_who_does_not_hold_unregisters_without_disturbing() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let held = it.held();
        assert_eq!(it.unregister(B, Some(KEY_B)), Ok(ReservationEffects::default()));
        assert_eq!(it.held(), held);
    }
}

#[test]
fn a_release_needs_the_type_and_tells_registrants_that_shared_it() {
    for kind in Kind::ALL {
        for named in Kind::ALL {
            let mut it = held_by_a(kind);
            let effects = it.release(A, KEY_A, named);
            if named != kind {
                assert_eq!(effects, Err(INVALID));
                continue;
            }
            assert_eq!(it.held(), None);
            let shared = !matches!(kind, Kind::WriteExclusive | Kind::ExclusiveAccess);
            assert_eq!(told(&effects.unwrap()).len(), if shared { 2 } else { 0 }, "{kind:?}");
        }
    }
}

#[test]
fn a_release_by_one_who_does_not_hold_has_no_effect() {
    for kind in Kind::ALL.into_iter().filter(|kind| !is_held_by_all(*kind)) {
        for named in Kind::ALL {
            let mut it = held_by_a(kind);
            let before = it.clone();
            assert_eq!(it.release(B, KEY_B, named), Ok(ReservationEffects::default()));
            assert_eq!(it, before);
        }
    }
    assert_eq!(three().release(A, KEY_A, Kind::WriteExclusive), Ok(ReservationEffects::default()));
}

#[test]
fn a_clear_removes_everything_and_tells_every_other_registrant() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let effects = it.clear(B, KEY_B).unwrap();
        assert_eq!((it.held(), it.registrants().count()), (None, 0));
        let notices = [(A, Notice::ReservationPreempted), (C, Notice::ReservationPreempted)];
        assert_eq!(told(&effects), notices);
    }
}

#[test]
fn preempting_the_holder_takes_the_reservation_over() {
    for kind in Kind::ALL.into_iter().filter(|kind| !is_held_by_all(*kind)) {
        for wanted in Kind::ALL {
            let mut it = held_by_a(kind);
            let effects = it.preempt(B, KEY_B, KEY_A, wanted, false).unwrap();
            assert_eq!(it.held().map(|held| held.kind), Some(wanted));
            assert!(it.is_holder(B));
            assert_eq!(it.is_holder(C), is_held_by_all(wanted));
            assert!(it.registrants().all(|(host, _)| host != A), "its registration is gone");
            assert!(told(&effects).contains(&(A, Notice::RegistrationPreempted)));
            let shared =
                kind != wanted && !matches!(kind, Kind::WriteExclusive | Kind::ExclusiveAccess);
            let released = told(&effects).contains(&(C, Notice::ReservationReleased));
            assert_eq!(released, shared, "{kind:?} to {wanted:?}");
            assert!(effects.aborts.is_empty());
        }
    }
}

#[test]
fn preempting_a_registrant_leaves_the_reservation_alone() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let held = it.held();
        let effects = it.preempt(A, KEY_A, KEY_B, Kind::ExclusiveAccess, true).unwrap();
        assert_eq!(it.held(), held, "{kind:?}");
        assert_eq!(it.registrants().collect::<Vec<_>>(), [(A, KEY_A)]);
        let notices = [(B, Notice::RegistrationPreempted), (C, Notice::RegistrationPreempted)];
        assert_eq!(told(&effects), notices);
        assert_eq!(effects.aborts, [B, C]);
    }
}

#[test]
fn a_key_that_nobody_has_cannot_be_preempted() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let before = it.clone();
        assert_eq!(it.preempt(B, KEY_B, 0x99, kind, false), Err(CONFLICT));
        assert_eq!(it, before);
    }
    assert_eq!(three().preempt(A, KEY_A, 0x99, Kind::WriteExclusive, false), Err(CONFLICT));
}

#[test]
fn key_zero_means_everyone_else_when_all_hold_it_and_nothing_otherwise() {
    for kind in Kind::ALL {
        let mut it = held_by_a(kind);
        let effects = it.preempt(B, KEY_B, 0, Kind::ExclusiveAccess, true);
        if !is_held_by_all(kind) {
            assert_eq!(effects, Err(INVALID), "{kind:?}");
            continue;
        }
        assert_eq!(it.registrants().collect::<Vec<_>>(), [(B, KEY_B)]);
        assert!(it.is_holder(B));
        assert_eq!(it.held().map(|held| held.kind), Some(Kind::ExclusiveAccess));
        assert_eq!(effects.unwrap().aborts, [A, C]);
    }
}

#[test]
fn preempting_without_a_reservation_only_removes_registrations() {
    let mut it = three();
    let effects = it.preempt(A, KEY_A, KEY_B, Kind::WriteExclusive, false).unwrap();
    assert_eq!((it.held(), it.registrants().count()), (None, 1));
    assert_eq!(told(&effects).len(), 2);
}

#[test]
fn a_holder_may_preempt_itself_to_change_the_type() {
    let mut it = three();
    it.acquire(B, KEY_B, Kind::WriteExclusiveRegistrantsOnly).unwrap();
    let effects = it.preempt(B, KEY_B, KEY_B, Kind::ExclusiveAccess, false).unwrap();
    assert!(it.is_holder(B));
    let left: Vec<HostId> = it.registrants().map(|(host, _)| host).collect();
    assert_eq!(left, [A, B], "C shared the key and is gone, the issuer stays");
    let notices = [(A, Notice::ReservationReleased), (C, Notice::RegistrationPreempted)];
    assert_eq!(told(&effects), notices);
}

#[test]
fn the_generation_counts_registrations_and_not_reservations() {
    let mut it = three();
    assert_eq!(it.generation(), 3);
    it.acquire(A, KEY_A, Kind::WriteExclusive).unwrap();
    it.release(A, KEY_A, Kind::WriteExclusive).unwrap();
    assert_eq!(it.generation(), 3);
    it.replace(A, None, 7).unwrap();
    it.preempt(A, 7, KEY_B, Kind::WriteExclusive, false).unwrap();
    it.register(B, None, KEY_B).unwrap();
    it.unregister(B, None).unwrap();
    it.clear(A, 7).unwrap();
    assert_eq!(it.generation(), 8);
}

#[test]
fn a_power_cycle_keeps_only_what_was_to_persist() {
    let mut it = held_by_a(Kind::WriteExclusive);
    it.set_persists(true);
    let before = it.clone();
    it.power_cycle();
    assert_eq!(it, before);
    it.set_persists(false);
    it.power_cycle();
    assert_eq!(it, Reservations::default());
}

#[test]
fn a_host_without_an_identifier_is_forgotten_alone() {
    let mut it = three();
    it.register(HostId::Anonymous(1), None, 5).unwrap();
    it.acquire(HostId::Anonymous(1), 5, Kind::ExclusiveAccess).unwrap();
    it.remove_host(HostId::Anonymous(1));
    assert_eq!((it.held(), it.registrants().count()), (None, 3));
}
