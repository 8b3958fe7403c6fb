//! Buffer memory of all connections: fixed in size at start and never exceeded.
//!
//! ```text
//!   BufferPool   one region: blocks of 4 KiB and up, and one reserved block of the largest size
//!     ▲ │        with a lock
//!     │ ▼
//!   BufferCache  per connection: recently used blocks, and the right to two pages
//!     ▲ │        no lock
//!     │ ▼
//!   Buffer       memory of one command; returned on drop
//! ```
//!
//! A connection that finds no free block waits in [`mod@wait_queue`]. The reserved block goes to a host
//! that holds nothing, so the largest command of every host eventually gets its buffer. No host may
//! hold more than it leaves to others. While any connection waits, no connection caches unused
//! blocks. The two pages are for in-capsule data and for what a connection cannot do without:
//! Connect and admin commands. There are as many pairs as connections are allowed, so a connection
//! without one in use always gets one; the most recently used pair is allocated first and the
//! others are never touched.
//!
//! ```text
//!   region   | blocks of 4 KiB and up … | pairs of pages … |
//! ```

mod buddy;
mod buffer;
mod buffer_cache;
mod memory_ledger;
#[cfg(test)]
mod tests;
mod wait_queue;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Error, Segment};
use tenmil_dma::{Region, RegionTable};
use tenmil_nvme_controller::controller::WakeFn;

use buddy::BuddyAllocator;
pub(super) use buffer::Buffer;
use buffer::{Block, BufferSource, MemoryAccount};
pub(super) use buffer_cache::BufferCache;
use memory_ledger::{ChargedEntries, MemoryLedger};
pub(super) use memory_ledger::{HostClass, HostMemory};
use wait_queue::{BufferWaiter, WaitQueue};

/// Handle to the buffer memory of all connections of a service.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<PoolShared>,
}

struct PoolShared {
    /// The region lives as long as any handle.
    region: Region,
    regions: RegionTable,
    order_max: u8,
    connections_max: usize,
    /// Whether any connection waits. Written under the lock.
    is_scarce: AtomicBool,
    caches: AtomicU64,
    state: Mutex<PoolState>,
}

struct PoolState {
    buddy: BuddyAllocator,
    /// Bytes of the free blocks that are reserved for hosts that a subsystem lists.
    reserved_bytes: u64,
    /// The reserved block, while it is free.
    reserve: Option<u32>,
    /// Pairs of pages that are free.
    own: Vec<u32>,
    /// Pages whose partner has not been returned yet, of pairs that are returned together.
    halves: Vec<u32>,
    /// Number of connections that are entitled to a pair.
    connections: usize,
    /// Waiting connections, oldest first.
    wait_queue: WaitQueue,
    ledger: MemoryLedger,
    /// Allocated blocks, recorded for the fuzzer.
    allocated: Option<Vec<Block>>,
}

/// Order of a connection's own two pages.
const OWN_ORDER: u8 = 1;
/// log2 of the page size.
const PAGE_SHIFT: u32 = 12;
/// Size of a connection's own two pages in bytes.
pub(super) const OWN_BYTES: u32 = 1 << (PAGE_SHIFT + OWN_ORDER as u32);
/// Fraction of the pool that is reserved for hosts that a subsystem lists.
const RESERVED_PART: u32 = 8;
/// Largest pool: offsets in a segment have 31 bits.
const BYTES_MAX: u64 = 1 << 31;

/// Smallest block order that holds `len_bytes`.
#[inline]
fn block_order_for(len_bytes: u32) -> u8 {
    if len_bytes <= 1 << PAGE_SHIFT {
        return 0;
    }
    let pages = len_bytes.div_ceil(1 << PAGE_SHIFT);
    u8::try_from(pages.next_power_of_two().trailing_zeros()).unwrap_or(u8::MAX)
}

