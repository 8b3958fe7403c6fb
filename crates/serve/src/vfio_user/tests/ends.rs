//! Clients that connect, disconnect, and violate the protocol.

use std::os::unix::fs::FileExt;

use tenmil_base::Span;
use tenmil_linux::local_socket::{Connection, RecvResult};
use tenmil_reactor::PollMode;
use tenmil_vfio_user::{ClientEvent, Errno, region_index};

use super::rig::{Machine, Rig};
use crate::endpoint_event::EndpointEvent;

#[test]
fn a_disconnected_client_leaks_nothing_and_the_next_is_served() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = Rig::new(poll);
        let baseline = rig.regions.count();
        for is_shared in [true, false, true] {
            let mut machine = rig.machine();
            machine.map(is_shared);
            machine.enable();
            machine.make_queue();
            assert_eq!(machine.transfer(2, 0, 1), 0);
            // In the middle of a command.
            machine.submit(1, super::rig::command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 7)]));
            drop(machine);
            assert_eq!(
                rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_))),
                EndpointEvent::Disconnected(None)
            );
            rig.await_regions(baseline);
        }
    }
}

/// A client cannot be deprived of the doorbell page that it has mapped.
#[test]
fn a_client_that_has_gone_rings_no_doorbell_of_the_next_one() {
    let rig = Rig::new(PollMode::Always);
    let doorbells = |machine: &mut Machine| {
        machine.client.request_region_info(region_index::BAR0);
        let reply = machine.wait(|reply| matches!(reply, ClientEvent::Region { .. }));
        let ClientEvent::Region { file: Some(file), .. } = reply else { panic!("{reply:?}") };
        std::fs::File::from(file.try_clone().unwrap())
    };
    let (tail, one) = (0x1000 + 2 * 32, 1_u32.to_le_bytes());
    let mut first = rig.machine();
    let old = doorbells(&mut first);
    drop(first);
    rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)));

    let mut machine = rig.machine();
    machine.map(true);
    machine.enable();
    machine.make_queue();
    let own = doorbells(&mut machine);
    let read = super::rig::command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 0)]);
    machine.put(1, read);
    old.write_all_at(&one, tail).unwrap();
    for _ in 0..100 {
        machine.read(0x1c, 4);
    }
    assert_eq!(machine.completion(1), None, "somebody else has rung");
    own.write_all_at(&one, tail).unwrap();
    assert_eq!(machine.complete(1), 0);
}

#[test]
fn a_second_client_is_rejected_until_the_first_disconnects() {
    let rig = Rig::new(PollMode::Adaptive);
    let first = rig.machine();
    let mut second = Machine::connect(&rig.path(), rig.clock);
    let reply = second.wait(|reply| matches!(reply, ClientEvent::Refused { .. }));
    assert!(matches!(reply, ClientEvent::Refused { error: Errno::BUSY, .. }), "{reply:?}");
    // A silent client is disconnected after a while; further ones are closed immediately.
    let silent = Connection::connect(&rig.path(), Span::from_secs(20)).unwrap();
    assert!(silent.wait_to_receive(Span::from_secs(20)).unwrap());
    assert_eq!(silent.receive(&mut [0; 1]).unwrap(), RecvResult::Eof);
    drop(first);
    rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)));
    let mut third = Machine::connect(&rig.path(), rig.clock);
    let is_over = |reply: &ClientEvent<_>| {
        matches!(reply, ClientEvent::Version(_) | ClientEvent::Refused { error: Errno::BUSY, .. })
    };
    while !matches!(third.wait(is_over), ClientEvent::Version(_)) {
        third = Machine::connect(&rig.path(), rig.clock);
    }
}

#[test]
fn a_client_that_violates_the_protocol_is_disconnected_with_the_reason() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine();
    machine.connection.send(&[0xff; 16]).unwrap();
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert!(why.contains("bytes, expected 16 to"), "{why}");
    let other = Connection::connect(&rig.path(), Span::from_secs(20)).unwrap();
    other.send(&[1, 0, 13, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert_eq!(why, "DEVICE_RESET: expected VERSION first");
}

#[test]
fn stopping_the_service_disconnects_its_client() {
    let mut rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    machine.map(true);
    machine.enable();
    rig.stop();
    while machine.carry() {
        machine.connection.wait_to_receive(Span::from_secs(20)).unwrap();
    }
    assert!(!rig.path().exists(), "its socket is gone");
}
