//! Runtime: the reactors, memory and threads that devices and servers of a program share.

mod builder;
mod pending_result;
#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tenmil_base::{BlockDevice, Error};
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::thread_pool::{PoolHandle, ThreadPool};
use tenmil_reactor::{Reactors, Registry};

use crate::access::Access;
use crate::blocking;
use crate::device::{BufferPool, Device, DeviceThread};
use crate::export::Export;
use crate::open_devices::{ChannelLease, OpenDevices};
use crate::server::Server;
pub use builder::RuntimeBuilder;
use pending_result::PendingResult;
use tenmil_base::oneshot;

/// Reactors, buffer memory, open devices, and threads for blocking work. Clones share them.
///
/// A *reactor* is a thread that polls devices and connections while there is work and sleeps
/// otherwise; a runtime has one for each core. What may block (opening files, connecting to
/// controllers, resolving names) runs on other threads of the runtime.
///
/// When the last clone is dropped, the reactors stop: requests in flight complete within the
/// [stop timeout](RuntimeBuilder::stop_timeout), and all devices are closed. Later operations of their
/// handles fail, and its servers serve no more. The drop waits for that, unless it happens on a thread of
/// the runtime.
///
/// ```
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = tenmil::Runtime::new()?;
/// let dev = rt.block_on(rt.open("ram:16m", tenmil::Access::ReadWrite))?;
/// assert_eq!(dev.limits().block_count, 32768);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Runtime(Arc<RuntimeInner>);

struct RuntimeInner {
    /// None only during the drop, as is the pool.
    reactors: Option<Reactors>,
    /// Light threads for devices, one on each reactor.
    threads: Box<[DeviceThread]>,
    /// Number of devices that were attached.
    next: AtomicUsize,
    services: RuntimeServices,
    pool: Option<ThreadPool>,
}

/// What blocking tasks need of a runtime. Does not keep it alive.
#[derive(Clone)]
pub(crate) struct RuntimeServices {
    pub(crate) devices: Arc<OpenDevices>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) pool: PoolHandle,
    buffers: BufferPool,
}

/// Blocking tasks at once, and the number that may wait.
const THREADS_MAX: usize = 4;
const WAITING_MAX: usize = 1024;

impl Runtime {
    /// Starts a runtime with a reactor on each core that this process may use, and 64 MiB of buffer
    /// memory, whose pages are allocated when they are first used.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::new()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If threads or memory are exhausted.
    pub fn new() -> Result<Self, Error> {
        Self::builder().start()
    }

    /// Builder of a runtime: cores, poll mode, buffer memory.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::builder().buffer_bytes(16 << 20).start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// Opens the device that `uri` names: `file:/var/tmp/disk?size=1g`, `tcp://HOST:PORT/NQN?ns=1`,
    /// `pcie:0000:5e:00.0`, `emu:ram`, `volume:[file:pool]/db`; docs/user/device-uris.md lists all kinds.
    /// Begins at once, on another thread. If the future is dropped, the device is closed again.
    ///
    /// A URI that is open already is shared, if the [accesses](Access) are compatible.
    ///
    /// ```
    /// use tenmil::{Access, Runtime};
    ///
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = Runtime::new()?;
    /// let dev = rt.block_on(rt.open("emu:ram", Access::ReadWrite))?;
    /// let error = rt.block_on(rt.open("tape:0", Access::ReadOnly)).unwrap_err();
    /// assert!(error.text.starts_with("open tape:0: no devices of kind `tape`, expected one of null:"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the URI has an unknown or invalid option, the device cannot be opened, or another access to it
    /// conflicts.
    pub fn open(
        &self,
        uri: &str,
        access: Access,
    ) -> impl Future<Output = Result<Device, Error>> + Send + use<> {
        let what = format!("open {uri}");
        let uri = match uri.parse::<Uri>() {
            Ok(uri) => uri,
            Err(error) => {
                return PendingResult::ready_error(Error::from(error).with_context("open"));
            }
        };
        self.open_and_attach(what, move |services| {
            let lease = services.devices.open(&uri, access, services.pool.clone())?;
            Ok((uri.to_string(), lease))
        })
    }

    /// Attaches a block device of the program's own, which implements
    /// [`BlockDevice`], as `name`. Its channels find the data of requests in
    /// the [regions](Self::regions) of this runtime. Requests that it does not support are split or
    /// emulated. Each call is an opening of its own: two of one block device do not exclude each other.
    /// If the future is dropped, the device is detached again.
    ///
    /// [`driver`](crate::driver) has an example.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use tenmil::{Access, Device, Error, Runtime, driver::BlockDevice};
    ///
    /// fn attach(rt: &Runtime, own: Arc<dyn BlockDevice>) -> Result<Device, Error> {
    ///     rt.block_on(rt.attach("own", own, Access::ReadWrite))
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// If the device opens no channel, or its limits are contradictory.
    pub fn attach(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        access: Access,
    ) -> impl Future<Output = Result<Device, Error>> + Send + use<> {
        let name = name.to_owned();
        self.open_and_attach(format!("attach {name}"), move |services| {
            let pool = services.pool.clone();
            let lease = services.devices.attach(&name, device, access, pool)?;
            Ok((name, lease))
        })
    }

