//! Send queue: header bytes stored here, and references to payload stored by the owner.
//!
//! ```text
//!   headers   | ···· | unsent headers, contiguous           | ···· free ···· | termination |
//!                    ↑ read                                 ↑ write          ↑ capacity
//!   pieces    [Headers 0..72] [Payload tag 3, 0..4096] [Headers 72..148] …
//! ```
//!
//! Consecutive headers without payload in between form one piece. Space for a TermReq is reserved
//! behind the ring. A growing queue starts with space for a few headers, since most connections
//! never send more at a time.

use tenmil_wire::tcp::TERM_REQ_BYTES_MAX;

/// Piece of the stream, for a gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendPiece {
    /// Range of [`headers`](crate::Connection::header_bytes).
    Headers {
        /// Offset.
        at: u32,
        /// Length in bytes.
        len_bytes: u32,
    },
    /// Payload of a command, stored by the owner.
    Payload {
        /// Tag of the command.
        tag: u16,
        /// Offset in its data.
        offset: u32,
        /// Length in bytes.
        len_bytes: u32,
    },
}

/// Initial capacity of the piece list.
const PIECES_MIN: usize = 8;
/// Initial header space of a growing queue, in bytes.
const CAPACITY_MIN: usize = 512;

/// First eight bytes of a command capsule without data and digests: type, flags, lengths of the header and
/// to the data, and of the PDU (TCP 1.0 §3.6.2.6).
const CAPSULE_PREFIX: u64 = 72 << 32 | 72 << 16 | 0x04;

/// Ring of header bytes, and the pieces that refer to it and to payload.
#[derive(Debug)]
pub(crate) struct SendQueue {
    headers: Box<[u8]>,
    capacity: usize,
    capacity_max: usize,
    read: usize,
    write: usize,
    pieces: Vec<SendPiece>,
    /// Index of the first piece that was not sent completely.
    first_unsent: usize,
    pieces_max: usize,
    queued_bytes: u64,
    sent_bytes: u64,
}

impl SendQueue {
    /// Memory of a queue of this size, in bytes.
    pub(crate) const fn memory_bytes(capacity: usize, pieces_max: usize) -> usize {
        capacity + TERM_REQ_BYTES_MAX + 2 * pieces_max * size_of::<SendPiece>()
    }

    pub(crate) fn new(capacity: usize, pieces_max: usize) -> Self {
        Self {
            headers: vec![0; capacity + TERM_REQ_BYTES_MAX].into(),
            capacity,
            capacity_max: capacity,
            read: 0,
            write: 0,
            pieces: Vec::new(),
            first_unsent: 0,
            pieces_max,
            queued_bytes: 0,
            sent_bytes: 0,
        }
    }

    /// Creates a queue that starts small and [grows](Self::grow) up to this size.
    pub(crate) fn with_growth(capacity_max: usize, pieces_max: usize) -> Self {
        Self { capacity_max, ..Self::new(CAPACITY_MIN.min(capacity_max), pieces_max) }
    }

    /// Grows the queue for `len` bytes of headers, if it may. Returns whether there is space.
    #[cold]
    pub(crate) fn grow(&mut self, len: usize) -> bool {
        while self.capacity < self.capacity_max && self.find_header_space(len).is_none() {
            self.double_capacity();
        }
        self.has_space(len)
    }

    /// Doubles the header space and moves unsent headers to its front.
    fn double_capacity(&mut self) {
        let capacity = (2 * self.capacity).min(self.capacity_max);
        let mut headers = vec![0; capacity + TERM_REQ_BYTES_MAX];
        let mut write = 0;
        for piece in &mut self.pieces[self.first_unsent..] {
            if let SendPiece::Headers { at, len_bytes } = piece {
                let (from, len) = (*at as usize, *len_bytes as usize);
                headers[write..write + len].copy_from_slice(&self.headers[from..from + len]);
                *at = to_u32(write);
                write += len;
            }
        }
        (self.headers, self.capacity) = (headers.into(), capacity);
        (self.read, self.write) = (0, write);
    }

