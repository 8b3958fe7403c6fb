//! Records that the stream below has not accepted.
//!
//! Records are encrypted into a buffer of the thread, which so stays in its cache however many streams
//! it has. A stream keeps the buffer while the stream below has no space for all of it.

use std::cell::Cell;

use tenmil_base::{SendSlice, Stream, StreamError};

/// Records that the stream below has not accepted, oldest first.
#[derive(Debug, Default)]
pub(super) struct PendingRecords {
    bytes: Vec<u8>,
    sent: usize,
    /// Why nothing can be sent any more.
    failure: Option<StreamError>,
}

thread_local! {
    /// Empty buffer that no stream of this thread uses.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl PendingRecords {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Number of bytes.
    pub(super) fn len_bytes(&self) -> usize {
        self.bytes.len() - self.sent
    }

    pub(super) const fn failure(&self) -> Option<&StreamError> {
        self.failure.as_ref()
    }

    /// Bytes, to which records are appended.
    #[inline]
    pub(super) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        if self.bytes.capacity() == 0 {
            self.bytes = SPARE.try_with(Cell::take).unwrap_or_default();
        }
        &mut self.bytes
    }

    /// Sends as much as the stream below accepts.
    ///
    /// # Errors
    ///
    /// If nothing can be sent any more, the same each time.
    #[inline]
    pub(super) fn send_to(
        &mut self,
        below: &mut dyn Stream,
        has_more: bool,
    ) -> Result<(), StreamError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let unsent = &self.bytes[self.sent..];
        if !unsent.is_empty() {
            let len_bytes = u32::try_from(unsent.len()).unwrap_or(u32::MAX);
            match below.send(unsent, &[SendSlice::Headers { at: 0, len_bytes }], has_more) {
                Ok(count) => self.sent += count,
                Err(failure) => return Err(self.failure.insert(failure).clone()),
            }
        }
        if self.sent == self.bytes.len() {
            self.clear();
        }
        Ok(())
    }

    fn clear(&mut self) {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        self.sent = 0;
        // The thread may be about to exit.
        let _ = SPARE.try_with(|spare| spare.set(bytes));
    }
}
