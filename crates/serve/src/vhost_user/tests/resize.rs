//! Disk that grows while a front end uses it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{BlockDevice, Error, IoChannel, Limits, Span};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_reactor::PollMode;
use tenmil_vhost_user::CONFIG_CHANGED;

use super::test_front_end::{BLOCKS, TestFrontEnd, TestServer, u32_payload};
use super::virtio_driver::{read_request, write_request};
use crate::endpoint_event::EndpointEvent;

/// RAM device whose reported length changes.
struct ResizableDevice {
    ram: RamDevice,
    block_count: Arc<AtomicU64>,
}

const BEFORE: u64 = BLOCKS / 2;

impl BlockDevice for ResizableDevice {
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
fn start_resizable_server() -> (TestServer, Arc<AtomicU64>) {
    let block_count = Arc::new(AtomicU64::new(BEFORE));
    let shared = Arc::clone(&block_count);
    let rig = TestServer::with_device(PollMode::Adaptive, |regions| {
        Arc::new(ResizableDevice {
            ram: RamDevice::new(regions, 512, BLOCKS).unwrap(),
            block_count: shared,
        })
    });
    (rig, block_count)
}

fn read_capacity(machine: &TestFrontEnd) -> u64 {
    machine.send_message(24, 1, &[u32_payload(&[0, 8, 0]), vec![0; 8]].concat(), &[]);
    let (config, _) = machine.receive_reply().unwrap();
    u64::from_le_bytes(*config.last_chunk().unwrap())
}

fn await_back_channel_message(rig: &TestServer, back: &LocalConnection) -> Vec<u8> {
    let end = rig.clock.now().after(super::test_front_end::TIME_LIMIT);
    let mut bytes = [0; 64];
    loop {
        match back.receive(&mut bytes).unwrap() {
            RecvResult::Bytes(count) => return bytes[..count].to_vec(),
            RecvResult::Eof => panic!("the socket was closed"),
            RecvResult::WouldBlock => tenmil_linux::named_thread::sleep(Span::from_us(100)),
        }
        assert!(rig.clock.now() < end, "no notification was sent");
    }
}

#[test]
fn resize_is_visible_after_the_config_change_message() {
    let (rig, block_count) = start_resizable_server();
    let machine = rig.connect_and_negotiate(0);
    let (back, given) = LocalConnection::pair().unwrap();
    assert_eq!(machine.send_for_ack(21, &[], &[given.as_fd()]), 0);
    let mut queues = [0, 1].map(|number| machine.start_queue(number));
    for queue in &mut queues {
        assert_eq!(queue.execute_request(write_request(BEFORE - 8, 4096)), (0, 1));
        assert_eq!(queue.execute_request(read_request(BEFORE, 512)), (1, 1), "past its end");
    }
    assert_eq!(read_capacity(&machine), BEFORE);
    block_count.store(BLOCKS, Ordering::SeqCst);
    rig.server.notify_resize();
    assert_eq!(await_back_channel_message(&rig, &back), CONFIG_CHANGED);
    assert_eq!(read_capacity(&machine), BLOCKS);
    for queue in &mut queues {
        assert_eq!(queue.execute_request(read_request(BEFORE, 512)), (0, 513));
        assert_eq!(queue.execute_request(read_request(BLOCKS, 512)), (1, 1), "past its new end");
    }
    // Queues started later, and queues in new memory, use the new length, too.
    assert_eq!(machine.start_queue(2).execute_request(write_request(BLOCKS - 1, 512)), (0, 1));
    machine.send_memory_table();
    assert_eq!(queues[0].execute_request(read_request(BLOCKS - 1, 512)), (0, 513));
    machine.close_connection();
    rig.await_disconnect_event();
    assert_eq!(read_capacity(&rig.connect_and_negotiate(0)), BLOCKS, "the next front end");
}

#[test]
fn front_end_without_config_messages_reads_the_new_size() {
    let (rig, block_count) = start_resizable_server();
    let machine = rig.connect_and_negotiate(0);
    let mut queue = machine.start_queue(0);
    // A descriptor of another type is rejected; a socket whose other end is closed causes an event.
    assert_eq!(machine.send_for_ack(21, &[], &[machine.memory_file().as_fd()]), 1);
    rig.await_event(
        |new_events| matches!(new_events, EndpointEvent::Error(why) if why.contains("Unix stream")),
    );
    let (back, given) = LocalConnection::pair().unwrap();
    assert_eq!(machine.send_for_ack(21, &[], &[given.as_fd()]), 0);
    drop((back, given));
    block_count.store(BLOCKS, Ordering::SeqCst);
    rig.server.notify_resize();
    rig.await_event(
        |new_events| matches!(new_events, EndpointEvent::Error(why) if why.contains("accepts no message")),
    );
    assert_eq!(read_capacity(&machine), BLOCKS);
    assert_eq!(queue.execute_request(read_request(BLOCKS - 1, 512)), (0, 513));
    block_count.store(BLOCKS - 8, Ordering::SeqCst);
    rig.server.notify_resize();
    while read_capacity(&machine) != BLOCKS - 8 {
        tenmil_linux::named_thread::yield_cpu();
    }
    let more = rig.server.next_event();
    assert!(more.is_none(), "it is reported once: {more:?}");
}
