//! Wait queue of the buffer pool, and the rules by which blocks are granted.
//!
//! No host may hold more than it leaves to others: a host is granted a block if, with that block,
//! it holds at most what is free, and all hosts of its address at most three times as much. So
//! whatever has been allocated, something is left for a host that holds nothing, and the waiting
//! host that holds least is served first. NQNs and addresses can be had
//! in any number, so an eighth is reserved for hosts that a subsystem names, once one names any; these
//! come before all others, and have no share of an address. The reserved block is for a host that holds nothing at
//! all, because a host that holds something makes progress with that. Connections of one host are
//! served in the order of their requests, so that its small commands cannot starve a large one.

use std::collections::VecDeque;

use tenmil_nvme_controller::controller::WakeFn;

use super::ledger::Payer;
use super::{Block, BufferSource, PAGE_SHIFT, PoolState};

/// Waiting connections, oldest first.
pub(super) type Line = VecDeque<BufferWaiter>;

/// Waiting connection.
pub(super) struct BufferWaiter {
    pub(super) quota: u64,
    pub(super) payer: Payer,
    pub(super) order: u8,
    pub(super) waker: WakeFn,
}

/// Limit of all hosts of an address, in multiples of the free memory.
const ADDRESS_SHARE: u64 = 3;

impl PoolState {
    /// BufferSource of the block that a host may be granted, if any.
    pub(super) fn source(&self, payer: Payer, order: u8) -> Option<BufferSource> {
        let bytes = 1_u64 << (PAGE_SHIFT + u32::from(order));
        let free = u64::from(self.buddy.free_pages()) << PAGE_SHIFT;
        let [host, address] = [payer.host, payer.address].map(|at| self.ledger.bytes(at));
        let is_left = !payer.leaves_reserve || bytes + self.reserved_bytes <= free;
        let has_share = is_left && host + bytes <= free && address + bytes <= ADDRESS_SHARE * free;
        if has_share && self.buddy.has(order) {
            return Some(BufferSource::Shared);
        }
        (host == 0 && self.kept.is_some()).then_some(BufferSource::Reserve)
    }

    /// Allocates a block for a host, if the rules allow it.
    pub(super) fn block(&mut self, payer: Payer, order: u8) -> Option<Block> {
        let source = self.source(payer, order)?;
        let page = match source {
            BufferSource::Shared => self.buddy.take(order)?,
            _ => self.kept.take()?,
        };
        let block = Block { page, order, source };
        self.charge(payer, block);
        Some(block)
    }

    /// Charges a block to a host and its address.
    pub(super) fn charge(&mut self, payer: Payer, block: Block) {
        self.note(block);
        for at in [payer.host, payer.address] {
            self.ledger.add(at, block.charged_bytes());
        }
    }

    /// Removes a returned block from the accounts.
    pub(super) fn discharge(&mut self, payer: Payer, block: Block) {
        for at in [payer.host, payer.address] {
            self.ledger.subtract(at, block.charged_bytes());
        }
    }

    /// Index of the waiting connection that is served next.
    pub(super) fn next(&mut self) -> Option<usize> {
        self.ledger.begin_pass();
        let mut best = None;
        for at in 0..self.line.len() {
            let BufferWaiter { payer, order, .. } = self.line[at];
            // Only the oldest connection of each host is considered.
            if !self.ledger.is_first(payer.host) || self.source(payer, order).is_none() {
                continue;
            }
            let had = [payer.host, payer.address].map(|at| self.ledger.bytes(at));
            let key = (payer.leaves_reserve, had);
            if best.is_none_or(|(other, _)| key < other) {
                best = Some((key, at));
            }
        }
        best.map(|(_, at)| at)
    }

    /// Whether another host waits, or any host waits for memory that is used up.
    pub(super) fn is_wanted(&self, payer: Payer) -> bool {
        let is_missing = |order| !self.buddy.has(order) && self.kept.is_none();
        self.line.iter().any(|one| one.payer.host != payer.host || is_missing(one.order))
    }
}
