//! Builder of a runtime.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tenmil_base::{Error, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, ReactorOptions, Reactors, ThreadBuilder};

use super::{Runtime, RuntimeInner, RuntimeServices, THREADS_MAX, WAITING_MAX};
use crate::device::{BufferPool, DeviceThread};
use crate::open_devices::OpenDevices;

/// Builder of a [`Runtime`], from [`Runtime::builder`].
///
/// ```
/// use tenmil::{PollMode, Runtime};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::builder().poll(PollMode::Hybrid).buffer_bytes(1 << 20).start()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder starts nothing before `start`"]
pub struct RuntimeBuilder {
    cores: Option<CpuList>,
    poll: PollMode,
    pin: bool,
    buffer_bytes: u32,
    stop_timeout: Duration,
}

/// Size of the region table, its largest. A device needs a few regions for each channel, and so does
/// each device below it.
const REGIONS_MAX: usize = 4096;

impl Default for RuntimeBuilder {
    fn default() -> Self {
        Self {
            cores: None,
            poll: PollMode::default(),
            pin: true,
            buffer_bytes: 64 << 20,
            stop_timeout: Duration::from_secs(1),
        }
    }
}

impl RuntimeBuilder {
    /// Cores, each of which gets a reactor. The default is all that this process may use.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().cores([2, 3]).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn cores(mut self, cores: impl IntoIterator<Item = u32>) -> Self {
        self.cores = Some(cores.into_iter().collect());
        self
    }

    /// Poll mode of the reactors. The default polls for some microseconds before it sleeps.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().poll(tenmil::PollMode::Always).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn poll(mut self, mode: PollMode) -> Self {
        self.poll = mode;
        self
    }

    /// Whether reactors are pinned to their cores, where that is permitted. The default is yes.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().pin(false).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin(mut self, pin: bool) -> Self {
        self.pin = pin;
        self
    }

    /// Memory for [buffers](crate::Buffer), in bytes. The default is 64 MiB. Pages are allocated when
    /// they are first used.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().buffer_bytes(16 << 20).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn buffer_bytes(mut self, bytes: u32) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Time for which the drop of the runtime waits for requests in flight. A request that takes longer
    /// fails, and its buffer is never used again. The default is a second.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// use std::time::Duration;
    ///
    /// let rt = tenmil::Runtime::builder().stop_timeout(Duration::from_secs(5)).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn stop_timeout(mut self, timeout: Duration) -> Self {
        self.stop_timeout = timeout;
        self
    }

    /// Starts the runtime.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().pin(false).start()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a core is not available to this process, or threads or memory are exhausted.
    pub fn start(self) -> Result<Runtime, Error> {
        let Self { cores, poll, pin, buffer_bytes, stop_timeout } = self;
        let (clock, regions) = (Clock::start(), RegionTable::new(REGIONS_MAX));
        let buffers = map_buffer_pool(&regions, buffer_bytes)?;
        let drain_max = Span { ns: u64::try_from(stop_timeout.as_nanos()).unwrap_or(u64::MAX) };
        let options = ReactorOptions { poll, pin, drain_max, ..ReactorOptions::default() };
        let cores = cores.unwrap_or_else(CpuList::allowed_cpus);
        let refuse = |why: &dyn fmt::Display| format!("start a runtime on cores {cores}: {why}");
        let reactors = Reactors::start_on_cores(&cores, &options, &clock)
            .map_err(|why| Error::new(why.category(), refuse(&why)))?;
        let registry = Arc::clone(reactors.registry());
        let start = |(number, reactor)| {
            let thread = ThreadBuilder::new(&format!("devices-{number}")).on_reactor(reactor);
            let thread = reactors.spawn(thread);
            thread.map(DeviceThread::new).map_err(|why| Error::environment(refuse(&why)))
        };
        let threads = (0_u32..).zip(registry.reactors()).map(start).collect::<Result<_, _>>()?;
        let pool = ThreadPool::new(THREADS_MAX, WAITING_MAX);
        let devices = Arc::new(OpenDevices::new(regions, clock));
        let services = RuntimeServices { devices, registry, pool: pool.handle(), buffers };
        let (reactors, next, pool) = (Some(reactors), AtomicUsize::new(0), Some(pool));
        Ok(Runtime(Arc::new(RuntimeInner { reactors, threads, next, services, pool })))
    }
}

/// Maps the buffer memory.
fn map_buffer_pool(regions: &RegionTable, buffer_bytes: u32) -> Result<BufferPool, Error> {
    let refuse = |error: &dyn fmt::Display| {
        Error::environment(format!("start a runtime with {buffer_bytes} bytes of buffers: {error}"))
    };
    let mapping = MemoryMapping::new(buffer_bytes as usize, MemoryBacking::Private);
    let memory = regions.add_mapping(mapping.map_err(|error| refuse(&error))?);
    let memory = memory.map_err(|error| refuse(&error))?;
    let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
    Ok(BufferPool::new(DevicePool::new(regions.clone(), memory, kind, store)))
}
