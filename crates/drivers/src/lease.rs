//! Devices of a gateway group: one that is served until an instant, and one that is not open here.
//!
//! The lease of the gateway is one word, the instant at which it ends. A channel loads it once per batch and
//! compares it with the time of the iteration: a process that was stopped and goes on submits nothing from the
//! next iteration on. A request that was submitted before is on its way to the medium; only a fence of the
//! medium stops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Durability, Error, Instant,
    IoChannel, IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, RequestFlags,
    Segment,
};
use tenmil_block::CompletionQueue;

/// Instant at which a lease ends. Clones are the same lease.
#[derive(Clone, Debug, Default)]
pub struct LeaseEnd(Arc<AtomicU64>);

/// A device that is served until a lease ends, without a volatile cache: what is acknowledged is on the medium,
/// so that another gateway finds it there.
pub struct LeasedDevice {
    inner: Arc<dyn BlockDevice>,
    lease: LeaseEnd,
    limits: Limits,
    /// Whether writes are forced to the medium.
    is_forced: bool,
}

/// A device that another gateway has open. Each request completes with the status of an inaccessible ANA group.
#[derive(Debug)]
pub struct UnopenedDevice {
    limits: Limits,
}

struct LeasedChannel {
    inner: Box<dyn IoChannel>,
    lease: LeaseEnd,
    limits: Limits,
    is_forced: bool,
    /// Requests accepted and not completed.
    outstanding: usize,
    /// The batch being submitted, with forced writes.
    batch: Vec<Request>,
    /// Completions of requests after the end of the lease.
    ready: CompletionQueue,
}

struct UnopenedChannel {
    limits: Limits,
    ready: CompletionQueue,
}

/// Asymmetric Access Inaccessible (NVM command set, path related status 02h): not executed, and the host
/// retries on another path.
const INACCESSIBLE: IoStatus = IoStatus(0x302);
/// Largest number of requests that are changed at once.
const BATCH: usize = 256;

impl LeaseEnd {
    /// Sets the end.
    pub fn set(&self, end: Instant) {
        // No other memory is published by it.
        self.0.store(end.ns, Ordering::Relaxed);
    }

    /// Whether the lease has ended.
    #[inline]
    #[must_use]
    pub fn has_ended(&self, now: Instant) -> bool {
        now.ns >= self.0.load(Ordering::Relaxed)
    }
}

impl LeasedDevice {
    /// A device that is served until the lease ends.
    ///
    /// # Errors
    ///
    /// If the device is memory of this process, which no other gateway can have.
    pub fn new(inner: Arc<dyn BlockDevice>, lease: LeaseEnd) -> Result<Self, Error> {
        let below = inner.limits();
        let is_forced = match below.durability {
            Durability::Persistent => false,
            Durability::VolatileCache => true,
            Durability::NonPersistent => {
                let text = "its blocks are memory of this process, expected a device that each gateway \
                            of the group reaches";
                return Err(Error::usage(text));
            }
        };
        // A deallocation cannot be forced to the medium: another gateway might find the former blocks.
        let unforced = OperationSet::from_operations(&[Operation::Deallocate]);
        let operations =
            if is_forced { below.operations.without(unforced) } else { below.operations };
        let limits = Limits { durability: Durability::Persistent, operations, ..below };
        Ok(Self { inner, lease, limits, is_forced })
    }
}

impl BlockDevice for LeasedDevice {
    fn limits(&self) -> Limits {
        Limits { block_count: self.inner.limits().block_count, ..self.limits.clone() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(LeasedChannel {
            inner: self.inner.channel()?,
            lease: self.lease.clone(),
            is_forced: self.is_forced,
            outstanding: 0,
            batch: Vec::with_capacity(BATCH),
            ready: CompletionQueue::with_depth(self.limits.depth_max),
            limits: self.limits(),
        }))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn failure_reason(&self) -> Option<String> {
        self.inner.failure_reason()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.inner.block_status(lba)
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.inner.refresh_size()
    }
}

impl LeasedChannel {
    /// Completes requests without executing them. Returns their number.
    #[cold]
    fn refuse(&mut self, requests: &[Request]) -> usize {
        let room = (self.limits.depth_max as usize).saturating_sub(self.outstanding);
        let refused = &requests[..requests.len().min(room)];
        for request in refused {
            let completion = IoCompletion { token: request.token, status: INACCESSIBLE, result: 0 };
            self.ready.push(completion);
        }
        self.outstanding += refused.len();
        refused.len()
    }

