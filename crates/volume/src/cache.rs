//! Cache of metadata blocks within a memory budget, with least-recently-used eviction. Pages used since
//! the last completed step are not evicted: otherwise a step that needs more pages than fit would never
//! have them all at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::format::{BLOCK_BYTES, Page};

/// Metadata cache. Users hold references to pages, so evicting a page loses nothing.
#[derive(Debug)]
pub(crate) struct Cache {
    pages: BTreeMap<u64, (Arc<Page>, u64)>,
    /// Last use to address.
    uses: BTreeMap<u64, u64>,
    clock: u64,
    /// Clock value of the last completed step.
    done: u64,
    pages_max: usize,
}

/// Minimum capacity in pages: all that one change and its commit use at a time.
const PAGES_MIN: usize = 128;

impl Cache {
    /// Creates a cache of about `budget_bytes`.
    pub(crate) fn new(budget_bytes: usize) -> Self {
        let pages_max = (budget_bytes / BLOCK_BYTES).max(PAGES_MIN);
        Self { pages: BTreeMap::new(), uses: BTreeMap::new(), clock: 0, done: 0, pages_max }
    }

    pub(crate) fn get(&mut self, address: u64) -> Option<Arc<Page>> {
        let (page, used) = self.pages.get_mut(&address)?;
        self.uses.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.uses.insert(self.clock, address);
        Some(Arc::clone(page))
    }

    pub(crate) fn put(&mut self, address: u64, page: Arc<Page>) {
        self.clock += 1;
        if let Some((_, used)) = self.pages.insert(address, (page, self.clock)) {
            self.uses.remove(&used);
        }
        self.uses.insert(self.clock, address);
        self.shrink();
    }

    /// Completes a step: the pages it used may be evicted.
    pub(crate) fn evict(&mut self) {
        self.done = self.clock;
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.pages.len() > self.pages_max
            && let Some(oldest) =
                self.uses.first_entry().filter(|oldest| *oldest.key() <= self.done)
        {
            self.pages.remove(&oldest.remove());
        }
    }

    pub(crate) fn forget(&mut self, address: u64) {
        if let Some((_, used)) = self.pages.remove(&address) {
            self.uses.remove(&used);
        }
    }

    /// Drops all pages, whose contents may be outdated.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.uses.clear();
    }

    /// Number of cached pages.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }
}
