//! Records that are received.
//!
//! ```text
//!  stream below ─► whole record, content fits ─► decrypted into its destination
//!       │     └──► whole record, otherwise ────► `decrypted` ─(copy)─► destination
//!       └────────► start of a record ─(copy)─► `stored` ─► as above
//! ```

use zeroize::Zeroizing;

use super::handover::Direction;
use super::post_handshake::PostHandshake;
use super::{Plaintext, Side};
use crate::alert::Alert;
use crate::cipher::{CipherFailure, OpeningKey, ScatterList};
use crate::cipher_io::{CipherIo, Received, ReceivedMore};
use crate::error::TlsError;
use crate::key_schedule::{IV_BYTES, TrafficSecret};
use crate::record::{
    CONTENT_BYTES_MAX, ContentType, HEADER_BYTES, OVERHEAD_BYTES, RecordHeader, RecordViolation,
    missing_bytes, nonce, split_record,
};

/// Receiving direction of a session.
pub(super) struct Reader {
    stored: StoredBytes,
    opener: Opener,
}

/// Received bytes in memory of the session: the start of a record, or what was received with the
/// handshake.
#[derive(Default)]
struct StoredBytes {
    bytes: Vec<u8>,
    consumed: usize,
}

/// Keys, and what was decrypted.
struct Opener {
    secret: TrafficSecret,
    key: OpeningKey,
    iv: Zeroizing<[u8; IV_BYTES]>,
    /// Number of the next record with this key.
    sequence: u64,
    /// Content of a record, and the part of it that has not been delivered.
    decrypted: Box<[u8]>,
    start: usize,
    end: usize,
    messages: PostHandshake,
    /// Records without data since the last one with data.
    without_data: u32,
    is_update_requested: bool,
    /// Whether the peer has announced the end of its bytes.
    is_closed: bool,
}

enum Progress {
    Made,
    WouldBlock,
}

/// Smallest content that is decrypted into its destination. Smaller ones may be handshake messages and
/// alerts, of which the destination sees nothing; and a copy of so few bytes costs little.
const DIRECT_BYTES_MIN: usize = 1024;
/// Records without data that are accepted one after the other.
const WITHOUT_DATA_MAX: u32 = 32;

impl Reader {
    pub(super) fn new(
        side: Side,
        direction: &Direction,
        received: Vec<u8>,
    ) -> Result<Self, CipherFailure> {
        let keys = direction.secret.keys().ok_or(CipherFailure)?;
        let opener = Opener {
            key: OpeningKey::new(direction.secret.suite(), keys.key.expose())?,
            secret: direction.secret.clone(),
            iv: keys.iv,
            sequence: direction.sequence,
            decrypted: Box::default(),
            start: 0,
            end: 0,
            messages: PostHandshake::new(side),
            without_data: 0,
            is_update_requested: false,
            is_closed: false,
        };
        Ok(Self { stored: StoredBytes { bytes: received, consumed: 0 }, opener })
    }

    /// Fills `into` as far as there are whole records. The result is that of a receive without bytes.
    pub(super) fn receive(
        &mut self,
        io: &mut dyn CipherIo,
        into: &mut ScatterList<'_>,
    ) -> Result<Plaintext, TlsError> {
        loop {
            self.opener.deliver(into);
            if into.left_bytes() == 0 {
                return Ok(Plaintext::WouldBlock);
            }
            if self.opener.is_closed {
                return Ok(Plaintext::End);
            }
            match self.step(io, into)? {
                Progress::Made => {}
                Progress::WouldBlock => return Ok(Plaintext::WouldBlock),
            }
        }
    }

