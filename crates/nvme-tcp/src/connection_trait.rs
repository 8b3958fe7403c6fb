//! Interface between the owner of a socket and either end of a connection.

use tenmil_base::Instant;

use crate::PayloadDigest;
use crate::endpoint::{CloseReason, ConnectionCore};
use crate::events::EventQueue;
use crate::pdu_body::{DataPlacement, PduBody};
use crate::send_queue::SendPiece;

/// End of an NVMe/TCP connection, as seen by the owner of its socket.
pub trait Connection {
    /// Events of this end.
    type Event: From<CloseReason>;

    /// State shared by both kinds of ends.
    fn connection_core(&self) -> &ConnectionCore;

    /// Shared state, mutable; for this crate only.
    fn connection_core_mut(&mut self) -> &mut ConnectionCore;

    /// Parses received bytes, as far as PDUs are complete, tags are free and `events` has space.
    /// Returns how many bytes were consumed; the others must be passed again, followed by more.
    fn receive(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut EventQueue<Self::Event>,
    ) -> usize;

    /// Queues PDUs to send, as far as there is space.
    fn fill_send_queue(&mut self, payloads: &impl PayloadDigest);

    /// Whether more PDUs wait for space in the send queue. The owner passes this on to the socket
    /// (MSG_MORE), which then does not send a partial segment.
    #[must_use]
    fn has_more(&self) -> bool;

    /// Records that the socket has sent `count` bytes of the pieces and no longer references them.
    /// Reports commands that complete by that, as far as `events` has space; a call with zero
    /// continues.
    ///
    /// # Panics
    ///
    /// If fewer bytes were queued.
    fn record_sent(&mut self, count: usize, events: &mut EventQueue<Self::Event>);

    /// Tags of outstanding commands. Their buffers belong to the owner again once the socket is
    /// closed; until then some may still complete through [`record_sent`](Self::record_sent).
    fn outstanding_tags(&self) -> impl Iterator<Item = u16> + '_;

    /// Pieces to send, oldest first.
    #[inline]
    #[must_use]
    fn send_pieces(&self) -> &[SendPiece] {
        self.connection_core().send_queue.pieces()
    }

    /// Header bytes that the pieces refer to.
    #[inline]
    #[must_use]
    fn header_bytes(&self) -> &[u8] {
        self.connection_core().send_queue.headers()
    }

    /// Range of a command's data that the next bytes of the stream can be received into directly.
    /// Valid when all received bytes have been consumed; completed with [`received_direct`](Self::received_direct).
    #[must_use]
    fn next_direct_placement(&self) -> Option<DataPlacement> {
        let core = self.connection_core();
        core.body.as_ref().filter(|_| core.is_open()).and_then(PduBody::direct_placement)
    }

    /// Records that `count` bytes were received into the range of [`next_direct_placement`](Self::next_direct_placement).
    ///
    /// # Panics
    ///
    /// If the range is shorter.
    fn received_direct(&mut self, now: Instant, count: u32, events: &mut EventQueue<Self::Event>) {
        let body = self
            .connection_core_mut()
            .body
            .as_mut()
            .expect("direct_placement() has returned a range");
        body.record_direct_bytes(count);
        self.receive(now, &[], events);
        let is_inside_pdu = self.connection_core().body.is_some();
        self.connection_core_mut().update_pdu_timer(now, is_inside_pdu, true);
    }

    /// Whether the connection has been negotiated and has not ended.
    #[must_use]
    fn is_open(&self) -> bool {
        self.connection_core().is_open()
    }

    /// Whether the socket can be closed: nothing more is received or sent.
    #[must_use]
    fn is_closed(&self) -> bool {
        self.connection_core().is_closed()
    }

    /// Whether nothing more will be sent, so that the write side of the socket can be shut down.
    #[must_use]
    fn is_write_closed(&self) -> bool {
        self.connection_core().is_write_closed()
    }

    /// Time at which [`handle_deadline`](Self::handle_deadline) must be called; [`Instant::NEVER`] for none.
    #[must_use]
    fn deadline(&self) -> Instant {
        self.connection_core().deadline()
    }

    /// Closes the connection if its deadline has passed.
    fn handle_deadline(&mut self, now: Instant, events: &mut EventQueue<Self::Event>) {
        if let Some(reason) = self.connection_core_mut().handle_deadline(now) {
            events.push_close(reason.into());
        }
    }

    /// Restarts the time limit of an incomplete PDU, if there is one: its rest was not read meanwhile.
    fn restart_pdu_timeout(&mut self, now: Instant) {
        self.connection_core_mut().restart_pdu_timeout(now);
    }

    /// Handles the end of the stream. `unconsumed` received bytes were not consumed.
    fn handle_eof(&mut self, unconsumed: usize, events: &mut EventQueue<Self::Event>) {
        let is_inside_pdu = unconsumed > 0 || self.connection_core().body.is_some();
        if let Some(reason) = self.connection_core_mut().handle_eof(is_inside_pdu) {
            events.push_close(reason.into());
        }
    }
}
