//! Disk that grows while a front end uses it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{BlockDevice, Error, IoChannel, Limits, Span};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::{Connection, RecvResult};
use tenmil_reactor::PollMode;
use tenmil_vhost_user::CONFIG_CHANGED;

use super::driver::{read, write};
use super::rig::{BLOCKS, Machine, Rig, halves};
use crate::endpoint_event::EndpointEvent;

/// RAM device whose reported length changes.
struct Growing {
    ram: RamDevice,
    block_count: Arc<AtomicU64>,
}

const BEFORE: u64 = BLOCKS / 2;

impl BlockDevice for Growing {
    fn limits(&self) -> Limits {
        Limits { block_count: self.block_count.load(Ordering::SeqCst), ..self.ram.limits() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.ram.channel()
    }

    fn channels_max(&self) -> u32 {
        self.ram.channels_max()
    }
}

/// Disk with half of its length, and the value that restores the full length.
fn growing() -> (Rig, Arc<AtomicU64>) {
    let block_count = Arc::new(AtomicU64::new(BEFORE));
    let shared = Arc::clone(&block_count);
    let rig = Rig::of(PollMode::Adaptive, |regions| {
        Arc::new(Growing {
            ram: RamDevice::new(regions, 512, BLOCKS).unwrap(),
            block_count: shared,
        })
    });
    (rig, block_count)
}

fn sectors(machine: &Machine) -> u64 {
    machine.send(24, 1, &[halves(&[0, 8, 0]), vec![0; 8]].concat(), &[]);
    let (config, _) = machine.receive().unwrap();
    u64::from_le_bytes(*config.last_chunk().unwrap())
}

fn await_message(rig: &Rig, back: &Connection) -> Vec<u8> {
    let end = rig.clock.now().after(super::rig::TIME_LIMIT);
    let mut bytes = [0; 64];
    loop {
        match back.receive(&mut bytes).unwrap() {
            RecvResult::Bytes(count) => return bytes[..count].to_vec(),
            RecvResult::Eof => panic!("the socket was closed"),
            RecvResult::WouldBlock => tenmil_linux::thread::sleep(Span::from_us(100)),
        }
        assert!(rig.clock.now() < end, "nothing is told");
    }
}

#[test]
fn a_disk_that_grows_is_longer_for_its_guest_when_that_hears_of_it() {
    let (rig, block_count) = growing();
    let machine = rig.machine(0);
    let (back, given) = Connection::pair().unwrap();
    assert_eq!(machine.ask(21, &[], &[given.as_fd()]), 0);
    let mut queues = [0, 1].map(|number| machine.start(number));
    for queue in &mut queues {
        assert_eq!(queue.one(write(BEFORE - 8, 4096)), (0, 1));
        assert_eq!(queue.one(read(BEFORE, 512)), (1, 1), "past its end");
    }
    assert_eq!(sectors(&machine), BEFORE);
    block_count.store(BLOCKS, Ordering::SeqCst);
    rig.server.resized();
    assert_eq!(await_message(&rig, &back), CONFIG_CHANGED);
    assert_eq!(sectors(&machine), BLOCKS);
    for queue in &mut queues {
        assert_eq!(queue.one(read(BEFORE, 512)), (0, 513));
        assert_eq!(queue.one(read(BLOCKS, 512)), (1, 1), "past its new end");
    }
    // Queues started later, and queues in new memory, use the new length, too.
    assert_eq!(machine.start(2).one(write(BLOCKS - 1, 512)), (0, 1));
    machine.share();
    assert_eq!(queues[0].one(read(BLOCKS - 1, 512)), (0, 513));
    machine.hang_up();
    rig.await_leaving();
    assert_eq!(sectors(&rig.machine(0)), BLOCKS, "whoever comes next");
}

#[test]
fn whoever_cannot_be_told_finds_the_new_length_when_it_looks() {
    let (rig, block_count) = growing();
    let machine = rig.machine(0);
    let mut queue = machine.start(0);
    // A descriptor of another type is rejected; a socket whose other end is closed causes an event.
    assert_eq!(machine.ask(21, &[], &[machine.file().as_fd()]), 1);
    rig.await_event(
        |new_events| matches!(new_events, EndpointEvent::Error(why) if why.contains("Unix stream")),
    );
    let (back, given) = Connection::pair().unwrap();
    assert_eq!(machine.ask(21, &[], &[given.as_fd()]), 0);
    drop((back, given));
    block_count.store(BLOCKS, Ordering::SeqCst);
    rig.server.resized();
    rig.await_event(
        |new_events| matches!(new_events, EndpointEvent::Error(why) if why.contains("accepts no message")),
    );
    assert_eq!(sectors(&machine), BLOCKS);
    assert_eq!(queue.one(read(BLOCKS - 1, 512)), (0, 513));
    block_count.store(BLOCKS - 8, Ordering::SeqCst);
    rig.server.resized();
    while sectors(&machine) != BLOCKS - 8 {
        tenmil_linux::thread::yield_now();
    }
    let more = rig.server.next_event();
    assert!(more.is_none(), "it is told of once: {more:?}");
}
