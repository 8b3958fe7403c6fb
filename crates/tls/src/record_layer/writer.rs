//! Records that are sent.

use zeroize::Zeroizing;

use super::handover::Direction;
use super::post_handshake::{KEY_UPDATE_BYTES, key_update};
use crate::alert::Alert;
use crate::cipher::{CipherFailure, GatherList, SealingKey};
use crate::error::TlsError;
use crate::key_schedule::{IV_BYTES, TrafficSecret};
use crate::record::{
    CONTENT_BYTES_MAX, ContentType, OVERHEAD_BYTES, RecordViolation, header_of, nonce,
};

/// Sending direction of a session.
pub(super) struct Writer {
    secret: TrafficSecret,
    key: SealingKey,
    iv: Zeroizing<[u8; IV_BYTES]>,
    /// Number of records with this key, and of the next one.
    sequence: u64,
    /// Blocks that this key has encrypted, and the number that a key may encrypt.
    blocks: u64,
    blocks_per_key_max: u64,
    content_bytes_max: usize,
    /// Whether a KeyUpdate precedes the next data.
    updates_keys: bool,
    is_closed: bool,
}

/// Blocks of AES that one key encrypts: those of 2^24 full records. RFC 8446 §5.5 permits 2^24.5 such
/// records for AES-GCM. The limit is one of blocks, and most records are small. It is worth not to be
/// reached early: Linux does not know KeyUpdate on a connection of NVMe/TCP, and resets it.
const BLOCKS_PER_KEY_MAX: u64 = (1 << 24) * blocks_of_record(CONTENT_BYTES_MAX);

/// Blocks of a record: those of its content and type, and one for its tag.
const fn blocks_of_record(content_bytes: usize) -> u64 {
    (content_bytes as u64 + 1).div_ceil(16) + 1
}

impl Writer {
    pub(super) fn new(
        direction: &Direction,
        content_bytes_max: usize,
    ) -> Result<Self, CipherFailure> {
        let keys = direction.secret.keys().ok_or(CipherFailure)?;
        Ok(Self {
            key: SealingKey::new(direction.secret.suite(), keys.key.expose())?,
            secret: direction.secret.clone(),
            iv: keys.iv,
            sequence: direction.sequence,
            blocks: 0,
            blocks_per_key_max: BLOCKS_PER_KEY_MAX,
            content_bytes_max,
            updates_keys: false,
            is_closed: false,
        })
    }

    /// Encrypts all of `list` as data, in full records.
    #[inline]
    pub(super) fn send(
        &mut self,
        list: &mut GatherList<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        if self.is_closed {
            return Err(TlsError::Config("TLS: this side has announced its end".into()));
        }
        let records = list.left_bytes().div_ceil(self.content_bytes_max) + 1;
        out.reserve(list.left_bytes() + records * OVERHEAD_BYTES);
        while list.left_bytes() > 0 {
            // The KeyUpdate is a record with the old key as well.
            let count = list.left_bytes().min(self.content_bytes_max);
            let blocks = blocks_of_record(count) + blocks_of_record(KEY_UPDATE_BYTES);
            if self.updates_keys || self.blocks + blocks > self.blocks_per_key_max {
                self.send_key_update(out)?;
            }
            self.seal(ContentType::ApplicationData as u8, list, count, out)?;
        }
        Ok(())
    }

    /// Requests that a KeyUpdate precedes the next data: our own, or the answer to one of the peer.
    pub(super) const fn request_key_update(&mut self) {
        self.updates_keys = true;
    }

    /// Sends an alert. Nothing may follow it.
    pub(super) fn close(&mut self, alert: Alert, out: &mut Vec<u8>) -> Result<(), TlsError> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Ok(());
        }
        self.send_record(ContentType::Alert as u8, &alert.content(), out)
    }

    /// Sends a KeyUpdate, which requests none of the peer, and changes to the next key.
    #[cold]
    fn send_key_update(&mut self, out: &mut Vec<u8>) -> Result<(), TlsError> {
        self.updates_keys = false;
        self.send_key_update_with(0, out)
    }

    /// Sends a KeyUpdate with any request, and changes to the next key.
    pub(super) fn send_key_update_with(
        &mut self,
        request: u8,
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        self.send_record(ContentType::Handshake as u8, &key_update(request), out)?;
        self.change_key()
    }

    fn change_key(&mut self) -> Result<(), TlsError> {
        let secret = self.secret.next().ok_or(CipherFailure)?;
        let keys = secret.keys().ok_or(CipherFailure)?;
        self.key = SealingKey::new(secret.suite(), keys.key.expose())?;
        self.iv = keys.iv;
        self.secret = secret;
        (self.sequence, self.blocks) = (0, 0);
        Ok(())
    }

    /// Encrypts a record of any content and type.
    pub(super) fn send_record(
        &mut self,
        content_type: u8,
        content: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        let mut list = GatherList::new();
        list.add_bytes(content);
        self.seal(content_type, &mut list, content.len(), out)
    }

    /// Encrypts one record.
    #[inline]
    fn seal(
        &mut self,
        content_type: u8,
        list: &mut GatherList<'_>,
        count: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), TlsError> {
        // A nonce that was used is never used again, also not after a failure.
        let sequence = self.sequence;
        self.sequence = sequence.checked_add(1).ok_or(RecordViolation::SequenceEnd)?;
        self.blocks += blocks_of_record(count);
        let nonce = nonce(&self.iv, sequence);
        self.key.seal(&nonce, &header_of(count), (list, count), content_type, out)?;
        Ok(())
    }

    #[cfg(test)]
    pub(super) const fn set_blocks_per_key_max(&mut self, blocks_max: u64) {
        self.blocks_per_key_max = blocks_max;
    }
}
