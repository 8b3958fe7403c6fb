//! Slow-I/O log of a device that is served over vfio-user, vhost-user or ublk.
//!
//! ```text
//!   server ── requests ──▶ ObservedChannel ──▶ channel of the device
//!                            │ while there is a threshold: the times of each request, by token
//! ```
//!
//! A server receives a request and offers it to the device in one iteration, and answers it in the iteration
//! in which the device completes it. So a request begins when it is offered first, its stage `queue` lasts
//! until the device accepts it, and its stage `send` takes no time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Error, HoleReporting, Instant,
    IoChannel, IoCompletion, Limits, MediumMemory, Operation, Request, ReservationControl, Segment,
    Span, UtcTime,
};
use tenmil_wire::Status;

use super::{ExportSlowIo, SlowIo, SlowIoSource, SlowIoStages};

/// Slow requests of a served device.
#[derive(Debug)]
pub struct DeviceSlowIo {
    slow_io: ExportSlowIo,
    source: Mutex<Arc<SlowIoSource>>,
    namespace: Option<u32>,
}

/// Device whose requests are observed.
struct ObservedDevice {
    inner: Arc<dyn BlockDevice>,
    slow_io: Arc<DeviceSlowIo>,
}

/// Channel of an observed device.
struct ObservedChannel {
    inner: Box<dyn IoChannel>,
    slow_io: Arc<DeviceSlowIo>,
    /// Accepted requests by token, if there was a threshold when they were submitted.
    in_flight: BTreeMap<u64, ObservedRequest>,
    /// Requests that the device did not accept in the last call, by token, and when they were offered first.
    refused: BTreeMap<u64, Instant>,
}

#[derive(Clone, Copy, Debug)]
struct ObservedRequest {
    operation: Operation,
    lba: u64,
    blocks: u32,
    offered_at: Instant,
    submitted_at: Instant,
}

impl DeviceSlowIo {
    /// The log of a device that is served over a protocol, at `listen` or, with several devices there, as
    /// this namespace.
    #[must_use]
    pub fn new(protocol: &'static str, listen: &str, namespace: Option<u32>) -> Arc<Self> {
        let source =
            SlowIoSource { protocol, export: listen.to_owned(), ..SlowIoSource::default() };
        let (slow_io, source) = (ExportSlowIo::default(), Mutex::new(Arc::new(source)));
        Arc::new(Self { slow_io, source, namespace })
    }

    /// Changes where the device is served, as the log names it.
    pub fn set_listen(&self, listen: &str) {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut source).export = listen.to_owned();
    }

    /// Threshold, count and log.
    #[must_use]
    pub fn export(&self) -> &ExportSlowIo {
        &self.slow_io
    }

    /// The device with its requests observed.
    #[must_use]
    pub fn observe(self: &Arc<Self>, inner: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        Arc::new(ObservedDevice { inner, slow_io: Arc::clone(self) })
    }

    fn report(&self, now: Instant, limits: &Limits, of: ObservedRequest, end: &IoCompletion) {
        let source = self.source.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let has_blocks = !matches!(of.operation, Operation::Flush);
        let block_size = u64::from(limits.block_size);
        // A namespace is addressed by block, a disk by byte.
        let unit = if self.namespace.is_some() { 1 } else { block_size };
        let status = Status(end.status.0);
        self.slow_io.append(SlowIo {
            source,
            operation: of.operation.name(),
            namespace: self.namespace,
            start: has_blocks.then_some(of.lba.saturating_mul(unit)),
            len_bytes: if has_blocks { u64::from(of.blocks) * block_size } else { 0 },
            id: end.token,
            error: (!status.is_success()).then(|| status.name().to_owned()),
            received_at: of.offered_at,
            stages: SlowIoStages {
                wait: Span::default(),
                transfer: None,
                queue: of.submitted_at.since(of.offered_at),
                device: now.since(of.submitted_at),
                send: Some(Span::default()),
            },
            ended_at: UtcTime { unix_us: 0 },
        });
    }
}

