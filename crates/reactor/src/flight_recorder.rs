//! Flight recorder: the last control events of each reactor, in a ring of fixed size.
//!
//! ```text
//!   reactor 0 ── record ──▶ | sequence, kind | time | first | second |  × 4096, the oldest is overwritten
//!   reactor 1 ── record ──▶ | …              |
//!   other threads ────────▶ | …              |  one ring, behind a lock
//! ```
//!
//! It has what is rare: threads that start, migrate and end, connections, long iterations, long sleeps, stalls,
//! panics; nothing per I/O, and nothing per iteration. An entry costs four stores to memory that only this
//! reactor writes. Readers take no lock that a reactor takes; an entry that is overwritten while it is read is
//! skipped.
//!
//! A program records into the ring of the thread that it runs on, with [`record`], so code needs no handle. In
//! simulations, whose reactors have no threads of their own, nothing is recorded.

use std::cell::OnceCell;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, TryLockError, Weak};

use tenmil_base::{Instant, Span, UtcTime};
use tenmil_linux::Clock;

use crate::adaptive_spin::PollMode;
use crate::event::{Event, SlowIterationCause};
use crate::registry::{ReactorId, Registry, ThreadId};

/// Kind of a recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlightEventKind {
    /// A thread started: its number, its reactor.
    ThreadStarted = 1,
    /// A thread arrived from another reactor: its number, the previous reactor.
    ThreadMigrated,
    /// A thread did not detach in time: its number, the time limit.
    MigrationTimeout,
    /// A thread ended: its number.
    ThreadEnded,
    /// A poller panicked: number of its thread.
    PollerPanicked,
    /// A message panicked: number of its thread.
    MessagePanicked,
    /// A channel panicked while it was closed: number of the thread.
    ChannelPanicked,
    /// A task panicked: number of its thread.
    TaskPanicked,
    /// An iteration took longer than permitted: the poller or mailbox, the duration.
    SlowIteration,
    /// An iteration does not return: the poller or mailbox, the duration so far.
    Stalled,
    /// An iteration that was reported as stalled has returned: the duration.
    Resumed,
    /// The kernel does not wait for a descriptor: number of the thread.
    WaitFailed,
    /// A descriptor stays readable without work: number of the thread, the descriptor.
    SpuriousWakeups,
    /// The poll mode changed: the new one.
    PollModeChanged,
    /// The reactor slept for long: the duration.
    LongSleep,
    /// A connection was accepted: its number.
    ConnectionAccepted,
    /// A connection, a Connect or an authentication was rejected: the number of the connection, the reason.
    ConnectionRejected,
    /// A connection ended: its number, the reason.
    ConnectionEnded,
    /// A host created a controller: number of its connection, controller identifier.
    ControllerCreated,
    /// A host connected a queue: number of the connection, queue identifier.
    QueueConnected,
    /// The target reports an error of its own, which is in the log.
    TargetError,
    /// A path to a remote device changed its state: number of the path in the device's URI, the change.
    PathChanged,
    /// Slow commands were dropped from the slow-I/O log, whose queue was full: their number.
    SlowIoDropped,
    /// A thread panicked.
    Panicked,
    /// The recorder was written to a file.
    Written,
}

/// Recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightEvent {
    /// Number within its ring, from 1.
    pub sequence: u64,
    /// Time on the clock of the reactors.
    pub at: Instant,
    /// What happened.
    pub kind: FlightEventKind,
    /// What it is about, as the kind defines.
    pub arguments: [u64; 2],
}

/// Events of one ring.
#[derive(Clone, Debug)]
pub struct FlightLog {
    /// The reactor; `None` for all threads that are none.
    pub reactor: Option<ReactorId>,
    /// Clock of the times, if the ring belongs to a reactor.
    pub clock: Clock,
    /// The events that are still in the ring, oldest first.
    pub events: Vec<FlightEvent>,
    /// Events that were overwritten.
    pub overwritten: u64,
    registry: Weak<Registry>,
}

/// Ring of events, written by one thread at a time.
#[derive(Debug)]
pub(crate) struct FlightRing {
    entries: Box<[FlightEntry]>,
    next: AtomicU64,
}

/// One entry of a ring.
#[derive(Debug, Default)]
struct FlightEntry {
    /// Sequence number above the kind, in the lowest byte; zero while the entry is written.
    stamp: AtomicU64,
    at_ns: AtomicU64,
    first: AtomicU64,
    second: AtomicU64,
}

