//! Handle of an open device, for `async`/`await` programs, independent of the executor.
//!
//! ```text
//!   task on the same reactor ─┐
//!   task of tokio or smol ────┼─ Device ── slot of a table, its index in a mailbox ─┐
//!   any OS thread ────────────┘    ▲                                               ▼
//!                                  └── waker of the slot ── poller of the device: I/O channel
//! ```
//!
//! A [`Device`] is a handle of an I/O channel that lives on a light thread. The handle depends on
//! [`core::future`] alone, so it works under any executor. The state of an operation lies in a slot
//! of a table that is allocated when the device is attached; the index of the slot is the token of
//! the request. An operation allocates nothing, and costs a system call only if the reactor of the
//! thread sleeps.
//!
//! A [`Buffer`] owns its memory. It moves into an operation and comes back with the result. A
//! future may be dropped at any time: the buffer then stays in its slot until the device has
//! completed the request, and returns to its pool afterwards.
//!
//! If all slots are in use, further operations wait in the order in which they were first polled.

mod buffer;
mod device_poller;
mod error;
mod io_future;
mod operation_slots;
mod operations;
mod slot_wait_queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll};

use tenmil_base::{Error, IoChannel, Limits, WakeSource};
use tenmil_reactor::task::{ExecutorHandle, JoinHandle, SpawnTaskErrorKind};
use tenmil_reactor::{PollerBuilder, PollerWake, ThreadHandle};

use crate::open_devices::DeviceClaim;
pub use buffer::Buffer;
pub(crate) use buffer::BufferPool;
use device_poller::DevicePoller;
pub use error::{IoError, IoErrorKind};
use operation_slots::{CLOSE_TOKEN, SharedDeviceState};
use tenmil_base::{OneshotReceiver, OneshotSender, oneshot};

/// An open block device. Clones refer to the same device, which is closed when the last one has been
/// dropped and all operations have completed.
///
/// Its operations are futures for any executor: a task of the [`Runtime`](crate::Runtime), tokio, smol,
/// or none ([`Runtime::block_on`](crate::Runtime::block_on)). An operation starts when its future is
/// first polled; operations in flight at the same time are not ordered. A future may be dropped at any
/// time; whether the operation takes effect is then not defined.
///
/// ```
/// use tenmil::{Access, Runtime};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::new()?;
/// rt.block_on(async {
///     let dev = rt.open("ram:16m", Access::ReadWrite).await?;
///     let mut buf = dev.buffer(4096)?;
///     buf.store(0, b"ten million");
///     let buf = dev.write_fua(8, buf).await?;
///     let buf = dev.read(8, buf).await?;
///     assert!(buf.to_vec().starts_with(b"ten million"));
///     dev.deallocate(8, 8).await?;
///     dev.flush().await?;
///     dev.close().await;
///     Ok(())
/// })
/// # }
/// ```
#[derive(Clone)]
pub struct Device(Arc<DeviceHandleInner>);

/// State shared by all clones of a handle.
struct DeviceHandleInner {
    shared: Arc<SharedDeviceState>,
    closed: Weak<CloseNotifier>,
    /// Claim that an export shares. None after the device has been closed.
    claim: Weak<DeviceClaim>,
    home: DeviceThread,
}

/// Light thread of a device, with the executor of its tasks. Clones refer to the same.
#[derive(Clone)]
pub(crate) struct DeviceThread {
    pub(crate) thread: ThreadHandle,
    tasks: Arc<OnceLock<ExecutorHandle>>,
}

/// Notifies the waiters when it is dropped, which is after the device has been closed.
#[derive(Default)]
pub(crate) struct CloseNotifier(Mutex<Vec<OneshotSender<()>>>);

/// Future that completes when the device has been closed.
struct CloseFuture(OneshotReceiver<()>);

/// Largest number of tasks of one light thread.
const TASKS_MAX: u32 = 1024;

