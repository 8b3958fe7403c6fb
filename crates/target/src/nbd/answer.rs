//! What goes back for a request: headers, and errors in the words of the protocol.

use base::Outcome;
use wire::nbd::reply::{Payload, data_chunk};
use wire::nbd::{ChunkFlags, ChunkHeader, ErrorCode, SimpleReply};

/// The header of a reply, built on the stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    bytes: [u8; HEADER_BYTES],
    len: usize,
}

/// The longest header: a chunk that tells of an error in words.
const HEADER_BYTES: usize = 160;
/// Words of an error.
const TEXT_BYTES_MAX: usize = HEADER_BYTES - ChunkHeader::BYTES - 14;

/// Why a request was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// In the protocol's words.
    pub(super) error: ErrorCode,
    /// In our own.
    pub(super) text: &'static str,
    /// Where, if that is known.
    pub(super) offset: Option<u64>,
}

impl Failure {
    pub(super) const fn new(error: ErrorCode, text: &'static str) -> Self {
        Self { error, text, offset: None }
    }

    /// What a backend has answered for the bytes from `offset` on, or for what is of no bytes.
    pub(super) fn of(outcome: Outcome, writes: bool, offset: Option<u64>) -> Self {
        let (error, text) = match outcome {
            Outcome::LBA_OUT_OF_RANGE if writes => (ErrorCode::ENOSPC, "past the end"),
            Outcome::LBA_OUT_OF_RANGE => (ErrorCode::EINVAL, "past the end"),
            Outcome::CAPACITY_EXCEEDED => (ErrorCode::ENOSPC, "the medium is full"),
            Outcome::INVALID_OPCODE => (ErrorCode::ENOTSUP, "the medium cannot do this"),
            Outcome::INVALID_FIELD => (ErrorCode::EINVAL, "the medium refuses this"),
            Outcome::UNRECOVERED_READ => (ErrorCode::EIO, "the medium has lost the data"),
            Outcome::WRITE_FAULT => (ErrorCode::EIO, "the medium could not take the data"),
            Outcome::WRITE_PROTECTED => (ErrorCode::EPERM, "the medium is only read"),
            Outcome::NO_DEVICE | Outcome::ABORTED_BY_HOST => {
                (ErrorCode::ESHUTDOWN, "the medium has been removed")
            }
            Outcome::PATH_ERROR => (ErrorCode::EIO, "the path to the medium failed"),
            _ => (ErrorCode::EIO, "the medium had an error"),
        };
        Self { error, text, offset }
    }
}

impl Header {
    /// The bytes.
    #[inline]
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    #[inline]
    fn of(parts: [&[u8]; 2]) -> Self {
        let mut header = Self { bytes: [0; HEADER_BYTES], len: 0 };
        for part in parts {
            header.bytes[header.len..][..part.len()].copy_from_slice(part);
            header.len += part.len();
        }
        header
    }

    /// Before the data of a read, or all of the reply to something else.
    #[inline]
    pub(super) fn done(structured: bool, cookie: u64, data: Option<(u64, u32)>) -> Self {
        match data {
            Some((offset, len_bytes)) if structured && len_bytes > 0 => {
                Self::of([&data_chunk(cookie, offset, len_bytes), &[]])
            }
            // A chunk of data holds at least one byte.
            Some(_) if structured => Self::chunk(cookie, &Payload::None),
            _ => Self::of([&SimpleReply { error: ErrorCode::NONE, cookie }.to_bytes(), &[]]),
        }
    }

    /// Something went wrong.
    pub(super) fn failed(structured: bool, cookie: u64, failure: Failure) -> Self {
        let Failure { error, text, offset } = failure;
        if !structured {
            return Self::of([&SimpleReply { error, cookie }.to_bytes(), &[]]);
        }
        let text = &text[..text.len().min(TEXT_BYTES_MAX)];
        Self::chunk(cookie, &Payload::Error { error, text, offset })
    }

    /// Before the extents of a block status.
    pub(super) fn status(cookie: u64, context: u32, extents: usize) -> Self {
        let payload = context.to_be_bytes();
        let len_bytes = u32::try_from(payload.len() + extents * 8).expect("few extents are told");
        let header = ChunkHeader {
            flags: ChunkFlags::DONE,
            kind: wire::nbd::ChunkCode::BLOCK_STATUS,
            cookie,
            len_bytes,
        };
        Self::of([&header.to_bytes(), &payload])
    }

    /// The one chunk of a reply. Only for replies that are not on the way of an I/O.
    fn chunk(cookie: u64, payload: &Payload<'_>) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        payload.emit(&mut bytes);
        let len_bytes = u32::try_from(bytes.len()).expect("no longer than a header");
        let flags = ChunkFlags::DONE;
        let header = ChunkHeader { flags, kind: payload.kind(), cookie, len_bytes };
        Self::of([&header.to_bytes(), &bytes])
    }
}

#[cfg(test)]
mod tests {
    use base::Outcome;
    use wire::nbd::ErrorCode;

    use super::Failure;

    #[test]
    fn a_medium_that_has_gone_or_may_not_be_written_is_told_from_one_that_failed() {
        for (outcome, error) in [
            (Outcome::NO_DEVICE, ErrorCode::ESHUTDOWN),
            (Outcome::ABORTED_BY_HOST, ErrorCode::ESHUTDOWN),
            (Outcome::WRITE_PROTECTED, ErrorCode::EPERM),
            (Outcome::CAPACITY_EXCEEDED, ErrorCode::ENOSPC),
            (Outcome::INVALID_OPCODE, ErrorCode::ENOTSUP),
            (Outcome::UNRECOVERED_READ, ErrorCode::EIO),
            (Outcome::INTERNAL_ERROR, ErrorCode::EIO),
        ] {
            let failure = Failure::of(outcome, true, Some(512));
            assert_eq!((failure.error, failure.offset), (error, Some(512)), "{outcome:?}");
            assert!(!failure.text.is_empty());
        }
    }
}
