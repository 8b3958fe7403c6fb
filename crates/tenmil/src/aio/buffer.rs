//! Memory that belongs to one operation at a time.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use base::{Dma, Memory, Segment};
use dma::DevicePool;

/// Where buffers come from and go back to. Clones are the same pool.
#[derive(Clone, Debug)]
pub struct Buffers(Arc<DevicePool>);

/// Some memory that a device can reach, and that nobody else has. Dropped, it goes back to its pool.
pub struct Buffer {
    pool: Buffers,
    segment: Segment,
}

impl Buffers {
    /// Hands out what is free in `pool`.
    pub fn new(pool: DevicePool) -> Self {
        Self(Arc::new(pool))
    }

    /// A buffer full of zeroes, if there is room for it. Takes whole pages, and a lock: keep buffers
    /// and use them again where it matters.
    pub fn allocate(&self, len_bytes: u32) -> Option<Buffer> {
        let segment = self.0.allocate(len_bytes)?;
        Some(Buffer { pool: self.clone(), segment })
    }

    /// Bytes that can still be allocated.
    pub fn free_bytes(&self) -> u64 {
        self.0.free_bytes()
    }

    pub(super) fn owns(&self, buffer: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &buffer.pool.0)
    }
}

impl Buffer {
    /// How long it is.
    pub fn len_bytes(&self) -> u32 {
        self.segment.len_bytes
    }

    /// Copies bytes out, from `skip_bytes` on.
    ///
    /// # Panics
    ///
    /// If the buffer ends before that.
    pub fn load(&self, skip_bytes: u32, into: &mut [u8]) {
        let segment = self.part(skip_bytes, into.len());
        self.pool.0.load(segment, into).expect("a part of a buffer lies in its region");
    }

    /// Copies bytes in, from `skip_bytes` on.
    ///
    /// # Panics
    ///
    /// If the buffer ends before that.
    pub fn store(&mut self, skip_bytes: u32, from: &[u8]) {
        let segment = self.part(skip_bytes, from.len());
        self.pool.0.store(segment, from).expect("a part of a buffer lies in its region");
    }

    /// A copy of all its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.segment.len_bytes as usize];
        self.load(0, &mut bytes);
        bytes
    }

    fn part(&self, skip_bytes: u32, len: usize) -> Segment {
        let len_bytes = u32::try_from(len).ok();
        let part = len_bytes.and_then(|len_bytes| self.segment.slice(skip_bytes, len_bytes));
        part.unwrap_or_else(|| {
            let have = self.segment.len_bytes;
            panic!("{len} bytes from byte {skip_bytes} on, in a buffer of {have}")
        })
    }

    /// What the device is told.
    pub(super) fn segment(&self) -> Segment {
        self.segment
    }

    /// Takes the memory out of circulation for ever: a device may still touch it that will never
    /// say when it is done.
    pub(super) fn lose(self) {
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
