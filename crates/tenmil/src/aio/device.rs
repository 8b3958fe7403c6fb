//! The handle of a device.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use base::{Backend, Flags, Limits, Operation, WakeSource};
use reactor::{Handle, Registration, WokenBy};

use super::io::Io;
use super::later::{Later, Promise, pair};
use super::place::{LET_GO, Order, Shared};
use super::poller::DevicePoller;
use super::{Buffer, Buffers, NotDone, Why};
use crate::Refused;

/// A block device on a light thread, for futures anywhere: on that thread, on another, or in another
/// runtime. Clones are the same device; when the last one goes, it is let go.
///
/// An operation begins when its future is polled first. Those that are under way at the same time
/// are done in any order.
#[derive(Clone)]
pub struct Device(Arc<Hold>);

/// What all clones of a handle share.
struct Hold {
    shared: Arc<Shared>,
    closed: Weak<Closed>,
}

/// Whoever waits until a device is closed. It is dropped when that is done.
#[derive(Default)]
pub(super) struct Closed(Mutex<Vec<Promise<()>>>);

/// The end of a device.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct Closing(Later<()>);

impl Device {
    /// Lets `backend` live on `thread`, as a poller with this name, until the last handle is
    /// dropped. `buffers` are of memory that it reaches.
    ///
    /// # Errors
    ///
    /// If the thread has ended, or takes no message.
    pub fn on(
        thread: &Handle,
        name: &str,
        backend: Box<dyn Backend>,
        buffers: &Buffers,
    ) -> Result<Self, Refused> {
        Self::lives(thread, name, backend, buffers, Arc::default())
    }

    pub(super) fn lives(
        thread: &Handle,
        name: &str,
        backend: Box<dyn Backend>,
        buffers: &Buffers,
        closed: Arc<Closed>,
    ) -> Result<Self, Refused> {
        let refuse = |why: &dyn fmt::Display| Refused::machine(format!("attach '{name}': {why}"));
        let woken_by = woken_by(&*backend).map_err(|error| refuse(&error))?;
        let is_done_by_kernel = backend.is_done_by_kernel();
        let (shared, incoming) = Shared::new(thread, name, backend.limits(), buffers);
        let shared = Arc::new(shared);
        let hold = Hold { shared: Arc::clone(&shared), closed: Arc::downgrade(&closed) };
        let poller = DevicePoller::new(shared, backend, incoming, closed);
        let registration = Registration::active(name, woken_by, poller);
        let registration =
            if is_done_by_kernel { registration.sleeps_at_once() } else { registration };
        // What cannot be added is dropped, and whoever uses the device learns that it is gone.
        let sent = thread.call(move |context| drop(context.add(registration)));
        match sent {
            Ok(()) => Ok(Self(Arc::new(hold))),
            Err(_) if thread.is_gone() => Err(refuse(&"its thread has ended")),
            Err(_) => Err(refuse(&"the mailbox of its thread is full, expected room")),
        }
    }

    /// The name that it was opened by.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// Geometry and limits.
    pub fn limits(&self) -> &Limits {
        &self.shared().limits
    }

    /// Where buffers for it come from.
    pub fn buffers(&self) -> &Buffers {
        &self.shared().buffers
    }

    /// A buffer that it can reach, full of zeroes, if there is room for one.
    pub fn buffer(&self, len_bytes: u32) -> Option<Buffer> {
        self.shared().buffers.allocate(len_bytes)
    }

    /// Whether it is gone: its thread has ended, or its backend has panicked.
    pub fn is_gone(&self) -> bool {
        self.shared().is_gone()
    }

    /// Lets go of this handle. Ends when the device has been closed: after the last handle has
    /// gone, and all that was begun has ended.
    pub fn close(self) -> Closing {
        let Some(closed) = self.0.closed.upgrade() else { return Closing(Later::of(())) };
        let (promise, later) = pair();
        closed.0.lock().unwrap_or_else(PoisonError::into_inner).push(promise);
        Closing(later)
    }

