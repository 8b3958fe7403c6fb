//! Well-behaved use of a disk.

use std::os::fd::AsFd;

use tenmil_base::{Random, Span};
use tenmil_reactor::PollMode;

use super::test_front_end::{
    BLOCKS, EVENT_INDEX, TestFrontEnd, TestQueue, TestServer, memory_table_payload, u32_payload,
    u64_payload, vring_addresses_payload,
};
use super::virtio_driver::{
    DriverRequest, SIZE, VirtioBlkDriver, flush_request, read_request, write_request,
};
use crate::endpoint_event::EndpointEvent;
use crate::vhost_user::device_id_of_uri;

const ALL: [(PollMode, u64); 4] = [
    (PollMode::Adaptive, EVENT_INDEX),
    (PollMode::Adaptive, 0),
    (PollMode::Always, EVENT_INDEX),
    (PollMode::Always, 0),
];

#[test]
fn config_space_and_device_id_are_reported() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    machine.send_message(24, 1, &[u32_payload(&[0, 60, 0]), vec![0; 60]].concat(), &[]);
    let (config, _) = machine.receive_reply().unwrap();
    assert_eq!(config[12..20], BLOCKS.to_le_bytes(), "sectors");
    assert_eq!(config[12 + 20..12 + 24], 512_u32.to_le_bytes());
    machine.send_message(17, 1, &[], &[]);
    let (queues, _) = machine.receive_reply().unwrap();
    let queues = u64::from_le_bytes(queues.try_into().unwrap());
    assert_eq!(queues, u64::from(rig.server.queues_max()));
    assert!(queues > 1);
    let mut queue = machine.start_queue(0);
    let asked = DriverRequest { kind: 8, sector: 0, len_bytes: 20, is_read: true };
    assert_eq!(queue.execute_request(asked), (0, 21));
    assert_eq!(queue.driver.load_bytes(queue.driver.data_offset(0)), device_id_of_uri("ram:"));
}

#[test]
fn written_data_is_read_back_with_any_descriptor_layout() {
    for (poll, features) in ALL {
        let rig = TestServer::new(poll);
        let machine = rig.connect_and_negotiate(features);
        let mut queue = machine.start_queue(1);
        for uses_tables in [false, true] {
            queue.driver.uses_tables = uses_tables;
            let data = queue.driver.data_offset(0);
            let bytes: Vec<u8> = (0..4096_u32).map(|byte| (byte % 251) as u8).collect();
            queue.driver.store_bytes(data, &bytes);
            assert_eq!(queue.execute_request(write_request(8, 4096)), (0, 1));
            queue.driver.store_bytes(data, &[0; 4096]);
            assert_eq!(queue.execute_request(read_request(9, 1024)), (0, 1025));
            let found: [u8; 2048] = queue.driver.load_bytes(data);
            assert_eq!((&found[..1024], &found[1024..]), (&bytes[512..1536], &[0; 1024][..]));
            assert_eq!(queue.execute_request(flush_request()), (0, 1));
            // Beyond the end, part of a block, an unknown request type.
            assert_eq!(queue.execute_request(read_request(BLOCKS, 512)), (1, 1));
            assert_eq!(queue.execute_request(write_request(0, 100)), (1, 1));
            assert_eq!(
                queue.execute_request(DriverRequest { kind: 99, ..flush_request() }),
                (2, 1)
            );
            // Write zeroes over the second block of the data.
            queue.driver.store_bytes(
                data,
                &[&9_u64.to_le_bytes()[..], &1_u32.to_le_bytes(), &[0; 4]].concat(),
            );
            let zeroes = DriverRequest { kind: 13, sector: 0, len_bytes: 16, is_read: false };
            assert_eq!(queue.execute_request(zeroes), (0, 1));
            assert_eq!(queue.execute_request(read_request(9, 512)), (0, 513));
            assert_eq!(queue.driver.load_bytes(data), [0_u8; 512]);
        }
    }
}

