//! Answers that lie ready until somebody polls.

use base::{Answer, Answers};

/// A bounded queue of answers, first in, first out, that takes and gives them by the batch.
///
/// ```text
///   0        taken            len     2 × depth
///   | given  | waiting        |       |           moved to the front when the end is reached,
///   which is at most one move per `depth` answers
/// ```
#[derive(Debug)]
pub(crate) struct Ready {
    answers: Vec<Answer>,
    taken: usize,
    depth: usize,
}

impl Ready {
    /// An empty queue for at most `depth` answers. It has memory for as many as it ever had.
    pub(crate) fn with_depth(depth: u32) -> Self {
        let depth = depth as usize;
        Self { answers: Vec::new(), taken: 0, depth }
    }

    /// How many answers wait.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.answers.len() - self.taken
    }

    /// How many more there is room for.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.depth - self.len()
    }

    /// Appends answers; the caller has looked at [`room`](Self::room).
    #[inline]
    pub(crate) fn extend(&mut self, answers: impl ExactSizeIterator<Item = Answer>) {
        assert!(answers.len() <= self.room(), "more answers than there may be outstanding");
        if self.answers.len() + answers.len() > 2 * self.depth {
            self.make_room();
        }
        self.answers.extend(answers);
    }

    /// Moves what waits to the front.
    #[cold]
    fn make_room(&mut self) {
        self.answers.drain(..self.taken);
        self.taken = 0;
    }

    /// Appends one answer.
    #[inline]
    pub(crate) fn push(&mut self, answer: Answer) {
        assert!(self.room() > 0, "more answers than there may be outstanding");
        if self.answers.len() == 2 * self.depth {
            self.make_room();
        }
        self.answers.push(answer);
    }

    /// Moves as many as there is room for, oldest first, and returns how many that were.
    #[inline]
    pub(crate) fn give(&mut self, answers: &mut Answers) -> usize {
        let count = self.len().min(answers.room());
        answers.append(&self.answers[self.taken..self.taken + count]);
        self.taken += count;
        if self.taken == self.answers.len() {
            self.answers.clear();
            self.taken = 0;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use base::{Answer, Answers, Outcome, Random};

    use super::Ready;

    fn answer(token: u64) -> Answer {
        Answer { token, outcome: Outcome::SUCCESS, result: 0 }
    }

    #[test]
    fn answers_come_out_as_they_went_in_whatever_the_batches() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let mut ready = Ready::with_depth(7);
            let (mut put, mut got) = (0, 0);
            let mut draw = |bound: usize| usize::try_from(random.below(bound as u64)).unwrap();
            for _ in 0..500 {
                let count = draw(ready.room() + 1);
                ready.extend((0..count).map(|offset| answer(put + offset as u64)));
                put += count as u64;
                let mut answers = Answers::with_capacity(draw(9));
                assert_eq!(ready.give(&mut answers), answers.as_slice().len());
                for given in answers.drain() {
                    assert_eq!(given.token, got);
                    got += 1;
                }
                assert_eq!(ready.len() as u64, put - got);
                assert!(
                    ready.answers.capacity() <= 4 * 7,
                    "it grows to twice its depth and stays so"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "outstanding")]
    fn one_more_than_the_depth_is_our_own_mistake() {
        Ready::with_depth(1).extend([answer(0), answer(1)].into_iter());
    }
}