    /// Reads as many blocks as the buffer has room for, from `lba` on.
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Read, Flags::NONE, lba, buffer).await
    }

    /// Writes the buffer to the blocks from `lba` on.
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Write, Flags::NONE, lba, buffer).await
    }

    /// As [`write`](Self::write), and the blocks survive a power cut once this has ended: forced
    /// unit access.
    pub async fn write_fua(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Write, Flags::FUA, lba, buffer).await
    }

    /// Compares the buffer with the blocks from `lba` on. That they differ is
    /// [`Outcome::COMPARE_FAILURE`](base::Outcome::COMPARE_FAILURE).
    pub async fn compare(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Compare, Flags::NONE, lba, buffer).await
    }

    /// If the blocks from `lba` on are as the first half of the buffer, they are as its second half
    /// afterwards, and nothing comes between the two. If they are not, nothing changes, and that is
    /// [`Outcome::COMPARE_FAILURE`](base::Outcome::COMPARE_FAILURE).
    pub async fn compare_and_write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::CompareAndWrite, Flags::NONE, lba, buffer).await
    }

    /// Every write that has ended before this begins survives a power cut once this has ended.
    pub async fn flush(&self) -> Result<(), NotDone> {
        self.command(Operation::Flush, 0, 0, 0).await
    }

    /// These blocks are not needed any more. What they read as afterwards is up to the device.
    pub async fn deallocate(&self, lba: u64, blocks: u32) -> Result<(), NotDone> {
        self.command(Operation::Deallocate, lba, blocks, 0).await
    }

    /// These blocks read as zeroes afterwards.
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), NotDone> {
        self.command(Operation::WriteZeroes, lba, blocks, 0).await
    }

    /// Copies `blocks` blocks on the device, from those at `from` to those at `lba`. No data passes
    /// through memory that a program sees.
    pub async fn copy(&self, from: u64, lba: u64, blocks: u32) -> Result<(), NotDone> {
        self.command(Operation::Copy, lba, blocks, from).await
    }

    /// These blocks can be read; no data moves.
    pub async fn verify(&self, lba: u64, blocks: u32) -> Result<(), NotDone> {
        self.command(Operation::Verify, lba, blocks, 0).await
    }

    /// Reads of these blocks fail until they are written again.
    pub async fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<(), NotDone> {
        self.command(Operation::WriteUncorrectable, lba, blocks, 0).await
    }

    async fn transfer(
        &self,
        operation: Operation,
        flags: Flags,
        lba: u64,
        buffer: Buffer,
    ) -> Result<Buffer, NotDone> {
        let blocks = self.blocks_of(operation, &buffer);
        let buffer = Some(buffer);
        let mut order = Order { operation, lba, operand: 0, blocks: 0, flags, buffer };
        match blocks {
            Ok(blocks) => order.blocks = blocks,
            Err(why) => return Err(NotDone::new(&self.shared().name, order, why)),
        }
        let buffer = Io::new(self.shared(), order).await?;
        Ok(buffer.unwrap_or_else(|| unreachable!("what went in comes out")))
    }

    /// For how many blocks the buffer is, if it can be used.
    fn blocks_of(&self, operation: Operation, buffer: &Buffer) -> Result<u32, Why> {
        self.check(operation)?;
        let parts = if operation == Operation::CompareAndWrite { 2 } else { 1 };
        let (len_bytes, block_size) = (buffer.len_bytes(), self.limits().block_size * parts);
        if len_bytes == 0 || !len_bytes.is_multiple_of(block_size) {
            return Err(Why::Length { len_bytes, block_size });
        }
        if !self.buffers().owns(buffer) {
            return Err(Why::Stranger);
        }
        Ok(len_bytes / block_size)
    }

    async fn command(
        &self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        operand: u64,
    ) -> Result<(), NotDone> {
        let order = Order { operation, lba, operand, blocks, flags: Flags::NONE, buffer: None };
        if let Err(why) = self.check(operation) {
            return Err(NotDone::new(&self.shared().name, order, why));
        }
        Io::new(self.shared(), order).await.map(drop)
    }

    fn check(&self, operation: Operation) -> Result<(), Why> {
        let has = self.limits().support.has(operation);
        if has { Ok(()) } else { Err(Why::Unsupported(operation)) }
    }

    fn shared(&self) -> &Shared {
        &self.0.shared
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // There is a slot for it. If the poller is gone, so is what was to be let go.
        let _ = self.shared.incoming.send(LET_GO);
        self.shared.thread.ring();
    }
}

impl Closing {
    /// Waits on an OS thread that has nothing else to do.
    pub fn wait(self) {
        let _ = self.0.wait();
    }
}

impl Future for Closing {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}

/// What wakes the poller of a backend: operations always, by the bell of its thread; and answers, if
/// the backend has something that announces them.
fn woken_by(backend: &dyn Backend) -> std::io::Result<WokenBy> {
    match backend.wake_source() {
        WakeSource::Nothing => {
            Ok(WokenBy::OnlyWhileBusy("operations ring, answers are polled for"))
        }
        source => WokenBy::of(source),
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Device").field("name", &self.shared().name).finish_non_exhaustive()
    }
}
