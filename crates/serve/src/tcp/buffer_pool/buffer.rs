//! Owned block of the buffer pool, returned to it on drop.
//!
//! ```text
//!   Account ◀── Arc ── Buffer ── in a command slot, in a cache, in a queue
//!      │                  │ drop
//!      └─ BufferPool ◀────┘
//! ```
//!
//! The reference count of an account changes only when a block leaves the pool or returns to it,
//! which takes a lock anyway. Moving a buffer between a cache and its command slots counts nothing.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tenmil_base::Segment;

use super::memory_ledger::{ChargedEntries, HostMemory};
use super::{BufferPool, OWN_BYTES, OWN_ORDER, PAGE_SHIFT};
#[cfg(test)]
use crate::tcp::injected_bug::{InjectedBug, is_injected};

/// Buffer of a command.
pub(in crate::tcp) struct Buffer {
    account: Arc<MemoryAccount>,
    page: u32,
    order: u8,
    source: BufferSource,
}

/// Memory accounting of a connection. It lives until the last buffer is dropped.
pub(super) struct MemoryAccount {
    pool: BufferPool,
    /// Bytes that the connection holds, published for management.
    held: Arc<AtomicU64>,
    /// Whether the connection's own pair of pages is allocated.
    is_own_allocated: AtomicBool,
    /// Entries of the ledger, see [`ChargedEntries`]. They change once, under the lock of the pool's state or
    /// before the account is shared.
    host: AtomicU32,
    address: AtomicU32,
    excluded_from_reserve: AtomicBool,
}

/// Source of a block, to which it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferSource {
    Shared,
    /// The reserved block.
    Reserve,
    /// The connection's own pages.
    Own,
    /// One page of a pair that is returned as a whole, from the reserved block.
    ReserveHalf,
    /// One page of the connection's own pair.
    OwnHalf,
    /// None: the block was returned separately, or is leaked.
    None,
}

/// Block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) page: u32,
    pub(super) order: u8,
    pub(super) source: BufferSource,
}

impl Block {
    /// Pages of the block, counted from the start of the pool.
    pub(super) fn pages(&self) -> Range<u32> {
        self.page..self.page + (1 << self.order)
    }

    /// Bytes charged to the host. Memory reserved for every connection is not charged.
    pub(super) fn charged_bytes(self) -> u64 {
        match self.source {
            BufferSource::Shared | BufferSource::Reserve | BufferSource::ReserveHalf => {
                1 << (PAGE_SHIFT + u32::from(self.order))
            }
            BufferSource::Own | BufferSource::OwnHalf | BufferSource::None => 0,
        }
    }
}

impl MemoryAccount {
    pub(super) fn new(pool: &BufferPool, charged: ChargedEntries) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            held: Arc::new(AtomicU64::new(OWN_BYTES.into())),
            is_own_allocated: AtomicBool::new(false),
            host: AtomicU32::new(charged.host),
            address: AtomicU32::new(charged.address),
            excluded_from_reserve: AtomicBool::new(charged.excluded_from_reserve),
        })
    }

    /// Entries of the ledger to which the connection is charged.
    pub(super) fn charged_entries(&self) -> ChargedEntries {
        ChargedEntries {
            host: self.host.load(Ordering::Relaxed),
            address: self.address.load(Ordering::Relaxed),
            excluded_from_reserve: self.excluded_from_reserve.load(Ordering::Relaxed),
        }
    }

    /// Charges the connection to its host. Only its own pages may be allocated at this point.
    pub(super) fn set_host(&self, host: HostMemory<'_>) {
        let charged = self.pool.set_host(self.charged_entries(), host);
        self.host.store(charged.host, Ordering::Relaxed);
        self.address.store(charged.address, Ordering::Relaxed);
        self.excluded_from_reserve.store(charged.excluded_from_reserve, Ordering::Relaxed);
    }

    /// Turns an allocated block into a buffer of the connection.
    pub(super) fn into_buffer(self: &Arc<Self>, block: Block) -> Buffer {
        let Block { page, order, source } = block;
        match source {
            BufferSource::Own => self.is_own_allocated.store(true, Ordering::Relaxed),
            // Relaxed: a statistic that orders no other access.
            _ => _ = self.held.fetch_add(block.charged_bytes(), Ordering::Relaxed),
        }
        Buffer { account: Arc::clone(self), page, order, source }
    }

    /// Counter of the bytes that the connection holds.
    pub(super) fn held_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.held)
    }

    /// Whether the connection's own pages are free. Their flag is only changed by the thread that
    /// runs the connection.
    pub(super) fn has_free_own_pages(&self) -> bool {
        !self.is_own_allocated.load(Ordering::Relaxed)
    }

    /// Records that a block was returned. `is_own` tells whether that made the connection's own
    /// pair complete.
    pub(super) fn record_freed(&self, block: Block, is_own: bool) {
        self.held.fetch_sub(block.charged_bytes(), Ordering::Relaxed);
        if is_own {
            self.is_own_allocated.store(false, Ordering::Relaxed);
        }
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        // Own pages that were leaked occupy the slot of a connection forever.
        self.pool.remove_connection(self.charged_entries(), self.has_free_own_pages());
    }
}

