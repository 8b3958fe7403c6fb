//! A namespace that several paths lead to, and the thread that tends their controllers.
//!
//! ```text
//!   RemoteMedium, … ─▶ Tended ── remote::Multipath (locked to ask for a queue, or to tend)
//!                        └── a thread that tends: connections, ANA states, time-outs, events
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Span};
use dma::{CommandStore, DeviceKind, DevicePool, Region, Regions};
use host::{Clock, Stop, Turn, Wait};
use nvme::{ControllerOptions, QueuePairOptions, QueueSizes, Techniques};
use remote::{
    Multipath, MultipathOptions, MultipathQueue, PathEvent, PathSetup, Policy, QueueTicket, Sleep,
};

use super::attached::{Attached, pool_bytes};
use super::channel::Queues;
use super::dial::Caller;
use super::name::TcpName;
use super::reservations::{ReservationQueue, ReservedNamespace};
use super::sleep::Pillow;
use super::teller::Teller;
use super::tending::{TenderBed, TendingThread, wait_for_shutdown};
use crate::Refused;
use crate::growth::Growth;

/// The paths, and the thread that tends them. It goes with the last medium and channel.
pub(super) struct Tended {
    shared: Arc<Mutex<Multipath>>,
    thread: TendingThread,
    clock: Clock,
    name: TcpName,
    teller: Arc<Teller>,
    growth: Arc<Growth>,
    regions: Regions,
    /// Queue pairs may live on when their path is lost.
    _memory: Vec<Arc<Region>>,
}

/// How long the thread sleeps at most, and while somebody is being called.
const TENDED: Span = Span::from_ms(100);
const PAUSE: Span = Span::from_us(50);

impl Tended {
    /// Calls all paths, and waits until one leads there and the others have been tried.
    pub(super) fn call(name: &TcpName, regions: &Regions, clock: Clock) -> Result<Self, Refused> {
        let machine = |what: &str, error: &dyn std::fmt::Display| {
            Refused::machine(format!("call tcp://{}: {what}: {error}", name.address))
        };
        let mut memory = Vec::new();
        let mut setups = Vec::new();
        for address in name.addresses() {
            // A path that comes back has new queues while the old ones may still be there.
            let bytes = usize::try_from(2 * pool_bytes(name)).unwrap_or(usize::MAX);
            let region = regions.allocate(bytes);
            let region = region.map_err(|error| machine("memory for its queues", &error))?;
            let store = CommandStore::for_device(DeviceKind::Emulated);
            let kind = DeviceKind::Emulated;
            let pool = DevicePool::new(regions.clone(), region.segment(), kind, store);
            pool.map_on_use();
            let (address, regions) = (address.to_owned(), regions.clone());
            let sockets = name.sockets.clone();
            let dial = move || {
                Box::new(Caller::new(&address, &regions, &sockets)) as Box<dyn remote::Dial>
            };
            setups.push(PathSetup { pool, dial: Box::new(dial) });
            memory.push(Arc::new(region));
        }
        let bed = TenderBed::make(name)?;
        let multipath = Multipath::begin(setups, wishes(name), clock.now())
            .map_err(|error| Refused::caller(error.to_string()))?;
        let shared = Arc::new(Mutex::new(multipath));
        let teller = Arc::new(Teller::new(name));
        reach(name, &teller, &shared, &clock)?;
        lock(&shared).wakes(bed.pillow().bell());
        let (tended, told) = (Arc::clone(&shared), Arc::clone(&teller));
        let growth = Arc::new(Growth::default());
        let grown = Arc::clone(&growth);
        let thread = bed.begin(name, clock, |stop, pillow| Tender {
            shared: tended,
            stop,
            pillow,
            teller: told,
            growth: grown,
        })?;
        let (name, regions) = (name.clone(), regions.clone());
        Ok(Self { shared, thread, clock, name, teller, growth, regions, _memory: memory })
    }
}

impl Tended {
    fn check(&self, multipath: &Multipath, now: Instant) -> Result<(), Refused> {
        let address = &self.name.address;
        let refused = || Refused::peer(format!("tcp://{address}: all paths have been given up"));
        multipath.is_there(now).then_some(()).ok_or_else(refused)
    }

    /// A queue to the namespace that the paths lead to, and to no other.
    fn checked(&self, attached: Attached) -> Result<ReservationQueue, Refused> {
        let (found, expected) = (attached.identity(), self.identity());
        if found != expected {
            let text = |name: Option<String>| name.unwrap_or_else(|| "none".to_owned());
            let (found, expected) = (text(found), text(expected));
            return Err(Refused::peer(format!(
                "reserve tcp://{}: found namespace {found}, expected {expected}",
                self.name.address
            )));
        }
        ReservationQueue::of(attached)
    }
}

/// What the paths are asked for.
fn wishes(name: &TcpName) -> MultipathOptions {
    let techniques = Techniques::default();
    MultipathOptions {
        options: name.options.clone(),
        controller: ControllerOptions { queue_pairs: name.queues, ..ControllerOptions::default() },
        namespace: name.namespace,
        spread: name.spread,
        cache: name.cache,
        queue: QueuePairOptions { depth: name.depth + 1, vector: None, techniques },
        sizes: QueueSizes::default(),
    }
}

