//! Sent memory that is not released yet and may be read once more, like data that are retransmitted
//! or queued in a network card.
//!
//! ```text
//!   put ── link reads or discards it ──▶ random lag ──▶ it is read once more ── released
//! ```
//!
//! The last read must return what was sent. Otherwise its owner has reused the memory too early.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{Instant, Memory, Random, Segment, Span};

/// Sent memory of one end that is not released.
pub(super) struct ZeroCopyTracker {
    lag: Span,
    jitter: Span,
    random: Random,
    pieces: VecDeque<UnreleasedPiece>,
    /// Number of released bytes.
    released: u64,
    /// Segments whose contents changed before the last read.
    strays: Vec<String>,
}

struct UnreleasedPiece {
    /// Stream offset of its end.
    end: u64,
    /// Time of the last read, once the link has finished with it.
    leaves: Option<Instant>,
    /// Segment and original contents. None for bytes that were copied.
    memory: Option<(Segment, Arc<dyn Memory>, Vec<u8>)>,
}

impl ZeroCopyTracker {
    pub(super) fn new(lag: Span, jitter: Span, random: Random) -> Self {
        Self { lag, jitter, random, pieces: VecDeque::new(), released: 0, strays: Vec::new() }
    }

    /// Records bytes that the link has copied.
    pub(super) fn record_copied(&mut self, end: u64) {
        self.pieces.push_back(UnreleasedPiece { end, leaves: None, memory: None });
    }

    /// Records the first `len_bytes` of `segment` as sent.
    pub(super) fn record_segment(
        &mut self,
        end: u64,
        segment: Segment,
        memory: &Arc<dyn Memory>,
        len_bytes: usize,
    ) {
        let mut was = vec![0; len_bytes];
        let part = u32::try_from(len_bytes).ok().and_then(|len| segment.slice(0, len));
        let part = part.unwrap_or(segment);
        // The segment was valid when the link accepted it.
        let _ = memory.load(part, &mut was);
        let memory = Some((part, Arc::clone(memory), was));
        self.pieces.push_back(UnreleasedPiece { end, leaves: None, memory });
    }

    /// Records that the link has finished with the bytes before `given`. Returns the number of
    /// released bytes.
    pub(super) fn release_delivered(&mut self, now: Instant, given: u64) -> u64 {
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
        while let Some(piece) = self.pieces.pop_front_if(|piece| piece.is_release_due(now)) {
            self.released = piece.end;
            self.strays.extend(piece.content_error());
        }
        self.released
    }

    /// Whether [`release_delivered`](Self::release_delivered) would release something.
    pub(super) fn has_releasable(&self, now: Instant) -> bool {
        self.pieces.front().is_some_and(|piece| piece.is_release_due(now))
    }

    /// Segments whose contents changed before the last read.
    pub(super) fn changed_segments(&self) -> &[String] {
        &self.strays
    }
}

impl UnreleasedPiece {
    fn is_release_due(&self, now: Instant) -> bool {
        self.leaves.is_some_and(|leaves| leaves <= now)
    }

    /// Error if the contents have changed.
    fn content_error(&self) -> Option<String> {
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
