//! I/O buffers, each owned by one operation at a time.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use tenmil_base::{Dma, Memory, Segment};
use tenmil_dma::DevicePool;

/// Pool of DMA-capable I/O buffers. Clones share the pool.
#[derive(Clone, Debug)]
pub(crate) struct BufferPool(Arc<DevicePool>);

/// Memory for the data of an operation, with a single owner: [`Device::buffer`](super::Device::buffer)
/// allocates it, an operation takes it and returns it with its result. It is zeroed when it is allocated.
/// Dropping it returns the memory to the runtime.
///
/// A device may write the memory, so it is never borrowed: bytes are copied in and out.
///
/// ```
/// # fn main() -> Result<(), tenmil::Error> {
/// # let rt = tenmil::Runtime::new()?;
/// # let dev = rt.block_on(rt.open("null:", tenmil::Access::ReadOnly))?;
/// let mut buf = dev.buffer(4096)?;
/// buf.store(8, b"ten million");
/// let mut text = [0; 3];
/// buf.load(8, &mut text);
/// assert_eq!(&text, b"ten");
/// # Ok(())
/// # }
/// ```
pub struct Buffer {
    pool: BufferPool,
    segment: Segment,
}

impl BufferPool {
    /// Creates a buffer pool over the free memory of `pool`.
    pub(crate) fn new(pool: DevicePool) -> Self {
        Self(Arc::new(pool))
    }

    /// Allocates a zeroed buffer, or returns none if the pool is exhausted.
    pub(crate) fn allocate(&self, len_bytes: u32) -> Option<Buffer> {
        let segment = self.0.allocate(len_bytes)?;
        Some(Buffer { pool: self.clone(), segment })
    }

    /// Bytes that can still be allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.0.free_bytes()
    }

    pub(super) fn is_from_pool(&self, buffer: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &buffer.pool.0)
    }
}

impl Buffer {
    /// Length in bytes.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = tenmil::Runtime::new()?;
    /// # let dev = rt.block_on(rt.open("null:", tenmil::Access::ReadOnly))?;
    /// assert_eq!(dev.buffer(4096)?.len_bytes(), 4096);
    /// # Ok(())
    /// # }
    /// ```
    pub fn len_bytes(&self) -> u32 {
        self.segment.len_bytes
    }

    /// Copies bytes out of the buffer, starting at `skip_bytes`.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = tenmil::Runtime::new()?;
    /// # let dev = rt.block_on(rt.open("null:", tenmil::Access::ReadOnly))?;
    /// let buf = dev.buffer(4096)?;
    /// let mut header = [1; 16];
    /// buf.load(512, &mut header);
    /// assert_eq!(header, [0; 16]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the range passes the end of the buffer.
    pub fn load(&self, skip_bytes: u32, into: &mut [u8]) {
        let segment = self.buffer_segment(skip_bytes, into.len());
        self.pool.0.load(segment, into).expect("a part of a buffer lies in its region");
    }

    /// Copies bytes into the buffer, starting at `skip_bytes`.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = tenmil::Runtime::new()?;
    /// # let dev = rt.block_on(rt.open("null:", tenmil::Access::ReadOnly))?;
    /// let mut buf = dev.buffer(4096)?;
    /// buf.store(512, &4711_u64.to_le_bytes());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the range passes the end of the buffer.
    pub fn store(&mut self, skip_bytes: u32, from: &[u8]) {
        let segment = self.buffer_segment(skip_bytes, from.len());
        self.pool.0.store(segment, from).expect("a part of a buffer lies in its region");
    }

    /// Copies the whole buffer into a vector.
    ///
    /// ```
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = tenmil::Runtime::new()?;
    /// # let dev = rt.block_on(rt.open("null:", tenmil::Access::ReadOnly))?;
    /// assert_eq!(dev.buffer(512)?.to_vec(), [0; 512]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.segment.len_bytes as usize];
        self.load(0, &mut bytes);
        bytes
    }

    fn buffer_segment(&self, skip_bytes: u32, len: usize) -> Segment {
        let len_bytes = u32::try_from(len).ok();
        let part = len_bytes.and_then(|len_bytes| self.segment.slice(skip_bytes, len_bytes));
        part.unwrap_or_else(|| {
            let have = self.segment.len_bytes;
            panic!("{len} bytes from byte {skip_bytes} on, in a buffer of {have}")
        })
    }

    /// Segment that describes the buffer to the device.
    pub(super) fn segment(&self) -> Segment {
        self.segment
    }

    /// Leaks the memory: a device may still access it and will never report the end of the access.
    pub(super) fn leak_memory(self) {
        let _ = ManuallyDrop::new(self);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.0.release(self.segment);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Buffer").field("segment", &self.segment).finish_non_exhaustive()
    }
}
