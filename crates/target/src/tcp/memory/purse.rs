//! What one connection has of the budget.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ctrl::controller::Bell;

use super::{Account, Block, Budget, Buffer, OWN_ORDER, PAGE_SHIFT, Source, Standing, order_of};

/// A connection's blocks. Taking and giving back costs no lock as long as what goes out is what came
/// back last.
pub(in crate::tcp) struct Purse {
    budget: Budget,
    account: Arc<Account>,
    number: u64,
    bell: Bell,
    /// Blocks that nobody uses just now, by order.
    idle: Vec<Vec<Buffer>>,
    idle_bytes: u32,
    /// It stands in line.
    is_waiting: bool,
}

/// Idle bytes that a connection keeps: what a host with 128 small commands has under way, twice.
const KEPT_BYTES: u32 = 1 << 20;
/// Bytes that are fetched at a time, where blocks are smaller.
const FETCHED_BYTES: u32 = 64 << 10;

impl Purse {
    /// A purse with a right to two pages, for a connection from this address. `bell` is rung when it is
    /// next in line.
    pub(in crate::tcp) fn new(budget: &Budget, address: &str, bell: Bell) -> Option<Self> {
        let number = budget.shared.purses.fetch_add(1, Ordering::Relaxed);
        let payer = budget.enter(address)?;
        let idle = (0..=budget.shared.order_max).map(|_| Vec::new()).collect();
        Some(Self {
            budget: budget.clone(),
            account: Account::new(budget, payer),
            number,
            bell,
            idle,
            idle_bytes: 0,
            is_waiting: false,
        })
    }

    /// A buffer of `len_bytes`, which must not be more than the largest. Without one the connection
    /// waits in line, and its bell is rung.
    #[inline]
    pub(in crate::tcp) fn take(&mut self, len_bytes: u32) -> Option<Buffer> {
        let order = order_of(len_bytes);
        if let Some(buffer) = self.idle.get_mut(usize::from(order))?.pop() {
            self.idle_bytes -= 1 << (PAGE_SHIFT + u32::from(order));
            return Some(buffer);
        }
        self.fetch(order)
    }

    /// The block that is set aside for the connection's rings.
    pub(in crate::tcp) fn take_rings(&mut self, len_bytes: u32) -> Option<Buffer> {
        let ring_bytes = self.budget.ring_bytes();
        let fits = u64::from(len_bytes) <= ring_bytes;
        let page = fits.then(|| self.budget.state().rings.pop()).flatten()?;
        let order = order_of(len_bytes);
        Some(self.account.buffer(Block { page, order, source: Source::Rings }))
    }

    /// The connection's own pages, for what is no longer than they are.
    #[cold]
    pub(in crate::tcp) fn take_own(&mut self, len_bytes: u32) -> Option<Buffer> {
        if order_of(len_bytes) > OWN_ORDER || !self.has_own() {
            return None;
        }
        let block = self.budget.take_own()?;
        Some(self.account.buffer(block))
    }

    /// Whether nobody uses the connection's own pages.
    pub(in crate::tcp) fn has_own(&self) -> bool {
        self.account.has_own()
    }

    /// Takes a buffer back that nobody uses any more.
    #[inline]
    pub(in crate::tcp) fn give(&mut self, buffer: Buffer) {
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

    /// What nobody uses just now.
    pub(in crate::tcp) fn idle(&self) -> impl Iterator<Item = &Buffer> {
        self.idle.iter().flatten()
    }

    /// Gives back what is idle: somebody waits, or nothing will be needed for a while.
    pub(in crate::tcp) fn tidy(&mut self) {
        if self.idle_bytes > 0 {
            self.empty();
        }
    }

    /// It is known whose connection it is, and with whom it shares what a host may have. It must have
    /// nothing but its own pages.
    pub(in crate::tcp) fn bind(&self, host: &str, standing: Standing) {
        self.account.bind(host, standing);
    }

    /// Whether other hosts wait for what this connection has, or any for what there is not.
    pub(in crate::tcp) fn is_missed(&self) -> bool {
        self.budget.is_wanted(self.account.payer())
    }

    /// Nothing is waited for any more.
    pub(in crate::tcp) fn stop_waiting(&mut self) {
        if core::mem::take(&mut self.is_waiting) {
            self.budget.leave(self.number);
        }
    }

    /// Whether somebody waits for what may be idle here.
    #[inline]
    pub(in crate::tcp) fn is_wanted(&self) -> bool {
        self.idle_bytes > 0 && self.budget.is_scarce()
    }

    pub(in crate::tcp) fn budget(&self) -> &Budget {
        &self.budget
    }

    #[cold]
    fn fetch(&mut self, order: u8) -> Option<Buffer> {
        // What lies idle in other sizes may be what is missing.
        if self.budget.is_scarce() {
            self.tidy();
        }
        let payer = (self.number, self.account.payer());
        let mut found = self.budget.take(payer, &self.bell, order);
        if found.is_none() && self.idle_bytes > 0 {
            self.empty();
            found = self.budget.take(payer, &self.bell, order);
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

    /// Bytes that are not the budget's just now.
    pub(in crate::tcp) fn held(&self) -> Arc<AtomicU64> {
        self.account.held()
    }

    #[cold]
    fn put_away(&mut self, buffer: Buffer) {
        let is_own = buffer.is_own();
        drop(buffer);
        if !is_own {
            self.tidy();
        }
    }

    #[cold]
    fn empty(&mut self) {
        self.idle_bytes = 0;
        let blocks = self.idle.iter_mut().flat_map(|buffers| buffers.drain(..));
        self.budget.give(&self.account, blocks.map(Buffer::into_block));
    }
}

impl Drop for Purse {
    fn drop(&mut self) {
        self.tidy();
        self.stop_waiting();
    }
}

impl fmt::Debug for Purse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Purse {{ {} bytes idle }}", self.idle_bytes)
    }
}
