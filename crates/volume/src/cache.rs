//! Blocks of metadata that were read, as many as the budget allows; the least recently used go, but
//! none that was used since something was last done: whoever looks for more pages than there is room
//! for would never have them together.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::format::{BLOCK_BYTES, Page};

/// The cache. Whoever uses a page holds it, so that nothing is lost when it goes.
#[derive(Debug)]
pub(crate) struct Cache {
    pages: BTreeMap<u64, (Arc<Page>, u64)>,
    /// Last use to address.
    uses: BTreeMap<u64, u64>,
    clock: u64,
    /// When something was last done.
    done: u64,
    pages_max: usize,
}

/// The fewest pages that a cache may hold: all that one change and its commit touch at a time.
const PAGES_MIN: usize = 128;

impl Cache {
    /// One that takes about so many bytes.
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

    /// Something has been done: what it used may go.
    pub(crate) fn settle(&mut self) {
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

    /// Nothing of it is known to be so any more.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.uses.clear();
    }

    /// How many pages it holds.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }
}
