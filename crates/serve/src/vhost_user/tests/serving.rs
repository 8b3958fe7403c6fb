//! Well-behaved use of a disk.

use std::os::fd::AsFd;

use tenmil_base::{Random, Span};
use tenmil_reactor::PollMode;

use super::driver::{Asked, Driver, SIZE, flush, read, write};
use super::rig::{BLOCKS, EVENT_INDEX, Machine, Queue, Rig, address_payload, halves, table, words};
use crate::endpoint_event::EndpointEvent;
use crate::vhost_user::id;

const ALL: [(PollMode, u64); 4] = [
    (PollMode::Adaptive, EVENT_INDEX),
    (PollMode::Adaptive, 0),
    (PollMode::Always, EVENT_INDEX),
    (PollMode::Always, 0),
];

#[test]
fn configuration_space_and_identity_are_told() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(0);
    machine.send(24, 1, &[halves(&[0, 60, 0]), vec![0; 60]].concat(), &[]);
    let (config, _) = machine.receive().unwrap();
    assert_eq!(config[12..20], BLOCKS.to_le_bytes(), "sectors");
    assert_eq!(config[12 + 20..12 + 24], 512_u32.to_le_bytes());
    machine.send(17, 1, &[], &[]);
    let (queues, _) = machine.receive().unwrap();
    let queues = u64::from_le_bytes(queues.try_into().unwrap());
    assert_eq!(queues, u64::from(rig.server.queues()));
    assert!(queues > 1);
    let mut queue = machine.start(0);
    let asked = Asked { kind: 8, sector: 0, len_bytes: 20, is_read: true };
    assert_eq!(queue.one(asked), (0, 21));
    assert_eq!(queue.driver.get(queue.driver.data(0)), id("ram:"));
}

#[test]
fn what_was_written_is_read_however_it_is_asked_for() {
    for (poll, features) in ALL {
        let rig = Rig::new(poll);
        let machine = rig.machine(features);
        let mut queue = machine.start(1);
        for uses_tables in [false, true] {
            queue.driver.uses_tables = uses_tables;
            let data = queue.driver.data(0);
            let bytes: Vec<u8> = (0..4096_u32).map(|byte| (byte % 251) as u8).collect();
            queue.driver.put(data, &bytes);
            assert_eq!(queue.one(write(8, 4096)), (0, 1));
            queue.driver.put(data, &[0; 4096]);
            assert_eq!(queue.one(read(9, 1024)), (0, 1025));
            let found: [u8; 2048] = queue.driver.get(data);
            assert_eq!((&found[..1024], &found[1024..]), (&bytes[512..1536], &[0; 1024][..]));
            assert_eq!(queue.one(flush()), (0, 1));
            // Beyond the end, part of a block, an unknown request type.
            assert_eq!(queue.one(read(BLOCKS, 512)), (1, 1));
            assert_eq!(queue.one(write(0, 100)), (1, 1));
            assert_eq!(queue.one(Asked { kind: 99, ..flush() }), (2, 1));
            // Write zeroes over the second block of the data.
            queue
                .driver
                .put(data, &[&9_u64.to_le_bytes()[..], &1_u32.to_le_bytes(), &[0; 4]].concat());
            let zeroes = Asked { kind: 13, sector: 0, len_bytes: 16, is_read: false };
            assert_eq!(queue.one(zeroes), (0, 1));
            assert_eq!(queue.one(read(9, 512)), (0, 513));
            assert_eq!(queue.driver.get(data), [0_u8; 512]);
        }
    }
}

/// Runs random requests on several queues and compares the data read with the data written.
fn load(queues: &mut [Queue], rounds: usize, seed: u64) {
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
                let data = queue.driver.data(head);
                if is_read {
                    queue.driver.put(data, &[!value.unwrap_or(0); 512]);
                    queue.driver.ask(head, read(sector, 512));
                } else {
                    written[usize::try_from(number).unwrap()][place] = value;
                    queue.driver.put(data, &[value.unwrap_or(0); 512]);
                    queue.driver.ask(head, write(sector, 512));
                }
                asked.push((head, is_read, value));
            }
            queue.kick();
            for _ in 0..count {
                let (head, len) = queue.await_used();
                let at = asked.iter().position(|(asked, ..)| *asked == head).expect("asked once");
                let (_, is_read, value) = asked.swap_remove(at);
                assert_eq!(queue.driver.status(head), 0);
                assert_eq!(len, if is_read { 513 } else { 1 });
                let found: [u8; 512] = queue.driver.get(queue.driver.data(head));
                // The block may contain data of an earlier test.
                let is_right = value.is_none_or(|value| found == [value; 512]);
                assert!(is_right, "queue {number}: {:?} is not {value:?}", &found[..4]);
            }
        }
    }
}

