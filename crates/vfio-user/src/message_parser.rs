//! Message assembly from received bytes and descriptors.

use crate::Violation;
use crate::header::{HEADER_BYTES, HEADER_SIZE, Header};

/// Complete message.
#[derive(Clone, Debug)]
pub(crate) struct Message<F> {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
    pub(crate) files: Vec<F>,
}

/// Incoming message.
#[derive(Debug)]
pub(crate) struct MessageParser<F> {
    header_bytes: [u8; HEADER_BYTES],
    taken: usize,
    header: Option<Header>,
    body: Vec<u8>,
    files: Vec<F>,
    body_bytes_max: u32,
    files_max: usize,
}

/// Space for the fields beside data in the longest message, in bytes.
const FIELDS_BYTES: u32 = 64;

impl<F> MessageParser<F> {
    /// Creates a parser for messages with at most `data_bytes_max` of data and `message_files_max`
    /// descriptors.
    pub(crate) fn new(data_bytes_max: u32, files_max: u32) -> Self {
        Self {
            header_bytes: [0; HEADER_BYTES],
            taken: 0,
            header: None,
            body: Vec::new(),
            files: Vec::new(),
            body_bytes_max: data_bytes_max + FIELDS_BYTES,
            files_max: files_max as usize,
        }
    }

    /// Number of bytes to receive next: the rest of the header or of the body.
    pub(crate) fn receive_len(&self) -> usize {
        match self.header {
            None => HEADER_BYTES - self.taken,
            Some(header) => header.body_bytes as usize - self.body.len(),
        }
    }

    /// Whether a part of a message has arrived.
    pub(crate) fn has_partial_message(&self) -> bool {
        self.taken > 0
    }

    /// Receives at most `receive_len` bytes and the descriptors that arrived with them. Returns a
    /// message if it is complete.
    pub(crate) fn handle_received(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<Option<Message<F>>, Violation> {
        if bytes.len() > self.receive_len() {
            let command = self.header.map_or(crate::Command::Other(0), |header| header.command);
            let found = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let expected_max = u32::try_from(self.receive_len()).unwrap_or(u32::MAX);
            return Err(Violation::Size { command, found, expected_max });
        }
        self.files.extend(files);
        match self.header {
            Some(_) => self.body.extend_from_slice(bytes),
            None => {
                self.header_bytes[self.taken..][..bytes.len()].copy_from_slice(bytes);
                self.taken += bytes.len();
                if self.taken == HEADER_BYTES {
                    let header = Header::parse(&self.header_bytes, self.body_bytes_max)?;
                    self.header = Some(header);
                }
            }
        }
        let found = self.files.len();
        if found > self.files_max {
            let command = Header::parse(&self.header_bytes, u32::MAX - HEADER_SIZE)
                .map_or(crate::Command::Other(0), |header| header.command);
            return Err(Violation::TooManyFiles { command, found, expected_max: self.files_max });
        }
        let Some(header) = self.header.filter(|_| self.receive_len() == 0) else { return Ok(None) };
        (self.header, self.taken) = (None, 0);
        let (body, files) = (core::mem::take(&mut self.body), core::mem::take(&mut self.files));
        Ok(Some(Message { header, body, files }))
    }
}
