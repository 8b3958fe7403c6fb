//! Authentication of connected queues: again, with another secret, and after one was removed.

use tenmil_base::Span;
use tenmil_nvme_auth::{Host, HostConfig, Step};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, PropertySize};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{Status, nqn};

use super::authenticating_host::{
    ExchangeResult, OF_HOST, host_config, randomness, secret, secured_target, security,
};
use super::test_target::{ENABLED, TestTarget, admin_config, admin_connect, connect_data};
use crate::tcp::authentication::AUTHENTICATION_TIMEOUT;
use crate::tcp::security::REMOVAL_GRACE;
use crate::tcp::{DisconnectReason, TargetEvent};

/// Secret that replaces the one of the host.
const NEW: u64 = 3;

fn new_host_config() -> HostConfig {
    HostConfig { host_secret: secret(NEW), ..host_config() }
}

/// Host with an admin queue and an I/O queue, which have authenticated with the old secret.
fn connect_with_old_secret(rig: &mut TestTarget) -> (usize, usize) {
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    (admin, rig.connect_authenticated_io((cntlid, 1), host_config()))
}

/// Exchange that has begun on a queue.
fn begin_exchange(rig: &mut TestTarget, line: usize, config: HostConfig) -> Host {
    let mut host = Host::new(config).unwrap();
    let negotiate = host.start(randomness(line as u64 + 70));
    assert_eq!(rig.send_message(line, &negotiate), Some(Status::SUCCESS));
    host
}

/// Completes an exchange that has begun. Returns what the last command has returned.
fn complete_exchange(
    rig: &mut TestTarget,
    line: usize,
    host: &mut Host,
) -> Option<Result<Vec<u8>, Status>> {
    let challenge = rig.receive_message(line).unwrap().unwrap();
    let Step::Message(reply) = host.handle_message(&challenge) else { panic!("it replies") };
    assert_eq!(rig.send_message(line, &reply), Some(Status::SUCCESS));
    rig.receive_message(line)
}

fn revocations(rig: &TestTarget) -> usize {
    let reason = |event: &TargetEvent| {
        matches!(
            event,
            TargetEvent::Disconnected { reason: DisconnectReason::CredentialsRevoked, .. }
        )
    };
    rig.new_events.iter().filter(|event| reason(event)).count()
}

#[test]
fn queue_can_be_authenticated_again_under_io() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    let io = rig.connect_authenticated_io((cntlid, 1), host_config());
    for round in 0..3 {
        for line in [admin, io] {
            let mut host = Host::new(host_config()).unwrap();
            let result = rig.run_exchange(line, &mut host, 50 + round, &mut |_, _| {});
            assert!(matches!(result, ExchangeResult::Authenticated(_)), "{result:?}");
            assert_eq!(rig.write_block(io, 7), Status::SUCCESS);
        }
    }
    // A failed one ends the connection, and with the admin queue the association.
    let result = rig.authenticate(admin, HostConfig { host_secret: secret(8), ..host_config() });
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

/// On an authenticated queue, an exchange that is begun must be completed.
#[test]
fn half_done_reauthentication_ends_the_connection() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    let io = rig.connect_authenticated_io((cntlid, 1), host_config());
    rig.advance_time(Span::from_secs(100));
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS, "no exchange is in progress");
    let negotiate = Host::new(host_config()).unwrap().start(randomness(1));
    assert_eq!(rig.send_message(io, &negotiate), Some(Status::SUCCESS));
    rig.advance_time(Span::from_secs(29));
    assert_eq!(rig.write_block(io, 2), Status::SUCCESS);
    rig.advance_time(Span::from_secs(2));
    assert_eq!(rig.service.connection_count(), 1, "the I/O connection has ended");
    assert_eq!(rig.get_property(admin, offset::VS, PropertySize::Four).status(), Status::SUCCESS);
    rig.end_all();
}

/// Old and new secret, then only the new one, with commands outstanding all the time.
#[test]
fn secret_is_rotated_without_an_outage() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let renewed = new_host_config();
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    let io = rig.connect_authenticated_io((cntlid, 1), host_config());
    rig.set_security(security(&[OF_HOST, NEW]));
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS, "it stays");
    // Another host still has the old secret, and a third one the new one.
    let old = rig.connect_unauthenticated().0;
    rig.authenticate(old, host_config()).outcome();
    let new = rig.connect_unauthenticated().0;
    rig.authenticate(new, renewed.clone()).outcome();
    for line in [admin, io] {
        rig.authenticate(line, renewed.clone()).outcome();
        assert_eq!(rig.write_block(io, 2), Status::SUCCESS);
    }
    assert_eq!(rig.service.association_count(), 3);
    rig.set_security(security(&[NEW]));
    assert_eq!(rig.write_block(io, 3), Status::SUCCESS, "it has authenticated again");
    rig.advance_time(REMOVAL_GRACE);
    assert_eq!(rig.service.association_count(), 2, "the one with the old secret has ended");
    assert_eq!(revocations(&rig), 1, "{:?}", rig.new_events);
    let old = rig.connect_unauthenticated().0;
    let result = rig.authenticate(old, host_config());
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.end_all();
}

