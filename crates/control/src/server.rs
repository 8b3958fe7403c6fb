//! The table on a socket: a thread of its own, which sleeps until somebody wants something.
//!
//! It shares no lock and no memory with the data path but what the parts of the [`State`] share. In
//! one turn of its loop every connection gets the same: one read, a few lines answered, one write.
//! So whoever sends more than others waits for them, and not they for him.

mod seat;

use core::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base::{Instant, Interrupts, Span};
use host::local_socket::{Connection, Listener, Peer};
use host::runtime_directory::{RuntimeDirectory, uid};
use host::watch::{Interest, Ready, Watch};
use host::{Clock, EventVectors, Stop, Thread};
use serde_json::json;

use crate::event::{Announcements, ENDING, Event};
use crate::method::Table;
use crate::refusal::{Code, Refusal};
use crate::session::{Limits, Served};
use crate::state::State;
use seat::Seat;

/// A socket that answers. Dropping it tells whoever follows events, closes every connection, takes
/// the socket away and ends the thread.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    wake: EventVectors,
    thread: Option<Thread<()>>,
}

/// Why there is no server.
#[derive(Debug)]
pub struct Refused {
    path: PathBuf,
    error: io::Error,
}

/// Connections that are served at once.
const SEATS: usize = 64;
/// Of them, those of one process.
const SEATS_OF_ONE: usize = 16;
/// Events that are told in one turn; the rest in the next.
const EVENTS_MAX: usize = 64;
/// How long nobody is let in after that went wrong, which is when descriptors have run out.
const ACCEPT_AGAIN: Span = Span::from_ms(100);

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST_SEAT: u64 = 2;
const READABLE: Interest = Interest { readable: true, writable: false };
const NOTHING: Interest = Interest { readable: false, writable: false };

impl Server {
    /// Serves `table` from `state` as process `pid` in `directory`, and tells what is announced.
    pub fn start(
        directory: &RuntimeDirectory,
        pid: u32,
        table: &'static Table,
        state: State,
        announcements: Announcements,
    ) -> Result<Self, Refused> {
        let path = directory.socket_of(pid);
        let refused = |error| Refused { path: path.clone(), error };
        let listener = Listener::bind(directory, pid).map_err(refused)?;
        let wake = announcements.wake.clone();
        let room = Room::new(listener, table, state, announcements).map_err(refused)?;
        let thread = Thread::spawn("control", None, move |stop| room.serve(stop));
        let thread = thread.map_err(refused)?;
        Ok(Self { path, wake, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
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

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "listen at {}: {}", self.path.display(), self.error)
    }
}

impl core::error::Error for Refused {}

/// What the thread owns.
struct Room {
    listener: Listener,
    watch: Watch,
    clock: Clock,
    table: &'static Table,
    state: State,
    announcements: Announcements,
    seats: Vec<Option<Seat>>,
    /// What the watch has found.
    ready: Vec<Ready>,
    /// Not before then is anybody let in.
    closed_until: Option<Instant>,
    /// More announcements wait than were told.
    more_events: bool,
}

impl Room {
    fn new(
        listener: Listener,
        table: &'static Table,
        state: State,
        announcements: Announcements,
    ) -> io::Result<Self> {
        let watch = Watch::new()?;
        watch.add(&listener, LISTENER, READABLE)?;
        let wake = announcements.wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?;
        watch.add(wake, WAKE, READABLE)?;
        let seats = (0..SEATS).map(|_| None).collect();
        let clock = crate::event::clock();
        Ok(Self {
            listener,
            watch,
            clock,
            table,
            state,
            announcements,
            seats,
            ready: Vec::new(),
            closed_until: None,
            more_events: false,
        })
    }

    /// Serves until it is told to stop.
    fn serve(mut self, stop: &Stop) {
        while !stop.is_stopped() {
            match self.wait() {
                Ok(wants_in) => self.turn(wants_in),
                // Without its watch it could only spin.
                Err(_) => return,
            }
        }
        let text = "the process stops serving".to_owned();
        self.tell(&Event { kind: ENDING, text, about: json!({}) });
        let now = self.clock.now();
        self.seats.iter_mut().flatten().for_each(|seat| seat.flush(now));
    }

