//! Revocation of a controller's DMA, which may take until the last access has ended.
//!
//! ```text
//!   revoke ── no DMA in flight ────────────────▶ parked commands complete; dead, removed, …
//!      └── park ── polled: none in flight ──────────▲
//!            └── timeout: owner notified, still parked ──▲
//! ```
//!
//! While DMA is in flight, no queue pair is released. No buffer that the controller may still access is
//! returned to its owner, neither before the timeout nor after it.

use tenmil_base::{Dma, Instant, Mmio};

use super::{Controller, ControllerState, Phase, QueueTransports};
use crate::error::{ControllerError, ResetCause};
use crate::event::Event;

/// Controller with revoked DMA that may still be in flight.
#[derive(Debug)]
pub(super) struct DmaRevocation {
    then: AfterRevocation,
    since: Instant,
    /// Final state reported to the owner, if only the memory is still waited for.
    ended: Option<ControllerState>,
}

/// Next step once no DMA is in flight.
#[derive(Debug)]
pub(super) enum AfterRevocation {
    Die(ControllerError),
    Remove,
    /// The controller is reset again.
    Reset(ResetCause),
    /// The shutdown counts as complete.
    EndShutdown,
}

impl DmaRevocation {
    /// Final state, if it has been reported to the owner.
    pub(super) fn reported_state(&self) -> Option<ControllerState> {
        self.ended
    }

    pub(super) fn ends_shutdown(&self) -> bool {
        matches!(self.then, AfterRevocation::EndShutdown)
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Revokes the controller's DMA and continues with `then` once none is in flight.
    pub(super) fn revoke_dma(&mut self, now: Instant, then: AfterRevocation) {
        if self.dma.revoke_access() {
            return self.continue_after_revocation(now, then);
        }
        self.freeze();
        self.phase = Phase::RevokingDma(DmaRevocation { then, since: now, ended: None });
    }

    /// Checks whether DMA is still in flight.
    pub(super) fn poll_revocation(&mut self, now: Instant) {
        let timeout = self.options.cut_off_timeout;
        let Phase::RevokingDma(cutting) = &mut self.phase else { return };
        if !self.dma.revoke_access() {
            let waited = now.since(cutting.since);
            if cutting.ended.is_none() && waited >= timeout {
                let (state, event) = match cutting.then {
                    AfterRevocation::Remove => (ControllerState::Removed, Event::Removed),
                    _ => {
                        (ControllerState::Dead, Event::Dead(ControllerError::DmaActive { waited }))
                    }
                };
                cutting.ended = Some(state);
                self.push_event(event);
            }
            return;
        }
        let ended = Phase::Ended(cutting.ended.unwrap_or(ControllerState::Dead));
        let Phase::RevokingDma(cutting) = core::mem::replace(&mut self.phase, ended) else {
            return;
        };
        if cutting.ended.is_some() {
            self.end_queues();
            self.fail_admin_commands(now);
        } else {
            self.continue_after_revocation(now, cutting.then);
        }
    }

    fn continue_after_revocation(&mut self, now: Instant, then: AfterRevocation) {
        match then {
            AfterRevocation::Die(error) => self.end(now, ControllerState::Dead, Event::Dead(error)),
            AfterRevocation::Remove => self.end(now, ControllerState::Removed, Event::Removed),
            AfterRevocation::EndShutdown => self.end_shutdown(now, false),
            AfterRevocation::Reset(cause) => {
                self.complete_parked_commands(now);
                self.reset_with_cause(now, cause);
            }
        }
    }
}
