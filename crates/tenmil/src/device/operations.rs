//! Operations of a device: each is a future that owns its buffer until it completes.

use tenmil_base::{Operation, RequestFlags};

use super::Device;
use super::buffer::Buffer;
use super::error::{IoError, IoErrorKind};
use super::io_future::IoFuture;
use super::operation_slots::SlotRequest;

impl Device {
    /// Reads into the whole buffer, starting at block `lba`.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let buf = dev.read(7, dev.buffer(4096)?).await?;
    /// assert_eq!(buf.to_vec(), [0; 4096]);
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn read(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.execute_with_buffer(Operation::Read, RequestFlags::NONE, lba, buffer).await
    }

    /// Writes the whole buffer, starting at block `lba`.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let mut buf = dev.buffer(4096)?;
    /// buf.store(0, b"ten million");
    /// let buf = dev.write(7, buf).await?;
    /// dev.flush().await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.execute_with_buffer(Operation::Write, RequestFlags::NONE, lba, buffer).await
    }

    /// Like [`write`](Self::write), with Force Unit Access: the blocks are persistent when it
    /// completes.
    ///
    /// ```no_run
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// let dev = rt.open("file:/var/tmp/disk", Access::ReadWrite).await?;
    /// let buf = dev.write_fua(0, dev.buffer(4096)?).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn write_fua(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.execute_with_buffer(Operation::Write, RequestFlags::FUA, lba, buffer).await
    }

    /// Compares the buffer with the blocks that start at `lba`. A difference is reported as
    /// [`IoStatus::COMPARE_FAILURE`](crate::driver::IoStatus::COMPARE_FAILURE).
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let buf = dev.write(0, dev.buffer(512)?).await?;
    /// let mut buf = dev.compare(0, buf).await?;
    /// buf.store(0, b"x");
    /// assert!(dev.compare(0, buf).await.is_err());
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn compare(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.execute_with_buffer(Operation::Compare, RequestFlags::NONE, lba, buffer).await
    }

    /// Compares the blocks that start at `lba` with the first half of the buffer and, if they are
    /// equal, writes the second half to them, atomically. If they differ, nothing is written and
    /// the result is [`IoStatus::COMPARE_FAILURE`](crate::driver::IoStatus::COMPARE_FAILURE).
    ///
    /// ```no_run
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("emu:ram", Access::ReadWrite).await?;
    /// // A lock in block 0: zeroes are replaced by an owner.
    /// let mut buf = dev.buffer(1024)?;
    /// buf.store(512, b"owner 4711");
    /// let buf = dev.compare_and_write(0, buf).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn compare_and_write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.execute_with_buffer(Operation::CompareAndWrite, RequestFlags::NONE, lba, buffer).await
    }

    /// Makes every write that completed before this call persistent.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let buf = dev.write(0, dev.buffer(4096)?).await?;
    /// let buf = dev.write(8, buf).await?;
    /// dev.flush().await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn flush(&self) -> Result<(), IoError> {
        self.execute_without_data(Operation::Flush, 0, 0, 0).await
    }

    /// Deallocates blocks. What they read as afterwards depends on the device.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// dev.deallocate(0, 2048).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn deallocate(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.execute_without_data(Operation::Deallocate, lba, blocks, 0).await
    }

    /// Writes zeroes to blocks without transferring data.
    ///
    /// ```
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// dev.write_zeroes(0, 2048).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn write_zeroes(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.execute_without_data(Operation::WriteZeroes, lba, blocks, 0).await
    }

    /// Copies `blocks` blocks from `from` to `lba` on the device. No data passes through host
    /// memory.
    ///
    /// ```no_run
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("emu:ram", Access::ReadWrite).await?;
    /// // Blocks 0 to 7 to blocks 1000 to 1007.
    /// dev.copy(0, 1000, 8).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn copy(&self, from: u64, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.execute_without_data(Operation::Copy, lba, blocks, from).await
    }

    /// Verifies that blocks can be read, without transferring data.
    ///
    /// ```no_run
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("emu:ram", Access::ReadWrite).await?;
    /// if let Err(error) = dev.verify(0, 2048).await {
    ///     println!("cannot be read: {error}");
    /// }
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn verify(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.execute_without_data(Operation::Verify, lba, blocks, 0).await
    }

    /// Marks blocks as uncorrectable: reads of them fail until they are written again.
    ///
    /// ```no_run
    /// # use tenmil::{Access, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("emu:ram", Access::ReadWrite).await?;
    /// dev.write_uncorrectable(7, 1).await?;
    /// assert!(dev.read(7, dev.buffer(512)?).await.is_err());
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub async fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<(), IoError> {
        self.execute_without_data(Operation::WriteUncorrectable, lba, blocks, 0).await
    }

    async fn execute_with_buffer(
        &self,
        operation: Operation,
        flags: RequestFlags,
        lba: u64,
        buffer: Buffer,
    ) -> Result<Buffer, IoError> {
        let blocks = self.block_count_of_buffer(operation, &buffer);
        let buffer = Some(buffer);
        let mut order = SlotRequest { operation, lba, operand: 0, blocks: 0, flags, buffer };
        match blocks {
            Ok(blocks) => order.blocks = blocks,
            Err(why) => return Err(IoError::new(&self.device_state().name, order, why)),
        }
        let buffer = IoFuture::new(self.device_state(), order).await?;
        Ok(buffer
            .unwrap_or_else(|| unreachable!("an operation returns the buffer that it was given")))
    }

    /// Number of blocks that the buffer covers, or why it cannot be used for this operation.
    fn block_count_of_buffer(
        &self,
        operation: Operation,
        buffer: &Buffer,
    ) -> Result<u32, IoErrorKind> {
        self.check_supported(operation)?;
        let parts = if operation == Operation::CompareAndWrite { 2 } else { 1 };
        let (len_bytes, block_size) = (buffer.len_bytes(), self.limits().block_size * parts);
        if len_bytes == 0 || !len_bytes.is_multiple_of(block_size) {
            return Err(IoErrorKind::Length { len_bytes, block_size });
        }
        if !self.device_state().buffers.is_from_pool(buffer) {
            return Err(IoErrorKind::ForeignBuffer);
        }
        Ok(len_bytes / block_size)
    }

    async fn execute_without_data(
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
        if let Err(why) = self.check_supported(operation) {
            return Err(IoError::new(&self.device_state().name, order, why));
        }
        IoFuture::new(self.device_state(), order).await.map(drop)
    }

    fn check_supported(&self, operation: Operation) -> Result<(), IoErrorKind> {
        let has = self.limits().operations.has(operation);
        if has { Ok(()) } else { Err(IoErrorKind::Unsupported(operation)) }
    }
}