    /// Total bytes ever queued.
    #[inline]
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Total bytes ever sent.
    #[inline]
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first_unsent == self.pieces.len()
    }

    #[inline]
    pub(crate) fn headers(&self) -> &[u8] {
        &self.headers
    }

    /// Pieces to send, oldest first.
    #[inline]
    pub(crate) fn pieces(&self) -> &[SendPiece] {
        &self.pieces[self.first_unsent..]
    }

    /// Whether there is space for `len` bytes of headers in at most three pieces.
    #[inline]
    pub(crate) fn has_space(&self, len: usize) -> bool {
        self.find_header_space(len).is_some()
            && self.pieces.len() - self.first_unsent + 3 <= self.pieces_max
    }

    /// Offset at which `len` contiguous header bytes fit.
    #[inline]
    fn find_header_space(&self, len: usize) -> Option<usize> {
        if self.write < self.read {
            return (self.read - self.write > len).then_some(self.write);
        }
        if self.capacity - self.write >= len {
            return Some(self.write);
        }
        (self.read > len).then_some(0)
    }

    /// Queues a header, its digest and padding with zeroes to the length `padded_len`.
    ///
    /// # Panics
    ///
    /// If there is no space; check with [`has_space`](Self::has_space).
    #[inline(always)]
    pub(crate) fn push_header(&mut self, header: &[u8], digest: Option<u32>, padded_len: usize) {
        let at = self.find_header_space(padded_len).expect("the caller has checked has_space()");
        let space = &mut self.headers[at..at + padded_len];
        space[..header.len()].copy_from_slice(header);
        let mut end = header.len();
        if let Some(digest) = digest {
            space[end..end + 4].copy_from_slice(&digest.to_le_bytes());
            end += 4;
        }
        if end < padded_len {
            space[end..].fill(0);
        }
        self.write = at + padded_len;
        self.push_headers_piece(at, padded_len);
    }

    /// Queues a command capsule without data and digests (§3.6.2.6). `None` if there is no space.
    #[inline(always)]
    pub(crate) fn push_capsule(&mut self, command: &[u64; 8]) -> Option<()> {
        const BYTES: usize = 72;
        let at = self.find_header_space(BYTES)?;
        if self.pieces.len() - self.first_unsent == self.pieces_max {
            return None;
        }
        let space = self.headers[at..].first_chunk_mut::<BYTES>()?;
        let (words, _) = space.as_chunks_mut::<8>();
        words[0] = CAPSULE_PREFIX.to_le_bytes();
        for (bytes, word) in words[1..].iter_mut().zip(command) {
            *bytes = word.to_le_bytes();
        }
        self.write = at + BYTES;
        self.push_headers_piece(at, BYTES);
        Some(())
    }

    #[inline(always)]
    fn push_headers_piece(&mut self, at: usize, len: usize) {
        let (begin, added) = (to_u32(at), to_u32(len));
        self.queued_bytes += len as u64;
        if !self.is_empty()
            && let Some(SendPiece::Headers { at, len_bytes }) = self.pieces.last_mut()
            && *at + *len_bytes == begin
        {
            *len_bytes += added;
            return;
        }
        self.push_piece(SendPiece::Headers { at: begin, len_bytes: added });
    }

    /// Queues a reference to payload.
    #[inline]
    pub(crate) fn push_payload(&mut self, tag: u16, offset: u32, len_bytes: u32) {
        self.queued_bytes += u64::from(len_bytes);
        self.push_piece(SendPiece::Payload { tag, offset, len_bytes });
    }

    /// Queues the TermReq after everything else, in its reserved space.
    pub(crate) fn push_termination(&mut self, bytes: &[u8]) {
        let at = self.capacity;
        self.headers[at..at + bytes.len()].copy_from_slice(bytes);
        self.queued_bytes += bytes.len() as u64;
        self.push_piece(SendPiece::Headers { at: to_u32(at), len_bytes: to_u32(bytes.len()) });
    }

    #[inline]
    fn push_piece(&mut self, piece: SendPiece) {
        if self.pieces.len() == self.pieces.capacity() {
            self.compact_or_grow_pieces();
        }
        self.pieces.push(piece);
    }

    /// Moves the unsent pieces to the front if they are at most half of the list. Otherwise
    /// allocates memory, for up to twice the largest number of unsent pieces; so a piece is rarely
    /// moved more than once.
    #[cold]
    fn compact_or_grow_pieces(&mut self) {
        let len = self.pieces.len();
        if len > 0 && 2 * self.first_unsent >= len {
            self.pieces.drain(..self.first_unsent);
            self.first_unsent = 0;
        } else {
            let capacity = (2 * len).clamp(PIECES_MIN, 2 * self.pieces_max.max(PIECES_MIN));
            self.pieces.reserve_exact(capacity.saturating_sub(len));
        }
    }

    /// Records that `count` bytes were sent.
    ///
    /// # Panics
    ///
    /// If fewer were queued.
    #[inline]
    pub(crate) fn record_sent(&mut self, count: usize) {
        self.sent_bytes += count as u64;
        assert!(self.sent_bytes <= self.queued_bytes, "sent bytes exceed queued bytes");
        if self.sent_bytes == self.queued_bytes {
            return self.clear();
        }
        let mut remaining = count;
        while remaining > 0 {
            let (len_bytes, header_at) = match &mut self.pieces[self.first_unsent] {
                SendPiece::Headers { at, len_bytes } => (len_bytes, Some(at)),
                SendPiece::Payload { offset, len_bytes, .. } => {
                    let sent = remaining.min(*len_bytes as usize);
                    *offset += to_u32(sent);
                    (len_bytes, None)
                }
            };
            let sent = remaining.min(*len_bytes as usize);
            *len_bytes -= to_u32(sent);
            remaining -= sent;
            let is_done = *len_bytes == 0;
            if let Some(at) = header_at {
                *at += to_u32(sent);
                self.read = *at as usize;
            }
            self.first_unsent += usize::from(is_done);
        }
    }

    /// Everything was sent.
    #[inline]
    fn clear(&mut self) {
        self.pieces.clear();
        (self.first_unsent, self.read, self.write) = (0, 0, 0);
    }
}

