//! Placeholder for a missing device: every read and write fails.

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Request, Segment, WakeSource,
};

use tenmil_block::CompletionQueue;

/// A missing device, with the limits of another one.
pub(super) struct MissingDevice(pub(super) Limits);

struct MissingDeviceChannel {
    limits: Limits,
    ready: CompletionQueue,
}

impl BlockDevice for MissingDevice {
    fn limits(&self) -> Limits {
        self.0.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (limits, ready) = (self.0.clone(), CompletionQueue::with_depth(self.0.depth_max));
        Ok(Box::new(MissingDeviceChannel { limits, ready }))
    }
}

impl IoChannel for MissingDeviceChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let count = requests.len().min(self.ready.free_count());
        self.ready.extend(requests[..count].iter().map(|request| IoCompletion {
            token: request.token,
            status: IoStatus::UNRECOVERED_READ,
            result: 0,
        }));
        count
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        self.ready.drain_into(completions)
    }
}

impl ChannelWakeup for MissingDeviceChannel {
    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        !self.ready.is_empty()
    }
}
