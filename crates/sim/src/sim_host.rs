//! Host side: one controller, its queue pairs, and the workload that runs on them.

use tenmil_base::{ChannelWakeup, Dma, Durability, Instant, IoChannel, Span};
use tenmil_nvme_host::{
    ArmResult, Controller, ControllerError, ControllerOptions, ControllerState, Event,
    FastPathOptions, NamespaceQueue, QueuePairOptions, QueueSizes, RingTransport, arm_interrupt,
};

use crate::event_trace::{TraceKind, digest_bytes};
use crate::host_memory::SimDma;
use crate::injected_bug::{BugInjector, InjectedBug};
use crate::sim_bus::SimBus;
use crate::sim_clock::NextWakeup;
use crate::sim_pci_device::{SimDoorbell, SimMmio, SimPciDevice};
use crate::workload::Workload;

/// Driver under test with simulated registers and memory.
pub type SimController = Controller<SimMmio, SimDma>;

/// A simulated host.
pub struct SimHost {
    bus: SimBus,
    dma: SimDma,
    options: SimHostOptions,
    controller: SimController,
    queues: Vec<HostQueue>,
    driver_events: Vec<Event>,
    iterations: usize,
    /// Number of queue pairs requested, and number created or failed.
    requested: usize,
    judged: usize,
    saboteur: BugInjector,
}

/// Options of a host.
#[derive(Clone, Debug)]
pub struct SimHostOptions {
    /// Options of the driver.
    pub controller: ControllerOptions,
    /// Number of queue pairs to create.
    pub queue_pairs: u16,
    /// Entries of each queue.
    pub queue_depth: u32,
    /// Driver options.
    pub techniques: FastPathOptions,
    /// Sleep until an interrupt or a deadline, rather than poll.
    pub interrupts: bool,
}

/// A queue pair and its namespace.
struct HostQueue {
    id: u16,
    queue: NamespaceQueue<RingTransport<SimDma, SimDoorbell>>,
    /// Sleeping until its interrupt vector is signaled.
    is_asleep: bool,
    /// The queue pair is deleted: no new requests are submitted.
    is_leaving: bool,
}

/// Namespace of the workload.
pub const NSID: u32 = 1;
/// Maximum number of controller events per iteration.
const EVENTS_MAX: usize = 16;

impl Default for SimHostOptions {
    fn default() -> Self {
        Self {
            controller: ControllerOptions {
                admin_depth: 32,
                queue_pairs: 4,
                admin_timeout: Span::from_ms(200),
                io_timeout: Span::from_ms(100),
                status_interval: Span::from_ms(50),
                poll_interval: Span::from_ms(5),
                quiesce_timeout: Span::from_ms(100),
                shutdown_timeout: Span::from_ms(500),
                resets_max: 4,
                ..ControllerOptions::default()
            },
            queue_pairs: 1,
            queue_depth: 32,
            techniques: FastPathOptions::default(),
            interrupts: false,
        }
    }
}

impl SimHost {
    /// Creates a host that has found `device` on its bus.
    pub fn new(
        bus: &SimBus,
        device: &SimPciDevice,
        options: SimHostOptions,
        planted: Option<InjectedBug>,
    ) -> Result<Self, ControllerError> {
        let dma = SimDma::new(bus);
        let controller_options =
            ControllerOptions { interrupts: options.interrupts, ..options.controller };
        let controller =
            Controller::new(device.register_access(), dma.clone(), controller_options)?;
        Ok(Self {
            bus: bus.clone(),
            dma,
            options,
            controller,
            queues: Vec::new(),
            driver_events: Vec::new(),
            iterations: 0,
            requested: 0,
            judged: 0,
            saboteur: BugInjector::new(bus, planted),
        })
    }

    /// The driver.
    pub fn driver(&mut self) -> &mut SimController {
        &mut self.controller
    }

    /// State of the driver.
    pub fn driver_state(&self) -> ControllerState {
        self.controller.state()
    }

    /// All events of the driver so far.
    pub fn driver_events(&self) -> &[Event] {
        &self.driver_events
    }

    /// Number of queue pairs in use.
    pub fn queue_pair_count(&self) -> usize {
        self.queues.iter().filter(|queue| !queue.is_leaving).count()
    }

    /// Whether a queue has yet to fail a flush for writes that may have been lost with the volatile
    /// cache.
    pub fn has_unreported_losses(&self) -> bool {
        let has_cache = |queue: &&HostQueue| {
            !queue.is_leaving && queue.queue.limits().durability == Durability::VolatileCache
        };
        self.queues.iter().filter(has_cache).any(|queue| queue.queue.queue().has_lost_writes())
    }

    /// Creates the queue pairs again if none is left.
    pub fn recreate_queue_pairs(&mut self, now: Instant) {
        if self.queue_pair_count() == 0 && self.driver_state() == ControllerState::Ready {
            self.create_queue_pairs(now);
        }
    }

    /// Commands in flight, including those frozen by a reset.
    pub fn commands_in_flight(&self) -> u32 {
        self.queues.iter().map(|queue| queue.queue.queue().in_flight()).sum()
    }

