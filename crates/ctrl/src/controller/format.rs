//! Format NVM: the blocks of one namespace, or of all, read as zeroes afterwards, in blocks of the
//! size asked for (Base 2.1 §5.1.10, NVM 1.1 §4.1.2).
//!
//! It takes as many turns as it takes. Until it is done every I/O command to those namespaces is
//! answered with Format In Progress.

use base::{Instant, Operation};
use wire::Status;
use wire::admin::{FormatNvm, SecureErase};
use wire::log::self_test::SelfTestOutcome;

use super::Controller;
use super::commands::{Step, settled};
use super::contract::{AdminDone, AdminEnd, AdminStep};
use super::subsystem::{Record, State, Subsystem, format_sizes, shift_of};
use super::sweep::Sweep;

/// A format under way.
pub(super) struct Format {
    /// The command to answer; `None` once a reset has forgotten it.
    cid: Option<u16>,
    /// The namespaces still to be done, each with its new block size.
    waiting: Vec<(u32, u32)>,
    sweep: Option<(u32, u32, Sweep)>,
}

impl Controller {
    /// Whether every medium can be made to read as zeroes, which is what a format promises.
    pub(super) fn can_format(&self) -> bool {
        let state = self.subsystem.lock();
        let erasable = |record: &Record| record.limits.support.has(Operation::WriteZeroes);
        !state.records.is_empty() && state.records.values().all(erasable)
    }

    pub(super) fn format_nvm(&mut self, now: Instant, cid: u16, format: &FormatNvm) -> Step {
        if self.format.is_some() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if !matches!(format.ses, SecureErase::None | SecureErase::UserData) {
            return Err(Status::INVALID_FIELD);
        }
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock();
        let nsids = self.targets(&state, format.nsid)?;
        let mut waiting = Vec::new();
        for &nsid in &nsids {
            let record = self.active(&state, nsid)?;
            self.check_writable(&state, record)?;
            waiting.push((nsid, block_size(record, format)?));
        }
        for nsid in nsids {
            if let Some(record) = state.records.get_mut(&nsid) {
                record.is_formatting = true;
            }
            if self.self_tests.reads(nsid) {
                self.self_tests.abort(SelfTestOutcome::AbortedByFormat, self.health.hours(now));
            }
        }
        subsystem.settle(state);
        self.format = Some(Format { cid: Some(cid), waiting, sweep: None });
        Ok(AdminStep::Later)
    }

    /// Works on the format that runs, if one does.
    pub(super) fn turn_format(&mut self, now: Instant) {
        let Some(format) = &mut self.format else { return };
        let Some(end) = format.turn(now, &self.subsystem) else { return };
        let cid = format.cid;
        self.format = None;
        self.done.extend(cid.map(|cid| AdminDone { cid, end }));
    }

    /// Whether the blocks of a namespace may be changed by an admin command of this controller's
    /// host.
    pub(super) fn check_writable(&self, state: &State, record: &Record) -> Result<(), Status> {
        self.check_changeable(state, record)?;
        if record.is_protected() { Err(Status::NAMESPACE_WRITE_PROTECTED) } else { Ok(()) }
    }

    /// Whether a namespace may be changed by an admin command of this controller's host
    /// (Base 2.1 §8.1.22, command behavior table).
    pub(super) fn check_changeable(&self, state: &State, record: &Record) -> Result<(), Status> {
        if record.is_formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let seat = state.seats.get(&self.config.cntlid);
        if let Some(refusal) = seat.and_then(|seat| seat.ana(record.ana_group).refusal()) {
            return Err(refusal);
        }
        let seen = record.reservations.seen_by(self.host);
        if seen.is_some_and(|reservation| reservation.refuses_writes()) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        Ok(())
    }
}

impl Format {
    fn turn(&mut self, now: Instant, subsystem: &Subsystem) -> Option<AdminEnd> {
        let Some((nsid, block_size, sweep)) = &mut self.sweep else {
            let Some((nsid, block_size)) = self.waiting.pop() else { return Some(AdminEnd::OK) };
            match open(subsystem, nsid) {
                Ok(sweep) => self.sweep = Some((nsid, block_size, sweep)),
                Err(status) => return Some(self.fail(subsystem, nsid, status)),
            }
            return None;
        };
        let (nsid, block_size) = (*nsid, *block_size);
        match sweep.turn(now)? {
            Ok(()) => finish(subsystem, nsid, Some(block_size)),
            Err(failure) => {
                let status = Status(failure.outcome.0);
                return Some(self.fail(subsystem, nsid, status));
            }
        }
        self.sweep = None;
        self.waiting.is_empty().then_some(AdminEnd::OK)
    }

    fn fail(&mut self, subsystem: &Subsystem, nsid: u32, status: Status) -> AdminEnd {
        finish(subsystem, nsid, None);
        self.give_up(subsystem);
        AdminEnd::refused(settled(status))
    }

    /// Makes what has not been formatted available again, as it is.
    pub(super) fn give_up(&mut self, subsystem: &Subsystem) {
        let current = self.sweep.take().map(|(nsid, _, _)| nsid);
        for nsid in self.waiting.drain(..).map(|(nsid, _)| nsid).chain(current) {
            finish(subsystem, nsid, None);
        }
    }

    /// The controller was reset: the format goes on, but nobody waits for it.
    pub(super) const fn orphan(&mut self) {
        self.cid = None;
    }

    /// When to look again.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        self.sweep.as_ref().map_or(now, |(_, _, sweep)| sweep.wake_at(now))
    }
}

fn open(subsystem: &Subsystem, nsid: u32) -> Result<Sweep, Status> {
    let medium = {
        let state = subsystem.lock();
        state.records.get(&nsid).ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?.medium.clone()
    };
    Sweep::over(&*medium, Operation::WriteZeroes, 0, u64::MAX)
}

/// Ends the format of one namespace, with another block size if it went well.
fn finish(subsystem: &Subsystem, nsid: u32, block_size: Option<u32>) {
    let mut state = subsystem.lock();
    if let Some(record) = state.records.get_mut(&nsid) {
        record.is_formatting = false;
        if let Some(block_size) = block_size {
            record.block_shift = shift_of(block_size);
        }
    }
    state.post_changed(nsid);
    subsystem.settle(state);
}

/// The block size of the format that is asked for.
fn block_size(record: &Record, format: &FormatNvm) -> Result<u32, Status> {
    let sizes = format_sizes(&record.limits);
    let size = sizes.get(usize::from(format.format())).copied();
    if format.pi != 0 || format.mset {
        return Err(Status::INVALID_FORMAT);
    }
    size.ok_or(Status::INVALID_FORMAT)
}
