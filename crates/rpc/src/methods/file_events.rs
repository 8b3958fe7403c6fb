//! Events of files and block devices that the process has open.

use serde_json::json;
use tenmil_drivers::LostWrite;

use crate::event::{Event, EventKind, EventSender};

const WRITE_LOST: EventKind = EventKind {
    name: "write-lost",
    help: "the kernel failed to write completed writes of a file to stable storage",
};

pub(super) const EVENTS: &[EventKind] = &[WRITE_LOST];

impl EventSender {
    /// Emits an event for lost writes of a file.
    pub fn emit_lost_write(&self, lost: &LostWrite) {
        let about = json!({ "path": lost.path.display().to_string(), "error": lost.error });
        self.emit(Event { kind: WRITE_LOST, text: lost.to_string(), about });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_drivers::LostWrite;

    use crate::event::event_channel;

    #[test]
    fn writeback_loss_event_names_the_file_and_the_error() {
        let (announcer, announced) = event_channel().unwrap();
        announcer.emit_lost_write(&LostWrite { path: "/a".into(), error: "EIO".into() });
        let event = announced.next().unwrap();
        assert_eq!((event.kind.name, &event.about["path"]), ("write-lost", &"/a".into()));
        assert!(event.text.starts_with("flush /a: EIO; "), "{}", event.text);
    }
}
