//! Per-connection cache of pool blocks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_nvme_controller::controller::WakeFn;

use super::{
    Buffer, BufferPool, HostMemory, MemoryAccount, OWN_ORDER, PAGE_SHIFT, block_order_for,
};

/// Cache of blocks. Allocating and freeing takes no lock as long as the cache has a block of the
/// size.
pub(in crate::tcp) struct BufferCache {
    pool: BufferPool,
    account: Arc<MemoryAccount>,
    number: u64,
    waker: WakeFn,
    /// Free blocks by order.
    idle: Vec<Vec<Buffer>>,
    idle_bytes: u32,
    /// Whether it is in the pool's wait queue.
    is_waiting: bool,
}

/// Largest number of cached bytes: twice the buffers of a host with 128 small commands outstanding.
const IDLE_BYTES_MAX: u32 = 1 << 20;
/// Bytes that one refill allocates, for small blocks.
const REFILL_BYTES: u32 = 64 << 10;

impl BufferCache {
    /// Creates a cache, with the right to two pages, for a connection from this address. `waker` is
    /// called when the connection is next in the wait queue.
    pub(in crate::tcp) fn new(pool: &BufferPool, address: &str, waker: WakeFn) -> Option<Self> {
        let number = pool.shared.caches.fetch_add(1, Ordering::Relaxed);
        let charged = pool.add_connection(address)?;
        let idle = (0..=pool.shared.order_max).map(|_| Vec::new()).collect();
        Some(Self {
            pool: pool.clone(),
            account: MemoryAccount::new(pool, charged),
            number,
            waker,
            idle,
            idle_bytes: 0,
            is_waiting: false,
        })
    }

    /// Allocates a buffer of `len_bytes`, which must not exceed the largest block. If that fails,
    /// the connection is queued, and its waker is called later.
    #[inline]
    pub(in crate::tcp) fn allocate(&mut self, len_bytes: u32) -> Option<Buffer> {
        let order = block_order_for(len_bytes);
        if let Some(buffer) = self.idle.get_mut(usize::from(order))?.pop() {
            self.idle_bytes -= 1 << (PAGE_SHIFT + u32::from(order));
            return Some(buffer);
        }
        self.refill_from_pool(order)
    }

    /// Allocates the connection's own pages, if `len_bytes` fits.
    #[cold]
    pub(in crate::tcp) fn allocate_own_pages(&mut self, len_bytes: u32) -> Option<Buffer> {
        if block_order_for(len_bytes) > OWN_ORDER || !self.has_free_own_pages() {
            return None;
        }
        let block = self.pool.allocate_own_pages()?;
        Some(self.account.into_buffer(block))
    }

    /// Whether the connection's own pages are free.
    pub(in crate::tcp) fn has_free_own_pages(&self) -> bool {
        self.account.has_free_own_pages()
    }

    /// Frees a buffer, into the cache or to the pool.
    #[inline]
    pub(in crate::tcp) fn release_buffer(&mut self, buffer: Buffer) {
        let bytes = 1 << (PAGE_SHIFT + u32::from(buffer.block_order()));
        let is_cached = buffer.is_from_shared_blocks()
            && self.idle_bytes + bytes <= IDLE_BYTES_MAX
            && !self.pool.has_waiters();
        if is_cached && let Some(buffers) = self.idle.get_mut(usize::from(buffer.block_order())) {
            self.idle_bytes += bytes;
            buffers.push(buffer);
            return;
        }
        self.free_to_pool(buffer);
    }

    /// Cached blocks.
    pub(in crate::tcp) fn idle_buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.idle.iter().flatten()
    }

    /// Returns all cached blocks to the pool: another connection waits, or nothing will be needed
    /// for a while.
    pub(in crate::tcp) fn release_idle_buffers(&mut self) {
        if self.idle_bytes > 0 {
            self.free_idle();
        }
    }

    /// Charges the connection to its host. Only its own pages may be allocated at this point.
    pub(in crate::tcp) fn set_host(&self, host: HostMemory<'_>) {
        self.account.set_host(host);
    }

    /// Whether another host could use the memory that this connection holds, or any host waits for
    /// memory that is used up.
    pub(in crate::tcp) fn others_need_memory(&self) -> bool {
        self.pool.is_needed_by_others(self.account.charged_entries())
    }

    /// Whether it is in the wait queue.
    #[inline]
    pub(in crate::tcp) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Leaves the wait queue.
    #[inline]
    pub(in crate::tcp) fn stop_waiting(&mut self) {
        if self.is_waiting {
            self.leave_wait_queue();
        }
    }

    #[cold]
    fn leave_wait_queue(&mut self) {
        self.is_waiting = false;
        self.pool.cancel_wait(self.number);
    }

    /// Whether a waiting connection may need the cached blocks.
    #[inline]
    pub(in crate::tcp) fn should_release_idle(&self) -> bool {
        self.idle_bytes > 0 && self.pool.has_waiters()
    }

    pub(in crate::tcp) fn pool(&self) -> &BufferPool {
        &self.pool
    }

    #[cold]
    fn refill_from_pool(&mut self, order: u8) -> Option<Buffer> {
        // Releasing cached blocks of other sizes may satisfy the request.
        if self.pool.has_waiters() {
            self.release_idle_buffers();
        }
        let charged = (self.number, self.account.charged_entries());
        let mut found = self.pool.allocate_or_wait(charged, &self.waker, order);
        if found.is_none() && self.idle_bytes > 0 {
            self.free_idle();
            found = self.pool.allocate_or_wait(charged, &self.waker, order);
        }
        self.is_waiting = found.is_none();
        let found = self.account.into_buffer(found?);
        let bytes = 1 << (PAGE_SHIFT + u32::from(order));
        if bytes < REFILL_BYTES {
            let buffers = &mut self.idle[usize::from(order)];
            let limit = (REFILL_BYTES / bytes) as usize - 1;
            self.pool.allocate_spare(&self.account, order, buffers, limit);
            self.idle_bytes += u32::try_from(buffers.len()).unwrap_or(0) * bytes;
        }
        Some(found)
    }

    /// Counter of the bytes that the connection holds.
    pub(in crate::tcp) fn held_bytes(&self) -> Arc<AtomicU64> {
        self.account.held_bytes()
    }

    #[cold]
    fn free_to_pool(&mut self, buffer: Buffer) {
        let is_own = buffer.is_from_own_pages();
        drop(buffer);
        if !is_own {
            self.release_idle_buffers();
        }
    }

    #[cold]
    fn free_idle(&mut self) {
        self.idle_bytes = 0;
        let blocks = self.idle.iter_mut().flat_map(|buffers| buffers.drain(..));
        self.pool.free_blocks(&self.account, blocks.map(Buffer::into_block));
    }
}

impl Drop for BufferCache {
    fn drop(&mut self) {
        self.release_idle_buffers();
        self.stop_waiting();
    }
}

impl fmt::Debug for BufferCache {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "BufferCache {{ {} bytes idle }}", self.idle_bytes)
    }
}
