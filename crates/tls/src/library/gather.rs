//! Plaintext of one send: headers and segments, in order, on the caller's stack.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use tenmil_base::{InvalidSegment, Segment, SendSlice};
use tenmil_dma::RegionTable;

/// Memory of one send. Borrows everything that it names.
pub(crate) struct GatherList<'a> {
    vectors: [MaybeUninit<libc::iovec>; SLICES_MAX],
    count: usize,
    len_bytes: usize,
    borrowed: PhantomData<&'a [u8]>,
}

/// Largest number of entries. What does not fit is sent by the next call.
const SLICES_MAX: usize = 256;

impl<'a> GatherList<'a> {
    pub(crate) fn new() -> Self {
        let vectors = [const { MaybeUninit::uninit() }; SLICES_MAX];
        Self { vectors, count: 0, len_bytes: 0, borrowed: PhantomData }
    }

    /// Adds slices, as many as fit and up to `max_bytes` in all. An error is a segment without an
    /// address in this process; what is before it was added.
    ///
    /// # Panics
    ///
    /// If a slice is outside the headers.
    pub(crate) fn add_all(
        &mut self,
        regions: &'a RegionTable,
        headers: &'a [u8],
        slices: &[SendSlice],
        max_bytes: usize,
    ) -> Result<(), InvalidSegment> {
        for slice in slices {
            let space = u32::try_from(max_bytes - self.len_bytes).unwrap_or(u32::MAX);
            if space == 0 || self.count == SLICES_MAX {
                break;
            }
            match *slice {
                SendSlice::Headers { at, len_bytes } => {
                    self.add_bytes(&headers[at as usize..][..len_bytes.min(space) as usize]);
                }
                SendSlice::Memory(segment) => {
                    let address = regions.host_address(segment)?;
                    let len = segment.len_bytes.min(space) as usize;
                    self.add(address.as_ptr().cast(), len);
                }
            }
        }
        Ok(())
    }

    /// Adds bytes, if they fit.
    pub(crate) fn add_bytes(&mut self, bytes: &'a [u8]) {
        self.add(bytes.as_ptr().cast_mut().cast(), bytes.len());
    }

    fn add(&mut self, base: *mut c_void, len: usize) {
        if len == 0 {
            return;
        }
        if let Some(entry) = self.vectors.get_mut(self.count) {
            entry.write(libc::iovec { iov_base: base, iov_len: len });
            self.count += 1;
            self.len_bytes += len;
        }
    }

    /// Number of bytes.
    pub(crate) const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Entries, for the library.
    pub(super) fn vectors(&self) -> &[libc::iovec] {
        let first = self.vectors.as_ptr().cast();
        // SAFETY: the first `count` entries were written by `add`.
        unsafe { std::slice::from_raw_parts(first, self.count) }
    }
}

/// First segment of `slices` behind those of `skip_bytes`, if the slices begin with it there.
pub(crate) fn segment_at(slices: &[SendSlice], skip_bytes: usize) -> Option<Segment> {
    let mut skip = skip_bytes;
    for slice in slices {
        if skip < slice.len_bytes() {
            let SendSlice::Memory(segment) = *slice else { return None };
            let skip = u32::try_from(skip).ok()?;
            return segment.slice(skip, segment.len_bytes - skip);
        }
        skip -= slice.len_bytes();
    }
    None
}
