//! Takeover of a pool by the second host.
//!
//! ```text
//!   without reservations   host 0 is idle and cut off | host 1 opens the pool and claims it by force
//!   with                   host 0 keeps on writing    | host 1 preempts it | opens | claims by force
//! ```

use tenmil_base::Span;

use super::{ClusterSimulation, ScheduledAction};
use crate::cluster_plan::FaultEvent;
use crate::reservation_client::{DesiredReservation, ReservationClient};
use crate::run_history::RecordScope;

/// What the opening of a reserved pool waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeoverStage {
    /// The reservation of the first host.
    Reserving,
    /// The preemption by the second host.
    Preempting,
    /// The claim of the second host.
    Claiming,
}

impl ClusterSimulation {
    /// The first host reserves the disk before it opens the pool.
    pub(super) fn reserve_pool_disk(&mut self) {
        if self.plan.is_reserved {
            self.takeover = Some(TakeoverStage::Reserving);
            self.request_reservation(0, DesiredReservation::Held);
        }
    }

    /// The second host takes the pool over. Without a reservation, nothing of the first one may be in
    /// flight: no host can close the time between its read of the superblocks and a write.
    pub(super) fn take_over(&mut self, span: Span, outage: Option<(Span, Span)>) {
        let is_reserved = self.plan.is_reserved;
        let [first, second] = &mut self.pools[..] else { return };
        let is_ready =
            if is_reserved { first.has_written_volume() } else { first.is_takeover_safe() };
        if !is_ready {
            let again = ScheduledAction::Fault(FaultEvent::TakeOver { span, outage });
            return self.schedule(self.now.after(Span::from_us(200)), again);
        }
        match is_reserved {
            true => first.handle_preemption(),
            false => {
                first.stop_requests();
                second.take_over_pool();
            }
        }
        // A reserved pool is taken over from a host that writes, or whose writes arrive later.
        if !is_reserved || outage.is_some() {
            for process in 0..self.processes.len() {
                self.network.partition(0, process, span);
            }
            self.record_event(RecordScope::ALL, format!("host 0 is partitioned for {span}"));
        }
        self.record_event(RecordScope::ALL, "host 1 takes the pool over".into());
        if is_reserved {
            self.takeover = Some(TakeoverStage::Preempting);
            if !self.plan.bugs.takeover_does_not_preempt {
                self.request_reservation(1, DesiredReservation::Preempted(0));
            }
        }
        if let Some((later, down)) = outage {
            let outage = FaultEvent::LosePower { machine: 0, down };
            self.schedule(self.now.after(later), ScheduledAction::Fault(outage));
        }
    }

    /// Goes on with the opening of a reserved pool. Returns true if there was progress.
    pub(super) fn poll_takeover(&mut self) -> bool {
        let is_done =
            |host| self.registrants.get(&host).is_none_or(ReservationClient::has_reached_requested);
        let owner = self.pools.first().and_then(|host| self.checker.pool_owner(host.disk_index()));
        let next = match self.takeover {
            Some(TakeoverStage::Reserving) if is_done(0) => {
                self.pools[0].open_pool();
                None
            }
            Some(TakeoverStage::Preempting) if is_done(1) => {
                self.pools[1].take_over_pool();
                Some(TakeoverStage::Claiming)
            }
            Some(TakeoverStage::Claiming) if owner == Some(1) => None,
            _ => return false,
        };
        self.takeover = next;
        true
    }
}
