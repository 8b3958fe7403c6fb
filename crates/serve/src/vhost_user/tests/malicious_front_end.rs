//! Front ends and guests that violate the protocol.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{Random, Span};
use tenmil_linux::RemoteEventFd;
use tenmil_linux::local_socket::LocalConnection;
use tenmil_reactor::PollMode;

use super::test_front_end::{
    EVENT_INDEX, TestFrontEnd, TestQueue, TestServer, memory_table_payload, u32_payload,
    u64_payload, vring_addresses_payload,
};
use super::virtio_driver::{
    AVAILABLE, DATA, GUEST, INDIRECT, MEMORY_BYTES, NEXT, SIZE, USER, WRITE, read_request,
    write_request,
};
use crate::endpoint_event::EndpointEvent;

/// Lets a guest do something; returns the reason for which its front end was disconnected.
fn disconnect_reason_after(
    poll: PollMode,
    action: impl FnOnce(&TestFrontEnd, &mut TestQueue),
) -> String {
    let rig = TestServer::new(poll);
    let baseline = rig.regions.region_count();
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    let mut queue = machine.start_queue(2);
    assert_eq!(queue.execute_request(read_request(0, 512)).0, 0);
    action(&machine, &mut queue);
    queue.kicked.signal();
    let why = rig.await_disconnect_event().expect("a reason");
    machine.await_connection_close();
    rig.await_region_count(baseline);
    // The next front end is served normally.
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    assert_eq!(machine.start_queue(0).execute_request(write_request(0, 512)).0, 0);
    why
}

#[test]
fn invalid_ring_is_reported_and_its_front_end_disconnected() {
    type Act = fn(&TestFrontEnd, &mut TestQueue);
    let acts: [(&str, Act); 13] = [
        ("queue 2: available index 34 after 1, expected at most 32 more", |_, queue| {
            queue.driver.store_bytes(queue.driver.base + AVAILABLE + 2, &34_u16.to_le_bytes());
        }),
        ("queue 2: descriptor 32, expected one below 32", |_, queue| {
            queue.driver.publish_chain(SIZE)
        }),
        ("queue 2: chain 5 goes on, expected its end after 32 at most", |_, queue| {
            queue.driver.write_descriptor(queue.driver.base + 5 * 16, GUEST + DATA, 1, NEXT, 5);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: chain 5 has a table of 40 bytes", |_, queue| {
            queue.driver.write_descriptor(
                queue.driver.base + 5 * 16,
                GUEST + DATA,
                40,
                INDIRECT,
                0,
            );
            queue.driver.publish_chain(5);
        }),
        ("queue 2: 16 bytes at 0x40100000 are not in shared memory", |_, queue| {
            let end = GUEST + MEMORY_BYTES;
            queue.driver.write_descriptor(queue.driver.base + 5 * 16, end, 160, INDIRECT, 0);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: 512 bytes at 0x400fff00 are not in shared memory", |_, queue| {
            let end = GUEST + MEMORY_BYTES - 256;
            queue.driver.write_descriptor(queue.driver.base + 5 * 16, end, 512, WRITE, 0);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: 512 bytes at 0x0 are not in shared memory", |_, queue| {
            queue.driver.write_descriptor(queue.driver.base + 5 * 16, 0, 512, 0, 0);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: chain 5 has something to read behind something to write", |_, queue| {
            let at = queue.driver.base + 5 * 16;
            queue.driver.write_descriptor(at, GUEST + DATA, 16, NEXT | WRITE, 6);
            queue.driver.write_descriptor(at + 16, GUEST + DATA, 16, 0, 0);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: chain 5 has 8 bytes to read and 1 to write, expected 16 and 1", |_, queue| {
            let at = queue.driver.base + 5 * 16;
            queue.driver.write_descriptor(at, GUEST + DATA, 8, NEXT, 6);
            queue.driver.write_descriptor(at + 16, GUEST + DATA, 1, WRITE, 0);
            queue.driver.publish_chain(5);
        }),
        ("queue 2: chain 5 has 16 bytes to read and 0 to write", |_, queue| {
            queue.driver.write_descriptor(queue.driver.base + 5 * 16, GUEST + DATA, 16, 0, 0);
            queue.driver.publish_chain(5);
        }),
        // No byte for the status, only an empty writable descriptor.
        ("queue 2: chain 5 has 16 bytes to read and 0 to write", |_, queue| {
            let at = queue.driver.base + 5 * 16;
            queue.driver.write_descriptor(at, GUEST + DATA, 16, NEXT, 6);
            queue.driver.write_descriptor(at + 16, GUEST + DATA, 0, WRITE, 0);
            queue.driver.publish_chain(5);
        }),
        ("memory at 0x40000000 was made shorter than it was when mapped", |machine, queue| {
            queue.driver.submit_request(0, write_request(0, 4096));
            drop(replace_and_truncate_memory(machine));
        }),
        (
            "SET_FEATURES: features is 0x10000000, expected the same while queues run",
            |machine, _| {
                machine.send_message(2, 1, &u64_payload(&[1 << 28]), &[]);
            },
        ),
    ];
    for (expected, action) in acts {
        for poll in [PollMode::Adaptive, PollMode::Always] {
            let why = disconnect_reason_after(poll, action);
            assert!(why.contains(expected), "{why}, expected {expected}");
        }
    }
}