impl ObservedChannel {
    /// [`submit`](IoChannel::submit) while there is a threshold, or was one in the last call.
    #[cold]
    fn submit_observed(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let accepted = self.inner.submit(now, requests, segments);
        let mut refused = std::mem::take(&mut self.refused);
        if !self.slow_io.slow_io.is_on() {
            return accepted;
        }
        for (index, request) in requests.iter().enumerate() {
            let offered_at = refused.remove(&request.token).unwrap_or(now);
            if index < accepted {
                let Request { operation, lba, blocks, .. } = *request;
                let observed =
                    ObservedRequest { operation, lba, blocks, offered_at, submitted_at: now };
                self.in_flight.insert(request.token, observed);
            } else {
                self.refused.insert(request.token, offered_at);
            }
        }
        accepted
    }

    /// Reports the slow ones of requests that have completed.
    #[cold]
    fn report_slow(&mut self, now: Instant, completions: &[IoCompletion]) {
        let threshold_ns = self.slow_io.slow_io.threshold_ns();
        for completion in completions {
            let Some(observed) = self.in_flight.remove(&completion.token) else { continue };
            if now.since(observed.offered_at).ns >= threshold_ns {
                self.slow_io.report(now, self.inner.limits(), observed, completion);
            }
        }
    }
}

impl IoChannel for ObservedChannel {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.slow_io.slow_io.is_on() || !self.refused.is_empty() {
            return self.submit_observed(now, requests, segments);
        }
        self.inner.submit(now, requests, segments)
    }

    #[inline]
    fn flush_submissions(&mut self) {
        self.inner.flush_submissions();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        let before = answers.as_slice().len();
        let count = self.inner.poll(now, answers);
        if !self.in_flight.is_empty() {
            self.report_slow(now, &answers.as_slice()[before..]);
        }
        count
    }

    fn fence_writes(&mut self) {
        self.inner.fence_writes();
    }
}

impl ChannelWakeup for ObservedChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&*self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut *self.inner)
    }
}

