//! Reservation Persistence (feature 83h): it ends when it is durable, for every namespace that it
//! was set for (Base 2.1 §5.1.25.1.30).

use std::sync::MutexGuard;

use wire::Status;

use crate::controller::Controller;
use crate::controller::commands::{Step, settled};
use crate::controller::contract::{AdminDone, AdminEnd, AdminStep};
use crate::controller::reservation::line::{Asker, Change, Reply, Wish};
use crate::controller::subsystem::State;

/// A Set Features command that waits.
pub(in crate::controller) struct Persisting {
    number: u64,
    cid: u16,
    /// Namespaces that have not told how it ended.
    left: usize,
    /// The first refusal.
    end: Result<(), Status>,
}

impl Controller {
    /// Whether the reservations of these namespaces persist from now on.
    pub(super) fn persist_reservations(
        &mut self,
        mut state: MutexGuard<'_, State>,
        cid: u16,
        nsids: &[u32],
        persists: bool,
    ) -> Step {
        self.persisted_ever += 1;
        let number = self.persisted_ever;
        let subsystem = self.subsystem.clone();
        let by = Asker { cntlid: self.config.cntlid, reply: Reply::Feature(number) };
        let (mut left, mut end) = (0, Ok(()));
        for &nsid in nsids {
            let wish = Wish::Persistence(persists);
            let (nqn, origin) = (self.nqn.clone(), None);
            let change = Change { by, host: self.host, nqn, origin, wish };
            match subsystem.change_reservations(&mut state, nsid, change) {
                None => left += 1,
                Some(ended) => end = end.and(ended),
            }
        }
        subsystem.settle(state);
        if left == 0 {
            return end.map(|()| AdminStep::Done(AdminEnd::OK));
        }
        self.persisting.push(Persisting { number, cid, left, end });
        Ok(AdminStep::Later)
    }

    /// One of the namespaces that a command set it for has ended.
    pub(in crate::controller) fn persisted(&mut self, number: u64, end: Result<(), Status>) {
        let found = self.persisting.iter().position(|waiting| waiting.number == number);
        let Some(at) = found else { return };
        let waiting = &mut self.persisting[at];
        waiting.left -= 1;
        waiting.end = waiting.end.and(end);
        if waiting.left > 0 {
            return;
        }
        let Persisting { cid, end, .. } = self.persisting.swap_remove(at);
        let refused = |status| AdminEnd::refused(settled(status));
        let end = end.map_or_else(refused, |()| AdminEnd::OK);
        self.done.push_back(AdminDone { cid, end });
    }
}
