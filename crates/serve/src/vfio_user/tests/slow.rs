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

use super::rig::{BLOCKS, IOVA, MEMORY_BYTES, Machine, Rig, command};
use crate::endpoint_event::EndpointEvent;

const TIME_LIMIT: Span = Span::from_secs(20);

/// Device that completes nothing while its gate is closed.
struct Gated {
    ram: RamDevice,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    is_closed: AtomicBool,
    /// Number of requests received.
    taken: AtomicUsize,
}

struct GatedChannel {
    channel: Box<dyn IoChannel>,
    gate: Arc<Gate>,
}

impl BlockDevice for Gated {
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
fn waiting() -> (Rig, Arc<Gate>, Machine) {
    let gate = Arc::new(Gate::default());
    let shut = Arc::clone(&gate);
    let rig = Rig::of(PollMode::Adaptive, |regions| {
        Arc::new(Gated { ram: RamDevice::new(regions, 512, BLOCKS).unwrap(), gate: shut })
    });
    let mut machine = rig.machine();
    machine.map(true);
    machine.enable();
    machine.make_queue();
    let before = gate.taken.load(Ordering::Relaxed);
    gate.is_closed.store(true, Ordering::Relaxed);
    machine.submit(1, command(&[(0, 2), (1, 1), (6, 0x11_0000), (12, 7)]));
    let end = rig.clock.now().after(TIME_LIMIT);
    while gate.taken.load(Ordering::Relaxed) == before {
        assert!(rig.clock.now() < end, "the medium is asked for nothing");
        tenmil_linux::thread::yield_now();
    }
    (rig, gate, machine)
}

/// The close of the socket tells the client that its memory is not accessed any more.
#[test]
fn the_socket_of_a_client_that_leaves_is_closed_after_its_memory_was_let_go() {
    let (rig, gate, machine) = waiting();
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
    let (mut rig, gate, machine) = waiting();
    drop(machine);
    let notified = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
    assert!(
        format!("{notified:?}").contains("a device has not completed I/O for 5 s"),
        "{notified:?}"
    );
    let mut second = Machine::connect(&rig.path(), rig.clock);
    let reply = second.wait(|reply| matches!(reply, ClientEvent::Refused { .. }));
    assert!(matches!(reply, ClientEvent::Refused { error: Errno::BUSY, .. }), "{reply:?}");
    gate.is_closed.store(false, Ordering::Relaxed);
    rig.stop();
}

/// A warning like the one for a disconnected client.
#[test]
fn a_command_that_waits_for_a_medium_is_told_of_and_answered_in_the_end() {
    let wait = |is_reset: bool, expected: &'static str| {
        let (rig, gate, mut machine) = waiting();
        let id = match is_reset {
            true => machine.client.request_reset(),
            false => machine.client.unmap_dma(IOVA, MEMORY_BYTES),
        };
        machine.carry();
        let notified = rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)));
        let interest = format!("a device has not completed I/O for 5 s: {expected} waits for it");
        assert_eq!(notified, EndpointEvent::Error(interest));
        gate.is_closed.store(false, Ordering::Relaxed);
        assert_eq!(machine.errno(id), 0);
    };
    std::thread::scope(|threads| {
        threads.spawn(|| wait(true, "a reset"));
        wait(false, "DMA_UNMAP at 0x100000");
    });
}

/// The kernel of a virtual machine may have stopped between the two halves.
#[test]
fn memory_is_taken_back_though_half_a_fused_pair_is_all_that_ever_comes() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    machine.map(true);
    machine.enable();
    machine.make_queue();
    let (iova, len_bytes) = (IOVA + MEMORY_BYTES, 4096);
    let (is_readable, is_writable) = (true, true);
    let more = DmaMap { iova, len_bytes, file_offset: 0, is_readable, is_writable };
    let id = machine.client.map_dma(more, None);
    assert_eq!(machine.errno(id), 0);
    let compare = 5 | 1 << 8;
    machine.submit(1, command(&[(0, compare), (1, 1), (6, 0x11_0000)]));
    let id = machine.client.unmap_dma(iova, len_bytes);
    assert_eq!(machine.errno(id), 0);
    assert_eq!(machine.read(0x1c, 4) & 1, 1, "and it goes on");
}

#[test]
fn a_client_that_does_wrong_all_the_time_is_told_of_a_few_times() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    for _ in 0..1000 {
        machine.map_wrongly();
    }
    drop(machine);
    let mut troubles = Vec::new();
    rig.await_event(|new_events| {
        if let EndpointEvent::Error(text) = new_events {
            troubles.push(text.clone());
        }
        matches!(new_events, EndpointEvent::Disconnected(_))
    });
    assert_eq!(troubles.len(), 17, "{troubles:?}");
    assert_eq!(troubles[16], "984 more of the same client");
}
