//! Per-connection cache of pool blocks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_nvme_controller::controller::WakeFn;

use super::{Account, Buffer, BufferPool, OWN_ORDER, PAGE_SHIFT, Standing, order_of};

/// Cache of blocks. Allocating and freeing takes no lock as long as the cache has a block of the
/// size.
pub(in crate::tcp) struct BufferCache {
    budget: BufferPool,
    account: Arc<Account>,
    number: u64,
    waker: WakeFn,
    /// Free blocks by order.
    idle: Vec<Vec<Buffer>>,
    idle_bytes: u32,
    /// Whether it is in the pool's wait queue.
    is_waiting: bool,
}

/// Largest number of cached bytes: twice the buffers of a host with 128 small commands outstanding.
const KEPT_BYTES: u32 = 1 << 20;
/// Bytes that one refill allocates, for small blocks.
const FETCHED_BYTES: u32 = 64 << 10;

impl BufferCache {
    /// Creates a cache, with the right to two pages, for a connection from this address. `waker` is
    /// called when its turn in the wait queue has come.
    pub(in crate::tcp) fn new(budget: &BufferPool, address: &str, waker: WakeFn) -> Option<Self> {
        let number = budget.shared.purses.fetch_add(1, Ordering::Relaxed);
        let payer = budget.enter(address)?;
        let idle = (0..=budget.shared.order_max).map(|_| Vec::new()).collect();
        Some(Self {
            budget: budget.clone(),
            account: Account::new(budget, payer),
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
    pub(in crate::tcp) fn take(&mut self, len_bytes: u32) -> Option<Buffer> {
        let order = order_of(len_bytes);
        if let Some(buffer) = self.idle.get_mut(usize::from(order))?.pop() {
            self.idle_bytes -= 1 << (PAGE_SHIFT + u32::from(order));
            return Some(buffer);
        }
        self.fetch(order)
    }

    /// Allocates the connection's own pages, if `len_bytes` fits.
    #[cold]
    pub(in crate::tcp) fn take_own(&mut self, len_bytes: u32) -> Option<Buffer> {
        if order_of(len_bytes) > OWN_ORDER || !self.has_own() {
            return None;
        }
        let block = self.budget.take_own()?;
        Some(self.account.buffer(block))
    }

    /// Whether the connection's own pages are free.
    pub(in crate::tcp) fn has_own(&self) -> bool {
        self.account.has_own()
    }

    /// Frees a buffer, into the cache or to the pool.
    #[inline]
    pub(in crate::tcp) fn release(&mut self, buffer: Buffer) {
        let bytes = 1 << (PAGE_SHIFT + u32::from(buffer.order()));
        let is_kept =
            buffer.is_shared() && self.idle_bytes + bytes <= KEPT_BYTES && !self.budget.is_scarce();
        if is_kept && let Some(places) = self.idle.get_mut(usize::from(buffer.order())) {
            self.idle_bytes += bytes;
            places.push(buffer);
            return;
        }
        self.put_away(buffer);
    }

    /// Cached blocks.
    pub(in crate::tcp) fn idle(&self) -> impl Iterator<Item = &Buffer> {
        self.idle.iter().flatten()
    }

    /// Returns all cached blocks to the pool: another connection waits, or nothing will be needed
    /// for a while.
    pub(in crate::tcp) fn release_idle(&mut self) {
        if self.idle_bytes > 0 {
            self.empty();
        }
    }

    /// It is known whose connection it is, and with whom it shares what a host may have. It must have
    /// nothing but its own pages.
    pub(in crate::tcp) fn bind(&self, host: &str, standing: Standing) {
        self.account.bind(host, standing);
    }

    /// Whether another host could use the memory that this connection holds, or any host waits for
    /// memory that is used up.
    pub(in crate::tcp) fn is_missed(&self) -> bool {
        self.budget.is_wanted(self.account.payer())
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
            self.leave_queue();
        }
    }

    #[cold]
    fn leave_queue(&mut self) {
        self.is_waiting = false;
        self.budget.leave(self.number);
    }

    /// Whether a waiting connection may need the cached blocks.
    #[inline]
    pub(in crate::tcp) fn has_waiters(&self) -> bool {
        self.idle_bytes > 0 && self.budget.is_scarce()
    }

    pub(in crate::tcp) fn budget(&self) -> &BufferPool {
        &self.budget
    }

    #[cold]
    fn fetch(&mut self, order: u8) -> Option<Buffer> {
        // Releasing cached blocks of other sizes may satisfy the request.
        if self.budget.is_scarce() {
            self.release_idle();
        }
        let payer = (self.number, self.account.payer());
        let mut found = self.budget.take(payer, &self.waker, order);
        if found.is_none() && self.idle_bytes > 0 {
            self.empty();
            found = self.budget.take(payer, &self.waker, order);
        }
        self.is_waiting = found.is_none();
        let found = self.account.buffer(found?);
        let bytes = 1 << (PAGE_SHIFT + u32::from(order));
        if bytes < FETCHED_BYTES {
            let places = &mut self.idle[usize::from(order)];
            let most = (FETCHED_BYTES / bytes) as usize - 1;
            self.budget.take_spare(&self.account, order, places, most);
            self.idle_bytes += u32::try_from(places.len()).unwrap_or(0) * bytes;
        }
        Some(found)
    }

    /// Counter of the bytes that the connection holds.
    pub(in crate::tcp) fn held(&self) -> Arc<AtomicU64> {
        self.account.held()
    }

    #[cold]
    fn put_away(&mut self, buffer: Buffer) {
        let is_own = buffer.is_own();
        drop(buffer);
        if !is_own {
            self.release_idle();
        }
    }

    #[cold]
    fn empty(&mut self) {
        self.idle_bytes = 0;
        let blocks = self.idle.iter_mut().flat_map(|buffers| buffers.drain(..));
        self.budget.give(&self.account, blocks.map(Buffer::into_block));
    }
}

impl Drop for BufferCache {
    fn drop(&mut self) {
        self.release_idle();
        self.stop_waiting();
    }
}

impl fmt::Debug for BufferCache {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Purse {{ {} bytes idle }}", self.idle_bytes)
    }
}
