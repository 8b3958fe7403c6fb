//! Reads that a channel maps itself from its extent cache, without a request to the pool.
//!
//! Such reads are looked up in the cached runs, counted as started, and submitted to the device in a
//! batch with the client's memory. A slot of the channel's table provides their token. It stores their
//! segments only if the device is full.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{CompletionBatch, IoCompletion, IoStatus, Operation, Request, RequestFlags};
use tenmil_volume::VolumeRun;

use super::extent_cache::ExtentCache;
use super::read_epochs::ReadEpochs;

/// The cached reads of a channel, those of a batch and those in flight.
pub(super) struct CachedExtentReads {
    /// Cached runs, valid while `epoch` equals `seen`.
    extents: ExtentCache,
    epoch: Arc<AtomicU64>,
    seen: u64,
    readers: ReadEpochs,
    /// The client's tokens, by slot of the channel's table.
    tokens: Box<[u64]>,
    /// Requests to submit to the device.
    pub(super) batch: Vec<Request>,
    request_blocks_max: u32,
    /// Device blocks in one volume block.
    per_block: u32,
}

/// Marks the token of a cached read.
const KNOWN: u64 = 1 << 32;
/// Bit of its token with the read-epoch bucket that counts it.
const BUCKET_SHIFT: u32 = 33;

impl CachedExtentReads {
    /// For a channel with `depth_max` slots, whose oldest read is published by `readers`.
    pub(super) fn new(
        readers: ReadEpochs,
        epoch: Arc<AtomicU64>,
        limits: &tenmil_base::Limits,
        per_block: u32,
    ) -> Self {
        let depth = limits.depth_max as usize;
        Self {
            extents: ExtentCache::new(limits.block_count),
            seen: epoch.load(Ordering::Acquire),
            epoch,
            readers,
            tokens: vec![0; depth].into(),
            batch: Vec::with_capacity(depth),
            request_blocks_max: limits.request_blocks_max,
            per_block,
        }
    }

    /// Number of reads in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.readers.reads_in_flight()
    }

    /// The device location of a read, as of `seen`.
    #[inline]
    pub(super) fn cached_location(&self, request: &Request) -> Option<u64> {
        if request.operation != Operation::Read
            || !(1..=self.request_blocks_max).contains(&request.blocks)
        {
            return None;
        }
        self.extents.find_run(request.lba, request.blocks.into())
    }

    /// Caches a run. The caller holds the pool lock, which keeps it valid for the call.
    pub(super) fn cache_run(&mut self, block: u64, run: VolumeRun) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch != self.seen {
            self.extents.clear();
            self.seen = epoch;
        }
        self.extents.cache_run(block, run);
    }

    /// Adds a read at location `at` to the batch.
    #[inline]
    pub(super) fn add_read(&mut self, slot: u32, request: &Request, at: u64) {
        self.tokens[slot as usize] = request.token;
        self.batch.push(Request {
            token: KNOWN | u64::from(slot),
            lba: at * u64::from(self.per_block),
            blocks: request.blocks * self.per_block,
            flags: request.flags.without(RequestFlags::HOLES),
            ..*request
        });
    }

    /// Counts the reads of the batch from `first` on as started in this transaction, if their locations
    /// are still valid; they then stay valid until the reads have ended. Otherwise removes them from the
    /// batch and frees their slots.
    #[inline(always)]
    pub(super) fn begin_batch_reads(
        &mut self,
        first: usize,
        transaction: u64,
        free: &mut Vec<u32>,
    ) -> bool {
        let count = self.batch.len() - first;
        let bucket = self.readers.begin_read(transaction, count);
        // After the read epoch is published, so that what is valid now stays valid until it is released.
        if self.epoch.load(Ordering::Acquire) != self.seen {
            self.readers.end_read(bucket, count);
            free.extend(self.batch.drain(first..).map(|read| token_slot(read.token)));
            self.extents.clear();
            return false;
        }
        let bucket = (bucket as u64) << BUCKET_SHIFT;
        self.batch[first..].iter_mut().for_each(|read| read.token |= bucket);
        true
    }

    /// Ends a read before it was submitted to the device. Returns the client's token.
    pub(super) fn abandon_read(&mut self, token: u64) -> u64 {
        self.readers.end_read(token_bucket(token), 1);
        self.tokens[token_slot(token) as usize]
    }

    /// Fails the reads among completions of a device that has lost writes: the client repeats them, and
    /// their locations are looked up anew after the recovery.
    #[cold]
    pub(super) fn interrupt_reads_after_loss(completions: &mut [IoCompletion]) {
        let reads = completions.iter_mut().filter(|completion| completion.token & KNOWN != 0);
        for read in reads.filter(|read| read.status.is_success()) {
            read.status = IoStatus::INTERRUPTED;
        }
    }

    /// Ends the reads among completions of the device, and frees their slots. Their completions get the
    /// client's tokens; all others are removed from `completions` and passed to `other`.
    #[inline]
    pub(super) fn handle_read_completions(
        &mut self,
        completions: &mut CompletionBatch,
        first: usize,
        free: &mut Vec<u32>,
        mut other: impl FnMut(u64, IoStatus),
    ) {
        let mut ended = [0; 2];
        completions.remove_if(first, |completion| {
            if completion.token & KNOWN == 0 {
                other(completion.token, completion.status);
                return true;
            }
            let slot = token_slot(completion.token);
            ended[token_bucket(completion.token)] += 1;
            completion.token = self.tokens[slot as usize];
            free.push(slot);
            false
        });
        for (bucket, count) in ended.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            self.readers.end_read(bucket, count);
        }
    }
}

/// The slot in a token.
#[expect(clippy::cast_possible_truncation, reason = "the low half is the place")]
pub(super) const fn token_slot(token: u64) -> u32 {
    token as u32
}

/// The read-epoch bucket in the token of a cached read.
const fn token_bucket(token: u64) -> usize {
    (token >> BUCKET_SHIFT & 1) as usize
}
