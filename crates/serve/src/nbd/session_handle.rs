//! Session as other threads see it: identity, counters and pending command.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use tenmil_base::Counter;
use tenmil_reactor::flight_recorder::{self, FlightEventKind};

use super::transmission::NbdStats;

/// Shared state of a session. The session's thread writes everything except the command.
#[derive(Debug)]
pub(super) struct SessionHandle {
    id: u64,
    peer: String,
    command: AtomicU8,
    phase: AtomicU8,
    counters: SessionCounters,
    /// Export that the client has selected, or the only one.
    export: OnceLock<String>,
    is_reported: AtomicBool,
    event_sender: Sender<ExportEvent>,
}

/// Event of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportEvent {
    /// Name of the export; empty if the client has selected none of several.
    pub export: String,
    /// What has happened.
    pub event: NbdEvent,
}

/// Counters of a session.
#[derive(Debug, Default)]
struct SessionCounters {
    reads: Counter,
    read_bytes: Counter,
    writes: Counter,
    written_bytes: Counter,
    others: Counter,
    errors: Counter,
    in_flight: AtomicU64,
    receives: Counter,
    receives_in_vain: Counter,
    sends: Counter,
}

/// Snapshot of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionSample {
    /// Connection id, never reused.
    pub id: u64,
    /// Address of the peer.
    pub peer: String,
    /// Phase of the protocol.
    pub phase: ConnectionPhase,
    /// Completed requests.
    pub done: NbdStats,
    /// Outstanding requests.
    pub in_flight: u64,
    /// Receive calls that returned data.
    pub receives: u64,
    /// Receive calls that returned nothing.
    pub receives_in_vain: u64,
    /// Send calls.
    pub sends: u64,
}

/// Phase of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionPhase {
    /// The client has not selected an export.
    #[default]
    Handshake,
    /// Requests and replies.
    Transmission,
    /// Closing: nothing more is received.
    Ending,
}

/// Command to a session from another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionCommand {
    /// End the session.
    Disconnect,
    /// The exported device was removed.
    DeviceRemoved,
}

/// Event of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdEvent {
    /// A client connected.
    Connected {
        /// Connection id.
        connection: u64,
        /// Address of the peer.
        peer: String,
    },
    /// A client disconnected.
    Disconnected {
        /// Connection id.
        connection: u64,
        /// Address of the peer.
        peer: String,
        /// Why it disconnected.
        reason: DisconnectReason,
        /// Requests completed on the connection.
        done: NbdStats,
    },
    /// The device was resized.
    Resized {
        /// New size in bytes.
        size_bytes: u64,
    },
    /// The device was removed.
    Removed,
    /// An error, as one line of text.
    Error(String),
}

impl NbdEvent {
    /// Records the event in the flight recorder, without its texts.
    fn record_in_flight_recorder(&self) {
        let (kind, arguments) = match self {
            Self::Connected { connection, .. } => {
                (FlightEventKind::ConnectionAccepted, [*connection, 0])
            }
            Self::Disconnected { connection, reason, .. } => {
                let reason = flight_recorder::pack_text(reason.name());
                (FlightEventKind::ConnectionEnded, [*connection, reason])
            }
            Self::Error(_) => (FlightEventKind::TargetError, [0, 0]),
            Self::Resized { .. } | Self::Removed => return,
        };
        flight_recorder::record_now(kind, arguments);
    }
}

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DisconnectReason {
    /// The client sent `NBD_CMD_DISC`.
    ClientDisconnect,
    /// The client closed the stream without `NBD_CMD_DISC`.
    Closed,
    /// The client aborted the negotiation or selected an unknown export.
    NoExport,
    /// The client sent an invalid message.
    ProtocolError,
    /// The client exceeded a time limit.
    TooSlow,
    /// The client sent no request for as long as the server allows.
    Idle,
    /// The socket failed with this error.
    Broken(String),
    /// Disconnected by a management command.
    Administrative,
    /// The device was removed.
    DeviceRemoved,
    /// The server is shutting down.
    ServerEnds,
}

impl SessionHandle {
    pub(super) fn new(id: u64, peer: String, event_sender: Sender<ExportEvent>) -> Self {
        Self {
            id,
            peer,
            command: AtomicU8::new(0),
            phase: AtomicU8::new(0),
            counters: SessionCounters::default(),
            export: OnceLock::new(),
            is_reported: AtomicBool::new(false),
            event_sender,
        }
    }

