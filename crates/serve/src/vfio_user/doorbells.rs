//! Doorbells mapped by the client: a shared page that is polled on every iteration.
//!
//! A doorbell must read zero when its queue is created, so words without a queue are kept at zero:
//! the client writes them only after the creation. A deleted queue is always noticed before another
//! one can reuse its number: a deletion completes at the end of a controller iteration, a creation
//! at the start of a later one, and the doorbells are polled in between.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{Error, Instant, Interrupts, RingMemory};
use tenmil_dma::{MemoryBacking, MemoryMapping};
use tenmil_nvme_controller::STRIDE;
use tenmil_nvme_controller::transport::MemoryTransport;

/// File of the size of BAR 0, of which the client maps the doorbell part.
#[derive(Debug)]
pub(super) struct DoorbellPage {
    /// Mapping of the file. Only the doorbell part is used.
    mapping: MemoryMapping,
    file: Arc<OwnedFd>,
    /// Last value of each doorbell.
    generation_seen: Vec<u32>,
    /// Doorbells that have a queue.
    active: Vec<u32>,
    /// Queue change counter of the controller for which `active` is valid.
    queue_changes: Option<u32>,
}

/// Offset of the first doorbell in BAR 0.
pub(super) const FIRST: u32 = 0x1000;
const CSTS: u32 = 0x1c;
const _: () = assert!(CSTS as usize == tenmil_wire::register::offset::CSTS);
/// Distance between two doorbells.
const STEP: u32 = 4 << STRIDE;

impl DoorbellPage {
    /// Creates doorbells for `pairs` queues, in a file of `bar_bytes`.
    pub(super) fn new(bar_bytes: u32, pairs: u32) -> Result<Self, Error> {
        let mapping = MemoryMapping::new(bar_bytes as usize, MemoryBacking::Shared);
        let mapping = mapping
            .map_err(|error| format!("memory for doorbells: {error}"))
            .map_err(Error::environment)?;
        let file = mapping.descriptor().and_then(|file| file.try_clone_to_owned().ok());
        let file = Arc::new(
            file.ok_or("memory for doorbells: no descriptor is left")
                .map_err(Error::environment)?,
        );
        let last = doorbell_offset(pairs * 2 - 1);
        mapping
            .shared_word(last)
            .ok_or("doorbells outside of BAR 0")
            .map_err(Error::environment)?;
        let generation_seen = vec![0; pairs as usize * 2];
        Ok(Self { mapping, file, generation_seen, active: Vec::new(), queue_changes: None })
    }

    /// Creates new doorbells for the next client: earlier clients may keep the old ones mapped.
    pub(super) fn new_for_next_client(&self) -> Result<Self, Error> {
        let bar_bytes = u32::try_from(self.mapping.len_bytes()).unwrap_or(u32::MAX);
        Self::new(bar_bytes, u32::try_from(self.generation_seen.len() / 2).unwrap_or(u32::MAX))
    }

    /// File that the client maps.
    pub(super) fn shared_file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Length of the doorbell part, in whole pages.
    pub(super) fn len_bytes(&self) -> u64 {
        (self.generation_seen.len() as u64 * u64::from(STEP)).next_multiple_of(4096)
    }

    /// Forwards changed doorbells to the controller. Returns whether there were any.
    #[inline]
    pub(super) fn poll_doorbells<H: RingMemory + Clone, I: Interrupts>(
        &mut self,
        now: Instant,
        front: &mut MemoryTransport<H, I>,
    ) -> bool {
        if self.queue_changes != Some(front.queue_change_count()) {
            self.update_polled_doorbells(front);
        }
        let mut has_new_events = false;
        for index in &self.active {
            let value = self.load_doorbell(*index);
            let generation_seen = &mut self.generation_seen[*index as usize];
            if value != *generation_seen {
                *generation_seen = value;
                front.write_doorbell(now, *index, value);
                has_new_events = true;
            }
        }
        has_new_events
    }

    /// Stores a doorbell write that arrived by message at offset `at` of BAR 0.
    pub(super) fn store_at_offset(&self, at: u32, value: u32) {
        let skip = at.wrapping_sub(FIRST);
        if skip.is_multiple_of(STEP) {
            self.store_doorbell(skip / STEP, value);
        }
    }

    fn store_doorbell(&self, index: u32, value: u32) {
        if let Some(word) =
            self.doorbell_cell(index).filter(|_| (index as usize) < self.generation_seen.len())
        {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }

    #[inline]
    fn load_doorbell(&self, index: u32) -> u32 {
        // Acquire; pairs with the release store of the client, which follows its writes to the
        // rings.
        self.doorbell_cell(index).map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
    }

    #[inline]
    fn doorbell_cell(&self, index: u32) -> Option<&AtomicU32> {
        self.mapping.shared_word(doorbell_offset(index))
    }

    /// Determines which doorbells have a queue, and clears the others.
    #[cold]
    fn update_polled_doorbells<H: RingMemory + Clone, I: Interrupts>(
        &mut self,
        front: &MemoryTransport<H, I>,
    ) {
        self.queue_changes = Some(front.queue_change_count());
        let is_ready = front.read_register(CSTS, 4) & 1 != 0;
        self.active.clear();
        for index in 0..self.generation_seen.len() {
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            if front.has_doorbell(index) {
                self.active.push(number);
            }
            if !front.has_doorbell(index) || !is_ready {
                self.generation_seen[index] = 0;
                self.store_doorbell(number, 0);
            }
        }
    }
}

/// Offset of a doorbell in BAR 0.
#[inline]
const fn doorbell_offset(index: u32) -> usize {
    FIRST as usize + index as usize * STEP as usize
}