    fn submit_forced(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.batch.clear();
        self.batch.extend(requests.iter().take(BATCH).map(|request| {
            let is_write = matches!(
                request.operation,
                Operation::Write
                    | Operation::WriteZeroes
                    | Operation::Copy
                    | Operation::CompareAndWrite
            );
            let forced = request.flags.union(RequestFlags::FUA);
            Request { flags: if is_write { forced } else { request.flags }, ..*request }
        }));
        self.inner.submit(now, &self.batch, segments)
    }
}

impl IoChannel for LeasedChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.lease.has_ended(now) {
            return self.refuse(requests);
        }
        let accepted = if self.is_forced {
            self.submit_forced(now, requests, segments)
        } else {
            self.inner.submit(now, requests, segments)
        };
        self.outstanding += accepted;
        accepted
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let refused = self.ready.drain_into(completions);
        let first = completions.len();
        let count = refused + self.inner.poll(now, completions);
        self.outstanding = self.outstanding.saturating_sub(count);
        let has_ended = completions.len() > first && self.lease.has_ended(now);
        for completion in completions.tail_mut(first) {
            // The medium may be fenced, or is lost to this gateway: the failure is of this path, and not of the medium.
            let is_lost = has_ended || completion.status == IoStatus::NO_DEVICE;
            if !completion.status.is_success() && is_lost {
                completion.status = IoStatus::PATH_ERROR;
            }
        }
        count
    }

    fn fence_writes(&mut self) {
        self.inner.fence_writes();
    }
}

impl ChannelWakeup for LeasedChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&*self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut *self.inner)
    }

    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { self.inner.wake_at() } else { Instant::default() }
    }

    fn arm(&mut self) -> bool {
        let is_busy_below = self.inner.arm();
        !self.ready.is_empty() || is_busy_below
    }
}

impl UnopenedDevice {
    /// A device with the limits that it has where it is open.
    #[must_use]
    pub const fn new(limits: Limits) -> Self {
        Self { limits }
    }
}

impl BlockDevice for UnopenedDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let ready = CompletionQueue::with_depth(self.limits.depth_max);
        Ok(Box::new(UnopenedChannel { limits: self.limits.clone(), ready }))
    }

    fn block_status(&self, _: u64) -> Result<BlockExtent, Error> {
        Err(Error::environment("another gateway of the group has the device open"))
    }
}

impl IoChannel for UnopenedChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
        let room = (self.limits.depth_max as usize).saturating_sub(self.ready.len());
        let refused = &requests[..requests.len().min(room)];
        for request in refused {
            let completion = IoCompletion { token: request.token, status: INACCESSIBLE, result: 0 };
            self.ready.push(completion);
        }
        refused.len()
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        self.ready.drain_into(completions)
    }
}

impl ChannelWakeup for UnopenedChannel {
    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { Instant::NEVER } else { Instant::default() }
    }

    fn arm(&mut self) -> bool {
        !self.ready.is_empty()
    }
}