const _: () = assert!(size_of::<FlightEntry>() == 32, "two to a cache line");

/// Ring of a running reactor.
struct RegisteredRing {
    ring: Weak<FlightRing>,
    reactor: ReactorId,
    clock: Clock,
    registry: Weak<Registry>,
}

/// Number of entries of a reactor's ring: 128 KiB.
pub const FLIGHT_ENTRIES: usize = 4096;
/// Number of entries of the ring for all other threads.
const OTHER_ENTRIES: usize = 1024;
/// Shortest sleep that is recorded.
pub(crate) const LONG_SLEEP: Span = Span::from_secs(1);

/// Rings of the reactors of this process.
static RINGS: Mutex<Vec<RegisteredRing>> = Mutex::new(Vec::new());
/// Whether this process has, or had, reactors with rings.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);
/// Ring of all threads that are no reactors. The lock makes its writers one at a time.
static OTHER: LazyLock<(FlightRing, Mutex<()>)> =
    LazyLock::new(|| (FlightRing::new(OTHER_ENTRIES), Mutex::new(())));

thread_local! {
    /// Ring of the reactor that this thread runs, and its clock.
    static OWN_RING: OnceCell<(Arc<FlightRing>, Clock)> = const { OnceCell::new() };
}

/// Records an event of the reactor that this thread runs, or of this other thread. Not for the I/O path.
#[cold]
pub fn record(at: Instant, kind: FlightEventKind, arguments: [u64; 2]) {
    let is_own = OWN_RING.try_with(|ring| {
        ring.get().is_some_and(|(ring, _)| {
            ring.append(at, kind, arguments);
            true
        })
    });
    if is_own == Ok(true) || !IS_RECORDING.load(Ordering::Relaxed) {
        return;
    }
    let (ring, writers) = &*OTHER;
    // A panic may be recorded while this thread has the lock.
    if let Ok(_writer) = writers.try_lock().or_else(ignore_poison) {
        ring.append(at, kind, arguments);
    }
}

/// Records an event as of now, if this process has reactors: for code that has no time at hand. It reads the
/// clock.
#[cold]
pub fn record_now(kind: FlightEventKind, arguments: [u64; 2]) {
    if !IS_RECORDING.load(Ordering::Relaxed) {
        return;
    }
    let own = OWN_RING.try_with(|ring| ring.get().map(|(_, clock)| *clock)).ok().flatten();
    let clock = own.or_else(|| {
        let rings = RINGS.try_lock().or_else(ignore_poison).ok()?;
        rings.first().map(|registered| registered.clock)
    });
    if let Some(clock) = clock {
        record(clock.now(), kind, arguments);
    }
}

/// What all rings of this process have. Waits for nothing that a reactor holds, and for nothing at all if
/// another thread holds the list of the rings: then it is empty.
pub fn recorded_events() -> Vec<FlightLog> {
    let Ok(rings) = RINGS.try_lock().or_else(ignore_poison) else { return Vec::new() };
    let mut logs: Vec<FlightLog> = rings.iter().filter_map(RegisteredRing::log).collect();
    let Some(first) = rings.first() else { return logs };
    let (events, overwritten) = OTHER.0.snapshot();
    let (clock, registry) = (first.clock, first.registry.clone());
    if !events.is_empty() {
        logs.push(FlightLog { reactor: None, clock, events, overwritten, registry });
    }
    logs
}

/// The events of these logs as text, oldest first: one line each, with the time of the wall clock.
pub fn flight_text(logs: &[FlightLog], wall_clock: UtcTime) -> String {
    let mut rows: Vec<(u64, &FlightLog, &FlightEvent)> = Vec::new();
    for log in logs {
        let now = log.clock.now();
        for event in &log.events {
            let age_us = now.since(event.at).ns / 1_000;
            rows.push((wall_clock.unix_us.saturating_sub(age_us), log, event));
        }
    }
    rows.sort_by_key(|(unix_us, ..)| *unix_us);
    let mut text = String::new();
    for (unix_us, log, event) in rows {
        let place = match log.reactor {
            Some(reactor) => format!("reactor {reactor}"),
            None => "other".to_owned(),
        };
        let kind = event.kind.name();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{} {place} {kind}: {}", UtcTime { unix_us }, log.describe(event));
    }
    text
}

