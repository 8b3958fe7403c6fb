//! Events of pools that the process has open.

use serde_json::json;
use tenmil_drivers::pool::{CapacityEvent, CapacityState, PoolStopEvent};

use crate::event::{Event, EventKind, EventSender};

const FILLING: EventKind =
    pool_event_kind("pool-low-space", "the used space of a pool exceeds one of its thresholds");
const RELIEVED: EventKind = pool_event_kind(
    "pool-space-recovered",
    "the used space of a pool fell clearly below a threshold again",
);
const FULL: EventKind =
    pool_event_kind("pool-full", "a pool rejected a write or a change for lack of free space");

const STOPPED: EventKind = pool_event_kind(
    "pool-stopped",
    "a pool stopped accepting changes, because its device failed or another process owns it",
);

const RECOVERED: EventKind =
    pool_event_kind("pool-recovered", "a stopped pool resumed; unflushed writes may be lost");

pub(super) const EVENTS: &[EventKind] = &[FILLING, RELIEVED, FULL, STOPPED, RECOVERED];

const fn pool_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl EventSender {
    /// Emits an event about the free space of a pool.
    pub fn emit_capacity_event(&self, new_events: &CapacityEvent) {
        let (kind, percent) = match new_events.fill {
            CapacityState::Above(percent) => (FILLING, Some(percent)),
            CapacityState::Below(percent) => (RELIEVED, Some(percent)),
            CapacityState::Full => (FULL, None),
        };
        let about = json!({
            "pool": new_events.store,
            "device": new_events.device,
            "threshold_percent": percent,
            "used_bytes": new_events.used_bytes,
            "capacity_bytes": new_events.capacity_bytes,
        });
        self.emit(Event { kind, text: new_events.to_string(), about });
    }

    /// Emits an event when a pool stops or recovers.
    pub fn emit_pool_stop(&self, new_events: &PoolStopEvent) {
        let about = json!({
            "pool": new_events.store,
            "device": new_events.device,
            "why": new_events.why.to_string(),
        });
        let kind = if new_events.recovered.is_some() { RECOVERED } else { STOPPED };
        self.emit(Event { kind, text: new_events.to_string(), about });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_drivers::pool::{CapacityEvent, CapacityState};

    use crate::event::event_channel;

    #[test]
    fn capacity_event_becomes_an_rpc_event() {
        let (announcer, announced) = event_channel().unwrap();
        for fill in [CapacityState::Above(80), CapacityState::Full, CapacityState::Below(80)] {
            let (device, store) = ("ram:1g".to_owned(), "pool".to_owned());
            let new_events =
                CapacityEvent { device, store, fill, used_bytes: 8, capacity_bytes: 10 };
            announcer.emit_capacity_event(&new_events);
        }
        let events: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
        let kinds: Vec<&str> = events.iter().map(|event| event.kind.name).collect();
        assert_eq!(kinds, ["pool-low-space", "pool-full", "pool-space-recovered"]);
        assert_eq!(events[0].about["threshold_percent"], 80);
        assert_eq!(events[1].about["threshold_percent"], serde_json::Value::Null);
        assert!(events[0].text.contains("80 % of its capacity are used: 8 of 10 bytes"));
    }
}