impl std::fmt::Debug for LeasedDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("LeasedDevice").field("lease", &self.lease).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tenmil_base::{
        BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
        IoCompletion, IoStatus, Limits, Operation, Request, RequestFlags, Segment,
    };

    use super::{INACCESSIBLE, LeaseEnd, LeasedDevice, UnopenedDevice};
    use crate::NullDevice;

    /// Records the requests that reach it, and completes them with a status.
    #[derive(Clone)]
    struct Recorder {
        limits: Limits,
        executed: Arc<Mutex<Vec<Request>>>,
        status: IoStatus,
        completions: Vec<IoCompletion>,
    }

    impl Recorder {
        fn new(durability: Durability, status: IoStatus) -> Self {
            let limits = NullDevice::new(512, 8).unwrap().limits();
            let limits = Limits { durability, ..limits };
            Self { limits, executed: Arc::default(), status, completions: Vec::new() }
        }
    }

    impl BlockDevice for Recorder {
        fn limits(&self) -> Limits {
            self.limits.clone()
        }

        fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
            Ok(Box::new(self.clone()))
        }
    }

    impl IoChannel for Recorder {
        fn limits(&self) -> &Limits {
            &self.limits
        }

        fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
            self.executed.lock().unwrap().extend_from_slice(requests);
            let status = self.status;
            let done = |request: &Request| IoCompletion { token: request.token, status, result: 0 };
            self.completions.extend(requests.iter().map(done));
            requests.len()
        }

        fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
            completions.append(&self.completions);
            std::mem::take(&mut self.completions).len()
        }
    }

    impl ChannelWakeup for Recorder {}

    fn request(operation: Operation) -> Request {
        Request { operation, blocks: 1, token: 7, ..Request::PLACEHOLDER }
    }

    /// Submits a request at a time, and returns its status as it is polled at another.
    fn execute(channel: &mut dyn IoChannel, [submitted, polled]: [u64; 2]) -> IoStatus {
        let write = request(Operation::Write);
        assert_eq!(channel.submit(Instant { ns: submitted }, &[write], &[]), 1);
        let mut completions = CompletionBatch::with_capacity(8);
        assert_eq!(channel.poll(Instant { ns: polled }, &mut completions), 1);
        assert_eq!(completions.as_slice()[0].token, 7);
        completions.as_slice()[0].status
    }

    #[test]
    fn request_after_the_end_of_the_lease_is_not_executed() {
        let device = Recorder::new(Durability::Persistent, IoStatus::SUCCESS);
        let lease = LeaseEnd::default();
        let leased = LeasedDevice::new(Arc::new(device.clone()), lease.clone()).unwrap();
        let mut channel = leased.channel().unwrap();
        assert_eq!(execute(&mut *channel, [1, 1]), INACCESSIBLE, "there is no lease yet");
        lease.set(Instant { ns: 100 });
        assert_eq!(execute(&mut *channel, [99, 99]), IoStatus::SUCCESS);
        assert_eq!(execute(&mut *channel, [100, 100]), INACCESSIBLE);
        assert_eq!(device.executed.lock().unwrap().len(), 1);
        lease.set(Instant { ns: 200 });
        assert_eq!(execute(&mut *channel, [150, 150]), IoStatus::SUCCESS);
    }

    #[test]
    fn failure_after_the_end_of_the_lease_is_of_the_path() {
        let device = Recorder::new(Durability::Persistent, IoStatus::WRITE_FAULT);
        let lease = LeaseEnd::default();
        lease.set(Instant { ns: 100 });
        let leased = LeasedDevice::new(Arc::new(device), lease).unwrap();
        let mut channel = leased.channel().unwrap();
        assert_eq!(execute(&mut *channel, [1, 99]), IoStatus::WRITE_FAULT);
        assert_eq!(execute(&mut *channel, [1, 100]), IoStatus::PATH_ERROR);
    }

    #[test]
    fn device_that_is_lost_here_may_be_reached_on_another_path() {
        let device = Recorder::new(Durability::Persistent, IoStatus::NO_DEVICE);
        let lease = LeaseEnd::default();
        lease.set(Instant::NEVER);
        let leased = LeasedDevice::new(Arc::new(device), lease).unwrap();
        assert_eq!(execute(&mut *leased.channel().unwrap(), [1, 1]), IoStatus::PATH_ERROR);
    }

    #[test]
    fn writes_to_a_volatile_cache_are_forced_and_no_cache_is_reported() {
        for (durability, is_forced) in
            [(Durability::VolatileCache, true), (Durability::Persistent, false)]
        {
            let device = Recorder::new(durability, IoStatus::SUCCESS);
            let lease = LeaseEnd::default();
            lease.set(Instant::NEVER);
            let leased = LeasedDevice::new(Arc::new(device.clone()), lease).unwrap();
            assert_eq!(leased.limits().durability, Durability::Persistent);
            let trims = leased.limits().operations.has(Operation::Deallocate);
            assert_eq!(trims, !is_forced && device.limits.operations.has(Operation::Deallocate));
            let mut channel = leased.channel().unwrap();
            let both = [request(Operation::Write), request(Operation::Read)];
            assert_eq!(channel.submit(Instant { ns: 1 }, &both, &[]), 2);
            let executed = device.executed.lock().unwrap();
            assert_eq!(executed[0].flags.has(RequestFlags::FUA), is_forced);
            assert!(!executed[1].flags.has(RequestFlags::FUA), "reads are not forced");
        }
    }

    #[test]
    fn memory_of_this_process_is_rejected() {
        let device = Recorder::new(Durability::NonPersistent, IoStatus::SUCCESS);
        let error = LeasedDevice::new(Arc::new(device), LeaseEnd::default()).unwrap_err();
        assert!(error.text.contains("memory of this process"), "{error}");
    }

    #[test]
    fn unopened_device_executes_nothing() {
        let limits = NullDevice::new(512, 8).unwrap().limits();
        let mut channel = UnopenedDevice::new(limits).channel().unwrap();
        assert_eq!(execute(&mut *channel, [1, 1]), INACCESSIBLE);
    }
}
