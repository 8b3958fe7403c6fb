//! What is to be sent, in order: headers that lie here, and payload that lies with the owner.
//!
//! ```text
//!   headers   | ···· | unsent headers, one behind the other | ···· free ···· | termination |
//!                    ↑ read                                 ↑ write          ↑ capacity
//!   pieces    [Headers 0..72] [Payload tag 3, 0..4096] [Headers 72..148] …
//! ```
//!
//! Headers that follow one another without payload between them are one piece. The termination
//! request has a place of its own, so that there is always room for it. An outbox that may grow begins
//! with room for a few headers: most connections never have more to say at a time.

use wire::tcp::TERMINATION_BYTES_MAX;

/// A piece of the stream, for a gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// So many bytes of [`headers`](crate::Connection::headers), from there on.
    Headers {
        /// The first.
        at: u32,
        /// How many.
        len_bytes: u32,
    },
    /// Data of a command, which lie with the owner.
    Payload {
        /// Which command's.
        tag: u16,
        /// From which byte of its data on.
        offset: u32,
        /// How many bytes.
        len_bytes: u32,
    },
}

/// What there is memory for at first.
const PIECES_MIN: usize = 8;
/// Bytes of headers that one which may grow has room for at first.
const CAPACITY_MIN: usize = 512;

/// The queue.
#[derive(Debug)]
pub(crate) struct Outbox {
    headers: Box<[u8]>,
    capacity: usize,
    capacity_max: usize,
    read: usize,
    write: usize,
    pieces: Vec<Piece>,
    /// How many of them have been sent.
    first: usize,
    pieces_max: usize,
    queued_bytes: u64,
    sent_bytes: u64,
}

impl Outbox {
    /// Bytes of memory that one takes with this much room.
    pub(crate) const fn memory_bytes(capacity: usize, pieces_max: usize) -> usize {
        capacity + TERMINATION_BYTES_MAX + 2 * pieces_max * size_of::<Piece>()
    }

    pub(crate) fn new(capacity: usize, pieces_max: usize) -> Self {
        Self {
            headers: vec![0; capacity + TERMINATION_BYTES_MAX].into(),
            capacity,
            capacity_max: capacity,
            read: 0,
            write: 0,
            pieces: Vec::new(),
            first: 0,
            pieces_max,
            queued_bytes: 0,
            sent_bytes: 0,
        }
    }

    /// One that has room for so much once it needs it, and is [told to grow](Self::grow) then.
    pub(crate) fn growing(capacity_max: usize, pieces_max: usize) -> Self {
        Self { capacity_max, ..Self::new(CAPACITY_MIN.min(capacity_max), pieces_max) }
    }

    /// Makes room for `len` bytes of headers, if it may have more than it has. Whether there is room.
    #[cold]
    pub(crate) fn grow(&mut self, len: usize) -> bool {
        while self.capacity < self.capacity_max && self.place(len).is_none() {
            self.double();
        }
        self.has_room(len)
    }

    /// Twice as much room for headers, with those that are unsent at the front.
    fn double(&mut self) {
        let capacity = (2 * self.capacity).min(self.capacity_max);
        let mut headers = vec![0; capacity + TERMINATION_BYTES_MAX];
        let mut write = 0;
        for piece in &mut self.pieces[self.first..] {
            if let Piece::Headers { at, len_bytes } = piece {
                let (from, len) = (*at as usize, *len_bytes as usize);
                headers[write..write + len].copy_from_slice(&self.headers[from..from + len]);
                *at = narrow(write);
                write += len;
            }
        }
        (self.headers, self.capacity) = (headers.into(), capacity);
        (self.read, self.write) = (0, write);
    }