/// A host that authenticates its admin queue again keeps its I/O queues.
#[test]
fn io_queues_follow_an_admin_queue_that_authenticates_again() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let renewed = new_host_config();
    let (admin, cntlid) = rig.connect_authenticated_admin(host_config());
    let io = rig.connect_authenticated_io((cntlid, 1), host_config());
    rig.authenticate(admin, renewed).outcome();
    rig.set_security(security(&[NEW]));
    rig.advance_time(Span::from_secs(60));
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS);
    assert_eq!(rig.service.association_count(), 1);
    rig.end_all();
}

/// An I/O queue that was not authenticated again ends the association.
#[test]
fn removed_secret_of_one_queue_ends_the_association() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let renewed = new_host_config();
    let (_, cntlid) = rig.connect_authenticated_admin(renewed);
    rig.connect_authenticated_io((cntlid, 1), host_config());
    rig.set_security(security(&[NEW]));
    rig.advance_time(REMOVAL_GRACE);
    assert_eq!(rig.service.association_count(), 0);
    assert_eq!(rig.service.connection_count(), 0);
    rig.end_all();
}

/// The secret is removed between the reply of the host and the end of its exchange.
#[test]
fn secret_that_is_removed_during_an_exchange_is_of_no_use() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let mut host = begin_exchange(&mut rig, line, host_config());
    rig.set_security(security(&[NEW]));
    assert_eq!(
        complete_exchange(&mut rig, line, &mut host),
        Some(Err(Status::CONNECT_INVALID_HOST.with_dnr())),
        "in place of SUCCESS1"
    );
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

/// The old secret is removed while the host authenticates with the new one, at any step.
#[test]
fn host_that_authenticates_again_during_the_removal_stays() {
    for messages in 1..4 {
        let mut rig = secured_target(security(&[OF_HOST, NEW]));
        let (admin, io) = connect_with_old_secret(&mut rig);
        let mut host = begin_exchange(&mut rig, admin, new_host_config());
        if messages == 1 {
            rig.set_security(security(&[NEW]));
            rig.advance_time(Span::from_secs(29));
        }
        let challenge = rig.receive_message(admin).unwrap().unwrap();
        if messages == 2 {
            rig.set_security(security(&[NEW]));
            rig.advance_time(Span::from_secs(29));
        }
        let Step::Message(reply) = host.handle_message(&challenge) else { panic!("it replies") };
        assert_eq!(rig.send_message(admin, &reply), Some(Status::SUCCESS));
        if messages == 3 {
            rig.set_security(security(&[NEW]));
            rig.advance_time(Span::from_secs(29));
        }
        assert_eq!(rig.write_block(io, 1), Status::SUCCESS, "its commands are served meanwhile");
        let success = rig.receive_message(admin).unwrap().unwrap();
        assert!(matches!(host.handle_message(&success), Step::Authenticated { .. }));
        rig.advance_time(Span::from_secs(100));
        assert_eq!(rig.write_block(io, 2), Status::SUCCESS, "after message {messages}");
        assert_eq!(revocations(&rig), 0);
        rig.end_all();
    }
}

/// The reload is earlier than the first message of the host.
#[test]
fn host_that_authenticates_again_soon_after_the_removal_stays() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let (admin, io) = connect_with_old_secret(&mut rig);
    rig.set_security(security(&[NEW]));
    rig.advance_time(Span { ns: REMOVAL_GRACE.ns - 1 });
    let mut host = begin_exchange(&mut rig, admin, new_host_config());
    rig.advance_time(Span::from_secs(20));
    assert!(matches!(complete_exchange(&mut rig, admin, &mut host), Some(Ok(_))));
    rig.advance_time(Span::from_secs(100));
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS);
    rig.end_all();
}

#[test]
fn host_that_does_not_authenticate_again_ends_soon_after_the_removal() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let (_, io) = connect_with_old_secret(&mut rig);
    rig.set_security(security(&[NEW]));
    rig.advance_time(Span { ns: REMOVAL_GRACE.ns - 1 });
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS);
    // A further change is no new removal.
    rig.set_security(security(&[NEW, 4]));
    rig.advance_time(Span { ns: 1 });
    assert_eq!(rig.service.connection_count(), 0);
    assert_eq!(revocations(&rig), 1, "{:?}", rig.new_events);
    rig.end_all();
}