/// Runs random requests on several queues and compares the data read with the data written.
fn run_and_verify_random_load(queues: &mut [TestQueue], rounds: usize, seed: u64) {
    let mut random = Random::new(seed);
    // Each queue has its own blocks, so the order of requests does not matter.
    let mut written = vec![[None::<u8>; 64]; queues.len()];
    for _ in 0..rounds {
        for (number, queue) in (0_u64..).zip(queues.iter_mut()) {
            let count = 1 + random.below(10);
            let mut asked = Vec::new();
            for at in 0..count {
                let head = u16::try_from(at * 3).unwrap();
                let block = random.below(6) * 10 + at;
                let is_read = random.chance(1, 2);
                let (place, sector) = (usize::try_from(block).unwrap(), number * 64 + block);
                let stamp = written[usize::try_from(number).unwrap()][place];
                let value =
                    if is_read { stamp } else { Some(stamp.map_or(1, |old| old.wrapping_add(1))) };
                let data = queue.driver.data_offset(head);
                if is_read {
                    queue.driver.store_bytes(data, &[!value.unwrap_or(0); 512]);
                    queue.driver.submit_request(head, read_request(sector, 512));
                } else {
                    written[usize::try_from(number).unwrap()][place] = value;
                    queue.driver.store_bytes(data, &[value.unwrap_or(0); 512]);
                    queue.driver.submit_request(head, write_request(sector, 512));
                }
                asked.push((head, is_read, value));
            }
            queue.kick_queue();
            for _ in 0..count {
                let (head, len) = queue.await_used();
                let at = asked.iter().position(|(asked, ..)| *asked == head).expect("asked once");
                let (_, is_read, value) = asked.swap_remove(at);
                assert_eq!(queue.driver.request_status(head), 0);
                assert_eq!(len, if is_read { 513 } else { 1 });
                let found: [u8; 512] = queue.driver.load_bytes(queue.driver.data_offset(head));
                // The block may contain data of an earlier test.
                let is_right = value.is_none_or(|value| found == [value; 512]);
                assert!(is_right, "queue {number}: {:?} is not {value:?}", &found[..4]);
            }
        }
    }
}

#[test]
fn several_queues_are_served_and_none_is_missed_while_idle() {
    for (poll, features) in ALL {
        let rig = TestServer::new(poll);
        let machine = rig.connect_and_negotiate(features);
        let mut queues: Vec<TestQueue> = (0..3).map(|number| machine.start_queue(number)).collect();
        queues[2].driver.uses_tables = true;
        run_and_verify_random_load(&mut queues, 200, 0x5eed);
        let kicks: usize = queues.iter().map(|queue| queue.kicks).sum();
        if poll == PollMode::Always {
            assert!(kicks <= 3, "a polling server requests no kicks: {kicks}");
        }
    }
}

#[test]
fn idle_queue_is_woken_by_a_kick_and_signals_call() {
    for features in [EVENT_INDEX, 0] {
        let rig = TestServer::new(PollMode::Adaptive);
        let machine = rig.connect_and_negotiate(features);
        let mut queue = machine.start_queue(0);
        for round in 0..20_u16 {
            // The queue sleeps for certain after it has requested kicks and nothing has arrived for
            // a while.
            tenmil_linux::named_thread::sleep(Span::from_ms(2));
            // The driver requests a call for the next used head.
            queue.driver.store_bytes(
                super::virtio_driver::AVAILABLE + 4 + 2 * u64::from(SIZE),
                &round.to_le_bytes(),
            );
            queue.driver.submit_request(0, read_request(0, 512));
            queue.kick_queue();
            queue.await_call();
            assert_eq!(queue.await_used(), (0, 513));
        }
        assert!(queue.kicks > 10, "{}", queue.kicks);
    }
}

