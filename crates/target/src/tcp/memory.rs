//! The memory that connections have for data: a budget that is given at start and never exceeded.
//!
//! ```text
//!   Budget   one region: blocks of 4 KiB and up, and one of the largest that is kept back
//!     ▲ │    behind a lock
//!     │ ▼
//!   Purse    a connection's own: blocks that were used last, and the right to two pages
//!     ▲ │    no lock
//!     │ ▼
//!   Buffer   what one command has: whoever drops it gives it back
//! ```
//!
//! Who finds nothing waits in [`mod@line`], and a host that has nothing may have the block that is kept back:
//! so whatever one command needs it gets, and the others after it. No host has more than it leaves to
//! others. While somebody waits nobody keeps what he does not use. The two pages are for what comes unasked and for what a connection cannot
//! do without: Connect, admin commands, data in a capsule. There are as many as there may be
//! connections, so whoever has none out gets some at once; they are those that were used last, and the
//! others are never touched. For the rings of an I/O queue as much is set aside as all connections
//! need: whoever is let in can connect, however much is wanted for data.
//!
//! ```text
//!   region   | blocks of 4 KiB and up … | pairs of pages … | rings, one behind the other … |
//! ```

mod buddy;
mod buffer;
mod ledger;
mod line;
mod purse;
mod reach;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Dma, Segment};
use ctrl::controller::Bell;
use dma::{CommandStore, DeviceKind, DevicePool, Region, Regions};

use buddy::Buddy;
pub(super) use buffer::Buffer;
use buffer::{Account, Block, Source};
pub(super) use ledger::Standing;
use ledger::{Ledger, Payer};
use line::{Line, Waiter};
pub(super) use purse::Purse;
pub(super) use reach::{Reach, iova_of};

/// Memory for the data of all connections of a service. A handle.
#[derive(Clone)]
pub struct Budget {
    shared: Arc<Shared>,
}

struct Shared {
    /// Kept for as long as anybody has a handle.
    region: Region,
    pool: DevicePool,
    order_max: u8,
    ring_pages: u32,
    connections_max: usize,
    /// Somebody waits. Stored inside the lock.
    is_scarce: AtomicBool,
    purses: AtomicU64,
    state: Mutex<State>,
}

struct State {
    buddy: Buddy,
    /// Bytes of the blocks above that are only for hosts that a subsystem names.
    reserved_bytes: u64,
    /// The block that is kept back, while nobody has it.
    kept: Option<u32>,
    /// Pairs of pages that no connection uses just now.
    own: Vec<u32>,
    /// Where the other half has come back, of pages that go back together.
    halves: Vec<u32>,
    /// Connections that have a right to one.
    owners: usize,
    /// Pages where the rings of queues begin that may still come.
    rings: Vec<u32>,
    /// Who waits, oldest first.
    line: Line,
    ledger: Ledger,
    /// Blocks that have gone out, if somebody wants to know.
    went: Option<Vec<Block>>,
}

/// A connection's own two pages.
const OWN_ORDER: u8 = 1;
/// Bytes of a page, as a power of two.
const PAGE_SHIFT: u32 = 12;
/// Bytes of a connection's own two pages.
pub(super) const OWN_BYTES: u32 = 1 << (PAGE_SHIFT + OWN_ORDER as u32);
/// The part of the budget that is reserved for hosts that a subsystem names, as of the connections.
const RESERVED_PART: u32 = 8;
/// The longest budget: what a segment can name.
const BYTES_MAX: u64 = 1 << 31;

/// The smallest order of blocks that hold `len_bytes`.
#[inline]
fn order_of(len_bytes: u32) -> u8 {
    let pages = len_bytes.max(1).div_ceil(1 << PAGE_SHIFT);
    u8::try_from(pages.next_power_of_two().trailing_zeros()).unwrap_or(u8::MAX)
}