impl BufferPool {
    /// Creates a pool of `bytes` in a region of its own, for transfers of up to
    /// `transfer_bytes_max` and for `connections_max` connections, each with its own pages.
    ///
    /// # Errors
    ///
    /// If `bytes` is too small for one transfer and the reserved parts, too large, or cannot be
    /// allocated.
    pub fn new(
        regions: &RegionTable,
        bytes: u64,
        transfer_bytes_max: u32,
        connections_max: usize,
    ) -> Result<Self, Error> {
        let order_max = block_order_for(transfer_bytes_max);
        let layout = PoolLayout::new(bytes, order_max, connections_max)?;
        let bytes = u64::from(layout.pages) << PAGE_SHIFT;
        let len = usize::try_from(bytes).map_err(Error::environment)?;
        let region = regions
            .allocate_region(len)
            .map_err(|why| format!("memory for connections: {bytes} bytes: {why}"))
            .map_err(Error::environment)?;
        let mut buddy = BuddyAllocator::new(layout.own_first, order_max);
        // One block of the largest order is only for hosts that hold nothing, and a part of the rest
        // only for hosts that a subsystem lists: both progress whatever the others hold.
        let reserve = buddy.allocate(order_max);
        let reserved_bytes = u64::from(buddy.free_pages() / RESERVED_PART) << PAGE_SHIFT;
        let own = (layout.own_first..layout.pages).step_by(1 << OWN_ORDER).collect();
        let (halves, wait_queue, ledger) = (Vec::new(), WaitQueue::new(), MemoryLedger::default());
        let state = PoolState {
            buddy,
            reserved_bytes,
            reserve,
            own,
            halves,
            connections: 0,
            wait_queue,
            ledger,
            allocated: None,
        };
        let shared = PoolShared {
            region,
            regions: regions.clone(),
            order_max,
            connections_max,
            is_scarce: AtomicBool::new(false),
            caches: AtomicU64::new(0),
            state: Mutex::new(state),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Size of the pool in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.shared.region.len_bytes()
    }

    /// Free bytes, including the reserved block and the memory set aside for future connections.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let state = self.lock_state();
        let reserve = state.reserve.map_or(0, |_| 1_u64 << self.shared.order_max);
        let own = ((self.shared.connections_max - state.connections) as u64) << OWN_ORDER;
        (u64::from(state.buddy.free_pages()) + reserve + own) << PAGE_SHIFT
    }

    /// Number of waiting connections.
    #[must_use]
    pub fn waiting_connections(&self) -> usize {
        self.lock_state().wait_queue.len()
    }

    pub(super) fn regions(&self) -> &RegionTable {
        &self.shared.regions
    }

    fn segment_at(&self) -> Segment {
        self.shared.region.segment()
    }

    /// The whole pool.
    pub(super) fn pool_segment(&self) -> Segment {
        self.segment_at()
    }

    /// Number of pages for data, which come first, and of own pages, which follow.
    pub(super) fn data_and_own_page_counts(&self) -> (usize, usize) {
        let own = self.shared.connections_max << OWN_ORDER;
        let pages = usize::try_from(self.size_bytes() >> PAGE_SHIFT).unwrap_or(0);
        (pages - own, own)
    }

