//! One direction of a connection: bytes are delivered late, in parts, or not at all.
//!
//! `tenmil proxy` uses it as well, to pass the bytes of one peer to the other.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use tenmil_base::{Instant, Memory, Random, Segment, Span};

/// One direction of a connection.
pub struct LinkDirection {
    options: LinkOptions,
    random: Random,
    /// Data in flight, oldest first.
    pieces: VecDeque<SentPiece>,
    /// Number of bytes accepted so far.
    taken: u64,
    /// Number of bytes delivered or discarded so far.
    given: u64,
    /// Nothing is delivered before this time.
    frozen_until: Instant,
    /// Nothing is delivered any more.
    swallows: bool,
    /// No more data are accepted.
    is_closed: bool,
    /// Faults that take effect at the next byte.
    next: VecDeque<LinkFault>,
}

/// Options of one direction.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// Whether writes and reads are split at random positions.
    pub splits: bool,
    /// Capacity in bytes.
    pub room_bytes: usize,
    /// Delay of each byte.
    pub delay: Span,
    /// Maximum additional delay. The order is preserved.
    pub jitter: Span,
    /// Faults by byte position.
    pub faults: LinkFaults,
}

/// Faults by number of delivered bytes, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkFaults(Vec<(u64, LinkFault)>);

/// Fault of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// The connection breaks in both directions: no further byte arrives.
    Cut,
    /// This direction ends as if its sender had closed it. Later data are discarded.
    Close,
    /// Nothing is delivered for this time.
    Freeze(Span),
    /// All later data are discarded silently.
    BlackHole,
    /// These bits of the next byte are inverted.
    Flip(u8),
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadResult {
    /// This number of bytes, at least one.
    Bytes(usize),
    /// Nothing at the moment.
    Nothing,
    /// End of the stream.
    End,
    /// The connection must be broken.
    Cut,
}

/// Data accepted by one write.
struct SentPiece {
    arrives: Instant,
    what: PieceContent,
}

enum PieceContent {
    Bytes(VecDeque<u8>),
    /// Read when it is delivered.
    Memory(Segment, Arc<dyn Memory>),
}

impl Default for LinkOptions {
    /// No delay and no faults, with a capacity of 1 MiB.
    fn default() -> Self {
        Self {
            splits: false,
            room_bytes: 1 << 20,
            delay: Span::default(),
            jitter: Span::default(),
            faults: LinkFaults::default(),
        }
    }
}

impl LinkFaults {
    /// A single fault after `at_byte` delivered bytes.
    pub fn single(at_byte: u64, fault: LinkFault) -> Self {
        Self(vec![(at_byte, fault)])
    }

    /// Adds a fault after `at_byte` delivered bytes. Faults at the same byte take effect in the
    /// order in which they were added.
    #[must_use]
    pub fn with_fault(mut self, at_byte: u64, fault: LinkFault) -> Self {
        let index = self.0.partition_point(|(byte, _)| *byte <= at_byte);
        self.0.insert(index, (at_byte, fault));
        self
    }
}

impl LinkDirection {
    /// Creates a direction that draws random numbers from `random`.
    pub fn new(options: LinkOptions, random: Random) -> Self {
        Self {
            options,
            random,
            pieces: VecDeque::new(),
            taken: 0,
            given: 0,
            frozen_until: Instant::default(),
            swallows: false,
            is_closed: false,
            next: VecDeque::new(),
        }
    }

    /// Free capacity in bytes.
    pub fn free_capacity_bytes(&self) -> usize {
        let held = usize::try_from(self.taken - self.given).unwrap_or(usize::MAX);
        self.options.room_bytes.saturating_sub(held)
    }

    /// Number of bytes delivered or discarded. Memory of these bytes is not read any more.
    pub fn delivered_bytes(&self) -> u64 {
        self.given
    }

    /// Number of bytes accepted.
    pub fn accepted_bytes(&self) -> u64 {
        self.taken
    }

