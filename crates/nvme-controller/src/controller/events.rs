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
pub(super) struct Events {
    /// Maximum outstanding requests.
    requests_max: u16,
    /// Outstanding requests.
    requests: u16,
    /// Events not yet reported, oldest first; each event once.
    pending: VecDeque<Event>,
    /// Events reported and not acknowledged: at most one per type.
    reported: Vec<Event>,
}

/// Asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    kind: EventType,
    information: u8,
    /// Log page with the details, whose reading acknowledges the event.
    log_page: LogPage,
}

impl Event {
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
    fn dword(self) -> u32 {
        let Self { kind, information, log_page } = self;
        let result = EventResult::zeroed();
        result.with(|result| result.aet(kind).aei(information).lid(log_page.code())).0
    }
}

impl Events {
    pub(super) const fn new(requests_max: u16) -> Self {
        Self { requests_max, requests: 0, pending: VecDeque::new(), reported: Vec::new() }
    }

    /// Accepts an Asynchronous Event Request, which becomes outstanding.
    pub(super) fn request(&mut self) -> Result<(), Status> {
        if self.requests >= self.requests_max {
            return Err(Status::AER_LIMIT_EXCEEDED);
        }
        self.requests += 1;
        Ok(())
    }

    /// Records that an outstanding request was aborted.
    pub(super) const fn request_aborted(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    /// Raises an event that the host has enabled.
    pub(super) fn raise(&mut self, event: Event) {
        if !self.pending.contains(&event) {
            self.pending.push_back(event);
        }
    }

    /// Result for the oldest outstanding request, if there is one and an event is pending.
    #[inline]
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.requests == 0 || self.pending.is_empty() { None } else { self.report_next() }
    }

    fn report_next(&mut self) -> Option<u32> {
        // At most one event of a type is reported until its log page is read (Base 2.1 §5.1.2).
        let is_masked = |event: &Event| self.reported.iter().any(|told| told.kind == event.kind);
        let at = self.pending.iter().position(|event| !is_masked(event))?;
        let event = self.pending.remove(at)?;
        self.requests -= 1;
        self.reported.push(event);
        Some(event.dword())
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

    use super::{Event, Events};

    const ALL: [Event; 10] = [
        Event::INVALID_DOORBELL,
        Event::INVALID_DOORBELL_VALUE,
        Event::DIAGNOSTIC_FAILURE,
        Event::RELIABILITY,
        Event::TEMPERATURE,
        Event::SPARE,
        Event::NAMESPACE_CHANGED,
        Event::FIRMWARE_ACTIVATION,
        Event::ANA_CHANGED,
        Event::RESERVATION,
    ];

    fn with_requests(count: u16) -> Events {
        let mut events = Events::new(count);
        for _ in 0..count {
            events.request().unwrap();
        }
        events
    }

    #[test]
    fn requests_beyond_the_limit_are_refused_until_one_is_answered_or_aborted() {
        let mut events = with_requests(2);
        assert_eq!(events.request(), Err(Status::AER_LIMIT_EXCEEDED));
        events.request_aborted();
        assert_eq!(events.request(), Ok(()));
        events.raise(Event::SPARE);
        assert!(events.next().is_some());
        assert_eq!(events.request(), Ok(()));
    }

    #[test]
    fn an_event_waits_for_a_request() {
        let mut events = Events::new(1);
        events.raise(Event::NAMESPACE_CHANGED);
        assert_eq!(events.next(), None);
        events.request().unwrap();
        assert_eq!(events.next(), Some(0x0004_0002));
    }

    #[test]
    fn each_event_has_its_dword() {
        let expected = [
            0x1_0000, 0x1_0100, 0x1_0200, 0x2_0001, 0x2_0101, 0x2_0201, 0x4_0002, 0x3_0102,
            0xc_0302, 0x80_0006,
        ];
        assert_eq!(ALL.map(Event::dword), expected);
    }

    #[test]
    fn a_type_that_was_told_is_masked_until_its_page_is_read() {
        for told in ALL {
            for next in ALL.into_iter().filter(|&next| next != told) {
                let mut events = with_requests(4);
                events.raise(told);
                assert_eq!(events.next(), Some(told.dword()));
                events.raise(next);
                let masked = told.kind == next.kind;
                assert_eq!(events.next().is_none(), masked, "{told:?}, then {next:?}");
                events.acknowledge(told.log_page);
                let lost = masked && told.log_page == next.log_page;
                assert_eq!(events.next().is_some(), masked && !lost, "{told:?}, then {next:?}");
            }
        }
    }

    #[test]
    fn reading_a_page_first_leaves_nothing_to_tell() {
        let mut events = with_requests(1);
        events.raise(Event::NAMESPACE_CHANGED);
        events.acknowledge(LogPage::ChangedNamespaces);
        assert_eq!(events.next(), None);
    }

    #[test]
    fn the_same_event_is_told_once() {
        let mut events = with_requests(4);
        events.raise(Event::SPARE);
        events.raise(Event::SPARE);
        assert!(events.next().is_some());
        events.acknowledge(LogPage::Health);
        assert_eq!(events.next(), None);
    }

    #[test]
    fn a_reset_forgets_requests_events_and_masks() {
        let mut events = with_requests(2);
        events.raise(Event::SPARE);
        events.next();
        events.raise(Event::NAMESPACE_CHANGED);
        events.reset();
        events.request().unwrap();
        assert_eq!(events.next(), None);
        events.raise(Event::SPARE);
        assert_eq!(events.next(), Some(Event::SPARE.dword()));
    }
}