#[test]
fn removing_memory_of_a_running_ring_disconnects() {
    let why = disconnect_reason_after(PollMode::Adaptive, |machine, _| {
        let elsewhere =
            [u32_payload(&[1, 0]), u64_payload(&[GUEST, MEMORY_BYTES, 0x1000, 0])].concat();
        machine.send_message(5, 9, &elsewhere, &[machine.memory_file().as_fd()]);
    });
    assert!(why.contains("queue 2: its ring: 512 bytes at"), "{why}");
}

/// Truncates the file of a machine's memory. The file of a region cannot be truncated, so the
/// memory is shared anew in another file.
fn replace_and_truncate_memory(machine: &TestFrontEnd) -> std::fs::File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let mut bytes = vec![0; usize::try_from(MEMORY_BYTES).unwrap()];
    let whole = super::test_front_end::segment_of(machine.memory.id(), 0, 1 << 20);
    tenmil_base::Memory::load(&machine.regions, whole, &mut bytes).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    assert_eq!(machine.send_for_ack(5, &memory_table_payload(), &[file.as_fd()]), 0);
    file.set_len(0).unwrap();
    file
}

#[test]
fn chain_that_is_available_twice_is_rejected() {
    // The first request is held by a slow device.
    let rig = TestServer::with_device(PollMode::Adaptive, |regions| {
        Arc::new(super::crash_recovery::ShufflingDevice::new(regions))
    });
    let baseline = rig.regions.region_count();
    let machine = rig.connect_and_negotiate(0);
    let mut queue = machine.start_queue(0);
    queue.driver.submit_request(0, write_request(0, 512));
    queue.driver.publish_chain(0);
    queue.kicked.signal();
    let why = rig.await_disconnect_event().unwrap();
    assert_eq!(why, "queue 0: chain 0 was given twice, expected it once until it is used");
    // Its memory is kept until the device completes the request.
    machine.await_connection_close();
    rig.await_region_count(baseline);
    drop(machine);
}

#[test]
fn queue_outside_of_memory_is_rejected_and_the_connection_stays() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let (kick, _) = RemoteEventFd::pair().unwrap();
    for place in [USER - 0x1000, USER + MEMORY_BYTES - 0x1000, GUEST, 0] {
        let payload = [u32_payload(&[1, 0]), u64_payload(&[place, place, place, 0])].concat();
        assert_eq!(machine.send_for_ack(8, &u32_payload(&[1, 1024]), &[]), 0);
        assert_eq!(machine.send_for_ack(9, &payload, &[]), 0);
        assert_eq!(machine.send_for_ack(12, &u64_payload(&[1]), &[kick.as_fd()]), 0);
        assert_eq!(machine.send_for_ack(18, &u32_payload(&[1, 1]), &[]), 1);
        let reported = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
        let EndpointEvent::Error(text) = reported else { unreachable!() };
        assert!(text.contains("queue 1: its ring: 16384 bytes at"), "{text}");
        // The queue does not run, so its parameters can be set again.
        assert_eq!(machine.send_for_ack(18, &u32_payload(&[1, 0]), &[]), 0);
        assert_eq!(machine.stop_queue(1), 0);
    }
    assert_eq!(machine.start_queue(0).execute_request(read_request(0, 512)).0, 0);
}

