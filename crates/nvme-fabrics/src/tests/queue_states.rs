//! Connection of a queue in each state of its link, with the threads of the queue and of the controller in
//! any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{CompletionBatch, Operation, Request, SharedWaker, Span, WakeSource};
use tenmil_nvme_host::{ControllerState, Event, QueueState, Transport};
use tenmil_wire::{Command, IoOpcode};

use super::single_path_host::SinglePathHost;
use crate::fabrics_controller::FabricsController;
use crate::fabrics_queue_pair::{FabricsQueuePair, QueuePairState};
use crate::segment_lists::SegmentPointer;
use crate::wait_handle::WaitHandle;

/// Interval of polls.
const POLL: Span = Span::from_us(50);

/// A controller and a queue pair, each polled by a test as it likes.
struct TwoThreads {
    host: SinglePathHost,
    remote: FabricsController,
    queue_pair: FabricsQueuePair,
    events: Vec<Event>,
}

impl TwoThreads {
    /// The queue has its connection.
    fn new() -> Self {
        let mut host = SinglePathHost::new();
        let (remote, queue_pair) = host.queue_pair_without_retries(8);
        let mut threads = Self { host, remote, queue_pair, events: Vec::new() };
        threads.poll_queue();
        assert_eq!(threads.queue_pair.state(), QueuePairState::Open);
        threads
    }

    fn poll_queue(&mut self) -> usize {
        let mut completions = CompletionBatch::with_capacity(8);
        self.queue_pair.poll_raw(self.host.now, &mut completions);
        completions.len()
    }

    /// Polls the controller, and the target, for some time.
    fn poll_controller_for(&mut self, span: Span) {
        let end = self.host.now.after(span);
        while self.host.now < end {
            self.host.now = self.host.now.after(POLL);
            self.host.target.step(self.host.now);
            self.events.extend(self.remote.poll(self.host.now));
        }
    }

    /// Polls everything until an event.
    fn await_event(&mut self, expected: &Event) {
        while !self.events.contains(expected) {
            self.poll_controller_for(POLL);
            self.poll_queue();
        }
    }

    fn read(&mut self, token: u64) -> usize {
        let memory = self.host.buffer(0, 8);
        let request =
            Request { token, ..SinglePathHost::request(Operation::Read, 0, &[memory], token) };
        self.queue_pair.submit(self.host.now, &[request], &[memory])
    }

    /// Passes a command to the transport, as `submit` does after it has checked the state.
    fn submit_to_transport(&mut self) {
        let command = Command::new(IoOpcode::Flush.code()).with_nsid(1).with_cid(1);
        let transport = self.queue_pair.driver_queue().queue_mut().transport_mut();
        transport.submit(command, SegmentPointer::None, None);
        transport.flush(1);
    }

    /// Number of commands that the target has received, once all that were sent have arrived.
    fn received_commands(&mut self) -> u64 {
        for _ in 0..20 {
            self.host.now = self.host.now.after(POLL);
            self.host.target.step(self.host.now);
        }
        self.host.target.state().received_io_commands
    }
}

/// The controller counts an idle queue as closed, and its thread has not seen the state yet.
#[test]
fn command_of_an_idle_queue_that_was_frozen_is_not_sent() {
    let mut threads = TwoThreads::new();
    threads.remote.controller().freeze();
    threads.submit_to_transport();
    assert_eq!(threads.received_commands(), 0);
    assert_eq!(threads.queue_pair.driver_state(), QueueState::Running, "not seen yet");
    assert_eq!(threads.queue_pair.state(), QueuePairState::Disconnected);
    threads.submit_to_transport();
    assert_eq!(threads.received_commands(), 0);
}

#[test]
fn command_of_a_queue_that_is_frozen_afterwards_is_sent_and_its_close_awaited() {
    let mut threads = TwoThreads::new();
    threads.host.target.state().withholds_completions = true;
    threads.submit_to_transport();
    assert_eq!(threads.received_commands(), 1);
    let now = threads.host.now;
    threads.remote.controller().reset(now).unwrap();
    threads.poll_controller_for(Span::from_secs(5));
    assert_eq!(threads.remote.controller().state(), ControllerState::Resetting);
    assert!(!threads.events.contains(&Event::Recovered));
    threads.host.target.state().withholds_completions = false;
    threads.await_event(&Event::Recovered);
}

