//! Bounded queue of completions that wait for a poll.

use tenmil_base::{CompletionBatch, IoCompletion};

/// A bounded FIFO of completions, filled and drained in batches.
///
/// ```text
///   0         taken             len     2 × depth
///   | drained | waiting         |       |         moved to the front when the end is reached,
///   which is at most one move per `depth` completions
/// ```
#[derive(Debug)]
pub struct CompletionQueue {
    completions: Vec<IoCompletion>,
    taken: usize,
    depth: usize,
}

impl CompletionQueue {
    /// An empty queue for at most `depth` completions. Its memory grows on demand and is kept.
    pub fn with_depth(depth: u32) -> Self {
        let depth = depth as usize;
        Self { completions: Vec::new(), taken: 0, depth }
    }

    /// Number of waiting completions.
    #[inline]
    pub fn len(&self) -> usize {
        self.completions.len() - self.taken
    }

    /// Whether none is waiting.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of free entries.
    #[inline]
    pub fn free_count(&self) -> usize {
        self.depth - self.len()
    }

    /// Appends completions; the caller has checked [`free_count`](Self::free_count).
    #[inline]
    pub fn extend(&mut self, completions: impl ExactSizeIterator<Item = IoCompletion>) {
        assert!(
            completions.len() <= self.free_count(),
            "more completions than requests outstanding"
        );
        if self.completions.len() + completions.len() > 2 * self.depth {
            self.compact();
        }
        self.completions.extend(completions);
    }

    /// Moves waiting completions to the front.
    #[cold]
    fn compact(&mut self) {
        self.completions.drain(..self.taken);
        self.taken = 0;
    }

    /// Appends one completion.
    #[inline]
    pub fn push(&mut self, completion: IoCompletion) {
        assert!(self.free_count() > 0, "more completions than requests outstanding");
        if self.completions.len() == 2 * self.depth {
            self.compact();
        }
        self.completions.push(completion);
    }

    /// Moves completions, oldest first, as far as `completions` has free entries. Returns their number.
    #[inline]
    pub fn drain_into(&mut self, completions: &mut CompletionBatch) -> usize {
        let count = self.len().min(completions.remaining());
        completions.append(&self.completions[self.taken..self.taken + count]);
        self.taken += count;
        if self.taken == self.completions.len() {
            self.completions.clear();
            self.taken = 0;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{CompletionBatch, IoCompletion, IoStatus, Random};

    use super::CompletionQueue;

    fn sample_completion(token: u64) -> IoCompletion {
        IoCompletion { token, status: IoStatus::SUCCESS, result: 0 }
    }

    #[test]
    fn completion_queue_is_fifo_for_any_batch_size() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let mut ready = CompletionQueue::with_depth(7);
            let (mut put, mut got) = (0, 0);
            let mut draw = |bound: usize| usize::try_from(random.below(bound as u64)).unwrap();
            for _ in 0..500 {
                let count = draw(ready.free_count() + 1);
                ready.extend((0..count).map(|offset| sample_completion(put + offset as u64)));
                put += count as u64;
                let mut completions = CompletionBatch::with_capacity(draw(9));
                assert_eq!(ready.drain_into(&mut completions), completions.as_slice().len());
                for given in completions.drain() {
                    assert_eq!(given.token, got);
                    got += 1;
                }
                assert_eq!(ready.len() as u64, put - got);
                assert!(
                    ready.completions.capacity() <= 4 * 7,
                    "it grows to twice its depth and stays so"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "outstanding")]
    fn pushing_beyond_the_depth_panics() {
        CompletionQueue::with_depth(1)
            .extend([sample_completion(0), sample_completion(1)].into_iter());
    }
}
