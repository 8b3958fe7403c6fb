//! Memory that was sent and may leave once more: as what is transmitted again, or lies in a card.
//!
//! ```text
//!   put ── the line reads it, or is cut ──▶ a lag that is drawn ──▶ it leaves once more ── released
//! ```
//!
//! What leaves last must be what was sent. If it is not, its owner had given it to somebody else.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Instant, Memory, Random, Segment, Span};

/// What one end has sent and is not told to be released.
pub(super) struct Unreleased {
    lag: Span,
    jitter: Span,
    random: Random,
    pieces: VecDeque<Piece>,
    /// Bytes that are released, from the first on.
    released: u64,
    /// What has left and was not what was sent.
    strays: Vec<String>,
}

struct Piece {
    /// Of all bytes that were ever sent, it ends before this one.
    end: u64,
    /// When it leaves for the last time, once the line has done with it.
    leaves: Option<Instant>,
    /// Where it lies and what it was; nothing for bytes that were copied.
    memory: Option<(Segment, Arc<dyn Memory>, Vec<u8>)>,
}

impl Unreleased {
    pub(super) fn new(lag: Span, jitter: Span, random: Random) -> Self {
        Self { lag, jitter, random, pieces: VecDeque::new(), released: 0, strays: Vec::new() }
    }

    /// Bytes were taken, and the line has its own copy of them.
    pub(super) fn put(&mut self, end: u64) {
        self.pieces.push_back(Piece { end, leaves: None, memory: None });
    }

    /// The first `len_bytes` of `segment` were taken.
    pub(super) fn put_memory(
        &mut self,
        end: u64,
        segment: Segment,
        memory: &Arc<dyn Memory>,
        len_bytes: usize,
    ) {
        let mut was = vec![0; len_bytes];
        let part = u32::try_from(len_bytes).ok().and_then(|len| segment.slice(0, len));
        let part = part.unwrap_or(segment);
        // It was looked at when the line took it.
        let _ = memory.load(part, &mut was);
        let memory = Some((part, Arc::clone(memory), was));
        self.pieces.push_back(Piece { end, leaves: None, memory });
    }

    /// The line has done with so many bytes. How many are released now.
    pub(super) fn settle(&mut self, now: Instant, given: u64) -> u64 {
        for piece in &mut self.pieces {
            if piece.end > given {
                break;
            }
            if piece.leaves.is_none() {
                let more = Span { ns: self.random.below(self.jitter.ns + 1) };
                let is_held = piece.memory.is_some();
                piece.leaves = Some(if is_held { now.after(self.lag).after(more) } else { now });
            }
        }
        while let Some(piece) = self.pieces.pop_front_if(|piece| piece.has_to_leave(now)) {
            self.released = piece.end;
            self.strays.extend(piece.stray());
        }
        self.released
    }

    /// Whether [`settle`](Self::settle) would release something.
    pub(super) fn has_news(&self, now: Instant) -> bool {
        self.pieces.front().is_some_and(|piece| piece.has_to_leave(now))
    }

    /// What has left and was not what was sent.
    pub(super) fn strays(&self) -> &[String] {
        &self.strays
    }
}

impl Piece {
    fn has_to_leave(&self, now: Instant) -> bool {
        self.leaves.is_some_and(|leaves| leaves <= now)
    }

    /// What is wrong with the bytes that leave, if something is.
    fn stray(&self) -> Option<String> {
        let (segment, memory, was) = self.memory.as_ref()?;
        let mut bytes = vec![0; was.len()];
        if memory.load(*segment, &mut bytes).is_err() {
            return Some(format!("{segment:?} is not there any more"));
        }
        let at = bytes.iter().zip(was).position(|(found, expected)| found != expected)?;
        let (found, expected) = (bytes[at], was[at]);
        Some(format!("byte {at} of {segment:?} left as {found:#04x}, was sent as {expected:#04x}"))
    }
}