/// Registers the ring of a reactor and makes it that of this thread.
pub(crate) fn start_recording(reactor: ReactorId, clock: Clock, registry: &Arc<Registry>) {
    let ring = Arc::new(FlightRing::new(FLIGHT_ENTRIES));
    let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
    rings.retain(|registered| registered.ring.strong_count() > 0);
    let registered = RegisteredRing {
        ring: Arc::downgrade(&ring),
        reactor,
        clock,
        registry: Arc::downgrade(registry),
    };
    rings.push(registered);
    IS_RECORDING.store(true, Ordering::Relaxed);
    // A thread runs one reactor.
    let _ = OWN_RING.with(|own| own.set((ring, clock)));
}

/// Records an event of the registry.
pub(crate) fn record_reactor_event(at: Instant, event: &Event) {
    use FlightEventKind as Kind;
    let thread = |thread: &ThreadId| u64::from(thread.0);
    let (kind, arguments) = match event {
        Event::ThreadStarted { thread: id, reactor, .. } => {
            (Kind::ThreadStarted, [thread(id), reactor.0.into()])
        }
        Event::ThreadMigrated { thread: id, from, .. } => {
            (Kind::ThreadMigrated, [thread(id), from.0.into()])
        }
        Event::MigrationTimeout { thread: id, after, .. } => {
            (Kind::MigrationTimeout, [thread(id), after.ns])
        }
        Event::ThreadEnded { thread: id, .. } => (Kind::ThreadEnded, [thread(id), 0]),
        Event::PollerPanicked(panicked) => (Kind::PollerPanicked, [thread(&panicked.thread), 0]),
        Event::MessagePanicked { thread: id, .. } => (Kind::MessagePanicked, [thread(id), 0]),
        Event::ChannelPanicked { thread: id, .. } => (Kind::ChannelPanicked, [thread(id), 0]),
        Event::TaskPanicked { thread: id, .. } => (Kind::TaskPanicked, [thread(id), 0]),
        Event::WaitFailed { thread: id, .. } => (Kind::WaitFailed, [thread(id), 0]),
        Event::SpuriousWakeups { thread: id, descriptor, .. } => {
            (Kind::SpuriousWakeups, [thread(id), u64::from(descriptor.unsigned_abs())])
        }
        Event::PollModeChanged { mode, .. } => (Kind::PollModeChanged, [*mode as u64, 0]),
        // With its account, which the event has not: `record_slow_iteration` and the watchdog.
        Event::SlowIteration { .. } | Event::ReactorStalled { .. } => return,
        Event::NotPinned { .. } | Event::Schedule(_) | Event::Frequency(_) => return,
    };
    record(at, kind, arguments);
}

impl FlightRing {
    pub(crate) fn new(entries: usize) -> Self {
        let entries = (0..entries).map(|_| FlightEntry::default()).collect();
        Self { entries, next: AtomicU64::new(0) }
    }

    /// Appends an event. Called by one thread at a time.
    fn append(&self, at: Instant, kind: FlightEventKind, [first, second]: [u64; 2]) {
        let index = self.next.load(Ordering::Relaxed);
        self.next.store(index + 1, Ordering::Relaxed);
        let Some(entry) = self.entry(index) else { return };
        // The entry is invalid before a part of it changes: this fence pairs with that of `read`.
        entry.stamp.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.at_ns.store(at.ns, Ordering::Relaxed);
        entry.first.store(first, Ordering::Relaxed);
        entry.second.store(second, Ordering::Relaxed);
        // Pairs with the acquiring load of `read`: a reader that sees the stamp sees the parts.
        entry.stamp.store((index + 1) << 8 | kind as u64, Ordering::Release);
    }

    /// The events that are in the ring, and the number of those that were overwritten.
    pub(crate) fn snapshot(&self) -> (Vec<FlightEvent>, u64) {
        let end = self.next.load(Ordering::Relaxed);
        let start = end.saturating_sub(self.entries.len() as u64);
        ((start..end).filter_map(|index| self.read(index)).collect(), start)
    }

