//! Runs of pages, handed out and taken back. For set-up and reset; never on the way of an I/O.

/// A free list over `0..pages`, sorted and merged, first fit.
#[derive(Debug)]
pub(crate) struct Arena {
    free: Vec<Run>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u64,
    count: u64,
}

impl Arena {
    pub(crate) fn new(pages: u64) -> Self {
        Self { free: vec![Run { first: 0, count: pages }] }
    }

    /// The first page of a run of `count`, if there is one.
    pub(crate) fn allocate(&mut self, count: u64) -> Option<u64> {
        let index = self.free.iter().position(|run| run.count >= count)?;
        let run = &mut self.free[index];
        let first = run.first;
        run.first += count;
        run.count -= count;
        if run.count == 0 {
            self.free.remove(index);
        }
        Some(first)
    }

    /// Takes a run back.
    ///
    /// # Panics
    ///
    /// If any of it is free already: that is a mistake of ours, and memory that two think is theirs.
    pub(crate) fn release(&mut self, first: u64, count: u64) {
        let index = self.free.partition_point(|run| run.first < first);
        let after_previous = index.checked_sub(1).is_none_or(|i| self.free[i].end() <= first);
        let before_next = self.free.get(index).is_none_or(|next| first + count <= next.first);
        assert!(after_previous && before_next, "pages {first}..+{count} are free already");
        self.free.insert(index, Run { first, count });
        if index + 1 < self.free.len() && self.free[index].end() == self.free[index + 1].first {
            self.free[index].count += self.free.remove(index + 1).count;
        }
        if index > 0 && self.free[index - 1].end() == self.free[index].first {
            self.free[index - 1].count += self.free.remove(index).count;
        }
    }

    /// Pages that are free.
    pub(crate) fn free_pages(&self) -> u64 {
        self.free.iter().map(|run| run.count).sum()
    }
}

impl Run {
    fn end(self) -> u64 {
        self.first + self.count
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::{Arena, Run};

    #[test]
    fn everything_comes_back_whatever_the_order() {
        let mut random = Random::new(5);
        for _ in 0..200 {
            let mut arena = Arena::new(64);
            let mut held = Vec::new();
            while let Some(first) = arena.allocate(1 + held.len() as u64 % 3) {
                held.push((first, 1 + held.len() as u64 % 3));
            }
            while !held.is_empty() {
                let index = usize::try_from(random.below(held.len() as u64)).unwrap();
                let (first, count) = held.swap_remove(index);
                arena.release(first, count);
            }
            assert_eq!(arena.free, [Run { first: 0, count: 64 }]);
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn giving_the_same_pages_back_twice_is_our_own_mistake() {
        let mut arena = Arena::new(8);
        let first = arena.allocate(2).unwrap();
        arena.release(first, 2);
        arena.release(first, 1);
    }
}
