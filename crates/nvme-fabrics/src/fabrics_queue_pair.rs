//! Fabrics queue pair: a queue pair of the driver over an NVMe/TCP connection.
//!
//! ```text
//!   submit ─▶ NamespaceQueue ─▶ TcpTransport ─▶ connection     sent by the following flush
//!   poll   ◀─ NamespaceQueue ◀─ TcpTransport ◀─ connection
//! ```

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Instant, IoChannel, Limits, Request, Segment,
    Span,
};
use tenmil_nvme_host::{NamespaceQueue, NamespaceView, QueuePair, QueueSizes, QueueState};

use crate::cache_tracker::Association;
use crate::tcp_transport::TcpTransport;
use crate::wait_handle::WaitHandle;

/// A queue pair with its connection. Nothing is retried: commands aborted by a reset complete with
/// [`ABORTED_BY_HOST`](tenmil_base::IoStatus::ABORTED_BY_HOST) once the old controller can no longer execute
/// them.
///
/// A [`FabricsChannel`](crate::FabricsChannel) has one for each path. Its owner may also submit raw commands
/// to its [`queue`](Self::queue).
pub struct FabricsQueuePair {
    queue: NamespaceQueue<TcpTransport>,
    sends_on_flush: bool,
    /// Command timeout.
    pub(crate) command_timeout: Span,
}

/// State of a fabrics queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuePairState {
    /// It accepts requests.
    Open,
    /// It accepts no requests, and may still complete some.
    Closing,
    /// It has no connection. Outstanding requests complete when the old controller can no longer execute
    /// them.
    Disconnected,
}

impl FabricsQueuePair {
    pub(crate) fn new(
        pair: QueuePair<TcpTransport>,
        view: NamespaceView,
        sizes: QueueSizes,
        command_timeout: Span,
    ) -> Option<Self> {
        let queue = NamespaceQueue::new(pair, view, sizes)?;
        Some(Self { queue, sends_on_flush: true, command_timeout })
    }

    /// Selects whether submitted requests are sent by the following flush, or by the next poll.
    #[must_use]
    pub(crate) fn set_send_on_flush(mut self, sends_on_flush: bool) -> Self {
        self.sends_on_flush = sends_on_flush;
        self
    }

    /// The queue pair of the driver.
    pub fn driver_queue(&mut self) -> &mut NamespaceQueue<TcpTransport> {
        &mut self.queue
    }

    #[inline]
    fn transport(&self) -> &TcpTransport {
        self.queue.queue().transport()
    }

    #[inline]
    fn transport_mut(&mut self) -> &mut TcpTransport {
        self.queue.queue_mut().transport_mut()
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    /// The state that the controller has set.
    #[inline]
    pub(crate) fn driver_state(&self) -> QueueState {
        self.queue.queue().state()
    }

    pub(crate) fn state(&self) -> QueuePairState {
        match (self.transport().is_connected(), self.driver_state()) {
            (false, _) => QueuePairState::Disconnected,
            (true, QueueState::Running) => QueuePairState::Open,
            (true, _) => QueuePairState::Closing,
        }
    }

    /// The association that the completions of the last poll belong to.
    #[inline]
    pub(crate) fn association(&self) -> Option<&Association> {
        self.transport().association()
    }

    /// Whether the connection was lost by itself, and there is no new one yet.
    pub(crate) fn is_connection_lost(&self) -> bool {
        self.transport().is_connection_lost()
    }

    /// Submits requests to the queue pair, as it accepts them.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        self.queue.submit(now, requests, segments)
    }

    /// Sends submitted requests.
    #[inline]
    pub fn flush(&mut self) {
        if self.sends_on_flush {
            self.queue.flush_submissions();
        }
    }

    /// Polls completions. [`send_remaining_data`](Self::send_remaining_data) follows.
    #[inline]
    pub(crate) fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) {
        self.transport_mut().poll_drain(now);
        self.queue.poll(now, completions);
    }

    /// Sends data requested by the controller (R2T), and the rest of split requests.
    #[inline]
    pub(crate) fn send_remaining_data(&mut self) {
        self.queue.flush_submissions();
    }

    /// Polls completions and sends what is left to send, for an owner of raw commands.
    pub fn poll_raw(&mut self, now: Instant, completions: &mut CompletionBatch) {
        self.poll(now, completions);
        self.send_remaining_data();
    }

    /// Discards completions. Returns true once nothing is in flight.
    pub fn drain(&mut self, now: Instant) -> bool {
        self.transport_mut().poll_drain(now);
        let is_done = self.queue.drain_discarding_completions(now);
        self.queue.flush_submissions();
        is_done
    }

    pub(crate) fn doorbell_stats(&self) -> DoorbellStats {
        self.queue.doorbell_stats()
    }

    /// Latest time of the next poll.
    pub fn wake_at(&self) -> Instant {
        self.queue.wake_at().min(self.transport().wake_at())
    }

    /// Makes state changes wake the thread's wait handle.
    pub(crate) fn set_waker(&self, wait_handle: &dyn WaitHandle) {
        self.queue.queue().set_waker(wait_handle.waker());
    }

    /// Arms the wake source. Returns true if the thread must not sleep.
    pub(crate) fn arm(&mut self, wait_handle: &mut dyn WaitHandle) -> bool {
        // Locally completed commands and unsent parts of split requests have no wake-up.
        self.transport_mut().arm_connection(wait_handle)
            || !self.queue.queue_mut().arm()
            || self.queue.wake_at() == Instant::default()
    }

    pub(crate) fn disarm(&mut self) {
        self.transport_mut().disarm();
    }
}
