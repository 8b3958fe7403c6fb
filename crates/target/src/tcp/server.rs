//! A service at its doors: who comes in is given a reactor.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dma::Regions;
use host::Clock;
use host::socket::{Address, Door, Placement, SocketOptions, Sockets};
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
    /// Who serves.
    pub reactors: Arc<Directory>,
    /// What deadlines are counted by: the reactors' own clock.
    pub clock: Clock,
}

/// A service at its doors. Dropping it lets nobody in any more; who is in stays until the reactors
/// end, or as long as he likes.
#[derive(Debug)]
pub struct Server(Hall);

/// What the thread owns.
struct Usher {
    plan: ServerPlan,
    /// Which port of the service each door is.
    ports: Vec<u16>,
    /// The sockets of each reactor.
    sockets: Vec<(ReactorId, Sockets)>,
    next: usize,
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
        let (doors, ports) = std::mem::take(&mut plan.doors).into_iter().unzip();
        let usher = Usher { plan, ports, sockets, next: 0 };
        Ok(Self(Hall::open("nvme-tcp", doors, None, usher)?))
    }

    /// Where it listens, with the ports that were picked.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        self.0.addresses()
    }
}

impl Keeper for Usher {
    fn seat(&mut self, socket: OwnedFd, door: usize) -> Result<(), String> {
        let port = self.ports[door];
        let (reactor, sockets) = self.place(&socket);
        let stream = sockets.stream(socket).map_err(|why| why.to_string())?;
        let ServerPlan { service, reactors, clock, .. } = &self.plan;
        let mut guest = service.accept(stream, port, clock.now())?;
        let woken_by = guest.make_bed().map_err(|error| error.to_string())?;
        let seat = Arc::clone(guest.seat());
        let name = format!("tcp-{}", guest.id());
        let registration = Registration::active("connection", woken_by, guest);
        let plan = ThreadPlan::new(&name).on(reactor).mailbox(MAILBOX).poller(registration);
        let home = reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        seat.settle(home);
        Ok(())
    }

    fn trouble(&self, text: String) {
        self.plan.service.tell(News::Trouble(text));
    }
}

impl Usher {
    /// The reactor on the processor that handles what comes for a socket, or the next.
    fn place(&mut self, socket: &OwnedFd) -> (ReactorId, Sockets) {
        let cpu = Placement::of(socket).cpu;
        let near = cpu.and_then(|cpu| self.plan.reactors.reactor_on(cpu));
        let near = near.and_then(|near| self.sockets.iter().position(|(id, _)| *id == near));
        let at = near.unwrap_or_else(|| {
            self.next = (self.next + 1) % self.sockets.len();
            self.next
        });
        self.sockets[at].clone()
    }
}

impl fmt::Debug for ServerPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerPlan").field("doors", &self.doors).finish_non_exhaustive()
    }
}
