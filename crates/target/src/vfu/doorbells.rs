//! Doorbells that the client has mapped: a page of a file, looked at every turn.
//!
//! What a queue finds in a doorbell begins at zero when it is created. So words of queues that do not
//! exist are kept at zero: a client writes there only after its queue has been created. A queue that
//! is deleted is seen to be gone before another one can have its number: a deletion ends at the end of
//! a turn of the controller, a creation at the start of a later one, and here is looked between them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base::{HostMemory, Instant, Interrupts};
use ctrl::STRIDE;
use ctrl::front::MemoryFrontEnd;
use dma::{Backing, Mapping};

/// A file as long as BAR 0, of which the client maps the part with the doorbells.
#[derive(Debug)]
pub(super) struct Doorbells {
    /// The file, mapped. Only the part with the doorbells is used.
    mapping: Mapping,
    file: Arc<OwnedFd>,
    /// What was last seen, by number.
    seen: Vec<u32>,
    /// Numbers of those behind which there are queues.
    active: Vec<u32>,
    /// For which queues that is true.
    queue_changes: Option<u32>,
}

/// Where doorbells begin in BAR 0.
pub(super) const FIRST: u32 = 0x1000;
const CSTS: u32 = 0x1c;
const _: () = assert!(CSTS as usize == wire::register::offset::CSTS);
/// Between two of them.
const STEP: u32 = 4 << STRIDE;

impl Doorbells {
    /// Doorbells of `pairs` queues, in a file of `bar_bytes`.
    pub(super) fn new(bar_bytes: u32, pairs: u32) -> Result<Self, String> {
        let mapping = Mapping::new(bar_bytes as usize, Backing::Shared);
        let mapping = mapping.map_err(|error| format!("memory for doorbells: {error}"))?;
        let file = mapping.descriptor().and_then(|file| file.try_clone_to_owned().ok());
        let file = Arc::new(file.ok_or("memory for doorbells: no descriptor is left")?);
        let last = place(pairs * 2 - 1);
        mapping.word(last).ok_or("doorbells outside of BAR 0")?;
        let seen = vec![0; pairs as usize * 2];
        Ok(Self { mapping, file, seen, active: Vec::new(), queue_changes: None })
    }

    /// The same for another client: whoever had these may have them mapped for ever.
    pub(super) fn anew(&self) -> Result<Self, String> {
        let bar_bytes = u32::try_from(self.mapping.len_bytes()).unwrap_or(u32::MAX);
        Self::new(bar_bytes, u32::try_from(self.seen.len() / 2).unwrap_or(u32::MAX))
    }

    /// What the client maps.
    pub(super) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// How long the part with the doorbells is, in whole pages.
    pub(super) fn len_bytes(&self) -> u64 {
        (self.seen.len() as u64 * u64::from(STEP)).next_multiple_of(4096)
    }

    /// Rings what the client has rung. True if there was something.
    #[inline]
    pub(super) fn look<H: HostMemory + Clone, I: Interrupts>(
        &mut self,
        now: Instant,
        front: &mut MemoryFrontEnd<H, I>,
    ) -> bool {
        if self.queue_changes != Some(front.queue_changes()) {
            self.sort(front);
        }
        let mut has_news = false;
        for index in &self.active {
            let value = self.word(*index);
            let seen = &mut self.seen[*index as usize];
            if value != *seen {
                *seen = value;
                front.ring(now, *index, value);
                has_news = true;
            }
        }
        has_news
    }

    /// A write to `at` in BAR 0 that came by message.
    pub(super) fn store_at(&self, at: u32, value: u32) {
        let skip = at.wrapping_sub(FIRST);
        if skip.is_multiple_of(STEP) {
            self.store(skip / STEP, value);
        }
    }

    fn store(&self, index: u32, value: u32) {
        if let Some(word) = self.at(index).filter(|_| (index as usize) < self.seen.len()) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }

    #[inline]
    fn word(&self, index: u32) -> u32 {
        // Pairs with the release by which the client stores, after what it has stored in its rings.
        self.at(index).map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
    }

    #[inline]
    fn at(&self, index: u32) -> Option<&AtomicU32> {
        self.mapping.word(place(index))
    }

    /// Finds out which doorbells have queues, and clears the others.
    #[cold]
    fn sort<H: HostMemory + Clone, I: Interrupts>(&mut self, front: &MemoryFrontEnd<H, I>) {
        self.queue_changes = Some(front.queue_changes());
        let is_ready = front.read(CSTS, 4) & 1 != 0;
        self.active.clear();
        for index in 0..self.seen.len() {
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            if front.has_doorbell(index) {
                self.active.push(number);
            }
            if !front.has_doorbell(index) || !is_ready {
                self.seen[index] = 0;
                self.store(number, 0);
            }
        }
    }
}

/// Where doorbell `index` lies in BAR 0.
#[inline]
const fn place(index: u32) -> usize {
    FIRST as usize + index as usize * STEP as usize
}
