//! Wait queue of the buffer pool, and the rules by which blocks are granted.
//!
//! No host may hold more than it leaves to others: a host is granted a block if, with that block,
//! it holds at most what is free, and all hosts of its address at most three times as much. So
//! whatever has been allocated, something is left for a host that holds nothing, and the waiting
//! host that holds least is served first. A client can use any number of NQNs and addresses, so an
//! eighth is reserved for hosts that a subsystem lists, once one lists any; these are served before all
//! others, and are not charged to their address. The reserved block is for a host that holds nothing at
//! all, because a host that holds something makes progress with that. Connections of one host are
//! served in the order of their requests, so that its small commands cannot starve a large one.

use std::collections::VecDeque;

use tenmil_nvme_controller::controller::WakeFn;

use super::memory_ledger::ChargedEntries;
use super::{Block, BufferSource, PAGE_SHIFT, PoolState};

/// Waiting connections, oldest first.
pub(super) type WaitQueue = VecDeque<BufferWaiter>;

/// Waiting connection.
pub(super) struct BufferWaiter {
    pub(super) cache: u64,
    pub(super) charged: ChargedEntries,
    pub(super) order: u8,
    pub(super) waker: WakeFn,
}

/// Limit of all hosts of an address, in multiples of the free memory.
const ADDRESS_SHARE: u64 = 3;

impl PoolState {
    /// Source of the block that may be allocated for a host, if any.
    pub(super) fn block_source(&self, charged: ChargedEntries, order: u8) -> Option<BufferSource> {
        let bytes = 1_u64 << (PAGE_SHIFT + u32::from(order));
        let free = u64::from(self.buddy.free_pages()) << PAGE_SHIFT;
        let [host, address] =
            [charged.host, charged.address].map(|at| self.ledger.charged_bytes(at));
        let is_left = !charged.excluded_from_reserve || bytes + self.reserved_bytes <= free;
        let has_share = is_left && host + bytes <= free && address + bytes <= ADDRESS_SHARE * free;
        let may_charge = self.ledger.is_within_limit(charged.host, bytes);
        if has_share && may_charge && self.buddy.has_block(order) {
            return Some(BufferSource::Shared);
        }
        (host == 0 && self.reserve.is_some()).then_some(BufferSource::Reserve)
    }

    /// Allocates a block for a host, if the rules allow it.
    pub(super) fn allocate_block(&mut self, charged: ChargedEntries, order: u8) -> Option<Block> {
        let source = self.block_source(charged, order)?;
        let page = match source {
            BufferSource::Shared => self.buddy.allocate(order)?,
            _ => self.reserve.take()?,
        };
        let block = Block { page, order, source };
        self.charge_block(charged, block);
        Some(block)
    }

    /// Charges a block to a host and its address.
    pub(super) fn charge_block(&mut self, charged: ChargedEntries, block: Block) {
        self.log_allocated_block(block);
        for at in [charged.host, charged.address] {
            self.ledger.charge(at, block.charged_bytes());
        }
    }

    /// Removes a returned block from the accounts.
    pub(super) fn uncharge_block(&mut self, charged: ChargedEntries, block: Block) {
        for at in [charged.host, charged.address] {
            self.ledger.uncharge(at, block.charged_bytes());
        }
    }

    /// Index of the waiting connection that is served next.
    pub(super) fn next_waiter(&mut self) -> Option<usize> {
        self.ledger.begin_wait_queue_pass();
        let mut next = None;
        for at in 0..self.wait_queue.len() {
            let BufferWaiter { charged, order, .. } = self.wait_queue[at];
            // Only the oldest connection of each host is considered.
            if !self.ledger.mark_first_in_pass(charged.host)
                || self.block_source(charged, order).is_none()
            {
                continue;
            }
            let held = [charged.host, charged.address].map(|at| self.ledger.charged_bytes(at));
            let key = (charged.excluded_from_reserve, held);
            if next.is_none_or(|(other, _)| key < other) {
                next = Some((key, at));
            }
        }
        next.map(|(_, at)| at)
    }

    /// Whether another host waits, or any host waits for memory that is used up.
    pub(super) fn is_needed_by_others(&self, charged: ChargedEntries) -> bool {
        let is_missing = |order| !self.buddy.has_block(order) && self.reserve.is_none();
        self.wait_queue.iter().any(|one| one.charged.host != charged.host || is_missing(one.order))
    }
}