#[test]
fn memory_region_with_wrong_size_or_file_is_rejected() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let baseline = rig.regions.region_count();
    let file = machine.memory_file();
    let other = tempfile::tempfile_in("/dev/shm").unwrap();
    other.set_len(0x1000).unwrap();
    let of = |area: [u64; 4]| [u32_payload(&[1, 0]), u64_payload(&area)].concat();
    let files: [(Vec<u8>, BorrowedFd<'_>, &str); 4] = [
        (of([0, 2 * MEMORY_BYTES, 0, 0]), file.as_fd(), "it has 1048576 bytes"),
        (of([0, 0x1000, 0, MEMORY_BYTES]), file.as_fd(), "it has 1048576 bytes"),
        (of([0, 0x1001, 0, 0]), file.as_fd(), "expected whole pages"),
        (of([0, 8 << 40, 0, 0]), other.as_fd(), "expected 4398046511104 at most"),
    ];
    for (payload, file, expected) in files {
        assert_eq!(machine.send_for_ack(5, &payload, &[file]), 1);
        let reported = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
        let EndpointEvent::Error(text) = reported else { unreachable!() };
        assert!(text.contains(expected), "{text}");
    }
    let twice = [
        u32_payload(&[2, 0]),
        u64_payload(&[0, 0x2000, 0, 0]),
        u64_payload(&[0x1000, 0x1000, 0x9000, 0]),
    ];
    assert_eq!(machine.send_for_ack(5, &twice.concat(), &[file.as_fd(), file.as_fd()]), 1);
    // The previous memory is still in effect.
    assert_eq!(rig.regions.region_count(), baseline);
    assert_eq!(machine.start_queue(0).execute_request(read_request(0, 512)).0, 0);
}

#[test]
fn call_descriptor_must_be_an_eventfd() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    assert_eq!(machine.send_for_ack(13, &u64_payload(&[0]), &[file.as_fd()]), 1);
    for (code, payload) in [(8, u32_payload(&[0, 32])), (9, vring_addresses_payload(0))] {
        assert_eq!(machine.send_for_ack(code, &payload, &[]), 0);
    }
    assert_eq!(machine.send_for_ack(12, &u64_payload(&[0]), &[file.as_fd()]), 0);
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 1]), &[]), 1, "its kick is none");
}

#[test]
fn too_many_descriptors_end_the_connection_and_are_closed() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let file = machine.memory_file();
    let many: Vec<BorrowedFd<'_>> = (0..40).map(|_| file.as_fd()).collect();
    machine.send_message(5, 9, &memory_table_payload(), &many);
    let why = rig.await_disconnect_event().unwrap();
    assert!(why.contains("40 descriptors"), "{why}");
}

#[test]
fn partial_message_times_out() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let begun = rig.clock.now();
    machine.connection.send(&[1, 0, 0, 0, 1]).unwrap();
    let why = rig.await_disconnect_event().unwrap();
    assert!(why.contains("incomplete after"), "{why}");
    assert!(rig.clock.now().since(begun) >= Span::from_secs(4));
}

