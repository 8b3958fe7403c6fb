//! Format NVM: makes the blocks of one or all namespaces read as zeroes, with the requested block size
//! (Base 2.1 §5.1.10, NVM 1.1 §4.1.2).
//!
//! A format runs over many polls. Until it is complete, every I/O command to its namespaces fails with
//! Format In Progress.

use tenmil_base::{Instant, Operation};
use tenmil_wire::Status;
use tenmil_wire::admin::{FormatNvm, SecureErase};
use tenmil_wire::log::self_test::SelfTestOutcome;

use super::Controller;
use super::commands::{CommandResult, with_dnr_unless_retryable};
use super::range_operation::RangeOperation;
use super::subsystem::{
    NamespaceEntry, Subsystem, SubsystemState, block_size_shift, formattable_block_sizes,
};
use super::transport_interface::{AdminCompletion, AdminOutcome, AdminResult};

/// Format in progress.
pub(super) struct FormatInProgress {
    /// Command to complete; `None` after a controller reset.
    cid: Option<u16>,
    /// Remaining namespaces, each with its new block size.
    remaining: Vec<(u32, u32)>,
    scan: Option<(u32, u32, RangeOperation)>,
}

impl Controller {
    /// Whether every block device supports Write Zeroes, which a format needs.
    pub(super) fn can_format(&self) -> bool {
        let state = self.subsystem.lock_state();
        let erasable =
            |record: &NamespaceEntry| record.limits.operations.has(Operation::WriteZeroes);
        !state.records.is_empty() && state.records.values().all(erasable)
    }

    pub(super) fn format_nvm(
        &mut self,
        now: Instant,
        cid: u16,
        format: &FormatNvm,
    ) -> CommandResult {
        if self.format.is_some() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if !matches!(format.ses, SecureErase::None | SecureErase::UserData) {
            return Err(Status::INVALID_FIELD);
        }
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock_state();
        let nsids = self.selected_nsids(&state, format.nsid)?;
        let mut remaining = Vec::new();
        for &nsid in &nsids {
            let record = self.attached_namespace(&state, nsid)?;
            self.check_writable(&state, record)?;
            remaining.push((nsid, requested_block_size(record, format)?));
        }
        for nsid in nsids {
            if let Some(record) = state.records.get_mut(&nsid) {
                record.is_formatting = true;
            }
            if self.self_tests.includes_namespace(nsid) {
                self.self_tests
                    .abort(SelfTestOutcome::AbortedByFormat, self.health.power_on_hours(now));
            }
        }
        subsystem.publish_and_notify(state);
        self.format = Some(FormatInProgress { cid: Some(cid), remaining, scan: None });
        Ok(AdminOutcome::Deferred)
    }

    /// Advances the format in progress, if any.
    #[inline]
    pub(super) fn poll_format(&mut self, now: Instant) {
        if self.format.is_some() {
            self.advance_format(now);
        }
    }

    fn advance_format(&mut self, now: Instant) {
        let Some(format) = &mut self.format else { return };
        let Some(end) = format.poll(now, &self.subsystem) else { return };
        let cid = format.cid;
        self.format = None;
        self.deferred_completions.extend(cid.map(|cid| AdminCompletion { cid, end }));
    }

    /// Checks that an admin command of this controller's host may change the blocks of a namespace.
    pub(super) fn check_writable(
        &self,
        state: &SubsystemState,
        record: &NamespaceEntry,
    ) -> Result<(), Status> {
        self.check_may_change_namespace(state, record)?;
        if record.is_write_protected() { Err(Status::NAMESPACE_WRITE_PROTECTED) } else { Ok(()) }
    }

    /// Checks that an admin command of this controller's host may change a namespace (Base 2.1 §8.1.22,
    /// command behavior table).
    pub(super) fn check_may_change_namespace(
        &self,
        state: &SubsystemState,
        record: &NamespaceEntry,
    ) -> Result<(), Status> {
        if record.is_formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let entry = state.controllers.get(&self.config.cntlid);
        if let Some(refusal) =
            entry.and_then(|entry| entry.ana_state(record.ana_group).rejection_status())
        {
            return Err(refusal);
        }
        let seen = record.reservations.as_seen_by(self.host);
        if seen.is_some_and(|reservation| reservation.rejects_writes()) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        Ok(())
    }
}

impl FormatInProgress {
    fn poll(&mut self, now: Instant, subsystem: &Subsystem) -> Option<AdminResult> {
        let Some((nsid, block_size, scan)) = &mut self.scan else {
            let Some((nsid, block_size)) = self.remaining.pop() else {
                return Some(AdminResult::OK);
            };
            match start_erase(subsystem, nsid) {
                Ok(scan) => self.scan = Some((nsid, block_size, scan)),
                Err(status) => return Some(self.fail_format(subsystem, nsid, status)),
            }
            return None;
        };
        let (nsid, block_size) = (*nsid, *block_size);
        match scan.poll(now)? {
            Ok(()) => finish_namespace_format(subsystem, nsid, Some(block_size)),
            Err(failure) => {
                let status = Status(failure.status.0);
                return Some(self.fail_format(subsystem, nsid, status));
            }
        }
        self.scan = None;
        self.remaining.is_empty().then_some(AdminResult::OK)
    }

    fn fail_format(&mut self, subsystem: &Subsystem, nsid: u32, status: Status) -> AdminResult {
        finish_namespace_format(subsystem, nsid, None);
        self.release_remaining_namespaces(subsystem);
        AdminResult::failure(with_dnr_unless_retryable(status))
    }

    /// Makes the remaining namespaces available again, unchanged.
    pub(super) fn release_remaining_namespaces(&mut self, subsystem: &Subsystem) {
        let current = self.scan.take().map(|(nsid, _, _)| nsid);
        for nsid in self.remaining.drain(..).map(|(nsid, _)| nsid).chain(current) {
            finish_namespace_format(subsystem, nsid, None);
        }
    }

    /// Handles a controller reset: the format continues without a command to complete.
    pub(super) const fn drop_requester(&mut self) {
        self.cid = None;
    }

    /// Time of the next poll.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        self.scan.as_ref().map_or(now, |(_, _, scan)| scan.wake_at(now))
    }
}

fn start_erase(subsystem: &Subsystem, nsid: u32) -> Result<RangeOperation, Status> {
    let device = {
        let state = subsystem.lock_state();
        state.records.get(&nsid).ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?.device.clone()
    };
    RangeOperation::start(&*device, Operation::WriteZeroes, 0, u64::MAX)
}

/// Ends the format of one namespace; on success with a new block size.
fn finish_namespace_format(subsystem: &Subsystem, nsid: u32, block_size: Option<u32>) {
    let mut state = subsystem.lock_state();
    if let Some(record) = state.records.get_mut(&nsid) {
        record.is_formatting = false;
        if let Some(block_size) = block_size {
            record.block_shift = block_size_shift(block_size);
        }
    }
    state.notify_namespace_changed(nsid);
    subsystem.publish_and_notify(state);
}

/// Block size of the requested format.
fn requested_block_size(record: &NamespaceEntry, format: &FormatNvm) -> Result<u32, Status> {
    let sizes = formattable_block_sizes(&record.limits);
    let size = sizes.get(usize::from(format.lba_format_index())).copied();
    if format.pi != 0 || format.mset {
        return Err(Status::INVALID_FORMAT);
    }
    size.ok_or(Status::INVALID_FORMAT)
}