    /// Starts a server. Begins at once, on another thread; if the future is dropped, the server is
    /// stopped again. The server uses the reactors of this runtime.
    ///
    /// ```
    /// use tenmil::{Access, Export, Runtime};
    ///
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = Runtime::new()?;
    /// rt.block_on(async {
    ///     let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    ///     let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
    ///     let host = rt.open(&server.uris()[0], Access::ReadWrite).await?;
    ///     host.write_zeroes(0, 8).await?;
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the address is not free or not allowed, or a device is closed, of another runtime, or cannot be
    /// exported.
    pub fn serve(
        &self,
        export: Export,
    ) -> impl Future<Output = Result<Server, Error>> + Send + use<> {
        self.run_blocking(format!("serve {}", export.protocol_and_address()), move |services| {
            Server::start(services, export)
        })
    }

    /// Runs a future on the calling thread until it completes. For programs without an executor: the
    /// thread sleeps while the future waits.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// let rt = tenmil::Runtime::new()?;
    /// assert_eq!(rt.block_on(async { 6 * 7 }), 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If it is called on a reactor, which must not wait.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        assert!(
            !tenmil_linux::event_loop::is_in_event_loop(),
            "block_on is called on a reactor, which must not wait: `Device::spawn` runs futures there"
        );
        let mut future = pin!(future);
        let waker = Waker::from(Arc::new(ThreadUnparker(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            std::thread::park();
        }
    }

    /// Memory of this runtime: a block device of the program's own loads and stores the data of requests
    /// there. Clones refer to the same memory.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// use tenmil::Runtime;
    /// use tenmil::driver::RegionTable;
    ///
    /// let rt = Runtime::new()?;
    /// let regions: RegionTable = rt.regions().clone(); // kept by a block device and its channels
    /// # Ok(())
    /// # }
    /// ```
    pub fn regions(&self) -> &RegionTable {
        &self.0.services.devices.regions
    }

    /// Registry of the reactors.
    #[doc(hidden)]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.0.services.registry
    }

    /// Opens a channel in the pool and attaches it to the next light thread in rotation.
    fn open_and_attach(
        &self,
        what: String,
        open: impl FnOnce(&RuntimeServices) -> Result<(String, ChannelLease), Error> + Send + 'static,
    ) -> PendingResult<Device> {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let home = self.0.threads[number % self.0.threads.len()].clone();
        self.run_blocking(what, move |services| {
            let (name, lease) = open(&services)?;
            let (closed, claim) = (lease.close_notifier(), Arc::downgrade(lease.claim()));
            let channel = Box::new(lease);
            Device::attach_to_thread(&home, &name, channel, &services.buffers, closed, claim)
        })
    }

    /// Runs blocking work in the pool; `what` names it in errors.
    fn run_blocking<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(RuntimeServices) -> Result<T, Error> + Send + 'static,
    ) -> PendingResult<T> {
        let (promise, later) = oneshot();
        let services = self.0.services.clone();
        let task = move || promise.send(work(services));
        match self.0.services.pool.submit(blocking::blocking_task("open or serve", task)) {
            Ok(()) => PendingResult::new(what, later),
            Err(_) => PendingResult::ready_error(Error::environment(format!(
                "{what}: {WAITING_MAX} devices and servers are being opened or closed, expected fewer"
            ))),
        }
    }
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        // First the reactors, which close their devices in the pool; then the pool, which waits for
        // that: a tuple drops its fields in order.
        let parts = (self.reactors.take(), self.pool.take());
        if blocking::may_block() {
            return drop(parts);
        }
        // Neither a reactor nor a thread of the pool can wait for itself. A failed spawn drops its
        // closure, so the parts are kept outside it.
        let kept = Arc::new(Mutex::new(Some(parts)));
        let take =
            |kept: &Mutex<Option<_>>| kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&kept);
        let stop = move |_: &tenmil_linux::StopFlag| drop(take(&theirs));
        match tenmil_linux::NamedThread::spawn("runtime-stop", None, stop) {
            // Dropping its handle would wait for it.
            Ok(stopping) => std::mem::forget(stopping),
            Err(_) => {
                let registry = &self.services.registry;
                for reactor in registry.reactors() {
                    // Refused only if it has ended already, or is not reached at all.
                    let _ = registry.stop_reactor(reactor);
                }
                std::mem::forget(take(&kept));
            }
        }
    }
}

/// Wakes a thread that is parked.
struct ThreadUnparker(Thread);

impl Wake for ThreadUnparker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Runtime").field("reactors", &self.0.threads.len()).finish_non_exhaustive()
    }
}
