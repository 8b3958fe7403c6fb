//! Get Log Page: which pages there are, and which part of one is asked for (Base 2.1 §5.1.12).
//!
//! A page is made whole and then cut, so every page can be read at every offset; what is asked for
//! behind its end is zeroes.

use base::Instant;
use wire::Status;
use wire::admin::GetLogPage;
use wire::log::LogPage;

use super::Controller;
use super::commands::Step;
use super::contract::{AdminEnd, AdminStep};

mod changes;
mod effects;
pub(super) mod error;
mod health;
mod history;
pub(super) mod telemetry;

impl Controller {
    pub(super) fn get_log_page(
        &mut self,
        now: Instant,
        get: &GetLogPage,
        data: &mut Vec<u8>,
    ) -> Step {
        let page = LogPage::from_code(get.lid);
        if !self.has_log_page(page) {
            return Err(Status::INVALID_LOG_PAGE);
        }
        check_scope(get.nsid)?;
        let len_bytes = self.transfer(get.len_bytes())? as usize;
        let step = offset_step(page);
        // No page is indexed, so OT has to be clear.
        if get.ot || !get.lpo.is_multiple_of(step) {
            return Err(Status::INVALID_FIELD);
        }
        let whole = self.log_page(now, page, get)?;
        let offset = usize::try_from(get.lpo).map_err(|_| Status::INVALID_FIELD)?;
        let rest = whole.get(offset..).ok_or(Status::INVALID_FIELD)?;
        data.clear();
        data.extend(rest.iter().take(len_bytes));
        data.resize(len_bytes, 0);
        if !get.rae {
            self.acknowledge(page);
        }
        Ok(AdminStep::Done(AdminEnd::OK))
    }

    /// Whether this controller keeps the page.
    fn has_log_page(&self, page: LogPage) -> bool {
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
            LogPage::Ana => self.subsystem.about().ana_groups > 0,
            LogPage::ReservationNotification => self.subsystem.about().reservations,
            _ => false,
        }
    }

    /// The whole page.
    fn log_page(
        &mut self,
        now: Instant,
        page: LogPage,
        get: &GetLogPage,
    ) -> Result<Vec<u8>, Status> {
        match page {
            LogPage::SupportedLogPages => Ok(self.supported_log_pages()),
            LogPage::ErrorInformation => Ok(self.error_page()),
            LogPage::Health => Ok(self.health_page(now)),
            LogPage::FirmwareSlot => Ok(self.firmware_page()),
            LogPage::ChangedNamespaces => Ok(self.changed_page()),
            LogPage::CommandEffects if get.csi == 0 => Ok(self.command_effects()),
            LogPage::CommandEffects => Err(Status::INVALID_FIELD),
            LogPage::SelfTest => Ok(self.self_test_page()),
            LogPage::TelemetryHost => self.telemetry_page(now, get.lsp & 1 != 0, get.lpo),
            LogPage::TelemetryController => Ok(self.controller_telemetry_page()),
            LogPage::Ana => Ok(self.ana_page(get.lsp & 1 != 0)),
            LogPage::FeatureEffects => Ok(self.feature_effects()),
            LogPage::ReservationNotification => Ok(self.notification_page()),
            _ => Err(Status::INVALID_LOG_PAGE),
        }
    }

    /// The host has read a page and does not want to retain its events.
    fn acknowledge(&mut self, page: LogPage) {
        self.events.acknowledge(page);
        match page {
            LogPage::ChangedNamespaces => self.changed.clear(),
            LogPage::ReservationNotification => self.notification_read(),
            _ => {}
        }
    }
}

/// Pages are the controller's: no single namespace has its own (LPA.SMART per namespace is clear).
fn check_scope(nsid: u32) -> Result<(), Status> {
    match nsid {
        0 | u32::MAX => Ok(()),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// What an offset is a multiple of: a dword, or a block of telemetry (Base 2.1 §5.1.12.1.8).
fn offset_step(page: LogPage) -> u64 {
    match page {
        LogPage::TelemetryHost | LogPage::TelemetryController => telemetry::BLOCK_BYTES as u64,
        _ => 4,
    }
}