    /// Address of the client.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Sends a command to the session. The first command is kept.
    pub(super) fn send_command(&self, command: SessionCommand) {
        let word = match command {
            SessionCommand::Disconnect => 1,
            SessionCommand::DeviceRemoved => 2,
        };
        // Relaxed suffices: the caller wakes the session afterwards, and the wake-up orders the
        // store before the load.
        let _ = self.command.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Command sent to the session, if any.
    #[inline]
    pub(super) fn pending_command(&self) -> Option<SessionCommand> {
        match self.command.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(SessionCommand::Disconnect),
            _ => Some(SessionCommand::DeviceRemoved),
        }
    }

    /// Counts a receive call.
    #[inline]
    pub(super) fn count_receive(&self, in_vain: bool) {
        let counters = &self.counters;
        if in_vain { counters.receives_in_vain.add(1) } else { counters.receives.add(1) }
    }

    /// Counts a send call.
    #[inline]
    pub(super) fn count_send(&self) {
        self.counters.sends.add(1);
    }

    /// Publishes the counters and the phase.
    #[inline]
    pub(super) fn publish_counters(&self, phase: ConnectionPhase, done: &NbdStats, in_flight: u64) {
        let counters = &self.counters;
        counters.reads.set(done.reads);
        counters.read_bytes.set(done.read_bytes);
        counters.writes.set(done.writes);
        counters.written_bytes.set(done.written_bytes);
        counters.others.set(done.others);
        counters.errors.set(done.errors);
        counters.in_flight.store(in_flight, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Sets the export that events name.
    pub(super) fn set_export(&self, name: &str) {
        let _ = self.export.set(name.to_owned());
    }

    pub(super) fn emit(&self, event: NbdEvent) {
        event.record_in_flight_recorder();
        let export = self.export.get().cloned().unwrap_or_default();
        // The receiver may be gone; then the event is dropped.
        let _ = self.event_sender.send(ExportEvent { export, event });
    }

    /// Reports, once, that the client has connected to its export.
    pub(super) fn report_connected(&self) {
        if self.is_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        self.emit(NbdEvent::Connected { connection: self.id, peer: self.peer.clone() });
    }

    pub(super) fn report_disconnected(&self, reason: DisconnectReason) {
        let (connection, peer, done) = (self.id, self.peer.clone(), self.sample().done);
        self.emit(NbdEvent::Disconnected { connection, peer, reason, done });
    }

    pub(super) fn sample(&self) -> ConnectionSample {
        let counters = &self.counters;
        ConnectionSample {
            id: self.id,
            peer: self.peer.clone(),
            phase: match self.phase.load(Ordering::Relaxed) {
                0 => ConnectionPhase::Handshake,
                1 => ConnectionPhase::Transmission,
                _ => ConnectionPhase::Ending,
            },
            done: NbdStats {
                reads: counters.reads.get(),
                read_bytes: counters.read_bytes.get(),
                writes: counters.writes.get(),
                written_bytes: counters.written_bytes.get(),
                others: counters.others.get(),
                errors: counters.errors.get(),
            },
            in_flight: counters.in_flight.load(Ordering::Relaxed),
            receives: counters.receives.get(),
            receives_in_vain: counters.receives_in_vain.get(),
            sends: counters.sends.get(),
        }
    }
}

impl ConnectionPhase {
    /// Name of the phase.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Transmission => "transmission",
            Self::Ending => "ending",
        }
    }
}

impl DisconnectReason {
    /// Stable identifier for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::ClientDisconnect => "client-disconnect",
            Self::Closed => "closed",
            Self::NoExport => "no-export",
            Self::ProtocolError => "protocol-error",
            Self::TooSlow => "timeout",
            Self::Idle => "idle-timeout",
            Self::Broken(_) => "broken",
            Self::Administrative => "administrative",
            Self::DeviceRemoved => "device-removed",
            Self::ServerEnds => "server-ends",
        }
    }
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::ClientDisconnect => "the client has disconnected",
            Self::Closed => "the client has closed the connection without NBD_CMD_DISC",
            Self::NoExport => "the client selected no existing export",
            Self::ProtocolError => "the client violated the protocol",
            Self::TooSlow => "a request or reply exceeded its time limit",
            Self::Idle => "no request arrived within --nbd-idle-timeout",
            Self::Broken(why) => return write!(out, "the socket failed: {why}"),
            Self::Administrative => "it was disconnected through the RPC socket",
            Self::DeviceRemoved => "the device has been removed",
            Self::ServerEnds => "the server is shutting down",
        })
    }
}

impl fmt::Display for NbdEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connection, peer } => {
                write!(out, "connection {connection}: {peer} connected")
            }
            Self::Disconnected { connection, peer, reason, .. } => {
                write!(out, "connection {connection}: {peer} disconnected: {reason}")
            }
            Self::Resized { size_bytes } => {
                write!(out, "the size of the export is {size_bytes} bytes")
            }
            Self::Removed => out.write_str("the device has been removed"),
            Self::Error(text) => out.write_str(text),
        }
    }
}
