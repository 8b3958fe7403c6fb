//! Kernel buffers: data of ublk requests, registered by the kernel and without an address in this
//! process.
//!
//! ```text
//!   kernel buffer region    | request 0 | request 1 | …      each of the maximum request size
//! ```
//!
//! Such a region has a place in the table with length zero: resolving an address in it fails, as for
//! memory that does not exist. Code that can use registered buffers calls
//! [`kernel_buffer`](RegionTable::kernel_buffer). A load or store of a part is copied by the kernel, with
//! one system call each, and is [counted](RegionTable::copied_bytes).

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{InvalidSegment, RegionId, Segment};

use super::{RegionError, RegionTable, is_inside, slot_index};
use crate::memory_mapping::{MemoryBacking, MemoryMapping};

/// Registered buffers of a queue.
#[derive(Debug)]
pub(super) struct KernelBuffers {
    lender: KernelBufferSource,
    /// Bytes per request.
    each: u32,
    len_bytes: u64,
    /// Bytes copied by loads and stores.
    copied_bytes: AtomicU64,
}

/// Descriptor and queue of the buffers.
#[derive(Debug)]
pub struct KernelBufferSource {
    /// Descriptor for copies.
    pub descriptor: OwnedFd,
    /// Queue of the descriptor.
    pub queue: u16,
    /// Offset of the data in the descriptor, by queue, request and byte, for copies.
    pub data_at: fn(u16, u16, u32) -> u64,
}

/// Part of a request's buffer.
#[derive(Clone, Copy, Debug)]
pub struct KernelBufferSlice<'a> {
    /// Descriptor for copies.
    pub descriptor: BorrowedFd<'a>,
    /// Queue of the descriptor.
    pub queue: u16,
    /// Request of the queue.
    pub request: u16,
    /// First byte in the request's buffer.
    pub byte: u32,
    /// Length in bytes.
    pub len_bytes: u32,
}

