//! Asynchronous events: pending, reported and acknowledged (Base 2.1 §5.1.2).
//!
//! ```text
//!   raised ────▶ pending ──(a request is outstanding, its type is not masked)──▶ reported
//!                   ▲                                                          │ type masked
//!                   └────────── cleared by reading the log page ◀──────────────┘ until then
//! ```

use std::collections::VecDeque;

use tenmil_wire::Status;
use tenmil_wire::log::LogPage;
use tenmil_wire::log::event::{
    CommandSetEvent, ErrorEvent, EventResult, EventType, HealthEvent, NoticeEvent,
};

/// Event state machine of one controller.
#[derive(Debug)]
pub(super) struct AsyncEventQueue {
    /// Maximum outstanding requests.
    requests_max: u16,
    /// Outstanding requests.
    requests: u16,
    /// Events not yet reported, oldest first; each event once.
    pending: VecDeque<AsyncEvent>,
    /// Events reported and not acknowledged: at most one per type.
    reported: Vec<AsyncEvent>,
}

/// Asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AsyncEvent {
    kind: EventType,
    information: u8,
    /// Log page with the details, whose reading acknowledges the event.
    log_page: LogPage,
}

impl AsyncEvent {
    /// A doorbell that does not exist was written.
    pub(super) const INVALID_DOORBELL: Self = Self::error(ErrorEvent::InvalidDoorbell);
    /// An invalid value was written to a doorbell.
    pub(super) const INVALID_DOORBELL_VALUE: Self = Self::error(ErrorEvent::InvalidDoorbellValue);
    /// A self-test has failed.
    pub(super) const DIAGNOSTIC_FAILURE: Self = Self::error(ErrorEvent::DiagnosticFailure);
    /// Reliability is compromised.
    pub(super) const RELIABILITY: Self = Self::health(HealthEvent::Reliability);
    /// A temperature has passed its threshold.
    pub(super) const TEMPERATURE: Self = Self::health(HealthEvent::Temperature);
    /// Spare capacity is below its threshold.
    pub(super) const SPARE: Self = Self::health(HealthEvent::Spare);
    /// A namespace attribute has changed.
    pub(super) const NAMESPACE_CHANGED: Self =
        Self::notice(NoticeEvent::NamespaceChanged, LogPage::ChangedNamespaces);
    /// Firmware is about to be activated.
    pub(super) const FIRMWARE_ACTIVATION: Self =
        Self::notice(NoticeEvent::FirmwareActivation, LogPage::FirmwareSlot);
    /// An asymmetric namespace access state has changed.
    pub(super) const ANA_CHANGED: Self = Self::notice(NoticeEvent::Ana, LogPage::Ana);
    /// A reservation notification is available.
    pub(super) const RESERVATION: Self = Self {
        kind: EventType::CommandSet,
        information: CommandSetEvent::Reservation.code(),
        log_page: LogPage::ReservationNotification,
    };

    const fn error(event: ErrorEvent) -> Self {
        let log_page = LogPage::ErrorInformation;
        Self { kind: EventType::Error, information: event.code(), log_page }
    }

    const fn health(event: HealthEvent) -> Self {
        Self { kind: EventType::Health, information: event.code(), log_page: LogPage::Health }
    }

    const fn notice(event: NoticeEvent, log_page: LogPage) -> Self {
        Self { kind: EventType::Notice, information: event.code(), log_page }
    }

    /// Dword 0 of the completion (Base 2.1 §5.1.2.1).
    fn completion_dword0(self) -> u32 {
        let Self { kind, information, log_page } = self;
        let result = EventResult::zeroed();
        result.with(|result| result.aet(kind).aei(information).lid(log_page.code())).0
    }
}

impl AsyncEventQueue {
    pub(super) const fn new(requests_max: u16) -> Self {
        Self { requests_max, requests: 0, pending: VecDeque::new(), reported: Vec::new() }
    }

    /// Accepts an Asynchronous Event Request, which becomes outstanding.
    pub(super) fn accept_request(&mut self) -> Result<(), Status> {
        if self.requests >= self.requests_max {
            return Err(Status::AER_LIMIT_EXCEEDED);
        }
        self.requests += 1;
        Ok(())
    }

    /// Records that an outstanding request was aborted.
    pub(super) const fn note_request_aborted(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    /// Raises an event that the host has enabled.
    pub(super) fn raise_event(&mut self, event: AsyncEvent) {
        if !self.pending.contains(&event) {
            self.pending.push_back(event);
        }
    }

    /// Result for the oldest outstanding request, if there is one and an event is pending.
    #[inline]
    pub(super) fn next_reported_event(&mut self) -> Option<u32> {
        if self.requests == 0 || self.pending.is_empty() { None } else { self.report_next() }
    }

    fn report_next(&mut self) -> Option<u32> {
        // At most one event of a type is reported until its log page is read (Base 2.1 §5.1.2).
        let is_masked = |event: &AsyncEvent| {
            self.reported.iter().any(|reported_values| reported_values.kind == event.kind)
        };
        let at = self.pending.iter().position(|event| !is_masked(event))?;
        let event = self.pending.remove(at)?;
        self.requests -= 1;
        self.reported.push(event);
        Some(event.completion_dword0())
    }

    /// Acknowledges the events of a log page that the host has read without Retain Asynchronous Event,
    /// whether reported or pending.
    pub(super) fn acknowledge(&mut self, log_page: LogPage) {
        self.reported.retain(|event| event.log_page != log_page);
        self.pending.retain(|event| event.log_page != log_page);
    }

    /// Handles a controller reset: drops requests and events.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.requests_max);
    }
}

