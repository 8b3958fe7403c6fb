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
//! A connection that finds no free block waits in [`mod@line`]. The reserved block goes to a host
//! that holds nothing, so the largest command of every host eventually gets its buffer. No host may
//! hold more than it leaves to others. While any connection waits, no connection caches unused
//! blocks. The two pages are for in-capsule data and for what a connection cannot do without:
//! Connect and admin commands. There are as many pairs as connections are allowed, so a connection
//! without one in use always gets one; the most recently used pair is handed out first and the
//! others are never touched.
//!
//! ```text
//!   region   | blocks of 4 KiB and up … | pairs of pages … |
//! ```

mod buddy;
mod buffer;
mod buffer_cache;
mod ledger;
mod line;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Error, Segment};
use tenmil_dma::{Region, RegionTable};
use tenmil_nvme_controller::controller::WakeFn;

use buddy::Buddy;
pub(super) use buffer::Buffer;
use buffer::{Account, Block, BufferSource};
pub(super) use buffer_cache::BufferCache;
pub(super) use ledger::Standing;
use ledger::{Ledger, Payer};
use line::{BufferWaiter, Line};

/// Handle to the buffer memory of all connections of a service.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

struct Shared {
    /// The region lives as long as any handle.
    region: Region,
    regions: RegionTable,
    order_max: u8,
    connections_max: usize,
    /// Whether any connection waits. Written under the lock.
    is_scarce: AtomicBool,
    purses: AtomicU64,
    state: Mutex<PoolState>,
}

struct PoolState {
    buddy: Buddy,
    /// Bytes of the blocks above that are only for hosts that a subsystem names.
    reserved_bytes: u64,
    /// The block that is kept back, while nobody has it.
    kept: Option<u32>,
    /// Pairs of pages that are free.
    own: Vec<u32>,
    /// Pages whose partner has not been returned yet, of pairs that are returned together.
    halves: Vec<u32>,
    /// Number of connections that are entitled to a pair.
    owners: usize,
    /// Waiting connections, oldest first.
    line: Line,
    ledger: Ledger,
    /// Allocated blocks, recorded for the fuzzer.
    went: Option<Vec<Block>>,
}

/// Order of a connection's own two pages.
const OWN_ORDER: u8 = 1;
/// log2 of the page size.
const PAGE_SHIFT: u32 = 12;
/// Size of a connection's own two pages in bytes.
pub(super) const OWN_BYTES: u32 = 1 << (PAGE_SHIFT + OWN_ORDER as u32);
/// The part of the budget that is reserved for hosts that a subsystem names, as of the connections.
const RESERVED_PART: u32 = 8;
/// The longest budget: what a segment can name.
const BYTES_MAX: u64 = 1 << 31;

