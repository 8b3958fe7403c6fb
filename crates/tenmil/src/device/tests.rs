mod dropping;
mod removal;
mod waiting;

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Memory, Operation, OperationSet, Request, Segment, Span,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::{EventLoop, NextStep, Sleeper};
use tenmil_reactor::{
    Reactor, ReactorOptions, Registry, ThreadBuilder, ThreadHandle, TimeSource, UnstartedReactors,
};

use std::sync::Weak;

use super::{Buffer, BufferPool, Device, DeviceThread, IoError};

/// A device that completes requests on demand. The memory of each request in flight is filled with
/// a pattern, which must still be there at the completion.
#[derive(Clone)]
struct ManualDevice(Arc<Mutex<ManualDeviceState>>);

struct ManualDeviceState {
    pool: DevicePool,
    /// Queue depth.
    room: usize,
    held: Vec<(Request, Option<Segment>, u8)>,
    done: Vec<IoCompletion>,
    /// First blocks in the order of submission.
    taken: Vec<u64>,
    status: IoStatus,
    panics: bool,
    /// Panics after it has accepted requests and before it returns their number.
    panics_after_taking: bool,
    /// Number of calls of `arm`.
    arms: u32,
    /// Time at which it must be polled again.
    again_at: Instant,
}

struct ManualChannel {
    slow: ManualDevice,
    limits: Limits,
}

impl ManualDevice {
    fn with_state<T>(&self, work: impl FnOnce(&mut ManualDeviceState) -> T) -> T {
        work(&mut self.0.lock().unwrap())
    }

    fn held_request_count(&self) -> usize {
        self.with_state(|inner| inner.held.len())
    }

    /// Completes the request in flight with this index.
    fn complete_request(&self, index: usize) {
        self.with_state(|inner| {
            let (request, segment, pattern) = inner.held.swap_remove(index);
            if let Some(segment) = segment {
                let mut bytes = vec![0; segment.len_bytes as usize];
                inner.pool.load(segment, &mut bytes).unwrap();
                let is_mine = bytes.iter().all(|byte| *byte == pattern);
                assert!(is_mine, "memory of an unanswered request was handed out: {request:?}");
            }
            let Request { token, .. } = request;
            inner.done.push(IoCompletion { token, status: inner.status, result: 0 });
        });
    }

    fn complete_all(&self) {
        (0..self.held_request_count()).for_each(|_| self.complete_request(0));
    }
}

impl IoChannel for ManualChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let (count, panics) = self.slow.with_state(|inner| {
            let room = inner.room.saturating_sub(inner.held.len() + inner.done.len());
            let count = requests.len().min(room);
            for request in &requests[..count] {
                let has_data = request.segment_count == 1;
                let segment = has_data.then(|| segments[request.segment_first as usize]);
                let pattern = u8::try_from(inner.taken.len() % 255).unwrap() + 1;
                inner.taken.push(request.lba);
                if let Some(segment) = segment {
                    inner.pool.fill(segment, pattern).unwrap();
                }
                inner.held.push((*request, segment, pattern));
            }
            (count, inner.panics_after_taking)
        });
        assert!(!panics, "on purpose");
        count
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let (done, panics) =
            self.slow.with_state(|inner| (std::mem::take(&mut inner.done), inner.panics));
        assert!(!panics, "on purpose");
        completions.append(&done);
        done.len()
    }
}

impl ChannelWakeup for ManualChannel {
    fn wake_at(&self) -> Instant {
        self.slow.with_state(|inner| inner.again_at)
    }

    fn arm(&mut self) -> bool {
        self.slow.with_state(|inner| {
            inner.arms += 1;
            !inner.done.is_empty()
        })
    }
}

/// One reactor in simulated time with a device on it.
struct TestReactor {
    now_ns: Arc<AtomicU64>,
    reactor: Reactor,
    sleeper: Sleeper,
    directory: Arc<Registry>,
    thread: ThreadHandle,
    slow: ManualDevice,
    device: Device,
}

const BLOCK: u32 = 512;
const PAGE: u32 = 4096;

fn buffer_pool(pages: u32) -> DevicePool {
    let regions = RegionTable::new(1);
    let mapping = MemoryMapping::new((pages * PAGE) as usize, MemoryBacking::Private).unwrap();
    let memory = regions.add_mapping(mapping).unwrap();
    DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain)
}

