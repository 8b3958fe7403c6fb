//! Memory for large requests, shared by all connections of a server.
//!
//! A connection owns four buffers, so requests of up to 1 MiB always make progress. For larger
//! requests it leases buffers, and returns free ones before it goes idle. The last quarter of the
//! pool is reserved for connections that have leased none, so a connection that holds much memory
//! cannot block the others.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use tenmil_base::Segment;
use tenmil_dma::{Region, RegionError, RegionTable};

use super::connection_memory::{LARGE_BYTES, subsegment};

/// Pool of large buffers that connections lease.
pub struct BufferPool {
    memory: Region,
    pieces: usize,
    free: Mutex<Vec<u16>>,
}

/// Memory for large requests of all connections of a server, in bytes.
pub const POOL_BYTES: u32 = 256 << 20;
/// Largest number of buffers leased by one connection: enough for the largest request.
const LEASE_MAX: usize = (tenmil_wire::nbd::PAYLOAD_BYTES_MAX / LARGE_BYTES) as usize;

const _: () = assert!(POOL_BYTES / LARGE_BYTES < 1 << 15, "a piece has a number of 16 bits");

impl BufferPool {
    /// Creates a pool of `len_bytes`. The kernel allocates the pages on first touch.
    ///
    /// # Errors
    ///
    /// If the region table is full or memory is exhausted.
    pub fn new(regions: &RegionTable, len_bytes: u32) -> Result<Self, RegionError> {
        let memory = regions.allocate_region(len_bytes as usize)?;
        let pieces = len_bytes / LARGE_BYTES;
        let free = (0..u16::try_from(pieces).unwrap_or(u16::MAX)).rev().collect();
        Ok(Self { memory, pieces: pieces as usize, free: Mutex::new(free) })
    }

    /// Number of buffers.
    pub(super) fn buffer_count(&self) -> usize {
        self.pieces
    }

    /// Segment of a buffer.
    #[inline]
    pub(super) fn buffer_segment(&self, piece: u16) -> Segment {
        subsegment(self.memory.segment(), u32::from(piece) * LARGE_BYTES, LARGE_BYTES)
    }

    /// Leases `count` buffers to a connection that has leased `held`. Returns false if they are not
    /// available now.
    pub(super) fn try_lease_buffers(&self, count: usize, held: usize, into: &mut Vec<u16>) -> bool {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let reserve = if held == 0 { 0 } else { self.pieces / 4 };
        if held + count > LEASE_MAX || free.len() < count + reserve {
            return false;
        }
        let rest = free.len() - count;
        into.extend(free.drain(rest..).rev());
        true
    }

    /// Returns buffers to the pool.
    pub(super) fn release_buffers(&self, pieces: impl Iterator<Item = u16>) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend(pieces);
    }

    #[cfg(test)]
    pub(super) fn free_buffer_count(&self) -> usize {
        self.free.lock().unwrap().len()
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Pool").field("pieces", &self.pieces).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tenmil_dma::RegionTable;

    use super::{BufferPool, LARGE_BYTES, LEASE_MAX, POOL_BYTES};

    #[test]
    fn buffers_are_leased_once_and_the_last_quarter_only_to_connections_without_any() {
        let pool = BufferPool::new(&RegionTable::new(1), 16 * LARGE_BYTES).unwrap();
        let (mut one, mut other) = (Vec::new(), Vec::new());
        assert!(pool.try_lease_buffers(12, 0, &mut one));
        assert!(!pool.try_lease_buffers(1, 12, &mut one), "the rest is for others");
        assert!(
            pool.try_lease_buffers(4, 0, &mut other) && !pool.try_lease_buffers(1, 0, &mut other)
        );
        let mut all: Vec<u16> = one.iter().chain(&other).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<u16>>());
        pool.release_buffers(one.drain(..));
        assert_eq!(pool.free_buffer_count(), 12);
        assert!(
            pool.try_lease_buffers(5, 4, &mut other) && !pool.try_lease_buffers(4, 9, &mut other)
        );
    }

    #[test]
    fn connection_leases_no_more_than_the_largest_request() {
        let pool = BufferPool::new(&RegionTable::new(1), POOL_BYTES).unwrap();
        let mut leased = Vec::new();
        assert!(
            pool.try_lease_buffers(LEASE_MAX, 0, &mut leased)
                && !pool.try_lease_buffers(1, LEASE_MAX, &mut leased)
        );
    }
}
