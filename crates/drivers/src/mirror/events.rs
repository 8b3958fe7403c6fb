//! Events of the mirrors of this process, for logs and event streams.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tenmil_block::uri::short_form_for_terminal;

/// An event with its mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorNotice {
    /// The URI of the mirror.
    pub device: String,
    /// The event.
    pub event: MirrorEvent,
    /// The device of the affected leg, if known.
    pub leg_device: Option<String>,
    /// Current number of in-sync legs.
    pub legs_in_sync: u32,
    /// Number of legs of the mirror.
    pub legs: u32,
}

/// An event of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorEvent {
    /// It was opened without this leg, or with this leg stale.
    Degraded {
        /// Leg number.
        leg: u8,
    },
    /// An in-sync leg failed and is stale.
    LegLost {
        /// Leg number.
        leg: u8,
    },
    /// A stale leg responds again and is being resynchronized.
    LegReturned {
        /// Leg number.
        leg: u8,
    },
    /// A leg has been resynchronized.
    LegInSync {
        /// Leg number.
        leg: u8,
    },
    /// No leg has all writes that were completed and not flushed; flushes fail.
    WritesLost,
    /// Another process owns the mirror now; it is no longer used here.
    TakenOver {
        /// The new owner, if known.
        by: Option<tenmil_volume::PoolOwner>,
    },
}

/// Event counters since a mirror was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorEventCounters {
    /// Legs that failed and became stale.
    pub legs_lost: u64,
    /// Stale legs that responded again.
    pub legs_returned: u64,
    /// Legs that were resynchronized.
    pub legs_resynchronized: u64,
    /// Losses of completed writes on all legs.
    pub writes_lost: u64,
}

/// Events that have not been emitted yet, and the counters.
#[derive(Debug, Default)]
pub(super) struct PendingEvents {
    events: VecDeque<MirrorEvent>,
    pub(super) counters: MirrorEventCounters,
}

type Subscriber = Box<dyn Fn(&MirrorNotice) + Send>;

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());
/// Whether there is a subscriber. Events are kept until the first subscribes.
static HAS_SUBSCRIBER: AtomicBool = AtomicBool::new(false);
/// Maximum number of kept events. The oldest are dropped; the counters include them.
const WAITING_MAX: usize = 64;

/// Subscribes to the events of all mirrors of this process. `subscriber` is called within a second, on the
/// mirror's maintenance thread, for as long as the process runs.
pub fn subscribe_mirror_events(subscriber: impl Fn(&MirrorNotice) + Send + 'static) {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(subscriber));
    // Relaxed: a reader that sees it takes the lock.
    HAS_SUBSCRIBER.store(true, Ordering::Relaxed);
}

impl PendingEvents {
    pub(super) fn count_and_queue(&mut self, event: MirrorEvent) {
        let MirrorEventCounters { legs_lost, legs_returned, legs_resynchronized, writes_lost } =
            &mut self.counters;
        match event {
            MirrorEvent::Degraded { .. } | MirrorEvent::TakenOver { .. } => {}
            MirrorEvent::LegLost { .. } => *legs_lost += 1,
            MirrorEvent::LegReturned { .. } => *legs_returned += 1,
            MirrorEvent::LegInSync { .. } => *legs_resynchronized += 1,
            MirrorEvent::WritesLost => *writes_lost += 1,
        }
        if self.events.len() == WAITING_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Events to emit now, if there is a subscriber.
    pub(super) fn take_if_subscribed(&mut self) -> VecDeque<MirrorEvent> {
        match HAS_SUBSCRIBER.load(Ordering::Relaxed) {
            true => std::mem::take(&mut self.events),
            false => VecDeque::new(),
        }
    }
}

impl MirrorEvent {
    /// The affected leg.
    pub const fn leg(self) -> Option<u8> {
        match self {
            Self::Degraded { leg }
            | Self::LegLost { leg }
            | Self::LegReturned { leg }
            | Self::LegInSync { leg } => Some(leg),
            Self::WritesLost | Self::TakenOver { .. } => None,
        }
    }
}

impl MirrorNotice {
    pub(super) fn emit(&self) {
        let hearers = SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner);
        hearers.iter().for_each(|subscriber| subscriber(self));
    }
}

impl fmt::Display for MirrorNotice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, event, leg_device, legs_in_sync, legs } = self;
        write!(out, "{}: ", short_form_for_terminal(device))?;
        if let Some(leg) = event.leg() {
            let leg_device = leg_device.as_deref().map_or("absent".into(), short_form_for_terminal);
            write!(out, "leg {leg} ({leg_device}) ")?;
        }
        match event {
            MirrorEvent::Degraded { .. } => write!(out, "is not in sync")?,
            MirrorEvent::LegLost { .. } => write!(out, "failed and is stale")?,
            MirrorEvent::LegReturned { .. } => write!(out, "responds again, resynchronizing it")?,
            MirrorEvent::LegInSync { .. } => write!(out, "is in sync again")?,
            MirrorEvent::WritesLost => {
                write!(out, "completed writes that were not flushed may be lost on every leg")?;
            }
            MirrorEvent::TakenOver { by } => {
                let by = by.map_or("another process".to_owned(), |by| by.to_string());
                return write!(out, "taken over by {by}: it is not used here any more");
            }
        }
        let health = if legs_in_sync < legs { "degraded" } else { "healthy" };
        write!(out, "; {legs_in_sync} of {legs} legs in sync, {health}")
    }
}

#[cfg(test)]
mod tests {
    use super::{MirrorEvent, MirrorEventCounters, MirrorNotice, PendingEvents, WAITING_MAX};

    #[test]
    fn mirror_event_names_leg_device_and_health() {
        let text = |event, legs_in_sync| {
            let (device, leg_device) = ("mirror:[ram:1m],[ram:1m]".into(), Some("ram:1m".into()));
            MirrorNotice { device, event, leg_device, legs_in_sync, legs: 2 }.to_string()
        };
        assert_eq!(
            text(MirrorEvent::LegLost { leg: 1 }, 1),
            "mirror:[ram:1m],[ram:1m]: leg 1 (ram:1m) failed and is stale; 1 of 2 legs in sync, \
             degraded"
        );
        assert!(text(MirrorEvent::LegInSync { leg: 1 }, 2).ends_with("2 legs in sync, healthy"));
        assert!(text(MirrorEvent::WritesLost, 2).contains(": completed writes that were not"));
    }

    #[test]
    fn unread_mirror_events_are_bounded_and_counted() {
        let mut waiting = PendingEvents::default();
        (0..WAITING_MAX + 9).for_each(|_| waiting.count_and_queue(MirrorEvent::LegLost { leg: 0 }));
        waiting.count_and_queue(MirrorEvent::LegInSync { leg: 0 });
        assert_eq!(waiting.events.len(), WAITING_MAX);
        assert_eq!(waiting.events.back(), Some(&MirrorEvent::LegInSync { leg: 0 }));
        let counters = MirrorEventCounters {
            legs_lost: WAITING_MAX as u64 + 9,
            legs_resynchronized: 1,
            ..MirrorEventCounters::default()
        };
        assert_eq!(waiting.counters, counters);
    }
}
