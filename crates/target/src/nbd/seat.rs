//! One connection as others see it: who it is, what it has done, and what it is told.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use base::Count;

use super::exchange::Done;

/// What a guest shows, and what he is told. Written by the guest's own thread but for orders.
#[derive(Debug)]
pub(super) struct Seat {
    id: u64,
    peer: String,
    order: AtomicU8,
    phase: AtomicU8,
    tally: Tally,
    tell: Sender<News>,
}

/// What a guest has done.
#[derive(Debug, Default)]
struct Tally {
    reads: Count,
    read_bytes: Count,
    writes: Count,
    written_bytes: Count,
    others: Count,
    errors: Count,
    in_flight: AtomicU64,
    receives: Count,
    receives_in_vain: Count,
    sends: Count,
}

/// A connection at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionSample {
    /// Its number, which is never used again.
    pub id: u64,
    /// Who it is.
    pub peer: String,
    /// What it is about.
    pub phase: ConnectionPhase,
    /// What it was answered.
    pub done: Done,
    /// Requests that are not answered.
    pub in_flight: u64,
    /// System calls that received something.
    pub receives: u64,
    /// System calls that found nothing to receive.
    pub receives_in_vain: u64,
    /// System calls that sent.
    pub sends: u64,
}

/// What a connection is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionPhase {
    /// The client has not chosen an export.
    #[default]
    Handshake,
    /// It asks and is answered.
    Transmission,
    /// Nothing more is taken from it.
    Ending,
}

/// What a connection is told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Somebody wants it to end.
    Leave,
    /// What it is about has gone.
    DeviceRemoved,
}

/// Something that has happened at the doors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// Somebody has come.
    Connected {
        /// His number.
        connection: u64,
        /// Who he is.
        peer: String,
    },
    /// Somebody has gone.
    Disconnected {
        /// His number.
        connection: u64,
        /// Who he was.
        peer: String,
        /// Why.
        reason: Reason,
        /// What he was answered.
        done: Done,
    },
    /// The device has another size.
    Resized {
        /// Bytes.
        size_bytes: u64,
    },
    /// The device has been removed.
    Removed,
    /// Something went wrong, in a line.
    Trouble(String),
}

/// Why somebody has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The client said that it ends.
    Said,
    /// The client has closed its end without a word.
    Closed,
    /// The client chose no export, or one that there is not.
    NothingChosen,
    /// What the client sent makes no sense.
    Nonsense,
    /// The client took too long.
    TooSlow,
    /// The client asked for nothing as long as the server allows.
    Idle,
    /// The socket failed, as the kernel says.
    Broken(String),
    /// Somebody asked for it.
    Told,
    /// The device has been removed.
    DeviceRemoved,
    /// The server ends.
    ServerEnds,
}

impl Seat {
    pub(super) fn new(id: u64, peer: String, tell: Sender<News>) -> Self {
        Self {
            id,
            peer,
            order: AtomicU8::new(0),
            phase: AtomicU8::new(0),
            tally: Tally::default(),
            tell,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Tells a guest. The first order stands.
    pub(super) fn order(&self, order: Order) {
        let word = match order {
            Order::Leave => 1,
            Order::DeviceRemoved => 2,
        };
        // Whoever gives an order rings after it, which is what makes it seen.
        let _ = self.order.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// What the guest was told.
    #[inline]
    pub(super) fn ordered(&self) -> Option<Order> {
        match self.order.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Order::Leave),
            _ => Some(Order::DeviceRemoved),
        }
    }

    /// Somebody received, or tried to.
    #[inline]
    pub(super) fn received(&self, in_vain: bool) {
        let tally = &self.tally;
        if in_vain { tally.receives_in_vain.add(1) } else { tally.receives.add(1) }
    }

    /// Somebody sent.
    #[inline]
    pub(super) fn sent(&self) {
        self.tally.sends.add(1);
    }

    /// Shows what was done, and what is under way.
    #[inline]
    pub(super) fn show(&self, phase: ConnectionPhase, done: &Done, in_flight: u64) {
        let tally = &self.tally;
        tally.reads.set(done.reads);
        tally.read_bytes.set(done.read_bytes);
        tally.writes.set(done.writes);
        tally.written_bytes.set(done.written_bytes);
        tally.others.set(done.others);
        tally.errors.set(done.errors);
        tally.in_flight.store(in_flight, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub(super) fn tell(&self, news: News) {
        // If nobody listens, nobody wants to know.
        let _ = self.tell.send(news);
    }

    pub(super) fn has_come(&self) {
        self.tell(News::Connected { connection: self.id, peer: self.peer.clone() });
    }

    pub(super) fn has_gone(&self, reason: Reason) {
        let (connection, peer, done) = (self.id, self.peer.clone(), self.sample().done);
        self.tell(News::Disconnected { connection, peer, reason, done });
    }

    pub(super) fn sample(&self) -> ConnectionSample {
        let tally = &self.tally;
        ConnectionSample {
            id: self.id,
            peer: self.peer.clone(),
            phase: match self.phase.load(Ordering::Relaxed) {
                0 => ConnectionPhase::Handshake,
                1 => ConnectionPhase::Transmission,
                _ => ConnectionPhase::Ending,
            },
            done: Done {
                reads: tally.reads.get(),
                read_bytes: tally.read_bytes.get(),
                writes: tally.writes.get(),
                written_bytes: tally.written_bytes.get(),
                others: tally.others.get(),
                errors: tally.errors.get(),
            },
            in_flight: tally.in_flight.load(Ordering::Relaxed),
            receives: tally.receives.get(),
            receives_in_vain: tally.receives_in_vain.get(),
            sends: tally.sends.get(),
        }
    }
}

impl ConnectionPhase {
    /// It in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Transmission => "transmission",
            Self::Ending => "ending",
        }
    }
}

impl Reason {
    /// It in a word that does not change, for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Said => "said",
            Self::Closed => "closed",
            Self::NothingChosen => "nothing-chosen",
            Self::Nonsense => "nonsense",
            Self::TooSlow => "too-slow",
            Self::Idle => "idle-timeout",
            Self::Broken(_) => "broken",
            Self::Told => "told",
            Self::DeviceRemoved => "device-removed",
            Self::ServerEnds => "server-ends",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Said => "the client said that it ends",
            Self::Closed => "the client closed its end without a word",
            Self::NothingChosen => "the client chose no export that there is",
            Self::Nonsense => "what the client sent makes no sense",
            Self::TooSlow => "the client took too long",
            Self::Idle => "no request came within --nbd-idle-timeout",
            Self::Broken(why) => return write!(out, "the socket failed: {why}"),
            Self::Told => "somebody asked for it",
            Self::DeviceRemoved => "the device has been removed",
            Self::ServerEnds => "the server ends",
        })
    }
}

impl fmt::Display for News {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connection, peer } => {
                write!(out, "connection {connection}: {peer} has come")
            }
            Self::Disconnected { connection, peer, reason, .. } => {
                write!(out, "connection {connection}: {peer} has gone: {reason}")
            }
            Self::Resized { size_bytes } => write!(out, "the export has {size_bytes} bytes now"),
            Self::Removed => out.write_str("the device has been removed"),
            Self::Trouble(text) => out.write_str(text),
        }
    }
}
