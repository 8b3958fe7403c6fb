//! Reply headers and errors of the transmission phase.

use tenmil_base::IoStatus;
use tenmil_wire::nbd::reply::{ChunkPayload, encode_data_chunk_header, encode_hole_chunk};
use tenmil_wire::nbd::{ChunkFlags, ChunkHeader, ErrorCode, SimpleReply};

/// Reply header, built on the stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyHeader {
    bytes: [u8; HEADER_BYTES],
    len: usize,
}

/// Longest header: an error chunk with a message.
const HEADER_BYTES: usize = 160;
/// Longest error message.
const TEXT_BYTES_MAX: usize = HEADER_BYTES - ChunkHeader::BYTES - 14;

/// NBD error and message of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestFailure {
    /// NBD error code.
    pub(super) error: ErrorCode,
    /// Message for the client's log.
    pub(super) text: &'static str,
    /// Byte offset of the error, if known.
    pub(super) offset: Option<u64>,
}

impl RequestFailure {
    pub(super) const fn new(error: ErrorCode, text: &'static str) -> Self {
        Self { error, text, offset: None }
    }

    /// Translates a failed I/O status. `offset` is the first byte of the failed range, `None` for a
    /// request without a range.
    pub(super) fn from_io_status(status: IoStatus, writes: bool, offset: Option<u64>) -> Self {
        let (error, text) = match status {
            IoStatus::LBA_OUT_OF_RANGE if writes => (ErrorCode::ENOSPC, "past the end"),
            IoStatus::LBA_OUT_OF_RANGE => (ErrorCode::EINVAL, "past the end"),
            IoStatus::CAPACITY_EXCEEDED => (ErrorCode::ENOSPC, "the medium is full"),
            IoStatus::INVALID_OPCODE => (ErrorCode::ENOTSUP, "the medium cannot do this"),
            IoStatus::INVALID_FIELD => (ErrorCode::EINVAL, "the medium refuses this"),
            IoStatus::UNRECOVERED_READ => (ErrorCode::EIO, "the medium has lost the data"),
            IoStatus::WRITE_FAULT => (ErrorCode::EIO, "the medium could not take the data"),
            IoStatus::WRITE_PROTECTED => (ErrorCode::EPERM, "the medium is only read"),
            IoStatus::NO_DEVICE | IoStatus::ABORTED_BY_HOST => {
                (ErrorCode::ESHUTDOWN, "the medium has been removed")
            }
            IoStatus::PATH_ERROR => (ErrorCode::EIO, "the path to the medium failed"),
            _ => (ErrorCode::EIO, "the medium had an error"),
        };
        Self { error, text, offset }
    }
}

impl ReplyHeader {
    /// Encoded header.
    #[inline]
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    #[inline]
    fn from_parts(parts: [&[u8]; 2]) -> Self {
        let mut header = Self { bytes: [0; HEADER_BYTES], len: 0 };
        for part in parts {
            header.bytes[header.len..][..part.len()].copy_from_slice(part);
            header.len += part.len();
        }
        header
    }

    /// Header before the data of a read, or the whole success reply to any other command.
    #[inline]
    pub(super) fn success(structured: bool, cookie: u64, data: Option<(u64, u32)>) -> Self {
        match data {
            Some((offset, len_bytes)) if structured && len_bytes > 0 => {
                Self::from_parts([&encode_data_chunk_header(cookie, offset, len_bytes), &[]])
            }
            // A data chunk holds at least one byte, so an empty read gets a chunk without payload.
            Some(_) if structured => Self::single_chunk(cookie, &ChunkPayload::None),
            _ => {
                Self::from_parts([&SimpleReply { error: ErrorCode::NONE, cookie }.to_bytes(), &[]])
            }
        }
    }

    /// Whole reply to a read of a hole. The client must have negotiated structured replies.
    #[inline]
    pub(super) fn read_hole(cookie: u64, offset: u64, len_bytes: u32) -> Self {
        Self::from_parts([&encode_hole_chunk(cookie, offset, len_bytes), &[]])
    }

    /// Whole reply of a failed request.
    pub(super) fn failure(structured: bool, cookie: u64, failure: RequestFailure) -> Self {
        let RequestFailure { error, text, offset } = failure;
        if !structured {
            return Self::from_parts([&SimpleReply { error, cookie }.to_bytes(), &[]]);
        }
        let text = &text[..text.len().min(TEXT_BYTES_MAX)];
        Self::single_chunk(cookie, &ChunkPayload::Error { error, text, offset })
    }

    /// Header of a block status chunk, before the extents.
    pub(super) fn block_status_chunk(cookie: u64, context: u32, extents: usize) -> Self {
        let payload = context.to_be_bytes();
        let len_bytes =
            u32::try_from(payload.len() + extents * 8).expect("few extents are reported");
        let header = ChunkHeader {
            flags: ChunkFlags::DONE,
            kind: tenmil_wire::nbd::ChunkCode::BLOCK_STATUS,
            cookie,
            len_bytes,
        };
        Self::from_parts([&header.to_bytes(), &payload])
    }

    /// Builds a reply of a single chunk. It allocates, so it is only for replies off the I/O path.
    fn single_chunk(cookie: u64, payload: &ChunkPayload<'_>) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        payload.emit(&mut bytes);
        let len_bytes = u32::try_from(bytes.len()).expect("no longer than a header");
        let flags = ChunkFlags::DONE;
        let header = ChunkHeader { flags, kind: payload.kind(), cookie, len_bytes };
        Self::from_parts([&header.to_bytes(), &bytes])
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::IoStatus;
    use tenmil_wire::nbd::ErrorCode;

    use super::RequestFailure;

    #[test]
    fn removed_and_read_only_devices_have_distinct_nbd_errors() {
        for (status, error) in [
            (IoStatus::NO_DEVICE, ErrorCode::ESHUTDOWN),
            (IoStatus::ABORTED_BY_HOST, ErrorCode::ESHUTDOWN),
            (IoStatus::WRITE_PROTECTED, ErrorCode::EPERM),
            (IoStatus::CAPACITY_EXCEEDED, ErrorCode::ENOSPC),
            (IoStatus::INVALID_OPCODE, ErrorCode::ENOTSUP),
            (IoStatus::UNRECOVERED_READ, ErrorCode::EIO),
            (IoStatus::INTERNAL_ERROR, ErrorCode::EIO),
        ] {
            let failure = RequestFailure::from_io_status(status, true, Some(512));
            assert_eq!((failure.error, failure.offset), (error, Some(512)), "{status:?}");
            assert!(!failure.text.is_empty());
        }
    }
}