impl Budget {
    /// `bytes` of memory in a region of its own, for commands that move at most `transfer_bytes_max`
    /// and for `connections_max` connections, whose own pages are set aside, and `ring_bytes` for the
    /// queue of each.
    ///
    /// # Errors
    ///
    /// If that is too little for one such command and one connection, too much, or not to be had.
    pub fn new(
        regions: &Regions,
        bytes: u64,
        transfer_bytes_max: u32,
        connections_max: usize,
        ring_bytes: u32,
    ) -> Result<Self, String> {
        let order_max = order_of(transfer_bytes_max);
        if order_of(ring_bytes) > order_max {
            return Err(format!(
                "memory for connections: the rings of a queue are {ring_bytes} bytes, expected at \
                 most the {transfer_bytes_max} of a transfer"
            ));
        }
        let ring_pages = ring_bytes.div_ceil(1 << PAGE_SHIFT);
        let layout = Layout::new(bytes, order_max, connections_max, ring_pages)?;
        let bytes = u64::from(layout.pages) << PAGE_SHIFT;
        let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
        let region = regions
            .allocate(len)
            .map_err(|why| format!("memory for connections: {bytes} bytes: {why}"))?;
        let pool = DevicePool::new(
            regions.clone(),
            region.segment(),
            DeviceKind::Emulated,
            CommandStore::Plain,
        );
        let mut buddy = Buddy::new(layout.own_first, order_max);
        let kept = buddy.take(order_max);
        let reserved_bytes = u64::from(buddy.free_pages() / RESERVED_PART) << PAGE_SHIFT;
        let own = (layout.own_first..layout.rings_first).step_by(1 << OWN_ORDER).collect();
        let rings = (layout.rings_first..layout.pages).step_by(ring_pages as usize).collect();
        let (halves, line, ledger) = (Vec::new(), Line::new(), Ledger::default());
        let state = State {
            buddy,
            reserved_bytes,
            kept,
            own,
            halves,
            owners: 0,
            rings,
            line,
            ledger,
            went: None,
        };
        let shared = Shared {
            region,
            pool,
            order_max,
            ring_pages,
            connections_max,
            is_scarce: AtomicBool::new(false),
            purses: AtomicU64::new(0),
            state: Mutex::new(state),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.region.len_bytes()
    }

    /// What nobody has, the block that is kept back and what is set aside for connections to come
    /// included.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let state = self.state();
        let kept = state.kept.map_or(0, |_| 1_u64 << self.shared.order_max);
        let own = ((self.shared.connections_max - state.owners) as u64) << OWN_ORDER;
        let rings = state.rings.len() as u64 * u64::from(self.shared.ring_pages);
        (u64::from(state.buddy.free_pages()) + kept + own + rings) << PAGE_SHIFT
    }

