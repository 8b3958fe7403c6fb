//! Copies between regions that bypass the cache, for working sets larger than the cache.
//!
//! A store that misses the cache first fetches the line that it overwrites; a non-temporal store does
//! not. A load that misses waits; if the address of the next copy is known, its first lines can be
//! prefetched during this one. The effect of both is measured in
//! docs/developer/numbers.md, under memory.

use tenmil_base::{InvalidSegment, Segment};

use crate::barrier::{prefetch_read, streaming_barrier};
use crate::region_table::RegionTable;

const LINE: usize = 64;

impl RegionTable {
    /// Like [`copy_segment`](Self::copy_segment), but bypasses the cache where the processor can, if the length is a
    /// multiple of a cache line and the target is aligned. The two segments must not overlap. This thread
    /// sees the stores at once, other threads after [`fence_nontemporal`](Self::fence_nontemporal).
    #[inline]
    pub fn copy_nontemporal(&self, from: Segment, to: Segment) -> Result<(), InvalidSegment> {
        #[cfg(target_arch = "x86_64")]
        if from.len_bytes == to.len_bytes && (to.len_bytes as usize).is_multiple_of(LINE) {
            let (source, target) = (self.host_address(from)?, self.host_address(to)?);
            if target.as_ptr().addr().is_multiple_of(LINE) {
                let lines = to.len_bytes as usize / LINE;
                // SAFETY: both ranges were resolved against their regions and have this many lines, and
                // the target is aligned to a line.
                unsafe { copy_lines_nontemporal(source.as_ptr(), target.as_ptr(), lines) };
                return Ok(());
            }
        }
        self.copy_segment(from, to)
    }

    /// Orders [`copy_nontemporal`](Self::copy_nontemporal) stores before all later stores of this thread.
    #[inline]
    pub fn fence_nontemporal(&self) {
        streaming_barrier();
    }

    /// Prefetches a segment for reading. A hint: an invalid segment is ignored.
    #[inline]
    pub fn prefetch_segment(&self, segment: Segment) {
        if let Ok(address) = self.host_address(segment) {
            for skip in (0..segment.len_bytes as usize).step_by(LINE) {
                prefetch_read(address.as_ptr().wrapping_add(skip));
            }
        }
    }
}

/// Prefetches `value` for reading, without waiting.
#[inline]
pub fn prefetch_value<T>(value: &T) {
    prefetch_read((&raw const *value).cast());
}

/// # Safety
///
/// `from` is readable and `to` writable for `lines` lines; `to` is aligned to a line. No reference to
/// either range exists.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_lines_nontemporal(from: *const u8, to: *mut u8, lines: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const WIDTH: usize = size_of::<__m128i>();
    for skip in (0..lines * LINE).step_by(LINE) {
        for word in (skip..skip + LINE).step_by(WIDTH) {
            // SAFETY: within the lines promised by the caller.
            let source = unsafe { from.add(word) };
            // SAFETY: as above.
            let target = unsafe { to.add(word) };
            // SAFETY: readable, and the load permits any alignment; SSE2 is part of every x86-64
            // processor.
            let value = unsafe { _mm_loadu_si128(source.cast()) };
            // SAFETY: writable, and aligned as a line is.
            unsafe { _mm_stream_si128(target.cast(), value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{InvalidSegment, Memory, Segment};

    use crate::{MemoryBacking, MemoryMapping, RegionTable};

    #[test]
    fn nontemporal_copy_is_exact_at_any_alignment() {
        let regions = RegionTable::new(2);
        let mapping = || MemoryMapping::new(8192, MemoryBacking::Private).unwrap();
        let (from, to) =
            (regions.add_mapping(mapping()).unwrap(), regions.add_mapping(mapping()).unwrap());
        let pattern: Vec<u8> = (0..8192_u32).map(|byte| (byte % 251) as u8).collect();
        regions.store(from, &pattern).unwrap();
        for (source, target, len) in
            [(0, 0, 8192), (1, 64, 4096), (0, 1, 4096), (64, 128, 100), (7, 64, 64), (0, 0, 0)]
        {
            regions.fill(to, 0xee).unwrap();
            let (part, place) = (from.slice(source, len).unwrap(), to.slice(target, len).unwrap());
            regions.prefetch_segment(part);
            regions.copy_nontemporal(part, place).unwrap();
            regions.fence_nontemporal();
            let mut bytes = vec![0; 8192];
            regions.load(to, &mut bytes).unwrap();
            let (source, target, len) = (source as usize, target as usize, len as usize);
            assert_eq!(bytes[target..target + len], pattern[source..source + len]);
            let outside = bytes[..target].iter().chain(&bytes[target + len..]);
            assert!(outside.into_iter().all(|byte| *byte == 0xee), "{source} {target} {len}");
        }
    }

    #[test]
    fn invalid_segment_is_rejected_and_its_prefetch_ignored() {
        let regions = RegionTable::new(1);
        let whole =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let past = Segment { offset: 64, ..whole };
        assert_eq!(regions.copy_nontemporal(whole, past), Err(InvalidSegment(past)));
        assert_eq!(regions.copy_nontemporal(past, whole), Err(InvalidSegment(past)));
        let shorter = whole.slice(0, 64).unwrap();
        assert_eq!(regions.copy_nontemporal(whole, shorter), Err(InvalidSegment(shorter)));
        regions.prefetch_segment(past);
    }
}
