//! Events: what a program says without being asked.
//!
//! Whoever has something to say has an [`Announcer`], and says it without waiting. What nobody was
//! quick enough to take is lost, and how much that was is itself an event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use base::{Instant, Interrupts};
use host::{Clock, EventVectors};
use serde_json::{Value, json};

/// A kind of event, as a constant of whoever announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventKind {
    /// A word that does not change its meaning.
    pub name: &'static str,
    /// When it comes, as half a sentence.
    pub help: &'static str,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Which kind.
    pub kind: EventKind,
    /// A line for people.
    pub text: String,
    /// An object for programs.
    pub about: Value,
}

/// Somebody changed something.
pub(crate) const SET: EventKind =
    EventKind { name: "set", help: "a set method was called and did what it was asked" };
/// Announcements were lost.
pub(crate) const LOST: EventKind =
    EventKind { name: "lost", help: "so many events came faster than they could be told" };
/// The server ends.
pub(crate) const ENDING: EventKind =
    EventKind { name: "ending", help: "the process stops serving; nothing comes after this" };

impl EventKind {
    /// The kinds that every server has.
    pub const COMMON: [Self; 3] = [SET, LOST, ENDING];
}

/// Says things. Cheap to clone; any thread may have one.
#[derive(Clone, Debug)]
pub struct Announcer {
    queue: SyncSender<Event>,
    lost: Arc<AtomicU64>,
    wake: EventVectors,
}

/// Where what is announced comes out: a server's.
#[derive(Debug)]
pub struct Announcements {
    queue: Receiver<Event>,
    lost: Arc<AtomicU64>,
    pub(crate) wake: EventVectors,
}

/// As many announcements wait to be told.
const WAITING_MAX: usize = 256;

/// A place to say things at, and the other end of it.
pub fn announcements() -> std::io::Result<(Announcer, Announcements)> {
    let (sender, receiver) = sync_channel(WAITING_MAX);
    let lost = Arc::new(AtomicU64::new(0));
    let wake = EventVectors::new(1)?;
    let announcer = Announcer { queue: sender, lost: Arc::clone(&lost), wake: wake.clone() };
    Ok((announcer, Announcements { queue: receiver, lost, wake }))
}

impl Announcer {
    /// Says something. Does not wait: costs an allocation and a system call, so it is for what
    /// happens rarely.
    pub fn announce(&self, event: Event) {
        if self.queue.try_send(event).is_err() {
            // Only a count: nothing else is published by it.
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.wake.clone().raise(0);
    }

    /// Has whoever serves look around.
    pub(crate) fn wake(&self) {
        self.wake.clone().raise(0);
    }

    /// So many things happened that nobody will be told of.
    pub(crate) fn announce_lost(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
        self.wake.clone().raise(0);
    }
}

impl Announcements {
    /// The next one. What was lost comes before what came after it could be told again.
    pub(crate) fn next(&self) -> Option<Event> {
        match self.lost.swap(0, Ordering::Relaxed) {
            0 => self.queue.try_recv().ok(),
            count => Some(lost(count)),
        }
    }
}

fn lost(count: u64) -> Event {
    Event {
        kind: LOST,
        text: format!("{count} events were lost"),
        about: json!({ "count": count }),
    }
}

impl Event {
    /// The line it is told in.
    pub(crate) fn to_line(&self, now: Instant) -> Vec<u8> {
        let event = json!({
            "kind": self.kind.name,
            "at_ns": now.ns,
            "text": self.text,
            "about": self.about,
        });
        let mut line = json!({ "event": event }).to_string().into_bytes();
        line.push(b'\n');
        line
    }
}

/// The clock of events: that of the kernel, so that programs on one machine can put their events in
/// one order.
pub(crate) fn clock() -> Clock {
    Clock::kernel()
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};
    use serde_json::{Value, json};

    use super::{Event, SET, WAITING_MAX, announcements};

    fn event(number: usize) -> Event {
        Event { kind: SET, text: format!("number {number}"), about: json!({}) }
    }

    #[test]
    fn announcements_come_out_in_order_and_wake_whoever_waits() {
        let (announcer, announced) = announcements().unwrap();
        assert!(announced.next().is_none() && !announced.wake.clear(0));
        let other = announcer.clone();
        announcer.announce(event(1));
        other.announce(event(2));
        assert!(announced.wake.wait(0, Span::from_secs(10)).unwrap());
        let texts: Vec<_> = std::iter::from_fn(|| announced.next()).map(|it| it.text).collect();
        assert_eq!(texts, ["number 1", "number 2"]);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_the_count_is_told_once() {
        let (announcer, announced) = announcements().unwrap();
        (0..WAITING_MAX + 3).for_each(|number| announcer.announce(event(number)));
        assert_eq!(announced.next().unwrap().text, "3 events were lost");
        assert_eq!(announced.next().unwrap(), event(0));
        assert_eq!(std::iter::from_fn(|| announced.next()).count(), WAITING_MAX - 1);
    }

    #[test]
    fn an_announcer_outlives_whoever_listened() {
        let (announcer, announced) = announcements().unwrap();
        drop(announced);
        announcer.announce(event(1));
    }

    #[test]
    fn an_event_is_one_line() {
        let line = Event { text: "two\nlines".into(), ..event(0) }.to_line(Instant { ns: 5 });
        let text = String::from_utf8(line).unwrap();
        assert_eq!(text.lines().count(), 1);
        let value: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({ "kind": "set", "at_ns": 5, "text": "two\nlines", "about": {} });
        assert_eq!(value["event"], expected);
    }
}