    /// Decrypts a record, or receives more.
    #[inline]
    fn step(
        &mut self,
        io: &mut dyn CipherIo,
        into: &mut ScatterList<'_>,
    ) -> Result<Progress, TlsError> {
        if !self.stored.is_empty() {
            return self.step_stored(io, into);
        }
        let bytes = match io.received() {
            Received::Bytes(bytes) => bytes,
            Received::WouldBlock => return Ok(Progress::WouldBlock),
            Received::End => return Err(TlsError::Truncated),
        };
        if let Some((header, sealed)) = split_record(bytes)? {
            let count = HEADER_BYTES + sealed.len();
            self.opener.open(&header, sealed, into)?;
            io.consume(count);
            return Ok(Progress::Made);
        }
        match io.receive_more() {
            ReceivedMore::Bytes => Ok(Progress::Made),
            ReceivedMore::Later => Ok(Progress::WouldBlock),
            ReceivedMore::End => Err(TlsError::Truncated),
            ReceivedMore::NotPossible => {
                self.store_partial_record(io);
                Ok(Progress::Made)
            }
        }
    }

    /// Completes the record that is stored, or decrypts it.
    fn step_stored(
        &mut self,
        io: &mut dyn CipherIo,
        into: &mut ScatterList<'_>,
    ) -> Result<Progress, TlsError> {
        if let Some((header, sealed)) = split_record(self.stored.bytes())? {
            let count = HEADER_BYTES + sealed.len();
            self.opener.open(&header, sealed, into)?;
            self.stored.consume(count);
            return Ok(Progress::Made);
        }
        let missing = missing_bytes(self.stored.bytes())?;
        match io.received() {
            Received::Bytes(bytes) => {
                let count = bytes.len().min(missing);
                self.stored.push(&bytes[..count]);
                io.consume(count);
                Ok(Progress::Made)
            }
            Received::WouldBlock => Ok(Progress::WouldBlock),
            Received::End => Err(TlsError::Truncated),
        }
    }

    /// Copies the start of a record that `io` has received.
    pub(super) fn store_partial_record(&mut self, io: &mut dyn CipherIo) {
        if !self.stored.is_empty() {
            return;
        }
        let Received::Bytes(bytes) = io.received() else { return };
        if matches!(split_record(bytes), Ok(None)) {
            let count = bytes.len();
            self.stored.push(bytes);
            io.consume(count);
        }
    }

    pub(super) fn push_received(&mut self, bytes: &[u8]) {
        self.stored.push(bytes);
    }

    /// Whether a KeyUpdate of the peer has requested one of ours since the last call.
    #[inline]
    pub(super) fn take_update_request(&mut self) -> bool {
        std::mem::take(&mut self.opener.is_update_requested)
    }

    /// Whether the next receive makes progress with `received` and nothing more.
    pub(super) fn has_more(&self, received: &[u8]) -> bool {
        let Opener { start, end, is_closed, .. } = self.opener;
        let is_known = |bytes: &[u8]| !matches!(split_record(bytes), Ok(None));
        let has_records = match self.stored.bytes() {
            [] => is_known(received),
            stored => !received.is_empty() || is_known(stored),
        };
        start < end || is_closed || has_records
    }

    pub(super) fn release_buffers(&mut self) {
        if self.stored.is_empty() {
            self.stored = StoredBytes::default();
        }
        if self.opener.start == self.opener.end {
            self.opener.decrypted = Box::default();
        }
    }
}

impl Opener {
    /// Decrypts a record and handles what it contains. Data that are not in `into` then are in
    /// `decrypted`, which is empty before.
    #[inline]
    fn open(
        &mut self,
        header: &RecordHeader,
        sealed: &[u8],
        into: &mut ScatterList<'_>,
    ) -> Result<(), TlsError> {
        let content_len = (HEADER_BYTES + sealed.len()).saturating_sub(OVERHEAD_BYTES);
        if content_len >= DIRECT_BYTES_MIN && content_len <= into.left_bytes() {
            let content_type = self.decrypt(header, sealed, into)?;
            if content_type == ContentType::ApplicationData as u8 && self.accepts_data() {
                into.mark_filled(content_len);
                self.without_data = 0;
                return self.count_record();
            }
            // Padding, or no data. The destination, which others may change, is not read: the record is
            // decrypted again.
            into.overwrite_next(content_len);
        }
        self.open_here(header, sealed, content_len)
    }

