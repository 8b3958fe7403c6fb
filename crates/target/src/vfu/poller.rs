//! A device on a reactor: what is looked at when, and how it sleeps.

use std::io;
use std::os::fd::AsFd;

use base::{Instant, Span};
use ctrl::front::Wait;
use host::local_socket::Connection;
use host::stream::Door;
use host::watch::{Interest, Ready, Watch};
use reactor::{Context, Found, Parting, Poller, WokenBy};

use super::guest::Guest;
use super::visitors::Visitors;

/// A door, and the device behind it.
pub(super) struct Host {
    door: Door,
    guest: Guest,
    visitors: Visitors,
    watch: Watch,
    /// What was found by the watch last.
    ready: Vec<Ready>,
    /// The session whose socket is watched, and whether room in it is waited for.
    watches_room: bool,
    is_watched: bool,
    /// Something could not be listened to: it must not sleep.
    is_sleepless: bool,
    now: Instant,
    /// When sockets are looked at next.
    look_at: Instant,
    turns: u32,
    /// Until when the controller has nothing to do by itself.
    until: Instant,
}

const DOOR: u64 = 0;
const CLIENT: u64 = 1;
const MEDIUM: u64 = 2;
const VISITOR: u64 = 3;
const READABLE: Interest = Interest { readable: true, writable: false };
const BOTH: Interest = Interest { readable: true, writable: true };

/// While there is work, sockets are looked at so often: a look is a system call.
const LOOK: Span = Span::from_us(50);
/// Memory that was taken back is looked for every so many turns; a power of two.
const MEMORY_TURNS: u32 = 256;

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
            watches_room: false,
            is_watched: false,
            is_sleepless: false,
            now,
            look_at: now,
            turns: 0,
            until: now,
        })
    }

    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        Ok(WokenBy::Descriptor(self.watch.as_fd().try_clone_to_owned()?))
    }

    /// Looks at the door and the sockets.
    fn look(&mut self, now: Instant) -> usize {
        let mut count = self.guest.hear(now);
        if !self.visitors.is_empty() {
            self.visitors.turn(now);
        }
        if self.guest.is_leaving() {
            return count;
        }
        // What the kernel says of a door that is no more is said again.
        while let Ok(Some(socket)) = self.door.accept() {
            count += 1;
            let connection = Connection::from(socket);
            if self.guest.is_free() {
                self.guest.enter(connection);
                self.is_watched = false;
            } else {
                self.visitors.receive(now, connection);
                let socket = self.visitors.last();
                let added = socket.map(|socket| self.watch.add(socket, VISITOR, READABLE));
                self.is_sleepless |= added.is_some_and(|added| added.is_err());
            }
        }
        count
    }

    /// Has the watch know the socket that there is now, and what is waited for.
    fn watch_session(&mut self) {
        let has_unsent = self.guest.has_unsent();
        let Some(socket) = self.guest.descriptor() else {
            self.is_watched = false;
            return;
        };
        let interest = if has_unsent { BOTH } else { READABLE };
        let result = match self.is_watched {
            false => self.watch.add(socket, CLIENT, interest),
            true if self.watches_room != has_unsent => self.watch.change(socket, CLIENT, interest),
            true => Ok(()),
        };
        self.is_sleepless |= result.is_err();
        (self.is_watched, self.watches_room) = (true, has_unsent);
    }
}

impl Poller for Host {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        self.now = now;
        self.turns = self.turns.wrapping_add(1);
        let wait = self.guest.device.turn(now);
        let mut count = usize::from(wait == Wait::Busy);
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
        Found::from_count(count)
    }

    fn arm(&mut self) -> Found {
        let now = self.now;
        self.watch_session();
        self.guest.look_after_memory(now);
        let Self { guest, watch, is_sleepless, .. } = self;
        let until = guest.device.front.arm(now);
        guest.device.front.new_descriptors(|descriptor| {
            *is_sleepless |= watch.add(descriptor, MEDIUM, READABLE).is_err();
        });
        self.until = until.unwrap_or(now);
        let mut has_news = until.is_none() || self.is_sleepless || self.guest.is_in_motion();
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
        self.until.min(self.visitors.wake_at())
    }

    fn detach(&mut self, parting: Parting) -> bool {
        match parting {
            Parting::Moves => true,
            Parting::Ends => {
                self.guest.leave(self.now);
                self.guest.is_free()
            }
        }
    }
}
