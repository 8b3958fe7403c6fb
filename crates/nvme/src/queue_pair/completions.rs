//! The completion side: from the ring to answers.

use base::{Answer, Answers, CompletionEntry, CompletionRing, Dma, Doorbell, Instant, Outcome};

use super::{Parents, QueuePair, distance};
use crate::link::ResetReason;
use crate::slot::{Completing, Ended, Mark, Nonsense};
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
    fn take_completions<P: Parents>(&mut self, places: &mut [Answer], parents: &mut P) -> usize {
        // Most looks find nothing, and should be over soon.
        if self.completion.load(self.head, self.phase).is_none() {
            self.ring_for_what_was_taken();
            return 0;
        }
        let before = self.unrung;
        let (mut written, mut last) = (0, 0);
        // Each completion gives at most one answer, and nonsense must not keep us here for ever.
        let mut limit = places.len().min(self.completion_depth as usize);
        while written < limit {
            let taken = if self.by_line {
                self.take_lines(&mut places[written..limit], &mut last)
            } else if self.techniques.completion_doorbell == CompletionDoorbell::Each {
                self.take_one(&mut places[written], &mut last)
            } else {
                self.take_plain(&mut places[written..limit], &mut last)
            };
            written += taken.plain;
            match taken.end {
                End::Empty => break,
                End::NoRoom => {}
                End::Unusual(entry) => match self.end_unusual(&entry, parents) {
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

    /// Where nothing was submitted since completions were taken, with whose doorbell theirs would
    /// have gone.
    #[inline(always)]
    fn ring_for_what_was_taken(&mut self) {
        if self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll {
            self.ring_completion();
        }
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

    /// Takes completions one by one, up to the end of the ring and as long as nothing is special
    /// about them. The second half of the last entry goes into `last`.
    ///
    /// Not inlined: with its loop for itself, everything that the loop needs fits into registers.
    #[inline(never)]
    #[expect(clippy::cast_possible_truncation, reason = "no more than the ring has entries")]
    fn take_plain(&mut self, places: &mut [Answer], last: &mut u64) -> Taken {
        let mut slots = self.slots.complete_many();
        let run = places.len().min((self.completion_depth - self.head) as usize);
        let (head, phase) = (self.head, self.phase);
        let mut unusual = None;
        let plain = self.completion.load_each(head, phase, &mut places[..run], |entry, place| {
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
            Some(entry) => End::Unusual(entry),
            None if plain == run => End::NoRoom,
            None => End::Empty,
        };
        Taken { plain, end }
    }

    /// As [`take_plain`](Self::take_plain), by cache lines of which a copy is worked on.
    #[inline(never)]
    #[expect(clippy::cast_possible_truncation, reason = "no more than the ring has entries")]
    fn take_lines(&mut self, places: &mut [Answer], last: &mut u64) -> Taken {
        let mut slots = self.slots.complete_many();
        let run = places.len().min((self.completion_depth - self.head) as usize);
        let mut taken = Taken { plain: 0, end: End::NoRoom };
        let mut line = [CompletionEntry::default(); 4];
        'run: while taken.plain < run {
            let head = self.head + taken.plain as u32;
            let found = self.completion.load_line(head, self.phase, &mut line);
            if found == 0 {
                taken.end = End::Empty;
                break;
            }
            if self.techniques.completion_prefetch && head + 4 < self.completion_depth {
                self.completion.prefetch(head + 4);
            }
            if self.techniques.slot_lookahead {
                line.iter().take(found).for_each(|entry| slots.touch(dword3_in(entry)));
            }
            for (entry, place) in line.iter().take(found).zip(&mut places[taken.plain..run]) {
                *last = entry[1];
                if !answer_plain(&mut slots, entry, place) {
                    taken.end = End::Unusual(*entry);
                    break 'run;
                }
                taken.plain += 1;
            }
        }
        slots.finish(taken.plain);
        self.advance(taken.plain as u32 + u32::from(matches!(taken.end, End::Unusual(_))));
        taken
    }

    /// Takes one completion and rings for it.
    fn take_one(&mut self, place: &mut Answer, last: &mut u64) -> Taken {
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

    /// Ends a command of which something is special, or none at all.
    #[cold]
    fn end_unusual<P: Parents>(
        &mut self,
        entry: &CompletionEntry,
        parents: &mut P,
    ) -> Option<Answer> {
        match self.slots.complete(cid_in(entry)) {
            Ok(ended) => {
                let outcome = self.injected_outcome(cid_in(entry), ended.mark, outcome_in(entry));
                end_special(ended, outcome, result_in(entry), parents)
            }
            Err(nonsense) => {
                self.report(nonsense);
                None
            }
        }
    }

    /// Checks how far the controller says it has read (SQHD): between where it was and our tail.
    /// Of the completions of a poll the last is looked at; nothing is made of the others.
    #[inline(always)]
    fn note_fetched(&mut self, second_half: u64) {
        let depth = self.submission_depth;
        let before = distance(self.fetched, self.tail, depth);
        let head = low_half(second_half);
        let fetched = u32::from(head);
        if fetched >= depth || distance(fetched, self.tail, depth) > before {
            self.report(Nonsense::SubmissionHead { head });
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

    /// A completion that cannot be is counted and skipped, and the controller half is asked for a
    /// reset.
    #[cold]
    fn report(&mut self, nonsense: Nonsense) {
        self.cold.nonsense_count += 1;
        self.cold.nonsense = Some(nonsense);
        self.link.want_reset(ResetReason::Nonsense(nonsense));
    }
}

/// How far a look at the ring got.
struct Taken {
    /// Commands of which nothing was special; their answers are written.
    plain: usize,
    end: End,
}

/// Why it got no further.
enum End {
    /// There is no more.
    Empty,
    /// There is no more room for answers, or no more of the ring.
    NoRoom,
    /// This one takes a closer look.
    Unusual(CompletionEntry),
}

/// Answers a command of which nothing is special; false if there is something, and then nothing was
/// done. The fields are stored one by one: an answer put together elsewhere and copied here would
/// have to wait for its parts.
#[inline(always)]
fn answer_plain(slots: &mut Completing<'_>, entry: &CompletionEntry, place: &mut Answer) -> bool {
    let Some(token) = slots.complete_plain(dword3_in(entry)) else { return false };
    place.token = token;
    place.outcome = outcome_in(entry);
    place.result = result_in(entry);
    true
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
const fn dword3_in(entry: &CompletionEntry) -> u32 {
    (entry[1] >> 32) as u32
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
