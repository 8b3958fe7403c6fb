//! A send in progress and everything that the kernel may read for it.

use tenmil_base::{InvalidSegment, SendSlice};
use tenmil_dma::RegionTable;

use crate::io_vectors::advance_list;

/// Addresses, and the headers they refer to. Boxed and not moved while the kernel uses it.
pub(super) struct SendOp {
    headers: Vec<u8>,
    list: Vec<libc::iovec>,
    /// Number of leading entries that are done.
    done: usize,
    message: libc::msghdr,
    flags: i32,
    /// Not yet fully sent.
    pub(super) is_sending: bool,
    /// Sent without a copy.
    pub(super) zero_copy: bool,
    /// Outstanding zero-copy notifications.
    pub(super) notifications: u32,
    /// Position of its first byte in the stream.
    pub(super) from: u64,
}

/// Maximum number of entries per call: half of `IOV_MAX`.
const STRETCHES_MAX: usize = 512;

// SAFETY: the addresses are those of its own headers and of region memory, which are valid on every
// thread; nothing else in it is tied to a thread.
unsafe impl Send for SendOp {}

impl SendOp {
    pub(super) fn new() -> Self {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let message: libc::msghdr = unsafe { std::mem::zeroed() };
        let (headers, list) = (Vec::new(), Vec::new());
        Self {
            headers,
            list,
            done: 0,
            message,
            flags: 0,
            is_sending: false,
            zero_copy: false,
            notifications: 0,
            from: 0,
        }
    }

    /// Whether the kernel no longer uses it.
    pub(super) fn is_free(&self) -> bool {
        !self.is_sending && self.notifications == 0
    }

    /// Takes as many of `stretches` as one call takes, and returns their length in bytes.
    pub(super) fn fill_from(
        &mut self,
        regions: &RegionTable,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, InvalidSegment> {
        self.headers.clear();
        self.headers.extend_from_slice(headers);
        self.list.clear();
        self.done = 0;
        let mut taken = 0;
        for stretch in stretches.iter().take(STRETCHES_MAX) {
            let (base, len) = match *stretch {
                SendSlice::Headers { at, len_bytes } => {
                    let part = &mut self.headers[at as usize..][..len_bytes as usize];
                    (part.as_mut_ptr(), part.len())
                }
                SendSlice::Memory(segment) => {
                    (regions.host_address(segment)?.as_ptr(), segment.len_bytes as usize)
                }
            };
            if len > 0 {
                self.list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                taken += len;
            }
        }
        let more = has_more || stretches.len() > STRETCHES_MAX;
        // MSG_WAITALL: the kernel itself continues a short send, so a send completes as a whole.
        self.flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        self.flags |= if more { libc::MSG_MORE } else { 0 };
        Ok(taken)
    }

    /// Message header for the kernel: valid, with all it refers to, until `self` is changed or
    /// dropped.
    pub(super) fn message_header(&mut self) -> (*const libc::msghdr, u32) {
        let rest = &mut self.list[self.done..];
        // `as _`: the field is narrower with musl.
        self.message.msg_iovlen = rest.len() as _;
        self.message.msg_iov = rest.as_mut_ptr();
        (&raw const self.message, self.flags.cast_unsigned())
    }

    /// Advances by `count` bytes. Returns whether anything is left.
    pub(super) fn record_sent(&mut self, count: usize) -> bool {
        advance_list(&mut self.list, &mut self.done, count)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::SendSlice;
    use tenmil_dma::RegionTable;

    use super::SendOp;

    #[test]
    fn partial_send_continues() {
        let mut outgoing = SendOp::new();
        let stretches =
            [(0, 3), (5, 2)].map(|(at, len_bytes)| SendSlice::Headers { at, len_bytes });
        let len = outgoing.fill_from(&RegionTable::new(1), b"abcdefg", &stretches, false).unwrap();
        assert_eq!(len, 5);
        assert!(outgoing.record_sent(2));
        assert_eq!(outgoing.list[outgoing.done..].len(), 2);
        assert_eq!(outgoing.list[0].iov_len, 1);
        assert!(outgoing.record_sent(1));
        assert_eq!(outgoing.list[outgoing.done..].len(), 1);
        assert!(!outgoing.record_sent(2));
    }
}
