//! Completion side of a queue pair: from the ring to completions for the caller.

use tenmil_base::{
    CompletionBatch, CompletionEntry, CompletionRing, Dma, Doorbell, Instant, IoCompletion,
    IoStatus,
};

use super::{QueuePair, SplitTracker, distance};
use crate::fast_path::CompletionDoorbell;
use crate::queue_link::ResetReason;
use crate::slot::{CompleteCursor, EndedCommand, InvalidCompletion, SlotFlags};

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    #[inline(always)]
    pub(crate) fn poll_with<P: SplitTracker>(
        &mut self,
        now: Instant,
        answers: &mut CompletionBatch,
        parents: &mut P,
    ) -> usize {
        self.polls += 1;
        let count = if self.link.state_word() == self.ordinary {
            if now >= self.scan_at {
                self.scan(now);
            }
            answers.fill(|places| self.take_completions(places, parents))
        } else {
            self.poll_slow(now, answers, parents)
        };
        self.idle_polls += u64::from(count == 0);
        count
    }

    /// Consumes completion entries, writes completions into `places` and returns their number.
    #[inline(always)]
    fn take_completions<P: SplitTracker>(
        &mut self,
        places: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize {
        // Most polls find nothing, and must be cheap.
        if self.completion.load(self.head, self.phase).is_none() {
            self.ring_for_what_was_taken();
            return 0;
        }
        let before = self.unrung;
        let (mut written, mut last) = (0, 0);
        // Each entry yields at most one completion; the limit also bounds the loop for an endless stream
        // of invalid entries.
        let mut limit = places.len().min(self.completion_depth as usize);
        while written < limit {
            let taken = if self.techniques.completion_doorbell == CompletionDoorbell::Each {
                self.take_one(&mut places[written], &mut last)
            } else {
                self.take_plain(&mut places[written..limit], &mut last)
            };
            written += taken.plain;
            match taken.end {
                ScanEnd::Empty => break,
                ScanEnd::BatchFull => {}
                ScanEnd::NeedsSlowPath(entry) => match self.end_unusual(&entry, parents) {
                    Some(answer) => {
                        places[written] = answer;
                        written += 1;
                    }
                    None => limit -= 1,
                },
            }
        }
        if self.unrung == before {
            self.ring_for_what_was_taken();
        } else {
            self.note_fetched(last);
        }
        written
    }

    /// Writes the completion doorbell if it is still due, because nothing was submitted since the entries
    /// were consumed.
    #[inline(always)]
    fn ring_for_what_was_taken(&mut self) {
        if self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll {
            self.ring_completion();
        }
    }

    /// [`take_completions`](Self::take_completions) off the fast path.
    #[inline(never)]
    pub(super) fn take_completions_slow<P: SplitTracker>(
        &mut self,
        answers: &mut CompletionBatch,
        parents: &mut P,
    ) -> usize {
        answers.fill(|places| self.take_completions(places, parents))
    }

    /// Consumes completions of commands without flags, up to the end of the ring. Stores the second half
    /// of the last entry in `last`.
    ///
    /// Not inlined: the separate loop keeps all its values in registers.
    #[inline(never)]
    #[expect(clippy::cast_possible_truncation, reason = "no more than the ring has entries")]
    fn take_plain(&mut self, places: &mut [IoCompletion], last: &mut u64) -> RingScan {
        let mut slots = self.slots.complete_many();
        let run = places.len().min((self.completion_depth - self.head) as usize);
        let (head, phase) = (self.head, self.phase);
        let mut unusual = None;
        let plain =
            self.completion.load_entries(head, phase, &mut places[..run], |entry, place| {
                let is_plain = answer_plain(&mut slots, &entry, place);
                if !is_plain {
                    unusual = Some(entry);
                }
                is_plain
            });
        slots.finish(plain);
        let count = plain as u32 + u32::from(unusual.is_some());
        if let Some(entry) =
            count.checked_sub(1).and_then(|last| self.completion.load(head + last, phase))
        {
            *last = entry[1];
        }
        self.advance(count);
        let end = match unusual {
            Some(entry) => ScanEnd::NeedsSlowPath(entry),
            None if plain == run => ScanEnd::BatchFull,
            None => ScanEnd::Empty,
        };
        RingScan { plain, end }
    }

    /// Consumes one completion and writes the doorbell.
    fn take_one(&mut self, place: &mut IoCompletion, last: &mut u64) -> RingScan {
        let before = self.unrung;
        let taken = self.take_plain(core::slice::from_mut(place), last);
        if self.unrung != before {
            self.ring_completion();
        }
        taken
    }

    #[inline(always)]
    fn advance(&mut self, count: u32) {
        self.head += count;
        self.unrung += count;
        if self.head >= self.completion_depth {
            self.head = 0;
            self.phase = !self.phase;
        }
    }

    /// Handles a completion off the fast path: a command with flags, or an invalid entry.
    #[cold]
    fn end_unusual<P: SplitTracker>(
        &mut self,
        entry: &CompletionEntry,
        parents: &mut P,
    ) -> Option<IoCompletion> {
        match self.slots.complete(cid_in(entry)) {
            Ok(ended) => {
                let outcome = self.injected_outcome(cid_in(entry), ended.mark, outcome_in(entry));
                complete_special(ended, outcome, result_in(entry), parents)
            }
            Err(nonsense) => {
                self.report(nonsense);
                None
            }
        }
    }

    /// Checks the submission head (SQHD): it must be between its previous value and the tail. Only the
    /// last completion of a poll is checked.
    #[inline(always)]
    fn note_fetched(&mut self, second_half: u64) {
        let depth = self.submission_depth;
        let before = distance(self.fetched, self.tail, depth);
        let head = low_half(second_half);
        let fetched = u32::from(head);
        if fetched >= depth || distance(fetched, self.tail, depth) > before {
            self.report(InvalidCompletion::SubmissionHead { head });
        } else {
            self.fetched = fetched;
        }
    }

    #[inline]
    pub(super) fn ring_completion(&mut self) {
        self.completion_doorbell.ring(self.head);
        self.unrung = 0;
        self.completion_rings += 1;
    }

    /// Counts an invalid completion, which is skipped, and requests a controller reset.
    #[cold]
    fn report(&mut self, nonsense: InvalidCompletion) {
        self.cold.nonsense_count += 1;
        self.cold.nonsense = Some(nonsense);
        self.link.request_reset(ResetReason::InvalidCompletion(nonsense));
    }
}

