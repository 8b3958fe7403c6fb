//! Asynchronous events: what has happened, what the host wants to hear of, and what it has still to
//! acknowledge (Base 2.1 §5.1.2).
//!
//! ```text
//!   happened ──▶ pending ──(a request is parked, its type is not masked)──▶ reported
//!                   ▲                                                          │ type masked
//!                   └────────── cleared by reading the log page ◀──────────────┘ until then
//! ```

use std::collections::VecDeque;

use wire::Status;
use wire::log::LogPage;
use wire::log::event::{
    CommandSetEvent, ErrorEvent, EventResult, EventType, HealthEvent, NoticeEvent,
};

/// The event machine of one controller.
#[derive(Debug)]
pub(super) struct Events {
    /// How many requests may be parked.
    requests_max: u16,
    /// How many are parked.
    requests: u16,
    /// What the host has not been told yet, oldest first; each event once.
    pending: VecDeque<Event>,
    /// What it has been told and has not acknowledged: at most one per type.
    reported: Vec<Event>,
}

/// An event that a host can be told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    kind: EventType,
    information: u8,
    /// The log page that tells more, and whose reading acknowledges the event.
    log_page: LogPage,
}

impl Event {
    /// A doorbell was written that does not exist.
    pub(super) const INVALID_DOORBELL: Self = Self::error(ErrorEvent::InvalidDoorbell);
    /// A doorbell was written with a value that cannot be.
    pub(super) const INVALID_DOORBELL_VALUE: Self = Self::error(ErrorEvent::InvalidDoorbellValue);
    /// A self-test has failed.
    pub(super) const DIAGNOSTIC_FAILURE: Self = Self::error(ErrorEvent::DiagnosticFailure);
    /// Reliability is compromised.
    pub(super) const RELIABILITY: Self = Self::health(HealthEvent::Reliability);
    /// A temperature has passed its threshold.
    pub(super) const TEMPERATURE: Self = Self::health(HealthEvent::Temperature);
    /// Spare capacity is below its threshold.
    pub(super) const SPARE: Self = Self::health(HealthEvent::Spare);
    /// Something about a namespace has changed.
    pub(super) const NAMESPACE_CHANGED: Self =
        Self::notice(NoticeEvent::NamespaceChanged, LogPage::ChangedNamespaces);
    /// Firmware is about to be activated.
    pub(super) const FIRMWARE_ACTIVATION: Self =
        Self::notice(NoticeEvent::FirmwareActivation, LogPage::FirmwareSlot);
    /// An asymmetric access state has changed.
    pub(super) const ANA_CHANGED: Self = Self::notice(NoticeEvent::Ana, LogPage::Ana);
    /// A reservation notification is there to be read.
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

    /// A request comes to be parked.
    pub(super) fn request(&mut self) -> Result<(), Status> {
        if self.requests >= self.requests_max {
            return Err(Status::AER_LIMIT_EXCEEDED);
        }
        self.requests += 1;
        Ok(())
    }

    /// A parked request was aborted.
    pub(super) const fn request_aborted(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    /// Something has happened that the host wants to hear of.
    pub(super) fn happened(&mut self, event: Event) {
        if !self.pending.contains(&event) {
            self.pending.push_back(event);
        }
    }

    /// The result for the oldest parked request, if there is one and something to report.
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.requests == 0 {
            return None;
        }
        let is_masked = |event: &Event| self.reported.iter().any(|told| told.kind == event.kind);
        let at = self.pending.iter().position(|event| !is_masked(event))?;
        let event = self.pending.remove(at)?;
        self.requests -= 1;
        self.reported.push(event);
        Some(event.dword())
    }

    /// The host has read a log page without asking to retain the event: what that page tells of,
    /// told or untold, is acknowledged.
    pub(super) fn acknowledge(&mut self, log_page: LogPage) {
        self.reported.retain(|event| event.log_page != log_page);
        self.pending.retain(|event| event.log_page != log_page);
    }

    /// The controller was reset: nothing is parked and nothing is owed.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.requests_max);
    }
}

#[cfg(test)]
mod tests {
    use wire::Status;
    use wire::log::LogPage;

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
        events.happened(Event::SPARE);
        assert!(events.next().is_some());
        assert_eq!(events.request(), Ok(()));
    }

    #[test]
    fn an_event_waits_for_a_request() {
        let mut events = Events::new(1);
        events.happened(Event::NAMESPACE_CHANGED);
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
                events.happened(told);
                assert_eq!(events.next(), Some(told.dword()));
                events.happened(next);
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
        events.happened(Event::NAMESPACE_CHANGED);
        events.acknowledge(LogPage::ChangedNamespaces);
        assert_eq!(events.next(), None);
    }

    #[test]
    fn the_same_event_is_told_once() {
        let mut events = with_requests(4);
        events.happened(Event::SPARE);
        events.happened(Event::SPARE);
        assert!(events.next().is_some());
        events.acknowledge(LogPage::Health);
        assert_eq!(events.next(), None);
    }

    #[test]
    fn a_reset_forgets_requests_events_and_masks() {
        let mut events = with_requests(2);
        events.happened(Event::SPARE);
        events.next();
        events.happened(Event::NAMESPACE_CHANGED);
        events.reset();
        events.request().unwrap();
        assert_eq!(events.next(), None);
        events.happened(Event::SPARE);
        assert_eq!(events.next(), Some(Event::SPARE.dword()));
    }
}
