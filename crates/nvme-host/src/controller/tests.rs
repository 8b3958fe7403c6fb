//! The complete controller side against a scripted controller, in simulated time.

mod cmb;
mod error_recovery;
mod events;
mod many_controllers;
mod owner_commands;
mod queues;
mod scripted_device;
pub(crate) mod shared_memory;
mod shutdown;
mod startup;

use tenmil_base::{CompletionBatch, Dma, Instant, IoCompletion, Span};
use tenmil_wire::Command;

use self::scripted_device::{ScriptedDevice, ScriptedDoorbell};
use self::shared_memory::SharedMemory;
use crate::fast_path_options::FastPathOptions;
use crate::queue_link::QueueState;
use crate::queue_pair::{QueuePair, RingTransport};
use crate::{Controller, ControllerOptions, ControllerState, Event, QueuePairOptions};

/// Queue pair of the scripted device.
type ScriptedQueuePair = QueuePair<RingTransport<SharedMemory, ScriptedDoorbell>>;

/// A controller, its device, and the time.
struct ControllerHarness {
    now: Instant,
    device: ScriptedDevice,
    memory: SharedMemory,
    controller: Controller<ScriptedDevice, SharedMemory>,
    /// Events with their times.
    events: Vec<(Instant, Event)>,
    /// Queue pairs as held by another thread, with their completions.
    pairs: Vec<(ScriptedQueuePair, Vec<IoCompletion>)>,
    /// Whether that thread polls them.
    polls_pairs: bool,
}

/// Options with timeouts that keep simulated runs short, otherwise the defaults.
fn short_timeout_options() -> ControllerOptions {
    ControllerOptions {
        admin_timeout: Span::from_ms(200),
        io_timeout: Span::from_ms(100),
        quiesce_timeout: Span::from_ms(50),
        shutdown_timeout: Span::from_ms(500),
        status_interval: Span::from_ms(100),
        poll_interval: Span::from_ms(5),
        resets_within: Span::from_secs(100),
        ..ControllerOptions::default()
    }
}

impl ControllerHarness {
    fn new() -> Self {
        Self::with_device(short_timeout_options(), |_| {})
    }

    /// A harness whose device was changed before the start.
    fn with_device(
        options: ControllerOptions,
        change: impl FnOnce(&mut scripted_device::DeviceState),
    ) -> Self {
        let memory = SharedMemory::default();
        let device = ScriptedDevice::new(&memory);
        change(&mut device.state());
        let controller = Controller::new(device.clone(), memory.clone(), options).unwrap();
        let now = Instant::default();
        let (events, pairs) = (Vec::new(), Vec::new());
        Self { now, device, memory, controller, events, pairs, polls_pairs: true }
    }

    /// A harness whose controller is ready.
    fn ready() -> Self {
        Self::ready_with(short_timeout_options(), |_| {})
    }

    fn ready_with(
        options: ControllerOptions,
        change: impl FnOnce(&mut scripted_device::DeviceState),
    ) -> Self {
        let mut harness = Self::with_device(options, change);
        harness.run_until(|event| *event == Event::Ready);
        harness.events.clear();
        harness
    }

    /// A ready harness with `count` queue pairs of 16 entries, taken and polled.
    fn with_pairs(count: u16) -> Self {
        let mut harness = Self::ready();
        for id in 1..=count {
            assert_eq!(harness.create_queue_pair(None), id);
        }
        harness.events.clear();
        harness
    }

    fn create_queue_pair(&mut self, vector: Option<u16>) -> u16 {
        let wanted = QueuePairOptions { depth: 16, vector, techniques: FastPathOptions::default() };
        let id = self.controller.create_queue_pair(self.now, wanted).unwrap();
        self.run_until(|event| *event == Event::QueuePairCreated { id });
        self.pairs.push((self.controller.take_queue_pair(id).unwrap(), Vec::new()));
        id
    }

    /// One instant: all parties do what is due.
    fn poll_all(&mut self) {
        self.device.state().step(self.now);
        for _ in 0..10_000 {
            let Some(event) = self.controller.poll(self.now) else { break };
            self.events.push((self.now, event));
        }
        if self.polls_pairs {
            let mut completions = CompletionBatch::with_capacity(64);
            for (pair, answered) in &mut self.pairs {
                pair.flush();
                pair.poll(self.now, &mut completions);
                answered.extend(completions.drain());
            }
        }
    }

    /// Advances the time, from one due action to the next.
    fn run_for(&mut self, span: Span) {
        let end = self.now.after(span);
        while self.now < end {
            self.step(end);
        }
        self.poll_all();
    }

    fn step(&mut self, end: Instant) {
        self.poll_all();
        let pairs = self.pairs.iter().map(|(pair, _)| pair.wake_at());
        let own = pairs.min().filter(|_| self.polls_pairs).unwrap_or(Instant::NEVER);
        let busy = self.pairs.iter().any(|(pair, _)| pair.in_flight() > 0) && self.polls_pairs;
        let soon = if busy { self.now.after(Span::from_ms(1)) } else { Instant::NEVER };
        let next = self.controller.wake_at().min(self.device.state().wake_at()).min(own).min(soon);
        self.now = next.max(self.now.after(Span::from_us(10))).min(end);
    }

    /// Advances the time until a matching event, and returns the time that passed.
    ///
    /// # Panics
    ///
    /// If the event does not occur within two simulated minutes.
    fn run_until(&mut self, wanted: impl Fn(&Event) -> bool) -> Span {
        let (start, seen) = (self.now, self.events.len());
        let end = start.after(Span::from_secs(120));
        while self.now < end {
            self.poll_all();
            if self.events[seen..].iter().any(|(_, event)| wanted(event)) {
                return self.now.since(start);
            }
            self.step(end);
        }
        panic!("it never came: {:?}", self.events);
    }

    /// The events, without their times.
    fn events_without_times(&self) -> Vec<Event> {
        self.events.iter().map(|(_, event)| event.clone()).collect()
    }

    fn submit_io(&mut self, pair: usize, token: u64) {
        self.pairs[pair].0.submit(self.now, token, Command::new(2)).unwrap();
        self.pairs[pair].0.flush();
    }

    /// Submits an admin command with a page of data.
    fn submit_admin(&mut self, token: u64, opcode: u8) {
        let data = self.memory.allocate(4096).unwrap();
        self.controller.submit_admin(self.now, token, Command::new(opcode), Some(data)).unwrap();
    }

    fn assert_queue_state(&self, pair: usize, order: QueueState) {
        assert_eq!(self.pairs[pair].0.state(), order);
    }

    fn assert_state(&self, state: ControllerState) {
        assert_eq!(self.controller.state(), state);
    }
}
