//! What happens to files and block devices that this process has open.

use block::LostWrite;
use serde_json::json;

use crate::event::{Announcer, Event, EventKind};

const WRITE_LOST: EventKind = EventKind {
    name: "write-lost",
    help: "the kernel could not bring answered writes of a file to stable storage",
};

pub(super) const EVENTS: &[EventKind] = &[WRITE_LOST];

impl Announcer {
    /// Announces that a file has lost writes.
    pub fn announce_lost_write(&self, lost: &LostWrite) {
        let about = json!({ "path": lost.path.display().to_string(), "error": lost.error });
        self.announce(Event { kind: WRITE_LOST, text: lost.to_string(), about });
    }
}

#[cfg(test)]
mod tests {
    use block::LostWrite;

    use crate::event::announcements;

    #[test]
    fn lost_write_names_the_file_and_the_error() {
        let (announcer, announced) = announcements().unwrap();
        announcer.announce_lost_write(&LostWrite { path: "/a".into(), error: "EIO".into() });
        let event = announced.next().unwrap();
        assert_eq!((event.kind.name, &event.about["path"]), ("write-lost", &"/a".into()));
        assert!(event.text.starts_with("flush /a: EIO; "), "{}", event.text);
    }
}