    /// Everything that was ever queued.
    #[inline]
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Everything that was ever sent.
    #[inline]
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first == self.pieces.len()
    }

    #[inline]
    pub(crate) fn headers(&self) -> &[u8] {
        &self.headers
    }

    /// What is to be sent, oldest first.
    #[inline]
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces[self.first..]
    }

    /// Whether there is room for headers of `len` bytes that are parts of three pieces at most.
    #[inline]
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.place(len).is_some() && self.pieces.len() - self.first + 3 <= self.pieces_max
    }

    /// Where `len` bytes of headers fit together.
    #[inline]
    fn place(&self, len: usize) -> Option<usize> {
        if self.write < self.read {
            return (self.read - self.write > len).then_some(self.write);
        }
        if self.capacity - self.write >= len {
            return Some(self.write);
        }
        (self.read > len).then_some(0)
    }

    /// Queues a header that is followed by `padding` zeros.
    ///
    /// # Panics
    ///
    /// If [`has_room`](Self::has_room) was not asked.
    #[inline(always)]
    pub(crate) fn push_header(&mut self, header: &[u8], digest: Option<u32>, whole: usize) {
        let at = self.place(whole).expect("room was asked for");
        let place = &mut self.headers[at..at + whole];
        place[..header.len()].copy_from_slice(header);
        let mut end = header.len();
        if let Some(digest) = digest {
            place[end..end + 4].copy_from_slice(&digest.to_le_bytes());
            end += 4;
        }
        if end < whole {
            place[end..].fill(0);
        }
        self.write = at + whole;
        self.push_headers_piece(at, whole);
    }

    #[inline]
    fn push_headers_piece(&mut self, at: usize, len: usize) {
        let (begin, more) = (narrow(at), narrow(len));
        self.queued_bytes += len as u64;
        if !self.is_empty()
            && let Some(Piece::Headers { at, len_bytes }) = self.pieces.last_mut()
            && *at + *len_bytes == begin
        {
            *len_bytes += more;
            return;
        }
        self.push(Piece::Headers { at: begin, len_bytes: more });
    }

    /// Queues payload.
    #[inline]
    pub(crate) fn push_payload(&mut self, tag: u16, offset: u32, len_bytes: u32) {
        self.queued_bytes += u64::from(len_bytes);
        self.push(Piece::Payload { tag, offset, len_bytes });
    }

    /// Queues what goes behind everything else, even if there is no room for it.
    pub(crate) fn push_termination(&mut self, bytes: &[u8]) {
        let at = self.capacity;
        self.headers[at..at + bytes.len()].copy_from_slice(bytes);
        self.queued_bytes += bytes.len() as u64;
        self.push(Piece::Headers { at: narrow(at), len_bytes: narrow(bytes.len()) });
    }

    #[inline]
    fn push(&mut self, piece: Piece) {
        if self.pieces.len() == self.pieces.capacity() {
            self.make_room();
        }
        self.pieces.push(piece);
    }

    /// Moves what is unsent to the front, if that is half of all at most. Else makes more memory, up to
    /// twice as much as may be unsent: so a piece is hardly moved more often than once.
    #[cold]
    fn make_room(&mut self) {
        let len = self.pieces.len();
        if len > 0 && 2 * self.first >= len {
            self.pieces.drain(..self.first);
            self.first = 0;
        } else {
            let room = (2 * len).clamp(PIECES_MIN, 2 * self.pieces_max.max(PIECES_MIN));
            self.pieces.reserve_exact(room.saturating_sub(len));
        }
    }

    /// So many bytes have been sent.
    ///
    /// # Panics
    ///
    /// If there were not so many.
    #[inline]
    pub(crate) fn sent(&mut self, count: usize) {
        self.sent_bytes += count as u64;
        assert!(self.sent_bytes <= self.queued_bytes, "no more is sent than was queued");
        let mut left = count;
        while left > 0 {
            let (len_bytes, header_at) = match &mut self.pieces[self.first] {
                Piece::Headers { at, len_bytes } => (len_bytes, Some(at)),
                Piece::Payload { offset, len_bytes, .. } => {
                    let taken = left.min(*len_bytes as usize);
                    *offset += narrow(taken);
                    (len_bytes, None)
                }
            };
            let taken = left.min(*len_bytes as usize);
            *len_bytes -= narrow(taken);
            left -= taken;
            let is_done = *len_bytes == 0;
            if let Some(at) = header_at {
                *at += narrow(taken);
                self.read = *at as usize;
            }
            self.first += usize::from(is_done);
        }
        if self.is_empty() {
            self.pieces.clear();
            (self.first, self.read, self.write) = (0, 0, 0);
        }
    }
}

/// A length within an outbox.
#[inline]
fn narrow(len: usize) -> u32 {
    u32::try_from(len).expect("an outbox is small")
}

#[cfg(test)]
mod tests {
    use super::{Outbox, Piece};

