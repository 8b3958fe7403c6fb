//! Records that are sent.

use zeroize::Zeroizing;

use super::handover::Direction;
use super::post_handshake::key_update;
use crate::alert::Alert;
use crate::cipher::{CipherFailure, GatherList, SealingKey};
use crate::error::TlsError;
use crate::key_schedule::{IV_BYTES, TrafficSecret};
use crate::record::{ContentType, OVERHEAD_BYTES, RecordViolation, header_of, nonce};

/// Sending direction of a session.
pub(super) struct Writer {
    secret: TrafficSecret,
    key: SealingKey,
    iv: Zeroizing<[u8; IV_BYTES]>,
    /// Number of records with this key, and of the next one.
    sequence: u64,
    records_per_key_max: u64,
    content_bytes_max: usize,
    /// Whether a KeyUpdate precedes the next data.
    updates_keys: bool,
    is_closed: bool,
}

/// Records that one key encrypts. RFC 8446 §5.5 permits 2^24.5 full ones for AES-GCM.
const RECORDS_PER_KEY_MAX: u64 = 1 << 24;

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
            records_per_key_max: RECORDS_PER_KEY_MAX,
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
            if self.updates_keys || self.sequence >= self.records_per_key_max - 1 {
                self.send_key_update(out)?;
            }
            let count = list.left_bytes().min(self.content_bytes_max);
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
        self.sequence = 0;
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
        let nonce = nonce(&self.iv, sequence);
        self.key.seal(&nonce, &header_of(count), (list, count), content_type, out)?;
        Ok(())
    }

    #[cfg(test)]
    pub(super) const fn set_records_per_key_max(&mut self, records_max: u64) {
        self.records_per_key_max = records_max;
    }
}