impl DeviceThread {
    pub(crate) fn new(thread: ThreadHandle) -> Self {
        Self { thread, tasks: Arc::default() }
    }

    /// Executor of the thread, started by the first call.
    fn task_executor(&self) -> Result<&ExecutorHandle, &'static str> {
        if let Some(tasks) = self.tasks.get() {
            return Ok(tasks);
        }
        let started = ExecutorHandle::start_on_thread(&self.thread, "tasks", TASKS_MAX);
        let started = started.map_err(|_| match self.thread.has_ended() {
            true => "its runtime has been dropped, expected a running one",
            false => "the mailbox of its light thread is full, expected a free slot",
        })?;
        // Of two that were started at once, the second is dropped, which closes it.
        Ok(self.tasks.get_or_init(|| started))
    }
}

impl Device {
    /// Attaches an I/O channel to a light thread as a poller called `name`, until the last handle is
    /// dropped. `buffers` must allocate from memory that the channel can access.
    ///
    /// # Errors
    ///
    /// If the thread has ended, or its mailbox is full.
    pub(crate) fn attach_to_thread(
        home: &DeviceThread,
        name: &str,
        channel: Box<dyn IoChannel>,
        buffers: &BufferPool,
        closed: Arc<CloseNotifier>,
        claim: Weak<DeviceClaim>,
    ) -> Result<Self, Error> {
        let thread = &home.thread;
        let refuse = |why: &dyn fmt::Display| Error::environment(format!("attach '{name}': {why}"));
        let woken_by = wake_sources_of(&*channel).map_err(|error| refuse(&error))?;
        let is_done_by_kernel = channel.is_done_by_local_kernel();
        let (shared, incoming) = SharedDeviceState::new(thread, name, channel.limits(), buffers);
        let shared = Arc::new(shared);
        let (state, notifier) = (Arc::clone(&shared), Arc::downgrade(&closed));
        let hold = DeviceHandleInner { shared: state, closed: notifier, claim, home: home.clone() };
        let poller = DevicePoller::new(shared, channel, incoming, closed);
        let registration = PollerBuilder::polled_each_iteration(name, woken_by, poller);
        let registration = if is_done_by_kernel { registration.no_spin() } else { registration };
        // A registration that cannot be added is dropped, and operations then fail with
        // `DeviceRemoved`.
        let sent = thread.send_closure(move |context| drop(context.add_poller(registration)));
        match sent {
            Ok(()) => Ok(Self(Arc::new(hold))),
            Err(_) if thread.has_ended() => {
                Err(refuse(&"its light thread has ended, as its runtime was dropped"))
            }
            Err(_) => Err(refuse(&"the mailbox of its light thread is full, expected a free slot")),
        }
    }

    /// Name by which the device was opened or attached.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// assert_eq!(dev.name(), "ram:16m");
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn name(&self) -> &str {
        &self.device_state().name
    }

    /// Geometry, limits and supported operations.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// assert_eq!(dev.limits().block_size, 512);
    /// assert_eq!(dev.limits().block_count, 32_768);
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn limits(&self) -> &Limits {
        &self.device_state().limits
    }

    /// Allocates a zeroed buffer that the device can access. Allocates whole pages and takes a lock:
    /// reuse buffers on a hot path.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let mut buf = dev.buffer(4096)?;
    /// for lba in (0..80).step_by(8) {
    ///     buf = dev.read(lba, buf).await?;
    /// }
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the buffer memory of the runtime is exhausted.
    pub fn buffer(&self, len_bytes: u32) -> Result<Buffer, Error> {
        let buffers = &self.device_state().buffers;
        buffers.allocate(len_bytes).ok_or_else(|| {
            let free = buffers.free_bytes();
            let text = format!(
                "{}: allocate a buffer of {len_bytes} bytes: {free} bytes of buffer memory are free, \
                 expected as many in one piece",
                self.name()
            );
            let hint = "Drop buffers, or start the runtime with more: \
                        `Runtime::builder().buffer_bytes(BYTES)`.";
            Error::environment(text).with_hint(hint)
        })
    }