    #[test]
    fn headers_that_follow_one_another_are_one_piece() {
        let mut outbox = Outbox::new(64, 8);
        outbox.push_header(&[1; 8], None, 8);
        outbox.push_header(&[2; 8], Some(0x0403_0201), 16);
        outbox.push_payload(7, 0, 100);
        outbox.push_header(&[3; 4], None, 4);
        let payload = Piece::Payload { tag: 7, offset: 0, len_bytes: 100 };
        let headers = |at, len_bytes| Piece::Headers { at, len_bytes };
        assert_eq!(outbox.pieces(), [headers(0, 24), payload, headers(24, 4)]);
        assert_eq!(outbox.headers()[16..24], [1, 2, 3, 4, 0, 0, 0, 0]);
    }

    /// What comes out is what went in, whatever is sent at a time and however the ring goes round.
    #[test]
    fn a_ring_of_headers_goes_round_and_loses_nothing() {
        for step in 1..60 {
            let mut outbox = Outbox::new(50, 60);
            let (mut expected, mut out) = (Vec::new(), Vec::new());
            for number in 0..200_u8 {
                let len = usize::from(number % 7) + 1;
                while !outbox.has_room(len + 1) {
                    take(&mut outbox, step, &mut out);
                }
                outbox.push_header(&vec![number; len], None, len + 1);
                expected.extend(vec![number; len]);
                expected.push(0);
                if number % 3 == 0 {
                    outbox.push_payload(0, u32::from(number), 2);
                    expected.extend([number, number + 1]);
                }
            }
            outbox.push_termination(&[0xee; 152]);
            expected.extend([0xee; 152]);
            while !outbox.is_empty() {
                take(&mut outbox, step, &mut out);
            }
            assert!(out == expected, "{step} bytes at a time");
            assert_eq!(outbox.sent_bytes(), outbox.queued_bytes());
        }
    }

    fn take(outbox: &mut Outbox, step: usize, out: &mut Vec<u8>) {
        let mut bytes = Vec::new();
        for piece in outbox.pieces() {
            match *piece {
                Piece::Headers { at, len_bytes } => {
                    bytes.extend(&outbox.headers()[at as usize..][..len_bytes as usize]);
                }
                Piece::Payload { offset, len_bytes, .. } => {
                    bytes.extend((offset..offset + len_bytes).map(|byte| byte.to_le_bytes()[0]));
                }
            }
        }
        let count = step.min(bytes.len());
        out.extend(&bytes[..count]);
        outbox.sent(count);
    }

    #[test]
    fn one_that_grows_takes_as_much_as_one_that_is_large() {
        let mut large = Outbox::new(5000, 1000);
        let mut growing = Outbox::growing(5000, 1000);
        assert_eq!(growing.headers().len(), super::CAPACITY_MIN + 152);
        while large.has_room(24) {
            assert!(growing.has_room(24) || growing.grow(24));
            large.push_header(&[1; 24], None, 24);
            growing.push_header(&[1; 24], None, 24);
        }
        assert!(!growing.has_room(24) && !growing.grow(24));
        assert_eq!(growing.queued_bytes(), 5000 / 24 * 24);
    }

    #[test]
    fn one_that_grows_says_what_one_that_is_large_says_whatever_is_sent_meanwhile() {
        for step in [1, 24, 100, 1000] {
            let mut large = Outbox::new(5000, 1000);
            let mut growing = Outbox::growing(5000, 1000);
            let [mut one, mut other] = [Vec::new(), Vec::new()];
            for number in 0..1000_u32 {
                let has_room = growing.has_room(24) || growing.grow(24);
                if !has_room || !large.has_room(24) || number % 60 == 59 {
                    take(&mut large, step, &mut one);
                    take(&mut growing, step, &mut other);
                    continue;
                }
                for outbox in [&mut large, &mut growing] {
                    outbox.push_header(&[number.to_le_bytes()[0]; 24], None, 24);
                    outbox.push_payload(1, number, 3);
                }
            }
            take(&mut large, usize::MAX, &mut one);
            take(&mut growing, usize::MAX, &mut other);
            assert!(one == other, "{step} bytes at a time");
            assert!(large.is_empty() && growing.is_empty());
        }
    }

    #[test]
    #[should_panic(expected = "no more is sent than was queued")]
    fn sending_more_than_there_is_is_our_own_mistake() {
        Outbox::new(8, 4).sent(1);
    }
}
