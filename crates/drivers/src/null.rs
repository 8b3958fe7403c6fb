//! Null device: every request completes, and no data moves.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, HoleReporting, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment, WakeSource,
};

use super::request_validation::SEGMENTS_MAX;
use tenmil_base::Error;
use tenmil_block::CompletionQueue;
use tenmil_block::uri::Uri;
use tenmil_block::{BLOCK_DEFAULT, OpenedDevice, Opener, whole_block_count};

/// A device without storage. A read leaves the memory unchanged, a write is discarded, a compare finds no
/// difference; only the LBA range is checked. What remains is the cost of the layers above.
#[derive(Clone, Debug)]
pub struct NullDevice {
    limits: Limits,
}

#[derive(Debug)]
struct NullChannel {
    limits: Limits,
    /// The completion of a single request submitted while the queue was empty; it precedes the queue.
    /// Token and status are loaded as they were stored. A completion in the queue is loaded as a whole,
    /// which stalls until the stores of its parts are done.
    alone: Option<(u64, IoStatus)>,
    ready: CompletionQueue,
}

const DEPTH_MAX: u32 = 4096;
/// Bytes in the largest request: what an emulated SSD with a transfer limit of 1 MiB needs.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Default size in bytes.
const SIZE_DEFAULT: u64 = 1 << 40;

/// Opens `null:?size=1t&block=512`.
pub(crate) fn open(_: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    if !uri.path().is_empty() {
        let problem = format!("path is `{}`, expected none: null:?size=1t", uri.path());
        return Err(uri.error(problem).into());
    }
    let mut fields = uri.options();
    let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
    let size_bytes = fields.size_value("size")?.unwrap_or(SIZE_DEFAULT);
    fields.reject_unconsumed()?;
    let null = NullDevice::new(block_size, whole_block_count(uri, size_bytes, block_size)?)?;
    Ok(OpenedDevice::without_existing_data(Arc::new(null), "null: no data is transferred"))
}

impl NullDevice {
    /// A device of `block_count` blocks of `block_size` bytes.
    ///
    /// # Errors
    ///
    /// If the block size is not a power of two from 512 to 65536, or `block_count` is zero.
    pub fn new(block_size: u32, block_count: u64) -> Result<Self, Error> {
        super::request_validation::validate_geometry("null", block_size, block_count)?;
        Ok(Self {
            limits: Limits {
                block_size,
                metadata_size: 0,
                block_count,
                request_blocks_max: REQUEST_BYTES_MAX / block_size,
                segments_max: SEGMENTS_MAX,
                optimal_boundary_blocks: 0,
                atomic_write_blocks: 1,
                depth_max: DEPTH_MAX,
                durability: Durability::NonPersistent,
                operations: OperationSet::from_operations(&Operation::ALL),
            },
        })
    }
}

impl BlockDevice for NullDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn hole_reporting(&self) -> HoleReporting {
        HoleReporting::Everywhere
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let ready = CompletionQueue::with_depth(self.limits.depth_max);
        Ok(Box::new(NullChannel { limits: self.limits.clone(), alone: None, ready }))
    }
}

impl NullChannel {
    fn has_completions(&self) -> bool {
        self.alone.is_some() || !self.ready.is_empty()
    }

    /// Not inlined: a single request does not pay for the loop.
    #[inline(never)]
    fn submit_batch(&mut self, requests: &[Request]) -> usize {
        let waiting = usize::from(self.alone.is_some());
        let count = requests.len().min(self.ready.free_count() - waiting);
        let block_count = self.limits.block_count;
        self.ready.extend(requests[..count].iter().map(|request| IoCompletion {
            token: request.token,
            status: range_check_status(request, block_count),
            result: 0,
        }));
        count
    }
}

impl IoChannel for NullChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        match requests {
            [request] if self.alone.is_none() && self.ready.is_empty() => {
                self.alone =
                    Some((request.token, range_check_status(request, self.limits.block_count)));
                1
            }
            _ => self.submit_batch(requests),
        }
    }

    #[inline]
    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        match self.alone {
            Some((token, status)) if completions.remaining() > 0 => {
                self.alone = None;
                completions.push(IoCompletion { token, status, result: 0 });
                1 + if !self.ready.is_empty() { self.ready.drain_into(completions) } else { 0 }
            }
            _ => self.ready.drain_into(completions),
        }
    }
}

impl ChannelWakeup for NullChannel {
    fn wake_at(&self) -> Instant {
        if self.has_completions() { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        self.has_completions()
    }
}

#[inline]
fn range_check_status(request: &Request, block_count: u64) -> IoStatus {
    // The operand is zero unless it is the first source block of a copy. So the larger of the two is
    // checked, without a branch on the operation.
    let first = request.lba.max(request.operand);
    let fits = first.saturating_add(u64::from(request.blocks)) <= block_count;
    if fits { IoStatus::SUCCESS } else { IoStatus::LBA_OUT_OF_RANGE }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{BlockDevice, CompletionBatch, Instant, IoStatus, Operation, Request};

    use super::NullDevice;

    #[test]
    fn null_device_completes_in_order() {
        let mut channel = NullDevice::new(512, 8).unwrap().channel().unwrap();
        let now = Instant::default();
        // LBAs of tokens from 4 on are past the end.
        let request = |token| Request {
            token,
            lba: token * 2,
            blocks: 1,
            operation: Operation::Read,
            ..Request::PLACEHOLDER
        };
        let mut got = Vec::new();
        let mut poll = |channel: &mut Box<dyn tenmil_base::IoChannel>, room| {
            let mut completions = CompletionBatch::with_capacity(room);
            assert_eq!(channel.poll(now, &mut completions), completions.len());
            got.extend(completions.drain().map(|completion| (completion.token, completion.status)));
        };
        assert_eq!(channel.submit(now, &[request(0)], &[]), 1);
        assert!(channel.arm(), "it has an answer");
        poll(&mut channel, 0);
        assert_eq!(channel.submit(now, &[request(1), request(2)], &[]), 2);
        poll(&mut channel, 1);
        assert_eq!(channel.submit(now, &[request(3)], &[]), 1);
        poll(&mut channel, 2);
        assert_eq!(channel.submit(now, &[request(4)], &[]), 1);
        poll(&mut channel, 9);
        assert!(!channel.arm());
        let expected = [0, 1, 2, 3].map(|token| (token, IoStatus::SUCCESS));
        assert_eq!(got[..4], expected);
        assert_eq!(got[4..], [(4, IoStatus::LBA_OUT_OF_RANGE)]);
    }
}
