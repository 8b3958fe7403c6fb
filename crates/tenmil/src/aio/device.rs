//! Handle of a device.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use tenmil_base::{
    IoChannel, Limits, OneshotReceiver, OneshotSender, Operation, RequestFlags, WakeSource, oneshot,
};
use tenmil_reactor::{PollerBuilder, PollerWake, ThreadHandle};

use super::io::IoFuture;
use super::poller::DevicePoller;
use super::slot::{CLOSE_TOKEN, DeviceState, SlotRequest};
use super::{Buffer, BufferPool, IoError, IoErrorKind};
use tenmil_base::Error;

/// Handle of a block device on a lightweight thread, usable by futures on that thread, on other
/// threads and in other executors. Clones share the device, which is closed when the last clone is
/// dropped.
///
/// An operation starts when its future is first polled. Operations in flight at the same time are
/// not ordered.
#[derive(Clone)]
pub struct Device(Arc<HandleInner>);

/// State shared by all clones of a handle.
struct HandleInner {
    shared: Arc<DeviceState>,
    closed: Weak<CloseNotifier>,
}

/// Notifies the waiters when it is dropped, which is after the device has been closed.
#[derive(Default)]
pub(super) struct CloseNotifier(Mutex<Vec<OneshotSender<()>>>);

/// Future that completes when the device has been closed.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct CloseFuture(OneshotReceiver<()>);

impl Device {
    /// Attaches an I/O channel to `thread` as a poller called `name`, until the last handle is
    /// dropped. `buffers` must allocate from memory that the channel can access.
    ///
    /// # Errors
    ///
    /// If the thread has ended, or its mailbox is full.
    pub fn on(
        thread: &ThreadHandle,
        name: &str,
        backend: Box<dyn IoChannel>,
        buffers: &BufferPool,
    ) -> Result<Self, Error> {
        Self::attach_to_thread(thread, name, backend, buffers, Arc::default())
    }

    pub(super) fn attach_to_thread(
        thread: &ThreadHandle,
        name: &str,
        backend: Box<dyn IoChannel>,
        buffers: &BufferPool,
        closed: Arc<CloseNotifier>,
    ) -> Result<Self, Error> {
        let refuse = |why: &dyn fmt::Display| Error::environment(format!("attach '{name}': {why}"));
        let woken_by = woken_by(&*backend).map_err(|error| refuse(&error))?;
        let is_done_by_kernel = backend.is_kernel_io();
        let (shared, incoming) = DeviceState::new(thread, name, backend.limits(), buffers);
        let shared = Arc::new(shared);
        let hold = HandleInner { shared: Arc::clone(&shared), closed: Arc::downgrade(&closed) };
        let poller = DevicePoller::new(shared, backend, incoming, closed);
        let registration = PollerBuilder::active(name, woken_by, poller);
        let registration = if is_done_by_kernel { registration.no_spin() } else { registration };
        // A registration that cannot be added is dropped, and operations then fail with
        // `DeviceGone`.
        let sent = thread.call(move |context| drop(context.add(registration)));
        match sent {
            Ok(()) => Ok(Self(Arc::new(hold))),
            Err(_) if thread.is_gone() => Err(refuse(&"its thread has ended")),
            Err(_) => Err(refuse(&"the mailbox of its thread is full, expected room")),
        }
    }

    /// Name by which the device was opened.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// Geometry and limits.
    pub fn limits(&self) -> &Limits {
        &self.shared().limits
    }

    /// Buffer pool of this device.
    pub fn buffers(&self) -> &BufferPool {
        &self.shared().buffers
    }

    /// Allocates a zeroed buffer that the device can access, or returns none if the pool is
    /// exhausted.
    pub fn buffer(&self, len_bytes: u32) -> Option<Buffer> {
        self.shared().buffers.allocate(len_bytes)
    }

    /// Whether the device is gone: its thread has ended, or its I/O channel has panicked.
    pub fn is_gone(&self) -> bool {
        self.shared().is_gone()
    }

    /// Drops this handle. The future completes when the device has been closed, which happens after
    /// the last handle is dropped and all operations have completed.
    pub fn close(self) -> CloseFuture {
        let Some(closed) = self.0.closed.upgrade() else {
            return CloseFuture(OneshotReceiver::ready(()));
        };
        let (sender, later) = oneshot();
        closed.0.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        CloseFuture(later)
    }

