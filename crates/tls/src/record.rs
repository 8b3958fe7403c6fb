//! Format of protected records (RFC 8446 §5), and the rules that a record may violate.
//!
//! ```text
//!  TLSCiphertext       | 23 | 3 3 | length : 2 | encrypted : length - 16 | tag : 16 |
//!  encrypted           | content : 0 to 2^14 | content type : 1 | zeros |
//!  nonce : 12          (0 : 4, sequence number : 8) xor iv
//! ```

use core::fmt;

use crate::alert::Alert;

/// Header of a record, which its tag covers.
pub(crate) type RecordHeader = [u8; HEADER_BYTES];

/// Type of the content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentType {
    Alert = 21,
    Handshake = 22,
    ApplicationData = 23,
}

/// Rule that a record violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordViolation {
    /// The tag is wrong: the record was changed, repeated or lost on its way, or has another key.
    NotAuthentic,
    /// The record is too short for a content type and a tag.
    TooShort,
    /// The record is longer than permitted.
    TooLong,
    /// The type in the header is not that of a protected record.
    NotProtected(u8),
    /// The record has no content type.
    NoContentType,
    /// The content type is not permitted here.
    ContentType(u8),
    /// An alert or a part of a handshake message has no bytes.
    EmptyContent,
    /// An alert does not have two bytes.
    AlertLength,
    /// Another record is between the parts of a handshake message.
    InterleavedMessage,
    /// A handshake message begins with the old key and ends with the new one.
    MessageSpansKeys,
    /// A handshake message is not permitted here.
    Message(u8),
    /// The length of a handshake message is wrong.
    MessageLength,
    /// A field of a KeyUpdate has no permitted value.
    KeyUpdateRequest(u8),
    /// Too many records without data, one after the other.
    TooManyWithoutData,
    /// The number of records with one key has reached its end.
    SequenceEnd,
}

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 5;
/// Largest content of a record (RFC 8446 §5.1).
pub(crate) const CONTENT_BYTES_MAX: usize = 1 << 14;
/// Tag of AES-GCM.
pub(crate) const TAG_BYTES: usize = 16;
/// Bytes of a record beside its content: header, content type and tag.
pub(crate) const OVERHEAD_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;
/// Largest length in a header: content, content type and tag. RFC 8446 §5.2 limits it to 2^14 + 256
/// and §5.4 what was decrypted to 2^14 + 1, which is the smaller limit with a tag of 16 bytes. Both
/// have the same alert.
const SEALED_BYTES_MAX: usize = CONTENT_BYTES_MAX + 1 + TAG_BYTES;
/// Smallest length in a header.
const SEALED_BYTES_MIN: usize = 1 + TAG_BYTES;

impl ContentType {
    /// Content type of a protected record; `None` if it has no place there.
    pub(crate) const fn from_id(id: u8) -> Option<Self> {
        match id {
            21 => Some(Self::Alert),
            22 => Some(Self::Handshake),
            23 => Some(Self::ApplicationData),
            _ => None,
        }
    }
}

/// Header of a record with `content_len` bytes, which is at most [`CONTENT_BYTES_MAX`].
pub(crate) fn header_of(content_len: usize) -> RecordHeader {
    let sealed = u16::try_from(content_len + SEALED_BYTES_MIN).unwrap_or(u16::MAX).to_be_bytes();
    [ContentType::ApplicationData as u8, 3, 3, sealed[0], sealed[1]]
}

/// Splits the first record from `bytes`: its header, and what was encrypted with the tag. `None` if
/// its end is missing.
///
/// # Errors
///
/// If the header is that of no permitted record, as soon as this is known.
pub(crate) fn split_record(bytes: &[u8]) -> Result<Option<(RecordHeader, &[u8])>, RecordViolation> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
        return check_type(bytes).map(|()| None);
    };
    let end = record_len(header)?;
    Ok(bytes.get(HEADER_BYTES..end).map(|sealed| (*header, sealed)))
}

/// Number of bytes that are missing at the end of the record whose first bytes are `bytes`: those of
/// its header first.
pub(crate) fn missing_bytes(bytes: &[u8]) -> Result<usize, RecordViolation> {
    match bytes.first_chunk::<HEADER_BYTES>() {
        None => check_type(bytes).map(|()| HEADER_BYTES - bytes.len()),
        Some(header) => Ok(record_len(header)?.saturating_sub(bytes.len())),
    }
}

/// Length of a record with its header. The version has no meaning (RFC 8446 §5.2), but the tag covers
/// it.
fn record_len(header: &RecordHeader) -> Result<usize, RecordViolation> {
    check_type(header)?;
    let sealed = usize::from(u16::from_be_bytes([header[3], header[4]]));
    match sealed {
        0..SEALED_BYTES_MIN => Err(RecordViolation::TooShort),
        SEALED_BYTES_MIN..=SEALED_BYTES_MAX => Ok(HEADER_BYTES + sealed),
        _ => Err(RecordViolation::TooLong),
    }
}