impl TestReactor {
    /// Creates a device with `depth` slots and a queue depth of `room`.
    fn new(depth: u32, room: usize, pages: u32) -> Self {
        let now_ns = Arc::new(AtomicU64::new(1_000_000));
        let now = Instant { ns: 1_000_000 };
        let stopwatch = TimeSource::Simulated(Arc::clone(&now_ns));
        let options = ReactorOptions::default();
        let UnstartedReactors { registry: directory, mut reactors } =
            UnstartedReactors::new(&[0], &options, &stopwatch, now).unwrap();
        let (reactor, sleeper) = reactors.remove(0);
        let thread = directory.spawn(ThreadBuilder::new("storage")).unwrap();
        let pool = buffer_pool(pages);
        let slow = ManualDevice(Arc::new(Mutex::new(ManualDeviceState {
            pool: pool.clone(),
            room,
            held: Vec::new(),
            done: Vec::new(),
            taken: Vec::new(),
            status: IoStatus::SUCCESS,
            panics: false,
            panics_after_taking: false,
            arms: 0,
            again_at: Instant::NEVER,
        })));
        let backend = ManualChannel { slow: slow.clone(), limits: device_limits(depth) };
        let buffers = BufferPool::new(pool);
        let device = attach_device(&thread, "slow", backend, &buffers).unwrap();
        let mut stand = Self { now_ns, reactor, sleeper, directory, thread, slow, device };
        stand.run_iterations(5);
        stand
    }

    /// Runs `count` iterations, a microsecond apart. Returns the result of the last one.
    fn run_iterations(&mut self, count: usize) -> NextStep {
        let mut wait = NextStep::Again;
        for _ in 0..count {
            wait = self.reactor.iterate(self.now());
            self.advance_time(Span::from_us(1));
        }
        wait
    }

    fn now(&self) -> Instant {
        Instant { ns: self.now_ns.load(Ordering::Relaxed) }
    }

    fn advance_time(&self, span: Span) {
        self.now_ns.fetch_add(span.ns, Ordering::Relaxed);
    }

    /// Runs iterations until the reactor wants to sleep, and lets it sleep. False if it stays
    /// awake.
    fn run_until_asleep(&mut self) -> bool {
        for _ in 0..10_000 {
            if let NextStep::SleepUntil(_) = self.run_iterations(1) {
                self.sleeper.announce_sleep();
                if !self.reactor.arm(self.now()) {
                    return true;
                }
                self.sleeper.cancel_sleep();
                self.reactor.disarm(&[]);
                return false;
            }
        }
        false
    }

    fn start_read(&self, lba: u64, buffer: Buffer) -> PolledOperation {
        let device = self.device.clone();
        PolledOperation::new(async move { device.read(lba, buffer).await })
    }

    fn buffer(&self) -> Buffer {
        self.device.buffer(BLOCK).unwrap()
    }

    fn free_bytes(&self) -> u64 {
        self.device.device_state().buffers.free_bytes()
    }
}

/// Attaches a device to a light thread, as no claim of any.
fn attach_device(
    thread: &ThreadHandle,
    name: &str,
    backend: ManualChannel,
    buffers: &BufferPool,
) -> Result<Device, tenmil_base::Error> {
    let (home, backend) = (DeviceThread::new(thread.clone()), Box::new(backend));
    Device::attach_to_thread(&home, name, backend, buffers, Arc::default(), Weak::new())
}

fn device_limits(depth_max: u32) -> Limits {
    Limits {
        block_size: BLOCK,
        metadata_size: 0,
        block_count: 1 << 20,
        request_blocks_max: 256,
        segments_max: 1,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max,
        durability: Durability::NonPersistent,
        operations: OperationSet::from_operations(&Operation::ALL),
    }
}

/// An operation that is polled explicitly when it was woken.
struct PolledOperation {
    future: Pin<Box<dyn Future<Output = Result<Buffer, IoError>> + Send>>,
    woken: Arc<WakeFlag>,
}

#[derive(Default)]
struct WakeFlag(AtomicBool);

impl WakeFlag {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PolledOperation {
    fn new(future: impl Future<Output = Result<Buffer, IoError>> + Send + 'static) -> Self {
        let woken = Arc::new(WakeFlag(AtomicBool::new(true)));
        Self { future: Box::pin(future), woken }
    }

    /// Moves the operation to another task. Returns the waker of the previous one.
    fn move_to_other_task(&mut self) -> Arc<WakeFlag> {
        std::mem::replace(&mut self.woken, Arc::new(WakeFlag(AtomicBool::new(true))))
    }

    /// Polls the operation if it was woken since the last time.
    fn poll(&mut self) -> Option<Result<Buffer, IoError>> {
        if !self.woken.0.swap(false, Ordering::Relaxed) {
            return None;
        }
        let waker = Waker::from(Arc::clone(&self.woken));
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        }
    }
}