    /// Reads an entry, unless it is being written or was overwritten.
    fn read(&self, index: u64) -> Option<FlightEvent> {
        let entry = self.entry(index)?;
        let stamp = entry.stamp.load(Ordering::Acquire);
        let at = Instant { ns: entry.at_ns.load(Ordering::Relaxed) };
        let arguments = [&entry.first, &entry.second].map(|part| part.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = entry.stamp.load(Ordering::Relaxed) == stamp && stamp >> 8 == index + 1;
        let kind = FlightEventKind::from_u8(stamp.to_le_bytes()[0])?;
        is_whole.then_some(FlightEvent { sequence: index + 1, at, kind, arguments })
    }

    fn entry(&self, index: u64) -> Option<&FlightEntry> {
        let len = self.entries.len() as u64;
        self.entries.get(usize::try_from(index % len.max(1)).ok()?)
    }
}

impl RegisteredRing {
    fn log(&self) -> Option<FlightLog> {
        let (events, overwritten) = self.ring.upgrade()?.snapshot();
        let (reactor, clock, registry) = (Some(self.reactor), self.clock, self.registry.clone());
        Some(FlightLog { reactor, clock, events, overwritten, registry })
    }
}

impl FlightLog {
    /// What happened, with the names of threads and pollers that are still there.
    pub fn describe(&self, event: &FlightEvent) -> String {
        use FlightEventKind as Kind;
        let [first, second] = event.arguments;
        let registry = self.registry.upgrade();
        let thread = || {
            let number = u32::try_from(first).unwrap_or(u32::MAX);
            let name = registry.as_ref().and_then(|it| it.thread_name_if_free(ThreadId(number)));
            match name {
                Some(name) => format!("thread {first} '{name}'"),
                None => format!("thread {first}"),
            }
        };
        let account = || {
            let cause = registry.as_ref().and_then(|registry| registry.account_if_free(first));
            cause.unwrap_or(SlowIterationCause::Unknown).to_string()
        };
        let took = |ns: u64| Span { ns: ns / 1_000 * 1_000 };
        match event.kind {
            Kind::ThreadStarted => format!("{} on reactor {second}", thread()),
            Kind::ThreadMigrated => format!("{} from reactor {second}", thread()),
            Kind::MigrationTimeout => format!("{} after {}", thread(), took(second)),
            Kind::ThreadEnded
            | Kind::PollerPanicked
            | Kind::MessagePanicked
            | Kind::ChannelPanicked
            | Kind::TaskPanicked
            | Kind::WaitFailed => thread(),
            Kind::SlowIteration => format!("{}, {}", account(), took(second)),
            Kind::Stalled => format!("{}, for {} so far", account(), took(second)),
            Kind::Resumed | Kind::LongSleep => format!("after {}", took(first)),
            Kind::SpuriousWakeups => format!("{}, descriptor {second}", thread()),
            Kind::PollModeChanged => {
                let mode = usize::try_from(first).ok().and_then(|at| PollMode::ALL.get(at));
                mode.copied().unwrap_or_default().name().to_owned()
            }
            Kind::ConnectionAccepted => format!("connection {first}"),
            Kind::ConnectionRejected | Kind::ConnectionEnded => {
                format!("connection {first}, {}", unpack_text(second))
            }
            Kind::ControllerCreated => format!("connection {first}, controller {second}"),
            Kind::QueueConnected => format!("connection {first}, queue {second}"),
            Kind::TargetError => "see the log".to_owned(),
            Kind::PathChanged if first == u64::MAX => unpack_text(second),
            Kind::PathChanged => format!("path {first}, {}", unpack_text(second)),
            Kind::SlowIoDropped => format!("{first} commands"),
            Kind::Panicked => "see the log".to_owned(),
            Kind::Written => format!("file {first}"),
        }
    }
}

/// The first eight bytes of a name, as an argument of an event.
pub fn pack_text(name: &str) -> u64 {
    let mut bytes = [0; 8];
    for (to, from) in bytes.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    u64::from_le_bytes(bytes)
}

fn unpack_text(word: u64) -> String {
    let bytes = word.to_le_bytes();
    let shown = bytes.iter().take_while(|byte| byte.is_ascii_graphic());
    shown.map(|byte| char::from(*byte)).collect()
}

fn ignore_poison<G>(error: TryLockError<G>) -> Result<G, ()> {
    match error {
        TryLockError::Poisoned(poisoned) => Ok(poisoned.into_inner()),
        TryLockError::WouldBlock => Err(()),
    }
}

impl FlightEventKind {
    /// All kinds, by number.
    pub const ALL: [Self; 25] = [
        Self::ThreadStarted,
        Self::ThreadMigrated,
        Self::MigrationTimeout,
        Self::ThreadEnded,
        Self::PollerPanicked,
        Self::MessagePanicked,
        Self::ChannelPanicked,
        Self::TaskPanicked,
        Self::SlowIteration,
        Self::Stalled,
        Self::Resumed,
        Self::WaitFailed,
        Self::SpuriousWakeups,
        Self::PollModeChanged,
        Self::LongSleep,
        Self::ConnectionAccepted,
        Self::ConnectionRejected,
        Self::ConnectionEnded,
        Self::ControllerCreated,
        Self::QueueConnected,
        Self::TargetError,
        Self::PathChanged,
        Self::SlowIoDropped,
        Self::Panicked,
        Self::Written,
    ];

