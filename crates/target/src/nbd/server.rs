//! An export at its doors: who comes in is given memory and a thread.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Segment, Span};
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
use crate::address::network_of_peer;
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
    /// How many of them from one address (of IPv6, one /64). A Unix socket has none.
    pub per_address_max: usize,
    /// How long a client may ask for nothing. None: as long as its end of the connection is there.
    pub idle_max: Option<Span>,
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
    lent: Arc<Lent>,
    tell: Sender<News>,
}

/// The memory of a connection. It goes with the connection.
#[derive(Debug)]
pub(super) struct Loan {
    lent: Arc<Lent>,
    address: Option<IpAddr>,
    /// None once it is lost.
    memory: Option<Region>,
}

/// How many connections there are.
#[derive(Debug, Default)]
pub(super) struct Lent(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    addresses: BTreeMap<IpAddr, usize>,
}

impl Lent {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let Plan { served, regions, reactors, clock, .. } = &self.plan;
        let Plan { connections_max, per_address_max, .. } = &self.plan;
        let medium = served.medium();
        let most = (*connections_max).min(medium.channels_max() as usize);
        let stream = Stream::new(socket, regions.clone()).map_err(|error| error.to_string())?;
        let loan = Loan::take(&self.lent, regions, &stream.peer(), (most, *per_address_max))?;
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
            idle_max: self.plan.idle_max,
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
        lent: &Arc<Lent>,
        regions: &Regions,
        peer: &str,
        (most, most_of_address): (usize, usize),
    ) -> Result<Self, String> {
        let address = network_of_peer(peer);
        // Only the thread at the doors adds.
        let (all, of_address) = {
            let counts = lent.counts();
            let of_address = address.and_then(|address| counts.addresses.get(&address)).copied();
            (counts.all, of_address.unwrap_or(0))
        };
        if all >= most {
            return Err(format!(
                "{most} are connected, expected fewer (`--connections` allows more)"
            ));
        }
        if of_address >= most_of_address {
            return Err(format!(
                "connection of {peer}: {most_of_address} of its address are connected, expected fewer \
                 (`--connections-per-address` allows more)"
            ));
        }
        let memory = regions.allocate(MEMORY_BYTES as usize).map_err(|error| error.to_string())?;
        let mut counts = lent.counts();
        counts.all += 1;
        if let Some(address) = address {
            *counts.addresses.entry(address).or_default() += 1;
        }
        drop(counts);
        Ok(Self { lent: Arc::clone(lent), address, memory: Some(memory) })
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
        let mut counts = self.lent.counts();
        counts.all -= 1;
        if let Some(address) = self.address
            && let Some(count) = counts.addresses.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                counts.addresses.remove(&address);
            }
        }
    }
}

impl Plan {
    /// How many connections one address may have of so many: half of them, and a few in any case.
    #[must_use]
    pub const fn per_address_max_of(connections_max: usize) -> usize {
        if connections_max / 2 > PER_ADDRESS_MIN { connections_max / 2 } else { PER_ADDRESS_MIN }
    }
}

/// Connections that one client opens for itself: what stock ones do at most.
const PER_ADDRESS_MIN: usize = 16;

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Plan").field("doors", &self.doors).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dma::Regions;

    use super::{Lent, Loan, Plan};

    #[test]
    fn one_address_does_not_take_all_connections_and_gives_its_own_back() {
        let (lent, regions) = (Arc::<Lent>::default(), Regions::new(64));
        let take = |peer: &str| Loan::take(&lent, &regions, peer, (6, 2));
        let one = take("127.0.0.1:1").unwrap();
        let _two = take("127.0.0.1:2").unwrap();
        let refused = take("127.0.0.1:3").unwrap_err();
        let expected = "connection of 127.0.0.1:3: 2 of its address are connected, expected fewer \
                        (`--connections-per-address` allows more)";
        assert_eq!(refused, expected);
        // IPv6 by its /64; a Unix socket has no address, and nobody but its owner.
        let _others = ["[2001:db8::1]:1", "[2001:db8::2]:1"].map(|peer| take(peer).unwrap());
        assert!(take("[2001:db8::3]:1").is_err());
        let _local = ["process 7", "process 7"].map(|peer| take(peer).unwrap());
        assert!(take("process 8").unwrap_err().contains("6 are connected"));
        drop(one);
        assert!(take("127.0.0.1:3").is_ok());
    }

    #[test]
    fn one_address_has_half_and_what_a_client_opens_for_itself() {
        assert_eq!([2, 64, 1000].map(Plan::per_address_max_of), [16, 32, 500]);
    }
}
