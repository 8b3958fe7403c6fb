//! The scheduler at work: a poller that looks at the books once in a period, plans, and orders.
//!
//! It lives on a light thread of its own, which is idle and so gathers with the idle ones. As a timed
//! poller it costs the turns between two looks nothing. What may block, the kernel's files about
//! cpusets and frequencies, is the [`Ground`]'s business.
//!
//! [`start`] is all that a program needs; [`balancer`] leaves machine and thread to the caller.

mod ground;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use base::{Instant, Span};
use host::Cores;
use host::frequency::{Frequency, Speed};
use host::machine::Machine;
use host::pool::Pool;
use host::topology::Place;

use crate::context::Context;
use crate::directory::{Directory, Loads, ReactorTime, ThreadId, ThreadTime};
use crate::event::Event;
use crate::governor;
use crate::message::Handle;
use crate::poller::{Found, Poller, Registration};
use crate::refused::Refused;
use crate::schedule::{
    Move, Options, OptionsError, Plan, ReactorLoad, Scheduler, Snapshot, ThreadLoad,
};
use crate::thread::ThreadPlan;
pub use ground::{Ground, KernelGround};

/// Balances threads over reactors, as a poller.
struct Balancer {
    steering: Steering,
    ground: Box<dyn Ground>,
    /// Where the reactors' cores lie.
    places: Vec<Place>,
    last: Option<Loads>,
    /// When each thread was first seen after its last move.
    arrived: BTreeMap<ThreadId, Instant>,
    /// How often it is polled: the period of the settings when it last looked at them.
    period: Span,
}

/// What others may ask of a balancer, at any time and from any thread.
#[derive(Clone, Debug)]
pub struct Steering(Arc<Mutex<Steered>>);

#[derive(Debug)]
struct Steered {
    scheduler: Scheduler,
    plan: Plan,
    /// How fast each core is to run, by what was seen last; nothing where nobody governs.
    speeds: Vec<(u32, Speed)>,
}

/// Why no balancer was started.
#[derive(Debug)]
pub enum NotBalanced {
    /// Its settings do not go together.
    Options(OptionsError),
    /// Its thread was refused.
    Refused(Refused),
}

/// A balancer for reactors whose cores lie at these places, to be added to a light thread; and what
/// it is steered by.
pub fn balancer(
    options: Options,
    places: Vec<Place>,
    ground: impl Ground + 'static,
) -> Result<(Registration, Steering), OptionsError> {
    let cores: Cores = places.iter().map(|place| place.core).collect();
    let period = options.period;
    let scheduler = Scheduler::new(options, cores)?;
    let steering = Steering(Arc::new(Mutex::new(Steered {
        scheduler,
        plan: Plan::default(),
        speeds: Vec::new(),
    })));
    let balancer = Balancer {
        steering: steering.clone(),
        ground: Box::new(ground),
        places,
        last: None,
        arrived: BTreeMap::new(),
        period,
    };
    Ok((Registration::timed("balancer", period, balancer), steering))
}

/// Starts balancing the threads of these reactors, on a light thread of its own. Given a
/// `frequency`, it also chooses how fast their cores run. What may block is done by `pool`.
pub fn start(
    directory: &Directory,
    options: Options,
    frequency: Option<Frequency>,
    pool: Arc<Pool>,
) -> Result<(Handle, Steering), NotBalanced> {
    let machine = Machine::this();
    let reactors = directory.sample(Instant::default()).reactors;
    let cores: Cores = reactors.iter().map(|reactor| reactor.core).collect();
    let places = Place::of(&machine, &cores);
    let ground = KernelGround::new(machine, cores, frequency, pool);
    let (balancer, steering) = balancer(options, places, ground).map_err(NotBalanced::Options)?;
    let plan = ThreadPlan::new("balancer").poller(balancer);
    let handle = directory.spawn(plan).map_err(|refused| NotBalanced::Refused(refused.why))?;
    Ok((handle, steering))
}

impl Balancer {
    /// Plans for the period between two looks at the books, and orders what was planned. Gives the
    /// length of the next period.
    fn balance(&mut self, last: &Loads, loads: &Loads, directory: &Directory) -> Option<Span> {
        let now = loads.at;
        let snapshot = self.snapshot(last, loads);
        let steering = self.steering.clone();
        let mut steered = match steering.0.try_lock() {
            Ok(steered) => steered,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Somebody changes the settings. The next look is over two periods.
            Err(TryLockError::WouldBlock) => return None,
        };
        let plan = steered.scheduler.plan(now, &snapshot);
        let wishes = governor::decide(steered.scheduler.options(), &snapshot, &plan);
        for order in &plan.moves {
            send(order, loads, directory);
        }
        for event in &plan.events {
            directory.note(now, Event::Schedule(event.clone()));
        }
        steered.speeds = if self.ground.governs() { wishes.clone() } else { Vec::new() };
        for error in self.ground.run_at(wishes) {
            directory.note(now, Event::Frequency(error));
        }
        steered.plan = plan;
        let Options { period, rest, .. } = *steered.scheduler.options();
        // Nobody asks for earlier ones.
        self.arrived.retain(|_, at| now.since(*at) < rest);
        Some(period)
    }

