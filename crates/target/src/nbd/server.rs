//! An export at its doors: who comes in is given memory and a thread.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use base::Segment;
use block::Event;
use dma::{Region, Regions};
use host::Clock;
use host::pool::Pool;
use host::stream::{Address, Door, Stream};
use reactor::{Directory, Registration, ThreadPlan};

use super::guest::{Guest, GuestParts};
use super::memory::MEMORY_BYTES;
use super::pool::{POOL_BYTES, Pool as Memory};
use super::seat::{News, Seat};
use super::served::Served;
use super::survey::Survey;
use crate::hall::{Hall, Keeper};

/// What is served to whom by whom.
pub struct Plan {
    /// Where it listens.
    pub doors: Vec<Door>,
    /// What it serves.
    pub served: Arc<Served>,
    /// Where the memory of connections lies; a place for each, and one for what they share.
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
    hall: Hall,
    told: Receiver<News>,
}

/// What the thread owns.
struct Usher {
    plan: Plan,
    pool: Arc<Pool>,
    /// Memory for large requests of all.
    memory: Arc<Memory>,
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

/// Threads that answer questions: what is where, whether it may be longer.
const SURVEYORS: usize = 2;
/// Questions that wait for them.
const QUESTIONS_MAX: usize = 1024;

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn start(mut plan: Plan) -> io::Result<Self> {
        let (tell, told) = channel();
        let doors = std::mem::take(&mut plan.doors);
        let served = Arc::clone(&plan.served);
        let pool = Arc::new(Pool::new(SURVEYORS, QUESTIONS_MAX));
        let memory = Memory::new(&plan.regions, POOL_BYTES)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let memory = Arc::new(memory);
        let usher = Usher { plan, pool, memory, lent: Arc::default(), tell };
        let hall = Hall::open("nbd", doors, served.descriptor().event_source(), usher)?;
        Ok(Self { hall, told })
    }

    /// Where it listens, with the ports that were picked.
    pub fn addresses(&self) -> &[Address] {
        self.hall.addresses()
    }

    /// The next thing that has happened, if something has.
    pub fn next_news(&self) -> Option<News> {
        self.told.try_recv().ok()
    }
}

impl Keeper for Usher {
    /// Passes on what has happened to the device.
    fn hear(&mut self) {
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

    fn seat(&mut self, socket: OwnedFd, _: usize) -> Result<(), String> {
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
            survey: Survey::new(Arc::clone(served), Arc::clone(&self.pool)),
            loan,
            pool: Arc::clone(&self.memory),
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

    fn trouble(&self, text: String) {
        self.tell(News::Trouble(text));
    }
}

impl Usher {
    fn tell(&self, news: News) {
        // If nobody listens, nobody wants to know.
        let _ = self.tell.send(news);
    }
}

/// Messages to a connection's thread: there are hardly any.
const MAILBOX: usize = 16;

impl Loan {
    pub(super) fn take(
        lent: &Arc<AtomicUsize>,
        regions: &Regions,
        most: usize,
    ) -> Result<Self, String> {
        if lent.load(Ordering::Relaxed) >= most {
            return Err(format!(
                "{most} are connected, expected fewer (`--connections` allows more)"
            ));
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
