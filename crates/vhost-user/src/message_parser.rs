//! Message assembly from received bytes and descriptors.

use crate::message_types::{
    HEADER_BYTES, MessageType, NEED_REPLY, PAYLOAD_BYTES_MAX, REPLY, VERSION, VERSION_BITS,
};
use crate::payload_reader::PayloadReader;
use crate::violation::Violation;

/// Complete message.
#[derive(Clone, Debug)]
pub(crate) struct Message<F> {
    pub(crate) code: MessageType,
    pub(crate) wants_reply: bool,
    pub(crate) payload: Vec<u8>,
    pub(crate) files: Vec<F>,
}

/// Incoming message.
#[derive(Debug)]
pub(crate) struct MessageParser<F> {
    header: Vec<u8>,
    /// Parsed header, once complete.
    known: Option<ParsedHeader>,
    payload: Vec<u8>,
    files: Vec<F>,
}

#[derive(Clone, Copy, Debug)]
struct ParsedHeader {
    code: MessageType,
    wants_reply: bool,
    payload_bytes: usize,
}

impl<F> MessageParser<F> {
    pub(crate) fn new() -> Self {
        let header = Vec::with_capacity(HEADER_BYTES);
        Self { header, known: None, payload: Vec::new(), files: Vec::new() }
    }

    /// Number of bytes to receive next: the rest of the header or of the payload.
    pub(crate) fn receive_len(&self) -> usize {
        match self.known {
            None => HEADER_BYTES - self.header.len(),
            Some(known) => known.payload_bytes - self.payload.len(),
        }
    }

    /// Whether a message was received in part.
    pub(crate) fn has_partial_message(&self) -> bool {
        !self.header.is_empty()
    }

    /// Receives at most `receive_len` bytes and the descriptors that arrived with them. Returns a
    /// message if it is complete.
    pub(crate) fn receive(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<Option<Message<F>>, Violation> {
        if bytes.len() > self.receive_len() {
            let code = self.known.map_or(MessageType(0), |known| known.code);
            let found = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let receive_len = u32::try_from(self.receive_len()).unwrap_or(u32::MAX);
            return Err(Violation::Size { code, found, expected: (0, receive_len) });
        }
        self.files.extend(files);
        match self.known {
            Some(_) => self.payload.extend_from_slice(bytes),
            None => self.header.extend_from_slice(bytes),
        }
        if self.known.is_none() && self.header.len() == HEADER_BYTES {
            self.known = Some(ParsedHeader::parse(&self.header)?);
        }
        let Some(known) = self.known.filter(|_| self.receive_len() == 0) else { return Ok(None) };
        self.header.clear();
        self.known = None;
        let (payload, files) =
            (core::mem::take(&mut self.payload), core::mem::take(&mut self.files));
        let ParsedHeader { code, wants_reply, .. } = known;
        Ok(Some(Message { code, wants_reply, payload, files }))
    }
}

impl ParsedHeader {
    /// Parses a header.
    ///
    /// ```text
    ///   0       4        8                12
    ///   | type  | flags  | payload bytes  |
    /// ```
    fn parse(header: &[u8]) -> Result<Self, Violation> {
        let mut fields = PayloadReader(header);
        let (code, flags, size) = (MessageType(fields.u32()), fields.u32(), fields.u32());
        if flags & VERSION_BITS != VERSION || flags & REPLY != 0 {
            return Err(Violation::Flags { code, found: flags });
        }
        // An unknown message is skipped, so that it can be rejected.
        let expected = code.rule().map_or((0, PAYLOAD_BYTES_MAX), |rule| rule.payload_bytes);
        if size < expected.0 || size > expected.1 {
            return Err(Violation::Size { code, found: size, expected });
        }
        let wants_reply = flags & NEED_REPLY != 0;
        Ok(Self { code, wants_reply, payload_bytes: size as usize })
    }
}