    /// Waits for something to do. Says whether somebody wants in.
    fn wait(&mut self) -> io::Result<bool> {
        let at_once = self.more_events || self.seats.iter().flatten().any(Seat::has_work);
        let seats = self.seats.iter().flatten().map(Seat::deadline);
        let until = seats.chain(self.closed_until).min().unwrap_or(Instant::NEVER);
        let timeout = match until {
            _ if at_once => Some(Span::default()),
            Instant::NEVER => None,
            until => Some(until.since(self.clock.now())),
        };
        let mut wants_in = false;
        self.watch.wait(timeout, &mut self.ready)?;
        for ready in &self.ready {
            match ready.token {
                LISTENER => wants_in = true,
                WAKE => {
                    // A signal masks: from here on the next one comes again, and what came before
                    // is looked at before the next wait.
                    self.announcements.wake.unmask(0);
                    self.more_events = true;
                }
                token => {
                    let seat = usize::try_from(token - FIRST_SEAT).ok();
                    let seat = seat.and_then(|index| self.seats.get_mut(index)?.as_mut());
                    seat.into_iter().for_each(|seat| seat.readable |= ready.readable);
                }
            }
        }
        Ok(wants_in)
    }

    /// One turn: whoever wants in, what was announced, and every seat once.
    fn turn(&mut self, wants_in: bool) {
        let now = self.clock.now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
            // If even this is refused, the next turn that is due for another reason tries again.
            let _ = self.watch.change(&self.listener, LISTENER, READABLE);
        }
        if wants_in && self.closed_until.is_none() {
            self.accept(now);
        }
        self.tell_announcements();
        for index in 0..self.seats.len() {
            let Some(seat) = &mut self.seats[index] else { continue };
            let served = Served { table: self.table, state: &self.state };
            let events = seat.turn(now, served);
            if !seat.keep(&self.watch, FIRST_SEAT + index as u64) {
                // Closing takes it out of the watch.
                self.seats[index] = None;
            }
            events.iter().for_each(|event| self.tell(event));
        }
    }

    fn accept(&mut self, now: Instant) {
        // As many as there are seats, so that a crowd at the door does not keep those inside waiting.
        for _ in 0..SEATS {
            match self.listener.accept() {
                Ok(Some(connection)) => self.seat(now, connection),
                Ok(None) => return,
                Err(_) => {
                    self.closed_until = Some(now.after(ACCEPT_AGAIN));
                    let _ = self.watch.change(&self.listener, LISTENER, NOTHING);
                    return;
                }
            }
        }
    }

    /// Gives a connection a seat, or a reason why not.
    fn seat(&mut self, now: Instant, connection: Connection) {
        let Ok(peer) = connection.peer() else { return };
        let refusal = admit(peer, uid()).and_then(|()| self.find_seat(peer));
        let seat = Seat::new(now, connection, peer, Limits::USUAL);
        match refusal {
            Ok(index) => {
                if self.watch.add(&seat, FIRST_SEAT + index as u64, READABLE).is_ok() {
                    self.seats[index] = Some(seat);
                }
            }
            Err(refusal) => seat.turn_away(now, refusal),
        }
    }

    fn find_seat(&self, peer: Peer) -> Result<usize, Refusal> {
        let of_peer = self.seats.iter().flatten().filter(|seat| seat.peer().pid == peer.pid);
        if of_peer.count() >= SEATS_OF_ONE {
            return Err(Refusal::caller(
                Code::Busy,
                format!("connect: process {} has {SEATS_OF_ONE} already, expected fewer", peer.pid),
            ));
        }
        self.seats.iter().position(Option::is_none).ok_or_else(|| {
            Refusal::machine(
                Code::Busy,
                format!("connect: all {SEATS} connections are taken, expected a free one"),
            )
        })
    }

    fn tell_announcements(&mut self) {
        if !std::mem::take(&mut self.more_events) {
            return;
        }
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.announcements.next() else { return };
            self.tell(&event);
        }
        self.more_events = true;
    }

    /// Tells an event to whoever follows them. It is sent when the seat has its turn, at once.
    fn tell(&mut self, event: &Event) {
        let line = event.to_line(self.clock.now());
        self.seats.iter_mut().flatten().for_each(|seat| seat.tell(&line));
    }
}

/// Whether `peer` may ask a process of user `uid`.
fn admit(peer: Peer, uid: u32) -> Result<(), Refusal> {
    if peer.uid == uid || peer.uid == 0 {
        return Ok(());
    }
    Err(Refusal::caller(
        Code::NotAllowed,
        format!("connect: user is uid {}, expected uid {uid} or 0", peer.uid),
    ))
}

#[cfg(test)]
mod tests;
