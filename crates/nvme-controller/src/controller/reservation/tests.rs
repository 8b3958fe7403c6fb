//! Every type, role and action of reservations.

use tenmil_wire::Status;
use tenmil_wire::log::event::ReservationEvent as Notice;

use super::{
    HostId, REGISTRANTS_MAX, ReservationChangeEffects, Reservations, is_all_registrants_type,
};
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
fn three_registrants() -> Reservations {
    let mut it = Reservations::default();
    for (host, key) in [(A, KEY_A), (B, KEY_B), (C, KEY_B)] {
        it.register(host, None, key).unwrap();
    }
    it
}

fn reservation_held_by_host_a(kind: Kind) -> Reservations {
    let mut it = three_registrants();
    it.acquire(A, KEY_A, kind).unwrap();
    it
}

fn notified_hosts(effects: &ReservationChangeEffects) -> &[(HostId, Notice)] {
    &effects.notices
}

#[test]
fn access_per_reservation_type_matches_the_table_of_the_specification() {
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
        let it = reservation_held_by_host_a(kind);
        let access = |host| {
            let seen = it.as_seen_by(host).unwrap();
            (!seen.rejects_reads(), !seen.rejects_writes())
        };
        assert_eq!(access(A), holder, "{kind:?}");
        assert_eq!(access(B), registrant, "{kind:?}");
        assert_eq!(access(STRANGER), other, "{kind:?}");
        assert_eq!(it.is_holder(B), is_all_registrants_type(kind), "{kind:?}");
        assert!(!it.is_holder(STRANGER));
    }
    assert_eq!(
        three_registrants().as_seen_by(STRANGER),
        None,
        "without a reservation there is no conflict"
    );
}

#[test]
fn second_registration_requires_the_same_key() {
    let mut it = three_registrants();
    assert_eq!(it.register(A, None, KEY_A), Ok(ReservationChangeEffects::default()));
    assert_eq!(it.register(A, None, KEY_B), Err(CONFLICT));
    assert_eq!(it.register(STRANGER, None, 0), Err(INVALID));
    assert_eq!(it.registrants().count(), 3);
}

#[test]
fn registrant_count_is_bounded() {
    let mut it = Reservations::default();
    for id in 0..REGISTRANTS_MAX as u64 {
        it.register(HostId::Short(id + 1), None, 1).unwrap();
    }
    assert_eq!(it.register(A, None, 1), Err(Status::NOT_ENOUGH_RESOURCES));
    assert!(it.register(HostId::Short(1), None, 1).is_ok(), "those who are in may say so again");
}

#[test]
fn registrants_per_nqn_are_bounded() {
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
fn registrants_per_origin_address_are_bounded() {
    let site = |name: &str| super::OriginRegistrantLimit { name: name.into(), count_max: 3 };
    let mut it = Reservations::default();
    let register = |it: &mut Reservations, id: u64, from: &str| {
        let (host, nqn) = (HostId::Short(id), super::HostNqn::from(format!("nqn.{id}")));
        it.check_origin_limit(host, &site(from))?;
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
fn reservation_key_is_compared_unless_iekey_is_set() {
    let mut it = three_registrants();
    assert_eq!(it.replace_key(A, Some(1), 2), Err(CONFLICT));
    assert_eq!(it.replace_key(STRANGER, None, 2), Err(CONFLICT));
    assert_eq!(it.replace_key(A, Some(KEY_A), 0), Err(INVALID));
    it.replace_key(A, Some(KEY_A), 2).unwrap();
    it.replace_key(A, None, 3).unwrap();
    assert_eq!(it.registrants().next(), Some((A, 3)));
    assert_eq!(it.unregister(A, Some(2)), Err(CONFLICT));
    assert_eq!(it.unregister(STRANGER, None), Err(CONFLICT));
    it.unregister(A, None).unwrap();
    assert!(it.registrants().all(|(host, _)| host != A));
}

#[test]
fn actions_other_than_register_require_a_registrant_with_its_key() {
    let kind = Kind::WriteExclusive;
    for (host, key) in [(STRANGER, KEY_A), (A, KEY_B)] {
        let mut it = three_registrants();
        let before = it.clone();
        assert_eq!(it.acquire(host, key, kind), Err(CONFLICT));
        assert_eq!(it.preempt(host, key, KEY_B, kind, true), Err(CONFLICT));
        assert_eq!(it.release_and_unregister(host, key, kind), Err(CONFLICT));
        assert_eq!(it.clear(host, key), Err(CONFLICT));
        assert_eq!(it, before, "what is refused changes nothing");
    }
}

#[test]
fn only_the_holder_can_acquire_a_reservation_again() {
    for kind in Kind::ALL {
        for again in Kind::ALL {
            let mut it = reservation_held_by_host_a(kind);
            let expected =
                if again == kind { Ok(ReservationChangeEffects::default()) } else { Err(CONFLICT) };
            assert_eq!(it.acquire(A, KEY_A, again), expected, "{kind:?} {again:?}");
            let shared = is_all_registrants_type(kind) && again == kind;
            assert_eq!(it.acquire(B, KEY_B, again).is_ok(), shared, "{kind:?} {again:?}");
        }
    }
}

#[test]
fn unregistering_holder_releases_unless_all_registrants_hold() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let effects = it.unregister(A, Some(KEY_A)).unwrap();
        assert_eq!(it.active_reservation().is_some(), is_all_registrants_type(kind), "{kind:?}");
        let released = matches!(
            kind,
            Kind::WriteExclusiveRegistrantsOnly | Kind::ExclusiveAccessRegistrantsOnly
        );
        let notices = [(B, Notice::ReservationReleased), (C, Notice::ReservationReleased)];
        assert_eq!(notified_hosts(&effects), if released { &notices[..] } else { &[] }, "{kind:?}");
        it.unregister(B, None).unwrap();
        it.unregister(C, None).unwrap();
        assert_eq!(it.active_reservation(), None, "the last registrant takes it along");
    }
}

#[test]
fn unregistering_a_non_holder_keeps_the_reservation() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let held = it.active_reservation();
        assert_eq!(it.unregister(B, Some(KEY_B)), Ok(ReservationChangeEffects::default()));
        assert_eq!(it.active_reservation(), held);
    }
}