    /// Whether the controller is ready and all queue pair requests have completed.
    pub fn is_ready(&self) -> bool {
        let is_started = self.driver_events.contains(&Event::Ready);
        is_started && self.driver_state() == ControllerState::Ready && self.judged >= self.requested
    }

    /// One iteration of the host thread.
    pub fn run_iteration(&mut self, now: Instant, workload: &mut Workload, work: WorkloadPhase) {
        self.iterations += 1;
        self.saboteur.run_iteration();
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.controller.poll(now) else { break };
            self.handle_event(now, event, workload);
        }
        self.wake_queues();
        for queue in &mut self.queues {
            if !queue.is_asleep || queue.queue.wake_at() <= now {
                queue.is_asleep = false;
                workload.poll(now, &mut self.saboteur.wrap_channel(&mut queue.queue));
            }
        }
        self.queues.retain(|queue| !queue.is_leaving || queue.has_work());
        let count = self.queues.len();
        if let (Some(at), WorkloadPhase::Submit) = (self.iterations.checked_rem(count), work)
            && let Some(queue) = self.queues.get_mut(at).filter(|queue| !queue.is_leaving)
        {
            queue.is_asleep = false;
            workload.submit(&mut self.saboteur.wrap_channel(&mut queue.queue));
        }
        self.arm_queues();
    }

    /// Time of the next iteration without an event.
    pub fn wake_at(&self) -> NextWakeup {
        if self.saboteur.is_oversleeping() {
            return NextWakeup::default();
        }
        let queues = self.queues.iter().fold(NextWakeup::default(), |earliest, queue| {
            earliest.with_wakeup_at(queue.queue.wake_at())
        });
        queues.with_wakeup_at(self.controller.wake_at())
    }

    /// Drops the queue pairs.
    pub fn drop_queues(&mut self) {
        self.queues.clear();
    }

    fn handle_event(&mut self, now: Instant, event: Event, workload: &mut Workload) {
        let text = format!("{event:?}");
        self.bus.record(TraceKind::Reported, [digest_bytes(text.as_bytes()), 0, 0]);
        match &event {
            Event::Ready => self.create_queue_pairs(now),
            Event::QueuePairCreated { id } => {
                self.judged += 1;
                self.open_queue(*id, workload);
            }
            Event::QueuePairRefused { id, .. } | Event::QueuePairDeleted { id } => {
                self.judged += usize::from(matches!(event, Event::QueuePairRefused { .. }));
                let of = |queue: &&mut HostQueue| queue.id == *id;
                self.queues.iter_mut().filter(of).for_each(|queue| queue.is_leaving = true);
            }
            Event::NamespaceResized { id: NSID, to_blocks, .. } => {
                self.queues.iter_mut().for_each(|queue| queue.queue.set_block_count(*to_blocks));
            }
            _ => {}
        }
        self.driver_events.push(event);
    }

    fn create_queue_pairs(&mut self, now: Instant) {
        let depth_max = self.controller.capabilities().map_or(2, |known| known.depth_max);
        for number in 1..=self.options.queue_pairs {
            let options = QueuePairOptions {
                depth: self.options.queue_depth.min(depth_max),
                vector: self.options.interrupts.then_some(number),
                techniques: self.options.techniques,
            };
            // Fewer queue pairs than requested are acceptable.
            let begun = self.controller.create_queue_pair(now, options);
            self.requested += usize::from(begun.is_ok());
        }
    }

    fn open_queue(&mut self, id: u16, workload: &mut Workload) {
        let known = (self.controller.namespace(NSID), self.controller.identity());
        let (Some(namespace), Some(identity)) = known else { return };
        let view = namespace.view(&identity.limits);
        let Some(pair) = self.controller.take_queue_pair(id) else { return };
        if self.saboteur.is_leaking() {
            let _ = self.dma.allocate(1);
        }
        let sizes = QueueSizes::default();
        if let Some(queue) = NamespaceQueue::new(pair, view, sizes) {
            workload.set_limits(queue.limits());
            self.queues.push(HostQueue { id, queue, is_asleep: false, is_leaving: false });
        }
    }

    /// Wakes the queue pairs whose vector was signaled.
    fn wake_queues(&mut self) {
        if !self.options.interrupts {
            return;
        }
        let signalled = self.bus.with_state(|state| state.interrupts);
        for queue in &mut self.queues {
            queue.is_asleep &= signalled & 1 << queue.id == 0;
        }
    }

    fn arm_queues(&mut self) {
        if !self.options.interrupts {
            return;
        }
        for queue in &mut self.queues {
            let (bus, bit) = (&self.bus, 1_u64 << queue.id);
            let armed = arm_interrupt(queue.queue.queue_mut(), || {
                bus.with_state(|state| state.interrupts &= !bit)
            });
            queue.is_asleep = armed == ArmResult::Armed;
        }
    }
}

impl HostQueue {
    fn has_work(&self) -> bool {
        self.queue.queue().in_flight() > 0 || self.queue.wake_at() != Instant::NEVER
    }
}

/// Phase of the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadPhase {
    /// Reap completions and submit requests.
    Submit,
    /// Reap completions only.
    Drain,
}
