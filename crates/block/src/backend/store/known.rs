//! Reads of which the store is not asked, because their channel knows where the blocks lie.
//!
//! They are found in the runs that the channel remembers, counted as begun, and sent to the device by
//! the batch, with the memory that whoever asked has named: a place of the channel's table is taken for
//! the token, and for the memory only if the device has no room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Answers, Operation, Outcome, Request};
use volume::Run;

use super::extents::Extents;
use super::readers::Readers;

/// The known reads of a channel, those of a batch and those under way.
pub(super) struct Known {
    /// Where blocks lie, true while `epoch` is what was `seen`.
    extents: Extents,
    epoch: Arc<AtomicU64>,
    seen: u64,
    readers: Readers,
    /// By the place in the channel's table.
    reads: Box<[Read]>,
    /// What goes to the device.
    pub(super) batch: Vec<Request>,
    request_blocks_max: u32,
    /// Blocks of the device in one of the volume.
    per_block: u32,
}

/// What the answer to a read needs.
#[derive(Clone, Copy, Debug, Default)]
struct Read {
    /// That of whoever asked.
    token: u64,
    /// The one for which it counts.
    bucket: usize,
}

/// Marks the token of a known read.
const KNOWN: u64 = 1 << 32;

impl Known {
    /// Of a channel with so many places, that says in the seat of `readers` how old its reads are.
    pub(super) fn new(
        readers: Readers,
        epoch: Arc<AtomicU64>,
        limits: &base::Limits,
        per_block: u32,
    ) -> Self {
        let depth = limits.depth_max as usize;
        Self {
            extents: Extents::of(limits.block_count),
            seen: epoch.load(Ordering::Acquire),
            epoch,
            readers,
            reads: vec![Read::default(); depth].into(),
            batch: Vec::with_capacity(depth),
            request_blocks_max: limits.request_blocks_max,
            per_block,
        }
    }

    /// How many are under way.
    pub(super) fn under_way(&self) -> usize {
        self.readers.under_way()
    }

    /// Where the blocks of a read lay when the runs were `seen`.
    #[inline]
    pub(super) fn find(&self, request: &Request) -> Option<u64> {
        if request.operation != Operation::Read
            || !(1..=self.request_blocks_max).contains(&request.blocks)
        {
            return None;
        }
        self.extents.find(request.lba, request.blocks.into())
    }

    /// Remembers a run of which somebody knows, until the store's lock is let go, that it is true.
    pub(super) fn keep(&mut self, block: u64, run: Run) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch != self.seen {
            self.extents.clear();
            self.seen = epoch;
        }
        self.extents.keep(block, run);
    }

    /// Puts a read into the batch, from where its blocks lie.
    #[inline]
    pub(super) fn add(&mut self, slot: u32, request: &Request, at: u64) {
        self.reads[slot as usize].token = request.token;
        self.batch.push(Request {
            token: KNOWN | u64::from(slot),
            lba: at * u64::from(self.per_block),
            blocks: request.blocks * self.per_block,
            ..*request
        });
    }

    /// Counts the reads of the batch from `first` on as begun in this transaction, if what was found of
    /// them is true and stays so until they have ended; or takes them out of the batch and gives their
    /// places back.
    #[inline]
    pub(super) fn begin(&mut self, first: usize, transaction: u64, free: &mut Vec<u32>) -> bool {
        let count = self.batch.len() - first;
        let bucket = self.readers.begin(transaction, count);
        // After the seat was taken, so that what is true now stays true until it is left.
        if self.epoch.load(Ordering::Acquire) != self.seen {
            self.readers.end(bucket, count);
            free.extend(self.batch.drain(first..).map(|read| slot_of(read.token)));
            self.extents.clear();
            return false;
        }
        for read in &self.batch[first..] {
            self.reads[slot_of(read.token) as usize].bucket = bucket;
        }
        true
    }

    /// One has ended before it came to the device. Returns the token of whoever asked.
    pub(super) fn give_up(&mut self, slot: u32) -> u64 {
        let Read { token, bucket } = self.reads[slot as usize];
        self.readers.end(bucket, 1);
        token
    }

    /// Ends those whose answers the device has brought, and gives their places back. The answers get the
    /// tokens of whoever asked; all others of them are taken out and go to `other`.
    #[inline]
    pub(super) fn end(
        &mut self,
        answers: &mut Answers,
        first: usize,
        free: &mut Vec<u32>,
        mut other: impl FnMut(u64, Outcome),
    ) {
        let mut ended = [0; 2];
        answers.sift(first, |answer| {
            if answer.token & KNOWN == 0 {
                other(answer.token, answer.outcome);
                return true;
            }
            let slot = slot_of(answer.token);
            let Read { token, bucket } = self.reads[slot as usize];
            answer.token = token;
            ended[bucket] += 1;
            free.push(slot);
            false
        });
        for (bucket, count) in ended.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            self.readers.end(bucket, count);
        }
    }
}

/// The place in a token.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the place")]
pub(super) const fn slot_of(token: u64) -> u32 {
    token as u32
}
