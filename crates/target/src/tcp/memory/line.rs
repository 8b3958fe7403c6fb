//! Those that wait for memory, and which of them is next.
//!
//! Nobody has more than it leaves to others: a host may have another block while it has, with that
//! block, no more than is free, and all hosts of an address three times as much. So whatever some have
//! taken, some is left for who has nothing, and who has least comes first. NQNs and addresses can be had
//! in any number, so an eighth is reserved for hosts that a subsystem names, once one names any; these
//! come before all others, and have no share of an address. The block that is kept back
//! is for a host that has nothing at all, since one that has something gets on with that. Connections
//! of one host are served in the order in which they came, so that a large command of it is not kept
//! from ever having enough by its small ones.

use std::collections::VecDeque;

use ctrl::controller::Bell;

use super::ledger::Payer;
use super::{Block, PAGE_SHIFT, Source, State};

/// Those that wait, oldest first.
pub(super) type Line = VecDeque<Waiter>;

/// One that waits.
pub(super) struct Waiter {
    pub(super) purse: u64,
    pub(super) payer: Payer,
    pub(super) order: u8,
    pub(super) bell: Bell,
}

/// How many times what is free all hosts of an address may have.
const ADDRESS_SHARE: u64 = 3;

impl State {
    /// Whether a host may have another block, and from where.
    pub(super) fn source(&self, payer: Payer, order: u8) -> Option<Source> {
        let bytes = 1_u64 << (PAGE_SHIFT + u32::from(order));
        let free = u64::from(self.buddy.free_pages()) << PAGE_SHIFT;
        let [host, address] = [payer.host, payer.address].map(|at| self.ledger.bytes(at));
        let is_left = !payer.leaves_reserve || bytes + self.reserved_bytes <= free;
        let has_share = is_left && host + bytes <= free && address + bytes <= ADDRESS_SHARE * free;
        if has_share && self.buddy.has(order) {
            return Some(Source::Shared);
        }
        (host == 0 && self.kept.is_some()).then_some(Source::Kept)
    }

    /// A block of the budget, if there is one for this host.
    pub(super) fn block(&mut self, payer: Payer, order: u8) -> Option<Block> {
        let source = self.source(payer, order)?;
        let page = match source {
            Source::Shared => self.buddy.take(order)?,
            _ => self.kept.take()?,
        };
        let block = Block { page, order, source };
        self.charge(payer, block);
        Some(block)
    }

    /// A block is a host's from now on.
    pub(super) fn charge(&mut self, payer: Payer, block: Block) {
        self.note(block);
        for at in [payer.host, payer.address] {
            self.ledger.add(at, block.charged_bytes());
        }
    }

    /// A block has come back.
    pub(super) fn discharge(&mut self, payer: Payer, block: Block) {
        for at in [payer.host, payer.address] {
            self.ledger.subtract(at, block.charged_bytes());
        }
    }

    /// Who is next, of those that wait: where in the line.
    pub(super) fn next(&mut self) -> Option<usize> {
        self.ledger.begin_pass();
        let mut best = None;
        for at in 0..self.line.len() {
            let Waiter { payer, order, .. } = self.line[at];
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

    /// Whether another host waits, or one that memory is missing for and not only its share.
    pub(super) fn is_wanted(&self, payer: Payer) -> bool {
        let is_missing = |order| !self.buddy.has(order) && self.kept.is_none();
        self.line.iter().any(|one| one.payer.host != payer.host || is_missing(one.order))
    }
}