impl RegionTable {
    /// Adds a region, for the lifetime of the table, for the buffers of `requests` requests of `each`
    /// bytes.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn register_kernel_buffers(
        &self,
        lender: KernelBufferSource,
        (requests, each): (u16, u32),
    ) -> Result<Segment, RegionError> {
        // The mapping is never accessed: no address in it is resolved.
        let mapping =
            MemoryMapping::new(4096, MemoryBacking::Private).map_err(RegionError::MapFailed)?;
        let len_bytes = u64::from(requests) * u64::from(each);
        let empty = self
            .add_mapping_part(&mut self.lock_mappings(), mapping, 0)
            .map_err(RegionError::TableFull)?;
        let slot = self.table.leased.get(slot_index(empty.region) as usize);
        let leased = KernelBuffers { lender, each, len_bytes, copied_bytes: AtomicU64::new(0) };
        // A place is assigned only once, so it is still empty.
        slot.map(|slot| slot.get_or_init(|| leased));
        Ok(Segment { len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX), ..empty })
    }

    /// Buffer part of `segment`, if the segment is inside one request's buffer.
    pub fn kernel_buffer(&self, segment: Segment) -> Option<KernelBufferSlice<'_>> {
        let leased = self.kernel_buffer_region(segment.region)?;
        if !is_inside(segment, leased.len_bytes) {
            return None;
        }
        let each = u64::from(leased.each);
        let (request, byte) = (segment.offset.checked_div(each)?, segment.offset % each);
        if byte + u64::from(segment.len_bytes) > each {
            return None;
        }
        Some(KernelBufferSlice {
            descriptor: leased.lender.descriptor.as_fd(),
            queue: leased.lender.queue,
            request: u16::try_from(request).ok()?,
            byte: u32::try_from(byte).ok()?,
            len_bytes: segment.len_bytes,
        })
    }

    /// Bytes of a kernel buffer region copied so far by loads and stores.
    pub fn copied_bytes(&self, region: RegionId) -> u64 {
        self.kernel_buffer_region(region)
            .map_or(0, |leased| leased.copied_bytes.load(Ordering::Relaxed))
    }

    fn kernel_buffer_region(&self, region: RegionId) -> Option<&KernelBuffers> {
        let place = slot_index(region);
        let leased = self.table.leased.get(place as usize)?.get()?;
        (region.0 == place).then_some(leased)
    }

    /// Like [`load`](tenmil_base::Memory::load), for kernel buffers.
    #[cold]
    pub(super) fn load_kernel_buffer(
        &self,
        segment: Segment,
        into: &mut [u8],
    ) -> Result<(), InvalidSegment> {
        self.copy_kernel_buffer(segment, into.len(), |lender, at, done| {
            let rest = &mut into[done..];
            // SAFETY: the descriptor is open as long as the table exists, and `rest` is borrowed for the
            // call, which writes no more than its length.
            unsafe { libc::pread(lender, rest.as_mut_ptr().cast(), rest.len(), at) }
        })
    }

    /// Like [`store`](tenmil_base::Memory::store), for kernel buffers.
    #[cold]
    pub(super) fn store_kernel_buffer(
        &self,
        segment: Segment,
        from: &[u8],
    ) -> Result<(), InvalidSegment> {
        self.copy_kernel_buffer(segment, from.len(), |lender, at, done| {
            let rest = &from[done..];
            // SAFETY: as in `load_kernel_buffer`; the call only reads.
            unsafe { libc::pwrite(lender, rest.as_ptr().cast(), rest.len(), at) }
        })
    }

    /// Copies all `len` bytes of a part through the kernel. `step` gets the descriptor, the offset of the
    /// rest, and the number of bytes done.
    fn copy_kernel_buffer(
        &self,
        segment: Segment,
        len: usize,
        mut step: impl FnMut(i32, i64, usize) -> isize,
    ) -> Result<(), InvalidSegment> {
        let refuse = InvalidSegment(segment);
        let part = self.kernel_buffer(segment).ok_or(refuse)?;
        let leased = self.kernel_buffer_region(segment.region).ok_or(refuse)?;
        let first = (leased.lender.data_at)(part.queue, part.request, part.byte);
        assert_eq!(len, segment.len_bytes as usize, "the two lengths are the caller's");
        let mut done = 0;
        while done < len {
            let at = i64::try_from(first + done as u64).map_err(|_| refuse)?;
            match usize::try_from(step(part.descriptor.as_raw_fd(), at, done)) {
                // The request has ended, or is shorter than announced.
                Ok(0) => return Err(refuse),
                Ok(count) => done += count,
                Err(_) if Error::last_os_error().kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(refuse),
            }
        }
        leased.copied_bytes.fetch_add(u64::from(part.len_bytes), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use tenmil_base::{Memory, RegionId, Segment};

    use super::KernelBufferSource;
    use crate::{MemoryBacking, MemoryMapping, RegionTable};

    fn test_buffer_source(descriptor: OwnedFd, queue: u16) -> KernelBufferSource {
        let data_at = |queue, request, byte| {
            1000 * u64::from(queue) + 100 * u64::from(request) + u64::from(byte)
        };
        KernelBufferSource { descriptor, queue, data_at }
    }

    fn test_descriptor() -> OwnedFd {
        std::io::pipe().unwrap().0.into()
    }

    #[test]
    fn kernel_buffer_is_identified_by_its_request_and_has_no_address() {
        let regions = RegionTable::new(4);
        let memory = regions.allocate_region(4096).unwrap();
        let descriptor = test_descriptor();
        let number = descriptor.as_raw_fd();
        let whole =
            regions.register_kernel_buffers(test_buffer_source(descriptor, 3), (4, 8192)).unwrap();
        assert_eq!(whole.len_bytes, 4 * 8192);
        let part = regions.kernel_buffer(whole.slice(2 * 8192 + 512, 1024).unwrap()).unwrap();
        assert_eq!(part.descriptor.as_raw_fd(), number);
        assert_eq!((part.queue, part.request, part.byte, part.len_bytes), (3, 2, 512, 1024));
        assert!(
            regions.kernel_buffer(whole.slice(3 * 8192, 8192).unwrap()).is_some(),
            "the last one"
        );
        let outside = Segment { offset: 4 * 8192, len_bytes: 512, ..whole };
        let across = Segment { offset: 8192 - 512, len_bytes: 1024, ..whole };
        let later = Segment { region: RegionId(whole.region.0 | 1 << 12), ..whole };
        let later = later.slice(0, 512).unwrap();
        for none in [outside, across, later, memory.segment()] {
            assert!(regions.kernel_buffer(none).is_none(), "{none:?}");
        }
        for part in [whole, whole.slice(0, 1).unwrap(), outside] {
            assert!(regions.host_address(part).is_err(), "{part:?}");
            assert!(regions.load(part, &mut vec![0; part.len_bytes as usize]).is_err());
        }
        assert_eq!(regions.region_count(), 1, "of memory");
    }

    #[test]
    fn full_table_rejects_kernel_buffers() {
        let regions = RegionTable::new(1);
        let _memory = regions.allocate_region(4096).unwrap();
        assert!(
            regions
                .register_kernel_buffers(test_buffer_source(test_descriptor(), 0), (1, 4096))
                .is_err()
        );
    }

    #[test]
    fn loads_and_stores_copy_through_the_kernel_and_are_counted() {
        let regions = RegionTable::new(4);
        let mapping = MemoryMapping::new(8192, MemoryBacking::Shared).unwrap();
        let file = mapping.descriptor().unwrap().try_clone_to_owned().unwrap();
        let memory = regions.add_mapping(mapping).unwrap();
        let whole =
            regions.register_kernel_buffers(test_buffer_source(file, 2), (60, 100)).unwrap();
        let part = whole.slice(100 + 10, 20).unwrap();
        regions.store(part, &[7; 20]).unwrap();
        let mut all = vec![0; 8192];
        regions.load(memory, &mut all).unwrap();
        assert!(
            all.iter().enumerate().all(|(at, byte)| (*byte == 7) == (2110..2130).contains(&at))
        );
        let mut some = [0; 30];
        regions.load(whole.slice(100 + 5, 30).unwrap(), &mut some).unwrap();
        assert_eq!(
            (&some[..5], &some[5..25], &some[25..]),
            (&[0; 5][..], &[7; 20][..], &[0; 5][..])
        );
        let across = whole.slice(90, 20).unwrap();
        assert!(regions.store(across, &[1; 20]).is_err(), "parts of two requests");
        let behind = whole.slice(5980, 10).unwrap();
        assert!(regions.load(behind, &mut some[..10]).is_ok());
        assert_eq!(regions.copied_bytes(whole.region), 20 + 30 + 10);
        assert_eq!(regions.copied_bytes(memory.region), 0);
        let later = whole.slice(0, 4).map(|part| Segment { region: RegionId(77), ..part }).unwrap();
        assert!(regions.store(later, &[1; 4]).is_err());
    }

    #[test]
    fn buffer_of_an_ended_request_is_no_memory() {
        let regions = RegionTable::new(2);
        let mapping = MemoryMapping::new(4096, MemoryBacking::Shared).unwrap();
        let file = mapping.descriptor().unwrap().try_clone_to_owned().unwrap();
        let whole =
            regions.register_kernel_buffers(test_buffer_source(file, 4), (200, 100)).unwrap();
        assert!(regions.load(whole.slice(0, 96).unwrap(), &mut [0; 96]).is_ok());
        assert!(
            regions.load(whole.slice(0, 97).unwrap(), &mut [0; 97]).is_err(),
            "of a file's end"
        );
        assert_eq!(regions.copied_bytes(whole.region), 96);
    }
}