/// Smallest block order that holds `len_bytes`.
#[inline]
fn order_of(len_bytes: u32) -> u8 {
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
        let order_max = order_of(transfer_bytes_max);
        let layout = PoolLayout::new(bytes, order_max, connections_max)?;
        let bytes = u64::from(layout.pages) << PAGE_SHIFT;
        let len = usize::try_from(bytes).map_err(Error::environment)?;
        let region = regions
            .allocate(len)
            .map_err(|why| format!("memory for connections: {bytes} bytes: {why}"))
            .map_err(Error::environment)?;
        let mut buddy = Buddy::new(layout.own_first, order_max);
        let kept = buddy.take(order_max);
        let reserved_bytes = u64::from(buddy.free_pages() / RESERVED_PART) << PAGE_SHIFT;
        let own = (layout.own_first..layout.pages).step_by(1 << OWN_ORDER).collect();
        let (halves, line, ledger) = (Vec::new(), Line::new(), Ledger::default());
        let state = PoolState {
            buddy,
            reserved_bytes,
            kept,
            own,
            halves,
            owners: 0,
            line,
            ledger,
            went: None,
        };
        let shared = Shared {
            region,
            regions: regions.clone(),
            order_max,
            connections_max,
            is_scarce: AtomicBool::new(false),
            purses: AtomicU64::new(0),
            state: Mutex::new(state),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Size of the pool in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.region.len_bytes()
    }

    /// Free bytes, including the reserved block and the memory set aside for future connections.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let state = self.state();
        let kept = state.kept.map_or(0, |_| 1_u64 << self.shared.order_max);
        let own = ((self.shared.connections_max - state.owners) as u64) << OWN_ORDER;
        (u64::from(state.buddy.free_pages()) + kept + own) << PAGE_SHIFT
    }

    /// Number of waiting connections.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().line.len()
    }

    pub(super) fn regions(&self) -> &RegionTable {
        &self.shared.regions
    }

    fn whole(&self) -> Segment {
        self.shared.region.segment()
    }

    /// The whole pool.
    pub(super) fn region(&self) -> Segment {
        self.whole()
    }

    /// Number of pages for data, which come first, and of own pages, which follow.
    pub(super) fn areas(&self) -> (usize, usize) {
        let own = self.shared.connections_max << OWN_ORDER;
        let pages = usize::try_from(self.bytes() >> PAGE_SHIFT).unwrap_or(0);
        (pages - own, own)
    }

    /// Whether any connection waits.
    #[inline]
    pub(super) fn is_scarce(&self) -> bool {
        // Relaxed: only a hint. A connection that sees it late returns its cache late.
        self.shared.is_scarce.load(Ordering::Relaxed)
    }

    /// Registers a connection of an address. `None` if the limit is reached.
    fn enter(&self, address: &str) -> Option<Payer> {
        let mut state = self.state();
        if state.owners >= self.shared.connections_max {
            return None;
        }
        state.owners += 1;
        let [host, address] = [0; 2].map(|_| state.ledger.enter(address));
        Some(Payer { host, address, leaves_reserve: false })
    }

    /// Unregisters a connection. Its slot stays occupied if its own pages were leaked.
    fn go(&self, payer: Payer, has_own: bool) {
        let mut state = self.state();
        state.owners -= usize::from(has_own);
        state.ledger.leave(payer.host);
        state.ledger.leave(payer.address);
    }

    /// It is known whose a connection is. It has nothing yet but what is set aside for it.
    fn bind(&self, payer: Payer, host: &str, standing: Standing) -> Payer {
        let mut state = self.state();
        let Payer { host: old_host, address: old_address, .. } = payer;
        match standing {
            // The same NQN is another host where it is not named. No NQN and no address has a space.
            Standing::Named => {
                let at = ["host", "all of"].map(|of| state.ledger.enter(&format!("{of} {host}")));
                state.ledger.leave(old_host);
                state.ledger.leave(old_address);
                Payer { host: at[0], address: at[1], leaves_reserve: false }
            }
            // One without a name stays its address's.
            Standing::Unnamed { leaves_reserve } if host.is_empty() => {
                Payer { leaves_reserve, ..payer }
            }
            Standing::Unnamed { leaves_reserve } => {
                let host = state.ledger.enter(host);
                state.ledger.leave(old_host);
                Payer { host, leaves_reserve, ..payer }
            }
        }
    }

    /// Allocates a block for the cache numbered `quota`, or queues the cache if no block is
    /// available to it.
    fn take(&self, (quota, payer): (u64, Payer), waker: &WakeFn, order: u8) -> Option<Block> {
        let mut state = self.state();
        if state.line.is_empty()
            && let Some(block) = state.block(payer, order)
        {
            return Some(block);
        }
        if let Some(waiter) = state.line.iter_mut().find(|waiter| waiter.quota == quota) {
            waiter.order = order;
        } else {
            state.line.push_back(BufferWaiter { quota, payer, order, waker: waker.clone() });
            self.shared.is_scarce.store(true, Ordering::Relaxed);
        }
        // A host below its share may be served before the connection at the head of the queue, so
        // this one is granted its block only if it is next.
        let next = state.next();
        let at = next.filter(|at| state.line.get(*at).is_some_and(|one| one.quota == quota))?;
        let block = state.block(payer, order)?;
        state.line.remove(at);
        self.call_next(state);
        Some(block)
    }

    /// Allocates blocks beyond the current need, while there are free ones and no connection waits.
    fn take_spare(&self, account: &Arc<Account>, order: u8, places: &mut Vec<Buffer>, most: usize) {
        let mut state = self.state();
        while state.line.is_empty()
            && places.len() < most
            && state.source(account.payer(), order) == Some(BufferSource::Shared)
            && let Some(page) = state.buddy.take(order)
        {
            let block = Block { page, order, source: BufferSource::Shared };
            state.charge(account.payer(), block);
            places.push(account.buffer(block));
        }
    }

    /// Allocates the pair of pages that every connection is entitled to.
    fn take_own(&self) -> Option<Block> {
        let mut state = self.state();
        let page = state.own.pop()?;
        let block = Block { page, order: OWN_ORDER, source: BufferSource::Own };
        state.note(block);
        Some(block)
    }

    /// Whether a waiting connection could use the memory that this one holds.
    fn is_wanted(&self, payer: Payer) -> bool {
        self.is_scarce() && self.state().is_wanted(payer)
    }

    /// Starts recording allocated blocks. Returns those since the last call.
    pub(super) fn went(&self) -> Vec<Range<u32>> {
        let went = self.state().went.replace(Vec::new());
        went.unwrap_or_default().iter().map(Block::pages).collect()
    }

    /// Frees blocks of a connection.
    fn give(&self, account: &Account, blocks: impl IntoIterator<Item = Block>) {
        let mut state = self.state();
        for block in blocks {
            let is_own = state.put(block);
            state.discharge(account.payer(), block);
            account.gave(block, is_own);
        }
        self.call_next(state);
    }

    /// Removes a leaked block from the accounting. It is never allocated again.
    fn forget(&self, payer: Payer, block: Block) {
        self.state().discharge(payer, block);
    }

    /// Removes a cache from the wait queue.
    fn leave(&self, quota: u64) {
        let mut state = self.state();
        state.line.retain(|waiter| waiter.quota != quota);
        self.call_next(state);
    }

    /// Wakes the connection that is next in the wait queue.
    fn call_next(&self, mut state: MutexGuard<'_, PoolState>) {
        self.shared.is_scarce.store(!state.line.is_empty(), Ordering::Relaxed);
        let next = state.next().and_then(|at| state.line.get(at));
        let waker = next.map(|waiter| waiter.waker.clone());
        drop(state);
        if let Some(waker) = waker {
            waker();
        }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
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
        let least = largest + u64::from(OWN_BYTES) * connections as u64;
        if !(least..=BYTES_MAX).contains(&bytes) {
            return Err(Error::environment(format!(
                "memory for {connections} connections: {bytes} bytes, expected {least} to \
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
    /// Records an allocated block, if recording is on.
    fn note(&mut self, block: Block) {
        if let Some(went) = &mut self.went {
            went.push(block);
        }
    }

    /// Returns a block to its source. Returns whether a connection's own pair is complete again.
    fn put(&mut self, block: Block) -> bool {
        let Block { page, order, source } = block;
        match source {
            BufferSource::Shared => self.buddy.free(page, order),
            BufferSource::Reserve => self.kept = Some(page),
            BufferSource::Own => self.own.push(page),
            BufferSource::KeptHalf | BufferSource::OwnHalf => return self.put_half(page, source),
            BufferSource::Nowhere => {}
        }
        source == BufferSource::Own
    }

    /// Returns one page of a pair that is returned as a whole; the first page waits for the second.
    fn put_half(&mut self, page: u32, source: BufferSource) -> bool {
        let first = page & !1;
        let Some(at) = self.halves.iter().position(|half| *half == first) else {
            self.halves.push(first);
            return false;
        };
        self.halves.swap_remove(at);
        let source =
            if source == BufferSource::OwnHalf { BufferSource::Own } else { BufferSource::Reserve };
        self.put(Block { page: first, order: OWN_ORDER, source })
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Budget {{ {} of {} bytes free }}", self.free_bytes(), self.bytes())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Shared").field("region", &self.region).finish_non_exhaustive()
    }
}