    /// How many wait for memory.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().line.len()
    }

    /// Bytes of the largest buffer.
    pub(super) fn buffer_bytes_max(&self) -> u32 {
        1 << (PAGE_SHIFT + u32::from(self.shared.order_max))
    }

    pub(super) fn pool(&self) -> &DevicePool {
        &self.shared.pool
    }

    pub(super) fn regions(&self) -> &Regions {
        self.shared.pool.regions()
    }

    fn whole(&self) -> Segment {
        self.shared.region.segment()
    }

    /// All of it, to be looked at.
    pub(super) fn region(&self) -> Segment {
        self.whole()
    }

    /// Pages for data, which come first, and pages that are connections' own, which follow.
    pub(super) fn areas(&self) -> (usize, usize) {
        let own = self.shared.connections_max << OWN_ORDER;
        let rings = self.shared.connections_max * self.shared.ring_pages as usize;
        let pages = usize::try_from(self.bytes() >> PAGE_SHIFT).unwrap_or(0);
        (pages - own - rings, own)
    }

    /// Where the pool's memory begins, for a device.
    fn iova(&self) -> u64 {
        self.shared.pool.iova(self.whole()).unwrap_or_default()
    }

    /// Whether somebody waits.
    #[inline]
    pub(super) fn is_scarce(&self) -> bool {
        // Only a hint: whoever sees it late gives back late.
        self.shared.is_scarce.load(Ordering::Relaxed)
    }

    /// Bytes that are set aside for the rings of a connection.
    fn ring_bytes(&self) -> u64 {
        u64::from(self.shared.ring_pages) << PAGE_SHIFT
    }

    /// A connection comes from an address. None if there are as many as there may be.
    fn enter(&self, address: &str) -> Option<Payer> {
        let mut state = self.state();
        if state.owners >= self.shared.connections_max {
            return None;
        }
        state.owners += 1;
        let [host, address] = [0; 2].map(|_| state.ledger.enter(address));
        Some(Payer { host, address, leaves_reserve: false })
    }

    /// A connection has gone. Its place is free unless its own pages are out for ever.
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

    /// A block for the purse of this number, which waits in line if there is none for it.
    fn take(&self, (purse, payer): (u64, Payer), bell: &Bell, order: u8) -> Option<Block> {
        let mut state = self.state();
        if state.line.is_empty()
            && let Some(block) = state.block(payer, order)
        {
            return Some(block);
        }
        if let Some(waiter) = state.line.iter_mut().find(|waiter| waiter.purse == purse) {
            waiter.order = order;
        } else {
            state.line.push_back(Waiter { purse, payer, order, bell: bell.clone() });
            self.shared.is_scarce.store(true, Ordering::Relaxed);
        }
        let next = state.next();
        let at = next.filter(|at| state.line.get(*at).is_some_and(|one| one.purse == purse))?;
        let block = state.block(payer, order)?;
        state.line.remove(at);
        self.call_next(state);
        Some(block)
    }

    /// A block if there is one and nobody waits: for more than is needed just now.
    fn take_spare(&self, account: &Arc<Account>, order: u8, places: &mut Vec<Buffer>, most: usize) {
        let mut state = self.state();
        while state.line.is_empty()
            && places.len() < most
            && state.source(account.payer(), order) == Some(Source::Shared)
            && let Some(page) = state.buddy.take(order)
        {
            let block = Block { page, order, source: Source::Shared };
            state.charge(account.payer(), block);
            places.push(account.buffer(block));
        }
    }

    /// Two pages that every connection has a right to.
    fn take_own(&self) -> Option<Block> {
        let mut state = self.state();
        let page = state.own.pop()?;
        let block = Block { page, order: OWN_ORDER, source: Source::Own };
        state.note(block);
        Some(block)
    }

    /// Whether others wait for what this one has, and would have it if it were free.
    fn is_wanted(&self, payer: Payer) -> bool {
        self.is_scarce() && self.state().is_wanted(payer)
    }

    /// From now on it is remembered which blocks go out. Those that went since this was last asked.
    pub(super) fn went(&self) -> Vec<Range<u32>> {
        let went = self.state().went.replace(Vec::new());
        went.unwrap_or_default().iter().map(Block::pages).collect()
    }

    /// Blocks come back that a connection had.
    fn give(&self, account: &Account, blocks: impl IntoIterator<Item = Block>) {
        let mut state = self.state();
        for block in blocks {
            let is_own = state.put(block);
            state.discharge(account.payer(), block);
            account.gave(block, is_own);
        }
        self.call_next(state);
    }

    /// A block never comes back, and is nobody's.
    fn forget(&self, payer: Payer, block: Block) {
        self.state().discharge(payer, block);
    }

    /// A purse wants nothing any more.
    fn leave(&self, purse: u64) {
        let mut state = self.state();
        state.line.retain(|waiter| waiter.purse != purse);
        self.call_next(state);
    }

    /// Whoever is next in line looks again.
    fn call_next(&self, mut state: MutexGuard<'_, State>) {
        self.shared.is_scarce.store(!state.line.is_empty(), Ordering::Relaxed);
        let next = state.next().and_then(|at| state.line.get(at));
        let bell = next.map(|waiter| waiter.bell.clone());
        drop(state);
        if let Some(bell) = bell {
            bell();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many pages there are, and where pairs of them and rings begin.
struct Layout {
    pages: u32,
    own_first: u32,
    rings_first: u32,
}

impl Layout {
    /// Of so many bytes, the last are set aside; there is room for a block of the largest before.
    fn new(bytes: u64, order_max: u8, connections: usize, ring_pages: u32) -> Result<Self, String> {
        let each = u64::from(OWN_BYTES) + (u64::from(ring_pages) << PAGE_SHIFT);
        let largest = 1_u64 << (PAGE_SHIFT + u32::from(order_max));
        let least = largest + each * connections as u64;
        if !(least..=BYTES_MAX).contains(&bytes) {
            return Err(format!(
                "memory for {connections} connections: {bytes} bytes, expected {least} to \
                 {BYTES_MAX}"
            ));
        }
        // What is in range is no more than 32 bits can count.
        let count = u32::try_from(connections).unwrap_or(u32::MAX);
        let pages = u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX);
        // Each pair of pages lies where a pair begins.
        let pages = pages - (pages - count * ring_pages) % (1 << OWN_ORDER);
        let rings_first = pages - count * ring_pages;
        Ok(Self { pages, own_first: rings_first - (count << OWN_ORDER), rings_first })
    }
}

impl State {
    /// Remembers that a block goes out, if somebody wants to know.
    fn note(&mut self, block: Block) {
        if let Some(went) = &mut self.went {
            went.push(block);
        }
    }

    /// Puts a block where it came from. Whether a connection's own pages are whole again.
    fn put(&mut self, block: Block) -> bool {
        let Block { page, order, source } = block;
        match source {
            Source::Shared => self.buddy.give(page, order),
            Source::Kept => self.kept = Some(page),
            Source::Own => self.own.push(page),
            Source::Rings => self.rings.push(page),
            Source::KeptHalf | Source::OwnHalf => return self.put_half(page, source),
            Source::Nowhere => {}
        }
        source == Source::Own
    }

    /// Puts back one of two pages that go back together: the first of them waits for the other.
    fn put_half(&mut self, page: u32, source: Source) -> bool {
        let first = page & !1;
        let Some(at) = self.halves.iter().position(|half| *half == first) else {
            self.halves.push(first);
            return false;
        };
        self.halves.swap_remove(at);
        let source = if source == Source::OwnHalf { Source::Own } else { Source::Kept };
        self.put(Block { page: first, order: OWN_ORDER, source })
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Budget {{ {} of {} bytes free }}", self.free_bytes(), self.bytes())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Shared").field("region", &self.region).finish_non_exhaustive()
    }
}
