//! Events of mirrors that the process has open.

use serde_json::json;
use tenmil_drivers::mirror::{MirrorEvent, MirrorNotice};

use crate::event::{Event, EventKind, EventSender};

const DEGRADED: EventKind =
    mirror_event_kind("mirror-degraded", "a mirror was opened with a missing or stale leg");
const LOST: EventKind =
    mirror_event_kind("mirror-leg-lost", "a leg of a mirror failed and became stale");
const RETURNED: EventKind = mirror_event_kind(
    "mirror-leg-returned",
    "a stale leg of a mirror is reachable again and is being resynchronized",
);
const IN_SYNC: EventKind = mirror_event_kind(
    "mirror-leg-in-sync",
    "the resynchronization of a leg of a mirror has completed",
);
const WRITES_LOST: EventKind = mirror_event_kind(
    "mirror-writes-lost",
    "completed but unflushed writes may be lost on every leg of a mirror",
);

const TAKEN_OVER: EventKind = mirror_event_kind(
    "mirror-taken-over",
    "another process has taken over a mirror, which is no longer used here",
);

pub(super) const EVENTS: &[EventKind] =
    &[DEGRADED, LOST, RETURNED, IN_SYNC, WRITES_LOST, TAKEN_OVER];

const fn mirror_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl EventSender {
    /// Emits an event of a mirror.
    pub fn emit_mirror_event(&self, new_events: &MirrorNotice) {
        let kind = match new_events.event {
            MirrorEvent::Degraded { .. } => DEGRADED,
            MirrorEvent::LegLost { .. } => LOST,
            MirrorEvent::LegReturned { .. } => RETURNED,
            MirrorEvent::LegInSync { .. } => IN_SYNC,
            MirrorEvent::WritesLost => WRITES_LOST,
            MirrorEvent::TakenOver { .. } => TAKEN_OVER,
        };
        let about = json!({
            "device": new_events.device,
            "leg": new_events.event.leg(),
            "leg_device": new_events.leg_device,
            "legs_in_sync": new_events.legs_in_sync,
            "legs": new_events.legs,
        });
        self.emit(Event { kind, text: new_events.to_string(), about });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_drivers::mirror::{MirrorEvent, MirrorNotice};

    use crate::event::event_channel;

    #[test]
    fn mirror_notice_becomes_an_event() {
        let (announcer, announced) = event_channel().unwrap();
        for event in [MirrorEvent::LegLost { leg: 1 }, MirrorEvent::WritesLost] {
            let (device, leg_device) = ("mirror:[ram:1m],[ram:1m]".to_owned(), None);
            announcer.emit_mirror_event(&MirrorNotice {
                device,
                event,
                leg_device,
                legs_in_sync: 1,
                legs: 2,
            });
        }
        let events: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
        let kinds: Vec<&str> = events.iter().map(|event| event.kind.name).collect();
        assert_eq!(kinds, ["mirror-leg-lost", "mirror-writes-lost"]);
        assert_eq!(events[0].about["leg"], 1);
        assert_eq!(events[1].about["leg"], serde_json::Value::Null);
    }
}