/// Inflight memory with invalid content.
#[test]
fn invalid_inflight_buffer_is_rejected_by_name() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(0x1000).unwrap();
    let area = |len: u64| [u64_payload(&[len, 0]), vec![1, 0, 32, 0]].concat();
    assert_eq!(machine.send_for_ack(32, &area(0x2000), &[file.as_fd()]), 1, "its file is shorter");
    assert_eq!(
        machine.send_for_ack(32, &area(0x100), &[file.as_fd()]),
        1,
        "and so is what it names"
    );
    use std::os::unix::fs::FileExt;
    file.write_all_at(&[9, 0, 32, 0], 8).unwrap();
    assert_eq!(machine.send_for_ack(32, &area(0x1000), &[file.as_fd()]), 0);
    let (kick, _) = RemoteEventFd::pair().unwrap();
    for (code, payload) in [(8, u32_payload(&[0, 32])), (9, vring_addresses_payload(0))] {
        assert_eq!(machine.send_for_ack(code, &payload, &[]), 0);
    }
    assert_eq!(machine.send_for_ack(12, &u64_payload(&[0]), &[kick.as_fd()]), 0);
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 1]), &[]), 1);
    let is_it = |new_events: &EndpointEvent| matches!(new_events, EndpointEvent::Error(text) if text.contains("version 9"));
    rig.await_event(is_it);
    // More descriptors than the record has room for.
    assert_eq!(machine.send_for_ack(8, &u32_payload(&[0, 64]), &[]), 0);
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 1]), &[]), 1);
    let has_no_room = |new_events: &EndpointEvent| matches!(new_events, EndpointEvent::Error(text) if text.contains("space for it"));
    rig.await_event(has_no_room);
    // A queue beyond the last one that has a record.
    for (code, payload) in [(8, u32_payload(&[1, 32])), (9, vring_addresses_payload(1))] {
        assert_eq!(machine.send_for_ack(code, &payload, &[]), 0);
    }
    assert_eq!(machine.send_for_ack(12, &u64_payload(&[1]), &[kick.as_fd()]), 0);
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[1, 1]), &[]), 1);
    rig.await_event(has_no_room);
}

/// Random, almost correct messages; all resources are released afterwards.
#[test]
fn invalid_messages_do_not_affect_the_next_front_end() {
    let rig = TestServer::new(PollMode::Adaptive);
    let baseline = rig.regions.region_count();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(MEMORY_BYTES).unwrap();
    let (event, _) = RemoteEventFd::pair().unwrap();
    let event: OwnedFd = event;
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let mut machine = rig.connect_unnegotiated();
        machine.negotiate(EVENT_INDEX);
        for _ in 0..random.below(40) {
            let code = u32::try_from(1 + random.below(40)).unwrap();
            let len = [0, 8, 8, 8, 20, 40, 40, 72][usize::try_from(random.below(8)).unwrap()];
            let mut payload: Vec<u8> = (0..len).map(|_| 0).collect();
            for at in 0..len / 4 {
                let value = match random.below(6) {
                    0 => u32::try_from(random.below(1 << 32)).unwrap(),
                    1 => 32,
                    2 => 0x1000 * u32::try_from(random.below(16)).unwrap(),
                    _ => u32::try_from(random.below(3)).unwrap(),
                };
                payload[at * 4..][..4].copy_from_slice(&value.to_le_bytes());
            }
            let pick = random.below(3);
            let files: &[BorrowedFd<'_>] = match pick {
                0 => &[],
                1 => &[file.as_fd()],
                _ => &[event.as_fd()],
            };
            let size = u32::try_from(payload.len()).unwrap();
            let mut bytes = [code, 9, size].map(u32::to_le_bytes).concat();
            bytes.extend(payload);
            if !try_send_message(&machine.connection, &bytes, files) {
                break;
            }
        }
        drop(machine);
        rig.await_disconnect_event();
        rig.await_region_count(baseline);
    }
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    assert_eq!(machine.start_queue(0).execute_request(write_request(0, 512)).0, 0);
}

/// Sends a message; false once the server has closed.
fn try_send_message(connection: &LocalConnection, bytes: &[u8], files: &[BorrowedFd<'_>]) -> bool {
    matches!(connection.send_files(bytes, files), Ok(count) if count == bytes.len())
}

#[test]
fn silent_front_end_does_not_block_others() {
    let rig = TestServer::new(PollMode::Adaptive);
    let silent = rig.connect_unnegotiated();
    let why = rig.await_disconnect_event().expect("a reason");
    assert_eq!(why, "a message was incomplete after 5 s");
    silent.await_connection_close();
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    assert_eq!(machine.start_queue(0).execute_request(write_request(0, 512)).0, 0);
}
