//! Get Log Page: supported pages, and reading a part of one (Base 2.1 §5.1.12).
//!
//! A page is built completely and then cut, so every page can be read at every offset. Bytes beyond its
//! end are zeroes.

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::admin::GetLogPage;
use tenmil_wire::log::LogPage;

use super::Controller;
use super::commands::CommandResult;
use super::transport_interface::{AdminOutcome, AdminResult};

mod effects;
pub(super) mod error_information;
mod health;
mod notifications;
mod self_test;
pub(super) mod telemetry;

impl Controller {
    pub(super) fn get_log_page(
        &mut self,
        now: Instant,
        get: &GetLogPage,
        data: &mut Vec<u8>,
    ) -> CommandResult {
        let page = LogPage::from_code(get.lid);
        if !self.supports_log_page(page) {
            return Err(Status::INVALID_LOG_PAGE);
        }
        check_log_nsid(get.nsid)?;
        let len_bytes = self.check_transfer_length(get.len_bytes())? as usize;
        let granularity = log_offset_granularity(page);
        // No page has an index, so OT must be cleared.
        if get.ot || !get.lpo.is_multiple_of(granularity) {
            return Err(Status::INVALID_FIELD);
        }
        let content = self.log_page(now, page, get)?;
        let offset = usize::try_from(get.lpo).map_err(|_| Status::INVALID_FIELD)?;
        let rest = content.get(offset..).ok_or(Status::INVALID_FIELD)?;
        data.clear();
        data.extend(rest.iter().take(len_bytes));
        data.resize(len_bytes, 0);
        if !get.rae {
            self.clear_reported_event(page);
        }
        Ok(AdminOutcome::Done(AdminResult::OK))
    }

    /// Whether this controller supports the page.
    fn supports_log_page(&self, page: LogPage) -> bool {
        match page {
            LogPage::SupportedLogPages
            | LogPage::ErrorInformation
            | LogPage::Health
            | LogPage::FirmwareSlot
            | LogPage::ChangedNamespaces
            | LogPage::CommandEffects
            | LogPage::SelfTest
            | LogPage::TelemetryHost
            | LogPage::TelemetryController
            | LogPage::FeatureEffects => true,
            LogPage::Ana => self.subsystem.constants().ana_groups > 0,
            LogPage::ReservationNotification => self.subsystem.constants().reservations,
            _ => false,
        }
    }

    /// Builds the complete page.
    fn log_page(
        &mut self,
        now: Instant,
        page: LogPage,
        get: &GetLogPage,
    ) -> Result<Vec<u8>, Status> {
        match page {
            LogPage::SupportedLogPages => Ok(self.supported_log_pages_page()),
            LogPage::ErrorInformation => Ok(self.error_log_page()),
            LogPage::Health => Ok(self.health_log_page(now)),
            LogPage::FirmwareSlot => Ok(self.firmware_slot_log_page()),
            LogPage::ChangedNamespaces => Ok(self.changed_namespace_list_page()),
            LogPage::CommandEffects if get.csi == 0 => Ok(self.command_effects_page()),
            LogPage::CommandEffects => Err(Status::INVALID_FIELD),
            LogPage::SelfTest => Ok(self.self_test_page()),
            LogPage::TelemetryHost => self.telemetry_page(now, get.lsp & 1 != 0, get.lpo),
            LogPage::TelemetryController => Ok(self.controller_telemetry_page()),
            LogPage::Ana => Ok(self.ana_log_page(get.lsp & 1 != 0)),
            LogPage::FeatureEffects => Ok(self.feature_effects_page()),
            LogPage::ReservationNotification => Ok(self.reservation_notification_page()),
            _ => Err(Status::INVALID_LOG_PAGE),
        }
    }

    /// Handles a page read without Retain Asynchronous Event.
    fn clear_reported_event(&mut self, page: LogPage) {
        self.events.acknowledge(page);
        match page {
            LogPage::ChangedNamespaces => self.changed.clear(),
            LogPage::ReservationNotification => self.pop_reservation_notification(),
            _ => {}
        }
    }
}

/// Checks the NSID: all pages have controller scope (LPA.SMART per namespace is cleared).
fn check_log_nsid(nsid: u32) -> Result<(), Status> {
    match nsid {
        0 | u32::MAX => Ok(()),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Granularity of the offset: a dword, or a telemetry block (Base 2.1 §5.1.12.1.8).
fn log_offset_granularity(page: LogPage) -> u64 {
    match page {
        LogPage::TelemetryHost | LogPage::TelemetryController => telemetry::BLOCK_BYTES as u64,
        _ => 4,
    }
}