#[test]
fn queue_without_kick_descriptor_is_polled() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    for (code, payload) in [
        (8, u32_payload(&[0, SIZE.into()])),
        (10, u32_payload(&[0, 0])),
        (9, vring_addresses_payload(0)),
    ] {
        assert_eq!(machine.send_for_ack(code, &payload, &[]), 0);
    }
    assert_eq!(machine.send_for_ack(12, &u64_payload(&[0x100]), &[]), 0);
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 1]), &[]), 0);
    let mut driver = VirtioBlkDriver::new(machine.regions.clone(), machine.memory.id(), 0);
    let end = rig.clock.now().after(Span::from_secs(20));
    for _ in 0..5 {
        tenmil_linux::named_thread::sleep(Span::from_ms(2));
        driver.submit_request(0, read_request(0, 512));
        while driver.take_used().is_none() {
            assert!(rig.clock.now() < end, "it sleeps");
        }
    }
}

#[test]
fn stopped_queue_reports_its_index_and_restarts_from_it() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    let mut queue = machine.start_queue(0);
    for _ in 0..40 {
        assert_eq!(queue.execute_request(write_request(0, 512)).0, 0);
    }
    assert_eq!(machine.stop_queue(0), 40);
    let mut queue = machine.start_queue_at(0, queue.driver);
    assert_eq!(queue.execute_request(read_request(0, 512)).0, 0);
    // Disabled, and enabled again.
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 0]), &[]), 0);
    queue.driver.submit_request(0, read_request(0, 512));
    tenmil_linux::named_thread::sleep(Span::from_ms(5));
    assert_eq!(queue.driver.take_used(), None, "it does not run");
    assert_eq!(machine.send_for_ack(18, &u32_payload(&[0, 1]), &[]), 0);
    assert_eq!(queue.await_used().0, 0);
    assert_eq!(machine.stop_queue(0), 42);
}

#[test]
fn memory_table_changes_under_load_lose_no_request() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    let baseline = rig.regions.region_count();
    let mut queues: Vec<TestQueue> = (0..2).map(|number| machine.start_queue(number)).collect();
    let more = [u64_payload(&[0]), u64_payload(&[0, 0x1_0000, 0x1000_0000, 0])].concat();
    for round in 0..20 {
        for queue in &mut queues {
            for head in [0, 3, 6, 9] {
                queue.driver.submit_request(head, write_request(u64::from(head), 512));
            }
            queue.kick_queue();
        }
        match round % 4 {
            0 => assert_eq!(
                machine.send_for_ack(5, &memory_table_payload(), &[machine.memory_file().as_fd()]),
                0
            ),
            1 => assert_eq!(machine.send_for_ack(37, &more, &[machine.memory_file().as_fd()]), 0),
            2 => assert_eq!(machine.send_for_ack(38, &more, &[]), 0),
            // An unknown area is rejected, and everything continues.
            _ => assert_eq!(machine.send_for_ack(38, &more, &[]), 1),
        }
        for queue in &mut queues {
            for _ in 0..4 {
                let (head, _) = queue.await_used();
                assert_eq!(queue.driver.request_status(head), 0);
            }
        }
    }
    run_and_verify_random_load(&mut queues, 20, 7);
    assert_eq!(rig.regions.region_count(), baseline);
}

#[test]
fn call_descriptor_can_change_while_a_queue_runs() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let mut queue = machine.start_queue(0);
    for _ in 0..5 {
        let (calls, call) = tenmil_linux::RemoteEventFd::pair().unwrap();
        assert_eq!(machine.send_for_ack(13, &u64_payload(&[0]), &[calls.as_fd()]), 0);
        queue.call = call;
        assert_eq!(queue.execute_request(read_request(0, 512)).0, 0);
        queue.await_call();
    }
    assert_eq!(machine.send_for_ack(13, &u64_payload(&[0x100]), &[]), 0);
    assert_eq!(queue.execute_request(read_request(0, 512)).0, 0);
}

/// Uses some queues, and disconnects with requests outstanding.
fn use_queues_and_disconnect(rig: &TestServer, machine: TestFrontEnd, queues: u32) {
    let mut all: Vec<TestQueue> = (0..queues).map(|number| machine.start_queue(number)).collect();
    run_and_verify_random_load(&mut all, 3, 1);
    all[0].driver.submit_request(0, write_request(0, 4096));
    all[0].kick_queue();
    let _memory = machine.close_connection();
    assert_eq!(rig.await_disconnect_event(), None);
}

