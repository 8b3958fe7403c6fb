//! Reservation changes: the change queue of each namespace, and the results of its reservation store.

use std::sync::{Arc, Weak};
use tenmil_base::Error;

use tenmil_wire::Status;

use super::controller_entry::ReservationResult;
use super::{SharedSubsystem, Subsystem, SubsystemState};
use crate::controller::config::ReservationPersistenceMode;
use crate::controller::reservation::change_queue::{
    ChangeKind, ChangeQueue, ChangeRequester, PendingChange, PersistPlan, RecordWrite,
};
use crate::controller::reservation::preempt_abort::{PreemptedWriterGuard, PreemptedWriterTracker};
use crate::controller::reservation::{HostId, ReservationChangeEffects, Reservations};

/// Pending write of a record to a [`ReservationStore`](crate::controller::ReservationStore). Dropping it
/// counts as a failed write.
pub struct PersistRequest {
    subsystem: Weak<SharedSubsystem>,
    nsid: u32,
    number: u64,
    is_pending: bool,
}

/// Error of a change whose record was rejected by the store, or dropped.
const NO_WRITER: &str = "keep reservations: no store accepts them";

impl PersistRequest {
    /// Reports that the record is durable, or why not, as one line. The change then takes effect or
    /// fails, and the requester gets the result. Must not be called before
    /// [`ReservationStore::start_store`](crate::controller::ReservationStore::start_store) has returned: a lock is
    /// held until then.
    pub fn complete_write(mut self, written: Result<(), Error>) {
        self.is_pending = false;
        self.deliver_write_result(written);
    }

    fn deliver_write_result(&self, written: Result<(), Error>) {
        if let Some(shared) = self.subsystem.upgrade() {
            Subsystem { shared }.handle_write_result(self.nsid, self.number, written);
        }
    }
}

impl Drop for PersistRequest {
    fn drop(&mut self) {
        if self.is_pending {
            self.deliver_write_result(Err(Error::environment(NO_WRITER.to_owned())));
        }
    }
}

impl Subsystem {
    /// Changes the reservations of a namespace. Returns the result, or `None` if the requester gets it
    /// later as a pending update.
    pub(in crate::controller) fn change_reservations(
        &self,
        state: &mut SubsystemState,
        nsid: u32,
        change: PendingChange,
    ) -> Option<Result<(), Status>> {
        let Some(record) = state.records.get_mut(&nsid) else {
            return Some(Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        };
        if record.change_queue.is_writing() {
            record.change_queue.push(change);
            return None;
        }
        let requester = change.requester;
        match self.start_change(state, nsid, change) {
            Ok(Some(None)) => Some(Ok(())),
            Ok(Some(writers)) => {
                state.post_result(requester, Ok(writers));
                None
            }
            Ok(None) => None,
            Err(status) => Some(Err(status)),
        }
    }

    /// Applies a change, or starts to write it. `Ok(None)` means that the write is in progress.
    fn start_change(
        &self,
        state: &mut SubsystemState,
        nsid: u32,
        change: PendingChange,
    ) -> Result<Option<Option<PreemptedWriterTracker>>, Status> {
        state.changes += 1;
        let number = state.changes;
        let missing = Status::INVALID_NAMESPACE_OR_FORMAT;
        let record = state.records.get_mut(&nsid).ok_or(missing)?;
        let mut after = record.reservations.clone();
        let effects = change.apply(&mut after, record.can_persist())?;
        let plan = record.persist_plan(&after)?;
        let (PersistPlan::Write(bytes), ReservationPersistenceMode::Durable(store)) =
            (plan, &mut record.persistence)
        else {
            return Ok(Some(state.apply_change(nsid, after, effects)));
        };
        let subsystem = Arc::downgrade(&self.shared);
        let stored = PersistRequest { subsystem, nsid, number, is_pending: true };
        if let Err(mut refused) = store.start_store(bytes, stored) {
            refused.is_pending = false;
            state.post_persist_error(Some(change.requester), NO_WRITER);
            return Err(Status::INTERNAL_ERROR);
        }
        record.change_queue.start_write(RecordWrite {
            requester: Some(change.requester),
            number,
            after,
            effects,
        });
        Ok(None)
    }

    /// Handles the result of a write, and starts the next change.
    fn handle_write_result(&self, nsid: u32, number: u64, written: Result<(), Error>) {
        let mut state = self.lock_state();
        let record = state.records.get_mut(&nsid);
        let writing =
            record.and_then(|record| record.change_queue.end_write(number, written.is_ok()));
        // If the namespace was deleted meanwhile, all requesters have got an error already.
        if let Some(RecordWrite { requester, after, effects, .. }) = writing {
            let end = match written {
                Ok(()) => Ok(state.apply_change(nsid, after, effects)),
                Err(why) => {
                    state.post_persist_error(requester, &why.text);
                    Err(Status::INTERNAL_ERROR)
                }
            };
            if let Some(requester) = requester {
                state.post_result(requester, end);
            }
            self.start_waiting_changes(&mut state, nsid);
        }
        self.publish_and_notify(state);
    }

    /// Starts waiting changes until one has to be written.
    fn start_waiting_changes(&self, state: &mut SubsystemState, nsid: u32) {
        while let Some(change) =
            state.records.get_mut(&nsid).and_then(|record| record.change_queue.next())
        {
            let requester = change.requester;
            let is_command = matches!(change.kind, ChangeKind::Command(..));
            let may = state.check_reservation_access(requester.cntlid, nsid, is_command);
            match may.and_then(|()| self.start_change(state, nsid, change)) {
                Ok(None) => {}
                Ok(Some(writers)) => state.post_result(requester, Ok(writers)),
                Err(status) => state.post_result(requester, Err(status)),
            }
        }
    }
}

impl SubsystemState {
    /// Checks that a controller's host may read or change the reservations of a namespace. A command is
    /// rejected under the same conditions as its other I/O.
    pub(in crate::controller) fn check_reservation_access(
        &self,
        cntlid: u16,
        nsid: u32,
        is_command: bool,
    ) -> Result<(), Status> {
        let record = self.attached_namespace(cntlid, nsid).ok_or(Status::INVALID_FIELD)?;
        if !is_command {
            return Ok(());
        }
        if record.is_formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let entry = self.controllers.get(&cntlid);
        entry
            .and_then(|entry| entry.ana_state(record.ana_group).rejection_status())
            .map_or(Ok(()), Err)
    }

