//! The handle of a device.

use std::fmt;
use std::sync::Arc;

use base::{Backend, Limits, Operation, WakeSource};
use reactor::{Handle, Registration, WokenBy};

use super::io::Io;
use super::place::{Order, Shared};
use super::poller::DevicePoller;
use super::{Buffer, Buffers, NotDone, Why};
use crate::Refused;

/// A block device on a light thread, for futures anywhere: on that thread, on another, or in another
/// runtime. Clones are the same device.
///
/// An operation begins when its future is polled first. Those that are under way at the same time
/// are done in any order.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

impl Device {
    /// Lets `backend` live on `thread`, as a poller with this name. `buffers` are of memory that it
    /// reaches.
    pub fn on(
        thread: &Handle,
        name: &str,
        backend: Box<dyn Backend>,
        buffers: &Buffers,
    ) -> Result<Self, Refused> {
        let refuse = |why: &dyn fmt::Display| Refused::machine(format!("attach '{name}': {why}"));
        let woken_by = woken_by(&*backend).map_err(|error| refuse(&error))?;
        let (shared, incoming) = Shared::new(thread, backend.limits(), buffers);
        let shared = Arc::new(shared);
        let poller = DevicePoller::new(Arc::clone(&shared), backend, incoming);
        let registration = Registration::active(name, woken_by, poller);
        // What cannot be added is dropped, and whoever uses the device learns that it is gone.
        let sent = thread.call(move |context| drop(context.add(registration)));
        match sent {
            Ok(()) => Ok(Self(shared)),
            Err(_) if thread.is_gone() => Err(refuse(&"its thread has ended")),
            Err(_) => Err(refuse(&"the mailbox of its thread is full, expected room")),
        }
    }

    /// Geometry and limits.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// Where buffers for it come from.
    pub fn buffers(&self) -> &Buffers {
        &self.0.buffers
    }

    /// A buffer that it can reach, full of zeroes, if there is room for one.
    pub fn buffer(&self, len_bytes: u32) -> Option<Buffer> {
        self.0.buffers.allocate(len_bytes)
    }

    /// Whether it is gone: its thread has ended, or its backend has panicked.
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }

    /// Reads as many blocks as the buffer has room for, from `lba` on.
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Read, lba, buffer).await
    }

    /// Writes the buffer to the blocks from `lba` on.
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Write, lba, buffer).await
    }

    /// Compares the buffer with the blocks from `lba` on. That they differ is
    /// [`Outcome::COMPARE_FAILURE`](base::Outcome::COMPARE_FAILURE).
    pub async fn compare(&self, lba: u64, buffer: Buffer) -> Result<Buffer, NotDone> {
        self.transfer(Operation::Compare, lba, buffer).await
    }

    /// Every write that has ended before this begins survives a power cut once this has ended.
    pub async fn flush(&self) -> Result<(), Why> {
        self.command(Operation::Flush, 0, 0).await
    }

    /// These blocks are not needed any more.
    pub async fn deallocate(&self, lba: u64, blocks: u32) -> Result<(), Why> {
        self.command(Operation::Deallocate, lba, blocks).await
    }

    /// These blocks read as zeroes afterwards.
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), Why> {
        self.command(Operation::WriteZeroes, lba, blocks).await
    }

    async fn transfer(
        &self,
        operation: Operation,
        lba: u64,
        buffer: Buffer,
    ) -> Result<Buffer, NotDone> {
        let (len_bytes, block_size) = (buffer.len_bytes(), self.0.limits.block_size);
        if len_bytes == 0 || !len_bytes.is_multiple_of(block_size) {
            let why = Why::Length { len_bytes, block_size };
            return Err(NotDone { why, buffer: Some(buffer) });
        }
        if !self.0.buffers.owns(&buffer) {
            return Err(NotDone { why: Why::Stranger, buffer: Some(buffer) });
        }
        let blocks = len_bytes / block_size;
        let order = Order { operation, lba, blocks, buffer: Some(buffer) };
        let buffer = Io::new(&self.0, order).await?;
        Ok(buffer.unwrap_or_else(|| unreachable!("what went in comes out")))
    }

    async fn command(&self, operation: Operation, lba: u64, blocks: u32) -> Result<(), Why> {
        let order = Order { operation, lba, blocks, buffer: None };
        Io::new(&self.0, order).await.map(drop).map_err(|not_done| not_done.why)
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
        out.debug_struct("Device").field("thread", &self.0.thread).finish_non_exhaustive()
    }
}
