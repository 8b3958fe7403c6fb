//! A service at its doors: who comes in is given a reactor.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dma::Regions;
use host::Clock;
use host::socket::{self, Address, Door, SocketOptions, Sockets};
use reactor::{Directory, ReactorId, Registration, ThreadPlan};

use super::news::News;
use super::service::Service;
use crate::hall::{Hall, Keeper};

/// What is served by whom.
pub struct ServerPlan {
    /// Where it listens, and which port of the service that is.
    pub doors: Vec<(Door, u16)>,
    /// What it serves.
    pub service: Service,
    /// Where the memory of the service lies.
    pub regions: Regions,
    /// How sockets are made.
    pub sockets: SocketOptions,
    /// Who gets a connection.
    pub placement: Placement,
    /// Who serves.
    pub reactors: Arc<Directory>,
    /// What deadlines are counted by: the reactors' own clock.
    pub clock: Clock,
}

/// Which reactor a connection is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The one on the processor that handles what comes for its socket; the next, if that is none.
    #[default]
    Near,
    /// The same for all whose packets come by one receive queue (NAPI), and the next for the first of
    /// them; without a queue, as on loopback, as [`Near`](Self::Near).
    Queue,
    /// The next, whatever comes where.
    Spread,
}

/// A service at its doors. Dropping it lets nobody in any more; who is in stays until the reactors
/// end, or as long as he likes.
#[derive(Debug)]
pub struct Server {
    pub(super) ushers: Arc<Ushers>,
    /// By the number of the port: a thread at each door.
    halls: BTreeMap<u16, Hall>,
}

/// What the threads share.
pub(super) struct Ushers {
    plan: ServerPlan,
    /// The sockets of each reactor.
    sockets: Vec<(ReactorId, Sockets)>,
    next: AtomicUsize,
    /// Whose connections come by which receive queue.
    queues: Mutex<BTreeMap<u32, usize>>,
    /// It was told that there are connections without one.
    is_told_without: AtomicBool,
}

/// What a thread owns.
struct Usher {
    ushers: Arc<Ushers>,
    /// Which port of the service its door is.
    port: u16,
}

/// Messages to a connection's thread: there are hardly any.
const MAILBOX: usize = 16;

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn start(mut plan: ServerPlan) -> io::Result<Self> {
        let sockets = |reactor| (reactor, Sockets::new(plan.regions.clone(), plan.sockets.clone()));
        let sockets = plan.reactors.reactors().map(sockets).collect();
        let doors = std::mem::take(&mut plan.doors);
        let ushers = Arc::new(Ushers {
            plan,
            sockets,
            next: AtomicUsize::new(0),
            queues: Mutex::default(),
            is_told_without: AtomicBool::new(false),
        });
        let mut server = Self { ushers, halls: BTreeMap::new() };
        for (door, port) in doors {
            server.open(door, port)?;
        }
        Ok(server)
    }

    /// Lets in who comes by this door as well, which is this port of the service, in place of the one
    /// that was it before.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn open(&mut self, door: Door, port: u16) -> io::Result<()> {
        let usher = Usher { ushers: Arc::clone(&self.ushers), port };
        self.halls.insert(port, Hall::open("nvme-tcp", vec![door], None, usher)?);
        Ok(())
    }

    /// Lets nobody in any more by this port. Who is in stays.
    pub fn close(&mut self, port: u16) {
        self.halls.remove(&port);
    }

    /// Where it listens, with the ports that were picked, in the order of the service's numbers.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.halls.values().flat_map(|hall| hall.addresses().iter().cloned()).collect()
    }
}

impl Keeper for Usher {
    fn seat(&mut self, socket: OwnedFd, _: usize) -> Result<(), String> {
        let (reactor, sockets) = self.ushers.place(&socket);
        let stream = sockets.stream(socket).map_err(|why| why.to_string())?;
        let is_tied = stream.is_tied();
        let ServerPlan { service, reactors, clock, .. } = &self.ushers.plan;
        let mut guest = service.accept(stream, self.port, clock.now())?;
        let woken_by = guest.make_bed().map_err(|error| error.to_string())?;
        let seat = Arc::clone(guest.seat());
        let name = format!("tcp-{}", guest.id());
        let registration = Registration::active("connection", woken_by, guest);
        let registration = match is_tied {
            true => registration.tied("its socket belongs to the io_uring of that reactor"),
            false => registration,
        };
        let plan = ThreadPlan::new(&name).on(reactor).mailbox(MAILBOX).poller(registration);
        let home = reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        seat.settle(home);
        Ok(())
    }

    fn trouble(&self, text: String) {
        self.ushers.plan.service.tell(News::Notice(text));
    }
}

impl Ushers {
    /// Who is given a connection.
    fn place(&self, socket: &OwnedFd) -> (ReactorId, Sockets) {
        let place = match self.plan.placement {
            Placement::Spread => None,
            Placement::Near => self.near(socket::Placement::of(socket).cpu),
            Placement::Queue => self.behind(socket::Placement::of(socket)),
        };
        self.sockets[place.unwrap_or_else(|| self.next())].clone()
    }

    fn next(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.sockets.len()
    }

    fn near(&self, cpu: Option<u32>) -> Option<usize> {
        let near = self.plan.reactors.reactor_on(cpu?)?;
        self.sockets.iter().position(|(id, _)| *id == near)
    }

    /// Whoever has the connections of the same receive queue.
    pub(super) fn behind(&self, placement: socket::Placement) -> Option<usize> {
        let Some(queue) = placement.napi_id else {
            if !self.is_told_without.swap(true, Ordering::Relaxed) {
                self.plan.service.tell(News::Trouble(WITHOUT_QUEUE.to_owned()));
            }
            return self.near(placement.cpu);
        };
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        Some(*queues.entry(queue).or_insert_with(|| self.next()))
    }
}

/// What is said where connections are to be placed by something that they have not.
const WITHOUT_QUEUE: &str = "a connection has no receive queue (SO_INCOMING_NAPI_ID is 0, as on \
     loopback), expected one for placement=queue: such connections go to the reactor on the processor \
     that handles their packets";

impl fmt::Debug for Ushers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ushers").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerPlan").field("doors", &self.doors).finish_non_exhaustive()
    }
}
