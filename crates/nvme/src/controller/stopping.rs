//! The orderly end: queue pairs run dry and are deleted, then the controller is told.
//!
//! ```text
//!   Ready --> Draining and Deleting --> registers: CC.SHN, SHST, EN=0 --> ShutDown
//! ```

use base::{Dma, Instant, Mmio, Span};
use wire::register::ShutdownNotification;

use super::{Controller, Phase};
use crate::error::Refusal;

/// Nobody waits longer than this for a controller to shut down, whatever it asks for.
const SHUTDOWN_MAX: Span = Span::from_secs(60);

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Begins to shut the controller down. [`Event::ShutDown`](crate::Event::ShutDown) follows,
    /// whatever the controller does, or [`Event::Dead`](crate::Event::Dead) if it could not even be
    /// cut off from memory; then its queue pairs are of no more use.
    pub fn shut_down(
        &mut self,
        now: Instant,
        notification: ShutdownNotification,
    ) -> Result<(), Refusal> {
        let (Phase::Starting | Phase::Ready) = self.phase else { return Err(Refusal::NotReady) };
        self.asked = None;
        if notification == ShutdownNotification::Abrupt || matches!(self.phase, Phase::Starting) {
            self.freeze();
            self.begin_shutdown(now, notification);
            return Ok(());
        }
        let drain_until = now.after(self.options.quiesce_timeout);
        self.phase = Phase::Stopping { notification, drain_until };
        Ok(())
    }

    /// Goes on with a shutdown once the queue pairs are gone.
    pub(super) fn stop_if_so(&mut self, now: Instant) {
        let Phase::Stopping { notification, drain_until } = self.phase else { return };
        self.drain_queues(drain_until);
        if !self.has_queues() {
            self.freeze();
            self.begin_shutdown(now, notification);
        }
    }

    /// How long the controller may take: what it asks for (RTD3E), within reason.
    pub(super) fn shutdown_allowance(&self) -> Span {
        let asked =
            self.identity.as_ref().map_or(Span::default(), |identity| identity.limits.shutdown);
        asked.clamp(self.options.shutdown_timeout, SHUTDOWN_MAX.max(self.options.shutdown_timeout))
    }
}
