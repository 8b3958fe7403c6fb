//! A device on a reactor: what is looked at when, and how it sleeps.

use std::io;
use std::os::fd::AsFd;

use base::{Instant, Span};
use ctrl::front::Wait;
use host::local_socket::Connection;
use host::stream::Door;
use host::watch::{Interest, Ready, Watch};
use reactor::{Context, Found, MeanLatency, Parting, Poller, WokenBy};

use super::guest::{Guest, PATIENCE};
use super::visitors::Visitors;

/// A door, and the device behind it.
pub(super) struct Host {
    door: Door,
    guest: Guest,
    visitors: Visitors,
    watch: Watch,
    /// What was found by the watch last.
    ready: Vec<Ready>,
    /// What is waited for of the client's socket, if it is watched.
    watched: Option<Interest>,
    /// What could not be listened to: while there is any, it must not sleep.
    unheard: Unheard,
    /// Nobody is let in before: there are no descriptors for it.
    door_at: Option<Instant>,
    now: Instant,
    /// When sockets are looked at next.
    look_at: Instant,
    turns: u32,
    /// Until when the controller has nothing to do by itself.
    until: Instant,
    /// I/O commands under way, as of the last turn that changed anything, and what they take.
    under_way: usize,
    latency: MeanLatency,
}

#[derive(Default)]
struct Unheard {
    door: bool,
    client: bool,
    media: bool,
    visitors: bool,
}

const DOOR: u64 = 0;
const CLIENT: u64 = 1;
const MEDIUM: u64 = 2;
const VISITOR: u64 = 3;
const READABLE: Interest = Interest { readable: true, writable: false };
const NOTHING: Interest = Interest { readable: false, writable: false };

/// While there is work, sockets are looked at so often: a look is a system call.
const LOOK: Span = Span::from_us(50);
/// Memory that was taken back is looked for every so many turns; a power of two.
const MEMORY_TURNS: u32 = 256;

impl Unheard {
    fn is_any(&self) -> bool {
        self.door || self.client || self.media || self.visitors
    }
}

impl Host {
    pub(super) fn new(door: Door, guest: Guest) -> io::Result<Self> {
        let watch = Watch::new()?;
        watch.add(&door, DOOR, READABLE)?;
        let (visitors, ready, now) = (Visitors::default(), Vec::new(), Instant::default());
        Ok(Self {
            door,
            guest,
            visitors,
            watch,
            ready,
            watched: None,
            unheard: Unheard::default(),
            door_at: None,
            now,
            look_at: now,
            turns: 0,
            until: now,
            under_way: 0,
            latency: MeanLatency::default(),
        })
    }

    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        Ok(WokenBy::Descriptor(self.watch.as_fd().try_clone_to_owned()?))
    }

    /// Looks at the door and the sockets. One call says which of them have something: a door in vain
    /// is the dearer call, for it makes a socket first.
    fn look(&mut self, now: Instant) -> usize {
        self.watch_session();
        let mut ready = std::mem::take(&mut self.ready);
        // What is not watched is looked at by itself.
        let is_blind = self.watch.wait(Some(Span::default()), &mut ready).is_err();
        let has = |token, is_unheard| {
            is_blind || is_unheard || ready.iter().any(|found| found.token == token)
        };
        let (client, door) = (has(CLIENT, self.unheard.client), has(DOOR, self.unheard.door));
        self.ready = ready;
        let mut count = if client { self.guest.hear(now) } else { 0 };
        count += self.guest.expire(now);
        if !self.visitors.is_empty() {
            self.visitors.turn(now);
            self.unheard.visitors &= !self.visitors.is_empty();
        }
        if self.guest.is_leaving() {
            return count;
        }
        if self.door_at.is_some_and(|at| at <= now) {
            self.door_at = None;
            let opened = self.watch.change(&self.door, DOOR, READABLE);
            self.unheard.door = opened.is_err();
        }
        while door && self.door_at.is_none() {
            match self.door.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    count += 1;
                    self.let_in(now, Connection::from(socket));
                }
                // Whoever knocks goes on knocking, and would keep the thread awake.
                Err(_) => {
                    self.door_at = Some(now.after(PATIENCE));
                    let _ = self.watch.change(&self.door, DOOR, NOTHING);
                }
            }
        }
        count
    }

    fn let_in(&mut self, now: Instant, connection: Connection) {
        if self.guest.is_free() {
            self.guest.enter(now, connection);
            self.watched = None;
        } else if let Some(socket) = self.visitors.receive(now, connection) {
            let added = self.watch.add(socket, VISITOR, READABLE);
            self.unheard.visitors |= added.is_err();
        }
    }

    /// Has the watch know the socket that there is now, and what is waited for.
    fn watch_session(&mut self) {
        if let Some(socket) = self.guest.parting() {
            // It would say for ever that its other end has gone. One that is not in the set is none.
            let _ = self.watch.remove(socket);
        }
        let Some((socket, interest)) = self.guest.wanted() else {
            (self.watched, self.unheard.client) = (None, false);
            return;
        };
        let result = match self.watched {
            None => self.watch.add(socket, CLIENT, interest),
            Some(watched) if watched == interest => return,
            Some(_) => self.watch.change(socket, CLIENT, interest),
        };
        (self.watched, self.unheard.client) = (Some(interest), result.is_err());
    }

    /// What was begun and what has ended in turns of the controller.
    fn count(&mut self) {
        let front = &mut self.guest.device.front;
        let ended = usize::try_from(front.take_ended()).unwrap_or(usize::MAX);
        self.latency.end(ended);
        self.under_way = front.in_flight();
    }

    /// Does a bounded amount of work. How much that was.
    pub(super) fn work(&mut self, now: Instant) -> usize {
        self.latency.pass(now, self.under_way);
        self.now = now;
        self.turns = self.turns.wrapping_add(1);
        let wait = self.guest.device.turn(now);
        let mut count = usize::from(wait == Wait::Busy);
        if count > 0 {
            self.count();
        }
        self.until = match wait {
            Wait::Busy => now,
            Wait::Pending(until) | Wait::Idle(until) => until,
        };
        let may_be_late = count > 0 || self.guest.device.maps_doorbells();
        if !may_be_late || now >= self.look_at {
            self.look_at = now.after(LOOK);
            count += self.look(now);
        }
        count += self.guest.go_on(now);
        if self.turns & (MEMORY_TURNS - 1) == 0 {
            self.guest.look_after_memory(now);
        }
        count
    }
}

