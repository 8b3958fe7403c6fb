//! Records after the handshake, in both directions (RFC 8446 §5), without a socket.
//!
//! ```text
//!  GatherList ─► Writer ─(encrypted on the way)─► CipherIo::outgoing
//!                  ▲ answer to a KeyUpdate, alert
//!  ScatterList ◄─ Reader ◄─(decrypted on the way)─ CipherIo::received
//!                  └ `decrypted`: what does not fit, and what is no data
//! ```
//!
//! A violation ends the session, and the peer gets its alert. Each direction counts its records, which
//! makes their nonces, and derives its next key at a KeyUpdate.

mod handover;
mod post_handshake;
mod reader;
mod writer;

use crate::alert::Alert;
use crate::cipher::{CipherFailure, GatherList, ScatterList};
use crate::cipher_io::CipherIo;
use crate::error::TlsError;
use crate::record::RecordViolation;

#[cfg(test)]
pub(crate) use self::handover::Direction;
pub(crate) use self::handover::Handover;
use self::reader::Reader;
use self::writer::Writer;

/// Protection of the records of an open session.
pub(crate) struct RecordLayer {
    reader: Reader,
    writer: Writer,
    /// Error that was found behind bytes which had to be returned first.
    failure: Option<TlsError>,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plaintext {
    /// Number of bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    WouldBlock,
    /// The peer has announced the end of its bytes.
    End,
}

/// End of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl RecordLayer {
    /// Continues with the secrets of a handshake. `received` are encrypted bytes that come before those
    /// of the next calls.
    pub(crate) fn new(
        side: Side,
        handover: &Handover,
        received: Vec<u8>,
    ) -> Result<Self, CipherFailure> {
        let Handover { client, server, content_bytes_max } = handover;
        let (ours, theirs) = match side {
            Side::Client => (client, server),
            Side::Server => (server, client),
        };
        Ok(Self {
            reader: Reader::new(side, theirs, received)?,
            writer: Writer::new(ours, *content_bytes_max)?,
            failure: None,
        })
    }

    /// Encrypts all of `list`, as records of `io`.
    #[inline]
    pub(crate) fn send(
        &mut self,
        io: &mut dyn CipherIo,
        list: &mut GatherList<'_>,
    ) -> Result<(), TlsError> {
        let sent = self.writer.send(list, io.outgoing());
        sent.map_err(|error| self.refuse(io, error))
    }

    /// Decrypts received records into `into` until it is full, or no whole record is left.
    pub(crate) fn receive(
        &mut self,
        io: &mut dyn CipherIo,
        into: &mut ScatterList<'_>,
    ) -> Result<Plaintext, TlsError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let before = into.left_bytes();
        let end = self.reader.receive(io, into);
        if self.reader.take_update_request() {
            self.writer.request_key_update();
        }
        let end = end.map_err(|error| self.refuse(io, error));
        match (before - into.left_bytes(), end) {
            (0, end) => end,
            (count, end) => {
                self.failure = end.err();
                Ok(Plaintext::Bytes(count))
            }
        }
    }

    /// Encrypts with new keys from the next data on.
    pub(crate) const fn update_keys(&mut self) {
        self.writer.request_key_update();
    }

    /// Announces the end of this side's bytes.
    pub(crate) fn close(&mut self, io: &mut dyn CipherIo) {
        // A failure is that of the cipher. The peer then finds the end without an announcement.
        let _ = self.writer.close(Alert::CLOSE_NOTIFY, io.outgoing());
    }

    /// Bytes that were received before those of the next calls.
    pub(crate) fn push_received(&mut self, bytes: &[u8]) {
        self.reader.push_received(bytes);
    }

    /// Copies the start of a record, so that the stream below need not store it.
    pub(crate) fn store_partial_record(&mut self, io: &mut dyn CipherIo) {
        self.reader.store_partial_record(io);
    }

    /// Whether the next receive returns something with `received` and nothing more from below.
    pub(crate) fn has_more(&self, received: &[u8]) -> bool {
        self.failure.is_some() || self.reader.has_more(received)
    }

    /// Frees buffers that hold nothing.
    pub(crate) fn release_buffers(&mut self) {
        self.reader.release_buffers();
    }

    /// Limits the number of blocks that one key encrypts.
    #[cfg(test)]
    pub(crate) const fn set_blocks_per_key_max(&mut self, blocks_max: u64) {
        self.writer.set_blocks_per_key_max(blocks_max);
    }

    /// Encrypts a record of any content and type: what a peer may send, for tests and fuzzing.
    pub(crate) fn send_record(
        &mut self,
        content_type: u8,
        content: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        self.writer.send_record(content_type, content, out)
    }

    /// Sends a KeyUpdate with any request, and changes to the next key.
    pub(crate) fn send_key_update_with(
        &mut self,
        request: u8,
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        self.writer.send_key_update_with(request, out)
    }

    /// Sends the alert of an error.
    #[cold]
    fn refuse(&mut self, io: &mut dyn CipherIo, error: TlsError) -> TlsError {
        if let Some(alert) = error.alert() {
            // If it cannot be encrypted, the peer only finds the end of the connection.
            let _ = self.writer.close(alert, io.outgoing());
        }
        error
    }
}

impl From<RecordViolation> for TlsError {
    fn from(violation: RecordViolation) -> Self {
        Self::BadRecord(violation)
    }
}

impl From<CipherFailure> for TlsError {
    fn from(_: CipherFailure) -> Self {
        Self::Cipher
    }
}
