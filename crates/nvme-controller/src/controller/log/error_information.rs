//! Error Information log page: the last errors, newest first (Base 2.1 §5.1.12.1.2).

use std::collections::VecDeque;

use tenmil_wire::Layout;
use tenmil_wire::log::error_information::{ErrorEntry, NOT_APPLICABLE};

use crate::controller::Controller;
use crate::controller::config::TransportModel;
use crate::controller::transport_interface::ErrorReport;

/// Error log of one controller.
#[derive(Debug)]
pub(in crate::controller) struct ErrorLog {
    entries: VecDeque<(u64, ErrorReport)>,
    capacity: usize,
    /// Total number of errors; also the number of the newest.
    count: u64,
}

/// TRTYPE of NVMe/TCP (Base 2.1 §5.1.12.3.1).
const TCP: u8 = 3;

impl ErrorLog {
    pub(in crate::controller) const fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::new(), capacity, count: 0 }
    }

    /// Adds an error, and drops the oldest if the log is full.
    pub(in crate::controller) fn push(&mut self, report: &ErrorReport) {
        self.count += 1;
        self.entries.truncate(self.capacity - 1);
        self.entries.push_front((self.count, *report));
    }

    /// Total number of errors.
    pub(in crate::controller) const fn total_count(&self) -> u64 {
        self.count
    }
}

impl Controller {
    pub(super) fn error_log_page(&self) -> Vec<u8> {
        let trtype = match self.config.transport {
            // NVMe over PCIe has no transport type of its own (Base 2.1 §5.1.12.1.2, TRTYPE 0h).
            TransportModel::Memory { .. } => 0,
            TransportModel::Fabrics { .. } => TCP,
        };
        let mut page = Vec::new();
        for (number, report) in &self.errors.entries {
            let is_command = report.sqid != NOT_APPLICABLE;
            let entry = ErrorEntry::zeroed().with(|entry| {
                entry
                    .error_count(*number)
                    .sqid(report.sqid)
                    .cid(report.cid)
                    .status_field(report.status.0)
                    .parameter_error_location(NOT_APPLICABLE)
                    .lba(report.lba)
                    .nsid(report.nsid)
                    .trtype(trtype)
                    .opcode(report.opcode)
                    .version(is_command.into())
            });
            page.extend(entry.as_bytes());
        }
        page.resize(self.errors.capacity * <ErrorEntry as Layout>::BYTES, 0);
        page
    }
}