    /// Whether memory is in flight that has not been read.
    pub(super) fn holds_memory(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece.what, PieceContent::Memory(..)))
    }

    /// Accepts as many bytes as there is space for, and returns their number.
    pub fn accept_bytes(&mut self, now: Instant, bytes: &[u8]) -> usize {
        let count = self.accepted_portion(bytes.len());
        self.push_piece(now, PieceContent::Bytes(bytes[..count].iter().copied().collect()));
        count
    }

    /// Accepts memory, which is read when it is delivered.
    pub(super) fn accept_segment(
        &mut self,
        now: Instant,
        segment: Segment,
        memory: &Arc<dyn Memory>,
    ) -> usize {
        let count = self.accepted_portion(segment.len_bytes as usize);
        let part = u32::try_from(count).ok().and_then(|len| segment.slice(0, len));
        let part = part.unwrap_or(segment);
        self.push_piece(now, PieceContent::Memory(part, Arc::clone(memory)));
        count
    }

    /// Number of bytes accepted by one write of `len` bytes.
    fn accepted_portion(&mut self, len: usize) -> usize {
        let most = len.min(self.free_capacity_bytes());
        if self.options.splits && most > 0 { self.random_split(most) } else { most }
    }

    /// Random number in `1..=most`, often near its ends.
    fn random_split(&mut self, most: usize) -> usize {
        let drawn = match self.random.below(4) {
            0 => 1,
            1 => 1 + self.random.below((most as u64).min(32)),
            2 => 1 + self.random.below(most as u64),
            _ => most as u64,
        };
        usize::try_from(drawn).unwrap_or(most)
    }

    fn push_piece(&mut self, now: Instant, what: PieceContent) {
        let len = what.len_bytes();
        if len == 0 {
            return;
        }
        self.taken += len as u64;
        if self.swallows {
            self.given = self.taken;
            return;
        }
        let jitter = Span { ns: self.random.below(self.options.jitter.ns + 1) };
        let arrives = now.after(self.options.delay).after(jitter);
        let arrives = self.pieces.back().map_or(arrives, |last| last.arrives.max(arrives));
        self.pieces.push_back(SentPiece { arrives, what });
    }

    /// Closes the direction: its end arrives after the data in flight.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    /// Injects `fault` before the next byte is delivered.
    pub fn inject_fault(&mut self, fault: LinkFault) {
        self.next.push_back(fault);
    }

    /// Discards all data in flight.
    pub(super) fn discard_in_flight(&mut self) {
        self.pieces.clear();
        self.given = self.taken;
    }

    /// Reads data that have arrived, up to the length of `into`.
    pub fn read_arrived(&mut self, now: Instant, into: &mut [u8]) -> ReadResult {
        let flipped = match self.apply_due_faults(now) {
            Ok(flipped) => flipped,
            Err(arrival) => return arrival,
        };
        let mut most = into.len();
        if let Some((at_byte, _)) = self.options.faults.0.first() {
            // Stop at the next fault.
            most = most.min(usize::try_from(at_byte - self.given).unwrap_or(usize::MAX));
        }
        if self.options.splits && most > 0 {
            most = self.random_split(most);
        }
        let mut count = 0;
        while count < most {
            let Some(piece) = self.pieces.front_mut().filter(|piece| piece.arrives <= now) else {
                break;
            };
            count += piece.what.take_bytes(&mut into[count..most]);
            if piece.what.len_bytes() == 0 {
                self.pieces.pop_front();
            }
        }
        self.given += count as u64;
        if count == 0 {
            return ReadResult::Nothing;
        }
        into[0] ^= flipped;
        ReadResult::Bytes(count)
    }

    /// Whether [`read_arrived`](Self::read_arrived) would return something now.
    pub fn has_arrived(&self, now: Instant) -> bool {
        self.wake_at(now) <= now
    }

    /// Time of the next delivery: bytes, the end or a fault.
    pub fn wake_at(&self, now: Instant) -> Instant {
        if self.swallows {
            return Instant::NEVER;
        }
        let arrives = self.pieces.front().map(|piece| piece.arrives);
        let at_a_fault = !self.next.is_empty()
            || self.options.faults.0.first().is_some_and(|(at_byte, _)| *at_byte <= self.given);
        let at = match arrives {
            _ if at_a_fault => now,
            Some(arrives) => arrives,
            None if self.is_closed => now,
            None => return Instant::NEVER,
        };
        at.max(self.frozen_until)
    }

    /// Applies the faults that are due. Returns the bits to invert in the next byte.
    fn apply_due_faults(&mut self, now: Instant) -> Result<u8, ReadResult> {
        let mut flipped = 0;
        while self.frozen_until <= now {
            let has_next = !self.pieces.is_empty();
            let Some(fault) = self.take_due_fault(has_next) else { break };
            match fault {
                LinkFault::Cut => return Err(ReadResult::Cut),
                LinkFault::Close => {
                    self.is_closed = true;
                    self.discard_from_now_on();
                    return Err(ReadResult::End);
                }
                LinkFault::Freeze(span) => self.frozen_until = now.after(span),
                LinkFault::BlackHole => self.discard_from_now_on(),
                LinkFault::Flip(bits) => flipped ^= bits,
            }
        }
        if self.frozen_until > now {
            return Err(ReadResult::Nothing);
        }
        if self.is_closed && self.pieces.is_empty() {
            return Err(ReadResult::End);
        }
        Ok(flipped)
    }

    fn discard_from_now_on(&mut self) {
        self.swallows = true;
        self.discard_in_flight();
    }

    /// Next fault that is due. Inverting bits requires a byte to be present.
    fn take_due_fault(&mut self, has_next: bool) -> Option<LinkFault> {
        let is_due = |fault: &LinkFault| has_next || !matches!(fault, LinkFault::Flip(_));
        if self.next.front().is_some_and(is_due) {
            return self.next.pop_front();
        }
        let (at_byte, fault) = self.options.faults.0.first()?;
        if *at_byte > self.given || !is_due(fault) {
            return None;
        }
        Some(self.options.faults.0.remove(0).1)
    }
}

