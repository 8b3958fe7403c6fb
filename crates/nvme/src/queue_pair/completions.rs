//! The completion side: from the ring to answers.

use base::{Answer, Answers, CompletionEntry, CompletionRing, Dma, Doorbell, Instant, Outcome};

use super::{Parents, QueuePair, distance};
use crate::link::ResetReason;
use crate::slot::{Ended, Mark, Nonsense};
use crate::techniques::CompletionDoorbell;

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    #[inline(always)]
    pub(crate) fn poll_with<P: Parents>(
        &mut self,
        now: Instant,
        answers: &mut Answers,
        parents: &mut P,
    ) -> usize {
        self.polls += 1;
        let count = if self.link.word() == self.ordinary {
            if now >= self.scan_at {
                self.scan(now);
            }
            answers.fill(|places| self.take_completions(places, parents))
        } else {
            self.poll_ordered(now, answers, parents)
        };
        self.idle_polls += u64::from(count == 0);
        count
    }

    /// Takes what has completed, writes answers into `places` and returns how many.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "at most as many as the ring has entries")]
    fn take_completions<P: Parents>(&mut self, places: &mut [Answer], parents: &mut P) -> usize {
        // Each completion gives at most one answer, and nonsense must not keep us here for ever.
        let budget = places.len().min(self.completion_depth as usize);
        let mut line = [CompletionEntry::default(); 4];
        let (mut taken, mut written) = (0, 0);
        while taken < budget {
            let count = self.load(&mut line).min(budget - taken);
            let Some(entries) = line.get(..count) else { break };
            let Some(last) = entries.last() else { break };
            self.note_fetched(head_in(last));
            if self.techniques.slot_lookahead {
                entries.iter().for_each(|entry| self.slots.touch(cid_in(entry)));
            }
            for entry in entries {
                if let Some(answer) = self.end(entry, parents)
                    && let Some(place) = places.get_mut(written)
                {
                    *place = answer;
                    written += 1;
                }
            }
            taken += count;
            self.advance(count as u32);
        }
        if self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll {
            self.ring_completion();
        }
        written
    }

    /// [`take_completions`](Self::take_completions), where it does not matter.
    #[inline(never)]
    pub(super) fn take_completions_slowly<P: Parents>(
        &mut self,
        answers: &mut Answers,
        parents: &mut P,
    ) -> usize {
        answers.fill(|places| self.take_completions(places, parents))
    }

    /// Copies completions out of their ring and returns how many.
    #[inline(always)]
    fn load(&self, line: &mut [CompletionEntry; 4]) -> usize {
        if self.by_line {
            return self.completion.load_line(self.head, self.phase, line);
        }
        let Some(entry) = self.completion.load(self.head, self.phase) else { return 0 };
        line[0] = entry;
        1
    }

    /// Ends the command that a completion names.
    #[inline(always)]
    fn end<P: Parents>(&mut self, entry: &CompletionEntry, parents: &mut P) -> Option<Answer> {
        let (result, outcome) = (result_in(entry), outcome_in(entry));
        match self.slots.complete(cid_in(entry)) {
            Ok(Ended { token, mark: Mark::NONE }) => Some(Answer { token, outcome, result }),
            Ok(ended) => {
                let outcome = self.injected_outcome(cid_in(entry), ended.mark, outcome);
                end_special(ended, outcome, result, parents)
            }
            Err(nonsense) => {
                self.report(nonsense);
                None
            }
        }
    }

    /// Checks how far the controller says it has read (SQHD): between where it was and our tail.
    /// Of the completions of a line the last is looked at; nothing is made of the others.
    #[inline(always)]
    fn note_fetched(&mut self, head: u16) {
        let depth = self.submission_depth;
        let before = distance(self.fetched, self.tail, depth);
        let fetched = u32::from(head);
        if fetched >= depth || distance(fetched, self.tail, depth) > before {
            self.report(Nonsense::SubmissionHead { head });
        } else {
            self.fetched = fetched;
        }
    }

    #[inline(always)]
    fn advance(&mut self, count: u32) {
        self.head += count;
        self.unrung += count;
        if self.head >= self.completion_depth {
            self.head = 0;
            self.phase = !self.phase;
        }
        if self.techniques.completion_prefetch {
            self.completion.prefetch(self.head);
        }
        if self.techniques.completion_doorbell == CompletionDoorbell::Each {
            self.ring_completion();
        }
    }

    #[inline]
    pub(super) fn ring_completion(&mut self) {
        self.completion_doorbell.ring(self.head);
        self.unrung = 0;
        self.completion_rings += 1;
    }

    /// A completion that cannot be is counted and skipped, and the controller half is asked for a
    /// reset.
    #[cold]
    fn report(&mut self, nonsense: Nonsense) {
        self.cold.nonsense_count += 1;
        self.cold.nonsense = Some(nonsense);
        self.link.want_reset(ResetReason::Nonsense(nonsense));
    }
}

/// The fields of a completion in the two halves that it is loaded in (Base 2.1 §4.2.1).
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
const fn head_in(entry: &CompletionEntry) -> u16 {
    low_half(entry[1])
}

#[inline]
const fn outcome_in(entry: &CompletionEntry) -> Outcome {
    Outcome(low_half(entry[1] >> 49))
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

/// The answer to a command that is special, if there is one yet.
#[cold]
pub(super) fn end_special<P: Parents>(
    ended: Ended,
    outcome: Outcome,
    result: u32,
    parents: &mut P,
) -> Option<Answer> {
    if ended.mark.has(Mark::CHILD) {
        return parents.child_ended(ended.token, outcome, result);
    }
    Some(Answer { token: ended.token, outcome, result })
}