/// Waits until each path is up, or has been tried once in vain. Every wait on the way has an end.
fn reach(
    name: &TcpName,
    teller: &Teller,
    shared: &Mutex<Multipath>,
    clock: &Clock,
) -> Result<(), Refused> {
    let mut troubles: Vec<Option<String>> = vec![None; name.addresses().count()];
    loop {
        let now = clock.now();
        let mut multipath = lock(shared);
        let event = multipath.poll(now);
        if let Some(event) = &event {
            teller.tell(event);
        }
        match event {
            Some(PathEvent::Down { path, why } | PathEvent::Unfit { path, why }) => {
                troubles[path] = Some(why);
            }
            Some(_) => continue,
            None => {}
        }
        let is_known = |path: usize| multipath.access(path).is_some() || troubles[path].is_some();
        if (0..troubles.len()).all(is_known) {
            if (0..troubles.len()).any(|path| multipath.access(path).is_some()) {
                return Ok(());
            }
            let troubles = name.addresses().zip(&troubles);
            let each: Vec<String> = troubles
                .map(|(address, why)| format!("{address}: {}", why.as_deref().unwrap_or("")))
                .collect();
            let address = &name.address;
            let each = each.join("; ");
            return Err(Refused::peer(format!(
                "call tcp://{address}: no path leads there: {each}"
            )));
        }
        drop(multipath);
        host::thread::rest(PAUSE);
    }
}

fn lock(shared: &Mutex<Multipath>) -> MutexGuard<'_, Multipath> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Tended {
    fn drop(&mut self) {
        self.thread.end();
        let mut multipath = lock(&self.shared);
        multipath.shut_down(self.clock.now());
        wait_for_shutdown(&self.clock, |now| {
            // Nobody is left who would want to know.
            let _ = multipath.poll(now);
            multipath.is_shutting_down()
        });
    }
}

impl Queues for Tended {
    type Queue = MultipathQueue;
    type Ticket = QueueTicket;

    fn open_queue(&self) -> Result<QueueTicket, Refused> {
        let mut multipath = lock(&self.shared);
        self.check(&multipath, self.clock.now())?;
        let ticket = multipath.open_queue();
        drop(multipath);
        self.thread.wake();
        Ok(ticket)
    }

    /// With a connection on each path that is there.
    fn take_queue(&self, ticket: QueueTicket) -> Result<Option<MultipathQueue>, Refused> {
        let now = self.clock.now();
        let mut multipath = lock(&self.shared);
        if let Some(event) = multipath.poll(now) {
            hear(&event, &mut multipath, &self.teller, &self.growth);
        }
        self.check(&multipath, now)?;
        Ok(multipath.take_queue(ticket))
    }

    fn close_queue(&self, ticket: QueueTicket) {
        lock(&self.shared).close_queue(ticket);
    }

    fn is_up(&self) -> bool {
        lock(&self.shared).down_since().is_none()
    }

    fn with_sleep(queue: MultipathQueue, sleep: Box<dyn Sleep>) -> MultipathQueue {
        queue.with_sleep(sleep)
    }

    fn clock(&self) -> (&Clock, &Policy) {
        (&self.clock, &self.name.options.policy)
    }

    fn address(&self) -> &str {
        &self.name.address
    }

    fn queues_max(&self) -> u32 {
        self.name.queues.into()
    }

    fn takes_lent(&self) -> Result<u32, String> {
        self.name.takes_lent()
    }

    fn identity(&self) -> Option<String> {
        lock(&self.shared).namespace_name()
    }

    fn reserved(&self) -> Option<ReservedNamespace> {
        let mut multipath = lock(&self.shared);
        let nsid = self.name.namespace;
        let known = (0..multipath.paths()).find_map(|path| {
            Some(multipath.remote(path)?.controller().namespace(nsid)?.reservations)
        });
        drop(multipath);
        ReservedNamespace::of(&self.name, known?, &self.regions, self.clock)
    }

    /// A queue of a controller of its own: a reservation belongs to the host, whatever the path.
    fn reservation_queue(&self) -> Result<ReservationQueue, Refused> {
        let mut refused = None;
        for address in self.name.addresses() {
            let name = TcpName { address: address.to_owned(), ..self.name.to_one_queue() };
            let attached = Attached::call(&name, &self.regions, self.clock);
            match attached.and_then(|attached| self.checked(attached)) {
                Ok(queue) => return Ok(queue),
                Err(why) => refused = Some(why),
            }
        }
        Err(refused.unwrap_or_else(|| Refused::caller("a namespace without a path")))
    }

    fn growth(&self) -> &Growth {
        &self.growth
    }

    fn abandon(&self, queue: &mut MultipathQueue) -> bool {
        queue.abandon(self.clock.now())
    }
}

/// Something has happened.
fn hear(event: &PathEvent, multipath: &mut Multipath, teller: &Teller, growth: &Growth) {
    teller.tell(event);
    let is_resized = |event: &nvme::Event| matches!(event, nvme::Event::NamespaceResized { .. });
    if matches!(event, PathEvent::Controller { event, .. } if is_resized(event)) {
        // Whichever path a request takes leads to its blocks.
        if let Some(blocks) = multipath.block_count() {
            growth.has_now(blocks);
        }
    }
}

/// What the thread does.
struct Tender {
    shared: Arc<Mutex<Multipath>>,
    stop: Stop,
    pillow: Pillow,
    teller: Arc<Teller>,
    growth: Arc<Growth>,
}

impl Turn for Tender {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() {
            return Wait::Ended;
        }
        let mut multipath = lock(&self.shared);
        while let Some(event) = multipath.poll(now) {
            hear(&event, &mut multipath, &self.teller, &self.growth);
        }
        Wait::Until(multipath.wake_at(now).min(now.after(TENDED)))
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.pillow.clear();
        self.stop.is_stopped() || lock(&self.shared).arm(&mut self.pillow)
    }

    fn woken(&mut self, _: &[u64]) {
        lock(&self.shared).disarm();
    }
}
