//! Graceful shutdown: queue pairs are drained and deleted, then the controller is shut down.
//!
//! ```text
//!   Ready --> Draining and Deleting --> registers: CC.SHN, SHST, EN=0 --> ShutDown
//! ```

use tenmil_base::{Dma, Instant, Mmio, Span};
use tenmil_wire::register::ShutdownNotification;

use super::{Controller, Phase, QueueTransports};
use crate::error::RequestError;

/// Upper bound of the shutdown timeout, whatever the controller requests.
const SHUTDOWN_MAX: Span = Span::from_secs(60);

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Starts the shutdown of the controller. [`Event::ShutDown`](crate::Event::ShutDown) follows,
    /// whatever the controller does, or [`Event::Dead`](crate::Event::Dead) if its DMA cannot be revoked
    /// either; its queue pairs are then unusable.
    pub fn start_shutdown(
        &mut self,
        now: Instant,
        notification: ShutdownNotification,
    ) -> Result<(), RequestError> {
        let (Phase::Starting | Phase::Ready) = self.phase else {
            return Err(RequestError::NotReady);
        };
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

    /// Continues a shutdown once the queue pairs are deleted.
    pub(super) fn continue_shutdown(&mut self, now: Instant) {
        let Phase::Stopping { notification, drain_until } = self.phase else { return };
        self.drain_queues(drain_until);
        if !self.has_queues() {
            self.freeze();
            self.begin_shutdown(now, notification);
        }
    }

    /// Shutdown timeout: the time requested by the controller (RTD3E), within bounds.
    pub(super) fn shutdown_timeout(&self) -> Span {
        let asked =
            self.identity.as_ref().map_or(Span::default(), |identity| identity.limits.shutdown);
        asked.clamp(self.options.shutdown_timeout, SHUTDOWN_MAX.max(self.options.shutdown_timeout))
    }
}
