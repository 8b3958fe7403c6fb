//! Receive loop of both ends.

use tenmil_base::Instant;
use tenmil_wire::tcp::{FatalError, TermReq};

use crate::connection_trait::Connection;
use crate::endpoint::RejectedPdu;
use crate::events::{EVENTS_PER_PDU, EventQueue};

/// Result of a parsing step.
pub(crate) enum PduReceiveStep {
    /// Continue.
    Continue,
    /// More bytes are needed.
    NeedBytes,
    /// A tag is needed.
    NeedTag,
}

/// End of a connection that parses what it receives.
pub(crate) trait ReceivePdus: Connection {
    /// Receives the body of a PDU, from `at` on.
    fn receive_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<Self::Event>,
    ) -> PduReceiveStep;

    /// Parses the header at `at` and advances `at` past it, and past the body if all of the body is in
    /// `bytes`.
    fn receive_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<Self::Event>,
    ) -> Result<PduReceiveStep, RejectedPdu<'a>>;

    /// Implements [`receive`](Connection::receive).
    #[inline]
    fn receive_pdus(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut EventQueue<Self::Event>,
    ) -> usize {
        let mut at = 0;
        let mut is_inside_pdu = false;
        while self.connection_core().accepts_pdus() && events.remaining_capacity() >= EVENTS_PER_PDU
        {
            let step = match self.connection_core().body {
                Some(_) => Ok(self.receive_body(bytes, &mut at, events)),
                None => self.receive_header(bytes, &mut at, events),
            };
            match step {
                Ok(PduReceiveStep::Continue) => {}
                Ok(PduReceiveStep::NeedTag) => break,
                Ok(PduReceiveStep::NeedBytes) => {
                    is_inside_pdu = self.connection_core().body.is_some() || at < bytes.len();
                    break;
                }
                Err((violation, header)) => {
                    let reason = self.connection_core_mut().reject_pdu(now, violation, header);
                    events.push(reason.into());
                }
            }
        }
        if !self.connection_core().accepts_pdus() {
            return bytes.len();
        }
        self.connection_core_mut().update_pdu_timer(now, is_inside_pdu, at > 0);
        at
    }

    /// Handles a TermReq of the peer.
    #[cold]
    fn handle_termination(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<Self::Event>,
    ) -> Result<(), FatalError> {
        let reason = self
            .connection_core_mut()
            .handle_termination(&TermReq::from_bytes(header_array(header)));
        events.push(reason.into());
        Ok(())
    }
}

/// Number of padding bytes between a header of length `len`, including its digest, and data at
/// `pdo`.
#[inline]
pub(crate) fn padding_len(pdo: u8, len: usize) -> u8 {
    pdo - u8::try_from(len).unwrap_or(pdo)
}

/// Header as an array; its length follows from the PDU type.
#[inline]
pub(crate) fn header_array<const N: usize>(header: &[u8]) -> &[u8; N] {
    header.first_chunk().expect("a parsed header has the length of its PDU type")
}
