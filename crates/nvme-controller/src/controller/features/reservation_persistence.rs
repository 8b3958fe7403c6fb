//! Reservation Persistence (feature 83h): the command completes when the setting is durable in every
//! selected namespace (Base 2.1 §5.1.25.1.30).

use std::sync::MutexGuard;

use tenmil_wire::Status;

use crate::controller::Controller;
use crate::controller::commands::{CommandResult, with_dnr_unless_retryable};
use crate::controller::reservation::change_queue::{
    ChangeKind, ChangeRequester, PendingChange, ReservationReplyTarget,
};
use crate::controller::subsystem::SubsystemState;
use crate::controller::transport_interface::{AdminCompletion, AdminOutcome, AdminResult};

/// Set Features command that waits for durability.
pub(in crate::controller) struct PendingFeatureSave {
    number: u64,
    cid: u16,
    /// Number of namespaces whose result is pending.
    left: usize,
    /// First error.
    end: Result<(), Status>,
}

impl Controller {
    /// Sets whether the reservations of these namespaces persist.
    pub(super) fn set_reservation_persistence(
        &mut self,
        mut state: MutexGuard<'_, SubsystemState>,
        cid: u16,
        nsids: &[u32],
        persists: bool,
    ) -> CommandResult {
        self.saves_total += 1;
        let number = self.saves_total;
        let subsystem = self.subsystem.clone();
        let requester = ChangeRequester {
            cntlid: self.config.cntlid,
            reply: ReservationReplyTarget::Feature(number),
        };
        let (mut left, mut end) = (0, Ok(()));
        for &nsid in nsids {
            let kind = ChangeKind::Persistence(persists);
            let (nqn, origin) = (self.nqn.clone(), None);
            let change = PendingChange { requester, host: self.host, nqn, origin, kind };
            match subsystem.change_reservations(&mut state, nsid, change) {
                None => left += 1,
                Some(ended) => end = end.and(ended),
            }
        }
        subsystem.publish_and_notify(state);
        if left == 0 {
            return end.map(|()| AdminOutcome::Done(AdminResult::OK));
        }
        self.pending_saves.push(PendingFeatureSave { number, cid, left, end });
        Ok(AdminOutcome::Deferred)
    }

    /// Handles the result of one namespace; completes the command with the last one.
    pub(in crate::controller) fn handle_persist_result(
        &mut self,
        number: u64,
        end: Result<(), Status>,
    ) {
        let found = self.pending_saves.iter().position(|waiting| waiting.number == number);
        let Some(at) = found else { return };
        let waiting = &mut self.pending_saves[at];
        waiting.left -= 1;
        waiting.end = waiting.end.and(end);
        if waiting.left > 0 {
            return;
        }
        let PendingFeatureSave { cid, end, .. } = self.pending_saves.swap_remove(at);
        let refused = |status| AdminResult::failure(with_dnr_unless_retryable(status));
        let end = end.map_or_else(refused, |()| AdminResult::OK);
        self.deferred_completions.push_back(AdminCompletion { cid, end });
    }
}
