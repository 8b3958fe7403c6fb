//! What a request in flight needs until its completion.

use libc::iovec;
use tenmil_base::{InvalidSegment, Request, Segment};
use tenmil_dma::RegionTable;

use super::CephErrno;

/// A request that librbd works on: the request itself, its address list, and its result.
///
/// librbd owns it from [`Image::submit`](super::Image::submit) until its completion is polled, so all that it accesses
/// meanwhile stays in place, whatever its submitter does. Records are used again: their lists keep their
/// memory.
#[derive(Debug)]
pub(crate) struct IoRecord {
    /// The request as its submitter gave it.
    pub(crate) request: Request,
    /// Bytes transferred, or the negative error number.
    pub(crate) result: i64,
    /// Addresses of the data. librbd keeps a reference to the list while a read is in flight.
    pub(super) vectors: Vec<iovec>,
    /// Data of a compare-and-write whose memory is not contiguous.
    pub(super) bounce: Vec<u8>,
    /// Where librbd stores the first byte that differs.
    pub(super) mismatch: u64,
}

/// A request that librbd did not accept.
#[derive(Debug)]
pub(crate) enum SubmitError {
    /// Its memory is not in a region.
    Memory,
    /// The library refused it.
    Refused(CephErrno),
}

// SAFETY: the list holds addresses of region memory, which are valid on every thread.
unsafe impl Send for IoRecord {}

impl IoRecord {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self {
            request: Request::PLACEHOLDER,
            result: 0,
            vectors: Vec::new(),
            bounce: Vec::new(),
            mismatch: 0,
        })
    }

    /// Sets the address list. Adjacent segments are merged.
    pub(super) fn set_vectors(
        &mut self,
        regions: &RegionTable,
        segments: &[Segment],
    ) -> Result<(), InvalidSegment> {
        self.vectors.clear();
        for segment in segments {
            let base = regions.host_address(*segment)?.as_ptr();
            let len = segment.len_bytes as usize;
            match self.vectors.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                    last.iov_len += len;
                }
                _ => self.vectors.push(iovec { iov_base: base.cast(), iov_len: len }),
            }
        }
        Ok(())
    }

    /// Where the two halves of the data of a compare-and-write are, each of `half` bytes. `Ok(None)` if one of them is
    /// not contiguous: then the data were copied to the bounce buffer.
    pub(super) fn compared_and_new(
        &mut self,
        regions: &RegionTable,
        segments: &[Segment],
        half: usize,
    ) -> Result<Option<[*const libc::c_char; 2]>, InvalidSegment> {
        self.set_vectors(regions, segments)?;
        match self.vectors[..] {
            [both] if both.iov_len == 2 * half => {
                let first = both.iov_base.cast::<libc::c_char>().cast_const();
                Ok(Some([first, first.wrapping_add(half)]))
            }
            [compared, new] if compared.iov_len == half && new.iov_len == half => {
                Ok(Some([compared.iov_base.cast_const().cast(), new.iov_base.cast_const().cast()]))
            }
            _ => self.copy_to_bounce(regions, segments).map(|()| None),
        }
    }

    fn copy_to_bounce(
        &mut self,
        regions: &RegionTable,
        segments: &[Segment],
    ) -> Result<(), InvalidSegment> {
        use tenmil_base::Memory;
        self.bounce.clear();
        for segment in segments {
            let start = self.bounce.len();
            self.bounce.resize(start + segment.len_bytes as usize, 0);
            regions.load(*segment, &mut self.bounce[start..])?;
        }
        Ok(())
    }
}
