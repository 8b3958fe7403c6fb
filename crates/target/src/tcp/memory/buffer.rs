//! A block of the budget, which has one owner at a time and goes back when that drops it.
//!
//! ```text
//!   Account ◀── Arc ── Buffer ── in a slot, in a purse, in a queue
//!      │                  │ drop
//!      └─ Budget ◀────────┘
//! ```
//!
//! The count of an account's owners changes when a block leaves the budget and when it comes back,
//! which costs a lock anyway. Between a purse and its slots a buffer is moved, and nothing is counted.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use base::Segment;

use super::ledger::{Payer, Standing};
use super::{Budget, OWN_BYTES, OWN_ORDER, PAGE_SHIFT};
#[cfg(test)]
use crate::tcp::plant::{Plant, is_planted};

/// The memory of one command, or of something else that needs some.
pub(in crate::tcp) struct Buffer {
    account: Arc<Account>,
    page: u32,
    order: u8,
    source: Source,
}

/// What a connection has of the budget. It ends with the last of its buffers.
pub(super) struct Account {
    budget: Budget,
    /// Bytes that are not the budget's just now, for whoever wants to know.
    held: Arc<AtomicU64>,
    /// Its two pages are out, of those that every connection has a right to.
    is_own_out: AtomicBool,
    /// Where it is counted: [`Payer`], which changes once, inside the lock of the budget's state or
    /// before anybody else has it.
    host: AtomicU32,
    address: AtomicU32,
    leaves_reserve: AtomicBool,
}

/// Where a block comes from, and goes back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Shared,
    /// The block that is kept back.
    Kept,
    /// A connection's own pages.
    Own,
    /// The block that is set aside for the rings of a connection.
    Rings,
    /// One page of two that belong together, of the block that is kept back.
    KeptHalf,
    /// One of a connection's own pages.
    OwnHalf,
    /// Nowhere: it went back by other means, or nobody may ever use it again.
    Nowhere,
}

/// A block, as the budget sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) page: u32,
    pub(super) order: u8,
    pub(super) source: Source,
}

impl Block {
    /// Which pages of the budget they are.
    pub(super) fn pages(&self) -> Range<u32> {
        self.page..self.page + (1 << self.order)
    }

    /// Bytes by which a block counts as a host's: not what is set aside for every connection.
    pub(super) fn charged_bytes(self) -> u64 {
        match self.source {
            Source::Shared | Source::Kept | Source::KeptHalf => {
                1 << (PAGE_SHIFT + u32::from(self.order))
            }
            Source::Own | Source::OwnHalf | Source::Rings | Source::Nowhere => 0,
        }
    }
}

impl Account {
    pub(super) fn new(budget: &Budget, payer: Payer) -> Arc<Self> {
        Arc::new(Self {
            budget: budget.clone(),
            held: Arc::new(AtomicU64::new(OWN_BYTES.into())),
            is_own_out: AtomicBool::new(false),
            host: AtomicU32::new(payer.host),
            address: AtomicU32::new(payer.address),
            leaves_reserve: AtomicBool::new(payer.leaves_reserve),
        })
    }

    /// Where it is counted.
    pub(super) fn payer(&self) -> Payer {
        Payer {
            host: self.host.load(Ordering::Relaxed),
            address: self.address.load(Ordering::Relaxed),
            leaves_reserve: self.leaves_reserve.load(Ordering::Relaxed),
        }
    }

    /// It is known whose connection it is. Nothing but its own pages may be out.
    pub(super) fn bind(&self, host: &str, standing: Standing) {
        let payer = self.budget.bind(self.payer(), host, standing);
        self.host.store(payer.host, Ordering::Relaxed);
        self.address.store(payer.address, Ordering::Relaxed);
        self.leaves_reserve.store(payer.leaves_reserve, Ordering::Relaxed);
    }

    /// A block is the connection's from now on.
    pub(super) fn buffer(self: &Arc<Self>, block: Block) -> Buffer {
        let Block { page, order, source } = block;
        match source {
            Source::Own => self.is_own_out.store(true, Ordering::Relaxed),
            // Only a number to be shown: it orders nothing.
            _ => _ = self.held.fetch_add(self.counted(block), Ordering::Relaxed),
        }
        Buffer { account: Arc::clone(self), page, order, source }
    }

