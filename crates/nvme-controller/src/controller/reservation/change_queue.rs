//! Change queue of a namespace's reservations: changes are serialized, and each takes effect when it is
//! durable.
//!
//! ```text
//!   request ─▶ waiting ─▶ evaluate on the state in effect ─┬─ nothing to write ─────▶ in effect ─▶ result
//!                ▲                                         └─▶ store ─▶ durable ────▶ in effect ─▶ result
//!                └───────────────────────── next change ◀──────────────────────────────┘
//! ```
//!
//! A change is not visible before it is durable: queues and reports use the previous state. A failed
//! write therefore needs no rollback, and of two racing hosts, the second change is evaluated on the
//! result of the first.

use std::collections::VecDeque;

use tenmil_wire::{Command, Status};

use super::commands::{RequestingHost, apply_command};
use super::{HostId, HostNqn, OriginRegistrantLimit, ReservationChangeEffects, Reservations};
use crate::controller::config::ReservationPersistenceMode;
use crate::controller::subsystem::NamespaceEntry;
use crate::controller::transport_interface::QueueCommandId;

/// Pending changes of one namespace.
#[derive(Default)]
pub(in crate::controller) struct ChangeQueue {
    waiting: VecDeque<PendingChange>,
    writing: Option<RecordWrite>,
    /// The last record may not have been written: the next change writes one in any case.
    is_uncertain: bool,
}

/// Requested reservation change.
pub(in crate::controller) struct PendingChange {
    pub(in crate::controller) requester: ChangeRequester,
    pub(in crate::controller) host: HostId,
    pub(in crate::controller) nqn: Option<HostNqn>,
    pub(in crate::controller) origin: Option<OriginRegistrantLimit>,
    pub(in crate::controller) kind: ChangeKind,
}

/// Kind of a change.
pub(in crate::controller) enum ChangeKind {
    /// Reservation command with its keys.
    Command(Command, Vec<u8>),
    /// Whether reservations persist through power loss (feature 83h).
    Persistence(bool),
}

/// Receiver of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) struct ChangeRequester {
    pub(in crate::controller) cntlid: u16,
    pub(in crate::controller) reply: ReservationReplyTarget,
}

/// Command of the controller that waits for the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ReservationReplyTarget {
    /// Command of an I/O queue.
    Queue(QueueCommandId),
    /// Set Features command, by its internal number.
    Feature(u64),
}

/// Change that is being made durable.
pub(in crate::controller) struct RecordWrite {
    /// `None` if the requester has been reset.
    pub(in crate::controller) requester: Option<ChangeRequester>,
    pub(in crate::controller) number: u64,
    pub(in crate::controller) after: Reservations,
    pub(in crate::controller) effects: ReservationChangeEffects,
}

/// When a change takes effect.
pub(in crate::controller) enum PersistPlan {
    /// At once: there is nothing to write.
    Now,
    /// After this record is durable; `None` means no record.
    Write(Option<Vec<u8>>),
}

impl ChangeQueue {
    pub(in crate::controller) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    pub(in crate::controller) fn push(&mut self, change: PendingChange) {
        self.waiting.push_back(change);
    }

    /// Next waiting change, if no write is in progress.
    pub(in crate::controller) fn next(&mut self) -> Option<PendingChange> {
        if self.is_writing() { None } else { self.waiting.pop_front() }
    }

    pub(in crate::controller) fn start_write(&mut self, writing: RecordWrite) {
        self.writing = Some(writing);
    }

    /// Ends the write with this number and returns it.
    pub(in crate::controller) fn end_write(
        &mut self,
        number: u64,
        is_durable: bool,
    ) -> Option<RecordWrite> {
        let writing = self.writing.take_if(|writing| writing.number == number)?;
        self.is_uncertain = !is_durable;
        Some(writing)
    }

    /// Drops requesters: their waiting changes are removed, and a change being written takes effect
    /// without a result.
    pub(in crate::controller) fn drop_requesters(
        &mut self,
        is_removed: impl Fn(&ChangeRequester) -> bool,
    ) {
        self.waiting.retain(|change| !is_removed(&change.requester));
        if let Some(writing) = &mut self.writing {
            writing.requester.take_if(|requester| is_removed(requester));
        }
    }

    /// Applies an immediate update also to the state that is being written.
    pub(in crate::controller) fn apply_to_state_being_written(
        &mut self,
        update: impl Fn(&mut Reservations),
    ) {
        if let Some(writing) = &mut self.writing {
            update(&mut writing.after);
        }
    }

    /// State after the change that is being written.
    pub(in crate::controller) fn state_after_write(&self) -> Option<&Reservations> {
        self.writing.as_ref().map(|writing| &writing.after)
    }

    /// All requesters.
    pub(in crate::controller) fn into_requesters(self) -> impl Iterator<Item = ChangeRequester> {
        let writing = self.writing.and_then(|writing| writing.requester);
        writing.into_iter().chain(self.waiting.into_iter().map(|change| change.requester))
    }
}

impl PendingChange {
    /// Applies the change to `reservations`.
    pub(in crate::controller) fn apply(
        &self,
        reservations: &mut Reservations,
        can_persist: bool,
    ) -> Result<ReservationChangeEffects, Status> {
        match &self.kind {
            ChangeKind::Command(command, data) => {
                let (nqn, origin) = (self.nqn.as_ref(), self.origin.as_ref());
                let requester = RequestingHost { host: self.host, nqn, origin, can_persist };
                apply_command(reservations, requester, command, data)
            }
            ChangeKind::Persistence(persists) => {
                reservations.set_persists_through_power_loss(*persists);
                Ok(ReservationChangeEffects::default())
            }
        }
    }
}

impl NamespaceEntry {
    /// Whether reservations can persist through power loss.
    pub(in crate::controller) const fn can_persist(&self) -> bool {
        !matches!(self.persistence, ReservationPersistenceMode::None)
    }

    /// When a change to `after` takes effect.
    pub(in crate::controller) fn persist_plan(
        &self,
        after: &Reservations,
    ) -> Result<PersistPlan, Status> {
        let before = &self.reservations;
        match &self.persistence {
            ReservationPersistenceMode::Emulated => Ok(PersistPlan::Now),
            ReservationPersistenceMode::None
                if after != before && after.persists_through_power_loss =>
            {
                Err(Status::INVALID_FIELD)
            }
            ReservationPersistenceMode::None => Ok(PersistPlan::Now),
            ReservationPersistenceMode::Durable(_) => {
                let is_new = after != before
                    && (after.persists_through_power_loss || before.persists_through_power_loss);
                if !is_new && !self.change_queue.is_uncertain {
                    return Ok(PersistPlan::Now);
                }
                Ok(PersistPlan::Write(after.persists_through_power_loss.then(|| after.to_record())))
            }
        }
    }
}
