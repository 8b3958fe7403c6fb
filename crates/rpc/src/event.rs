//! Events: messages that a process sends to subscribed clients.
//!
//! An event is emitted through an [`EventSender`], without blocking. If the queue is full, the
//! event is dropped, and the number of dropped events is reported as an event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use serde_json::{Value, json};
use tenmil_base::{Instant, Interrupts, UtcTime};
use tenmil_linux::{Clock, EventFdVectors};

/// Kind of an event, a constant of its emitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventKind {
    /// Stable name.
    pub name: &'static str,
    /// When it is emitted, as a phrase.
    pub help: &'static str,
}

/// Event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Kind.
    pub kind: EventKind,
    /// One-line text for people.
    pub text: String,
    /// Object for programs.
    pub about: Value,
}

/// Event of a successful method that changes something.
pub(crate) const SET: EventKind =
    EventKind { name: "set", help: "a method that changes something succeeded" };
/// Event for dropped events.
pub(crate) const LOST: EventKind = EventKind {
    name: "events-dropped",
    help: "events were dropped because they occurred faster than they could be sent",
};
/// Event of the server's end.
pub(crate) const ENDING: EventKind = EventKind {
    name: "shutdown",
    help: "the control server is shutting down; no further events follow",
};

impl EventKind {
    /// Kinds that every server emits.
    pub const COMMON: [Self; 3] = [SET, LOST, ENDING];
}

/// Sender of events. Cheap to clone; usable from any thread.
#[derive(Clone, Debug)]
pub struct EventSender {
    queue: SyncSender<Event>,
    lost: Arc<AtomicU64>,
    wake: EventFdVectors,
}

/// Receiving end of the event queue, owned by a server.
#[derive(Debug)]
pub struct EventReceiver {
    queue: Receiver<Event>,
    lost: Arc<AtomicU64>,
    pub(crate) wake: EventFdVectors,
}

/// Capacity of the event queue.
const WAITING_MAX: usize = 256;

/// Creates an event queue.
pub fn event_channel() -> std::io::Result<(EventSender, EventReceiver)> {
    let (sender, receiver) = sync_channel(WAITING_MAX);
    let lost = Arc::new(AtomicU64::new(0));
    let wake = EventFdVectors::new(1)?;
    let announcer = EventSender { queue: sender, lost: Arc::clone(&lost), wake: wake.clone() };
    Ok((announcer, EventReceiver { queue: receiver, lost, wake }))
}

impl EventSender {
    /// Emits an event without blocking. It costs an allocation and a system call, so it is for
    /// infrequent events.
    pub fn emit(&self, event: Event) {
        if self.queue.try_send(event).is_err() {
            // Relaxed: a counter that publishes nothing else.
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.wake.clone().raise(0);
    }

    /// Wakes the server thread.
    pub(crate) fn wake_server(&self) {
        self.wake.clone().raise(0);
    }

    /// Adds events that were dropped elsewhere.
    pub(crate) fn report_dropped(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
        self.wake.clone().raise(0);
    }
}

impl EventReceiver {
    /// Next event. Dropped events are reported before the first one that follows them.
    pub(crate) fn next(&self) -> Option<Event> {
        match self.lost.swap(0, Ordering::Relaxed) {
            0 => self.queue.try_recv().ok(),
            count => Some(dropped_event(count)),
        }
    }
}

fn dropped_event(count: u64) -> Event {
    Event {
        kind: LOST,
        text: format!("{count} events were dropped"),
        about: json!({ "count": count }),
    }
}

impl Event {
    /// The event as one of a stream of server-sent events, with the times at which the server sends
    /// it. JSON text contains no line break, so the data are one line.
    pub(crate) fn to_stream_text(&self, now: Instant, time: UtcTime) -> String {
        let event = json!({
            "kind": self.kind.name,
            "time": time.to_string(),
            "monotonic_ns": now.ns,
            "text": self.text,
            "about": self.about,
        });
        format!("event: {}\ndata: {event}\n\n", self.kind.name)
    }
}

/// Clock of `monotonic_ns` of an event: the kernel's monotonic clock, so that events of several
/// programs on a machine can be ordered. Their `time` is for people and for other machines.
pub(crate) fn event_clock() -> Clock {
    Clock::on_kernel_clock()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::{Instant, Span};

    use super::{Event, SET, UtcTime, WAITING_MAX, event_channel};

    fn test_event(number: usize) -> Event {
        Event { kind: SET, text: format!("number {number}"), about: json!({}) }
    }

    #[test]
    fn events_arrive_in_order_and_wake_the_receiver() {
        let (announcer, announced) = event_channel().unwrap();
        assert!(announced.next().is_none() && !announced.wake.clear_signals(0));
        let other = announcer.clone();
        announcer.emit(test_event(1));
        other.emit(test_event(2));
        assert!(announced.wake.wait_for_signal(0, Span::from_secs(10)).unwrap());
        let texts: Vec<_> = std::iter::from_fn(|| announced.next()).map(|it| it.text).collect();
        assert_eq!(texts, ["number 1", "number 2"]);
    }

    #[test]
    fn dropped_events_are_counted_and_reported_once() {
        let (announcer, announced) = event_channel().unwrap();
        (0..WAITING_MAX + 3).for_each(|number| announcer.emit(test_event(number)));
        assert_eq!(announced.next().unwrap().text, "3 events were dropped");
        assert_eq!(announced.next().unwrap(), test_event(0));
        assert_eq!(std::iter::from_fn(|| announced.next()).count(), WAITING_MAX - 1);
    }

    #[test]
    fn sender_outlives_the_receiver() {
        let (announcer, announced) = event_channel().unwrap();
        drop(announced);
        announcer.emit(test_event(1));
    }

    #[test]
    fn event_is_sent_with_one_line_of_data() {
        let event = Event { text: "two\nlines".into(), ..test_event(0) };
        let time = UtcTime { unix_us: 1_709_210_096_789_000 };
        let text = event.to_stream_text(Instant { ns: 5 }, time);
        let data = text.strip_prefix("event: set\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
        assert_eq!(data.lines().count(), 1);
        let expected = json!({
            "kind": "set",
            "time": "2024-02-29T12:34:56.789000Z",
            "monotonic_ns": 5,
            "text": "two\nlines",
            "about": {},
        });
        assert_eq!(serde_json::from_str::<Value>(data).unwrap(), expected);
    }
}
