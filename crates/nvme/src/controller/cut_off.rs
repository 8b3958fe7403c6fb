//! Cutting a controller off from memory, which may take until the last access has ended.
//!
//! ```text
//!   cut off ── nothing under way ──────────────▶ what was parked is answered; dead, removed, …
//!      └── park ── asked again: nothing ────────────▲
//!            └── for too long: told so, and parked on ──▲
//! ```
//!
//! Until nothing is under way no queue pair is told anything, so no buffer is given back that the
//! controller may still touch: not in time, and not when time is up.

use base::{Dma, Instant, Mmio};

use super::{Controller, Phase, State};
use crate::error::{ControllerError, ResetCause};
use crate::event::Event;

/// A controller that is cut off and may have something under way.
#[derive(Debug)]
pub(super) struct CuttingOff {
    then: Then,
    since: Instant,
    /// Its owner has been told how it ended, and only the memory is still waited for.
    ended: Option<State>,
}

/// What comes once it can touch nothing.
#[derive(Debug)]
pub(super) enum Then {
    Die(ControllerError),
    Remove,
    /// It is reset once more.
    Reset(ResetCause),
    /// It counts as shut down.
    EndShutdown,
}

impl CuttingOff {
    /// The state in which its owner sees the controller, if that has been told.
    pub(super) fn ended(&self) -> Option<State> {
        self.ended
    }

    pub(super) fn is_shutdown(&self) -> bool {
        matches!(self.then, Then::EndShutdown)
    }
}

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Cuts the controller off from memory and goes on with `then` once it can touch nothing.
    pub(super) fn cut_off(&mut self, now: Instant, then: Then) {
        if self.dma.cut_off() {
            return self.go_on(now, then);
        }
        self.freeze();
        self.phase = Phase::CuttingOff(CuttingOff { then, since: now, ended: None });
    }

    /// Asks again.
    pub(super) fn turn_cutting_off(&mut self, now: Instant) {
        let timeout = self.options.cut_off_timeout;
        let Phase::CuttingOff(cutting) = &mut self.phase else { return };
        if !self.dma.cut_off() {
            let waited = now.since(cutting.since);
            if cutting.ended.is_none() && waited >= timeout {
                let (state, event) = match cutting.then {
                    Then::Remove => (State::Removed, Event::Removed),
                    _ => (State::Dead, Event::Dead(ControllerError::StillReaches { waited })),
                };
                cutting.ended = Some(state);
                self.tell(event);
            }
            return;
        }
        let ended = Phase::Ended(cutting.ended.unwrap_or(State::Dead));
        let Phase::CuttingOff(cutting) = core::mem::replace(&mut self.phase, ended) else { return };
        if cutting.ended.is_some() {
            self.end_queues();
            self.answer_admin(now);
        } else {
            self.go_on(now, cutting.then);
        }
    }

    fn go_on(&mut self, now: Instant, then: Then) {
        match then {
            Then::Die(error) => self.end(now, State::Dead, Event::Dead(error)),
            Then::Remove => self.end(now, State::Removed, Event::Removed),
            Then::EndShutdown => self.end_shutdown(now, false),
            Then::Reset(cause) => {
                self.let_go(now);
                self.reset_because(now, cause);
            }
        }
    }
}