impl BlockDevice for ObservedDevice {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(ObservedChannel {
            inner: self.inner.channel()?,
            slow_io: Arc::clone(&self.slow_io),
            in_flight: BTreeMap::new(),
            refused: BTreeMap::new(),
        }))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn failure_reason(&self) -> Option<String> {
        self.inner.failure_reason()
    }

    fn identity(&self) -> Option<String> {
        self.inner.identity()
    }

    fn reservations(&self) -> Option<&dyn ReservationControl> {
        self.inner.reservations()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.inner.block_status(lba)
    }

    fn hole_reporting(&self) -> HoleReporting {
        self.inner.hole_reporting()
    }

    fn medium_memory(&self) -> Option<MediumMemory> {
        self.inner.medium_memory()
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.inner.refresh_size()
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.inner.supports_kernel_buffers()
    }

    fn is_resizable(&self) -> bool {
        self.inner.is_resizable()
    }

    fn resize(&self, block_count: u64) -> Result<(), Error> {
        self.inner.resize(block_count)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{
        BlockDevice, CompletionBatch, Instant, IoChannel, Operation, Request, Segment, Span,
    };
    use tenmil_dma::{Region, RegionTable};
    use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};

    use super::{DeviceSlowIo, SlowIoStages};

    const DELAY: Span = Span::from_ms(20);

    /// A channel of a delayed memory, its log, and memory for its requests.
    fn delayed(namespace: Option<u32>) -> (Arc<DeviceSlowIo>, Box<dyn IoChannel>, Region) {
        let regions = RegionTable::new(16);
        let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, 512, 64).unwrap());
        let latency = LatencySpec { mean: DELAY, p99: None };
        let delays = DelaySettings { read: latency, write: latency };
        let device = Arc::new(DelayDevice::new(ram, delays, 1).unwrap());
        let slow_io = DeviceSlowIo::new("vhost-user", "vhost-user:/run/disk", namespace);
        let memory = regions.allocate_region(4096).unwrap();
        let channel = slow_io.observe(device).channel().unwrap();
        (slow_io, channel, memory)
    }

    fn block_of(memory: &Region) -> Segment {
        memory.segment().slice(0, 512).unwrap()
    }

    fn read(token: u64) -> Request {
        let operation = Operation::Read;
        Request { token, lba: 7, blocks: 1, segment_count: 1, operation, ..Request::PLACEHOLDER }
    }

    /// Polls at a time; returns the number of completions.
    fn poll(channel: &mut dyn IoChannel, now: Instant) -> usize {
        channel.flush_submissions();
        let mut completions = CompletionBatch::with_capacity(8);
        channel.poll(now, &mut completions)
    }

    #[test]
    fn request_is_logged_if_it_takes_as_long_as_the_threshold() {
        for (threshold, logged) in [(Span::from_ms(5), 1), (DELAY, 1), (Span::from_ms(21), 0)] {
            let (slow_io, mut channel, memory) = delayed(None);
            slow_io.export().set_threshold(Some(threshold));
            let (begin, end) = (Instant { ns: 1_000 }, Instant { ns: 1_000 + DELAY.ns });
            assert_eq!(channel.submit(begin, &[read(3)], &[block_of(&memory)]), 1);
            assert_eq!(poll(&mut *channel, begin), 0);
            assert_eq!(poll(&mut *channel, end), 1);
            assert_eq!(slow_io.export().count(), logged, "{threshold}");
            let Some(slow) = slow_io.export().log().next_command() else { continue };
            let expected = SlowIoStages {
                device: DELAY,
                send: Some(Span::default()),
                ..SlowIoStages::default()
            };
            assert_eq!((slow.stages, slow.received_at), (expected, begin));
            assert_eq!(
                slow.to_string(),
                "slow I/O: read of vhost-user:/run/disk, 512 bytes at 3584: 20.000 ms, wait 0.000 ms, queue \
                 0.000 ms, device 20.000 ms, send 0.000 ms; command 0x3, success"
            );
        }
    }

    #[test]
    fn threshold_applies_to_requests_submitted_from_then_on() {
        let (slow_io, mut channel, memory) = delayed(Some(2));
        let at = |ms| Instant { ns: 0 }.after(Span::from_ms(ms));
        assert_eq!(channel.submit(at(0), &[read(1)], &[block_of(&memory)]), 1);
        slow_io.export().set_threshold(Some(Span::from_ms(1)));
        assert_eq!(poll(&mut *channel, at(30)), 1);
        assert_eq!(slow_io.export().count(), 0, "its submission was not observed");
        assert_eq!(channel.submit(at(30), &[read(1)], &[block_of(&memory)]), 1);
        slow_io.export().set_threshold(None);
        assert_eq!(poll(&mut *channel, at(60)), 1);
        assert_eq!(slow_io.export().count(), 0, "it was switched off");
        slow_io.export().set_threshold(Some(Span::from_ms(1)));
        slow_io.set_listen("vfio-user:/run/nvme");
        assert_eq!(channel.submit(at(60), &[read(1)], &[block_of(&memory)]), 1);
        assert_eq!(poll(&mut *channel, at(90)), 1);
        let line = slow_io.export().log().next_command().unwrap().to_string();
        assert!(line.contains("of vfio-user:/run/nvme namespace 2, block 7, 512 bytes"), "{line}");
    }

    #[test]
    fn request_that_the_device_refuses_at_first_waits_in_the_queue() {
        let (slow_io, mut channel, memory) = delayed(None);
        slow_io.export().set_threshold(Some(Span::from_ms(1)));
        let at = |ms| Instant { ns: 0 }.after(Span::from_ms(ms));
        let depth = u64::from(channel.limits().depth_max);
        let requests: Vec<Request> = (0..depth + 1).map(read).collect();
        let accepted = channel.submit(at(0), &requests, &[block_of(&memory)]);
        assert!(accepted < requests.len(), "{accepted} of {} were accepted", requests.len());
        channel.flush_submissions();
        let mut completions = CompletionBatch::with_capacity(requests.len());
        assert_eq!(channel.poll(at(20), &mut completions), accepted);
        while slow_io.export().log().next_command().is_some() {}
        assert_eq!(channel.submit(at(21), &requests[accepted..], &[block_of(&memory)]), 1);
        assert_eq!(poll(&mut *channel, at(41)), 1);
        let last = slow_io.export().log().next_command().unwrap();
        let stages = (last.stages.queue, last.stages.device);
        assert_eq!((last.id, stages), (depth, (Span::from_ms(21), DELAY)));
    }
}