    /// Whether any connection waits.
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        // Relaxed: only a hint. A connection that sees it late returns its cache late.
        self.shared.is_scarce.load(Ordering::Relaxed)
    }

    /// Registers a connection of an address. `None` if the limit is reached.
    fn add_connection(&self, address: &str) -> Option<ChargedEntries> {
        let mut state = self.lock_state();
        if state.connections >= self.shared.connections_max {
            return None;
        }
        state.connections += 1;
        let [host, address] = [0; 2].map(|_| state.ledger.add_connection(address));
        Some(ChargedEntries { host, address, excluded_from_reserve: false })
    }

    /// Unregisters a connection. Its slot stays occupied if its own pages were leaked.
    fn remove_connection(&self, charged: ChargedEntries, has_own: bool) {
        let mut state = self.lock_state();
        state.connections -= usize::from(has_own);
        state.ledger.remove_connection(charged.host);
        state.ledger.remove_connection(charged.address);
    }

    /// Charges a connection to its host. Only its own pages may be allocated at this point.
    fn set_host(&self, charged: ChargedEntries, host: HostMemory<'_>) -> ChargedEntries {
        let HostMemory { name, class, bytes_max } = host;
        let mut state = self.lock_state();
        let charged = state.set_host(charged, name, class);
        if !name.is_empty() {
            state.ledger.set_limit(charged.host, bytes_max);
        }
        charged
    }

    /// Allocates a block for the cache numbered `cache`, or queues the cache if no block is
    /// available to it.
    fn allocate_or_wait(
        &self,
        (cache, charged): (u64, ChargedEntries),
        waker: &WakeFn,
        order: u8,
    ) -> Option<Block> {
        let mut state = self.lock_state();
        if state.wait_queue.is_empty()
            && let Some(block) = state.allocate_block(charged, order)
        {
            return Some(block);
        }
        if let Some(waiter) = state.wait_queue.iter_mut().find(|waiter| waiter.cache == cache) {
            waiter.order = order;
        } else {
            state.wait_queue.push_back(BufferWaiter {
                cache,
                charged,
                order,
                waker: waker.clone(),
            });
            self.shared.is_scarce.store(true, Ordering::Relaxed);
        }
        // A host below its share may be served before the connection at the head of the queue, so
        // this one is granted its block only if it is next.
        let next = state.next_waiter();
        let at =
            next.filter(|at| state.wait_queue.get(*at).is_some_and(|one| one.cache == cache))?;
        let block = state.allocate_block(charged, order)?;
        state.wait_queue.remove(at);
        self.wake_next_waiter(state);
        Some(block)
    }

    /// Allocates blocks beyond the current need, while there are free ones and no connection waits.
    fn allocate_spare(
        &self,
        account: &Arc<MemoryAccount>,
        order: u8,
        buffers: &mut Vec<Buffer>,
        limit: usize,
    ) {
        let mut state = self.lock_state();
        while state.wait_queue.is_empty()
            && buffers.len() < limit
            && state.block_source(account.charged_entries(), order) == Some(BufferSource::Shared)
            && let Some(page) = state.buddy.allocate(order)
        {
            let block = Block { page, order, source: BufferSource::Shared };
            state.charge_block(account.charged_entries(), block);
            buffers.push(account.into_buffer(block));
        }
    }

    /// Allocates the pair of pages that every connection is entitled to.
    fn allocate_own_pages(&self) -> Option<Block> {
        let mut state = self.lock_state();
        let page = state.own.pop()?;
        let block = Block { page, order: OWN_ORDER, source: BufferSource::Own };
        state.log_allocated_block(block);
        Some(block)
    }

    /// Whether a waiting connection could use the memory that this one holds.
    fn is_needed_by_others(&self, charged: ChargedEntries) -> bool {
        self.has_waiters() && self.lock_state().is_needed_by_others(charged)
    }

    /// Starts recording allocated blocks. Returns those since the last call.
    pub(super) fn take_allocated_blocks(&self) -> Vec<Range<u32>> {
        let allocated = self.lock_state().allocated.replace(Vec::new());
        allocated.unwrap_or_default().iter().map(Block::pages).collect()
    }

    /// Frees blocks of a connection.
    fn free_blocks(&self, account: &MemoryAccount, blocks: impl IntoIterator<Item = Block>) {
        let mut state = self.lock_state();
        for block in blocks {
            let is_own = state.free_block(block);
            state.uncharge_block(account.charged_entries(), block);
            account.record_freed(block, is_own);
        }
        self.wake_next_waiter(state);
    }

    /// Removes a leaked block from the accounting. It is never allocated again.
    fn write_off_leaked(&self, charged: ChargedEntries, block: Block) {
        self.lock_state().uncharge_block(charged, block);
    }

    /// Removes a cache from the wait queue.
    fn cancel_wait(&self, cache: u64) {
        let mut state = self.lock_state();
        state.wait_queue.retain(|waiter| waiter.cache != cache);
        self.wake_next_waiter(state);
    }

    /// Wakes the connection that is next in the wait queue.
    fn wake_next_waiter(&self, mut state: MutexGuard<'_, PoolState>) {
        self.shared.is_scarce.store(!state.wait_queue.is_empty(), Ordering::Relaxed);
        let next = state.next_waiter().and_then(|at| state.wait_queue.get(at));
        let waker = next.map(|waiter| waiter.waker.clone());
        drop(state);
        if let Some(waker) = waker {
            waker();
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, PoolState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of pages, and the first page of the pairs.
struct PoolLayout {
    pages: u32,
    own_first: u32,
}

impl PoolLayout {
    /// Computes the layout: the pairs at the end, and space for at least one largest block before them.
    fn new(bytes: u64, order_max: u8, connections: usize) -> Result<Self, Error> {
        let largest = 1_u64 << (PAGE_SHIFT + u32::from(order_max));
        let minimum = largest + u64::from(OWN_BYTES) * connections as u64;
        if !(minimum..=BYTES_MAX).contains(&bytes) {
            return Err(Error::environment(format!(
                "memory for {connections} connections: {bytes} bytes, expected {minimum} to \
                 {BYTES_MAX}"
            )));
        }
        // The range check above bounds both values to 32 bits.
        let count = u32::try_from(connections).unwrap_or(u32::MAX);
        let pages = u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX);
        // Align the pairs to pairs.
        let pages = pages - pages % (1 << OWN_ORDER);
        Ok(Self { pages, own_first: pages - (count << OWN_ORDER) })
    }
}

impl PoolState {
    /// Charges a connection to its host. Only its own pages may be allocated at this point.
    fn set_host(
        &mut self,
        charged: ChargedEntries,
        host: &str,
        class: HostClass,
    ) -> ChargedEntries {
        let ChargedEntries { host: old_host, address: old_address, .. } = charged;
        match class {
            // A listed host and an unlisted one with the same NQN have separate entries: the names
            // contain a space, which neither NQNs nor addresses do.
            HostClass::Named => {
                let at = ["host", "all of"]
                    .map(|of| self.ledger.add_connection(&format!("{of} {host}")));
                self.ledger.remove_connection(old_host);
                self.ledger.remove_connection(old_address);
                ChargedEntries { host: at[0], address: at[1], excluded_from_reserve: false }
            }
            // A host without an NQN stays charged to its address.
            HostClass::Unnamed { excluded_from_reserve } if host.is_empty() => {
                ChargedEntries { excluded_from_reserve, ..charged }
            }
            HostClass::Unnamed { excluded_from_reserve } => {
                let host = self.ledger.add_connection(host);
                self.ledger.remove_connection(old_host);
                ChargedEntries { host, excluded_from_reserve, ..charged }
            }
        }
    }

    /// Records an allocated block, if recording is on.
    fn log_allocated_block(&mut self, block: Block) {
        if let Some(allocated) = &mut self.allocated {
            allocated.push(block);
        }
    }

    /// Returns a block to its source. Returns whether a connection's own pair is complete again.
    fn free_block(&mut self, block: Block) -> bool {
        let Block { page, order, source } = block;
        match source {
            BufferSource::Shared => self.buddy.free(page, order),
            BufferSource::Reserve => self.reserve = Some(page),
            BufferSource::Own => self.own.push(page),
            BufferSource::ReserveHalf | BufferSource::OwnHalf => {
                return self.free_page_of_pair(page, source);
            }
            BufferSource::None => {}
        }
        source == BufferSource::Own
    }

    /// Returns one page of a pair that is returned as a whole; the first page waits for the second.
    fn free_page_of_pair(&mut self, page: u32, source: BufferSource) -> bool {
        let first = page & !1;
        let Some(at) = self.halves.iter().position(|half| *half == first) else {
            self.halves.push(first);
            return false;
        };
        self.halves.swap_remove(at);
        let source =
            if source == BufferSource::OwnHalf { BufferSource::Own } else { BufferSource::Reserve };
        self.free_block(Block { page: first, order: OWN_ORDER, source })
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "BufferPool {{ {} of {} bytes free }}", self.free_bytes(), self.size_bytes())
    }
}

impl fmt::Debug for PoolShared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Shared").field("region", &self.region).finish_non_exhaustive()
    }
}