#[test]
fn disconnected_front_end_leaves_no_resources_and_the_next_is_served() {
    for poll in [PollMode::Adaptive, PollMode::Always] {
        let rig = TestServer::new(poll);
        let baseline = rig.regions.region_count();
        for queues in [1, 3, 2] {
            let machine = rig.connect_and_negotiate(EVENT_INDEX);
            use_queues_and_disconnect(&rig, machine, queues);
            rig.await_region_count(baseline);
        }
    }
}

#[test]
fn disk_serves_one_front_end_at_a_time() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(0);
    let mut queue = machine.start_queue(0);
    let other = rig.connect_unnegotiated();
    other.await_connection_close();
    let reported = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
    let EndpointEvent::Error(text) = reported else { unreachable!() };
    assert!(text.contains("another front end uses the disk"), "{text}");
    assert_eq!(queue.execute_request(read_request(0, 512)).0, 0);
    let _memory = machine.close_connection();
    assert_eq!(rig.await_disconnect_event(), None);
    let machine = rig.connect_and_negotiate(0);
    assert_eq!(machine.start_queue(0).execute_request(read_request(0, 512)).0, 0);
}

#[test]
fn inflight_buffer_tracks_outstanding_requests() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    let question = [u64_payload(&[0, 0]), vec![2, 0, 32, 0, 0, 0, 0, 0]].concat();
    machine.send_message(31, 1, &question, &[]);
    let (completion, files) = machine.receive_reply().unwrap();
    assert_eq!((completion.len(), files.len()), (24, 1));
    assert_eq!(completion[16..20], [2, 0, 32, 0]);
    assert_eq!(machine.send_for_ack(32, &completion, &[files[0].as_fd()]), 0);
    let mut queue = machine.start_queue(1);
    for _ in 0..50 {
        assert_eq!(queue.execute_request(write_request(3, 512)).0, 0);
    }
    assert_eq!(machine.stop_queue(1), 50);
    // Queue 1 has an empty record of version 1 with 32 entries.
    let disconnect = tenmil_dma::FileRange { offset: 0, len_bytes: 4096 };
    let mapped = rig.regions.map_foreign(files[0].as_fd(), disconnect).unwrap();
    let at = u64::from(tenmil_vhost_user::inflight::stride_bytes(32));
    let place = super::test_front_end::segment_of(mapped.id(), mapped.offset() + at + 8, 8);
    let mut header = [0; 8];
    tenmil_base::Memory::load(&rig.regions, place, &mut header).unwrap();
    assert_eq!(header, [1, 0, 32, 0, 0, 0, 50, 0]);
}

/// Requests taken by the previous process are executed once, and new ones follow.
#[test]
fn queue_starts_with_requests_of_the_inflight_buffer() {
    let rig = TestServer::new(PollMode::Adaptive);
    let machine = rig.connect_and_negotiate(EVENT_INDEX);
    machine.send_message(
        31,
        1,
        &[u64_payload(&[0, 0]), vec![1, 0, 32, 0, 0, 0, 0, 0]].concat(),
        &[],
    );
    let (completion, files) = machine.receive_reply().unwrap();
    assert_eq!(machine.send_for_ack(32, &completion, &[files[0].as_fd()]), 0);
    let record = std::fs::File::from(files[0].try_clone().unwrap());
    // Version 1, 32 entries, used index zero; head 3 is in flight.
    use std::os::unix::fs::FileExt;
    record.write_all_at(&[1, 0, 32, 0, 0, 0, 0, 0], 8).unwrap();
    record.write_all_at(&[1], 16 + 3 * 16).unwrap();
    let mut driver = VirtioBlkDriver::new(machine.regions.clone(), machine.memory.id(), 0);
    driver.submit_request(3, write_request(8, 512));
    let mut queue = machine.start_queue_at(0, driver);
    assert_eq!(queue.await_used(), (3, 1));
    assert_eq!(queue.driver.request_status(3), 0);
    assert_eq!(queue.execute_request(read_request(8, 512)), (0, 513));
    assert_eq!(machine.stop_queue(0), 2);
}