    /// Reads into the whole buffer, starting at block `lba`.
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.transfer(Operation::Read, RequestFlags::NONE, lba, buffer).await
    }

    /// Writes the whole buffer, starting at block `lba`.
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.transfer(Operation::Write, RequestFlags::NONE, lba, buffer).await
    }

    /// Like [`write`](Self::write), with Force Unit Access: the blocks are persistent when it
    /// completes.
    pub async fn write_fua(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.transfer(Operation::Write, RequestFlags::FUA, lba, buffer).await
    }

    /// Compares the buffer with the blocks that start at `lba`. A difference is reported as
    /// [`Outcome::COMPARE_FAILURE`](tenmil_base::IoStatus::COMPARE_FAILURE).
    pub async fn compare(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.transfer(Operation::Compare, RequestFlags::NONE, lba, buffer).await
    }

    /// Compares the blocks that start at `lba` with the first half of the buffer and, if they are
    /// equal, writes the second half to them, atomically. If they differ, nothing is written and
    /// the result is [`Outcome::COMPARE_FAILURE`](tenmil_base::IoStatus::COMPARE_FAILURE).
    pub async fn compare_and_write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.transfer(Operation::CompareAndWrite, RequestFlags::NONE, lba, buffer).await
    }

    /// Makes every write that completed before this call persistent.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.command(Operation::Flush, 0, 0, 0).await
    }

    /// Deallocates blocks. What they read as afterwards depends on the device.
    pub async fn deallocate(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.command(Operation::Deallocate, lba, blocks, 0).await
    }

    /// Writes zeroes to blocks without transferring data.
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.command(Operation::WriteZeroes, lba, blocks, 0).await
    }

    /// Copies `blocks` blocks from `from` to `lba` on the device. No data passes through host
    /// memory.
    pub async fn copy(&self, from: u64, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.command(Operation::Copy, lba, blocks, from).await
    }

    /// Verifies that blocks can be read, without transferring data.
    pub async fn verify(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.command(Operation::Verify, lba, blocks, 0).await
    }

    /// Marks blocks as uncorrectable: reads of them fail until they are written again.
    pub async fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.command(Operation::WriteUncorrectable, lba, blocks, 0).await
    }

    async fn transfer(
        &self,
        operation: Operation,
        flags: RequestFlags,
        lba: u64,
        buffer: Buffer,
    ) -> Result<Buffer, IoError> {
        let blocks = self.blocks_of(operation, &buffer);
        let buffer = Some(buffer);
        let mut order = SlotRequest { operation, lba, operand: 0, blocks: 0, flags, buffer };
        match blocks {
            Ok(blocks) => order.blocks = blocks,
            Err(why) => return Err(IoError::new(&self.shared().name, order, why)),
        }
        let buffer = IoFuture::new(self.shared(), order).await?;
        Ok(buffer.unwrap_or_else(|| unreachable!("what went in comes out")))
    }

    /// Number of blocks that the buffer covers, or why it cannot be used for this operation.
    fn blocks_of(&self, operation: Operation, buffer: &Buffer) -> Result<u32, IoErrorKind> {
        self.check(operation)?;
        let parts = if operation == Operation::CompareAndWrite { 2 } else { 1 };
        let (len_bytes, block_size) = (buffer.len_bytes(), self.limits().block_size * parts);
        if len_bytes == 0 || !len_bytes.is_multiple_of(block_size) {
            return Err(IoErrorKind::Length { len_bytes, block_size });
        }
        if !self.buffers().owns(buffer) {
            return Err(IoErrorKind::ForeignBuffer);
        }
        Ok(len_bytes / block_size)
    }

    async fn command(
        &self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        operand: u64,
    ) -> Result<(), IoError> {
        let order = SlotRequest {
            operation,
            lba,
            operand,
            blocks,
            flags: RequestFlags::NONE,
            buffer: None,
        };
        if let Err(why) = self.check(operation) {
            return Err(IoError::new(&self.shared().name, order, why));
        }
        IoFuture::new(self.shared(), order).await.map(drop)
    }

    fn check(&self, operation: Operation) -> Result<(), IoErrorKind> {
        let has = self.limits().operations.has(operation);
        if has { Ok(()) } else { Err(IoErrorKind::Unsupported(operation)) }
    }

    fn shared(&self) -> &DeviceState {
        &self.0.shared
    }
}

impl Drop for HandleInner {
    fn drop(&mut self) {
        // The mailbox has room for this token. If the poller is gone, the device is closed already.
        let _ = self.shared.incoming.send(CLOSE_TOKEN);
        self.shared.thread.notify();
    }
}

impl CloseFuture {
    /// Blocks the calling OS thread until the device has been closed.
    pub fn wait(self) {
        let _ = self.0.wait();
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
fn woken_by(backend: &dyn IoChannel) -> std::io::Result<PollerWake> {
    match backend.wake_source() {
        WakeSource::None => {
            Ok(PollerWake::OnlyWhileBusy("operations ring, answers are polled for"))
        }
        source => PollerWake::of(source),
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Device").field("name", &self.shared().name).finish_non_exhaustive()
    }
}
