//! Reservation changes: the change queue of each namespace, and the results of its reservation store.

use std::sync::{Arc, Weak};
use tenmil_base::Error;

use tenmil_wire::Status;

use super::controller_entry::End;
use super::{Shared, State, Subsystem};
use crate::controller::config::Persistence;
use crate::controller::reservation::change_queue::{
    ApplyPlan, ChangeKind, ChangeQueue, PendingChange, Requester, WriteInProgress,
};
use crate::controller::reservation::preempted::{Preempted, Writers};
use crate::controller::reservation::{HostId, ReservationEffects, Reservations};

/// Pending write of a record to a [`ReservationStore`](crate::controller::ReservationStore). Dropping it
/// counts as a failed write.
pub struct PersistRequest {
    subsystem: Weak<Shared>,
    nsid: u32,
    number: u64,
    is_owed: bool,
}

/// Error of a change whose record was rejected by the store, or dropped.
const NO_WRITER: &str = "keep reservations: nobody has written them";

impl PersistRequest {
    /// Reports that the record is durable, or why not, as one line. The change then takes effect or
    /// fails, and the requester gets the result. Must not be called before
    /// [`ReservationStore::store`](crate::controller::ReservationStore::store) has returned: a lock is
    /// held until then.
    pub fn ended(mut self, written: Result<(), Error>) {
        self.is_owed = false;
        self.complete(written);
    }

    fn complete(&self, written: Result<(), Error>) {
        if let Some(shared) = self.subsystem.upgrade() {
            Subsystem { shared }.stored(self.nsid, self.number, written);
        }
    }
}

impl Drop for PersistRequest {
    fn drop(&mut self) {
        if self.is_owed {
            self.complete(Err(Error::environment(NO_WRITER.to_owned())));
        }
    }
}

impl Subsystem {
    /// Changes the reservations of a namespace. Returns the result, or `None` if the requester gets it
    /// later as a pending update.
    pub(in crate::controller) fn change_reservations(
        &self,
        state: &mut State,
        nsid: u32,
        change: PendingChange,
    ) -> Option<Result<(), Status>> {
        let Some(record) = state.records.get_mut(&nsid) else {
            return Some(Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        };
        if record.line.is_writing() {
            record.line.wait(change);
            return None;
        }
        let by = change.by;
        match self.begin(state, nsid, change) {
            Ok(Some(None)) => Some(Ok(())),
            Ok(Some(writers)) => {
                state.post_end(by, Ok(writers));
                None
            }
            Ok(None) => None,
            Err(status) => Some(Err(status)),
        }
    }

    /// Applies a change, or starts to write it. `Ok(None)` means that the write is in progress.
    fn begin(
        &self,
        state: &mut State,
        nsid: u32,
        change: PendingChange,
    ) -> Result<Option<Option<Writers>>, Status> {
        state.changes += 1;
        let number = state.changes;
        let missing = Status::INVALID_NAMESPACE_OR_FORMAT;
        let record = state.records.get_mut(&nsid).ok_or(missing)?;
        let mut after = record.reservations.clone();
        let new_events = change.make(&mut after, record.can_persist())?;
        let plan = record.plan(&after)?;
        let (ApplyPlan::Write(bytes), Persistence::Durable(keeper)) =
            (plan, &mut record.persistence)
        else {
            return Ok(Some(state.take_effect(nsid, after, new_events)));
        };
        let subsystem = Arc::downgrade(&self.shared);
        let stored = PersistRequest { subsystem, nsid, number, is_owed: true };
        if let Err(mut refused) = keeper.store(bytes, stored) {
            refused.is_owed = false;
            state.post_trouble(Some(change.by), NO_WRITER);
            return Err(Status::INTERNAL_ERROR);
        }
        record.line.begin(WriteInProgress { by: Some(change.by), number, after, new_events });
        Ok(None)
    }

    /// Handles the result of a write, and starts the next change.
    fn stored(&self, nsid: u32, number: u64, written: Result<(), Error>) {
        let mut state = self.lock();
        let record = state.records.get_mut(&nsid);
        let writing = record.and_then(|record| record.line.written(number, written.is_ok()));
        // If the namespace was deleted meanwhile, all requesters have got an error already.
        if let Some(WriteInProgress { by, after, new_events, .. }) = writing {
            let end = match written {
                Ok(()) => Ok(state.take_effect(nsid, after, new_events)),
                Err(why) => {
                    state.post_trouble(by, &why.text);
                    Err(Status::INTERNAL_ERROR)
                }
            };
            if let Some(by) = by {
                state.post_end(by, end);
            }
            self.go_on(&mut state, nsid);
        }
        self.publish_and_notify(state);
    }

    /// Starts waiting changes until one has to be written.
    fn go_on(&self, state: &mut State, nsid: u32) {
        while let Some(change) = state.records.get_mut(&nsid).and_then(|record| record.line.next())
        {
            let by = change.by;
            let is_command = matches!(change.wish, ChangeKind::Command(..));
            let may = state.may_reserve(by.cntlid, nsid, is_command);
            match may.and_then(|()| self.begin(state, nsid, change)) {
                Ok(None) => {}
                Ok(Some(writers)) => state.post_end(by, Ok(writers)),
                Err(status) => state.post_end(by, Err(status)),
            }
        }
    }
}

impl State {
    /// Checks that a controller's host may read or change the reservations of a namespace. A command is
    /// rejected under the same conditions as its other I/O.
    pub(in crate::controller) fn may_reserve(
        &self,
        cntlid: u16,
        nsid: u32,
        is_command: bool,
    ) -> Result<(), Status> {
        let record = self.attached(cntlid, nsid).ok_or(Status::INVALID_FIELD)?;
        if !is_command {
            return Ok(());
        }
        if record.is_formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let entry = self.controllers.get(&cntlid);
        entry.and_then(|entry| entry.ana(record.ana_group).refusal()).map_or(Ok(()), Err)
    }