impl Buffer {
    /// Returns its first `len_bytes` as a segment of `pool`; `None` if it is shorter.
    #[inline]
    pub(in crate::tcp) fn segment(&self, pool: &BufferPool, len_bytes: u32) -> Option<Segment> {
        #[cfg(test)]
        let is_unchecked = is_injected(InjectedBug::Overwrite);
        #[cfg(not(test))]
        let is_unchecked = false;
        if u64::from(len_bytes) > self.len_bytes() && !is_unchecked {
            return None;
        }
        let segment = pool.segment_at();
        Some(Segment {
            offset: segment.offset + self.pool_offset(),
            len_bytes,
            region: segment.region,
        })
    }

    /// Splits a pair of pages into two buffers of a page each, the lower one first. A reserved or
    /// own pair is returned to the pool when both halves are, in any order.
    pub(in crate::tcp) fn split_pages(mut self) -> Option<[Self; 2]> {
        let source = match self.source {
            BufferSource::Shared => BufferSource::Shared,
            BufferSource::Reserve => BufferSource::ReserveHalf,
            BufferSource::Own => BufferSource::OwnHalf,
            BufferSource::ReserveHalf | BufferSource::OwnHalf | BufferSource::None => return None,
        };
        if self.order != OWN_ORDER {
            return None;
        }
        (self.order, self.source) = (0, source);
        let upper =
            Self { account: Arc::clone(&self.account), page: self.page + 1, order: 0, source };
        Some([self, upper])
    }

    /// Leaks the block: it is never used again, because a device or the kernel may access it
    /// forever.
    pub(in crate::tcp) fn leak_block(mut self) {
        self.account.pool.write_off_leaked(self.account.charged_entries(), self.block());
        self.source = BufferSource::None;
    }

    /// Converts the buffer into a block, which the caller returns to the pool.
    pub(super) fn into_block(mut self) -> Block {
        let block = self.block();
        self.source = BufferSource::None;
        block
    }

    pub(super) fn block(&self) -> Block {
        Block { page: self.page, order: self.order, source: self.source }
    }

    /// Pages of the buffer, counted from the start of the pool.
    pub(in crate::tcp) fn pages(&self) -> Range<u32> {
        self.block().pages()
    }

    pub(super) fn block_order(&self) -> u8 {
        self.order
    }

    /// Length in bytes.
    #[inline]
    pub(in crate::tcp) fn len_bytes(&self) -> u64 {
        1 << (PAGE_SHIFT + u32::from(self.order))
    }

    /// Whether it comes from the shared blocks.
    #[inline]
    pub(super) fn is_from_shared_blocks(&self) -> bool {
        self.source == BufferSource::Shared
    }

    /// Whether it comes from memory reserved for its connection.
    pub(in crate::tcp) fn is_from_own_pages(&self) -> bool {
        matches!(self.source, BufferSource::Own | BufferSource::OwnHalf)
    }

    /// Offset in the pool, in bytes.
    #[inline]
    pub(super) fn pool_offset(&self) -> u64 {
        u64::from(self.page) << PAGE_SHIFT
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        if self.source != BufferSource::None {
            self.account.pool.free_blocks(&self.account, [self.block()]);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Buffer {{ {:?} }}", self.block())
    }
}