fn check_type(bytes: &[u8]) -> Result<(), RecordViolation> {
    match bytes.first() {
        Some(&kind) if kind != ContentType::ApplicationData as u8 => {
            Err(RecordViolation::NotProtected(kind))
        }
        _ => Ok(()),
    }
}

/// Nonce of a record (RFC 8446 §5.3).
pub(crate) fn nonce(iv: &[u8; 12], sequence: u64) -> [u8; 12] {
    let mut nonce = *iv;
    for (byte, of_sequence) in nonce[4..].iter_mut().zip(sequence.to_be_bytes()) {
        *byte ^= of_sequence;
    }
    nonce
}

impl RecordViolation {
    /// Alert for the peer.
    pub(crate) const fn alert(self) -> Alert {
        match self {
            Self::NotAuthentic | Self::TooShort => Alert::BAD_RECORD_MAC,
            Self::TooLong => Alert::RECORD_OVERFLOW,
            Self::NotProtected(_)
            | Self::NoContentType
            | Self::ContentType(_)
            | Self::EmptyContent
            | Self::InterleavedMessage
            | Self::MessageSpansKeys
            | Self::Message(_)
            | Self::TooManyWithoutData => Alert::UNEXPECTED_MESSAGE,
            Self::AlertLength | Self::MessageLength => Alert::DECODE_ERROR,
            Self::KeyUpdateRequest(_) => Alert::ILLEGAL_PARAMETER,
            Self::SequenceEnd => Alert::INTERNAL_ERROR,
        }
    }
}

impl fmt::Display for RecordViolation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAuthentic => out.write_str("its tag is wrong"),
            Self::TooShort => out.write_str("it is too short for a content type and a tag"),
            Self::TooLong => out.write_str("it is longer than 2^14 bytes of content"),
            Self::NotProtected(found) => write!(out, "its type is {found}, expected 23"),
            Self::NoContentType => out.write_str("it has no content type"),
            Self::ContentType(found) => {
                write!(out, "its content type is {found}, expected 21, 22 or 23")
            }
            Self::EmptyContent => out.write_str("an alert or handshake message without bytes"),
            Self::AlertLength => out.write_str("the length of an alert, expected 2 bytes"),
            Self::InterleavedMessage => {
                out.write_str("another record between the parts of a handshake message")
            }
            Self::MessageSpansKeys => out.write_str("bytes behind a KeyUpdate in its record"),
            Self::Message(found) => {
                write!(out, "handshake message {found} after the handshake, expected KeyUpdate")
            }
            Self::MessageLength => out.write_str("the length of a handshake message"),
            Self::KeyUpdateRequest(found) => {
                write!(out, "the request of a KeyUpdate is {found}, expected 0 or 1")
            }
            Self::TooManyWithoutData => {
                out.write_str("too many records without data, one after the other")
            }
            Self::SequenceEnd => out.write_str("too many records with one key"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        CONTENT_BYTES_MAX, RecordViolation, header_of, missing_bytes, nonce, split_record,
    };

    #[test]
    fn nonces_of_all_sequence_numbers_differ_in_the_last_eight_bytes() {
        let iv = [0xff; 12];
        assert_eq!(nonce(&iv, 0), iv);
        assert_eq!(nonce(&iv, 1), [255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 254]);
        assert_eq!(nonce(&[0; 12], u64::MAX), [0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
        assert_eq!(nonce(&[0; 12], 0x0102_0304_0506_0708), [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn records_are_split_at_their_length_and_refused_by_their_header() {
        let header = header_of(3);
        assert_eq!(header, [23, 3, 3, 0, 20]);
        let record = [&header[..], &[7; 20], &[9]].concat();
        for len in 0..25 {
            assert_eq!(split_record(&record[..len]), Ok(None), "{len}");
            let missing = if len < 5 { 5 - len } else { 25 - len };
            assert_eq!(missing_bytes(&record[..len]), Ok(missing), "{len}");
        }
        for len in 25..=26 {
            assert_eq!(split_record(&record[..len]), Ok(Some((header, &[7; 20][..]))));
            assert_eq!(missing_bytes(&record[..len]), Ok(0));
        }
        for kind in (0..=255).filter(|kind| *kind != 23) {
            let expected = RecordViolation::NotProtected(kind);
            assert_eq!(split_record(&[kind]), Err(expected));
            assert_eq!(missing_bytes(&[kind]), Err(expected));
            assert_eq!(split_record(&[kind, 3, 3, 0, 20]), Err(expected));
        }
        let of_length = |len: usize| {
            let [high, low] = u16::try_from(len).unwrap().to_be_bytes();
            split_record(&[23, 3, 3, high, low]).map(|record| record.is_some())
        };
        for len in 0..17 {
            assert_eq!(of_length(len), Err(RecordViolation::TooShort));
        }
        for len in 17..=CONTENT_BYTES_MAX + 17 {
            assert_eq!(of_length(len), Ok(false));
        }
        for len in CONTENT_BYTES_MAX + 18..=0xffff {
            assert_eq!(of_length(len), Err(RecordViolation::TooLong));
        }
    }
}
