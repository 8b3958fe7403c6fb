//! Receive loop of both ends.

use tenmil_base::Instant;
use tenmil_wire::tcp::{FatalError, TermReq};

use crate::connection::Connection;
use crate::endpoint::RejectedPdu;
use crate::events::{EVENTS_PER_UNIT, EventQueue};

/// Result of a parsing step.
pub(crate) enum ReceiveStep {
    /// Continue.
    On,
    /// More bytes are needed.
    Short,
    /// A tag is needed.
    Full,
}

/// End of a connection that parses what it receives.
pub(crate) trait Receive: Connection {
    /// Receives the body of a PDU, from `at` on.
    fn read_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<Self::Event>,
    ) -> ReceiveStep;

    /// Parses the header at `at`, and adds its length; with a body that is here as a whole and has no digest,
    /// receives that as well.
    fn read_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<Self::Event>,
    ) -> Result<ReceiveStep, RejectedPdu<'a>>;

    /// Implements [`receive`](Connection::receive).
    #[inline]
    fn read(&mut self, now: Instant, bytes: &[u8], events: &mut EventQueue<Self::Event>) -> usize {
        let mut at = 0;
        let mut is_within = false;
        while self.core().is_listening() && events.room() >= EVENTS_PER_UNIT {
            let step = match self.core().body {
                Some(_) => Ok(self.read_body(bytes, &mut at, events)),
                None => self.read_header(bytes, &mut at, events),
            };
            match step {
                Ok(ReceiveStep::On) => {}
                Ok(ReceiveStep::Full) => break,
                Ok(ReceiveStep::Short) => {
                    is_within = self.core().body.is_some() || at < bytes.len();
                    break;
                }
                Err((refusal, header)) => {
                    let cause = self.core_mut().refuse(now, refusal, header);
                    events.push(cause.into());
                }
            }
        }
        if !self.core().is_listening() {
            return bytes.len();
        }
        self.core_mut().note(now, is_within, at > 0);
        at
    }

    /// Handles a TermReq of the peer.
    #[cold]
    fn handle_termination(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<Self::Event>,
    ) -> Result<(), FatalError> {
        let cause = self.core_mut().terminated(&TermReq::from_bytes(whole(header)));
        events.push(cause.into());
        Ok(())
    }
}

/// Number of padding bytes between a header of length `len`, including its digest, and data at
/// `pdo`.
#[inline]
pub(crate) fn padding(pdo: u8, len: usize) -> u8 {
    pdo - u8::try_from(len).unwrap_or(pdo)
}

/// Header as an array; its length follows from the PDU type.
#[inline]
pub(crate) fn whole<const N: usize>(header: &[u8]) -> &[u8; N] {
    header.first_chunk().expect("a header is as long as its type says")
}
