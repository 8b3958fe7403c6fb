//! Asynchronous events (Base 2.1 §5.1.2): keeps requests outstanding, and reads the log page of each
//! event, which also enables the next event of its type.
//!
//! ```text
//!   Asynchronous Event Request --> completion: type, information, log page
//!        ^-- sent again at once        '--> Get Log Page --> Event (and a scan, if namespaces)
//! ```

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::{Dma, Instant, IoCompletion, Mmio};
use tenmil_wire::Status;
use tenmil_wire::admin::AsynchronousEventRequest;
use tenmil_wire::feature::queue::AsynchronousEventConfiguration;
use tenmil_wire::identify::{BYTES, NSID_ALL, NamespaceList};
use tenmil_wire::log::event::{AsyncEvent as Notice, EventResult, NoticeEvent};
use tenmil_wire::log::health::{CriticalWarning, HealthInformation};
use tenmil_wire::log::{self, LogPage as Page};

use super::admin_queue_pair::{AdminCommandPurpose, EVENTS_MAX};
use super::initialization::AdminQuery;
use super::{Controller, Phase, QueueTransports};
use crate::event::Event;

/// Log pages to read when no query is outstanding: at most one entry per log page.
#[derive(Debug, Default)]
pub(super) struct PendingLogPages {
    logs: BTreeMap<u8, PendingLogPage>,
}

/// A log page, and the event that announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingLogPage {
    pub(super) id: u8,
    what: Notice,
}

impl PendingLogPages {
    pub(super) fn clear(&mut self) {
        self.logs.clear();
    }
}

impl PendingLogPage {
    /// Number of bytes to read. Reading any part is sufficient for the controller.
    pub(super) fn len_bytes(self) -> u32 {
        match Page::from_code(self.id) {
            Page::ErrorInformation => 64,
            Page::ChangedNamespaces => 4096,
            _ => 512,
        }
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Number of requests to keep outstanding.
    pub(super) fn wanted_event_request_count(&self) -> u16 {
        let limit = self.identity.as_ref().map_or(1, |identity| identity.limits.event_requests);
        limit.min(self.options.event_requests).min(EVENTS_MAX)
    }

    /// Events to enable: all health warnings, telemetry, and the notices used by the driver, if supported
    /// by the controller (Base 2.1 §5.1.25.1.5).
    pub(super) fn event_configuration(&self) -> AsynchronousEventConfiguration {
        let warnings = CriticalWarning::zeroed().with(|warnings| {
            let warnings = warnings.spare_below_threshold(true).temperature_threshold(true);
            warnings.degraded_reliability(true).media_read_only(true).volatile_backup_failed(true)
        });
        let has_telemetry = self.identity.as_ref().is_some_and(|of| of.page.telemetry());
        self.supported_notices()
            .with(|events| events.critical_warnings(warnings).telemetry_notices(has_telemetry))
    }

    /// Notices among these events, as supported by the controller (OAES).
    pub(super) fn supported_notices(&self) -> AsynchronousEventConfiguration {
        let events = AsynchronousEventConfiguration::zeroed();
        let Some(identity) = &self.identity else { return events };
        let page = &identity.page;
        events.with(|events| {
            events
                .namespace_attribute_notices(page.namespace_attribute_notices())
                .firmware_activation_notices(page.firmware_activation_notices())
                .ana_change_notices(page.ana_change_notices())
                .discovery_notices(page.discovery_notices())
        })
    }

    /// Falls back to notices, or to no events, after the controller has rejected the event configuration.
    pub(super) fn fall_back_to_notices(&mut self, has_notices: bool) {
        self.event_requests = self.wanted_event_request_count();
        if let Some(status) = self.events_refused {
            self.push_event(Event::EventConfigurationRefused { status, has_notices });
        }
    }

    /// Keeps requests outstanding, and reads the next pending log page.
    pub(super) fn poll_async_events(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Starting | Phase::Ready) {
            return;
        }
        let held = self.admin.outstanding_count(|purpose| *purpose == AdminCommandPurpose::Event);
        for _ in held..usize::from(self.event_requests) {
            self.admin.submit_internal(
                now,
                AdminCommandPurpose::Event,
                &AsynchronousEventRequest {},
            );
        }
        if matches!(self.phase, Phase::Ready)
            && self.asked.is_none()
            && let Some((_, log)) = self.wanted.logs.pop_first()
        {
            self.send_query(now, AdminQuery::Log(log));
        }
    }

    /// Handles the completion of a request.
    pub(super) fn handle_event_completion(&mut self, answer: IoCompletion) {
        let status = Status(answer.status.0);
        if !status.is_success() {
            // A new request would fail in the same way, so this one is not replaced.
            self.event_requests = self.event_requests.saturating_sub(1);
            let left = self.event_requests;
            return self.push_event(Event::EventsRefused { status, left });
        }
        let result = EventResult(answer.result);
        let log = PendingLogPage { id: result.lid(), what: result.event() };
        match log.what {
            Notice::Immediate(_) | Notice::OneShot(_) => self.push_notice_event(log),
            _ => drop(self.wanted.logs.insert(log.id, log)),
        }
    }

    /// Handles the result of reading an event's log page.
    pub(super) fn handle_event_log_page(
        &mut self,
        now: Instant,
        log: PendingLogPage,
        status: Status,
        page: &[u8; BYTES],
    ) {
        let is_read = status.is_success();
        match (log.what, Page::from_code(log.id)) {
            (Notice::Error(what), Page::ErrorInformation) => {
                let entry = log::error_information::error_entries(&page[..64]).next();
                let newest = entry.filter(|_| is_read).map(Box::new);
                self.push_event(Event::ErrorReported { what, newest });
            }
            (Notice::Health(_), Page::Health) if is_read => {
                let mut health = HealthInformation::zeroed();
                health.as_bytes_mut().copy_from_slice(&page[..512]);
                self.push_event(Event::Health(Box::new(health)));
            }
            (Notice::Notice(NoticeEvent::NamespaceChanged), Page::ChangedNamespaces) => {
                let changed = if is_read { changed_namespaces(page) } else { None };
                self.start_namespace_scan(now, self.unchanged_namespaces(changed));
            }
            (Notice::Notice(NoticeEvent::FirmwareActivation), _) => {
                self.push_event(Event::FirmwareActivation);
            }
            (Notice::Notice(NoticeEvent::Ana), _) => self.push_event(Event::AccessChanged),
            _ => self.push_notice_event(log),
        }
    }

    fn push_notice_event(&mut self, log: PendingLogPage) {
        self.push_event(Event::Notice { what: log.what, log_page: log.id });
    }

    /// Namespaces that need no new Identify if only `changed` have changed; none if that is unknown.
    fn unchanged_namespaces(&self, changed: Option<BTreeSet<u32>>) -> BTreeSet<u32> {
        let Some(changed) = changed else { return BTreeSet::new() };
        self.namespaces.keys().copied().filter(|id| !changed.contains(id)).collect()
    }
}

/// Namespaces in the Changed Attached Namespace List; `None` if the list has overflowed (Base 2.1
/// §5.1.12.1.5).
fn changed_namespaces(page: &[u8; BYTES]) -> Option<BTreeSet<u32>> {
    let list = NamespaceList::from_bytes(page);
    let changed: BTreeSet<u32> = list.iter().collect();
    if changed.contains(&NSID_ALL) { None } else { Some(changed) }
}
