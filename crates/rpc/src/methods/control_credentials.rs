//! Event of the credentials of the control API: its certificate and its token.

use serde_json::json;
use tenmil_base::Error;

use crate::event::{Event, EventKind, EventSender};

const RELOADED: EventKind = EventKind {
    name: "control-credentials-reloaded",
    help: "the certificate and the token of the control API were read again on SIGHUP or a reload",
};
const ERROR: EventKind = EventKind {
    name: "control-credentials-error",
    help: "the certificate or the token of the control API could not be read again, and the former one stays",
};

pub(super) const EVENTS: &[EventKind] = &[RELOADED, ERROR];

impl EventSender {
    /// Emits the result of reading the certificate and the token again.
    pub fn emit_control_reload(&self, done: Result<(), &Error>) {
        let (kind, text) = match done {
            Ok(()) => (RELOADED, "control API: credentials were read again".to_owned()),
            Err(refused) => {
                (ERROR, format!("control API: credentials are unchanged: {}", refused.text))
            }
        };
        self.emit(Event { kind, text, about: json!({}) });
    }
}