impl Poller for Host {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        Found::from_count(self.work(context.now()))
    }

    fn arm(&mut self) -> Found {
        let now = self.now;
        self.watch_session();
        self.guest.look_after_memory(now);
        let Self { guest, watch, unheard, .. } = self;
        let until = guest.device.front.arm(now);
        guest.device.front.new_descriptors(|descriptor| {
            unheard.media |= watch.add(descriptor, MEDIUM, READABLE).is_err();
        });
        self.until = until.unwrap_or(now);
        self.count();
        let mut has_news = until.is_none() || self.unheard.is_any();
        has_news |= self.guest.is_in_motion();
        has_news |= self.look(now) > 0 || self.guest.go_on(now) > 0;
        self.watch_session();
        Found::from_count(usize::from(has_news))
    }

    fn disarm(&mut self) {
        self.guest.device.front.disarm();
        self.ready.clear();
        self.look_at = Instant::default();
    }

    fn wake_at(&self) -> Instant {
        let door_at = self.door_at.unwrap_or(Instant::NEVER);
        self.until.min(self.visitors.wake_at()).min(door_at).min(self.guest.wake_at())
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.under_way > 0)
    }

    fn detach(&mut self, parting: Parting) -> bool {
        match parting {
            Parting::Moves => true,
            Parting::Ends => {
                self.guest.leave(self.now);
                !self.guest.is_leaving()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;

    use base::{Instant, Medium, Span};
    use block::Ram;
    use dma::Regions;
    use host::local_socket::Connection;
    use host::stream::{Address, Door};
    use reactor::{Found, Poller};

    use super::{Guest, Host};
    use crate::vfu::DeviceOptions;
    use crate::vfu::device::Device;
    use crate::vfu::lines::Lines;
    use crate::vfu::memory::Maps;

    const PATIENCE: Span = Span::from_secs(20);

    /// A host that nobody drives but the test, and where its door is.
    fn host() -> (Host, tempfile::TempDir) {
        let (regions, now) = (Regions::new(16), Instant::default());
        let directory = tempfile::tempdir().unwrap();
        let door = Door::open(&Address::Path(directory.path().join("door"))).unwrap();
        let ram: Arc<dyn Medium> = Arc::new(Ram::new(&regions, 512, 8).unwrap());
        let (maps, lines, options) =
            (Maps::new(regions.clone()), Lines::new(3), DeviceOptions::default());
        let options = DeviceOptions { queues: 2, ..options };
        let device = Device::new(vec![ram], &options, &maps, lines.clone(), &regions, now).unwrap();
        let guest = Guest::new(device, maps, lines, regions, sync_channel(4).0);
        (Host::new(door, guest).unwrap(), directory)
    }

    fn connect(directory: &tempfile::TempDir) -> Connection {
        Connection::connect(&directory.path().join("door"), PATIENCE).unwrap()
    }

    /// Arms until there is nothing left to do: false if that never is.
    fn may_sleep(host: &mut Host) -> bool {
        for _ in 0..100 {
            let found = host.arm();
            let mut ready = Vec::new();
            host.watch.wait(Some(Span::default()), &mut ready).unwrap();
            if found == Found::Nothing && ready.is_empty() {
                return true;
            }
            host.disarm();
        }
        false
    }

    #[test]
    fn a_host_sleeps_however_many_say_nothing_at_its_door() {
        let (mut host, directory) = host();
        assert!(may_sleep(&mut host), "nobody is there");
        let clients: Vec<Connection> = (0..12).map(|_| connect(&directory)).collect();
        assert!(may_sleep(&mut host), "one has it, and others wait");
        drop(clients);
    }

    #[test]
    fn a_client_that_says_nothing_does_not_keep_others_out() {
        let (mut host, directory) = host();
        let silent = connect(&directory);
        host.work(Instant::default());
        assert!(!host.guest.is_free());
        let by = Instant::default().after(Span::from_secs(5));
        assert_eq!(host.wake_at(), by);
        host.work(Instant { ns: by.ns - 1 });
        assert!(!host.guest.is_free());
        (0..4).for_each(|_| {
            host.work(by);
        });
        assert!(host.guest.is_free());
        let client = connect(&directory);
        let question = vfu::Client::<()>::new();
        client.send(question.outgoing().unwrap().bytes).unwrap();
        (1..5).for_each(|secs| {
            host.work(by.after(Span::from_secs(60 * secs)));
        });
        assert!(!host.guest.is_free(), "who has begun stays");
        drop(silent);
    }

    #[test]
    fn half_a_message_does_not_keep_others_out() {
        for cut in [1, 15, 16, 20] {
            let (mut host, directory) = host();
            let client = connect(&directory);
            let mut question = vfu::Client::<()>::new();
            let begun = Instant::default();
            client.send(question.outgoing().unwrap().bytes).unwrap();
            (0..4).for_each(|_| {
                host.work(begun);
            });
            question.sent(question.outgoing().unwrap().bytes.len());
            // A whole message, and a part of another.
            question.read(vfu::region_index::CONFIGURATION, 0, 4);
            let message = question.outgoing().unwrap().bytes.to_vec();
            let at = begun.after(Span::from_secs(60));
            client.send(&message).unwrap();
            client.send(&message[..cut]).unwrap();
            host.work(at);
            let by = at.after(Span::from_secs(5));
            assert_eq!(host.wake_at(), by, "cut at {cut}");
            // More of it earns no more time.
            client.send(&message[cut..cut + 1]).unwrap();
            host.work(Instant { ns: by.ns - 1 });
            assert!(!host.guest.is_free(), "cut at {cut}");
            (0..4).for_each(|_| {
                host.work(by);
            });
            assert!(host.guest.is_free(), "cut at {cut}");
        }
    }

    #[test]
    fn message_that_comes_in_pieces_is_answered_and_its_client_stays() {
        let (mut host, directory) = host();
        let client = connect(&directory);
        let mut question = vfu::Client::<()>::new();
        let message = question.outgoing().unwrap().bytes.to_vec();
        let mut now = Instant::default();
        for round in 0..3 {
            let (first, rest) = message.split_at(20);
            client.send(first).unwrap();
            host.work(now);
            now = now.after(Span::from_secs(4));
            client.send(rest).unwrap();
            host.work(now);
            if round > 0 {
                break;
            }
            question.sent(message.len());
            now = now.after(Span::from_secs(60));
            host.work(now);
            assert!(!host.guest.is_free(), "who is between messages stays");
        }
    }

    #[test]
    fn a_host_sleeps_while_its_client_reads_nothing() {
        let (mut host, directory) = host();
        let client = connect(&directory);
        assert!(may_sleep(&mut host));
        let mut question = vfu::Client::<()>::new();
        client.send(question.outgoing().unwrap().bytes).unwrap();
        assert!(may_sleep(&mut host));
        // The answers are more than the socket and the server hold.
        question.sent(question.outgoing().unwrap().bytes.len());
        question.read(vfu::region_index::CONFIGURATION, 0, 256);
        let message = question.outgoing().unwrap().bytes;
        let mut in_vain = 0;
        while in_vain < 3 {
            if client.send(message).unwrap() > 0 {
                in_vain = 0;
            } else {
                host.arm();
                host.disarm();
                in_vain += 1;
            }
        }
        assert!(may_sleep(&mut host), "its socket says that there is more to read");
    }
}
