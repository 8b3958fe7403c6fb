//! Takeover of a pool by the second host.
//!
//! ```text
//!   without reservations   host 0 is idle and cut off | host 1 opens the pool and claims it by force
//!   with                   host 0 keeps on writing    | host 1 preempts it | opens | claims by force
//! ```

use tenmil_base::Span;

use super::{Action, World};
use crate::history::Scope;
use crate::plan::FaultEvent;
use crate::registrant::{RequestedState, ReservationClient};

/// What the opening of a reserved pool waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takeover {
    /// The reservation of the first host.
    Reserving,
    /// The preemption by the second host.
    Preempting,
    /// The claim of the second host.
    Claiming,
}

impl World {
    /// The first host reserves the disk before it opens the pool.
    pub(super) fn reserve_pool(&mut self) {
        if self.plan.is_reserved {
            self.takeover = Some(Takeover::Reserving);
            self.want(0, RequestedState::Held);
        }
    }

    /// The second host takes the pool over. Without a reservation, nothing of the first one may be in
    /// flight: no host can close the time between its read of the superblocks and a write.
    pub(super) fn take_over(&mut self, span: Span, outage: Option<(Span, Span)>) {
        let is_reserved = self.plan.is_reserved;
        let [first, second] = &mut self.pools[..] else { return };
        let is_ready = if is_reserved { first.is_in_use() } else { first.is_at_rest() };
        if !is_ready {
            let again = Action::Fault(FaultEvent::TakeOver { span, outage });
            return self.schedule(self.now.after(Span::from_us(200)), again);
        }
        match is_reserved {
            true => first.preempt(),
            false => {
                first.cut_off();
                second.take_over();
            }
        }
        // A reserved pool is taken over from a host that writes, or whose writes arrive later.
        if !is_reserved || outage.is_some() {
            for process in 0..self.processes.len() {
                self.network.partition(0, process, span);
            }
            self.note(Scope::ALL, format!("host 0 is partitioned for {span}"));
        }
        self.note(Scope::ALL, "host 1 takes the pool over".into());
        if is_reserved {
            self.takeover = Some(Takeover::Preempting);
            if !self.plan.bugs.takeover_does_not_preempt {
                self.want(1, RequestedState::Preempted(0));
            }
        }
        if let Some((later, down)) = outage {
            let outage = FaultEvent::LosePower { machine: 0, down };
            self.schedule(self.now.after(later), Action::Fault(outage));
        }
    }

    /// Goes on with the opening of a reserved pool. Returns true if there was progress.
    pub(super) fn turn_takeover(&mut self) -> bool {
        let is_done = |host| self.registrants.get(&host).is_none_or(ReservationClient::is_reached);
        let owner = self.pools.first().and_then(|host| self.checker.pool_owner(host.disk()));
        let next = match self.takeover {
            Some(Takeover::Reserving) if is_done(0) => {
                self.pools[0].open();
                None
            }
            Some(Takeover::Preempting) if is_done(1) => {
                self.pools[1].take_over();
                Some(Takeover::Claiming)
            }
            Some(Takeover::Claiming) if owner == Some(1) => None,
            _ => return false,
        };
        self.takeover = next;
        true
    }
}