#[test]
fn idle_queue_is_not_waited_for_and_closes_its_connection_when_it_is_polled() {
    let mut threads = TwoThreads::new();
    let now = threads.host.now;
    threads.remote.controller().reset(now).unwrap();
    threads.poll_controller_for(Span::from_secs(5));
    assert!(threads.events.contains(&Event::Recovered));
    let target = threads.host.target.clone();
    assert_eq!(threads.queue_pair.state(), QueuePairState::Open, "it has not seen anything");
    assert_eq!((threads.read(1), threads.queue_pair.state()), (0, QueuePairState::Disconnected));
    threads.poll_controller_for(Span::from_ms(1));
    assert_eq!(target.state().connects, [0, 1, 0, 1]);
    assert_eq!(target.open_connection_count(), 2, "and none is left of before");
    threads.await_event(&Event::QueuePairResumed { id: 1 });
    assert_eq!(threads.read(2), 1);
    threads.queue_pair.flush();
    while threads.poll_queue() == 0 {
        threads.poll_controller_for(POLL);
    }
}

#[test]
fn frozen_queue_sends_nothing_that_it_had_accepted() {
    let mut threads = TwoThreads::new();
    assert_eq!(threads.read(1), 1);
    threads.remote.controller().freeze();
    threads.poll_queue();
    threads.queue_pair.flush();
    threads.submit_to_transport();
    assert_eq!(threads.received_commands(), 0);
    assert_eq!(threads.queue_pair.state(), QueuePairState::Disconnected);
}

#[test]
fn connection_that_the_queue_has_not_taken_is_closed_by_the_next_reset() {
    let mut threads = TwoThreads::new();
    let target = threads.host.target.clone();
    let now = threads.host.now;
    threads.remote.controller().reset(now).unwrap();
    while !threads.events.contains(&Event::QueuePairResumed { id: 1 }) {
        if threads.queue_pair.driver_state() != QueueState::Released {
            threads.poll_queue();
        }
        threads.poll_controller_for(POLL);
    }
    assert_eq!(threads.queue_pair.state(), QueuePairState::Disconnected);
    assert_eq!(target.open_connection_count(), 2);
    target.state().refuses_connections = true;
    let now = threads.host.now;
    threads.remote.controller().reset(now).unwrap();
    threads.poll_controller_for(Span::from_secs(1));
    assert_eq!(target.open_connection_count(), 0);
    target.state().refuses_connections = false;
    threads.events.clear();
    threads.await_event(&Event::QueuePairResumed { id: 1 });
    threads.poll_queue();
    assert_eq!((threads.queue_pair.state(), threads.read(1)), (QueuePairState::Open, 1));
}

#[test]
fn dropped_controller_closes_the_connections_of_its_queues() {
    for is_busy in [false, true] {
        let mut threads = TwoThreads::new();
        if is_busy {
            threads.host.target.state().withholds_completions = true;
            assert_eq!(threads.read(1), 1);
            threads.queue_pair.flush();
        }
        let TwoThreads { mut host, remote, mut queue_pair, .. } = threads;
        drop(remote);
        let mut completions = CompletionBatch::with_capacity(8);
        for _ in 0..10 {
            host.now = host.now.after(POLL);
            queue_pair.poll_raw(host.now, &mut completions);
            host.target.step(host.now);
        }
        assert_eq!(queue_pair.state(), QueuePairState::Disconnected, "{is_busy}");
        // Nothing of an idle queue can be executed late, so its controller could end.
        let expected = if is_busy { QueueState::Frozen } else { QueueState::Dead };
        assert_eq!(queue_pair.driver_state(), expected, "{is_busy}");
        assert_eq!(host.target.open_connection_count(), 0, "{is_busy}");
        assert!(completions.is_empty(), "its memory may be accessed by the old controller");
    }
}

/// Counts wake-ups.
struct CountingWaitHandle(Arc<AtomicU32>);

impl WaitHandle for CountingWaitHandle {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn watch(&mut self, _: WakeSource<'_>) -> bool {
        true
    }

    fn waker(&self) -> SharedWaker {
        let count = Arc::clone(&self.0);
        Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn clear(&mut self) {}
}

#[test]
fn sleeping_thread_is_woken_by_each_state_change_and_does_not_sleep_before_it_has_applied_it() {
    let mut threads = TwoThreads::new();
    let count = Arc::new(AtomicU32::new(0));
    let mut wait_handle = CountingWaitHandle(Arc::clone(&count));
    threads.queue_pair.set_waker(&wait_handle);
    threads.poll_queue();
    assert!(!threads.queue_pair.arm(&mut wait_handle), "it may sleep");
    threads.queue_pair.disarm();
    let before = count.load(Ordering::Relaxed);
    threads.remote.controller().freeze();
    assert_eq!(count.load(Ordering::Relaxed), before + 1);
    assert!(threads.queue_pair.arm(&mut wait_handle), "there is a state to apply");
    threads.queue_pair.disarm();
}