#[test]
fn several_queues_are_served_and_nothing_is_forgotten_asleep() {
    for (poll, features) in ALL {
        let rig = Rig::new(poll);
        let machine = rig.machine(features);
        let mut queues: Vec<Queue> = (0..3).map(|number| machine.start(number)).collect();
        queues[2].driver.uses_tables = true;
        load(&mut queues, 200, 0x5eed);
        let kicks: usize = queues.iter().map(|queue| queue.kicks).sum();
        if poll == PollMode::Always {
            assert!(kicks <= 3, "whoever looks wants no kicks: {kicks}");
        }
    }
}

#[test]
fn one_that_sleeps_is_kicked_and_calls() {
    for features in [EVENT_INDEX, 0] {
        let rig = Rig::new(PollMode::Adaptive);
        let machine = rig.machine(features);
        let mut queue = machine.start(0);
        for round in 0..20_u16 {
            // The queue sleeps for certain after it has requested kicks and nothing has arrived for
            // a while.
            tenmil_linux::thread::sleep(Span::from_ms(2));
            // The driver requests a call for the next used head.
            queue
                .driver
                .put(super::driver::AVAILABLE + 4 + 2 * u64::from(SIZE), &round.to_le_bytes());
            queue.driver.ask(0, read(0, 512));
            queue.kick();
            queue.await_call();
            assert_eq!(queue.await_used(), (0, 513));
        }
        assert!(queue.kicks > 10, "{}", queue.kicks);
    }
}

#[test]
fn a_queue_without_a_kick_is_looked_at() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(0);
    for (code, payload) in
        [(8, halves(&[0, SIZE.into()])), (10, halves(&[0, 0])), (9, address_payload(0))]
    {
        assert_eq!(machine.ask(code, &payload, &[]), 0);
    }
    assert_eq!(machine.ask(12, &words(&[0x100]), &[]), 0);
    assert_eq!(machine.ask(18, &halves(&[0, 1]), &[]), 0);
    let mut driver = Driver::new(machine.regions.clone(), machine.memory.id(), 0);
    let end = rig.clock.now().after(Span::from_secs(20));
    for _ in 0..5 {
        tenmil_linux::thread::sleep(Span::from_ms(2));
        driver.ask(0, read(0, 512));
        while driver.take().is_none() {
            assert!(rig.clock.now() < end, "it sleeps");
        }
    }
}

#[test]
fn a_queue_that_is_stopped_says_where_it_was_and_goes_on_from_there() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(EVENT_INDEX);
    let mut queue = machine.start(0);
    for _ in 0..40 {
        assert_eq!(queue.one(write(0, 512)).0, 0);
    }
    assert_eq!(machine.stop(0), 40);
    let mut queue = machine.go_on(0, queue.driver);
    assert_eq!(queue.one(read(0, 512)).0, 0);
    // Disabled, and enabled again.
    assert_eq!(machine.ask(18, &halves(&[0, 0]), &[]), 0);
    queue.driver.ask(0, read(0, 512));
    tenmil_linux::thread::sleep(Span::from_ms(5));
    assert_eq!(queue.driver.take(), None, "it does not run");
    assert_eq!(machine.ask(18, &halves(&[0, 1]), &[]), 0);
    assert_eq!(queue.await_used().0, 0);
    assert_eq!(machine.stop(0), 42);
}

#[test]
fn memory_changes_under_load_and_nothing_is_lost() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(EVENT_INDEX);
    let baseline = rig.regions.count();
    let mut queues: Vec<Queue> = (0..2).map(|number| machine.start(number)).collect();
    let more = [words(&[0]), words(&[0, 0x1_0000, 0x1000_0000, 0])].concat();
    for round in 0..20 {
        for queue in &mut queues {
            for head in [0, 3, 6, 9] {
                queue.driver.ask(head, write(u64::from(head), 512));
            }
            queue.kick();
        }
        match round % 4 {
            0 => assert_eq!(machine.ask(5, &table(), &[machine.file().as_fd()]), 0),
            1 => assert_eq!(machine.ask(37, &more, &[machine.file().as_fd()]), 0),
            2 => assert_eq!(machine.ask(38, &more, &[]), 0),
            // An unknown area is rejected, and everything continues.
            _ => assert_eq!(machine.ask(38, &more, &[]), 1),
        }
        for queue in &mut queues {
            for _ in 0..4 {
                let (head, _) = queue.await_used();
                assert_eq!(queue.driver.status(head), 0);
            }
        }
    }
    load(&mut queues, 20, 7);
    assert_eq!(rig.regions.count(), baseline);
}

