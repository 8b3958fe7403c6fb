//! Cache of metadata blocks within a memory budget, with least-recently-used eviction. Pages used since
//! the last completed step are not evicted: otherwise a step that needs more pages than fit would never
//! have them all at once.
//!
//! A lookup only stamps the page. The order of last use is found when the cache is full, for an eighth of
//! it at a time.

use std::sync::Arc;

use crate::format::{BLOCK_BYTES, Page};
use crate::page_map::PageMap;

/// Metadata cache. Users hold references to pages, so evicting a page loses nothing.
#[derive(Debug)]
pub(crate) struct MetadataCache {
    pages: PageMap<CachedPage>,
    clock: u64,
    /// Clock value of the last completed step.
    done: u64,
    pages_max: usize,
    /// Number of pages at which eviction is tried next.
    evict_at: usize,
}

#[derive(Debug)]
struct CachedPage {
    page: Arc<Page>,
    /// Clock value of its last use.
    used: u64,
}

/// Minimum capacity in pages: all that one change and its commit use at a time.
const PAGES_MIN: usize = 128;

impl MetadataCache {
    /// Creates a cache of about `budget_bytes`.
    pub(crate) fn new(budget_bytes: usize) -> Self {
        let pages_max = (budget_bytes / BLOCK_BYTES).max(PAGES_MIN);
        let evict_at = pages_max + 1;
        Self { pages: PageMap::default(), clock: 0, done: 0, pages_max, evict_at }
    }

    pub(crate) fn get(&mut self, address: u64) -> Option<Arc<Page>> {
        let cached = self.pages.get_mut(&address)?;
        self.clock += 1;
        cached.used = self.clock;
        Some(Arc::clone(&cached.page))
    }

    pub(crate) fn put(&mut self, address: u64, page: Arc<Page>) {
        self.clock += 1;
        self.pages.insert(address, CachedPage { page, used: self.clock });
        if self.pages.len() >= self.evict_at {
            self.evict_least_recently_used();
        }
    }

    /// Completes a step: the pages it used may be evicted.
    pub(crate) fn end_step(&mut self) {
        self.done = self.clock;
        if self.pages.len() > self.pages_max {
            self.evict_least_recently_used();
        }
    }

    /// Evicts the pages that were not used for longest, down to seven eighths of the capacity, as far as
    /// the step in progress has not used them.
    #[cold]
    fn evict_least_recently_used(&mut self) {
        let keep = self.pages_max - self.pages_max / 8;
        let evictable = self.pages.iter().filter(|(_, cached)| cached.used <= self.done);
        let mut oldest: Vec<(u64, u64)> =
            evictable.map(|(address, cached)| (cached.used, *address)).collect();
        let count = oldest.len().min(self.pages.len().saturating_sub(keep));
        oldest.sort_unstable();
        for (_, address) in &oldest[..count] {
            self.pages.remove(address);
        }
        // A step that uses more than the capacity does not search at each page.
        self.evict_at = (self.pages.len() + self.pages_max / 8).max(self.pages_max) + 1;
    }

    pub(crate) fn remove(&mut self, address: u64) {
        self.pages.remove(&address);
    }

    /// Drops all pages, whose contents may be outdated.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
    }

    /// Number of cached pages.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{MetadataCache, PAGES_MIN};
    use crate::format::{BlockKind, Page, PageBody};

    fn page() -> Arc<Page> {
        let body = PageBody::Node { level: 0, records: Vec::new() };
        Arc::new(Page { kind: BlockKind::Map, generation: 1, owner: 1, body })
    }

    #[test]
    fn least_recently_used_pages_are_evicted_except_those_of_the_current_step() {
        let mut cache = MetadataCache::new(0);
        for address in 0..PAGES_MIN as u64 {
            cache.put(address, page());
        }
        cache.end_step();
        assert!(cache.get(0).is_some(), "used in the next step");
        cache.put(1000, page());
        assert!(cache.len() <= PAGES_MIN);
        assert!(cache.get(0).is_some() && cache.get(1000).is_some());
        assert!(cache.get(1).is_none() && cache.get(PAGES_MIN as u64 - 1).is_some());
        // A step that uses more than fits has all of it at once.
        for address in 2000..3000 {
            cache.put(address, page());
        }
        assert!((2000..3000).all(|address| cache.get(address).is_some()));
        cache.end_step();
        assert!(cache.len() <= PAGES_MIN, "{}", cache.len());
        assert!(cache.get(2999).is_some(), "the last one used");
    }
}