    /// Puts new reservations into effect, and posts the consequences for other hosts. What may still write for hosts that were
    /// preempted, if their commands are to be aborted.
    fn take_effect(
        &mut self,
        nsid: u32,
        after: Reservations,
        new_events: ReservationEffects,
    ) -> Option<Writers> {
        if let Some(record) = self.records.get_mut(&nsid) {
            record.reservations = after;
        }
        for (to, notice) in new_events.notices {
            self.notify_reservation(nsid, to, notice);
        }
        let preempted = Preempted::new();
        for victim in new_events.aborts {
            self.request_abort(nsid, victim, &preempted);
        }
        let writers = preempted.writers();
        drop(preempted);
        (!writers.are_gone()).then_some(writers)
    }

    /// Fails the waiting changes of a deleted namespace.
    pub(super) fn cancel_changes(&mut self, line: ChangeQueue) {
        for by in line.askers() {
            self.post_end(by, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        }
    }

    /// Drops the requesters of changes: a controller that was reset, or one of its queues.
    pub(in crate::controller) fn drop_requesters(
        &mut self,
        cntlid: u16,
        is_gone: impl Fn(&Requester) -> bool,
    ) {
        for record in self.records.values_mut() {
            record.line.forget(|by| by.cntlid == cntlid && is_gone(by));
        }
        if let Some(entry) = self.controllers.get_mut(&cntlid) {
            entry.mail.ends.retain(|(reply, _)| !is_gone(&Requester { cntlid, reply: *reply }));
        }
    }

    /// Removes a host without an identifier, which cannot return.
    pub(in crate::controller) fn forget_host(&mut self, host: HostId) {
        for record in self.records.values_mut() {
            record.reservations.forget(host);
            record.line.apply_to_pending(|after| after.forget(host));
        }
    }

    fn post_end(&mut self, by: Requester, end: End) {
        if let Some(entry) = self.controllers.get_mut(&by.cntlid) {
            entry.mail.ends.push((by.reply, end));
            self.mail_count += 1;
        }
    }

    fn post_trouble(&mut self, by: Option<Requester>, why: &str) {
        let entry = by.and_then(|by| self.controllers.get_mut(&by.cntlid));
        if let Some(entry) = entry {
            entry.mail.trouble = Some(why.to_owned());
            self.mail_count += 1;
        }
    }
}

impl std::fmt::Debug for PersistRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nsid, number, .. } = self;
        out.debug_struct("Stored").field("nsid", nsid).field("number", number).finish()
    }
}