    fn from_u8(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }

    /// Stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ThreadStarted => "thread-started",
            Self::ThreadMigrated => "thread-migrated",
            Self::MigrationTimeout => "migration-timeout",
            Self::ThreadEnded => "thread-ended",
            Self::PollerPanicked => "poller-panicked",
            Self::MessagePanicked => "message-panicked",
            Self::ChannelPanicked => "channel-panicked",
            Self::TaskPanicked => "task-panicked",
            Self::SlowIteration => "iteration-too-long",
            Self::Stalled => "reactor-stalled",
            Self::Resumed => "reactor-resumed",
            Self::WaitFailed => "wait-unsupported",
            Self::SpuriousWakeups => "spurious-wakeups",
            Self::PollModeChanged => "poll-mode-changed",
            Self::LongSleep => "long-sleep",
            Self::ConnectionAccepted => "connection-accepted",
            Self::ConnectionRejected => "connection-rejected",
            Self::ConnectionEnded => "connection-ended",
            Self::ControllerCreated => "controller-created",
            Self::QueueConnected => "queue-connected",
            Self::TargetError => "target-error",
            Self::PathChanged => "path-changed",
            Self::SlowIoDropped => "slow-io-dropped",
            Self::Panicked => "panicked",
            Self::Written => "written",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tenmil_base::Instant;

    use super::{FlightEventKind, FlightRing, pack_text, unpack_text};

    #[test]
    fn kinds_are_numbered_as_they_are_listed() {
        for (number, kind) in (1_u8..).zip(FlightEventKind::ALL) {
            assert_eq!((kind as u8, FlightEventKind::from_u8(number)), (number, Some(kind)));
        }
        assert_eq!(FlightEventKind::from_u8(0), None);
        let beyond = u8::try_from(FlightEventKind::ALL.len()).unwrap() + 1;
        assert_eq!(FlightEventKind::from_u8(beyond), None);
    }

    #[test]
    fn full_ring_overwrites_and_counts_the_oldest() {
        let ring = FlightRing::new(4);
        for number in 0..6 {
            ring.append(Instant { ns: number }, FlightEventKind::LongSleep, [number, 7]);
        }
        let (events, overwritten) = ring.snapshot();
        let seen: Vec<_> = events.iter().map(|event| (event.sequence, event.arguments)).collect();
        assert_eq!(seen, [(3, [2, 7]), (4, [3, 7]), (5, [4, 7]), (6, [5, 7])]);
        assert_eq!((overwritten, events[0].at.ns), (2, 2));
    }

    #[test]
    fn entry_that_is_overwritten_while_it_is_read_is_skipped() {
        let ring = Arc::new(FlightRing::new(8));
        let ended = Arc::new(AtomicBool::new(false));
        let (theirs, stop) = (Arc::clone(&ring), Arc::clone(&ended));
        let writer = tenmil_linux::NamedThread::spawn("writer", None, move |_| {
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                let kind = FlightEventKind::ALL[usize::try_from(number % 8).unwrap()];
                theirs.append(Instant { ns: number }, kind, [number, !number]);
                number += 1;
            }
        })
        .unwrap();
        for _ in 0..20_000 {
            for event in ring.snapshot().0 {
                let [first, second] = event.arguments;
                assert_eq!((first, second), (event.sequence - 1, !(event.sequence - 1)));
                assert_eq!(event.at.ns, first, "all parts are of one event");
                assert_eq!(event.kind as u64, first % 8 + 1);
            }
        }
        ended.store(true, Ordering::Relaxed);
        writer.join();
    }

    #[test]
    fn names_are_packed_into_a_word() {
        assert_eq!(unpack_text(pack_text("closed")), "closed");
        assert_eq!(unpack_text(pack_text("host-disconnect")), "host-dis");
        assert_eq!(unpack_text(pack_text("")), "");
    }
}
