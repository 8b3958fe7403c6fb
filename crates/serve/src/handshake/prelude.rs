//! What a peer sends before TLS begins.

use super::{Refusal, SocketIo};

/// First bytes of a connection, which decide whether TLS begins.
pub(crate) trait Prelude: Send {
    /// Handles what has been received.
    fn step(&mut self, io: &mut SocketIo) -> PreludeStep;

    /// Flags that the peer has sent before TLS; none if it sends none.
    fn received_flags(&self) -> u32 {
        0
    }
}

/// Result of a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PreludeStep {
    /// More bytes must be received first.
    Await,
    /// A TLS handshake follows.
    StartTls,
    /// The connection stays in plaintext.
    Plaintext,
    /// The connection is closed.
    Refused(Refusal),
}

/// The first byte decides, and stays in the socket: that of a TLS record, or that of a PDU.
#[derive(Debug)]
pub(crate) struct FirstBytePrelude {
    /// Whether plaintext is accepted.
    pub(crate) accepts_plaintext: bool,
}

/// Content type of a handshake record (RFC 8446 §5.1). An ICReq begins with 0.
const RECORD_HANDSHAKE: u8 = 22;

impl Prelude for FirstBytePrelude {
    fn step(&mut self, io: &mut SocketIo) -> PreludeStep {
        match io.socket().peek_byte() {
            Ok(None) => PreludeStep::Await,
            Ok(Some(RECORD_HANDSHAKE)) => PreludeStep::StartTls,
            Ok(Some(_)) if self.accepts_plaintext => PreludeStep::Plaintext,
            Ok(Some(_)) => PreludeStep::Refused(Refusal::Plaintext),
            Err(_) => PreludeStep::Refused(Refusal::Closed),
        }
    }
}