#[test]
fn release_requires_the_type_and_notifies_registrants() {
    for kind in Kind::ALL {
        for named in Kind::ALL {
            let mut it = reservation_held_by_host_a(kind);
            let effects = it.release_and_unregister(A, KEY_A, named);
            if named != kind {
                assert_eq!(effects, Err(INVALID));
                continue;
            }
            assert_eq!(it.active_reservation(), None);
            let shared = !matches!(kind, Kind::WriteExclusive | Kind::ExclusiveAccess);
            assert_eq!(
                notified_hosts(&effects.unwrap()).len(),
                if shared { 2 } else { 0 },
                "{kind:?}"
            );
        }
    }
}

#[test]
fn release_by_a_non_holder_has_no_effect() {
    for kind in Kind::ALL.into_iter().filter(|kind| !is_all_registrants_type(*kind)) {
        for named in Kind::ALL {
            let mut it = reservation_held_by_host_a(kind);
            let before = it.clone();
            assert_eq!(
                it.release_and_unregister(B, KEY_B, named),
                Ok(ReservationChangeEffects::default())
            );
            assert_eq!(it, before);
        }
    }
    assert_eq!(
        three_registrants().release_and_unregister(A, KEY_A, Kind::WriteExclusive),
        Ok(ReservationChangeEffects::default())
    );
}

#[test]
fn clear_removes_all_and_notifies_other_registrants() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let effects = it.clear(B, KEY_B).unwrap();
        assert_eq!((it.active_reservation(), it.registrants().count()), (None, 0));
        let notices = [(A, Notice::ReservationPreempted), (C, Notice::ReservationPreempted)];
        assert_eq!(notified_hosts(&effects), notices);
    }
}

#[test]
fn preempting_the_holder_transfers_the_reservation() {
    for kind in Kind::ALL.into_iter().filter(|kind| !is_all_registrants_type(*kind)) {
        for wanted in Kind::ALL {
            let mut it = reservation_held_by_host_a(kind);
            let effects = it.preempt(B, KEY_B, KEY_A, wanted, false).unwrap();
            assert_eq!(it.active_reservation().map(|held| held.kind), Some(wanted));
            assert!(it.is_holder(B));
            assert_eq!(it.is_holder(C), is_all_registrants_type(wanted));
            assert!(it.registrants().all(|(host, _)| host != A), "its registration is gone");
            assert!(notified_hosts(&effects).contains(&(A, Notice::RegistrationPreempted)));
            let shared =
                kind != wanted && !matches!(kind, Kind::WriteExclusive | Kind::ExclusiveAccess);
            let released = notified_hosts(&effects).contains(&(C, Notice::ReservationReleased));
            assert_eq!(released, shared, "{kind:?} to {wanted:?}");
            assert!(effects.aborts.is_empty());
        }
    }
}

