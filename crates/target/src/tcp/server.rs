//! Doors, and the thread that stands at them.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::{Interrupts, Span};
use dma::Regions;
use host::socket::{Address, Door, Placement, SocketOptions, Sockets};
use host::watch::{Interest, Ready, Watch};
use host::{Clock, EventVectors, Stop, Thread};
use reactor::{Directory, ReactorId, Registration, ThreadPlan};

use super::news::News;
use super::service::Service;

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
pub struct Server {
    addresses: Vec<Address>,
    wake: EventVectors,
    thread: Option<Thread<()>>,
}

/// What the thread owns.
struct Hall {
    plan: ServerPlan,
    watch: Watch,
    /// The sockets of each reactor.
    sockets: Vec<(ReactorId, Sockets)>,
    next: usize,
}

/// How long nobody is let in after that went wrong, which is when descriptors have run out.
const ACCEPT_AGAIN: Span = Span::from_ms(100);
/// Messages to a connection's thread: there are hardly any.
const MAILBOX: usize = 16;
const WAKE: u64 = 0;
const FIRST_DOOR: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn start(plan: ServerPlan) -> io::Result<Self> {
        let addresses = plan.doors.iter().map(|(door, _)| door.address().clone()).collect();
        let wake = EventVectors::new(1)?;
        let watch = Watch::new()?;
        watch.add(wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?, WAKE, READABLE)?;
        for (token, (door, _)) in (FIRST_DOOR..).zip(&plan.doors) {
            watch.add(door, token, READABLE)?;
        }
        let sockets = |reactor| (reactor, Sockets::new(plan.regions.clone(), plan.sockets.clone()));
        let sockets = plan.reactors.reactors().map(sockets).collect();
        let hall = Hall { plan, watch, sockets, next: 0 };
        let thread = Thread::spawn("nvme-tcp", None, move |stop| hall.serve(stop))?;
        Ok(Self { addresses, wake, thread: Some(thread) })
    }

    /// Where it listens, with the ports that were picked.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().stop();
        self.wake.raise(0);
        // Its own drop waits for its end.
        drop(thread);
    }
}

impl Hall {
    fn serve(mut self, stop: &Stop) {
        let mut ready: Vec<Ready> = Vec::new();
        while !stop.is_stopped() {
            if let Err(error) = self.watch.wait(None, &mut ready) {
                // Without its watch it could only spin.
                self.trouble(format!("wait for connections: {error}"));
                return;
            }
            for found in &ready {
                if let Some(door) = found.token.checked_sub(FIRST_DOOR) {
                    self.accept(usize::try_from(door).unwrap_or(0));
                }
            }
        }
    }

    /// Lets in who waits at a door.
    fn accept(&mut self, door: usize) {
        match self.plan.doors[door].0.accept() {
            Ok(None) => {}
            Ok(Some(socket)) => {
                if let Err(text) = self.seat(socket, self.plan.doors[door].1) {
                    self.trouble(format!("connect: {text}"));
                }
            }
            Err(error) => {
                self.trouble(format!("accept: {error}"));
                host::thread::rest(ACCEPT_AGAIN);
            }
        }
    }

    fn seat(&mut self, socket: OwnedFd, port: u16) -> Result<(), String> {
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

    fn trouble(&self, text: String) {
        self.plan.service.tell(News::Trouble(text));
    }
}

impl fmt::Debug for ServerPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerPlan").field("doors", &self.doors).finish_non_exhaustive()
    }
}
