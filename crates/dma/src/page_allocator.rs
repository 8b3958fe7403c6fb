//! Page allocator with contiguous runs; used for set-up and reset, never on the I/O path.

/// Free list over `0..pages`: sorted, merged, first fit.
#[derive(Debug)]
pub(crate) struct PageAllocator {
    free: Vec<PageRun>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageRun {
    first: u64,
    count: u64,
}

impl PageAllocator {
    pub(crate) fn new(pages: u64) -> Self {
        Self { free: vec![PageRun { first: 0, count: pages }] }
    }

    /// Allocates a run of `count` pages and returns its first page, if there is one.
    pub(crate) fn allocate_run(&mut self, count: u64) -> Option<u64> {
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

    /// Frees a run.
    ///
    /// # Panics
    ///
    /// A page of the run is free already: a bug, with two owners of the same memory.
    pub(crate) fn free_run(&mut self, first: u64, count: u64) {
        let index = self.free.partition_point(|run| run.first < first);
        let after_previous = index.checked_sub(1).is_none_or(|i| self.free[i].end() <= first);
        let before_next = self.free.get(index).is_none_or(|next| first + count <= next.first);
        assert!(after_previous && before_next, "pages {first}..+{count} are free already");
        self.free.insert(index, PageRun { first, count });
        if index + 1 < self.free.len() && self.free[index].end() == self.free[index + 1].first {
            self.free[index].count += self.free.remove(index + 1).count;
        }
        if index > 0 && self.free[index - 1].end() == self.free[index].first {
            self.free[index - 1].count += self.free.remove(index).count;
        }
    }

    /// Number of free pages.
    pub(crate) fn free_pages(&self) -> u64 {
        self.free.iter().map(|run| run.count).sum()
    }
}

impl PageRun {
    fn end(self) -> u64 {
        self.first + self.count
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{PageAllocator, PageRun};

    #[test]
    fn all_pages_are_free_after_frees_in_any_order() {
        let mut random = Random::new(5);
        for _ in 0..200 {
            let mut arena = PageAllocator::new(64);
            let mut held = Vec::new();
            while let Some(first) = arena.allocate_run(1 + held.len() as u64 % 3) {
                held.push((first, 1 + held.len() as u64 % 3));
            }
            while !held.is_empty() {
                let index = usize::try_from(random.below(held.len() as u64)).unwrap();
                let (first, count) = held.swap_remove(index);
                arena.free_run(first, count);
            }
            assert_eq!(arena.free, [PageRun { first: 0, count: 64 }]);
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn freeing_pages_twice_panics() {
        let mut arena = PageAllocator::new(8);
        let first = arena.allocate_run(2).unwrap();
        arena.free_run(first, 2);
        arena.free_run(first, 1);
    }
}