#[test]
fn preempting_a_registrant_keeps_the_reservation() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let held = it.active_reservation();
        let effects = it.preempt(A, KEY_A, KEY_B, Kind::ExclusiveAccess, true).unwrap();
        assert_eq!(it.active_reservation(), held, "{kind:?}");
        assert_eq!(it.registrants().collect::<Vec<_>>(), [(A, KEY_A)]);
        let notices = [(B, Notice::RegistrationPreempted), (C, Notice::RegistrationPreempted)];
        assert_eq!(notified_hosts(&effects), notices);
        assert_eq!(effects.aborts, [B, C]);
    }
}

#[test]
fn preempting_an_unknown_key_conflicts() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let before = it.clone();
        assert_eq!(it.preempt(B, KEY_B, 0x99, kind, false), Err(CONFLICT));
        assert_eq!(it, before);
    }
    assert_eq!(
        three_registrants().preempt(A, KEY_A, 0x99, Kind::WriteExclusive, false),
        Err(CONFLICT)
    );
}

#[test]
fn preempting_key_zero_requires_an_all_registrants_reservation() {
    for kind in Kind::ALL {
        let mut it = reservation_held_by_host_a(kind);
        let effects = it.preempt(B, KEY_B, 0, Kind::ExclusiveAccess, true);
        if !is_all_registrants_type(kind) {
            assert_eq!(effects, Err(INVALID), "{kind:?}");
            continue;
        }
        assert_eq!(it.registrants().collect::<Vec<_>>(), [(B, KEY_B)]);
        assert!(it.is_holder(B));
        assert_eq!(it.active_reservation().map(|held| held.kind), Some(Kind::ExclusiveAccess));
        assert_eq!(effects.unwrap().aborts, [A, C]);
    }
}

#[test]
fn preempting_without_a_reservation_only_removes_registrations() {
    let mut it = three_registrants();
    let effects = it.preempt(A, KEY_A, KEY_B, Kind::WriteExclusive, false).unwrap();
    assert_eq!((it.active_reservation(), it.registrants().count()), (None, 1));
    assert_eq!(notified_hosts(&effects).len(), 2);
}

#[test]
fn holder_may_preempt_itself_to_change_the_type() {
    let mut it = three_registrants();
    it.acquire(B, KEY_B, Kind::WriteExclusiveRegistrantsOnly).unwrap();
    let effects = it.preempt(B, KEY_B, KEY_B, Kind::ExclusiveAccess, false).unwrap();
    assert!(it.is_holder(B));
    let left: Vec<HostId> = it.registrants().map(|(host, _)| host).collect();
    assert_eq!(left, [A, B], "C shared the key and is gone, the issuer stays");
    let notices = [(A, Notice::ReservationReleased), (C, Notice::RegistrationPreempted)];
    assert_eq!(notified_hosts(&effects), notices);
}

#[test]
fn the_generation_counts_registrations_and_not_reservations() {
    let mut it = three_registrants();
    assert_eq!(it.generation(), 3);
    it.acquire(A, KEY_A, Kind::WriteExclusive).unwrap();
    it.release_and_unregister(A, KEY_A, Kind::WriteExclusive).unwrap();
    assert_eq!(it.generation(), 3);
    it.replace_key(A, None, 7).unwrap();
    it.preempt(A, 7, KEY_B, Kind::WriteExclusive, false).unwrap();
    it.register(B, None, KEY_B).unwrap();
    it.unregister(B, None).unwrap();
    it.clear(A, 7).unwrap();
    assert_eq!(it.generation(), 8);
}

#[test]
fn power_cycle_keeps_only_persistent_reservations() {
    let mut it = reservation_held_by_host_a(Kind::WriteExclusive);
    it.set_persists_through_power_loss(true);
    let before = it.clone();
    it.handle_power_cycle();
    assert_eq!(it, before);
    it.set_persists_through_power_loss(false);
    it.handle_power_cycle();
    assert_eq!(it, Reservations::default());
}

#[test]
fn removing_an_anonymous_host_keeps_the_others() {
    let mut it = three_registrants();
    it.register(HostId::Anonymous(1), None, 5).unwrap();
    it.acquire(HostId::Anonymous(1), 5, Kind::ExclusiveAccess).unwrap();
    it.remove_host(HostId::Anonymous(1));
    assert_eq!((it.active_reservation(), it.registrants().count()), (None, 3));
}