/// The queues take turns, so that an exchange is in progress all the time and never one of all queues.
#[test]
fn host_that_begins_exchange_after_exchange_ends_after_one_time_limit() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let (_, cntlid) = rig.connect_authenticated_admin(host_config());
    let queues = [1, 2].map(|qid| rig.connect_authenticated_io((cntlid, qid), host_config()));
    let mut exchange = begin_exchange(&mut rig, queues[0], new_host_config());
    rig.set_security(security(&[NEW]));
    let seconds = AUTHENTICATION_TIMEOUT.ns / 1_000_000_000;
    for second in 0..seconds {
        assert_eq!(rig.service.association_count(), 1, "after {second} s");
        let (current, other) = match second % 2 {
            0 => (queues[0], queues[1]),
            _ => (queues[1], queues[0]),
        };
        let next = begin_exchange(&mut rig, other, new_host_config());
        assert!(matches!(complete_exchange(&mut rig, current, &mut exchange), Some(Ok(_))));
        exchange = next;
        rig.advance_time(Span::from_secs(1));
    }
    assert_eq!(rig.service.association_count(), 0);
    assert_eq!(revocations(&rig), 1, "{:?}", rig.new_events);
    rig.end_all();
}

/// After the grace, what the exchange leaves behind is judged when it ends.
#[test]
fn exchange_that_ends_without_the_new_secret_ends_the_association() {
    // With a wrong secret; on a connection that closes; and of one queue while another has the old secret.
    for how in 0..3 {
        let mut rig = secured_target(security(&[OF_HOST, NEW]));
        let (_, io) = connect_with_old_secret(&mut rig);
        let config = match how {
            0 => HostConfig { host_secret: secret(9), ..host_config() },
            _ => new_host_config(),
        };
        let mut host = begin_exchange(&mut rig, io, config);
        rig.set_security(security(&[NEW]));
        rig.advance_time(Span::from_secs(10));
        assert_eq!(rig.service.association_count(), 1);
        match how {
            1 => rig.lines[io].pipe = None,
            _ => drop(complete_exchange(&mut rig, io, &mut host)),
        }
        rig.run_until_idle();
        assert_eq!(rig.service.association_count(), 0, "case {how}");
        assert_eq!(revocations(&rig), 1, "{:?}", rig.new_events);
        rig.end_all();
    }
}

/// The host began with the old secret while it was valid.
#[test]
fn connected_queue_that_authenticates_with_a_removed_secret_ends() {
    let mut rig = secured_target(security(&[OF_HOST, NEW]));
    let (admin, _) = rig.connect_authenticated_admin(new_host_config());
    let mut host = begin_exchange(&mut rig, admin, host_config());
    rig.set_security(security(&[NEW]));
    rig.advance_time(Span::from_secs(2));
    assert_eq!(rig.service.association_count(), 1, "what it has proved before is valid");
    let refused = Status::AUTHENTICATION_REQUIRED.with_dnr();
    assert_eq!(complete_exchange(&mut rig, admin, &mut host), Some(Err(refused)));
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    assert!(
        rig.new_events.iter().any(|event| event.to_string().contains("was removed")),
        "{:?}",
        rig.new_events
    );
    rig.end_all();
}

#[test]
fn discovery_connection_has_the_same_time_after_the_removal() {
    for is_authenticating in [false, true] {
        let mut rig = TestTarget::new();
        rig.set_discovery_security(security(&[OF_HOST, NEW]));
        let config =
            |host: HostConfig| HostConfig { subsystem_nqn: nqn::DISCOVERY.to_owned(), ..host };
        let line = rig.open_connection(admin_config());
        let data = connect_data(CNTLID_DYNAMIC)
            .with(|data| data.subnqn(Ascii::nul_padded(nqn::DISCOVERY)));
        rig.execute_connect(line, &admin_connect(), &data);
        rig.authenticate(line, config(host_config())).outcome();
        rig.set_property(line, offset::CC, ENABLED);
        let mut host =
            is_authenticating.then(|| begin_exchange(&mut rig, line, config(new_host_config())));
        rig.set_discovery_security(security(&[NEW]));
        rig.advance_time(Span { ns: REMOVAL_GRACE.ns - 1 });
        assert_eq!(rig.service.connection_count(), 1);
        rig.advance_time(Span::from_secs(20));
        assert_eq!(rig.service.connection_count(), u64::from(is_authenticating));
        assert_eq!(revocations(&rig), usize::from(!is_authenticating));
        if let Some(host) = &mut host {
            assert!(matches!(complete_exchange(&mut rig, line, host), Some(Ok(_))));
            rig.advance_time(Span::from_secs(40));
            let value = rig.get_property(line, offset::VS, PropertySize::Four);
            assert_eq!(value.status(), Status::SUCCESS);
        }
        rig.end_all();
    }
}
