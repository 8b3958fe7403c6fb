//! Encrypted bytes between a session and its owner.

/// Source and sink of encrypted bytes during one call.
pub trait CipherIo {
    /// Received bytes that were not consumed. Receives if there are none.
    fn received(&mut self) -> Received<'_>;

    /// Receives bytes behind those that were not consumed, so that a record whose end is missing can be
    /// decrypted where it is. By default such a record is copied.
    fn receive_more(&mut self) -> ReceivedMore {
        ReceivedMore::NotPossible
    }

    /// Consumes the first `count` bytes of those.
    fn consume(&mut self, count: usize);

    /// Bytes to be sent. The session appends to them; the owner removes what it has sent.
    fn outgoing(&mut self) -> &mut Vec<u8>;

    /// Appends `bytes` to those to be sent.
    fn send(&mut self, bytes: &[u8]) {
        self.outgoing().extend_from_slice(bytes);
    }
}

/// Encrypted bytes of a peer.
#[derive(Debug)]
pub enum Received<'a> {
    /// At least one byte.
    Bytes(&'a [u8]),
    /// None now.
    WouldBlock,
    /// None any more.
    End,
}

/// Result of receiving behind bytes that were not consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedMore {
    /// There are more now.
    Bytes,
    /// A later call may receive more: the bytes are left where they are.
    Later,
    /// Nothing has arrived, or there is no space: the session copies the bytes and consumes them.
    NotPossible,
    /// None any more.
    End,
}
