//! Buddy allocator: pages allocated in blocks of powers of two, each aligned to its size.
//!
//! ```text
//!   order 2   |       free        |                   |
//!   order 1                       |  free   |         |
//!   order 0                                 |free|used|     a block and its buddy merge when both
//!                                                           are free
//! ```

/// Free blocks of each order, as bitmaps.
#[derive(Debug)]
pub(super) struct BuddyAllocator {
    orders: Vec<BuddyOrder>,
    free_pages: u32,
}

#[derive(Debug)]
struct BuddyOrder {
    /// Bit `n` is set if the block that starts at page `n << order` is free.
    words: Vec<u64>,
    count: u32,
    /// Index of the first word that may have a bit set.
    first: usize,
}

impl BuddyAllocator {
    /// Creates an allocator with `pages` free pages, in blocks of at most `1 << order_max` pages.
    pub(super) fn new(pages: u32, order_max: u8) -> Self {
        let order = |order: u8| {
            let blocks = (pages >> order) as usize;
            BuddyOrder { words: vec![0; blocks.div_ceil(64)], count: 0, first: 0 }
        };
        let mut buddy = Self { orders: (0..=order_max).map(order).collect(), free_pages: 0 };
        let mut page = 0;
        while page < pages {
            let fits = (0..=order_max)
                .rev()
                .find(|&order| page.is_multiple_of(1 << order) && pages - page >= 1 << order);
            let order = fits.unwrap_or(0);
            buddy.free(page, order);
            page += 1 << order;
        }
        buddy
    }

    /// Allocates a block. Returns its first page.
    pub(super) fn allocate(&mut self, order: u8) -> Option<u32> {
        let found =
            (order..self.order_count()).find(|&from| self.free_bitmap_mut(from).count > 0)?;
        let block = self.free_bitmap_mut(found).pop_free()?;
        let page = block << found;
        // The unused remainder becomes one free block of each smaller order.
        for half in order..found {
            self.free_bitmap_mut(half).set_free((page >> half) + 1);
        }
        self.free_pages -= 1 << order;
        Some(page)
    }

    /// Whether a block of this order can be allocated.
    pub(super) fn has_block(&self, order: u8) -> bool {
        self.orders.iter().skip(order.into()).any(|order| order.count > 0)
    }

    /// Frees a block, merging it with free buddies.
    ///
    /// # Panics
    ///
    /// If it is free already.
    pub(super) fn free(&mut self, page: u32, order: u8) {
        self.free_pages += 1 << order;
        let (mut block, mut order) = (page >> order, order);
        assert!(!self.free_bitmap_mut(order).is_free(block), "page {page} is free already");
        while order + 1 < self.order_count() && self.free_bitmap_mut(order).clear_free(block ^ 1) {
            (block, order) = (block >> 1, order + 1);
        }
        self.free_bitmap_mut(order).set_free(block);
    }

    /// Number of free pages.
    pub(super) fn free_pages(&self) -> u32 {
        self.free_pages
    }

    fn order_count(&self) -> u8 {
        u8::try_from(self.orders.len()).unwrap_or(u8::MAX)
    }

    fn free_bitmap_mut(&mut self, order: u8) -> &mut BuddyOrder {
        &mut self.orders[usize::from(order)]
    }
}

impl BuddyOrder {
    fn pop_free(&mut self) -> Option<u32> {
        let at = self.first + self.words[self.first..].iter().position(|word| *word != 0)?;
        let bit = self.words[at].trailing_zeros();
        self.words[at] &= self.words[at] - 1;
        (self.first, self.count) = (at, self.count - 1);
        Some(u32::try_from(at).unwrap_or(u32::MAX) * 64 + bit)
    }

    fn set_free(&mut self, block: u32) {
        let at = block as usize / 64;
        self.words[at] |= 1 << (block % 64);
        self.count += 1;
        self.first = self.first.min(at);
    }

    fn is_free(&self, block: u32) -> bool {
        self.words.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 != 0)
    }

    /// Removes a block from the free blocks. Returns whether it was free.
    fn clear_free(&mut self, block: u32) -> bool {
        let was_free = self.is_free(block);
        if was_free {
            self.words[block as usize / 64] &= !(1 << (block % 64));
            self.count -= 1;
        }
        was_free
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tenmil_base::Random;

    use super::BuddyAllocator;

    #[test]
    fn blocks_are_aligned_disjoint_and_merge_when_freed() {
        let mut random = Random::new(7);
        for pages in [1, 7, 64, 100, 1000] {
            let mut buddy = BuddyAllocator::new(pages, 5);
            let mut leased: BTreeMap<u32, u8> = BTreeMap::new();
            for _ in 0..4000 {
                let order = u8::try_from(random.below(6)).unwrap();
                if random.below(2) == 0
                    && let Some(page) = buddy.allocate(order)
                {
                    assert!(page.is_multiple_of(1 << order) && page + (1 << order) <= pages);
                    let overlaps =
                        |(&at, &of): (&u32, &u8)| page < at + (1 << of) && at < page + (1 << order);
                    assert!(!leased.iter().any(overlaps), "page {page} twice");
                    leased.insert(page, order);
                } else if let Some((page, order)) = leased.pop_first() {
                    buddy.free(page, order);
                }
                let taken: u32 = leased.values().map(|order| 1_u32 << order).sum();
                assert_eq!(buddy.free_pages(), pages - taken);
            }
            for (page, order) in leased {
                buddy.free(page, order);
            }
            let segment = (0..pages / 32).filter(|_| buddy.allocate(5).is_some()).count();
            assert_eq!(segment, pages as usize / 32, "everything is whole again");
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn freeing_a_block_twice_panics() {
        let mut buddy = BuddyAllocator::new(8, 3);
        let page = buddy.allocate(0).unwrap();
        buddy.allocate(0).unwrap();
        buddy.free(page, 0);
        buddy.free(page, 0);
    }
}