#[test]
fn who_is_called_may_change_while_a_queue_runs() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(0);
    let mut queue = machine.start(0);
    for _ in 0..5 {
        let (calls, call) = tenmil_linux::RemoteEventFd::pair().unwrap();
        assert_eq!(machine.ask(13, &words(&[0]), &[calls.as_fd()]), 0);
        queue.call = call;
        assert_eq!(queue.one(read(0, 512)).0, 0);
        queue.await_call();
    }
    assert_eq!(machine.ask(13, &words(&[0x100]), &[]), 0);
    assert_eq!(queue.one(read(0, 512)).0, 0);
}

/// Uses some queues, and disconnects with requests outstanding.
fn come_and_go(rig: &Rig, machine: Machine, queues: u32) {
    let mut all: Vec<Queue> = (0..queues).map(|number| machine.start(number)).collect();
    load(&mut all, 3, 1);
    all[0].driver.ask(0, write(0, 4096));
    all[0].kick();
    let _memory = machine.hang_up();
    assert_eq!(rig.await_leaving(), None);
}

#[test]
fn a_front_end_that_goes_leaves_nothing_behind_and_the_next_is_served() {
    for poll in [PollMode::Adaptive, PollMode::Always] {
        let rig = Rig::new(poll);
        let baseline = rig.regions.count();
        for queues in [1, 3, 2] {
            let machine = rig.machine(EVENT_INDEX);
            come_and_go(&rig, machine, queues);
            rig.await_regions(baseline);
        }
    }
}

#[test]
fn one_front_end_at_a_time_has_the_disk() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(0);
    let mut queue = machine.start(0);
    let other = rig.connect();
    other.await_end();
    let told = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
    let EndpointEvent::Error(text) = told else { unreachable!() };
    assert!(text.contains("another front end uses the disk"), "{text}");
    assert_eq!(queue.one(read(0, 512)).0, 0);
    let _memory = machine.hang_up();
    assert_eq!(rig.await_leaving(), None);
    let machine = rig.machine(0);
    assert_eq!(machine.start(0).one(read(0, 512)).0, 0);
}

#[test]
fn what_is_in_flight_is_kept_in_memory_that_the_front_end_has() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(EVENT_INDEX);
    let question = [words(&[0, 0]), vec![2, 0, 32, 0, 0, 0, 0, 0]].concat();
    machine.send(31, 1, &question, &[]);
    let (completion, files) = machine.receive().unwrap();
    assert_eq!((completion.len(), files.len()), (24, 1));
    assert_eq!(completion[16..20], [2, 0, 32, 0]);
    assert_eq!(machine.ask(32, &completion, &[files[0].as_fd()]), 0);
    let mut queue = machine.start(1);
    for _ in 0..50 {
        assert_eq!(queue.one(write(3, 512)).0, 0);
    }
    assert_eq!(machine.stop(1), 50);
    // Queue 1 has an empty record of version 1 with 32 entries.
    let disconnect = tenmil_dma::FileRange { offset: 0, len_bytes: 4096 };
    let mapped = rig.regions.map_foreign(files[0].as_fd(), disconnect).unwrap();
    let at = u64::from(tenmil_vhost_user::inflight::stride_bytes(32));
    let place = super::rig::segment(mapped.id(), mapped.offset() + at + 8, 8);
    let mut header = [0; 8];
    tenmil_base::Memory::load(&rig.regions, place, &mut header).unwrap();
    assert_eq!(header, [1, 0, 32, 0, 0, 0, 50, 0]);
}

/// Requests taken by the previous process are executed once, and new ones follow.
#[test]
fn a_queue_begins_with_what_is_recorded_as_in_flight() {
    let rig = Rig::new(PollMode::Adaptive);
    let machine = rig.machine(EVENT_INDEX);
    machine.send(31, 1, &[words(&[0, 0]), vec![1, 0, 32, 0, 0, 0, 0, 0]].concat(), &[]);
    let (completion, files) = machine.receive().unwrap();
    assert_eq!(machine.ask(32, &completion, &[files[0].as_fd()]), 0);
    let record = std::fs::File::from(files[0].try_clone().unwrap());
    // Version 1, 32 entries, used index zero; head 3 is in flight.
    use std::os::unix::fs::FileExt;
    record.write_all_at(&[1, 0, 32, 0, 0, 0, 0, 0], 8).unwrap();
    record.write_all_at(&[1], 16 + 3 * 16).unwrap();
    let mut driver = Driver::new(machine.regions.clone(), machine.memory.id(), 0);
    driver.ask(3, write(8, 512));
    let mut queue = machine.go_on(0, driver);
    assert_eq!(queue.await_used(), (3, 1));
    assert_eq!(queue.driver.status(3), 0);
    assert_eq!(queue.one(read(8, 512)), (0, 513));
    assert_eq!(machine.stop(0), 2);
}