    /// Whether the device was removed: its runtime was dropped, or its I/O channel has panicked. All
    /// operations then fail.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// use tenmil::{Access, Runtime};
    ///
    /// let rt = Runtime::new()?;
    /// let dev = rt.block_on(rt.open("ram:16m", Access::ReadWrite))?;
    /// drop(rt);
    /// assert!(dev.is_removed());
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_removed(&self) -> bool {
        self.device_state().is_removed()
    }

    /// Drops this handle. The future completes when the device has been closed, which happens after
    /// the last handle and the last export of it are dropped and all operations have completed.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// dev.close().await;
    /// // Nothing else has it open, so that it may be opened exclusively.
    /// let dev = rt.open("ram:16m", Access::Exclusive).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn close(self) -> impl Future<Output = ()> + Send + use<> {
        let Some(closed) = self.0.closed.upgrade() else {
            return CloseFuture(OneshotReceiver::already_complete(()));
        };
        let (promise, later) = oneshot();
        closed.0.lock().unwrap_or_else(PoisonError::into_inner).push(promise);
        CloseFuture(later)
    }

    /// Spawns a task on the reactor that polls this device: its operations then cross no thread. The
    /// task must not block. Dropping the handle drops the task; [`JoinHandle::detach`] lets it continue.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let rt = tenmil::Runtime::new()?;
    /// let dev = rt.block_on(rt.open("ram:16m", tenmil::Access::ReadOnly))?;
    /// let task = dev.clone();
    /// let task = dev.spawn(async move { task.read(0, task.buffer(512)?).await.map_err(tenmil::Error::from) })?;
    /// assert_eq!(rt.block_on(task)??.to_vec(), [0; 512]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the runtime was dropped, or its reactor runs 1024 tasks already.
    pub fn spawn<F>(&self, future: F) -> Result<JoinHandle<F::Output>, Error>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let refuse =
            |why: &str| Error::environment(format!("spawn a task at {}: {why}", self.name()));
        let tasks = self.0.home.task_executor().map_err(refuse)?;
        tasks.spawn_task(future).map_err(|refused| match refused.kind {
            SpawnTaskErrorKind::TableFull { tasks_max } => {
                refuse(&format!("{tasks_max} run on its reactor, expected fewer"))
            }
            SpawnTaskErrorKind::ThreadGone => {
                refuse("its runtime has been dropped, expected a running one")
            }
        })
    }

    /// Light thread of the device.
    #[doc(hidden)]
    pub fn thread(&self) -> &ThreadHandle {
        &self.0.home.thread
    }

    /// Claim of the device, if it is open.
    pub(crate) fn device_claim(&self) -> Option<Arc<DeviceClaim>> {
        if self.is_removed() { None } else { self.0.claim.upgrade() }
    }

    fn device_state(&self) -> &SharedDeviceState {
        &self.0.shared
    }
}

impl Drop for DeviceHandleInner {
    fn drop(&mut self) {
        // The mailbox has a free slot for this token. If the poller has ended, the device is closed already.
        let _ = self.shared.incoming.send(CLOSE_TOKEN);
        self.shared.thread.notify_reactor();
    }
}

impl Future for CloseFuture {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}

/// Wake-up sources of the poller of an I/O channel: requests, through the waker of its thread, and
/// completions, if the channel has a source that announces them.
fn wake_sources_of(channel: &dyn IoChannel) -> std::io::Result<PollerWake> {
    match channel.wake_source() {
        WakeSource::None => {
            Ok(PollerWake::OnlyWhileBusy("an operation wakes it, and completions are polled for"))
        }
        source => PollerWake::from_source(source),
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Device").field("name", &self.device_state().name).finish_non_exhaustive()
    }
}
