//! Opening and closing devices by URI, on a small thread pool that may block.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tenmil_base::{IoChannel, OneshotReceiver, oneshot};
use tenmil_block::Claim;
use tenmil_block::uri::Uri;
use tenmil_dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, RegionTable};
use tenmil_linux::Clock;
use tenmil_linux::thread_pool::{BlockingTask, PoolHandle, ThreadPool};
use tenmil_reactor::ThreadHandle;

use super::open_devices::OpenDevices;
use super::{BufferPool, Device};
use tenmil_base::Error;

/// Opens block devices by URI. Clones share one registry of open devices: opening the same URI
/// again returns a handle of the same device, if the claims are compatible.
///
/// Blocking work (files, controllers, name resolution) runs on threads of the opener's own, so
/// openers and devices can be used and dropped on a reactor. Dropping the last opener waits for the
/// work that is in progress, except on a reactor. A device that is still open then is closed by a
/// separate thread when it is dropped. A program that exits at once does not wait for that;
/// [`Device::close`] does.
#[derive(Clone)]
pub struct Opener(pub(super) Arc<OpenParts>);

pub(super) struct OpenParts {
    pub(super) shelf: Arc<OpenDevices>,
    buffers: BufferPool,
    pool: ThreadPool,
}

/// Future of [`Opener::open`]. If it is dropped, the device is closed again.
#[must_use = "a future does nothing unless it is awaited"]
pub struct OpenFuture {
    name: String,
    later: OneshotReceiver<Result<Device, Error>>,
}

/// Default size of the buffer pool, in bytes. Memory that is never used is not backed by pages.
const BUFFER_BYTES: u32 = 64 << 20;

/// Size of the region table. A device needs a few regions for each channel, and so does each device
/// below it.
const REGIONS_MAX: usize = 4096;

/// Number of devices opened or closed at once, and number of such jobs that may be queued.
const THREADS_MAX: usize = 4;
const WAITING_MAX: usize = 1024;

impl Opener {
    /// Creates an opener with 64 MiB of buffers. Pages are backed on first use, and no thread is
    /// started yet.
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub fn new(clock: &Clock) -> Result<Self, Error> {
        Self::with_buffers(clock, BUFFER_BYTES)
    }

    /// Creates an opener with `buffer_bytes` bytes of buffers.
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub fn with_buffers(clock: &Clock, buffer_bytes: u32) -> Result<Self, Error> {
        let refuse = |error: &dyn fmt::Display| {
            Error::environment(format!("{buffer_bytes} bytes of buffers: {error}"))
        };
        let regions = RegionTable::new(REGIONS_MAX);
        let mapping = Mapping::new(buffer_bytes as usize, Backing::Private);
        let memory = regions.add(mapping.map_err(|error| refuse(&error))?);
        let memory = memory.map_err(|error| refuse(&error))?;
        let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
        let buffers = BufferPool::new(DevicePool::new(regions.clone(), memory, kind, store));
        let shelf = Arc::new(OpenDevices::new(regions, *clock));
        let pool = ThreadPool::new(THREADS_MAX, WAITING_MAX);
        Ok(Self(Arc::new(OpenParts { shelf, buffers, pool })))
    }

    /// Buffer pool shared by all devices of this opener.
    pub fn buffers(&self) -> &BufferPool {
        &self.0.buffers
    }

    /// Opens the device that `uri` names and attaches it to `thread`. Returns at once; the returned
    /// future yields the device or the error.
    ///
    /// ```
    /// use tenmil_linux::{Clock, CpuList};
    /// use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};
    /// use tenmil::aio::{Claim, Opener};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = Clock::start();
    /// let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    /// let thread = reactors.spawn(ThreadBuilder::new("storage"))?;
    /// let opener = Opener::new(&clock)?;
    /// let device = opener.open(&"ram:16m".parse()?, Claim::WriteOnce, &thread).wait()?;
    /// assert_eq!(device.limits().block_count, 32768);
    /// # Ok(())
    /// # }
    /// ```
    pub fn open(&self, uri: &Uri, claim: Claim, thread: &ThreadHandle) -> OpenFuture {
        let (sender, later) = oneshot();
        let name = uri.to_string();
        let (uri, thread) = (uri.clone(), thread.clone());
        let (shelf, pool) = (Arc::clone(&self.0.shelf), self.0.pool.handle());
        let buffers = self.0.buffers.clone();
        let job = move || sender.send(open(&shelf, &uri, claim, pool, &thread, &buffers));
        let later = match self.0.pool.submit(BlockingTask::new("open", job)) {
            Ok(()) => later,
            Err(_) => OneshotReceiver::ready(Err(Error::environment(format!(
                "open {name}: {WAITING_MAX} others are being opened or closed, expected fewer"
            )))),
        };
        OpenFuture { name, later }
    }
}

fn open(
    shelf: &OpenDevices,
    uri: &Uri,
    claim: Claim,
    pool: PoolHandle,
    thread: &ThreadHandle,
    buffers: &BufferPool,
) -> Result<Device, Error> {
    let lent = shelf.lend(uri, claim, pool)?;
    let closed = lent.closed();
    let backend: Box<dyn IoChannel> = Box::new(lent);
    Device::attach_to_thread(thread, &uri.to_string(), backend, buffers, closed)
}

impl OpenFuture {
    /// Blocks the calling OS thread until the device is open. Must not be called on a reactor,
    /// which it would block.
    ///
    /// # Errors
    ///
    /// If the URI has an unknown or invalid option, the device cannot be opened, another claim on
    /// it conflicts, or its thread has ended.
    pub fn wait(self) -> Result<Device, Error> {
        let Self { name, later } = self;
        later.wait().unwrap_or_else(|| Err(panicked(&name)))
    }
}

fn panicked(name: &str) -> Error {
    Error::environment(format!("open {name}: the thread that did it panicked"))
}

impl Future for OpenFuture {
    type Output = Result<Device, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = Pin::new(&mut self.later).poll(context);
        polled.map(|opened| opened.unwrap_or_else(|| Err(panicked(&self.name))))
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Opener").field("pool", &self.0.pool).finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenFuture {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Opening").field("name", &self.name).finish_non_exhaustive()
    }
}
