//! What happens to stores of volumes that this process has open.

use block::store::{Fill, RoomNews, StopNews};
use serde_json::json;

use crate::event::{Announcer, Event, EventKind};

const FILLING: EventKind =
    kind("store-filling", "more of a store's room is taken than one of its thresholds says");
const RELIEVED: EventKind =
    kind("store-relieved", "clearly less of a store's room is taken than a threshold says, again");
const FULL: EventKind =
    kind("store-full", "a store has refused a write or a change, for there is no room");

const STOPPED: EventKind = kind(
    "store-stopped",
    "a store takes no changes any more: its device has failed, or somebody else owns it",
);

const RECOVERED: EventKind = kind(
    "store-recovered",
    "a store that had stopped goes on; writes that were not flushed may be lost",
);

pub(super) const EVENTS: &[EventKind] = &[FILLING, RELIEVED, FULL, STOPPED, RECOVERED];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl Announcer {
    /// Announces how full a store has become.
    pub fn announce_room(&self, news: &RoomNews) {
        let (kind, percent) = match news.fill {
            Fill::Above(percent) => (FILLING, Some(percent)),
            Fill::Below(percent) => (RELIEVED, Some(percent)),
            Fill::Full => (FULL, None),
        };
        let about = json!({
            "store": news.store,
            "device": news.device,
            "threshold_percent": percent,
            "taken_bytes": news.taken_bytes,
            "room_bytes": news.room_bytes,
        });
        self.announce(Event { kind, text: news.to_string(), about });
    }

    /// Announces that a store has stopped, or goes on.
    pub fn announce_stop(&self, news: &StopNews) {
        let about = json!({
            "store": news.store,
            "device": news.device,
            "why": news.why.to_string(),
        });
        let kind = if news.recovered.is_some() { RECOVERED } else { STOPPED };
        self.announce(Event { kind, text: news.to_string(), about });
    }
}

#[cfg(test)]
mod tests {
    use block::store::{Fill, RoomNews};

    use crate::event::announcements;

    #[test]
    fn how_full_a_store_is_becomes_an_event() {
        let (announcer, announced) = announcements().unwrap();
        for fill in [Fill::Above(80), Fill::Full, Fill::Below(80)] {
            let (device, store) = ("ram:1g".to_owned(), "pool".to_owned());
            let news = RoomNews { device, store, fill, taken_bytes: 8, room_bytes: 10 };
            announcer.announce_room(&news);
        }
        let events: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
        let kinds: Vec<&str> = events.iter().map(|event| event.kind.name).collect();
        assert_eq!(kinds, ["store-filling", "store-full", "store-relieved"]);
        assert_eq!(events[0].about["threshold_percent"], 80);
        assert_eq!(events[1].about["threshold_percent"], serde_json::Value::Null);
        assert!(events[0].text.contains("80 % of its room are taken: 8 of 10 bytes"));
    }
}
