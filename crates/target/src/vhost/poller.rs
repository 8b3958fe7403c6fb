//! The door and the front end on a reactor: what is looked at when, and how it sleeps.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use base::{Instant, Span};
use host::local_socket::Connection;
use host::stream::Door;
use host::watch::{Interest, Ready, Watch};
use reactor::{Context, Found, Parting, Poller, WokenBy};

use super::guest::{Guest, PATIENCE};
use super::post::Bell;

/// A door, and the disk behind it.
pub(super) struct Host {
    door: Door,
    guest: Guest,
    bell: Arc<Bell>,
    watch: Watch,
    /// What was found by the watch last.
    ready: Vec<Ready>,
    /// What is waited for of the front end's socket, if it is watched.
    watched: Option<Interest>,
    /// Whether the door is.
    is_door_watched: bool,
    /// Something could not be watched: it must not sleep.
    is_deaf: bool,
    /// Nobody is let in before: there are no descriptors for it.
    door_at: Option<Instant>,
    now: Instant,
    /// When sockets are looked at next.
    look_at: Instant,
}

const DOOR: u64 = 0;
const FRONT: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// While a reactor is awake, sockets are looked at so often: a look is a system call.
const LOOK: Span = Span::from_us(200);

impl Host {
    pub(super) fn new(door: Door, guest: Guest) -> io::Result<Self> {
        let watch = Watch::new()?;
        watch.add(&door, DOOR, READABLE)?;
        let bell = Arc::clone(&guest.stand.bell);
        let (ready, now) = (Vec::new(), Instant::default());
        Ok(Self {
            door,
            guest,
            bell,
            watch,
            ready,
            watched: None,
            is_door_watched: true,
            is_deaf: false,
            door_at: None,
            now,
            look_at: now,
        })
    }

    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        Ok(WokenBy::Descriptor(self.watch.as_fd().try_clone_to_owned()?))
    }

    /// Looks at the door and the socket. How much was done.
    fn look(&mut self, now: Instant) -> usize {
        self.watch_all(now);
        let mut ready = std::mem::take(&mut self.ready);
        // Without its watch it looks at both by itself, and does not sleep.
        self.is_deaf |= self.watch.wait(Some(Span { ns: 0 }), &mut ready).is_err();
        let is_ready = |token: u64| ready.iter().any(|found| found.token == token);
        let (has_front, has_door) = (is_ready(FRONT), is_ready(DOOR));
        self.ready = ready;
        let mut count = 0;
        if has_front || self.is_deaf {
            count += self.guest.hear(now);
        }
        if has_door || self.is_deaf {
            count += self.let_in(now);
        }
        count
    }

    fn let_in(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while !self.guest.is_leaving() && self.door_at.is_none() {
            match self.door.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    count += 1;
                    let connection = Connection::from(socket);
                    if self.guest.is_free() {
                        self.guest.enter(now, connection);
                        self.watched = None;
                    } else {
                        self.guest.turn_away(&connection);
                    }
                }
                // Whoever knocks goes on knocking, and would keep the thread awake.
                Err(_) => self.door_at = Some(now.after(PATIENCE)),
            }
        }
        count
    }

    /// Has the watch know what is waited for now.
    fn watch_all(&mut self, now: Instant) {
        self.door_at = self.door_at.filter(|at| *at > now);
        let wants_door = self.door_at.is_none() && !self.guest.is_leaving();
        if wants_door != self.is_door_watched {
            let changed = match wants_door {
                true => self.watch.add(&self.door, DOOR, READABLE),
                false => self.watch.remove(&self.door),
            };
            self.is_deaf |= changed.is_err();
            self.is_door_watched = wants_door;
        }
        let wanted = self.guest.wanted().map(|(_, interest)| interest);
        if wanted == self.watched {
            return;
        }
        let Some(socket) = self.guest.socket() else {
            // It was closed, and has left the watch with that.
            self.watched = None;
            return;
        };
        let changed = match (self.watched, wanted) {
            (None, Some(interest)) => self.watch.add(socket, FRONT, interest),
            (Some(_), Some(interest)) => self.watch.change(socket, FRONT, interest),
            // It would say for ever that its other end has gone.
            (_, None) => self.watch.remove(socket),
        };
        self.is_deaf |= changed.is_err();
        self.watched = wanted;
    }

    /// Does a bounded amount of work. How much that was.
    pub(super) fn work(&mut self, now: Instant) -> usize {
        self.now = now;
        let has_rung = self.bell.take();
        let mut count = usize::from(has_rung);
        let is_due = now >= self.look_at;
        if is_due {
            count += self.look(now);
        }
        if is_due || has_rung {
            count += self.guest.go_on(now);
        }
        if is_due || count > 0 {
            // What was done may be answered at once.
            self.look_at = if count > 0 { now } else { now.after(LOOK) };
        }
        count
    }
}

impl Poller for Host {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        Found::from_count(self.work(context.now()))
    }

    fn arm(&mut self) -> Found {
        self.look_at = Instant::default();
        let count = self.work(self.now);
        self.watch_all(self.now);
        Found::from_count(count + usize::from(self.is_deaf))
    }

    fn disarm(&mut self) {
        self.look_at = Instant::default();
    }

    /// While queues are busy beside it, door and front end may wait a moment.
    fn may_doze(&self) -> bool {
        !self.is_deaf
    }

    fn wake_at(&self) -> Instant {
        self.guest.wake_at().min(self.door_at.unwrap_or(Instant::NEVER))
    }

    fn detach(&mut self, parting: Parting) -> bool {
        match parting {
            Parting::Moves => true,
            Parting::Ends => {
                self.guest.leave(self.now);
                self.guest.go_on(self.now);
                self.guest.is_free()
            }
        }
    }
}