#[cfg(test)]
mod tests {
    use tenmil_wire::Status;
    use tenmil_wire::log::LogPage;

    use super::{AsyncEvent, AsyncEventQueue};

    const ALL: [AsyncEvent; 10] = [
        AsyncEvent::INVALID_DOORBELL,
        AsyncEvent::INVALID_DOORBELL_VALUE,
        AsyncEvent::DIAGNOSTIC_FAILURE,
        AsyncEvent::RELIABILITY,
        AsyncEvent::TEMPERATURE,
        AsyncEvent::SPARE,
        AsyncEvent::NAMESPACE_CHANGED,
        AsyncEvent::FIRMWARE_ACTIVATION,
        AsyncEvent::ANA_CHANGED,
        AsyncEvent::RESERVATION,
    ];

    fn event_queue_with_requests(count: u16) -> AsyncEventQueue {
        let mut events = AsyncEventQueue::new(count);
        for _ in 0..count {
            events.accept_request().unwrap();
        }
        events
    }

    #[test]
    fn aer_limit_applies_until_a_request_completes_or_is_aborted() {
        let mut events = event_queue_with_requests(2);
        assert_eq!(events.accept_request(), Err(Status::AER_LIMIT_EXCEEDED));
        events.note_request_aborted();
        assert_eq!(events.accept_request(), Ok(()));
        events.raise_event(AsyncEvent::SPARE);
        assert!(events.next_reported_event().is_some());
        assert_eq!(events.accept_request(), Ok(()));
    }

    #[test]
    fn async_event_waits_for_a_request() {
        let mut events = AsyncEventQueue::new(1);
        events.raise_event(AsyncEvent::NAMESPACE_CHANGED);
        assert_eq!(events.next_reported_event(), None);
        events.accept_request().unwrap();
        assert_eq!(events.next_reported_event(), Some(0x0004_0002));
    }

    #[test]
    fn dword0_encodes_event_type_and_log_page() {
        let expected = [
            0x1_0000, 0x1_0100, 0x1_0200, 0x2_0001, 0x2_0101, 0x2_0201, 0x4_0002, 0x3_0102,
            0xc_0302, 0x80_0006,
        ];
        assert_eq!(ALL.map(AsyncEvent::completion_dword0), expected);
    }

    #[test]
    fn reported_event_type_is_masked_until_its_log_page_is_read() {
        for reported_values in ALL {
            for next in ALL.into_iter().filter(|&next| next != reported_values) {
                let mut events = event_queue_with_requests(4);
                events.raise_event(reported_values);
                assert_eq!(events.next_reported_event(), Some(reported_values.completion_dword0()));
                events.raise_event(next);
                let masked = reported_values.kind == next.kind;
                assert_eq!(
                    events.next_reported_event().is_none(),
                    masked,
                    "{reported_values:?}, then {next:?}"
                );
                events.acknowledge(reported_values.log_page);
                let lost = masked && reported_values.log_page == next.log_page;
                assert_eq!(
                    events.next_reported_event().is_some(),
                    masked && !lost,
                    "{reported_values:?}, then {next:?}"
                );
            }
        }
    }

    #[test]
    fn reading_the_log_page_before_the_report_drops_the_event() {
        let mut events = event_queue_with_requests(1);
        events.raise_event(AsyncEvent::NAMESPACE_CHANGED);
        events.acknowledge(LogPage::ChangedNamespaces);
        assert_eq!(events.next_reported_event(), None);
    }

    #[test]
    fn pending_duplicate_event_is_reported_once() {
        let mut events = event_queue_with_requests(4);
        events.raise_event(AsyncEvent::SPARE);
        events.raise_event(AsyncEvent::SPARE);
        assert!(events.next_reported_event().is_some());
        events.acknowledge(LogPage::Health);
        assert_eq!(events.next_reported_event(), None);
    }

    #[test]
    fn reset_clears_requests_events_and_masks() {
        let mut events = event_queue_with_requests(2);
        events.raise_event(AsyncEvent::SPARE);
        events.next_reported_event();
        events.raise_event(AsyncEvent::NAMESPACE_CHANGED);
        events.reset();
        events.accept_request().unwrap();
        assert_eq!(events.next_reported_event(), None);
        events.raise_event(AsyncEvent::SPARE);
        assert_eq!(events.next_reported_event(), Some(AsyncEvent::SPARE.completion_dword0()));
    }
}
