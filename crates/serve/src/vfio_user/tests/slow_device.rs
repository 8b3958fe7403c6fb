//! Devices that do not complete requests, and clients that disconnect meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Limits, Request,
    Segment, Span,
};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::RecvResult;
use tenmil_reactor::PollMode;
use tenmil_vfio_user::server::DmaMap;
use tenmil_vfio_user::{ClientEvent, Errno};

use super::test_client::{BLOCKS, IOVA, MEMORY_BYTES, TestClient, TestServer, admin_command};
use crate::endpoint_event::EndpointEvent;

const TIME_LIMIT: Span = Span::from_secs(20);

/// Device that completes nothing while its gate is closed.
struct GatedDevice {
    ram: RamDevice,
    gate: Arc<HeldRequests>,
}

#[derive(Default)]
struct HeldRequests {
    is_closed: AtomicBool,
    /// Number of requests received.
    taken: AtomicUsize,
}

struct GatedChannel {
    channel: Box<dyn IoChannel>,
    gate: Arc<HeldRequests>,
}

impl BlockDevice for GatedDevice {
    fn limits(&self) -> Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (channel, gate) = (self.ram.channel()?, Arc::clone(&self.gate));
        Ok(Box::new(GatedChannel { channel, gate }))
    }
}

impl IoChannel for GatedChannel {
    fn limits(&self) -> &Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken = self.channel.submit(now, requests, segments);
        self.gate.taken.fetch_add(taken, Ordering::Relaxed);
        taken
    }

    fn poll(&mut self, now: Instant, replies: &mut CompletionBatch) -> usize {
        if self.gate.is_closed.load(Ordering::Relaxed) {
            0
        } else {
            self.channel.poll(now, replies)
        }
    }
}

impl ChannelWakeup for GatedChannel {}

/// Machine with a command outstanding at a device whose gate is closed.
fn server_with_outstanding_read() -> (TestServer, Arc<HeldRequests>, TestClient) {
    let gate = Arc::new(HeldRequests::default());
    let shut = Arc::clone(&gate);
    let rig = TestServer::with_device(PollMode::Adaptive, |regions| {
        Arc::new(GatedDevice { ram: RamDevice::new(regions, 512, BLOCKS).unwrap(), gate: shut })
    });
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    machine.enable_controller();
    machine.create_io_queue();
    let before = gate.taken.load(Ordering::Relaxed);
    gate.is_closed.store(true, Ordering::Relaxed);
    machine.submit_command(1, admin_command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 7)]));
    let end = rig.clock.now().after(TIME_LIMIT);
    while gate.taken.load(Ordering::Relaxed) == before {
        assert!(rig.clock.now() < end, "the medium is asked for nothing");
        tenmil_linux::named_thread::yield_cpu();
    }
    (rig, gate, machine)
}

/// The close of the socket tells the client that its memory is not accessed any more.
#[test]
fn client_socket_is_closed_after_its_memory_was_released() {
    let (rig, gate, machine) = server_with_outstanding_read();
    machine.connection.shutdown_write().unwrap();
    assert_eq!(
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_))),
        EndpointEvent::Disconnected(None)
    );
    assert_eq!(machine.connection.receive(&mut [0; 1]).unwrap(), RecvResult::WouldBlock);
    gate.is_closed.store(false, Ordering::Relaxed);
    assert!(machine.connection.wait_to_receive(TIME_LIMIT).unwrap());
    assert_eq!(machine.connection.receive(&mut [0; 1]).unwrap(), RecvResult::Eof);
}

#[test]
fn a_slow_drain_is_reported_and_new_clients_are_rejected() {
    let (mut rig, gate, machine) = server_with_outstanding_read();
    drop(machine);
    let notified = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
    assert!(
        format!("{notified:?}").contains("a device has not completed I/O for 5 s"),
        "{notified:?}"
    );
    let mut second = TestClient::connect(&rig.socket_path(), rig.clock);
    let reply = second.await_reply(|reply| matches!(reply, ClientEvent::Refused { .. }));
    assert!(matches!(reply, ClientEvent::Refused { error: Errno::BUSY, .. }), "{reply:?}");
    gate.is_closed.store(false, Ordering::Relaxed);
    rig.stop();
}

/// A warning like the one for a disconnected client.
#[test]
fn reply_waits_for_the_device_and_a_slow_wait_is_reported() {
    let wait = |is_reset: bool, expected: &'static str| {
        let (rig, gate, mut machine) = server_with_outstanding_read();
        let id = match is_reset {
            true => machine.client.request_reset(),
            false => machine.client.request_dma_unmap(IOVA, MEMORY_BYTES),
        };
        machine.process_messages();
        let notified = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
        let interest = format!("a device has not completed I/O for 5 s: {expected} waits for it");
        assert_eq!(notified, EndpointEvent::Error(interest));
        gate.is_closed.store(false, Ordering::Relaxed);
        assert_eq!(machine.await_errno(id), 0);
    };
    std::thread::scope(|threads| {
        threads.spawn(|| wait(true, "a reset"));
        wait(false, "DMA_UNMAP at 0x100000");
    });
}

/// The kernel of a virtual machine may have stopped between the two halves.
#[test]
fn memory_is_released_although_a_fused_second_never_arrives() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    machine.enable_controller();
    machine.create_io_queue();
    let (iova, len_bytes) = (IOVA + MEMORY_BYTES, 4096);
    let (is_readable, is_writable) = (true, true);
    let more = DmaMap { iova, len_bytes, file_offset: 0, is_readable, is_writable };
    let id = machine.client.request_dma_map(more, None);
    assert_eq!(machine.await_errno(id), 0);
    let compare = 5 | 1 << 8;
    machine.submit_command(1, admin_command(&[(0, compare), (1, 1), (6, 0x11_0000)]));
    let id = machine.client.request_dma_unmap(iova, len_bytes);
    assert_eq!(machine.await_errno(id), 0);
    assert_eq!(machine.read_region(0x1c, 4) & 1, 1, "and it goes on");
}

#[test]
fn repeated_client_errors_are_reported_a_few_times_only() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    for _ in 0..1000 {
        machine.map_more_than_file();
    }
    drop(machine);
    let mut errors = Vec::new();
    rig.await_event(|new_events| {
        if let EndpointEvent::Error(text) = new_events {
            errors.push(text.clone());
        }
        matches!(new_events, EndpointEvent::Disconnected(_))
    });
    assert_eq!(errors.len(), 17, "{errors:?}");
    assert_eq!(errors[16], "984 more of the same client");
}