impl PieceContent {
    fn len_bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory(segment, _) => segment.len_bytes as usize,
        }
    }

    /// Removes bytes from the front.
    fn take_bytes(&mut self, into: &mut [u8]) -> usize {
        let count = self.len_bytes().min(into.len());
        match self {
            Self::Bytes(bytes) => {
                for (to, from) in into.iter_mut().zip(bytes.drain(..count)) {
                    *to = from;
                }
            }
            Self::Memory(segment, memory) => {
                let len = u32::try_from(count).unwrap_or(segment.len_bytes);
                let rest = segment.len_bytes - len;
                let parts = segment.slice(0, len).zip(segment.slice(len, rest));
                if let Some((part, rest)) = parts {
                    // The segment was valid when it was accepted. If its region has gone since, the
                    // buffer stays as it is.
                    let _ = memory.load(part, &mut into[..count]);
                    *segment = rest;
                }
            }
        }
        count
    }
}

impl fmt::Debug for LinkDirection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Line")
            .field("taken", &self.taken)
            .field("given", &self.given)
            .field("pieces", &self.pieces.len())
            .field("frozen_until", &self.frozen_until)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random, Span};

    use super::{LinkDirection, LinkFault, LinkFaults, LinkOptions, ReadResult};

    const NOW: Instant = Instant { ns: 1000 };

    fn test_direction(options: LinkOptions) -> LinkDirection {
        LinkDirection::new(options, Random::new(1))
    }

    fn direction_with_faults(faults: LinkFaults) -> LinkDirection {
        test_direction(LinkOptions { faults, ..LinkOptions::default() })
    }

    fn read_all_arrived(line: &mut LinkDirection, now: Instant) -> (ReadResult, Vec<u8>) {
        let mut into = [0; 64];
        let arrival = line.read_arrived(now, &mut into);
        let count = if let ReadResult::Bytes(count) = arrival { count } else { 0 };
        (arrival, into[..count].to_vec())
    }

    #[test]
    fn exact_byte_count_arrives_before_a_cut() {
        for at in 0..=8 {
            let mut line = direction_with_faults(LinkFaults::single(at, LinkFault::Cut));
            assert_eq!(line.accept_bytes(NOW, b"abcdefgh"), 8);
            let mut came = Vec::new();
            loop {
                match read_all_arrived(&mut line, NOW) {
                    (ReadResult::Bytes(_), bytes) => came.extend(bytes),
                    (arrival, _) => break assert_eq!(arrival, ReadResult::Cut),
                }
            }
            assert_eq!(came, &b"abcdefgh"[..usize::try_from(at).unwrap()]);
        }
    }

    #[test]
    fn bytes_are_delayed() {
        let delay = Span::from_us(5);
        let mut line = test_direction(LinkOptions { delay, ..LinkOptions::default() });
        line.accept_bytes(NOW, b"abc");
        assert_eq!(read_all_arrived(&mut line, NOW).0, ReadResult::Nothing);
        assert_eq!(line.wake_at(NOW), NOW.after(delay));
        assert!(!line.has_arrived(NOW) && line.has_arrived(NOW.after(delay)));
        assert_eq!(read_all_arrived(&mut line, NOW.after(delay)).1, b"abc");
        line.close();
        assert_eq!(read_all_arrived(&mut line, NOW.after(delay)).0, ReadResult::End);
    }

    #[test]
    fn freeze_ends_and_a_black_hole_does_not() {
        let frozen = Span::from_ms(2);
        let faults =
            LinkFaults::single(2, LinkFault::Freeze(frozen)).with_fault(4, LinkFault::BlackHole);
        let mut line = direction_with_faults(faults);
        line.accept_bytes(NOW, b"abcdef");
        assert_eq!(read_all_arrived(&mut line, NOW).1, b"ab");
        assert_eq!(read_all_arrived(&mut line, NOW).0, ReadResult::Nothing);
        let later = NOW.after(frozen);
        assert_eq!(line.wake_at(NOW), later);
        assert_eq!(read_all_arrived(&mut line, later).1, b"cd");
        assert_eq!(read_all_arrived(&mut line, later).0, ReadResult::Nothing);
        assert_eq!(line.accept_bytes(later, &[7; 100]), 100, "it takes everything");
        assert_eq!(line.free_capacity_bytes(), 1 << 20);
        assert_eq!(line.wake_at(later), Instant::NEVER);
    }

    #[test]
    fn closed_direction_ends_and_a_bit_flip_changes_a_byte() {
        let faults = LinkFaults::single(3, LinkFault::Close).with_fault(1, LinkFault::Flip(1));
        let mut line = direction_with_faults(faults);
        line.accept_bytes(NOW, b"abcd");
        assert_eq!(read_all_arrived(&mut line, NOW).1, b"a");
        assert_eq!(read_all_arrived(&mut line, NOW).1, b"cc");
        assert_eq!(read_all_arrived(&mut line, NOW).0, ReadResult::End);
        assert_eq!(line.accept_bytes(NOW, b"xyz"), 3, "its sender is not told");
        assert_eq!(read_all_arrived(&mut line, NOW).0, ReadResult::End);
    }

    #[test]
    fn capacity_covers_undelivered_bytes() {
        let mut line = test_direction(LinkOptions { room_bytes: 5, ..LinkOptions::default() });
        assert_eq!(line.accept_bytes(NOW, b"abcdefgh"), 5);
        assert_eq!((line.free_capacity_bytes(), line.accept_bytes(NOW, b"x")), (0, 0));
        let mut two = [0; 2];
        assert_eq!(line.read_arrived(NOW, &mut two), ReadResult::Bytes(2));
        assert_eq!(line.free_capacity_bytes(), 2);
    }

    #[test]
    fn splits_vary_and_lose_nothing() {
        let mut sizes = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let options = LinkOptions { splits: true, ..LinkOptions::default() };
            let mut line = LinkDirection::new(options, Random::new(seed));
            let mut put = 0;
            let bytes: Vec<u8> = (0..10).collect();
            let mut came = Vec::new();
            while came.len() < bytes.len() {
                put += line.accept_bytes(NOW, &bytes[put..]);
                if let (ReadResult::Bytes(count), more) = read_all_arrived(&mut line, NOW) {
                    sizes.insert(count);
                    came.extend(more);
                }
            }
            assert_eq!(came, bytes);
        }
        assert_eq!(sizes.len(), 10, "{sizes:?}");
    }
}
