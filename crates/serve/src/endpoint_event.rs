//! Events of the vfio-user and vhost-user endpoints.

use std::sync::mpsc::SyncSender;

use tenmil_base::{Instant, Span};

/// Event of an endpoint that serves one client at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointEvent {
    /// A client connected. Describes the client.
    Connected(String),
    /// The client disconnected, or was disconnected for the given reason.
    Disconnected(Option<String>),
    /// An error that is worth reporting to the operator.
    Error(String),
}

/// Reports events of an endpoint to its server.
pub(crate) struct EventReporter {
    events: SyncSender<EndpointEvent>,
    /// Number of events that did not fit into the channel.
    dropped: u64,
    /// Number of errors of the current client.
    errors: u64,
}

/// Deadline after which a slow drain is reported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlowDrainReport {
    until: Instant,
    is_late: bool,
}

/// Time after which a slow drain is reported.
pub(crate) const DRAIN_WARNING: Span = Span::from_secs(5);
/// Largest number of reported errors of a client.
const ERRORS_MAX: u64 = 16;

impl EndpointEvent {
    /// Prefixes the text with the endpoint's address, to distinguish the endpoints of one process.
    #[must_use]
    pub fn with_endpoint_address(self, place: &str) -> Self {
        let named = |text| format!("{place}: {text}");
        match self {
            Self::Connected(who) => Self::Connected(named(who)),
            Self::Disconnected(why) => Self::Disconnected(why.map(named)),
            Self::Error(text) => Self::Error(named(text)),
        }
    }
}

impl EventReporter {
    pub(crate) const fn new(events: SyncSender<EndpointEvent>) -> Self {
        Self { events, dropped: 0, errors: 0 }
    }

    /// Emits an event. If the channel is full, the number of lost events is reported later.
    pub(crate) fn report(&mut self, event: EndpointEvent) {
        if self.dropped > 0 {
            let text = format!("{} more events than could be reported", self.dropped);
            if self.events.try_send(EndpointEvent::Error(text)).is_ok() {
                self.dropped = 0;
            }
        }
        self.dropped += u64::from(self.events.try_send(event).is_err());
    }

    /// Reports an error of the client, up to a limit per client.
    pub(crate) fn report_error(&mut self, text: String) {
        self.errors += 1;
        if self.errors <= ERRORS_MAX {
            self.report(EndpointEvent::Error(text));
        }
    }

    /// Reports that the client has disconnected. `client` is what it is called.
    pub(crate) fn report_disconnect(&mut self, why: Option<String>, client: &str) {
        if let Some(more) = self.errors.checked_sub(ERRORS_MAX).filter(|more| *more > 0) {
            self.report(EndpointEvent::Error(format!("{more} more of the same {client}")));
        }
        self.errors = 0;
        self.report(EndpointEvent::Disconnected(why));
    }
}

impl SlowDrainReport {
    pub(crate) fn new(now: Instant) -> Self {
        Self { until: now.after(DRAIN_WARNING), is_late: false }
    }

    /// Whether it was reported.
    pub(crate) const fn has_reported(&self) -> bool {
        self.is_late
    }

    /// Time of the report, if it is still to come.
    pub(crate) fn wake_at(&self) -> Instant {
        if self.is_late { Instant::NEVER } else { self.until }
    }

    /// Reports once that the deadline has passed.
    pub(crate) fn report_slow_drain(
        &mut self,
        now: Instant,
        reporter: &mut EventReporter,
        text: impl FnOnce() -> String,
    ) {
        if !self.is_late && now >= self.until {
            self.is_late = true;
            reporter.report(EndpointEvent::Error(text()));
        }
    }
}
