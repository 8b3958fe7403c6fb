//! The host's stack: one controller, its queue pairs, and a workload that runs over them.

use base::{Backend, Dma, Durability, Instant, Span};
use nvme::{
    Armed, Controller, ControllerError, ControllerOptions, Event, NamespaceQueue, QueuePairOptions,
    QueueSizes, State, Techniques, arm,
};

use crate::bus::Bus;
use crate::clock::Earliest;
use crate::device::{Device, SimDoorbell, SimMmio};
use crate::host_memory::SimDma;
use crate::planted::{Planted, Saboteur};
use crate::trace::{Kind, digest};
use crate::workload::Workload;

/// The driver under test, over simulated registers and memory.
pub type SimController = Controller<SimMmio, SimDma>;

/// A host.
pub struct Host {
    bus: Bus,
    dma: SimDma,
    options: HostOptions,
    controller: SimController,
    lanes: Vec<Lane>,
    told: Vec<Event>,
    turns: usize,
    /// Queue pairs that were asked for, and those about which there was a verdict.
    asked: usize,
    judged: usize,
    saboteur: Saboteur,
}

/// How a host goes about it.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// What the driver is told.
    pub controller: ControllerOptions,
    /// Queue pairs to be made.
    pub queue_pairs: u16,
    /// Entries of each.
    pub queue_depth: u32,
    /// What makes them fast.
    pub techniques: Techniques,
    /// Sleep until an interrupt or a deadline, and do not poll.
    pub interrupts: bool,
}

/// A queue pair and the namespace that is served over it.
struct Lane {
    id: u16,
    queue: NamespaceQueue<SimDma, SimDoorbell>,
    /// Nothing to do until its vector is signalled.
    is_asleep: bool,
    /// Its queue pair is gone from the device: it takes nothing more.
    is_leaving: bool,
}

/// The namespace that the workload runs on.
pub const NSID: u32 = 1;
/// Events taken from the controller in one turn.
const EVENTS_MAX: usize = 16;

impl Default for HostOptions {
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
            techniques: Techniques::default(),
            interrupts: false,
        }
    }
}

impl Host {
    /// A host that has found `device` on its bus.
    pub fn new(
        bus: &Bus,
        device: &Device,
        options: HostOptions,
        planted: Option<Planted>,
    ) -> Result<Self, ControllerError> {
        let dma = SimDma::new(bus);
        let controller_options =
            ControllerOptions { interrupts: options.interrupts, ..options.controller };
        let controller = Controller::new(device.registers(), dma.clone(), controller_options)?;
        Ok(Self {
            bus: bus.clone(),
            dma,
            options,
            controller,
            lanes: Vec::new(),
            told: Vec::new(),
            turns: 0,
            asked: 0,
            judged: 0,
            saboteur: Saboteur::new(bus, planted),
        })
    }

    /// The driver.
    pub fn controller(&mut self) -> &mut SimController {
        &mut self.controller
    }

    /// How far the driver is.
    pub fn state(&self) -> State {
        self.controller.state()
    }

    /// Everything that the driver has told so far.
    pub fn told(&self) -> &[Event] {
        &self.told
    }

