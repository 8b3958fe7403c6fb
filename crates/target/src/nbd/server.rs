//! Doors, and the thread that stands at them.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use base::{Interrupts, Segment, Span};
use block::Event;
use dma::{Region, Regions};
use host::pool::Pool;
use host::stream::{Address, Door, Stream};
use host::watch::{Interest, Ready, Watch};
use host::{Clock, EventVectors, Stop, Thread};
use reactor::{Directory, Registration, ThreadPlan};

use super::guest::{Guest, GuestParts};
use super::memory::MEMORY_BYTES;
use super::seat::{News, Seat};
use super::served::Served;
use super::survey::Survey;

/// What is served to whom by whom.
pub struct Plan {
    /// Where it listens.
    pub doors: Vec<Door>,
    /// What it serves.
    pub served: Arc<Served>,
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
    told: Receiver<News>,
}

/// What the thread owns.
struct Hall {
    plan: Plan,
    watch: Watch,
    pool: Arc<Pool>,
    lent: Arc<AtomicUsize>,
    tell: Sender<News>,
}

/// The memory of a connection. It goes with the connection.
#[derive(Debug)]
pub(super) struct Loan {
    lent: Arc<AtomicUsize>,
    /// None once it is lost.
    memory: Option<Region>,
}

/// Threads that find out what is where.
const SURVEYORS: usize = 2;
/// Questions that wait for them.
const QUESTIONS_MAX: usize = 1024;
/// How long nobody is let in after that went wrong, which is when descriptors have run out.
const ACCEPT_AGAIN: Span = Span::from_ms(100);

const WAKE: u64 = 0;
const DEVICE: u64 = 1;
const FIRST_DOOR: u64 = 2;
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
        if let Some(events) = plan.served.descriptor().event_source() {
            watch.add(events, DEVICE, READABLE)?;
        }
        for (token, door) in (FIRST_DOOR..).zip(&plan.doors) {
            watch.add(door, token, READABLE)?;
        }
        let (tell, told) = channel();
        let hall = Hall {
            plan,
            watch,
            pool: Arc::new(Pool::new(SURVEYORS, QUESTIONS_MAX)),
            lent: Arc::default(),
            tell,
        };
        let thread = Thread::spawn("nbd", None, move |stop| hall.serve(stop))?;
        Ok(Self { addresses, wake, thread: Some(thread), told })
    }

    /// Where it listens, with the ports that were picked.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The next thing that has happened, if something has.
    pub fn next_news(&self) -> Option<News> {
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
                self.tell(News::Trouble(format!("wait for connections: {error}")));
                return;
            }
            for found in &ready {
                match found.token {
                    WAKE => {}
                    DEVICE => self.hear(),
                    door => self.accept(usize::try_from(door - FIRST_DOOR).unwrap_or(0)),
                }
            }
        }
    }

    /// Passes on what has happened to the device.
    fn hear(&self) {
        let served = &self.plan.served;
        while let Some(event) = served.descriptor().next_event() {
            served.obey(&event);
            match event {
                Event::Resized { .. } | Event::Overflowed { .. } => {
                    self.tell(News::Resized { size_bytes: served.export().size_bytes() });
                }
                Event::Removed => self.tell(News::Removed),
                Event::MediumError { lba, blocks } => {
                    let text = format!("the medium has lost {blocks} blocks from {lba} on");
                    self.tell(News::Trouble(text));
                }
                Event::MediumChanged => {
                    self.tell(News::Trouble("the medium has been changed".to_owned()));
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
                    self.tell(News::Trouble(format!("connect: {text}")));
                }
            }
            Err(error) => {
                self.tell(News::Trouble(format!("accept: {error}")));
                host::thread::rest(ACCEPT_AGAIN);
            }
        }
    }

    fn seat(&mut self, socket: OwnedFd) -> Result<(), String> {
        let Plan { served, regions, reactors, clock, connections_max, .. } = &self.plan;
        let medium = served.medium();
        let most = (*connections_max).min(medium.channels_max() as usize);
        let loan = Loan::take(&self.lent, regions, most)?;
        let stream = Stream::new(socket, regions.clone()).map_err(|error| error.to_string())?;
        let id = served.next_connection();
        let seat = Arc::new(Seat::new(id, stream.peer(), self.tell.clone()));
        let guest = Guest::new(GuestParts {
            stream,
            backend: medium.channel()?,
            served: Arc::clone(served),
            seat: Arc::clone(&seat),
            regions: regions.clone(),
            survey: Survey::new(Arc::clone(medium), Arc::clone(&self.pool)),
            loan,
            now: clock.now(),
        });
        let guest = guest.map_err(|error| error.to_string())?;
        let woken_by = guest.woken_by().map_err(|error| error.to_string())?;
        seat.has_come();
        served.enter(seat);
        let registration = Registration::active("connection", woken_by, guest);
        let plan = ThreadPlan::new(&format!("nbd-{id}")).mailbox(MAILBOX).poller(registration);
        let home = reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        served.settle(id, home);
        Ok(())
    }

    /// Says what went wrong. If nobody listens, nobody wants to know.
    fn tell(&self, news: News) {
        let _ = self.tell.send(news);
    }
}

/// Messages to a connection's thread: there are hardly any.
const MAILBOX: usize = 16;

impl Loan {
    fn take(lent: &Arc<AtomicUsize>, regions: &Regions, most: usize) -> Result<Self, String> {
        if lent.load(Ordering::Relaxed) >= most {
            return Err(format!("{most} are connected, expected fewer"));
        }
        let memory = regions.allocate(MEMORY_BYTES as usize).map_err(|error| error.to_string())?;
        // Only the thread at the doors adds.
        lent.fetch_add(1, Ordering::Relaxed);
        Ok(Self { lent: Arc::clone(lent), memory: Some(memory) })
    }

    pub(super) fn memory(&self) -> Segment {
        self.memory.as_ref().map_or_else(Segment::default, Region::segment)
    }

    /// The memory is never used again, and never given back.
    pub(super) fn lose(&mut self) {
        std::mem::forget(self.memory.take());
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Plan").field("doors", &self.doors).finish_non_exhaustive()
    }
}