    fn snapshot(&mut self, last: &Loads, loads: &Loads) -> Snapshot {
        let ours = self.ground.ours();
        let reactor = |reactor: &ReactorTime| {
            let before = last.reactors.iter().find(|before| before.id == reactor.id);
            let place = self.places.iter().find(|place| place.core == reactor.core);
            ReactorLoad {
                core: reactor.core,
                busy: since(reactor.busy, before.map(|before| before.busy)),
                taken: !ours.cores.contains(reactor.core),
                siblings: place.map(|place| place.siblings.clone()).unwrap_or_default(),
                node: place.and_then(|place| place.node),
            }
        };
        let reactors = loads.reactors.iter().map(reactor).collect();
        let mut threads = Vec::with_capacity(loads.threads.len());
        for thread in &loads.threads {
            let before = last.thread(thread.id);
            if before.is_some_and(|before| before.moves < thread.moves) {
                self.arrived.insert(thread.id, loads.at);
            }
            threads.extend(self.load(thread, before, loads));
        }
        Snapshot { elapsed: loads.at.since(last.at).ns, quota: ours.quota, reactors, threads }
    }

    fn load(
        &self,
        thread: &ThreadTime,
        before: Option<&ThreadTime>,
        loads: &Loads,
    ) -> Option<ThreadLoad> {
        let home = loads.reactors.iter().find(|reactor| reactor.id == thread.home)?;
        // No plan is made for one that cannot go.
        let mask = match thread.is_tied {
            true => Some(Cores::from_iter([home.core])),
            false => thread.mask.clone(),
        };
        Some(ThreadLoad {
            id: u64::from(thread.id.0),
            home: home.core,
            busy: since(thread.busy, before.map(|before| before.busy)),
            mask,
            node: thread.node,
            last_move: self.arrived.get(&thread.id).copied(),
            // A second order before the first is carried out would take its place; the rest keeps
            // the scheduler from giving one.
            moving: false,
        })
    }
}

impl Poller for Balancer {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let loads = context.directory().loads(context.now());
        let Some(last) = self.last.take() else {
            self.last = Some(loads);
            return Found::Work;
        };
        let Some(period) = self.balance(&last, &loads, context.directory()) else {
            self.last = Some(last);
            return Found::Work;
        };
        self.last = Some(loads);
        if let Some(me) = context.poller().filter(|_| period != self.period) {
            self.period = period;
            context.set_period(me, period);
        }
        Found::Work
    }
}

impl Steering {
    /// The settings in force.
    pub fn options(&self) -> Options {
        self.lock().scheduler.options().clone()
    }

    /// Changes the settings, the policy among them, from the end of the running period on. Settings
    /// that do not go together are refused and change nothing.
    pub fn set_options(&self, options: Options) -> Result<(), OptionsError> {
        self.lock().scheduler.set_options(options)
    }

    /// What was planned last.
    pub fn plan(&self) -> Plan {
        self.lock().plan.clone()
    }

    /// How fast each core was last asked to run; empty where nobody governs frequencies.
    pub fn speeds(&self) -> Vec<(u32, Speed)> {
        self.lock().speeds.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Steered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for NotBalanced {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Options(error) => write!(out, "{error}"),
            Self::Refused(why) => write!(out, "start the balancer: {why}"),
        }
    }
}

impl std::error::Error for NotBalanced {}

/// Has a thread moved. A reactor whose inbox is full is not told; if the
/// reason stays, the next plan after the thread's rest says so again.
fn send(order: &Move, loads: &Loads, directory: &Directory) {
    let on = |core| loads.reactors.iter().find(|reactor| reactor.core == core);
    let Some(to) = on(order.to) else { return };
    let Ok(thread) = u32::try_from(order.thread).map(ThreadId) else { return };
    // Not by `Directory::move_thread`, which holds people to the mask: where no core of it is left,
    // the scheduler has to leave it.
    let _ = directory.steer(thread, to.id);
}

fn since(now: Span, before: Option<Span>) -> u64 {
    now.ns.saturating_sub(before.unwrap_or_default().ns)
}

#[cfg(test)]
mod tests;