    /// Queue pairs that are in use.
    pub fn lanes(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.is_leaving).count()
    }

    /// Whether a queue has still to fail a flush for writes that may be lost with the controller's cache.
    pub fn owes_losses(&self) -> bool {
        let has_cache = |lane: &&Lane| {
            !lane.is_leaving && lane.queue.limits().durability == Durability::VolatileCache
        };
        self.lanes.iter().filter(has_cache).any(|lane| lane.queue.queue().has_lost_writes())
    }

    /// Makes the queue pairs again that there were, if there are none left.
    pub fn reopen(&mut self, now: Instant) {
        if self.lanes() == 0 && self.state() == State::Ready {
            self.create_queue_pairs(now);
        }
    }

    /// Commands in flight or parked.
    pub fn in_flight(&self) -> u32 {
        self.lanes.iter().map(|lane| lane.queue.queue().in_flight()).sum()
    }

    /// Whether it has everything that it is going to have: the workload can run, if there is
    /// anything to run it on.
    pub fn is_up(&self) -> bool {
        let is_started = self.told.contains(&Event::Ready);
        is_started && self.state() == State::Ready && self.judged >= self.asked
    }

    /// One turn of the thread that does everything.
    pub fn turn(&mut self, now: Instant, workload: &mut Workload, work: Work) {
        self.turns += 1;
        self.saboteur.turn();
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.controller.poll(now) else { break };
            self.handle(now, event, workload);
        }
        self.wake_lanes();
        for lane in &mut self.lanes {
            if !lane.is_asleep || lane.queue.wake_at() <= now {
                lane.is_asleep = false;
                workload.poll(now, &mut self.saboteur.over(&mut lane.queue));
            }
        }
        self.lanes.retain(|lane| !lane.is_leaving || lane.has_work());
        let count = self.lanes.len();
        if let (Some(at), Work::Submit) = (self.turns.checked_rem(count), work)
            && let Some(lane) = self.lanes.get_mut(at).filter(|lane| !lane.is_leaving)
        {
            lane.is_asleep = false;
            workload.submit(&mut self.saboteur.over(&mut lane.queue));
        }
        self.sleep_lanes();
    }

    /// When the next turn is due even if nothing happens.
    pub fn wake_at(&self) -> Earliest {
        if self.saboteur.oversleeps() {
            return Earliest::default();
        }
        let lanes = self
            .lanes
            .iter()
            .fold(Earliest::default(), |earliest, lane| earliest.or(lane.queue.wake_at()));
        lanes.or(self.controller.wake_at())
    }

    /// Lets go of the queue pairs.
    pub fn drop_lanes(&mut self) {
        self.lanes.clear();
    }

    fn handle(&mut self, now: Instant, event: Event, workload: &mut Workload) {
        let text = format!("{event:?}");
        self.bus.record(Kind::Reported, [digest(text.as_bytes()), 0, 0]);
        match &event {
            Event::Ready => self.create_queue_pairs(now),
            Event::QueuePairCreated { id } => {
                self.judged += 1;
                self.open_lane(*id, workload);
            }
            Event::QueuePairRefused { id, .. } | Event::QueuePairDeleted { id } => {
                self.judged += usize::from(matches!(event, Event::QueuePairRefused { .. }));
                let of = |lane: &&mut Lane| lane.id == *id;
                self.lanes.iter_mut().filter(of).for_each(|lane| lane.is_leaving = true);
            }
            Event::NamespaceResized { id: NSID, to_blocks, .. } => {
                self.lanes.iter_mut().for_each(|lane| lane.queue.resize(*to_blocks));
            }
            _ => {}
        }
        self.told.push(event);
    }

    fn create_queue_pairs(&mut self, now: Instant) {
        let depth_max = self.controller.capabilities().map_or(2, |known| known.depth_max);
        for number in 1..=self.options.queue_pairs {
            let options = QueuePairOptions {
                depth: self.options.queue_depth.min(depth_max),
                vector: self.options.interrupts.then_some(number),
                techniques: self.options.techniques,
            };
            // Fewer than were wanted are good enough.
            let begun = self.controller.create_queue_pair(now, options);
            self.asked += usize::from(begun.is_ok());
        }
    }

    fn open_lane(&mut self, id: u16, workload: &mut Workload) {
        let known = (self.controller.namespace(NSID), self.controller.identity());
        let (Some(namespace), Some(identity)) = known else { return };
        let view = namespace.view(&identity.limits);
        let Some(pair) = self.controller.take_queue_pair(id) else { return };
        if self.saboteur.leaks() {
            let _ = self.dma.allocate(1);
        }
        let sizes = QueueSizes::default();
        if let Some(queue) = NamespaceQueue::new(&self.dma, pair, view, sizes) {
            workload.set_limits(queue.limits());
            self.lanes.push(Lane { id, queue, is_asleep: false, is_leaving: false });
        }
    }

    /// Whose vector was signalled has something to do.
    fn wake_lanes(&mut self) {
        if !self.options.interrupts {
            return;
        }
        let signalled = self.bus.with(|state| state.interrupts);
        for lane in &mut self.lanes {
            lane.is_asleep &= signalled & 1 << lane.id == 0;
        }
    }

    fn sleep_lanes(&mut self) {
        if !self.options.interrupts {
            return;
        }
        for lane in &mut self.lanes {
            let (bus, bit) = (&self.bus, 1_u64 << lane.id);
            let armed = arm(lane.queue.queue_mut(), || bus.with(|state| state.interrupts &= !bit));
            lane.is_asleep = armed == Armed::Armed;
        }
    }
}

impl Lane {
    fn has_work(&self) -> bool {
        self.queue.queue().in_flight() > 0 || self.queue.wake_at() != Instant::NEVER
    }
}

/// What a host does with its workload in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Takes answers and submits more.
    Submit,
    /// Only takes answers.
    Drain,
}
