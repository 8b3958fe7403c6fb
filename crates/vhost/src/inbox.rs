//! Bytes and descriptors become messages.

use crate::bytes::Fields;
use crate::code::{
    Code, HEADER_BYTES, NEED_REPLY, PAYLOAD_BYTES_MAX, REPLY, VERSION, VERSION_BITS,
};
use crate::violation::Violation;

/// A message, whole.
#[derive(Clone, Debug)]
pub(crate) struct Message<F> {
    pub(crate) code: Code,
    pub(crate) wants_reply: bool,
    pub(crate) payload: Vec<u8>,
    pub(crate) files: Vec<F>,
}

/// The message that is coming.
#[derive(Debug)]
pub(crate) struct Inbox<F> {
    header: Vec<u8>,
    /// What the header says, once it is whole.
    known: Option<Known>,
    payload: Vec<u8>,
    files: Vec<F>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    code: Code,
    wants_reply: bool,
    payload_bytes: usize,
}

impl<F> Inbox<F> {
    pub(crate) fn new() -> Self {
        let header = Vec::with_capacity(HEADER_BYTES);
        Self { header, known: None, payload: Vec::new(), files: Vec::new() }
    }

    /// How many bytes are wanted next: the rest of the header, or of the payload.
    pub(crate) fn wanted(&self) -> usize {
        match self.known {
            None => HEADER_BYTES - self.header.len(),
            Some(known) => known.payload_bytes - self.payload.len(),
        }
    }

    /// Whether a part of a message has come.
    pub(crate) fn is_amid(&self) -> bool {
        !self.header.is_empty()
    }

    /// Takes bytes, no more than were wanted, and the descriptors that came with them. A message, if
    /// that was the last of it.
    pub(crate) fn take(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<Option<Message<F>>, Violation> {
        if bytes.len() > self.wanted() {
            let code = self.known.map_or(Code(0), |known| known.code);
            let found = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let wanted = u32::try_from(self.wanted()).unwrap_or(u32::MAX);
            return Err(Violation::Size { code, found, expected: (0, wanted) });
        }
        self.files.extend(files);
        match self.known {
            Some(_) => self.payload.extend_from_slice(bytes),
            None => self.header.extend_from_slice(bytes),
        }
        if self.known.is_none() && self.header.len() == HEADER_BYTES {
            self.known = Some(Known::read(&self.header)?);
        }
        let Some(known) = self.known.filter(|_| self.wanted() == 0) else { return Ok(None) };
        self.header.clear();
        self.known = None;
        let (payload, files) =
            (core::mem::take(&mut self.payload), core::mem::take(&mut self.files));
        let Known { code, wants_reply, .. } = known;
        Ok(Some(Message { code, wants_reply, payload, files }))
    }
}

impl Known {
    /// ```text
    ///   0       4        8                12
    ///   | code  | flags  | payload bytes  |
    /// ```
    fn read(header: &[u8]) -> Result<Self, Violation> {
        let mut fields = Fields(header);
        let (code, flags, size) = (Code(fields.u32()), fields.u32(), fields.u32());
        if flags & VERSION_BITS != VERSION || flags & REPLY != 0 {
            return Err(Violation::Flags { code, found: flags });
        }
        // One that is not known is read over, so that it can be refused.
        let expected = code.rule().map_or((0, PAYLOAD_BYTES_MAX), |rule| rule.payload_bytes);
        if size < expected.0 || size > expected.1 {
            return Err(Violation::Size { code, found: size, expected });
        }
        let wants_reply = flags & NEED_REPLY != 0;
        Ok(Self { code, wants_reply, payload_bytes: size as usize })
    }
}
