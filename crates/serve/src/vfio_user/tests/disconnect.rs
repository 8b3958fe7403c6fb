//! Clients that connect, disconnect, and violate the protocol.

use std::os::unix::fs::FileExt;

use tenmil_base::Span;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_reactor::PollMode;
use tenmil_vfio_user::{ClientEvent, Errno, region_index};

use super::test_client::{TestClient, TestServer};
use crate::endpoint_event::EndpointEvent;

#[test]
fn disconnected_client_leaks_nothing_and_the_next_is_served() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = TestServer::new(poll);
        let baseline = rig.regions.region_count();
        for is_shared in [true, false, true] {
            let mut machine = rig.connect_client();
            machine.map_own_memory(is_shared);
            machine.enable_controller();
            machine.create_io_queue();
            assert_eq!(machine.execute_read_or_write(2, 0, 1), 0);
            // In the middle of a command.
            machine.submit_command(
                1,
                super::test_client::admin_command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 7)]),
            );
            drop(machine);
            assert_eq!(
                rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_))),
                EndpointEvent::Disconnected(None)
            );
            rig.await_region_count(baseline);
        }
    }
}

/// A client cannot be deprived of the doorbell page that it has mapped.
#[test]
fn disconnected_client_cannot_ring_doorbells_of_the_next_client() {
    let rig = TestServer::new(PollMode::Always);
    let doorbells = |machine: &mut TestClient| {
        machine.client.request_region_info(region_index::BAR0);
        let reply = machine.await_reply(|reply| matches!(reply, ClientEvent::Region { .. }));
        let ClientEvent::Region { file: Some(file), .. } = reply else { panic!("{reply:?}") };
        std::fs::File::from(file.try_clone().unwrap())
    };
    let (tail, one) = (0x1000 + 2 * 32, 1_u32.to_le_bytes());
    let mut first = rig.connect_client();
    let old = doorbells(&mut first);
    drop(first);
    rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)));

    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    machine.enable_controller();
    machine.create_io_queue();
    let own = doorbells(&mut machine);
    let read = super::test_client::admin_command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 0)]);
    machine.queue_command_without_doorbell(1, read);
    old.write_all_at(&one, tail).unwrap();
    for _ in 0..100 {
        machine.read_region(0x1c, 4);
    }
    assert_eq!(machine.next_completion(1), None, "the doorbell of another client was written");
    own.write_all_at(&one, tail).unwrap();
    assert_eq!(machine.await_completion(1), 0);
}

#[test]
fn second_client_is_rejected_until_the_first_disconnects() {
    let rig = TestServer::new(PollMode::Adaptive);
    let first = rig.connect_client();
    let mut second = TestClient::connect(&rig.socket_path(), rig.clock);
    let reply = second.await_reply(|reply| matches!(reply, ClientEvent::Refused { .. }));
    assert!(matches!(reply, ClientEvent::Refused { error: Errno::BUSY, .. }), "{reply:?}");
    // A silent client is disconnected after a while; further ones are closed immediately.
    let silent = LocalConnection::connect(&rig.socket_path(), Span::from_secs(20)).unwrap();
    assert!(silent.wait_to_receive(Span::from_secs(20)).unwrap());
    assert_eq!(silent.receive(&mut [0; 1]).unwrap(), RecvResult::Eof);
    drop(first);
    rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)));
    let mut third = TestClient::connect(&rig.socket_path(), rig.clock);
    let is_over = |reply: &ClientEvent<_>| {
        matches!(reply, ClientEvent::Version(_) | ClientEvent::Refused { error: Errno::BUSY, .. })
    };
    while !matches!(third.await_reply(is_over), ClientEvent::Version(_)) {
        third = TestClient::connect(&rig.socket_path(), rig.clock);
    }
}

#[test]
fn protocol_violation_disconnects_the_client_with_the_reason() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_client();
    machine.connection.send(&[0xff; 16]).unwrap();
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert!(why.contains("bytes, expected 16 to"), "{why}");
    let other = LocalConnection::connect(&rig.socket_path(), Span::from_secs(20)).unwrap();
    other.send(&[1, 0, 13, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert_eq!(why, "DEVICE_RESET: expected VERSION first");
}

#[test]
fn server_stop_disconnects_its_client() {
    let mut rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    machine.enable_controller();
    rig.stop();
    while machine.process_messages() {
        machine.connection.wait_to_receive(Span::from_secs(20)).unwrap();
    }
    assert!(!rig.socket_path().exists(), "its socket is gone");
}