    /// Bytes that are not the budget's just now.
    pub(super) fn held(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.held)
    }

    /// Whether nobody uses the connection's own pages. Their flag changes on the thread that has the
    /// connection.
    pub(super) fn has_own(&self) -> bool {
        !self.is_own_out.load(Ordering::Relaxed)
    }

    /// A block has gone back. `is_own` says whether it made the connection's own pages whole again.
    pub(super) fn gave(&self, block: Block, is_own: bool) {
        self.held.fetch_sub(self.counted(block), Ordering::Relaxed);
        if is_own {
            self.is_own_out.store(false, Ordering::Relaxed);
        }
    }

    /// Bytes by which a block counts as the connection's. Its own pages always do.
    fn counted(&self, block: Block) -> u64 {
        match block.source {
            Source::Rings => self.budget.ring_bytes(),
            _ => block.charged_bytes(),
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        // Pages that are still read are nobody's for ever, and with them a place.
        self.budget.go(self.payer(), self.has_own());
    }
}

impl Buffer {
    /// The first `len_bytes` of it, in the memory of `budget`. None if it is shorter.
    #[inline]
    pub(in crate::tcp) fn segment(&self, budget: &Budget, len_bytes: u32) -> Option<Segment> {
        #[cfg(test)]
        let is_unchecked = is_planted(Plant::Overwrite);
        #[cfg(not(test))]
        let is_unchecked = false;
        if u64::from(len_bytes) > self.len_bytes() && !is_unchecked {
            return None;
        }
        let whole = budget.whole();
        Some(Segment { offset: whole.offset + self.offset(), len_bytes, region: whole.region })
    }

    /// Two buffers of a page each, the lower first: the halves of one of two pages. What belongs
    /// together goes back together, whenever each of them does.
    pub(in crate::tcp) fn split(mut self) -> Option<[Self; 2]> {
        let source = match self.source {
            Source::Shared => Source::Shared,
            Source::Kept => Source::KeptHalf,
            Source::Own => Source::OwnHalf,
            Source::Rings | Source::KeptHalf | Source::OwnHalf | Source::Nowhere => return None,
        };
        if self.order != OWN_ORDER {
            return None;
        }
        (self.order, self.source) = (0, source);
        let upper =
            Self { account: Arc::clone(&self.account), page: self.page + 1, order: 0, source };
        Some([self, upper])
    }

    /// Nobody ever uses it again, since somebody may read or write it for ever.
    pub(in crate::tcp) fn abandon(mut self) {
        self.account.budget.forget(self.account.payer(), self.block());
        self.source = Source::Nowhere;
    }

    /// Goes back by means of the caller.
    pub(super) fn into_block(mut self) -> Block {
        let block = self.block();
        self.source = Source::Nowhere;
        block
    }

    pub(super) fn block(&self) -> Block {
        Block { page: self.page, order: self.order, source: self.source }
    }

    /// Which pages of the budget they are.
    pub(in crate::tcp) fn pages(&self) -> Range<u32> {
        self.block().pages()
    }

    pub(super) fn order(&self) -> u8 {
        self.order
    }

    /// How long it is.
    #[inline]
    pub(in crate::tcp) fn len_bytes(&self) -> u64 {
        1 << (PAGE_SHIFT + u32::from(self.order))
    }

    /// Whether it is one of those that anybody may have.
    #[inline]
    pub(super) fn is_shared(&self) -> bool {
        self.source == Source::Shared
    }

    /// Whether nobody but its connection could have it.
    pub(in crate::tcp) fn is_own(&self) -> bool {
        matches!(self.source, Source::Own | Source::OwnHalf | Source::Rings)
    }

    /// Where it begins in the budget's memory.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.page) << PAGE_SHIFT
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        if self.source != Source::Nowhere {
            self.account.budget.give(&self.account, [self.block()]);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Buffer {{ {:?} }}", self.block())
    }
}