/// Progress of a scan of the ring.
struct RingScan {
    /// Completions written for commands without flags.
    plain: usize,
    end: ScanEnd,
}

/// Reason why the scan stopped.
enum ScanEnd {
    /// The ring has no further entries.
    Empty,
    /// No space for completions is left, or the end of the ring is reached.
    BatchFull,
    /// This entry needs the slow path.
    NeedsSlowPath(CompletionEntry),
}

/// Completes a command without flags; returns false, without effect, if it has flags. The fields are
/// stored individually: a completion assembled elsewhere and copied would stall on its parts.
#[inline(always)]
fn answer_plain(
    slots: &mut CompleteCursor<'_>,
    entry: &CompletionEntry,
    place: &mut IoCompletion,
) -> bool {
    let Some(token) = slots.complete_plain(dword3_in(entry)) else { return false };
    place.token = token;
    place.status = outcome_in(entry);
    place.result = result_in(entry);
    true
}

/// Fields of a completion in the two halves in which it is loaded (Base 2.1 §4.2.1).
///
/// ```text
///   first   DW1 63:32 | DW0 31:0
///   second  status 63:49 | phase 48 | CID 47:32 | SQID 31:16 | SQHD 15:0
/// ```
#[inline]
const fn cid_in(entry: &CompletionEntry) -> u16 {
    low_half(entry[1] >> 32)
}

#[inline]
const fn dword3_in(entry: &CompletionEntry) -> u32 {
    (entry[1] >> 32) as u32
}

#[inline]
const fn outcome_in(entry: &CompletionEntry) -> IoStatus {
    IoStatus(low_half(entry[1] >> 49))
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "dword 0 is the low half")]
const fn result_in(entry: &CompletionEntry) -> u32 {
    entry[0] as u32
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are what is wanted")]
const fn low_half(bits: u64) -> u16 {
    bits as u16
}

/// Completion of a command with flags, if it is complete.
#[cold]
pub(super) fn complete_special<P: SplitTracker>(
    ended: EndedCommand,
    outcome: IoStatus,
    result: u32,
    parents: &mut P,
) -> Option<IoCompletion> {
    if ended.mark.has(SlotFlags::CHILD) {
        return parents.child_ended(ended.token, outcome, result);
    }
    Some(IoCompletion { token: ended.token, status: outcome, result })
}
