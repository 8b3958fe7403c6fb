//! Doors, and the thread that stands at them.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use base::{Interrupts, Medium, Segment, Span};
use dma::{Backing, Mapping, Regions};
use host::pool::Pool;
use host::stream::{Address, Door, Stream};
use host::watch::{Interest, Ready, Watch};
use host::{Clock, EventVectors, Stop, Thread};
use reactor::{Directory, Registration, ThreadPlan};

use super::export::Export;
use super::guest::{Guest, GuestParts};
use super::memory::MEMORY_BYTES;
use super::survey::Survey;

/// What is served to whom by whom.
pub struct Plan {
    /// Where it listens.
    pub doors: Vec<Door>,
    /// What it is called and can do.
    pub export: Export,
    /// What it is.
    pub medium: Arc<dyn Medium>,
    /// Where the memory of connections lies; a place for each.
    pub regions: Regions,
    /// Who serves.
    pub reactors: Arc<Directory>,
    /// What deadlines are counted by: the reactors' own clock.
    pub clock: Clock,
    /// How many may be connected at once.
    pub connections_max: usize,
}

/// A medium that is served. Dropping it lets nobody in any more; who is in stays until the reactors
/// end, or as long as he likes.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<Address>,
    wake: EventVectors,
    thread: Option<Thread<()>>,
    told: Receiver<String>,
}

/// What the thread owns.
struct Hall {
    plan: Plan,
    export: Arc<Export>,
    watch: Watch,
    pool: Arc<Pool>,
    purse: Arc<Purse>,
    tell: Sender<String>,
    guests: u64,
}

/// Memory for connections: what one has left, the next one gets.
#[derive(Debug, Default)]
struct Purse {
    state: Mutex<PurseState>,
}

#[derive(Debug, Default)]
struct PurseState {
    idle: Vec<Segment>,
    lent: usize,
}

/// The memory of a connection. It goes back when the connection is gone.
#[derive(Debug)]
pub(super) struct Loan {
    purse: Arc<Purse>,
    memory: Segment,
    is_lost: bool,
}

/// Threads that find out what is where.
const SURVEYORS: usize = 2;
/// Questions that wait for them.
const QUESTIONS_MAX: usize = 1024;
/// How long nobody is let in after that went wrong, which is when descriptors have run out.
const ACCEPT_AGAIN: Span = Span::from_ms(100);

const WAKE: u64 = 0;
const FIRST_DOOR: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn start(plan: Plan) -> io::Result<Self> {
        let addresses = plan.doors.iter().map(|door| door.address().clone()).collect();
        let wake = EventVectors::new(1)?;
        let watch = Watch::new()?;
        watch.add(wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?, WAKE, READABLE)?;
        for (token, door) in (FIRST_DOOR..).zip(&plan.doors) {
            watch.add(door, token, READABLE)?;
        }
        let (tell, told) = channel();
        let hall = Hall {
            export: Arc::new(plan.export.clone()),
            plan,
            watch,
            pool: Arc::new(Pool::new(SURVEYORS, QUESTIONS_MAX)),
            purse: Arc::default(),
            tell,
            guests: 0,
        };
        let thread = Thread::spawn("nbd", None, move |stop| hall.serve(stop))?;
        Ok(Self { addresses, wake, thread: Some(thread), told })
    }

    /// Where it listens, with the ports that were picked.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The next thing that went wrong with a connection, in a line, if something did.
    pub fn next_trouble(&self) -> Option<String> {
        self.told.try_recv().ok()
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
                self.tell(format!("wait for connections: {error}"));
                return;
            }
            for found in &ready {
                let door = usize::try_from(found.token).unwrap_or(0).checked_sub(1);
                if let Some(door) = door {
                    self.accept(door);
                }
            }
        }
    }

    /// Lets in who waits at a door.
    fn accept(&mut self, door: usize) {
        match self.plan.doors[door].accept() {
            Ok(None) => {}
            Ok(Some(socket)) => {
                if let Err(text) = self.seat(socket) {
                    self.tell(format!("connect: {text}"));
                }
            }
            Err(error) => {
                self.tell(format!("accept: {error}"));
                host::thread::rest(ACCEPT_AGAIN);
            }
        }
    }

    fn seat(&mut self, socket: OwnedFd) -> Result<(), String> {
        let Plan { medium, regions, reactors, clock, connections_max, .. } = &self.plan;
        let most = (*connections_max).min(medium.channels_max() as usize);
        let loan = Loan::take(&self.purse, regions, most)?;
        let stream = Stream::new(socket, regions.clone()).map_err(|error| error.to_string())?;
        let guest = Guest::new(GuestParts {
            stream,
            backend: medium.channel()?,
            export: Arc::clone(&self.export),
            regions: regions.clone(),
            survey: Survey::new(Arc::clone(medium), Arc::clone(&self.pool)),
            loan,
            now: clock.now(),
        });
        let guest = guest.map_err(|error| error.to_string())?;
        let woken_by = guest.woken_by().map_err(|error| error.to_string())?;
        let name = format!("nbd-{}", self.guests);
        self.guests += 1;
        let registration = Registration::active("connection", woken_by, guest);
        let plan = ThreadPlan::new(&name).mailbox(MAILBOX).poller(registration);
        reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        Ok(())
    }

    /// Says what went wrong. If nobody listens, nobody wants to know.
    fn tell(&self, text: String) {
        let _ = self.tell.send(text);
    }
}

/// Messages to a connection's thread: there are hardly any.
const MAILBOX: usize = 16;

impl Loan {
    fn take(purse: &Arc<Purse>, regions: &Regions, most: usize) -> Result<Self, String> {
        let mut state = purse.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.lent >= most {
            return Err(format!("{most} are connected, expected fewer"));
        }
        let memory = match state.idle.pop() {
            Some(memory) => memory,
            None => {
                let mapping = Mapping::new(MEMORY_BYTES as usize, Backing::Private);
                let mapping = mapping.map_err(|error| error.to_string())?;
                regions.add(mapping).map_err(|error| error.to_string())?
            }
        };
        state.lent += 1;
        Ok(Self { purse: Arc::clone(purse), memory, is_lost: false })
    }

    pub(super) fn memory(&self) -> Segment {
        self.memory
    }

    /// The memory is never used again.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut state = self.purse.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.lent -= 1;
        if !self.is_lost {
            state.idle.push(self.memory);
        }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Plan").field("doors", &self.doors).finish_non_exhaustive()
    }
}