    /// Puts new reservations into effect, and posts the consequences for other hosts.
    /// Returns the writers of preempted hosts whose commands are to be aborted, if there are any.
    fn apply_change(
        &mut self,
        nsid: u32,
        after: Reservations,
        effects: ReservationChangeEffects,
    ) -> Option<PreemptedWriterTracker> {
        if let Some(record) = self.records.get_mut(&nsid) {
            record.reservations = after;
        }
        for (to, notice) in effects.notices {
            self.notify_reservation(nsid, to, notice);
        }
        let preempted = PreemptedWriterGuard::new();
        for victim in effects.aborts {
            self.post_namespace_abort(nsid, victim, &preempted);
        }
        let writers = preempted.tracker();
        drop(preempted);
        (!writers.have_all_writers_finished()).then_some(writers)
    }

    /// Fails the waiting changes of a deleted namespace.
    pub(super) fn cancel_changes(&mut self, change_queue: ChangeQueue) {
        for requester in change_queue.into_requesters() {
            self.post_result(requester, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        }
    }

    /// Drops the requesters of changes: a controller that was reset, or one of its queues.
    pub(in crate::controller) fn drop_requesters(
        &mut self,
        cntlid: u16,
        is_removed: impl Fn(&ChangeRequester) -> bool,
    ) {
        for record in self.records.values_mut() {
            record
                .change_queue
                .drop_requesters(|requester| requester.cntlid == cntlid && is_removed(requester));
        }
        if let Some(entry) = self.controllers.get_mut(&cntlid) {
            entry
                .updates
                .results
                .retain(|(reply, _)| !is_removed(&ChangeRequester { cntlid, reply: *reply }));
        }
    }

    /// Removes a host without an identifier, which cannot return.
    pub(in crate::controller) fn remove_anonymous_host(&mut self, host: HostId) {
        for record in self.records.values_mut() {
            record.reservations.remove_host(host);
            record.change_queue.apply_to_state_being_written(|after| after.remove_host(host));
        }
    }

    fn post_result(&mut self, requester: ChangeRequester, end: ReservationResult) {
        if let Some(entry) = self.controllers.get_mut(&requester.cntlid) {
            entry.updates.results.push((requester.reply, end));
            self.posted_update_count += 1;
        }
    }

    fn post_persist_error(&mut self, requester: Option<ChangeRequester>, why: &str) {
        let entry = requester.and_then(|requester| self.controllers.get_mut(&requester.cntlid));
        if let Some(entry) = entry {
            entry.updates.persist_error = Some(why.to_owned());
            self.posted_update_count += 1;
        }
    }
}

impl std::fmt::Debug for PersistRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nsid, number, .. } = self;
        out.debug_struct("PersistRequest").field("nsid", nsid).field("number", number).finish()
    }
}
