//! A backend controlled by a test.

use std::sync::{Arc, Mutex};

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Operation, OperationSet, Request, RequestFlags, Segment,
};

/// Keeps accepted requests until the test completes them.
#[derive(Clone)]
pub(crate) struct ScriptedChannel {
    limits: Limits,
    shared: Arc<Mutex<ScriptedState>>,
}

#[derive(Default)]
struct ScriptedState {
    /// Number of further requests that it accepts.
    room: usize,
    batches: Vec<usize>,
    taken: Vec<(Request, Vec<Segment>)>,
    completions: Vec<IoCompletion>,
    flushes: usize,
}

impl ScriptedChannel {
    pub(crate) fn new(limits: Limits, room: usize) -> Self {
        let shared = ScriptedState { room, ..ScriptedState::default() };
        Self { limits, shared: Arc::new(Mutex::new(shared)) }
    }

    /// Changes the size of the device.
    pub(crate) fn resize(&mut self, block_count: u64) {
        self.limits.block_count = block_count;
    }

    pub(crate) fn add_free_entries(&self, room: usize) {
        self.shared.lock().unwrap().room += room;
    }

    /// Requests accepted since the last call, oldest first.
    pub(crate) fn take_accepted(&self) -> Vec<(Request, Vec<Segment>)> {
        std::mem::take(&mut self.shared.lock().unwrap().taken)
    }

    /// Lengths of the batches of which any request was accepted since the last call.
    pub(crate) fn batch_sizes(&self) -> Vec<usize> {
        std::mem::take(&mut self.shared.lock().unwrap().batches)
    }

    /// Number of calls of `flush` since the last call.
    pub(crate) fn flush_count(&self) -> usize {
        std::mem::take(&mut self.shared.lock().unwrap().flushes)
    }

    pub(crate) fn complete_request(&self, token: u64, status: IoStatus, result: u32) {
        self.shared.lock().unwrap().completions.push(IoCompletion { token, status, result });
    }
}

impl IoChannel for ScriptedChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut shared = self.shared.lock().unwrap();
        let count = requests.len().min(shared.room);
        shared.room -= count;
        if count > 0 {
            shared.batches.push(count);
        }
        for request in &requests[..count] {
            let first = request.segment_first as usize;
            let own = usize::from(request.segment_count) + usize::from(request.metadata_count);
            shared.taken.push((*request, segments[first..first + own].to_vec()));
        }
        count
    }

    fn flush_submissions(&mut self) {
        self.shared.lock().unwrap().flushes += 1;
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let mut shared = self.shared.lock().unwrap();
        let count = completions.remaining().min(shared.completions.len());
        shared.completions.drain(..count).for_each(|completion| completions.push(completion));
        count
    }

    fn accept_write_losses(&mut self) -> Result<(), Error> {
        Err(Error::environment("on purpose"))
    }
}

impl ChannelWakeup for ScriptedChannel {
    fn arm(&mut self) -> bool {
        !self.shared.lock().unwrap().completions.is_empty()
    }
}

/// Limits with blocks of 512 bytes, and at most 8 blocks and 2 segments in a request.
pub(crate) fn limits() -> Limits {
    Limits {
        block_size: 512,
        metadata_size: 0,
        block_count: 1000,
        request_blocks_max: 8,
        segments_max: 2,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 100,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&[
            Operation::Read,
            Operation::Write,
            Operation::Flush,
        ]),
    }
}

/// A request without memory.
pub(crate) fn request(operation: Operation, token: u64, lba: u64, blocks: u32) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks,
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

/// Polls once, for at most ten completions.
pub(crate) fn poll(backend: &mut impl IoChannel, now: Instant) -> Vec<IoCompletion> {
    let mut completions = CompletionBatch::with_capacity(10);
    let count = backend.poll(now, &mut completions);
    assert_eq!(count, completions.as_slice().len());
    completions.drain().collect()
}
