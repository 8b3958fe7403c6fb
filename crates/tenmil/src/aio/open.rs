//! Devices by name, opened and closed by a few threads that may wait.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base::Backend;
use block::Claim;
use block::uri::Uri;
use dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions};
use host::Clock;
use host::pool::{Intake, Job, Pool};
use reactor::Handle;

use super::later::{Later, pair};
use super::shelf::Shelf;
use super::{Buffers, Device};
use crate::Refused;

/// Opens block devices by name. Clones are the same opener, and so are the devices that it has open:
/// who opens one by the same name gets a handle of the same, if their claims go together.
///
/// Whatever may block (files, controllers, names) is done by a few threads of its own, so a reactor
/// may open and drop devices, and openers too. When the last opener goes, it waits for what these
/// threads are doing, unless it goes on a reactor. A device that is open then is closed by a thread
/// of its own when it is dropped; a program that ends at once does not wait for it, and
/// [`Device::close`] does.
#[derive(Clone)]
pub struct Opener(pub(super) Arc<Parts>);

pub(super) struct Parts {
    pub(super) shelf: Arc<Shelf>,
    buffers: Buffers,
    pool: Pool,
}

/// A device that is being opened. If this is dropped, it is closed again.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Opening {
    name: String,
    later: Later<Result<Device, Refused>>,
}

/// Bytes of buffers, unless somebody says otherwise. What is not used costs nothing.
const BUFFER_BYTES: u32 = 64 << 20;

/// Places for memory: a device takes a few for each channel, and so do those it stands on.
const REGIONS_MAX: usize = 4096;

/// How many devices are opened or closed at once, and how many wait for that.
const THREADS_MAX: usize = 4;
const WAITING_MAX: usize = 1024;

impl Opener {
    /// An opener with 64 MiB of buffers, which cost nothing before they are used. Starts no thread
    /// yet.
    ///
    /// # Errors
    ///
    /// If there is no memory.
    pub fn new(clock: &Clock) -> Result<Self, Refused> {
        Self::with_buffers(clock, BUFFER_BYTES)
    }

    /// An opener with so many bytes of buffers.
    ///
    /// # Errors
    ///
    /// If there is no memory.
    pub fn with_buffers(clock: &Clock, buffer_bytes: u32) -> Result<Self, Refused> {
        let refuse = |error: &dyn fmt::Display| {
            Refused::machine(format!("{buffer_bytes} bytes of buffers: {error}"))
        };
        let regions = Regions::new(REGIONS_MAX);
        let mapping = Mapping::new(buffer_bytes as usize, Backing::Private);
        let memory = regions.add(mapping.map_err(|error| refuse(&error))?);
        let memory = memory.map_err(|error| refuse(&error))?;
        let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
        let buffers = Buffers::new(DevicePool::new(regions.clone(), memory, kind, store));
        let shelf = Arc::new(Shelf::new(regions, *clock));
        let pool = Pool::new(THREADS_MAX, WAITING_MAX);
        Ok(Self(Arc::new(Parts { shelf, buffers, pool })))
    }

    /// Buffers for all of its devices.
    pub fn buffers(&self) -> &Buffers {
        &self.0.buffers
    }

    /// Opens the device that `uri` names, of any kind there is, to live on `thread`. Returns at once;
    /// what comes of it is awaited.
    ///
    /// ```
    /// use host::{Clock, Cores};
    /// use reactor::{ReactorOptions, Reactors, ThreadPlan};
    /// use tenmil::aio::{Claim, Opener};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = Clock::start();
    /// let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    /// let thread = reactors.spawn(ThreadPlan::new("storage"))?;
    /// let opener = Opener::new(&clock)?;
    /// let device = opener.open(&"ram:16m".parse()?, Claim::WriteOnce, &thread).wait()?;
    /// assert_eq!(device.limits().block_count, 32768);
    /// # Ok(())
    /// # }
    /// ```
    pub fn open(&self, uri: &Uri, claim: Claim, thread: &Handle) -> Opening {
        let (promise, later) = pair();
        let name = uri.to_string();
        let (uri, thread) = (uri.clone(), thread.clone());
        let (shelf, pool) = (Arc::clone(&self.0.shelf), self.0.pool.intake());
        let buffers = self.0.buffers.clone();
        let job = move || promise.keep(open(&shelf, &uri, claim, pool, &thread, &buffers));
        let later = match self.0.pool.submit(Job::new("open", job)) {
            Ok(()) => later,
            Err(_) => Later::of(Err(Refused::machine(format!(
                "open {name}: {WAITING_MAX} others are being opened or closed, expected fewer"
            )))),
        };
        Opening { name, later }
    }
}

fn open(
    shelf: &Shelf,
    uri: &Uri,
    claim: Claim,
    pool: Intake,
    thread: &Handle,
    buffers: &Buffers,
) -> Result<Device, Refused> {
    let lent = shelf.lend(uri, claim, pool)?;
    let closed = lent.closed();
    let backend: Box<dyn Backend> = Box::new(lent);
    Device::lives(thread, &uri.to_string(), backend, buffers, closed)
}

impl Opening {
    /// Waits on an OS thread that has nothing else to do. Not to be called on a reactor, which it
    /// would stop.
    ///
    /// # Errors
    ///
    /// If the name says what its kind does not know, the device cannot be had, somebody has it in a
    /// way that does not go with the claim, or its thread has ended.
    pub fn wait(self) -> Result<Device, Refused> {
        let Self { name, later } = self;
        later.wait().unwrap_or_else(|| Err(panicked(&name)))
    }
}

fn panicked(name: &str) -> Refused {
    Refused::machine(format!("open {name}: the thread that did it panicked"))
}

impl Future for Opening {
    type Output = Result<Device, Refused>;

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

impl fmt::Debug for Opening {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Opening").field("name", &self.name).finish_non_exhaustive()
    }
}
