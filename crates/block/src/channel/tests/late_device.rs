//! A device that completes late and out of order, and records its requests.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Random, Request, RequestFlags,
    Segment,
};

/// See the module.
pub(crate) struct LateDevice {
    pub(crate) depth: u32,
    pub(crate) log: Arc<LateLog>,
}

/// Requests to all channels of a device.
#[derive(Default)]
pub(crate) struct LateLog {
    /// Channels that were opened and not dropped.
    pub(crate) open: AtomicU32,
    opened: AtomicU32,
    /// Requests in flight, with the number of the channel.
    pub(crate) in_flight: Mutex<Vec<(u32, Request)>>,
    /// Number of requests accepted by each call.
    pub(crate) batches: Mutex<Vec<usize>>,
    /// Sizes it was set to, and the number of requests in flight at the time.
    pub(crate) sizes: Mutex<Vec<(u64, usize)>>,
    /// While set, channels complete nothing.
    pub(crate) is_stuck: std::sync::atomic::AtomicBool,
}

struct LateChannel {
    number: u32,
    limits: Limits,
    log: Arc<LateLog>,
    random: Random,
    in_flight: Vec<Request>,
}

pub(crate) const BLOCKS: u64 = 1_000;
/// A size that it rejects.
pub(crate) const REFUSED: u64 = 13;

impl LateDevice {
    pub(crate) fn with_depth(depth: u32) -> Self {
        Self { depth, log: Arc::default() }
    }
}

/// The result of a request, which distinguishes it from all others.
pub(crate) fn expected_result(request: &Request) -> u32 {
    u32::try_from(request.lba).unwrap() * 7 + request.operation as u32
}

/// A request for one block.
pub(crate) fn request(operation: Operation, token: u64, lba: u64) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks: u32::from(operation != Operation::Flush),
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

impl BlockDevice for LateDevice {
    fn limits(&self) -> Limits {
        Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: BLOCKS,
            request_blocks_max: 8,
            segments_max: 1,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: self.depth,
            durability: Durability::NonPersistent,
            operations: OperationSet::from_operations(&Operation::ALL),
        }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.log.open.fetch_add(1, Ordering::SeqCst);
        let number = self.log.opened.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(LateChannel {
            number,
            limits: self.limits(),
            log: Arc::clone(&self.log),
            random: Random::new(u64::from(number)),
            in_flight: Vec::new(),
        }))
    }

    fn is_resizable(&self) -> bool {
        true
    }

    /// Accepts every size except [`REFUSED`]: the device has more blocks than its limits declare.
    fn resize(&self, block_count: u64) -> Result<(), Error> {
        let in_flight = self.log.in_flight.lock().unwrap().len();
        self.log.sizes.lock().unwrap().push((block_count, in_flight));
        if block_count == REFUSED { Err(Error::environment("it does not want to")) } else { Ok(()) }
    }
}

impl IoChannel for LateChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
        let room = self.limits.depth_max as usize - self.in_flight.len();
        let taken = &requests[..requests.len().min(room)];
        self.in_flight.extend(taken);
        let logged = taken.iter().map(|request| (self.number, *request));
        self.log.in_flight.lock().unwrap().extend(logged);
        self.log.batches.lock().unwrap().push(taken.len());
        taken.len()
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        if self.withholds_completions() {
            return 0;
        }
        let mut count = 0;
        while !self.in_flight.is_empty() && completions.remaining() > 0 && self.random.chance(3, 4)
        {
            let index = self.random.below(self.in_flight.len() as u64);
            let request = self.in_flight.swap_remove(usize::try_from(index).unwrap());
            let mut log = self.log.in_flight.lock().unwrap();
            let token = (self.number, request.token);
            let logged = log.iter().position(|(number, other)| (*number, other.token) == token);
            log.swap_remove(logged.expect("it was submitted"));
            drop(log);
            let is_good = request.lba % 10 != 9;
            let status = if is_good { IoStatus::SUCCESS } else { IoStatus::UNRECOVERED_READ };
            completions.push(IoCompletion {
                token: request.token,
                status,
                result: expected_result(&request),
            });
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for LateChannel {
    /// A stuck channel has no completions, and would report them.
    fn arm(&mut self) -> bool {
        !self.withholds_completions()
    }
}

impl LateChannel {
    fn withholds_completions(&self) -> bool {
        self.log.is_stuck.load(Ordering::SeqCst)
    }
}

impl Drop for LateChannel {
    fn drop(&mut self) {
        let number = self.number;
        self.log.in_flight.lock().unwrap().retain(|(other, _)| *other != number);
        self.log.open.fetch_sub(1, Ordering::SeqCst);
    }
}