    /// Decrypts a record into `decrypted`, and handles what it contains.
    fn open_here(
        &mut self,
        header: &RecordHeader,
        sealed: &[u8],
        content_len: usize,
    ) -> Result<(), TlsError> {
        let mut decrypted = std::mem::take(&mut self.decrypted);
        if decrypted.is_empty() {
            decrypted = vec![0; CONTENT_BYTES_MAX].into_boxed_slice();
        }
        let mut content = ScatterList::new();
        content.add_bytes(&mut decrypted[..content_len]);
        let last = self.decrypt(header, sealed, &mut content);
        let result = last.and_then(|last| {
            self.count_record()?;
            self.handle_content(&decrypted[..content_len], last)
        });
        self.decrypted = decrypted;
        result
    }

    fn decrypt(
        &mut self,
        header: &RecordHeader,
        sealed: &[u8],
        content: &mut ScatterList<'_>,
    ) -> Result<u8, TlsError> {
        let nonce = nonce(&self.iv, self.sequence);
        let last = self.key.open(&nonce, header, sealed, content)?;
        Ok(last.ok_or(RecordViolation::NotAuthentic)?)
    }

    fn count_record(&mut self) -> Result<(), TlsError> {
        self.sequence = self.sequence.checked_add(1).ok_or(RecordViolation::SequenceEnd)?;
        Ok(())
    }

    /// Whether no handshake message has begun.
    fn accepts_data(&self) -> bool {
        !self.messages.is_within_message()
    }

    /// Handles the content of a record, of which `last` is the last byte behind `content`.
    fn handle_content(&mut self, content: &[u8], last: u8) -> Result<(), TlsError> {
        let (content, content_type) = match last {
            0 => match content.iter().rposition(|byte| *byte != 0) {
                Some(at) => (&content[..at], content[at]),
                None => return Err(RecordViolation::NoContentType.into()),
            },
            content_type => (content, content_type),
        };
        let kind =
            ContentType::from_id(content_type).ok_or(RecordViolation::ContentType(content_type))?;
        if kind != ContentType::Handshake && !self.accepts_data() {
            return Err(RecordViolation::InterleavedMessage.into());
        }
        if kind == ContentType::ApplicationData && !content.is_empty() {
            self.without_data = 0;
            (self.start, self.end) = (0, content.len());
            return Ok(());
        }
        self.without_data += 1;
        if self.without_data > WITHOUT_DATA_MAX {
            return Err(RecordViolation::TooManyWithoutData.into());
        }
        match kind {
            ContentType::ApplicationData => Ok(()),
            ContentType::Alert => self.handle_alert(content),
            ContentType::Handshake => self.handle_handshake(content),
        }
    }

    fn handle_alert(&mut self, content: &[u8]) -> Result<(), TlsError> {
        match *content {
            [] => Err(RecordViolation::EmptyContent.into()),
            [_, alert] => match Alert(alert) {
                Alert::CLOSE_NOTIFY => {
                    self.is_closed = true;
                    Ok(())
                }
                Alert::USER_CANCELED => Ok(()),
                alert => Err(TlsError::PeerAlert(alert)),
            },
            _ => Err(RecordViolation::AlertLength.into()),
        }
    }

    fn handle_handshake(&mut self, content: &[u8]) -> Result<(), TlsError> {
        if content.is_empty() {
            return Err(RecordViolation::EmptyContent.into());
        }
        let Some(update) = self.messages.parse(content)? else { return Ok(()) };
        let secret = self.secret.next().ok_or(CipherFailure)?;
        let keys = secret.keys().ok_or(CipherFailure)?;
        self.key = OpeningKey::new(secret.suite(), keys.key.expose())?;
        self.iv = keys.iv;
        self.secret = secret;
        self.sequence = 0;
        self.is_update_requested |= update.is_request;
        Ok(())
    }

    /// Copies decrypted bytes.
    #[inline]
    fn deliver(&mut self, into: &mut ScatterList<'_>) {
        if self.start < self.end {
            self.start += into.fill(&self.decrypted[self.start..self.end]);
        }
    }
}

impl StoredBytes {
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.consumed..]
    }

    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.bytes.capacity() == 0 {
            self.bytes.reserve(CONTENT_BYTES_MAX + OVERHEAD_BYTES);
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
        if self.consumed == self.bytes.len() {
            self.bytes.clear();
            self.consumed = 0;
        }
    }
}
