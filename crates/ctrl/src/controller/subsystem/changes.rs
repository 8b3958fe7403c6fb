//! How reservations change: the line of each namespace, and what its keeper says.

use std::sync::{Arc, Weak};

use wire::Status;

use super::seat::End;
use super::{Shared, State, Subsystem};
use crate::controller::config::Persistence;
use crate::controller::reservation::line::{Asker, Change, Line, Plan, Wish, Writing};
use crate::controller::reservation::preempted::{Preempted, Writers};
use crate::controller::reservation::{Host, News, Reservations};

/// A record that a [`Keeper`](crate::controller::Keeper) is to write down, and that has not been
/// written. Dropped without a word, it counts as one that could not be.
pub struct Stored {
    subsystem: Weak<Shared>,
    nsid: u32,
    number: u64,
    is_owed: bool,
}

/// Why a change is refused if no one took its record, or let it fall.
const NOBODY_WRITES: &str = "keep reservations: nobody has written them";

impl Stored {
    /// It stays written, or it does not for this reason, in a line. The change takes effect or is
    /// refused, and whoever asked for it is told. Not before
    /// [`Keeper::store`](crate::controller::Keeper::store) has returned: a lock is held until then.
    pub fn ended(mut self, written: Result<(), String>) {
        self.is_owed = false;
        self.tell(written);
    }

    fn tell(&self, written: Result<(), String>) {
        if let Some(shared) = self.subsystem.upgrade() {
            Subsystem { shared }.stored(self.nsid, self.number, written);
        }
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if self.is_owed {
            self.tell(Err(NOBODY_WRITES.to_owned()));
        }
    }
}

impl Subsystem {
    /// Has the reservations of a namespace change. How that ended; `None` if whoever asked is told
    /// later, by mail.
    pub(in crate::controller) fn change_reservations(
        &self,
        state: &mut State,
        nsid: u32,
        change: Change,
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

    /// Makes a change, or has it written down first: then it has not ended.
    fn begin(
        &self,
        state: &mut State,
        nsid: u32,
        change: Change,
    ) -> Result<Option<Option<Writers>>, Status> {
        state.changes += 1;
        let number = state.changes;
        let missing = Status::INVALID_NAMESPACE_OR_FORMAT;
        let record = state.records.get_mut(&nsid).ok_or(missing)?;
        let mut after = record.reservations.clone();
        let news = change.make(&mut after, record.can_persist())?;
        let plan = record.plan(&after)?;
        let (Plan::Write(bytes), Persistence::Kept(keeper)) = (plan, &mut record.persistence)
        else {
            return Ok(Some(state.take_effect(nsid, after, news)));
        };
        let subsystem = Arc::downgrade(&self.shared);
        let stored = Stored { subsystem, nsid, number, is_owed: true };
        if let Err(mut refused) = keeper.store(bytes, stored) {
            refused.is_owed = false;
            state.post_trouble(Some(change.by), NOBODY_WRITES);
            return Err(Status::INTERNAL_ERROR);
        }
        record.line.begin(Writing { by: Some(change.by), number, after, news });
        Ok(None)
    }

    /// A keeper has done what it could; the next change begins.
    fn stored(&self, nsid: u32, number: u64, written: Result<(), String>) {
        let mut state = self.lock();
        let record = state.records.get_mut(&nsid);
        let writing = record.and_then(|record| record.line.written(number, written.is_ok()));
        // A namespace that has gone meanwhile has told all who waited.
        if let Some(Writing { by, after, news, .. }) = writing {
            let end = match written {
                Ok(()) => Ok(state.take_effect(nsid, after, news)),
                Err(why) => {
                    state.post_trouble(by, &why);
                    Err(Status::INTERNAL_ERROR)
                }
            };
            if let Some(by) = by {
                state.post_end(by, end);
            }
            self.go_on(&mut state, nsid);
        }
        self.settle(state);
    }

    /// Begins what waits, until something has to be written.
    fn go_on(&self, state: &mut State, nsid: u32) {
        while let Some(change) = state.records.get_mut(&nsid).and_then(|record| record.line.next())
        {
            let by = change.by;
            let is_command = matches!(change.wish, Wish::Command(..));
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
    /// Whether a controller's host may look at the reservations of a namespace, or change them; a
    /// command is refused where its other I/O would be.
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
        let seat = self.seats.get(&cntlid);
        seat.and_then(|seat| seat.ana(record.ana_group).refusal()).map_or(Ok(()), Err)
    }

    /// The reservations of a namespace are these from now on. What may still write for hosts that were
    /// preempted, if their commands are to be aborted.
    fn take_effect(&mut self, nsid: u32, after: Reservations, news: News) -> Option<Writers> {
        if let Some(record) = self.records.get_mut(&nsid) {
            record.reservations = after;
        }
        for (to, notice) in news.notices {
            self.post_notice(nsid, to, notice);
        }
        let preempted = Preempted::new();
        for victim in news.aborts {
            self.post_abort(nsid, victim, &preempted);
        }
        let writers = preempted.writers();
        drop(preempted);
        (!writers.are_gone()).then_some(writers)
    }

    /// Ends what waits to change the reservations of a namespace that has gone.
    pub(super) fn disband(&mut self, line: Line) {
        for by in line.askers() {
            self.post_end(by, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        }
    }

    /// Forgets who asked for changes: a controller that was reset, or one of its queues.
    pub(in crate::controller) fn forget_askers(
        &mut self,
        cntlid: u16,
        is_gone: impl Fn(&Asker) -> bool,
    ) {
        for record in self.records.values_mut() {
            record.line.forget(|by| by.cntlid == cntlid && is_gone(by));
        }
        if let Some(seat) = self.seats.get_mut(&cntlid) {
            seat.mail.ends.retain(|(reply, _)| !is_gone(&Asker { cntlid, reply: *reply }));
        }
    }

    /// A host without an identifier can never come back.
    pub(in crate::controller) fn forget_host(&mut self, host: Host) {
        for record in self.records.values_mut() {
            record.reservations.forget(host);
            record.line.beside(|after| after.forget(host));
        }
    }

    fn post_end(&mut self, by: Asker, end: End) {
        if let Some(seat) = self.seats.get_mut(&by.cntlid) {
            seat.mail.ends.push((by.reply, end));
            self.mail_count += 1;
        }
    }

    fn post_trouble(&mut self, by: Option<Asker>, why: &str) {
        let seat = by.and_then(|by| self.seats.get_mut(&by.cntlid));
        if let Some(seat) = seat {
            seat.mail.trouble = Some(why.to_owned());
            self.mail_count += 1;
        }
    }
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nsid, number, .. } = self;
        out.debug_struct("Stored").field("nsid", nsid).field("number", number).finish()
    }
}