/// Converts an offset within the queue.
#[inline]
fn to_u32(len: usize) -> u32 {
    u32::try_from(len).expect("offsets in a send queue are below 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::{SendPiece, SendQueue};

    #[test]
    fn consecutive_headers_form_one_piece() {
        let mut queue = SendQueue::new(64, 8);
        queue.push_header(&[1; 8], None, 8);
        queue.push_header(&[2; 8], Some(0x0403_0201), 16);
        queue.push_payload(7, 0, 100);
        queue.push_header(&[3; 4], None, 4);
        let payload = SendPiece::Payload { tag: 7, offset: 0, len_bytes: 100 };
        let headers = |at, len_bytes| SendPiece::Headers { at, len_bytes };
        assert_eq!(queue.pieces(), [headers(0, 24), payload, headers(24, 4)]);
        assert_eq!(queue.headers()[16..24], [1, 2, 3, 4, 0, 0, 0, 0]);
    }

    /// The output equals the input, for all sizes of sends and all positions of the ring.
    #[test]
    fn the_header_ring_wraps_without_losing_bytes() {
        for step in 1..60 {
            let mut queue = SendQueue::new(50, 60);
            let (mut expected, mut out) = (Vec::new(), Vec::new());
            for number in 0..200_u8 {
                let len = usize::from(number % 7) + 1;
                while !queue.has_space(len + 1) {
                    send_bytes(&mut queue, step, &mut out);
                }
                queue.push_header(&vec![number; len], None, len + 1);
                expected.extend(vec![number; len]);
                expected.push(0);
                if number % 3 == 0 {
                    queue.push_payload(0, u32::from(number), 2);
                    expected.extend([number, number + 1]);
                }
            }
            queue.push_termination(&[0xee; 152]);
            expected.extend([0xee; 152]);
            while !queue.is_empty() {
                send_bytes(&mut queue, step, &mut out);
            }
            assert!(out == expected, "{step} bytes at a time");
            assert_eq!(queue.sent_bytes(), queue.queued_bytes());
        }
    }

    fn send_bytes(queue: &mut SendQueue, step: usize, out: &mut Vec<u8>) {
        let mut bytes = Vec::new();
        for piece in queue.pieces() {
            match *piece {
                SendPiece::Headers { at, len_bytes } => {
                    bytes.extend(&queue.headers()[at as usize..][..len_bytes as usize]);
                }
                SendPiece::Payload { offset, len_bytes, .. } => {
                    bytes.extend((offset..offset + len_bytes).map(|byte| byte.to_le_bytes()[0]));
                }
            }
        }
        let count = step.min(bytes.len());
        out.extend(&bytes[..count]);
        queue.record_sent(count);
    }

    #[test]
    fn a_growing_queue_accepts_as_much_as_a_large_one() {
        let mut large = SendQueue::new(5000, 1000);
        let mut growing = SendQueue::with_growth(5000, 1000);
        assert_eq!(growing.headers().len(), super::CAPACITY_MIN + 152);
        while large.has_space(24) {
            assert!(growing.has_space(24) || growing.grow(24));
            large.push_header(&[1; 24], None, 24);
            growing.push_header(&[1; 24], None, 24);
        }
        assert!(!growing.has_space(24) && !growing.grow(24));
        assert_eq!(growing.queued_bytes(), 5000 / 24 * 24);
    }

    #[test]
    fn a_growing_queue_sends_the_same_bytes_as_a_large_one() {
        for step in [1, 24, 100, 1000] {
            let mut large = SendQueue::new(5000, 1000);
            let mut growing = SendQueue::with_growth(5000, 1000);
            let [mut one, mut other] = [Vec::new(), Vec::new()];
            for number in 0..1000_u32 {
                let has_space = growing.has_space(24) || growing.grow(24);
                if !has_space || !large.has_space(24) || number % 60 == 59 {
                    send_bytes(&mut large, step, &mut one);
                    send_bytes(&mut growing, step, &mut other);
                    continue;
                }
                for queue in [&mut large, &mut growing] {
                    queue.push_header(&[number.to_le_bytes()[0]; 24], None, 24);
                    queue.push_payload(1, number, 3);
                }
            }
            send_bytes(&mut large, usize::MAX, &mut one);
            send_bytes(&mut growing, usize::MAX, &mut other);
            assert!(one == other, "{step} bytes at a time");
            assert!(large.is_empty() && growing.is_empty());
        }
    }

    #[test]
    #[should_panic(expected = "sent bytes exceed queued bytes")]
    fn recording_more_bytes_than_queued_panics() {
        SendQueue::new(8, 4).record_sent(1);
    }
}
